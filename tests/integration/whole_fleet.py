"""The whole loop for tests: ranks that serve a real model, planner and agent process under a supervisor, and an oracle.

One fleet of ranks serves many cases: parts are killed and come back around it. Whoever waits keeps serving meanwhile, so
every wait is also a check that requests are answered. `settle` ends a case: it drains the requests and checks the invariants
of everything that was served since the start.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import FleetConfig
from agent.engine.reference.launch import Fleet, free_port, launch_ranks
from agent.engine.reference.messages import RankState
from demo.oracle import OracleProcess, Served
from demo.processes import Supervised
from demo.serving import Serving
from demo.traffic import Traffic
from eplb_service.cli.client import planner_client
from eplb_service.cli.generations import state_text
from eplb_service.dispatch import Dispatch
from eplb_service.errors import ConflictError, EnvironmentFault
from eplb_service.failpoints import VARIABLE
from eplb_service.ids import DeploymentId, RankId
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.policy.registry import load_policy
from eplb_service.policy.warm_up import warm_up_policy
from eplb_service.rpc.convert_placement import placement_from_pb
from tests.integration.fault_checks import History, check_boundaries, check_maps, check_slots, rows_of
from tests.integration.fault_points import Hold, held, hold_at
from tests.integration.fault_processes import children_of, is_alive, kill_now, name_of

__all__ = ["DEPLOYMENT", "WAIT_S", "Held", "WholeFleet", "compile_kernels", "held", "is_alive", "kill_now"]

DEPLOYMENT = DeploymentId("whole")
WAIT_S = 90.0
CALL_TIMEOUT_S = 5.0
TURN_S = 0.02
HELD_POSITION = 2
"""Position of the rank whose staging a test can hold."""
OVER = {"active", "superseded", "stopped"}


class WholeFleet:
    """Ranks from the start; planner and agent process once `start_service` is called."""

    def __init__(
        self,
        *,
        rank_ids: Sequence[int],
        in_flight: int,
        window_steps: int = 16,
        hook_options: Mapping[str, Any],
        dispatch: Dispatch = Dispatch.EVEN,
        slots_per_rank: int = 0,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="eplb-whole-"))
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.holds = self._make_holds()
        self.staging, self.arming = self.holds["hook.staging.begin"], self.holds["agent.arm.forwarded"]
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.planner = self._planner(port)
        self.agent = self._agent()
        self.served: list[Served] = []
        self.history = History()
        self.last_refusal = ""
        self.tokens_before_service = 0
        self.spare_request_ids = itertools.count(1)
        self._down: set[str] = set()
        self._started = False
        self._loaded_rows: list[tuple[int, ...]] = []
        self._rank_ids, self._window_steps, self._hook_options = rank_ids, window_steps, hook_options
        self._in_flight = in_flight
        self._dispatch, self._slots_per_rank = dispatch, slots_per_rank

    def __enter__(self) -> Self:
        compile_kernels()
        try:
            self.oracle = OracleProcess()
            self.oracle.start()
            self._stack.callback(self.oracle.kill)
            self.traffic = Traffic(seed=7, prompt_bytes=40, new_tokens=20)
            self._begin_ranks()
            self._stack.callback(self._end_ranks)
            self._loaded_rows = rows_of(self.serving.inspect()[0])
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    ranks: Fleet
    """The ranks of the present life."""
    serving: Serving
    model_factory = "demo.model:load"

    @property
    def parts(self) -> tuple[Supervised, ...]:
        """What is supervised, in the order in which it is started."""
        return self.planner, self.agent

    @property
    def hook_socket(self) -> str:
        """Where hooks look for the agent process."""
        return str(self.folder / "agent.sock")

    @property
    def planner_target(self) -> str:
        """Where the agent process looks for the planner."""
        return self.address

    @property
    def store_arguments(self) -> Sequence[str]:
        """Of `eplb serve`."""
        return (f"--data-dir={self.folder / 'store'}",)

    @property
    def rank_environment(self) -> Mapping[str, str]:
        """Of all ranks."""
        return {}

    @property
    def rank_environments(self) -> Mapping[int, Mapping[str, str]]:
        """Of ranks by their position."""
        return {HELD_POSITION: self._failpoints("hook")}

    @property
    def engine_options(self) -> Mapping[str, Any]:
        """More fields of `FleetConfig`."""
        return {}

    planner_arguments: Sequence[str] = ()
    """More of `eplb serve`."""

    def _make_holds(self) -> dict[str, Hold]:
        """By point. Those of hooks are of the rank at HELD_POSITION alone."""
        return {point: hold_at(self.folder, point) for point in ("hook.staging.begin", "agent.arm.forwarded")}

    def _failpoints(self, process: str) -> dict[str, str]:
        """Environment of a process; process: the first word of its points."""
        return {VARIABLE: ",".join(hold.setting for point, hold in self.holds.items() if point.startswith(process))}

    def _begin_ranks(self) -> None:
        """Start the ranks and connect to them."""
        self.ranks = self._launch()  # kills what it started when it fails
        clients = [self.ranks.client(position) for position in range(len(self._rank_ids))]
        self.serving = self._serving(clients)

    def _serving(self, clients: list[RankClient]) -> Serving:
        return Serving(clients, self.traffic, in_flight=self._in_flight, finished=self._finished)

    def _end_ranks(self) -> None:
        """Kill what is left of the ranks."""
        self.ranks.kill()
        self.serving.close()

    def stop_ranks(self) -> None:
        """Have the ranks drop their requests and end in good order."""
        self.ranks.stop(timeout_s=20, cancel=True)

    def _planner(self, port: int) -> Supervised:
        arguments = [
            *("serve", f"--port={port}", *self.store_arguments, "--metrics-enabled=false"),
            *("--mode=observe", "--planning-windows=2", "--rollout-layers-per-chunk-max=1", "--rollout-backoff-s=0.1"),
            *(f"--ready-file={self.folder / 'planner.ready'}", "--log-format=json"),
            *self.planner_arguments,
        ]
        environment = self._failpoints("planner")
        return Supervised("planner", arguments, self.folder / "planner.ready", self.folder / "planner.log", environment)

    def _agent(self) -> Supervised:
        arguments = [
            *("agent", f"--planner={self.planner_target}", f"--socket={self.folder / 'agent.sock'}"),
            *(f"--ready-file={self.folder / 'agent.ready'}", "--log-format=json"),
        ]
        environment = self._failpoints("agent")
        return Supervised("agent", arguments, self.folder / "agent.ready", self.folder / "agent.log", environment)

    def _launch(self) -> Fleet:
        ids = self._rank_ids
        config = FleetConfig(
            deployment=DEPLOYMENT,
            model_factory=self.model_factory,
            rank_ids=tuple(RankId(rank) for rank in ids),
            nodes=tuple(f"node{2 * position // len(ids)}" for position in range(len(ids))),
            run_directory=str(self.folder),
            engine_port=free_port(),
            hook_port=free_port(),
            hook_sockets=(self.hook_socket,) * len(ids),
            window_steps=self._window_steps,
            staging_bytes=1 << 20,
            dispatch=self._dispatch,
            slots_per_rank=self._slots_per_rank,
            hook_options=self._hook_options,
            environment=self.rank_environment,
            rank_environments=self.rank_environments,
            log_to_files=True,
            start_timeout_s=WAIT_S,
            **self.engine_options,
        )
        return launch_ranks(config, preload=["agent.hook.hook"])

    def start_service(self) -> None:
        """Start planner and agent process, and wait until they and all ranks have found one another."""
        for part in self.parts:
            part.start()
            self._stack.callback(part.stop)
        self._started = True
        self.until(lambda: all(part.ready_file.exists() for part in self.parts), "planner and agent process")
        self.until_ready()

    def kill(self, part: Supervised) -> None:
        """`kill -9`; the part stays down until `bring_back`."""
        self._down.add(part.name)
        kill_now(part.pid)

    def bring_back(self, part: Supervised) -> None:
        """Let the supervisor see that it died, and wait until it is there again."""
        restarts = part.restarts
        self._down.discard(part.name)
        self.until(lambda: part.restarts > restarts and part.ready_file.exists(), f"the {part.name} to be restarted")

    def store_pid(self) -> int:
        """Process id of the embedded store's server; 0 while there is none."""
        names = {child: name_of(child) for child in children_of(self.planner.pid)}
        return next((child for child, name in names.items() if name.startswith(("valkey-server", "redis-server"))), 0)

    # ── serving and waiting ──────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> None:
        """Requests and supervision."""
        self.serving.pump(time.monotonic(), wait_s=TURN_S)
        self.supervise()

    def supervise(self) -> None:
        """Start again what died, and take in what the oracle says."""
        self.oracle.collect()
        if self._started:
            for part in self.parts:
                if part.name not in self._down:
                    part.revive()

    def until(self, done: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Serve until something holds. Fails at the deadline with what the parts said last."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:.0f} s for {what}\n{self.last_words()}")
            self.turn()

    def serve_tokens(self, count: int) -> None:
        """Go on until every rank has brought new tokens and all together `count`."""
        goal = self.serving.tokens + count
        self.until(lambda: self.serving.tokens >= goal, f"{count} more tokens")

    def _finished(self, served: Served) -> None:
        self.served.append(served)
        self.oracle.submit(served)

    def last_words(self) -> str:
        """The ends of all logs."""
        logs = [f"{part.name}, pid {part.pid}, {part.restarts} restarts:\n{part.last_words(25)}" for part in self.parts]
        for file in sorted(self.folder.glob("rank-*.log")):
            logs += [f"{file.name}:", *file.read_text(errors="replace").splitlines()[-6:]]
        return f"last refusal: {self.last_refusal}\nstatus: {self.status()}\n" + "\n".join(logs)

    # ── what the planner says ────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, make: Callable[[Any], Any]) -> Any:
        """One question to the planner; None when it is away or cannot now, kept as `last_refusal`."""
        try:
            with planner_client(self.address, timeout_s=CALL_TIMEOUT_S) as client:
                return make(client)
        except (ConflictError, EnvironmentFault) as error:
            self.last_refusal = str(error)
            return None

    def status(self) -> Any:
        """`DeploymentStatus`; None while the planner is away or does not know the deployment."""
        reply = self.call(lambda client: client.call(client.admin.Status, admin_pb2.StatusRequest()))
        mine = [view for view in reply.deployments if view.deployment == DEPLOYMENT] if reply is not None else []
        if not mine:
            return None
        self.history.see_epoch(mine[0].epoch)
        return mine[0]

    def generations(self) -> dict[int, Any]:
        """Every published generation by its number."""
        request = placement_pb2.ListGenerationsRequest(deployment=DEPLOYMENT, limit=1000)
        reply = self.call(lambda client: client.call(client.placement.ListGenerations, request))
        if reply is None:
            return {}
        views = [view for view in reply.generations if view.generation]
        self.history.see(views)
        return {int(view.generation): view for view in views}

    def is_ready(self) -> bool:
        """All ranks are there, what is live is known, nothing is under way."""
        status = self.status()
        return status is not None and status.state == "ready" and all(rank.state == "live" for rank in status.ranks)

    def until_ready(self) -> None:
        """Wait for `is_ready`."""
        self.until(self.is_ready, "the deployment to be ready")

    def until_over(self, number: int) -> Any:
        """Wait until a generation is live everywhere or was stopped, and nothing is under way; returns its view."""
        found: dict[int, Any] = {}

        def over() -> bool:
            found.update(self.generations())
            return number in found and state_text(found[number].state) in OVER

        self.until(over, f"the end of generation {number}")
        self.until_ready()
        self.until(over, f"generation {number} to be told again")
        return found[number]

    def rebalance(self) -> int:
        """Have a new generation published by force, as soon as the planner can; returns its number."""
        key = uuid.uuid4().hex
        request = admin_pb2.RebalanceRequest(deployment=DEPLOYMENT, idempotency_key=key, force=True)
        return self._order(lambda client: client.call(client.admin.Rebalance, request))

    def is_loaded(self) -> bool:
        """Whether ranks route as they did when they were started."""
        return rows_of(self.serving.inspect()[0]) == self._loaded_rows

    def order_loaded(self) -> int:
        """Have the placement that the engine loaded published, as soon as the planner can; returns its number."""
        request = admin_pb2.RollbackRequest(deployment=DEPLOYMENT, generation=0, idempotency_key=uuid.uuid4().hex)
        return self._order(lambda client: client.call(client.admin.Rollback, request))

    def back_to_loaded(self) -> None:
        """Have the placement that the engine loaded published and rolled out, so that a rebalance has something to move."""
        if not self.is_loaded():
            view = self.until_over(self.order_loaded())
            assert state_text(view.state) == "active", view

    def _order(self, make: Callable[[Any], Any]) -> int:
        replies: list[Any] = []

        def answered() -> bool:
            reply = self.call(make)
            if reply is not None:
                replies.append(reply)
            return bool(replies)

        self.until(answered, "the planner to take an order")
        number = int(replies[0].generation)
        assert number > 0, f"nothing was published: {replies[0]}"
        return number

    def prove_life(self) -> None:
        """One more rebalance goes through to the end, and what it moved serves."""
        self.back_to_loaded()
        self.carry_through(self.rebalance())

    def carry_through(self, number: int) -> None:
        """A generation goes live, moves experts, serves, and is what every rank routes by then."""
        view = self.until_over(number)
        assert state_text(view.state) == "active", view
        assert view.moves.experts > 0, view
        self.serve_tokens(50)
        held = {generation for one in self.settle() for generation in one.generations}
        assert number in held, f"generation {number} is active, but layers are routed by {sorted(held)}"
        rows = self.published_rows(number)
        different = [inspection.rank_id for inspection in self.serving.inspect() if rows_of(inspection) != rows]
        assert not different, f"ranks {different} do not route by the rows that generation {number} was published with"

    def published_rows(self, number: int) -> list[tuple[int, ...]]:
        """Physical to logical of every layer, as the planner has it."""
        request = placement_pb2.GetPlacementRequest(deployment=DEPLOYMENT, generation=number)
        views: list[Any] = []

        def told() -> bool:
            view = self.call(lambda client: client.call(client.placement.GetPlacement, request))
            views.extend([view] if view is not None else [])
            return bool(views)

        self.until(told, f"the rows of generation {number}")
        (table,) = placement_from_pb(views[-1].placement).tables
        return [tuple(row) for row in table.physical_to_logical.tolist()]

    # ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> list[Held]:
        """Finish the requests under way, then check tokens, slots, maps and numbers."""
        self.serving.accepting = False
        self.until(lambda: not any(self.serving.running), "the end of the requests under way")
        self.until(lambda: all(i.state is RankState.IDLE for i in self.serving.inspect()), "the engine to be idle")
        inspections = self.serving.inspect()
        check_maps(inspections)
        check_slots(inspections)
        check_boundaries(self.served)
        self.until(lambda: not self.oracle.waiting, "the oracle")
        wrong = [judged for judged in self.oracle.judged if judged.mismatches]
        assert not wrong, f"{len(wrong)} of {len(self.oracle.judged)} requests differ, first {wrong[0]}"
        self.serving.accepting = True
        return [Held(inspection.rank_id, tuple(layer.generation for layer in inspection.layers)) for inspection in inspections]


@dataclass(frozen=True)
class Held:
    """What each layer of a rank is routed by."""

    rank_id: int
    generations: tuple[int, ...]


def compile_kernels() -> None:
    """Have the planner's kernels compiled and kept on disk: once on a machine, and not beside ranks that take its cores."""
    warm_up_policy(load_policy("greedy"), "greedy")
