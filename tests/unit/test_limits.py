"""Contradictions: each pair of constraints that cannot both be met is told with the numbers and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.feasibility import check_feasible
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import legal_rows, limits_of
from eplb_service.topology import Topology
from tests.unit.constraint_oracle import is_clean, tiny_problems


def problem_of(
    constraints: Constraints,
    *,
    num_logical: int = 8,
    num_ranks: int = 4,
    slots: int = 3,
    num_nodes: int = 2,
    dead: tuple[int, ...] = (),
    layer_ids: tuple[int, ...] = (4, 7),
    **changes: Any,
) -> PlanningProblem:
    topology = replace(
        Topology.regular(num_ranks=num_ranks, num_nodes=num_nodes), dead=frozenset(RankId(rank) for rank in dead)
    )
    current = Table.linear(
        model="m", layer_ids=layer_ids, num_logical=num_logical, rank_ids=topology.rank_ids, slots_per_rank=slots
    )
    return PlanningProblem(
        loads=np.ones((1, len(layer_ids), num_logical)), topology=topology, current=current, constraints=constraints, **changes
    )


def pins(*named: tuple[int, int] | tuple[int, int, int]) -> frozenset[ExpertOnRank]:
    return frozenset(ExpertOnRank(*item) for item in named)


ALL = Resilience()
BY_RANK = Resilience(domain=FailureDomain.RANK)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            problem_of(Constraints(pinned=pins((7, 3, 4)), barred=pins((7, 3)))),
            "expert 7 is pinned to rank 3 and barred from it; drop one: layer 4$",
        ),
        (
            problem_of(Constraints(pinned=pins((7, 3)), barred=pins((7, 3)))),
            "expert 7 is pinned to rank 3 and barred from it; drop one: all 2 layers$",
        ),
        (
            problem_of(Constraints(pinned=pins((5, 1, 7))), dead=(1,)),
            "expert 5 is pinned to rank 1, which is dead; bring the rank back or unpin the expert: layer 7",
        ),
        (
            problem_of(Constraints(pinned=pins((5, 1)), unusable_slots=frozenset({(1, 0), (1, 1), (1, 2)}))),
            "expert 5 is pinned to rank 1, which has no usable slot; free one or unpin the expert",
        ),
        (
            problem_of(Constraints(pinned=pins((0, 2), (1, 2), (2, 2), (3, 2, 7)))),
            "4 experts are pinned to rank 2 in layer 7, which has 3 usable slots; pin fewer or free slots",
        ),
        (
            problem_of(Constraints(pinned=pins((6, 0), (6, 1), (6, 2)), max_replicas=2)),
            "expert 6 is pinned to 3 ranks in layer 4 but may have 2 replicas; pin it to fewer or raise max_replicas",
        ),
        (
            problem_of(Constraints(pinned=pins(*((e, r) for r in range(4) for e in (0, 1, 2)))), slots=3),
            "pins and one copy of each other expert need 17 slots in layer 4, there are 12",
        ),
        (
            problem_of(Constraints(barred=pins(*((5, rank) for rank in range(4))))),
            r"expert 5 is barred from every rank that serves \(4 of 4\): layer 4; allow it somewhere",
        ),
        (
            problem_of(Constraints(barred=pins((5, 0), (5, 1)), resilience=ALL), slots=5),
            r"expert 5 must be on two nodes \(resilience\) but bars leave it one: layer 4",
        ),
        (
            problem_of(Constraints(resilience=ALL), num_logical=256, num_ranks=32, slots=9, num_nodes=4),
            "resilience of 256 of 256 experts needs 512 usable slots, there are 288; protect a share of at most 0.125, or use",
        ),
        (
            problem_of(Constraints(resilience=ALL, max_replicas=1), slots=5),
            "resilience needs two replicas of 8 experts a layer but max_replicas is 1; raise max_replicas to 2",
        ),
        (
            problem_of(Constraints(resilience=ALL), slots=5, num_nodes=1),
            "resilience by node needs at least two nodes that serve; there is 1 .*; protect against the loss of a rank",
        ),
        (
            problem_of(Constraints(resilience=BY_RANK), num_ranks=1, slots=20, num_nodes=1),
            "resilience by rank needs at least two ranks that serve; there is 1",
        ),
        (
            problem_of(Constraints(resilience=ALL, num_groups=4), slots=5),
            "resilience by node wants experts on two nodes but 4 strict groups keep each expert on one; give groups a price",
        ),
        (
            problem_of(
                Constraints(resilience=ALL, unusable_slots=frozenset((r, s) for r in (2, 3) for s in range(7))), slots=9
            ),
            "a copy of 8 experts outside node 'node0', where there are 4 usable slots for them; protect a share of at most 0.5",
        ),
        (
            problem_of(Constraints(num_groups=2, pinned=pins((1, 0), (2, 3)))),
            "expert 1 is pinned to rank 0 on node 'node0' and expert 2 to rank 3 on node 'node1', but both are of group 0",
        ),
        (
            problem_of(Constraints(num_groups=4, pinned=pins((0, 0), (2, 0), (4, 1)))),
            "experts of 3 groups are pinned to node 'node0', which gets 2 of 4 strict groups: layer 4; pin fewer there",
        ),
        (
            problem_of(Constraints(num_groups=2), slots=2, num_logical=6, dead=(0,)),
            "node 'node0' has 2 usable slots on 2 ranks but 1 of 2 groups are 3 experts",
        ),
        (problem_of(Constraints(num_groups=3)), "8 experts do not divide into 3 groups; give a divisor of 8"),
        (problem_of(Constraints(num_groups=0)), "8 experts do not divide into 0 groups"),
        (problem_of(Constraints(num_groups=8), num_ranks=3, num_nodes=3), "8 expert groups do not divide over 3 nodes"),
        (
            problem_of(Constraints(pinned=pins((6, 1), (7, 1, 4)), max_moves=2)),
            "3 moves are needed for 0 experts .* and 3 pins that are not met yet but at most 2 are allowed; raise max_moves",
        ),
        (
            problem_of(Constraints(pinned=pins((6, 1)), max_move_bytes=9), expert_bytes=(5, 5)),
            "10 bytes must move for .* but at most 9 may; raise max_move_bytes",
        ),
        (
            problem_of(Constraints(pinned=pins((6, 1), (7, 1, 4)), max_moves_per_layer=1)),
            "2 moves are needed in layer 4 for lost experts and pins but at most 1 are allowed; raise max_moves_per_layer",
        ),
        (
            problem_of(Constraints(pinned=pins((6, 1), (7, 1, 4)), max_moves_per_rank=2)),
            "3 experts pinned to rank 1 must move there but at most 2 may move to one rank; raise max_moves_per_rank",
        ),
        (
            problem_of(Constraints(pinned=pins((6, 1)), max_layers=1)),
            "2 layers must change for .* but at most 1 may; raise max_layers",
        ),
        (
            problem_of(Constraints(max_moves_per_rank=0), dead=(1,)),
            "4 moves are needed for 4 experts .* but 3 ranks that serve may take 0 each; raise max_moves_per_rank",
        ),
        (problem_of(Constraints(max_moves=3), dead=(1,)), "4 moves are needed for 4 experts .* but at most 3 are allowed"),
        (problem_of(Constraints(pinned=pins((8, 1)))), "expert 8 is pinned but model 'm' has experts 0 to 7"),
        (problem_of(Constraints(barred=pins((-1, 1)))), "expert -1 is barred but model 'm' has experts 0 to 7"),
        (problem_of(Constraints(barred=pins((1, 9)))), r"rank 9 is not among the ranks 0-3"),
        (problem_of(Constraints(pinned=pins((1, 1, 5)))), r"pinned in layer 5, which is not among the layers 4, 7"),
        # sglang#37923: what a rank cost matrix would say is a price of replicas off their node here; nonsense is refused too
        (problem_of(Constraints(group_price=-1.0)), "group_price must be finite and at least 0 moves; got -1.0"),
        (problem_of(Constraints(group_price=float("nan"))), "group_price must be finite"),
        (problem_of(Constraints(max_layers=-1)), "max_layers must be at least 0; got -1"),
        (problem_of(Constraints(max_replicas=0)), "max_replicas must be at least 1; got 0"),
        (
            problem_of(Constraints(unusable_slots=frozenset({(1, 3)}))),
            "unusable slot 3 of rank 1 does not exist; slots run to 2",
        ),
    ],
)
def test_contradictions_are_named_in_pairs_with_numbers(problem: PlanningProblem, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        limits_of(problem)


def test_moves_do_not_bind_when_starting_from_nothing() -> None:
    problem = problem_of(Constraints(pinned=pins((6, 1)), max_moves=0), from_nothing=True)
    assert limits_of(problem).pins.shape == (2, 3)


def test_what_only_competition_rules_out_is_decided_by_a_flow_and_named() -> None:
    barred = pins(*((expert, rank) for expert in range(4) for rank in (1, 2, 3)))
    with pytest.raises(InvalidInputError, match=r"layer 4: experts 0, 1, 2, 3 need 4 slots on ranks \[0\], which have 3"):
        check_feasible(problem_of(Constraints(barred=barred)))


def test_strict_groups_beside_protection_by_rank_are_decided_exactly() -> None:
    """By load, groups 0 and 1 share a node; both have two hot experts, and a node has two slots to spare."""
    resilience = Resilience(hot_share=0.25, domain=FailureDomain.RANK)
    problem = problem_of(
        Constraints(num_groups=4, resilience=resilience), num_logical=16, slots=5, layer_ids=(4,), max_imbalance=1.0
    )
    fits = replace(problem, loads=np.array([[[6.0, 6, 0, 0, 6, 6, 0, 0, 5, 5, 5, 5, 0, 0, 0, 0]]]))
    check_feasible(fits)
    limits = limits_of(fits)
    task = layer_task(fits, limits, Layout.of(fits, limits), 0)
    homes = [{int(node) for node in task.node_of[task.allowed[:, 4 * group]]} for group in (0, 1)]
    assert homes[0] != homes[1]
    three_hot_in_one_group = replace(problem, loads=np.array([[[6.0, 6, 6, 0, 6, 0, 0, 0, 5, 5, 5, 5, 0, 0, 0, 0]]]))
    with pytest.raises(InvalidInputError, match="layer 4: 4 strict groups on 2 nodes and the pins, bars and protected experts"):
        check_feasible(three_hot_in_one_group)


def clean_layer_exists(problem: PlanningProblem, layer: int) -> bool:
    """Tries every layer: each rank takes any set of experts that fits it."""
    table, room = problem.current, limits_of_room(problem)
    every = [[e for e in range(table.num_logical) if bits >> e & 1] for bits in range(1 << table.num_logical)]
    options = [[held for held in every if len(held) <= most] for most in room]
    size, layer_id = table.slots_per_rank, table.layer_ids[layer]
    rows = table.physical_to_logical[[layer]]
    one = replace(
        problem,
        current=Table(table.model, (layer_id,), table.num_logical, table.rank_ids, rows),
        loads=problem.loads[:, [layer]],
        expert_bytes=(),
        from_nothing=True,
        constraints=replace(
            problem.constraints,
            pinned=frozenset(pin for pin in problem.constraints.pinned if pin.layer_id in (None, layer_id)),
            barred=frozenset(bar for bar in problem.constraints.barred if bar.layer_id in (None, layer_id)),
        ),
    )
    usable = [
        [
            slot
            for slot in range(size)
            if rank not in problem.topology.dead and (rank, slot) not in problem.constraints.unusable_slots
        ]
        for rank in table.rank_ids
    ]

    def fill(position: int, row: list[int]) -> bool:
        if position == len(options):
            return is_clean([row], one)
        for held in options[position]:
            trial = row.copy()
            for slot, expert in zip(usable[position], held, strict=False):
                trial[position * size + slot] = expert
            if fill(position + 1, trial):
                return True
        return False

    return fill(0, [-1] * (size * len(options)))


def limits_of_room(problem: PlanningProblem) -> list[int]:
    """Usable slots of each rank."""
    return [
        sum(
            rank not in problem.topology.dead and (rank, slot) not in problem.constraints.unusable_slots
            for slot in range(problem.current.slots_per_rank)
        )
        for rank in problem.topology.rank_ids
    ]


@settings(max_examples=150, deadline=None)
@given(tiny_problems(limits_on_moves=False))
def test_a_problem_is_refused_exactly_when_no_placement_meets_it(problem: PlanningProblem) -> None:
    room = limits_of_room(problem)
    if (1 << problem.current.num_logical) ** len(room) > 1 << 12:
        return
    groups, price = problem.constraints.num_groups, problem.constraints.group_price
    nodes = {node for node, most in zip(problem.topology.nodes, room, strict=True) if most}
    if groups is not None and price is None and (problem.current.num_logical % groups or groups % max(1, len(nodes))):
        return  # refused for a rule of its own: each node gets as many groups
    possible = all(clean_layer_exists(problem, layer) for layer in range(problem.current.num_layers))
    if groups is not None and problem.current.num_logical % groups:
        possible = False
    try:
        check_feasible(problem)
    except InvalidInputError:
        assert not possible or ((groups or 1) > 1 and price is None)
    else:
        assert possible


@settings(max_examples=150, deadline=None)
@given(tiny_problems(limits_on_moves=False))
def test_legal_rows_are_those_that_a_reader_of_slots_finds_clean(problem: PlanningProblem) -> None:
    try:
        limits = limits_of(problem)
    except InvalidInputError:
        return
    table = problem.current
    free = replace(problem, constraints=replace(problem.constraints, num_groups=None))
    legal = legal_rows(table.physical_to_logical, limits, table.num_logical)
    assert legal.all() == is_clean(table.physical_to_logical.tolist(), free)
