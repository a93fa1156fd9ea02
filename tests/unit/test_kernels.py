"""The compiled loops against slow, obvious versions of what they promise."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.policy import exchanges, kernels, matching
from eplb_service.policy.bounds import hottest_copy


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.data())
def test_matching_is_the_cheapest_of_all_permutations(size: int, data: st.DataObject) -> None:
    cost = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size))
    )
    found = matching.cheapest_matching(cost.astype(np.int64))
    assert sorted(found.tolist()) == list(range(size))
    best = min(sum(cost[row, column] for row, column in enumerate(p)) for p in itertools.permutations(range(size)))
    assert sum(cost[row, column] for row, column in enumerate(found.tolist())) == best


DISTINCT = True


def allotments(num_logical: int, num_slots: int, copies_max: int) -> list[tuple[int, ...]]:
    ranges = [range(1, copies_max + 1)] * num_logical
    return [copies for copies in itertools.product(*ranges) if sum(copies) <= num_slots]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 4))
def test_no_allotment_has_a_cooler_hottest_copy(loads: list[int], spare: int, copies_max: int) -> None:
    load = np.array(loads, np.float64)
    num_slots = load.size + spare
    best = min(
        max(value / copies for value, copies in zip(loads, allotment, strict=True))
        for allotment in allotments(load.size, num_slots, copies_max)
    )
    copies = kernels.allot_copies(load, num_slots, copies_max)
    assert (load / copies).max() <= best + 1e-9
    assert copies.sum() <= num_slots
    assert copies.max() <= copies_max
    assert abs(hottest_copy(load, num_slots, copies_max) - best) < 1e-9


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_packing_and_exchanges_keep_copies_room_and_distinctness(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    room = np.array(data.draw(st.lists(st.integers(1, 4), min_size=num_ranks, max_size=num_ranks)), np.int64)
    num_logical = data.draw(st.integers(1, int(room.sum())))
    load = np.array(data.draw(st.lists(st.integers(0, 99), min_size=num_logical, max_size=num_logical)), np.float64)
    copies = kernels.allot_copies(load, int(room.sum()), num_ranks)
    capacity = np.ones(num_ranks)
    bins = kernels.pack(load, copies, room, capacity, 4, DISTINCT)
    packed = np.bincount(bins[bins >= 0], minlength=num_logical)
    height = kernels.loads_of_bins(bins, load).max()
    exchanges.improve(bins, load, room, capacity, DISTINCT, 100)
    assert np.bincount(bins[bins >= 0], minlength=num_logical).tolist() == packed.tolist()
    assert (packed >= 1).all()
    assert (packed <= copies).all()
    if (room == room[0]).all():
        assert packed.tolist() == copies.tolist(), "equal ranks can hold every copy"
    assert ((bins >= 0).sum(axis=1) <= room).all()
    for held in bins:
        experts = held[held >= 0]
        assert np.unique(experts).size == experts.size
        assert (held[experts.size :] == -1).all()
    assert kernels.loads_of_bins(bins, load).max() <= height * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_exchanges_end_where_no_single_one_relieves_the_busiest_rank(data: st.DataObject) -> None:
    num_ranks, width = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    num_logical = data.draw(st.integers(width, num_ranks * width))
    load = np.array(data.draw(st.lists(st.integers(0, 99), min_size=num_logical, max_size=num_logical)), np.float64)
    capacity = np.array(data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=num_ranks, max_size=num_ranks)))
    room = np.full(num_ranks, width, np.int64)
    copies = kernels.allot_copies(load, num_ranks * width, num_ranks)
    bins = kernels.pack(load, copies, room, capacity, width, DISTINCT)
    exchanges.improve(bins, load, room, capacity, DISTINCT, 1000)
    heights = kernels.loads_of_bins(bins, load) / capacity
    top = int(heights.argmax())
    for rank, mine, theirs in itertools.product(range(num_ranks), range(width), range(width)):
        if rank == top or bins[top, mine] < 0:
            continue
        other = bins.copy()
        other[top, mine], other[rank, theirs] = bins[rank, theirs], bins[top, mine]
        if any(len(set(held[held >= 0].tolist())) < (held >= 0).sum() for held in other):
            continue
        after = kernels.loads_of_bins(other, load) / capacity
        assert max(after[top], after[rank]) >= heights[top] * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=1, max_size=12), st.integers(0, 8), st.randoms())
def test_experts_are_ordered_by_load_per_copy_whatever_order_equals_came_in(
    loads: list[float], spare: int, random: Random
) -> None:
    load = np.array(loads)
    order = np.array(sorted(range(load.size), key=lambda expert: (-load[expert], random.random())), np.int64)
    kernels.settle_ties(order, load)
    assert order.tolist() == sorted(range(load.size), key=lambda expert: (-load[expert], expert))
    copies = np.ones(load.size, np.int64)
    share = kernels.allot_in_order(load, order, copies, np.full(load.size, 5), load.size + spare)
    assert np.array_equal(share, load / copies)
    assert kernels.hottest_first(order, copies, share).tolist() == sorted(
        range(load.size), key=lambda expert: (-share[expert], expert)
    )
