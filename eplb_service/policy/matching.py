"""Compiled: which rank gets which bin, and which slot which expert, so that most stays where it is.

Ties go to the lowest index everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.policy.compiled import compiled

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@compiled
def cheapest_matching(cost: Int64Array) -> Int64Array:  # noqa: C901, PLR0912  # the method as published, in one place
    """Column of each row in a matching of least total cost. Cost: square, shape (n, n).

    The Hungarian method with potentials, O(n^3) (H. W. Kuhn, 1955; shortest augmenting paths after Edmonds and Karp), from what
    the least costs of rows and columns match already.
    """
    size = cost.shape[0]
    row_potential = np.zeros(size + 1, np.int64)
    column_potential = np.zeros(size + 1, np.int64)
    row_of_column = np.full(size + 1, -1, np.int64)
    is_matched = np.zeros(size, np.bool_)
    for row in range(size):
        row_potential[row] = cost[row].min()
    column_potential[:size] = np.iinfo(np.int64).max
    for row in range(size):
        for column in range(size):
            column_potential[column] = min(column_potential[column], cost[row, column] - row_potential[row])
    for row in range(size):
        for column in range(size):
            if row_of_column[column] < 0 and cost[row, column] == row_potential[row] + column_potential[column]:
                row_of_column[column] = row
                is_matched[row] = True
                break
    slack = np.empty(size + 1, np.int64)
    previous = np.empty(size + 1, np.int64)
    used = np.empty(size + 1, np.bool_)
    for row in range(size):
        if is_matched[row]:
            continue
        row_of_column[size] = row
        column = size
        slack[:] = np.iinfo(np.int64).max
        previous[:] = -1
        used[:] = False
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
            if delta > 0:
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
def kept_by(bins: Int32Array, current: Int32Array, num_logical: int) -> Int64Array:
    """How many experts of each bin each rank holds now. Shapes (R, S), no expert twice in a bin. Returns (bins, ranks)."""
    num_ranks, width = bins.shape
    first = np.full(num_logical, -1, np.int64)  # of each expert's chain of places in bins
    following = np.empty(num_ranks * width, np.int64)
    for index in range(num_ranks - 1, -1, -1):
        for slot in range(width):
            expert = bins[index, slot]
            if expert >= 0:
                following[index * width + slot] = first[expert]
                first[expert] = index * width + slot
    kept = np.zeros((num_ranks, num_ranks), np.int64)
    seen_on = np.full(num_logical, -1, np.int64)
    for rank in range(num_ranks):
        for slot in range(current.shape[1]):
            expert = current[rank, slot]
            if expert < 0 or seen_on[expert] == rank:
                continue
            seen_on[expert] = rank
            place = first[expert]
            while place >= 0:
                kept[place // width, rank] += 1
                place = following[place]
    return kept


@compiled
def match_ranks(bins: Int32Array, current: Int32Array, kind: Int64Array, num_logical: int) -> Int32Array:
    """Give each bin to the rank that already holds most of it; only ranks of equal kind swap bins. Shapes (R, S); kind (R,).

    The result has the same bins in another order, with the fewest moves that such an order can have; of orders with as few, one
    that leaves most bins where they are.
    """
    num_ranks = bins.shape[0]
    cost = -(num_ranks + 1) * kept_by(bins, current, num_logical)
    for index in range(num_ranks):
        for rank in range(num_ranks):
            if kind[index] != kind[rank]:
                cost[index, rank] = 1 << 32
            elif index != rank:
                cost[index, rank] += 1
    rank_of_bin = cheapest_matching(cost)
    result = np.empty(bins.shape, np.int32)
    for index in range(num_ranks):
        result[rank_of_bin[index]] = bins[index]
    return result


@compiled
def align(bins: Int32Array, current: Int32Array, usable: BoolArray) -> Int32Array:  # noqa: C901  # sorts few as it goes
    """Put the experts of each bin into slots: those that the rank holds stay, the others fill up in ascending order.

    The compiled twin of `moves.align_slots`. All shapes (R, S). Returns rows of slots, -1 = empty.
    """
    result = np.full(current.shape, -1, np.int32)
    wanted = np.empty(bins.shape[1], np.int32)
    for rank in range(current.shape[0]):
        for index in range(bins.shape[1]):
            at = index
            while at > 0 and wanted[at - 1] > bins[rank, index]:
                wanted[at] = wanted[at - 1]
                at -= 1
            wanted[at] = bins[rank, index]
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
