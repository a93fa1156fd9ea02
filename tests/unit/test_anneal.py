"""The annealing kernel: whatever it does, its books agree with what is in the slots, and every row that it keeps is legal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.anneal import BLOCK, Record, anneal
from eplb_service.policy.anneal_changes import LIMIT, MOVES, OVERLOAD, PRICE, Scratch, new_scratch
from eplb_service.policy.anneal_state import State, bins_of, new_state
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_search import FEWEST, LOWEST, LayerSearch, seed_of
from eplb_service.policy.layer_task import LayerTask, layer_task
from eplb_service.policy.limits import limits_of
from eplb_service.policy.needed_copies import with_copies
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.task_layers import is_met
from eplb_service.topology import Topology

MANY = 1 << 40


def never() -> bool:
    return False


def search_of(task: LayerTask, *, moves_max: int = MANY, intake_max: int = MANY, seed: int = 1) -> LayerSearch:
    start = repaired_row(task).reshape(task.held.shape)
    return LayerSearch(task, start, seed, moves_max, np.full(task.num_ranks, intake_max, np.int64))


@st.composite
def tasks(draw: st.DrawFn) -> LayerTask:
    """Small layers with every constraint that a task can hold."""
    num_ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=draw(st.integers(1, min(2, num_ranks))))
    num_logical = draw(st.integers(1, num_ranks * slots))
    speeds = draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_ranks, max_size=num_ranks))
    base = draw(st.none() | st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=num_ranks, max_size=num_ranks))
    dead = frozenset({RankId(0)}) if num_ranks > 2 and draw(st.booleans()) else frozenset()
    topology = replace(
        topology,
        capacity=None if speeds is None else tuple(speeds),
        base_load=None if base is None else tuple(base),
        dead=dead,
    )
    pair = st.builds(ExpertOnRank, st.integers(0, num_logical - 1), st.integers(0, num_ranks - 1).map(RankId))
    constraints = Constraints(
        pinned=frozenset(draw(st.lists(pair, max_size=2))),
        barred=frozenset(draw(st.lists(pair, max_size=3))),
        max_replicas=draw(st.none() | st.integers(1, 4)),
        distinct_ranks=draw(st.booleans()),
        unusable_slots=frozenset({(num_ranks - 1, 0)}) if draw(st.booleans()) else frozenset(),
        resilience=Resilience(hot_share=0.5, domain=draw(st.sampled_from(FailureDomain))) if draw(st.booleans()) else None,
    )
    load = draw(st.lists(st.integers(0, 60).map(float), min_size=num_logical, max_size=num_logical))
    rows = [draw(st.permutations(range(num_ranks * slots)))]
    current = Table("m", (0,), num_logical, topology.rank_ids, (np.array(rows, np.int32) % num_logical).astype(np.int32))
    try:
        problem = PlanningProblem(loads=np.array([[load]]), topology=topology, current=current, constraints=constraints)
        limits = limits_of(problem)
        task = layer_task(problem, limits, Layout.of(problem, limits), 0)
        repaired_row(task)
    except InvalidInputError:
        assume(False)
        raise
    return task


def run(search: LayerSearch, limit: float, pieces: list[int], *, lower: bool) -> tuple[State, Scratch, Record]:
    """A search of as many steps as the pieces add up to."""
    layer, slots = with_copies(search.layer, search.rest.slots, limit)
    state = new_state(layer, slots, search.task.room.sum() + 2)
    scratch = new_scratch(layer, search.moves_max, search.intake_max, seed_of(7))
    scratch.level[LIMIT] = limit
    record = Record(slots.copy(), np.full(1, np.inf), np.full(40, np.inf), np.zeros((40, slots.size), np.int32))
    first = 0
    for steps in pieces:
        anneal(layer, state, scratch, LOWEST if lower else FEWEST, record, first, first + steps, sum(pieces))
        first += steps
    return state, scratch, record


def slow_heights(task: LayerTask, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Work over capacity of each rank in fair heights, from nothing."""
    return task.heights(bins_of(task, slots)) / (task.fair if task.fair > 0 else 1.0)


def received(task: LayerTask, slots: npt.NDArray[np.int32]) -> list[int]:
    """Experts that each rank gets and did not hold, not even in a slot that is out of use now."""
    bins = bins_of(task, slots)
    return [sum(task.price[rank, expert] > 0 for expert in set(new.tolist()) - {-1}) for rank, new in enumerate(bins)]


@settings(max_examples=60, deadline=None)
@given(tasks(), st.sampled_from([1.0, 1.1, 1.5, 3.0]), st.booleans())
def test_books_agree_with_the_slots_after_any_number_of_steps(task: LayerTask, limit: float, lower: bool) -> None:
    search = search_of(task)
    state, scratch, record = run(search, limit, [BLOCK * 12], lower=lower)
    heights = slow_heights(task, state.expert_at)
    work = state.work * search.layer.inverse
    np.testing.assert_allclose(work, heights, atol=1e-9)
    assert abs(scratch.level[OVERLOAD] - np.maximum(heights - scratch.level[LIMIT], 0.0).sum()) < 1e-7
    rank_of, present = search.layer.rank_of, state.expert_at >= 0
    price = task.price[rank_of[present], state.expert_at[present]].sum()
    assert abs(scratch.level[PRICE] - price) < 1e-9
    assert scratch.counter[MOVES] == search.found(state.expert_at).moves
    assert state.copies.tolist() == np.bincount(state.expert_at[present], minlength=task.num_logical).tolist()
    for expert in range(task.num_logical):
        held = state.holders[expert, : state.copies[expert]]
        assert sorted(held.tolist()) == np.flatnonzero(state.expert_at == expert).tolist()
    changed = np.flatnonzero(state.expert_at != search.layer.home)
    assert sorted(state.changed[: state.num_changed[0]].tolist()) == changed.tolist()
    for moves in np.flatnonzero(np.isfinite(record.heights)).tolist():
        assert abs(slow_heights(task, record.rows[moves]).max() - record.heights[moves]) < 1e-9


