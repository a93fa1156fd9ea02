"""The rollout of one generation: stored first, then one chunk after another, until all flipped or there is a reason to stop.

    PERSISTING ──stored──► BACKING_OFF ──back-off over, no obstacle──► chunk (`open_chunk`)
                            (or hold) ▲                                  │ flipped: next; aborted: again, with new ids
                                      └──────────────────────────────────┘

Whatever ends it goes through `_finish`. A run that ended leaves nothing open, save where its group or epoch ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.control import Address, Live, Pulse
from eplb_service.flip_stall import ChunkFlip, FlipStall, StallModel
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import ChunkId, GenerationNumber, RankId
from eplb_service.membership.group import Group
from eplb_service.rollout.chunk_ids import ChunkIds
from eplb_service.rollout.chunks import PlannedChunk
from eplb_service.rollout.events import (
    NO_CHUNK,
    Alarm,
    Cancel,
    Effect,
    Finished,
    LiveChanged,
    Note,
    Outcome,
    Persist,
    RolloutRecord,
    RolloutSettings,
    RolloutState,
)
from eplb_service.rollout.open_chunk import ChunkAnswer, Contradiction, FlippedEverywhere, NeverFlips, OpenChunk
from eplb_service.rollout.readiness import Readiness
from eplb_service.transitions import Trail


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How it ended. alarm: ranks contradicted one another. ask_again: ranks do not route by what we believed."""

    finished: Finished
    alarm: Alarm | None = None
    ask_again: bool = False


