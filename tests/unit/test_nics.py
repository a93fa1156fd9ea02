"""Ranks that share a NIC: what comes in over it, what that costs, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.costs import CostModel, copy_seconds
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.moves import NO_MOVES, MoveSummary, residency_moves
from eplb_service.placement import Table
from eplb_service.topology import LinkKind, Topology

COST = CostModel(seconds_per_step=1.0, horizon_steps=1.0, bytes_per_s=10.0, commit_stall_s=0.0, cross_node_bytes_per_s=2.0)


def table_of(rows: list[list[int]], num_logical: int, num_ranks: int) -> Table:
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    return Table("m", tuple(range(len(rows))), num_logical, ranks, np.array(rows, np.int32))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    num_ranks = draw(st.integers(1, 6))
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    nodes = tuple(draw(st.lists(st.sampled_from("ab"), min_size=num_ranks, max_size=num_ranks)))
    nics = tuple(draw(st.lists(st.sampled_from("xyz"), min_size=num_ranks, max_size=num_ranks)))
    dead = frozenset(draw(st.sets(st.sampled_from(ranks), max_size=num_ranks - 1)))
    return Topology(ranks, nodes, dead=dead, nics=nics)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Topology, Table, Table]:
    topology = draw(topologies())
    num_layers, num_logical = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    row = st.lists(st.integers(-1, num_logical - 1), min_size=topology.num_ranks * 3, max_size=topology.num_ranks * 3)
    rows = st.lists(row, min_size=num_layers, max_size=num_layers)
    before, after = (table_of(draw(rows), num_logical, topology.num_ranks) for _ in range(2))
    return topology, before, after


def slow_bytes_into_nics(topology: Topology, before: Table, after: Table, sizes: list[int]) -> dict[tuple[str, str], int]:
    """Bytes over each NIC, by walking layers, ranks and experts."""
    assert topology.nics is not None
    over: dict[tuple[str, str], int] = defaultdict(int)
    for layer, size in enumerate(sizes):
        held, wanted = (
            [set(rank) - {-1} for rank in table.physical_to_logical[layer].reshape(topology.num_ranks, -1).tolist()]
            for table in (before, after)
        )
        for rank in range(topology.num_ranks):
            for expert in wanted[rank] - held[rank]:
                sources = [other for other in topology.alive_positions() if expert in held[other]]
                if not any(topology.nodes[other] == topology.nodes[rank] for other in sources):
                    over[topology.nodes[rank], topology.nics[rank]] += size
    return over


@settings(max_examples=150, deadline=None, derandomize=True)
@given(changes(), st.lists(st.integers(0, 50), min_size=3, max_size=3))
def test_bytes_into_the_busiest_nic_equal_a_walk_over_ranks_and_experts(
    case: tuple[Topology, Table, Table], sizes: list[int]
) -> None:
    topology, before, after = case
    summary = residency_moves(before, after, topology, sizes[: before.num_layers])
    over = slow_bytes_into_nics(topology, before, after, sizes[: before.num_layers])
    assert summary.bytes_into_busiest_nic == max(over.values(), default=0)
    assert sum(over.values()) == summary.bytes_by_link[LinkKind.CROSS_NODE] + summary.bytes_without_source


@settings(max_examples=100, deadline=None, derandomize=True)
@given(changes(), st.lists(st.integers(0, 50), min_size=3, max_size=3))
def test_names_of_nics_change_nothing_but_what_nics_take_and_a_copy_never_gets_cheaper(
    case: tuple[Topology, Table, Table], sizes: list[int]
) -> None:
    named, before, after = case
    summary = residency_moves(before, after, named, sizes[: before.num_layers])
    unnamed = residency_moves(before, after, replace(named, nics=None), sizes[: before.num_layers])
    assert replace(summary, bytes_into_busiest_nic=0) == unnamed
    within, across = unnamed.bytes_by_link[LinkKind.SAME_NODE], unnamed.bytes_by_link[LinkKind.CROSS_NODE]
    across += unnamed.bytes_without_source
    total = max(1, within + across)
    by_rank = unnamed.bytes_into_busiest_rank * (within / 10.0 + across / 2.0) / total
    assert copy_seconds(COST, unnamed) == pytest.approx(by_rank)
    assert copy_seconds(COST, summary) == pytest.approx(max(by_rank, summary.bytes_into_busiest_nic / 2.0))


def moved(*, busiest_rank: int, busiest_nic: int) -> MoveSummary:
    links = {**NO_MOVES.bytes_by_link, LinkKind.CROSS_NODE: 400}
    return replace(NO_MOVES, bytes_by_link=links, bytes_into_busiest_rank=busiest_rank, bytes_into_busiest_nic=busiest_nic)


def test_four_ranks_behind_one_nic_wait_for_one_another() -> None:
    assert copy_seconds(COST, moved(busiest_rank=100, busiest_nic=0)) == 50.0
    assert copy_seconds(COST, moved(busiest_rank=100, busiest_nic=400)) == 200.0
    assert copy_seconds(COST, moved(busiest_rank=100, busiest_nic=100)) == 50.0


def test_nics_are_told_by_node_and_name() -> None:
    ranks = tuple(RankId(rank) for rank in range(5))
    topology = Topology(ranks, ("a", "a", "b", "b", "a"), nics=("x", "y", "x", "x", "x"))
    assert topology.nic_indices == (0, 1, 2, 2, 0)
    assert topology.num_nics == 3
    own = replace(topology, nics=None)
    assert own.nic_indices == (0, 1, 2, 3, 4)
    assert own.num_nics == 5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(topologies(), st.integers(1, 3))
def test_blocks_of_ranks_on_nics_are_even_on_every_node(topology: Topology, num_nics: int) -> None:
    sizes = {node: topology.nodes.count(node) for node in topology.node_names}
    if min(sizes.values()) < num_nics:
        with pytest.raises(InvalidInputError, match=f"{num_nics} NICs for the .* ranks of node"):
            topology.with_nics(num_nics)
        return
    made = topology.with_nics(num_nics)
    assert made.num_nics == num_nics * topology.num_nodes
    for node, size in sizes.items():
        indices = [nic for name, nic in zip(made.nodes, made.nic_indices, strict=True) if name == node]
        counts = [indices.count(nic) for nic in sorted(set(indices))]
        assert indices == sorted(indices)
        assert sum(counts) == size
        assert counts == sorted(counts, reverse=True)
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(Topology.regular(num_ranks=3), nics=("x", "y")), "3 ranks but 2 NICs; give one for each rank"),
        (lambda: replace(Topology.regular(num_ranks=2), nics=("x", "")), "the NIC of rank 1 has no name"),
        (lambda: Topology.regular(num_ranks=4, num_nodes=2).with_nics(3), "3 NICs for the 2 ranks of node node0"),
        (lambda: Topology.regular(num_ranks=4).with_nics(0), "must be at least 1; got 0"),
    ],
)
def test_nics_that_do_not_fit_the_ranks_are_refused_with_the_numbers(make: Callable[[], Topology], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()
