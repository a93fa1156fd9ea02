"""Whether a generation brought what it promised: like with like, beyond noise, and what is learned from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.calibration import StepTimeModel
from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.errors import InvalidInputError
from eplb_service.horizon import WindowSum
from eplb_service.validation import (
    SHARE_MAX,
    SHARE_MIN,
    Bias,
    Observation,
    Outcome,
    ValidationConfig,
    changed_share,
    judge,
    observe,
)
from tests.unit.gate_trials import LINEAR, TOPOLOGY, Float64Array, draw, plan, popularity

CONFIG = ValidationConfig()
MODEL = StepTimeModel(
    seconds_per_token=1e-5,
    error=1e-7,
    intercept_s=0.001,
    per_mean_token_s=0.0,
    residual_s=1e-5,
    r_squared=0.99,
    num_windows=64,
    separated=True,
)


def window(loads: Float64Array, *, index: int = 0, step_s: float = 0.0) -> WindowSum:
    return WindowSum(
        index=index,
        loads=(loads,),
        sources=(None,),
        steps=32,
        live_digest=1,
        coverage=1.0,
        dispersion=1.0,
        step_s=step_s,
    )


def observed(
    gains: list[float], *, error: float = 0.001, saved_s: float | None = None, noise_s: float = 1e-5
) -> list[Observation]:
    made = []
    for index, gain in enumerate(gains):
        times = (
            {}
            if saved_s is None
            else {"step_s": 0.01 - saved_s, "previous_step_s": 0.01, "expected_step_s": 0.0095, "step_error_s": noise_s}
        )
        made.append(
            Observation(
                window_index=index,
                mean=1.2 - gain,
                worst=1.3 - gain,
                previous_mean=1.2,
                previous_worst=1.3,
                error=error,
                **times,
            )
        )
    return made


def test_both_placements_are_scored_on_the_window_that_was_served() -> None:
    loads = popularity(3) * 50_000
    after = plan((popularity(1) * 50_000)[None], LINEAR).placement
    seen = observe(window(loads), (after,), (LINEAR,), topology=TOPOLOGY, dispatch=Dispatch.EVEN, model=None)
    new, old = imbalance_of(loads, after, TOPOLOGY), imbalance_of(loads, LINEAR, TOPOLOGY)
    assert [seen.mean, seen.worst] == pytest.approx([new.mean, new.worst])
    assert [seen.previous_mean, seen.previous_worst] == pytest.approx([old.mean, old.worst])
    assert seen.gain == pytest.approx(old.mean - new.mean)
    assert seen.expected_step_s == 0.0


def test_error_of_a_window_is_what_resampling_it_shows() -> None:
    random, shares = np.random.default_rng(0), popularity(3)
    after = plan((popularity(1) * 50_000)[None], LINEAR).placement
    seen = [
        observe(
            window(draw(random, shares, 20_000).sum(axis=0)),
            (after,),
            (LINEAR,),
            topology=TOPOLOGY,
            dispatch=Dispatch.EVEN,
            model=None,
        )
        for _ in range(150)
    ]
    spread = float(np.std([one.gain for one in seen]))
    assert 0.4 * seen[0].error < spread < 1.6 * seen[0].error


def test_expected_step_times_are_those_of_the_model_less_what_it_was_off_by_before() -> None:
    loads = popularity(3) * 50_000
    after = plan(loads[None], LINEAR).placement
    seen = observe(
        window(loads, step_s=0.02),
        (after,),
        (LINEAR,),
        topology=TOPOLOGY,
        dispatch=Dispatch.EVEN,
        model=MODEL,
        offset_s=0.002,
    )
    per_step = loads.sum() / 4 / 32
    assert seen.expected_step_s == pytest.approx(0.003 + 1e-5 * per_step * seen.mean)
    assert seen.previous_step_s == pytest.approx(0.003 + 1e-5 * per_step * seen.previous_mean)


@pytest.mark.parametrize(
    ("gains", "promised", "outcome"),
    [
        ([0.1], 0.1, Outcome.PENDING),
        ([0.1, 0.11, 0.1, 0.09], 0.1, Outcome.KEPT),
        ([0.05, 0.051, 0.05, 0.049], 0.1, Outcome.SMALLER),
        ([-0.05, -0.06, -0.05, -0.04], 0.1, Outcome.WORSE),
        ([-0.005, -0.006, -0.005, -0.004], 0.1, Outcome.SMALLER),  # less than a rollback is worth
        ([-0.3, 0.1, -0.3, 0.1], 0.1, Outcome.KEPT),  # within what the windows differ by
        ([-0.05, -0.05, -0.05, 0.01], 0.1, Outcome.SMALLER),  # not in every window
    ],
)
def test_judgement(gains: list[float], promised: float, outcome: Outcome) -> None:
    answer = judge(CONFIG, promised, observed(gains))
    assert answer.outcome is outcome, answer.reason
    if outcome is not Outcome.PENDING:
        assert f"promised a gain of {promised:.4f}" in answer.reason
        assert answer.gain == pytest.approx(np.mean(gains))


def test_loss_within_sampling_noise_is_no_loss() -> None:
    assert judge(CONFIG, 0.1, observed([-0.02] * 4, error=0.02)).outcome is not Outcome.WORSE
    assert judge(CONFIG, 0.1, observed([-0.02] * 4, error=0.002)).outcome is Outcome.WORSE


def test_steps_that_take_longer_than_under_the_previous_placement_are_worse_whatever_the_balance_says() -> None:
    slower = judge(CONFIG, 0.1, observed([0.1, 0.101, 0.1, 0.099], saved_s=-0.002))
    assert slower.outcome is Outcome.WORSE
    assert "worse by step time" in slower.reason
    assert slower.step_gain_s == pytest.approx(-0.002)
    assert judge(CONFIG, 0.1, observed([0.1] * 4, saved_s=-0.002, noise_s=0.01)).outcome is Outcome.KEPT
    assert judge(CONFIG, 0.1, observed([0.1] * 4, saved_s=0.0005)).outcome is Outcome.KEPT


def test_another_plan_for_the_same_load_is_judged_worse_in_at_most_one_of_a_hundred_trials() -> None:
    random, shares = np.random.default_rng(5), popularity(3)
    trials = worse = 0
    while trials < 200:
        first, second = (plan(draw(random, shares, 20_000), LINEAR).placement for _ in range(2))
        truth = imbalance_of(shares, second, TOPOLOGY).mean - imbalance_of(shares, first, TOPOLOGY).mean
        if truth > CONFIG.min_loss / 2:
            continue  # it is worse
        trials += 1
        drawn = [window(draw(random, shares, 20_000).sum(axis=0), index=k) for k in range(4)]
        seen = [observe(each, (second,), (first,), topology=TOPOLOGY, dispatch=Dispatch.EVEN, model=None) for each in drawn]
        worse += judge(CONFIG, 0.1, seen).outcome is Outcome.WORSE
    assert worse <= 2


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(-2, 2)), max_size=20))
def test_bias_is_bounded_whatever_happens(history: list[tuple[float, float]]) -> None:
    bias = Bias()
    for promised, seen in history:
        bias = bias.after(promised=promised, observed=seen)
    assert SHARE_MIN <= bias.share <= SHARE_MAX


def test_bias_is_shrunk_at_first_and_follows_what_happens_again_and_again() -> None:
    assert Bias().share == 1.0
    shares = []
    bias = Bias()
    for _ in range(30):
        bias = bias.after(promised=0.1, observed=0.05)
        shares.append(bias.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6
    assert shares[-1] == pytest.approx(0.5, abs=0.06)
    for _ in range(30):
        bias = bias.after(promised=0.1, observed=0.1)
    assert bias.share == pytest.approx(1.0, abs=0.01)
    assert bias.value == pytest.approx(1.0 - bias.share)


def test_changed_share_is_that_of_the_tokens_that_go_elsewhere() -> None:
    old, other = popularity(1), popularity(2)
    for share in (0.0, 0.1, 0.5, 1.0):
        now = (1 - share) * old + share * other
        distance = float(np.abs(old - now).sum(axis=1).mean() / 2)
        assert changed_share((old * 1e9,), (now * 1e9,)) == pytest.approx(distance, abs=1e-3)


def test_resample_of_a_load_is_no_change_of_it() -> None:
    random, shares = np.random.default_rng(2), popularity(4)
    for tokens in (2_000, 20_000, 200_000):
        seen = [
            changed_share((draw(random, shares, tokens).sum(axis=0),), (draw(random, shares, tokens).sum(axis=0),))
            for _ in range(50)
        ]
        assert max(seen) < 0.02


def test_idle_layers_and_bad_settings() -> None:
    idle = np.zeros((4, 16))
    assert changed_share((idle,), (idle,)) == 0.0
    assert changed_share((idle,), (popularity(1),)) == 1.0
    with pytest.raises(InvalidInputError, match="at least 1 window"):
        ValidationConfig(windows=0)
    with pytest.raises(InvalidInputError, match="min_loss"):
        ValidationConfig(min_loss=float("nan"))
