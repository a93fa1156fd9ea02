"""What a user can get wrong on the command line: each ends in one sentence that says what, the numbers and what to do.

Files are tried against the command in this process, services as processes of their own with a deadline. What else can be wrong
with `eplb serve` is in `test_planner_start`, with `eplb agent` in `test_agent_process`, with a data directory in
`test_embedded_store_processes`, on the wire in `test_convert`, with a hook that finds no agent process in `test_hook_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
import numpy as np
import pytest

from agent.adviser.config import VARIABLES as ADVISER_VARIABLES
from agent.command import agent
from agent.hook.config import VARIABLES
from eplb_service.cli.root import CommandTree, root, run
from eplb_service.config import load_config
from tests.integration.agent_doubles import FakeHook, address

DEADLINE_S = 60.0


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Load files, good and bad, in the present folder: 3 layers of 16 experts."""
    monkeypatch.chdir(tmp_path)
    good = np.random.default_rng(3).integers(1, 1000, (3, 16)).astype(np.float64)
    np.save("load.npy", good)
    for name, value in (("nan", np.nan), ("infinite", np.inf), ("negative", -2.0)):
        bad = good.copy()
        bad[1, 2] = value
        np.save(f"{name}.npy", bad)
    np.save("vector.npy", good[0])
    np.save("no_layers.npy", np.zeros((0, 16)))
    np.save("words.npy", np.array([["many", "few"]]))
    np.save("objects.npy", np.array([[{}]], object), allow_pickle=True)
    np.savez("two.npz", a=good, b=good)
    Path("empty.npy").write_bytes(b"")
    Path("text.npy").write_text("1 2 3\n")
    Path("cut.npy").write_bytes(Path("load.npy").read_bytes()[:-40])
    Path("empty.json").write_text(" ")
    Path("broken.json").write_text('{"loads": [[1, 2]')
    Path("ragged.json").write_text("[[1, 2], [3]]")
    Path("keys.json").write_text('{"load": [[1, 2]]}')
    Path("load.csv").write_text("1,2\n")
    Path("folder.npy").mkdir()
    np.save("map_short.npy", np.zeros((2, 20), np.int64))
    np.save("map_narrow.npy", np.tile(np.arange(16), (3, 1)))
    np.save("map_fractions.npy", np.full((3, 20), 0.5))
    np.save("map_uncovered.npy", np.zeros((3, 20), np.int64))
    Path("map_other.json").write_text(json.dumps({"num_logical": 8, "physical_to_logical": [[0] * 20] * 3}))
    return tmp_path


FLEET = ("--ranks", "4", "--slots-per-rank", "5")

