"""Many ranks under a hostile network: every message ever sent may arrive at any time, any number of times, in any order.

Ranks step in lock-step with at most one boundary of skew and vote every K-th boundary, as the real ones do. After every
choice: all ranks begin a step with one map, what flips was staged by that rank, every expert has a slot, and a chunk of which
one rank said that it will not flip never flips anywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from eplb_service.control import Arm, Disarm, Disarmed, Hello, Live, RefusalCode, Refused, Stage, ToRank
from eplb_service.generation import live_digest
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, chunk_epoch, chunk_id
from tests.unit.hook_chunk_parts import LAYER, NUM_LOGICAL, RANKS, ROW, address, done, machine, stage

PERIOD = 2
NO_EFFECT = (RefusalCode.BUSY, RefusalCode.STALE_EPOCH, RefusalCode.CLOSED)
ROWS = (ROW, (1, 0, 2, 3, 3, 2), (3, 2, 1, 0, 0, 0), (0, 1, 2, 3, -1, 1), (2, 2, 0, 1, 3, 3))


@dataclass
class Rank:
    machine: ChunkMachine
    boundary: int = -1
    copying: Stage | None = None
    staged: ChunkId = ev.NO_CHUNK
    answered_epoch: int = 0


@dataclass
class World:
    """The simulated fleet and everything that was ever said in it."""

    ranks: list[Rank] = field(default_factory=lambda: [Rank(machine(rank)) for rank in RANKS])
    now: float = 0.0
    epoch: int = 1
    sequence: int = 0
    messages: list[ToRank] = field(default_factory=list)
    chunks: list[ChunkId] = field(default_factory=list)
    casts: dict[int, dict[int, ChunkId]] = field(default_factory=dict)
    maps: dict[int, int] = field(default_factory=dict)
    closed: set[ChunkId] = field(default_factory=set)
    flipped: set[ChunkId] = field(default_factory=set)

    # ── effects, with what must hold when they come ──────────────────────────────────────────────────────────────────────

    def feed(self, index: int, event: ev.Event) -> list[ev.Effect]:
        rank = self.ranks[index]
        tombstone = rank.machine.ledger.closed_id
        effects = rank.machine.handle(event, self.now)
        assert rank.machine.ledger.closed_id >= tombstone
        for effect in effects:
            match effect:
                case ev.BeginStaging():
                    assert rank.copying is None, "two copies write to staging at once"
                    assert rank.staged == ev.NO_CHUNK
                    rank.copying = effect.stage
                case ev.ReleaseStaging():
                    assert rank.copying is None, "staging is released under a copy"
                    rank.staged = ev.NO_CHUNK
                case ev.Flip():
                    chunk = effect.stage.chunk_id
                    assert rank.staged == chunk, "flips what was not staged"
                    assert chunk not in self.closed, "flips what another rank said will not flip"
                    assert chunk_epoch(chunk) >= rank.answered_epoch, "flips a chunk that a new leader believes closed"
                    self.flipped.add(chunk)
                case ev.Send(message=Disarmed() as message):
                    self.note_closed(message.chunk_id)
                case ev.Send(message=Refused() as message) if message.code not in NO_EFFECT:
                    self.note_closed(message.chunk_id)
                case ev.Send(message=Live() as message) if message.epoch == message.epoch_seen:
                    rank.answered_epoch = message.epoch
                case ev.FailStop():
                    raise AssertionError("no fault here leaves an outcome unknown")
                case _:
                    pass
        row = rank.machine.live[LAYER].row
        assert set(range(NUM_LOGICAL)) <= set(row), "an expert has no slot"
        return effects

    def note_closed(self, chunk: ChunkId) -> None:
        assert chunk not in self.flipped, "says that it will not flip what flipped"
        self.closed.add(chunk)

    # ── what may happen ──────────────────────────────────────────────────────────────────────────────────────────────────

    def act(self, choice: int) -> None:
        kind, index, which = choice % 16, choice // 16 % len(self.ranks), choice // 64
        match kind:
            case 0:
                self.open_chunk(index, which)
            case 1:
                self.replay(which)
            case 2:
                self.to_all(lambda to, chunk: Arm(to=to, chunk_id=chunk), which)
            case 3:
                self.to_all(lambda to, chunk: Disarm(to=to, chunk_id=chunk, epoch=Epoch(self.epoch)), which)
            case 4:
                self.epoch += which % 2
                self.sequence = 0 if which % 2 else self.sequence
                self.messages += [Hello(to=address(rank), epoch=Epoch(self.epoch)) for rank in RANKS]
            case 5 | 6 | 7 if self.messages:
                message = self.messages[-1 - which % len(self.messages)]
                self.feed(RANKS.index(message.to.rank_id), ev.Received(message))
            case 8:
                self.end_copy(index, failed=which % 4 == 0)
            case 9 | 10:
                self.step(index)
            case 11:
                for other in range(index, index + (1 + which % 3) * len(self.ranks)):
                    self.step(other % len(self.ranks))
            case 12:
                self.resolve(index)
            case 13:
                self.now += (which % 7) / 2
                self.feed(index, ev.Tick())
            case 14:
                events = (ev.VotingOff("off"), ev.VotingOn(), ev.VotingOn(), ev.VotingOn(), ev.EngineIdle(), ev.Attached())
                self.feed(index, events[which % len(events)])
            case 15:
                self.whole_rollout_prefix(which)

    def open_chunk(self, index: int, which: int) -> None:
        """A Stage to all ranks, planned on what one of them routes by."""
        self.sequence += 1
        chunk = chunk_id(self.epoch, self.sequence)
        row = self.ranks[index].machine.live[LAYER].row
        for rank in RANKS:
            made = stage(chunk, old=row, new=ROWS[which % len(ROWS)], rank=rank, generation=GenerationNumber(self.sequence))
            self.messages.append(made)
        self.chunks.append(chunk)

    def to_all(self, make: Any, which: int) -> None:
        if self.chunks:
            chunk = self.chunks[-1 - which % len(self.chunks)]
            self.messages += [make(address(rank), chunk) for rank in RANKS]

    def whole_rollout_prefix(self, which: int) -> None:
        """The plain course of events up to some point, so that votes that pass are common."""
        for rank_index, rank in enumerate(self.ranks):
            old = Disarm(to=address(RANKS[rank_index]), chunk_id=rank.machine.open_id, epoch=Epoch(self.epoch))
            self.feed(rank_index, ev.Received(old))
            self.end_copy(rank_index, failed=True)
        self.open_chunk(0, which)
        for rank_index in range(len(self.ranks)):
            self.feed(rank_index, ev.Received(self.messages[-len(RANKS) + rank_index]))
        for rank_index in range(len(self.ranks) - (which % 5 == 0)):
            self.end_copy(rank_index, failed=False)
        self.to_all(lambda to, chunk: Arm(to=to, chunk_id=chunk), 0)
        for rank_index in range(len(self.ranks) - (which % 3 == 0)):
            self.feed(rank_index, ev.Received(self.messages[-len(RANKS) + rank_index]))
        for turn in range(which % 13):
            self.step(turn % len(self.ranks))

    def replay(self, which: int) -> None:
        """Old Stage and Arm messages of one chunk reach all ranks again, as if they had been under way for long."""
        if not self.chunks:
            return
        chunk = self.chunks[-1 - which % min(len(self.chunks), 3)]
        old = [message for message in self.messages if isinstance(message, Stage) and message.chunk_id == chunk]
        for message in old:
            self.feed(RANKS.index(message.to.rank_id), ev.Received(message))
        for index in range(len(self.ranks)):
            self.end_copy(index, failed=False)
        for index, rank in enumerate(RANKS):
            self.feed(index, ev.Received(Arm(to=address(rank), chunk_id=chunk)))
        for turn in range(which % 13):
            self.step(turn % len(self.ranks))

    def end_copy(self, index: int, *, failed: bool) -> None:
        rank = self.ranks[index]
        if rank.copying is None:
            return
        chunk, rank.copying = rank.copying.chunk_id, None
        if failed:
            self.feed(index, ev.StagingFailed(chunk, RefusalCode.TRANSFER, "lost"))
        else:
            rank.staged = chunk
            self.feed(index, done(chunk))

    def resolve(self, index: int) -> None:
        """The waiter: a vote is known as soon as all ranks have cast it."""
        rank = self.ranks[index]
        if rank.machine.state is not ev.ChunkState.VOTING:
            return
        boundary = rank.boundary - rank.boundary % PERIOD
        votes = self.casts[boundary]
        if len(votes) < len(self.ranks):
            return
        passed = set(votes.values()) == {rank.machine.open_id}
        self.feed(index, ev.VoteResolved(rank.machine.open_id, ev.Outcome.PASSED if passed else ev.Outcome.FAILED))

    def step(self, index: int) -> None:
        rank = self.ranks[index]
        if rank.boundary > min(other.boundary for other in self.ranks):
            return  # its collectives wait for the others
        boundary = rank.boundary + 1
        if boundary % PERIOD == 0:
            self.resolve(index)
        rank.boundary = boundary
        self.feed(index, ev.Boundary(boundary, 0))
        if boundary % PERIOD == 0:
            for effect in self.feed(index, ev.FlipDue(boundary)):
                if isinstance(effect, ev.Flip):
                    self.feed(index, ev.FlipDone(effect.stage.chunk_id, 0.0))
            (cast,) = (e for e in self.feed(index, ev.VoteDue(boundary)) if isinstance(e, ev.CastVote))
            self.casts.setdefault(boundary, {})[index] = cast.chunk_id
        routed = live_digest({LAYER: rank.machine.live[LAYER].digest})
        assert self.maps.setdefault(boundary, routed) == routed, f"ranks begin step {boundary} with different maps"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, (1 << 14) - 1), min_size=20, max_size=160))
def test_no_order_of_messages_breaks_the_rules(choices: list[int]) -> None:
    world = World()
    for choice in choices:
        world.act(choice)


def test_the_simulation_reaches_flips_withdrawals_and_new_leaders() -> None:
    """A property that nothing can violate proves nothing: the same actions must reach what the rules are about."""
    flipped, closed, leaders = 0, 0, 0
    for seed in range(60):
        choose, world = random.Random(seed), World()
        for _ in range(150):
            world.act(choose.randrange(1 << 14))
        flipped, closed = flipped + len(world.flipped), closed + len(world.closed)
        leaders += sum(rank.answered_epoch > 1 for rank in world.ranks)
    assert flipped > 30
    assert closed > 100
    assert leaders > 60
