"""Chunks and copies: what fits, from where, and that weights follow the map."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.moves import residency_moves
from eplb_service.placement import Placement, Table, row_digest
from eplb_service.rollout.chunks import PlannedChunk, plan_chunks
from eplb_service.topology import LinkKind, Topology

M = "m"


def table(rows: list[list[int]], *, num_logical: int, ranks: tuple[int, ...] = (0, 1), model: str = M) -> Table:
    return Table(model, tuple(range(len(rows))), num_logical, tuple(RankId(r) for r in ranks), np.array(rows, np.int32))


def topology(ranks: tuple[int, ...], nodes: tuple[str, ...], dead: tuple[int, ...] = ()) -> Topology:
    return Topology(tuple(RankId(r) for r in ranks), nodes, dead=frozenset(RankId(r) for r in dead))


def plan(
    live: Table,
    target: Table,
    nodes: tuple[str, ...],
    *,
    budget: int = 1 << 40,
    layers_max: int | None = None,
    flip_bytes_max: int | None = None,
) -> tuple[PlannedChunk, ...]:
    where = topology(tuple(live.rank_ids), nodes)
    return plan_chunks(
        Placement((live,)),
        Placement((target,)),
        topology=where,
        expert_bytes=dict.fromkeys(live.layers, 10),
        staging_bytes=dict.fromkeys(where.rank_ids, budget),
        layers_max=layers_max,
        flip_bytes_max=flip_bytes_max,
    )


def test_nothing_changes_nothing_is_planned() -> None:
    same = table([[0, 1, 2, 3]], num_logical=4)
    assert plan(same, same, ("a", "a")) == ()


def test_slots_that_keep_their_expert_need_no_copy() -> None:
    (chunk,) = plan(table([[0, 1, 2, 3]], num_logical=4), table([[0, 2, 2, 3]], num_logical=4), ("a", "a"))
    assert [(copy.expert, copy.source_rank, copy.source_slot, copy.target_rank, copy.target_slot) for copy in chunk.copies] == [
        (2, 1, 0, 0, 1)
    ]
    assert chunk.staged_bytes == (10, 0)


def test_experts_that_swap_places_on_a_rank_are_staged_too() -> None:
    (chunk,) = plan(table([[0, 1, 2, 3]], num_logical=4), table([[1, 0, 2, 3]], num_logical=4), ("a", "a"))
    assert [(copy.source_rank, copy.source_slot, copy.target_slot) for copy in chunk.copies] == [(0, 1, 0), (0, 0, 1)]
    assert chunk.staged_bytes == (20, 0)


def test_layers_flip_together_as_long_as_no_rank_writes_more_than_a_flip_may_and_a_larger_one_goes_alone() -> None:
    rows = [[0, 1, 2, 3]] * 4
    live = table(rows, num_logical=4)
    one, two = [0, 2, 2, 3], [2, 3, 0, 1]  # ten bytes for rank 0; twenty for both
    target = table([one, two, one, one], num_logical=4)
    chunks = plan(live, target, ("a", "a"), flip_bytes_max=20)
    assert [[change.layer.layer_id for change in chunk.layers] for chunk in chunks] == [[0, 2], [1], [3]]
    assert [chunk.staged_bytes for chunk in chunks] == [(20, 0), (20, 20), (10, 0)]
    chunks = plan(live, target, ("a", "a"), flip_bytes_max=9)
    assert [[change.layer.layer_id for change in chunk.layers] for chunk in chunks] == [[0], [1], [2], [3]]
    (chunk,) = plan(live, target, ("a", "a"))
    assert chunk.staged_bytes == (50, 20)


def test_a_slot_that_becomes_empty_changes_the_layer_without_a_copy() -> None:
    (chunk,) = plan(table([[0, 1, 1, 2]], num_logical=3), table([[0, 1, -1, 2]], num_logical=3), ("a", "a"))
    assert chunk.copies == ()
    assert chunk.layers[0].new_row == (0, 1, -1, 2)


def test_a_layer_whose_shares_alone_change_is_flipped_without_a_copy_or_a_byte() -> None:
    rows = [[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 1, 2]]
    live = table(rows, num_logical=3).with_even_shares()
    shares = np.array([[1, 0.25, 0.75, 1], [1, 0.5, 0.5, 1], [1, 1, 0.125, 0.875]], np.float32)
    moved = [rows[0], rows[1], [0, 1, 2, 2]]
    target = table(moved, num_logical=3).with_shares(shares)
    (chunk,) = plan(live, target, ("a", "a"), budget=10)
    assert [change.layer.layer_id for change in chunk.layers] == [0, 2], "the second layer is as it was"
    assert [copy.layer.layer_id for copy in chunk.copies] == [2]
    assert chunk.staged_bytes == (0, 10)
    weighted = chunk.layers[0]
    assert (weighted.new_row, weighted.new_shares) == ((0, 1, 1, 2), (1.0, 0.25, 0.75, 1.0))
    assert weighted.old_digest == row_digest(LayerRef(M, 0), live.row(0), live.shares_row(0))
    assert weighted.new_digest == row_digest(LayerRef(M, 0), live.row(0), shares[0])
    assert [part.layers[0].layer.layer_id for part in plan(live, target, ("a", "a"), layers_max=1)] == [0, 2]


def test_shares_and_none_do_not_go_together() -> None:
    bare = table([[0, 1, 1, 2]], num_logical=3)
    with pytest.raises(
        InvalidInputError, match="the live map has shares and the target has none: a deployment has one dispatch"
    ):
        plan(bare.with_even_shares(), bare, ("a", "a"))
    with pytest.raises(InvalidInputError, match="the target has shares and the live map has none"):
        plan(bare, bare.with_even_shares(), ("a", "a"))


def test_the_nearest_source_is_used() -> None:
    live = table([[0, 1, 0, 2, 0, 3]], num_logical=4, ranks=(7, 8, 9))
    target = table([[0, 0, 0, 2, 0, 3]], num_logical=4, ranks=(7, 8, 9))
    (chunk,) = plan(live, target, ("a", "a", "b"))
    assert chunk.copies[0].source_rank == 7  # same rank
    target = table([[0, 1, 0, 2, 1, 3]], num_logical=4, ranks=(7, 8, 9))
    (chunk,) = plan(live, target, ("a", "a", "b"))
    assert chunk.copies[0].source_rank == 7  # expert 1 exists nowhere else: cross node
    live = table([[0, 1, 4, 2, 4, 3, 5, 5]], num_logical=6, ranks=(7, 8, 9, 10))
    target = table([[0, 1, 4, 2, 4, 3, 5, 4]], num_logical=6, ranks=(7, 8, 9, 10))
    (chunk,) = plan(live, target, ("a", "a", "b", "b"))
    assert chunk.copies[0].source_rank == 9  # same node before cross node


def test_load_is_spread_over_equal_sources() -> None:
    live = table([[0, 1, 0, 2, 3, 3, 4, 4]], num_logical=5, ranks=(0, 1, 2, 3))
    target = table([[0, 1, 0, 2, 3, 0, 4, 0]], num_logical=5, ranks=(0, 1, 2, 3))
    (chunk,) = plan(live, target, ("a", "a", "a", "a"))
    assert sorted(copy.source_rank for copy in chunk.copies) == [0, 1]


def test_a_copy_with_one_source_leaves_the_others_to_copies_with_a_choice() -> None:
    # rank 2 wants 0 (held by 0 and 1), rank 3 wants 1 (held by 0 alone): 0 must come from rank 1
    live = table([[0, 1, 0, 2, 3, 3, 4, 4]], num_logical=5, ranks=(0, 1, 2, 3))
    target = table([[0, 1, 0, 2, 3, 0, 4, 1]], num_logical=5, ranks=(0, 1, 2, 3))
    (chunk,) = plan(live, target, ("a", "a", "a", "a"))
    assert {copy.expert: copy.source_rank for copy in chunk.copies} == {0: 1, 1: 0}


def test_a_layer_that_does_not_fit_is_refused_with_the_numbers() -> None:
    live = table([[0, 1, 2, 3]], num_logical=4)
    with pytest.raises(InvalidInputError, match=r"m/0 alone stages 20 bytes on rank 0 .* budget is 19 bytes"):
        plan(live, table([[1, 0, 2, 3]], num_logical=4), ("a", "a"), budget=19)


def test_the_smallest_budget_of_any_rank_counts() -> None:
    live, target = table([[0, 1, 2, 3]], num_logical=4), table([[1, 0, 2, 3]], num_logical=4)
    with pytest.raises(InvalidInputError, match="budget is 15"):
        plan_chunks(
            Placement((live,)),
            Placement((target,)),
            topology=topology((0, 1), ("a", "a")),
            expert_bytes={LayerRef(M, 0): 10},
            staging_bytes={RankId(0): 100, RankId(1): 15},
        )


def test_an_expert_that_only_a_dead_rank_holds_has_no_source() -> None:
    live, target = table([[0, 1, 2, 3]], num_logical=4), table([[0, 2, -1, -1]], num_logical=4)
    with pytest.raises(InvalidInputError, match="no rank that serves holds expert 2"):
        plan_chunks(
            Placement((live,)),
            Placement((target,)),
            topology=topology((0, 1), ("a", "a"), dead=(1,)),
            expert_bytes={LayerRef(M, 0): 10},
            staging_bytes={RankId(0): 100, RankId(1): 100},
        )


def test_a_dead_rank_gets_no_expert() -> None:
    live, target = table([[0, 1, 2, 3]], num_logical=4), table([[0, 1, 1, 3]], num_logical=4)
    with pytest.raises(InvalidInputError, match="dead rank 1 gets expert 1"):
        plan_chunks(
            Placement((live,)),
            Placement((target,)),
            topology=topology((0, 1), ("a", "a"), dead=(1,)),
            expert_bytes={LayerRef(M, 0): 10},
            staging_bytes={RankId(0): 100, RankId(1): 100},
        )


def test_other_ranks_or_shapes_are_refused() -> None:
    live = table([[0, 1, 2, 3]], num_logical=4)
    with pytest.raises(InvalidInputError, match="same tables over the ranks"):
        plan(live, table([[0, 1, 2, 3, 0, 1]], num_logical=4, ranks=(0, 1, 2)), ("a", "a"))


@st.composite
def change(draw: st.DrawFn) -> tuple[Placement, Placement, Topology, dict[LayerRef, int], int | None]:
    num_ranks = draw(st.integers(1, 5))
    num_nodes = draw(st.integers(1, num_ranks))
    ids = tuple(RankId(3 * rank + 4) for rank in range(num_ranks))
    where = Topology(ids, tuple(f"n{rank % num_nodes}" for rank in range(num_ranks)))
    before: list[Table] = []
    after: list[Table] = []
    sizes: dict[LayerRef, int] = {}
    for model, num_layers in (("target", draw(st.integers(1, 4))), ("drafter", draw(st.integers(0, 1)))):
        if not num_layers:
            continue
        slots = draw(st.integers(1, 4))
        num_logical = draw(st.integers(1, num_ranks * slots))
        pair = []
        for _ in range(2):
            rows = []
            for _ in range(num_layers):
                spare = num_ranks * slots - num_logical
                rest = draw(st.lists(st.integers(-1, num_logical - 1), min_size=spare, max_size=spare))
                rows.append(draw(st.permutations([*range(num_logical), *rest])))
            pair.append(Table(model, tuple(range(num_layers)), num_logical, ids, np.array(rows, np.int32)))
        before.append(pair[0])
        after.append(pair[1])
        sizes |= {layer: draw(st.integers(1, 9)) for layer in pair[0].layers}
    return Placement(tuple(before)), Placement(tuple(after)), where, sizes, draw(st.none() | st.integers(1, 2))


def applied(live: Placement, chunks: tuple[PlannedChunk, ...], where: Topology) -> Placement:
    """The slow oracle: slots hold the names of experts; each chunk is staged from them whole, then written."""
    content = {layer: row.tolist() for layer, _, row in live.layers()}
    slots = {layer: table.slots_per_rank for layer, table, _ in live.layers()}
    for chunk in chunks:
        staged = {}
        for copy in chunk.copies:
            source = where.position_of(copy.source_rank) * slots[copy.layer] + copy.source_slot
            assert content[copy.layer][source] == copy.expert, "the source holds what the copy says"
            staged[copy.layer, where.position_of(copy.target_rank) * slots[copy.layer] + copy.target_slot] = copy.expert
        for layer_change in chunk.layers:
            old = content[layer_change.layer]
            assert row_digest(layer_change.layer, np.array(old)) == layer_change.old_digest
            new = [
                -1 if wanted == -1 else staged.get((layer_change.layer, index), old[index])
                for index, wanted in enumerate(layer_change.new_row)
            ]
            assert tuple(new) == layer_change.new_row, "weights follow the map"
            assert row_digest(layer_change.layer, np.array(new)) == layer_change.new_digest
            content[layer_change.layer] = new
    return live.with_rows({layer: np.array(row, np.int32) for layer, row in content.items()})


@given(change())
@settings(max_examples=150, deadline=None)
def test_applying_the_copies_to_symbolic_slots_gives_the_target(
    case: tuple[Placement, Placement, Topology, dict[LayerRef, int], int | None],
) -> None:
    live, target, where, sizes, layers_max = case
    staged_alone = [
        max(sum(size for old, new in zip(a, b, strict=True) if old != new != -1) for a, b in zip(rows, others, strict=True))
        for (layer, table_, row), (_, _, other) in zip(live.layers(), target.layers(), strict=True)
        for size in [sizes[layer]]
        for rows, others in [(row.reshape(table_.num_ranks, -1).tolist(), other.reshape(table_.num_ranks, -1).tolist())]
    ]
    budget = max(1, *staged_alone)
    arguments = {
        "topology": where,
        "expert_bytes": sizes,
        "staging_bytes": dict.fromkeys(where.rank_ids, budget),
        "layers_max": layers_max,
    }
    chunks = plan_chunks(live, target, **arguments)  # type: ignore[arg-type]
    assert chunks == plan_chunks(live, target, **arguments)  # type: ignore[arg-type]
    assert applied(live, chunks, where) == target
    changed = [layer_change.layer for chunk in chunks for layer_change in chunk.layers]
    assert sorted(changed) == sorted(
        layer for (layer, _, old), (_, _, new) in zip(live.layers(), target.layers(), strict=True) if (old != new).any()
    )
    for chunk in chunks:
        received = dict.fromkeys(where.rank_ids, 0)
        for copy in chunk.copies:
            received[copy.target_rank] += sizes[copy.layer]
        assert tuple(received.values()) == chunk.staged_bytes
        assert max(chunk.staged_bytes) <= budget
        assert layers_max is None or len(chunk.layers) <= layers_max
        targets = [(copy.layer, copy.target_rank, copy.target_slot) for copy in chunk.copies]
        assert len(set(targets)) == len(targets)


@given(change())
@settings(max_examples=60, deadline=None)
def test_no_copy_goes_further_than_the_move_count_says(
    case: tuple[Placement, Placement, Topology, dict[LayerRef, int], int | None],
) -> None:
    live, target, where, sizes, _ = case
    chunks = plan_chunks(live, target, topology=where, expert_bytes=sizes, staging_bytes=dict.fromkeys(where.rank_ids, 1 << 30))
    nearest = dict.fromkeys(LinkKind, 0)
    for copy in {(c.layer, c.expert, c.target_rank): c for chunk in chunks for c in chunk.copies}.values():
        kind = where.link(where.position_of(copy.source_rank), where.position_of(copy.target_rank))
        nearest[kind] += sizes[copy.layer]
    for kind in (LinkKind.SAME_NODE, LinkKind.CROSS_NODE):
        summaries = [
            residency_moves(before, after, where, [sizes[layer] for layer in before.layers])
            for before, after in zip(live.tables, target.tables, strict=True)
        ]
        assert nearest[kind] == sum(summary.bytes_by_link[kind] for summary in summaries)
