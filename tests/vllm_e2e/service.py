"""A real planner and a real agent process, and what passes between the engine and them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.adviser import client
from agent.engine.reference.launch import free_port
from agent.frames import encode
from demo.processes import Supervised
from eplb_service import __version__
from eplb_service.advice import Advice, AdviceRequest
from eplb_service.cli.client import planner_client
from eplb_service.cli.generations import state_text
from eplb_service.errors import ConflictError, DeadlineError, EnvironmentFault
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from tests.adviser_doubles import ScriptedAgent
from tests.vllm_e2e.checks import CheckError
from tests.vllm_e2e.plain_model import EXPERT_BYTES

READY_S = 300.0
"""Of a planner or an agent process, on a machine that has other work."""
ANSWER_S = 30.0
"""Of a question to the planner."""
SETTINGS = {
    "mode": "auto", "policy": "greedy", "planning-interval-s": "0", "planning-windows": "12",
    "planning-expert-bytes": str(EXPERT_BYTES), "gate-min-generation-age-s": "0", "cost-seconds-per-step": "0.1",
    "cost-horizon-steps": "10000", "cost-bytes-per-s": "1e9", "store-owner": "vllm-e2e",
    "metrics-enabled": "false",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A question of the engine, and what it was answered; None = nothing."""

    question: AdviceRequest
    answer: Advice | None


class Service:
    """The two processes, and between the engine and them one that hands every question on and keeps it."""

    def __init__(self, folder: Path, deployment: str) -> None:
        self._deployment = deployment
        port = free_port()
        self._address = f"127.0.0.1:{port}"
        agent_socket, self.socket = folder / "agent.sock", folder / "asked.sock"
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        self._planner = Supervised(
            "planner",
            [
                "serve",
                *settings,
                f"--port={port}",
                f"--data-dir={folder / 'store'}",
                f"--ready-file={folder / 'planner.ready'}",
            ],
            folder / "planner.ready",
            folder / "planner.log",
        )
        self._agent = Supervised(
            "agent",
            ["agent", f"--planner={self._address}", f"--socket={agent_socket}", f"--ready-file={folder / 'agent.ready'}"],
            folder / "agent.ready",
            folder / "agent.log",
        )
        self._agent_socket = str(agent_socket)
        self.asked: list[Asked] = []
        self._recorder = ScriptedAgent(self.socket, self._hand_on)

    def start(self) -> None:
        """Start both, and wait until they serve."""
        for part in (self._planner, self._agent):
            part.start()
            self._wait_ready(part)

    def _wait_ready(self, part: Supervised) -> None:
        try:
            part.wait_ready(READY_S)
        except (DeadlineError, EnvironmentFault) as error:
            raise CheckError(str(error)) from None

    def stop(self) -> None:
        """End all."""
        self._recorder.close()
        self._agent.stop()
        self._planner.stop()

    def kill_planner(self) -> None:
        """As a machine that fails: no word to anybody. Returns when it is dead."""
        os.kill(self._planner.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self._planner.pid, os.WEXITED | os.WNOWAIT)

    def restart_planner(self) -> None:
        """Start it again, on what it had stored."""
        if not self._planner.revive():
            raise CheckError("the planner that was killed is alive")
        self._wait_ready(self._planner)

    def _hand_on(self, question: AdviceRequest) -> bytes | None:
        answer: Advice | None = None
        with contextlib.suppress(client.NoAnswerError):
            answer = client.ask(self._agent_socket, question, timeout_s=question.timeout_s, release=__version__)
        self.asked.append(Asked(question, answer))
        return None if answer is None else encode(answer)

    def wait_for_questions(self, number: int, deadline_s: float) -> None:
        """Until so many were answered. Raises CheckError at the deadline."""
        wait_until(lambda: len(self.asked) >= number, f"question {number} (there were {len(self.asked)})", deadline_s)

    # ── what the planner says ────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> Any:
        """Of the deployment. Raises CheckError when the planner does not know it."""
        reply = self._call(lambda planner: planner.call(planner.admin.Status, admin_pb2.StatusRequest()))
        for found in reply.deployments:
            if found.deployment == self._deployment:
                return found
        raise CheckError(f"the planner knows no {self._deployment}, only {[found.deployment for found in reply.deployments]}")

    def generations(self) -> dict[int, str]:
        """State of each generation, by number."""
        request = placement_pb2.ListGenerationsRequest(deployment=self._deployment, limit=100)
        reply = self._call(lambda planner: planner.call(planner.placement.ListGenerations, request))
        return {int(view.generation): state_text(view.state) for view in reply.generations}

    def live_rows(self) -> npt.NDArray[np.int32]:
        """The map that the planner holds for live. Shape (L, P)."""
        request = placement_pb2.GetPlacementRequest(deployment=self._deployment)
        reply = self._call(lambda planner: planner.call(planner.placement.GetPlacement, request))
        return array_of(reply.placement.tables[0].physical_to_logical, "<i4").astype(np.int32)

    def _call(self, make: Callable[[Any], Any]) -> Any:
        try:
            with planner_client(self._address, timeout_s=ANSWER_S) as planner:
                return make(planner)
        except (ConflictError, EnvironmentFault) as error:
            raise CheckError(f"the planner says: {error}") from None


def array_of(packed: Any, dtype: str) -> npt.NDArray[Any]:
    """An array of the planner's answers."""
    return np.frombuffer(packed.data, dtype).reshape(tuple(packed.shape))


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float) -> None:
    """Raises CheckError when it does not hold by the deadline (a moment of `time.monotonic`)."""
    while not holds():
        if time.monotonic() > deadline_s:
            raise CheckError(f"waited in vain for {what}")
        time.sleep(0.02)


@contextmanager
def service_in(folder: Path, deployment: str) -> Iterator[Service]:
    """Up within the block."""
    service = Service(folder, deployment)
    try:
        service.start()
        yield service
    finally:
        service.stop()
