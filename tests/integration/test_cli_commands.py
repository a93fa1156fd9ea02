"""Every command of `eplb` against a real planner process with ranks that speak the protocol: what people and programs get."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eplb_service import __version__
from eplb_service.cli.root import run
from tests.integration.planner_fleet import Fleet
from tests.integration.test_planner_loop import QUICK

pytestmark = pytest.mark.process
DEADLINE_S = 90.0
DEPLOYMENT = "chat"


class Stage:
    """A planner process in mode observe, and ranks that run in a thread of this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self.address = ""
        self.fleet: Fleet

    def start(self) -> None:
        ready, log = self._folder / "ready.json", self._folder / "log"
        settings = QUICK | {"planning.mode": "observe", "gate.min_tokens": "0"}
        flags = [part for key, text in settings.items() for part in ("--" + key.replace(".", "-").replace("_", "-"), text)]
        environment = {key: text for key, text in os.environ.items() if not key.startswith("EPLB_")}
        with log.open("w") as stream:
            self._planner = subprocess.Popen(
                [
                    *(sys.executable, "-m", "eplb_service", "serve", "--data-dir", str(self._folder / "data")),
                    *("--ready-file", str(ready), *flags),
                ],
                stdout=stream,
                stderr=stream,
                env=environment,
            )
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert self._planner.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        self.address = json.loads(ready.read_text())["address"]

    def start_fleet(self) -> None:
        self._thread.start()
        self.fleet = Fleet(self.address, deployment=DEPLOYMENT)
        self.join(self.fleet)

    def join(self, fleet: Fleet) -> None:
        asyncio.run_coroutine_threadsafe(fleet.__aenter__(), self._loop).result(DEADLINE_S)

    def leave(self, fleet: Fleet) -> None:
        asyncio.run_coroutine_threadsafe(fleet.__aexit__(), self._loop).result(DEADLINE_S)

    def report(self, hot: int) -> None:
        """Two windows in which one expert takes most tokens: what a plan is made from."""
        for _ in range(2):
            self._loop.call_soon_threadsafe(self.fleet.report, self.fleet.skewed(hot=hot))

    def go_on(self) -> None:
        """Let chunks flip that were held."""
        self.fleet.hold_flips = False
        self._loop.call_soon_threadsafe(self.fleet.vote)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.leave(self.fleet)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE_S)
        self._loop.close()
        self._planner.kill()
        self._planner.wait(DEADLINE_S)


