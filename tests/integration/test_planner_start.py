"""Every way in which `eplb serve` does not start: one sentence that says what, the numbers and what to do; no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from eplb_service import app, failpoints
from eplb_service.cli.root import run
from eplb_service.store.base import Store
from eplb_service.store.connection import StoreTimes
from eplb_service.store.embedded import find_binary
from eplb_service.store.redis import RedisStore

Fails = Callable[..., str]


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fails]:
    """`fails(code, *words, flags=(...))` runs `eplb serve` here and returns its sentence."""
    for name in ("EPLB_FAILPOINTS", "EPLB_STORE_PASSWORD"):
        monkeypatch.delenv(name, raising=False)

    def start(code: int, *words: str, flags: tuple[str, ...] = ()) -> str:
        given = ("--port", "0", "--metrics-port", "0", "--data-dir", str(tmp_path / "data"), "--log-level", "error")
        assert run(["serve", *given, *flags]) == code
        said = capsys.readouterr().err
        assert "Traceback" not in said
        lines = [line for line in said.splitlines() if line.startswith(("eplb: ", "Error: "))]
        assert len(lines) == 1, said
        for word in words:
            assert word in lines[0]
        return lines[0]

    yield start
    structlog.reset_defaults()
    failpoints.forget()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def impatient_store(spec: str, data_dir: Path, *, password: str | None = None) -> Store:
    del data_dir
    return RedisStore(spec, password=password, times=StoreTimes(operation_s=0.3))


def test_unknown_setting_in_the_file(fails: Fails, tmp_path: Path) -> None:
    file = tmp_path / "planner.toml"
    file.write_text("[gate]\nmin_coverge = 1\n")
    fails(2, str(file), "gate.min_coverge", "nearest known one is gate.min_coverage", flags=("--config", str(file)))


def test_unknown_setting_in_the_environment(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_GATE_MIN_COVERGE", "1")
    fails(2, "EPLB_GATE_MIN_COVERGE", "nearest known one is EPLB_GATE_MIN_COVERAGE")


def test_unknown_flag(fails: Fails) -> None:
    fails(2, "--gate-min-coverge", flags=("--gate-min-coverge", "1"))


def test_bad_number(fails: Fails) -> None:
    fails(2, "store.lease_s", "--store-lease-s", "at least 1", flags=("--store-lease-s", "0"))


def test_unknown_policy(fails: Fails) -> None:
    fails(2, "planning.policy", "'greedyy'", "greedy", flags=("--policy", "greedyy"))


def test_bad_failpoint(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_FAILPOINTS", "nonsense")
    fails(2, "EPLB_FAILPOINTS", "'nonsense'", "name=exit:FILE")


def test_ready_file_that_cannot_be_written(fails: Fails, tmp_path: Path) -> None:
    fails(2, "ready file", "No such file", flags=("--ready-file", str(tmp_path / "no" / "ready.json")))


def test_port_in_use(fails: Fails, taken_port: int) -> None:
    fails(3, f"127.0.0.1:{taken_port}: Address already in use", "--port", flags=("--port", str(taken_port)))


def test_metrics_port_in_use(fails: Fails, taken_port: int) -> None:
    flags = ("--metrics-port", str(taken_port))
    fails(3, "/metrics", f":{taken_port}: Address already in use", "--metrics-port", flags=flags)


def test_host_that_does_not_resolve(fails: Fails) -> None:
    fails(3, "no.such.host.invalid", "cannot be resolved", flags=("--host", "no.such.host.invalid"))


def test_data_directory_that_cannot_be_one(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(2, "data directory", "is not a directory", flags=("--data-dir", str(tmp_path / "file" / "data")))


def test_store_address_that_cannot_be_read_shows_no_password(fails: Fails) -> None:
    said = fails(2, "store URL", flags=("--store", "http://:hunter2@cache"))
    assert "hunter2" not in said


def test_store_that_does_not_answer(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    monkeypatch.setattr(app, "open_store", impatient_store)
    fails(3, f"store redis://127.0.0.1:{port} is unreachable", flags=("--store", f"redis://127.0.0.1:{port}"))


def test_wrong_password_is_told_and_not_shown(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    server = subprocess.Popen(
        [str(find_binary()), "--port", "0", "--unixsocket", str(path), "--requirepass", "right", "--save", ""],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        monkeypatch.setenv("EPLB_STORE_PASSWORD", "hunter2")
        said = fails(3, "password", flags=("--store", f"unix://{path}"))
        assert "hunter2" not in said
    finally:
        server.kill()
        server.wait(10)


def test_help_shows_every_setting_but_the_password() -> None:
    command = [sys.executable, "-m", "eplb_service", "serve", "--help"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    for text in ("--gate-min-coverage", "--data-dir", "Exit codes", "EPLB_STORE_PASSWORD", "Examples"):
        assert text in page
    assert "--store-password" not in page
