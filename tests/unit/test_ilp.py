from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, Proposal, Resilience
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.feasibility import check_feasible
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.groups import Layout
from eplb_service.policy.ilp import IlpPolicy
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import limits_of
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology

GOLDEN = [600.0, 560, 120, 120, 20, 10, 10, 10]


def problem_of(
    load: list[float], *, topology: Topology, slots_per_rank: int, constraints: Constraints | None = None
) -> PlanningProblem:
    current = Table.linear(
        model="m", layer_ids=(0,), num_logical=len(load), rank_ids=topology.rank_ids, slots_per_rank=slots_per_rank
    )
    return PlanningProblem(
        loads=np.array([[load]], np.float64), topology=topology, current=current, constraints=constraints or Constraints()
    )


def plan(problem: PlanningProblem) -> Proposal:
    return verify(problem, IlpPolicy().plan(problem), policy="ilp", solve_s=0.0)


def slow_optimum(load: list[float], topology: Topology, slots: int) -> float:
    """Least imbalance over every choice of distinct experts for each rank."""
    choices = [list(itertools.combinations(range(len(load)), size)) for size in range(slots + 1)]
    sets = list(itertools.chain.from_iterable(choices))
    speed = topology.capacity or (1.0,) * topology.num_ranks
    best = float("inf")
    for held in itertools.product(sets, repeat=topology.num_ranks):
        copies = [sum(expert in rank for rank in held) for expert in range(len(load))]
        if min(copies) > 0:
            height = max(sum(load[e] / copies[e] for e in rank) / speed[r] for r, rank in enumerate(held))
            best = min(best, height)
    return best / (sum(load) / sum(speed))


def test_golden_case_is_solved_to_its_proven_optimum_vllm_37656() -> None:
    proposal = plan(problem_of(GOLDEN, topology=Topology.regular(num_ranks=8), slots_per_rank=2))
    mean = sum(GOLDEN) / 8
    assert proposal.status == "optimal"
    assert not proposal.cut_off
    assert proposal.predicted.worst * mean == pytest.approx(590 / 3)
    assert proposal.lower_bound.worst * mean == pytest.approx(590 / 3)


@dataclass(slots=True)
class SteppingClock:
    """A clock that goes on by a step whenever it is read."""

    step_s: float
    now_s: float = 0.0

    def monotonic(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def wall(self) -> float:
        return self.now_s


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.data())
def test_small_layers_are_solved_to_the_optimum_of_all_placements(shape: tuple[int, int], data: st.DataObject) -> None:
    num_ranks, slots = shape
    num_logical = data.draw(st.integers(2, 4))
    load = data.draw(st.lists(st.integers(1, 60).map(float), min_size=num_logical, max_size=num_logical))
    capacity = data.draw(st.none() | st.just((2.0, 1.0, 1.5)[:num_ranks]))
    topology = replace(Topology.regular(num_ranks=num_ranks), capacity=capacity)
    problem = problem_of(load, topology=topology, slots_per_rank=slots)
    proposal = plan(problem)
    optimum = slow_optimum(load, topology, slots)
    assert proposal.predicted.worst == pytest.approx(optimum, rel=1e-5)
    assert proposal.lower_bound.worst <= optimum * (1 + 1e-9)
    if capacity is None:
        assert proposal.status == "optimal"


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_never_worse_than_greedy(data: st.DataObject) -> None:
    num_ranks, slots = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    num_logical = data.draw(st.integers(1, num_ranks * slots))
    load = data.draw(st.lists(st.integers(0, 500).map(float), min_size=num_logical, max_size=num_logical))
    problem = replace(
        problem_of(load, topology=Topology.regular(num_ranks=num_ranks), slots_per_rank=slots),
        work_budget=data.draw(st.integers(1, 200)),
    )
    greedy = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
    assert plan(problem).predicted.worst <= greedy.predicted.worst * (1 + 1e-9)


def test_same_problem_gives_the_same_plan() -> None:
    load = np.random.default_rng(5).gamma(0.5, 100, 12).tolist()
    problem = replace(problem_of(load, topology=Topology.regular(num_ranks=4), slots_per_rank=4), work_budget=300)
    first, second = plan(problem), plan(problem)
    assert first.placement == second.placement
    assert first.lower_bound == second.lower_bound
    assert first.status == second.status


