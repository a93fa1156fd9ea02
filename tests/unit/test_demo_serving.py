"""The demo's client side: keeps ranks busy, follows tokens back, and stops when one batch saw two placements."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agent.engine.reference.messages import Ended, EndReason, FromEngine, NewToken, NewTokens, Rejected
from demo.oracle import Served
from demo.serving import STEPS_KEPT, Serving
from demo.traffic import Traffic
from eplb_service.errors import BrokenInvariantError


class Rank:
    """A rank's connection: keeps what it was asked, says what a test wants."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.says: list[FromEngine] = []

    def submit(self, *, request_id: int, prompt: list[int], max_new_tokens: int, kind: str) -> None:
        del prompt, max_new_tokens, kind
        self.asked.append(request_id)

    def receive(self, *, timeout_s: float) -> list[FromEngine]:
        del timeout_s
        said, self.says = self.says, []
        return said

    def token(self, request: int, token: int, *, boundary: int, generations: tuple[int, ...] = (0, 0)) -> None:
        new = NewToken(request_id=request, index=0, token=token)
        self.says.append(NewTokens(boundary=boundary, generations=generations, tokens=(new,)))

    def end(self, request: int, reason: EndReason = EndReason.LENGTH) -> None:
        self.says.append(Ended(request_id=request, kind="code", reason=reason, num_tokens=1))


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return Traffic(seed=1, prompt_bytes=16)


class Bench:
    def __init__(self, traffic: Traffic) -> None:
        self.ranks = [Rank(), Rank()]
        self.finished: list[Served] = []
        clients: Any = self.ranks
        self.serving = Serving(clients, traffic, in_flight=2, finished=self.finished.append)
        self.serving.pump(0.0)


@pytest.fixture
def bench(traffic: Traffic) -> Bench:
    return Bench(traffic)


def test_every_rank_is_kept_busy_and_refilled(bench: Bench) -> None:
    assert [len(rank.asked) for rank in bench.ranks] == [2, 2]
    first = bench.ranks[0].asked[0]
    bench.ranks[0].token(first, 65, boundary=1)
    bench.ranks[0].end(first)
    bench.serving.pump(1.0)
    bench.serving.pump(1.1)
    assert len(bench.ranks[0].asked) == 3
    assert bench.serving.running == [2, 2]
    assert (bench.serving.requests, bench.serving.tokens) == (1, 1)
    assert len({*bench.ranks[0].asked, *bench.ranks[1].asked}) == 5


def test_a_finished_request_carries_tokens_steps_and_generations(bench: Bench) -> None:
    request = bench.ranks[0].asked[0]
    bench.ranks[0].token(request, 65, boundary=7)
    bench.ranks[0].token(request, 66, boundary=8, generations=(1, 0))
    bench.ranks[0].end(request)
    bench.serving.pump(1.0)
    (served,) = bench.finished
    assert (served.request_id, served.tokens, served.boundaries) == (request, (65, 66), (7, 8))
    assert served.generations == ((0, 0), (1, 0))
    assert bench.serving.across_a_flip == 1
    assert bench.serving.flip_boundaries == [8]


def test_two_ranks_that_routed_one_step_differently_end_the_run(bench: Bench) -> None:
    bench.ranks[0].token(bench.ranks[0].asked[0], 65, boundary=7, generations=(1, 0))
    bench.ranks[1].token(bench.ranks[1].asked[0], 65, boundary=7, generations=(0, 0))
    with pytest.raises(
        BrokenInvariantError, match=re.escape("at step 7 rank position 1 routed its layers by generations (0, 0)")
    ):
        bench.serving.pump(1.0)


def test_a_cancelled_request_is_not_judged_and_a_rejected_one_ends_the_run(bench: Bench) -> None:
    bench.ranks[0].end(bench.ranks[0].asked[0], EndReason.CANCELLED)
    bench.serving.pump(1.0)
    assert (bench.finished, bench.serving.requests) == ([], 0)
    bench.ranks[0].says.append(Rejected(request_id=bench.ranks[0].asked[1], reason="queue full"))
    with pytest.raises(BrokenInvariantError, match="was rejected although the queue had room: queue full"):
        bench.serving.pump(2.0)


def test_rate_counts_the_last_seconds_only(bench: Bench) -> None:
    request = bench.ranks[0].asked[0]
    assert bench.serving.tokens_per_s(0.0) == 0.0
    for second in range(10):
        bench.ranks[0].token(request, 65, boundary=second)
        bench.serving.pump(float(second))
    assert bench.serving.tokens_per_s(9.0) == pytest.approx(4 / 3.0)
    bench.serving.pump(60.0)
    assert bench.serving.tokens_per_s(60.0) == 0.0


def test_no_request_is_sent_once_serving_closes(bench: Bench) -> None:
    bench.serving.accepting = False
    bench.ranks[0].end(bench.ranks[0].asked[0])
    bench.serving.pump(1.0)
    bench.serving.pump(1.1)
    assert bench.serving.running == [1, 2]


def test_prompts_follow_from_the_seed_and_ids_are_unique(traffic: Traffic) -> None:
    again, other = Traffic(seed=1, prompt_bytes=16), Traffic(seed=2, prompt_bytes=16)
    del traffic
    first, same, different = ([one.next() for _ in range(4)] for one in (Traffic(seed=1, prompt_bytes=16), again, other))
    assert first == same
    assert {prompt.request_id for prompt in first}.isdisjoint(prompt.request_id for prompt in different)
    again.kind = "logs"
    assert again.next().kind == "logs"


def test_flips_are_remembered_over_days_of_steps_and_steps_are_not(bench: Bench) -> None:
    request = bench.ranks[0].asked[0]
    flips = [1000, 4100, 9000, 12_287]
    for step in range(3 * STEPS_KEPT):
        generation = sum(step >= flip for flip in flips)
        bench.ranks[0].token(request, 65, boundary=step, generations=(generation, generation))
        bench.ranks[1].token(bench.ranks[1].asked[0], 65, boundary=step, generations=(generation, generation))
        bench.serving.pump(0.001 * step)
    assert bench.serving.flip_boundaries == flips
    assert len(bench.serving._routed_by) <= 2 * STEPS_KEPT
    assert bench.serving.boundaries_compared == 6 * STEPS_KEPT
