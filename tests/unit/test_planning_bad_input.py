"""Input that breaks planners elsewhere, by the public thread that reported it, and the odd ends of what may be asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.errors import InvalidInputError, PolicyFailedError
from eplb_service.ids import RankId
from eplb_service.placement import Table, fewest_slots
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, Proposal, RawPlan
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy
from eplb_service.topology import Topology

POLICIES = ("greedy", "minmove", "ilp", "elastic")


def problem_of(loads: npt.ArrayLike, *, num_ranks: int, slots: int, num_nodes: int = 1, **changes: Any) -> PlanningProblem:
    array = np.asarray(loads, np.float64)
    topology = changes.pop("topology", None) or Topology.regular(num_ranks=num_ranks, num_nodes=num_nodes)
    current = Table.linear(
        model="m",
        layer_ids=range(array.shape[0]),
        num_logical=array.shape[1],
        rank_ids=topology.rank_ids,
        slots_per_rank=slots,
    )
    known = {"work_budget": 20_000, "time_limit_s": 20.0, **changes}
    return PlanningProblem(loads=array[None], topology=topology, current=current, **known)


def plan(problem: PlanningProblem, policy: str) -> Proposal:
    return verify(problem, run_policy(load_policy(policy), problem), policy=policy, solve_s=0.0)


def test_slots_that_do_not_divide_over_ranks_are_refused_vllm_52435_vllm_50669() -> None:
    ranks = tuple(RankId(rank) for rank in range(3))
    least = r"use at least 86 slots per rank \(258 slots, 2 redundant experts\)"
    with pytest.raises(InvalidInputError, match=f"256 slots do not divide over 3 ranks, and every rank has as many; {least}"):
        Table("m", (0,), 256, ranks, np.arange(256, dtype=np.int32)[None])
    with pytest.raises(InvalidInputError, match=f"256 experts do not fit 3 ranks x 85 slots = 255; {least}"):
        Table.linear(model="m", layer_ids=(0,), num_logical=256, rank_ids=ranks, slots_per_rank=85)
    assert not plan(problem_of(np.ones((1, 256)), num_ranks=3, slots=86), "greedy").placement.uncovered()
    assert fewest_slots(8, 3) == "use at least 3 slots per rank (9 slots, 1 redundant experts)"  # resolved from both, never 0
    assert not plan(problem_of(np.ones((1, 8)), num_ranks=3, slots=3), "minmove").placement.uncovered()


@pytest.mark.parametrize("policy", POLICIES)
def test_only_slots_need_divide_over_ranks_trt_llm_15410_vllm_18343(policy: str) -> None:
    loads = np.random.default_rng(1).gamma(1.0, 100, (1, 16))
    proposal = plan(problem_of(loads, num_ranks=6, slots=3), policy)  # 16 experts divide by neither 6 ranks nor 3 slots
    assert proposal.placement.physical_to_logical.dtype == np.int32
    assert not proposal.placement.uncovered()


def test_more_nodes_than_ranks_or_ranks_that_do_not_fill_nodes_sglang_8253_vllm_51988_fastdeploy_5923() -> None:
    with pytest.raises(InvalidInputError, match="2 nodes for 1 ranks: a node without a rank"):
        Topology.regular(num_ranks=1, num_nodes=2)
    uneven = plan(problem_of(np.ones((1, 12)), num_ranks=6, slots=3, num_nodes=4), "minmove")
    assert not uneven.placement.uncovered()
    with pytest.raises(InvalidInputError, match="8 expert groups do not divide over 3 nodes"):
        plan(problem_of(np.ones((1, 8)), num_ranks=3, slots=4, num_nodes=3, constraints=Constraints(num_groups=8)), "greedy")
    soft = Constraints(num_groups=8, group_price=2.0)
    assert not plan(
        problem_of(np.ones((1, 8)), num_ranks=3, slots=4, num_nodes=3, constraints=soft), "minmove"
    ).placement.uncovered()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_two_replicas_on_one_rank_deepseek_eplb_22(policy: str) -> None:
    stacked = Table("m", (0,), 5, tuple(RankId(rank) for rank in range(3)), np.array([[0, 2, 3, 4, 1, 1]], np.int32))
    problem = replace(problem_of([[5.0, 100, 10, 100, 100]], num_ranks=3, slots=2), current=stacked, max_imbalance=1.3)
    proposal = plan(problem, policy)
    if not np.array_equal(proposal.placement.physical_to_logical, stacked.physical_to_logical):
        assert all(len(set(rank)) == 2 for rank in proposal.placement.by_rank()[0].tolist())


def test_one_bad_layer_refuses_the_plan_and_names_the_layer_vllm_ascend_9151_vllm_23243() -> None:
    problem = problem_of(np.ones((4, 4)), num_ranks=2, slots=3)
    rows = problem.current.physical_to_logical.copy()
    rows[2] = [0, 0, 1, 2, 3, 1]
    with pytest.raises(PolicyFailedError, match="layer 2: rank position 0 holds expert 0 twice; the live placement stays"):
        verify(problem, RawPlan(physical_to_logical=rows), policy="odd", solve_s=0.0)


def test_slots_name_experts_that_exist_vllm_ascend_5311() -> None:
    current = problem_of(np.ones((1, 256)), num_ranks=16, slots=17).current
    assert int(current.physical_to_logical.max()) == 255
    assert current.by_rank()[0, 15].tolist() == [*range(255, 256), *range(16)]


def test_widths_differ_by_model_and_a_load_of_another_width_is_refused_vllm_56387() -> None:
    assert plan(problem_of(np.ones((2, 28)), num_ranks=4, slots=8), "greedy").placement.num_logical == 28
    with pytest.raises(InvalidInputError, match=r"loads must have shape \(windows, 1 layers, 8 experts\); got \(1, 1, 9\)"):
        replace(problem_of(np.ones((1, 8)), num_ranks=2, slots=5), loads=np.ones((1, 1, 9)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("loads", "num_ranks", "slots"),
    [
        ([[float(2**60), float(2**60 + 2**20), 1.0, 0.0]], 2, 3),  # counts beyond 2^53
        ([[1e300, 1e300, 1e299, 5.0]], 2, 3),
        ([[7.0] * 8], 4, 3),
        ([[0.0] * 4], 2, 3),
        ([[5.0]], 1, 1),
        ([[5.0]], 3, 2),  # more slots than one expert may fill
        ([[1.0, 2.0, 3.0]], 1, 5),
        ([[9.0, 1.0, 1.0, 1.0]], 8, 1),  # one slot a rank
        ([[9.0, 1.0]], 2, 6),  # more replicas than ranks
    ],
)
def test_odd_shapes_and_counts_are_planned(policy: str, loads: list[list[float]], num_ranks: int, slots: int) -> None:
    proposal = plan(problem_of(loads, num_ranks=num_ranks, slots=slots), policy)
    assert not proposal.placement.uncovered()
    assert np.isfinite(proposal.predicted.worst)
    assert proposal.predicted.worst <= proposal.before.worst * (1 + 1e-9)


@pytest.mark.parametrize("policy", [*POLICIES, "robust"])
def test_a_layer_in_which_everything_is_pinned_leaves_nothing_to_try(policy: str) -> None:
    for loads, num_ranks in (([[1.0]], 1), ([[3.0, 1.0]], 2)):
        problem = problem_of(loads, num_ranks=num_ranks, slots=1)
        held = enumerate(problem.current.physical_to_logical[0].tolist())
        constraints = Constraints(pinned=frozenset(ExpertOnRank(expert, rank) for rank, expert in held))
        proposal = plan(replace(problem, constraints=constraints), policy)
        assert proposal.placement == problem.current


@pytest.mark.parametrize("policy", ["greedy", "minmove", "elastic"])
def test_no_time_and_no_work_still_leave_a_legal_plan(policy: str) -> None:
    loads = np.random.default_rng(4).gamma(0.5, 100, (3, 16))
    problem = problem_of(loads, num_ranks=4, slots=5, time_limit_s=0.0, work_budget=0)
    assert not plan(problem, policy).placement.uncovered()
    lost = replace(problem, current=problem.current.with_rows({1: np.array([0] * 20)}))
    assert not plan(lost, policy).placement.uncovered()


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("nan"), float("inf")])
def test_capacities_that_mean_nothing_are_refused_with_what_to_do(capacity: float) -> None:
    with pytest.raises(
        InvalidInputError, match=r"capacities must be finite and > 0; .* declare a rank that serves nothing dead"
    ):
        Topology((RankId(0), RankId(1)), ("a", "a"), (1.0, capacity))


def test_a_layer_too_large_for_the_exact_model_keeps_a_heuristic_plan() -> None:
    loads = np.random.default_rng(0).lognormal(0, 1, (1, 512)) * 1000
    proposal = plan(problem_of(loads, num_ranks=64, slots=12, work_budget=100), "ilp")
    assert not proposal.placement.uncovered()
    assert proposal.predicted.worst <= proposal.before.worst


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": np.full((1, 1, 4), 1e308)}, r"at most 1e\+300 of an expert; window 0 layer 0 expert 0 has 1e\+308"),
        (
            {"topology": Topology((RankId(0), RankId(1)), ("a", "a"), (1.0, 1e-308))},
            "rank 1 has capacity 1e-308",
        ),
        ({"topology": Topology((RankId(0), RankId(1)), ("a", "a"), base_load=(0.0, 1e300))}, "rank 1 has a base load of 1e"),
        ({"expert_bytes": (10**23,)}, "an expert of layer 0 has 1000+ bytes; sizes run from 0 to"),
        ({"expert_bytes": (-1,)}, "an expert of layer 0 has -1 bytes"),
    ],
)
def test_numbers_that_arithmetic_cannot_hold_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(problem_of(np.ones((1, 4)), num_ranks=2, slots=3), **change)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("policy", POLICIES)
def test_loads_that_were_averaged_away_count_as_none_and_the_largest_are_planned(policy: str) -> None:
    gone = plan(problem_of([[5e-324, 1e-300, 0.0, 1e-291], [3.0, 5.0, 1.0, 5e-324]], num_ranks=2, slots=3), policy)
    assert gone.predicted.per_layer[0] == gone.lower_bound.per_layer[0] == 1.0
    large = plan(problem_of(np.array([[1.0, 0.25, 0.5, 0.125]]) * 1e300, num_ranks=2, slots=3), policy)
    assert large.predicted.worst == pytest.approx(
        plan(problem_of(np.array([[8.0, 2.0, 4.0, 1.0]]), num_ranks=2, slots=3), policy).predicted.worst
    )
