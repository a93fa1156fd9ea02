from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError, PolicyFailedError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem, Proposal, RawPlan
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.limits import limits_of
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology
from tests.unit.constraint_oracle import is_acceptable, is_clean, promises_broken, tiny_problems

RANKS = tuple(RankId(rank) for rank in (7, 3))
CURRENT = Table("m", (3, 9), 3, RANKS, np.array([[0, 1, 2, 0], [0, 1, 2, 0]], np.int32))
LOADS = np.array([[[30.0, 20, 10], [10, 10, 10]]])
NEW = [[0, 2, 1, 0], [0, 1, 2, 1]]


def problem_with(**changes: Any) -> PlanningProblem:
    constraints = changes.pop("constraints", Constraints())
    topology = changes.pop("topology", Topology(RANKS, ("a", "b")))
    return PlanningProblem(
        loads=LOADS, topology=topology, current=CURRENT, constraints=constraints, expert_bytes=(5, 6), **changes
    )


def check(raw: object, problem: PlanningProblem | None = None) -> Proposal:
    return verify(problem or problem_with(), raw, policy="p", solve_s=0.5)


def of(rows: npt.ArrayLike, **claims: Any) -> RawPlan:
    return RawPlan(physical_to_logical=np.array(rows), **claims)


def test_proposal_is_computed_not_believed() -> None:
    proposal = check(of(NEW, status="feasible", lower_bound=(1.0, 1.0)))
    assert proposal.predicted.per_layer == pytest.approx((35 / 30, 15 / 15))
    assert proposal.before.per_layer == pytest.approx((35 / 30, 15 / 15))
    assert (proposal.moves.experts, proposal.moves.move_bytes) == (3, 16)
    assert (proposal.policy, proposal.status, proposal.solve_s, proposal.cut_off) == ("p", "feasible", 0.5, False)
    assert proposal.placement.layer_ids == (3, 9)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (42, "a int instead of a RawPlan"),
        (RawPlan(physical_to_logical=[[0]]), "a list instead of an array"),  # type: ignore[arg-type]
        (of(np.array(NEW) * 1.0), "float64; expert ids are integers"),
        (of(np.array([[0, np.nan, 1, 0], [0, 1, 2, 1]])), "holds NaN"),
        (of(np.array(NEW, object)), "object"),
        (of([NEW[0]]), r"shape \(1, 4\); expected 2 layers x 4 slots"),
        (of([NEW[0], [0, 1, 2, 3]]), "layer 9 slot 3 holds expert 3; ids run from 0 to 2"),
        (of([NEW[0], [0, 1, 2, -2]]), "layer 9 slot 3 holds expert -2"),
        (of([[0, 1, 1, 0], NEW[1]]), "layer 3: expert 2 has no slot"),
        (of([NEW[0], [0, 0, 1, 2]]), "layer 9: rank position 0 holds expert 0 twice"),
        (of(NEW, status=7), "status 7"),
        (of(NEW, cut_off="no"), "cut_off 'no'"),
        (of(NEW, lower_bound=(1.0,)), "1 lower bounds for 2 layers"),
        (of(NEW, lower_bound=(1.5, 1.0)), "layer 3: claims that no placement is below 1.5, its own plan has 1.1666"),
        (of(NEW, lower_bound=(float("nan"), 1.0)), "layer 3: claims that no placement is below nan"),
        (of(NEW, lower_bound=(10**400, 1.0)), "layer 3: claims that no placement is below 1000"),
    ],
)
def test_nonsense_is_refused_with_layer_slot_and_numbers_vllm_23243(raw: object, message: str) -> None:
    with pytest.raises(PolicyFailedError, match=message):
        check(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": Topology(RANKS, ("a", "b"), None, frozenset({RankId(3)}))}, "3 experts do not fit 2 usable slots"),
        ({"constraints": Constraints(unusable_slots=frozenset({(3, 1)}))}, "layer 3: rank position 1 slot 1 holds expert 0"),
        ({"constraints": Constraints(max_replicas=1)}, "layer 3: expert 0 has 2 replicas; at most 1"),
        ({"constraints": Constraints(max_moves=2)}, "3 moves; at most 2 are allowed"),
    ],
)
def test_constraints_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((PolicyFailedError, InvalidInputError), match=message):
        check(of(NEW), problem_with(**changes))


