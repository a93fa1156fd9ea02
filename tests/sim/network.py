"""What lies between processes: messages are lost, late, repeated and overtake one another, and whole links are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.sim.world import World


class Network(Protocol):
    """Carries messages between named processes."""

    def send(self, source: str, target: str, message: object, deliver: Callable[[], None]) -> None:
        """Have `deliver` called when the message arrives: once, more than once, or never."""

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between two processes now."""


class FaultyNetwork:
    """A network of one seed. Every message has its own fate and delay, so any two may change places.

    faulty_s: from when until when it loses, repeats and delays; delays of up to 60 ms are always there. storm: it repeats most.
    """

    def __init__(self, world: World, faulty_s: tuple[float, float], *, storm: bool = False) -> None:
        self._world, self._faulty_s = world, faulty_s
        self._chance = chance = world.chance("network")
        self.drop_share = chance.choice([0.0, 0.02, 0.1, 0.25])
        self.repeat_share = chance.choice([0.0, 0.05, 0.3])
        self.slow_share = chance.choice([0.0, 0.05, 0.2])
        if storm:
            self.drop_share, self.repeat_share, self.slow_share = 0.1, 0.7, 0.1
        self._cut_until_s: dict[frozenset[str], float] = {}

    def send(self, source: str, target: str, message: object, deliver: Callable[[], None]) -> None:
        """See `Network`."""
        world, chance = self._world, self._chance
        fate, delay_s = chance.random(), 0.002 + 0.058 * chance.random()
        first_s, last_s = self._faulty_s
        if world.is_calm or not first_s <= world.now <= last_s:
            world.after(delay_s, deliver)
            return
        if self._cut_until_s and self.is_cut(source, target):
            world.counts["messages cut off"] += 1
            return
        if fate < self.drop_share:
            world.counts["messages lost"] += 1
            world.note("   lost: {} {} → {}", message, source, target)
            return
        fate -= self.drop_share
        if fate < self.repeat_share:
            world.counts["messages repeated"] += 1
            world.after(0.002 + 2.0 * chance.random(), deliver)
        elif fate - self.repeat_share < self.slow_share:
            delay_s = 0.1 + 4.0 * chance.random()
            world.counts["messages late"] += 1
        world.after(delay_s, deliver)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Nothing passes between two processes for a while."""
        self._world.note("── nothing passes between {} and {} for {} s", one, other, round(seconds, 2))
        self._cut_until_s[frozenset((one, other))] = self._world.now + seconds

    def is_cut(self, one: str, other: str) -> bool:
        """See `Network`."""
        return not self._world.is_calm and self._cut_until_s.get(frozenset((one, other)), 0.0) > self._world.now
