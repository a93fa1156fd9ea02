"""What the gate promises, over a thousand trials each: it does not move for noise, and it does for drift that pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.costs import CostModel, price
from eplb_service.dispatch import Dispatch
from eplb_service.gate import GateConfig, decide
from eplb_service.noise import fresh_imbalance, rank_moments
from eplb_service.placement import Table
from tests.unit.gate_trials import LINEAR, TOPOLOGY, Float64Array, asked, draw, plan, popularity

FREE = CostModel(seconds_per_step=1.0, horizon_steps=1e9, bytes_per_s=1e12, commit_stall_s=0.0)
EAGER = GateConfig(min_gain_mean=0.0, min_gain_worst=0.0, min_tokens=0, min_return=0.0)


@pytest.mark.parametrize(("tokens", "sigma"), [(2_000, 1.0), (20_000, 0.3), (200_000, 1.0), (200_000, 0.0)])
def test_of_1000_resamples_of_the_load_that_was_planned_for_at_most_one_per_cent_are_moved_for(
    tokens: int, sigma: float
) -> None:
    """Moves that cost nothing, no least gain: nothing but the noise test speaks against them."""
    random = np.random.default_rng(tokens)
    moved = 0
    for load in range(25):
        shares = popularity(load, sigma)
        planned = plan(draw(random, shares, tokens), LINEAR).placement
        for _ in range(10):
            moved += decide(EAGER, asked(draw(random, shares, tokens), planned, cost=FREE)).move
    assert moved <= 0.01 * 250


def true_imbalance(shares: Float64Array, tokens: int, table: Table) -> float:
    """Mean over layers, expected on a window of so many tokens of the true load."""
    return fresh_imbalance([rank_moments(shares * tokens, table, TOPOLOGY, Dispatch.EVEN, 1.0)]).mean


def test_drift_worth_twice_its_cost_is_moved_for_within_two_windows_in_95_of_100_trials() -> None:
    """The default gate. Drift that would gain less than its least gain is not drawn: that is not worth a look, by setting."""
    random, tokens = np.random.default_rng(7), 50_000
    trials = moved = 0
    seed = 0
    while trials < 1000:
        seed += 1
        old, share = popularity(seed), random.uniform(0.1, 1.0)
        now = (1 - share) * old + share * popularity(seed + 5000)
        planned = plan(draw(random, old, tokens), LINEAR).placement
        best = plan(draw(random, now, tokens), planned)
        worth = true_imbalance(now, tokens, planned) - true_imbalance(now, tokens, best.placement)
        if worth < 0.02:
            continue
        trials += 1
        costs = CostModel(seconds_per_step=0.02, horizon_steps=1.0, bytes_per_s=1e9, commit_stall_s=0.001)
        total_s = price(costs, [best.moves], num_flips=1).total_s
        costs = replace(costs, horizon_steps=2 * total_s / (costs.seconds_per_step * worth))
        moved += any(decide(GateConfig(), asked(draw(random, now, tokens), planned, cost=costs)).move for _ in range(2))
    assert moved >= 0.95 * trials