@settings(max_examples=60, deadline=None)
@given(tasks(), st.sampled_from([1.0, 1.2, 2.0]), st.booleans())
def test_every_row_that_is_kept_is_legal_and_keeps_its_promise(task: LayerTask, limit: float, lower: bool) -> None:
    search = search_of(task)
    state, _, record = run(search, limit, [BLOCK * 12], lower=lower)
    assert is_met(task, bins_of(task, state.expert_at))
    for moves in np.flatnonzero(np.isfinite(record.heights)).tolist():
        assert is_met(task, bins_of(task, record.rows[moves]))
        assert search.found(record.rows[moves]).moves == moves
    if np.isfinite(record.value[0]):
        found = search.found(record.best)
        assert is_met(task, bins_of(task, record.best))
        assert found.height <= limit + 1e-9
        assert abs((found.height if lower else found.price) - record.value[0]) < 1e-9


@settings(max_examples=60, deadline=None)
@given(tasks(), st.integers(0, 5), st.integers(0, 2))
def test_limits_on_moves_are_never_exceeded(task: LayerTask, moves_max: int, intake_max: int) -> None:
    search = search_of(task, moves_max=moves_max, intake_max=intake_max)
    assume(search.rest.moves == 0)
    low = search.lowest(search.rest, np.inf, BLOCK * 12, never)
    found = search.fewest(1.2, BLOCK * 12, never)
    for row in (low, found):
        if row is not None:
            assert row.moves <= moves_max
            if row is low:
                assert max(received(task, row.slots)) <= intake_max
    assert low.height <= search.rest.height


@settings(max_examples=30, deadline=None)
@given(tasks(), st.booleans())
def test_search_in_pieces_ends_where_one_in_one_go_does(task: LayerTask, lower: bool) -> None:
    whole = run(search_of(task), 1.1, [BLOCK * 12], lower=lower)
    pieces = run(search_of(task), 1.1, [BLOCK * 5, BLOCK, BLOCK * 6], lower=lower)
    assert whole[0].expert_at.tolist() == pieces[0].expert_at.tolist()
    assert whole[1].counter.tolist() == pieces[1].counter.tolist()
    np.testing.assert_array_equal(whole[2].heights, pieces[2].heights)


def standard_task(layer: int = 0) -> LayerTask:
    load = np.exp(np.random.default_rng(0).normal(0, 1, (58, 256)))[layer] * 1000
    current = Table.linear(model="m", layer_ids=(0,), num_logical=256, rank_ids=tuple(range(32)), slots_per_rank=9)
    problem = PlanningProblem(loads=load[None, None], topology=Topology.regular(num_ranks=32), current=current)
    limits = limits_of(problem)
    return layer_task(problem, limits, Layout.of(problem, limits), 0)


def test_known_result_of_a_seed_stays_the_same_on_every_machine() -> None:
    found = search_of(standard_task()).fewest(1.02, 100_000, never)
    assert found is not None
    again = search_of(standard_task()).fewest(1.02, 100_000, never)
    assert again is not None
    assert found.slots.tolist() == again.slots.tolist()
    assert found.height <= 1.02 + 1e-9
    assert found.moves <= 45


def test_lowest_height_at_no_more_moves_is_lower_and_moves_no_more() -> None:
    search = search_of(standard_task())
    found = search.fewest(1.05, 100_000, never)
    assert found is not None
    low = search.lowest(found, found.price, 100_000, never)
    assert low.moves <= found.moves
    assert low.height < found.height


def test_expert_that_alone_exceeds_the_limit_gets_the_copies_that_any_row_needs() -> None:
    load = np.full(16, 10.0)
    load[3] = 500.0
    current = Table.linear(model="m", layer_ids=(0,), num_logical=16, rank_ids=tuple(range(8)), slots_per_rank=3)
    problem = PlanningProblem(loads=load[None, None], topology=Topology.regular(num_ranks=8), current=current)
    limits = limits_of(problem)
    search = search_of(layer_task(problem, limits, Layout.of(problem, limits), 0))
    layer, slots = with_copies(search.layer, search.rest.slots, 1.1)
    needed = int(np.ceil(500 / (1.1 * load.sum() / 8)))
    assert (slots == 3).sum() == needed
    assert layer.copies_min[3] == needed
    assert is_met(search.task, bins_of(search.task, slots))


def test_time_that_is_over_stops_a_search_and_says_so() -> None:
    search = search_of(standard_task())
    assert search.fewest(1.02, 1_000_000, lambda: True) is None
    assert search.cut_off
