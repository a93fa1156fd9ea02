"""One rollout: a generation's chunks, one after another, and what follows from how each ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb_service.chunks import PlannedChunk, plan_chunks
from eplb_service.errors import InvalidInputError
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import GenerationNumber
from eplb_service.membership import Group
from eplb_service.open_chunk import NeverFlips
from eplb_service.rollout_events import Finished, Outcome, RolloutSettings


@dataclass(slots=True)
class Run:
    """The rollout under way. index: chunks that flipped. tries: of the next one. cancelled: why to stop, empty = go on."""

    generation: Generation
    chunks: tuple[PlannedChunk, ...]
    started_s: float
    not_before_s: float
    index: int = 0
    tries: int = 0
    flip_boundaries: list[int] = field(default_factory=list)
    last_error: str = ""
    cancelled: str = ""

    @property
    def is_done(self) -> bool:
        """Every chunk flipped."""
        return self.index == len(self.chunks)

    def flipped(self, boundary: int | None, now: float) -> None:
        """The open chunk flipped everywhere."""
        self.index += 1
        self.tries = 0
        self.not_before_s = now
        if boundary is not None:
            self.flip_boundaries.append(boundary)

    def aborted(self, outcome: NeverFlips, settings: RolloutSettings, now: float, *, idle: bool) -> str:
        """The open chunk never flips: why to stop, or empty to try again at `not_before_s`."""
        self.last_error = outcome.reason
        if outcome.unvoted and idle:
            self.tries -= 1  # no steps, no votes: nobody's fault
        if self.cancelled:
            return self.cancelled
        if outcome.fatal or outcome.ask_again:
            return outcome.reason
        if self.tries >= settings.tries_max:
            return f"gave up chunk {self.index + 1} after {self.tries} tries: {outcome.reason}"
        self.not_before_s = now + settings.backoff_after(self.tries)
        return ""

    def finished(self, outcome: Outcome, reason: str, now: float) -> Finished:
        """The answer to `Start`."""
        return Finished(
            generation=self.generation.number,
            outcome=outcome,
            reason=reason,
            flip_boundaries=tuple(self.flip_boundaries),
            seconds=now - self.started_s,
        )


def chunks_to_roll_out(
    generation: Generation,
    *,
    group: Group,
    live: LiveMap,
    generation_floor: GenerationNumber,
    layers_per_chunk_max: int | None,
) -> tuple[PlannedChunk, ...]:
    """Chunks from the live map to a generation: only the layers that differ, so an unfinished one is continued.

    generation_floor: highest generation that any rank ever saw. Raises InvalidInputError with the reason why it cannot start.
    """
    name = f"generation {generation.number}"
    if group.observe_only:
        raise InvalidInputError(f"{name} cannot start: {group.observe_only} (observe only)")
    if generation.number < generation_floor:
        raise InvalidInputError(f"{name} cannot start: ranks have seen generation {generation_floor}; numbers never go back")
    for table in generation.placement.tables:
        uncovered = table.uncovered()
        if uncovered:
            layer, expert = uncovered[0]
            raise InvalidInputError(f"{name} cannot start: it leaves expert {expert} of layer {layer} on no rank")
        most = int(table.replica_counts.max())
        if most > group.replica_table_width:
            raise InvalidInputError(
                f"{name} cannot start: an expert of model {table.model!r} has {most} replicas, the engine's tables hold"
                f" {group.replica_table_width}"
            )
    return plan_chunks(
        live.placement,
        generation.placement,
        topology=group.topology,
        expert_bytes=group.expert_bytes,
        staging_bytes=group.staging_bytes,
        layers_max=layers_per_chunk_max,
    )
