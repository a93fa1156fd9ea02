"""Ranks that die, leave or join: what a planner carries over, what it places again, and what it can no longer keep."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Proposal, Resilience
from eplb_service.policy.registry import load_policy
from eplb_service.policy.survivors import met_by_survivors, onto_ranks
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy
from eplb_service.topology import Topology

WORK = 60_000


def ranks(*ids: int) -> tuple[RankId, ...]:
    return tuple(RankId(rank) for rank in ids)


def linear(num_logical: int, num_ranks: int, slots: int, *, num_layers: int = 1) -> Table:
    return Table.linear(
        model="m", layer_ids=range(num_layers), num_logical=num_logical, rank_ids=ranks(*range(num_ranks)), slots_per_rank=slots
    )


def plan(
    current: Table, topology: Topology, loads: np.ndarray | None = None, policy: str = "elastic", **changes: Any
) -> Proposal:
    given = np.ones((1, current.num_layers, current.num_logical)) if loads is None else loads
    problem = PlanningProblem(loads=given, topology=topology, current=current, work_budget=WORK, **changes)
    return verify(problem, run_policy(load_policy(policy), problem), policy=policy, solve_s=0.0)


def orphans(table: Table, topology: Topology) -> int:
    """Experts of all layers that no rank that serves holds."""
    alive = [position for position, rank in enumerate(topology.rank_ids) if rank not in topology.dead]
    return sum(table.num_logical - len(set(row[alive].reshape(-1).tolist()) - {-1}) for row in table.by_rank())


def test_experts_whose_only_replica_was_on_the_dead_rank_need_slots_elsewhere_vllm_41204_vllm_46370() -> None:
    topology = replace(Topology.regular(num_ranks=4), dead=frozenset(ranks(1)))
    with pytest.raises(InvalidInputError, match=r"8 experts do not fit 6 usable slots .*1 ranks dead.* at least 3 slots"):
        plan(linear(8, 4, 2), topology)
    proposal = plan(linear(8, 4, 3), topology)
    assert not proposal.placement.uncovered()
    assert (proposal.placement.by_rank()[:, 1] == -1).all()
    assert proposal.moves.experts == orphans(linear(8, 4, 3), topology)


@pytest.mark.parametrize("dead", range(8))
def test_every_orphan_is_placed_again_with_no_more_moves_than_orphans_when_balance_is_not_asked_for(dead: int) -> None:
    current = linear(64, 8, 10, num_layers=3)
    topology = replace(Topology.regular(num_ranks=8, num_nodes=2), dead=frozenset(ranks(dead)))
    loads = np.random.default_rng(dead).gamma(0.7, 100, (1, 3, 64))
    proposal = plan(current, topology, loads, max_imbalance=8.0)
    assert not proposal.placement.uncovered()
    assert proposal.moves.experts == orphans(current, topology)
    few = Constraints(max_moves=orphans(current, topology))
    assert not plan(current, topology, loads, constraints=few).placement.uncovered()


def test_balance_after_a_loss_is_within_the_target_and_most_experts_stay() -> None:
    current = linear(64, 8, 10, num_layers=2)
    topology = replace(Topology.regular(num_ranks=8), dead=frozenset(ranks(3)))
    loads = np.random.default_rng(5).gamma(2.0, 100, (1, 2, 64))
    proposal = plan(current, topology, loads, max_imbalance=1.08)
    assert proposal.predicted.worst <= 1.08
    kept = (proposal.placement.physical_to_logical == current.physical_to_logical) & (current.physical_to_logical >= 0)
    assert kept.sum() >= 0.6 * 2 * 70


def test_the_death_of_the_first_rank_is_like_any_other_and_ids_stay_vllm_38862() -> None:
    current = linear(6, 4, 3)
    topology = Topology(ranks(0, 1, 2, 3), ("a", "a", "b", "b"), dead=frozenset(ranks(0)))
    assert not plan(current, topology).placement.uncovered()
    survivors = Topology(ranks(0, 2, 3), ("a", "b", "b"))
    carried = onto_ranks(current, survivors)
    assert carried.rank_ids == ranks(0, 2, 3)
    assert carried.by_rank()[0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    again = plan(carried, survivors)
    assert again.placement.rank_ids == ranks(0, 2, 3)
    assert not again.placement.uncovered()


def test_a_shrunk_group_is_planned_at_its_own_size_and_kept_slots_hold_what_they_held_sglang_33111() -> None:
    current = linear(8, 4, 3)
    smaller = Topology(ranks(0, 1, 2), ("a",) * 3)
    carried = onto_ranks(current, smaller)
    assert carried.num_physical == 9
    assert {expert for _, expert in carried.uncovered()} <= set(range(8))
    proposal = plan(carried, smaller)
    assert not proposal.placement.uncovered()
    assert proposal.moves.experts == len(carried.uncovered())


def test_ranks_that_join_are_empty_until_planned_and_nothing_else_moves_without_need_sglang_33111() -> None:
    current = linear(8, 2, 6)
    grown = Topology(ranks(5, 0, 1, 9), ("b", "a", "a", "b"))
    carried = onto_ranks(current, grown)
    rows = carried.by_rank()[0]
    assert rows[0].tolist() == rows[3].tolist() == [-1] * 6
    assert rows[1].tolist() == current.by_rank()[0, 0].tolist()
    proposal = plan(carried, grown, max_imbalance=1.1)
    assert proposal.predicted.worst <= 1.1
    assert proposal.moves.experts == 4  # half of eight equal experts
    with pytest.raises(InvalidInputError, match="topology lists ranks"):
        plan(current, grown)


def test_carried_placement_keeps_slots_that_are_narrower_only_where_they_are_free() -> None:
    current = Table("m", (0,), 3, ranks(0, 1), np.array([[0, 1, -1, 2, 0, 1]], np.int32))
    topology = Topology(ranks(0, 1), ("a", "a"))
    assert onto_ranks(current, topology, slots_per_rank=4).by_rank()[0].tolist() == [[0, 1, -1, -1], [2, 0, 1, -1]]
    with pytest.raises(InvalidInputError, match="rank 1 holds expert 1 in slot 2 of layer 0 but is to have 2 slots"):
        onto_ranks(current, topology, slots_per_rank=2)


def test_shares_are_scaled_to_the_replicas_that_are_left() -> None:
    shares = np.array([[0.5, 1.0, 0.25, 1.0, 0.25, 0.0]], np.float32)
    current = Table("m", (0,), 3, ranks(0, 1, 2), np.array([[0, 1, 0, 2, 0, 2]], np.int32), shares)
    carried = onto_ranks(current, Topology(ranks(0, 2), ("a", "a")))
    assert carried.physical_to_logical.tolist() == [[0, 1, 0, 2]]
    assert carried.shares is not None
    assert carried.shares[0].tolist() == pytest.approx([2 / 3, 1.0, 1 / 3, 1.0])


def problem_of(constraints: Constraints, dead: tuple[int, ...], *, num_logical: int = 8, slots: int = 4) -> PlanningProblem:
    topology = replace(Topology.regular(num_ranks=4, num_nodes=2), dead=frozenset(ranks(*dead)))
    return PlanningProblem(
        loads=np.ones((1, 1, num_logical)), topology=topology, current=linear(num_logical, 4, slots), constraints=constraints
    )


@pytest.mark.parametrize(
    ("constraints", "dead", "notes"),
    [
        (Constraints(), (1,), []),
        (Constraints(pinned=frozenset({ExpertOnRank(1, 1), ExpertOnRank(2, 0)})), (1,), [r"1 pins to dead ranks \[1\]"]),
        (
            Constraints(resilience=Resilience()),
            (1,),
            ["a share of 0.5 of the experts is protected: resilience of 8 of 8 experts needs 16 usable slots, there are 12"],
        ),
        (
            Constraints(resilience=Resilience(hot_share=0.25)),
            (2, 3),
            ["no expert is protected: .*"],
        ),
        (Constraints(num_groups=2), (2, 3), []),
        (Constraints(num_groups=2), (0, 1, 2), []),
        (
            Constraints(barred=frozenset(ExpertOnRank(e, r) for e in range(3) for r in (0, 1)), num_groups=1),
            (2, 3),
            ["nothing is barred: .*"],
        ),
    ],
)
def test_survivors_give_up_only_what_they_must_and_say_so(
    constraints: Constraints, dead: tuple[int, ...], notes: list[str]
) -> None:
    slots = 8 if dead == (0, 1, 2) else 4
    met, told = met_by_survivors(problem_of(constraints, dead, slots=slots))
    assert len(told) == len(notes)
    for note, pattern in zip(told, notes, strict=True):
        assert re.match(pattern, note), note
    assert not plan(met.current, met.topology, constraints=met.constraints).placement.uncovered()


def test_strict_groups_become_soft_when_nodes_no_longer_divide_them() -> None:
    topology = replace(Topology.regular(num_ranks=4, num_nodes=4), dead=frozenset(ranks(3)))
    problem = PlanningProblem(
        loads=np.ones((1, 1, 8)), topology=topology, current=linear(8, 4, 4), constraints=Constraints(num_groups=4)
    )
    met, notes = met_by_survivors(problem)
    assert met.constraints.group_price is not None
    assert "groups are soft: 4 expert groups do not divide over 3 nodes" in notes[0]


def test_resilient_policy_protects_what_there_are_slots_for() -> None:
    topology = Topology.regular(num_ranks=4, num_nodes=2)
    loads = np.array([[[90.0, 80, 70, 60, 5, 4, 3, 2]]])
    proposal = plan(linear(8, 4, 3), topology, loads, policy="resilient")
    rows = proposal.placement.by_rank()[0]
    for expert in range(4):
        assert {rank // 2 for rank in range(4) if expert in rows[rank]} == {0, 1}
    with pytest.raises(InvalidInputError, match="finds no expert that it could protect: 8 usable slots leave none"):
        plan(linear(8, 4, 2), topology, loads, policy="resilient")


@pytest.mark.parametrize("domain", list(FailureDomain))
def test_after_the_loss_of_any_domain_every_protected_expert_is_still_there(domain: FailureDomain) -> None:
    topology = Topology.regular(num_ranks=6, num_nodes=3)
    loads = np.random.default_rng(2).gamma(0.5, 100, (1, 2, 12))
    constraints = Constraints(resilience=Resilience(domain=domain))
    proposal = plan(linear(12, 6, 5, num_layers=2), topology, loads, policy="minmove", constraints=constraints)
    parts = [[rank] for rank in range(6)] if domain is FailureDomain.RANK else [[0, 1], [2, 3], [4, 5]]
    for lost in parts:
        left = np.delete(proposal.placement.by_rank(), lost, axis=1).reshape(2, -1)
        assert all(set(range(12)) <= set(row.tolist()) for row in left)
    assert proposal.costs is not None
    assert (proposal.costs.protected, proposal.costs.unprotected) == (24, 0)
    assert proposal.costs.slots_for_protection > 0
    assert proposal.costs.bound >= proposal.costs.bound_without
