"""Small values for tests of the chunk machine: three ranks of two slots, one layer of four experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from agent.hook.stage_check import LayerShape, RankShape
from eplb_service.control import Address, Copy, FromRank, LayerChange, LinkBytes, LiveLayer, Stage
from eplb_service.ids import ChunkId, GenerationNumber, GroupId, Incarnation, LayerRef, RankId
from eplb_service.placement import row_digest

LAYER = LayerRef("m", 3)
RANKS = (RankId(4), RankId(7), RankId(9))
SLOTS = 2
NUM_LOGICAL = 4
ROW = (0, 1, 2, 3, 0, 1)
OTHER = (1, 0, 2, 3, 3, 2)
EXPERT_BYTES = 100


def address(rank: RankId = RANKS[0]) -> Address:
    return Address(rank, Incarnation(50 + rank), GroupId(8))


def shape(rank: RankId = RANKS[0], *, staging_bytes: int = 2 * EXPERT_BYTES) -> RankShape:
    return RankShape(
        rank_id=rank,
        group_rank_ids=RANKS,
        layers={LAYER: LayerShape(num_logical=NUM_LOGICAL, slots=SLOTS, expert_bytes=EXPERT_BYTES)},
        replica_table_width=3,
        staging_bytes=staging_bytes,
    )


def digest(row: Sequence[int]) -> int:
    return row_digest(LAYER, np.array(row))


def live(row: Sequence[int] = ROW) -> dict[LayerRef, LiveLayer]:
    return {LAYER: LiveLayer(layer=LAYER, generation=GenerationNumber(0), digest=digest(row), row=tuple(row))}


def machine(rank: RankId = RANKS[0]) -> ChunkMachine:
    return ChunkMachine(address(rank), shape(rank), live(), weights_version=0, off_reason="")


def copies(old: Sequence[int], new: Sequence[int]) -> tuple[Copy, ...]:
    """One copy for every slot that changes to an expert, from the first slot that holds it."""
    made = []
    for slot, expert in enumerate(new):
        if expert not in (old[slot], -1):
            source = list(old).index(expert)
            made.append(
                Copy(
                    layer=LAYER,
                    expert=expert,
                    source_rank=RANKS[source // SLOTS],
                    source_slot=source % SLOTS,
                    target_rank=RANKS[slot // SLOTS],
                    target_slot=slot % SLOTS,
                )
            )
    return tuple(made)


def stage(
    chunk: ChunkId, *, old: Sequence[int] = ROW, new: Sequence[int] = OTHER, rank: RankId = RANKS[0], **changes: Any
) -> Stage:
    made = Stage(
        to=address(rank),
        chunk_id=chunk,
        generation=GenerationNumber(1),
        weights_version=0,
        mesh_id=chunk,
        layers=(LayerChange(layer=LAYER, old_digest=digest(old), new_digest=digest(new), new_row=tuple(new)),),
        copies=copies(old, new),
        stage_timeout_s=10.0,
        arm_ttl_s=5.0,
    )
    return replace(made, **changes)


def sent(effects: Sequence[ev.Effect]) -> list[FromRank]:
    return [effect.message for effect in effects if isinstance(effect, ev.Send)]


def kinds(effects: Sequence[ev.Effect]) -> list[str]:
    """Names of effects in order; a Send by the name of its message."""
    return [type(effect.message if isinstance(effect, ev.Send) else effect).__name__ for effect in effects]


def done(chunk: ChunkId) -> ev.StagingDone:
    return ev.StagingDone(chunk, 0.1, LinkBytes())
