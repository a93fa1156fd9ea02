"""Ranks that share a NIC: what comes in over it, what that costs, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.calibration import LinkRates, NicTransfers, Transfer
from eplb_service.control import Address, LayerInfo, LinkBytes, ModelInfo, Registration, Staged
from eplb_service.costs import CostModel, copy_seconds, price
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.gate import GateConfig, GateInputs, TableEvidence, Verdict, VerdictCode, decide
from eplb_service.hops import TokenHops, token_hops
from eplb_service.ids import ChunkId, DeploymentId, GroupId, Incarnation, Phase, RankId
from eplb_service.membership.machine import Group
from eplb_service.moves import NO_MOVES, MoveSummary, residency_moves
from eplb_service.placement import Placement, Table
from eplb_service.planner.learning import Learning
from eplb_service.planner.proposing import moves_between
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.verify import verify
from eplb_service.topology import LinkKind, Topology
from tests.unit.test_dispatch import Case, cases, walk

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


@settings(max_examples=80, deadline=None)
@given(changes(), st.lists(st.integers(0, 50), min_size=3, max_size=3))
def test_bytes_into_the_busiest_nic_equal_a_walk_over_ranks_and_experts(
    case: tuple[Topology, Table, Table], sizes: list[int]
) -> None:
    topology, before, after = case
    summary = residency_moves(before, after, topology, sizes[: before.num_layers])
    over = slow_bytes_into_nics(topology, before, after, sizes[: before.num_layers])
    assert summary.bytes_into_busiest_nic == max(over.values(), default=0)
    assert sum(over.values()) == summary.bytes_by_link[LinkKind.CROSS_NODE] + summary.bytes_without_source


@settings(max_examples=60, deadline=None)
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
    both = price(COST, [moved(busiest_rank=100, busiest_nic=400), moved(busiest_rank=100, busiest_nic=100)], num_flips=2)
    assert (both.copy_s, both.nic_s, both.interference_s) == (250.0, 200.0, 250.0)


def test_tables_are_carried_one_after_another_so_what_their_nics_take_adds_up() -> None:
    registrations = [replace(rank_on("rail0", rank), node="ab"[rank]) for rank in range(2)]
    model = registrations[0].models[0]
    both = (model, replace(model, name="drafter"))
    group = Group.of(tuple(replace(registration, models=both) for registration in registrations))
    tables = [table_of([[0, 1, 2, 3]], 4, 2), table_of([[0, 2, 2, 3]], 4, 2)]
    before, after = (
        Placement(tuple(Table(name, (0,), 4, group.rank_ids, table.physical_to_logical) for name in ("v3", "drafter")))
        for table in tables
    )
    moves = moves_between(before, after, group)
    assert moves.bytes_by_link[LinkKind.CROSS_NODE] == moves.bytes_into_busiest_nic == 2 * 8


def test_nics_are_told_by_node_and_name() -> None:
    ranks = tuple(RankId(rank) for rank in range(5))
    topology = Topology(ranks, ("a", "a", "b", "b", "a"), nics=("x", "y", "x", "x", "x"))
    assert topology.nic_indices == (0, 1, 2, 2, 0)
    assert topology.num_nics == 3
    own = replace(topology, nics=None)
    assert own.nic_indices == (0, 1, 2, 3, 4)
    assert own.num_nics == 5


@settings(max_examples=60, deadline=None)
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


# ── measured rates ───────────────────────────────────────────────────────────────────────────────────────────────────────

WITHIN_PER_S, ACROSS_PER_S = 20e9, 4e9


def received_over_nics(random: np.random.Generator, nic_of: tuple[int, ...]) -> list[Transfer]:
    """One chunk: what each rank received, first from its node, then over its NIC, which its ranks share evenly in time."""
    within = random.integers(1 << 24, 1 << 28, len(nic_of))
    across = random.integers(1 << 24, 1 << 28, len(nic_of)) * (random.random(len(nic_of)) < 0.8)
    over_nic = np.bincount(nic_of, weights=across)
    noise = random.uniform(0.97, 1.03, len(nic_of))
    return [
        Transfer(
            same_node=int(near),
            cross_node=int(far),
            seconds=float((near / WITHIN_PER_S + (over_nic[nic] / ACROSS_PER_S if far else 0.0)) * slower),
        )
        for near, far, nic, slower in zip(within, across, nic_of, noise, strict=True)
    ]


def test_rate_of_a_nic_is_measured_and_not_the_part_that_one_of_its_ranks_gets() -> None:
    random, nic_of = np.random.default_rng(3), (0, 0, 0, 0, 1, 1, 1, 1)
    by_nic, by_rank, nics = LinkRates(), LinkRates(), NicTransfers()
    for chunk in range(60):
        told = received_over_nics(random, nic_of)
        for position in random.permutation(len(nic_of)).tolist():
            for transfer in nics.add(chunk, position, told[position], nic_of):
                by_nic.add(same_node=transfer.same_node, cross_node=transfer.cross_node, seconds=transfer.seconds)
            one = told[position]
            by_rank.add(same_node=one.same_node, cross_node=one.cross_node, seconds=one.seconds)
    assert by_nic.rates()[0] == pytest.approx(WITHIN_PER_S, rel=0.1)
    assert by_nic.rates()[1] == pytest.approx(ACROSS_PER_S, rel=0.1)
    mistaken = by_rank.rates()[1]
    assert mistaken is not None
    assert mistaken < ACROSS_PER_S / 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.floats(0, 9)), min_size=1, max_size=6), st.data())
def test_every_nic_counts_once_a_chunk_in_whatever_order_its_ranks_tell(
    given_: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    told = [Transfer(same_node=near, cross_node=far, seconds=seconds) for near, far, seconds in given_]
    nic_of = tuple(data.draw(st.lists(st.integers(0, 2), min_size=len(told), max_size=len(told))))
    nics = NicTransfers()
    order = data.draw(st.permutations(range(len(told))))
    repeats = data.draw(st.lists(st.sampled_from(range(len(told))), max_size=4))
    counted = [one for position in [*order, *repeats] for one in nics.add(7, position, told[position], nic_of)]
    within = [one for one in told if not one.cross_node]
    across = []
    for nic in set(nic_of):
        crossing = [one for one, mine in zip(told, nic_of, strict=True) if mine == nic and one.cross_node]
        if crossing:
            whole = (sum(one.cross_node for one in crossing), max(one.seconds for one in crossing))
            near = {one.same_node for one in counted if (one.cross_node, one.seconds) == whole}
            assert near & {one.same_node for one in crossing if one.seconds == whole[1]}
            across.append(whole)
    assert sorted((one.cross_node, one.seconds) for one in counted if one.cross_node) == sorted(across)
    key = lambda one: (one.same_node, one.seconds)  # noqa: E731
    assert sorted((one for one in counted if not one.cross_node), key=key) == sorted(within, key=key)
    assert nics.add(6, 0, told[0], nic_of) == ()  # late, of a chunk before


def test_a_nic_of_which_a_rank_does_not_tell_is_not_counted() -> None:
    nics, far = NicTransfers(), Transfer(same_node=0, cross_node=8, seconds=1.0)
    assert nics.add(1, 0, far, (0, 0)) == ()
    assert nics.add(2, 1, far, (0, 0)) == ()
    assert nics.add(2, 0, far, (0, 0)) == (replace(far, cross_node=16),)


def rank_on(nic: str, rank: int) -> Registration:
    layer = LayerInfo(layer_id=0, num_logical=4, slots=2, expert_bytes=8)
    return Registration(
        deployment=DeploymentId("chat"),
        address=Address(RankId(rank), Incarnation(1), GroupId(1)),
        node="a",
        group_rank_ids=(RankId(0), RankId(1)),
        phase=Phase.DECODE,
        stage=0,
        models=(ModelInfo(name="v3", digest="d", manifest_digest="m", layers=(layer,)),),
        capacity=1.0,
        dispatch="even",
        vote_period=4,
        window_steps=8,
        sub_windows=1,
        staging_bytes=100,
        replica_table_width=4,
        weights_version=0,
        nic=nic,
    )


@pytest.mark.parametrize(("nic", "rate"), [("", 1e9), ("mlx5_0", 2e9)])
def test_what_ranks_say_of_a_chunk_is_learned_by_their_nics(nic: str, rate: float) -> None:
    """Two ranks receive 1 GB each from other nodes within a second: a NIC each of 1 GB/s, or one of 2 GB/s."""
    group = Group.of((rank_on(nic, 0), rank_on(nic, 1)))
    learning = Learning(windows_kept=4)
    for registration in group.registrations:
        message = Staged(
            sender=registration.address, chunk_id=ChunkId(9), seconds=1.0, received=LinkBytes(cross_node=1_000_000_000)
        )
        learning.heard(message, None)  # nobody knows its NICs
        assert learning.measured().cross_node_bytes_per_s in (None, pytest.approx(1e9))
        learning.heard(message, group)
    assert learning.measured().cross_node_bytes_per_s == pytest.approx(rate)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(list(Dispatch)), st.lists(st.sampled_from("xy"), min_size=5, max_size=5))
def test_tokens_over_the_busiest_nic_equal_a_walk_over_sources_and_replicas(
    case: Case, dispatch: Dispatch, names: list[str]
) -> None:
    table = case.weighted if dispatch is Dispatch.WEIGHTED else case.table
    topology = replace(case.topology, nics=tuple(names[: case.topology.num_ranks]))
    hops = token_hops([case.load], table, topology, dispatch, case.sources)
    assert topology.nics is not None
    over: dict[tuple[str, str], float] = {(topology.nodes[at], topology.nics[at]): 0.0 for at in topology.alive_positions()}
    for source, target, tokens in walk(case, dispatch):
        if topology.link(source, target) is LinkKind.CROSS_NODE:
            over[topology.nodes[target], topology.nics[target]] += tokens
    assert hops.num_nics == len(over)
    assert hops.into_busiest_nic == pytest.approx(max(over.values()), abs=1e-3)
    if sum(over.values()) > 1:
        mean = sum(over.values()) / len(over)
        assert hops.nic_imbalance == pytest.approx(max(over.values()) / mean, abs=1e-3)
        assert hops.busiest_nic_share == pytest.approx(max(over.values()) / sum(over.values()), abs=1e-3)
    unnamed = token_hops([case.load], table, case.topology, dispatch, case.sources)
    assert unnamed == replace(hops, into_busiest_nic=None, num_nics=0)
    assert set(unnamed.to_json()) == {"same_rank", "same_node", "cross_node"}
    assert unnamed.nic_imbalance == 1.0


def test_layers_that_load_other_rails_do_not_even_one_another_out() -> None:
    """Expert 0 is hot and on one rank of node b: over rail x in layer 0, over rail y in layer 1."""
    topology = Topology(tuple(RankId(rank) for rank in range(4)), ("a", "a", "b", "b"), nics=("x", "y", "x", "y"))
    table = table_of([[1, 2, 0, 3], [1, 2, 3, 0]], 4, 4)
    hops = token_hops([[100, 0, 0, 0], [100, 0, 0, 0]], table, topology)
    assert hops == TokenHops(same_rank=50.0, same_node=50.0, cross_node=100.0, into_busiest_nic=100.0, num_nics=4)
    assert hops.nic_imbalance == 4.0
    assert hops.to_json()["busiest_nic_share"] == 1.0
    idle = token_hops([[0, 0, 0, 0], [0, 0, 0, 0]], table, topology)
    assert (idle.nic_imbalance, idle.busiest_nic_share) == (1.0, 0.0)


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_move_that_pays_over_nics_of_their_own_is_kept_back_where_ranks_share_one() -> None:
    own = Topology.regular(num_ranks=8, num_nodes=2)
    loads = np.exp(np.random.default_rng(5).normal(0, 1, (1, 4, 16))) * 1e5
    current = Table.linear(model="m", layer_ids=range(4), num_logical=16, rank_ids=own.rank_ids, slots_per_rank=3)

    def asked(topology: Topology, horizon_steps: float) -> Verdict:
        problem = PlanningProblem(loads=loads, topology=topology, current=current, expert_bytes=(1_000_000_000,) * 4)
        proposal = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
        evidence = TableEvidence(loads=loads, current=current, proposal=proposal, expert_bytes=problem.expert_bytes)
        inputs = GateInputs(
            tables=(evidence,),
            topology=topology,
            dispatch=Dispatch.EVEN,
            coverage=1.0,
            generation_age_s=None,
            cost=CostModel(seconds_per_step=0.01, horizon_steps=horizon_steps, bytes_per_s=1e9, commit_stall_s=0.0),
        )
        return decide(GateConfig(min_sub_windows=1), inputs)

    alone, shared = asked(own, 1000.0).numbers, asked(own.with_nics(1), 1000.0).numbers
    assert shared["nic_s"] == shared["copy_s"] > 1.5 * alone["copy_s"]
    assert alone["nic_s"] == 0.0
    between_s = 1.25 * (alone["copy_s"] * shared["copy_s"]) ** 0.5  # what the gate wants saved for each second of cost
    steps = 1000.0 * between_s / alone["saved_s"]
    pays, held = asked(own, steps), asked(own.with_nics(1), steps)
    assert (pays.code, held.code) == (VerdictCode.MOVE, VerdictCode.COST_EXCEEDS_GAIN)
    assert "NIC" not in pays.reason
    assert f"{held.numbers['nic_s']:.3g} s of it waiting for the busiest NIC, at 100% interference" in held.reason
