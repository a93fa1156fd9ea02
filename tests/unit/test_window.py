"""Which load reports are believed, and what their sum is. Names of public threads mark the kind of fault that a test closes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.ids import GroupId, Incarnation, Phase, RankId
from eplb_service.window.windows import (
    Accepted,
    Alarm,
    CombinedWindow,
    CountBasis,
    Expected,
    LoadReport,
    Refusal,
    Refused,
    Semantics,
    TableCounts,
    TableShape,
    Windows,
)

STEPS = 10
SHAPE = TableShape(model="m", layer_ids=(1, 2, 3), num_logical=4)
GROUP = GroupId(70)
RANKS = tuple(RankId(rank) for rank in (4, 5, 6, 7))
EXPECTED = Expected(
    group_id=GROUP,
    incarnations={rank: Incarnation(100 + rank) for rank in RANKS},
    window_steps=STEPS,
    tables=(SHAPE,),
)
COUNTS = np.arange(12, dtype=np.int64).reshape(1, 3, 4)


def table(counts: npt.NDArray[Any] = COUNTS, layer_ids: tuple[int | None, ...] = (1, 2, 3), model: str = "m") -> TableCounts:
    return TableCounts(model=model, layer_ids=layer_ids, counts=counts)


def report(rank: int = 4, k: int = 0, counts: npt.NDArray[Any] = COUNTS, **changes: Any) -> LoadReport:
    values: dict[str, Any] = {
        "rank_id": RankId(rank),
        "incarnation": Incarnation(100 + rank),
        "group_id": GROUP,
        "window_index": k,
        "boundary_begin": k * STEPS,
        "boundary_end": (k + 1) * STEPS,
        "forward_passes": STEPS,
        "tokens": 33,
        "semantics": Semantics.LOCAL_TOKENS,
        "phase": Phase.DECODE,
        "live_digest_begin": 1,
        "live_digest_end": 1,
        "tables": (table(counts),),
        "step_time_min_s": 0.01,
        "step_time_mean_s": 0.02,
        "step_time_max_s": 0.05,
    }
    return LoadReport(**{**values, **changes})


def refusal(answer: Accepted | Refused) -> Refusal:
    assert isinstance(answer, Refused), answer
    assert answer.sentence
    return answer.reason


def combined(windows: Windows, num_windows: int = 8) -> CombinedWindow:
    result = windows.combine(num_windows)
    assert result is not None
    return result


def fill(windows: Windows, k: int, expected: Expected = EXPECTED, **changes: Any) -> Accepted | Refused:
    answer: Accepted | Refused = Accepted()
    for rank in expected.incarnations:
        answer = windows.offer(report(rank, k, **changes), expected)
    return answer


def test_window_closes_with_its_last_rank_and_is_the_sum_of_all() -> None:
    windows = Windows()
    for rank in RANKS[:3]:
        answer = windows.offer(report(rank), EXPECTED)
        assert isinstance(answer, Accepted)
        assert answer.closed == ()
        assert windows.combine(1) is None
    answer = windows.offer(report(7, counts=COUNTS * 10), EXPECTED)
    assert isinstance(answer, Accepted)
    assert answer.closed == ((GROUP, 0),)
    result = combined(windows)
    assert result.tables[0].loads.tolist() == (COUNTS * 13).tolist()
    assert result.sources == RANKS
    assert result.tables[0].source_loads[3].tolist() == (COUNTS[0] * 10).tolist()
    assert (result.coverage, result.tokens, result.steps, result.live_digest) == (1.0, 4 * 33, STEPS, 1)


def test_sub_windows_and_windows_come_in_time_order_whatever_order_ranks_report_in() -> None:
    windows = Windows()
    series = [np.stack([COUNTS[0] * (10 * k + 1), COUNTS[0] * (10 * k + 2)]) for k in range(3)]
    for rank, k in ((4, 0), (4, 1), (5, 0), (6, 0), (7, 0), (5, 1), (6, 1), (7, 1)):
        windows.offer(report(rank, k, series[k]), EXPECTED)
    loads = combined(windows).tables[0].loads
    assert loads.shape == (4, 3, 4)
    assert [float(sub[2, 3] / 11 / 4) for sub in loads] == [1.0, 2.0, 11.0, 12.0]
    assert combined(windows, 1).tables[0].loads.shape == (2, 3, 4)


def test_duplicate_changes_nothing_and_a_conflicting_one_loses() -> None:
    windows = Windows()
    windows.offer(report(4), EXPECTED)
    assert refusal(windows.offer(report(4), EXPECTED)) is Refusal.DUPLICATE
    assert refusal(windows.offer(report(4, counts=COUNTS + 1), EXPECTED)) is Refusal.CONFLICTING_DUPLICATE
    for rank in RANKS[1:]:
        windows.offer(report(rank), EXPECTED)
    assert combined(windows).tables[0].loads.tolist() == (COUNTS * 4).tolist()
    assert refusal(windows.offer(report(7), EXPECTED)) is Refusal.DUPLICATE
    assert windows.counters == {"accepted": 4, "duplicate": 2, "conflicting_duplicate": 1}


def test_late_and_out_of_order_reports_are_refused() -> None:
    windows = Windows()
    windows.offer(report(4, 0), EXPECTED)
    windows.offer(report(4, 3), EXPECTED)
    late = windows.offer(report(5, 0), EXPECTED)
    assert refusal(late) is Refusal.LATE
    assert isinstance(late, Refused)
    assert "from 2 on" in late.sentence
    assert refusal(windows.offer(report(4, 2), EXPECTED)) is Refusal.OUT_OF_ORDER
    assert isinstance(windows.offer(report(5, 2), EXPECTED), Accepted)


def test_silent_rank_does_not_hold_a_window_open_for_ever_and_coverage_tells() -> None:
    windows = Windows()
    for k in range(3):
        for rank in RANKS[:3]:
            windows.offer(report(rank, k), EXPECTED)
    result = combined(windows)
    assert result.windows == ((GROUP, 0),)
    assert result.coverage == pytest.approx(0.75)
    assert result.tables[0].loads.tolist() == (COUNTS * 3).tolist(), "local tokens are never scaled up"


def test_one_rank_that_runs_ahead_does_not_close_the_windows_of_the_others() -> None:
    windows = Windows()
    for rank in RANKS[:3]:
        windows.offer(report(rank, 5), EXPECTED)
    windows.offer(report(7, 10**9), EXPECTED)
    assert isinstance(windows.offer(report(4, 6), EXPECTED), Accepted)
    assert isinstance(windows.offer(report(5, 6), EXPECTED), Accepted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank_id": RankId(9)}, Refusal.UNKNOWN_RANK),
        ({"incarnation": Incarnation(1)}, Refusal.WRONG_INCARNATION),
        ({"group_id": GroupId(71)}, Refusal.WRONG_GROUP),
        ({"boundary_begin": 9, "window_index": 1}, Refusal.BAD_BOUNDARIES),
        ({"boundary_end": 11}, Refusal.BAD_BOUNDARIES),
        ({"boundary_end": 0}, Refusal.BAD_BOUNDARIES),
        ({"window_index": -1}, Refusal.BAD_BOUNDARIES),
        ({"forward_passes": -1}, Refusal.NEGATIVE),
        ({"tokens": -5}, Refusal.NEGATIVE),
        ({"step_time_mean_s": float("nan")}, Refusal.BAD_STEP_TIMES),
        ({"step_time_max_s": 0.001}, Refusal.BAD_STEP_TIMES),
        ({"tables": ()}, Refusal.WRONG_SHAPE),
        ({"tables": (table(), table(model="drafter"))}, Refusal.WRONG_SHAPE),
        ({"tables": (table(layer_ids=(1, 2, 2)),)}, Refusal.WRONG_SHAPE),
        ({"tables": (table(layer_ids=(1, 2)),)}, Refusal.WRONG_SHAPE),
        ({"tables": (table(COUNTS[:, :2], (1, 2)),)}, Refusal.WRONG_SHAPE),
        ({"tables": (table(COUNTS[:, :, :3]),)}, Refusal.WRONG_SHAPE),
        ({"tables": (table(COUNTS[0]),)}, Refusal.WRONG_SHAPE),
        ({"tables": (table(COUNTS[:0]),)}, Refusal.WRONG_SHAPE),
        ({"tables": (table(), table())}, Refusal.WRONG_SHAPE),
        ({"tables": (table(COUNTS - 1),)}, Refusal.NEGATIVE),
        ({"tables": (table(COUNTS * 1.0),)}, Refusal.NOT_INTEGER),
        ({"tables": (table(COUNTS.astype(object)),)}, Refusal.NOT_INTEGER),
        ({"tables": (table(np.full((1, 3, 4), 1 << 63, np.uint64)),)}, Refusal.NOT_INTEGER),
    ],
)
def test_reports_that_cannot_be_are_refused_and_change_nothing(changes: dict[str, Any], reason: Refusal) -> None:
    windows = Windows()
    assert refusal(windows.offer(report(**changes), EXPECTED)) is reason
    assert (windows.num_kept, windows.counters) == (0, {reason.value: 1})
    assert isinstance(windows.offer(report(), EXPECTED), Accepted)


def test_warm_up_between_two_real_windows_counts_nowhere_vllm_56716() -> None:
    windows = Windows()
    fill(windows, 0)
    assert refusal(windows.offer(report(4, 1, COUNTS * 1000, warmup=True), EXPECTED)) is Refusal.WARMUP
    fill(windows, 2)
    result = combined(windows)
    assert result.windows == ((GROUP, 0), (GROUP, 2))
    assert result.tables[0].loads.sum() == COUNTS.sum() * 8


def test_full_token_set_from_every_rank_is_counted_once_vllm_22167() -> None:
    windows = Windows()
    fill(windows, 0, semantics=Semantics.GLOBAL_TOKENS)
    result = combined(windows)
    assert result.tables[0].loads.tolist() == COUNTS.tolist()
    assert (result.tokens, result.coverage) == (33, 1.0)
    assert result.sources == ()
    assert result.tables[0].source_loads.shape == (0, 3, 4)


def test_own_tokens_of_every_rank_are_added_up_vllm_22167() -> None:
    windows = Windows()
    fill(windows, 0, semantics=Semantics.LOCAL_TOKENS)
    assert combined(windows).tables[0].loads.tolist() == (COUNTS * 4).tolist()


def test_ranks_that_disagree_on_semantics_are_refused_vllm_22167() -> None:
    windows = Windows()
    windows.offer(report(4), EXPECTED)
    assert refusal(windows.offer(report(5, semantics=Semantics.GLOBAL_TOKENS), EXPECTED)) is Refusal.MIXED_SEMANTICS


def test_global_reports_that_differ_raise_an_alarm() -> None:
    windows = Windows()
    windows.offer(report(4, semantics=Semantics.GLOBAL_TOKENS), EXPECTED)
    answer = windows.offer(report(5, counts=COUNTS * 2, semantics=Semantics.GLOBAL_TOKENS), EXPECTED)
    assert isinstance(answer, Accepted)
    assert "ranks 4 and 5" in answer.alarms[Alarm.GLOBAL_REPORTS_DIFFER]


def test_only_global_tokens_are_scaled_up_to_the_whole_window() -> None:
    half: dict[str, Any] = {"boundary_begin": 5, "forward_passes": 5}
    local, everywhere = Windows(), Windows()
    fill(local, 0, **half)
    fill(everywhere, 0, semantics=Semantics.GLOBAL_TOKENS, **half)
    assert combined(local).tables[0].loads.tolist() == (COUNTS * 4).tolist()
    assert combined(everywhere).tables[0].loads.tolist() == (COUNTS * 2).tolist()
    assert combined(local).coverage == combined(everywhere).coverage == 0.5


def test_row_without_layer_id_is_refused_sglang_25948() -> None:
    answer = Windows().offer(report(tables=(table(layer_ids=(1, None, 3)),)), EXPECTED)
    assert refusal(answer) is Refusal.MISSING_LAYER_ID
    assert isinstance(answer, Refused)
    assert "row 1 has no layer id" in answer.sentence


def test_counts_on_one_layer_alone_raise_an_alarm_sglang_25948() -> None:
    counts = COUNTS.copy()
    counts[:, 1:] = 0
    answer = Windows().offer(report(counts=counts), EXPECTED)
    assert isinstance(answer, Accepted)
    assert "of 3 layers of model 'm' only layer 1" in answer.alarms[Alarm.ONE_LAYER_ONLY]
    healthy = Windows().offer(report(), EXPECTED)
    assert isinstance(healthy, Accepted)
    assert not healthy.alarms


def test_rows_are_matched_by_absolute_layer_id_and_empty_dense_rows_are_skipped_sglang_25961() -> None:
    windows = Windows()
    dump = np.zeros((1, 5, 4), np.int64)
    dump[0, [4, 2, 1]] = COUNTS[0]
    for rank in RANKS:
        windows.offer(report(rank, tables=(table(dump, (0, 3, 2, 9, 1)),)), EXPECTED)
    assert combined(windows).tables[0].loads.tolist() == (COUNTS * 4).tolist()
    busy = dump.copy()
    busy[0, 0, 0] = 1
    answer = windows.offer(report(4, 1, tables=(table(busy, (0, 3, 2, 9, 1)),)), EXPECTED)
    assert refusal(answer) is Refusal.WRONG_SHAPE
    assert isinstance(answer, Refused)
    assert "layer 0 is not an MoE layer" in answer.sentence


def test_tables_of_different_widths_and_models_are_kept_apart_vllm_56387() -> None:
    drafter = TableShape(model="draft", layer_ids=(61,), num_logical=2)
    wide = TableShape(model="m", layer_ids=(8,), num_logical=6)
    expected = replace(EXPECTED, tables=(SHAPE, wide, drafter))
    windows = Windows()
    for rank in RANKS:
        tables = (
            table(),
            TableCounts(model="m", layer_ids=(8,), counts=np.ones((1, 1, 6), np.int32)),
            TableCounts(model="draft", layer_ids=(61,), counts=np.full((1, 1, 2), 3, np.uint8)),
        )
        assert isinstance(windows.offer(report(rank, tables=tables), expected), Accepted)
    result = combined(windows)
    assert [part.shape for part in result.tables] == [SHAPE, wide, drafter]
    assert result.tables[2].loads.tolist() == [[[12.0, 12.0]]]


def test_window_of_another_phase_does_not_advance_the_filtered_series_vllm_ascend_10647() -> None:
    windows = Windows()
    decode_only = replace(EXPECTED, phase=Phase.DECODE)
    prefill, decode = np.zeros((1, 3, 4), np.int64), np.zeros((1, 3, 4), np.int64)
    prefill[:, :, 0], decode[:, :, 1] = 10_000, 100
    fill(windows, 0, decode_only, counts=decode)
    for k in range(1, 30):
        for rank in RANKS:
            answer = windows.offer(report(rank, k, prefill, phase=Phase.PREFILL), decode_only)
            assert refusal(answer) is Refusal.WRONG_PHASE
    fill(windows, 30, decode_only, counts=decode)
    result = combined(windows, 2)
    assert result.windows == ((GROUP, 0), (GROUP, 30))
    assert result.tables[0].loads[:, 0].tolist() == [[0.0, 400.0, 0.0, 0.0]] * 2


def test_window_that_spans_a_flip_is_refused_when_converted_by_one_map_vllm_36305() -> None:
    spanning: dict[str, Any] = {"live_digest_begin": 1, "live_digest_end": 2}
    windows = Windows()
    assert refusal(windows.offer(report(basis=CountBasis.CONVERTED_AT_END, **spanning), EXPECTED)) is Refusal.MIXED_GENERATIONS
    assert isinstance(windows.offer(report(basis=CountBasis.LOGICAL, **spanning), EXPECTED), Accepted)
    same: dict[str, Any] = {"live_digest_begin": 2, "live_digest_end": 2}
    assert isinstance(windows.offer(report(5, basis=CountBasis.CONVERTED_AT_END, **same), EXPECTED), Accepted)


def test_older_generations_are_left_out_of_what_is_compared_with_a_prediction_vllm_36305() -> None:
    windows = Windows()
    fill(windows, 0)
    fill(windows, 1, live_digest_end=2)
    fill(windows, 2, live_digest_begin=2, live_digest_end=2)
    assert combined(windows).live_digest is None
    newest = windows.combine(8, live_digest=2)
    assert newest is not None
    assert (newest.windows, newest.live_digest) == (((GROUP, 2),), 2)
    assert windows.combine(8, live_digest=3) is None


def test_report_of_a_live_map_that_cannot_be_is_refused() -> None:
    windows = Windows()
    known = replace(EXPECTED, live_digests=frozenset({1, 2}))
    stale = windows.offer(report(live_digest_begin=1, live_digest_end=0xBAD), known)
    assert refusal(stale) is Refusal.WRONG_GENERATION
    assert isinstance(stale, Refused)
    assert "0xbad" in stale.sentence


def test_new_group_restarts_the_count_and_keeps_the_history() -> None:
    windows = Windows()
    fill(windows, 40)
    windows.offer(report(4, 41), EXPECTED)
    survivors = {rank: Incarnation(100 + rank) for rank in RANKS[:2]}
    formed = replace(EXPECTED, group_id=GroupId(80), incarnations=survivors)
    fill(windows, 0, formed, group_id=GroupId(80))
    result = combined(windows)
    assert result.windows == ((GROUP, 40), (GROUP, 41), (GroupId(80), 0))
    assert result.coverage == pytest.approx((4 + 1 + 2) / (4 + 4 + 2))
    assert refusal(windows.offer(report(5, 41), formed)) is Refusal.WRONG_GROUP


def test_memory_is_bounded_by_windows_and_bytes_and_the_oldest_goes() -> None:
    few = Windows(windows_max=3)
    for k in range(10):
        fill(few, k)
    assert (few.num_kept, few.counters["windows_dropped"]) == (3, 7)
    assert combined(few, 99).windows == tuple((GROUP, k) for k in (7, 8, 9))
    one_report = 3 * 4 * 4
    tight = Windows(bytes_max=one_report * 8)
    for k in range(10):
        fill(tight, k)
    assert tight.kept_bytes <= one_report * 8
    tiny = Windows(bytes_max=one_report - 1)
    assert refusal(tiny.offer(report(), EXPECTED)) is Refusal.TOO_LARGE


def test_counts_above_32_bits_are_exact() -> None:
    windows = Windows()
    fill(windows, 0, counts=COUNTS + (1 << 40))
    assert combined(windows).tables[0].loads[0, 0, 1] == 4 * ((1 << 40) + 1)


def test_ranks_must_agree_on_sub_windows() -> None:
    windows = Windows()
    windows.offer(report(4), EXPECTED)
    assert refusal(windows.offer(report(5, counts=np.repeat(COUNTS, 2, axis=0)), EXPECTED)) is Refusal.WRONG_SHAPE


def test_step_times_are_those_of_the_slowest_rank() -> None:
    windows = Windows()
    for rank, slow in zip(RANKS, (1, 3, 2, 0), strict=True):
        times: dict[str, Any] = {
            "step_time_min_s": 0.01 * slow,
            "step_time_mean_s": 0.02 * slow,
            "step_time_max_s": 0.04 * slow,
        }
        windows.offer(report(rank, **times), EXPECTED)
    result = combined(windows)
    assert (result.step_time_min_s, result.step_time_mean_s, result.step_time_max_s) == pytest.approx((0.03, 0.06, 0.12))


def test_combine_wants_at_least_one_window() -> None:
    with pytest.raises(InvalidInputError, match="got 0"):
        Windows().combine(0)
    with pytest.raises(InvalidInputError, match="windows_max"):
        Windows(windows_max=0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_interleaving_with_repeats_gives_the_sum_of_each_report_once(data: st.DataObject) -> None:
    """Each rank reports in order and may repeat itself; ranks interleave at will, none further ahead than windows stay open."""
    num_windows = 2
    counts = {
        (rank, k): np.array(data.draw(st.lists(st.integers(0, 9), min_size=12, max_size=12))).reshape(1, 3, 4)
        for rank in RANKS
        for k in range(num_windows)
    }
    pending = {rank: list(range(num_windows)) for rank in RANKS}
    sent: list[tuple[RankId, int]] = []
    windows = Windows()
    while any(pending.values()):
        rank = data.draw(st.sampled_from([rank for rank in RANKS if pending[rank]]))
        k = pending[rank].pop(0)
        answer = windows.offer(report(rank, k, counts[rank, k]), EXPECTED)
        assert isinstance(answer, Accepted), answer
        sent.append((rank, k))
        repeat = data.draw(st.none() | st.sampled_from(sent))
        if repeat is not None:
            assert refusal(windows.offer(report(repeat[0], repeat[1], counts[repeat]), EXPECTED)) is Refusal.DUPLICATE
    result = combined(windows)
    assert result.coverage == 1.0
    for k in range(num_windows):
        assert result.tables[0].loads[k].tolist() == sum(counts[rank, k][0] for rank in RANKS).tolist()
    for position, rank in enumerate(RANKS):
        assert result.tables[0].source_loads[position].tolist() == (counts[rank, 0] + counts[rank, 1])[0].tolist()
