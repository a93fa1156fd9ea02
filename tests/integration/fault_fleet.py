"""A whole fleet whose every part can be killed, stopped and cut off: store, planner, agent process and ranks.

The store is a server of its own; agent process and planner, planner and store, hooks and agent process reach one another
through links that can be cut (`cut_link`), ranks one another in a network of their own where there can be one (`fault_mesh`).
A supervisor starts again what died. Processes stand still at named points, so that a fault hits the phase that is meant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from agent.engine.reference.launch import free_port
from demo.processes import Supervised
from eplb_service import failpoints
from eplb_service.errors import EnvironmentFault
from eplb_service.store.embedded import find_binary
from tests.integration.cut_link import CutLink
from tests.integration.fault_mesh import HELD, Mesh, why_not
from tests.integration.fault_mesh import VARIABLE as NETWORK
from tests.integration.fault_points import Hold, hold_at
from tests.integration.fault_processes import (
    birth_of,
    descendants_of,
    go_on,
    is_alive,
    kill_now,
    marked,
    name_of,
    shared_memory_of,
    stop_now,
)
from tests.integration.whole_fleet import HELD_POSITION, TURN_S, WholeFleet

MARK = "EPLB_TEST_FLEET"
"""Variable by which processes of a fleet are known, whoever is their parent."""
RESTARTS_MAX = 10_000
STEP_TIMEOUT_S = 10.0
"""Past it an engine gives up a step that a rank does not come to; steps of the tiny model take milliseconds. Ranks that
cast no id notice it no earlier."""


class Part(StrEnum):
    """What can fail."""

    PLANNER = "planner"
    STORE = "store"
    AGENT = "agent"
    RANK = "rank"


class Fault(StrEnum):
    """How it fails. CUT: connections end and new ones are refused; HOLD: they stand and nothing passes."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    HOLD = "hold"


class Phase(StrEnum):
    """Where a chunk is."""

    IDLE = "idle"
    STAGING = "staging"
    ARMED = "armed"
    VOTING = "voting"
    FLIPPING = "flipping"
    FLIPPED = "flipped"


POINTS = {
    Phase.STAGING: "hook.staging.begin",
    Phase.ARMED: "hook.arm.received",
    Phase.VOTING: "hook.vote.cast",
    Phase.FLIPPING: "hook.flip.begin",
    Phase.FLIPPED: "agent.flipped.received",
}
"""Where processes stand still in a phase. ARMED: all ranks but one are armed; FLIPPED: flipped, and not yet recorded."""
MORE_POINTS = (
    *("planner.generation.persisted", "planner.stage.sent", "planner.arm.sent", "planner.flipped.recorded"),
    *("agent.stage.forwarded", "agent.staged.forwarded", "agent.arm.forwarded"),
    *("hook.staging.connected", "hook.staging.done", "hook.armed", "hook.flip.done"),
)


