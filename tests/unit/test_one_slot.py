"""Exact moves for layers with one slot a rank, against a search through every row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.policy.layer_task import Int32Array, LayerTask
from eplb_service.policy.one_slot import fewest_moves_one_slot


def task_of(load: list[float], held: list[int], *, room: list[int] | None = None) -> LayerTask:
    """Ranks of one slot without any rule but one expert a rank."""
    num_ranks, num_logical = len(held), len(load)
    rooms = np.array(room or [1] * num_ranks, np.int64)
    here = np.where(rooms > 0, np.array(held), -1).astype(np.int32)[:, None]
    price = (here != np.arange(num_logical)).astype(np.float64)
    return LayerTask(
        load=np.array(load, np.float64),
        held=here,
        usable=rooms[:, None] > 0,
        room=rooms,
        capacity=np.ones(num_ranks),
        base=np.zeros(num_ranks),
        fair=float(sum(load)) / num_ranks,
        allowed=np.broadcast_to(rooms[:, None] > 0, (num_ranks, num_logical)).copy(),
        pinned=np.zeros((num_ranks, num_logical), np.bool_),
        price=price,
        copies_min=np.ones(num_logical, np.int64),
        copies_max=np.full(num_logical, max(1, int(rooms.sum())), np.int64),
        distinct=True,
        spread=np.zeros(num_logical, np.bool_),
        domain_of=np.arange(num_ranks, dtype=np.int64),
        node_of=np.zeros(num_ranks, np.int64),
    )


def height_of(task: LayerTask, row: np.ndarray) -> float:
    """Work over capacity of the busiest rank, inf for a row that breaks a rule."""
    copies = np.bincount(row[row >= 0], minlength=task.num_logical)
    if (copies < task.copies_min).any() or (copies > task.copies_max).any():
        return float("inf")
    work = task.base.copy()
    for rank, expert in enumerate(row.tolist()):
        if task.pinned[rank].any() and not (expert >= 0 and task.pinned[rank, expert] and task.pinned[rank].sum() == 1):
            return float("inf")
        if expert >= 0:
            if not task.allowed[rank, expert]:
                return float("inf")
            work[rank] += task.load[expert] / copies[expert]
    for expert in np.flatnonzero(task.spread).tolist():
        if len(set(task.domain_of[row == expert].tolist())) < 2:
            return float("inf")
    return float((work / task.capacity).max())


def price_of(task: LayerTask, row: np.ndarray) -> float:
    return sum(float(task.price[rank, expert]) for rank, expert in enumerate(row.tolist()) if expert >= 0)


def slow_best(task: LayerTask, target: float) -> tuple[float, float] | None:
    """(height that is reached at best or the target's, least price of a row at or under it)."""
    choices = [range(-1, task.num_logical) if room else [-1] for room in task.room.tolist()]
    rows = [np.array(row) for row in itertools.product(*choices)]
    scored = [(height_of(task, row), price_of(task, row)) for row in rows]
    lowest = min(height for height, _ in scored)
    if lowest == float("inf"):
        return None
    limit = max(lowest, target * task.fair) * (1 + 1e-9)
    return limit, min(price for height, price in scored if height <= limit)


def check(task: LayerTask, target: float, found: Int32Array | None) -> None:
    expected = slow_best(task, target)
    if expected is None:
        assert found is None
        return
    assert found is not None
    row = found.max(axis=1)
    assert height_of(task, row) <= expected[0]
    assert price_of(task, row) == pytest.approx(expected[1], abs=1e-5)


LOADS = st.lists(st.sampled_from([0.0, 1, 2, 3, 5, 8, 20]), min_size=1, max_size=3)
TARGETS = st.sampled_from([1.0, 1.05, 1.3, 2.0, 4.0])


@settings(max_examples=60, deadline=None)
@given(LOADS, TARGETS, st.data())
def test_moves_and_balance_are_those_of_the_best_of_all_rows(load: list[float], target: float, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(len(load), 5))
    held = data.draw(st.lists(st.integers(-1, len(load) - 1), min_size=num_ranks, max_size=num_ranks))
    room = data.draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=num_ranks, max_size=num_ranks))
    task = task_of(load, held, room=room)
    task = replace(task, copies_max=np.full(len(load), data.draw(st.integers(1, 4)), np.int64))
    check(task, target, fewest_moves_one_slot(task, target))


