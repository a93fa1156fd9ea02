"""The demo's supervisor: starts planner and agent process through the `eplb` command and restarts what dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from eplb_service.errors import DeadlineError, EnvironmentFault
from eplb_service.parent_death import die_with_parent

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
RESTARTS_MAX = 20


def ignore_interrupts() -> None:
    """From now on Ctrl-C changes nothing: the parts are being stopped, each within its deadline, so that nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(slots=True)
class Supervised:
    """One process of the product, restarted when it dies.

    ready_file: written by the process once it serves; removed before every start.
    program: what the arguments are for. restarts_max: deaths after which it is given up.
    """

    name: str
    arguments: Sequence[str]
    ready_file: Path
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = (sys.executable, "-m", "eplb_service")
    restarts_max: int = RESTARTS_MAX
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once. Call from the main thread (the parent-death signal follows the starting thread)."""
        self.ready_file.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own command, arguments made here)
                [*self.program, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
                start_new_session=True,  # a terminal's Ctrl-C is for the demo alone: it ends with the proof
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509  (one thread runs here)
            )

    @property
    def pid(self) -> int:
        """Process id of the present life; 0 before the first."""
        return self._process.pid if self._process else 0

    def revive(self) -> bool:
        """Restart it when it has died. Returns whether it had. Raises EnvironmentFault when it keeps dying."""
        if self._process is None or self._process.poll() is None:
            return False
        if self.restarts >= self.restarts_max:
            raise EnvironmentFault(f"{self.name} died {self.restarts + 1} times; its last words:\n{self.last_words()}")
        self.restarts += 1
        self.start()
        return True

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the ready file. Raises EnvironmentFault when the process dies first, DeadlineError at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not self.ready_file.exists():
            code = self._process.poll() if self._process else None
            if code is not None:
                raise EnvironmentFault(f"{self.name} ended with exit code {code} before it was ready:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise DeadlineError(f"{self.name} was not ready within {timeout_s:.0f} s:\n{self.last_words()}")
            time.sleep(0.02)

    def last_words(self, lines: int = 8) -> str:
        """The end of its log."""
        try:
            text = self.log_file.read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join("  " + line for line in text.splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL at the deadline."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
