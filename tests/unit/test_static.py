"""Going to a placement that is given: exactly, in parts where moves are limited, not at all where it breaks a constraint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, Proposal
from eplb_service.policy.static import StaticPolicy
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology

TOPOLOGY = Topology.regular(num_ranks=3)
LIVE = [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0]]
WANTED = [[4, 3, 2, 1, 0, 2], [0, 1, 2, 3, 4, 0], [0, 2, 1, 3, 4, 0]]
LOADS = np.array([[[1.0, 9, 2, 3, 4], [5, 5, 5, 5, 5], [1, 90, 8, 1, 1]]])


def table(rows: npt.ArrayLike, shares: npt.NDArray[np.float32] | None = None) -> Table:
    return Table("m", (2, 3, 8), 5, TOPOLOGY.rank_ids, np.array(rows, np.int32), shares)


def problem_of(**changes: Any) -> PlanningProblem:
    known: dict[str, Any] = {"current": table(LIVE), "wanted": table(WANTED), "topology": TOPOLOGY, "loads": LOADS}
    return PlanningProblem(**{**known, **changes})


def plan(problem: PlanningProblem) -> Proposal:
    return verify(problem, StaticPolicy().plan(problem), policy="static", solve_s=0.0)


def test_goes_to_the_wanted_rows_slot_by_slot() -> None:
    proposal = plan(problem_of())
    assert proposal.placement == table(WANTED)
    assert proposal.status == "reached"


def test_refuses_without_a_wanted_placement_and_says_what_to_do() -> None:
    with pytest.raises(InvalidInputError, match=r"none is: name one \(`eplb plan --to FILE`"):
        plan(problem_of(wanted=None))


def test_worst_balanced_layers_come_first_when_few_layers_may_change() -> None:
    proposal = plan(problem_of(constraints=Constraints(max_layers=1)))
    assert proposal.placement.physical_to_logical.tolist() == [LIVE[0], LIVE[1], WANTED[2]]
    assert proposal.status == "partial"


def test_a_layer_that_does_not_fit_gets_its_hottest_new_residencies_and_arrives_over_several_plans() -> None:
    constraints = Constraints(max_moves_per_layer=2)
    current, seen = table(LIVE), []
    for _ in range(6):
        proposal = plan(problem_of(current=current, constraints=constraints))
        assert not proposal.placement.uncovered()
        seen.append(proposal.moves.experts)
        current = proposal.placement
        if proposal.status == "reached":
            break
    assert current == table(WANTED)
    assert len(seen) > 1
    assert sum(seen) >= plan(problem_of()).moves.experts


def test_layers_that_cannot_stay_are_mended_first_whatever_else_is_wanted() -> None:
    lost = [[0, 1, 2, 3, 0, 1], *LIVE[1:]]  # expert 4 of the first layer has no slot
    proposal = plan(problem_of(current=table(lost), constraints=Constraints(max_moves=1)))
    assert not proposal.placement.uncovered()
    assert proposal.moves.experts == 1
    with pytest.raises(InvalidInputError, match=r"1 moves are needed for 1 experts .* but at most 0 are allowed"):
        plan(problem_of(current=table(lost), constraints=Constraints(max_moves=0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constraints": Constraints(barred=frozenset({ExpertOnRank(4, 0, 2)}))}, "layer 2: rank position 0 holds expert 4"),
        (
            {"constraints": Constraints(pinned=frozenset({ExpertOnRank(3, 2)}))},
            "layer 2: expert 3 is pinned to rank position 2",
        ),
        ({"wanted": table([[0, 1, 2, 3, 0, 1], *WANTED[1:]])}, "layer 2: expert 4 has no slot"),
        (
            {"topology": replace(TOPOLOGY, dead=frozenset({RankId(1)})), "current": table([[0, 1, 3, 3, 4, 2]] * 3)},
            "5 experts do not fit 4 usable slots",
        ),
    ],
)
def test_a_wanted_placement_that_breaks_a_constraint_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        plan(problem_of(**changes))


def test_a_wanted_placement_on_dead_ranks_points_to_the_elastic_policy() -> None:
    topology = Topology.regular(num_ranks=4)
    rows = np.array([[0, 1, 2, 3, 4, 0, 1, 2]], np.int32)
    whole = Table("m", (2,), 5, topology.rank_ids, rows)
    problem = PlanningProblem(
        loads=LOADS[:, :1], topology=replace(topology, dead=frozenset({RankId(3)})), current=whole, wanted=whole
    )
    with pytest.raises(InvalidInputError, match=r"ranks \[3\] are dead: policy 'elastic' plans without them"):
        plan(problem)


def test_wanted_of_another_shape_is_refused_before_any_policy() -> None:
    with pytest.raises(InvalidInputError, match="the wanted placement is for 3 layers x 3 slots"):
        problem_of(wanted=Table("m", (2, 3, 8), 3, TOPOLOGY.rank_ids, np.array([[0, 1, 2]] * 3, np.int32)))


def test_shares_that_come_with_the_wanted_rows_are_kept_and_others_are_found() -> None:
    given = np.zeros((3, 6), np.float32)
    for layer, row in enumerate(WANTED):
        for expert in range(5):
            slots = [slot for slot, held in enumerate(row) if held == expert]
            given[layer, slots] = [0.75, 0.25] if len(slots) == 2 else [1.0]
    weighted = problem_of(wanted=table(WANTED, given), dispatch=Dispatch.WEIGHTED)
    reached = plan(weighted).placement.shares
    assert reached is not None
    assert np.array_equal(reached, given)
    one = plan(replace(weighted, constraints=Constraints(max_layers=1)))
    assert one.placement.shares is not None
    assert np.array_equal(one.placement.shares[2], given[2])
    assert one.placement.shares[0].tolist() == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5]
    found = plan(problem_of(dispatch=Dispatch.WEIGHTED))
    assert found.placement.shares is not None
    assert found.predicted.mean <= plan(weighted).predicted.mean + 1e-6