class Run:
    """One generation under way. Every method returns effects to run in order; then look at `live` and `ended`."""

    def __init__(
        self,
        generation: Generation,
        chunks: tuple[PlannedChunk, ...],
        *,
        live: LiveMap,
        group: Group,
        ranks: Readiness,
        ids: ChunkIds,
        settings: RolloutSettings,
        stalls: StallModel,
        generation_floor: GenerationNumber,
        token: int,
        trail: Trail[RolloutState],
        now: float,
    ) -> None:
        trail.enter(RolloutState.PERSISTING)
        self._trail = trail
        self.generation = generation
        self.chunks = chunks
        self.live = live
        self.ended: RunEnd | None = None
        self.index = 0
        self.tries = 0
        self.hold = ""
        self._phase = RolloutState.PERSISTING  # while no chunk is open
        self._since_s = self._started_s = self._not_before_s = now
        self._deadline_s: float | None = now + settings.persist_timeout_s
        self._last_error = ""
        self._cancelled = ""
        self._flip_boundaries: list[int] = []
        self._chunk: OpenChunk | None = None
        self._group, self._ranks, self._ids, self._settings = group, ranks, ids, settings
        self._stalls = stalls
        self._stall = FlipStall(
            expected_s=max(stalls.seconds(max(chunk.staged_bytes)) for chunk in chunks),
            limit_s=settings.commit_stall_s_max,
        )
        self._generation_floor = generation_floor
        self._token = token
        self._effects: list[Effect] = []

    # ── what others may look at ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> RolloutState:
        """PERSISTING, BACKING_OFF, or that of the open chunk."""
        return self._phase if self._chunk is None else self._chunk.state

    @property
    def open_id(self) -> ChunkId:
        """The chunk that ranks may act on; 0 = none."""
        return self._chunk.chunk_id if self._chunk is not None else NO_CHUNK

    @property
    def since_s(self) -> float:
        """When it came into this state."""
        return self._since_s if self._chunk is None else self._chunk.since_s

    @property
    def deadline_s(self) -> float | None:
        """When `overdue` is due; None while the engine runs no steps."""
        return self._deadline_s if self._chunk is None else self._chunk.deadline_s

    @property
    def stalled(self) -> bool:
        """The deadline of this state passed and it goes on waiting."""
        return self._chunk is not None and self._chunk.stalled

    @property
    def last_error(self) -> str:
        """Last refusal, abort or missed deadline."""
        return (self._chunk.last_error if self._chunk is not None else "") or self._last_error

    @property
    def waiting_for(self) -> tuple[RankId, ...]:
        """Ranks whose answer, or whose return, is awaited."""
        if self._chunk is not None:
            return self._chunk.waiting_for
        return tuple(rank for rank in self._group.rank_ids if self.hold and rank in self._ranks.away)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> list[Effect]:
        """Store that it starts. Nothing is sent before `persisted`."""
        record = RolloutRecord(
            epoch=self._ids.epoch,
            generation=self.generation.number,
            digest=self.generation.digest,
            num_chunks=len(self.chunks),
            num_layers=sum(len(chunk.layers) for chunk in self.chunks),
            stall=self._stall,
        )
        return [Persist(self._token, record)]

    def persisted(self, token: int, now: float) -> list[Effect]:
        """The store has it: begin to send. Nothing for an answer that is not waited for."""
        self._effects = []
        if self._phase is RolloutState.PERSISTING and token == self._token:
            num_layers = sum(len(chunk.layers) for chunk in self.chunks)
            self._note(
                "rollout.started",
                f"{num_layers} layers in {len(self.chunks)} chunks; stored after {now - self._since_s:.3f} s; steps stand still"
                f" for a flip: {self._stall}",
            )
            self._back_off(now, 0.0)
            self._try_to_open(now)
        return self._effects

    def persist_failed(self, token: int, reason: str, now: float) -> list[Effect]:
        """The store did not take it: nothing was sent."""
        self._effects = []
        if self._phase is RolloutState.PERSISTING and token == self._token:
            self._finish(Outcome.NOT_STARTED, f"the store did not take the start of the rollout: {reason}", now)
        return self._effects

    def answered(self, answer: ChunkAnswer, now: float) -> list[Effect] | None:
        """Take a rank's answer to the open chunk in; None where it says nothing new."""
        if self._chunk is None or answer.chunk_id != self._chunk.chunk_id:
            return None
        effects = self._chunk.answered(answer, self._ranks.away, now)
        return None if effects is None else self._after_chunk(effects, now)

    def seen_live(self, live: Live, live_map: LiveMap, now: float) -> list[Effect]:
        """A rank told what is live there: it settles the open chunk, or must be what we know."""
        rank = live.sender.rank_id
        if self._chunk is not None:
            told = self._chunk.seen_live(rank, live.flipped_id, live.closed_id, live_map.row_digests, now)
            return self._after_chunk(told, now)
        self._effects = []
        if live_map.digest != self.live.digest:
            self._finish(Outcome.STOPPED, f"rank {rank} came back routing by another map", now, ask_again=True)
        else:
            self._try_to_open(now)
        return self._effects

    def attached(self, address: Address, now: float) -> list[Effect]:
        """A rank's stream is back."""
        if self._chunk is not None:
            return self._after_chunk(self._chunk.attached(address, self._ranks.away, now), now)
        self._effects = []
        self._try_to_open(now)
        return self._effects

    def pulsed(self, pulse: Pulse, now: float) -> list[Effect]:
        """A rank said how it is."""
        self._effects = []
        if self._chunk is None:
            self._try_to_open(now)
        elif not pulse.voting:
            reason = f"rank {pulse.sender.rank_id} takes no part in votes: {pulse.off_reason}"
            self._effects += self._chunk.withdraw(reason, now, fatal=True)
        return self._effects

    def cancel(self, event: Cancel, now: float) -> list[Effect]:
        """Stop after the open chunk, or withdraw it too."""
        self._effects = []
        self._cancelled = f"{event.reason} (by {event.by})"
        self._note("rollout.cancelled", f"{self._cancelled}: {'withdrawn' if event.withdraw else 'after the open chunk'}")
        if self._chunk is None:
            self._finish(Outcome.STOPPED, self._cancelled, now)
        elif event.withdraw:
            self._effects += self._chunk.withdraw(self._cancelled, now)
        return self._effects

    def overdue(self, now: float) -> list[Effect]:
        """The deadline of the state passed."""
        if self._chunk is not None:
            return self._after_chunk(self._chunk.overdue(now), now)
        self._effects = []
        if self._phase is RolloutState.PERSISTING:
            waited_s = now - self._since_s
            reason = f"the store did not confirm the start of the rollout within {waited_s:g} s"
            self._finish(Outcome.NOT_STARTED, reason, now)
            return self._effects
        held = self.hold
        self._try_to_open(now)
        if self.ended is None and held and self.hold == held:
            self._finish(Outcome.STOPPED, f"waited {self._settings.hold_timeout_s:g} s: {held}", now)
        return self._effects

    def group_ended(self, reason: str, now: float) -> list[Effect]:
        """The group is no more: withdraw what is open. What became of it the ranks tell when they are asked again."""
        self._effects = []
        if self._chunk is not None:
            self._effects += self._chunk.withdraw(reason, now)
            reason = f"{reason}; what became of chunk {self.open_id:#x} is learned when all ranks reply again"
        self._finish(Outcome.STOPPED, reason, now)
        return self._effects

    def abandon(self, reason: str, now: float, alarm: Alarm | None = None) -> list[Effect]:
        """Stop without a word to the ranks: another planner leads, or they contradict one another and are asked."""
        self._effects = []
        self._finish(Outcome.STOPPED, reason, now, alarm=alarm)
        return self._effects

    # ── one chunk after another ──────────────────────────────────────────────────────────────────────────────────────────

    def _try_to_open(self, now: float) -> None:
        """Open the next chunk, once the back-off is over and nothing speaks against it."""
        if self._phase is not RolloutState.BACKING_OFF or now < self._not_before_s:
            return
        obstacle = self._ranks.obstacle()
        if obstacle is None:
            self._open(now)
        elif obstacle.fatal:
            self._finish(Outcome.STOPPED, obstacle.reason, now)
        elif self.hold != obstacle.reason:
            self.hold = obstacle.reason
            self._note("rollout.held", f"chunk {self.index + 1} of {len(self.chunks)} waits: {obstacle.reason}")
            self._deadline_s = now + self._settings.hold_timeout_s if obstacle.is_timed else None

    def _open(self, now: float) -> None:
        self.tries += 1
        self.hold = ""
        chunk, plan = self._ids.open_next(), self.chunks[self.index]
        self._chunk = OpenChunk(
            epoch=self._ids.epoch,
            chunk_id=chunk,
            mesh_id=self._ids.mesh_id,
            generation=self.generation.number,
            weights_version=self._ranks.weights_version,
            plan=plan,
            group=self._group,
            settings=self._settings,
            trail=self._trail,
        )
        self._effects += self._chunk.open(now)
        tries = f", try {self.tries} of {self._settings.tries_max}" if self.tries > 1 else ""
        self._note(
            "chunk.opened",
            f"chunk {self.index + 1} of {len(self.chunks)}{tries}: {_layers_text(plan)}, {len(plan.copies)} copies",
        )

    def _after_chunk(self, effects: list[Effect], now: float) -> list[Effect]:
        """Act on what became of the open chunk, if that is proven now."""
        self._effects = list(effects)
        chunk = self._chunk
        if chunk is None:
            raise self._trail.broken(f"effects of a chunk while none is open, in state {self.state}")
        match chunk.outcome:
            case Contradiction(alarm):
                self._finish(Outcome.STOPPED, alarm.reason, now, alarm=alarm)
            case FlippedEverywhere(boundary):
                self._chunk = None
                self._flipped(chunk, boundary, now)
            case NeverFlips() as outcome:
                self._chunk = None
                self._aborted(chunk, outcome, now)
        return self._effects

    def _flipped(self, chunk: OpenChunk, boundary: int | None, now: float) -> None:
        self._ids.flipped(chunk.chunk_id)
        self.live = self.live.with_rows(chunk.rows, chunk.generation, chunk.shares)
        self.index += 1
        self.tries = 0
        if boundary is not None:
            self._flip_boundaries.append(boundary)
        reason = f"chunk {self.index} of {len(self.chunks)} of generation {chunk.generation} flipped"
        flip = self._measured(chunk)
        self._effects.append(
            LiveChanged(live=self.live, generation_floor=self._generation_floor, reason=reason, boundary=boundary, flip=flip)
        )
        where = f" at boundary {boundary}" if boundary is not None else ""
        stall = f" in {flip.measured_s * 1e3:.3g} ms, {flip.expected_s * 1e3:.3g} ms expected" if flip is not None else ""
        self._effects.append(Note(event="chunk.flipped", text=f"{reason}{where}{stall}", chunk_id=chunk.chunk_id))
        if self.index == len(self.chunks):
            self._finish(Outcome.ACTIVE, f"all {len(self.chunks)} chunks flipped", now)
        elif self._cancelled:
            self._finish(Outcome.STOPPED, self._cancelled, now)
        else:
            self._back_off(now, 0.0)
            self._try_to_open(now)

    def _measured(self, chunk: OpenChunk) -> ChunkFlip | None:
        """How long a chunk's flip held up steps, beside what was expected; None where no rank told."""
        if chunk.stall_s is None:
            return None
        staged_bytes = max(chunk.plan.staged_bytes)
        flip = ChunkFlip(
            chunk_id=chunk.chunk_id,
            staged_bytes=staged_bytes,
            expected_s=self._stalls.seconds(staged_bytes),
            measured_s=chunk.stall_s,
        )
        self._stall = replace(self._stall, measured_s=max(flip.measured_s, self._stall.measured_s or 0.0))
        return flip

    def _aborted(self, chunk: OpenChunk, outcome: NeverFlips, now: float) -> None:
        self._ids.aborted(chunk.chunk_id)
        self._last_error = outcome.reason
        self._effects.append(Note(event="chunk.aborted", text=outcome.reason, chunk_id=chunk.chunk_id))
        if outcome.unvoted and self._ranks.is_idle:
            self.tries -= 1  # no steps, no votes: nobody's fault
        if self._cancelled:
            self._finish(Outcome.STOPPED, self._cancelled, now)
        elif outcome.fatal or outcome.ask_again:
            self._finish(Outcome.STOPPED, outcome.reason, now, ask_again=outcome.ask_again, refused=outcome.fatal)
        elif self.tries >= self._settings.tries_max:
            reason = f"gave up chunk {self.index + 1} after {self.tries} tries: {outcome.reason}"
            self._finish(Outcome.STOPPED, reason, now, refused=True)
        else:
            self._back_off(now, self._settings.backoff_after(self.tries))

    def _note(self, event: str, text: str) -> None:
        self._effects.append(Note(event=event, text=text, chunk_id=self.open_id))

    def _back_off(self, now: float, wait_s: float) -> None:
        self._trail.enter(RolloutState.BACKING_OFF)
        self._phase = RolloutState.BACKING_OFF
        self._since_s = now
        self._not_before_s = self._deadline_s = now + wait_s
        self.hold = ""

    def _finish(
        self,
        outcome: Outcome,
        reason: str,
        now: float,
        *,
        alarm: Alarm | None = None,
        ask_again: bool = False,
        refused: bool = False,
    ) -> None:
        """The one way out."""
        finished = Finished(
            generation=self.generation.number,
            outcome=outcome,
            reason=reason,
            flip_boundaries=tuple(self._flip_boundaries),
            seconds=now - self._started_s,
            stall=self._stall,
            refused=refused,
        )
        self.ended = RunEnd(finished, alarm=alarm, ask_again=ask_again)
        self._effects.append(finished)


def _layers_text(plan: PlannedChunk) -> str:
    """The layers of a chunk in few words."""
    names = [str(change.layer) for change in plan.layers]
    return f"layer {names[0]}" if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