@settings(max_examples=80, deadline=None)
@given(LOADS, TARGETS, st.data())
def test_bars_pins_spread_and_prices_keep_the_least_price(load: list[float], target: float, data: st.DataObject) -> None:
    num_ranks, size = 5, len(load)
    held = data.draw(st.lists(st.integers(-1, size - 1), min_size=num_ranks, max_size=num_ranks))
    task = task_of(load, held)
    flags = st.lists(st.sampled_from([False, False, False, True]), min_size=num_ranks * size, max_size=num_ranks * size)
    shape = (num_ranks, size)
    barred = np.array(data.draw(flags)).reshape(shape)
    pinned = np.array(data.draw(flags)).reshape(shape) & (np.cumsum(np.ones(shape), axis=0) == data.draw(st.integers(1, 5)))
    spread = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    away = np.array(data.draw(flags)).reshape(shape)
    task = replace(
        task,
        allowed=task.allowed & ~barred,
        pinned=pinned & data.draw(st.booleans()),
        price=task.price + data.draw(st.sampled_from([0.0, 0.5, 3.0])) * away,
        spread=spread,
        copies_min=np.where(spread, 2, 1).astype(np.int64),
        domain_of=np.array([0, 0, 0, 1, 1]),
        base=np.full(num_ranks, data.draw(st.sampled_from([0.0, 1.0]))),
        capacity=np.full(num_ranks, data.draw(st.sampled_from([1.0, 2.0]))),
    )
    check(task, target, fewest_moves_one_slot(task, target))


def test_flow_and_count_agree() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        load = rng.gamma(0.5, 100, 12)
        task = task_of(load.tolist(), rng.integers(0, 12, 20).tolist())
        counted = fewest_moves_one_slot(task, 1.2)
        slow = replace(task, price=task.price * (1 + 1e-9))  # no longer plain: solved as a flow
        flowed = fewest_moves_one_slot(slow, 1.2)
        assert counted is not None
        assert flowed is not None
        assert price_of(task, counted.max(axis=1)) == price_of(task, flowed.max(axis=1))
        assert height_of(task, flowed.max(axis=1)) <= height_of(task, counted.max(axis=1)) * 1.5


def test_other_layers_are_left_to_others() -> None:
    task = task_of([3.0, 1.0], [0, 1, -1])
    two = replace(task, usable=np.ones((3, 2), np.bool_), held=np.full((3, 2), -1, np.int32), room=np.full(3, 2))
    assert fewest_moves_one_slot(two, 1.1) is None
    assert fewest_moves_one_slot(replace(task, capacity=np.array([1.0, 2.0, 1.0])), 1.1) is None
    assert fewest_moves_one_slot(replace(task, base=np.array([1.0, 2.0, 1.0])), 1.1) is None
    assert fewest_moves_one_slot(task_of([3.0, 1.0, 1.0, 1.0], [0, 1, 2]), 1.1) is None


def test_layer_of_320_ranks_takes_the_moves_that_missing_copies_need() -> None:
    load = np.exp(np.random.default_rng(1).normal(0, 1, 256))
    task = task_of(load.tolist(), [slot % 256 for slot in range(320)])
    row = fewest_moves_one_slot(task, 1.0)
    assert row is not None
    copies = np.bincount(row[:, 0], minlength=256)
    height = float((load / copies).max())
    have = np.bincount(task.held[:, 0], minlength=256)
    least = np.maximum(np.ceil(load / height * (1 - 1e-12)) - have, 0).sum()
    assert price_of(task, row[:, 0]) == least
