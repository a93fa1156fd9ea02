from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.moves import align_slots, count_moves, residency_moves
from eplb_service.placement import Table
from eplb_service.policy import matching
from eplb_service.topology import LinkKind, Topology

Rows = tuple[int, int, list[int], list[int]]


@st.composite
def row_pairs(draw: st.DrawFn) -> Rows:
    num_ranks, slots, num_logical = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    row = st.lists(st.integers(-1, num_logical - 1), min_size=num_ranks * slots, max_size=num_ranks * slots)
    return num_ranks, num_logical, draw(row), draw(row)


def tables_of(case: Rows) -> tuple[Table, Table]:
    num_ranks, num_logical, before, after = case
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    made = [Table("m", (5,), num_logical, ranks, np.array([row], np.int32)) for row in (before, after)]
    return made[0], made[1]


def slow_moves(case: Rows, topology: Topology) -> tuple[int, dict[LinkKind, int], int]:
    """Moves, copies by link kind and moves without a source, by walking ranks and experts."""
    num_ranks, _, before, after = case
    slots = len(before) // num_ranks
    held = [set(before[r * slots : (r + 1) * slots]) - {-1} for r in range(num_ranks)]
    by_link, moves, orphans = dict.fromkeys(LinkKind, 0), 0, 0
    for rank in range(num_ranks):
        fresh = set()
        for slot in range(rank * slots, (rank + 1) * slots):
            expert = after[slot]
            if expert == -1 or before[slot] == expert:
                continue
            if expert in held[rank] or expert in fresh:
                by_link[LinkKind.SAME_RANK] += 1
                continue
            fresh.add(expert)
            moves += 1
            sources = [r for r in topology.alive_positions() if expert in held[r]]
            kinds = {topology.link(r, rank) for r in sources}
            if not kinds:
                orphans += 1
            else:
                by_link[LinkKind.SAME_NODE if LinkKind.SAME_NODE in kinds else LinkKind.CROSS_NODE] += 1
    return moves, by_link, orphans


@settings(max_examples=200, deadline=None)
@given(row_pairs(), st.integers(1, 4))
def test_moves_by_link_equal_a_walk_over_ranks_and_slots(case: Rows, num_nodes: int) -> None:
    topology = Topology.regular(num_ranks=case[0], num_nodes=min(case[0], num_nodes))
    summary = residency_moves(*tables_of(case), topology, (10,))
    moves, by_link, orphans = slow_moves(case, topology)
    assert summary.experts == moves
    assert {kind: count // 10 for kind, count in summary.bytes_by_link.items()} == by_link
    assert summary.bytes_without_source == 10 * orphans
    assert summary.move_bytes == 10 * moves
    assert summary.slots_rewritten == moves + by_link[LinkKind.SAME_RANK]
    assert count_moves(np.array(case[2]), np.array(case[3]), num_ranks=case[0], num_logical=case[1]) == moves


@settings(max_examples=200, deadline=None)
@given(row_pairs())
def test_alignment_keeps_each_ranks_experts_and_as_many_slots_as_possible(case: Rows) -> None:
    num_ranks, _, before, after = case
    aligned = align_slots(np.array(before), np.array(after), num_ranks=num_ranks)
    slots = len(before) // num_ranks
    for rank in range(num_ranks):
        span = slice(rank * slots, (rank + 1) * slots)
        wanted, held, got = (Counter(x for x in row[span] if x >= 0) for row in (after, before, aligned.tolist()))
        assert got == wanted
        kept = sum(old == new >= 0 for old, new in zip(before[span], aligned.tolist()[span], strict=True))
        assert kept == sum((wanted & held).values())
    shape = (num_ranks, slots)
    compiled = matching.align(
        np.array(after, np.int32).reshape(shape), np.array(before, np.int32).reshape(shape), np.ones(shape, np.bool_)
    )
    assert compiled.reshape(-1).tolist() == aligned.tolist()


def test_alignment_never_uses_a_slot_that_is_out_of_use() -> None:
    usable = np.array([True, False, True, True])
    assert align_slots(np.array([9, 1, 2, 3]), np.array([1, -1, 2, 3]), num_ranks=2, usable=usable).tolist() == [1, -1, 2, 3]
    with pytest.raises(InvalidInputError, match="gets 2 experts but has 1 usable"):
        align_slots(np.array([0, 1, 2, 3]), np.array([0, 1, 2, 3]), num_ranks=2, usable=usable)


def test_dead_ranks_are_no_source() -> None:
    ranks = tuple(RankId(rank) for rank in range(3))
    before = Table("m", (0,), 3, ranks, np.array([[0, 1, 2, 1, 1, 0]], np.int32))
    after = before.with_rows({0: np.array([0, 2, -1, -1, 1, 0])})
    alive = Topology(ranks, ("a", "a", "b"))
    assert residency_moves(before, after, alive, (7,)).bytes_by_link[LinkKind.SAME_NODE] == 7
    dead = Topology(ranks, ("a", "a", "b"), None, frozenset({RankId(1)}))
    summary = residency_moves(before, after, dead, (7,))
    assert (summary.bytes_without_source, summary.move_bytes, summary.bytes_into_busiest_rank) == (7, 7, 7)


def test_placements_of_other_shapes_are_refused() -> None:
    before, _ = tables_of((2, 2, [0, 1], [1, 0]))
    other, _ = tables_of((1, 2, [0, 1], [1, 0]))
    with pytest.raises(InvalidInputError, match="differ"):
        residency_moves(before, other, Topology.regular(num_ranks=2))
    with pytest.raises(InvalidInputError, match="3 expert sizes for 1 layers"):
        residency_moves(before, before, Topology.regular(num_ranks=2), (1, 2, 3))
