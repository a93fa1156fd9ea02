"""All registered policies on tiny problems with any constraints: a clear refusal, or a plan that a reader of slots accepts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.policy.base import PlanningProblem, Proposal
from eplb_service.policy.registry import load_policy
from eplb_service.policy.survivors import met_by_survivors
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy
from tests.unit.constraint_oracle import has_move_limit, is_acceptable, promises_broken, slot_rules_broken, tiny_problems

POLICIES = ("greedy", "minmove", "ilp", "robust", "elastic", "resilient")
EXAMPLES = {"ilp": 20, "robust": 30, "resilient": 30, "elastic": 40}


def plan(problem: PlanningProblem, policy: str) -> Proposal:
    return verify(problem, run_policy(load_policy(policy), problem), policy=policy, solve_s=0.0)


def check(problem: PlanningProblem, policy: str) -> None:
    """Plan; a refusal must be an InvalidInputError, a plan must be accepted and no worse than what it replaces without need."""
    problem = replace(problem, work_budget=4000 * problem.current.num_layers, time_limit_s=20.0)
    try:
        proposal = plan(problem, policy)
    except InvalidInputError:
        return
    rows = proposal.placement.physical_to_logical.tolist()
    assert is_acceptable(rows, problem)
    live = problem.current.physical_to_logical.tolist()
    for layer, (row, before) in enumerate(zip(rows, live, strict=True)):
        sound = not slot_rules_broken(before, problem, copy_rules=True) and not promises_broken(before, layer, problem)
        if sound and problem.constraints.num_groups is None and policy not in {"resilient", "robust", "elastic"}:
            worst = max(proposal.before.per_layer[layer], problem.max_imbalance or 1.0)
            assert proposal.predicted.per_layer[layer] <= worst * (1 + 1e-6), (row, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_refuses_clearly_or_respects_every_constraint(policy: str) -> None:
    @settings(max_examples=EXAMPLES.get(policy, 60), deadline=None, suppress_health_check=list(HealthCheck))
    @given(tiny_problems())
    def run(problem: PlanningProblem) -> None:
        check(problem, policy)

    run()


@pytest.mark.parametrize("policy", ["greedy", "minmove", "elastic"])
@pytest.mark.parametrize("dispatch", [Dispatch.NEAREST, Dispatch.WEIGHTED])
def test_constraints_are_respected_under_any_dispatch(policy: str, dispatch: Dispatch) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(tiny_problems())
    def run(problem: PlanningProblem) -> None:
        problem = replace(problem, dispatch=dispatch, work_budget=4000 * problem.current.num_layers, time_limit_s=20.0)
        try:
            proposal = plan(problem, policy)
        except InvalidInputError:
            return
        assert is_acceptable(proposal.placement.physical_to_logical.tolist(), problem)

    run()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tiny_problems(limits_on_moves=False), st.data())
def test_the_static_policy_reaches_what_is_wanted_or_comes_nearer(problem: PlanningProblem, data: st.DataObject) -> None:
    problem = replace(problem, work_budget=4000 * problem.current.num_layers, time_limit_s=20.0)
    try:
        wanted = plan(problem, "greedy").placement
    except InvalidInputError:
        return
    going = replace(problem, wanted=wanted)
    assert plan(going, "static").placement == wanted
    limited = replace(
        going,
        constraints=replace(
            problem.constraints,
            max_moves=data.draw(st.none() | st.integers(0, 4)),
            max_layers=data.draw(st.none() | st.integers(0, 2)),
            max_moves_per_layer=data.draw(st.none() | st.integers(0, 3)),
            max_moves_per_rank=data.draw(st.none() | st.integers(0, 3)),
        ),
    )
    try:
        proposal = plan(limited, "static")
    except InvalidInputError:
        return
    assert is_acceptable(proposal.placement.physical_to_logical.tolist(), limited)
    if not has_move_limit(limited):
        assert proposal.placement == wanted


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tiny_problems(limits_on_moves=False))
def test_survivors_can_be_planned_for_whenever_the_experts_fit(problem: PlanningProblem) -> None:
    room = sum(
        rank not in problem.topology.dead and (rank, slot) not in problem.constraints.unusable_slots
        for rank in problem.topology.rank_ids
        for slot in range(problem.current.slots_per_rank)
    )
    groups = problem.constraints.num_groups
    if groups is not None and problem.current.num_logical % groups:
        return
    if room < problem.current.num_logical:
        with pytest.raises(InvalidInputError, match="do not fit"):
            met_by_survivors(problem)
        return
    met, notes = met_by_survivors(problem)
    assert (met.constraints == problem.constraints) == (not notes)
    proposal = plan(replace(met, work_budget=4000 * met.current.num_layers), "elastic")
    assert not proposal.placement.uncovered()
    assert np.array_equal(plan(replace(met, work_budget=0), "elastic").placement.replica_counts > 0, np.ones(
        (met.current.num_layers, met.current.num_logical), np.bool_
    ))  # fmt: skip