PLANS = [
    ("missing file", ("--load", "none.npy", *FLEET), 2, ["there is no file none.npy"]),
    ("folder", ("--load", "folder.npy", *FLEET), 2, ["folder.npy is a folder without files", "looked for: sglang"]),
    ("empty npy", ("--load", "empty.npy", *FLEET), 2, ["empty.npy is empty"]),
    ("empty json", ("--load", "empty.json", *FLEET), 2, ["empty.json is empty"]),
    ("text for npy", ("--load", "text.npy", *FLEET), 2, ["text.npy is no load file that is known here", "numpy (.npy, .npz)"]),
    ("cut off", ("--load", "cut.npy", *FLEET), 2, ["cannot read cut.npy"]),
    ("python objects", ("--load", "objects.npy", *FLEET), 2, ["objects.npy", "Python objects, not numbers"]),
    ("words", ("--load", "words.npy", *FLEET), 2, ["words.npy: loads must be numbers"]),
    ("two arrays", ("--load", "two.npz", *FLEET), 2, ["two.npz holds 2 arrays", "name the loads one of"]),
    ("no layers", ("--load", "no_layers.npy", *FLEET), 2, ["no_layers.npy is empty", "(0, 16)"]),
    ("wrong shape", ("--load", "vector.npy", *FLEET), 2, ["must have shape (layers, experts)", "got (16,)"]),
    ("negative", ("--load", "negative.npy", *FLEET), 2, ["layer row 1 expert 2 is -2.0", "finite and >= 0"]),
    ("NaN", ("--load", "nan.npy", *FLEET), 2, ["layer row 1 expert 2 is nan", "finite and >= 0"]),
    ("infinite", ("--load", "infinite.npy", *FLEET), 2, ["layer row 1 expert 2 is inf", "finite and >= 0"]),
    ("broken json", ("--load", "broken.json", *FLEET), 2, ["broken.json is no valid JSON"]),
    ("ragged json", ("--load", "ragged.json", *FLEET), 2, ["ragged.json: rows differ in length"]),
    ("unknown keys", ("--load", "keys.json", *FLEET), 2, ["keys.json has keys ['load']", "expected loads"]),
    ("other format", ("--load", "load.csv", *FLEET), 2, ["load.csv is no load file that is known here", "looked for: sglang"]),
    (
        "fewer slots than experts",
        ("--load", "load.npy", "--ranks", "4", "--slots-per-rank", "3"),
        2,
        ["16 experts do not fit 4 ranks x 3 slots = 12", "use at least 4 slots per rank"],
    ),
    ("no slots", ("--load", "load.npy", "--ranks", "4", "--slots-per-rank", "0"), 2, ["at least 1; got 0"]),
    ("no ranks", ("--load", "load.npy", "--ranks", "0", "--slots-per-rank", "5"), 2, ["at least 1; got ranks=0"]),
    ("more nodes than ranks", ("--load", "load.npy", *FLEET, "--nodes", "5"), 2, ["5 nodes for 4 ranks", "--nodes 4 or fewer"]),
    ("groups and experts", ("--load", "load.npy", *FLEET, "--groups", "3"), 2, ["16 experts do not divide into 3 groups"]),
    ("groups and nodes", ("--load", "load.npy", *FLEET, "--nodes", "4", "--groups", "2"), 2, ["2 expert groups", "4 nodes"]),
    ("unknown policy", ("--load", "load.npy", *FLEET, "--policy", "gredy"), 2, ["'gredy'", "greedy, ilp"]),
    ("size of the fleet", ("--load", "load.npy", "--ranks", "4"), 2, ["--load needs --slots-per-rank", "`eplb plan --help`"]),
    ("a word for a number", ("--load", "load.npy", "--ranks", "four"), 2, ["'four' is not a valid integer"]),
    ("current: missing", ("--load", "load.npy", *FLEET, "--current", "none.json"), 2, ["there is no file none.json"]),
    ("current: layers", ("--load", "load.npy", *FLEET, "--current", "map_short.npy"), 2, ["2 layers, expected 3"]),
    (
        "current: slots",
        ("--load", "load.npy", *FLEET, "--current", "map_narrow.npy"),
        2,
        ["3 layers x 16 slots", "the plan is for 3 x 20"],
    ),
    ("current: fractions", ("--load", "load.npy", *FLEET, "--current", "map_fractions.npy"), 2, ["integers; got float64"]),
    ("current: uncovered", ("--load", "load.npy", *FLEET, "--current", "map_uncovered.npy"), 2, ["no slot for expert 1"]),
    ("current: experts", ("--load", "load.npy", *FLEET, "--current", "map_other.json"), 2, ["num_logical 8, expected 16"]),
    (
        "out: no folder",
        ("--load", "load.npy", *FLEET, "--out", "none/plan.json"),
        2,
        ["there is no folder none"],
    ),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("words", "code", "sentences"), [row[1:] for row in PLANS], ids=[row[0] for row in PLANS])
def test_bad_plan_is_one_sentence(
    files: Path, words: tuple[str, ...], code: int, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *words]) == code
    one_sentence(capsys.readouterr().err, sentences)


def one_sentence(said: str, words: list[str]) -> None:
    assert said.startswith("eplb: "), said
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    for word in words:
        assert word in said


def clean_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("EPLB_")}


def as_user(*words: str, environment: Mapping[str, str] = {}) -> tuple[int, str]:
    """Exit code and stderr of the command as a process; one that does not end by itself fails the test."""
    done = subprocess.run(
        [sys.executable, "-m", "eplb_service", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**clean_environment(), **environment},
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "environment", "code", "sentences"),
    [
        (("serve", "--gate-min-coverge", "1"), {}, 2, ["--gate-min-coverge", "--gate-min-coverage"]),
        (("serve",), {"EPLB_TYPO_HERE": "1"}, 2, ["EPLB_TYPO_HERE names no setting"]),
        (("serve",), {"EPLB_GATE_MIN_COVERGE": "1"}, 2, ["nearest known one is EPLB_GATE_MIN_COVERAGE"]),
        (("serve", "--config", "/none.toml"), {}, 2, ["configuration file /none.toml cannot be read: No such file"]),
        (("serve", "--data-dir", "/proc/eplb", "--log-level", "error"), {}, 2, ["data directory /proc/eplb", "give one"]),
        (("agent", "--planner", "p:1", "--socket", "/none/s"), {}, 2, ["folder /none of the socket s does not exist"]),
        (("agent", "--planner", "p:1", "--socket", "/tmp/" + "s" * 120), {}, 2, ["has 125 bytes", "at most 107"]),
        (("status", "--planner", "127.0.0.1:1", "--output", "json"), {}, 3, ["planner at 127.0.0.1:1 is not reachable"]),
    ],
)
def test_bad_start_ends_as_a_process_with_one_sentence(
    words: tuple[str, ...], environment: dict[str, str], code: int, sentences: list[str]
) -> None:
    found, said = as_user(*words, environment=environment)
    assert found == code, said
    one_sentence(said, sentences)


