"""Memory that carrying experts takes on a rank, beside the slots: of the device, and pinned on the host again as much.

Known before anything starts, so that nobody has to find out by running out of it (vllm#24537, vllm#57894).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SEND_DEPTH = 2
"""Experts that a rank has under way to others at the same time."""


@dataclass(frozen=True, slots=True)
class StagingMemory:
    """Bytes of one rank. least: the smallest staging budget that can carry any plan; sending: what experts leave through."""

    least: int
    sending: int

    @classmethod
    def of(cls, layers: Iterable[tuple[int, int]]) -> StagingMemory:
        """layers: slots per rank and bytes of one expert, of each layer. A chunk holds whole layers, so one must fit.

        >>> StagingMemory.of([(9, 100), (4, 300)])
        StagingMemory(least=1200, sending=600)
        """
        known = tuple(layers)
        return cls(
            least=max((slots * size for slots, size in known), default=0),
            sending=SEND_DEPTH * max((size for _, size in known), default=0),
        )
