from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch, check_shares, imbalance_of, rank_loads, rank_shares
from eplb_service.errors import InvalidInputError
from eplb_service.hops import token_hops
from eplb_service.ids import RankId
from eplb_service.imbalance import Imbalance
from eplb_service.noise import rank_moments
from eplb_service.placement import Table
from eplb_service.static_dispatch import static_shares, static_targets
from eplb_service.topology import Topology


def table_of(rows: list[list[int]], num_logical: int, num_ranks: int, shares: list[list[float]] | None = None) -> Table:
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    given = None if shares is None else np.array(shares, np.float32)
    return Table("m", tuple(range(len(rows))), num_logical, ranks, np.array(rows, np.int32), given)


@dataclass
class Case:
    topology: Topology
    row: list[int]
    load: list[float]
    sent: list[list[float]] | None  # by rank and expert
    weights: list[float]  # of each slot

    @property
    def table(self) -> Table:
        return table_of([self.row], len(self.load), self.topology.num_ranks)

    @property
    def weighted(self) -> Table:
        """The same with shares in proportion to the weights."""
        sums = [0.0] * len(self.load)
        for held, weight in zip(self.row, self.weights, strict=True):
            if held >= 0:
                sums[held] += weight
        shares = [weight / sums[held] if held >= 0 else 0.0 for held, weight in zip(self.row, self.weights, strict=True)]
        return table_of([self.row], len(self.load), self.topology.num_ranks, [shares])

    @property
    def sources(self) -> list[list[list[float]]] | None:
        return None if self.sent is None else [self.sent]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 5))
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    nodes = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=num_ranks, max_size=num_ranks))  # in any order
    dead = draw(st.sets(st.sampled_from(ranks), max_size=num_ranks - 1))
    num_logical = draw(st.integers(1, 6))
    row = draw(st.lists(st.integers(-1, num_logical - 1), min_size=num_ranks * 3, max_size=num_ranks * 3))
    tokens = st.lists(st.integers(0, 100).map(float), min_size=num_logical, max_size=num_logical)
    return Case(
        topology=Topology(ranks, tuple(nodes), None, frozenset(dead)),
        row=row,
        load=draw(tokens),
        sent=draw(st.none() | st.lists(tokens, min_size=num_ranks, max_size=num_ranks)),
        weights=draw(st.lists(st.integers(1, 9).map(float), min_size=num_ranks * 3, max_size=num_ranks * 3)),
    )