class Eplb:
    """The command line, run here."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        """Stdout of a command that ends with `code`; one that fails says one sentence on stderr and nothing on stdout."""
        self._capsys.readouterr()
        found = run(list(words))
        said = self._capsys.readouterr()
        assert found == code, f"eplb {' '.join(words)} ended with {found}: {said.out}{said.err}"
        assert "Traceback" not in said.err
        if code:
            assert said.out == ""
            assert said.err.startswith("eplb: ")
            assert said.err.count("\n") == 1
            return said.err
        assert said.err == ""
        return said.out

    def json(self, *words: str) -> Any:
        """The one document that a command prints with `--output json`."""
        return json.loads(self(*words, "--output", "json"))

    def until(self, words: tuple[str, ...], holds: Callable[[Any], object], what: str) -> Any:
        """The first answer for which something holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds(answer := self.json(*words)):
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}; last: {answer}"
            time.sleep(0.02)
        return answer

    def settle(self, generation: int) -> Any:
        """Wait until a generation is active and observed or not under way any more."""
        show = ("generations", "show", str(generation))
        return self.until(show, lambda view: view["state"] == "active", f"generation {generation} to be active")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("cli"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def eplb(stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Eplb:
    monkeypatch.setenv("EPLB_PLANNER", stage.address)
    monkeypatch.delenv("EPLB_DEPLOYMENT", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return Eplb(capsys)


@pytest.fixture
def chat(stage: Stage, eplb: Eplb, monkeypatch: pytest.MonkeyPatch) -> Eplb:
    """With the ranks there, the deployment named, and load that a plan can be made from."""
    if not hasattr(stage, "fleet"):
        stage.start_fleet()
    monkeypatch.setenv("EPLB_DEPLOYMENT", DEPLOYMENT)
    eplb.until(("status",), lambda view: [one for one in view["deployments"] if one["state"] == "ready"], "a ready deployment")
    return eplb


def test_planner_without_deployments_says_so_and_what_to_start(eplb: Eplb) -> None:
    assert "no deployment yet: no agent has registered a rank (see `eplb agent --help`)" in eplb("status")
    assert eplb.json("status")["deployments"] == []
    for words in (("generations", "list"), ("placement", "show"), ("rebalance",), ("plan",), ("pause",)):
        assert "knows no deployment yet: no agent has registered a rank" in eplb(*words, code=2)


def test_status_shows_planner_store_settings_load_and_every_rank(stage: Stage, chat: Eplb) -> None:
    stage.report(hot=0)
    found = chat.until(("status",), lambda view: view["deployments"][0]["imbalance"], "a full window")
    assert (found["store_ok"], found["version"]) == (True, __version__)
    view = found["deployments"][0]
    assert (view["deployment"], view["state"], view["settings"]["mode"]) == (DEPLOYMENT, "ready", "observe")
    assert [rank["address"]["rank_id"] for rank in view["ranks"]] == [0, 1, 2, 3]
    assert len(view["rank_loads"]) == 3
    assert len(view["rank_loads"][0]) == 4

    settings = chat("status", DEPLOYMENT, "--settings")
    assert "  everything else is at its default: `eplb serve --help` lists all\n" in settings
    for key, text in found["configuration"].items():
        assert f"  {key} = {text}\n" in settings
    assert found["configuration"]["planning.policy"] == "greedy"
    page = chat("status", DEPLOYMENT)
    assert page.startswith("planner ")
    assert "everything else" not in page
    assert ": ok\n" in page
    for words in (
        "chat  ready",
        "mode observe, policy greedy",
        "as the engine loaded it",
        "worst layer 1.",
        "(layer 0 of tiny)",
    ):
        assert words in page
    rows = [line.split() for line in page.splitlines() if " node0 " in line or " node1 " in line]
    assert [row[:4] for row in rows] == [[str(rank), f"node{rank // 2}", "live", "yes"] for rank in range(4)]
    assert all(line == line.rstrip() for line in page.splitlines())


def test_an_operator_plans_rebalances_looks_back_pauses_and_resumes(stage: Stage, chat: Eplb) -> None:
    stage.report(hot=0)
    chat.until(("plan",), lambda answer: answer["verdict"]["move"], "a plan that pays")

    dry = chat("plan")
    assert "dry run of policy greedy, nothing is published" in dry
    assert "`eplb rebalance -d chat` would carry it out" in dry
    assert chat.json("plan")["proposal"]["generation"] == 0
    assert "nothing follows in mode observe" in chat("status")
    assert "no generation yet" in chat("generations", "list")
    assert chat.json("generations", "list")["generations"] == []

    # The same key gives the same answer, word for word, whatever happened in between.
    first = chat.json("rebalance", "--key", "one")
    assert (first["generation"], first["verdict"]["move"], first["idempotency_key"]) == (1, True, "one")
    made = chat.settle(1)
    assert chat.json("rebalance", "--key", "one") == first
    assert chat("rebalance", "--key", "one").startswith("chat: generation 1 is published; ")
    assert [view["generation"] for view in chat.json("generations", "list")["generations"]] == [1]
    assert "idempotency key 'one' was used before to rebalance" in chat("rollback", "0", "--key", "one", code=4)

    listed = chat("generations", "list", "--limit", "5").splitlines()
    assert listed[0].split()[:4] == ["generation", "state", "made", "before"]
    assert listed[1].split()[:2] == ["1", "active"]
    shown = chat("generations", "show", "1")
    for words in ("chat generation 1: active", "why", "moves", "flipped at steps", "decision to last flip", "longest flip"):
        assert words in shown
    assert made["moves"]["experts"] > 0
    stall = chat.json("generations", "show", "1")["flip_stall"]
    assert stall["measured_s"] > 0
    assert 0 < stall["expected_s"] < stall["limit_s"] == 0.01
    story = chat("generations", "show", "1", "--events")
    assert story.startswith(shown)
    rows = [line.split() for line in story[len(shown) :].splitlines()]
    assert rows[0][:4] == ["rollout", "of", "generation", "1:"]
    assert rows[1] == ["seconds", "epoch", "event", "chunk", "rank", "what"]
    assert rows[2][:3] == ["+0.000", "1", "generation.published"]
    assert rows[-1][2] == "rollout.finished"
    told = chat.json("generations", "show", "1", "--events")
    assert "rollout" not in chat.json("generations", "show", "1")
    assert (told["rollout"]["incomplete"], told["rollout"]["events"][1]["event"]) == ("", "rollout.started")
    assert [event["chunk_id"] is None for event in told["rollout"]["events"]][:3] == [True, True, False]

    table = chat("placement", "show", "--layer", "1")
    assert [line.split()[0] for line in table.splitlines()[3:7]] == ["1", "1", "2", "3"]
    assert "* the expert has more than one copy" in table
    live = chat.json("placement", "show")
    assert live["generation"] == 1
    assert live["placement"] == chat.json("placement", "show", "-g", "1")["placement"]
    only = chat.json("placement", "show", "--layer", "1")["placement"]["tables"][0]
    assert only["layer_ids"] == [1]
    assert only["physical_to_logical"] == [live["placement"]["tables"][0]["physical_to_logical"][1]]

    watched = chat("placement", "watch", "--count", "1", "--output", "json")
    assert watched.count("\n") == 1
    assert json.loads(watched)["generation"] == 1
    assert chat("placement", "watch", "--count", "1").startswith("chat: generation 1 live, active, digest ")
    assert chat("placement", "diff", "1", "0") == "chat: generation 1 and what is live hold the same experts in every slot\n"

    back = chat("rollback", "0", "--key", "two")
    assert back.startswith("chat: generation 2 is published; ")
    assert "as loaded by the engine" in back
    chat.settle(2)
    assert chat.json("rollback", "0", "--key", "two")["generation"] == 2
    changes = chat.json("placement", "diff", "1", "2")["changes"]
    assert f"{len(changes)} slots differ; " in chat("placement", "diff", "1", "2")
    assert {change["layer"]["layer_id"] for change in changes} <= {0, 1, 2}

    assert chat("pause", "--reason", "load test until noon") == (
        "chat: mode observe, paused (load test until noon), policy greedy\n"
    )
    assert "`eplb resume -d chat` ends it" in chat("status")
    assert "chat is paused (load test until noon); resume it first" in chat("rebalance", "--force", code=4)
    assert chat.json("resume")["paused"] is False
    assert chat("mode", "auto") == "chat: mode auto, not paused, policy greedy\n"
    assert chat.json("mode", "observe")["mode"] == "observe"


def test_an_operator_drains_a_rank_waits_until_it_may_be_stopped_and_gives_it_back(stage: Stage, chat: Eplb) -> None:
    assert "chat cannot drain ranks 1, 2: the ranks that stay (0, 3) have 2 x 3 = 6 slots" in chat("drain", "1", "2", code=4)
    assert "name at least one rank, or a node with --node; see `eplb drain --help`" in chat("drain", code=2)
    stage.fleet.hold_flips = True
    late = chat("drain", "3", "--wait", "0", "--key", "d", code=3)
    assert "after 0.0 s: rank 3 holds 9 experts over all layers, all of them live elsewhere too: do not stop it yet" in late
    assert "(chat is rolling_out); the drain goes on, `eplb status chat` tells how far it is" in late
    stage.go_on()
    said = chat("drain", "3", "--wait", "20", "--key", "d")
    assert said.startswith("chat: generation ")
    assert "[drain]" in said
    assert "rank 3 holds no expert that another has not: safe to stop" in said
    assert "rank 3 holds no expert that another has not: safe to stop" in chat("status")
    again = chat.json("drain", "3", "--key", "d")
    assert (again["rank_ids"], again["drains"][0]["state"], again["idempotency_key"]) == ([3], "safe_to_stop", "d")
    assert chat("pause").rstrip().endswith("policy greedy, drained ranks 3")
    chat("resume")
    assert "rank 2 is not drained; drained are 3" in chat("undrain", "2", code=2)
    assert chat("undrain", "--node", "node1") == "chat: mode observe, not paused, policy greedy\n"
    assert chat.json("status")["deployments"][0]["drains"] == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("drain", "9"), 2, "rank 9 is not among the ranks 0-3"),
        (("drain", "--node", "nope"), 2, "no rank is on node 'nope'; nodes are node0, node1"),
        (("status", "nope"), 2, "there is no deployment 'nope'; known: chat"),
        (("rebalance", "-d", "nope"), 2, "there is no deployment 'nope'; known: chat"),
        (("generations", "show", "77"), 2, "has no generation 77"),
        (("generations", "show", "77", "--events"), 2, "has no generation 77"),
        (("generations", "show", "0"), 2, "generation 0 is what the engine loaded by itself"),
        (("rollback", "77"), 2, "has no generation 77"),
        (("placement", "diff", "0", "77"), 2, "has no generation 77"),
        (("placement", "show", "--layer", "9"), 2, "chat has no MoE layer 9; its layers are 0, 1, 2"),
        (("placement", "show", "--layer", "9", "--output", "json"), 2, "chat has no MoE layer 9"),
        (("plan", "--policy", "gredy"), 2, "there is no policy 'gredy'; installed: elastic, greedy, ilp"),
        (("rebalance", "--policy", "gredy"), 2, "there is no policy 'gredy'"),
        (("rebalance", "--key", "k" * 129), 2, "idempotency key of 129 characters: give 1 to 128 printable characters"),
        (("rebalance", "--key", ""), 2, "idempotency key of 0 characters"),
        (("mode", "automatic"), 2, "'automatic' is not one of 'observe', 'auto'"),
        (("rollback", "last"), 2, "see `eplb rollback --help`"),
        (("stauts",), 2, "no such command 'stauts', did you mean status?"),
    ],
)
def test_what_does_not_exist_is_one_sentence(chat: Eplb, words: tuple[str, ...], code: int, sentence: str) -> None:
    assert sentence in chat(*words, code=code)


