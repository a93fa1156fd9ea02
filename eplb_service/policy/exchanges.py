"""Exchanges between ranks, compiled: relieve the busiest rank until nothing helps, and try other numbers of copies.

Bins, room, capacity and order as in `kernels`.
"""
# ruff: noqa: FBT001, PLR0917  # compiled functions take positions only

from __future__ import annotations

import numpy as np

from eplb_service.policy.compiled import compiled
from eplb_service.policy.kernels import (
    Float64Array,
    Int32Array,
    Int64Array,
    Rules,
    busiest,
    descending,
    loads_of_bins,
    open_rules,
    pack_in_order,
    share_of_bins,
)


@compiled
def may_leave(rules: Rules, expert: int, rank: int, to_rank: int) -> bool:
    """Whether a copy may go from a rank to another without all copies of a spread expert on one domain. -1 = no expert."""
    if expert < 0 or not rules.spread[expert] or rules.domain_of[rank] == rules.domain_of[to_rank]:
        return True
    for other in range(rules.domain_of.size):
        if other != rank and rules.held[other, expert] and rules.domain_of[other] != rules.domain_of[to_rank]:
            return True
    return False


@compiled
def best_exchange(
    share_at: Float64Array,
    expert_at: Int64Array,
    rank_at: Int64Array,
    places: Int64Array,
    height: Float64Array,
    per_token: Float64Array,
    rules: Rules,
    top: int,
) -> tuple[int, int]:
    """Places of a copy of the busiest rank and of another rank's whose exchange leaves the higher of the two ranks lowest.

    (-1, -1) when none leaves both below the busiest. Places are all copies in descending order of load, so that the partners
    worth a look stand close behind a copy: those that take neither too little nor too much. See `improve_in_order`.
    """
    best = height[top] * (1.0 - 1e-12)
    found = (-1, -1)
    lowest = height.min()
    least_per_token = per_token.min()
    for place in places:
        mine = expert_at[place]
        if mine < 0:
            continue
        for other in range(place + 1, share_at.size):
            change = share_at[place] - share_at[other]
            new_top = height[top] - change * per_token[top]
            if new_top >= best:
                continue
            if lowest + change * least_per_token >= best:
                break
            rank = rank_at[other]
            worst = max(new_top, height[rank] + change * per_token[rank])
            if worst >= best or rules.closed[rank, mine]:
                continue
            theirs = expert_at[other]
            if theirs >= 0 and rules.closed[top, theirs]:
                continue
            if not (may_leave(rules, mine, top, rank) and may_leave(rules, theirs, rank, top)):
                continue
            best = worst
            found = (place, other)
    return found


@compiled
def exchange(rules: Rules, expert: int, rank: int, to_rank: int) -> None:
    """Note that a copy went from a rank to another."""
    rules.held[rank, expert], rules.held[to_rank, expert] = False, True
    if rules.distinct:
        rules.closed[rank, expert], rules.closed[to_rank, expert] = False, True


