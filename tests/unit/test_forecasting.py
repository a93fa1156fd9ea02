"""Forecasts of one deployment: which windows they are of, what becomes of a window, what is told and what is kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.backtest import BACKTESTS_MIN, Evidence
from eplb_service.config import load_config
from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.forecast import NAMES, Lead, rescaled
from eplb_service.gains import TableEvidence, table_gains
from eplb_service.gate import GateConfig, decide
from eplb_service.ids import DeploymentId, GenerationNumber
from eplb_service.noise import error_dispersion
from eplb_service.planner import forecast_document as module
from eplb_service.planner.documents import Settings
from eplb_service.planner.forecasting import Forecasting, LoadForecast
from eplb_service.planner.learning import Learning
from eplb_service.planner.ledger import Ledger
from eplb_service.planner.validating import Validating, to_judge
from eplb_service.policy.base import PlanningProblem
from eplb_service.store.memory import MemoryStore
from eplb_service.telemetry import DeploymentGauges, Metrics
from eplb_service.window.report import CombinedTable, CombinedWindow, TableShape
from tests.unit.forecast_trials import BEGIN_S, SHAPE, Trial
from tests.unit.gate_trials import LINEAR, TOPOLOGY, Float64Array, asked, draw, plan, popularity
from tests.unit.test_gate_properties import FREE
from tests.unit.test_generation import generation
from tests.unit.test_learning import window as window_sum

ONE, OTHER = popularity(1), popularity(2)


def noisy(**more: Any) -> Trial:
    """A deployment whose windows are so small that an average wins."""
    return Trial(tokens=400, seed=3, **more).drive(lambda _: ONE, 250)


def closed(forecasting: Forecasting, number: int, at_s: float, *, commit_s: float = 0.0, serve_s: float = 0.0) -> None:
    loads = np.random.default_rng(number).multinomial(400, ONE).astype(np.float64)
    forecasting.window_closed([(SHAPE, loads)], at_s=at_s, commit_s=commit_s, serve_s=serve_s, num_ranks=4)


@pytest.mark.parametrize(
    ("window_s", "commit_s", "serve_s", "lead"),
    [
        (10.0, 0.0, 60.0, Lead(1, 6)),
        (10.0, 25.0, 60.0, Lead(4, 9)),
        (600.0, 25.0, 60.0, Lead(2, 2)),
        (0.1, 0.0, 60.0, Lead(1, 64)),
        (0.1, 60.0, 60.0, Lead(33, 64)),
    ],
)
def test_forecasts_are_of_the_windows_from_the_commit_until_another_plan_may_follow(
    window_s: float, commit_s: float, serve_s: float, lead: Lead
) -> None:
    forecasting = Forecasting(mode="auto", day_bins=24, num_windows=30)
    for number in range(40):
        closed(forecasting, number, number * window_s, commit_s=commit_s, serve_s=serve_s)
    numbers = forecasting.numbers()
    assert (numbers["forecast_first_windows"], numbers["forecast_last_windows"]) == (lead.first, lead.last)


def test_without_a_winner_the_windows_are_taken_as_they_are_and_it_is_said_why() -> None:
    trial = Trial(tokens=200_000)
    assert trial.forecasting.sentence() == ""
    trial.drive(lambda _: ONE, 60)
    done = max(found.num for found in trial.forecasting._backtest.evidence.values())  # type: ignore[union-attr]
    assert 0 < done < BACKTESTS_MIN
    want = f"planned from the last windows: {done} of {BACKTESTS_MIN} backtests of forecasts are done"
    assert trial.forecasting.sentence() == want
    trial.drive(lambda _: ONE, 150)
    assert trial.forecasting.forecast() is None
    assert trial.forecasting.used() == "last"
    sentence = trial.forecasting.sentence()
    assert sentence.startswith(
        "planned from the last windows: no forecast is better by 3 standard errors and 0.01 of imbalance"
    )
    assert "(the nearest, by a mean that halves in" in sentence


def test_a_winner_is_told_in_a_sentence_and_in_numbers() -> None:
    trial = noisy()
    found = trial.forecasting.forecast()
    assert found is not None
    assert found.words == trial.forecasting.sentence()
    numbers, word = trial.forecasting.numbers(), f"forecast_{found.name.replace('-', '_')}"
    assert f"{numbers[f'{word}_less_off']:.0%} less off than the last windows" in found.words
    assert f"over {numbers[f'{word}_backtests']:.0f} backtests" in found.words
    assert [name for name, value in numbers.items() if name.endswith("_used") and value == 1] == [f"{word}_used"]
    assert found.served_after(100) == (101, 104)
    metrics = Metrics("1")
    gauges = DeploymentGauges(
        imbalance_mean=None,
        imbalance_worst=None,
        window_coverage=None,
        rollout_age_s=0.0,
        rollout_stalled=False,
        ranks={},
        agents=0,
        generation=0,
        epoch=1,
        leading=True,
        forecast_used=trial.forecasting.used(),
        forecast_less_off=trial.forecasting.less_off(),
    )
    metrics.state_changed("chat", gauges)
    shown = {
        name: metrics.registry.get_sample_value("eplb_forecast_used", {"deployment": "chat", "forecaster": name})
        for name in NAMES
    }
    assert shown == {name: float(name == found.name) for name in NAMES}
    less = metrics.registry.get_sample_value("eplb_forecast_less_off", {"deployment": "chat", "forecaster": found.name})
    assert less == numbers[f"{word}_less_off"]


def test_a_kind_that_is_asked_for_is_used_where_it_wins_and_no_other() -> None:
    assert noisy(mode="ewma").forecasting.used().startswith("ewma")
    trend = noisy(mode="trend").forecasting
    assert trend.used() == "last" or trend.used().startswith("trend")
    off = noisy(mode="off").forecasting
    assert (off.used(), off.numbers(), off.to_json()) == ("last", {}, None)
    assert off.sentence() == "planned from the last windows: forecasts are off (planning.forecast)"


def test_settings_say_what_may_be_forecast() -> None:
    planning = load_config().config.planning
    assert (planning.forecast, planning.forecast_day_bins) == ("auto", 24)
    assert load_config(flags={"planning.forecast": "time-of-day"}).config.planning.forecast == "time-of-day"
    with pytest.raises(InvalidInputError, match="use auto or off or ewma or trend or time-of-day"):
        load_config(flags={"planning.forecast": "oracle"})
    with pytest.raises(InvalidInputError, match="at least 2 and at most 288 bins"):
        load_config(flags={"planning.forecast_day_bins": "1"})


# ── what happens to a deployment ─────────────────────────────────────────────────────────────────────────────────────────


def test_other_ranks_keep_what_was_learned_other_tables_do_not() -> None:
    trial = noisy()
    used = trial.forecasting.used()
    trial.forecasting.group_changed()
    trial.drive(lambda _: ONE, 1)
    assert trial.used[-1] == used
    assert trial.forecasting.forecast() is not None
    other = TableShape(model="m", layer_ids=(0, 1), num_logical=8)
    trial.forecasting.window_closed([(other, np.ones((2, 8)))], at_s=BEGIN_S + 1e6, commit_s=0.0, serve_s=0.0, num_ranks=4)
    assert trial.forecasting.used() == "last"
    assert trial.forecasting.less_off() == {}


def test_a_standstill_is_no_window_that_took_long_and_a_clock_set_back_teaches_nothing() -> None:
    forecasting = Forecasting(mode="auto", day_bins=24, num_windows=4)
    for number in range(20):
        closed(forecasting, number, number * 10.0, serve_s=100.0)
    before = forecasting.numbers()
    closed(forecasting, 20, 50_000.0, serve_s=100.0)
    assert forecasting._backtest is not None
    assert forecasting._backtest._pending == [] or forecasting._backtest._pending[0].first > forecasting._backtest._now
    closed(forecasting, 21, 100.0, serve_s=100.0)
    assert forecasting.numbers() == before
    assert forecasting._window_s == pytest.approx(10.0)


# ── in the place of a window ─────────────────────────────────────────────────────────────────────────────────────────────


def combined(seed: int, shape: TableShape = SHAPE) -> CombinedWindow:
    random = np.random.default_rng(seed)
    sources = random.poisson(5, (4, 4, len(shape.layer_ids), shape.num_logical)).astype(np.float64)
    table = CombinedTable(shape=shape, loads=sources.sum(axis=0), source_loads=sources.sum(axis=1))
    return CombinedWindow(
        windows=(),
        tables=(table,),
        sources=(),
        coverage=1.0,
        tokens=1,
        steps=1,
        live_digest=1,
        step_time_min_s=0.0,
        step_time_mean_s=0.0,
        step_time_max_s=0.0,
        alarms={},
    )


def test_a_window_with_a_forecast_is_one_that_policies_take() -> None:
    window = combined(1)
    forecast = LoadForecast(name="trend-8", words="", error=1e-4, lead=Lead(1, 4), popularity=((SHAPE, ONE),))
    table = forecast.applied(window).tables[0]
    problem = PlanningProblem(
        loads=table.loads, source_loads=table.source_loads.transpose(1, 0, 2), topology=TOPOLOGY, current=LINEAR
    )
    assert problem.total_loads / problem.total_loads.sum(axis=1, keepdims=True) == pytest.approx(ONE)
    assert table.loads.sum() == pytest.approx(window.tables[0].loads.sum())
    other = combined(2, TableShape(model="drafter", layer_ids=(0,), num_logical=4))
    assert forecast.applied(other).tables[0] is other.tables[0]


@given(seed=st.integers(0, 1000), error=st.floats(0, 1e-2), share=st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_the_gate_is_never_surer_of_a_forecast_than_of_a_window(seed: int, error: float, share: float) -> None:
    random = np.random.default_rng(seed)
    loads, counted = draw(random, (1 - share) * ONE + share * OTHER, 20_000), draw(random, ONE, 20_000)
    proposal = plan(loads, LINEAR)
    sure = table_gains(TableEvidence(loads=loads, current=LINEAR, proposal=proposal), TOPOLOGY, Dispatch.EVEN)
    told = TableEvidence(loads=loads, current=LINEAR, proposal=proposal, counted=counted, forecast_error=error)
    unsure = table_gains(told, TOPOLOGY, Dispatch.EVEN)
    assert (unsure.now_errors >= sure.now_errors - 1e-12).all()
    for mine, theirs in zip(unsure.points, sure.points, strict=True):
        assert (mine.errors >= theirs.errors - 1e-12).all()
        assert (mine.gain <= theirs.gain + 1e-9).all()


def test_noise_of_a_measured_error_is_as_large_as_the_error() -> None:
    """Windows drawn around a load are off it by what multinomial sampling makes: dispersion 1."""
    random, tokens = np.random.default_rng(0), 5000
    off = [((random.multinomial(tokens, ONE) / tokens - ONE) ** 2).sum(axis=1).mean() for _ in range(300)]
    assert error_dispersion(ONE * tokens, float(np.mean(off))) == pytest.approx(1.0, abs=0.1)
    assert error_dispersion(ONE * tokens, 7 * float(np.mean(off))) == pytest.approx(7.0, abs=0.7)
    assert error_dispersion(np.zeros((2, 3)), 1.0) == 1.0


def test_a_generation_made_for_later_windows_is_judged_over_all_of_them() -> None:
    windows = [window_sum(index) for index in range(10, 30)]
    assert [one.index for one in to_judge(windows, [0] * 4, 0)] == [10, 11, 12, 13]
    assert [one.index for one in to_judge(windows, [0] * 4, 3)] == [10]
    assert [one.index for one in to_judge(windows, [12, 17, 17, 40], 0)] == [12, 17, 18]
    assert [one.index for one in to_judge(windows, [12, 17, 22, 27], 2)] == [22, 27]
    learning = Learning(windows_kept=8)
    validating = Validating(SimpleNamespace(name="chat", learning=learning))  # type: ignore[arg-type]
    assert validating._due(GenerationNumber(7), 4) == [0, 0, 0, 0]
    learning.serves = (GenerationNumber(7), 12, 27)
    assert validating._due(GenerationNumber(7), 4) == [12, 17, 22, 27]
    assert validating._due(GenerationNumber(8), 4) == [0, 0, 0, 0]  # made from windows as they were
    learning.group_changed()  # windows are counted anew
    assert validating._due(GenerationNumber(7), 4) == [0, 0, 0, 0]


def test_the_time_to_a_commit_is_what_the_last_rollouts_took() -> None:
    ledger = Ledger(DeploymentId("chat"), MemoryStore(lambda: 0.0), Settings(mode="auto", policy="greedy"))
    assert ledger.commit_s == 0.0
    for number, took_s in enumerate([100.0, 3.0, 0.0, 5.0, *[4.0] * 6], start=1):
        ledger.generations[GenerationNumber(number)] = replace(generation(number), rollout_s=took_s)
    assert ledger.commit_s == pytest.approx((5.0 + 6 * 4.0) / 7)  # of the last eight, those that were rolled out


def test_the_gate_moves_for_the_other_half_of_the_day_before_it_begins_and_only_with_a_forecast() -> None:
    """The live placement fits the load of now; the plan for the forecast fits what comes, and clears what forecasts are off."""

    def path(number: int) -> Float64Array:
        return (ONE, OTHER)[number // 24 % 2]

    trial = Trial(tokens=20_000, window_s=1800.0, serve_s=7200.0).drive(path, 48 * 13 + 24)
    found = trial.forecasting.forecast()
    assert found is not None
    assert found.name == "time-of-day"
    counted = np.stack(trial.windows[-4:])
    live = plan(ONE[None] * 1e6, LINEAR).placement
    assert not decide(GateConfig(), asked(counted, live, cost=FREE)).move
    loads = rescaled(counted, found.popularity[0][1])
    inputs = asked(loads, live, cost=FREE)
    table = replace(inputs.tables[0], counted=counted, forecast_error=found.error)
    verdict = decide(GateConfig(), replace(inputs, tables=(table,)))
    assert verdict.move
    assert verdict.chosen[0] is not None
    later = path(len(trial.windows)) * 1e6
    before, after = (imbalance_of(later, placement, TOPOLOGY).mean for placement in (live, verdict.chosen[0].placement))
    assert after - 1 < 0.5 * (before - 1)


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def days(num_days: int = 4) -> Trial:
    return Trial(tokens=20_000, window_s=3600.0, serve_s=3600.0).drive(
        lambda number: (ONE, OTHER)[number // 12 % 2], 24 * num_days
    )


def test_what_was_learned_survives_the_store() -> None:
    before = Learning(windows_kept=8, forecasting=days().forecasting)
    after = Learning(windows_kept=8, forecasting=Forecasting(mode="auto", day_bins=24, num_windows=4))
    after.read_document(before.to_document())
    assert after.forecasting.numbers() == before.forecasting.numbers()
    assert after.forecasting.sentence() == before.forecasting.sentence() != ""
    mine, theirs = (module.day_of(one.forecasting._backtest) for one in (after, before))  # type: ignore[arg-type]
    assert (mine.visits == theirs.visits).all()
    assert mine.profile == pytest.approx(theirs.profile, rel=1e-3)
    assert after.forecasting.to_json() == before.forecasting.to_json()
    again = Trial(tokens=20_000)
    again.forecasting = after.forecasting
    again.close(ONE * 1000, BEGIN_S + 24 * 4 * 3600.0)  # the first window does not begin anew
    assert again.forecasting.less_off() == before.forecasting.less_off()


def test_a_winner_goes_on_after_a_restart_as_soon_as_it_has_seen_enough_again() -> None:
    trial = noisy()
    used = trial.forecasting.used()
    trial.forecasting = trial.forecasting.remembered(json.loads(json.dumps(trial.forecasting.to_json())))
    assert trial.forecasting.used() == "last"
    assert "wins its backtests, but must see more windows" in trial.forecasting.sentence()
    trial.drive(lambda _: ONE, 64)
    assert used in trial.used[-64:]
    assert trial.forecasting.forecast() is not None


def test_documents_without_forecasts_and_with_other_bins_are_read() -> None:
    learning = Learning(windows_kept=8, forecasting=days().forecasting)
    tree = json.loads(learning.to_document())
    bins = Learning(windows_kept=8, forecasting=Forecasting(mode="auto", day_bins=48, num_windows=4))
    bins.read_document(json.dumps(tree).encode())
    assert "time-of-day" not in bins.forecasting.less_off()
    assert "ewma-4" in bins.forecasting.less_off()
    del tree["forecasts"]
    learning.read_document(json.dumps(tree).encode())
    assert learning.forecasting.sentence() == ""


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: tree.update(shapes=[]),
        lambda tree: tree.update(shapes=[["m", [], 16]]),
        lambda tree: tree.update(shapes=[["m", [0, 1], 0]]),
        lambda tree: tree.update(shapes=[["m", [0, 1], 8]]),
        lambda tree: tree.update(lead=[3, 2]),
        lambda tree: tree.update(lead=[1, 1 << 40]),
        lambda tree: tree.update(window_s=-1.0),
        lambda tree: tree.update(window_s="nan"),
        lambda tree: tree.update(num_ranks="many"),
        lambda tree: tree.update(num_ranks=float("inf")),
        lambda tree: tree.update(shapes=[["m", [0], 1 << 40]]),
        lambda tree: tree["day"].update(visits=[1 << 80] * 24),
        lambda tree: tree["evidence"]["1"].update({"ewma-4": [1.0]}),
        lambda tree: tree["evidence"]["1"].update({"ewma-4": [1, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0]}),
        lambda tree: tree["evidence"]["1"].update({"ewma-4": [1, 1.0, 1.0, "x", 1.0, 1.0, 1.0]}),
        lambda tree: tree["evidence"].update({"64": {}}),
        lambda tree: tree["evidence"].update({"1": 5}),
        lambda tree: tree.update(evidence=3),
        lambda tree: tree["day"].update(visits=[-1] * 24),
        lambda tree: tree["day"].update(profile={}),
        lambda tree: tree["day"]["profile"].update({"3": "%%"}),
        lambda tree: tree["day"]["profile"].update({"3": base64.b64encode(b"1234").decode()}),
        lambda tree: tree.pop("day"),
    ],
)
def test_a_damaged_document_changes_nothing(damage: Damage) -> None:
    learning = Learning(windows_kept=8, forecasting=days(2).forecasting)
    tree, before = json.loads(learning.to_document()), learning.to_document()
    damage(tree["forecasts"])
    with pytest.raises(BrokenInvariantError, match="learned anew"):
        learning.read_document(json.dumps(tree).encode())
    assert learning.to_document() == before


def test_what_is_stored_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasting = days(2).forecasting
    tree = forecasting.to_json()
    assert tree is not None
    text = json.dumps(tree["day"])
    size = module.day_of(forecasting._backtest).profile.size  # type: ignore[arg-type]
    assert len(text) < 3 * size + 24 * 20
    monkeypatch.setattr(module, "PROFILE_TEXT_MAX", 3 * size - 1)
    small = forecasting.to_json()
    assert small is not None
    assert small["day"] is None
    again = forecasting.remembered(json.loads(json.dumps(small)))
    assert "time-of-day" not in again.less_off()


def test_evidence_reads_as_it_was_written() -> None:
    evidence = Evidence(3, 2.5, 2.0, 0.5, 0.7, 0.01, -0.2)
    assert module.evidence_of(json.loads(json.dumps([3, 2.5, 2.0, 0.5, 0.7, 0.01, -0.2]))) == evidence
