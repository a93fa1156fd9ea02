"""Which faults come, drawn from a seed alone: the same seed and size, the same faults in the same order. Pure.

When exactly each one hits depends on the machine: it waits for a place in a rollout, or for some tokens to be served.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.integration.fault_fleet import Fault, Part

KINDS: dict[tuple[Part, Fault], float] = {
    (Part.PLANNER, Fault.KILL): 1.2,
    (Part.PLANNER, Fault.STOP): 2.0,
    (Part.PLANNER, Fault.CUT): 2.5,
    (Part.PLANNER, Fault.HOLD): 2.0,
    (Part.STORE, Fault.KILL): 2.5,
    (Part.STORE, Fault.STOP): 2.0,
    (Part.STORE, Fault.CUT): 2.5,
    (Part.STORE, Fault.HOLD): 2.0,
    (Part.AGENT, Fault.KILL): 2.5,
    (Part.AGENT, Fault.STOP): 2.0,
    (Part.AGENT, Fault.CUT): 2.5,
    (Part.AGENT, Fault.HOLD): 2.0,
    (Part.RANK, Fault.KILL): 1.2,
    (Part.RANK, Fault.STOP): 2.0,
    (Part.RANK, Fault.CUT): 2.0,
}
"""Weights. Those of which whole fleets, or the planner with its compiled kernels, start again are rarer: they take long."""

POINTS = (
    *("hook.staging.begin", "hook.staging.connected", "hook.staging.done"),
    *("hook.arm.received", "hook.armed", "hook.vote.cast", "hook.flip.begin", "hook.flip.done"),
    *("agent.stage.forwarded", "agent.staged.forwarded", "agent.arm.forwarded", "agent.flipped.received"),
    *("planner.generation.persisted", "planner.stage.sent", "planner.arm.sent", "planner.flipped.recorded"),
)
AT_POINT_SHARE = 0.6
OVERLAP_SHARE = 0.25
PAST_DEADLINES_SHARE = 0.08
LONG_S = 13.0
"""Longer than the ranks' vote time-out in a soak (6 s) and its margin, and than the engine's for a step (10 s)."""
STEADY_SHARE = 0.25
"""Last part of a run, in which nothing is killed: parts live on, so that what they hold can be compared."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault to come.

    point: place in a rollout to wait for; empty = `tokens` more are waited for instead. held_s: how long processes stand still
    at the point after the fault began. lasts_s: from its beginning to its end; of what is killed, until it may start again.
    victim: position of the rank that it hits, modulo their number. overlaps: the next fault begins before this one ends.
    """

    index: int
    part: Part
    fault: Fault
    point: str
    tokens: int
    held_s: float
    lasts_s: float
    victim: int
    overlaps: bool

    def __str__(self) -> str:
        where = f"at {self.point}" if self.point else f"after {self.tokens} tokens"
        return f"#{self.index} {self.part} {self.fault} {where} for {self.lasts_s:.1f} s"


def schedule(seed: int, count: int, *, kinds: Sequence[tuple[Part, Fault]] = tuple(KINDS)) -> list[Planned]:
    """`count` faults. kinds: those that can be had on this machine.

    >>> schedule(7, 200) == schedule(7, 200)
    True
    """
    draw = random.Random(seed)
    found: list[Planned] = []
    num_steady = int(count * STEADY_SHARE)
    for index in range(count):
        steady = index >= count - num_steady
        before = found[-1] if found else None
        allowed = [
            kind
            for kind in kinds
            if not (steady and kind[1] is Fault.KILL)
            and not (before is not None and before.overlaps and before.part is kind[0])
        ]
        part, fault = draw.choices(allowed, [KINDS[kind] for kind in allowed])[0]
        long = part is Part.RANK and fault is not Fault.KILL and not steady and draw.random() < PAST_DEADLINES_SHARE
        found.append(
            Planned(
                index=index,
                part=part,
                fault=fault,
                point=draw.choice(POINTS) if draw.random() < AT_POINT_SHARE else "",
                tokens=draw.randrange(0, 80),
                held_s=draw.uniform(0.0, 0.6),
                lasts_s=LONG_S if long else draw.uniform(0.05, 2.0),
                victim=draw.randrange(64),
                overlaps=part is not Part.RANK and index + 1 < count and draw.random() < OVERLAP_SHARE,
            )
        )
    return found
