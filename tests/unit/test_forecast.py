"""Forecasters against slow oracles, and a forecast put in the place of a series of windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.forecast import (
    DAMPED,
    DAY_S,
    NAMES,
    NEWEST_DAY,
    Average,
    Float32Array,
    Layout,
    Lead,
    Present,
    TimeOfDay,
    Trend,
    forecasters,
    rescaled,
    rescaled_sources,
)
from tests.unit.gate_trials import Float64Array

LAYOUT = Layout([(2, 3), (1, 4)])


def present(last: Float32Array, at_s: float = 0.0, window_s: float = 1.0, num_windows: int = 1) -> Present:
    return Present(last=last, num_windows=num_windows, at_s=at_s, window_s=window_s)


def drawn(seed: int, num_windows: int, least: int = 0) -> list[Float32Array]:
    random = np.random.default_rng(seed)
    return [(random.poisson(20, LAYOUT.size) + least).astype(np.float32) for _ in range(num_windows)]


def shares(flat: Float32Array) -> Float64Array:
    """Popularity, layer by layer."""
    rows = [row / row.sum() if row.sum() > 0 else row * 0 for table in LAYOUT.split(flat) for row in table]
    return np.concatenate(rows)


def test_tables_of_other_sizes_lie_one_after_another() -> None:
    tables = [np.arange(6.0).reshape(2, 3), np.zeros((1, 4))]
    flat = LAYOUT.flatten(tables)
    assert all((mine == theirs).all() for mine, theirs in zip(LAYOUT.split(flat), tables, strict=True))
    assert LAYOUT.sums(flat).tolist() == [3.0, 12.0, 0.0]
    assert LAYOUT.popularity(flat) == pytest.approx(shares(flat), abs=1e-7)
    assert LAYOUT.known(flat).tolist() == [True] * 6 + [False] * 4


def test_there_is_one_forecaster_of_each_name_in_their_order() -> None:
    assert [forecaster.name for forecaster in forecasters(LAYOUT, 24)] == list(NAMES[1:])


@pytest.mark.parametrize("half_life", [2, 8])
def test_average_is_the_decayed_sum_of_tokens(half_life: int) -> None:
    average, windows = Average(LAYOUT, half_life), drawn(1, 20)
    for number, window in enumerate(windows):
        assert (average.forecast(Lead(1, 1), present(window)) is None) == (number < half_life)
        average.see(window, 0.0)
    ages = range(len(windows) - 1, -1, -1)
    want = sum(window.astype(np.float64) * 0.5 ** (age / half_life) for window, age in zip(windows, ages, strict=True))
    got = average.forecast(Lead(3, 9), present(windows[-1]))
    assert got == pytest.approx(shares(np.asarray(want, np.float32)), rel=1e-4)


@pytest.mark.parametrize("lead", [Lead(1, 1), Lead(3, 7)])
def test_trend_is_browns_double_smoothing_of_square_roots_damped(lead: Lead) -> None:
    half_life, windows = 2, drawn(2, 12, least=5)
    trend = Trend(LAYOUT, half_life)
    once = twice = None
    gain = 1 - 0.5 ** (1 / half_life)
    for window in windows:
        trend.see(window, 0.0)
        roots = np.sqrt(shares(window))
        once = roots if once is None else once + gain * (roots - once)
        twice = once if twice is None else twice + gain * (once - twice)
    assert once is not None
    assert twice is not None
    keep = 0.5 ** (1 / (DAMPED * half_life))
    steps = np.mean([sum(keep**k for k in range(1, h + 1)) for h in range(lead.first, lead.last + 1)])
    roots = np.maximum(0, 2 * once - twice + steps * gain / (1 - gain) * (once - twice))
    got = trend.forecast(lead, present(windows[-1]))
    assert got == pytest.approx(shares((roots**2).astype(np.float32)), rel=1e-3, abs=1e-5)


def test_trend_runs_ahead_of_a_load_that_drifts_and_needs_to_have_seen_some() -> None:
    layout, trend = Layout([(1, 2)]), Trend(Layout([(1, 2)]), 8)
    for number in range(60):
        at = 0.2 + 0.005 * number
        trend.see(np.array([at, 1 - at], np.float32) * 1000, 0.0)
        if number < 23:
            assert trend.forecast(Lead(4, 4), present(np.zeros(2, np.float32))) is None
    got = trend.forecast(Lead(4, 4), present(np.zeros(2, np.float32)))
    assert got is not None
    assert layout.sums(got) == pytest.approx([1.0])
    assert got[0] == pytest.approx(0.2 + 0.005 * 63, abs=0.004)  # the last window was at 0.495


def test_profile_of_the_day_is_a_mean_of_a_few_days_then_forgets() -> None:
    """Oracle: for each bin the days' popularity, the first three as a plain mean, each later one with its least weight."""
    bins, windows_a_bin, days = 4, 3, 7
    day, random = TimeOfDay(LAYOUT, bins), np.random.default_rng(3)
    seen: dict[int, list[Float64Array]] = {number: [] for number in range(bins)}
    for visit in range(bins * days):
        windows = [random.poisson(30, LAYOUT.size).astype(np.float32) for _ in range(windows_a_bin)]
        for number, window in enumerate(windows):
            day.see(window, (visit + (number + 0.5) / windows_a_bin) * DAY_S / bins)
        seen[visit % bins].append(shares(np.sum(windows, axis=0)))
    for number in range(bins):
        known = seen[number] if number < bins - 1 else seen[number][:-1]  # the last bin is not over yet
        want = known[0]
        for visit, shown in enumerate(known[1:], start=2):
            want = want + max(NEWEST_DAY, 1 / visit) * (shown - want)
        assert day.profile[number] == pytest.approx(want, abs=1e-5)
        assert day.visits[number] == len(known)


