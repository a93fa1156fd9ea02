from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch, imbalance_of, rank_loads
from eplb_service.errors import InvalidInputError, UnsupportedError
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.topology import Topology


def table_of(rows: list[list[int]], num_logical: int, num_ranks: int) -> Table:
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    return Table("m", tuple(range(len(rows))), num_logical, ranks, np.array(rows, np.int32))


def slow_rank_loads(load: list[float], row: list[int], topology: Topology, dispatch: Dispatch) -> list[float]:
    """Walk every (source, expert) pair by hand."""
    num_ranks = topology.num_ranks
    slots = len(row) // num_ranks
    alive = topology.alive_positions()
    result = [0.0] * num_ranks
    for source in alive:
        for expert, tokens in enumerate(load):
            replicas = [slot // slots for slot, held in enumerate(row) if held == expert and slot // slots in alive]
            if not replicas:
                continue
            chosen = replicas
            if dispatch is Dispatch.NEAREST:
                here = [rank for rank in replicas if rank == source]
                near = [rank for rank in replicas if topology.nodes[rank] == topology.nodes[source]]
                chosen = here or near or replicas
            for rank in chosen:
                result[rank] += tokens / len(alive) / len(chosen)
    return result


@st.composite
def placements(draw: st.DrawFn) -> tuple[Topology, list[int], list[float]]:
    num_ranks = draw(st.integers(1, 5))
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=draw(st.integers(1, num_ranks)))
    dead = draw(st.sets(st.sampled_from(topology.rank_ids), max_size=num_ranks - 1))
    topology = Topology(topology.rank_ids, topology.nodes, None, frozenset(dead))
    num_logical = draw(st.integers(1, 6))
    row = draw(st.lists(st.integers(-1, num_logical - 1), min_size=num_ranks * 3, max_size=num_ranks * 3))
    load = draw(st.lists(st.integers(0, 100).map(float), min_size=num_logical, max_size=num_logical))
    return topology, row, load


@settings(max_examples=150, deadline=None, derandomize=True)
@given(placements(), st.sampled_from([Dispatch.EVEN, Dispatch.HASHED, Dispatch.NEAREST]))
def test_rank_loads_equal_a_walk_over_sources_and_replicas(
    case: tuple[Topology, list[int], list[float]], dispatch: Dispatch
) -> None:
    topology, row, load = case
    fast = rank_loads([load], table_of([row], len(load), topology.num_ranks), topology, dispatch)[0]
    assert fast == pytest.approx(slow_rank_loads(load, row, topology, dispatch), abs=1e-9)


def test_nearest_dispatch_loads_the_copy_with_more_neighbours() -> None:
    topology = Topology(tuple(RankId(rank) for rank in range(4)), ("a", "a", "a", "b"))
    table = table_of([[0, 1, 2, 0]], 3, 4)
    load = [[100.0, 50.0, 50.0]]
    assert rank_loads(load, table, topology, Dispatch.EVEN)[0].tolist() == [50.0, 50.0, 50.0, 50.0]
    assert rank_loads(load, table, topology, Dispatch.NEAREST)[0].tolist() == [75.0, 50.0, 50.0, 25.0]


def test_imbalance_leaves_dead_ranks_out_and_respects_capacity() -> None:
    table = table_of([[0, 1, 2]], 3, 3)
    ranks = tuple(RankId(rank) for rank in range(3))
    dead = Topology(ranks, ("n", "n", "n"), None, frozenset({RankId(2)}))
    assert imbalance_of([[10, 10, 5]], table, dead).worst == 1.0
    fast = Topology(ranks, ("n", "n", "n"), (2.0, 1.0, 1.0))
    assert imbalance_of([[20, 10, 10]], table, fast).worst == 1.0


def test_weighted_dispatch_says_that_it_is_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="shares of each replica"):
        rank_loads([[1.0]], table_of([[0]], 1, 1), Topology.regular(num_ranks=1), Dispatch.WEIGHTED)


def test_wrong_shape_and_a_fleet_of_dead_ranks_are_refused() -> None:
    topology = Topology.regular(num_ranks=1)
    with pytest.raises(InvalidInputError, match="1 layers, 1 experts"):
        rank_loads([[1.0, 2.0]], table_of([[0]], 1, 1), topology)
    all_dead = Topology(topology.rank_ids, topology.nodes, None, frozenset(topology.rank_ids))
    with pytest.raises(InvalidInputError, match="all 1 ranks are dead"):
        imbalance_of([[1.0]], table_of([[0]], 1, 1), all_dead)
