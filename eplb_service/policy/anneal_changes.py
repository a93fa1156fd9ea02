"""Trying a change of one layer's slots in annealing: what it would do to price and overload, done when the energy allows it.

Energy: price of the residencies (times the price weight, 0 or 1) and of routes, plus `weight` for each fair height of overload
(height above the limit, summed over ranks). What exceeds the highest price or the move limits is not tried.
"""
# compiled functions take positions only

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.policy.anneal_routes import EVEN, WEIGHTED, hop_change, saved_parts
from eplb_service.policy.anneal_state import (
    Float64Array,
    Int32Array,
    Int64Array,
    Layer,
    State,
    exchange,
    is_spread,
    put,
    serve,
    settle,
)
from eplb_service.policy.compiled import compiled_nogil, inlined

PRICE_CEILING = 1e300
"""Highest price where none is given: a residency that is not allowed costs more (infinitely much)."""

CHANGES_MAX = 3
"""Most slots that one change refills."""

PRICE, OVERLOAD, WEIGHT, LIMIT, TEMPERATURE, PRICE_WEIGHT, PRICE_MAX, ROUTE_PRICE, ROUTE_MAX = range(9)
"""Positions in `Scratch.level`."""

RANDOM, MARK, MOVES, MOVES_MAX, NUM_HOT = range(5)
"""Positions in `Scratch.counter`."""


class Scratch(NamedTuple):
    """Where a search stands, beside the state of the slots.

    level: price and overload of the state, weight of overload, limit, temperature, weight of price (0 or 1), highest price,
    price of routes and the highest that is recorded;
    float64, by the positions above. counter: random number (its bits), current mark, moves of the state, most moves allowed,
    number of hot ranks; int64, by the positions above.
    slots, experts: the change to try, shape (CHANGES_MAX,). intake, intake_max: new residencies of a rank, and the most, (R,).
    hot: ranks above the limit, shape (R,). first_slot: first slot of each rank, shape (R + 1,).
    marks, touched, saved, names, route_prices, part_slots, parts: room for `try_change`.
    """

    level: Float64Array
    counter: Int64Array
    slots: Int32Array
    experts: Int32Array
    intake: Int64Array
    intake_max: Int64Array
    hot: Int32Array
    first_slot: Int64Array
    marks: Int64Array
    touched: Int32Array
    saved: Float64Array
    names: Int32Array
    route_prices: Float64Array
    part_slots: Int32Array
    parts: Float64Array


@compiled_nogil
def new_scratch(layer: Layer, moves_max: int, intake_max: Int64Array, seed: int) -> Scratch:
    """Room for a search without a highest price; `measure` fills in where it stands. Seed: not 0."""
    num_ranks = layer.inverse.size
    first_slot = np.zeros(num_ranks + 1, np.int64)
    for slot in range(layer.rank_of.size):
        first_slot[layer.rank_of[slot] + 1] += 1
    for rank in range(num_ranks):
        first_slot[rank + 1] += first_slot[rank]
    counter = np.zeros(5, np.int64)
    counter[RANDOM] = seed
    counter[MOVES_MAX] = moves_max
    level = np.zeros(9)
    level[PRICE_WEIGHT] = 1.0
    level[PRICE_MAX] = PRICE_CEILING
    level[ROUTE_MAX] = np.inf
    return Scratch(
        level,
        counter,
        np.zeros(CHANGES_MAX, np.int32),
        np.zeros(CHANGES_MAX, np.int32),
        np.zeros(num_ranks, np.int64),
        intake_max,
        np.zeros(num_ranks, np.int32),
        first_slot,
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int32),
        np.zeros(num_ranks),
        np.zeros(2 * CHANGES_MAX, np.int32),
        np.zeros(2 * CHANGES_MAX),
        np.zeros(layer.rank_of.size, np.int32),
        np.zeros(layer.rank_of.size),
    )


@inlined
def overload(layer: Layer, rank: int, work: float, limit: float) -> float:
    """Height above the limit of a rank with this much work, at least 0."""
    above = work * layer.inverse[rank] - limit
    return float(max(0.0, above))


@inlined
def measure(layer: Layer, state: State, scratch: Scratch) -> None:
    """Price, overload and moves from nothing."""
    scratch.counter[MOVES] = 0
    scratch.level[PRICE] = 0.0
    for rank in range(scratch.intake.size):
        scratch.intake[rank] = 0
    for slot in range(state.expert_at.size):
        expert = state.expert_at[slot]
        if expert >= 0:
            rank = layer.rank_of[slot]
            scratch.level[PRICE] += layer.price[rank, expert]
            scratch.counter[MOVES] += layer.fresh[rank, expert]
            scratch.intake[rank] += layer.fresh[rank, expert]
    scratch.level[ROUTE_PRICE] = state.route_price.sum()
    measure_overload(layer, state, scratch)


@inlined
def measure_overload(layer: Layer, state: State, scratch: Scratch) -> None:
    """Overload from nothing."""
    total = 0.0
    for rank in range(state.work.size):
        total += overload(layer, rank, state.work[rank], scratch.level[LIMIT])
    scratch.level[OVERLOAD] = total


