"""The planner's side of a rollout: one machine for one deployment under one epoch (DESIGN: rollout and commit).

    WAITING ─group ready─► HELLO ─all maps equal─► IDLE ─start─► PERSISTING ─stored─► BACKING_OFF ─► chunk (`open_chunk`)
                            ▲ └─not equal─► INCONSISTENT                              (or hold) ▲      │ flipped, or aborted
                            └───slow timer──────┘                                               └──────┘ and worth another try

`_ON_EVENT`, `_ON_MESSAGE` and `_ON_DEADLINE` at the end are the transition table; a message without an entry is dropped and
counted. What holds in every state:

- A message of another life, group or chunk changes nothing. A sign of another leader ends the machine (OUTRANKED).
- Whatever ends a rollout goes through `_finish`: the machine is free for the next one, whatever went wrong.
- Every state has a deadline, save those where nothing is waited for (WAITING, IDLE, OUTRANKED) and an engine without steps.
- `live` is what was proven: by an equal set of replies, or by the flips of all ranks. In doubt it is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from eplb_service.control import (
    Address,
    Flipped,
    Hello,
    Live,
    Pulse,
)
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.generation import AS_LOADED, LiveMap
from eplb_service.ids import CHUNK_SEQUENCE_BITS, ChunkId, Epoch, GenerationNumber, RankId, chunk_epoch, chunk_id
from eplb_service.live_replies import LiveReplies
from eplb_service.membership import Group, GroupLost, GroupReady, RankAttached, RankDetached
from eplb_service.open_chunk import ChunkAnswer, Contradiction, FlippedEverywhere, NeverFlips, OpenChunk
from eplb_service.readiness import Readiness
from eplb_service.rollout_events import (
    NO_CHUNK,
    Alarm,
    AlarmCleared,
    AlarmCode,
    Cancel,
    Effect,
    Fenced,
    LiveChanged,
    Note,
    Outcome,
    Outranked,
    Persist,
    Persisted,
    PersistFailed,
    Progress,
    Received,
    RolloutEvent,
    RolloutRecord,
    RolloutSettings,
    RolloutState,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout_run import Run, chunks_to_roll_out


class Rollout:
    """`handle(event, now)` → effects, in the order they must run. now: monotonic clock, seconds; never goes back.

    generation_floor: highest generation that the store, or an earlier machine of this process, knows.
    first_sequence: where our chunk ids begin. A store that lost its data may hand out an epoch that another planner still
    uses; drawn at random (say `1 + 65536 * randrange(65536)`), two leaders of one epoch share no chunk id, so that a vote is
    never for two contents, and the foreign ids that ranks mention give the other one away: then we are outranked by our epoch.
    """

    def __init__(
        self,
        epoch: Epoch,
        settings: RolloutSettings,
        *,
        generation_floor: GenerationNumber = AS_LOADED,
        first_sequence: int = 1,
    ) -> None:
        self.epoch = epoch
        self.settings = settings
        self._phase = RolloutState.WAITING  # while neither a chunk is open nor ranks are asked
        self._group: Group | None = None
        self._ranks: Readiness | None = None
        self._replies: LiveReplies | None = None  # while the live map is asked for
        self._live: LiveMap | None = None
        self._alarm: Alarm | None = None
        self._run: Run | None = None
        self._chunk: OpenChunk | None = None
        self._first_sequence = first_sequence
        self._next_sequence = first_sequence
        self._mesh_id: ChunkId | None = None
        self._last_opened = self._last_flipped = self._last_aborted = NO_CHUNK
        self._generation_floor = generation_floor
        self._token = 0
        self._since_s = 0.0
        self._deadline_s: float | None = None
        self._hold = ""
        self._dropped: Counter[str] = Counter()
        self._shown: Progress | None = None
        self._effects: list[Effect] = []

    # ── what the shell may look at ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> RolloutState:
        """What the machine is doing."""
        return self._phase if self._part is None else self._part.state

    @property
    def group(self) -> Group | None:
        """The ready group."""
        return self._group

    @property
    def live(self) -> LiveMap | None:
        """The live map; None before the first equal set of replies and while it is in doubt."""
        return self._live

    @property
    def open_chunk(self) -> ChunkId:
        """The chunk that ranks may act on; 0 = none."""
        return self._chunk.chunk_id if self._chunk is not None else NO_CHUNK

    @property
    def generation_floor(self) -> GenerationNumber:
        """Highest generation that the store or any rank ever saw; the next one is higher."""
        return self._generation_floor

    @property
    def alarm(self) -> Alarm | None:
        """What keeps this deployment from being rolled out to, until an equal set of live maps clears it."""
        return self._alarm

    @property
    def next_deadline(self) -> float | None:
        """When the next Tick is due; None = no timer."""
        return self._deadline_s if self._part is None else self._part.deadline_s

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that changed nothing, by reason."""
        return MappingProxyType(self._dropped)

    def progress(self) -> Progress:
        """Where the machine is."""
        run, part = self._run, self._part
        waiting_for: tuple[RankId, ...] = ()
        if part is not None:
            waiting_for = part.waiting_for
        elif self._hold and self._ranks is not None:
            waiting_for = tuple(rank for rank in self._ready_group.rank_ids if rank in self._ranks.away)
        return Progress(
            state=self.state,
            generation=run.generation.number if run else None,
            chunk_id=self.open_chunk,
            chunks_done=run.index if run else 0,
            chunks_total=len(run.chunks) if run else 0,
            attempt=run.tries if run else 0,
            waiting_for=waiting_for,
            since_s=part.since_s if part else self._since_s,
            deadline_s=self.next_deadline,
            stalled=part.stalled if part else False,
            hold="" if part else self._hold,
            last_error=(part.last_error if part else "") or (run.last_error if run else ""),
        )

    @property
    def _part(self) -> OpenChunk | LiveReplies | None:
        """What waits now, with a state and a deadline of its own."""
        return self._chunk or self._replies

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: RolloutEvent, now: float) -> tuple[Effect, ...]:
        """Take one event in. Raises nothing for what peers do: the effects say what follows."""
        self._effects = []
        if self._phase is not RolloutState.OUTRANKED:
            _ON_EVENT[type(event)](self, event, now)
        shown = self.progress()
        if shown != self._shown:
            self._shown = shown
            self._effects.append(shown)
        return tuple(self._effects)

    def _on_group_ready(self, event: GroupReady, now: float) -> None:
        self._end_group("the group was formed anew", now)
        self._group = event.group
        self._ranks = Readiness(event.group)
        self._ask_all(now)

    def _on_group_lost(self, event: GroupLost, now: float) -> None:
        if self._group is None or self._group.group_id != event.group_id:
            self._drop("loss of another group")
            return
        self._end_group(event.reason, now)
        self._enter(RolloutState.WAITING, now)

    def _end_group(self, reason: str, now: float) -> None:
        """Leave all that belongs to a group. What became of its open chunk is learned from the next one's live maps."""
        if self._chunk is not None:
            self._effects += self._chunk.withdraw(reason, now)
            reason = f"{reason}; what became of chunk {self._chunk.chunk_id:#x} is learned when all ranks reply again"
        self._chunk = None
        self._finish(Outcome.STOPPED, reason, now)
        self._group = self._ranks = self._live = self._mesh_id = self._replies = None
        self._last_opened = self._last_flipped = self._last_aborted = NO_CHUNK

    def _on_attached(self, event: RankAttached, now: float) -> None:
        """Its stream was away: what it was sent, and what it answered, may be lost. Ask it, and say again what counts now."""
        if not self._is_of_group(event.address):
            return
        ranks = self._readiness
        ranks.away -= {event.address.rank_id}
        self._effects.append(Send(Hello(to=event.address, epoch=self.epoch)))
        if self._chunk is not None:
            self._effects += self._chunk.attached(event.address, ranks.away, now)
        else:
            self._try_to_open(now)

    def _on_detached(self, event: RankDetached, _now: float) -> None:
        if self._is_of_group(event.address):
            self._readiness.away |= {event.address.rank_id}

    def _on_fenced(self, event: Fenced, now: float) -> None:
        self._outranked(event.by, now)

    def _outranked(self, by: Epoch, now: float) -> None:
        """Nothing more is sent: the new leader's Hello closes what is open."""
        self._chunk = None
        self._finish(Outcome.STOPPED, f"another planner leads this deployment with epoch {by}; ours is {self.epoch}", now)
        self._live = self._replies = None
        self._effects.append(Outranked(by))
        self._enter(RolloutState.OUTRANKED, now)

    def _on_received(self, event: Received, now: float) -> None:
        message = event.message
        if not self._is_of_group(message.sender):
            return
        _ON_MESSAGE[type(message)](self, message, now)

    def _on_answer(self, answer: ChunkAnswer, now: float) -> None:
        chunk = self._chunk
        if chunk is not None and answer.chunk_id == chunk.chunk_id:
            effects = chunk.answered(answer, self._readiness.away, now)
            if effects is None:
                self._drop(f"{type(answer).__name__} while {chunk.state}")
            else:
                self._effects += effects
                self._look_at_chunk(now)
        elif isinstance(answer, Flipped) and answer.chunk_id == self._last_aborted:
            reason = (
                f"rank {answer.sender.rank_id} flipped chunk {answer.chunk_id:#x}, which another rank closed without a flip"
            )
            self._in_doubt(Alarm(AlarmCode.FLIP_AFTER_DISARM, reason), now)
        elif self._is_foreign(answer.chunk_id):
            self._outranked(self.epoch, now)
        else:
            self._drop(f"{type(answer).__name__} of another chunk")

    def _on_tick(self, _event: Tick, now: float) -> None:
        deadline_s = self.next_deadline
        if deadline_s is None or now < deadline_s:
            return
        if self._part is not None:
            self._effects += self._part.overdue(now)
            self._look_at_chunk(now)
        else:
            _ON_DEADLINE[self._phase](self, now)

    # ── asking what is live ──────────────────────────────────────────────────────────────────────────────────────────────

    def _ask_all(self, now: float) -> None:
        self._live = self._mesh_id = None
        self._replies = LiveReplies(
            epoch=self.epoch, group=self._ready_group, settings=self.settings, last_opened=self._last_opened
        )
        self._effects += self._replies.ask_all(now)

    def _heard(self, live: Live, now: float) -> LiveMap | None:
        """What a reply is good for in every state; None when it is not to be used, or ended the machine."""
        if live.epoch_seen > self.epoch or self._is_foreign(live.closed_id) or self._is_foreign(live.flipped_id):
            self._outranked(live.epoch_seen, now)
        elif live.epoch != self.epoch:
            self._drop("Live of another epoch")
        elif live.flipped_id < self._last_flipped:
            self._drop("Live from before a flip")
        else:
            self._readiness.note(live)
            try:
                live_map = self._ready_group.live_map(live.layers)
            except InvalidInputError as error:
                self._raise_alarm(Alarm(AlarmCode.BAD_LIVE, f"rank {live.sender.rank_id}: {error}"))
                return None
            self._generation_floor = max(self._generation_floor, live.generation_seen, live_map.newest_generation)
            return live_map
        return None

    def _on_live(self, live: Live, now: float) -> None:
        live_map = self._heard(live, now)
        if live_map is None:
            return
        if self._replies is not None:
            if not self._replies.take(live, live_map, now):
                self._drop("Live with our last chunk open")
            elif self._replies.disagreement is not None:
                self._raise_alarm(self._replies.disagreement)
            elif self._replies.agreed is not None:
                self._adopt(self._replies.agreed, now)
        elif self._chunk is not None:
            rank, digests = live.sender.rank_id, live_map.row_digests
            self._effects += self._chunk.seen_live(rank, live.flipped_id, live.closed_id, digests, now)
            self._look_at_chunk(now)
        elif self._live is not None and live_map.digest != self._live.digest:
            self._finish(Outcome.STOPPED, f"rank {live.sender.rank_id} came back routing by another map", now)
            self._ask_all(now)
        else:
            self._try_to_open(now)

    def _adopt(self, live: LiveMap, now: float) -> None:
        """All ranks say the same: that is the truth, also when the store knows nothing of it."""
        self._replies, self._live = None, live
        if self._alarm is not None:
            self._effects.append(AlarmCleared(f"all ranks route by one map again (was: {self._alarm.reason})"))
            self._alarm = None
        self._effects.append(
            LiveChanged(live=live, generation_floor=self._generation_floor, reason="all ranks reply with this map")
        )
        self._enter(RolloutState.IDLE, now)

    def _raise_alarm(self, alarm: Alarm) -> None:
        if alarm != self._alarm:
            self._alarm = alarm
            self._effects.append(alarm)

    def _in_doubt(self, alarm: Alarm, now: float) -> None:
        """Ranks contradict one another: stop, close what is open, and ask until they agree."""
        self._raise_alarm(alarm)
        self._chunk = None
        self._finish(Outcome.STOPPED, alarm.reason, now)
        self._ask_all(now)

    # ── one rollout ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_start(self, event: Start, now: float) -> None:
        generation = event.generation
        run = Run(generation, (), started_s=now, not_before_s=now)
        if self.state is not RolloutState.IDLE or self._group is None or self._live is None:
            reason = f"generation {generation.number} cannot start: the rollout machine is {self.state}"
            self._effects.append(run.finished(Outcome.NOT_STARTED, reason, now))
            return
        try:
            run.chunks = chunks_to_roll_out(
                generation,
                group=self._group,
                live=self._live,
                generation_floor=self._generation_floor,
                layers_per_chunk_max=self.settings.layers_per_chunk_max,
            )
        except InvalidInputError as error:
            self._effects.append(run.finished(Outcome.NOT_STARTED, str(error), now))
            return
        self._generation_floor = max(self._generation_floor, generation.number)
        self._run = run
        if not run.chunks:
            self._finish(Outcome.ACTIVE, "every layer has its row already", now)
            return
        self._token += 1
        record = RolloutRecord(
            epoch=self.epoch,
            generation=generation.number,
            digest=generation.digest,
            num_chunks=len(run.chunks),
            num_layers=sum(len(chunk.layers) for chunk in run.chunks),
        )
        self._effects.append(Persist(self._token, record))
        self._enter(RolloutState.PERSISTING, now, self.settings.persist_timeout_s)

    def _on_persisted(self, event: Persisted, now: float) -> None:
        if self._phase is RolloutState.PERSISTING and event.token == self._token:
            self._enter(RolloutState.BACKING_OFF, now)
            self._try_to_open(now)

    def _on_persist_failed(self, event: PersistFailed, now: float) -> None:
        if self._phase is not RolloutState.PERSISTING or event.token != self._token:
            self._drop("store answer that nobody waits for")
        elif event.fenced_by is not None:
            self._outranked(event.fenced_by, now)
        else:
            self._finish(Outcome.NOT_STARTED, f"the store did not take the start of the rollout: {event.reason}", now)

    def _persist_overdue(self, now: float) -> None:
        waited_s = now - self._since_s
        self._finish(Outcome.NOT_STARTED, f"the store did not confirm the start of the rollout within {waited_s:g} s", now)

    def _on_cancel(self, event: Cancel, now: float) -> None:
        run = self._run
        if run is None:
            self._effects.append(
                Note(event="rollout.cancel_ignored", text=f"nothing is rolled out ({event.by}: {event.reason})")
            )
            return
        run.cancelled = f"{event.reason} (by {event.by})"
        if self._chunk is None:
            self._finish(Outcome.STOPPED, run.cancelled, now)
        elif event.withdraw:
            self._effects += self._chunk.withdraw(run.cancelled, now)

    def _finish(self, outcome: Outcome, reason: str, now: float) -> None:
        """The one way out of a rollout. IDLE after it, unless the caller enters another state."""
        run, self._run = self._run, None
        if run is not None:
            self._effects.append(run.finished(outcome, reason, now))
            self._enter(RolloutState.IDLE, now)

    # ── one chunk after another ──────────────────────────────────────────────────────────────────────────────────────────

    def _try_to_open(self, now: float) -> None:
        """Open the next chunk, once the back-off is over and nothing speaks against it."""
        run = self._run
        if run is None or self._phase is not RolloutState.BACKING_OFF or now < run.not_before_s:
            return
        obstacle = self._readiness.obstacle()
        if obstacle is None:
            self._open(run, now)
        elif obstacle.fatal:
            self._finish(Outcome.STOPPED, obstacle.reason, now)
        elif self._hold != obstacle.reason:
            self._hold = obstacle.reason
            self._deadline_s = now + self.settings.hold_timeout_s if obstacle.is_timed else None

    def _back_off_over(self, now: float) -> None:
        held = self._hold
        self._try_to_open(now)
        if self._chunk is None and held and self._hold == held:
            self._finish(Outcome.STOPPED, f"waited {self.settings.hold_timeout_s:g} s: {held}", now)

    def _open(self, run: Run, now: float) -> None:
        self._last_opened = chunk_id(self.epoch, self._next_sequence)
        self._next_sequence += 1
        self._mesh_id = self._mesh_id or self._last_opened
        run.tries += 1
        self._hold = ""
        self._chunk = OpenChunk(
            epoch=self.epoch,
            chunk_id=self._last_opened,
            mesh_id=self._mesh_id,
            generation=run.generation.number,
            weights_version=self._readiness.weights_version,
            plan=run.chunks[run.index],
            group=self._ready_group,
            settings=self.settings,
        )
        self._effects += self._chunk.open(now)

    def _look_at_chunk(self, now: float) -> None:
        """Act on what became of the open chunk, if that is proven now."""
        chunk, run = self._chunk, self._run
        if chunk is None or chunk.outcome is None:
            return
        if run is None:
            raise BrokenInvariantError(f"chunk {chunk.chunk_id:#x} is open outside a rollout")
        self._chunk = None
        match chunk.outcome:
            case Contradiction(alarm):
                self._in_doubt(alarm, now)
            case FlippedEverywhere(boundary):
                self._flipped(run, chunk, boundary, now)
            case NeverFlips() as outcome:
                self._aborted(run, chunk, outcome, now)

    def _flipped(self, run: Run, chunk: OpenChunk, boundary: int | None, now: float) -> None:
        if self._live is None:
            raise BrokenInvariantError(f"chunk {chunk.chunk_id:#x} flipped without a live map")
        self._last_flipped = chunk.chunk_id
        self._live = self._live.with_rows(chunk.rows, chunk.generation)
        run.flipped(boundary, now)
        reason = f"chunk {run.index} of {len(run.chunks)} of generation {chunk.generation} flipped"
        self._effects.append(
            LiveChanged(live=self._live, generation_floor=self._generation_floor, reason=reason, boundary=boundary)
        )
        self._effects.append(Note(event="chunk.flipped", text=f"{reason} at boundary {boundary}", chunk_id=chunk.chunk_id))
        if run.is_done:
            self._finish(Outcome.ACTIVE, f"all {len(run.chunks)} chunks flipped", now)
        elif run.cancelled:
            self._finish(Outcome.STOPPED, run.cancelled, now)
        else:
            self._enter(RolloutState.BACKING_OFF, now)
            self._try_to_open(now)

    def _aborted(self, run: Run, chunk: OpenChunk, outcome: NeverFlips, now: float) -> None:
        """It never flips in this group. Bytes of it may still be under way: the next try connects anew."""
        self._mesh_id = None
        self._last_aborted = chunk.chunk_id
        self._effects.append(Note(event="chunk.aborted", text=outcome.reason, chunk_id=chunk.chunk_id))
        stop = run.aborted(outcome, self.settings, now, idle=self._readiness.is_idle)
        if not stop:
            self._enter(RolloutState.BACKING_OFF, now, run.not_before_s - now)
            return
        self._finish(Outcome.STOPPED, stop, now)
        if outcome.ask_again:
            self._ask_all(now)

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_pulse(self, message: Pulse, now: float) -> None:
        rank = message.sender.rank_id
        self._readiness.note(message)
        if self._chunk is None:
            self._try_to_open(now)
        elif not message.voting:
            self._effects += self._chunk.withdraw(f"rank {rank} takes no part in votes: {message.off_reason}", now, fatal=True)

    @property
    def _readiness(self) -> Readiness:
        if self._ranks is None:
            raise BrokenInvariantError(f"no group while {self.state}")
        return self._ranks

    def _is_foreign(self, chunk: ChunkId) -> bool:
        """A chunk of our epoch that we never opened: another planner believes that this epoch is its own."""
        sequence = chunk & (1 << CHUNK_SEQUENCE_BITS) - 1
        return chunk_epoch(chunk) == self.epoch and not self._first_sequence <= sequence < self._next_sequence

    @property
    def _ready_group(self) -> Group:
        if self._group is None:
            raise BrokenInvariantError(f"no group while {self.state}")
        return self._group

    def _is_of_group(self, address: Address) -> bool:
        if self._group is not None and self._group.addresses.get(address.rank_id) == address:
            return True
        self._drop("of another group or life")
        return False

    def _enter(self, phase: RolloutState, now: float, timeout_s: float | None = None) -> None:
        self._phase = phase
        self._since_s = now
        self._deadline_s = None if timeout_s is None else now + timeout_s
        self._hold = ""

    def _drop(self, why: str) -> None:
        self._dropped[why] += 1


