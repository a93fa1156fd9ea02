"""Backtests: scores and evidence against slow oracles; who is believed, how soon, how seldom wrongly, and not for ever."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest

from eplb_service.backtest import BACKTESTS_MIN, OVERLAP, SAVED_MIN, Backtest, Evidence, score, winners
from eplb_service.forecast import Average, Float32Array, Kind, Layout, Lead, Present, Trend
from tests.unit.forecast_trials import Trial, imbalance_later
from tests.unit.gate_trials import Float64Array, popularity

LAYOUT = Layout([(2, 3), (1, 4)])
ONE, OTHER = popularity(1), popularity(2)


def test_score_is_the_squared_distance_weighted_by_tokens() -> None:
    random = np.random.default_rng(0)
    seen = random.poisson(20, LAYOUT.size).astype(np.float32)
    last, forecast = (LAYOUT.popularity(random.poisson(20, LAYOUT.size).astype(np.float32)) for _ in range(2))
    for flat in (last, forecast):
        want = tokens = 0.0
        for rows, shown in zip(LAYOUT.split(flat), LAYOUT.split(seen), strict=True):
            for row, counted in zip(rows, shown, strict=True):
                want += counted.sum() * ((row - counted / counted.sum()) ** 2).sum()
                tokens += counted.sum()
        assert score([flat], seen, LAYOUT)[0] == pytest.approx(want / tokens, rel=1e-4)
    assert score([last, None, forecast], seen, LAYOUT)[1] is None


def test_layers_that_one_forecast_does_not_know_count_for_none() -> None:
    seen = np.full(LAYOUT.size, 10, np.float32)
    exact = LAYOUT.popularity(seen)
    part = exact.copy()
    part[:3] = 0
    wrong = exact.copy()
    wrong[:3] = [1.0, 0.0, 0.0]
    assert score([wrong, part], seen, LAYOUT) == pytest.approx([0.0, 0.0], abs=1e-12)
    assert score([exact, np.zeros_like(exact)], seen, LAYOUT) == [None, None]
    assert score([exact], np.zeros_like(exact), LAYOUT) == [None]


def test_evidence_is_the_weighted_mean_of_batches_and_its_standard_error() -> None:
    random = np.random.default_rng(1)
    owns, lasts = random.exponential(1.0, 40), random.exponential(1.3, 40)
    evidence = Evidence()
    for own, last in zip(owns, lasts, strict=True):
        evidence = evidence.plus(own=own, last=last, keep=0.9, keep_recent=0.5)
    weights = 0.9 ** np.arange(39, -1, -1)
    count = weights.sum() ** 2 / (weights**2).sum()
    gains = lasts - owns
    mean = (weights * gains).sum() / weights.sum()
    variance = (weights * (gains - mean) ** 2).sum() / weights.sum() * count / (count - 1)
    assert evidence.num == 40
    assert evidence.effective == pytest.approx(count)
    assert evidence.gain == pytest.approx(mean)
    assert evidence.sigmas == pytest.approx(mean / math.sqrt(OVERLAP * variance / count))
    assert evidence.less_off == pytest.approx(1 - math.sqrt((weights * owns).sum() / (weights * lasts).sum()))
    assert evidence.error == pytest.approx((weights * owns).sum() / weights.sum())


def evidence_of(own: float, last: float, num: int = BACKTESTS_MIN) -> Evidence:
    evidence = Evidence()
    for _ in range(num):
        evidence = evidence.plus(own=own, last=last, keep=1.0, keep_recent=0.5)
    return evidence


def test_a_winner_is_better_often_enough_by_enough_and_of_late() -> None:
    good = evidence_of(0.5e-3, 1e-3)
    assert good.wins(4)
    assert not evidence_of(0.5e-3, 1e-3, BACKTESTS_MIN - 1).wins(4)
    assert not evidence_of(1e-3, 0.5e-3).wins(4)
    assert not evidence_of(0.95e-3, 1e-3).wins(4)  # 2.5 % less off
    least = SAVED_MIN**2 / (2 * 4 * math.log(4))
    assert not evidence_of(0.0, 0.99 * least).wins(4)
    assert evidence_of(0.0, 1.01 * least).wins(4)
    assert not good.wins(1)  # one rank is always in balance
    assert not good.plus(own=2e-3, last=1e-3, keep=1.0, keep_recent=0.5).wins(4)
    assert not Evidence().wins(4)


def test_of_several_that_win_the_one_that_gains_most_comes_first_and_only_kinds_that_are_wanted_do() -> None:
    every = (Average(LAYOUT, 4), Average(LAYOUT, 16), Trend(LAYOUT, 8))
    evidence = {"ewma-4": evidence_of(0.5, 1.0), "ewma-16": evidence_of(0.4, 1.0), "trend-8": evidence_of(0.3, 1.0)}
    names = {
        kinds: [found.forecaster.name for found in winners(every, evidence, kinds, 4)]
        for kinds in (frozenset(Kind), frozenset({Kind.EWMA}), frozenset({Kind.TIME_OF_DAY}))
    }
    assert list(names.values()) == [["trend-8", "ewma-16", "ewma-4"], ["ewma-16", "ewma-4"], []]
    evidence["trend-8"] = evidence_of(1.0, 0.3)
    assert [found.forecaster.name for found in winners(every, evidence, frozenset(Kind), 4)] == ["ewma-16", "ewma-4"]


@pytest.mark.parametrize("heavy", [False, True], ids=["even", "heavy"])
def test_a_forecast_that_is_just_as_good_as_last_is_used_in_fewer_than_one_in_a_hundred_looks(heavy: bool) -> None:
    """The boundary, where a wrong answer is likeliest (and costs least): equal on average, over batches that overlap.

    A forecast spans four steps, as a batch does, so neighbouring batches share a triangle of them. Where a few steps are far
    off (heavy), 60 looks in a row find more; where none is, not even one look of all is wrong.
    """
    random, looks, ever, trials = np.random.default_rng(2), 0, 0, 400
    for _ in range(trials):
        common = random.exponential(1.0, (244, 1)) if heavy else 1.0
        steps = common * (random.exponential(1.0, (244, 2)) if heavy else 1 + 0.2 * random.normal(size=(244, 2)))
        smooth = np.stack([np.convolve(steps[:, side], np.ones(4) / 4, "valid") for side in (0, 1)], axis=1)
        evidence, found = Evidence(), []
        for own, last in smooth[: 60 * 4].reshape(60, 4, 2).mean(axis=1).tolist():
            evidence = evidence.plus(own=own, last=last, keep=0.5 ** (1 / 32), keep_recent=0.5 ** (1 / 4))
            found.append(evidence.wins(4))
        looks += sum(found)
        ever += any(found)
    assert looks <= 0.01 * 60 * trials
    assert ever <= (0.03 if heavy else 0.01) * trials


def test_each_forecast_is_scored_on_the_windows_that_it_is_of_and_on_no_other() -> None:
    """Oracle: forecasts after every window, each scored on the sum of windows + 2 … + 4; batches of 2 + 4 windows."""
    layout, random = Layout([(1, 3)]), np.random.default_rng(4)
    average = Average(layout, 1)
    backtest = Backtest(layout, (average,))
    backtest.lead_is(Lead(2, 4))
    windows = [random.poisson(50, 3).astype(np.float32) for _ in range(60)]
    told: list[tuple[Float32Array, Float32Array | None]] = []
    for number, window in enumerate(windows):
        backtest.closed(window, float(number), 2)
        average.see(window, 0.0)
        assert backtest.wants
        last, forecast = layout.popularity(window), layout.popularity(np.sum(windows[: number + 1], axis=0))
        told.append((last, forecast))
        backtest.made([last, forecast])
    scores = []
    for number, said in enumerate(told[:-4]):
        seen = np.sum(windows[number + 2 : number + 5], axis=0)
        scores.append(score(said, seen, layout))
    want = Evidence()
    for begin in range(0, len(scores) - 6, 6):
        lasts, owns = zip(*scores[begin : begin + 6], strict=True)
        want = want.plus(own=np.mean(owns), last=np.mean(lasts), keep=0.5 ** (1 / 32), keep_recent=0.5 ** (1 / 4))
    got = backtest.evidence["ewma-1"]
    assert got.num == want.num == 9
    assert (got.own, got.last, got.gain_sq) == pytest.approx((want.own, want.last, want.gain_sq), rel=1e-4)


def test_long_leads_are_forecast_from_now_and_then_and_missing_windows_drop_what_waits() -> None:
    layout = Layout([(1, 3)])
    backtest = Backtest(layout, ())
    backtest.lead_is(Lead(1, 64))
    most, made = 0, 0
    window = np.ones(3, np.float32)
    for number in range(200):
        backtest.closed(window, float(number), 4)
        if backtest.wants:
            backtest.made([layout.popularity(window)])
            made += 1
        most = max(most, len(backtest._pending))
    assert (most, made) == (8, 25)
    backtest.interrupted()
    assert backtest._pending == []
    assert backtest.wants


def test_what_was_found_for_leads_much_longer_or_shorter_does_not_count_and_is_kept() -> None:
    backtest = Backtest(LAYOUT, ())
    backtest.lead_is(Lead(1, 8))
    backtest.evidence["ewma-4"] = evidence_of(0.5, 1.0)
    backtest.lead_is(Lead(2, 12))
    assert backtest.evidence
    backtest.lead_is(Lead(2, 30))
    assert not backtest.evidence
    backtest.lead_is(Lead(9, 15))  # by day again: nothing was forgotten
    assert backtest.evidence == {"ewma-4": evidence_of(0.5, 1.0)}


def at_any_time(true: Float64Array, number: int) -> Float64Array:
    return true


def test_score_ranks_forecasts_as_plans_made_from_them_turn_out() -> None:
    """Forecasts that are off by drift, by noise or by both, of 12 loads: what a plan for each shows on the true load."""
    random, agree, pairs = np.random.default_rng(5), 0.0, 0
    layout = Layout([ONE.shape])
    for seed in range(12):
        true, other = popularity(seed), popularity(seed + 100)
        forecasts = []
        for share, tokens in ((0.0, 2e4), (0.05, 1e6), (0.1, 1e4), (0.2, 1e5), (0.0, 1e3), (0.4, 1e6), (0.7, 1e4)):
            forecasts.append(random.multinomial(int(tokens), (1 - share) * true + share * other) / tokens)
        scores = score([layout.flatten([forecast]) for forecast in forecasts], layout.flatten([true * 1e6]), layout)
        shown = [imbalance_later(forecast, partial(at_any_time, true), 0, 1) for forecast in forecasts]
        for one in range(len(scores)):
            for two in range(one):
                mine, theirs = scores[one] or 0.0, scores[two] or 0.0
                if max(mine, theirs) > 2 * min(mine, theirs):
                    agree += (mine > theirs) == (shown[one] > shown[two])
                    pairs += 1
    assert pairs > 150
    assert agree / pairs > 0.9


# ── whole deployments ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wanders", [False, True], ids=["stays", "wanders"])
def test_of_100_loads_that_nothing_forecasts_better_fewer_than_two_are_ever_forecast(wanders: bool) -> None:
    """Loads that stay, with windows so large that no average saves the least; loads that wander, where the last is best."""
    layout, used = Layout([(1, 16)]), 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        average, trend = Average(layout, 4), Trend(layout, 4)
        backtest = Backtest(layout, (average, trend))
        lead = Lead(1, 1)
        backtest.lead_is(lead)
        logs, ever = random.normal(0, 1, 16), False
        for number in range(60):
            logs = logs + (random.normal(0, 0.05, 16) if wanders else 0.0)
            window = random.multinomial(200_000, np.exp(logs) / np.exp(logs).sum()).astype(np.float32)
            backtest.closed(window, float(number), 1)
            average.see(window, 0.0)
            trend.see(window, 0.0)
            now = Present(last=window, num_windows=1, at_s=0.0, window_s=1.0)
            backtest.made([layout.popularity(window), average.forecast(lead, now), trend.forecast(lead, now)])
            ever = ever or bool(winners(backtest.forecasters, backtest.evidence, frozenset(Kind), 4))
        assert backtest.evidence["ewma-4"].num >= BACKTESTS_MIN
        used += ever
    assert used <= 1


def between(share: float) -> Float64Array:
    mixed: Float64Array = (1 - share) * ONE + share * OTHER
    return mixed


def test_a_load_that_drifts_slowly_is_planned_for_where_it_will_be_and_plans_are_better_later() -> None:
    def path(number: int) -> Float64Array:
        return between(min(1.0, number / 500))

    trial, forecast, last = Trial(tokens=200_000, serve_s=100.0), list[float](), list[float]()
    trial.drive(path, 300)
    for _ in range(10):
        trial.drive(path, 10)
        assert trial.used[-1].startswith("trend")
        now = len(trial.windows)
        forecast.append(imbalance_later(trial.forecast(), path, now, now + 10))
        last.append(imbalance_later(trial.last(), path, now, now + 10))
    assert "planned for a forecast by a trend over" in trial.forecasting.sentence()
    assert np.mean(forecast) - 1 < 0.7 * (np.mean(last) - 1)


def test_small_noisy_windows_are_averaged_and_plans_are_better() -> None:
    trial = Trial(tokens=400, seed=3).drive(lambda _: ONE, 250)
    assert trial.used[-1].startswith("ewma")
    assert "a mean that halves in" in trial.forecasting.sentence()
    forecast = imbalance_later(trial.forecast(), lambda _: ONE, 0, 1)
    last = imbalance_later(trial.last(), lambda _: ONE, 0, 1)
    assert forecast - 1 < 0.7 * (last - 1)


def test_a_trend_is_dropped_when_the_load_begins_to_jump() -> None:
    random = np.random.default_rng(6)
    jumps = [popularity(int(seed)) for seed in random.integers(10, 1000, 400)]

    def path(number: int) -> Float64Array:
        return between(number / 500) if number < 350 else jumps[number // 5 - 70]

    trial = Trial(tokens=200_000, serve_s=100.0).drive(path, 350)
    assert trial.used[-1].startswith("trend")
    trial.drive(path, 100)
    assert not trial.used[-1].startswith("trend")
    assert not any(name.startswith("trend") for name in trial.used[-60:]), Counter(trial.used[-60:])


def test_a_load_with_two_halves_of_the_day_is_planned_for_before_it_turns() -> None:
    """Windows of half an hour, plans that serve two hours. The cycle ends after three weeks, and with it the forecast."""

    def path(number: int) -> Float64Array:
        return (ONE, OTHER)[number // 24 % 2] if number < 48 * 21 else ONE

    trial = Trial(tokens=20_000, window_s=1800.0, serve_s=7200.0).drive(path, 48 * 20 + 24)
    first = trial.used.index("time-of-day") / 48
    assert 3 < first < 14  # days
    assert trial.used[-1] == "time-of-day"
    now = len(trial.windows)  # the first half of a day is over
    forecast = imbalance_later(trial.forecast(), path, now, now + 4)
    last = imbalance_later(trial.last(), path, now, now + 4)
    assert last > 1.3
    assert forecast - 1 < 0.1 * (last - 1)
    assert "planned for a forecast by the time of day" in trial.forecasting.sentence()
    trial.drive(path, 48 * 3)
    assert trial.used[-1] != "time-of-day"
