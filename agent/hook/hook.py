"""The hook: what an engine holds, and the only thing that it calls."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from agent.engine.port import EnginePort, ReportsPressure
from agent.frames import RegistrationAnswer
from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from agent.hook.config import HookConfig, HookStatus
from agent.hook.flipper import FlipBrokenError, Flipper
from agent.hook.link import Link
from agent.hook.outbox import Outbox
from agent.hook.recorder import Recorder
from agent.hook.routing import PreparedFlip
from agent.hook.stager import Stager, Weights
from agent.hook.startup import EngineFacts, Meeting, inspect, meet
from agent.hook.vote import Voter
from agent.transfer.backup import ExpertSource
from agent.transfer.gloo import first_line
from agent.transfer.pace import Pressure
from agent.transfer.streams import streams_for
from eplb_service import __version__
from eplb_service.control import PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_OF_SHARES, Arm, Pulse, Registration, ToRank
from eplb_service.errors import BrokenInvariantError, ConflictError, EnvironmentFault, InvalidInputError
from eplb_service.failpoints import reach
from eplb_service.ids import ChunkId, LayerRef

__all__ = ["Hook", "HookConfig", "HookStatus"]

TICK_S = 0.2

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
        self._off: dict[str, str] = {}
        self._switched_off = config.off
        self._inert = config.off
        self._stopped = ""
        self._weights_version = port.weights_version()
        self._was_idle = False
        self._pulse_due_s = 0.0
        self._outbox = Outbox(config.ring_windows)
        self._facts: EngineFacts = inspect(port, config)
        facts = self._facts
        self._streams = streams_for(facts.device, port.compute_stream())
        self._flipper = Flipper(facts, port, self._streams)
        self._recorder: Recorder | None = Recorder(
            [(layer, shape.num_logical) for layer, shape in facts.shape.layers.items()],
            address=facts.description.address,
            phase=facts.description.phase,
            window_steps=config.window_steps,
            sub_windows=config.sub_windows,
            idle_after_s=config.idle_after_s,
            device=facts.device,
            streams=self._streams,
            outbox=self._outbox,
            clock=time.monotonic,
        )
        self._machine = ChunkMachine(
            facts.description.address, facts.shape, facts.live, weights_version=self._weights_version, off_reason="not started"
        )
        self._off["start"] = "not started"
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
        """Find the other ranks, allocate staging, start the threads. What fails here leaves the hook observe-only."""
        self._check_switch()
        self._meeting = meeting = meet(self._facts, self._config)  # kept: other ranks may still be on their way to our store
        problem = meeting.problem
        if not problem:
            try:
                self._stager = self._make_stager(meeting)
                with self._streams.on_compute_stream():
                    self._stager.weights_written(self._streams.record())
                self._stager.start(self._weights_version, {layer: live.row for layer, live in self._facts.live.items()})
            except (EnvironmentFault, ConflictError) as error:
                self._stager, problem = None, str(error)
        if meeting.votes is not None:
            self._voter = Voter(
                meeting.votes, timeout_s=self._config.vote_timeout_s, on_resolved=self._on_resolved, on_off=self._on_vote_off
            )
            self._voter.start()
        self._set_off("start", problem)
        if problem:
            logger.warning("hook.observing: nothing is moved on this rank: %s", problem)
        self._link.start()

    def begin_step(self, *, num_real_tokens: int, warmup: bool = False) -> None:
        """A step boundary: votes, flips and windows happen here. num_real_tokens: without padding and dummies.

        Raises EnvironmentFault when the outcome of a commit is unknown and this rank must not run another step; nothing else.
        """
        self._boundary += 1
        self._last_boundary_s = time.monotonic()
        capturing = False
        try:
            capturing = self._port.is_capturing()
            self._commit(capturing=capturing)
        except Exception as error:  # noqa: BLE001  # logged there; a step must not fail with the hook
            self._on_failure(error)
        self._raise_if_stopped()
        self._observe(num_real_tokens, warmup=warmup, capturing=capturing)

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        """Count what the router chose. experts: logical ids of real tokens, shape (n, k), any integer type.

        Raises InvalidInputError for a layer that the engine did not register (sglang#25948: counts without a layer).
        """
        if self._inert or self._recorder is None:
            return
        if layer not in self._facts.shape.layers:
            raise InvalidInputError(f"record was called for layer {layer}, which the engine did not register as an MoE layer")
        self._recorder.record(layer, experts)

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Nothing recorded inside the block counts, however it ends."""
        return self._recorder.warming_up() if self._recorder is not None else contextlib.nullcontext()

    def close(self) -> None:
        """Cast 0, resolve what is cast, end the threads; every wait has a deadline."""
        timeout_s = self._config.close_timeout_s
        self._set_off("close", "the engine is closing")
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
                stray_ids=self._recorder.stray_ids if self._recorder is not None else 0,
                reads_from=self._stager.reads_from if self._stager is not None else (),
                staging_bytes=self._stager.num_bytes if self._stager is not None else 0,
                pauses=self._pressure.pauses,
                paused_s=self._pressure.paused_s,
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
        if self._stopped or self._voter.is_off:
            return
        self._dispatch(ev.VoteDue(boundary))

    def _look_at_weights(self, *, capturing: bool) -> None:
        """A new version: what the stager reads next must come after whatever wrote the weights on the compute stream."""
        version = self._port.weights_version()
        if version != self._weights_version and self._stager is not None and not capturing:
            with self._streams.on_compute_stream():
                self._stager.weights_written(self._streams.record())
        self._weights_version = version

    def _on_failure(self, error: Exception) -> None:
        """Something broke in here. The other ranks must still get this rank's vote, and it is 0."""
        logger.error("hook.failed at boundary %d", self._boundary, exc_info=error)
        reason = f"the hook failed at boundary {self._boundary}: {type(error).__name__}: {first_line(error)}"
        with self._lock:
            undecided = self._machine.state in (ev.ChunkState.VOTING, ev.ChunkState.COMMITTED, ev.ChunkState.FLIPPING)
        if undecided and self._cast_at != self._boundary:
            self._stop(f"{reason}; the chunk under way cannot be flipped here as it may be elsewhere")
        else:
            self._set_off("failure", reason)
        if self._voter is not None and self._boundary % self._config.vote_period == 0 and self._cast_at != self._boundary:
            self._cast_at = self._boundary
            self._voter.cast(self._boundary, ev.NO_CHUNK)

    def _observe(self, num_real_tokens: int, *, warmup: bool, capturing: bool) -> None:
        """Windows. What fails here ends recording, never the step."""
        if self._recorder is None:
            return
        try:
            if self._switched_off != self._inert and not capturing:
                self._inert = self._switched_off
                self._recorder.pause()
            if not self._inert:
                self._recorder.boundary(
                    self._boundary,
                    num_real_tokens=num_real_tokens,
                    warmup=warmup,
                    capturing=capturing,
                    live_digest=self._flipper.routed_digest,
                )
                if self._outbox.take_news():
                    self._link.wake()
        except Exception:
            logger.exception("recorder.failed: this rank reports no more windows")
            self._recorder = None

    # ── events in, effects out ───────────────────────────────────────────────────────────────────────────────────────────

    def _dispatch(self, event: ev.Event, *, capturing: bool = False) -> None:
        """Advance the machine. Messages and orders to the worker go out in order, under the lock; the rest after it."""
        with self._lock:
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
                self._stop(effect.reason)
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
            prepared = self._flipper.flip(effect.stage, effect.boundary, capturing=capturing)
        except FlipBrokenError as error:
            logger.exception("hook.flip failed")
            self._stop(str(error))
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

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        logger.critical("hook.stopped: %s", reason)
        self._port.fail_stop(reason)

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise EnvironmentFault(self._stopped)

    # ── from other threads ───────────────────────────────────────────────────────────────────────────────────────────────

    def _dispatch_from_thread(self, event: ev.Event) -> None:
        """As `_dispatch`; a broken invariant ends this rank's part in rollouts, or its steps when a vote is undecided."""
        try:
            self._dispatch(event)
        except BrokenInvariantError as error:
            logger.exception("hook.failed")
            if self._machine.state in (ev.ChunkState.VOTING, ev.ChunkState.COMMITTED):
                self._stop(str(error))
            else:
                self._set_off("failure", first_line(error))

    def _on_resolved(self, chunk: ChunkId, outcome: ev.Outcome, detail: str) -> None:
        self._dispatch_from_thread(ev.VoteResolved(chunk, outcome, detail))

    def _on_vote_off(self, reason: str) -> None:
        logger.warning("hook.vote_off: %s", reason)
        self._set_off("vote", reason)

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
        description, config = self._facts.description, self._config
        return Registration(
            deployment=description.deployment,
            address=description.address,
            node=description.node,
            group_rank_ids=description.group_rank_ids,
            phase=description.phase,
            stage=description.stage,
            models=self._facts.models,
            capacity=description.capacity,
            nic=self._facts.nic,
            dispatch=description.dispatch,
            vote_period=config.vote_period,
            window_steps=config.window_steps,
            sub_windows=config.sub_windows,
            staging_bytes=config.staging_bytes if self._stager is not None else 0,
            replica_table_width=description.replica_table_width,
            weights_version=self._weights_version,
            protocol_min=PROTOCOL_VERSION_OF_SHARES if self._facts.shape.weighted else PROTOCOL_VERSION_MIN,
        )

    # ── small parts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_stager(self, meeting: Meeting) -> Stager:
        facts, config = self._facts, self._config
        return Stager(
            shape=facts.shape,
            nodes=facts.description.nodes,
            weights=Weights(tensors=facts.tensors, layouts=facts.layouts, device=facts.device),
            budget_bytes=config.staging_bytes,
            store=meeting.store,
            ways=config.ways,
            streams=self._streams,
            rendezvous_timeout_s=config.rendezvous_timeout_s,
            clock=time.monotonic,
            pressure=self._pressure,
            sources=self._sources,
            on_end=self._on_staging_end,
        )

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
        """The local off switch: needs no planner, no network and no restart."""
        file = self._config.off_file
        off = self._config.off or (file is not None and Path(file).exists())
        self._switched_off = off
        where = "EPLB_OFF" if self._config.off else str(file)
        self._set_off("switch", f"switched off on this machine ({where})" if off else "")

    def _set_off(self, key: str, reason: str) -> None:
        """Keep one reason for each cause; the first that stands is told."""
        with self._lock:
            if self._off.get(key, "") == reason:
                return
            self._off[key] = reason
            first = next((standing for standing in self._off.values() if standing), "")
            if first == self._machine.off_reason:
                return
            self._dispatch(ev.VotingOff(first) if first else ev.VotingOn())
            self._pulse_due_s = 0.0
