"""Bounds on imbalance against the best of all placements of tiny layers, under every dispatch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.bounds import hottest_copy, imbalance_bounds, level
from eplb_service.policy.limits import Limits, limits_of, row_fault
from eplb_service.topology import Topology


def table_of(row: list[int], num_logical: int, num_ranks: int) -> Table:
    return Table("m", (0,), num_logical, tuple(map(RankId, range(num_ranks))), np.array([row], np.int32))


def legal_rows(problem: PlanningProblem, limits: Limits) -> list[list[int]]:
    """Every row up to the order of slots that keeps all constraints."""
    slots, size = problem.current.slots_per_rank, problem.current.num_logical
    choices = []
    for rank in range(problem.current.num_ranks):
        room = int(limits.room[rank])
        usable = [slot for slot in range(slots) if limits.usable[rank, slot]]
        held = []
        for count in range(room + 1):
            for experts in itertools.combinations_with_replacement(range(size), count):
                row = [-1] * slots
                for slot, expert in zip(usable, experts, strict=False):
                    row[slot] = expert
                held.append(row)
        choices.append(held)
    rows = [list(itertools.chain.from_iterable(parts)) for parts in itertools.product(*choices)]
    return [row for row in rows if is_legal(row, problem, limits)]


def is_legal(row: list[int], problem: PlanningProblem, limits: Limits) -> bool:
    size, constraints = problem.current.num_logical, problem.constraints
    if row_fault(np.array(row), replace(limits, pins=limits.pins[:0], bars=limits.bars[:0], protected=None), size) is not None:
        return False
    by_rank = np.array(row).reshape(limits.usable.shape)
    there = {(rank, int(expert)) for rank, held in enumerate(by_rank) for expert in held if expert >= 0}
    if any((pin.rank_id, pin.expert) not in there for pin in constraints.pinned):
        return False
    if any((bar.rank_id, bar.expert) in there for bar in constraints.barred):
        return False
    domains = [{int(limits.domain_of[rank]) for rank, held in there if held == expert} for expert in range(size)]
    if limits.protected is not None and any(len(domains[expert]) < 2 for expert in np.flatnonzero(limits.protected[0])):
        return False
    groups = constraints.num_groups or 1
    if groups > 1 and constraints.group_price is None:
        nodes = problem.topology.node_indices
        homes = [{nodes[rank] for rank, expert in there if expert // (size // groups) == group} for group in range(groups)]
        return all(len(home) == 1 for home in homes)
    return True


def best_imbalance(problem: PlanningProblem) -> float | None:
    """Over all legal rows. None when there is no legal row."""
    best = None
    for row in legal_rows(problem, limits_of(problem)):
        table = table_of(row, problem.current.num_logical, problem.current.num_ranks)
        if problem.dispatch is Dispatch.WEIGHTED:
            reached = best_shares(problem, table)
        else:
            reached = imbalance_of(problem.total_loads, table, problem.topology, problem.dispatch).worst
        best = reached if best is None else min(best, reached)
    return best


def best_shares(problem: PlanningProblem, table: Table) -> float:
    """Imbalance when every expert is split at will over its ranks: what any set of experts needs of the ranks that hold one.

    (The theorem of maximal flows and minimal cuts.)
    """
    load, topology = problem.total_loads[0], problem.topology
    speed = np.array(topology.capacity or (1.0,) * topology.num_ranks)
    own = np.array(topology.base_load or (0.0,) * topology.num_ranks) * load.sum() / topology.num_ranks
    if not load.any():
        return 1.0
    height = float((own / speed).max())
    for chosen in itertools.product([False, True], repeat=load.size):
        ranks = [rank for rank, held in enumerate(table.by_rank()[0]) if any(chosen[expert] for expert in held if expert >= 0)]
        if ranks:
            height = max(height, level(float(load[list(chosen)].sum()), speed[ranks], own[ranks]))
    return height / float((load.sum() + own.sum()) / speed.sum())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_placement_is_below_the_bound(data: st.DataObject) -> None:
    num_ranks, slots, size = data.draw(st.sampled_from([(2, 2, 3), (2, 2, 2), (4, 1, 4), (4, 1, 2), (3, 2, 4), (2, 3, 4)]))
    load = data.draw(st.lists(st.sampled_from([0.0, 1, 2, 3, 7, 20]), min_size=size, max_size=size))
    nodes = 2 if num_ranks % 2 == 0 else 1
    speeds = st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=num_ranks, max_size=num_ranks)
    works = st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=num_ranks, max_size=num_ranks)
    topology = replace(
        Topology.regular(num_ranks=num_ranks, num_nodes=nodes),
        capacity=data.draw(st.none() | speeds.map(tuple)),
        base_load=data.draw(st.none() | works.map(tuple)),
    )
    somewhere = st.builds(ExpertOnRank, st.integers(0, size - 1), st.integers(0, num_ranks - 1))
    constraints = Constraints(
        num_groups=data.draw(st.sampled_from([None, None, 2])) if size % 2 == 0 and nodes == 2 else None,
        pinned=data.draw(st.frozensets(somewhere, max_size=2)),
        barred=data.draw(st.frozensets(somewhere, max_size=2)),
        resilience=data.draw(st.sampled_from([None, None, Resilience(hot_share=0.5, domain=FailureDomain.RANK)])),
        max_replicas=data.draw(st.sampled_from([None, None, 2])),
        unusable_slots=data.draw(st.sampled_from([frozenset(), frozenset({(0, 0)})])),
        distinct_ranks=data.draw(st.sampled_from([True, True, False])),
    )
    problem = PlanningProblem(
        loads=np.array([[load]], np.float64),
        topology=topology,
        current=table_of([-1] * (num_ranks * slots), size, num_ranks),
        constraints=constraints,
        dispatch=data.draw(st.sampled_from([Dispatch.EVEN, Dispatch.EVEN, Dispatch.NEAREST, Dispatch.WEIGHTED])),
    )
    try:
        best = best_imbalance(problem)
    except InvalidInputError:
        return
    if best is not None:
        assert imbalance_bounds(problem)[0] <= best * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_hottest_copy_is_the_best_of_all_allotments(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    load = np.array(data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size)), np.float64)
    most = np.array(data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)))
    least = np.minimum(most, np.array(data.draw(st.lists(st.integers(1, 2), min_size=size, max_size=size))))
    slots = int(least.sum()) + data.draw(st.integers(0, 4))
    allotments = itertools.product(*(range(low, high + 1) for low, high in zip(least, most, strict=True)))
    best = min(float((load / copies).max()) for copies in allotments if sum(copies) <= slots)
    assert hottest_copy(load, slots, most, least) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_level_is_where_water_stands(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    speed = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=size, max_size=size)))
    own = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=size, max_size=size)))
    load = data.draw(st.sampled_from([0.0, 1.0, 2.5, 10.0]))
    height = level(load, speed, own)
    low = float((own / speed).max())
    assert height >= low
    poured = float(np.maximum(0, height * speed - own).sum())
    assert poured >= load * (1 - 1e-9)
    assert height == pytest.approx(low) or poured == pytest.approx(load)


def problem_of(load: list[float], topology: Topology, slots: int, **constraints: object) -> PlanningProblem:
    table = table_of([-1] * (topology.num_ranks * slots), len(load), topology.num_ranks)
    rules = Constraints(**constraints)  # type: ignore[arg-type]  # named where it is called
    return PlanningProblem(loads=np.array([[load]]), topology=topology, current=table, constraints=rules)


def test_strict_groups_raise_the_bound_to_the_busiest_node() -> None:
    two = Topology.regular(num_ranks=4, num_nodes=2)
    assert imbalance_bounds(problem_of([5.0, 1, 1, 1], two, 2))[0] == 1.0
    assert imbalance_bounds(problem_of([5.0, 1, 1, 1], two, 2, num_groups=2))[0] == pytest.approx(6 / 4)
    three_of_four = problem_of([4.0, 0, 4, 0, 4, 0, 0, 0], two, 2, num_groups=4)
    assert imbalance_bounds(three_of_four)[0] == pytest.approx(8 / 6)


def test_second_copies_for_resilience_raise_the_bound() -> None:
    four = Topology.regular(num_ranks=4)
    free = problem_of([12.0, 1, 1], four, 1)
    assert imbalance_bounds(free)[0] == pytest.approx(6 / 3.5)
    bound = imbalance_bounds(problem_of([12.0, 1, 1], four, 2, resilience=Resilience(domain=FailureDomain.RANK)))[0]
    assert bound == pytest.approx(1.0)
    tight = problem_of([12.0, 1], four, 1, resilience=Resilience(domain=FailureDomain.RANK))
    assert imbalance_bounds(tight)[0] == pytest.approx(6 / 3.25)


def test_own_work_of_a_rank_is_a_bound() -> None:
    busy = replace(Topology.regular(num_ranks=4), base_load=(3.0, 0.0, 0.0, 0.0))
    assert imbalance_bounds(problem_of([1.0, 1, 1, 1], busy, 1))[0] == pytest.approx(3 / 1.75)


def test_bars_leave_an_expert_few_copies() -> None:
    four = Topology.regular(num_ranks=4)
    barred = frozenset({ExpertOnRank(0, 2), ExpertOnRank(0, 3)})
    assert imbalance_bounds(problem_of([9.0, 1, 1, 1], four, 2, barred=barred))[0] == pytest.approx(4.5 / 3)
