"""Watches the planner the way an operator would: over gRPC, in a thread of its own, patient when it is away."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from eplb_service.cli.client import planner_client
from eplb_service.errors import EplbError
from eplb_service.pb.v1 import admin_pb2, placement_pb2

CALL_TIMEOUT_S = 3.0


@dataclass(slots=True)
class Seen:
    """What the planner last said. deployment: `DeploymentStatus`; generations: `GenerationView`, oldest first."""

    deployment: Any = None
    generations: list[Any] = field(default_factory=list)
    away: str = "not asked yet"


class Observer:
    """Asks for the status and the generations of one deployment every `period_s`."""

    def __init__(self, address: str, deployment: str, *, period_s: float = 0.4) -> None:
        self._address = address
        self._deployment = deployment
        self._period_s = period_s
        self._lock = threading.Lock()
        self._seen = Seen()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def seen(self) -> Seen:
        """A copy of what is known."""
        with self._lock:
            return Seen(self._seen.deployment, list(self._seen.generations), self._seen.away)

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(2 * CALL_TIMEOUT_S)

    def _watch(self) -> None:
        with planner_client(self._address, timeout_s=CALL_TIMEOUT_S) as client:
            while not self._stop.wait(self._period_s):
                try:
                    status = client.call(client.admin.Status, admin_pb2.StatusRequest())
                    mine = [view for view in status.deployments if view.deployment == self._deployment]
                    generations: list[Any] = []
                    if mine:
                        request = placement_pb2.ListGenerationsRequest(deployment=self._deployment, limit=100)
                        generations = list(client.call(client.placement.ListGenerations, request).generations)[::-1]
                except EplbError as error:
                    with self._lock:
                        self._seen.away = str(error)
                    continue
                with self._lock:
                    self._seen = Seen(mine[0] if mine else None, generations, "")