def test_dead_rank_is_refused_by_layer_and_slot() -> None:
    topology = Topology((*RANKS, RankId(5)), ("a", "b", "b"), None, frozenset({RankId(5)}))
    current = Table("m", (3,), 3, topology.rank_ids, np.array([[0, 1, 2, 0, 1, 2]], np.int32))
    problem = PlanningProblem(loads=LOADS[:, :1], topology=topology, current=current)
    with pytest.raises(PolicyFailedError, match="layer 3: rank position 2 slot 0 holds expert 1 but is dead"):
        check(of([[0, 1, 2, 0, 1, -1]]), problem)
    assert check(of([[0, 1, 2, 0, -1, -1]]), problem).moves.experts == 0


def test_unchanged_row_may_keep_the_duplicates_it_has() -> None:
    stacked = CURRENT.with_rows({3: np.array([0, 0, 1, 2])})
    problem = replace(problem_with(), current=stacked)
    assert check(of([[0, 0, 1, 2], NEW[1]]), problem).placement.row(3).tolist() == [0, 0, 1, 2]
    with pytest.raises(PolicyFailedError, match="twice"):
        check(of([[1, 1, 0, 2], NEW[1]]), problem)


def test_groups_spread_over_nodes_are_refused() -> None:
    current = Table("m", (0,), 4, RANKS, np.array([[0, 1, 2, 3]], np.int32))
    problem = PlanningProblem(
        loads=np.ones((1, 1, 4)), topology=Topology(RANKS, ("a", "b")), current=current, constraints=Constraints(num_groups=2)
    )
    assert check(of([[2, 3, 0, 1]]), problem).moves.experts == 4
    with pytest.raises(PolicyFailedError, match="expert group 0 of 2 is spread"):
        check(of([[0, 2, 1, 3]]), problem)


def test_moves_are_not_limited_when_starting_from_nothing() -> None:
    assert check(of(NEW), problem_with(constraints=Constraints(max_moves=0), from_nothing=True)).moves.experts == 3


def test_bound_by_the_hottest_copy_holds_under_every_dispatch() -> None:
    loads = np.array([[[100.0, 1, 1], [1, 1, 1]]])
    even = replace(problem_with(), loads=loads)
    assert imbalance_bounds(even)[0] == 1.0
    three = replace(even, constraints=Constraints(max_replicas=1))
    assert imbalance_bounds(three)[0] == pytest.approx(100 / 51)
    assert imbalance_bounds(replace(three, dispatch=Dispatch.NEAREST))[0] == pytest.approx(100 / 51)


@settings(max_examples=250, deadline=None)
@given(tiny_problems(), st.data())
def test_accepts_what_a_reader_of_slots_accepts_and_nothing_else(problem: PlanningProblem, data: st.DataObject) -> None:
    try:
        limits_of(problem)
    except InvalidInputError:
        return
    expert = st.integers(-1, problem.current.num_logical - 1)
    rows = problem.current.physical_to_logical.tolist()
    if data.draw(st.booleans()):
        rows = data.draw(st.lists(st.permutations(rows[0]), min_size=len(rows), max_size=len(rows)))
    for _ in range(data.draw(st.integers(0, 4))):
        row, slot = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
        rows[row][slot] = data.draw(expert)
    try:
        proposal = check(of(rows), problem)
    except PolicyFailedError:
        assert not is_clean(rows, problem)
    else:
        assert is_acceptable(rows, problem)
        assert (proposal.costs is not None and proposal.costs.num_kept_faults > 0) == any(
            promises_broken(row, layer, problem) for layer, row in enumerate(rows)
        )


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (Constraints(max_move_bytes=15), "16 bytes to move; at most 15 are allowed"),
        (Constraints(max_layers=1), "2 layers change; at most 1 may"),
        (Constraints(max_moves_per_layer=1), "layer 3: 2 moves; at most 1 are allowed"),
        (Constraints(max_moves_per_rank=1), "rank 7 takes in 2 experts|rank 3 takes in 2 experts"),
    ],
)
def test_every_limit_on_moves_is_checked(constraints: Constraints, message: str) -> None:
    with pytest.raises(PolicyFailedError, match=message):
        check(of(NEW), problem_with(constraints=constraints))


