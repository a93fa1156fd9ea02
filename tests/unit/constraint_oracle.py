"""Reads a placement slot by slot against the rules as constraints state them: slow, obvious, apart from the code tested."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.topology import Topology


def slots_of(row: list[int], problem: PlanningProblem) -> list[tuple[int, int, int]]:
    """(rank id, local slot, expert) of every slot of a row that holds one."""
    size = problem.current.slots_per_rank
    return [
        (problem.topology.rank_ids[index // size], index % size, expert) for index, expert in enumerate(row) if expert != -1
    ]


def may_be_used(rank: int, slot: int, problem: PlanningProblem) -> bool:
    return rank not in problem.topology.dead and (rank, slot) not in problem.constraints.unusable_slots


def hot_experts(layer: int, problem: PlanningProblem) -> list[int]:
    """Experts that resilience protects in a layer."""
    resilience = problem.constraints.resilience
    if resilience is None:
        return []
    loads = [sum(window[layer][expert] for window in problem.loads.tolist()) for expert in range(problem.current.num_logical)]
    order = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    number = 0
    while number < resilience.hot_share * len(loads) - 1e-9:
        number += 1
    return order[:number]


def promises_broken(row: list[int], layer: int, problem: PlanningProblem) -> set[tuple[str, int, int]]:
    """Pins not met, barred experts held, protected experts not in two domains; as (what, rank, expert)."""
    held = {(rank, expert) for rank, slot, expert in slots_of(row, problem) if may_be_used(rank, slot, problem)}
    layer_id = problem.current.layer_ids[layer]
    broken = set()
    for pin in problem.constraints.pinned:
        if pin.layer_id in (None, layer_id) and (pin.rank_id, pin.expert) not in held:
            broken.add(("pin", pin.rank_id, pin.expert))
    for bar in problem.constraints.barred:
        if bar.layer_id in (None, layer_id) and (bar.rank_id, bar.expert) in held:
            broken.add(("bar", bar.rank_id, bar.expert))
    for expert in hot_experts(layer, problem):
        ranks = [rank for rank, other in held if other == expert]
        by_node = problem.constraints.resilience is not None and problem.constraints.resilience.domain is FailureDomain.NODE
        domains = {problem.topology.node_of(rank) if by_node else rank for rank in ranks}
        if len(domains) < 2:
            broken.add(("protect", -1, expert))
    return broken


def slot_rules_broken(row: list[int], problem: PlanningProblem, *, copy_rules: bool) -> bool:
    """Coverage, dead ranks, slots out of use; with copy_rules also duplicates and too many replicas."""
    slots = slots_of(row, problem)
    if any(not may_be_used(rank, slot, problem) for rank, slot, _ in slots):
        return True
    experts = [expert for _, _, expert in slots]
    if set(experts) != set(range(problem.current.num_logical)):
        return True
    if not copy_rules:
        return False
    if problem.constraints.distinct_ranks and len({(rank, expert) for rank, _, expert in slots}) < len(slots):
        return True
    most = problem.constraints.max_replicas
    return most is not None and max(experts.count(expert) for expert in experts) > most


def groups_broken(row: list[int], problem: PlanningProblem) -> bool:
    """A strict group on two nodes."""
    constraints = problem.constraints
    if constraints.num_groups is None or constraints.num_groups == 1 or constraints.group_price is not None:
        return False
    size = problem.current.num_logical // constraints.num_groups
    homes = {(expert // size, problem.topology.node_of(rank)) for rank, _, expert in slots_of(row, problem)}
    return len(homes) > constraints.num_groups


def moves_of(layer: int, row: list[int], problem: PlanningProblem) -> set[tuple[int, int]]:
    """(rank, expert) that were not there before."""
    before = {(rank, expert) for rank, _, expert in slots_of(problem.current.physical_to_logical[layer].tolist(), problem)}
    return {(rank, expert) for rank, _, expert in slots_of(row, problem)} - before


def breaks_move_limits(rows: list[list[int]], problem: PlanningProblem) -> bool:
    constraints = problem.constraints
    moves = [moves_of(layer, row, problem) for layer, row in enumerate(rows)]
    sizes = problem.expert_bytes or (0,) * len(rows)
    changed = 0
    for row, before in zip(rows, problem.current.physical_to_logical.tolist(), strict=True):
        size = problem.current.slots_per_rank
        changed += any(
            old != new and may_be_used(problem.topology.rank_ids[index // size], index % size, problem)
            for index, (old, new) in enumerate(zip(before, row, strict=True))
        )
    counted = [
        (constraints.max_moves, sum(len(some) for some in moves)),
        (constraints.max_move_bytes, sum(len(some) * size for some, size in zip(moves, sizes, strict=True))),
        (constraints.max_layers, changed),
        (constraints.max_moves_per_layer, max(len(some) for some in moves)),
        *(
            (constraints.max_moves_per_rank, sum(rank == mine for some in moves for mine, _ in some))
            for rank in problem.topology.rank_ids
        ),
    ]
    return not problem.from_nothing and any(most is not None and number > most for most, number in counted)


def has_move_limit(problem: PlanningProblem) -> bool:
    constraints = problem.constraints
    limits = (
        constraints.max_moves,
        constraints.max_move_bytes,
        constraints.max_layers,
        constraints.max_moves_per_layer,
        constraints.max_moves_per_rank,
    )
    return not problem.from_nothing and any(most is not None for most in limits)


def is_acceptable(rows: list[list[int]], problem: PlanningProblem) -> bool:
    """Whether `verify` may accept a map (it may be stricter about faults of the live map that a move limit excuses)."""
    for layer, row in enumerate(rows):
        live = [
            expert if may_be_used(rank, slot, problem) else -1
            for (rank, slot), expert in zip(
                [(rank, slot) for rank in problem.topology.rank_ids for slot in range(problem.current.slots_per_rank)],
                problem.current.physical_to_logical[layer].tolist(),
                strict=True,
            )
        ]
        same = row == live
        if slot_rules_broken(row, problem, copy_rules=not same) or (not same and groups_broken(row, problem)):
            return False
        broken = promises_broken(row, layer, problem)
        if broken - promises_broken(live, layer, problem) or (broken and not has_move_limit(problem)):
            return False
    return not breaks_move_limits(rows, problem)


def is_clean(rows: list[list[int]], problem: PlanningProblem) -> bool:
    """Whether a map breaks no rule at all, so that `verify` must accept it."""
    return not breaks_move_limits(rows, problem) and all(
        not slot_rules_broken(row, problem, copy_rules=True)
        and not groups_broken(row, problem)
        and not promises_broken(row, layer, problem)
        for layer, row in enumerate(rows)
    )


@st.composite
def tiny_problems(draw: st.DrawFn, *, limits_on_moves: bool = True) -> PlanningProblem:
    """Up to 4 ranks on 2 nodes, up to 6 experts, 1 or 2 layers, and any constraints; many of them contradict one another."""
    num_ranks, slots = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ids = draw(st.permutations([0, 1, 2, 5]))[:num_ranks]
    nodes = tuple(draw(st.sampled_from("ab")) for _ in ids)
    dead = frozenset(RankId(rank) for rank in ids if num_ranks > 1 and draw(st.integers(0, 7)) == 0)
    out = frozenset((rank, slot) for rank in ids for slot in range(slots) if draw(st.integers(0, 9)) == 0)
    room = sum(rank not in dead and (rank, slot) not in out for rank in ids for slot in range(slots))
    num_logical = draw(st.integers(1, max(1, min(6, room))))
    layer_ids = (3, 9)[: draw(st.integers(1, 2))]
    uneven = st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * num_ranks)
    topology = Topology(tuple(RankId(rank) for rank in ids), nodes, draw(uneven), dead, draw(uneven))
    expert = st.integers(-1, num_logical - 1)
    rows = [draw(st.lists(expert, min_size=num_ranks * slots, max_size=num_ranks * slots)) for _ in layer_ids]
    if draw(st.booleans()):  # how engines start
        rows = [[index % num_logical for index in range(num_ranks * slots)] for _ in layer_ids]
    loads = st.lists(st.integers(0, 20).map(float), min_size=num_logical, max_size=num_logical)
    named = st.builds(
        ExpertOnRank, st.integers(0, num_logical - 1), st.sampled_from(ids), st.none() | st.sampled_from(layer_ids)
    )
    few = st.none() | st.none() | st.integers(0, 6)
    constraints = Constraints(
        num_groups=draw(st.none() | st.sampled_from([1, 2, 3, *(n for n in (2, 3, 4) if num_logical % n == 0)])),
        group_price=draw(st.none() | st.sampled_from([0.0, 0.5, 3.0])),
        distinct_ranks=draw(st.integers(0, 3)) > 0,
        unusable_slots=out,
        pinned=frozenset(draw(st.lists(named, max_size=2))) if draw(st.booleans()) else frozenset(),
        barred=frozenset(draw(st.lists(named, max_size=3))) if draw(st.booleans()) else frozenset(),
        resilience=draw(
            st.none()
            | st.none()
            | st.builds(Resilience, hot_share=st.sampled_from([0.3, 1.0]), domain=st.sampled_from(list(FailureDomain)))
        ),
        max_replicas=draw(st.none() | st.integers(1, 4)),
        max_moves=draw(few) if limits_on_moves else None,
        max_move_bytes=draw(st.none() | st.none() | st.integers(0, 40)) if limits_on_moves else None,
        max_moves_per_rank=draw(few) if limits_on_moves else None,
        max_moves_per_layer=draw(few) if limits_on_moves else None,
        max_layers=draw(st.none() | st.none() | st.integers(0, 2)) if limits_on_moves else None,
    )
    return PlanningProblem(
        loads=np.array([[draw(loads) for _ in layer_ids] for _ in range(draw(st.integers(1, 2)))]),
        topology=topology,
        current=Table("m", layer_ids, num_logical, topology.rank_ids, np.array(rows, np.int32)),
        constraints=constraints,
        expert_bytes=tuple(draw(st.integers(1, 9)) for _ in layer_ids),
        from_nothing=draw(st.integers(0, 5)) == 0,
        max_imbalance=draw(st.none() | st.sampled_from([1.0, 1.1, 1.5])),
        seed=draw(st.integers(0, 3)),
    )
