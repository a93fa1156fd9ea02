"""The rules of one rank's chunk, each as a short script: what comes in, what must go out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from eplb_service.control import Address, Arm, Disarm, Disarmed, Flipped, Hello, Live, RefusalCode, Refused
from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import ChunkId, Epoch, GroupId, Incarnation, chunk_id
from tests.unit.hook_chunk_parts import LAYER, OTHER, ROW, address, digest, done, kinds, machine, sent, stage

FIRST, SECOND, THIRD = chunk_id(1, 1), chunk_id(1, 2), chunk_id(1, 3)
LATER = chunk_id(2, 1)


class Driver:
    """A machine with short words for what happens to it."""

    def __init__(self) -> None:
        self.machine: ChunkMachine = machine()
        self.now = 0.0

    def on(self, event: ev.Event) -> list[ev.Effect]:
        return self.machine.handle(event, self.now)

    def stage(self, chunk: ChunkId, **changes: object) -> list[ev.Effect]:
        return self.on(ev.Received(stage(chunk, **changes)))  # type: ignore[arg-type]

    def arm(self, chunk: ChunkId) -> list[ev.Effect]:
        return self.on(ev.Received(Arm(to=address(), chunk_id=chunk)))

    def disarm(self, chunk: ChunkId, epoch: int = 1) -> list[ev.Effect]:
        return self.on(ev.Received(Disarm(to=address(), chunk_id=chunk, epoch=Epoch(epoch))))

    def hello(self, epoch: int) -> list[ev.Effect]:
        return self.on(ev.Received(Hello(to=address(), epoch=Epoch(epoch))))

    def to_staged(self, chunk: ChunkId = FIRST) -> Driver:
        self.stage(chunk)
        self.on(done(chunk))
        return self

    def to_armed(self, chunk: ChunkId = FIRST) -> Driver:
        self.to_staged(chunk).arm(chunk)
        return self

    def to_voting(self, chunk: ChunkId = FIRST, boundary: int = 4) -> Driver:
        self.to_armed(chunk)
        assert self.on(ev.VoteDue(boundary)) == [ev.CastVote(boundary, chunk)]
        return self

    def resolved(self, outcome: ev.Outcome, chunk: ChunkId = FIRST) -> list[ev.Effect]:
        return self.on(ev.VoteResolved(chunk, outcome, "detail"))

    def to_committed(self, chunk: ChunkId = FIRST) -> Driver:
        self.to_voting(chunk).resolved(ev.Outcome.PASSED, chunk)
        return self

    def to_flipped(self, chunk: ChunkId = FIRST, boundary: int = 8) -> Driver:
        self.to_committed(chunk)
        self.on(ev.FlipDue(boundary))
        self.on(ev.FlipDone(chunk, 0.01))
        return self


@pytest.fixture
def rank() -> Driver:
    return Driver()


def refusal(effects: list[ev.Effect]) -> RefusalCode:
    (message,) = (m for m in sent(effects) if isinstance(m, Refused))
    return message.code


# ── the way through ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_chunk_goes_from_stage_to_flipped(rank: Driver) -> None:
    assert rank.stage(FIRST) == [ev.BeginStaging(stage(FIRST), 10.0)]
    assert kinds(rank.on(done(FIRST))) == ["Staged"]
    assert kinds(rank.arm(FIRST)) == ["Armed"]
    assert rank.on(ev.VoteDue(4)) == [ev.CastVote(4, FIRST)]
    assert rank.resolved(ev.Outcome.PASSED) == []
    assert rank.on(ev.FlipDue(8)) == [ev.Flip(stage(FIRST), 8)]
    assert rank.on(ev.VoteDue(8)) == [ev.CastVote(8, ev.NO_CHUNK)]  # the device still copies
    effects = rank.on(ev.FlipDone(FIRST, 0.02))
    assert kinds(effects) == ["ReleaseStaging", "Flipped"]
    (flipped,) = sent(effects)
    assert isinstance(flipped, Flipped)
    assert (flipped.boundary, flipped.stall_s, flipped.digests) == (8, 0.02, ((LAYER, digest(OTHER)),))
    assert rank.machine.live[LAYER].row == OTHER
    assert rank.machine.ledger.closed_id == FIRST


def test_only_the_committed_flip_happens_at_a_vote_boundary(rank: Driver) -> None:
    for driver in (rank, Driver().to_staged(), Driver().to_armed(), Driver().to_voting()):
        assert driver.on(ev.FlipDue(8)) == []


def test_a_vote_that_failed_leaves_the_chunk_armed_for_the_next(rank: Driver) -> None:
    rank.to_voting()
    assert rank.resolved(ev.Outcome.FAILED) == []
    assert rank.on(ev.VoteDue(8)) == [ev.CastVote(8, FIRST)]


def test_an_idle_engine_says_committed_and_flips_at_the_next_vote(rank: Driver) -> None:
    rank.to_committed()
    assert kinds(rank.on(ev.EngineIdle())) == ["Committed"]
    assert kinds(rank.on(ev.FlipDue(8))) == ["Flip"]


def test_nothing_is_said_to_be_committed_before_the_vote_passed(rank: Driver) -> None:
    assert rank.to_voting().on(ev.EngineIdle()) == []


# ── one open chunk, and the tombstone ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", [Driver.to_staged, Driver.to_armed, Driver.to_voting, Driver.to_committed])
def test_a_second_stage_while_a_chunk_is_open_is_busy_and_changes_nothing(
    rank: Driver, way: Callable[[Driver], Driver]
) -> None:
    way(rank)
    before = rank.machine.state
    assert refusal(rank.stage(SECOND)) is RefusalCode.BUSY
    assert (rank.machine.state, rank.machine.open_id) == (before, FIRST)
    assert rank.machine.ledger.closed_id < SECOND


def test_the_same_stage_again_is_answered_by_where_the_chunk_stands(rank: Driver) -> None:
    rank.stage(FIRST)
    assert rank.stage(FIRST) == []
    rank.on(done(FIRST))
    assert kinds(rank.stage(FIRST)) == ["Staged"]
    rank.arm(FIRST)
    assert kinds(rank.stage(FIRST)) == ["Armed"]


def test_another_content_under_the_open_id_is_busy(rank: Driver) -> None:
    rank.to_staged()
    assert refusal(rank.stage(FIRST, new=(1, 0, 3, 2, 0, 1))) is RefusalCode.BUSY


def test_a_closed_id_is_neither_staged_nor_armed(rank: Driver) -> None:
    rank.disarm(SECOND)
    for chunk in (FIRST, SECOND):
        assert refusal(rank.stage(chunk)) is RefusalCode.CLOSED
        assert refusal(rank.arm(chunk)) is RefusalCode.CLOSED
    assert kinds(rank.stage(THIRD)) == ["BeginStaging"]


def test_a_disarm_of_an_id_never_seen_closes_it(rank: Driver) -> None:
    assert kinds(rank.disarm(FIRST)) == ["Disarmed"]
    assert rank.machine.ledger.closed_id == FIRST
    assert refusal(rank.stage(FIRST)) is RefusalCode.CLOSED


def test_a_disarm_of_a_later_id_withdraws_the_open_chunk_too(rank: Driver) -> None:
    rank.to_armed()
    effects = rank.disarm(SECOND)
    assert kinds(effects) == ["ReleaseStaging", "Refused", "Disarmed", "Disarmed"]
    assert [m.chunk_id for m in sent(effects) if isinstance(m, Disarmed)] == [FIRST, SECOND]


def test_arm_for_what_is_not_staged_changes_nothing(rank: Driver) -> None:
    assert refusal(rank.arm(FIRST)) is RefusalCode.BUSY
    rank.stage(FIRST)
    assert refusal(rank.arm(FIRST)) is RefusalCode.BUSY
    assert rank.machine.state is ev.ChunkState.STAGING


# ── staging ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_copy_is_refused_and_closes_the_id(rank: Driver) -> None:
    rank.stage(FIRST)
    effects = rank.on(ev.StagingFailed(FIRST, RefusalCode.CHECKSUM, "bytes differ"))
    assert kinds(effects) == ["ReleaseStaging", "Refused"]
    assert refusal(effects) is RefusalCode.CHECKSUM
    assert refusal(rank.stage(FIRST)) is RefusalCode.CLOSED


def test_a_withdrawn_copy_keeps_staging_busy_until_the_worker_ended(rank: Driver) -> None:
    rank.stage(FIRST)
    assert kinds(rank.disarm(FIRST)) == ["CancelStaging", "Disarmed"]
    assert refusal(rank.stage(SECOND)) is RefusalCode.BUSY
    assert kinds(rank.on(done(FIRST))) == ["ReleaseStaging"]  # it completed, too late
    assert kinds(rank.stage(SECOND)) == ["BeginStaging"]


def test_a_copy_beyond_its_time_is_cancelled_and_refused(rank: Driver) -> None:
    rank.stage(FIRST)
    rank.now = 10.0
    effects = rank.on(ev.Tick())
    assert kinds(effects) == ["CancelStaging", "Refused"]
    assert refusal(effects) is RefusalCode.TRANSFER


# ── time to live ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_staged_chunk_that_is_not_armed_in_time_expires(rank: Driver) -> None:
    rank.to_staged()
    rank.now = 14.9
    assert rank.on(ev.Tick()) == []
    rank.now = 15.0
    effects = rank.on(ev.Tick())
    assert refusal(effects) is RefusalCode.EXPIRED
    assert refusal(rank.arm(FIRST)) is RefusalCode.CLOSED


def test_an_armed_chunk_never_expires_silently(rank: Driver) -> None:
    rank.to_armed()
    rank.now = 5.0
    effects = rank.on(ev.Boundary(3, 0))
    assert kinds(effects) == ["ReleaseStaging", "Refused", "Disarmed"]
    assert rank.on(ev.VoteDue(4)) == [ev.CastVote(4, ev.NO_CHUNK)]


def test_an_armed_chunk_does_not_expire_under_its_vote_but_right_after_a_failed_one(rank: Driver) -> None:
    rank.to_voting()
    rank.now = 50.0
    assert rank.on(ev.Tick()) == []
    assert kinds(rank.resolved(ev.Outcome.FAILED)) == ["ReleaseStaging", "Refused", "Disarmed"]


def test_a_vote_that_passed_beats_the_time_to_live(rank: Driver) -> None:
    rank.to_voting()
    rank.now = 50.0
    rank.on(ev.Tick())
    rank.resolved(ev.Outcome.PASSED)
    assert kinds(rank.on(ev.FlipDue(8))) == ["Flip"]


# ── withdrawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", [Driver.to_staged, Driver.to_armed])
def test_disarm_before_the_vote_is_answered_at_once(rank: Driver, way: Callable[[Driver], Driver]) -> None:
    way(rank)
    assert kinds(rank.disarm(FIRST)) == ["ReleaseStaging", "Disarmed"]
    assert rank.on(ev.VoteDue(4)) == [ev.CastVote(4, ev.NO_CHUNK)]


def test_disarm_under_a_vote_is_answered_after_it_failed(rank: Driver) -> None:
    rank.to_voting()
    assert rank.disarm(FIRST) == []
    assert kinds(rank.resolved(ev.Outcome.FAILED)) == ["ReleaseStaging", "Disarmed"]


def test_disarm_under_a_vote_that_passes_is_answered_flipped(rank: Driver) -> None:
    rank.to_voting()
    rank.disarm(FIRST)
    rank.resolved(ev.Outcome.PASSED)
    assert kinds(rank.disarm(FIRST)) == ["Committed"]
    rank.on(ev.FlipDue(8))
    assert kinds(rank.on(ev.FlipDone(FIRST, 0.0))) == ["ReleaseStaging", "Flipped"]
    assert kinds(rank.disarm(FIRST)) == ["Flipped"]


def test_a_flip_is_remembered_for_late_questions(rank: Driver) -> None:
    rank.to_flipped()
    said = sent(rank.disarm(FIRST))
    rank.disarm(SECOND)
    assert sent(rank.disarm(FIRST)) == said
    assert sent(rank.arm(FIRST)) == said


def test_a_disarm_of_an_older_epoch_is_dropped(rank: Driver) -> None:
    rank.hello(2)
    assert rank.disarm(FIRST, epoch=1) == []


# ── leaders ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_hello_is_answered_with_what_is_live(rank: Driver) -> None:
    rank.to_flipped()
    (reply,) = sent(rank.hello(5))
    assert isinstance(reply, Live)
    assert (reply.epoch, reply.epoch_seen, reply.closed_id, reply.flipped_id) == (5, 5, FIRST, FIRST)
    assert reply.layers[0].row == OTHER


@pytest.mark.parametrize("way", [Driver.to_staged, Driver.to_armed])
def test_a_new_leader_closes_the_open_chunk_before_it_hears_what_is_live(rank: Driver, way: Callable[[Driver], Driver]) -> None:
    way(rank)
    effects = rank.hello(2)
    assert kinds(effects)[0] == "ReleaseStaging"
    assert kinds(effects)[-1] == "Live"
    assert refusal(effects) is RefusalCode.WITHDRAWN
    assert rank.machine.ledger.closed_id == FIRST


def test_a_new_leader_waits_for_a_vote_under_way(rank: Driver) -> None:
    rank.to_voting()
    assert rank.hello(2) == []
    assert kinds(rank.resolved(ev.Outcome.FAILED)) == ["ReleaseStaging", "Refused", "Disarmed", "Live"]


def test_a_new_leader_hears_the_map_after_the_flip_that_a_vote_decided(rank: Driver) -> None:
    rank.to_committed()
    assert kinds(rank.hello(2)) == ["Committed"]
    rank.on(ev.FlipDue(8))
    effects = rank.on(ev.FlipDone(FIRST, 0.0))
    assert kinds(effects) == ["ReleaseStaging", "Flipped", "Live"]


def test_a_leader_that_asks_again_hears_what_is_live_only_once_its_chunk_is_over(rank: Driver) -> None:
    rank.to_armed()
    assert rank.hello(1) == []
    assert kinds(rank.disarm(FIRST)) == ["ReleaseStaging", "Disarmed", "Live"]


def test_a_leader_of_the_past_closes_nothing_and_learns_the_higher_epoch(rank: Driver) -> None:
    rank.to_armed(LATER)
    (reply,) = sent(rank.hello(1))
    assert isinstance(reply, Live)
    assert (reply.epoch, reply.epoch_seen) == (1, 2)
    assert rank.machine.state is ev.ChunkState.ARMED


def test_a_stage_of_an_older_epoch_is_refused_without_closing_anything(rank: Driver) -> None:
    rank.hello(2)
    assert refusal(rank.stage(FIRST)) is RefusalCode.STALE_EPOCH
    assert refusal(rank.arm(FIRST)) is RefusalCode.STALE_EPOCH
    assert rank.machine.ledger.closed_id == 0


@pytest.mark.parametrize(
    "other",
    [Address(address().rank_id, Incarnation(1), GroupId(8)), Address(address().rank_id, address().incarnation, GroupId(9))],
)
def test_messages_to_another_life_or_group_are_dropped(rank: Driver, other: Address) -> None:
    assert rank.stage(FIRST, to=other) == []
    assert rank.on(ev.Received(Hello(to=other, epoch=Epoch(9)))) == []
    assert rank.machine.ledger.epoch_seen == 0


# ── outcomes that are not plain ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_outcome_stops_the_rank_and_keeps_what_re_forming_needs(rank: Driver) -> None:
    rank.to_voting()
    assert kinds(rank.resolved(ev.Outcome.UNKNOWN)) == ["FailStop"]
    assert rank.machine.unresolved_id == FIRST
    assert rank.disarm(FIRST) == []  # neither answer would be true
    assert rank.hello(2) == []


def test_diverged_boundaries_end_voting_and_close_the_chunk(rank: Driver) -> None:
    rank.to_voting()
    assert kinds(rank.resolved(ev.Outcome.DIVERGED)) == ["ReleaseStaging", "Refused", "Disarmed"]
    assert rank.machine.off_reason == "detail"
    assert refusal(rank.stage(SECOND)) is RefusalCode.OFF


def test_switching_off_closes_the_open_chunk_and_on_again_takes_the_next(rank: Driver) -> None:
    rank.to_staged()
    assert refusal(rank.on(ev.VotingOff("switched off"))) is RefusalCode.OFF
    assert refusal(rank.stage(SECOND)) is RefusalCode.OFF
    rank.on(ev.VotingOn())
    assert kinds(rank.stage(THIRD)) == ["BeginStaging"]


def test_switching_off_under_a_vote_that_passes_still_flips_as_all_others_do(rank: Driver) -> None:
    rank.to_voting()
    assert rank.on(ev.VotingOff("switched off")) == []
    rank.resolved(ev.Outcome.PASSED)
    assert kinds(rank.on(ev.FlipDue(8))) == ["Flip"]


def test_a_new_weights_version_closes_the_open_chunk(rank: Driver) -> None:
    rank.to_armed()
    effects = rank.on(ev.Boundary(3, 1))
    assert refusal(effects) is RefusalCode.WEIGHTS_VERSION
    assert refusal(rank.stage(SECOND)) is RefusalCode.WEIGHTS_VERSION
    assert kinds(rank.stage(THIRD, weights_version=1)) == ["BeginStaging"]


@pytest.mark.parametrize("way", [Driver.to_voting, Driver.to_committed])
def test_weights_that_change_between_vote_and_flip_stop_the_rank(rank: Driver, way: Callable[[Driver], Driver]) -> None:
    way(rank)
    effects = rank.on(ev.Boundary(5, 1))
    if rank.machine.state is ev.ChunkState.VOTING:
        effects = rank.resolved(ev.Outcome.PASSED)
    assert kinds(effects) == ["FailStop"]


def test_weights_that_change_under_a_vote_that_fails_only_close_the_chunk(rank: Driver) -> None:
    rank.to_voting()
    rank.on(ev.Boundary(5, 1))
    effects = rank.resolved(ev.Outcome.FAILED)
    assert refusal(effects) is RefusalCode.WEIGHTS_VERSION
    assert kinds(effects)[-1] == "Disarmed"


def test_an_agent_process_that_comes_back_hears_where_the_chunk_stands(rank: Driver) -> None:
    assert rank.on(ev.Attached()) == []
    assert kinds(rank.to_staged().on(ev.Attached())) == ["Staged"]
    rank.arm(FIRST)
    assert kinds(rank.on(ev.Attached())) == ["Armed"]
    rank.disarm(FIRST)
    assert kinds(rank.on(ev.Attached())) == ["Disarmed"]
    assert kinds(Driver().to_committed().on(ev.Attached())) == ["Committed"]
    assert kinds(Driver().to_flipped().on(ev.Attached())) == ["Flipped"]


@pytest.mark.parametrize(
    "event",
    [
        done(FIRST),
        ev.StagingFailed(FIRST, RefusalCode.TRANSFER, ""),
        ev.VoteResolved(FIRST, ev.Outcome.FAILED),
        ev.FlipDone(FIRST, 0.0),
    ],
)
def test_what_cannot_happen_is_raised_with_the_history(rank: Driver, event: ev.Event) -> None:
    rank.stage(SECOND)
    with pytest.raises(BrokenInvariantError, match=f"Stage {SECOND:#x}"):
        rank.on(event)


def test_a_vote_before_the_last_one_is_resolved_is_a_broken_invariant(rank: Driver) -> None:
    rank.to_voting()
    with pytest.raises(BrokenInvariantError, match="vote at boundary 8"):
        rank.on(ev.VoteDue(8))


def test_a_row_that_was_rolled_back_is_another_chunk(rank: Driver) -> None:
    rank.to_flipped()
    assert kinds(rank.stage(SECOND, old=OTHER, new=ROW)) == ["BeginStaging"]