@pytest.mark.process
def test_store_that_is_not_there_ends_the_planner_with_its_address_and_no_password() -> None:
    flags = ("--port", "0", "--metrics-port", "0", "--log-level", "error")
    found, said = as_user("serve", *flags, "--store", "redis://127.0.0.1:1/0", environment={"EPLB_STORE_PASSWORD": "hunter2"})
    assert found == 3
    one_sentence(said, ["store redis://127.0.0.1:1 is unreachable", "check that the server runs"])
    assert "hunter2" not in said


def variables_of(command: click.Command) -> Iterator[str]:
    """Environment variables that a command and those below it read."""
    for parameter in command.params:
        yield from [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ()
    if isinstance(command, CommandTree):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from variables_of(found)
    elif isinstance(command, click.Group):
        for found in command.commands.values():
            yield from variables_of(found)


def test_variables_of_hook_agent_and_clients_do_not_trouble_the_planner() -> None:
    """One environment for everything on a node, as container files and units have it."""
    theirs = {*VARIABLES, *ADVISER_VARIABLES, *variables_of(root), *variables_of(agent)}
    assert {"EPLB_PLANNER", "EPLB_DEPLOYMENT", "EPLB_TLS_CA", "EPLB_SOCKET", "EPLB_OFF_FILE", "EPLB_AGENT_NODE"} <= theirs
    assert load_config(environment=dict.fromkeys(theirs, "1")).given() == {}


@pytest.mark.process
def test_a_rank_that_disagrees_about_the_model_is_told_at_its_agent_process_what_differs() -> None:
    """A real planner refuses it; the sentence is where the operator of that node looks."""

    async def scenario(folder: Path) -> None:
        planner_ready, agent_ready, socket = folder / "planner", folder / "agent", folder / "agent.sock"
        with contextlib.ExitStack() as stack:
            started(
                stack, folder / "planner.log", planner_ready, "serve", "--port", "0", "--metrics-enabled", "false",
                "--data-dir", str(folder / "data"), "--ready-file", str(planner_ready),
            )  # fmt: skip
            target = json.loads(planner_ready.read_text())["address"]
            log = folder / "agent.log"
            started(
                stack, log, agent_ready, "agent", "--planner", target, "--socket", str(socket), "--ready-file", str(agent_ready)
            )
            good, bad = FakeHook(address(0)), FakeHook(address(1), digest="another checkpoint")
            await good.link(socket)
            await asyncio.to_thread(wait_for, lambda: accepted(target), "the first rank to be taken")
            await bad.link(socket)
            sentence = "eplb agent: rank 1 of deployment moe is refused: "
            await asyncio.to_thread(wait_for, lambda: sentence in log.read_text(), "the refusal in the agent's output")
            line = next(line for line in log.read_text().splitlines() if line.startswith(sentence))
            for word in ("rank 0", "digest", "another checkpoint"):
                assert word in line
            assert "Traceback" not in log.read_text()
            await good.drop()
            await bad.drop()

    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        asyncio.run(asyncio.wait_for(scenario(Path(name)), DEADLINE_S))


def accepted(target: str) -> bool:
    """Whether the planner knows the deployment, asked as an operator would."""
    from eplb_service.cli.client import planner_client
    from eplb_service.pb.v1 import admin_pb2

    with planner_client(target, timeout_s=5) as client:
        return bool(client.call(client.admin.Status, admin_pb2.StatusRequest()).deployments)


def started(stack: contextlib.ExitStack, log: Path, ready: Path, *words: str) -> None:
    """Start a command and wait until it is ready; it is killed with the stack."""
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "eplb_service", *words], stdout=stream, stderr=stream, env=clean_environment()
        )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    wait_for(lambda: ready.exists() and ready.stat().st_size > 0, f"eplb {words[0]} to be ready", log)


def wait_for(holds: Callable[[], object], what: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S / 2
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}: {log.read_text() if log else ''}"
        time.sleep(0.02)
