from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError, NotFoundError, PolicyFailedError
from eplb_service.ids import RankId
from eplb_service.offline.placement_file import Expectation, read_placement
from eplb_service.offline.plan import plan_offline
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem, RawPlan

LOADS = np.random.default_rng(2).gamma(0.5, 100, (3, 4, 10))


def test_output_has_the_documented_keys_and_plain_values() -> None:
    plan = plan_offline(LOADS, num_ranks=4, num_nodes=2, slots_per_rank=3, expert_bytes=100)
    output: Any = json.loads(json.dumps(plan.to_json()))
    rows: npt.NDArray[np.int64] = np.array(output["physical_to_logical"])
    assert rows.shape == (4, 12)
    assert set(output["imbalance"]) == {"mean", "worst", "per_layer"}
    assert output["imbalance"]["mean"] == pytest.approx(np.mean(output["imbalance"]["per_layer"]))
    assert 1 <= output["lower_bound"]["worst"] <= output["imbalance"]["worst"] <= output["imbalance_before"]["worst"]
    assert output["moves"]["experts"] * 100 == output["moves"]["move_bytes"]
    assert (output["policy"], output["moves_against"], output["dispatch"]) == ("greedy", "linear", "even")
    assert output["solve_s"] > 0


def test_output_is_read_back_as_the_current_placement_and_then_nothing_moves_vllm_24069(tmp_path: Path) -> None:
    first = plan_offline(LOADS, num_ranks=4, slots_per_rank=3)
    (tmp_path / "plan.json").write_text(json.dumps(first.to_json()))
    expected = Expectation(model="x", num_layers=4, num_logical=10, rank_ids=tuple(RankId(rank) for rank in range(4)))
    current = read_placement(tmp_path / "plan.json", expected)
    again = plan_offline(LOADS, num_ranks=4, slots_per_rank=3, current=current)
    assert again.moves_against == "current"
    assert again.proposal.moves.experts == again.proposal.moves.slots_rewritten == 0


def test_absolute_layer_ids_of_the_current_placement_are_kept() -> None:
    current = Table.linear(model="v3", layer_ids=(3, 4, 5, 61), num_logical=10, rank_ids=range(4), slots_per_rank=3)
    plan = plan_offline(LOADS, num_ranks=4, slots_per_rank=3, current=current)
    assert plan.proposal.placement.layer_ids == (3, 4, 5, 61)
    assert plan.proposal.placement.model == "v3"


def test_dispatch_of_the_engine_is_what_is_predicted() -> None:
    even = plan_offline(LOADS, num_ranks=4, num_nodes=2, slots_per_rank=4)
    nearest = plan_offline(LOADS, num_ranks=4, num_nodes=2, slots_per_rank=4, dispatch=Dispatch.NEAREST)
    assert even.proposal.predicted != nearest.proposal.predicted
    assert nearest.proposal.lower_bound.worst == 1.0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"slots_per_rank": 2},
            InvalidInputError,
            "10 experts do not fit 4 ranks x 2 slots = 8; use at least 3 slots per rank",
        ),
        ({"slots_per_rank": 0}, InvalidInputError, "at least 1; got 0"),
        ({"num_ranks": 0}, InvalidInputError, "at least 1; got ranks=0"),
        ({"num_nodes": 5}, InvalidInputError, "5 nodes for 4 ranks"),
        ({"num_groups": 3}, InvalidInputError, "10 experts do not divide into 3 groups"),
        ({"num_groups": 5, "num_nodes": 2}, InvalidInputError, "5 expert groups do not divide over 2 nodes"),
        ({"policy": "nope"}, NotFoundError, "known policies: "),
        ({"loads": LOADS[0]}, InvalidInputError, r"got \(4, 10\)"),
        ({"loads": LOADS * np.nan}, InvalidInputError, "finite"),
        ({"max_moves": -1}, InvalidInputError, "at least 0; got -1"),
        (
            {"current": Table.linear(model="m", layer_ids=(0,), num_logical=10, rank_ids=range(4), slots_per_rank=3)},
            InvalidInputError,
            "for 1 layers x 12 slots of 10 experts on 4 ranks; the plan is for 4 x 12",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_numbers(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"loads": LOADS, "num_ranks": 4, "slots_per_rank": 3, **changes}
    loads = arguments.pop("loads")
    with pytest.raises(error, match=message):
        plan_offline(loads, **arguments)


def test_policy_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises:
        def plan(self, problem: PlanningProblem) -> RawPlan:
            raise ZeroDivisionError(f"{problem.current.num_layers} layers")

    monkeypatch.setattr("eplb_service.offline.plan.load_policy", lambda _: Raises())
    with pytest.raises(PolicyFailedError, match="policy 'plug-in' raised ZeroDivisionError: 2 layers"):
        plan_offline(LOADS, num_ranks=4, slots_per_rank=3, policy="plug-in")


def test_experts_that_ranks_do_not_divide_are_planned_vllm_52435() -> None:
    plan = plan_offline(LOADS, num_ranks=3, slots_per_rank=4)
    assert not plan.proposal.placement.uncovered()
