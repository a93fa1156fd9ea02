"""Inner loops of the greedy policy, compiled: allot copies, pack them on ranks.

Ties go to the lowest index everywhere. `bins` are the experts of each rank, shape (R, S), -1 padded at the end; `room` is the
number of usable slots of each rank, shape (R,); `capacity` the relative speed of each rank; `order` experts by descending load
per copy, ties by index.
"""
# ruff: noqa: FBT001  # compiled functions take positions only

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.policy.compiled import compiled

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

REPLICATED_FEW = 64
"""Up to as many replicated experts are sorted by insertion, which is quicker for few."""


class Rules(NamedTuple):
    """Who may hold what, kept up while copies are placed and exchanged.

    closed: shape (R, E), ranks that may not take a copy: barred, or (`distinct`) holding one. held: shape (R, E).
    spread: shape (E,), experts that must be on at least two domains; domain_of: shape (R,), domain of each rank.
    """

    closed: BoolArray
    held: BoolArray
    spread: BoolArray
    domain_of: Int64Array
    distinct: bool


@compiled
def open_rules(num_ranks: int, num_logical: int, distinct: bool) -> Rules:
    """Rules that bar nothing and protect nothing."""
    return Rules(
        np.zeros((num_ranks, num_logical), np.bool_),
        np.zeros((num_ranks, num_logical), np.bool_),
        np.zeros(num_logical, np.bool_),
        np.zeros(num_ranks, np.int64),
        distinct,
    )


@compiled
def is_hotter(share: Float64Array, first: int, second: int) -> bool:
    """Whether the first expert comes before the second: hotter per copy, then lower index."""
    if share[first] != share[second]:
        return bool(share[first] > share[second])
    return first < second


@compiled
def descending(values: Float64Array) -> Int64Array:
    """Indices by descending value, ties by index."""
    return np.argsort(-values, kind="mergesort")


@compiled
def settle_ties(order: Int64Array, share: Float64Array) -> None:
    """Put experts that are nearly in order, whatever the order of equals, into order. In place."""
    for index in range(1, order.size):
        expert = order[index]
        at = index
        while at > 0 and is_hotter(share, expert, order[at - 1]):
            order[at] = order[at - 1]
            at -= 1
        order[at] = expert


@compiled
def allot_in_order(
    load: Float64Array, order: Int64Array, copies: Int64Array, copies_max: Int64Array, num_slots: int
) -> Float64Array:
    """One more copy for the hottest per copy until the slots are used. Order: by load over `copies`; it is a heap already.

    Changes copies, of which each is at least 1 at first; none gets above copies_max. Returns load per copy. Shapes (E,).
    """
    share = load / copies
    heap = np.empty(order.size, np.int64)
    size = 0
    for expert in order:
        if copies[expert] < copies_max[expert]:
            heap[size] = expert
            size += 1
    for _ in range(num_slots - copies.sum()):
        if size == 0:
            break
        top = heap[0]
        copies[top] += 1
        share[top] = load[top] / copies[top]
        if copies[top] >= copies_max[top]:
            size -= 1
            top = heap[size]
        at = 0
        while 2 * at + 1 < size:
            child = 2 * at + 1
            if child + 1 < size and is_hotter(share, heap[child + 1], heap[child]):
                child += 1
            if is_hotter(share, top, heap[child]):
                break
            heap[at] = heap[child]
            at = child
        heap[at] = top
    return share


@compiled
def allot_copies(load: Float64Array, num_slots: int, copies_max: int) -> Int64Array:
    """Copies of each expert: one each, then one more for the hottest per copy until the slots are used. Shape (E,).

    This minimises the load of the hottest copy (an exchange argument). Stops early when every expert has copies_max.
    """
    copies = np.ones(load.size, np.int64)
    allot_in_order(load, descending(load), copies, np.full(load.size, copies_max), num_slots)
    return copies


@compiled
def hottest_first(order: Int64Array, copies: Int64Array, share: Float64Array) -> Int64Array:
    """Experts in descending order of load per copy, ties by index, from their order of load. Shape (E,).

    Those with one copy are in order already; the others, mostly few, are sorted and merged in.
    """
    num_replicated = 0
    for expert in range(copies.size):
        num_replicated += copies[expert] > 1
    if num_replicated > REPLICATED_FEW:
        return descending(share)
    replicated = np.empty(num_replicated, np.int64)
    size = 0
    for expert in range(copies.size):
        if copies[expert] > 1:
            at = size
            while at > 0 and is_hotter(share, expert, replicated[at - 1]):
                replicated[at] = replicated[at - 1]
                at -= 1
            replicated[at] = expert
            size += 1
    result = np.empty(order.size, np.int64)
    following = 0
    filled = 0
    for expert in order:
        if copies[expert] > 1:
            continue
        while following < num_replicated and is_hotter(share, replicated[following], expert):
            result[filled] = replicated[following]
            filled += 1
            following += 1
        result[filled] = expert
        filled += 1
    for index in range(following, num_replicated):
        result[filled] = replicated[index]
        filled += 1
    return result


@compiled
def share_of_bins(bins: Int32Array, load: Float64Array) -> Float64Array:
    """Load per copy of each expert under even split; the whole load where it has none. Shape (E,)."""
    copies = np.zeros(load.size, np.int64)
    for rank in range(bins.shape[0]):
        for slot in range(bins.shape[1]):
            if bins[rank, slot] >= 0:
                copies[bins[rank, slot]] += 1
    return load / np.maximum(copies, 1)


