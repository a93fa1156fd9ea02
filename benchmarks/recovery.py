"""How long a fleet takes from the loss of a rank until it serves every expert again: `python -m benchmarks.recovery`.

Four ranks of the reference engine on this machine, an agent process and a planner serve one request each; one rank is killed
(`kill -9`). *Formed again* is when all ranks that are left have formed a group without it, *full coverage* when each of them
has brought a token of a step whose map has every expert again: read from the weights file, compared, voted in. Prints the table
of docs/benchmarks.md: for each size of expert the median of `--runs` fleets, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import os
import selectors
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import FleetConfig
from agent.engine.reference.experts import linear_row
from agent.engine.reference.launch import Fleet, free_port, launch_ranks
from agent.engine.reference.messages import Ended, NewTokens
from benchmarks.recovery_model import CONTEXT, EXPERTS, LAYERS, WEIGHTS, write
from benchmarks.report import machine, markdown_table, written_between_marks
from demo.processes import Supervised
from eplb_service.cli.client import planner_client
from eplb_service.errors import ConflictError, DeadlineError, EnvironmentFault, NotFoundError
from eplb_service.ids import DeploymentId, RankId
from eplb_service.pb.v1 import admin_pb2, placement_pb2

RANKS = tuple(map(RankId, range(4)))
LOST = RankId(1)
LEFT = tuple(rank for rank in RANKS if rank != LOST)
WAIT_S = 180.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet. slots: of a rank, in every layer; with 16 every expert is twice there, and no loss takes the last copy."""

    expert_width: int
    slots: int

    @property
    def lost(self) -> int:
        """Experts that live on the lost rank alone, over all layers."""
        by_rank = linear_row(num_experts=EXPERTS, num_physical=len(RANKS) * self.slots).reshape(len(RANKS), -1)
        elsewhere = {int(expert) for rank in LEFT for expert in by_rank[rank]}
        return LAYERS * (EXPERTS - len(elsewhere))


CASES = (Case(256, 16), Case(256, 11), Case(1024, 11), Case(4096, 11), Case(16384, 11))


@dataclass(frozen=True, slots=True)
class Measured:
    """One loss. moves, move_bytes: of what brought experts back. formed_s, covered_s: seconds from the kill."""

    moves: int
    move_bytes: int
    formed_s: float
    covered_s: float


class Requests:
    """One request under way at every rank, and when tokens came."""

    def __init__(self, fleet: Fleet) -> None:
        self._clients: dict[RankId, RankClient] = {}
        self._selector = selectors.DefaultSelector()
        self._next = 0
        self.newest: dict[RankId, tuple[float, NewTokens]] = {}
        for position, rank in enumerate(fleet.config.rank_ids):
            self._clients[rank] = fleet.client(position)
            self._selector.register(self._clients[rank], selectors.EVENT_READ, rank)
            self._submit(rank)

    def _submit(self, rank: RankId) -> None:
        self._next += 1
        self._clients[rank].submit(request_id=self._next, prompt=b"a request", max_new_tokens=CONTEXT - 100)

    def forget(self, rank: RankId) -> None:
        """It is gone."""
        self._selector.unregister(self._clients[rank])
        self._clients.pop(rank).close()

    def serve(self, wait_s: float) -> None:
        """Take in what comes within a time, and keep every rank busy."""
        for key, _ in self._selector.select(wait_s):
            for message in self._clients[key.data].receive(timeout_s=0.0):
                if isinstance(message, NewTokens):
                    self.newest[key.data] = (time.monotonic(), message)
                elif isinstance(message, Ended):
                    self._submit(key.data)

    def serve_until(self, done: Callable[[], bool], what: str) -> None:
        """Serve until something holds. Raises DeadlineError."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {WAIT_S:g} s for {what}")
            self.serve(POLL_S)

    def first_tokens(self, wanted: Callable[[NewTokens], bool]) -> float:
        """When each rank has brought a token that is wanted: the time of the last of them."""
        first: dict[RankId, float] = {}

        def all_have() -> bool:
            for rank, (at, message) in self.newest.items():
                if rank not in first and wanted(message):
                    first[rank] = at
            return first.keys() == self._clients.keys()

        self.newest.clear()
        self.serve_until(all_have, "tokens of all ranks that are left")
        return max(first.values())

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for client in self._clients.values():
            client.close()


class Planner:
    """A planner process, and what it says of one deployment."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Start it and wait until it serves; the stack stops it."""
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        start(folder, "planner", ("serve", f"--port={port}", f"--data-dir={folder / 'store'}", *PLANNER_FLAGS), stack)

    def is_ready(self, deployment: DeploymentId) -> bool:
        """Whether it knows what all ranks hold."""
        try:
            with planner_client(self.address, timeout_s=10.0) as client:
                asked = admin_pb2.StatusRequest(deployment=deployment)
                deployments = client.call(client.admin.Status, asked).deployments
        except (ConflictError, EnvironmentFault, NotFoundError):
            return False
        return any(view.state == "ready" and len(view.ranks) == len(RANKS) for view in deployments)

    def newest_moves(self, deployment: DeploymentId) -> tuple[int, int]:
        """Experts and bytes that the newest generation moved."""
        with planner_client(self.address, timeout_s=10.0) as client:
            asked = placement_pb2.ListGenerationsRequest(deployment=deployment, limit=10)
            newest = max(client.call(client.placement.ListGenerations, asked).generations, key=lambda view: view.generation)
        moves, sent = newest.moves, newest.moves.bytes
        return int(moves.experts), int(sent.same_rank + sent.same_node + sent.cross_node + moves.bytes_from_backups)