def test_front_holds_the_plan_and_keeping_what_is_there_by_ascending_moves_without_dominated_points() -> None:
    one_layer = np.array([CURRENT.physical_to_logical[0], NEW[1]], np.int32)
    worse = np.array([[1, 2, 0, 1], [0, 1, 2, 1]], np.int32)
    raw = of(NEW, front=(one_layer, worse, np.array(NEW)))
    proposal = check(raw, problem_with(front=True))
    moves = [point.moves.experts for point in proposal.front]
    assert moves == sorted(moves)
    assert proposal.front[0].placement == CURRENT
    assert any(point.placement == proposal.placement for point in proposal.front)
    assert not any(np.array_equal(point.placement.physical_to_logical, worse) for point in proposal.front)
    assert check(raw).front == ()


def test_points_of_a_front_are_checked_like_the_plan() -> None:
    bad = np.array([[0, 0, 1, 2], NEW[1]], np.int32)
    with pytest.raises(PolicyFailedError, match="layer 3: rank position 0 holds expert 0 twice"):
        check(of(NEW, front=(bad,)), problem_with(front=True))


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ((1,), "1 lower bounds on moves for 2 layers"),
        ((-1, 0), "layer 3: claims at least -1 moves"),
        ((0.5, 0), "layer 3: claims at least 0.5 moves"),
        ((True, 0), "layer 3: claims at least True moves"),
        ((9, 0), "layer 3: claims that no placement within 2.0 takes fewer than 9 moves, its own has"),
    ],
)
def test_claims_on_moves_that_the_plan_refutes_are_refused(claims: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PolicyFailedError, match=message):
        check(of(NEW, moves_lower_bound=claims), problem_with(max_imbalance=2.0))


def test_claims_on_moves_add_up_and_mean_nothing_without_a_target() -> None:
    assert check(of(NEW, moves_lower_bound=(1, 1)), problem_with(max_imbalance=1.0)).moves_lower_bound == 2
    assert check(of(NEW, moves_lower_bound=(1, 1))).moves_lower_bound is None


def test_shares_are_for_weighted_engines_and_must_add_up() -> None:
    shares = np.array([[0.5, 1, 1, 0.5], [1, 0.5, 1, 0.5]], np.float32)
    with pytest.raises(PolicyFailedError, match="shares for an engine that dispatches by even"):
        check(of(NEW, shares=shares))
    assert check(of(NEW, shares=shares), problem_with(dispatch=Dispatch.WEIGHTED)).placement.shares is not None
    with pytest.raises(PolicyFailedError, match="add up to"):
        check(of(NEW, shares=shares * np.float32(0.5)), problem_with(dispatch=Dispatch.WEIGHTED))


def test_soft_groups_are_counted_not_refused() -> None:
    current = Table("m", (0,), 4, RANKS, np.array([[0, 1, 2, 3]], np.int32))
    problem = PlanningProblem(
        loads=np.ones((1, 1, 4)),
        topology=Topology(RANKS, ("a", "b")),
        current=current,
        constraints=Constraints(num_groups=2, group_price=3.0),
    )
    costs = check(of([[0, 2, 1, 3]]), problem).costs
    assert costs is not None
    assert costs.off_node == 2.0


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("constraints", [Constraints(), Constraints(max_replicas=1), Constraints(num_groups=2)])
def test_no_bound_is_above_a_live_row_that_may_stay_whatever_rule_for_new_rows_it_breaks(
    dispatch: Dispatch, constraints: Constraints
) -> None:
    topology = Topology.regular(num_ranks=2, num_nodes=2)
    faulty = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], np.int32)  # twice on a rank; both groups on both nodes
    table = Table("m", (0, 1), 2, topology.rank_ids, faulty)
    problem = PlanningProblem(
        loads=np.array([[[3.0, 3.0], [9.0, 1.0]]]), topology=topology, current=table, dispatch=dispatch, constraints=constraints
    )
    legal = np.array([[0, -1, 1, -1], [0, -1, 1, -1]], np.int32)
    stays = verify(problem, RawPlan(physical_to_logical=faulty), policy="x", solve_s=0.0)
    goes = verify(problem, RawPlan(physical_to_logical=legal), policy="x", solve_s=0.0)
    claims = verify(problem, RawPlan(physical_to_logical=legal, lower_bound=(1.0, 1.8)), policy="x", solve_s=0.0)
    for proposal in (stays, goes, claims):
        pairs = zip(proposal.lower_bound.per_layer, stays.predicted.per_layer, strict=True)
        assert all(low <= reached * (1 + 1e-12) for low, reached in pairs)
