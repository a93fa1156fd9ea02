"""Bounds on moves against the fewest moves of all rows of small layers, and what they prove of large ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem
from eplb_service.policy.layer_task import LayerTask
from eplb_service.policy.minmove import MinMovePolicy
from eplb_service.policy.move_bounds import certificates, moves_bound
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology

WORK = 0.0005


def task_of(load: Sequence[float], held: Sequence[Sequence[int]], *, room: Sequence[int] | None = None) -> LayerTask:
    """A layer without any rule but distinct experts on a rank."""
    num_ranks, num_logical, slots = len(held), len(load), len(held[0])
    rooms = np.array(room or [slots] * num_ranks, np.int64)
    usable = np.arange(slots)[None, :] < rooms[:, None]
    here = np.where(usable, np.array(held), -1).astype(np.int32)
    price = 1.0 - (here[:, :, None] == np.arange(num_logical)).any(axis=1)
    return LayerTask(
        load=np.array(load, np.float64),
        held=here,
        usable=usable,
        room=rooms,
        capacity=np.ones(num_ranks),
        base=np.zeros(num_ranks),
        fair=float(sum(load)) / num_ranks,
        allowed=np.broadcast_to(rooms[:, None] > 0, (num_ranks, num_logical)).copy(),
        pinned=np.zeros((num_ranks, num_logical), np.bool_),
        price=price,
        copies_min=np.ones(num_logical, np.int64),
        copies_max=np.full(num_logical, max(1, num_ranks), np.int64),
        distinct=True,
        spread=np.zeros(num_logical, np.bool_),
        domain_of=np.arange(num_ranks, dtype=np.int64),
        node_of=np.zeros(num_ranks, np.int64),
    )


def rows_of(task: LayerTask) -> list[list[tuple[int, ...]]]:
    """Every choice of experts for each rank that bars, pins and room allow; with repeats where an expert may be there twice."""
    choose = itertools.combinations if task.distinct else itertools.combinations_with_replacement
    choices = []
    for rank, room in enumerate(task.room.tolist()):
        may = np.flatnonzero(task.allowed[rank]).tolist()
        must = set(np.flatnonzero(task.pinned[rank]).tolist())
        choices.append([held for size in range(room + 1) for held in choose(may, size) if must <= set(held)])
    return choices


def fewest_moves(task: LayerTask, target: float) -> int | None:
    """Over all legal rows with an imbalance of at most target; None when there is none."""
    limit = target * task.fair * (1 + 1e-9)
    fewest = None
    for row in itertools.product(*rows_of(task)):
        copies = np.bincount(np.array([expert for held in row for expert in held], np.int64), minlength=task.num_logical)
        if (copies < task.copies_min).any() or (copies > task.copies_max).any():
            continue
        share = task.load / copies
        work = [
            (sum(share[e] for e in held) + base) / speed
            for held, base, speed in zip(row, task.base.tolist(), task.capacity.tolist(), strict=True)
        ]
        if max(work) <= limit:
            moves = sum(int(task.price[rank, expert] >= 1) for rank, held in enumerate(row) for expert in set(held))
            fewest = moves if fewest is None else min(fewest, moves)
    return fewest


def drawn_task(data: st.DataObject) -> LayerTask:
    num_ranks, slots, size = data.draw(st.sampled_from([(2, 2, 3), (2, 3, 4), (3, 2, 4), (3, 2, 3), (4, 1, 3), (3, 1, 2)]))
    load = data.draw(st.lists(st.sampled_from([0.0, 1, 2, 3, 5, 9, 20]), min_size=size, max_size=size))
    rank = st.lists(st.integers(-1, size - 1), min_size=slots, max_size=slots)
    return task_of(load, data.draw(st.lists(rank, min_size=num_ranks, max_size=num_ranks)))


TARGETS = st.sampled_from([1.0, 1.02, 1.2, 1.5, 2.0])


@settings(max_examples=60, deadline=None)
@given(TARGETS, st.data())
def test_no_row_takes_fewer_moves_than_the_bound(target: float, data: st.DataObject) -> None:
    task = drawn_task(data)
    fewest = fewest_moves(task, target)
    bound = moves_bound(task, target, work=WORK)
    assert fewest is None or bound <= fewest


@settings(max_examples=60, deadline=None)
@given(TARGETS, st.data())
def test_no_row_takes_fewer_moves_than_the_bound_under_constraints(target: float, data: st.DataObject) -> None:
    task = drawn_task(data)
    shape = (task.num_ranks, task.num_logical)
    flags = st.lists(st.sampled_from([False, False, False, True]), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    speed = st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=shape[0], max_size=shape[0])
    base = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), min_size=shape[0], max_size=shape[0])
    capacity, own = np.array(data.draw(speed)), np.array(data.draw(base))
    task = replace(
        task,
        allowed=task.allowed & ~np.array(data.draw(flags)).reshape(shape),
        pinned=np.array(data.draw(flags)).reshape(shape) & data.draw(st.booleans()),
        capacity=capacity,
        base=own,
        fair=float((task.load.sum() + own.sum()) / capacity.sum()),
        copies_min=np.full(shape[1], data.draw(st.sampled_from([1, 1, 2])), np.int64),
        copies_max=np.full(shape[1], data.draw(st.integers(2, shape[0])), np.int64),
        distinct=data.draw(st.sampled_from([True, True, False])),
    )
    if not task.distinct:
        task = replace(task, copies_max=np.full(shape[1], int(task.room.sum()), np.int64))
    fewest = fewest_moves(task, target)
    bound = moves_bound(task, target, work=WORK)
    assert fewest is None or bound <= fewest


def test_bound_of_small_layers_is_mostly_the_fewest_moves() -> None:
    rng = np.random.default_rng(7)
    reached = []
    for _ in range(20):
        task = task_of(rng.gamma(0.7, 10, 4).round(1).tolist(), rng.permutation([0, 1, 2, 3, 0, 1]).reshape(3, 2).tolist())
        fewest = fewest_moves(task, 1.25)
        if fewest:
            reached.append(moves_bound(task, 1.25, work=0.02) / fewest)
    assert len(reached) >= 10
    assert np.mean(reached) >= 0.8


def test_one_slot_a_rank_is_exact() -> None:
    task = task_of([9.0, 3, 3], [[0], [1], [2], [1], [2]])
    assert moves_bound(task, 1.0, work=WORK) == fewest_moves(task, 1.0) == 2


def standard_problem(layers: int) -> PlanningProblem:
    loads = np.exp(np.random.default_rng(0).normal(0, 1, (layers, 256))) * 1000
    topology = Topology.regular(num_ranks=32)
    table = Table.linear(model="m", layer_ids=range(layers), num_logical=256, rank_ids=topology.rank_ids, slots_per_rank=9)
    return PlanningProblem(loads=loads[None], topology=topology, current=table, max_imbalance=1.02, work_budget=250_000)


def test_bound_of_the_standard_work_is_near_what_a_plan_takes() -> None:
    problem = standard_problem(1)
    raw = MinMovePolicy().plan(problem)
    bounds = certificates(problem, 1.02, raw.physical_to_logical)
    proposal = verify(problem, replace(raw, moves_lower_bound=bounds), policy="minmove", solve_s=0.0)
    assert proposal.moves_lower_bound == bounds[0]
    assert bounds[0] <= proposal.moves.experts <= 1.7 * bounds[0]


def test_same_work_gives_the_same_bound_and_more_work_no_less() -> None:
    problem = standard_problem(1)
    row = problem.current.physical_to_logical
    first, second = (certificates(problem, 1.02, row, work=0.02) for _ in range(2))
    assert first == second


def test_layer_whose_live_row_is_good_enough_needs_no_moves() -> None:
    task = task_of([5.0, 5, 5, 5], [[0, 1], [2, 3]])
    assert moves_bound(task, 1.0, work=WORK) == 0


def test_nothing_is_claimed_under_a_dispatch_that_splits_unevenly() -> None:
    problem = replace(standard_problem(1), dispatch=Dispatch.NEAREST)
    assert certificates(problem, 1.02, problem.current.physical_to_logical) == (0,)


def test_groups_whose_node_is_free_are_left_out_of_the_bound() -> None:
    topology = Topology.regular(num_ranks=4, num_nodes=2)
    table = Table.linear(model="m", layer_ids=(0,), num_logical=8, rank_ids=topology.rank_ids, slots_per_rank=2)
    load = np.array([[[1.0, 1, 1, 1, 5, 5, 5, 5]]])
    problem = PlanningProblem(loads=load, topology=topology, current=table, max_imbalance=1.0)
    plain = certificates(problem, 1.0, table.physical_to_logical)
    grouped = replace(problem, constraints=Constraints(num_groups=2, group_price=3.0))
    assert certificates(grouped, 1.0, table.physical_to_logical) == plain


def test_pins_that_are_not_there_are_moves() -> None:
    topology = Topology.regular(num_ranks=2)
    table = Table.linear(model="m", layer_ids=(0,), num_logical=4, rank_ids=topology.rank_ids, slots_per_rank=3)
    pinned = frozenset({ExpertOnRank(3, 0)})
    problem = PlanningProblem(
        loads=np.array([[[4.0, 1, 1, 4]]]), topology=topology, current=table, constraints=Constraints(pinned=pinned)
    )
    good = np.array([[0, 1, 3, 3, 0, 2]], np.int32)
    with_pin = certificates(replace(problem, max_imbalance=1.3), 1.3, good)
    assert with_pin == (0,) or with_pin[0] >= 1


@pytest.mark.parametrize(("ranks", "slots", "experts"), [(8, 40, 256), (2, 256, 300), (94, 2, 160)])
def test_shapes_of_all_kinds_are_bounded(ranks: int, slots: int, experts: int) -> None:
    rng = np.random.default_rng(5)
    held = (np.arange(ranks * slots) % experts).reshape(ranks, slots)
    task = task_of(rng.gamma(0.5, 100, experts).tolist(), held.tolist())
    assert 0 <= moves_bound(task, 1.02, work=0.02) <= ranks * slots
