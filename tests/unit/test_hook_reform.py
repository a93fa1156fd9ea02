"""Forming a group again: what ranks decide from where they stand, over every way in which a vote may have ended for them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from agent.hook.chunk_events import ChunkState
from agent.hook.reform import NotServed, Reformed, Standing, decide, standing_of
from eplb_service.control import Arm, Disarm, Disarmed, Refused
from eplb_service.errors import InvalidInputError
from eplb_service.generation import live_digest
from eplb_service.ids import ChunkId, Epoch, RankId, chunk_id
from tests.unit.hook_chunk_parts import LAYER, OTHER, RANKS, ROW, address, digest, done, machine, sent, stage

CHUNK, EARLIER = chunk_id(1, 7), chunk_id(1, 3)
PERIOD = 4
OLD_MAP, NEW_MAP = live_digest({LAYER: digest(ROW)}), live_digest({LAYER: digest(OTHER)})

Seen = str
"""How the vote ended for one rank: `idle`, `staged`, `armed`, `failed`, `disarmed`, `unknown`, `voting`, `passed`, `flipping`,
`flipped`.
"""
CAST = ("voting", "unknown", "passed", "flipping", "flipped", "failed")
"""Ways in which it can stand for a rank that cast the chunk's id."""
NOT_CAST = ("idle", "staged", "armed", "disarmed")


def rank_that_saw(rank: RankId, seen: Seen) -> ChunkMachine:  # noqa: PLR0911  (one way to stand after another)
    """A rank's own machine, brought to where it stands."""
    found = machine(rank)
    handle = found.handle
    if seen == "idle":
        return found
    handle(ev.Received(stage(CHUNK, rank=rank)), 0.0)
    handle(done(CHUNK), 0.0)
    if seen == "staged":
        return found
    handle(ev.Received(Arm(to=address(rank), chunk_id=CHUNK)), 0.0)
    if seen == "armed":
        return found
    if seen == "disarmed":
        handle(ev.Received(Disarm(to=address(rank), chunk_id=CHUNK, epoch=Epoch(1))), 0.0)
        return found
    handle(ev.Boundary(8, 0), 0.0)
    assert handle(ev.VoteDue(8), 0.0) == [ev.CastVote(8, CHUNK)]
    if seen == "voting":
        return found
    if seen == "unknown":
        handle(ev.VoteResolved(CHUNK, ev.Outcome.UNKNOWN, "a peer is gone"), 0.0)
        return found
    if seen == "failed":
        handle(ev.VoteResolved(CHUNK, ev.Outcome.FAILED), 0.0)
        return found
    handle(ev.VoteResolved(CHUNK, ev.Outcome.PASSED), 0.0)
    if seen == "passed":
        return found
    handle(ev.FlipDue(12), 0.0)
    if seen == "flipped":
        handle(ev.FlipDone(CHUNK, 0.01), 0.0)
    return found


def stories() -> Iterator[tuple[Seen, ...]]:
    """Everything that three ranks can have seen of one vote: all cast the id and it passed, or not all did and it failed."""
    passed = ("voting", "unknown", "passed", "flipping", "flipped")
    yield from itertools.product(passed, repeat=3)
    failed = ("voting", "unknown", "failed", *NOT_CAST)
    for story in itertools.product(failed, repeat=3):
        if any(seen in NOT_CAST for seen in story):
            yield story


def survivors_of(story: tuple[Seen, ...]) -> Iterator[dict[RankId, ChunkMachine]]:
    """Every way in which at least one rank is left."""
    for size in (1, 2, 3):
        for left in itertools.combinations(range(3), size):
            yield {RANKS[index]: seen_once(RANKS[index], story[index]) for index in left}


@functools.cache
def seen_once(rank: RankId, seen: Seen) -> ChunkMachine:
    """The same, to look at only."""
    return rank_that_saw(rank, seen)


def test_after_every_vote_and_every_loss_all_ranks_that_are_left_route_by_one_map() -> None:
    """441 stories, each with every set of ranks lost (vllm#46370, vllm#53934)."""
    assert len(list(stories())) == 441
    told = set()
    for story in stories():
        for left in survivors_of(story):
            standings = [standing_of(found, rank) for rank, found in left.items()]
            decision = decide(standings, vote_period=PERIOD)
            assert isinstance(decision, Reformed), (story, decision)
            routes = {rank: OTHER if rank in decision.flips else found.live[LAYER].row for rank, found in left.items()}
            assert len(set(routes.values())) == 1, (story, decision)
            assert decision.live_digest == (NEW_MAP if OTHER in routes.values() else OLD_MAP)
            # A flip happens only where the vote passed and the bytes are there, and everywhere once one rank made it.
            seen = {rank: story[RANKS.index(rank)] for rank in left}
            if decision.flips:
                assert all(seen[rank] in CAST[:4] for rank in decision.flips)
                assert set(seen.values()) & {"passed", "flipping", "flipped"}
                assert decision.chunk_id == CHUNK
                assert all(left[rank].opened is not None for rank in decision.flips)
            assert not any(kind in NOT_CAST for kind in story) or not decision.flips
            assert decision.boundary % PERIOD == 0
            assert decision.boundary > max(found.ledger.boundary for found in left.values())
            told.add((bool(decision.flips), decision.live_digest == NEW_MAP))
    assert told == {(False, False), (False, True), (True, True)}