class FaultFleet(WholeFleet):
    """See the module. Links carry the name of the part that is cut off by them."""

    model_factory = "tests.integration.fault_mesh:load"

    def __init__(self, *, rank_ids: Sequence[int], in_flight: int, hook_options: Mapping[str, Any], **options: Any) -> None:
        self._link_port = free_port()
        self.mesh: Mesh | None = None
        self.why_no_mesh = "not started"
        self.links: dict[Part, CutLink] = {}
        self.lives = 0
        self._lost = ""
        """How it showed that a rank is gone; empty while all are there."""
        self._pids: dict[int, int] = {}
        """Every process that was met, by its id, and when it was born: ids are used again."""
        super().__init__(rank_ids=rank_ids, in_flight=in_flight, hook_options=hook_options, **options)
        self.store = self._store()
        for part in self.parts:
            part.restarts_max = RESTARTS_MAX
            part.environment = {**part.environment, MARK: str(self.folder)}

    def __enter__(self) -> Self:
        folder = self.folder
        targets = {
            Part.PLANNER: (self.planner_target, self.address),
            Part.STORE: (f"unix:{folder / 'store-link.sock'}", f"unix:{folder / 'store.sock'}"),
            Part.AGENT: (f"unix:{self.hook_socket}", f"unix:{folder / 'agent.sock'}"),
        }
        for part, (listen, target) in targets.items():
            self.links[part] = self._stack.enter_context(CutLink(listen, target))
        self.why_no_mesh = why_not()
        if not self.why_no_mesh:
            self.mesh = Mesh()
            self._stack.callback(self.mesh.close)
        return super().__enter__()

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def parts(self) -> tuple[Supervised, ...]:
        return self.store, self.planner, self.agent

    @property
    def hook_socket(self) -> str:
        return str(self.folder / "agent-link.sock")

    @property
    def planner_target(self) -> str:
        return f"127.0.0.1:{self._link_port}"

    @property
    def store_arguments(self) -> Sequence[str]:
        return (f"--store=unix://{self.folder / 'store-link.sock'}", "--store-owner=planner")

    @property
    def rank_environment(self) -> Mapping[str, str]:
        points = self._failpoints("hook")[failpoints.VARIABLE]
        return {NETWORK: self.mesh.path if self.mesh is not None else "", HELD: f"rank-{self.held_rank}/{points}"}

    @property
    def rank_environments(self) -> Mapping[int, Mapping[str, str]]:
        return {}  # of the first life only

    @property
    def engine_options(self) -> Mapping[str, Any]:
        return {"step_timeout_s": STEP_TIMEOUT_S}

    @property
    def held_rank(self) -> int:
        """Id of the rank that stands still at points of hooks."""
        return self._rank_ids[HELD_POSITION]

    def _make_holds(self) -> dict[str, Hold]:
        return {point: hold_at(self.folder, point) for point in (*POINTS.values(), *MORE_POINTS)}

    def _store(self) -> Supervised:
        data = self.folder / "store-data"
        data.mkdir()
        socket = self.folder / "store.sock"
        arguments = [
            *("--port", "0", "--unixsocket", str(socket), "--dir", str(data), "--save", "", "--daemonize", "no"),
            *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
        ]
        return Supervised("store", arguments, socket, self.folder / "store.log", program=(str(find_binary()),))

    def _begin_ranks(self) -> None:
        for file in (*self.folder.glob("rank-*.sock"), *self.folder.glob("rank-*.reason")):
            file.unlink()
        super()._begin_ranks()
        self._lost = ""
        self.lives += 1
        self.served.clear()  # its steps are counted anew
        self._meet(process.pid or 0 for process in self.ranks.processes)

    def restart_ranks(self) -> None:
        """End what is left of the ranks and start all of them again, as whoever supervises an engine does."""
        self._end_ranks()
        self._begin_ranks()

    def ends_of_ranks(self) -> dict[int, str]:
        """Position → why it ended, of ranks that are no more."""
        return {
            position: self.ranks.reason(position) or f"exit code {process.exitcode}"
            for position, process in enumerate(self.ranks.processes)
            if not process.is_alive()
        }

    # ── serving and waiting ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self._rank_ids)

    def turn(self) -> None:
        """Requests, as long as all ranks are there, and supervision of the other parts."""
        if not self._lost:
            try:
                super().turn()
            except EnvironmentFault as error:
                self._lost = str(error)
            return
        time.sleep(TURN_S)
        self.supervise()

    def last(self, seconds: float) -> None:
        """Let a fault last so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def until_served_or_ended(self, count: int) -> None:
        """Serve until there are so many more tokens, or a rank is gone."""
        goal = self.serving.tokens + count
        self.until(lambda: bool(self._lost) or self.serving.tokens >= goal, f"{count} more tokens, or the end of a rank")

    def votes_are_off(self) -> bool:
        """Whether a rank other than the one that faults hit says that it takes part in no votes."""
        status = self.status()
        return status is not None and any(not rank.voting for rank in status.ranks if rank.address.rank_id != self.held_rank)

    def someone_gave_up(self) -> bool:
        """Whether a rank other than the one that faults hit has ended, or says that it takes part in no votes."""
        return bool(self.ends_of_ranks().keys() - {HELD_POSITION}) or self.votes_are_off()

    def order_another(self) -> int:
        """Have a generation published that moves experts: the one loaded where another is live, a balanced one where not."""
        return self.rebalance() if self.is_loaded() else self.order_loaded()

    def prove_life_once(self) -> None:
        """One more generation goes through to the end and serves."""
        self.carry_through(self.order_another())

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def process_of(self, part: Part) -> Supervised:
        """Of a part that is supervised."""
        return {Part.PLANNER: self.planner, Part.STORE: self.store, Part.AGENT: self.agent}[part]

    def rank_pid(self, position: int) -> int:
        """Process id of a rank of the present life."""
        return self.ranks.processes[position].pid or 0

    def let_restart(self, part: Part) -> None:
        """A part that was killed may be started again from now on."""
        self._down.discard(self.process_of(part).name)

    def strike(self, part: Part, fault: Fault, *, victim: int = HELD_POSITION) -> Callable[[], None]:
        """Begin a fault; what is returned ends it. victim: position of the rank that is hit, if it is a rank."""
        if fault in (Fault.CUT, Fault.HOLD):
            return self._cut(part, fault)
        pid = self.rank_pid(victim) if part is Part.RANK else self.process_of(part).pid
        self._meet([pid, *descendants_of(pid)])
        if fault is Fault.STOP:
            stop_now(pid)
            return lambda: go_on(pid)
        if part is Part.RANK:
            kill_now(pid)
            return self.restart_ranks
        self.kill(self.process_of(part))
        return lambda: self.bring_back(self.process_of(part))

    def _cut(self, part: Part, fault: Fault) -> Callable[[], None]:
        if part is Part.RANK:
            assert self.mesh is not None, "ranks have no network of their own here"
            self.mesh.cut()
            return self.mesh.restore
        link = self.links[part]
        (link.cut if fault is Fault.CUT else link.hold)()
        return link.restore

    def _meet(self, pids: Iterable[int]) -> None:
        self._pids.update({pid: birth_of(pid) for pid in pids})

    def _lives(self, pid: int) -> bool:
        return is_alive(pid) and birth_of(pid) == self._pids[pid]

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def expected_files(self) -> set[str]:
        """Names that may lie in the folder while everything runs."""
        ranks = [f"rank-{rank}.{kind}" for rank in self._rank_ids for kind in ("sock", "log")]
        parts = [f"{part.name}.{kind}" for part in self.parts for kind in ("log", "ready", "sock")]
        links = ["agent-link.sock", "agent.sock.lock", "store-link.sock", "store-data"]
        holds = [name for hold in self.holds.values() for name in (hold.file.name, f"{hold.file.name}.reached")]
        return {*ranks, *parts, *links, *holds}

    def left_behind(self) -> list[str]:
        """What lies about that no part of a fleet that runs needs: files, processes, shared memory."""
        left = [f"file {path.name}" for path in self.folder.iterdir() if path.name not in self.expected_files()]
        known = {part.pid for part in self.parts}
        owned = {child for pid in known for child in descendants_of(pid)}
        left += [f"process {pid} ({name_of(pid)})" for pid in marked(str(self.folder)) if pid not in known | owned]
        ranks = {process.pid or 0 for process in self.ranks.processes}
        gone = {pid for pid in self._pids.keys() - ranks if not self._lives(pid)}
        left += [
            f"process {pid} ({name_of(pid)}) of a fleet that is no more"
            for pid in self._pids.keys() - ranks - known - owned - gone
        ]
        left += [f"shared memory {name}" for name in shared_memory_of(gone)]
        return left

    def all_left(self) -> list[str]:
        """What is there of a fleet that was stopped: asked after the end."""
        left = [f"process {pid} ({name_of(pid)})" for pid in marked(str(self.folder))]
        left += [f"process {pid} ({name_of(pid)})" for pid in self._pids if self._lives(pid)]
        left += [f"shared memory {name}" for name in shared_memory_of(self._pids)]
        return left + ([f"folder {self.folder}"] if self.folder.exists() else [])
