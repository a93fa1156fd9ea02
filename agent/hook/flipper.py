"""What is staged, how it becomes live, and what this rank routes by since then."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from agent.engine.port import EnginePort
from agent.hook.routing import PreparedFlip, flip
from agent.hook.startup import EngineFacts
from agent.transfer.gloo import first_line
from agent.transfer.streams import Streams
from eplb_service.control import Stage
from eplb_service.errors import EplbError
from eplb_service.failpoints import reach
from eplb_service.generation import live_digest
from eplb_service.ids import ChunkId, GenerationNumber, LayerRef


class FlipBrokenError(EplbError):
    """A chunk must flip here, as it does on all ranks, and cannot: this rank may not serve on."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    chunk_id: ChunkId
    prepared: PreparedFlip


class Flipper:
    """Holds the one prepared flip of a rank. `flip` is called on the model thread, the rest on any."""

    def __init__(self, facts: EngineFacts, port: EnginePort, streams: Streams) -> None:
        self._port, self._streams = port, streams
        self._lock = threading.Lock()
        self._prepared: PreparedFlip | None = None
        self._under_way: _UnderWay | None = None
        self.flips = 0
        self.enter(facts)

    def enter(self, facts: EngineFacts) -> None:
        """Be in a group whose ranks route by `facts.live`."""
        self._facts = facts
        self._digests = {layer: live.digest for layer, live in facts.live.items()}
        self._generations = {layer: live.generation for layer, live in facts.live.items()}
        self.routed_digest = live_digest(self._digests)

    @property
    def generations(self) -> Mapping[LayerRef, GenerationNumber]:
        """What each layer routes by from the last boundary on."""
        return dict(self._generations)

    def hold(self, prepared: PreparedFlip | None) -> None:
        """Keep what the worker staged; None = nothing (any more)."""
        with self._lock:
            self._prepared = prepared

    def flip(self, stage: Stage, boundary: int, *, tables: bool = True) -> PreparedFlip:
        """Enqueue the flip on the compute stream. Raises FlipBrokenError when it cannot be, or broke half way.

        tables: write them too; not while the group forms again, which writes those of the new one.
        """
        with self._lock:
            prepared = self._prepared
        if prepared is None:
            raise FlipBrokenError(f"chunk {stage.chunk_id:#x} must flip at boundary {boundary}, but nothing is staged for it")
        reach("hook.flip.begin")
        facts = self._facts
        try:
            flip(
                prepared,
                port=self._port,
                streams=self._streams,
                tensors=facts.tensors,
                layouts=facts.layouts,
                tables=facts.tables if tables else None,
            )
        except Exception as error:
            reason = f"the flip of chunk {stage.chunk_id:#x} broke: {type(error).__name__}: {first_line(error)}"
            raise FlipBrokenError(reason) from error
        self._digests.update({change.layer: change.new_digest for change in stage.layers})
        self._generations.update({change.layer: stage.generation for change in stage.layers})
        self.routed_digest = live_digest(self._digests)
        self.flips += 1
        with self._lock:
            self._under_way = _UnderWay(stage.chunk_id, prepared)
        reach("hook.flip.done")
        return prepared

    def finished(self) -> tuple[ChunkId, float] | None:
        """The flip that the device completed since the last call, with the seconds that the step stood still; never waits."""
        with self._lock:
            under_way = self._under_way
            if under_way is None or not under_way.prepared.copied_out.is_reached():
                return None
            self._under_way = None
        return under_way.chunk_id, under_way.prepared.stall_s