def test_layer_too_large_for_the_exact_model_is_bettered_a_few_ranks_at_a_time_and_says_so() -> None:
    load = np.exp(np.random.default_rng(0).normal(0, 1, 256)).tolist()
    problem = replace(problem_of(load, topology=Topology.regular(num_ranks=32), slots_per_rank=9), work_budget=300)
    proposal = plan(problem)
    greedy = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
    assert proposal.predicted.worst <= greedy.predicted.worst
    assert "1 of 1 layers too large for the exact model: 262112 variables, at most 40000" in proposal.status
    assert not proposal.cut_off


@pytest.mark.parametrize("constraints", [Constraints(), Constraints(num_groups=8), Constraints(num_groups=8, group_price=0.5)])
def test_many_large_layers_end_with_the_time_limit(constraints: Constraints) -> None:
    loads = np.exp(np.random.default_rng(0).normal(0, 1, (1, 8, 64)))
    topology = Topology.regular(num_ranks=16, num_nodes=4)
    current = Table.linear(model="m", layer_ids=range(8), num_logical=64, rank_ids=topology.rank_ids, slots_per_rank=8)
    problem = PlanningProblem(
        loads=loads, topology=topology, current=current, constraints=constraints, work_budget=10_000_000, time_limit_s=0.0
    )
    clock = SteppingClock(step_s=3.0)
    cut = IlpPolicy(clock=clock).plan(replace(problem, time_limit_s=10.0))
    assert cut.cut_off
    assert clock.now_s <= 10.0 + 12 * 3.0  # the layers that are left are asked once each
    at_once = IlpPolicy().plan(problem)
    assert at_once.cut_off
    greedy = GreedyPolicy().plan(problem)
    assert (at_once.physical_to_logical == greedy.physical_to_logical).all()


def test_target_takes_the_fewest_moves_there_are() -> None:
    rng = np.random.default_rng(2)
    for _ in range(3):
        load = rng.gamma(0.7, 100, 6).tolist()
        problem = replace(problem_of(load, topology=Topology.regular(num_ranks=3), slots_per_rank=3), max_imbalance=1.15)
        proposal = plan(problem)
        fewest = slow_fewest_moves(problem, 1.15)
        assert proposal.status == "optimal"
        if fewest is None:
            assert proposal.predicted.worst == pytest.approx(slow_optimum(load, problem.topology, 3), rel=1e-5)
        else:
            assert proposal.predicted.worst <= 1.15 * (1 + 1e-9)
            assert proposal.moves.experts == proposal.moves_lower_bound == fewest


def slow_fewest_moves(problem: PlanningProblem, target: float) -> int | None:
    """Over every choice of distinct experts for each rank."""
    load, slots = problem.total_loads[0], problem.current.slots_per_rank
    held = [set(row[row >= 0].tolist()) for row in problem.current.by_rank()[0]]
    sets = [set(c) for size in range(slots + 1) for c in itertools.combinations(range(load.size), size)]
    fewest = None
    for chosen in itertools.product(sets, repeat=len(held)):
        copies = [sum(expert in rank for rank in chosen) for expert in range(load.size)]
        if min(copies) == 0:
            continue
        if max(sum(load[e] / copies[e] for e in rank) for rank in chosen) <= target * load.sum() / len(held):
            moves = sum(len(new - old) for new, old in zip(chosen, held, strict=True))
            fewest = moves if fewest is None else min(fewest, moves)
    return fewest


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_pins_bars_resilience_and_capacities_are_kept_and_greedy_is_never_better(data: st.DataObject) -> None:
    load = data.draw(st.lists(st.integers(1, 60).map(float), min_size=4, max_size=4))
    somewhere = st.builds(ExpertOnRank, st.integers(0, 3), st.integers(0, 3))
    topology = replace(
        Topology.regular(num_ranks=4, num_nodes=2),
        capacity=data.draw(st.sampled_from([None, (1.0, 2.0, 1.0, 1.5)])),
        base_load=data.draw(st.sampled_from([None, (0.3, 0.0, 0.0, 0.5)])),
    )
    constraints = Constraints(
        pinned=data.draw(st.frozensets(somewhere, max_size=1)),
        barred=data.draw(st.frozensets(somewhere, max_size=2)),
        resilience=data.draw(st.sampled_from([None, Resilience(hot_share=0.5)])),
        max_replicas=data.draw(st.sampled_from([None, 2])),
    )
    problem = problem_of(load, topology=topology, slots_per_rank=3, constraints=constraints)
    problem = replace(problem, max_imbalance=data.draw(st.sampled_from([None, 1.2])), work_budget=200)
    try:
        limits_of(problem)
        check_feasible(problem)
    except InvalidInputError:
        return
    greedy = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
    proposal = plan(problem)  # verify checks every rule
    if problem.max_imbalance is None or greedy.predicted.worst > problem.max_imbalance:
        assert proposal.predicted.worst <= greedy.predicted.worst * (1 + 1e-9)
    else:
        assert proposal.predicted.worst <= problem.max_imbalance * (1 + 1e-9)
        assert proposal.moves.experts <= greedy.moves.experts


