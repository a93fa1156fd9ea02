"""A tiny problem that makes a policy import and compile what it needs, so that the first real plan is quick too."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import (
    Constraints,
    ExpertOnRank,
    PlanningProblem,
    Policy,
    RawPlan,
    load_shape_of,
    reduced_to_shape,
)
from eplb_service.policy.feasibility import check_feasible
from eplb_service.policy.fill import filled
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology

SOFT_PRICE = 20.0

COMPILE_LIMIT_S = 3600.0
"""Time limit of a warm-up: compiling takes as long as it takes. A policy that was cut off would leave its loops uncompiled."""


def tiny_problem() -> PlanningProblem:
    """Two layers, one of them idle, of three experts on two ranks; everything is asked for that a planner may ask."""
    ranks = tuple(RankId(rank) for rank in range(2))
    current = Table.linear(model="warm-up", layer_ids=(0, 1), num_logical=3, rank_ids=ranks, slots_per_rank=2)
    loads = np.array([[[7.0, 5.0, 1.0], [0.0, 0.0, 0.0]], [[6.0, 2.0, 1.0], [0.0, 0.0, 0.0]]])
    wanted = current.with_rows({0: np.array([0, 1, 2, 1])})
    topology = Topology.regular(num_ranks=2)
    return PlanningProblem(
        loads=loads,
        topology=topology,
        current=current,
        wanted=wanted,
        front=True,
        certify=True,
        work_budget=100,
        time_limit_s=COMPILE_LIMIT_S,
    )


def uneven_problem() -> PlanningProblem:
    """One layer of twelve experts on three ranks, far from balance: certificates have something to prove, groups to pack."""
    ranks = tuple(RankId(rank) for rank in range(3))
    current = Table.linear(model="warm-up", layer_ids=(0,), num_logical=12, rank_ids=ranks, slots_per_rank=5)
    return PlanningProblem(
        loads=np.arange(1.0, 13.0).reshape(1, 1, 12) ** 2,
        topology=Topology.regular(num_ranks=3),
        current=current,
        certify=True,
        work_budget=100,
        time_limit_s=COMPILE_LIMIT_S,
    )


def tiny_pairs() -> npt.NDArray[np.float64]:
    """Pairs of the tiny problem's tokens, shape (2, 3, 3)."""
    pairs = np.zeros((2, 3, 3))
    pairs[0, 0, 1] = pairs[0, 1, 0] = 4.0
    return pairs


def run_policy(policy: Policy, problem: PlanningProblem) -> RawPlan:
    """The policy's answer to a problem, with the loads in the shape that it declares.

    Raises InvalidInputError, before the policy is asked, when constraints contradict one another; else what the policy raises.
    """
    check_feasible(problem)
    reduced = reduced_to_shape(problem, load_shape_of(policy))
    raw: object = policy.plan(reduced)
    if problem.constraints.fill_slots and isinstance(raw, RawPlan):
        return filled(reduced, raw)
    return raw  # type: ignore[return-value]  # of foreign code: `verify` says what it is


def warm_up_policy(policy: Policy, name: str, *, together: bool = False) -> None:
    """Run a policy once and check its answer; then under nearest dispatch, with a barred rank, and with soft and strict groups.

    A policy that cannot do the latter is not refused for it: who asks for them will be told. together: with known pairs of
    experts too, which compiles what only they need. Raises PolicyFailedError when the first answer is unusable, or what the
    policy raises.
    """
    plain = tiny_problem()
    verify(plain, run_policy(policy, plain), policy=name, solve_s=0.0)
    problems = [
        replace(plain, dispatch=Dispatch.NEAREST),
        replace(plain, constraints=Constraints(barred=frozenset({ExpertOnRank(2, 0)}))),
        replace(
            plain,
            topology=Topology.regular(num_ranks=2, num_nodes=2),
            constraints=Constraints(num_groups=3, group_price=SOFT_PRICE),
        ),
        uneven_problem(),
        replace(uneven_problem(), constraints=Constraints(num_groups=3)),
    ]
    if together:
        apart = Topology.regular(num_ranks=2, num_nodes=2)
        problems.append(replace(plain, topology=apart, together=tiny_pairs(), from_nothing=True))
    for problem in problems:
        # A policy is foreign code and may raise anything.
        with contextlib.suppress(Exception):
            run_policy(policy, problem)


if __name__ == "__main__":  # what an image or an installation runs once, so that no first plan waits for the compiler
    from eplb_service.policy.registry import load_policy, policy_names

    for policy_name in policy_names():
        warm_up_policy(load_policy(policy_name), policy_name, together=True)
