"""What lies between processes: messages are lost, late, repeated and overtake one another, and whole links are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.sim.profile import Profile
from tests.sim.world import World


class Network(Protocol):
    """Carries messages between named processes."""

    def send(self, source: str, target: str, message: object, deliver: Callable[[], None]) -> None:
        """Have `deliver` called when the message arrives: once, more than once, or never."""

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between two processes now."""


class FaultyNetwork:
    """A network of one seed. Every message has its own fate and delay, so any two may change places.

    faulty_s: from when until when it loses, repeats and delays; delays of up to 60 ms are always there.
    """

    def __init__(self, world: World, faulty_s: tuple[float, float], profile: Profile) -> None:
        self._world, self._faulty_s, self._profile = world, faulty_s, profile
        self._chance = world.chance("network")
        self._cut_until_s: dict[frozenset[str], float] = {}

    def send(self, source: str, target: str, message: object, deliver: Callable[[], None]) -> None:
        """See `Network`."""
        world, chance, profile = self._world, self._chance, self._profile
        fate, delay_s = chance.random(), 0.002 + 0.058 * chance.random()
        first_s, last_s = self._faulty_s
        if world.is_calm or not first_s <= world.now <= last_s:
            world.after(delay_s, deliver)
            return
        if self._cut_until_s and self.is_cut(source, target):
            world.counts["messages cut off"] += 1
            return
        if profile.faulty_messages and type(message).__name__ not in profile.faulty_messages:
            world.after(delay_s, deliver)
            return
        if fate < profile.drop_share:
            world.counts["messages lost"] += 1
            world.note("   lost: {} {} → {}", message, source, target)
            return
        fate -= profile.drop_share
        if fate < profile.repeat_share:
            world.counts["messages repeated"] += 1
            for _ in range(profile.repeats):
                world.after(0.002 + profile.repeat_s * chance.random(), deliver)
        elif fate - profile.repeat_share < profile.slow_share:
            delay_s = 0.1 + profile.slow_s * chance.random()
            world.counts["messages late"] += 1
        world.after(delay_s, deliver)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Nothing passes between two processes for a while."""
        self._world.note("── nothing passes between {} and {} for {} s", one, other, round(seconds, 2))
        self._cut_until_s[frozenset((one, other))] = self._world.now + seconds

    def is_cut(self, one: str, other: str) -> bool:
        """See `Network`."""
        return not self._world.is_calm and self._cut_until_s.get(frozenset((one, other)), 0.0) > self._world.now