def start(folder: Path, name: str, command: Sequence[str], stack: ExitStack) -> None:
    """Start a part of the product and wait until it serves; the stack stops it."""
    ready = folder / f"{name}.ready"
    part = Supervised(name, (*command, f"--ready-file={ready}", "--log-format=json"), ready, folder / f"{name}.log")
    part.start()
    stack.callback(part.stop)
    part.wait_ready(WAIT_S)


PLANNER_FLAGS = ("--metrics-enabled=false", "--mode=observe")


def measure(case: Case, planner: Planner, deployment: DeploymentId, weights: Path, expert_bytes: int) -> Measured:
    """Start a fleet, lose a rank of it, and stop it. Raises EplbError when that does not go as it should."""
    with tempfile.TemporaryDirectory(prefix="eplb-recovery-") as name, ExitStack() as stack:
        folder = Path(name)
        start(folder, "agent", ("agent", f"--planner={planner.address}", f"--socket={folder / 'agent.sock'}"), stack)
        fleet = stack.enter_context(launch_ranks(fleet_of(case, deployment, folder, weights, expert_bytes)))
        requests = Requests(fleet)
        stack.callback(requests.close)
        requests.serve_until(
            lambda: len(requests.newest) == len(RANKS) and planner.is_ready(deployment), "the fleet to be ready"
        )
        return lose(case, fleet, requests, planner)


def lose(case: Case, fleet: Fleet, requests: Requests, planner: Planner) -> Measured:
    """Kill a rank and wait until the others serve every expert again."""
    deployment = fleet.config.deployment
    began = time.monotonic()
    fleet.process(LOST).kill()
    fleet.wait_for_ranks(LEFT, timeout_s=WAIT_S)
    formed_s = time.monotonic() - began
    requests.forget(LOST)
    if not case.lost:
        return Measured(0, 0, formed_s, requests.first_tokens(lambda _: True) - began)
    covered_s = requests.first_tokens(lambda message: min(message.generations) > 0) - began
    return Measured(*planner.newest_moves(deployment), formed_s, covered_s)


def fleet_of(case: Case, deployment: DeploymentId, folder: Path, weights: Path, expert_bytes: int) -> FleetConfig:
    """Four ranks on one node."""
    return FleetConfig(
        deployment=deployment,
        model_factory="benchmarks.recovery_model:load",
        rank_ids=RANKS,
        nodes=("node",) * len(RANKS),
        run_directory=str(folder),
        engine_port=free_port(),
        hook_port=free_port(),
        slots_per_rank=case.slots,
        hook_sockets=(str(folder / "agent.sock"),) * len(RANKS),
        staging_bytes=LAYERS * case.slots * expert_bytes,
        environment={WEIGHTS: str(weights)},
        log_to_files=True,
        survives=True,
        start_timeout_s=WAIT_S,
    )


def spread(seconds: Sequence[float]) -> str:
    """The median, with the least and the greatest."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def row(case: Case, planner: Planner, runs: int, folder: Path) -> list[str]:
    """One line of the table."""
    weights = folder / f"{case.expert_width}.safetensors"
    expert_bytes = write(weights, case.expert_width)
    found = [
        measure(case, planner, DeploymentId(f"{case.expert_width}-{case.slots}-{run}"), weights, expert_bytes)
        for run in range(runs)
    ]
    weights.unlink()
    return [
        f"{expert_bytes / 2**20:.2f} MiB",
        f"{case.lost}",
        f"{found[0].moves}",
        f"{found[0].move_bytes / 2**20:,.1f} MiB",
        spread([one.formed_s for one in found]),
        spread([one.covered_s for one in found]),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="fleets for each size (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="a page to put the table into, such as docs/benchmarks.md")
    arguments = parser.parse_args()
    runs = arguments.runs
    columns = ("an expert", "experts lost", "moved", "bytes", "formed again", "full coverage")
    with tempfile.TemporaryDirectory(prefix="eplb-recovery-") as name, ExitStack() as stack:
        planner = Planner(Path(name), stack)
        rows = [row(case, planner, runs, Path(name)) for case in CASES]
    fleets = "1 fleet" if runs == 1 else f"{runs} fleets"
    head = f"Measured on {machine()}; {fleets} for each line, load average at the end {os.getloadavg()[0]:.1f}."
    table = f"{head}\n\n{markdown_table(columns, rows)}"
    print(table)
    if arguments.write is not None:
        written_between_marks(arguments.write, "recovery", table)


if __name__ == "__main__":
    main()
