"""Starts the parts of the demo: planner and agent process through the `eplb` command, ranks through the reference engine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from agent.engine.reference.config import FleetConfig
from agent.engine.reference.launch import Fleet, free_port, launch_ranks
from demo.processes import Supervised
from eplb_service.ids import DeploymentId, RankId
from eplb_service.topology import Topology

DEPLOYMENT = DeploymentId("demo")
NUM_EXPERTS = 32
WINDOW_STEPS = 24
PLANNING_WINDOWS = 3
STAGING_BYTES = 1 << 20
CLEAN_STOP_S = 30.0

# What a fleet's cost model would be measured from; here it is given, since ranks that share two cores cannot show it.
COST_FLAGS = (
    "--cost-seconds-per-step=0.02",
    "--cost-horizon-steps=20000",
    "--cost-bytes-per-s=50e6",
    "--cost-commit-stall-s=0.01",
)
PLANNER_FLAGS = (
    "--mode=auto",
    "--planning-interval-s=0.5",
    f"--planning-windows={PLANNING_WINDOWS}",
    "--gate-min-generation-age-s=5",
    "--gate-min-gain-worst=0.04",
    "--gate-min-tokens=3000",
    "--rollout-backoff-s=0.3",
    "--log-format=json",
)


@dataclass(frozen=True, slots=True)
class Service:
    """Planner and agent process, supervised. address: of the planner."""

    planner: Supervised
    agent: Supervised
    address: str
    socket: Path

    @property
    def parts(self) -> tuple[Supervised, Supervised]:
        """Both."""
        return self.planner, self.agent


def start_service(folder: Path, stack: ExitStack, *, policy: str, port: int) -> Service:
    """Start planner and agent process in `folder` and wait until both are ready; the stack stops them.

    port: of the planner; 0 picks one, and keeps it over restarts. Raises EnvironmentFault with the part's last words.
    """
    port = port or free_port()
    socket = folder / "agent.sock"
    planner = Supervised(
        "planner",
        [
            "serve",
            f"--port={port}",
            f"--metrics-port={free_port()}",
            f"--data-dir={folder / 'store'}",
            f"--policy={policy}",
            f"--ready-file={folder / 'planner.ready'}",
            *PLANNER_FLAGS,
            *COST_FLAGS,
        ],
        folder / "planner.ready",
        folder / "planner.log",
    )
    agent = Supervised(
        "agent process",
        [
            "agent",
            f"--planner=127.0.0.1:{port}",
            f"--socket={socket}",
            f"--ready-file={folder / 'agent.ready'}",
            "--log-format=json",
        ],
        folder / "agent.ready",
        folder / "agent.log",
    )
    for part in (planner, agent):
        part.start()
        stack.callback(part.stop)
    planner.wait_ready()
    agent.wait_ready()
    return Service(planner, agent, f"127.0.0.1:{port}", socket)


def start_ranks(folder: Path, *, ranks: int, socket: Path | None, hook_factory: str = "") -> Fleet:
    """Start the ranks, the first half on one node and the rest on another, and wait until they serve.

    hook_factory: see `FleetConfig`; negative controls put a broken engine port under the real hook with it.
    """
    config = FleetConfig(
        deployment=DEPLOYMENT,
        model_factory="demo.model:load",
        rank_ids=tuple(RankId(rank) for rank in range(ranks)),
        nodes=tuple(f"node{rank * min(2, ranks) // ranks}" for rank in range(ranks)),
        run_directory=str(folder),
        engine_port=free_port(),
        hook_port=free_port(),
        hook_sockets=() if socket is None else (str(socket),) * ranks,
        hook_factory=hook_factory,
        window_steps=WINDOW_STEPS,
        staging_bytes=STAGING_BYTES,
    )
    return launch_ranks(config, preload=["agent.hook.hook"])


def topology_of(fleet: Fleet) -> Topology:
    """Where the fleet's ranks are."""
    return Topology(fleet.config.rank_ids, fleet.config.nodes)
