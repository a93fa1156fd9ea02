"""The whole loop for tests: ranks that serve a real model, planner and agent process under a supervisor, and an oracle.

One fleet of ranks serves many cases: parts are killed and come back around it. Whoever waits keeps serving meanwhile, so
every wait is also a check that requests are answered. `settle` ends a case: it drains the requests and checks the invariants
of everything that was served since the start.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from agent.engine.reference.config import FleetConfig
from agent.engine.reference.launch import Fleet, free_port, launch_ranks
from agent.engine.reference.messages import Inspection, RankState
from agent.engine.reference.model import expert_digest
from demo.model import load
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

DEPLOYMENT = DeploymentId("whole")
WAIT_S = 90.0
CALL_TIMEOUT_S = 5.0
TURN_S = 0.02
HELD_POSITION = 2
"""Position of the rank whose staging a test can hold."""
OVER = {"active", "superseded", "stopped"}


@dataclass(frozen=True)
class Hold:
    """Holds processes at a `hold` failpoint from `shut` to `open`."""

    file: Path

    @property
    def reached(self) -> bool:
        """Whether a process stands still there."""
        return self.file.with_name(f"{self.file.name}.reached").exists()

    def shut(self) -> None:
        self.file.with_name(f"{self.file.name}.reached").unlink(missing_ok=True)
        self.file.touch()

    def open(self) -> None:
        self.file.unlink(missing_ok=True)


@dataclass
class History:
    """What was seen of generations and epochs, checked whenever more is seen."""

    digests: dict[int, str] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    epoch: int = 0

    def see(self, views: Sequence[Any]) -> None:
        """Invariant 4: a generation is never changed or lost, and each new one has a higher number than all before."""
        newest = max(self.digests, default=0)
        lost = set(self.digests) - {int(view.generation) for view in views}
        assert not lost, f"generations {sorted(lost)} are no longer known"
        for view in sorted(views, key=lambda view: int(view.generation)):
            if view.generation not in self.digests:
                assert view.generation > newest, f"generation {view.generation} is new after {newest}"
            assert self.digests.setdefault(view.generation, view.placement_digest) == view.placement_digest
            assert self.epochs.setdefault(view.generation, view.epoch) == view.epoch
        epochs = [self.epochs[number] for number in sorted(self.epochs)]
        assert epochs == sorted(epochs), f"epochs of generations go back: {self.epochs}"

    def see_epoch(self, epoch: int) -> None:
        if epoch:  # 0 = does not lead yet
            assert epoch >= self.epoch, f"epoch {epoch} after {self.epoch}"
            self.epoch = epoch


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
        self.staging = Hold(self.folder / "staging")
        self.arming = Hold(self.folder / "arming")
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
        self._checkpoint: dict[tuple[int, int], int] = {}
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
            self.ranks = self._stack.enter_context(self._launch())
            clients = [self.ranks.client(position) for position in range(len(self._rank_ids))]
            self.traffic = Traffic(seed=7, prompt_bytes=40, new_tokens=20)
            self.serving = Serving(clients, self.traffic, in_flight=self._in_flight, finished=self._finished)
            self._stack.callback(self.serving.close)
            self._loaded_rows = rows_of(self.serving.inspect()[0])
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _planner(self, port: int) -> Supervised:
        arguments = [
            *("serve", f"--port={port}", f"--data-dir={self.folder / 'store'}", "--metrics-enabled=false"),
            *("--mode=observe", "--planning-windows=2", "--rollout-layers-per-chunk-max=1", "--rollout-backoff-s=0.1"),
            *(f"--ready-file={self.folder / 'planner.ready'}", "--log-format=json"),
        ]
        return Supervised("planner", arguments, self.folder / "planner.ready", self.folder / "planner.log")

    def _agent(self) -> Supervised:
        arguments = [
            *("agent", f"--planner={self.address}", f"--socket={self.folder / 'agent.sock'}"),
            *(f"--ready-file={self.folder / 'agent.ready'}", "--log-format=json"),
        ]
        environment = {VARIABLE: f"agent.arm.forwarded=hold:{self.arming.file}"}
        return Supervised("agent", arguments, self.folder / "agent.ready", self.folder / "agent.log", environment)

    def _launch(self) -> Fleet:
        ids = self._rank_ids
        config = FleetConfig(
            deployment=DEPLOYMENT,
            model_factory="demo.model:load",
            rank_ids=tuple(RankId(rank) for rank in ids),
            nodes=tuple(f"node{2 * position // len(ids)}" for position in range(len(ids))),
            run_directory=str(self.folder),
            engine_port=free_port(),
            hook_port=free_port(),
            hook_sockets=(str(self.folder / "agent.sock"),) * len(ids),
            window_steps=self._window_steps,
            staging_bytes=1 << 20,
            dispatch=self._dispatch,
            slots_per_rank=self._slots_per_rank,
            hook_options=self._hook_options,
            rank_environments={HELD_POSITION: {VARIABLE: f"hook.staging.begin=hold:{self.staging.file}"}},
            log_to_files=True,
            start_timeout_s=WAIT_S,
        )
        return launch_ranks(config, preload=["agent.hook.hook"])

    def start_service(self) -> None:
        """Start planner and agent process, and wait until they and all ranks have found one another."""
        parts = (self.planner, self.agent)
        for part in parts:
            part.start()
            self._stack.callback(part.stop)
        self._started = True
        self.until(lambda: all(part.ready_file.exists() for part in parts), "planner and agent process")
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
        children = [
            int(child)
            for task in Path(f"/proc/{self.planner.pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
        for child in children:
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if name.startswith(("valkey-server", "redis-server")):
                return child
        return 0

    # ── serving and waiting ──────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> None:
        """Requests and supervision."""
        self.serving.pump(time.monotonic(), wait_s=TURN_S)
        self.oracle.collect()
        if self._started:
            for part in (self.planner, self.agent):
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
        logs = [
            f"{part.name}, pid {part.pid}, {part.restarts} restarts:\n{part.last_words(25)}"
            for part in (self.planner, self.agent)
        ]
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

    def back_to_loaded(self) -> None:
        """Have the placement that the engine loaded published and rolled out, so that a rebalance has something to move."""
        if rows_of(self.serving.inspect()[0]) == self._loaded_rows:
            return
        request = admin_pb2.RollbackRequest(deployment=DEPLOYMENT, generation=0, idempotency_key=uuid.uuid4().hex)
        view = self.until_over(self._order(lambda client: client.call(client.admin.Rollback, request)))
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
        number = self.rebalance()
        view = self.until_over(number)
        assert state_text(view.state) == "active", view
        assert view.moves.experts > 0
        self.serve_tokens(50)
        assert {generation for inspection in self.settle() for generation in inspection.generations} == {number}

    # ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> list[Held]:
        """Finish the requests under way, then check tokens, slots, maps and numbers."""
        self.serving.accepting = False
        self.until(lambda: not any(self.serving.running), "the end of the requests under way")
        self.until(lambda: all(i.state is RankState.IDLE for i in self.serving.inspect()), "the engine to be idle")
        inspections = self.serving.inspect()
        self.check_maps(inspections)
        self.check_slots(inspections)
        self.check_boundaries()
        self.until(lambda: not self.oracle.waiting, "the oracle")
        wrong = [judged for judged in self.oracle.judged if judged.mismatches]
        assert not wrong, f"{len(wrong)} of {len(self.oracle.judged)} requests differ, first {wrong[0]}"
        self.serving.accepting = True
        return [Held(inspection.rank_id, tuple(layer.generation for layer in inspection.layers)) for inspection in inspections]

    def check_maps(self, inspections: Sequence[Inspection]) -> None:
        """Invariants 1 and 3: one map on all ranks, and every expert in it."""
        maps = {tuple((layer.generation, layer.row_digest) for layer in inspection.layers) for inspection in inspections}
        assert len(maps) == 1, f"ranks route by different maps: {maps}"
        for layer in inspections[0].layers:
            assert set(layer.row) - {-1} == set(range(32)), f"layer {layer.layer_id} does not cover every expert"

    def check_slots(self, inspections: Sequence[Inspection]) -> None:
        """Invariant 2: every slot that the map names holds exactly its expert's tensors."""
        if not self._checkpoint:
            self._checkpoint = checkpoint_digests()
        for position, inspection in enumerate(inspections):
            for layer in inspection.layers:
                slots = len(layer.slot_digests)
                held = layer.row[position * slots : (position + 1) * slots]
                for slot, (expert, digest) in enumerate(zip(held, layer.slot_digests, strict=True)):
                    if expert >= 0:
                        where = f"rank {inspection.rank_id} layer {layer.layer_id} slot {slot}"
                        assert digest == self._checkpoint[layer.layer_id, expert], f"{where} does not hold expert {expert}"

    def check_boundaries(self) -> None:
        """Invariants 1 and 4: at every step one vector of generations on all ranks, and no layer's ever goes back."""
        routed_by: dict[int, tuple[int, ...]] = {}
        for request in self.served:
            for boundary, generations in zip(request.boundaries, request.generations, strict=True):
                known = routed_by.setdefault(boundary, generations)
                assert known == generations, f"at step {boundary} ranks routed by {known} and {generations}"
        ordered = [routed_by[boundary] for boundary in sorted(routed_by)]
        for earlier, later in itertools.pairwise(ordered):
            assert all(a <= b for a, b in zip(earlier, later, strict=True)), f"generations go back: {earlier}, then {later}"


@dataclass(frozen=True)
class Held:
    """What each layer of a rank is routed by."""

    rank_id: int
    generations: tuple[int, ...]


@contextmanager
def held(hold: Hold) -> Iterator[Hold]:
    """Shut inside the block, and open after it whatever happens."""
    hold.shut()
    try:
        yield hold
    finally:
        hold.open()


def compile_kernels() -> None:
    """Have the planner's kernels compiled and kept on disk: once on a machine, and not beside ranks that take its cores."""
    warm_up_policy(load_policy("greedy"), "greedy")


def rows_of(inspection: Inspection) -> list[tuple[int, ...]]:
    """Physical to logical of every layer."""
    return [layer.row for layer in inspection.layers]


def checkpoint_digests() -> dict[tuple[int, int], int]:
    """(layer id, expert) → digest of all its tensors, from the weights on disk."""
    model = load()
    found = {}
    for layer_id in model.moe_layer_ids():
        stacked = model.expert_tensors(layer_id)
        for expert in range(model.config.num_experts):
            found[layer_id, expert] = expert_digest({name: tensor[expert] for name, tensor in stacked.items()})
    return found


def kill_now(pid: int) -> None:
    """SIGKILL, and wait until the process is no more (or a zombie)."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} survives SIGKILL"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