@inlined
def in_limits(layer: Layer, state: State, scratch: Scratch, count: int) -> bool:
    """Whether the change keeps the move limits: of the layer, and of the ranks that it touches (each once)."""
    more = 0
    for index in range(count):
        slot = scratch.slots[index]
        rank = layer.rank_of[slot]
        old, new = state.expert_at[slot], scratch.experts[index]
        change = 0
        if new >= 0:
            change += layer.fresh[rank, new]
        if old >= 0:
            change -= layer.fresh[rank, old]
        if change > 0 and scratch.intake[rank] + change > scratch.intake_max[rank]:
            return False
        more += change
    return more <= 0 or scratch.counter[MOVES] + more <= scratch.counter[MOVES_MAX]


@inlined
def note_intake(layer: Layer, scratch: Scratch, slot: int, old: int, new: int) -> None:
    """Count what a slot's rank takes in, after the slot was filled anew."""
    rank = layer.rank_of[slot]
    change = 0
    if new >= 0:
        change += layer.fresh[rank, new]
    if old >= 0:
        change -= layer.fresh[rank, old]
    scratch.intake[rank] += change
    scratch.counter[MOVES] += change


@inlined
def price_change(layer: Layer, state: State, scratch: Scratch, count: int) -> float:
    """What the change adds to the price."""
    total = 0.0
    for index in range(count):
        slot = scratch.slots[index]
        rank = layer.rank_of[slot]
        if scratch.experts[index] >= 0:
            total += layer.price[rank, scratch.experts[index]]
        if state.expert_at[slot] >= 0:
            total -= layer.price[rank, state.expert_at[slot]]
    return total


@inlined
def try_swap(layer: Layer, state: State, scratch: Scratch, slack: float) -> bool:
    """`try_change` where two slots exchange what they hold and copies serve equal parts: the quick way."""
    slot, other = scratch.slots[0], scratch.slots[1]
    rank, other_rank = layer.rank_of[slot], layer.rank_of[other]
    first, second = state.expert_at[slot], state.expert_at[other]
    price, first_part, second_part = 0.0, 0.0, 0.0
    if first >= 0:
        price += layer.price[other_rank, first] - layer.price[rank, first]
        first_part = layer.load[first] / state.copies[first]
    if second >= 0:
        price += layer.price[rank, second] - layer.price[other_rank, second]
        second_part = layer.load[second] / state.copies[second]
    if price > 0.0 and scratch.level[PRICE] + price > scratch.level[PRICE_MAX]:
        return False
    limit, weight, cost = scratch.level[LIMIT], scratch.level[WEIGHT], price * scratch.level[PRICE_WEIGHT]
    first_route, second_route = 0.0, 0.0
    if layer.hop_price > 0.0:
        first_route = layer.hop_price * hop_change(layer.node_of, layer.node_parts, first, rank, other_rank, first_part)
        second_route = layer.hop_price * hop_change(layer.node_of, layer.node_parts, second, other_rank, rank, second_part)
        cost += first_route + second_route
    before = overload(layer, rank, state.work[rank], limit) + overload(layer, other_rank, state.work[other_rank], limit)
    if cost - weight * before > slack:
        return False
    work = state.work[rank] - first_part + second_part
    other_work = state.work[other_rank] + first_part - second_part
    more = overload(layer, rank, work, limit) + overload(layer, other_rank, other_work, limit) - before
    if cost + weight * more > slack:
        return False
    if not in_limits(layer, state, scratch, 2):
        return False
    exchange(layer, state, slot, other)
    if not (keeps_spread(layer, state, first) and keeps_spread(layer, state, second)):
        exchange(layer, state, slot, other)
        return False
    state.work[rank] = work
    state.work[other_rank] = other_work
    note_intake(layer, scratch, slot, first, second)
    note_intake(layer, scratch, other, second, first)
    settle(layer, state, slot)
    settle(layer, state, other)
    if layer.hop_price > 0.0:
        note_routes(state, scratch, first, first_route)
        note_routes(state, scratch, second, second_route)
    scratch.level[PRICE] += price
    scratch.level[OVERLOAD] += more
    return True


@inlined
def note_routes(state: State, scratch: Scratch, expert: int, more: float) -> None:
    """Add to the price of an expert's routes."""
    if expert >= 0:
        state.route_price[expert] += more
        scratch.level[ROUTE_PRICE] += more


@inlined
def keeps_spread(layer: Layer, state: State, expert: int) -> bool:
    """Whether an expert (-1 = none) that must be on two domains is."""
    return expert < 0 or layer.spread[expert] == 0 or is_spread(layer, state, expert)


@inlined
def _name(scratch: Scratch, number: int, expert: int) -> int:
    """Add an expert to the names unless it is there. Returns how many there are."""
    if expert < 0:
        return number
    for index in range(number):
        if scratch.names[index] == expert:
            return number
    scratch.names[number] = expert
    return number + 1


