"""Plans all layers of a table in one compiled call, where no constraint treats one expert or rank unlike another.

That is the common case, and the one in which calls between Python and compiled code would cost more than the planning.
"""
# ruff: noqa: FBT001, PLR0917  # compiled functions take positions only

from __future__ import annotations

import numpy as np

from eplb_service.policy.compiled import compiled
from eplb_service.policy.exchanges import pack_and_improve, vary_copies
from eplb_service.policy.kernels import (
    BoolArray,
    Float64Array,
    Int32Array,
    Int64Array,
    allot_in_order,
    hottest_first,
    loads_of_bins,
    settle_ties,
)
from eplb_service.policy.matching import align, match_ranks


@compiled
def pack_layers(
    loads: Float64Array,
    orders: Int64Array,
    room: Int64Array,
    capacity: Float64Array,
    bases: Float64Array,
    width: int,
    copies_max: int,
    distinct: bool,
    steps_max: int,
    goal_over_bound: float,
) -> tuple[Int32Array, Int64Array, Float64Array, Float64Array]:
    """Bins of each layer: allot copies, pack them, improve by exchanges until the height is goal_over_bound times its bound.

    Loads: shape (L, E), tokens; orders: experts of each layer by descending load, equals in any order; room, capacity: of ranks
    that serve, shape (R,); bases: shape (L, R), tokens. Returns bins (L, R, width), copies (L, E), heights and lower bounds of
    them (L,).
    """
    num_layers, num_logical = loads.shape
    bins = np.empty((num_layers, room.size, width), np.int32)
    copies = np.ones((num_layers, num_logical), np.int64)
    heights = np.empty(num_layers)
    bounds = np.empty(num_layers)
    most = np.full(num_logical, copies_max)
    num_slots, fastest, speed = room.sum(), capacity.max(), capacity.sum()
    for layer in range(num_layers):
        load = loads[layer]
        order = orders[layer].copy()
        settle_ties(order, load)
        share = allot_in_order(load, order, copies[layer], most, num_slots)
        order = hottest_first(order, copies[layer], share)
        bounds[layer] = max(share[order[0]] / fastest, (load.sum() + bases[layer].sum()) / speed)
        bins[layer], heights[layer] = pack_and_improve(
            order,
            copies[layer],
            share,
            room,
            capacity,
            bases[layer],
            width,
            distinct,
            steps_max,
            goal_over_bound * bounds[layer],
        )
    return bins, copies, heights, bounds


@compiled
def vary_layers(
    bins: Int32Array,
    loads: Float64Array,
    copies: Int64Array,
    goals: Float64Array,
    room: Int64Array,
    capacity: Float64Array,
    bases: Float64Array,
    copies_max: int,
    distinct: bool,
    steps_max: int,
    trials_max: int,
) -> None:
    """Try other allotments of copies in each layer until its height is at most its goal, in place. Shapes as there."""
    for layer in range(loads.shape[0]):
        bins[layer] = vary_copies(
            loads[layer],
            copies[layer],
            bins[layer],
            room,
            capacity,
            bases[layer],
            copies_max,
            distinct,
            steps_max,
            goals[layer],
            trials_max,
        )


@compiled
def has_all(row: Int32Array, usable: BoolArray, num_logical: int) -> bool:
    """Whether slots in use hold every expert and the others nothing. Shapes (R, S)."""
    seen = np.zeros(num_logical, np.bool_)
    missing = num_logical
    for rank in range(row.shape[0]):
        for slot in range(row.shape[1]):
            expert = row[rank, slot]
            if expert < 0:
                continue
            if not usable[rank, slot]:
                return False
            if not seen[expert]:
                seen[expert] = True
                missing -= 1
    return missing == 0


@compiled
def keeps_copy_rules(row: Int32Array, num_logical: int, copies_max: int, distinct: bool) -> bool:
    """Whether no expert has more than copies_max copies or, with distinct, two on one rank. Shape (R, S)."""
    copies = np.zeros(num_logical, np.int64)
    latest_rank = np.full(num_logical, -1, np.int64)
    for rank in range(row.shape[0]):
        for slot in range(row.shape[1]):
            expert = row[rank, slot]
            if expert < 0:
                continue
            copies[expert] += 1
            if copies[expert] > copies_max or (distinct and latest_rank[expert] == rank):
                return False
            latest_rank[expert] = rank
    return True


@compiled
def moves_between(before: Int32Array, after: Int32Array, num_logical: int) -> int:
    """Residencies of `after` that were not there before. Shapes (R, S). The compiled twin of `moves.count_moves`."""
    held_by = np.full(num_logical, -1, np.int64)
    moves = 0
    for rank in range(before.shape[0]):
        for slot in range(before.shape[1]):
            if before[rank, slot] >= 0:
                held_by[before[rank, slot]] = rank
        for slot in range(after.shape[1]):
            expert = after[rank, slot]
            if expert >= 0 and held_by[expert] != rank:
                held_by[expert] = rank
                moves += 1
    return moves


@compiled
def settle_layers(
    loads: Float64Array,
    rows: Int32Array,
    bins: Int32Array,
    serving: Int64Array,
    usable: BoolArray,
    capacity: Float64Array,
    bases: Float64Array,
    kinds: Int64Array,
    copies_max: int,
    distinct: bool,
) -> tuple[Int32Array, BoolArray, Float64Array, Float64Array, Int64Array]:
    """Rows from bins, as near as can be to the current rows, and what they would do.

    Loads: shape (L, E); rows: shape (L, R, S), current; bins: shape (L, ranks that serve, S); serving: positions of those
    ranks; usable (R, S); bases: shape (L, R), tokens. Returns, of each layer: the row, whether the current one keeps all rules,
    heights before (infinite where the row cannot stay: an expert has no slot in use, or a slot out of use is filled) and after,
    moves.
    """
    num_layers, num_logical = loads.shape
    new_rows = np.empty_like(rows)
    legal = np.zeros(num_layers, np.bool_)
    before = np.full(num_layers, np.inf)
    after = np.zeros(num_layers)
    moves = np.zeros(num_layers, np.int64)
    by_rank = np.full(rows.shape[1:], -1, np.int32)
    for layer in range(num_layers):
        load, row = loads[layer], rows[layer]
        for index in range(serving.size):
            for slot in range(rows.shape[2]):
                by_rank[serving[index], slot] = bins[layer, index, slot]
        new_rows[layer] = align(match_ranks(by_rank, row, kinds, num_logical), row, usable)
        if has_all(row, usable, num_logical):
            before[layer] = ((bases[layer] + loads_of_bins(row, load)) / capacity).max()
            legal[layer] = keeps_copy_rules(row, num_logical, copies_max, distinct)
        after[layer] = ((bases[layer] + loads_of_bins(new_rows[layer], load)) / capacity).max()
        moves[layer] = moves_between(row, new_rows[layer], num_logical)
    return new_rows, legal, before, after, moves
