"""What a rank casts in a vote, and what the minimum over all ranks says: numbers in, outcome out."""

from __future__ import annotations

from collections.abc import Sequence

from agent.hook.chunk_events import NO_CHUNK, Outcome
from eplb_service.ids import ChunkId

LEAVING = -1
"""Boundary that a rank casts when it leaves."""


def ballot(boundary: int, chunk: ChunkId) -> list[int]:
    """`[b, -b, id, -id]`: its element-wise minimum over ranks holds the least and the greatest of both.

    >>> [min(pair) for pair in zip(ballot(8, ChunkId(5)), ballot(8, ChunkId(0)))]
    [8, -8, 0, -5]
    """
    return [boundary, -boundary, chunk, -chunk]


def read_ballot(minimum: Sequence[int], *, boundary: int, chunk: ChunkId) -> tuple[Outcome, str]:
    """The outcome for a rank that cast `chunk` at `boundary`, and a sentence when it is not plain.

    minimum: of all ranks' ballots. Passed only where all cast the same id, and that is this rank's own.
    """
    low, negative_high, low_id, negative_high_id = minimum
    if low != -negative_high:
        if low == LEAVING:
            return Outcome.DIVERGED, f"a rank left the vote group at boundary {boundary}"
        return (
            Outcome.DIVERGED,
            f"ranks are at different step boundaries: {low} to {-negative_high}, this one at {boundary}",
        )
    passed = chunk != NO_CHUNK and low_id == -negative_high_id == chunk
    return (Outcome.PASSED if passed else Outcome.FAILED), ""
