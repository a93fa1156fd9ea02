from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch, check_shares, imbalance_of
from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.hops import token_hops
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import limits_of
from eplb_service.policy.shares import (
    SHARE_UNITS,
    require_solver,
    rounded_shares,
    weighted_height,
    weighted_shares,
    with_shares,
)
from eplb_service.topology import Topology

STANDARD = np.exp(np.random.default_rng(0).normal(0, 1, (58, 256))) * 1000


def table_of(rows: list[list[int]], num_logical: int, num_ranks: int) -> Table:
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    return Table("m", tuple(range(len(rows))), num_logical, ranks, np.array(rows, np.int32))


@dataclass
class Case:
    topology: Topology
    table: Table
    load: list[float]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 5))
    slots = draw(st.integers(1, 3))
    num_logical = draw(st.integers(1, min(6, num_ranks * slots)))
    rest = draw(st.lists(st.integers(-1, num_logical - 1), min_size=num_ranks * slots, max_size=num_ranks * slots))
    row = draw(st.permutations([*range(num_logical), *rest[num_logical:]]))
    traits = draw(st.lists(st.integers(1, 4), min_size=10, max_size=10))
    plain = draw(st.booleans())
    topology = Topology(
        tuple(RankId(rank) for rank in range(num_ranks)),
        tuple("ab"[value % 2] for value in traits[:num_ranks]),
        None if plain else tuple(float(value) for value in traits[:num_ranks]),
        base_load=None if plain else tuple(value / 4 for value in traits[5 : 5 + num_ranks]),
    )
    load = draw(st.lists(st.integers(0, 100).map(float), min_size=num_logical, max_size=num_logical))
    return Case(topology, table_of([list(row)], num_logical, num_ranks), load)


def least_imbalance(case: Case) -> float:
    """By duality, over all sets of ranks: what can only be served there, over what they can do."""
    num_ranks = case.topology.num_ranks
    capacity = case.topology.capacity or (1.0,) * num_ranks
    base = [value * sum(case.load) / num_ranks for value in case.topology.base_load or (0.0,) * num_ranks]
    by_rank = case.table.by_rank()[0]
    holders = [{rank for rank in range(num_ranks) if expert in by_rank[rank]} for expert in range(len(case.load))]
    highest = 0.0
    for size in range(1, num_ranks + 1):
        for ranks in itertools.combinations(range(num_ranks), size):
            only_here = sum(tokens for tokens, where in zip(case.load, holders, strict=True) if where <= set(ranks))
            own = sum(base[rank] for rank in ranks)
            highest = max(highest, (only_here + own) / sum(capacity[rank] for rank in ranks))
    mean = (sum(case.load) + sum(base)) / sum(capacity)
    return highest / mean if sum(case.load) > 0 else 1.0


@settings(max_examples=150, deadline=None)
@given(cases())
def test_shares_reach_the_least_imbalance_that_any_split_has(case: Case) -> None:
    shares = weighted_shares(case.table, case.topology, [case.load])
    reached = imbalance_of([case.load], case.table.with_shares(shares), case.topology, Dispatch.WEIGHTED).worst
    assert reached == pytest.approx(least_imbalance(case), rel=1e-5)
    assert check_shares(case.table, shares) is None


@settings(max_examples=60, deadline=None)
@given(cases())
def test_shares_of_an_expert_add_up_to_exactly_one_in_any_order(case: Case) -> None:
    shares = weighted_shares(case.table, case.topology, [case.load])[0]
    row = case.table.physical_to_logical[0]
    assert shares.dtype == np.float32
    for expert in range(len(case.load)):
        total = np.float32(0)
        for share in shares[row == expert][::-1]:
            total = np.float32(total + share)
        assert total == 1.0
    assert (shares[row < 0] == 0).all()
    assert (shares * SHARE_UNITS == np.round(shares * SHARE_UNITS)).all()


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_height_of_a_row_is_a_bound_for_even_and_nearest_dispatch(case: Case) -> None:
    problem = PlanningProblem(loads=np.array([[case.load]]), topology=case.topology, current=case.table)
    limits = limits_of(problem)
    task = layer_task(problem, limits, Layout.of(problem, limits), 0)
    least = weighted_height(task, case.table.by_rank()[0])
    assert least == pytest.approx(least_imbalance(case) * task.fair, rel=1e-6)
    for dispatch in (Dispatch.EVEN, Dispatch.NEAREST):
        assert least <= imbalance_of([case.load], case.table, case.topology, dispatch).worst * task.fair * (1 + 1e-6)


def test_a_split_that_no_even_one_reaches() -> None:
    """Rank 0 is full with expert 0's neighbour, so most of expert 0 goes to rank 1."""
    table, topology = table_of([[0, 1, 0, 2]], 3, 2), Topology.regular(num_ranks=2)
    shares = weighted_shares(table, topology, [[60.0, 50.0, 10.0]])
    assert shares[0].tolist() == pytest.approx([1 / 6, 1.0, 5 / 6, 1.0], abs=1e-5)
    assert imbalance_of([[60.0, 50.0, 10.0]], table, topology).worst == pytest.approx(80 / 60)
    assert imbalance_of([[60.0, 50.0, 10.0]], table.with_shares(shares), topology, Dispatch.WEIGHTED).worst == pytest.approx(
        1.0, abs=1e-5
    )