def test_what_one_rank_said_will_not_flip_never_flips_when_the_group_forms_again() -> None:
    for story in stories():
        proven = any(seen == "disarmed" for seen in story)
        for left in survivors_of(story):
            decision = decide([standing_of(found, rank) for rank, found in left.items()], vote_period=PERIOD)
            assert isinstance(decision, Reformed)
            if proven:
                assert decision.flips == frozenset()
                assert decision.live_digest == OLD_MAP
    said = sent(rank_that_saw(RANKS[0], "armed").handle(ev.VotingOff("off"), 1.0))
    assert [type(message) for message in said] == [Refused, Disarmed]


def test_the_decision_is_the_same_on_every_rank() -> None:
    for story in itertools.product(("unknown", "flipped", "passed"), repeat=3):
        standings = [standing_of(rank_that_saw(rank, seen), rank) for rank, seen in zip(RANKS, story, strict=True)]
        decisions = [decide(order, vote_period=PERIOD) for order in itertools.permutations(standings)]
        assert all(decision == decisions[0] for decision in decisions)


def standing(rank: int, **changes: object) -> Standing:
    plain = Standing(
        rank_id=RankId(rank),
        live_digest=OLD_MAP,
        flipped_id=ev.NO_CHUNK,
        cast_id=ev.NO_CHUNK,
        has_passed=False,
        digest_after=OLD_MAP,
        can_flip=True,
        boundary=9,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_ranks_that_route_by_different_maps_do_not_serve_and_are_named() -> None:
    decision = decide([standing(4), standing(9), standing(7, live_digest=NEW_MAP, flipped_id=CHUNK)], vote_period=1)
    assert isinstance(decision, NotServed)
    assert f"2 different maps (rank 4, 9: {OLD_MAP:#x}; rank 7: {NEW_MAP:#x})" in decision.reason


def test_a_rank_whose_weights_changed_since_it_staged_does_not_flip_and_nobody_serves() -> None:
    """The others flipped with weights that this rank no longer has: no map is right on all of them (invariant 2)."""
    stale = rank_that_saw(RANKS[0], "passed")
    stale.handle(ev.Boundary(12, 1), 0.0)
    assert stale.state is ChunkState.UNRESOLVED
    first = standing_of(stale, RANKS[0])
    assert (first.cast_id, first.has_passed, first.can_flip) == (CHUNK, True, False)
    other = standing_of(rank_that_saw(RANKS[1], "flipped"), RANKS[1])
    decision = decide([first, other], vote_period=PERIOD)
    assert isinstance(decision, NotServed)
    assert f"rank {RANKS[0]} has to flip chunk {CHUNK:#x}" in decision.reason
    waiting = rank_that_saw(RANKS[0], "voting")
    waiting.handle(ev.Boundary(9, 1), 0.0)
    assert not standing_of(waiting, RANKS[0]).can_flip
    closed = decide(
        [standing_of(waiting, RANKS[0]), standing_of(rank_that_saw(RANKS[1], "idle"), RANKS[1])], vote_period=PERIOD
    )
    assert isinstance(closed, Reformed)  # no one flipped it, so nobody has to


def test_all_ids_that_were_voted_for_or_flipped_are_closed_in_the_new_group() -> None:
    decision = decide(
        [standing(4, flipped_id=EARLIER), standing(7, flipped_id=EARLIER, cast_id=CHUNK, digest_after=NEW_MAP)], vote_period=3
    )
    assert isinstance(decision, Reformed)
    assert (decision.closed_id, decision.flips, decision.chunk_id, decision.boundary) == (CHUNK, frozenset(), ev.NO_CHUNK, 12)


def test_votes_that_cannot_both_have_passed_end_the_group() -> None:
    late: ChunkId = chunk_id(1, 8)
    decision = decide(
        [standing(4, cast_id=CHUNK, has_passed=True), standing(7, cast_id=late, has_passed=True)], vote_period=PERIOD
    )
    assert isinstance(decision, NotServed)
    assert "passed at once" in decision.reason


@pytest.mark.parametrize(("standings", "period"), [([], 1), ([standing(1), standing(1)], 1), ([standing(1)], 0)])
def test_bad_input_is_refused(standings: list[Standing], period: int) -> None:
    with pytest.raises(InvalidInputError, match="one standing of each of its ranks"):
        decide(standings, vote_period=period)
