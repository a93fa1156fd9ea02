from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch, rank_loads
from eplb_service.hops import token_hops
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.anneal_routes import Routes, pour, routes_of, serve_nearest
from eplb_service.policy.anneal_state import Layer, State, layer_of, new_state
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import limits_of
from eplb_service.policy.shares import best_split
from eplb_service.static_dispatch import static_shares
from eplb_service.topology import Topology

STANDARD = np.exp(np.random.default_rng(0).normal(0, 1, (58, 256))) * 1000


def problem_of(case: Case, dispatch: Dispatch) -> PlanningProblem:
    return PlanningProblem(
        loads=case.sources.sum(axis=1)[None] if case.given else np.array([[case.load]]),
        source_loads=case.sources if case.given else None,
        topology=case.topology,
        current=case.table,
        dispatch=dispatch,
    )


@dataclass
class Case:
    topology: Topology
    table: Table
    load: list[float]
    sources: npt.NDArray[np.float64]
    given: bool

    @property
    def rank_of(self) -> npt.NDArray[np.int32]:
        return (np.arange(self.table.num_physical) // self.table.slots_per_rank).astype(np.int32)

    @property
    def count_on(self) -> npt.NDArray[np.uint8]:
        counts = np.zeros((self.table.num_ranks, self.table.num_logical), np.uint8)
        for slot, expert in enumerate(self.table.physical_to_logical[0].tolist()):
            if expert >= 0:
                counts[slot // self.table.slots_per_rank, expert] += 1
        return counts

    def holders(self, expert: int) -> npt.NDArray[np.int32]:
        return np.flatnonzero(self.table.physical_to_logical[0] == expert).astype(np.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 6))
    ranks = tuple(RankId(rank) for rank in range(num_ranks))
    nodes = tuple(draw(st.lists(st.sampled_from("abc"), min_size=num_ranks, max_size=num_ranks)))
    dead = draw(st.sets(st.sampled_from(ranks), max_size=num_ranks - 1))
    num_logical = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    row = rng.integers(-1, num_logical, (num_ranks, 3))
    row[[rank in dead for rank in ranks]] = -1
    sources = rng.integers(0, 20, (1, num_ranks, num_logical)).astype(np.float64)
    load = rng.integers(0, 100, num_logical).astype(np.float64).tolist()
    table = Table("m", (0,), num_logical, ranks, row.reshape(1, -1).astype(np.int32))
    return Case(Topology(ranks, nodes, None, frozenset(dead)), table, load, sources, draw(st.booleans()))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_the_search_serves_an_expert_as_nearest_dispatch_does(case: Case) -> None:
    problem = problem_of(case, Dispatch.NEAREST)
    routes = routes_of(problem, 0)
    work = np.zeros(case.table.num_ranks)
    load = problem.total_loads[0]
    for expert in range(case.table.num_logical):
        holders = case.holders(expert)
        if holders.size:
            serve_nearest(*routes[1:], case.rank_of, holders, case.count_on, work, expert, load[expert], 1.0)
    expected = rank_loads(load[None], case.table, case.topology, Dispatch.NEAREST, problem.source_loads)[0]
    assert work == pytest.approx(expected, abs=1e-9)
    for expert in range(case.table.num_logical):
        holders = case.holders(expert)
        if holders.size:
            serve_nearest(*routes[1:], case.rank_of, holders, case.count_on, work, expert, load[expert], -1.0)
    assert work == pytest.approx(np.zeros_like(work), abs=1e-9)


def state_of(problem: PlanningProblem, routes: Routes) -> tuple[Layer, State]:
    limits = limits_of(problem)
    task = layer_task(problem, limits, Layout.of(problem, limits), 0)
    layer, slots = layer_of(task, task.held, routes)
    return layer, new_state(layer, slots, problem.current.num_physical)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([Dispatch.NEAREST, Dispatch.EVEN]))
def test_the_price_of_routes_counts_the_tokens_that_cross_nodes(case: Case, dispatch: Dispatch) -> None:
    problem = problem_of(case, dispatch)
    assume(not case.table.uncovered() and problem.total_loads.any())
    routes = routes_of(problem, 0)
    if routes.hop_price == 0.0:  # one node, or an even split from unknown sources: placements do not differ in hops
        assert case.topology.num_nodes == 1 or not case.given
        return
    _, state = state_of(problem, routes._replace(hop_price=1.0, misplaced_price=0.0))
    loads = problem.total_loads
    hops = token_hops(loads, case.table, case.topology, dispatch, problem.source_loads)
    fair = loads.sum() / len(case.topology.alive_positions())
    assert state.route_price.sum() * fair == pytest.approx(hops.cross_node, abs=1e-9)
    expected = rank_loads(loads, case.table, case.topology, dispatch, problem.source_loads)[0]
    assert state.work * fair == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("row", "misplaced"),
    [
        ([0, 1, 2, 3, 0, 4, 5, 6], 0.0),  # one copy a node: static tables do what equal parts do
        ([0, 0, 1, 2, 0, 3, 4, 5], 1 / 8),  # two of three on one node: the neighbours' 2/8 all go to the first
        ([0, 0, 1, 2, 3, 4, 5, 6], 0.0),  # all on one node: six senders dealt to two copies
        ([0, 0, 0, 1, 2, 3, 4, 5], 1 / 8 * 2 * 1 / 3),  # five dealt to three: two of them serve one sender more
    ],
)
def test_what_static_tables_put_elsewhere_is_priced(row: list[int], misplaced: float) -> None:
    topology = Topology.regular(num_ranks=8, num_nodes=2)
    table = Table("m", (0,), 7, topology.rank_ids, np.array([row], np.int32))
    loads = np.zeros((1, 1, 7))
    loads[0, 0, 0] = 240.0
    problem = PlanningProblem(loads=loads, topology=topology, current=table, dispatch=Dispatch.NEAREST)
    case = Case(topology, table, [], np.zeros(0), given=False)
    routes = routes_of(problem, 0)._replace(hop_price=0.0, misplaced_price=1.0)
    price = serve_nearest(*routes[1:], case.rank_of, case.holders(0), case.count_on, np.zeros(8), 0, 240.0, 1.0)
    assert price == pytest.approx(240 * misplaced)
    static = (static_shares(table, topology, seed=3) @ loads[0, 0])[0]
    nearest = rank_loads(loads[0], table, topology, Dispatch.NEAREST)[0]
    assert np.abs(static - nearest).sum() / 2 == pytest.approx(price)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(), st.lists(st.integers(1, 4), min_size=6, max_size=6), st.lists(st.integers(0, 40), min_size=6, max_size=6))
def test_an_expert_is_poured_over_its_copies_as_the_linear_program_splits_it(
    case: Case, speeds: list[int], others: list[int]
) -> None:
    capacity = np.array(speeds[: case.table.num_ranks], np.float64)
    other_work = np.array(others[: case.table.num_ranks], np.float64)
    holders = case.holders(0)
    if holders.size == 0:
        return
    work, part = other_work.copy(), np.full(case.table.num_physical, np.nan)
    pour(case.rank_of, 1 / capacity, holders, case.count_on, work, part, 0, 30.0)
    assert np.nansum(part) == pytest.approx(30.0)
    assert work - other_work == pytest.approx(np.bincount(case.rank_of[holders], part[holders], case.table.num_ranks))
    held = case.count_on[:, :1].astype(np.int64)
    best = best_split(held, np.array([30.0]), capacity, other_work).height
    assert float((work / capacity).max()) == pytest.approx(best)
