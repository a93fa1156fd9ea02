"""`eplb serve` as a process: ready file, health, metrics, signals, ended at named points. Bad starts: `test_planner_start`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from agent.engine.reference.launch import free_port
from eplb_service import failpoints
from eplb_service.pb.v1 import placement_pb2
from tests.integration.planner_fleet import Fleet, until
from tests.integration.test_planner_loop import QUICK, first_generation, generation_of, reach, run

pytestmark = pytest.mark.process
READY_S = 90.0


@dataclass
class Process:
    """One life of a planner."""

    popen: subprocess.Popen[str]
    ready_file: Path
    log: Path

    def wait_ready(self) -> dict[str, str]:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.ready_file.exists():
                found: dict[str, str] = json.loads(self.ready_file.read_text())
                return found
            if self.popen.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"planner not ready, exit code {self.popen.poll()}:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)


Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(*flags, failpoints="…")` starts a planner on one data directory; all are killed at the end."""
    running: list[Process] = []

    def start(*flags: str, failpoint: str = "") -> Process:
        number = len(running)
        settings = QUICK | {"log.level": "info"}
        arguments = [part for key, text in settings.items() for part in ("--" + key.replace(".", "-").replace("_", "-"), text)]
        ready_file, log = tmp_path / f"ready{number}.json", tmp_path / f"log{number}"
        environment = {key: text for key, text in os.environ.items() if not key.startswith("EPLB_")}
        with log.open("w") as stream:
            popen = subprocess.Popen(
                [
                    *(sys.executable, "-m", "eplb_service", "serve", "--data-dir", str(tmp_path / "data")),
                    *("--ready-file", str(ready_file), *arguments, *flags),
                ],
                stdout=stream,
                stderr=stream,
                text=True,
                env=environment | {"EPLB_FAILPOINTS": failpoint},
            )
        running.append(Process(popen, ready_file, log))
        return running[-1]

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        print(process.log.read_text()[-8000:])  # shown when the test fails


def fails(process: Process, code: int, *words: str) -> None:
    """It ends with this code and one sentence."""
    assert process.popen.wait(40) == code, process.log.read_text()
    text = process.log.read_text()
    assert "Traceback" not in text
    sentences = [line for line in text.splitlines() if line.startswith("eplb: ")]
    assert len(sentences) == 1, text
    for word in words:
        assert word in sentences[0]


POINTS = (
    "planner.generation.persisted",
    "planner.stage.sent",
    "planner.arm.sent",
    "planner.flipped.recorded",
)


def test_planner_killed_at_every_named_point_in_turn_comes_back_and_finishes_the_rollout(serve: Serve, tmp_path: Path) -> None:
    """Each life ends as `kill -9` would end it: no finally, no flush, and the embedded store dies with it."""
    port = free_port()
    first = serve("--port", str(port), failpoint=f"{POINTS[0]}=exit:{tmp_path / POINTS[0]}")
    first.wait_ready()

    async def scenario() -> None:
        async with Fleet(f"127.0.0.1:{port}", num_layers=5) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            life = first
            for point, following in zip(POINTS, (*POINTS[1:], ""), strict=True):
                await until(lambda life=life: life.popen.poll() is not None, f"the planner to die at {point}")  # type: ignore[misc]
                assert (tmp_path / point).exists()
                assert life.popen.returncode == failpoints.EXIT_CODE
                assert fleet.all_route_alike()
                # Before the last point the rollout is not over; at it, at least the end of it was not recorded.
                assert 0 in fleet.live_generations or point == POINTS[-1]
                armed = f"{following}=exit:{tmp_path / following}" if following else ""
                life = serve("--port", str(port), failpoint=armed)
                await asyncio.to_thread(life.wait_ready)
            view = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            assert view.epoch == 1
            assert fleet.live_generations == {1}
            assert fleet.all_route_alike()
            status = await reach(fleet, "ready")
            assert (status.epoch, status.live_generation) == (len(POINTS) + 1, 1)
            fleet.report(fleet.skewed(hot=5))
            fleet.report(fleet.skewed(hot=5))
            await until(lambda: fleet.live_generations == {2}, "the next generation")

    run(scenario())


def test_planner_that_stands_still_while_armed_is_killed_and_the_armed_ranks_flip_without_it(
    serve: Serve, tmp_path: Path
) -> None:
    port = free_port()
    marker = tmp_path / "paused"
    first = serve("--port", str(port), failpoint=f"planner.arm.sent=pause:{marker}")
    first.wait_ready()

    async def scenario() -> None:
        async with Fleet(f"127.0.0.1:{port}", hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await until(marker.exists, "the planner to reach the point")
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
            first.kill()
            fleet.hold_flips = False
            fleet.vote()
            assert fleet.live_generations == {0, 1}
            await asyncio.to_thread(serve("--port", str(port)).wait_ready)
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            assert fleet.live_generations == {1}

    run(scenario())


def test_planner_shows_itself_refuses_a_second_one_and_stops_on_sigterm(serve: Serve) -> None:
    process = serve("--metrics-enabled", "true", "--metrics-port", "0")
    ready = process.wait_ready()
    assert int(ready["pid"]) == process.popen.pid
    with grpc.insecure_channel(ready["address"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness", "eplb.v1.AdminService", "eplb.v1.AgentService", "eplb.v1.PlacementService"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert {"eplb.v1.AdminService", "grpc.health.v1.Health"} <= names

    async def scenario() -> None:
        async with Fleet(ready["address"]) as fleet:
            await first_generation(fleet)

    run(scenario())
    page = urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=5).read().decode()
    for line in (
        'eplb_verdicts_total{code="move",deployment="chat"} 1.0',
        'eplb_window_reports_total{deployment="chat",outcome="accepted"} 4.0',
        'eplb_chunks_total{deployment="chat",outcome="flipped"} 3.0',
        'eplb_generations_total{deployment="chat",outcome="active"} 1.0',
        'eplb_moved_bytes_total{deployment="chat",link="same_node"} 12000.0',
        "eplb_store_up 1.0",
    ):
        assert line in page
    assert "Max rank load / mean rank load" in page

    second = serve()
    fails(second, 4, f"is in use by the planner with pid {process.popen.pid}")
    assert process.popen.poll() is None

    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(15) == 0
    assert not process.ready_file.exists()
    assert "Traceback" not in process.log.read_text()
