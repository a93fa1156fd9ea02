"""Named points: fire once, mark their file, end or hold the process; mistakes are told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eplb_service import failpoints
from eplb_service.errors import InvalidInputError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    failpoints.forget()
    yield
    failpoints.forget()


@pytest.mark.parametrize("text", ["a", "a=", "a=exit", "a=exit:", "=exit:/f", "a=stop:/f", "a=exit:/f,b"])
def test_what_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(InvalidInputError, match="EPLB_FAILPOINTS has"):
        failpoints.parse(text)


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_FAILPOINTS", raising=False)
    failpoints.reach("planner.arm.sent")
    asyncio.run(failpoints.reach_async("planner.arm.sent"))


def test_exit_ends_the_process_once_and_passes_in_the_next_life(tmp_path: Path) -> None:
    program = "from eplb_service import failpoints; failpoints.reach('x'); print('passed')"
    marker = tmp_path / "marker"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"EPLB_FAILPOINTS": f"x=exit:{marker}"}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert (first.returncode, first.stdout) == (failpoints.EXIT_CODE, "")
    assert marker.read_text().strip().isdecimal()
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert (second.returncode, second.stdout) == (0, "passed\n")


def test_pause_holds_until_its_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv("EPLB_FAILPOINTS", f"x=pause:{marker}")
    thread = threading.Thread(target=failpoints.reach, args=("x",))
    thread.start()
    deadline = time.monotonic() + 10
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert marker.read_text().strip() == str(os.getpid())
    assert thread.is_alive()
    marker.unlink()
    thread.join(10)
    assert not thread.is_alive()


def test_hold_acts_whenever_its_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached = tmp_path / "gate", tmp_path / "gate.reached"
    monkeypatch.setenv("EPLB_FAILPOINTS", f"x=hold:{gate}")
    failpoints.reach("x")
    assert not reached.exists()
    for _ in range(2):
        gate.touch()
        thread = threading.Thread(target=failpoints.reach, args=("x",))
        thread.start()
        deadline = time.monotonic() + 10
        while not reached.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert thread.is_alive()
        gate.unlink()
        thread.join(10)
        reached.unlink()