def test_time_of_day_knows_what_comes_and_keeps_most_of_what_is_unusual_now() -> None:
    layout, noon, night = Layout([(1, 2)]), np.array([900, 100], np.float32), np.array([100, 900], np.float32)
    day = TimeOfDay(layout, 2)
    half_s = DAY_S / 2
    for visit in range(3):
        assert day.forecast(Lead(1, 1), present(noon, at_s=visit * half_s, window_s=10.0)) is None
        day.see((night, noon)[visit % 2], (visit + 0.5) * half_s)
    late_s = 3 * half_s - 5.0  # noon begins in 5 s
    same = day.forecast(Lead(2, 2), present(night, at_s=late_s, window_s=10.0))
    assert same == pytest.approx(np.array([0.9, 0.1]), abs=1e-6)
    half = day.forecast(Lead(1, 2), present(night, at_s=late_s - 10.0, window_s=10.0))
    assert half == pytest.approx(np.array([0.5, 0.5]), abs=1e-6)  # one window of night, one of noon
    odd = day.forecast(Lead(2, 2), present(np.array([300, 700], np.float32), at_s=late_s, window_s=10.0))
    assert odd is not None
    assert odd[0] > 0.93


def test_a_profile_that_would_be_too_large_has_fewer_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_service.forecast.PROFILE_BYTES_MAX", 7 * 4 * LAYOUT.size)
    assert TimeOfDay(LAYOUT, 24).bins == 7


@given(seed=st.integers(0, 10_000), idle=st.booleans(), first=st.integers(1, 5), more=st.integers(0, 20))
@settings(deadline=None, max_examples=30)
def test_every_forecast_is_shares_of_each_layer_whatever_was_seen(seed: int, idle: bool, first: int, more: int) -> None:
    random, every = np.random.default_rng(seed), forecasters(LAYOUT, 2)
    tokens = np.zeros(LAYOUT.size, np.float32)
    for number in range(100):
        tokens = random.poisson(random.exponential(3, LAYOUT.size)).astype(np.float32)
        if idle:
            tokens[:3] = 0
        for forecaster in every:
            forecaster.see(tokens, number * DAY_S / 8)
    for forecaster in every:
        got = forecaster.forecast(Lead(first, first + more), present(tokens, at_s=100 * DAY_S / 8, window_s=100.0))
        assert got is not None
        assert (got >= 0).all()
        sums = LAYOUT.sums(got)
        assert all(abs(total - 1) < 1e-4 or total == 0 for total in sums.tolist()), forecaster.name
        assert not idle or sums[0] == 0
        assert sums[0] > 0 or tokens[:3].sum() == 0, forecaster.name  # a layer may be without tokens by chance too


# ── in the place of windows ──────────────────────────────────────────────────────────────────────────────────────────────


@given(seed=st.integers(0, 10_000), empty=st.booleans())
@settings(deadline=None, max_examples=50)
def test_rescaled_windows_have_the_popularity_their_own_tokens_and_sources_that_add_up(seed: int, empty: bool) -> None:
    random = np.random.default_rng(seed)
    by_source = random.poisson(random.exponential(2, (3, 4, 2, 5))).astype(np.float64)  # sources, windows, layers, experts
    if empty:
        by_source[:, :, 0] = 0
    loads, sources = by_source.sum(axis=0), by_source.sum(axis=1)
    wanted = random.dirichlet(np.ones(5), 2)
    wanted[:, 0] = 0
    wanted /= wanted.sum(axis=1, keepdims=True)
    got = rescaled(loads, wanted)
    assert got.shape == loads.shape
    assert (got >= 0).all()
    total, was = got.sum(axis=0), loads.sum(axis=0)
    assert total.sum(axis=1) == pytest.approx(was.sum(axis=1))
    for layer in range(2):
        if was[layer].sum() > 0:
            assert total[layer] / total[layer].sum() == pytest.approx(wanted[layer], abs=1e-9)
    moved = rescaled_sources(sources, was, total)
    assert moved.sum(axis=0) == pytest.approx(total)
    assert (moved >= 0).all()


def test_rescaled_series_keep_their_course_and_layers_that_are_not_known_stay() -> None:
    loads = np.array([[[2.0, 6.0, 0.0], [1.0, 1.0, 1.0]], [[6.0, 2.0, 0.0], [1.0, 2.0, 3.0]]])
    got = rescaled(loads, np.array([[0.25, 0.5, 0.25], [0.0, 0.0, 0.0]]))
    assert got[:, 0, 0].tolist() == [1.0, 3.0]
    assert got[:, 0, 1].tolist() == [6.0, 2.0]
    assert got[:, 0, 2].tolist() == [2.0, 2.0]  # never seen: as the layer's tokens come
    assert (got[:, 1] == loads[:, 1]).all()
    same = rescaled(loads, loads.sum(axis=0) / loads.sum(axis=(0, 2))[:, None])
    assert same == pytest.approx(loads)
