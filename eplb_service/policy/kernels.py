"""Inner loops of the greedy policy, compiled: allot copies, pack them on ranks, improve by swaps, match ranks, align slots.

Ties go to the lowest index everywhere. `bins` are the experts of each rank, shape (R, S), -1 padded at the end; `room` is the
number of usable slots of each rank, shape (R,); `capacity` the relative speed of each rank.
"""
# ruff: noqa: FBT001  # compiled functions take positions only

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.policy.compiled import compiled

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@compiled
def allot_copies(load: Float64Array, num_slots: int, copies_max: int) -> Int64Array:
    """Copies of each expert: one each, then one more for the hottest per copy until the slots are used. Shape (E,).

    This minimises the load of the hottest copy (an exchange argument). Stops early when every expert has copies_max.
    """
    copies = np.ones(load.size, np.int64)
    for _ in range(num_slots - load.size):
        chosen = -1
        hottest = -1.0
        for expert in range(load.size):
            per_copy = load[expert] / copies[expert]
            if copies[expert] < copies_max and per_copy > hottest:
                hottest = per_copy
                chosen = expert
        if chosen < 0:
            break
        copies[chosen] += 1
    return copies


@compiled
def is_on(bins: Int32Array, rank: int, expert: int) -> bool:
    """Whether a rank holds an expert."""
    for slot in range(bins.shape[1]):  # noqa: SIM110  # numba compiles no generator expressions
        if bins[rank, slot] == expert:
            return True
    return False


@compiled
def make_way(
    bins: Int32Array,
    fill: Int64Array,
    rank_load: Float64Array,
    share: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    expert: int,
) -> bool:
    """Place a copy when every rank with room holds the expert: it takes the slot of another copy, which goes where room is.

    Picks the exchange with the least larger load of the two ranks. False when there is none (the copy is then not placed).
    """
    best = np.inf
    best_full = best_slot = best_free = -1
    for full in range(room.size):
        if room[full] == 0 or is_on(bins, full, expert):
            continue
        for slot in range(fill[full]):
            other = bins[full, slot]
            for free in range(room.size):
                if free == full or fill[free] >= room[free] or is_on(bins, free, other):
                    continue
                new_full = (rank_load[full] - share[other] + share[expert]) / capacity[full]
                new_free = (rank_load[free] + share[other]) / capacity[free]
                if max(new_full, new_free) < best:
                    best = max(new_full, new_free)
                    best_full, best_slot, best_free = full, slot, free
    if best_full < 0:
        return False
    other = bins[best_full, best_slot]
    bins[best_full, best_slot] = expert
    rank_load[best_full] += share[expert] - share[other]
    bins[best_free, fill[best_free]] = other
    fill[best_free] += 1
    rank_load[best_free] += share[other]
    return True


@compiled
def pack(
    load: Float64Array,
    copies: Int64Array,
    room: Int64Array,
    capacity: Float64Array,
    width: int,
    distinct: bool,
) -> Int32Array:
    """Longest-first packing: each copy, heaviest first, goes to the rank that it leaves least loaded. Returns bins.

    With `distinct`, never two copies of an expert on one rank. Copies that find no place are left out; each expert with one
    copy always finds one.
    """
    num_ranks = room.size
    bins = np.full((num_ranks, width), -1, np.int32)
    fill = np.zeros(num_ranks, np.int64)
    rank_load = np.zeros(num_ranks)
    share = load / copies
    order = np.argsort(-share, kind="mergesort")
    for index in range(order.size):
        expert = order[index]
        for _ in range(copies[expert]):
            chosen = -1
            least = np.inf
            for rank in range(num_ranks):
                if fill[rank] >= room[rank] or (distinct and is_on(bins, rank, expert)):
                    continue
                after = (rank_load[rank] + share[expert]) / capacity[rank]
                if after < least:
                    least = after
                    chosen = rank
            if chosen >= 0:
                bins[chosen, fill[chosen]] = expert
                fill[chosen] += 1
                rank_load[chosen] += share[expert]
            elif distinct:
                make_way(bins, fill, rank_load, share, room, capacity, expert)
    return bins


