"""The robust policy: its cost against a slow version, its promises, and that it beats plans on sums where loads alternate."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.clock import Clock
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, Effort, ExpertOnRank, PlanningProblem, Proposal, Resilience
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.robust import RobustPolicy
from eplb_service.policy.scenarios import SCENARIOS_MAX, best_decay, scenarios_of
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]


def problem_of(
    loads: Float64Array, *, num_ranks: int, slots_per_rank: int, constraints: Constraints | None = None, num_nodes: int = 1
) -> PlanningProblem:
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=num_nodes)
    current = Table.linear(
        model="m",
        layer_ids=range(loads.shape[1]),
        num_logical=loads.shape[2],
        rank_ids=topology.rank_ids,
        slots_per_rank=slots_per_rank,
    )
    return PlanningProblem(
        loads=loads,
        topology=topology,
        current=current,
        constraints=constraints or Constraints(),
        effort=Effort.QUICK,
        time_limit_s=1000.0,
    )


def plan(problem: PlanningProblem) -> Proposal:
    return verify(problem, run_policy(RobustPolicy(), problem), policy="robust", solve_s=0.0)


def slow_mean_of_maxima(loads: Float64Array, row: npt.NDArray[np.int32], num_ranks: int) -> float:
    """Busiest rank of each sub-window over the mean rank, averaged. Loads: shape (W, E)."""
    by_rank = row.reshape(num_ranks, -1).tolist()
    flat = [expert for rank in by_rank for expert in rank if expert >= 0]
    highest = [
        max(sum(window[expert] / flat.count(expert) for expert in rank if expert >= 0) for rank in by_rank) for window in loads
    ]
    return float(sum(highest) / (loads.sum() / num_ranks))


def bursts(num_windows: int, num_logical: int, seed: int) -> Float64Array:
    """Pairs of experts that are busy by turns: as a sum they look alike. Shape (W, 1, E)."""
    random = np.random.default_rng(seed)
    loads = np.full((num_windows, 1, num_logical), 100.0)
    half = num_logical // 2
    for window in range(num_windows):
        loads[window, 0, :half] += 400.0 * (random.random(half) < 0.5)
        loads[window, 0, half:] += 500.0 - loads[window, 0, :half]
    return loads


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_experts_that_are_busy_by_turns_share_ranks_which_their_sums_do_not_tell(seed: int) -> None:
    loads = bursts(24, 16, seed)
    problem = replace(problem_of(loads[:12], num_ranks=4, slots_per_rank=4), from_nothing=True, work_budget=40_000)
    robust = plan(problem).placement.physical_to_logical[0]
    sums = GreedyPolicy().plan(problem).physical_to_logical[0]
    unseen = loads[12:, 0]
    assert slow_mean_of_maxima(unseen, robust, 4) < 0.5 + 0.5 * slow_mean_of_maxima(unseen, sums, 4)


def test_a_small_layer_is_as_good_as_the_best_of_all_placements() -> None:
    loads = bursts(3, 6, 5)
    problem = replace(problem_of(loads, num_ranks=3, slots_per_rank=2), from_nothing=True, work_budget=20_000)
    scenarios, weights = scenarios_of(loads)

    def cost(row: npt.NDArray[np.int32]) -> float:
        heights = np.array([[scenario[0, held].sum() for held in row.reshape(3, 2)] for scenario in scenarios])
        return float(weights @ (heights**16).mean(axis=1) ** (1 / 16))

    best = min(cost(np.array(order, np.int32)) for order in itertools.permutations(range(6)))
    assert cost(plan(problem).placement.physical_to_logical[0]) <= best * (1 + 1e-9)


def test_plan_again_on_the_same_series_moves_next_to_nothing() -> None:
    loads = np.random.default_rng(0).gamma(1.0, 100.0, (8, 3, 32))
    problem = replace(problem_of(loads, num_ranks=8, slots_per_rank=5), work_budget=200_000)
    first = plan(replace(problem, from_nothing=True))
    again = plan(replace(problem, current=first.placement))
    assert again.moves.experts <= 0.05 * 3 * 40


def test_same_problem_and_seed_give_the_same_plan_and_work_budgets_count() -> None:
    loads = np.random.default_rng(1).gamma(1.0, 100.0, (4, 2, 16))
    problem = problem_of(loads, num_ranks=4, slots_per_rank=5)
    assert plan(problem).placement == plan(problem).placement
    assert plan(replace(problem, work_budget=0)).placement == problem.current


def test_target_is_met_by_the_expected_imbalance_with_fewer_moves_the_higher_it_is() -> None:
    loads = np.random.default_rng(2).gamma(2.0, 100.0, (1, 2, 32))
    problem = problem_of(loads, num_ranks=4, slots_per_rank=10)
    tight, loose = (plan(replace(problem, max_imbalance=target)) for target in (1.01, 1.2))
    assert tight.status == loose.status == "target_met"
    assert tight.predicted.worst <= 1.01 + 1e-9
    assert loose.predicted.worst <= 1.2 + 1e-9
    assert 0 < loose.moves.experts < tight.moves.experts
    assert plan(replace(problem, max_imbalance=1.0)).status == "target_missed"


def test_limits_on_moves_are_kept_and_what_they_leave_is_used() -> None:
    loads = np.random.default_rng(3).gamma(0.5, 100.0, (4, 4, 16))
    problem = problem_of(loads, num_ranks=4, slots_per_rank=5)
    free = plan(problem)
    few = plan(replace(problem, constraints=Constraints(max_moves=free.moves.experts // 2)))
    assert few.status == "limited"
    assert 0 < few.moves.experts <= free.moves.experts // 2
    assert free.predicted.mean < few.predicted.mean < few.before.mean
    assert plan(replace(problem, constraints=Constraints(max_moves=0))).placement == problem.current
    one_layer = plan(replace(problem, constraints=Constraints(max_layers=1)))
    assert one_layer.moves.layers == 1


def test_lost_experts_come_back_with_the_fewest_moves_when_those_are_short() -> None:
    loads = np.random.default_rng(4).gamma(0.5, 100.0, (2, 2, 14))
    problem = problem_of(loads, num_ranks=4, slots_per_rank=5)
    lost = replace(problem, topology=replace(problem.topology, dead=frozenset({RankId(2)})))
    alive = lost.current.by_rank()[:, [0, 1, 3]].reshape(2, -1)
    orphans = sum(14 - np.unique(row[row >= 0]).size for row in alive)
    proposal = plan(replace(lost, constraints=Constraints(max_moves=orphans)))
    assert proposal.moves.experts == orphans
    with pytest.raises(InvalidInputError, match=f"{orphans} moves are needed"):
        plan(replace(lost, constraints=Constraints(max_moves=orphans - 1)))


def test_front_goes_from_few_moves_to_many_and_balance_gets_better() -> None:
    loads = np.random.default_rng(5).gamma(0.5, 100.0, (1, 2, 16))
    front = plan(replace(problem_of(loads, num_ranks=4, slots_per_rank=5), front=True)).front
    assert len(front) > 3
    means = [point.predicted.mean for point in front]
    assert means[-1] < 0.7 * (means[0] - 1) + 1
    assert [point.moves.experts for point in front] == sorted(point.moves.experts for point in front)


class RunOut(Clock):
    """Time that is over after the first look."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 100.0
        return self._now

    def wall(self) -> float:
        return self._now