def test_with_two_deployments_one_must_be_named(stage: Stage, chat: Eplb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_DEPLOYMENT")
    other = Fleet(stage.address, deployment="draft", num_layers=1)
    stage.join(other)
    try:
        chat.until(("status",), lambda view: len(view["deployments"]) == 2, "two deployments")
        assert "has 2 deployments (chat, draft): name one with --deployment" in chat("pause", code=2)
        chat.until(("status", "draft"), lambda view: view["deployments"][0]["state"] == "ready", "the second to be ready")
        assert len(chat.json("placement", "show", "-d", "draft")["placement"]["tables"][0]["layer_ids"]) == 1
    finally:
        stage.leave(other)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("placement", "show"),
        ("placement", "watch"),
        ("placement", "diff", "1", "2"),
        ("generations", "list"),
        ("generations", "show", "1"),
        ("plan",),
        ("rebalance",),
        ("rollback", "1"),
        ("drain", "1"),
        ("undrain", "1"),
        ("pause",),
        ("resume",),
        ("mode", "auto"),
    ],
)
def test_without_a_planner_every_command_says_so(
    eplb: Eplb, closed_port: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_DEPLOYMENT", DEPLOYMENT)
    for output in ("table", "json"):
        said = eplb(*words, "--output", output, "--planner", f"127.0.0.1:{closed_port}", code=3)
        assert f"planner at 127.0.0.1:{closed_port} is not reachable (connection refused)" in said


def test_an_order_whose_answer_is_lost_tells_the_key_that_asks_again(eplb: Eplb) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for words in (("rebalance",), ("rollback", "3"), ("drain", "3")):
            said = eplb(*words, "-d", "chat", "--key", "k7", "--timeout", "0.3", "--planner", address, code=3)
            assert "the same command with --key k7 tells its answer" in said
