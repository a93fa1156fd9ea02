"""Time for the shell: monotonic seconds for deadlines, wall-clock seconds for people. Pure modules get times as arguments."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Where the shell reads the time."""

    def monotonic(self) -> float:
        """Seconds that only grow, from an arbitrary start."""
        ...

    def wall(self) -> float:
        """Seconds since 1970."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `time.time`."""
        return time.time()


@dataclass(slots=True)
class ManualClock:
    """A clock that stands until it is moved, for tests."""

    now_s: float = 0.0
    wall_s: float = 1_700_000_000.0

    def monotonic(self) -> float:
        """Where it stands."""
        return self.now_s

    def wall(self) -> float:
        """Where it stands."""
        return self.wall_s

    def advance(self, seconds: float) -> None:
        """Move both."""
        self.now_s += seconds
        self.wall_s += seconds
