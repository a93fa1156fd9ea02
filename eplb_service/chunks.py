"""Splits the way from the live map to a generation into chunks that fit the staging budget, and picks each copy's source.

Layers are independent, so a chunk is some whole layers: staged together, flipped at one step. Every rank gets the same
list of copies, both ends of a copy follow one plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eplb_service.control import Copy, LayerChange
from eplb_service.ids import LayerRef, RankId
from eplb_service.placement import Placement
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Layers that flip together, and the copies that fill their slots.

    staged_bytes: bytes that each rank stages, in column order.
    """

    layers: tuple[LayerChange, ...]
    copies: tuple[Copy, ...]
    staged_bytes: tuple[int, ...]


def plan_chunks(
    live: Placement,
    target: Placement,
    *,
    topology: Topology,
    expert_bytes: Mapping[LayerRef, int],
    staging_bytes: Mapping[RankId, int],
    layers_max: int | None = None,
) -> tuple[PlannedChunk, ...]:
    """Chunks from `live` to `target`, changed layers only, in layer order. Empty when nothing changes.

    Raises InvalidInputError when the two differ in shape, when a single layer needs more staging than the smallest budget,
    and when an expert that must be copied is held by no rank that serves.
    """
    ...