@compiled
def places_of(
    bins: Int32Array, order: Int64Array, share: Float64Array, room: Int64Array
) -> tuple[Float64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    """A place for every copy, in the order of experts; free room follows as copies of -1 without load.

    Returns, of each place, load, expert, rank and slot, and the places of each rank by slot, shape (R, S).
    """
    num_ranks, width = bins.shape
    following = np.zeros(share.size, np.int64)
    num_copies = 0
    for rank in range(num_ranks):
        for slot in range(room[rank]):
            if bins[rank, slot] >= 0:
                following[bins[rank, slot]] += 1
                num_copies += 1
    num_places = room.sum()
    share_at = np.zeros(num_places)
    expert_at = np.full(num_places, -1, np.int64)
    start = 0
    for expert in order:
        for place in range(start, start + following[expert]):
            share_at[place] = share[expert]
            expert_at[place] = expert
        following[expert], start = start, start + following[expert]
    rank_at = np.empty(num_places, np.int64)
    slot_at = np.empty(num_places, np.int64)
    places = np.empty((num_ranks, width), np.int64)
    for rank in range(num_ranks):
        for slot in range(room[rank]):
            expert = bins[rank, slot]
            place = following[expert] if expert >= 0 else num_copies
            if expert >= 0:
                following[expert] += 1
            else:
                num_copies += 1
            places[rank, slot] = place
            rank_at[place] = rank
            slot_at[place] = slot
    return share_at, expert_at, rank_at, slot_at, places


@compiled
def improve_in_order(
    bins: Int32Array,
    order: Int64Array,
    share: Float64Array,
    rank_load: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    rules: Rules,
    steps_max: int,
    goal: float,
) -> int:
    """`improve` until the busiest rank's height is at most `goal`. Share: load per copy of each expert, shape (E,).

    Changes bins, rank_load and what is held.
    """
    share_at, expert_at, rank_at, slot_at, places = places_of(bins, order, share, room)
    per_token = 1.0 / capacity
    height = rank_load * per_token
    steps = 0
    while steps < steps_max:
        top = int(np.argmax(height))
        if height[top] <= goal:
            break
        place, other = best_exchange(share_at, expert_at, rank_at, places[top, : room[top]], height, per_token, rules, top)
        if place < 0:
            break
        rank = rank_at[other]
        exchange(rules, expert_at[place], top, rank)
        if expert_at[other] >= 0:
            exchange(rules, expert_at[other], rank, top)
        places[top, slot_at[place]], places[rank, slot_at[other]] = other, place
        slot_at[place], slot_at[other] = slot_at[other], slot_at[place]
        rank_at[place], rank_at[other] = rank, top
        change = share_at[place] - share_at[other]
        rank_load[top] -= change
        rank_load[rank] += change
        height[top] = rank_load[top] * per_token[top]
        height[rank] = rank_load[rank] * per_token[rank]
        steps += 1
    bins[:] = -1
    for rank in range(bins.shape[0]):
        filled = 0
        for slot in range(room[rank]):
            if expert_at[places[rank, slot]] >= 0:
                bins[rank, filled] = expert_at[places[rank, slot]]
                filled += 1
    return steps


@compiled
def note_bins(rules: Rules, bins: Int32Array) -> None:
    """Note what bins hold."""
    for rank in range(bins.shape[0]):
        for expert in bins[rank]:
            if expert >= 0:
                rules.held[rank, expert] = True
                if rules.distinct:
                    rules.closed[rank, expert] = True


@compiled
def improve(
    bins: Int32Array,
    load: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    distinct: bool,
    steps_max: int,
) -> int:
    """Relieve the busiest rank by the best exchange with another rank until none helps, in place. Returns the steps taken.

    An exchange swaps two copies, or moves one into free room; the larger of the two loads must fall below the busiest's.
    """
    share = share_of_bins(bins, load)
    order = descending(share)
    rules = open_rules(room.size, load.size, distinct)
    note_bins(rules, bins)
    return improve_in_order(bins, order, share, loads_of_bins(bins, load), room, capacity, rules, steps_max, 0.0)


@compiled
def pack_and_improve(
    order: Int64Array,
    copies: Int64Array,
    share: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    base: Float64Array,
    width: int,
    distinct: bool,
    steps_max: int,
    goal: float,
) -> tuple[Int32Array, float]:
    """Bins for an allotment of copies, and their height. Base: work that each rank has beside, shape (R,), tokens."""
    bins = np.full((room.size, width), -1, np.int32)
    rank_load = base.copy()
    rules = open_rules(room.size, copies.size, distinct)
    num_placed = pack_in_order(bins, rank_load, order, copies, share, room, capacity, rules)
    if num_placed < copies.sum():  # copies that found no place leave their load to the others
        load = share * copies
        share = share_of_bins(bins, load)
        order = descending(share)
        rank_load = base + loads_of_bins(bins, load)
    improve_in_order(bins, order, share, rank_load, room, capacity, rules, steps_max, goal)
    top = busiest(rank_load, capacity)
    return bins, rank_load[top] / capacity[top]


@compiled
def vary_copies(
    load: Float64Array,
    copies: Int64Array,
    bins: Int32Array,
    room: Int64Array,
    capacity: Float64Array,
    base: Float64Array,
    copies_max: int,
    distinct: bool,
    steps_max: int,
    goal: float,
    trials_max: int,
) -> Int32Array:
    """Give a copy of some replicated expert to one of the busiest rank's experts, pack anew, keep what is best; until `goal`.

    Allotting by the hottest copy alone is blind to packing: with few slots a rank, some other allotment packs better.
    """
    chosen_copies = copies.copy()
    trials = 0
    rank_load = base + loads_of_bins(bins, load)
    top = busiest(rank_load, capacity)
    height = rank_load[top] / capacity[top]
    while height > goal and trials < trials_max:
        best = height * (1.0 - 1e-9)
        best_bins = bins
        best_gains = best_gives = -1
        for slot in range(bins.shape[1]):
            gains = bins[top, slot]
            if gains < 0 or chosen_copies[gains] >= copies_max:
                continue
            for gives in range(load.size):
                if gives == gains or chosen_copies[gives] < 2 or trials >= trials_max:
                    continue
                trials += 1
                chosen_copies[gains] += 1
                chosen_copies[gives] -= 1
                share = load / chosen_copies
                other, other_height = pack_and_improve(
                    descending(share),
                    chosen_copies,
                    share,
                    room,
                    capacity,
                    base,
                    bins.shape[1],
                    distinct,
                    steps_max,
                    0.0,
                )
                chosen_copies[gains] -= 1
                chosen_copies[gives] += 1
                if other_height < best:
                    best, best_bins, best_gains, best_gives = other_height, other, gains, gives
        if best_gains < 0:
            break
        chosen_copies[best_gains] += 1
        chosen_copies[best_gives] -= 1
        bins = best_bins
        rank_load = base + loads_of_bins(bins, load)
        top = busiest(rank_load, capacity)
        height = rank_load[top] / capacity[top]
    return bins
