"""The vote over real gloo groups, one thread a rank, and over doubles for what must not be left to chance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from agent.hook.ballot import LEAVING
from agent.hook.chunk_events import NO_CHUNK, Outcome
from agent.hook.vote import Vote, Voter, read
from agent.transfer.gloo import GlooGroup, local_store, prefixed
from eplb_service.ids import ChunkId

WAIT_S = 10.0
ID = ChunkId((3 << 32) | 7)
BIG = ChunkId((1 << 63) - 1)


@dataclass
class Rank:
    """A voter and what it told."""

    group: GlooGroup
    timeout_s: float = 5.0
    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.voter = Voter(self.group, timeout_s=self.timeout_s, on_resolved=self._resolved, on_off=self.off.append)
        self.voter.start()

    def _resolved(self, chunk: ChunkId, outcome: Outcome, detail: str) -> None:
        self.outcomes.append((chunk, outcome))
        self.told.set()


def in_parallel(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    store = local_store()
    groups = in_parallel([partial(GlooGroup, prefixed("v", store), index, 3, WAIT_S) for index in range(3)])
    made = [Rank(group) for group in groups]
    yield made
    in_parallel([partial(rank.voter.leave, 1.0) for rank in made])


def vote(ranks: list[Rank], boundary: int, *ids: int) -> None:
    for rank, chunk in zip(ranks, ids, strict=True):
        rank.voter.cast(boundary, ChunkId(chunk))
    for rank in ranks:
        rank.voter.collect()


@pytest.mark.parametrize("chunk", [ID, BIG])
def test_a_unanimous_vote_passes_on_every_rank(ranks: list[Rank], chunk: ChunkId) -> None:
    vote(ranks, 4, chunk, chunk, chunk)
    assert [rank.outcomes for rank in ranks] == [[(chunk, Outcome.PASSED)]] * 3


@pytest.mark.parametrize("ids", [(ID, ID, 0), (0, ID, ID), (ID, ID + 1, ID), (ID, ID, ID - 1)])
def test_a_vote_that_is_not_unanimous_fails_on_every_rank_that_cast_an_id(ranks: list[Rank], ids: tuple[int, ...]) -> None:
    vote(ranks, 4, *ids)
    for rank, chunk in zip(ranks, ids, strict=True):
        assert rank.outcomes == ([(chunk, Outcome.FAILED)] if chunk else [])
        assert rank.off == []


def test_ranks_at_different_boundaries_all_stop_voting(ranks: list[Rank]) -> None:
    for rank, boundary, chunk in zip(ranks, (4, 4, 8), (ID, NO_CHUNK, ID), strict=True):
        rank.voter.cast(boundary, chunk)
    for rank in ranks:
        rank.voter.collect()
    assert ranks[0].outcomes == [(ID, Outcome.DIVERGED)]
    assert ranks[2].outcomes == [(ID, Outcome.DIVERGED)]
    for rank in ranks:
        rank.voter.collect()
        while not rank.off:  # the one that cast 0 looks without waiting
            rank.voter.collect() if not rank.voter._zeros else rank.voter._zeros[0].ballot.wait(timedelta(seconds=WAIT_S))
            rank.voter.collect()
        assert "4 to 8" in rank.off[0]
        assert rank.voter.is_off


def test_an_id_that_cannot_be_counted_is_unknown_and_zero_only_ends_voting(ranks: list[Rank]) -> None:
    for rank in ranks[:2]:
        rank.voter._timeout_s = 0.3
    ranks[0].voter.cast(4, ID)
    ranks[1].voter.cast(4, NO_CHUNK)  # the third rank never comes
    ranks[0].voter.collect()
    assert ranks[0].outcomes == [(ID, Outcome.UNKNOWN)]
    with pytest.raises(RuntimeError):
        ranks[1].voter._zeros[0].ballot.wait(timedelta(seconds=WAIT_S))
    ranks[1].voter.collect()
    assert (len(ranks[1].off), ranks[1].outcomes) == (1, [])
    ranks[1].voter.cast(8, NO_CHUNK)  # casts nothing more
    assert not ranks[1].voter._zeros


def test_the_waiter_resolves_a_vote_while_no_further_step_comes(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.voter.cast(4, ID)
    for rank in ranks:
        assert rank.told.wait(WAIT_S)
        assert rank.outcomes == [(ID, Outcome.PASSED)]


def test_a_rank_that_leaves_is_known_from_a_completed_vote(ranks: list[Rank]) -> None:
    leaving = threading.Thread(target=ranks[2].voter.leave, args=(3.0,))
    leaving.start()
    ranks[0].voter.cast(4, ID)
    ranks[1].voter.cast(4, ID)
    for rank in ranks[:2]:
        rank.voter.collect()
        assert rank.outcomes == [(ID, Outcome.DIVERGED)]
        assert "left" in rank.off[0]
    leaving.join(WAIT_S)
    assert not leaving.is_alive()


class _Stuck:
    """A group whose votes never end."""

    def all_reduce_min(self, values: torch.Tensor, timeout_s: float) -> Any:
        return self

    def wait(self, timeout: timedelta) -> bool:
        threading.Event().wait(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False

    def close_connections(self) -> None:
        return


def test_casting_zero_never_waits_and_casting_an_id_waits_only_for_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.hook.vote.MARGIN_S", 0.05)
    outcomes: list[Outcome] = []
    voter = Voter(_Stuck(), timeout_s=0.1, on_resolved=lambda _c, o, _d: outcomes.append(o), on_off=lambda _r: None)
    voter.start()
    for boundary in range(0, 400, 4):
        voter.cast(boundary, NO_CHUNK)
        voter.collect()
    voter.cast(400, ID)
    voter.collect()
    assert outcomes == [Outcome.UNKNOWN]
    voter.leave(1.0)


def test_only_an_id_that_this_rank_cast_can_pass() -> None:
    values = torch.tensor([8, -8, ID, -ID])
    stuck: Any = _Stuck()
    assert read(Vote(8, ID, values, stuck)) == (Outcome.PASSED, "")
    assert read(Vote(8, NO_CHUNK, values, stuck))[0] is Outcome.FAILED
    assert read(Vote(8, ChunkId(ID + 1), values, stuck))[0] is Outcome.FAILED
    assert read(Vote(8, NO_CHUNK, torch.tensor([8, -8, 0, 0]), stuck))[0] is Outcome.FAILED
    assert read(Vote(8, ID, torch.tensor([LEAVING, -8, 0, -ID]), stuck))[0] is Outcome.DIVERGED


def test_votes_of_a_group_that_is_given_up_end_without_a_word_here_and_at_once_at_their_peers(ranks: list[Rank]) -> None:
    for rank in ranks[:2]:
        rank.voter.cast(4, ID)  # the third never does
    ranks[0].voter.abandon()
    ranks[0].voter._waiter.join(WAIT_S)
    assert not ranks[0].voter._waiter.is_alive()
    assert ranks[1].told.wait(WAIT_S)
    assert ranks[1].outcomes == [(ID, Outcome.UNKNOWN)]
    assert (ranks[0].outcomes, ranks[0].off) == ([], [])
    assert ranks[0].voter.is_off
    ranks[0].voter.cast(8, ID)
    assert ranks[0].outcomes == []
