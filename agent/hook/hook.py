"""The hook: what an engine holds, and the only thing that it calls."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

import torch

from agent.engine.port import EnginePort, ReportsPressure
from agent.frames import RegistrationAnswer
from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from agent.hook.config import HookConfig, HookStatus
from agent.hook.entry import Entry, come_in
from agent.hook.flipper import FlipBrokenError, Flipper
from agent.hook.forming import Forming, Place
from agent.hook.link import Link
from agent.hook.observer import Observer
from agent.hook.off_reasons import CLOSE, FAILURE, FORM, START, SWITCH, VOTE, OffReasons
from agent.hook.outbox import Outbox
from agent.hook.regroup import Agreement, ledger_after, uncovered
from agent.hook.routing import FLIP_TIMEOUT_S, PreparedFlip
from agent.hook.stager import Stager, Weights
from agent.hook.standstill import Standstill
from agent.hook.startup import EngineFacts, Meeting, in_next_group, inspect, meet
from agent.hook.statements import registration_of
from agent.hook.vote import Voter
from agent.transfer.backup import ExpertSource
from agent.transfer.gloo import GlooGroup, Store, first_line
from agent.transfer.pace import Pressure
from agent.transfer.streams import streams_for
from eplb_service import __version__
from eplb_service.control import (
    Arm,
    Pulse,
    Registration,
    ToRank,
)
from eplb_service.errors import (
    BrokenInvariantError,
    ConflictError,
    DeadlineError,
    EnvironmentFault,
    EplbError,
)
from eplb_service.failpoints import reach
from eplb_service.ids import ChunkId, GroupId, LayerRef, RankId

__all__ = ["Hook", "HookConfig", "HookStatus"]

TICK_S = 0.2
FLIP_POLL_S = 0.001

logger = logging.getLogger(__name__)


class Hook:
    """One rank's part of the loop, inside the engine process.

    The engine calls `begin_step` before every forward pass (real or dummy, on every rank) and `record` for every MoE layer
    with the ids that its router chose, both from its model thread. Threads of the hook's own: the link to the agent process,
    the vote waiter, the staging worker. All of them meet the chunk machine under one lock, which is never held while waiting.

    sources: where experts can be had that no rank gives (`agent.transfer.backup`), by preference.
    """

    def __init__(self, port: EnginePort, config: HookConfig, *, sources: Sequence[ExpertSource] = ()) -> None:
        self._port, self._config, self._sources = port, config, tuple(sources)
        self._lock = threading.RLock()
        self._boundary = -1
        self._cast_at = -1
        self._last_boundary_s = time.monotonic()
        self._off = OffReasons(config)
        self._standstill = Standstill(port)
        self._is_member = False
        self._formings = 0
        self._forming: Forming | None = None
        self._voting_in: GroupId | None = None
        self._unreachable = 0
        self._weights_version = port.weights_version()
        self._was_idle = False
        self._pulse_due_s = 0.0
        self._outbox = Outbox(config.ring_windows)
        self._facts: EngineFacts = inspect(port, config)
        facts = self._facts
        self._streams = streams_for(facts.device, port.compute_stream())
        self._flipper = Flipper(facts, port, self._streams)
        self._observer = Observer(facts, config, self._streams, self._outbox)
        self._machine = ChunkMachine(
            facts.description.address,
            facts.shape,
            facts.live,
            weights_version=self._weights_version,
            off_reason=self._off.first,
        )
        self._put_off: ev.Flip | None = None
        self._link_is_bound = False
        self._meeting: Meeting | None = None
        self._voter: Voter | None = None
        self._stager: Stager | None = None
        self._pressure = Pressure(port.under_pressure if isinstance(port, ReportsPressure) else None)
        self._link = Link(
            config.socket_path,
            self,
            self._outbox,
            release=__version__,
            tick_s=min(TICK_S, config.pulse_period_s),
            reconnect_max_s=config.reconnect_max_s,
        )

    # ── what the engine calls ────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Find the other ranks, allocate staging, start the threads. What fails here leaves the hook observe-only.

        A rank that joins takes the map of the others and writes its tables. Where that fails it must not serve: raises
        EnvironmentFault, and may be started again for another group.
        """
        self._check_switch()
        if self._port.describe().joins:
            self._join()
            return
        self._meeting = meeting = meet(self._facts, self._config)  # kept: other ranks may still be on their way to our store
        problem = meeting.problem
        if not problem:
            try:
                self._stager = self._make_stager(self._facts, meeting.store)
                self._stager.start(self._weights_version, {layer: live.row for layer, live in self._facts.live.items()})
            except (EnvironmentFault, ConflictError) as error:
                self._stager, problem = None, str(error)
        self._start_voting(meeting.votes)
        self._is_member = True
        self._set_off(START, problem)
        if problem:
            logger.warning("hook.observing: nothing is moved on this rank: %s", problem)
        self._link.start()

    def reform(self) -> None:
        """The engine formed its group again: ranks were lost or joined. On the model thread, between two steps, on all ranks.

        `port.describe` and `port.routing_tables` are of the new group. Returns with the tables written that all its ranks route
        by; steps go on at a boundary that they agree on. Experts that no rank holds any more have no slot in them
        (`HookStatus.unreachable`).

        Raises EnvironmentFault when this rank must not serve on: no map is right for all ranks, or one did not come in time,
        which is named. Then no step runs here, and the engine may form yet another group, of any ranks that are left.
        Raises ConflictError when the hook was not started, or the port describes the group that was or another engine.
        """
        if not self._is_member:
            raise ConflictError("a hook forms again after it was in a group: call start() first, also on a rank that joins")
        if self._standstill.broken:
            raise EnvironmentFault(self._standstill.broken)
        facts = in_next_group(self._facts, self._port, self._config)
        self._set_off(FORM, "the vote group forms again")
        try:
            self._leave_group()
            self._form_group(facts)
        except Exception as error:
            raise self._not_formed(facts, error) from error
        self._link.register_anew()

    def begin_step(self, *, num_real_tokens: int, warmup: bool = False) -> None:
        """A step boundary: votes, flips and windows happen here. num_real_tokens: without padding and dummies.

        Raises EnvironmentFault when this rank must not run another step: as OutcomeUnknownError when the outcome of a commit is
        unknown in an engine that forms its group again (`FormsAgain`). Nothing else.
        """
        self._standstill.check()
        self._boundary += 1
        self._last_boundary_s = time.monotonic()
        capturing = False
        try:
            capturing = self._port.is_capturing()
            self._commit(capturing=capturing)
        except Exception as error:  # noqa: BLE001  # logged there; a step must not fail with the hook
            self._on_failure(error)
        self._standstill.check()
        self._observer.boundary(
            self._boundary,
            num_real_tokens=num_real_tokens,
            warmup=warmup,
            capturing=capturing,
            live_digest=self._flipper.routed_digest,
            switched_off=self._off.switched_off,
        )
        if self._outbox.take_news():
            self._link.wake()

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        """Count what the router chose. experts: logical ids of real tokens, shape (n, k), any integer type.

        Raises InvalidInputError for a layer that the engine did not register (sglang#25948: counts without a layer).
        """
        self._observer.record(layer, experts)

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Nothing recorded inside the block counts, however it ends."""
        return self._observer.warming_up()

    def close(self) -> None:
        """Cast 0, resolve what is cast, end the threads; every wait has a deadline."""
        timeout_s = self._config.close_timeout_s
        self._set_off(CLOSE, "the engine is closing")
        if self._voter is not None:
            self._voter.leave(timeout_s)
        if self._stager is not None:
            self._stager.close(timeout_s)
        self._link.close(timeout_s)

    @property
    def status(self) -> HookStatus:
        """What this hook is doing."""
        with self._lock:
            machine = self._machine
            return HookStatus(
                voting=not machine.off_reason,
                off_reason=machine.off_reason,
                boundary=self._boundary + 1,
                connected=self._link.is_connected,
                open_id=machine.open_id,
                flipped_id=machine.ledger.flipped_id,
                generations=self._flipper.generations,
                windows_sent=self._outbox.windows_sent,
                windows_dropped=self._outbox.windows_dropped,
                flips=self._flipper.flips,
                refusals=dict(machine.refusals),
                stray_ids=self._observer.stray_ids,
                reads_from=self._stager.reads_from if self._stager is not None else (),
                staging_bytes=self._stager.num_bytes if self._stager is not None else 0,
                pauses=self._pressure.pauses,
                paused_s=self._pressure.paused_s,
                unreachable=self._unreachable,
            )

    # ── a step boundary ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(self, *, capturing: bool) -> None:
        """See the last vote through, flip if it passed, cast the next: in this order, at the same boundary on all ranks."""
        boundary = self._boundary
        if not capturing:  # a query of an event would end the capture
            self._flip_put_off()
            self._poll_flip()
        self._look_at_weights(capturing=capturing)
        self._dispatch(ev.Boundary(boundary, self._weights_version))
        if self._voter is None or boundary % self._config.vote_period:
            return
        self._voter.collect()
        self._dispatch(ev.FlipDue(boundary), capturing=capturing)
        if self._standstill.holds or self._voter.is_off:
            return
        self._dispatch(ev.VoteDue(boundary))

    def _look_at_weights(self, *, capturing: bool) -> None:
        """A new version of the weights was written on the compute stream."""
        version = self._port.weights_version()
        if version != self._weights_version and self._stager is not None and not capturing:
            self._note_weights(self._stager)
        self._weights_version = version

    def _on_failure(self, error: Exception) -> None:
        """Something broke in here. The other ranks must still get this rank's vote, and it is 0."""
        logger.error("hook.failed at boundary %d", self._boundary, exc_info=error)
        reason = f"the hook failed at boundary {self._boundary}: {type(error).__name__}: {first_line(error)}"
        with self._lock:
            state = self._machine.state
        undecided = state in (ev.ChunkState.VOTING, ev.ChunkState.COMMITTED, ev.ChunkState.FLIPPING)
        if undecided and self._cast_at != self._boundary:
            self._standstill.stop(
                f"{reason}; the chunk under way cannot be flipped here as it may be elsewhere",
                for_good=state is ev.ChunkState.FLIPPING,
            )
        else:
            self._set_off(FAILURE, reason)
        if self._voter is not None and self._boundary % self._config.vote_period == 0 and self._cast_at != self._boundary:
            self._cast_at = self._boundary
            self._voter.cast(self._boundary, ev.NO_CHUNK)

    # ── events in, effects out ───────────────────────────────────────────────────────────────────────────────────────────

    def _dispatch(self, event: ev.Event, *, capturing: bool = False, voted_in: GroupId | None = None) -> None:
        """Advance the machine. Messages and orders to the worker go out in order, under the lock; the rest after it.

        voted_in: the group whose vote this is about; nothing is told of votes of a group that was given up.
        """
        with self._lock:
            if voted_in not in (None, self._voting_in):
                return
            effects = self._machine.handle(event, time.monotonic())
            later = [effect for effect in effects if not self._run_inside(effect)]
        if self._outbox.take_news():
            self._link.wake()
        for effect in later:
            self._run_after(effect, capturing=capturing)

    def _run_inside(self, effect: ev.Effect) -> bool:
        """Effects that only queue or free something; False for all others."""
        match effect:
            case ev.Send():
                self._outbox.put(effect.message)
            case ev.BeginStaging() if self._stager is not None:
                rows = {change.layer: self._machine.live[change.layer].row for change in effect.stage.layers}
                self._stager.begin(effect, rows)
            case ev.CancelStaging() if self._stager is not None:
                self._stager.cancel(effect.chunk_id)
            case ev.ReleaseStaging():
                self._flipper.hold(None)
            case _:
                return False
        return True

    def _run_after(self, effect: ev.Effect, *, capturing: bool) -> None:
        """Effects of the model thread, and the end of everything."""
        match effect:
            case ev.CastVote() if self._voter is not None:
                self._cast_at = effect.boundary
                self._voter.cast(effect.boundary, effect.chunk_id)
                if effect.chunk_id != ev.NO_CHUNK:
                    reach("hook.vote.cast")
            case ev.Flip():
                self._flip(effect, capturing=capturing)
            case ev.FailStop():
                self._standstill.stop(effect.reason)
            case _:
                raise BrokenInvariantError(f"no part of this hook can run {type(effect).__name__}")

    def _flip_put_off(self) -> None:
        """No pass runs while a graph is captured: a flip that was due then comes before the first that does."""
        effect, self._put_off = self._put_off, None
        if effect is not None:
            self._flip(effect, capturing=False)

    def _flip(self, effect: ev.Flip, *, capturing: bool) -> None:
        if capturing:
            self._put_off = effect
            return
        try:
            prepared = self._flipper.flip(effect.stage, effect.boundary, tables=self._forming is None)
        except FlipBrokenError as error:
            logger.exception("hook.flip failed")
            self._standstill.stop(str(error), for_good=True)
            return
        if self._stager is not None:
            self._stager.note_flip(effect.stage, prepared.checksums)
        self._poll_flip()

    def _poll_flip(self) -> None:
        """Say Flipped once the device has made it true."""
        with self._lock:
            finished = self._flipper.finished()
            if finished is not None:
                self._dispatch(ev.FlipDone(*finished))
                self._unreachable = uncovered(self._machine.live, self._facts.shape.layers)

    # ── another group ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _join(self) -> None:
        """The start of a rank that joins a group that serves."""
        if self._is_member:
            raise ConflictError("this hook is started; call reform() when its group has formed again")
        facts = inspect(self._port, self._config)
        try:
            self._form_group(facts)
        except Exception as error:
            raise self._not_formed(facts, error) from error
        self._link.start()

    def _not_formed(self, facts: EngineFacts, error: Exception) -> EnvironmentFault:
        why = str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {first_line(error)}"
        reason = f"group {facts.description.address.group_id:#x} did not form: {why}"
        self._standstill.not_formed(reason)
        return EnvironmentFault(reason)

    def _leave_group(self) -> None:
        """Give up votes and copies of the group that was. What was voted for stays in staging."""
        with self._lock:
            voter, self._voter, self._voting_in = self._voter, None, None
        if voter is not None:
            voter.abandon()
        self._weights_version = self._port.weights_version()
        self._dispatch(ev.Boundary(max(self._boundary, 0), self._weights_version))
        self._dispatch(ev.GroupEnded())
        self._flip_put_off()
        self._until_flipped()
        timeout_s = self._config.rendezvous_timeout_s
        if self._stager is not None and not self._stager.rest(timeout_s):
            raise DeadlineError(f"a cancelled copy did not end within {timeout_s:g} s, so staging cannot be used again")

    def _until_flipped(self) -> None:
        """Wait for the device, which a flip was given to. Raises DeadlineError when it does not end."""
        until = time.monotonic() + FLIP_TIMEOUT_S
        while self._machine.state is ev.ChunkState.FLIPPING and not self._standstill.broken:
            self._poll_flip()
            if time.monotonic() > until:
                raise DeadlineError(f"the flip of chunk {self._machine.open_id:#x} did not end within {FLIP_TIMEOUT_S:g} s")
            time.sleep(FLIP_POLL_S)

    def _form_group(self, facts: EngineFacts) -> None:
        """Agree with all ranks of the group on the map and go on in it; until then this rank stays where it stands."""
        place = Place(machine=self._machine, formings=self._formings) if self._is_member else None
        self._forming = None  # of an earlier try, with the store that it hosts
        self._forming = forming = Forming(facts.description, place, timeout_s=self._config.rendezvous_timeout_s)
        entry = come_in(
            forming,
            facts,
            config=self._config,
            streams=self._streams,
            weights_version=self._weights_version,
            flip=lambda agreement: self._flip_if_decided(agreement, facts.description.address.rank_id),
            staging=lambda store: self._staging_of(facts, store),
        )
        self._enter_group(entry)

    def _staging_of(self, facts: EngineFacts, store: Store) -> Stager | str:
        """This rank's stager, which one that joins makes here; or why it can move nothing."""
        if self._stager is not None:
            return self._stager
        if self._is_member or facts.problem:
            return (self._is_member and self._off.of(START)) or facts.problem or "it observes only"
        try:
            self._stager = self._make_stager(facts, store)
        except EnvironmentFault as error:
            return str(error)
        return self._stager

    def _flip_if_decided(self, agreement: Agreement, rank_id: RankId) -> str:
        """Flip the weights of the chunk that others flipped; why that could not be, empty when it could."""
        if rank_id not in agreement.reformed.flips:
            return ""
        self._dispatch(ev.GroupFormed(flips=True, boundary=agreement.reformed.boundary))
        self._until_flipped()
        return self._standstill.broken

    def _enter_group(self, entry: Entry) -> None:
        """Everything is agreed: be a rank of the new group."""
        facts, agreement, meeting = entry.facts, entry.agreement, entry.meeting
        address = facts.description.address
        with self._lock:
            before = self._machine
            if before.state is ev.ChunkState.UNRESOLVED:
                self._dispatch(ev.GroupFormed(flips=False, boundary=agreement.reformed.boundary))
            for cause, reason in ((START, meeting.problem), (VOTE, ""), (FORM, "")):
                self._off.note(cause, reason)
            ledger = ledger_after(
                agreement,
                address,
                facts.live,
                weights_version=self._weights_version,
                off_reason=self._off.first,
                before=before.ledger if self._is_member else None,
            )
            self._machine = before.in_group(facts.shape, ledger)
            self._facts = facts
            self._flipper.enter(facts)
            self._boundary, self._cast_at = agreement.reformed.boundary - 1, -1
            self._formings, self._is_member, self._meeting = agreement.formings, True, meeting
            self._unreachable = uncovered(facts.live, facts.shape.layers)
            self._forming = None
            self._standstill.end()
        self._observer.enter(address)
        self._start_voting(meeting.votes)
        logger.info(
            "hook.formed: group %#x of ranks %s goes on at boundary %d, %d experts are unreachable",
            address.group_id,
            list(facts.shape.group_rank_ids),
            self._boundary + 1,
            self._unreachable,
        )
        if meeting.problem:
            logger.warning("hook.observing: nothing is moved on this rank: %s", meeting.problem)

    def _start_voting(self, votes: GlooGroup | None) -> None:
        if votes is None:
            return
        group = self._voting_in = self._facts.description.address.group_id
        self._voter = Voter(
            votes,
            timeout_s=self._config.vote_timeout_s,
            on_resolved=lambda chunk, outcome, detail: self._on_resolved(group, chunk, outcome, detail),
            on_off=lambda reason: self._on_vote_off(group, reason),
        )
        self._voter.start()

    # ── from other threads ───────────────────────────────────────────────────────────────────────────────────────────────

    def _dispatch_from_thread(self, event: ev.Event, *, voted_in: GroupId | None = None) -> None:
        """As `_dispatch`; a broken invariant ends this rank's part in rollouts, or its steps when a vote is undecided."""
        try:
            self._dispatch(event, voted_in=voted_in)
        except BrokenInvariantError as error:
            logger.exception("hook.failed")
            if self._machine.state in (ev.ChunkState.VOTING, ev.ChunkState.COMMITTED):
                self._standstill.stop(str(error), for_good=True)
            else:
                self._set_off(FAILURE, first_line(error))

    def _on_resolved(self, group: GroupId, chunk: ChunkId, outcome: ev.Outcome, detail: str) -> None:
        self._dispatch_from_thread(ev.VoteResolved(chunk, outcome, detail), voted_in=group)

    def _on_vote_off(self, group: GroupId, reason: str) -> None:
        with self._lock:
            if self._voting_in == group:
                logger.warning("hook.vote_off: %s", reason)
                self._set_off(VOTE, reason)

    def _on_staging_end(self, end: ev.StagingDone | ev.StagingFailed, prepared: PreparedFlip | None) -> None:
        with self._lock:
            self._flipper.hold(prepared)
            self._dispatch_from_thread(end)

    def on_message(self, message: ToRank) -> None:
        """The planner says something (link thread)."""
        if isinstance(message, Arm):
            reach("hook.arm.received")
        self._dispatch_from_thread(ev.Received(message))
        if isinstance(message, Arm) and self._machine.state is ev.ChunkState.ARMED:
            reach("hook.armed")

    def on_attached(self) -> None:
        """The agent process is there (link thread)."""
        self._pulse_due_s = 0.0
        self._dispatch(ev.Attached())

    def on_answer(self, answer: RegistrationAnswer) -> None:
        """What the planner said to the registration (link thread)."""
        if not answer.accepted:
            logger.warning("hook.refused: the planner refuses this rank: %s", answer.reason)

    def on_tick(self) -> None:
        """Deadlines, the off switch, idleness and signs of life (link thread)."""
        if not self._link_is_bound:  # this thread asks the device whether a flip is through
            self._streams.bind_thread()
            self._link_is_bound = True
        self._poll_flip()
        self._dispatch_from_thread(ev.Tick())
        self._check_switch()
        now = time.monotonic()
        idle = now - self._last_boundary_s > self._config.idle_after_s
        if now >= self._pulse_due_s or idle != self._was_idle:
            if idle:
                self._dispatch_from_thread(ev.EngineIdle())
            self._pulse_due_s = now + self._config.pulse_period_s
            self._outbox.put(self._pulse(idle=idle))
        self._was_idle = idle

    def registration(self) -> Registration:
        """What this rank is (link thread)."""
        return registration_of(
            self._facts,
            self._config,
            weights_version=self._weights_version,
            stages=self._stager is not None,
            restores=bool(self._sources),
        )

    # ── small parts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note_weights(self, stager: Stager) -> None:
        """What the stager reads next comes after whatever wrote the weights on the compute stream."""
        with self._streams.on_compute_stream():
            stager.weights_written(self._streams.record())

    def _make_stager(self, facts: EngineFacts, store: Store | None) -> Stager:
        config = self._config
        stager = Stager(
            shape=facts.shape,
            nodes=facts.description.nodes,
            weights=Weights(tensors=facts.tensors, layouts=facts.layouts, device=facts.device),
            budget_bytes=config.staging_bytes,
            store=store,
            ways=config.ways,
            streams=self._streams,
            rendezvous_timeout_s=config.rendezvous_timeout_s,
            clock=time.monotonic,
            pressure=self._pressure,
            sources=self._sources,
            on_end=self._on_staging_end,
        )
        self._note_weights(stager)
        return stager

    def _pulse(self, *, idle: bool) -> Pulse:
        with self._lock:
            return Pulse(
                sender=self._facts.description.address,
                boundary=self._boundary + 1,  # how many were passed: none before the first step
                idle=idle,
                voting=not self._machine.off_reason,
                off_reason=self._machine.off_reason,
                windows_dropped=self._outbox.windows_dropped,
                weights_version=self._weights_version,
            )

    def _check_switch(self) -> None:
        self._set_off(SWITCH, self._off.look_at_switch())

    def _set_off(self, cause: str, reason: str) -> None:
        """Why this rank takes part in no rollout; empty = not for that cause any more."""
        with self._lock:
            if not self._off.note(cause, reason) or self._off.first == self._machine.off_reason:
                return
            first = self._off.first
            self._dispatch(ev.VotingOff(first) if first else ev.VotingOn())
            self._pulse_due_s = 0.0
