"""vLLM's real load balancer, a real agent process and a real planner: skewed load, until the engine went where it was told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.adviser_doubles import linear_map
from tests.engines.ranks import NUM_LOGICAL, NUM_PHYSICAL, EngineCheckError, RankResult, all_route_by, ranks_of
from tests.engines.vllm_ranks import HOT, LAYERS, start

STARTED_S = 60.0
INTERVALS = 10
SETTINGS = (
    *(
        "--planning-mode",
        "auto",
        "--planning-policy",
        "greedy",
        "--planning-interval-s",
        "0",
        "--planning-expert-bytes",
        "1000",
    ),
    *("--gate-min-generation-age-s", "0", "--cost-seconds-per-step", "0.1", "--cost-horizon-steps", "10000"),
    *("--cost-bytes-per-s", "1e9", "--metrics-enabled", "false", "--log-level", "error"),
)


def check(release: str, *, is_async: bool, say: Callable[[str], None]) -> None:
    """Raises EngineCheckError when the engine is not told to move within some intervals, or does not end where it was told."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        agent_socket = folder / "agent.sock"
        with (
            _service(folder, agent_socket) as planner,
            ranks_of("vllm", release, start, agent_socket, folder, is_async=is_async) as ranks,
        ):
            first = {name: linear_map(layers, NUM_LOGICAL, NUM_PHYSICAL) for name, layers in LAYERS.items()}
            moved: list[str] = []
            for number in range(INTERVALS):
                results = ranks.interval("interval", HOT + 5)
                all_route_by(f"interval {number + 1}", results, {name: results[0].maps[name] for name in LAYERS})
                said = _of_target(results)
                say(f"  interval {number + 1:<2} {max(result.seconds for result in results) * 1000:8.1f} ms   {said[:150]}")
                if moved and said.startswith("adviser: kept"):
                    break
                moved += [said] if said.startswith("adviser: moved") else []
            else:
                raise EngineCheckError(f"the planner did not tell it to move and then to stay in {INTERVALS} intervals")
            copies = np.count_nonzero(results[0].maps["target"] == 5, axis=1)
            if np.array_equal(results[0].maps["target"], first["target"]) or not (copies >= 2).all():
                raise EngineCheckError(f"told {moved}, but the hot expert has {copies.tolist()} copies in the layers")
            say(f"  the record of generation 1: {_record(planner, held_steps=not is_async)}")


def _of_target(results: list[RankResult]) -> str:
    lines = [line for result in results for line in result.said if "(check)" in line]
    return lines[0] if lines else "(the same as before)"


def _record(planner: str, *, held_steps: bool) -> str:
    """What the planner knows of the first generation's move. Raises EngineCheckError when that is not what happened."""
    command = ["generations", "show", "1", "--deployment", "check", "--planner", planner, "--output", "json"]
    line = [sys.executable, "-m", "tests.integration.eplb_command", *command]
    found = json.loads(subprocess.run(line, check=True, capture_output=True, timeout=STARTED_S).stdout)
    copied_s, told = float(found.get("copied_s", 0.0)), bool(found.get("copy_held_steps", False))
    if not 0 < copied_s <= found["rollout_s"] or told != held_steps:
        raise EngineCheckError(f"generation 1 was carried out in {copied_s} s, steps held up: {told}; its record is {found}")
    return f"told to shown {found['rollout_s']:.3f} s, carried out in {copied_s:.3f} s"


@contextmanager
def _service(folder: Path, agent_socket: Path) -> Iterator[str]:
    """A planner and an agent process, ready; killed with the block. Gives the planner's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_")}
    planner_ready, agent_ready = folder / "planner-ready", folder / "agent-ready"
    commands = [
        ["serve", "--port", str(port), "--data-dir", str(folder / "data"), "--ready-file", str(planner_ready), *SETTINGS],
        ["agent", "--planner", f"127.0.0.1:{port}", "--socket", str(agent_socket), "--ready-file", str(agent_ready)],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, ready in zip(commands, (planner_ready, agent_ready), strict=True):
            with (folder / f"{command[0]}.log").open("wb") as log:
                line = [sys.executable, "-m", "tests.integration.eplb_command", *command]
                running.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))
            deadline = time.monotonic() + STARTED_S
            while not ready.exists():
                if running[-1].poll() is not None or time.monotonic() > deadline:
                    raise EngineCheckError(
                        f"`eplb {command[0]}` did not start: {(folder / f'{command[0]}.log').read_text()[-2000:]}"
                    )
                time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()
