from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem, Proposal
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.ilp import IlpPolicy
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


@settings(max_examples=25, deadline=None, derandomize=True)
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


@settings(max_examples=20, deadline=None, derandomize=True)
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


def test_layer_too_large_for_the_model_keeps_the_greedy_plan_and_says_so() -> None:
    load = np.exp(np.random.default_rng(0).normal(0, 1, 256)).tolist()
    problem = problem_of(load, topology=Topology.regular(num_ranks=32), slots_per_rank=9)
    proposal = plan(problem)
    greedy = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
    assert proposal.status == "not_improved"
    assert proposal.placement == greedy.placement
    assert not proposal.cut_off


def test_optimum_that_cannot_be_proven_in_the_budget_is_called_feasible_or_not_improved() -> None:
    load = np.random.default_rng(8).gamma(0.3, 100, 24).tolist()
    problem = replace(problem_of(load, topology=Topology.regular(num_ranks=8), slots_per_rank=4), work_budget=5)
    proposal = plan(problem)
    assert proposal.status in ("feasible", "not_improved")
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
