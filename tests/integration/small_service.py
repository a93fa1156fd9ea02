"""A planner and an agent process for ranks that a test drives itself, and questions to the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.engine.reference.launch import free_port
from demo.processes import Supervised
from eplb_service.cli.client import planner_client
from eplb_service.cli.generations import state_text
from eplb_service.errors import ConflictError, EnvironmentFault
from eplb_service.pb.v1 import admin_pb2, placement_pb2


@dataclass
class Service:
    """A planner and an agent process; questions to the planner that it may refuse for now."""

    folder: Path
    parts: list[Supervised] = field(default_factory=list)
    ordered: int = 0

    def __post_init__(self) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.socket = str(self.folder / "agent.sock")
        commands = {
            "planner": [
                *("serve", f"--port={port}", f"--data-dir={self.folder / 'store'}", "--metrics-enabled=false"),
                *("--mode=observe", "--planning-windows=2", "--policy=greedy", f"--ready-file={self.folder / 'planner.ready'}"),
            ],
            "agent": [
                *("agent", f"--planner={self.address}", f"--socket={self.socket}"),
                f"--ready-file={self.folder / 'agent.ready'}",
            ],
        }
        for name, words in commands.items():
            part = Supervised(name, words, self.folder / f"{name}.ready", self.folder / f"{name}.log")
            part.start()
            self.parts.append(part)

    def call(self, make: Callable[[Any], Any]) -> Any:
        """The answer; None while the planner cannot."""
        try:
            with planner_client(self.address, timeout_s=20.0) as client:
                return make(client)
        except (ConflictError, EnvironmentFault):
            return None

    def deployment(self) -> Any:
        """What is said of the one deployment; None while it is not known."""
        reply = self.call(lambda client: client.call(client.admin.Status, admin_pb2.StatusRequest()))
        return reply.deployments[0] if reply is not None and reply.deployments else None

    def is_ready(self) -> bool:
        """Whether all ranks of the deployment are there and what is live is known."""
        return getattr(self.deployment(), "state", "") == "ready"

    def has_ordered_a_rebalance(self) -> bool:
        """Whether a generation was published by force, which needs windows first; its number is `ordered`."""
        request = admin_pb2.RebalanceRequest(deployment="test", idempotency_key="once", force=True)
        reply = self.call(lambda client: client.call(client.admin.Rebalance, request))
        self.ordered = 0 if reply is None else int(reply.generation)
        return self.ordered > 0

    def is_active(self) -> bool:
        """Whether the ordered generation is live on all ranks."""
        request = placement_pb2.ListGenerationsRequest(deployment="test", limit=10)
        reply = self.call(lambda client: client.call(client.placement.ListGenerations, request))
        states = {int(view.generation): state_text(view.state) for view in reply.generations} if reply is not None else {}
        return states.get(self.ordered) == "active"

    def last_words(self) -> str:
        return "\n".join(f"{part.name}:\n{part.last_words(20)}" for part in self.parts)
