"""What long-living parts hold over time, and whether it grows. The judging is pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.integration.fault_processes import Holdings, holdings_of

MIB = 1 << 20
GROWTH_MIB_PER_MINUTE_MAX = 4.0
GROWTH_MIB_MAX = 8.0
"""Memory may grow by the larger of both: allocators keep what a first rollout, retry or reconnection of its kind took."""
FILES_MAX = 8
"""Descriptors that may be open at one moment and not at another: a connection that is being made, a file being read."""
THREADS_MAX = 4
SAMPLES_MIN = 8


@dataclass(slots=True)
class Life:
    """One process, seen at some times. samples: (seconds, what it held)."""

    name: str
    pid: int
    samples: list[tuple[float, Holdings]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Growth:
    """From the first third of a life to its last third, medians of each. Memory in MiB."""

    name: str
    minutes: float
    memory_mib: float
    memory_begin_mib: float
    files: float
    threads: float

    @property
    def wrong(self) -> str:
        """What grew too much; empty when nothing did."""
        allowed = max(GROWTH_MIB_MAX, GROWTH_MIB_PER_MINUTE_MAX * self.minutes)
        found = []
        if self.memory_mib > allowed:
            found.append(f"memory by {self.memory_mib:.1f} MiB in {self.minutes:.1f} min, at most {allowed:.1f}")
        if self.files > FILES_MAX:
            found.append(f"open files by {self.files:.0f}, at most {FILES_MAX}")
        if self.threads > THREADS_MAX:
            found.append(f"threads by {self.threads:.0f}, at most {THREADS_MAX}")
        return f"{self.name} grew: {'; '.join(found)}" if found else ""


def growth_of(life: Life) -> Growth | None:
    """None for a life that was seen too seldom to say."""
    third = len(life.samples) // 3
    if len(life.samples) < SAMPLES_MIN:
        return None
    first, last = life.samples[:third], life.samples[-third:]

    def median(samples: Sequence[tuple[float, Holdings]], what: str) -> float:
        return float(statistics.median(getattr(held, what) for _, held in samples))

    def grown(what: str) -> float:
        return median(last, what) - median(first, what)

    return Growth(
        name=life.name,
        minutes=(life.samples[-1][0] - life.samples[0][0]) / 60.0,
        memory_mib=grown("rss_bytes") / MIB,
        memory_begin_mib=median(first, "rss_bytes") / MIB,
        files=grown("files"),
        threads=grown("threads"),
    )


class Watch:
    """Samples processes; a new process id under a name begins a new life."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], Life] = {}

    def sample(self, now: float, pids: Mapping[str, int]) -> None:
        """Look at each of them now."""
        for name, pid in pids.items():
            held = holdings_of(pid)
            if held is not None:
                self._lives.setdefault((name, pid), Life(name, pid)).samples.append((now, held))

    def growths(self, pids: Mapping[str, int]) -> list[Growth]:
        """Of the lives that these processes are in."""
        lives = [self._lives.get((name, pid)) for name, pid in pids.items()]
        found = [growth_of(life) for life in lives if life is not None]
        return [growth for growth in found if growth is not None]
