"""Virtual time: the event queue of one simulated run, its clocks, its sources of chance and its trace."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable

TRACE_LINES = 2000


class ViolationError(Exception):
    """An invariant broke, or something did not resolve."""


class World:
    """Events in order of time; after each one, `after_event` looks whether all still holds.

    is_calm: faults are over. chance(name): a source of chance of its own for each part, so that taking a fault out of a run
    changes as little as possible of the rest.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.is_calm = False
        self.num_events = 0
        self.counts: Counter[str] = Counter()
        self.after_event: Callable[[], None] = lambda: None
        self._trace: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=TRACE_LINES)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def chance(self, name: str) -> random.Random:
        """A source of chance for one part of the run."""
        return random.Random(f"{self.seed}/{name}")

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do this later."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._order, action))

    def run(self, until_s: float) -> None:
        """Everything that is due up to a time."""
        queue, settle = self._queue, self.after_event
        while queue and queue[0][0] <= until_s:
            self.now, _, action = heapq.heappop(queue)
            self.num_events += 1
            action()
            settle()
        self.now = until_s

    def note(self, text: str, *values: object) -> None:
        """A line of the trace; put together only when somebody reads it. text: for `format` with the values."""
        self._trace.append((self.now, text, values))

    @property
    def trace(self) -> list[str]:
        """What happened, a line each."""
        return [f"{at_s:8.3f}  {text.format(*map(words, values))}" for at_s, text, values in self._trace]

    def require(self, holds: bool, what: str) -> None:
        """Raises ViolationError when it does not hold."""
        if not holds:
            raise ViolationError(what)


class Clock:
    """Monotonic clock of one process: it starts anywhere, runs fast or slow, and jumps ahead (a machine that was suspended)."""

    def __init__(self, world: World, *, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self._world, self._offset_s, self._rate = world, offset_s, rate
        self.on_jump: list[Callable[[], None]] = []

    def now(self) -> float:
        """Seconds on this clock."""
        return self._offset_s + self._rate * self._world.now

    def until(self, deadline: float) -> float:
        """True seconds until this clock shows the deadline, if it does not jump."""
        return max(0.0, (deadline - self.now()) / self._rate)

    def jump(self, seconds: float) -> None:
        """It goes ahead at once."""
        self._offset_s += seconds
        for listener in self.on_jump:
            listener()


def words(value: object) -> str:
    """A message, or anything else, in few words."""
    if isinstance(value, int | float | str):
        return str(value)
    text = type(value).__name__
    for name in ("chunk_id", "epoch", "epoch_seen", "generation", "closed_id", "flipped_id", "code", "boundary"):
        known = getattr(value, name, None)
        if known is not None:
            shown = f"{known:#x}" if name.endswith("_id") else str(known)
            text += f" {shown}" if name == "chunk_id" else f" {name}={shown}"
    return text
