"""Repair against every possible layer of tiny shapes: legal, with the fewest new residencies, or refused when none is legal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.policy.layer_task import LayerTask
from eplb_service.policy.repair import repair_bins, repaired_row


def task_of(
    held: npt.ArrayLike,
    *,
    num_logical: int,
    load: npt.ArrayLike | None = None,
    usable: npt.ArrayLike | None = None,
    barred: tuple[tuple[int, int], ...] = (),
    pinned: tuple[tuple[int, int], ...] = (),
    protected: tuple[int, ...] = (),
    domain_of: tuple[int, ...] | None = None,
    copies_max: int | None = None,
    distinct: bool = True,
) -> LayerTask:
    """Pins and bars: (rank, expert)."""
    slots = np.array(held, np.int32)
    num_ranks = slots.shape[0]
    mask = np.ones(slots.shape, np.bool_) if usable is None else np.array(usable, np.bool_)
    slots = np.where(mask, slots, -1).astype(np.int32)
    room = mask.sum(axis=1).astype(np.int64)
    allowed = np.repeat((room > 0)[:, None], num_logical, axis=1)
    pins = np.zeros((num_ranks, num_logical), np.bool_)
    there = np.zeros((num_ranks, num_logical + 1), np.bool_)
    there[np.arange(num_ranks)[:, None], slots] = True
    for rank, expert in barred:
        allowed[rank, expert] = False
    for rank, expert in pinned:
        pins[rank, expert] = True
    spread = np.isin(np.arange(num_logical), protected)
    domains = np.arange(num_ranks) if domain_of is None else np.array(domain_of)
    pins_in = np.array([[pins[domains == domain, e].any() for e in range(num_logical)] for domain in range(num_ranks)])
    num_pins = pins.sum(axis=0)
    alone = spread & (num_pins > 0) & (pins_in.sum(axis=0) < 2)
    work = np.ones(num_logical) if load is None else np.array(load, np.float64)
    return LayerTask(
        load=work,
        held=slots,
        usable=mask,
        room=room,
        capacity=np.ones(num_ranks),
        base=np.zeros(num_ranks),
        fair=float(work.sum() / num_ranks),
        allowed=allowed,
        pinned=pins,
        price=(~there[:, :-1]).astype(np.float64),
        copies_min=np.maximum(np.where(spread, 2, 1), num_pins + alone).astype(np.int64),
        copies_max=np.full(num_logical, copies_max or num_ranks, np.int64),
        distinct=distinct,
        spread=spread,
        domain_of=domains.astype(np.int64),
        node_of=domains.astype(np.int64),
    )


def is_legal(task: LayerTask, layer: list[list[int]]) -> bool:
    """By reading the rules one by one."""
    for expert in range(task.num_logical):
        ranks = [rank for rank in range(task.num_ranks) if expert in layer[rank]]
        copies = sum(experts.count(expert) for experts in layer)
        if not ranks or copies > task.copies_max[expert]:
            return False
        if task.spread[expert] and len({int(task.domain_of[rank]) for rank in ranks}) < 2:
            return False
    for rank, experts in enumerate(layer):
        if len(experts) > task.room[rank] or (task.distinct and len(set(experts)) < len(experts)):
            return False
        if any(not task.allowed[rank, expert] for expert in experts):
            return False
        if any(task.pinned[rank, expert] and expert not in experts for expert in range(task.num_logical)):
            return False
    return True


def fewest_new(task: LayerTask) -> float:
    """Least price over all layers without duplicates, infinite when none is legal."""
    shape = (task.num_ranks, task.num_logical)
    best = float("inf")
    for number in range(1 << (shape[0] * shape[1])):
        chosen = (number >> np.arange(shape[0] * shape[1]) & 1).astype(np.bool_).reshape(shape)
        price = float(task.price[chosen].sum())
        if price < best and is_legal(task, [np.flatnonzero(row).tolist() for row in chosen]):
            best = price
    return best


def as_lists(bins: npt.NDArray[np.int32]) -> list[list[int]]:
    """Experts of each rank; empty slots only at the end."""
    lists = []
    for row in bins.tolist():
        experts = [expert for expert in row if expert >= 0]
        assert row == experts + [-1] * (len(row) - len(experts))
        lists.append(experts)
    return lists


@st.composite
def tiny_tasks(draw: st.DrawFn) -> LayerTask:
    num_ranks, num_logical = draw(st.sampled_from([(1, 3), (2, 2), (2, 3), (2, 4), (3, 2), (4, 2)]))
    slots = draw(st.integers(1, 3))
    pair = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_logical - 1))
    held = draw(st.lists(st.integers(-1, num_logical - 1), min_size=num_ranks * slots, max_size=num_ranks * slots))
    usable = draw(st.lists(st.integers(0, 5).map(bool), min_size=num_ranks * slots, max_size=num_ranks * slots))
    return task_of(
        np.reshape(held, (num_ranks, slots)),
        num_logical=num_logical,
        load=draw(st.lists(st.integers(0, 9), min_size=num_logical, max_size=num_logical)),
        usable=np.reshape(usable, (num_ranks, slots)),
        barred=tuple(draw(st.sets(pair, max_size=3))),
        pinned=tuple(draw(st.sets(pair, max_size=2))),
        protected=tuple(draw(st.sets(st.integers(0, num_logical - 1), max_size=num_logical))),
        domain_of=tuple(draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_ranks, max_size=num_ranks))),
        copies_max=draw(st.integers(1, 4)),
        distinct=draw(st.booleans()),
    )


@settings(max_examples=400, deadline=None)
@given(tiny_tasks())
def test_repair_finds_the_fewest_new_residencies_or_says_that_nothing_is_legal(task: LayerTask) -> None:
    best = fewest_new(task)
    if best == float("inf"):
        with pytest.raises(InvalidInputError, match="layer 0"):
            repair_bins(task)
        return
    bins = repair_bins(task)
    layer = as_lists(bins)
    assert is_legal(task, layer)
    placed = np.zeros((task.num_ranks, task.num_logical), np.bool_)
    for rank, experts in enumerate(layer):
        placed[rank, experts] = True
    assert task.price[placed].sum() == best


@settings(max_examples=100, deadline=None)
@given(tiny_tasks())
def test_what_was_repaired_is_left_alone(task: LayerTask) -> None:
    try:
        row = repaired_row(task)
    except InvalidInputError:
        return
    held = row.reshape(task.held.shape)
    there = np.zeros((task.num_ranks, task.num_logical + 1), np.bool_)
    there[np.arange(task.num_ranks)[:, None], held] = True
    again = replace(task, held=held, price=(~there[:, :-1]).astype(np.float64))
    assert np.array_equal(repaired_row(again), row)


def test_experts_that_stay_keep_their_slots_and_the_lost_one_takes_the_slot_of_a_spare() -> None:
    task = task_of([[0, 1, 2], [3, 1, 4], [5, 6, 0]], num_logical=8, load=[9, 2, 1, 1, 1, 1, 1, 5])
    assert repaired_row(task).tolist() == [0, 7, 2, 3, 1, 4, 5, 6, 0]


def test_a_pin_to_a_full_rank_pushes_an_expert_on_in_a_chain() -> None:
    task = task_of([[0, 1], [2, 3], [4, -1]], num_logical=5, pinned=((0, 4),), barred=((2, 0), (2, 1)))
    layer = as_lists(repair_bins(task))
    assert is_legal(task, layer)
    assert fewest_new(task) == 3  # 4 to rank 0, what it pushes out to rank 1, what that pushes out to rank 2


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (task_of([[0], [1]], num_logical=3), r"layer 0: experts 0, 1, 2 need 3 slots on ranks \[0, 1\], which have 2"),
        (
            task_of([[0, 1], [2, 3]], num_logical=4, barred=((1, 0), (1, 1), (1, 2))),
            r"experts 0, 1, 2 need 3 slots on ranks \[0\], which have 2",
        ),
        (task_of([[0, 1], [2, 3]], num_logical=4, protected=(0,)), r"need 5 slots on ranks \[0, 1\], which have 4"),
        (
            task_of([[0], [1], [-1]], num_logical=2, protected=(0, 1), domain_of=(0, 1, 1)),
            r"need 2 slots on ranks \[0\], which have 1",
        ),
        (
            task_of([[0, 1], [2, 3]], num_logical=4, pinned=((0, 1), (0, 2), (0, 3))),
            "3 experts are pinned to rank 0, which has 2",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_named_with_experts_ranks_and_slots(task: LayerTask, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        repair_bins(task)
