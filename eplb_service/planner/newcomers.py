"""Deployments that a rank registered for and no control stream speaks for yet: kept for a while, led by nobody, not stored.

Whoever can reach the planner can register any name. Only a control stream makes a deployment of it, with a lead in the store
and tasks of its own; until then it costs a place here, and the one that waited longest makes room for the next.
"""

from __future__ import annotations

from collections import OrderedDict

from eplb_service.ids import DeploymentId
from eplb_service.planner.steering import Steering

KEPT_S = 60.0
"""An agent process opens its control stream as soon as its first rank is accepted."""


class Newcomers:
    """At most `most` of them, each for KEPT_S after its last registration. now: monotonic, seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._steerings: OrderedDict[DeploymentId, tuple[Steering, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steerings)

    @property
    def steerings(self) -> tuple[Steering, ...]:
        """Those that wait, the longest first."""
        return tuple(steering for steering, _ in self._steerings.values())

    def get(self, name: DeploymentId, now: float) -> Steering | None:
        """One by name."""
        self._expire(now)
        found = self._steerings.get(name)
        return found[0] if found is not None else None

    def keep(self, steering: Steering, now: float) -> DeploymentId | None:
        """Keep one that a rank was just registered for; the name that had to make room, if one had to."""
        self._expire(now)
        name = steering.deployment.name
        self._steerings.pop(name, None)
        self._steerings[name] = (steering, now)
        return self._steerings.popitem(last=False)[0] if len(self._steerings) > self._most else None

    def take(self, name: DeploymentId) -> Steering | None:
        """One that a control stream speaks for now: it waits no more."""
        found = self._steerings.pop(name, None)
        return found[0] if found is not None else None

    def _expire(self, now: float) -> None:
        while self._steerings:
            name, (_, since_s) = next(iter(self._steerings.items()))
            if now - since_s < KEPT_S:
                return
            del self._steerings[name]