@compiled
def loads_of_bins(bins: Int32Array, load: Float64Array) -> Float64Array:
    """Rank loads under even split. Shape (R,)."""
    share = share_of_bins(bins, load)
    result = np.zeros(bins.shape[0])
    for rank in range(bins.shape[0]):
        for slot in range(bins.shape[1]):
            expert = bins[rank, slot]
            if expert >= 0:
                result[rank] += share[expert]
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
def make_way(
    bins: Int32Array,
    fill: Int64Array,
    rank_load: Float64Array,
    share: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    closed: BoolArray,
    expert: int,
) -> tuple[int, int, int]:
    """Place a copy when no rank with room may take it: it takes the slot of another copy, which goes where room is.

    Picks the exchange with the least larger load of the two ranks. Returns the rank that got the expert, the expert that left
    it and the rank that got that; -1 each when there is none (the copy is then not placed). `closed` is not changed.
    """
    best = np.inf
    best_full = best_slot = best_free = -1
    for full in range(room.size):
        if room[full] == 0 or closed[full, expert]:
            continue
        for slot in range(fill[full]):
            other = bins[full, slot]
            for free in range(room.size):
                if free == full or fill[free] >= room[free] or closed[free, other]:
                    continue
                new_full = (rank_load[full] - share[other] + share[expert]) / capacity[full]
                new_free = (rank_load[free] + share[other]) / capacity[free]
                if max(new_full, new_free) < best:
                    best = max(new_full, new_free)
                    best_full, best_slot, best_free = full, slot, free
    if best_full < 0:
        return -1, -1, -1
    left = bins[best_full, best_slot]
    bins[best_full, best_slot] = expert
    rank_load[best_full] += share[expert] - share[left]
    bins[best_free, fill[best_free]] = left
    fill[best_free] += 1
    rank_load[best_free] += share[left]
    return best_full, left, best_free


@compiled
def only_domain(held: BoolArray, domain_of: Int64Array, expert: int) -> int:
    """The domain that all copies of an expert are on, -1 when there is none such."""
    found = -1
    for rank in range(domain_of.size):
        if not held[rank, expert]:
            continue
        if found >= 0 and domain_of[rank] != found:
            return -1
        found = domain_of[rank]
    return found


@compiled
def note_heights(
    height: Float64Array, fill: Int64Array, rank_load: Float64Array, room: Int64Array, per_token: Float64Array
) -> None:
    """Height of each rank with room; infinite without."""
    for rank in range(room.size):
        height[rank] = rank_load[rank] * per_token[rank] if fill[rank] < room[rank] else np.inf


@compiled
def pack_in_order(  # noqa: C901, PLR0912  # calls cost in its innermost loop
    bins: Int32Array,
    rank_load: Float64Array,
    order: Int64Array,
    copies: Int64Array,
    share: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    rules: Rules,
) -> int:
    """Fill up bins: each copy in the order of experts goes to the rank that it leaves least loaded, of those that may take it.

    The last copy of an expert to be spread goes to another domain than the rest. Adds to rank_load and what is held. Returns
    the copies placed.
    """
    num_ranks = room.size
    fill = np.zeros(num_ranks, np.int64)
    for rank in range(num_ranks):
        while fill[rank] < room[rank] and bins[rank, fill[rank]] >= 0:
            fill[rank] += 1
    num_placed = 0
    per_token = 1.0 / capacity
    height = np.empty(num_ranks)
    note_heights(height, fill, rank_load, room, per_token)
    for expert in order:
        for copy in range(copies[expert]):
            full_domain = -1
            if rules.spread[expert] and copy == copies[expert] - 1:
                full_domain = only_domain(rules.held, rules.domain_of, expert)
            chosen = -1
            least = np.inf
            for rank in range(num_ranks):
                after = height[rank] + share[expert] * per_token[rank]
                if after < least and not rules.closed[rank, expert]:
                    if full_domain >= 0 and rules.domain_of[rank] == full_domain:
                        continue
                    least = after
                    chosen = rank
            if chosen >= 0:
                bins[chosen, fill[chosen]] = expert
                fill[chosen] += 1
                rank_load[chosen] += share[expert]
                full = fill[chosen] == room[chosen]
                height[chosen] = np.inf if full else rank_load[chosen] * per_token[chosen]
            else:
                chosen, left, free = make_way(bins, fill, rank_load, share, room, capacity, rules.closed, expert)
                if chosen < 0:
                    continue
                rules.held[chosen, left], rules.held[free, left] = False, True
                if rules.distinct:
                    rules.closed[chosen, left], rules.closed[free, left] = False, True
                note_heights(height, fill, rank_load, room, per_token)
            num_placed += 1
            rules.held[chosen, expert] = True
            if rules.distinct:
                rules.closed[chosen, expert] = True
    return num_placed


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
    bins = np.full((room.size, width), -1, np.int32)
    share = load / copies
    order = descending(share)
    rules = open_rules(room.size, load.size, distinct)
    pack_in_order(bins, np.zeros(room.size), order, copies, share, room, capacity, rules)
    return bins
