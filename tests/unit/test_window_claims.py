"""Windows far from where the group is: refused with the numbers, unless enough ranks say the same; nobody is late for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.ids import Incarnation, RankId
from eplb_service.window.claims import FAR_WINDOWS
from eplb_service.window.windows import Accepted, Expected, Refusal, Refused, Windows
from tests.unit.test_window import EXPECTED, RANKS, fill, refusal, report

FAR = 10**9


def group_of(num_ranks: int) -> Expected:
    incarnations = {RankId(rank): Incarnation(100 + rank) for rank in range(4, 4 + num_ranks)}
    return replace(EXPECTED, incarnations=incarnations)


def test_a_window_far_in_the_future_is_refused_with_the_numbers_and_its_rank_reports_on() -> None:
    windows = Windows()
    fill(windows, 5)
    answer = windows.offer(report(4, FAR), EXPECTED)
    assert refusal(answer) is Refusal.FAR_AHEAD
    assert isinstance(answer, Refused)
    assert answer.sentence == (
        f"window {FAR} of rank 4 is {FAR - 5} windows ahead of its group, which is at 5; more than {FAR_WINDOWS} are believed"
        " once another rank reports the same"
    )
    assert windows.counters["far_ahead"] == 1
    assert isinstance(fill(windows, 6), Accepted)
    assert windows.num_closed == 2


def test_the_whole_group_goes_on_after_hours_in_which_nobody_heard_of_it() -> None:
    windows = Windows()
    fill(windows, 5)
    assert refusal(windows.offer(report(4, 5000), EXPECTED)) is Refusal.FAR_AHEAD
    for rank in RANKS[1:]:
        assert isinstance(windows.offer(report(rank, 5000), EXPECTED), Accepted)
    assert isinstance(fill(windows, 5001), Accepted)
    assert windows.num_closed == 2
    assert isinstance(fill(windows, 5002), Accepted)
    assert windows.num_closed == 4, "5000 is closed without rank 4, 5001 and 5002 with it"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 16])
def test_a_first_report_that_is_a_mistake_makes_nobody_late_for_ever(num_ranks: int) -> None:
    windows, expected = Windows(), group_of(num_ranks)
    assert isinstance(windows.offer(report(4, FAR), expected), Accepted)
    for k in range(5, 9):
        for rank in expected.incarnations:
            windows.offer(report(rank, k), expected)
    assert isinstance(windows.offer(report(4, 9), expected), Accepted)
    closed = windows.combine(64)
    assert closed is not None
    assert max(k for _, k in closed.windows) <= 9, "what the mistake left is gone"
    assert windows.counters["accepted"] >= 2 * num_ranks + 1


def test_old_windows_of_one_agent_process_that_was_away_do_not_bring_the_group_back() -> None:
    windows = Windows()
    fill(windows, 500)
    for k in range(380, 396):  # two ranks of four
        for rank in RANKS[:2]:
            assert refusal(windows.offer(report(rank, k), EXPECTED)) is Refusal.LATE
    assert isinstance(fill(windows, 501), Accepted)
    assert windows.num_closed == 2


REPORTS = st.lists(st.tuples(st.integers(4, 7), st.integers(0, 1 << 62)), max_size=12)


@settings(max_examples=60, deadline=None, database=None)
@given(REPORTS, st.integers(1, 4), st.integers(0, 1000))
def test_whatever_one_rank_says_the_others_windows_close_again_within_a_few(
    lies: list[tuple[int, int]], num_ranks: int, begin: int
) -> None:
    """Lies of one rank, anywhere in between: then honest reports of all ranks, whose windows must count."""
    windows, expected = Windows(), group_of(num_ranks)
    for k in range(begin, begin + 4):
        for rank in expected.incarnations:
            windows.offer(report(rank, k), expected)
        for _, lie in lies:
            windows.offer(report(4, lie), expected)
    behind = begin + 4 + 2 * FAR_WINDOWS
    for k in range(behind, behind + 6):
        for rank in expected.incarnations:
            windows.offer(report(rank, k), expected)
    last = windows.combine(2)
    assert last is not None
    assert num_ranks == 1 or last.windows[-1][1] == behind + 5
    assert windows.num_kept <= windows.windows_max
