"""Watches the ranks of a fleet that survives: sees which end or hang, and has those that are left form again.

A thread of the launcher's process: an orchestrator's part, played by the one who started the ranks. What is decided, and when,
is in `coordinator`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess

from agent.engine.reference import coordinator as co
from agent.engine.reference.config import FleetConfig, LayerShape, Member
from agent.engine.reference.orders import STOPPED, End, Form, Formed, Halt, Ready, Standing, ToRankProcess
from eplb_service.errors import DeadlineError, EnvironmentFault
from eplb_service.ids import RankId

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Watched:
    """A rank process. last: the last that it reported."""

    member: Member
    process: BaseProcess
    connection: Connection
    last: str = "process started"


class FleetWatch:
    """The thread, and what it knows. shape: of all ranks' layers. free_port: gives a port for each new group."""

    def __init__(
        self,
        config: FleetConfig,
        ranks: Mapping[RankId, Watched],
        *,
        shape: LayerShape,
        free_port: Callable[[], int],
    ) -> None:
        self._free_port = free_port
        self.shape = shape
        self._ranks = dict(ranks)  # those that have not ended
        self._changed = threading.Condition()
        self._config = config
        self._coordinator = co.Coordinator(
            members=config.rank_ids,
            num_experts=shape.num_experts,
            slots_per_rank=shape.slots,
            gather_timeout_s=config.step_timeout_s,
            form_timeout_s=config.form_timeout_s,
        )
        self._arriving: list[Watched] = []
        self._ended = False
        self._bell, self._rung = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)
        self._thread.start()

    # ── what others ask, from any thread ─────────────────────────────────────────────────────────────────────────────────

    @property
    def config(self) -> FleetConfig:
        """Of the group that was last formed."""
        with self._changed:
            return self._config

    @property
    def reason(self) -> str:
        """Why the fleet ended; empty while it has not."""
        with self._changed:
            return self._coordinator.reason if self._coordinator.stage is co.Stage.ENDED else ""

    def add(self, rank: Watched) -> None:
        """Watch a process that was started to join."""
        with self._changed:
            self._arriving.append(rank)
        self._ring()

    def wait_for(self, done: Callable[[FleetConfig], bool], what: str, *, timeout_s: float) -> FleetConfig:
        """Wait until the group that serves is as wanted.

        Raises EnvironmentFault when the fleet has ended, DeadlineError when the time is over.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (self._serves and done(self._config)):
                if self._coordinator.stage is co.Stage.ENDED:
                    raise EnvironmentFault(f"waited for {what}, but the fleet has ended: {self._coordinator.reason}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"{what}: not within {timeout_s:g} s; the fleet is {self._coordinator.stage.value}, with ranks"
                        f" {list(self._config.rank_ids)}; last: {self._coordinator.reason or 'nothing happened'}"
                    )
                self._changed.wait(left)
            return self._config

    def is_gone(self, rank_id: RankId) -> bool:
        """Whether a rank's process has been seen to end."""
        with self._changed:
            return rank_id not in self._ranks and all(rank.member.rank_id != rank_id for rank in self._arriving)

    def close(self) -> None:
        """End the thread; ranks are left as they are."""
        with self._changed:
            self._ended = True
        self._ring()
        self._thread.join()

    @property
    def _serves(self) -> bool:
        return self._coordinator.stage is co.Stage.SERVING and self._coordinator.members == self._config.rank_ids

    def _ring(self) -> None:
        self._rung.send_bytes(b"!")

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with self._changed:
                self._ranks.update((rank.member.rank_id, rank) for rank in self._arriving)
                self._arriving.clear()
                if self._ended:
                    return
                deadline = self._coordinator.deadline_s
            by_source = {id(rank.connection): rank for rank in self._ranks.values()}
            timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = wait([self._bell, *(rank.connection for rank in self._ranks.values())], timeout_s)
            if self._bell in ready:
                self._bell.recv_bytes()
            for source in ready:
                rank = by_source.get(id(source))
                if rank is not None:
                    self._handle(self._event_of(rank))
            self._handle(co.Tick())

    def _event_of(self, rank: Watched) -> co.Event | None:
        """What a rank says, or that it ended: its end of the pipe closes with it."""
        rank_id = rank.member.rank_id
        try:
            said = rank.connection.recv()
        except (EOFError, OSError):
            with self._changed:
                del self._ranks[rank_id]
            return co.RankEnded(rank_id, asked=rank.last == STOPPED)
        match said:
            case Ready():
                return co.RankLoaded(rank_id)
            case Standing():
                return co.RankStands(rank_id, said.number, said.reason, said.steps)
            case Formed():
                return co.RankFormed(rank_id, said.number)
            case _:
                rank.last = str(said)
                return None

    def _handle(self, event: co.Event | None) -> None:
        if event is None:
            return
        with self._changed:
            before = self._coordinator.stage
            effects = self._coordinator.handle(event, time.monotonic())
            for effect in effects:
                self._run_effect(effect)
            after = self._coordinator.stage
            if effects or before is not after:
                _LOG.info("fleet.%s: ranks %s; %s", after.value, list(self._coordinator.members), self._coordinator.reason)
            self._changed.notify_all()

    def _run_effect(self, effect: co.Effect) -> None:
        match effect:
            case co.HaltRanks():
                for rank_id in effect.rank_ids:
                    self._tell(rank_id, Halt(number=effect.number))
            case co.FormGroup():
                members = [self._ranks[rank_id].member for rank_id in effect.rank_ids]
                self._config = self._config.regrouped(
                    members,
                    shape=self.shape,
                    engine_port=self._free_port(),
                    hook_port=self._free_port(),
                )
                for position, rank_id in enumerate(effect.rank_ids):
                    self._tell(rank_id, Form(number=effect.number, fleet=self._config, position=position))
            case co.KillRank():
                _LOG.warning("fleet.kills rank %d: %s", effect.rank_id, effect.reason)
                if effect.rank_id in self._ranks:
                    self._ranks[effect.rank_id].process.kill()
            case co.EndFleet():
                for rank_id in effect.rank_ids:
                    self._tell(rank_id, End(reason=effect.reason))

    def _tell(self, rank_id: RankId, order: ToRankProcess) -> None:
        """A rank that has ended, or hangs with a full pipe, hears nothing: its end is seen, or it is killed at its deadline."""
        rank = self._ranks.get(rank_id)
        if rank is not None:
            try:
                rank.connection.send(order)
            except OSError:
                _LOG.debug("rank %d ended before it could be told", rank_id)
