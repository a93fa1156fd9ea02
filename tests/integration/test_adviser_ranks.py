"""The adviser over real gloo groups, and against a real agent process with a real planner behind it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch.distributed

from agent.adviser.presence import all_present
from agent.engine.reference.launch import free_port
from eplb_service.advice import AdviceRequest
from tests.adviser_doubles import ScriptedAgent, keeping, moving, shuffled_map, silent
from tests.integration.adviser_ranks import NUM_LAYERS, NUM_LOGICAL, POINTS, Ranks, ranks_up
from tests.integration.test_planner_process import Serve, serve

__all__ = ["serve"]  # a fixture

pytestmark = pytest.mark.process
dist: Any = torch.distributed
LOAD = np.arange(1.0, NUM_LAYERS * NUM_LOGICAL + 1).reshape(NUM_LAYERS, NUM_LOGICAL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        yield Path(name)


def fresh(question: AdviceRequest) -> npt.NDArray[np.int32]:
    """Another map for each question."""
    num_layers, num_physical = question.current.shape
    return shuffled_map(question.sequence, num_layers, NUM_LOGICAL, num_physical, 2)


def test_a_rank_that_fails_at_any_point_leaves_both_on_one_map_and_in_step(folder: Path) -> None:
    """Each rank at each point, in one life of the group: a collective that one of them skipped would show in the next call."""
    agent = ScriptedAgent(folder / "s", moving(fresh))
    with ranks_up(folder, folder / "s") as ranks:
        both = ranks.call(LOAD)
        assert {done.outcome for done in both} == {"moved"}
        for point in POINTS:
            for rank in (0, 1):
                both = ranks.call(LOAD, {rank: point})
                assert {done.outcome for done in both} <= {"failed", "disagreed"}, (point, rank, both)
                assert np.array_equal(both[0].rows, both[1].rows)
                assert both[0].reduces == both[1].reduces, (point, rank)
        agent.answer = keeping
        assert {done.outcome for done in ranks.call(LOAD)} == {"kept"}
        agent.answer = silent
        assert {done.outcome for done in ranks.call(LOAD)} == {"away"}
        agent.answer = moving(fresh)
        both = ranks.call(LOAD)
        assert {done.outcome for done in both} == {"moved"}
        assert np.array_equal(both[0].rows, both[1].rows)
    agent.close()


def test_a_rank_that_dies_in_the_middle_leaves_the_other_on_its_map(folder: Path) -> None:
    """The group itself breaks: gloo tells the one that is left, which keeps its map and does not raise."""
    agent = ScriptedAgent(folder / "s", moving(fresh))
    with ranks_up(folder, folder / "s") as ranks:
        before = ranks.call(LOAD)[0].rows
        ranks.pipes[1].send(None)  # it is gone at once
        (left,) = ranks.call(LOAD, only=(0,))
        assert left.outcome == "group"
        assert "the ranks could not talk to one another" in left.reason
        assert np.array_equal(left.rows, before)
    agent.close()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_collective_that_fails_on_one_rank_ends_at_the_groups_time_out_and_nobody_moves(folder: Path, number: int) -> None:
    """The group is broken then, and stays so: the engine's own collectives on it fail too. No rank goes where its peer is not.

    What could end otherwise: the last collective may end well on one rank and not on another; nobody can tell it from outside.
    """
    agent = ScriptedAgent(folder / "s", moving(fresh))
    with ranks_up(folder, folder / "s", group_timeout_s=1.0) as ranks:
        before = ranks.call(LOAD)[0].rows
        for fail_at in ({1: f"all_reduce {number}"}, {}):
            both = ranks.call(LOAD, fail_at)
            assert [done.outcome for done in both] == ["group", "group"]
            assert all(np.array_equal(done.rows, before) for done in both)
    agent.close()


def present(port: int, size: int, ranks: list[int], *, attempt: int = 1, timeout_s: float = 0.3) -> dict[int, str]:
    """What some ranks of a group find out at once."""
    found: dict[int, str] = {}

    def run(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=20))
        found[rank] = all_present(store, "0-3-4", attempt=attempt, rank=rank, size=size, timeout_s=timeout_s)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_ranks_take_part_only_when_the_adviser_is_on_in_all_of_them() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))
    port = store.port
    missing = present(port, 4, [0, 1, 3])
    assert len(set(missing.values())) == 1
    assert "the adviser is not on in rank 2 of 4 after 0.3 s" in missing[0]
    late = present(port, 4, [2])  # it comes after the others have decided
    assert late[2] == missing[0]
    assert present(port, 4, [0, 1, 2, 3], attempt=2, timeout_s=20) == dict.fromkeys(range(4), "")


def until_moved(ranks: Ranks, hot: int, most: int = 12) -> list[str]:
    """Skewed load until the planner says move, and one call more; the outcomes."""
    load = np.full((NUM_LAYERS, NUM_LOGICAL), 2001.0)
    load[:, hot] = 20_001.0
    outcomes: list[str] = []
    both = ranks.call(load)
    for _ in range(most):
        both = ranks.call(load)
        assert np.array_equal(both[0].rows, both[1].rows)
        assert {done.reason for done in both} == {both[0].reason}
        outcomes.append(both[0].outcome)
        if "moved" in outcomes[:-1]:
            return outcomes
    raise AssertionError(f"never told to move: {outcomes}, last: {both[0].reason}")


def test_through_a_real_agent_process_the_planner_is_asked_and_the_ranks_move(serve: Serve, folder: Path) -> None:
    port = free_port()
    serve("--port", str(port), "--planning-expert-bytes", "1000").wait_ready()
    socket = folder / "agent.sock"
    ready = folder / "ready"
    command = [sys.executable, "-m", "tests.integration.eplb_command", "agent", "--planner", f"127.0.0.1:{port}"]
    environment = {key: text for key, text in os.environ.items() if not key.startswith("EPLB_")}
    agent = subprocess.Popen(
        [*command, "--socket", str(socket), "--ready-file", str(ready)], env=environment, stderr=sys.stderr
    )
    try:
        with ranks_up(folder, socket, deployment="vllm-chat", timeout_s=20.0) as ranks:
            while not ready.exists():
                assert agent.poll() is None, "the agent process ended"
                time.sleep(0.02)
            outcomes = until_moved(ranks, 4)  # the linear map holds it on one rank alone
            assert outcomes.count("moved") == 1
            assert outcomes[-1] == "kept"
    finally:
        agent.kill()
        agent.wait(10)
