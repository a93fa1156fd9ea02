"""The names of things, as types, so that one cannot be passed for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

DeploymentId = NewType("DeploymentId", str)
"""One expert-parallel group serving one stage in one phase; letters, digits, `.`, `_`, `-`; at most 128."""

RankId = NewType("RankId", int)
"""Stable id of a rank (0..65535); survives re-forming; never a position in a list."""

Incarnation = NewType("Incarnation", int)
"""One life of an engine process (63 bits, random)."""

GroupId = NewType("GroupId", int)
"""One forming of the vote group (63 bits)."""

GenerationNumber = NewType("GenerationNumber", int)
"""1, 2, 3, …; 0 names the placement that the engine loaded by itself."""

Epoch = NewType("Epoch", int)
"""Fencing number of the planner that leads a deployment; 31 bits."""

ChunkId = NewType("ChunkId", int)
"""(epoch, sequence) packed into 63 bits: `epoch << 32 | sequence`; it only grows; 0 = none."""

CHUNK_SEQUENCE_BITS = 32


def chunk_id(epoch: int, sequence: int) -> ChunkId:
    """Pack a chunk's epoch and sequence. Raises ValueError outside 31 and 32 bits."""
    if not 0 < epoch < 1 << 31 or not 0 < sequence < 1 << CHUNK_SEQUENCE_BITS:
        raise ValueError(f"chunk id out of range: epoch {epoch} (1..2^31-1), sequence {sequence} (1..2^32-1)")
    return ChunkId(epoch << CHUNK_SEQUENCE_BITS | sequence)


def chunk_epoch(chunk: int) -> Epoch:
    """The epoch that a chunk id was made in."""
    return Epoch(chunk >> CHUNK_SEQUENCE_BITS)


class Phase(StrEnum):
    """What a deployment, or the batches of a window, compute."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, order=True)
class LayerRef:
    """A layer by model name and absolute layer id (dense layers have ids too, and no experts)."""

    model: str
    layer_id: int

    def __str__(self) -> str:
        return f"{self.model}/{self.layer_id}"


def ids_text(ids: Sequence[int]) -> str:
    """Ids for people, runs as ranges: (0, 1, 2, 60) -> '0-2, 60'."""
    runs: list[list[int]] = []
    for value in ids:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"… ({len(ids)} in all)"])
