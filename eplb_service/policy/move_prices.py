"""Prices for residencies that prove how many moves a layer takes: the compiled part of `move_bounds`.

Every copy of an expert is a deal between the expert, which must supply so many, and the rank that takes it. A deal has a price:
one for a residency that is kept, one for an arrival, both for each number of copies that the expert may have. Every expert
supplies its copies as cheaply as it can; every rank takes what is worth most to it within its slots and its load limit, an
arrival costing it one move. By weak duality, what the experts charge less what the ranks gain is never above the moves of any
placement, whatever the prices (Lagrangian relaxation; A. M. Geoffrion, 1974). Prices and values are integers, so that the
bound is exact on any machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.policy.compiled import compiled_nogil

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

ONE = 1 << 16
"""Units of one move."""

NOTHING = -(1 << 30)
"""Value of what is impossible."""

VALUE_MAX = 1 << 28
"""Most that all slots of a rank may be worth, so that impossible stays impossible in 32 bits; bounds the prices."""

COUNTED_ARRIVALS = 12
"""Arrivals at a rank that are counted one by one; beyond, any number fits as far as their load does (which bounds no worse)."""


class Deals(NamedTuple):
    """A layer as deals. E experts, R ranks with room, J choices (an expert with a number of copies), H residencies held now.

    first_choice: choices of expert e are first_choice[e] to first_choice[e + 1] - 1, ascending copies. copies, weight: shape
    (J,), number of copies, load of one of them in units of load, rounded down.
    beyond: shape (E,), moves that more copies than all choices take, -1 = that is not allowed.
    first_held: residencies of rank r are first_held[r] to first_held[r + 1] - 1. expert_of: shape (H,). forced: shape (H,), the
    residency must stay. first_kept: prices of residency h are first_kept[h] to first_kept[h + 1] - 1, by choice of its expert.
    first_holder, holders: residencies of expert e are holders[first_holder[e]:first_holder[e + 1]].
    room, limit: shape (R,), slots and units of load that a rank may carry.
    """

    first_choice: Int64Array
    copies: Int64Array
    weight: Int64Array
    beyond: Int64Array
    first_held: Int64Array
    expert_of: Int64Array
    forced: BoolArray
    first_kept: Int64Array
    first_holder: Int64Array
    holders: Int64Array
    room: Int64Array
    limit: Int64Array


class Tables(NamedTuple):
    """Room to work. kept: shape (held + 1, slots + 1, units + 1), best value by residencies looked at, kept and load.

    best: shape (counted arrivals + 1, units + 1), best value of arrivals by number and load. taken: (J, same), whether the
    item was taken there. items: shape (J,), choices that arrivals may be worth taking.
    """

    kept: Int32Array
    best: Int32Array
    taken: BoolArray
    items: Int64Array


@compiled_nogil
def offer(deals: Deals, arrival: Int32Array, kept: Int32Array, expert: int, choice: int, order: Int64Array) -> tuple[int, int]:
    """The least that an expert charges for a number of copies, and how many residencies it then keeps: the first in `order`."""
    offset = choice - deals.first_choice[expert]
    cost = deals.copies[choice] * np.int64(arrival[choice])
    number = 0
    for position in range(deals.first_holder[expert], deals.first_holder[expert + 1]):
        held = deals.holders[position]
        price = kept[deals.first_kept[held] + offset]
        place = number
        while place > 0 and not deals.forced[order[place - 1]]:
            before = kept[deals.first_kept[order[place - 1]] + offset]
            if before <= price and not deals.forced[held]:
                break
            order[place] = order[place - 1]
            place -= 1
        order[place] = held
        number += 1
    keeps = 0
    while keeps < min(number, deals.copies[choice]):
        held = order[keeps]
        extra = np.int64(kept[deals.first_kept[held] + offset]) - np.int64(arrival[choice])
        if extra >= 0 and not deals.forced[held]:
            break
        cost += extra
        keeps += 1
    return cost, keeps


@compiled_nogil
def supply(deals: Deals, arrival: Int32Array, kept: Int32Array, wish_arrival: Float64Array, wish_kept: Float64Array) -> int:
    """What the experts charge at least, in units of a move; adds what they supply then to the wishes."""
    total = 0
    order = np.zeros(deals.room.size + 1, np.int64)
    for expert in range(deals.beyond.size):
        cheapest, chosen = 1 << 60, -1
        if deals.beyond[expert] >= 0:
            cheapest = int(deals.beyond[expert]) * ONE
        for choice in range(deals.first_choice[expert], deals.first_choice[expert + 1]):
            cost, _ = offer(deals, arrival, kept, expert, choice, order)
            if cost < cheapest:
                cheapest, chosen = cost, choice
        total += cheapest
        if chosen < 0:
            continue
        _, keeps = offer(deals, arrival, kept, expert, chosen, order)
        wish_arrival[chosen] += deals.copies[chosen] - keeps
        for place in range(keeps):
            wish_kept[deals.first_kept[order[place]] + chosen - deals.first_choice[expert]] += 1.0
    return total


@compiled_nogil
def value_arrivals(deals: Deals, arrival: Int32Array, tables: Tables) -> tuple[int, int]:
    """Fill the table of arrivals. Returns the number of items and of cells visited.

    An item is left out when as many others as a rank can count are at least as light and worth as much.
    """
    most, units = tables.best.shape[0] - 1, tables.best.shape[1] - 1
    candidates = np.zeros(arrival.size, np.int64)
    number = 0
    for choice in range(arrival.size):
        if arrival[choice] <= ONE or deals.weight[choice] > units:
            continue
        place = number
        while place > 0 and arrival[candidates[place - 1]] < arrival[choice]:
            candidates[place] = candidates[place - 1]
            place -= 1
        candidates[place] = choice
        number += 1
    lighter = np.zeros(units + 1, np.int64)
    tables.best[:, :] = 0
    slots = deals.room.max()
    items, cells = 0, 0
    for position in range(number):
        choice = candidates[position]
        weight, profit = deals.weight[choice], np.int32(arrival[choice] - ONE)
        if lighter[: weight + 1].sum() >= slots:
            continue
        lighter[weight] += 1
        tables.items[items] = choice
        length = units + 1 - weight
        for count in range(most, 0, -1):
            tables.taken[items, count, :weight] = False
            target, took = tables.best[count, weight:], tables.taken[items, count, weight:]
            unbounded = count == most and slots > most
            source = tables.best[count, :length].copy() if unbounded else tables.best[count - 1, :length]
            for place in range(length):
                value = np.int32(source[place] + profit)
                took[place] = value > target[place]
                target[place] = max(target[place], value)
        cells += most * length
        items += 1
    return items, cells


@compiled_nogil
def fill_kept(deals: Deals, kept: Int32Array, table: Int32Array, rank: int) -> int:
    """Fill the table of what a rank may keep. Returns the number of cells visited."""
    room, limit, first = deals.room[rank], deals.limit[rank], deals.first_held[rank]
    cells = 0
    table[0, 0, : limit + 1] = 0
    for step in range(deals.first_held[rank + 1] - first):
        held = first + step
        expert, last = deals.expert_of[held], min(step + 1, room)
        for count in range(last + 1):
            if count <= step and not deals.forced[held]:
                table[step + 1, count, : limit + 1] = table[step, count, : limit + 1]
            else:
                table[step + 1, count, : limit + 1] = NOTHING
        for choice in range(deals.first_choice[expert], deals.first_choice[expert + 1]):
            price = kept[deals.first_kept[held] + choice - deals.first_choice[expert]]
            weight = deals.weight[choice]
            if weight > limit or (price <= 0 and not deals.forced[held]):
                continue
            length = limit + 1 - weight
            for count in range(1, last + 1):
                source, target = table[step, count - 1, :length], table[step + 1, count, weight : limit + 1]
                for place in range(length):
                    target[place] = max(target[place], np.int32(source[place] + price))
            cells += last * length
    return cells


@compiled_nogil
def best_of_rank(last: Int32Array, mirrored: Int32Array, room: int, limit: int) -> tuple[int, int, int]:
    """The most a rank may gain, with the number of residencies and the load that it keeps then.

    last: shape (slots + 1, units + 1), values of what is kept; mirrored: of arrivals, by the load that is left for the kept.
    """
    best, best_count, best_load = np.int32(NOTHING), 0, 0
    for count in range(last.shape[0]):
        source, other = last[count, : limit + 1], mirrored[min(room - count, mirrored.shape[0] - 1), : limit + 1]
        highest = np.int32(NOTHING)
        for load in range(limit + 1):
            highest = max(highest, np.int32(source[load] + other[load]))
        if highest > best:
            best, best_count = highest, count
    source, other = last[best_count, : limit + 1], mirrored[min(room - best_count, mirrored.shape[0] - 1), : limit + 1]
    for load in range(limit + 1):
        if source[load] + other[load] == best:
            best_load = load
            break
    return int(best), best_count, best_load


@compiled_nogil
def demand(
    deals: Deals,
    arrival: Int32Array,
    kept: Int32Array,
    tables: Tables,
    wish_arrival: Float64Array,
    wish_kept: Float64Array,
) -> tuple[int, int]:
    """What the ranks gain at most, in units of a move; takes what they want then from the wishes. And the cells visited."""
    items, cells = value_arrivals(deals, arrival, tables)
    most = tables.best.shape[0] - 1
    mirrored, mirrored_for = np.empty_like(tables.best), -1
    total = 0
    for rank in range(deals.room.size):
        room, limit = deals.room[rank], deals.limit[rank]
        if limit != mirrored_for:
            for load in range(limit + 1):
                mirrored[:, load] = tables.best[:, limit - load]
            mirrored_for = limit
        cells += fill_kept(deals, kept, tables.kept, rank)
        number = deals.first_held[rank + 1] - deals.first_held[rank]
        value, count, load = best_of_rank(tables.kept[number, : min(number, room) + 1], mirrored, room, limit)
        total += max(value, NOTHING // 2)
        if value <= NOTHING // 2:
            continue
        _take_back(deals, kept, tables, rank, count, load, wish_kept)
        count, load = min(room - count, most), limit - load
        for position in range(items - 1, -1, -1):
            if count > 0 and tables.taken[position, count, load]:
                choice = tables.items[position]
                wish_arrival[choice] -= 1.0
                load -= deals.weight[choice]
                if count < most or deals.room.max() <= most:
                    count -= 1
    return total, cells


@compiled_nogil
def _take_back(
    deals: Deals, kept: Int32Array, tables: Tables, rank: int, count: int, load: int, wish_kept: Float64Array
) -> None:
    """Take what a rank keeps in its best choice from the wishes."""
    first = deals.first_held[rank]
    for step in range(deals.first_held[rank + 1] - first - 1, -1, -1):
        value = tables.kept[step + 1, count, load]
        held = first + step
        expert = deals.expert_of[held]
        if count <= step and not deals.forced[held] and tables.kept[step, count, load] == value:
            continue
        for choice in range(deals.first_choice[expert], deals.first_choice[expert + 1]):
            place = deals.first_kept[held] + choice - deals.first_choice[expert]
            weight = deals.weight[choice]
            if count > 0 and weight <= load and tables.kept[step, count - 1, load - weight] + kept[place] == value:
                wish_kept[place] -= 1.0
                count -= 1
                load -= weight
                break
