"""A real rollout machine over a fake agent process: what a planner says to real hooks, and what it makes of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb_service.control import Stage, Staged
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import Epoch, GenerationNumber
from eplb_service.imbalance import Imbalance
from eplb_service.membership.group import Group
from eplb_service.membership.machine import GroupReady
from eplb_service.moves import NO_MOVES
from eplb_service.placement import Placement
from eplb_service.rollout.events import (
    Alarm,
    Finished,
    Persist,
    Persisted,
    Received,
    RolloutEvent,
    RolloutSettings,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout.machine import Rollout
from tests.integration.hook_fleet import FakeAgent

SETTINGS = RolloutSettings(stage_timeout_s=10.0, arm_ttl_s=10.0, slowest_step_s=1.0, answer_slack_s=2.0)
DEADLINE_S = 40.0


@dataclass
class RolloutDriver:
    """Carries generations to the ranks that have registered at `agent`. stages: what was sent; finished: how each ended."""

    agent: FakeAgent
    epoch: Epoch = field(default_factory=lambda: Epoch(1))
    stages: list[Stage] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    _heard: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        by_rank = self.agent.registrations
        first = next(iter(by_rank.values()))
        self.group = Group.of(tuple(by_rank[rank] for rank in first.group_rank_ids))
        self.machine = Rollout(self.epoch, SETTINGS, first_sequence=1)
        self._feed(GroupReady(self.group))

    @property
    def live(self) -> LiveMap:
        """What is live; only once it is known."""
        live = self.machine.live
        assert live is not None, self.machine.progress()
        return live

    def pump(self) -> None:
        """Take in what ranks said since, and what is due."""
        said = self.agent.said
        while self._heard < len(said):
            self._heard += 1
            self._feed(Received(said[self._heard - 1]))
        if self.machine.next_deadline is not None and time.monotonic() >= self.machine.next_deadline:
            self._feed(Tick())

    def until_live(self) -> LiveMap:
        """Wait for the first equal set of replies."""
        said = self.agent.said
        self._until(
            lambda: self.machine.live is not None,
            meanwhile=lambda: self.agent.until(lambda: len(said) > self._heard, "reply of every rank"),
        )
        return self.live

    def roll_out(self, placement: Placement, meanwhile: Callable[[], None]) -> Finished:
        """Publish and carry out; `meanwhile` is called again and again, and must make the engine step."""
        self._number += 1
        ended = len(self.finished)
        self._feed(Start(generation_of(self._number, placement)))
        self._until(lambda: len(self.finished) > ended, meanwhile)
        return self.finished[-1]

    def staged_bytes(self, stage: Stage) -> int:
        """Bytes that arrived at any rank, from wherever, for a chunk."""
        answers: list[Staged] = list(self.agent.answers(Staged, stage.chunk_id).values())
        assert len(answers) == len(self.group.rank_ids)
        return sum(part.same_rank + part.same_node + part.cross_node for part in (staged.received for staged in answers))

    def _until(self, done: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"{self.machine.progress()}; said last: {self.agent.said[-8:]}"
            meanwhile()
            self.pump()

    def _feed(self, event: RolloutEvent) -> None:
        for effect in self.machine.handle(event, time.monotonic()):
            match effect:
                case Send(message):
                    if isinstance(message, Stage) and (not self.stages or self.stages[-1].chunk_id != message.chunk_id):
                        self.stages.append(message)
                    self.agent.send(message)
                case Persist(token, _):
                    self._feed(Persisted(token))
                case Finished():
                    self.finished.append(effect)
                case Alarm():
                    raise AssertionError(f"ranks contradict one another: {effect}")
                case _:
                    pass


def generation_of(number: int, placement: Placement) -> Generation:
    """A generation with this content."""
    even = Imbalance((1.0,) * sum(table.num_layers for table in placement.tables))
    return Generation(
        number=GenerationNumber(number),
        placement=placement,
        created_at_s=0.0,
        reason="test",
        policy="test",
        epoch=Epoch(1),
        before=even,
        predicted=even,
        lower_bound=even,
        moves=NO_MOVES,
    )