# ── the transition table ──────────────────────────────────────────────────────────────

_ON_EVENT: Mapping[type, Callable[[Rollout, Any, float], None]] = {
    GroupReady: Rollout._on_group_ready,
    GroupLost: Rollout._on_group_lost,
    RankAttached: Rollout._on_attached,
    RankDetached: Rollout._on_detached,
    Received: Rollout._on_received,
    Start: Rollout._on_start,
    Cancel: Rollout._on_cancel,
    Persisted: Rollout._on_persisted,
    PersistFailed: Rollout._on_persist_failed,
    Fenced: Rollout._on_fenced,
    Tick: Rollout._on_tick,
}

_ON_MESSAGE: Mapping[type, Callable[[Rollout, Any, float], None]] = {
    Live: Rollout._on_live,
    Pulse: Rollout._on_pulse,
    **dict.fromkeys(get_args(ChunkAnswer), Rollout._on_answer),
}
"""From ranks of the group. Answers to a chunk go on to the open chunk, which has a table of its own."""

_ON_DEADLINE: Mapping[RolloutState, Callable[[Rollout, float], None]] = {
    RolloutState.PERSISTING: Rollout._persist_overdue,
    RolloutState.BACKING_OFF: Rollout._back_off_over,
}
"""While neither a chunk is open nor ranks are asked: those have deadlines of their own."""