@inlined
def _touch(state: State, scratch: Scratch, number: int, rank: int) -> int:
    """Add a rank to those touched unless it is there, with its work. Returns how many there are."""
    if scratch.marks[rank] == scratch.counter[MARK]:
        return number
    scratch.marks[rank] = scratch.counter[MARK]
    scratch.touched[number] = rank
    scratch.saved[number] = state.work[rank]
    return number + 1


@inlined
def _touch_all(layer: Layer, state: State, scratch: Scratch, count: int, num_names: int) -> int:
    """Note every rank whose work the change can alter. Returns how many there are."""
    scratch.counter[MARK] += 1
    number = 0
    for index in range(num_names):
        expert = scratch.names[index]
        for copy in range(state.copies[expert]):
            number = _touch(state, scratch, number, layer.rank_of[state.holders[expert, copy]])
    for index in range(count):
        number = _touch(state, scratch, number, layer.rank_of[scratch.slots[index]])
    return number


@inlined
def _refill(layer: Layer, state: State, scratch: Scratch, count: int) -> None:
    """Fill the slots of the change; its experts become what the slots held, so that doing it again takes it back."""
    for index in range(count):
        old = state.expert_at[scratch.slots[index]]
        put(layer, state, scratch.slots[index], -1)
        scratch.experts[index], old = old, scratch.experts[index]
        put(layer, state, scratch.slots[index], old)


@inlined
def try_change(  # noqa: C901, PLR0912  # one decision in the order that finds out soonest
    layer: Layer, state: State, scratch: Scratch, count: int, slack: float
) -> bool:
    """Refill `count` slots (of ranks that differ) as `scratch` says, under any dispatch. Whether it was done.

    Slack: the most that energy may rise. Who may be where and how many copies there may be is the proposer's duty; prices,
    move limits and failure domains are looked at here.
    """
    price = price_change(layer, state, scratch, count)
    if price > 0.0 and scratch.level[PRICE] + price > scratch.level[PRICE_MAX]:
        return False
    if not in_limits(layer, state, scratch, count):
        return False
    cost = price * scratch.level[PRICE_WEIGHT]
    num_names, num_parts = 0, 0
    for index in range(count):
        num_names = _name(scratch, num_names, state.expert_at[scratch.slots[index]])
        num_names = _name(scratch, num_names, scratch.experts[index])
    num_touched = _touch_all(layer, state, scratch, count, num_names)
    limit, weight = scratch.level[LIMIT], scratch.level[WEIGHT]
    before = 0.0
    for index in range(num_touched):
        before += overload(layer, scratch.touched[index], scratch.saved[index], limit)
    if layer.dispatch != EVEN:
        for index in range(num_names):
            cost -= state.route_price[scratch.names[index]]
    if cost - weight * before > slack:
        return False
    if layer.dispatch == WEIGHTED:
        num_parts = saved_parts(
            state.copies, state.holders, state.part, scratch.names, num_names, scratch.part_slots, scratch.parts
        )
    for index in range(num_names):
        serve(layer, state, scratch.names[index], -1.0)
    _refill(layer, state, scratch, count)
    for index in range(num_names):
        scratch.route_prices[index] = serve(layer, state, scratch.names[index], 1.0)
        cost += scratch.route_prices[index]
    after = 0.0
    for index in range(num_touched):
        after += overload(layer, scratch.touched[index], state.work[scratch.touched[index]], limit)
    done = cost + weight * (after - before) <= slack
    for index in range(num_names):
        done = done and keeps_spread(layer, state, scratch.names[index])
    if not done:
        _refill(layer, state, scratch, count)
        for index in range(num_touched):
            state.work[scratch.touched[index]] = scratch.saved[index]
        for index in range(num_parts):
            state.part[scratch.part_slots[index]] = scratch.parts[index]
        return False
    for index in range(count):
        slot = scratch.slots[index]
        note_intake(layer, scratch, slot, scratch.experts[index], state.expert_at[slot])
    for index in range(count):
        settle(layer, state, scratch.slots[index])
    if layer.dispatch != EVEN:
        for index in range(num_names):
            expert = scratch.names[index]
            note_routes(state, scratch, expert, scratch.route_prices[index] - state.route_price[expert])
    scratch.level[PRICE] += price
    scratch.level[OVERLOAD] += after - before
    return True


@compiled_nogil
def pour_again(layer: Layer, state: State, scratch: Scratch, expert: int) -> None:
    """Split an expert anew over its copies under weighted dispatch, since others have changed: never adds overload."""
    scratch.level[OVERLOAD] -= overload_of_holders(layer, state, scratch.level[LIMIT], expert)
    serve(layer, state, expert, -1.0)
    serve(layer, state, expert, 1.0)
    scratch.level[OVERLOAD] += overload_of_holders(layer, state, scratch.level[LIMIT], expert)


@inlined
def overload_of_holders(layer: Layer, state: State, limit: float, expert: int) -> float:
    """Overload of the ranks that hold an expert, each once."""
    total = 0.0
    for index in range(state.copies[expert]):
        rank = layer.rank_of[state.holders[expert, index]]
        total += overload(layer, rank, state.work[rank], limit) / state.count_on[rank, expert]
    return total