def test_strict_groups_are_solved_over_all_ways_to_spread_them() -> None:
    topology = Topology.regular(num_ranks=4, num_nodes=2)
    load = [9.0, 9, 1, 1, 8, 8, 2, 2]
    problem = problem_of(load, topology=topology, slots_per_rank=3, constraints=Constraints(num_groups=4))
    proposal = plan(problem)
    assert proposal.status == "optimal"
    assert proposal.predicted.worst == pytest.approx(proposal.lower_bound.worst, rel=1e-5)
    assert proposal.lower_bound.worst >= imbalance_bounds(problem)[0] * (1 - 1e-9)


def test_soft_groups_get_no_more_replicas_off_their_node_than_greedy_gives_them() -> None:
    topology = Topology.regular(num_ranks=4, num_nodes=2)
    load = np.random.default_rng(4).gamma(0.6, 100, 12).tolist()
    constraints = Constraints(num_groups=4, group_price=2.0)
    problem = replace(problem_of(load, topology=topology, slots_per_rank=4, constraints=constraints), work_budget=500)
    greedy = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
    proposal = plan(problem)
    assert proposal.predicted.worst <= greedy.predicted.worst * (1 + 1e-9)
    assert off_home(problem, proposal) <= off_home(problem, greedy)


def off_home(problem: PlanningProblem, proposal: Proposal) -> int:
    """Replicas off the node that planning gives their group."""
    limits = limits_of(problem)
    price = layer_task(problem, limits, Layout.of(problem, limits), 0).price
    return sum(int(price[rank, expert] >= 2.0) for rank, row in enumerate(proposal.placement.by_rank()[0]) for expert in row)


def test_other_dispatch_than_even_split_keeps_the_rows_of_greedy() -> None:
    load = np.random.default_rng(5).gamma(0.5, 100, 12).tolist()
    problem = replace(problem_of(load, topology=Topology.regular(num_ranks=4), slots_per_rank=4), dispatch=Dispatch.NEAREST)
    proposal = plan(problem)
    assert proposal.status == "not_improved"
    assert proposal.placement.physical_to_logical.tolist() == GreedyPolicy().plan(problem).physical_to_logical.tolist()


def test_optimum_that_cannot_be_proven_in_the_budget_is_called_feasible_or_not_improved() -> None:
    load = np.random.default_rng(8).gamma(0.3, 100, 24).tolist()
    problem = replace(problem_of(load, topology=Topology.regular(num_ranks=8), slots_per_rank=4), work_budget=5)
    proposal = plan(problem)
    assert proposal.status.split()[0] in ("feasible", "not_improved")
    assert proposal.lower_bound.worst < proposal.predicted.worst


def test_groups_stay_on_their_node_and_moves_stay_in_budget() -> None:
    topology = Topology.regular(num_ranks=4, num_nodes=2)
    load = [90.0, 10, 40, 40, 5, 70, 20, 20]
    constraints = Constraints(num_groups=4)
    problem = problem_of(load, topology=topology, slots_per_rank=3, constraints=constraints)
    proposal = plan(problem)
    for node in proposal.placement.physical_to_logical[0].reshape(2, -1):
        assert len({int(expert) // 2 for expert in node if expert >= 0}) == 2
    limited = replace(problem, constraints=Constraints(max_moves=1))
    assert plan(limited).moves.experts <= 1


def test_idle_layer_and_dead_rank_are_handled() -> None:
    topology = replace(Topology.regular(num_ranks=4), dead=frozenset({RankId(1)}))
    problem = problem_of([0.0] * 6, topology=topology, slots_per_rank=2)
    proposal = plan(problem)
    assert (proposal.placement.by_rank()[0][1] == -1).all()
    assert proposal.predicted.worst == 1.0
    idle = problem_of([0.0] * 6, topology=Topology.regular(num_ranks=4), slots_per_rank=2)
    assert plan(idle).placement == idle.current
