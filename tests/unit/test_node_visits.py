"""Nodes that a token visits: exact against every choice of replicas written out, bounds around it, faults named."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.node_visits import checked_pairs, distinct_nodes, node_shares, visits_of
from eplb_service.placement import Table
from eplb_service.topology import Topology

EXPERTS, RANKS, NODES = 5, 4, 2


@st.composite
def routed(draw: st.DrawFn) -> tuple[Table, Topology, npt.NDArray[np.int64]]:
    """A layer in which every expert has a copy, on two or three nodes, and tokens with two or three different choices."""
    spare = draw(st.lists(st.integers(0, EXPERTS - 1), min_size=3, max_size=3))
    row = draw(st.permutations([*range(EXPERTS), *spare]))
    nodes = tuple(draw(st.sampled_from("abc")) for _ in range(RANKS))
    topology = Topology(tuple(RankId(rank) for rank in range(RANKS)), nodes)
    k = draw(st.integers(2, 3))
    tokens = draw(st.lists(st.permutations(range(EXPERTS)).map(lambda order: order[:k]), min_size=1, max_size=6))
    table = Table("m", (0,), EXPERTS, topology.rank_ids, np.array([row], np.int32))
    return table, topology, np.array(tokens, np.int64)[:, None, :]


def nodes_by_every_choice(table: Table, topology: Topology, token: list[int], sender: int | None) -> float:
    """Distinct nodes of one token over all ways in which its choices pick replicas. sender: node it comes from, by nearest."""
    node_of_slot = [topology.node_indices[slot // table.slots_per_rank] for slot in range(table.num_physical)]
    row = table.physical_to_logical[0].tolist()
    replicas = []
    for expert in token:
        held = [node_of_slot[slot] for slot, other in enumerate(row) if other == expert]
        near = [node for node in held if node == sender]
        replicas.append(near or held)
    ways = list(itertools.product(*replicas))
    return sum(len(set(way)) for way in ways) / len(ways)


def pairs_of(choices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Loads (1, E) and pairs (1, E, E) of tokens, counted one by one."""
    loads, pairs = np.zeros((1, EXPERTS)), np.zeros((1, EXPERTS, EXPERTS))
    for token in choices[:, 0].tolist():
        for expert in token:
            loads[0, expert] += 1
        for one, other in itertools.permutations(token, 2):
            pairs[0, one, other] += 1
    return loads, pairs


@settings(max_examples=60, deadline=None)
@given(routed())
def test_expected_nodes_are_those_of_every_way_to_pick_replicas(case: tuple[Table, Topology, npt.NDArray[np.int64]]) -> None:
    table, topology, choices = case
    shares, weights = node_shares(table, topology, Dispatch.EVEN)
    total, number = distinct_nodes(choices, shares, weights)
    slow = [nodes_by_every_choice(table, topology, token, None) for token in choices[:, 0].tolist()]
    assert number == len(slow)
    assert total == pytest.approx(sum(slow))


@settings(max_examples=60, deadline=None)
@given(routed())
def test_nearest_dispatch_is_averaged_over_the_ranks_that_send(case: tuple[Table, Topology, npt.NDArray[np.int64]]) -> None:
    table, topology, choices = case
    total, _ = distinct_nodes(choices, *node_shares(table, topology, Dispatch.NEAREST))
    slow = np.mean(
        [
            sum(nodes_by_every_choice(table, topology, token, node) for token in choices[:, 0].tolist())
            for node in topology.node_indices
        ]
    )
    assert total == pytest.approx(slow)


@settings(max_examples=60, deadline=None)
@given(routed(), st.sampled_from([Dispatch.EVEN, Dispatch.NEAREST]))
def test_bounds_from_pairs_hold_what_tokens_really_visit(
    case: tuple[Table, Topology, npt.NDArray[np.int64]], dispatch: Dispatch
) -> None:
    table, topology, choices = case
    loads, pairs = pairs_of(choices)
    visits = visits_of(loads, pairs, table, topology, dispatch)
    total, number = distinct_nodes(choices, *node_shares(table, topology, dispatch))
    assert visits.least - 1e-9 <= total / number <= visits.most + 1e-9
    assert 0.0 <= visits.pair_share <= 1.0 + 1e-9
    if choices.shape[2] == 2:
        assert total / number == pytest.approx(2.0 - visits.pair_share), "of two choices pairs tell everything"


def test_one_node_is_visited_once_and_an_absent_choice_not_at_all() -> None:
    topology = Topology.regular(num_ranks=2, num_nodes=2)
    table = Table("m", (0,), 4, topology.rank_ids, np.array([[0, 1, 2, 3]], np.int32))
    shares, weights = node_shares(table, topology, Dispatch.EVEN)
    assert distinct_nodes(np.array([[[0, 1]], [[0, 2]], [[3, -1]], [[-1, -1]]]), shares, weights) == (4.0, 3)


def test_senders_under_nearest_dispatch_weigh_what_they_send() -> None:
    topology = Topology.regular(num_ranks=2, num_nodes=2)
    table = Table("m", (0,), 2, topology.rank_ids, np.array([[0, 1, 1, -1]], np.int32))
    sources = np.array([[[3.0, 3.0], [1.0, 1.0]]])
    shares, weights = node_shares(table, topology, Dispatch.NEAREST, sources)
    assert weights.tolist() == [0.75, 0.25]
    total, _ = distinct_nodes(np.array([[[0, 1]]]), shares, weights)
    assert total == pytest.approx(0.75 * 1 + 0.25 * 2)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (np.zeros((1, 3)), r"shape \(layers, experts, experts\) = \(1, 3, 3\); got \(1, 3\)"),
        (np.array([[[0, 1, 0], [2, 0, 0], [0, 0, 0]]]), "layer 7, experts 0 and 1: 1 tokens chose both, 2 the other way round"),
        (np.array([[[0, -1, 0], [-1, 0, 0], [0, 0, 0]]]), "finite and >= 0"),
        (np.array([[[0, np.nan, 0], [np.nan, 0, 0], [0, 0, 0]]]), "finite and >= 0"),
        (np.array([[[0, 0, 6], [0, 0, 0], [6, 0, 0]]]), "with loads 9 and 5; no pair can have more tokens than either"),
    ],
)
def test_pairs_that_no_tokens_can_have_are_refused(pairs: npt.NDArray[np.float64], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        checked_pairs(pairs, np.array([[9.0, 9.0, 5.0]]), (7,))


def test_the_diagonal_is_ignored() -> None:
    assert checked_pairs(np.diag([100.0, 5.0])[None], np.array([[1.0, 1.0]]), (0,)).tolist() == [[[0.0, 0.0], [0.0, 0.0]]]


def test_pairs_of_experts_without_tokens_are_rounding_and_count_for_nothing() -> None:
    pairs = np.zeros((1, 2, 2))
    pairs[0, 0, 1] = pairs[0, 1, 0] = 1e-12
    table = Table("m", (0,), 2, (RankId(0), RankId(1)), np.array([[0, 1]], np.int32))
    loads = np.zeros((1, 2))
    found = visits_of(loads, checked_pairs(pairs, loads, (0,)), table, Topology.regular(num_ranks=2, num_nodes=2))
    assert (found.pair_share, found.least, found.most) == (0.0, 0.0, 0.0)
