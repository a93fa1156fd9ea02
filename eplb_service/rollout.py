"""The planner's side of a rollout: one machine for one deployment under one epoch."""

from __future__ import annotations

from eplb_service.generation import LiveMap
from eplb_service.ids import ChunkId, Epoch, GenerationNumber
from eplb_service.membership import Group
from eplb_service.rollout_events import Effect, Progress, RolloutEvent, RolloutSettings, RolloutState


class Rollout:
    """handle(event, now) -> effects, in the order they must run. See the table below and `rollout_events`."""

    def __init__(self, epoch: Epoch, settings: RolloutSettings) -> None: ...

    def handle(self, event: RolloutEvent, now: float) -> tuple[Effect, ...]: ...

    @property
    def state(self) -> RolloutState: ...

    @property
    def group(self) -> Group | None: ...

    @property
    def live(self) -> LiveMap | None:
        """Known live map; None before the first equal set of replies and while it is in doubt."""

    @property
    def open_chunk(self) -> ChunkId: ...

    @property
    def generation_floor(self) -> GenerationNumber: ...

    @property
    def next_deadline(self) -> float | None:
        """When the next Tick is due; None = no timer."""

    def progress(self) -> Progress: ...
