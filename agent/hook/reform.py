"""What ranks decide when their vote group forms again, before any of them runs another step: the same on all, or nothing.

A rank that cast a chunk's id and never learned the outcome stands still: others may have flipped it. When the group forms again
every rank that was in it tells all others where it stands, and each decides from all of that:

- A chunk that any rank flipped, or knows to have passed, was voted for by all. Ranks that cast its id flip it now, from the
  staging that they kept, before their first step.
- Every other chunk that is open closes for good: no rank that is left flipped it, and what a lost rank did is lost with it.
- All maps must then be equal. Where they are not, nobody serves: to route by a guess would break invariant 1 silently.
- Boundaries go on, on all ranks alike, at the first vote after the highest that any rank reached.

Ranks in lock-step are never more than one chunk apart: the next vote needs every rank's step, and one that does not know an
outcome makes none. A rank that is new to the group has no standing; it takes the map that the others agree on.

The decision alone is here. No hook forms its group again yet: a rank that does not know an outcome
ends, and its engine starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.hook.chunk import ChunkMachine
from agent.hook.chunk_events import NO_CHUNK, ChunkState
from eplb_service.errors import InvalidInputError
from eplb_service.generation import live_digest
from eplb_service.ids import ChunkId, LayerRef, RankId

_CAST = frozenset({ChunkState.VOTING, ChunkState.COMMITTED, ChunkState.FLIPPING, ChunkState.UNRESOLVED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank of the group that was stands.

    live_digest: of the map that it routes by. flipped_id: the last chunk that it flipped, 0 = none.
    cast_id: the chunk that it voted for and has neither flipped nor closed, 0 = none.
    has_passed: it knows that this vote passed. digest_after: of its map once it flipped that chunk.
    can_flip: what it staged is of the weights that it serves. boundary: of its last step.
    """

    rank_id: RankId
    live_digest: int
    flipped_id: ChunkId
    cast_id: ChunkId
    has_passed: bool
    digest_after: int
    can_flip: bool
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reformed:
    """All ranks serve on: those of `flips` flip `chunk_id` first (0 = nobody has to), all close ids up to `closed_id`.

    live_digest: of the one map that all route by then. boundary: of the first step.
    """

    flips: frozenset[RankId]
    chunk_id: ChunkId
    closed_id: ChunkId
    live_digest: int
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotServed:
    """No rank may run a step; the engine restarts. reason: for people."""

    reason: str


def standing_of(machine: ChunkMachine, rank_id: RankId) -> Standing:
    """Where the rank of a chunk machine stands, when its engine runs no step."""
    live = {layer: known.digest for layer, known in machine.live.items()}
    stage = machine.opened if machine.state in _CAST else None
    after: dict[LayerRef, int] = live if stage is None else live | {change.layer: change.new_digest for change in stage.layers}
    return Standing(
        rank_id=rank_id,
        live_digest=live_digest(live),
        flipped_id=machine.ledger.flipped_id,
        cast_id=NO_CHUNK if stage is None else stage.chunk_id,
        has_passed=stage is not None and machine.has_passed,
        digest_after=live_digest(after),
        can_flip=not machine.is_stale,
        boundary=machine.ledger.boundary,
    )


def decide(standings: Sequence[Standing], *, vote_period: int) -> Reformed | NotServed:
    """The decision; equal for equal standings, in whatever order they come. vote_period: K.

    Raises InvalidInputError without standings, with two of one rank, and for a vote period below 1.
    """
    ranks = sorted(standings, key=lambda standing: standing.rank_id)
    ids = [standing.rank_id for standing in ranks]
    if not ranks or len(set(ids)) != len(ids) or vote_period < 1:
        raise InvalidInputError(
            f"a group forms again from one standing of each of its ranks and a vote period of at least 1; got ranks {ids} and"
            f" {vote_period}"
        )
    flipped = {standing.flipped_id for standing in ranks} - {NO_CHUNK}
    passed = flipped | {standing.cast_id for standing in ranks if standing.has_passed}
    flipping = [standing for standing in ranks if standing.cast_id != NO_CHUNK and standing.cast_id in passed]
    chunks = sorted({standing.cast_id for standing in flipping})
    if len(chunks) > 1:
        return NotServed(reason=f"votes for chunks {', '.join(map(hex, chunks))} passed at once: restart the engine")
    stale = [standing.rank_id for standing in flipping if not standing.can_flip]
    if stale:
        return NotServed(
            reason=f"rank {_listed(stale)} has to flip chunk {chunks[0]:#x}, as others did, and its weights changed"
            " since it staged it: restart the engine"
        )
    due = {standing.rank_id for standing in flipping}
    after = {standing.rank_id: standing.digest_after if standing.rank_id in due else standing.live_digest for standing in ranks}
    if len(set(after.values())) > 1:
        return NotServed(reason=_disagreement(after))
    return Reformed(
        flips=frozenset(due),
        chunk_id=chunks[0] if chunks else NO_CHUNK,
        closed_id=max(max(standing.cast_id, standing.flipped_id) for standing in ranks),
        live_digest=after[ids[0]],
        boundary=(max(standing.boundary for standing in ranks) // vote_period + 1) * vote_period,
    )


def _disagreement(digests: dict[RankId, int]) -> str:
    by_map: dict[int, list[RankId]] = {}
    for rank, digest in digests.items():
        by_map.setdefault(digest, []).append(rank)
    maps = "; ".join(f"rank {_listed(ranks)}: {digest:#x}" for digest, ranks in by_map.items())
    return f"ranks route by {len(by_map)} different maps ({maps}): restart the engine"


def _listed(ranks: Sequence[RankId]) -> str:
    return ", ".join(map(str, ranks))
