"""The local off switch (`EPLB_OFF_FILE`), in every state that a chunk can be in: nothing is voted for from then on.

What is open closes by the rules; only a chunk that the vote has passed still flips, since the other ranks flip it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from agent.hook import chunk_events as ev
from agent.hook.chunk_events import ChunkState
from eplb_service.control import Arm, Disarm, Disarmed, Flipped, Hello, Live, RefusalCode, Refused
from eplb_service.ids import ChunkId, Epoch, chunk_id
from tests.unit.hook_chunk_parts import LAYER, OTHER, ROW, address, digest, done, kinds, sent, stage
from tests.unit.test_hook_chunk import Driver

FIRST, SECOND, THIRD = chunk_id(1, 1), chunk_id(1, 2), chunk_id(1, 3)
OFF = ev.VotingOff("switched off on this machine (/run/eplb/off)")


def to_staging(rank: Driver) -> None:
    rank.stage(FIRST)


def to_quiescing(rank: Driver) -> None:
    rank.stage(FIRST)
    rank.disarm(FIRST)


def to_flipping(rank: Driver) -> None:
    rank.to_committed().on(ev.FlipDue(8))


def to_unresolved(rank: Driver) -> None:
    rank.to_voting().resolved(ev.Outcome.UNKNOWN)


REACH: dict[ChunkState, Callable[[Driver], object]] = {
    ChunkState.IDLE: lambda rank: rank,
    ChunkState.STAGING: to_staging,
    ChunkState.STAGED: Driver.to_staged,
    ChunkState.ARMED: Driver.to_armed,
    ChunkState.VOTING: Driver.to_voting,
    ChunkState.COMMITTED: Driver.to_committed,
    ChunkState.FLIPPING: to_flipping,
    ChunkState.QUIESCING: to_quiescing,
    ChunkState.UNRESOLVED: to_unresolved,
}
SAID = {
    ChunkState.STAGING: ["CancelStaging", "Refused"],
    ChunkState.STAGED: ["ReleaseStaging", "Refused"],
    ChunkState.ARMED: ["ReleaseStaging", "Refused", "Disarmed"],
}
"""What a rank does at once; in all other states the rules leave it nothing to do."""


def rank_in(state: ChunkState) -> Driver:
    rank = Driver()
    REACH[state](rank)
    assert rank.machine.state is state
    return rank


def test_every_state_is_tried() -> None:
    assert set(REACH) == set(ChunkState)


@pytest.mark.parametrize("state", ChunkState)
def test_what_is_open_closes_by_the_rules_and_the_rank_says_why(state: ChunkState) -> None:
    rank = rank_in(state)
    effects = rank.on(OFF)
    assert kinds(effects) == SAID.get(state, [])
    for message in sent(effects):
        if isinstance(message, Refused):
            assert (message.chunk_id, message.code, message.reason) == (FIRST, RefusalCode.OFF, OFF.reason)
    assert rank.machine.off_reason == OFF.reason
    assert rank.on(OFF) == []  # a second time there is nothing left to do
    if state is not ChunkState.UNRESOLVED:
        assert rank.machine.live[LAYER].row == ROW


@pytest.mark.parametrize("state", ChunkState)
def test_nothing_new_is_taken_up_and_every_vote_is_cast_zero(state: ChunkState) -> None:
    rank = rank_in(state)
    rank.on(OFF)
    settle(rank)
    if state is ChunkState.UNRESOLVED:
        assert rank.stage(SECOND) == []
        return
    (refused,) = sent(rank.stage(SECOND, old=rank.machine.live[LAYER].row, new=ROW))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (RefusalCode.OFF, OFF.reason)
    (refused,) = sent(rank.arm(SECOND))
    assert isinstance(refused, Refused)
    assert rank.on(ev.VoteDue(12)) == [ev.CastVote(12, ev.NO_CHUNK)]
    (told,) = sent(rank.hello(2))
    assert isinstance(told, Live)
    assert (told.voting, told.off_reason) == (False, OFF.reason)


def settle(rank: Driver) -> None:
    """What is under way ends: a vote fails, a passed one flips, a cancelled copy stops."""
    match rank.machine.state:
        case ChunkState.VOTING:
            rank.resolved(ev.Outcome.FAILED)
        case ChunkState.COMMITTED:
            rank.on(ev.FlipDue(8))
            rank.on(ev.FlipDone(FIRST, 0.01))
        case ChunkState.FLIPPING:
            rank.on(ev.FlipDone(FIRST, 0.01))
        case ChunkState.QUIESCING:
            rank.on(ev.StagingFailed(FIRST, RefusalCode.TRANSFER, "cancelled"))
        case _:
            pass


@pytest.mark.parametrize(
    ("outcome", "answers", "row"),
    [
        (ev.Outcome.FAILED, [Refused, Disarmed], ROW),
        (ev.Outcome.DIVERGED, [Refused, Disarmed], ROW),
        (ev.Outcome.PASSED, [Flipped], OTHER),
    ],
)
def test_a_vote_under_way_decides_and_a_rank_that_is_off_follows_it(
    outcome: ev.Outcome, answers: list[type], row: tuple[int, ...]
) -> None:
    """One that passed has flipped the other ranks: a rank that left it out would route by another map (invariant 1)."""
    rank = rank_in(ChunkState.VOTING)
    rank.on(OFF)
    said = sent(rank.resolved(outcome))
    if outcome is ev.Outcome.PASSED:
        assert kinds(rank.on(ev.FlipDue(8))) == ["Flip"]
        said += sent(rank.on(ev.FlipDone(FIRST, 0.01)))
    assert [type(message) for message in said] == answers
    assert rank.machine.live[LAYER].digest == digest(row)
    assert rank.machine.state is ChunkState.IDLE


@pytest.mark.parametrize("state", [state for state in ChunkState if state is not ChunkState.UNRESOLVED])
def test_switched_on_again_the_rank_takes_part_in_the_next_chunk(state: ChunkState) -> None:
    rank = rank_in(state)
    rank.on(OFF)
    settle(rank)
    rank.on(ev.VotingOn())
    assert rank.machine.off_reason == ""
    row = rank.machine.live[LAYER].row
    rank.stage(THIRD, old=row, new=OTHER if row == ROW else ROW)
    rank.on(done(THIRD))
    assert kinds(rank.arm(THIRD)) == ["Armed"]
    assert rank.on(ev.VoteDue(16)) == [ev.CastVote(16, THIRD)]


# ── whatever happens next ────────────────────────────────────────────────────────────────────────────────────────────────


def next_events(rank: Driver, boundary: int) -> Iterator[ev.Event]:
    """All that may happen to a rank that is off: messages old and new at any time, what is under way as it can go on."""
    here, state = address(), rank.machine.state
    row = rank.machine.live[LAYER].row
    for chunk in (FIRST, SECOND):
        yield ev.Received(stage(chunk, old=row, new=OTHER if row == ROW else ROW))
        yield ev.Received(Arm(to=here, chunk_id=chunk))
        yield ev.Received(Disarm(to=here, chunk_id=chunk, epoch=Epoch(1)))
    yield ev.Received(Hello(to=here, epoch=Epoch(2)))
    yield ev.Attached()
    yield ev.EngineIdle()
    yield ev.Boundary(boundary, 0)
    if state in (ChunkState.COMMITTED, ChunkState.IDLE):
        yield ev.FlipDue(boundary)
    if state not in (ChunkState.VOTING, ChunkState.COMMITTED, ChunkState.UNRESOLVED):
        yield ev.VoteDue(boundary)
    if state is ChunkState.VOTING:
        for outcome in ev.Outcome:
            yield ev.VoteResolved(rank.machine.open_id, outcome, "detail")
    if state is ChunkState.FLIPPING:
        yield ev.FlipDone(rank.machine.open_id, 0.01)
    if state in (ChunkState.STAGING, ChunkState.QUIESCING):
        yield done(rank.machine.open_id)
        yield ev.StagingFailed(rank.machine.open_id, RefusalCode.TRANSFER, "cancelled")


@pytest.mark.parametrize("state", ChunkState)
def test_no_order_of_events_makes_a_rank_that_is_off_vote_for_or_flip_what_no_vote_passed(state: ChunkState) -> None:
    """Every sequence of two events, and of three around a vote."""
    sequences: list[tuple[ev.Event, ...]] = [()]
    for _ in range(3 if state in (ChunkState.ARMED, ChunkState.VOTING) else 2):
        sequences = [
            (*before, event) for before in sequences for event in next_events(replayed(state, before)[0], 4 * len(before) + 8)
        ]
    assert len(sequences) >= 100
    for sequence in sequences:
        rank, effects = replayed(state, sequence)
        casts = [effect for effect in effects if isinstance(effect, ev.CastVote)]
        assert all(cast.chunk_id == ev.NO_CHUNK for cast in casts), sequence
        flips = [effect.stage.chunk_id for effect in effects if isinstance(effect, ev.Flip)]
        passed = any(isinstance(event, ev.VoteResolved) and event.outcome is ev.Outcome.PASSED for event in sequence)
        may_flip = state is ChunkState.COMMITTED or (state is ChunkState.VOTING and passed)
        assert flips == [] or (may_flip and flips == [FIRST]), sequence
        assert not any(isinstance(effect, ev.BeginStaging) for effect in effects), sequence
        assert rank.machine.off_reason


def replayed(state: ChunkState, events: tuple[ev.Event, ...]) -> tuple[Driver, list[ev.Effect]]:
    """A rank that was switched off in a state, after some events; and what it did on them."""
    rank = rank_in(state)
    rank.on(OFF)
    return rank, list(itertools.chain.from_iterable(rank.on(event) for event in events))


def test_an_idle_engine_that_is_off_resolves_what_it_cast_and_casts_nothing() -> None:
    rank = rank_in(ChunkState.VOTING)
    rank.on(OFF)
    assert kinds(rank.resolved(ev.Outcome.PASSED)) == []
    assert kinds(rank.on(ev.EngineIdle())) == ["Committed"]
    chunk: ChunkId = rank.machine.open_id
    assert chunk == FIRST
