"""`python -m demo.ranks`: ranks of the reference engine without the demo; they serve on when no agent process is there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from demo.ranks import DRIFT, kind_at, main
from examples.tiny_moe.text import KINDS

DEADLINE_S = 90.0


def test_kinds_go_round_and_the_model_knows_them() -> None:
    assert [kind_at(second, 2.0) for second in (0.0, 1.9, 2.0, 4.1, 6.0)] == ["code", "code", "logs", "prose", "code"]
    assert set(DRIFT) <= set(KINDS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--socket", "/none/s", "--ranks", "2"], "there is no folder /none for the agent process's socket s"),
        (["--socket", "/tmp/s", "--ranks", "1"], "1 is not in the range 2<=x<=16"),
        ([], "Missing option '--socket'"),
    ],
)
def test_bad_arguments_end_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EPLB_SOCKET", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main(arguments) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert said.startswith("demo.ranks: ")
    assert sentence in said
    assert said.count("\n") == 1


class Ranks:
    """The command as a process; its lines are kept as they come."""

    def __init__(self, *words: str) -> None:
        environment = {key: text for key, text in os.environ.items() if not key.startswith("EPLB_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "demo.ranks", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self.lines.append(line)
                self._arrived.notify_all()

    def says(self, pattern: str) -> str:
        """The first line that has this pattern."""
        deadline = time.monotonic() + DEADLINE_S

        def found() -> str:
            return next((line for line in self.lines if re.search(pattern, line)), "")

        with self._arrived:
            while not found():
                left = deadline - time.monotonic()
                assert left > 0, f"waited for {pattern!r}: {''.join(self.lines)}"
                assert self._reader.is_alive(), f"ended before {pattern!r}: {''.join(self.lines)}"
                self._arrived.wait(min(left, 1.0))
            return found()


@pytest.mark.process
def test_ranks_without_an_agent_process_say_so_and_serve_on_while_prompts_drift() -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        socket = Path(name) / "agent.sock"
        ranks = Ranks("--socket", str(socket), "--ranks", "2", "--traffic", "--seconds-per-kind", "1", "--in-flight", "2")
        try:
            ranks.says(f"2 ranks serve; agent process at {re.escape(str(socket))}; ")
            said = ranks.says(f"no agent process at {re.escape(str(socket))}: ")
            assert "there is no such socket; start `eplb agent` on this node (the engine serves on)" in said
            for kind in DRIFT:
                ranks.says(rf"prompts {kind}, [1-9][0-9,]* tokens served")  # kinds go round: each comes again
            ranks.process.send_signal(signal.SIGTERM)
            assert ranks.process.wait(DEADLINE_S) == 0
            assert "Traceback" not in "".join(ranks.lines)
        finally:
            ranks.process.kill()
            ranks.process.wait(10)
