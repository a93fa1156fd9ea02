from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError, NotFoundError, PolicyFailedError
from eplb_service.formats.placement_rows import Expectation
from eplb_service.formats.placements import PlacementPath, read_placement
from eplb_service.ids import RankId
from eplb_service.offline.facts import facts_of, why_it_stopped
from eplb_service.offline.plan import OfflinePlan, default_policy, fleet_topology, plan_offline, starting_table
from eplb_service.offline.plan_document import plan_document
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, RawPlan, Resilience

LOADS = np.random.default_rng(2).gamma(0.5, 100, (3, 4, 10))


def problem_for(
    loads: npt.NDArray[np.float64] = LOADS,
    *,
    num_ranks: int = 4,
    slots_per_rank: int = 3,
    nodes: int | tuple[str, ...] = 1,
    current: Table | None = None,
    expert_bytes: int = 0,
    **asked: Any,
) -> PlanningProblem:
    topology = fleet_topology(num_ranks=num_ranks, nodes=nodes)
    _, num_layers, num_logical = loads.shape
    table = starting_table(
        num_layers=num_layers, num_logical=num_logical, topology=topology, slots_per_rank=slots_per_rank, current=current
    )
    return PlanningProblem(
        loads=loads, topology=topology, current=table, expert_bytes=(expert_bytes,) * num_layers, time_limit_s=60.0, **asked
    )


def planned(**asked: Any) -> OfflinePlan:
    return plan_offline(problem_for(**asked), policy="greedy")


def test_output_has_the_documented_keys_and_plain_values() -> None:
    plan = planned(nodes=2, expert_bytes=100)
    output: Any = json.loads(json.dumps(plan_document(plan)))
    rows: npt.NDArray[np.int64] = np.array(output["physical_to_logical"])
    assert rows.shape == (4, 12)
    for key in ("imbalance", "imbalance_before", "lower_bound"):
        assert set(output[key]) == {"mean", "worst", "per_layer"}
    assert output["imbalance"]["mean"] == pytest.approx(np.mean(output["imbalance"]["per_layer"]))
    assert 1 <= output["lower_bound"]["worst"] <= output["imbalance"]["worst"] <= output["imbalance_before"]["worst"]
    assert output["moves"]["experts"] * 100 == output["moves"]["move_bytes"]
    assert sum(output["moves"]["per_layer"]) == sum(output["moves"]["per_rank"]) == output["moves"]["experts"]
    assert (output["policy"], output["moves_against"], output["dispatch"]) == ("greedy", "current", "even")
    assert (output["target"], output["limits"], output["resilience_cost"], output["front"]) == (None, [], None, [])
    assert output["redundancy"] == {"experts_per_layer": 2, "bytes_per_rank": 4 * 2 * 100 // 4}
    assert output["staging"] == {"least_bytes_per_rank": 3 * 100, "sending_bytes_per_rank": 2 * 100}
    assert plan_document(planned(nodes=2))["staging"] is None
    assert sum(output["tokens_by_link"]["planned"].values()) == pytest.approx(LOADS.sum())
    assert output["solve_s"] > 0


def test_output_is_read_back_as_the_current_placement_and_then_nothing_moves_vllm_24069(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(planned())))
    expected = Expectation(model="x", num_layers=4, num_logical=10, rank_ids=tuple(RankId(rank) for rank in range(4)))
    again = planned(current=read_placement(PlacementPath(tmp_path / "plan.json"), expected).table)
    assert again.proposal.moves.experts == again.proposal.moves.slots_rewritten == 0


def test_absolute_layer_ids_of_the_current_placement_are_kept() -> None:
    current = Table.linear(model="v3", layer_ids=(3, 4, 5, 61), num_logical=10, rank_ids=range(4), slots_per_rank=3)
    plan = planned(current=current)
    assert plan.proposal.placement.layer_ids == (3, 4, 5, 61)
    assert plan.proposal.placement.model == "v3"