def test_of_splits_that_balance_alike_the_one_nearest_to_even_is_taken() -> None:
    table, topology = table_of([[0, 1, 0, 1, 2, -1]], 3, 3), Topology.regular(num_ranks=3)
    shares = weighted_shares(table, topology, [[10.0, 10.0, 50.0]])  # rank 2 is the busiest whatever the others do
    assert shares[0].tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 0.0]


def test_of_splits_that_balance_alike_the_one_with_fewest_tokens_across_nodes_is_taken() -> None:
    table, topology = table_of([[0, 1, 0, 1, 2, 3]], 4, 3), Topology.regular(num_ranks=3, num_nodes=3)
    loads = [[10.0, 10.0, 50.0, 0.0]]
    sources = np.zeros((1, 3, 4))
    sources[0, 0, 0] = sources[0, 1, 1] = 10.0
    sources[0, 2, 2] = 50.0
    shares = weighted_shares(table, topology, loads, sources)
    assert shares[0].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    hops = token_hops(loads, table.with_shares(shares), topology, Dispatch.WEIGHTED, sources)
    assert hops.cross_node == 0.0
    assert token_hops(loads, table, topology, Dispatch.WEIGHTED, sources).cross_node == pytest.approx(10.0)


def test_hops_are_never_bought_with_balance() -> None:
    table, topology = table_of([[0, 1, 0, 2]], 3, 2), Topology.regular(num_ranks=2, num_nodes=2)
    sources = np.zeros((1, 2, 3))
    sources[0, 0, :] = [60.0, 50.0, 10.0]  # all tokens come from rank 0
    near = weighted_shares(table, topology, [[60.0, 50.0, 10.0]], sources)
    assert near[0].tolist() == pytest.approx([1 / 6, 1.0, 5 / 6, 1.0], abs=1e-5)


def test_slots_of_dead_ranks_take_nothing() -> None:
    ranks = tuple(RankId(rank) for rank in range(3))
    topology = Topology(ranks, ("n",) * 3, None, frozenset({RankId(1)}))
    shares = weighted_shares(table_of([[0, 1, 0, 2, 0, 1]], 3, 3), topology, [[30.0, 10.0, 5.0]])
    assert shares[0].tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0, 0.5, 0.5])  # expert 2 is on the dead rank alone


def test_two_copies_on_one_rank_take_equal_parts() -> None:
    shares = weighted_shares(table_of([[0, 0, 0, 1]], 2, 2), Topology.regular(num_ranks=2), [[60.0, 20.0]])
    assert shares[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0], abs=1e-5)


def test_rounding_gives_what_is_missing_to_the_slots_that_lost_most() -> None:
    third = rounded_shares(np.array([[0], [0], [0]]), np.full((3, 1), 1 / 3))
    assert (third * SHARE_UNITS).tolist() == [349526.0, 349525.0, 349525.0]
    assert rounded_shares(np.array([[0], [0]]), np.zeros((2, 1))).tolist() == [0.5, 0.5]  # an idle expert


def test_idle_layers_and_idle_experts_split_evenly() -> None:
    shares = weighted_shares(table_of([[0, 0, 1, 1]] * 2, 2, 4), Topology.regular(num_ranks=4), [[0.0, 0.0], [8.0, 0.0]])
    assert shares.tolist() == [[0.5] * 4] * 2


def test_the_same_table_and_load_give_the_same_shares_bit_for_bit() -> None:
    rows = np.tile(np.arange(288) % 256, (4, 1)).astype(np.int32)
    rng = np.random.default_rng(1)
    table = table_of(rng.permuted(rows, axis=1).tolist(), 256, 32)
    topology = Topology.regular(num_ranks=32, num_nodes=4)
    first = weighted_shares(table, topology, STANDARD[:4])
    assert np.array_equal(first, weighted_shares(table, topology, STANDARD[:4]))
    weighted = imbalance_of(STANDARD[:4], table.with_shares(first), topology, Dispatch.WEIGHTED).per_layer
    even = imbalance_of(STANDARD[:4], table, topology).per_layer
    assert all(now <= before * (1 + 1e-6) for now, before in zip(weighted, even, strict=True))


def test_a_plan_gets_shares_under_weighted_dispatch_only() -> None:
    table = table_of([[0, 1, 0, 2]], 3, 2)
    loads, topology = np.array([[[60.0, 50.0, 10.0]]]), Topology.regular(num_ranks=2)
    even = PlanningProblem(loads=loads, topology=topology, current=table)
    assert with_shares(even, table.physical_to_logical) is None
    weighted = PlanningProblem(loads=loads, topology=topology, current=table, dispatch=Dispatch.WEIGHTED)
    shares = with_shares(weighted, table.physical_to_logical)
    assert shares is not None
    assert np.array_equal(shares, weighted_shares(table, topology, loads[0]))


def test_sglang_24515_a_missing_solver_is_an_error_and_never_another_split(monkeypatch: pytest.MonkeyPatch) -> None:
    require_solver()
    monkeypatch.setitem(sys.modules, "ortools.linear_solver", None)
    with pytest.raises(EnvironmentFault, match=r"OR-Tools cannot be imported .* install eplb-service\[planner\]"):
        require_solver()
    with pytest.raises(EnvironmentFault, match="OR-Tools cannot be imported"):
        weighted_shares(table_of([[0, 1, 0, 2]], 3, 2), Topology.regular(num_ranks=2), [[60.0, 50.0, 10.0]])


def test_loads_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\(1 layers, 2 experts\); got \(2,\)"):
        weighted_shares(table_of([[0, 1]], 2, 2), Topology.regular(num_ranks=2), [1.0, 2.0])
