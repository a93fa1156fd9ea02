"""How hostile the surroundings of a run are: which faults there are at all, how often, and how long their effects last.

Every seed draws all of it anew (swarm testing: Groce et al., ISSTA 2012): runs in which everything happens a little show less
than runs in which few things happen often. A search for what one rule prevents fixes some of it, and draws the rest.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

INCIDENTS_MAX = 7
MESSAGES = (
    "Arm",
    "Armed",
    "Committed",
    "Disarm",
    "Disarmed",
    "Flipped",
    "Hello",
    "Live",
    "Pulse",
    "Refused",
    "Stage",
    "Staged",
    "str",
)
"""Kinds of messages; str: to the store."""
Fixed = Mapping[str, object]
"""Fields of a profile that are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The surroundings of one run. Shares are of messages, or of chunks on a rank; times are the longest.

    kinds: of the incidents of this run. faulty_messages: kinds that are lost, repeated and late; empty
    = all. repeats: how often a message that is repeated arrives once more, within repeat_s.
    quiesce_s: how long a cancelled copy goes on writing. restart_s: least and longest until an engine that ended is there
    again. plan_s: until the planner has the next plan. cancel_share: of authorised chunks, that an operator withdraws.
    stage_timeout_s: how long ranks may take to stage a chunk. lease_s: of who leads. is_through_agents: agent processes carry
    the messages; otherwise every planner hears every rank. can_reform: the engine forms its group again in place, when ranks
    are lost or join; has_backups: its ranks have one of every expert.
    """

    num_ranks: int
    kinds: tuple[str, ...]
    num_incidents: int
    faulty_messages: tuple[str, ...]
    drop_share: float
    repeat_share: float
    repeats: int
    repeat_s: float
    slow_share: float
    slow_s: float
    fail_share: float
    corrupt_share: float
    memory_share: float
    slow_copy_share: float
    quiesce_s: float
    restart_s: tuple[float, float]
    plan_s: float
    cancel_share: float
    stage_timeout_s: float
    lease_s: float
    is_through_agents: bool
    can_reform: bool
    has_backups: bool

    @classmethod
    def drawn(cls, chance: random.Random, kinds: Sequence[str], fixed: Fixed) -> Profile:
        """One of a seed. kinds: all that there are."""
        some = tuple(sorted(chance.sample(sorted(kinds), chance.randint(1, 5))))
        drawn = cls(
            num_ranks=chance.choice([2, 3, 3, 4]),
            kinds=chance.choice([tuple(sorted(kinds)), some]),
            num_incidents=chance.randint(0, INCIDENTS_MAX),
            faulty_messages=chance.choice([(), (), tuple(sorted(chance.sample(MESSAGES, chance.randint(1, 4))))]),
            drop_share=chance.choice([0.0, 0.02, 0.1, 0.25]),
            repeat_share=chance.choice([0.0, 0.05, 0.3, 0.7]),
            repeats=chance.choice([1, 1, 3]),
            repeat_s=chance.choice([2.0, 2.0, 6.0]),
            slow_share=chance.choice([0.0, 0.05, 0.2]),
            slow_s=chance.choice([1.0, 4.0]),
            fail_share=chance.choice([0.0, 0.06, 0.3]),
            corrupt_share=chance.choice([0.0, 0.04, 0.1]),
            memory_share=chance.choice([0.0, 0.03]),
            slow_copy_share=chance.choice([0.0, 0.1, 0.4]),
            quiesce_s=chance.choice([0.5, 2.0]),
            restart_s=chance.choice([(0.5, 3.0), (0.05, 0.3)]),
            plan_s=chance.choice([0.3, 1.0, 3.0]),
            cancel_share=chance.choice([0.0, 0.2, 0.6]),
            stage_timeout_s=chance.choice([1.5, 1.5, 4.0]),
            lease_s=chance.choice([1.5, 1.5, 6.0]),
            is_through_agents=chance.random() < 0.6,
            can_reform=chance.random() < 0.5,
            has_backups=chance.random() < 0.7,
        )
        return dataclasses.replace(drawn, **dict(fixed)) if fixed else drawn  # type: ignore[arg-type]
