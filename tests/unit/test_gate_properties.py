"""What the gate promises, over a thousand trials each: it does not move for noise, and it does for drift that pays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from eplb_service.costs import CostModel, price
from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.gate import CLEARED_NOISE, GateConfig, GateInputs, TableEvidence, decide
from eplb_service.horizon import Horizon, PastPlan, WindowSum, measure_horizon
from eplb_service.noise import largest_by_row, rank_moments
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem, Proposal
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology
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


def test_of_the_standard_work_resampled_no_expert_is_moved() -> None:
    """58 layers of 256 experts, 32 ranks of 9 slots: the plan for W, then windows of 2 million tokens a layer drawn from W."""
    topology = Topology.regular(num_ranks=32, num_nodes=4)
    start = Table.linear(model="m", layer_ids=range(58), num_logical=256, rank_ids=topology.rank_ids, slots_per_rank=9)
    work = np.exp(np.random.default_rng(0).normal(0, 1, (58, 256))) * 1000
    shares, random, sizes = work / work.sum(axis=1, keepdims=True), np.random.default_rng(1), (44_000_000,) * 58

    def proposed(loads: Float64Array, current: Table) -> Proposal:
        problem = PlanningProblem(loads=loads, topology=topology, current=current, expert_bytes=sizes)
        return verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)

    planned = proposed(work[None], start).placement
    for _ in range(2):
        loads = random.multinomial(500_000, shares, size=(4, 58)).astype(np.float64)
        proposal = proposed(loads, planned)
        assert proposal.moves.experts > 10_000  # what greedy would do for noise
        table = TableEvidence(loads=loads, current=planned, proposal=proposal, expert_bytes=sizes)
        inputs = GateInputs(
            tables=(table,), topology=topology, dispatch=Dispatch.EVEN, coverage=1.0, generation_age_s=None, cost=FREE
        )
        assert not decide(GateConfig(), inputs).move
        assert not decide(EAGER, inputs).move


def true_imbalance(shares: Float64Array, tokens: int, table: Table) -> float:
    """Mean over layers, expected on a window of so many tokens of the true load."""
    by_layer, _ = largest_by_row(*rank_moments(shares * tokens, table, TOPOLOGY, Dispatch.EVEN, 1.0))
    return float(by_layer.mean())


@pytest.mark.parametrize("part", range(4))
def test_drift_worth_twice_its_cost_is_moved_for_within_two_windows_in_95_of_100_trials(part: int) -> None:
    """The default gate, 4 x 250 trials. Drift that would gain less than the gate asks for by setting is not drawn."""
    random, tokens = np.random.default_rng(part), 50_000
    base = CostModel(seconds_per_step=0.02, horizon_steps=1.0, bytes_per_s=1e9, commit_stall_s=0.001)
    trials = moved = 0
    for seed in itertools.count(1000 * part):
        old, other = popularity(seed), popularity(seed + 500)
        planned = plan(draw(random, old, tokens), LINEAR).placement
        for share in random.uniform(0.1, 1.0, 5):
            now = (1 - share) * old + share * other
            first = asked(draw(random, now, tokens), planned)
            best = first.tables[0].proposal
            worth = true_imbalance(now, tokens, planned) - true_imbalance(now, tokens, best.placement)
            if worth < 0.02:
                continue
            trials += 1
            total_s = price(base, [best.moves], num_flips=1).total_s
            costs = replace(base, horizon_steps=2 * total_s / (base.seconds_per_step * worth))
            if decide(GateConfig(), replace(first, cost=costs)).move:
                moved += 1
            else:
                moved += decide(GateConfig(), asked(draw(random, now, tokens), planned, cost=costs)).move
        if trials >= 250:
            break
    assert moved >= 0.95 * trials


def followed(period: int, cost: CostModel, num_windows: int) -> tuple[list[int], float, float]:
    """The planner's loop in small under a load that swings: plan from the last windows, price with how past plans went stale.

    Returns the windows at which it moved, the seconds saved against never moving, and those that moves cost.
    """
    random, phases = np.random.default_rng(period), [popularity(11), popularity(12)]
    current, plans, history, sums = LINEAR, list[PastPlan](), list[WindowSum](), list[Float64Array]()
    moved_at: list[int] = []
    saved_s = spent_s = 0.0
    horizon: Horizon | None = None
    for index in range(num_windows):
        sums.append(draw(random, phases[index // period % 2], TOKENS))
        loads = sums[-1].sum(axis=0)
        better = imbalance_of(loads, LINEAR, TOPOLOGY).mean - imbalance_of(loads, current, TOPOLOGY).mean
        saved_s += better * cost.seconds_per_step * STEPS
        history.append(
            WindowSum(
                index=index,
                loads=(loads,),
                sources=(None,),
                steps=STEPS,
                live_digest=1,
                coverage=1.0,
                dispersion=1.0,
                step_s=0.0,
            )
        )
        if index % 4 == 0 or horizon is None:
            horizon = measure_horizon(plans[-6:], history[-64:], TOPOLOGY, Dispatch.EVEN)
        priced = replace(cost, horizon_steps=horizon.steps if horizon is not None else 4.0 * STEPS)
        verdict = decide(GateConfig(), asked(np.concatenate(sums[-4:]), current, cost=priced))
        if not verdict.chosen or verdict.chosen[0] is None:
            continue
        point = verdict.chosen[0]
        if verdict.code in CLEARED_NOISE and verdict.gain > 0 and (verdict.move or not plans or index - plans[-1].index >= 4):
            plans.append(PastPlan(index=index, before=(current,), after=(point.placement,), promised=verdict.gain))
        if verdict.move:
            moved_at.append(index)
            spent_s += price(cost, [point.moves], num_flips=1).total_s
            current = point.placement
    return moved_at, saved_s, spent_s


TOKENS, STEPS = 40_000, 32


def swing_cost(period: int, share: float) -> CostModel:
    """A cost model by which a move from one phase's plan to the other's costs this share of what it saves in a phase."""
    first, second = (popularity(seed) * TOKENS for seed in (11, 12))
    here = plan(first[None], LINEAR)
    there = plan(second[None], here.placement)
    gain = there.before.mean - there.predicted.mean
    cost = CostModel(seconds_per_step=0.02, horizon_steps=1.0, bytes_per_s=1e9, commit_stall_s=0.0)
    wanted_s = share * period * gain * cost.seconds_per_step * STEPS
    return replace(cost, bytes_per_s=1e9 * price(cost, [there.moves], num_flips=1).total_s / wanted_s)


@pytest.mark.parametrize("period", [2, 4, 6, 8, 16])
def test_under_a_load_that_swings_placements_do_not_swing_where_that_does_not_pay(period: int) -> None:
    """A move costs three quarters of what it could save in a phase; found and carried out windows late, it loses.

    The first moves leave a placement that is poor under either load, and a planner must be wrong once or twice to learn.
    """
    moved_at, saved_s, spent_s = followed(period, swing_cost(period, 0.75), 12 * period)
    assert saved_s > 2 * spent_s
    assert len(moved_at) <= 6, moved_at
    assert not [index for index in moved_at if index >= 6 * period], moved_at


def test_under_a_load_that_swings_slowly_placements_follow_where_that_pays() -> None:
    """The counterpart: a gate that never moved would pass the test above."""
    moved_at, saved_s, spent_s = followed(24, swing_cost(24, 0.05), 6 * 24)
    assert saved_s > 5 * spent_s > 0
    assert len(moved_at) >= 5, moved_at
