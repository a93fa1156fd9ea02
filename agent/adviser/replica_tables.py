"""The tables that some engines want beside a map: where the replicas of each expert are. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.adviser.answer_check import IntArray, replica_counts

Int64Array = npt.NDArray[np.int64]


def replica_tables(rows: IntArray, num_logical: int) -> tuple[Int64Array, Int64Array]:
    """Slots of each expert, ascending, and how many. Rows: shape (L, P). Shapes (L, E, P - E + 1), -1 padded, and (L, E).

    >>> replica_tables(np.array([[0, 1, 0]]), 2)[0].tolist()
    [[[0, 2], [1, -1]]]
    """
    num_layers, num_physical = rows.shape
    counts = replica_counts(rows, num_logical)
    slots = np.argsort(rows, axis=1, kind="stable")
    experts = np.take_along_axis(rows, slots, axis=1)
    first = np.cumsum(counts, axis=1) - counts
    position = np.arange(num_physical)[None, :] - np.take_along_axis(first, experts, axis=1)
    width = max(num_physical - num_logical + 1, int(counts.max(initial=1)))
    physical = np.full((num_layers, num_logical, width), -1, dtype=np.int64)
    physical[np.arange(num_layers)[:, None], experts, position] = slots
    return physical, counts