@compiled
def loads_of_bins(bins: Int32Array, load: Float64Array) -> Float64Array:
    """Rank loads under even split. Shape (R,)."""
    copies = np.zeros(load.size, np.int64)
    for rank in range(bins.shape[0]):
        for slot in range(bins.shape[1]):
            if bins[rank, slot] >= 0:
                copies[bins[rank, slot]] += 1
    result = np.zeros(bins.shape[0])
    for rank in range(bins.shape[0]):
        for slot in range(bins.shape[1]):
            expert = bins[rank, slot]
            if expert >= 0:
                result[rank] += load[expert] / copies[expert]
    return result


@compiled
def busiest(rank_load: Float64Array, capacity: Float64Array) -> int:
    """Rank with the largest load for its capacity."""
    chosen = 0
    for rank in range(1, rank_load.size):
        if rank_load[rank] / capacity[rank] > rank_load[chosen] / capacity[chosen]:
            chosen = rank
    return chosen


@compiled
def improve(  # noqa: C901  # one search over pairs of slots; calls cost in its innermost loop
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
    copies = np.zeros(load.size, np.int64)
    fill = np.zeros(room.size, np.int64)
    for rank in range(room.size):
        for slot in range(bins.shape[1]):
            if bins[rank, slot] >= 0:
                copies[bins[rank, slot]] += 1
                fill[rank] += 1
    share = load / np.maximum(copies, 1)
    rank_load = loads_of_bins(bins, load)
    for step in range(steps_max):
        top = busiest(rank_load, capacity)
        height = rank_load[top] / capacity[top]
        best = height * (1.0 - 1e-12)
        best_slot = best_rank = best_other = -1
        for slot in range(fill[top]):
            mine = bins[top, slot]
            for rank in range(room.size):
                if rank == top or room[rank] == 0 or (distinct and is_on(bins, rank, mine)):
                    continue
                last = fill[rank] + 1 if fill[rank] < room[rank] else fill[rank]
                for other_slot in range(last):
                    theirs = bins[rank, other_slot] if other_slot < fill[rank] else -1
                    back = share[theirs] if theirs >= 0 else 0.0
                    new_top = (rank_load[top] - share[mine] + back) / capacity[top]
                    new_rank = (rank_load[rank] + share[mine] - back) / capacity[rank]
                    worst = max(new_top, new_rank)
                    if worst >= best or (distinct and theirs >= 0 and is_on(bins, top, theirs)):
                        continue
                    best = worst
                    best_slot, best_rank, best_other = slot, rank, other_slot
        if best_slot < 0:
            return step
        mine = bins[top, best_slot]
        theirs = bins[best_rank, best_other] if best_other < fill[best_rank] else -1
        back = share[theirs] if theirs >= 0 else 0.0
        rank_load[top] += back - share[mine]
        rank_load[best_rank] += share[mine] - back
        bins[best_rank, best_other] = mine
        if theirs >= 0:
            bins[top, best_slot] = theirs
        else:
            fill[best_rank] += 1
            fill[top] -= 1
            bins[top, best_slot] = bins[top, fill[top]]
            bins[top, fill[top]] = -1
    return steps_max


@compiled
def pack_and_improve(
    load: Float64Array,
    copies: Int64Array,
    room: Int64Array,
    capacity: Float64Array,
    width: int,
    distinct: bool,
    steps_max: int,
) -> Int32Array:
    """Bins for an allotment of copies."""
    bins = pack(load, copies, room, capacity, width, distinct)
    improve(bins, load, room, capacity, distinct, steps_max)
    return bins


@compiled
def vary_copies(
    load: Float64Array,
    copies: Int64Array,
    bins: Int32Array,
    room: Int64Array,
    capacity: Float64Array,
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
    rank_load = loads_of_bins(bins, load)
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
                varied = chosen_copies.copy()
                varied[gains] += 1
                varied[gives] -= 1
                other = pack_and_improve(load, varied, room, capacity, bins.shape[1], distinct, steps_max)
                other_height = (loads_of_bins(other, load) / capacity).max()
                if other_height < best:
                    best, best_bins, best_gains, best_gives = other_height, other, gains, gives
        if best_gains < 0:
            break
        chosen_copies[best_gains] += 1
        chosen_copies[best_gives] -= 1
        bins = best_bins
        rank_load = loads_of_bins(bins, load)
        top = busiest(rank_load, capacity)
        height = rank_load[top] / capacity[top]
    return bins


@compiled
def cheapest_matching(cost: Int64Array) -> Int64Array:  # noqa: C901  # the method as published, in one place
    """Column of each row in a matching of least total cost. Cost: square, shape (n, n).

    The Hungarian method with potentials, O(n^3) (H. W. Kuhn, 1955; shortest augmenting paths after Edmonds and Karp).
    """
    size = cost.shape[0]
    row_potential = np.zeros(size + 1, np.int64)
    column_potential = np.zeros(size + 1, np.int64)
    row_of_column = np.full(size + 1, -1, np.int64)
    for row in range(size):
        row_of_column[size] = row
        column = size
        slack = np.full(size + 1, np.iinfo(np.int64).max, np.int64)
        previous = np.full(size + 1, -1, np.int64)
        used = np.zeros(size + 1, np.bool_)
        while row_of_column[column] >= 0:
            used[column] = True
            current = row_of_column[column]
            delta = np.iinfo(np.int64).max
            following = -1
            for candidate in range(size):
                if used[candidate]:
                    continue
                reduced = cost[current, candidate] - row_potential[current] - column_potential[candidate]
                if reduced < slack[candidate]:
                    slack[candidate] = reduced
                    previous[candidate] = column
                if slack[candidate] < delta:
                    delta = slack[candidate]
                    following = candidate
            for candidate in range(size + 1):
                if used[candidate]:
                    row_potential[row_of_column[candidate]] += delta
                    column_potential[candidate] -= delta
                elif candidate < size:
                    slack[candidate] -= delta
            column = following
        while column != size:
            row_of_column[column] = row_of_column[previous[column]]
            column = previous[column]
    result = np.empty(size, np.int64)
    for column in range(size):
        result[row_of_column[column]] = column
    return result


@compiled
def match_ranks(  # noqa: C901  # building one cost matrix
    bins: Int32Array, current: Int32Array, kind: Int64Array, num_logical: int
) -> Int32Array:
    """Give each bin to the rank that already holds most of it; only ranks of equal kind swap bins. Shapes (R, S); kind (R,).

    The result has the same bins in another order, with the fewest moves that such an order can have.
    """
    num_ranks = bins.shape[0]
    held = np.zeros((num_ranks, num_logical), np.bool_)
    for rank in range(num_ranks):
        for slot in range(current.shape[1]):
            if current[rank, slot] >= 0:
                held[rank, current[rank, slot]] = True
    cost = np.zeros((num_ranks, num_ranks), np.int64)
    for index in range(num_ranks):
        for rank in range(num_ranks):
            if kind[index] != kind[rank]:
                cost[index, rank] = 1 << 32
                continue
            for slot in range(bins.shape[1]):
                expert = bins[index, slot]
                if expert >= 0 and not held[rank, expert]:
                    cost[index, rank] += num_ranks + 1
            if index != rank:
                cost[index, rank] += 1
    rank_of_bin = cheapest_matching(cost)
    result = np.full(bins.shape, -1, np.int32)
    for index in range(num_ranks):
        result[rank_of_bin[index]] = bins[index]
    return result


@compiled
def align(bins: Int32Array, current: Int32Array, usable: BoolArray) -> Int32Array:
    """Put the experts of each bin into slots: those that the rank holds stay, the others fill up in ascending order.

    The compiled twin of `moves.align_slots`. All shapes (R, S). Returns rows of slots, -1 = empty.
    """
    result = np.full(current.shape, -1, np.int32)
    for rank in range(current.shape[0]):
        wanted = np.sort(bins[rank])
        for slot in range(current.shape[1]):
            if not usable[rank, slot] or current[rank, slot] < 0:
                continue
            for index in range(wanted.size):
                if wanted[index] == current[rank, slot]:
                    result[rank, slot] = wanted[index]
                    wanted[index] = -1
                    break
        free = 0
        for index in range(wanted.size):
            if wanted[index] < 0:
                continue
            while free < current.shape[1] and (not usable[rank, free] or result[rank, free] >= 0):
                free += 1
            result[rank, free] = wanted[index]
    return result


def row_near(bins: Int32Array, current: Int32Array, usable: BoolArray, kinds: Int64Array, num_logical: int) -> Int32Array:
    """A row of shape (P,) from bins, with ranks and slots swapped so that as much as possible stays where `current` has it."""
    # Always a fresh array: a live placement is read-only, one that came from another process is not, and for numba these are
    # two types. It would compile the loops a second time, for seconds, in the middle of a first plan.
    slots = current.reshape(usable.shape).copy()
    row: Int32Array = align(match_ranks(bins, slots, kinds, num_logical), slots, usable).reshape(-1)
    return row