def test_dispatch_of_the_engine_is_what_is_predicted() -> None:
    even = planned(nodes=2, slots_per_rank=4)
    nearest = planned(nodes=2, slots_per_rank=4, dispatch=Dispatch.NEAREST)
    assert even.proposal.predicted != nearest.proposal.predicted


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"slots_per_rank": 2}, InvalidInputError, "do not fit 4 ranks x 2 slots = 8; use at least 3 slots per rank"),
        ({"slots_per_rank": 0}, InvalidInputError, "at least 1; got 0"),
        ({"num_ranks": 0}, InvalidInputError, "at least 1; got ranks=0"),
        ({"nodes": 5}, InvalidInputError, "5 nodes for 4 ranks"),
        ({"nodes": ("a", "b")}, InvalidInputError, "4 ranks but 2 node names"),
        ({"constraints": Constraints(num_groups=3)}, InvalidInputError, "10 experts do not divide into 3 groups"),
        (
            {"constraints": Constraints(num_groups=5), "nodes": 2},
            InvalidInputError,
            "5 expert groups do not divide over 2 nodes",
        ),
        ({"loads": LOADS * np.nan}, InvalidInputError, "finite"),
        ({"constraints": Constraints(max_moves=-1)}, InvalidInputError, "at least 0; got -1"),
        (
            {"current": Table.linear(model="m", layer_ids=(0,), num_logical=10, rank_ids=range(4), slots_per_rank=3)},
            InvalidInputError,
            "for 1 layers x 12 slots of 10 experts on 4 ranks; the plan is for 4 x 12",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_numbers(
    asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planned(**asked)


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="known policies: "):
        plan_offline(problem_for(), policy="nope")


def test_policy_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises:
        def plan(self, problem: PlanningProblem) -> RawPlan:
            raise ZeroDivisionError(f"{problem.current.num_layers} layers")

    monkeypatch.setattr("eplb_service.offline.plan.load_policy", lambda _: Raises())
    with pytest.raises(PolicyFailedError, match="policy 'plug-in' raised ZeroDivisionError: 2 layers"):
        plan_offline(problem_for(), policy="plug-in")


def test_experts_that_ranks_do_not_divide_are_planned_vllm_52435() -> None:
    assert not planned(num_ranks=3, slots_per_rank=4).proposal.placement.uncovered()


def test_policy_that_is_used_when_none_is_named() -> None:
    problem = problem_for()
    assert default_policy(problem) in ("minmove", "greedy")
    assert default_policy(problem_for(from_nothing=True, max_imbalance=1.1)) == "greedy"
    assert default_policy(problem_for(from_nothing=True, dispatch=Dispatch.NEAREST)) == default_policy(problem)
    assert default_policy(problem_for(wanted=problem.current)) == "static"


def test_target_limits_and_what_stopped_are_told() -> None:
    met = planned(slots_per_rank=6, max_imbalance=1.5)
    facts = facts_of(met.problem, met.proposal)
    assert facts.layers_over == ()
    assert why_it_stopped(met.problem, met.proposal, facts).code == "target_met"
    tight = planned(max_imbalance=1.0, constraints=Constraints(max_moves=0))
    facts = facts_of(tight.problem, tight.proposal)
    assert facts.layers_over == (0, 1, 2, 3)
    assert [(limit.name, limit.used, limit.most) for limit in facts.reached] == [("max_moves", 0, 0)]
    stop = why_it_stopped(tight.problem, tight.proposal, facts)
    assert (stop.code, stop.reason) == ("limit", "limited by --max-moves")


def test_limits_name_the_rank_and_the_layer_that_used_most() -> None:
    plan = planned(constraints=Constraints(max_moves=1000, max_layers=4, max_move_bytes=10**9), expert_bytes=7)
    facts = facts_of(plan.problem, plan.proposal)
    used = {limit.name: limit.used for limit in facts.limits}
    assert used == {
        "max_moves": plan.proposal.moves.experts,
        "max_layers": plan.proposal.moves.layers,
        "max_move_bytes": plan.proposal.moves.experts * 7,
    }
    assert [limit.name for limit in facts.reached] == (["max_layers"] if plan.proposal.moves.layers == 4 else [])


def test_limit_of_bytes_is_reached_where_not_one_more_expert_fits() -> None:
    plan = planned(constraints=Constraints(max_move_bytes=3 * 7 + 6), expert_bytes=7)
    facts = facts_of(plan.problem, plan.proposal)
    assert [limit.is_reached for limit in facts.limits] == [plan.proposal.moves.experts == 3]
    assert plan.proposal.moves.experts <= 3


def test_cost_of_resilience_is_against_the_same_plan_without_it() -> None:
    plan = planned(nodes=2, slots_per_rank=5, constraints=Constraints(resilience=Resilience()))
    assert plan.unprotected is not None
    cost: Any = plan_document(plan)["resilience_cost"]
    assert cost["moves"] == plan.proposal.moves.experts - plan.unprotected.moves.experts
    assert cost["imbalance_worst"] == pytest.approx(plan.proposal.predicted.worst - plan.unprotected.predicted.worst)


def test_replicas_off_their_groups_node_are_told_of_soft_groups_only() -> None:
    soft = planned(loads=LOADS[:, :, :8], nodes=2, constraints=Constraints(num_groups=4, group_price=0.5))
    facts = facts_of(soft.problem, soft.proposal)
    assert len(facts.off_node) == 4
    assert soft.proposal.costs is not None
    assert np.mean(facts.off_node) == soft.proposal.costs.off_node
    strict = planned(loads=LOADS[:, :, :8], nodes=2, constraints=Constraints(num_groups=4))
    assert facts_of(strict.problem, strict.proposal).off_node == ()


def test_what_was_asked_stands_in_the_document() -> None:
    pins = frozenset({ExpertOnRank(3, 1), ExpertOnRank(2, 0, 3)})
    problem = problem_for(constraints=Constraints(pinned=pins, unusable_slots=frozenset({(3, 2)})), seed=4)
    asked: Any = plan_document(plan_offline(problem, policy="greedy"))["asked"]
    assert asked["pins"] == ["2@0/3", "3@1"]
    assert (asked["unusable_slots"], asked["seed"], asked["source_loads"]) == (["3:2"], 4, "uniform")