def walk(case: Case, dispatch: Dispatch) -> list[tuple[int, int, float]]:
    """Every (source rank, serving rank, tokens), by hand: one source, one expert, one replica after the other."""
    num_ranks = case.topology.num_ranks
    slots = len(case.row) // num_ranks
    alive = case.topology.alive_positions()
    sent_by = []
    for expert, tokens in enumerate(case.load):
        replicas = [slot for slot, held in enumerate(case.row) if held == expert and slot // slots in alive]
        if not replicas:
            continue
        uniform = case.sent is None or sum(case.sent[rank][expert] for rank in alive) == 0
        for source in alive:
            part = 1 / len(alive)
            if not uniform and case.sent is not None:
                part = case.sent[source][expert] / sum(case.sent[rank][expert] for rank in alive)
            chosen = replicas
            if dispatch is Dispatch.NEAREST:
                here = [slot for slot in replicas if slot // slots == source]
                near = [slot for slot in replicas if case.topology.nodes[slot // slots] == case.topology.nodes[source]]
                chosen = here or near or replicas
            weight = {slot: case.weights[slot] if dispatch is Dispatch.WEIGHTED else 1.0 for slot in chosen}
            sent_by += [(source, slot // slots, tokens * part * weight[slot] / sum(weight.values())) for slot in chosen]
    return sent_by


def slow_rank_loads(case: Case, dispatch: Dispatch) -> list[float]:
    result = [0.0] * case.topology.num_ranks
    for _, target, tokens in walk(case, dispatch):
        result[target] += tokens
    return result


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([Dispatch.EVEN, Dispatch.HASHED, Dispatch.NEAREST]))
def test_rank_loads_equal_a_walk_over_sources_and_replicas(case: Case, dispatch: Dispatch) -> None:
    fast = rank_loads([case.load], case.table, case.topology, dispatch, case.sources)[0]
    assert fast == pytest.approx(slow_rank_loads(case, dispatch), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_weighted_rank_loads_follow_the_shares_of_the_slots_that_serve(case: Case) -> None:
    fast = rank_loads([case.load], case.weighted, case.topology, Dispatch.WEIGHTED, case.sources)[0]
    assert fast == pytest.approx(slow_rank_loads(case, Dispatch.WEIGHTED), abs=1e-3)  # shares are float32


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(list(Dispatch)))
def test_hops_equal_a_walk_over_sources_and_replicas(case: Case, dispatch: Dispatch) -> None:
    table = case.weighted if dispatch is Dispatch.WEIGHTED else case.table
    hops = token_hops([case.load], table, case.topology, dispatch, case.sources)
    expected = {"same_rank": 0.0, "same_node": 0.0, "cross_node": 0.0}
    for source, target, tokens in walk(case, dispatch):
        expected[case.topology.link(source, target).value] += tokens
    assert hops.to_json() == pytest.approx(expected, abs=1e-3)
    assert hops.total == pytest.approx(sum(expected.values()), abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(list(Dispatch)))
def test_shares_of_every_expert_that_is_reachable_add_up_to_one(case: Case, dispatch: Dispatch) -> None:
    slots = len(case.row) // case.topology.num_ranks
    reachable = {held for slot, held in enumerate(case.row) if slot // slots in case.topology.alive_positions()}
    table = case.weighted if dispatch is Dispatch.WEIGHTED else case.table
    sums = rank_shares(table, case.topology, dispatch, case.sources)[0].sum(axis=0)
    assert sums == pytest.approx([float(expert in reachable) for expert in range(len(case.load))])


def test_nearest_dispatch_loads_the_copy_with_more_neighbours() -> None:
    topology = Topology(tuple(RankId(rank) for rank in range(4)), ("a", "a", "a", "b"))
    table = table_of([[0, 1, 2, 0]], 3, 4)
    load = [[100.0, 50.0, 50.0]]
    assert rank_loads(load, table, topology, Dispatch.EVEN)[0].tolist() == [50.0, 50.0, 50.0, 50.0]
    assert rank_loads(load, table, topology, Dispatch.NEAREST)[0].tolist() == [75.0, 50.0, 50.0, 25.0]


def test_nearest_dispatch_follows_where_the_tokens_come_from() -> None:
    topology = Topology.regular(num_ranks=4, num_nodes=2)
    table = table_of([[0, 1, 1, 0]], 2, 4)
    sources = np.zeros((1, 4, 2))
    sources[0, 3, 0] = 90.0  # all of expert 0's tokens come from rank 3, which holds it
    sources[0, 1, 0] = 10.0  # but for those of rank 1, whose node holds it on rank 0
    sources[0, :, 1] = 25.0
    loads = [[100.0, 100.0]]
    assert rank_loads(loads, table, topology, Dispatch.NEAREST, sources)[0].tolist() == [10.0, 50.0, 50.0, 90.0]
    assert rank_loads(loads, table, topology, Dispatch.NEAREST)[0].tolist() == [50.0, 50.0, 50.0, 50.0]
    assert imbalance_of(loads, table, topology, Dispatch.NEAREST, sources).worst == pytest.approx(1.8)
    assert rank_loads(loads, table, topology, Dispatch.EVEN, sources)[0].tolist() == [50.0, 50.0, 50.0, 50.0]


def test_what_dead_ranks_sent_comes_from_the_others_alike() -> None:
    topology = Topology(tuple(RankId(rank) for rank in range(3)), ("a", "a", "b"), None, frozenset({RankId(1)}))
    table = table_of([[0, 0, 0]], 1, 3)
    only_dead = [[[0.0], [5.0], [0.0]]]
    assert rank_loads([[8.0]], table, topology, Dispatch.NEAREST, only_dead)[0].tolist() == [4.0, 0.0, 4.0]
    some_dead = [[[1.0], [5.0], [3.0]]]
    assert rank_loads([[8.0]], table, topology, Dispatch.NEAREST, some_dead)[0].tolist() == [2.0, 0.0, 6.0]


def test_imbalance_leaves_dead_ranks_out_and_respects_capacity() -> None:
    table = table_of([[0, 1, 2]], 3, 3)
    ranks = tuple(RankId(rank) for rank in range(3))
    dead = Topology(ranks, ("n", "n", "n"), None, frozenset({RankId(2)}))
    assert imbalance_of([[10, 10, 5]], table, dead).worst == 1.0
    fast = Topology(ranks, ("n", "n", "n"), (2.0, 1.0, 1.0))
    assert imbalance_of([[20, 10, 10]], table, fast).worst == 1.0


def test_a_weighted_engine_without_shares_splits_evenly() -> None:
    topology = Topology.regular(num_ranks=2)
    rows = [[0, 1, 1, -1]]
    assert rank_loads([[10.0, 4.0]], table_of(rows, 2, 2), topology, Dispatch.WEIGHTED).tolist() == [[12.0, 2.0]]
    weighted = table_of(rows, 2, 2, [[1.0, 0.25, 0.75, 0.0]])
    assert rank_loads([[10.0, 4.0]], weighted, topology, Dispatch.WEIGHTED).tolist() == [[11.0, 3.0]]
    assert rank_loads([[10.0, 4.0]], weighted, topology, Dispatch.EVEN).tolist() == [[12.0, 2.0]]  # the engine's own dispatch


def test_all_weight_on_dead_ranks_falls_to_the_copies_that_serve() -> None:
    topology = Topology(tuple(RankId(rank) for rank in range(3)), ("n",) * 3, None, frozenset({RankId(2)}))
    table = table_of([[0, 0, 0]], 1, 3, [[0.0, 0.0, 1.0]])
    assert rank_loads([[10.0]], table, topology, Dispatch.WEIGHTED).tolist() == [[5.0, 5.0, 0.0]]


@pytest.mark.parametrize(
    ("shares", "fault"),
    [
        (np.array([[1.0, 0.5, 0.6, 0.0]]), r"layer m/0: the shares of expert 1 on its 2 slots add up to 1\.1"),
        (np.array([[1.0, 1.5, -0.5, 0.0]]), r"layer m/0: slot 2 has share -0\.5, it holds expert 1"),
        (np.array([[1.0, np.nan, 0.5, 0.0]]), r"layer m/0: slot 1 has share nan, it holds expert 1"),
        (np.array([[1.0, np.inf, 0.5, 0.0]]), r"layer m/0: slot 1 has share inf, it holds expert 1"),
        (np.array([[1.0, 0.5, 0.5, 0.25]]), r"layer m/0: slot 3 has share 0\.25, it is empty"),
        (np.array([[1, 1, 0, 0]]), r"floating-point numbers of shape .* \(1, 4\); got int64"),
        (np.array([1.0, 0.5, 0.5, 0.0]), r"shape .* \(1, 4\); got float64 of shape \(4,\)"),
        ([[1.0, 0.5, 0.5, 0.0]], "shares are a list instead of an array"),
        (None, "shares are a NoneType instead of an array"),
    ],
)
def test_shares_that_cannot_be_are_told_with_layer_expert_and_numbers(shares: object, fault: str) -> None:
    told = check_shares(table_of([[0, 1, 1, -1]], 2, 2), shares)
    assert told is not None
    assert re.search(fault, told), told


def test_shares_within_the_rounding_of_float32_are_fine() -> None:
    assert check_shares(table_of([[0, 1, 1, -1]], 2, 2), np.array([[1.0, 1 / 3, 2 / 3, 0.0]], np.float32)) is None


def test_sources_that_cannot_be_are_told_with_layer_rank_and_expert() -> None:
    topology, table = Topology.regular(num_ranks=2), table_of([[0, 1, 1, -1]], 2, 2)
    with pytest.raises(InvalidInputError, match=r"\(layers, ranks, experts\) = \(1, 2, 2\); got \(2, 2\)"):
        rank_loads([[1.0, 1.0]], table, topology, Dispatch.NEAREST, np.zeros((2, 2)))
    bad = np.zeros((1, 2, 2))
    bad[0, 1, 0] = -3
    with pytest.raises(InvalidInputError, match=r"layer 0, rank 1, expert 0 is -3\.0"):
        rank_loads([[1.0, 1.0]], table, topology, Dispatch.NEAREST, bad)


def test_wrong_shape_and_a_fleet_of_dead_ranks_are_refused() -> None:
    topology = Topology.regular(num_ranks=1)
    with pytest.raises(InvalidInputError, match="1 layers, 1 experts"):
        rank_loads([[1.0, 2.0]], table_of([[0]], 1, 1), topology)
    with pytest.raises(InvalidInputError, match="1 layers, 1 experts"):
        token_hops([[1.0, 2.0]], table_of([[0]], 1, 1), topology)
    all_dead = Topology(topology.rank_ids, topology.nodes, None, frozenset(topology.rank_ids))
    with pytest.raises(InvalidInputError, match="all 1 ranks are dead"):
        imbalance_of([[1.0]], table_of([[0]], 1, 1), all_dead)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 3))
def test_static_tables_prefer_rank_then_node_and_deal_the_rest_in_equal_numbers(case: Case, seed: int) -> None:
    table, topology = case.table, case.topology
    targets = static_targets(table, topology, seed=seed)[0]
    alive = list(topology.alive_positions())
    for expert in range(len(case.load)):
        slots = [slot for slot, held in enumerate(case.row) if held == expert and slot // 3 in alive]
        dealt = dict.fromkeys(slots, 0)
        for source in range(topology.num_ranks):
            target = int(targets[source, expert])
            near = [slot for slot in slots if topology.nodes[slot // 3] == topology.nodes[source]]
            if source not in alive or not slots:
                assert target == -1
            elif any(slot // 3 == source for slot in slots):
                assert target == min(slot for slot in slots if slot // 3 == source)
            elif 0 < len(near) < len(slots):
                assert target == near[0]
            else:
                dealt[target] += 1
        assert not slots or max(dealt.values()) - min(dealt.values()) <= 1


def test_static_tables_are_nearest_dispatch_on_average_where_no_node_holds_two_of_several() -> None:
    topology = Topology.regular(num_ranks=8, num_nodes=2)
    table = table_of([[0, 1, 2, 3, 4, 5, 0, 1], [0, 0, 1, 2, 3, 4, 5, 5]], 6, 8)
    drawn = np.mean([static_shares(table, topology, seed=seed) for seed in range(400)], axis=0)
    assert drawn == pytest.approx(rank_shares(table, topology, Dispatch.NEAREST), abs=0.02)


def test_static_tables_use_the_first_copy_on_a_node_alone() -> None:
    """SGLang 0.5.23: of two copies on the node, with a third elsewhere, the neighbours all send to the first."""
    topology = Topology.regular(num_ranks=8, num_nodes=2)
    table = table_of([[0, 0, 1, 2, 0, 3, 4, 5]], 6, 8)
    loads = [[80.0, 0, 0, 0, 0, 0]]
    shares = static_shares(table, topology, seed=0)
    assert (shares @ np.array(loads)[:, :, None])[0, :, 0].tolist() == [30.0, 10.0, 0, 0, 40.0, 0, 0, 0]
    assert rank_loads(loads, table, topology, Dispatch.NEAREST)[0].tolist() == [20.0, 20.0, 0, 0, 40.0, 0, 0, 0]


def test_static_tables_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    topology = Topology.regular(num_ranks=8, num_nodes=4)
    table = table_of([[0, 1, 2, 3, 4, 5, 0, 1]], 6, 8)
    same = static_targets(table, topology, seed=7)
    assert np.array_equal(same, static_targets(table, topology, seed=7))
    assert any(not np.array_equal(same, static_targets(table, topology, seed=seed)) for seed in range(8, 12))
    assert Imbalance.of(static_shares(table, topology, seed=7)[:, :, 0]).worst >= 1.0


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(list(Dispatch)), st.lists(st.integers(1, 5), min_size=10, max_size=10))
def test_the_noise_model_and_the_imbalance_agree_on_what_a_rank_carries(
    case: Case, dispatch: Dispatch, traits: list[int]
) -> None:
    topology = case.topology
    topology = replace(
        topology,
        capacity=tuple(float(value) for value in traits[: topology.num_ranks]),
        base_load=tuple(value / 10 for value in traits[5 : 5 + topology.num_ranks]),
    )
    slots = len(case.row) // topology.num_ranks
    served = {held for slot, held in enumerate(case.row) if slot // slots in topology.alive_positions()}
    loads = np.array([[tokens * (expert in served) for expert, tokens in enumerate(case.load)]])
    table = case.weighted if dispatch is Dispatch.WEIGHTED else case.table
    sources = None if case.sent is None else np.array([case.sent])
    means, errors = rank_moments(loads, table, topology, dispatch, 1.0, sources)
    assert means.max() == pytest.approx(imbalance_of(loads, table, topology, dispatch, sources).worst)
    assert (errors >= 0).all()


def test_a_replica_picked_by_chance_adds_noise() -> None:
    topology = Topology.regular(num_ranks=2)
    table = table_of([[0, 0]], 1, 2, [[0.5, 0.5]])
    noise = {way: float(rank_moments(np.array([[1000.0]]), table, topology, way, 1.0)[1].max()) for way in Dispatch}
    assert noise[Dispatch.EVEN] == 0.0
    assert noise[Dispatch.HASHED] == noise[Dispatch.NEAREST] == noise[Dispatch.WEIGHTED] == pytest.approx(1 / 1000**0.5)
