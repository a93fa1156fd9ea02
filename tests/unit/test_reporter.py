"""Load reports waiting for the planner: bounded, counted, in order, sent again when a stream broke."""

from __future__ import annotations

import numpy as np
import pytest

from agent.reporter import Reporter, ReportKey
from eplb_service.errors import InvalidInputError
from eplb_service.ids import GroupId, Incarnation, Phase, RankId
from eplb_service.window.report import LoadReport, Semantics, TableCounts

ALL = frozenset(RankId(rank) for rank in range(8))


def report(rank: int, window: int, *, num_bytes: int = 32) -> LoadReport:
    counts = np.zeros((1, 1, num_bytes // 4), np.int32)
    return LoadReport(
        rank_id=RankId(rank), incarnation=Incarnation(1), group_id=GroupId(1), window_index=window, boundary_begin=window,
        boundary_end=window + 1, forward_passes=1, tokens=0, semantics=Semantics.LOCAL_TOKENS, phase=Phase.MIXED,
        live_digest_begin=1, live_digest_end=1, tables=(TableCounts(model="m", layer_ids=(0,), counts=counts),),
    )  # fmt: skip


def key(rank: int, window: int) -> ReportKey:
    return (RankId(rank), Incarnation(1), GroupId(1), window)


def drain(reporter: Reporter) -> list[tuple[int, int]]:
    taken = []
    while (sent := reporter.take(ALL)) is not None:
        taken.append((int(sent.rank_id), sent.window_index))
    return taken


def test_a_planner_that_stays_away_costs_the_oldest_windows_and_no_more_memory() -> None:
    """sglang#18587: an unbounded queue of expert statistics ended an engine."""
    reporter = Reporter(windows_max=4)
    for window in range(1000):
        reporter.offer(report(0, window))
    assert (reporter.num_queued, reporter.dropped(RankId(0))) == (4, 996)
    assert drain(reporter) == [(0, 996), (0, 997), (0, 998), (0, 999)]


def test_the_bound_in_bytes_holds_too() -> None:
    reporter = Reporter(windows_max=100, bytes_max=1000)
    for window in range(10):
        reporter.offer(report(0, window, num_bytes=400))
    assert (reporter.num_queued, reporter.dropped(RankId(0))) == (2, 8)
    reporter.offer(report(0, 10, num_bytes=4000))
    assert (reporter.num_queued, reporter.dropped(RankId(0))) == (0, 11)


def test_one_ranks_flood_costs_no_other_rank_its_windows() -> None:
    reporter = Reporter(windows_max=4)
    reporter.offer(report(1, 0))
    for window in range(100):
        reporter.offer(report(0, window))
    assert reporter.dropped(RankId(1)) == 0
    assert [rank for rank, _ in drain(reporter)] == [0, 1, 0, 0, 0]


def test_only_ranks_that_the_planner_knows_are_sent_for() -> None:
    reporter = Reporter()
    reporter.offer(report(0, 0))
    assert not reporter.has_next({RankId(1)})
    assert reporter.take({RankId(1)}) is None
    assert reporter.has_next({RankId(0)})


def test_enough_unanswered_reports_hold_back_the_rest() -> None:
    reporter = Reporter(in_flight_max=2)
    for window in range(4):
        reporter.offer(report(0, window))
    assert drain(reporter) == [(0, 0), (0, 1)]
    assert not reporter.has_next(ALL)
    assert not reporter.answered(key(0, 0), accepted=True, code="")
    assert drain(reporter) == [(0, 2)]


def test_what_was_not_answered_is_sent_again_first_and_in_order() -> None:
    reporter = Reporter()
    for window in range(3):
        reporter.offer(report(0, window))
    reporter.take(ALL)
    reporter.take(ALL)
    reporter.answered(key(0, 0), accepted=True, code="")
    reporter.stream_lost()
    assert reporter.num_in_flight == 0
    assert drain(reporter) == [(0, 1), (0, 2)]


def test_what_comes_back_from_a_broken_stream_is_bounded_too() -> None:
    reporter = Reporter(windows_max=3, in_flight_max=3)
    for window in range(3):
        reporter.offer(report(0, window))
    drain(reporter)
    for window in range(3, 6):
        reporter.offer(report(0, window))
    reporter.stream_lost()
    reporter.answered(key(0, 2), accepted=True, code="")
    assert reporter.dropped(RankId(0)) == 3
    assert drain(reporter) == [(0, 3), (0, 4), (0, 5)]


def test_a_refusal_is_news_when_its_reason_changes() -> None:
    reporter = Reporter()
    news = []
    for window, code in enumerate(["late", "late", "warmup", "", "late"]):
        reporter.offer(report(0, window))
        reporter.take(ALL)
        news.append(reporter.answered(key(0, window), accepted=not code, code=code))
    assert news == [True, False, True, False, True]
    assert (reporter.refused, reporter.num_answered) == (4, 5)


def test_a_duplicate_is_the_price_of_sending_again_and_no_news() -> None:
    reporter = Reporter()
    reporter.offer(report(0, 0))
    reporter.take(ALL)
    assert not reporter.answered(key(0, 0), accepted=False, code="duplicate")
    assert reporter.refused == 0


def test_answers_to_what_was_never_sent_are_ignored() -> None:
    reporter = Reporter()
    assert not reporter.answered(key(0, 0), accepted=False, code="late")
    assert (reporter.refused, reporter.num_answered) == (0, 0)


def test_a_rank_that_begins_a_new_life_leaves_nothing_of_the_old_one() -> None:
    reporter = Reporter(windows_max=1)
    for window in range(3):
        reporter.offer(report(0, window))
    reporter.take(ALL)
    reporter.offer(report(1, 0))
    reporter.forget(RankId(0))
    reporter.stream_lost()
    assert reporter.dropped(RankId(0)) == 0
    assert drain(reporter) == [(1, 0)]


def test_a_report_that_cannot_travel_is_lost_and_counted() -> None:
    reporter = Reporter()
    odd = report(0, 0)
    reporter.offer(odd)
    assert reporter.take(ALL) is odd
    reporter.unsendable(odd)
    assert (reporter.num_in_flight, reporter.dropped(RankId(0))) == (0, 1)


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got windows_max 0"):
        Reporter(windows_max=0)
