"""How long a gain lasts, from what past plans would have gained on the windows that followed."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.horizon import Horizon, PastPlan, WindowSum, gains_after, measure_horizon
from tests.unit.gate_trials import LINEAR, TOPOLOGY, Float64Array, plan, popularity

STEPS = 32


def window(index: int, loads: Float64Array) -> WindowSum:
    return WindowSum(
        index=index,
        loads=(loads,),
        sources=(None,),
        steps=STEPS,
        live_digest=1,
        coverage=1.0,
        dispersion=1.0,
        step_s=0.0,
    )


def made(index: int, loads: Float64Array) -> PastPlan:
    after = plan(loads[None], LINEAR).placement
    gain = imbalance_of(loads, LINEAR, TOPOLOGY).mean - imbalance_of(loads, after, TOPOLOGY).mean
    return PastPlan(index=index, before=(LINEAR,), after=(after,), promised=gain)


def measured(plans: list[PastPlan], windows: list[WindowSum]) -> Horizon:
    found = measure_horizon(plans, windows, TOPOLOGY, Dispatch.EVEN)
    assert found is not None
    return found


OLD, NEW = popularity(1) * 1e6, popularity(2) * 1e6


def load_on_which_nothing_is_gained() -> Float64Array:
    """Of many loads that on which the plan for OLD and the linear placement are most alike."""
    after = plan(OLD[None], LINEAR).placement
    loads = [popularity(seed) * 1e6 for seed in range(10, 400)]
    return min(
        loads, key=lambda load: abs(imbalance_of(load, LINEAR, TOPOLOGY).mean - imbalance_of(load, after, TOPOLOGY).mean)
    )


def test_a_load_that_stays_is_worth_twice_the_windows_seen_and_no_half_life_is_claimed() -> None:
    horizon = measured([made(0, OLD)], [window(k, OLD) for k in range(11)])
    assert horizon.steps == pytest.approx(2 * 10 * STEPS)
    assert horizon.half_life_steps is None
    assert horizon.shares == pytest.approx([1.0] * 10)
    assert "not halved within the 10 windows" in str(horizon)


@pytest.mark.parametrize("half_life", [2.0, 4.0, 8.0])
def test_half_life_and_worth_of_a_gain_that_decays_are_found(half_life: float) -> None:
    """Imbalance is not linear in the load, so the gain decays about as the old load's share does, not exactly."""
    far = load_on_which_nothing_is_gained()
    shares = [0.5 ** (k / half_life) for k in range(40)]
    windows = [window(k, share * OLD + (1 - share) * far) for k, share in enumerate(shares)]
    plans = [made(0, OLD)]
    gains = gains_after(plans[0], windows, TOPOLOGY, Dispatch.EVEN)
    horizon = measured(plans, windows)
    assert horizon.half_life_steps is not None
    assert 0.3 * half_life * STEPS < horizon.half_life_steps < 2 * half_life * STEPS
    lost = sum(gains.values()) / plans[0].promised
    assert horizon.steps >= STEPS * lost - 1e-6
    assert horizon.steps < 2.2 * half_life / np.log(2) * STEPS


@pytest.mark.parametrize("period", [2, 4, 8, 16])
def test_under_a_load_that_swings_to_and_fro_a_gain_is_worth_less_than_half_a_period(period: int) -> None:
    """Plans are made at the end of each phase, from it alone: the worst that can be done, and what looks best each time."""
    phases = [(OLD, NEW)[k // period % 2] for k in range(6 * period)]
    windows = [window(k, loads) for k, loads in enumerate(phases)]
    plans = []
    for end in range(period - 1, 4 * period, period):
        live = plan(phases[end - period][None] if end >= period else phases[end][None], LINEAR).placement
        after = plan(phases[end][None], live).placement
        promised = imbalance_of(phases[end], live, TOPOLOGY).mean - imbalance_of(phases[end], after, TOPOLOGY).mean
        plans.append(PastPlan(index=end, before=(live,), after=(after,), promised=promised))
    assert measured(plans, windows).steps < period / 2 * STEPS


def test_gain_of_a_plan_on_a_later_window_is_the_counterfactual_of_both_placements() -> None:
    past = made(3, OLD)
    windows = [window(k, NEW) for k in range(8)]
    gains = gains_after(past, windows, TOPOLOGY, Dispatch.EVEN)
    assert sorted(gains) == [1, 2, 3, 4]
    want = imbalance_of(NEW, LINEAR, TOPOLOGY).mean - imbalance_of(NEW, past.after[0], TOPOLOGY).mean
    assert gains[1] == pytest.approx(want, abs=1e-9)  # layers serve as many tokens each: by load is the plain mean


def test_too_few_windows_or_plans_say_nothing() -> None:
    windows = [window(k, OLD) for k in range(2)]
    assert measure_horizon([], windows, TOPOLOGY, Dispatch.EVEN) is None
    assert measure_horizon([made(0, OLD)], [], TOPOLOGY, Dispatch.EVEN) is None
    assert measure_horizon([made(0, OLD)], windows, TOPOLOGY, Dispatch.EVEN) is None
    assert measure_horizon([made(9, OLD)], [window(k, OLD) for k in range(9)], TOPOLOGY, Dispatch.EVEN) is None


def test_sources_are_counted_under_nearest_dispatch() -> None:
    sources = np.zeros((4, 4, 16))
    sources[:, 0, :] = OLD  # every token comes from rank 0
    loads = sources.sum(axis=1)
    windows = [
        WindowSum(
            index=k,
            loads=(loads,),
            sources=(sources,),
            steps=STEPS,
            live_digest=1,
            coverage=1.0,
            dispersion=1.0,
            step_s=0.0,
        )
        for k in range(4)
    ]
    past = made(0, OLD)
    gains = gains_after(past, windows, TOPOLOGY, Dispatch.NEAREST)
    want = (
        imbalance_of(loads, LINEAR, TOPOLOGY, Dispatch.NEAREST, sources).mean
        - imbalance_of(loads, past.after[0], TOPOLOGY, Dispatch.NEAREST, sources).mean
    )
    assert gains[1] == pytest.approx(want, abs=1e-9)
