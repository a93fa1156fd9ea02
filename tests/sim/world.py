"""Virtual time, one seeded source of chance, a network that loses, delays, repeats and reorders, and what must hold."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable


class ViolationError(Exception):
    """An invariant broke, or something did not resolve."""


class World:
    """The event queue of one simulated run. `is_calm`: faults are over; messages are slow at most, never lost."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.is_calm = False
        self.counts: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=300)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.drop_share = self.random.choice([0.0, 0.02, 0.1, 0.25])
        self.repeat_share = self.random.choice([0.0, 0.05, 0.3])
        self.slow_share = self.random.choice([0.0, 0.05, 0.2])

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._order, action))

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Run events up to a time; True as soon as is_done()."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if is_done():
                return True
        self.now = until_s
        return False

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def transmit(self, deliver: Callable[[], None]) -> None:
        """A message is under way: each delay is its own, so any two may change places."""
        copies = 1
        if not self.is_calm:
            if self.chance(self.drop_share):
                self.counts["messages lost"] += 1
                return
            copies += self.chance(self.repeat_share)
        for _ in range(copies):
            delay_s = self.random.uniform(0.002, 0.06)
            if not self.is_calm and self.chance(self.slow_share):
                delay_s = self.random.uniform(0.1, 4.0)
            self.after(delay_s, deliver)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:8.3f}  {text}")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ViolationError(what)