def test_time_that_runs_out_leaves_layers_as_they_are_and_says_so() -> None:
    problem = replace(problem_of(np.ones((1, 2, 4)) * [1.0, 9, 2, 5], num_ranks=2, slots_per_rank=3), time_limit_s=1.0)
    raw = RobustPolicy(clock=RunOut()).plan(problem)
    assert raw.cut_off
    assert np.array_equal(raw.physical_to_logical, problem.current.physical_to_logical)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_plan_passes_the_check_whatever_the_constraints(data: st.DataObject) -> None:
    num_ranks, slots = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 4))
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=2)
    dead = data.draw(st.sets(st.sampled_from(topology.rank_ids), max_size=1))
    topology = replace(
        topology, dead=frozenset(dead), base_load=tuple(data.draw(st.sampled_from([0.0, 0.5])) for _ in range(num_ranks))
    )
    num_logical = data.draw(st.integers(1, (num_ranks - len(dead)) * slots // 2))
    rank = st.sampled_from([rank for rank in topology.rank_ids if rank not in dead])
    expert = st.integers(0, num_logical - 1)
    named = st.builds(ExpertOnRank, expert, rank, st.none() | st.integers(0, 1))
    pinned, barred = data.draw(st.frozensets(named, max_size=2)), data.draw(st.frozensets(named, max_size=2))
    constraints = Constraints(
        pinned=pinned,
        barred=barred,
        resilience=data.draw(st.none() | st.just(Resilience(hot_share=0.5))),
        max_moves=data.draw(st.none() | st.integers(0, 12)),
        num_groups=data.draw(st.sampled_from([None, 1, num_logical])),
        group_price=1.5,
    )
    row = st.lists(st.integers(-1, num_logical - 1), min_size=num_ranks * slots, max_size=num_ranks * slots)
    current = Table("m", (0, 1), num_logical, topology.rank_ids, np.array([data.draw(row), data.draw(row)], np.int32))
    load = st.lists(st.integers(0, 50).map(float), min_size=2 * num_logical, max_size=2 * num_logical)
    loads = np.array([data.draw(load) for _ in range(data.draw(st.integers(1, 3)))]).reshape(-1, 2, num_logical)
    problem = PlanningProblem(
        loads=loads, topology=topology, current=current, constraints=constraints, work_budget=2000, time_limit_s=1000.0
    )
    try:
        raw = run_policy(RobustPolicy(), problem)
    except InvalidInputError:
        with pytest.raises(InvalidInputError):  # greedy finds the same fault
            run_policy(GreedyPolicy(), problem)
        return
    assert not verify(problem, raw, policy="robust", solve_s=0.0).placement.uncovered()


def test_backtest_trusts_the_last_window_where_loads_wander_and_all_of_them_where_they_only_scatter() -> None:
    random = np.random.default_rng(6)
    wander = np.exp(np.cumsum(random.normal(0, 0.4, (16, 4, 32)), axis=0)) * 1e4
    scatter = random.poisson(100.0, (16, 4, 32)).astype(np.float64)
    assert best_decay(wander) <= 0.2
    assert best_decay(scatter) >= 0.8


def test_long_series_are_pooled_from_the_oldest_and_no_load_is_lost() -> None:
    loads = np.random.default_rng(7).poisson(50.0, (50, 2, 8)).astype(np.float64)
    loads[3] = 0.0
    scenarios, weights = scenarios_of(loads)
    assert scenarios.shape == (SCENARIOS_MAX, 2, 8)
    assert weights.sum() == pytest.approx(1.0)
    assert np.array_equal(scenarios[-1], loads[-1])
    assert np.tensordot(weights, scenarios, 1).sum() == pytest.approx(loads.sum() / 49, rel=0.02)
    idle, one = scenarios_of(np.zeros((3, 1, 4)))
    assert idle.shape == (1, 1, 4)
    assert one.tolist() == [1.0]
