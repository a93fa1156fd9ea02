"""The copies of chunks, against a slow walk over every slot: complete, from the nearest sources, each expert once to a node."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.hook.stage_check import LayerShape, RankShape, check_stage
from eplb_service.control import Address, Copy, LiveLayer, Stage
from eplb_service.ids import ChunkId, GenerationNumber, GroupId, Incarnation, LayerRef, RankId
from eplb_service.moves import residency_moves
from eplb_service.placement import Placement, Table
from eplb_service.rollout.chunks import PlannedChunk, plan_chunks
from eplb_service.rollout.traffic import Traffic
from eplb_service.topology import LinkKind, Topology

SIZE = 10
MANY = 1 << 40


@dataclass(frozen=True)
class Case:
    live: Table
    target: Table
    where: Topology

    def chunks(self, *, fan_out: bool, budget: int = MANY) -> tuple[PlannedChunk, ...]:
        return plan_chunks(
            Placement((self.live,)),
            Placement((self.target,)),
            topology=self.where,
            expert_bytes=dict.fromkeys(self.live.layers, SIZE),
            staging_bytes=dict.fromkeys(self.where.rank_ids, budget),
            fan_out=fan_out,
        )

    def holders(self, layer: LayerRef, expert: int) -> list[int]:
        """Positions of ranks that serve and hold an expert now."""
        row = self.live.row(layer.layer_id)
        slots = self.live.slots_per_rank
        return [rank for rank in self.where.alive_positions() if expert in row[rank * slots : (rank + 1) * slots]]

    def wanted(self) -> Counter[tuple[LayerRef, int, int, int]]:
        """(layer, rank position, slot, expert) that must be filled."""
        found: Counter[tuple[LayerRef, int, int, int]] = Counter()
        for layer in self.live.layers:
            old, new = self.live.row(layer.layer_id), self.target.row(layer.layer_id)
            for index in range(old.size):
                if new[index] not in (-1, old[index]):
                    found[layer, *divmod(index, self.live.slots_per_rank), int(new[index])] += 1
        return found

    def needing(self) -> set[tuple[LayerRef, int, str]]:
        """(layer, expert, node) where a rank gets an expert and no rank of the node holds it."""
        return {
            (layer, expert, self.where.nodes[rank])
            for layer, rank, _, expert in self.wanted()
            if self.where.nodes[rank] not in {self.where.nodes[holder] for holder in self.holders(layer, expert)}
        }

    def link(self, copy: Copy) -> LinkKind:
        return self.where.link(self.where.position_of(copy.source_rank), self.where.position_of(copy.target_rank))


@st.composite
def cases(draw: st.DrawFn, *, distinct: bool = False) -> Case:
    """Small groups, some with dead ranks, NICs that ranks share, ranks of a node apart. distinct: no expert twice on a rank."""
    num_ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    ids = tuple(RankId(rank) for rank in draw(st.permutations(range(3, 3 + num_ranks))))
    nodes = tuple(f"n{draw(st.integers(0, 2))}" for _ in ids)
    nics = tuple(f"nic{draw(st.integers(0, 1))}" for _ in ids) if draw(st.booleans()) else None
    dead = draw(st.sets(st.sampled_from(ids), max_size=num_ranks - 1)) if draw(st.booleans()) else set()
    num_logical = draw(st.integers(slots, 6))
    rows: tuple[list[list[int]], list[list[int]]] = ([], [])
    for _ in range(draw(st.integers(1, 3))):
        held = [_on_rank(draw, slots, num_logical, distinct) for _ in ids]
        known = {expert for rank, mine in zip(ids, held, strict=True) if rank not in dead for expert in mine}
        after = [
            [expert if expert in known else -1 for expert in _on_rank(draw, slots, num_logical, distinct)]
            if rank not in dead
            else [-1] * slots
            for rank in ids
        ]
        rows[0].append([expert for mine in held for expert in mine])
        rows[1].append([expert for mine in after for expert in mine])
    layers = tuple(range(len(rows[0])))
    live, target = (Table("m", layers, num_logical, ids, np.array(made, np.int32)) for made in rows)
    return Case(live, target, Topology(ids, nodes, dead=frozenset(dead), nics=nics))


def _on_rank(draw: st.DrawFn, slots: int, num_logical: int, distinct: bool) -> list[int]:
    experts = st.integers(0, num_logical - 1)
    return draw(st.lists(experts, min_size=slots, max_size=slots, unique=distinct))


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_every_slot_that_changes_is_filled_once_from_a_live_slot_or_a_relay(case: Case, fan_out: bool) -> None:
    filled: Counter[tuple[LayerRef, int, int, int]] = Counter()
    for chunk in case.chunks(fan_out=fan_out):
        assert all(not copy.is_relay for copy in chunk.copies) or fan_out
        for index, copy in enumerate(chunk.copies):
            source, target = case.where.position_of(copy.source_rank), case.where.position_of(copy.target_rank)
            filled[copy.layer, target, copy.target_slot, copy.expert] += 1
            assert copy.source_rank not in case.where.dead
            if copy.is_relay:
                first = chunk.copies[copy.relay_of]
                assert copy.relay_of < index
                assert not first.is_relay
                assert (first.layer, first.expert) == (copy.layer, copy.expert)
                assert (first.target_rank, first.target_slot) == (copy.source_rank, copy.source_slot)
            else:
                held = case.live.row(copy.layer.layer_id)[source * case.live.slots_per_rank + copy.source_slot]
                assert held == copy.expert
    assert filled == case.wanted()


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_no_source_is_nearer_than_the_one_that_is_used(case: Case, fan_out: bool) -> None:
    for chunk in case.chunks(fan_out=fan_out):
        for copy in chunk.copies:
            target = case.where.position_of(copy.target_rank)
            links = {case.where.link(holder, target) for holder in case.holders(copy.layer, copy.expert)}
            if LinkKind.SAME_RANK in links:
                assert case.link(copy) is LinkKind.SAME_RANK
                assert not copy.is_relay
            elif LinkKind.SAME_NODE in links or copy.is_relay:
                assert case.link(copy) is not LinkKind.CROSS_NODE
            else:
                assert case.link(copy) is LinkKind.CROSS_NODE


@settings(max_examples=40, deadline=None)
@given(cases())
def test_an_expert_crosses_to_a_node_once_and_only_when_nobody_there_holds_it(case: Case) -> None:
    """One expert to N places was seen to cost N sends (vllm-ascend#2820, #2952)."""
    crossing: Counter[tuple[LayerRef, int, str]] = Counter()
    for chunk in case.chunks(fan_out=True):
        for copy in chunk.copies:
            if case.link(copy) is LinkKind.CROSS_NODE:
                crossing[copy.layer, copy.expert, case.where.node_of(copy.target_rank)] += 1
    assert crossing == Counter(case.needing())


def sent_by(case: Case, copies: list[Copy], *, servers: tuple[int, ...], link: LinkKind | None) -> int:
    """Most copies that one server sends to other ranks. servers: of each rank position. link: only over these."""
    sent = Counter(
        servers[case.where.position_of(copy.source_rank)]
        for copy in copies
        if copy.source_rank != copy.target_rank and link in (None, case.link(copy))
    )
    return max(sent.values(), default=0)


def naive(case: Case, copies: list[Copy]) -> list[Copy]:
    """The same, each from the first rank among the nearest, in column order."""
    made = []
    for copy in copies:
        target = case.where.position_of(copy.target_rank)
        source = case.where.position_of(copy.source_rank)
        if not copy.is_relay:
            holders = case.holders(copy.layer, copy.expert)
            source = next(rank for rank in holders if case.where.link(rank, target) is case.link(copy))
        made.append(
            Copy(
                layer=copy.layer,
                expert=copy.expert,
                source_rank=case.where.rank_ids[source],
                source_slot=0,
                target_rank=copy.target_rank,
                target_slot=0,
                relay_of=copy.relay_of,
            )
        )
    return made


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_what_the_busiest_sends_is_never_more_than_from_the_first_source_that_comes(case: Case, fan_out: bool) -> None:
    for chunk in case.chunks(fan_out=fan_out):
        planned, simple = list(chunk.copies), naive(case, list(chunk.copies))
        if case.where.nics is None:
            ranks = tuple(range(case.where.num_ranks))
            assert sent_by(case, planned, servers=ranks, link=None) <= sent_by(case, simple, servers=ranks, link=None)
        else:
            nics, across = case.where.nic_indices, LinkKind.CROSS_NODE
            assert sent_by(case, planned, servers=nics, link=across) <= sent_by(case, simple, servers=nics, link=across)


@settings(max_examples=40, deadline=None)
@given(cases(distinct=True))
def test_moves_are_priced_by_the_bytes_that_the_copies_carry(case: Case) -> None:
    for fan_out in (False, True):
        by_link = dict.fromkeys(LinkKind, 0)
        into_rank = [0] * case.where.num_ranks
        into_nic = [0] * case.where.num_nics
        for chunk in case.chunks(fan_out=fan_out):
            for copy in chunk.copies:
                link, target = case.link(copy), case.where.position_of(copy.target_rank)
                by_link[link] += SIZE
                into_rank[target] += SIZE * (link is not LinkKind.SAME_RANK)
                into_nic[case.where.nic_indices[target]] += SIZE * (link is LinkKind.CROSS_NODE)
        priced = residency_moves(case.live, case.target, case.where, (SIZE,) * case.live.num_layers, fan_out=fan_out)
        assert (priced.bytes_by_link, priced.bytes_without_source) == (by_link, 0)
        assert priced.bytes_into_busiest_rank == max(into_rank)
        assert priced.bytes_into_busiest_nic == (max(into_nic) if case.where.nics is not None else 0)


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_traffic_of_a_chunk_is_that_of_its_copies_one_by_one(case: Case, fan_out: bool) -> None:
    for chunk in case.chunks(fan_out=fan_out):
        sent, passed_on, received, into_nics, out_of_nics = (Counter[int]() for _ in range(5))
        for copy in chunk.copies:
            source, target = case.where.position_of(copy.source_rank), case.where.position_of(copy.target_rank)
            if source != target:
                (passed_on if copy.is_relay else sent)[source] += SIZE
                received[target] += SIZE
            if case.where.nodes[source] != case.where.nodes[target]:
                out_of_nics[case.where.nic_indices[source]] += SIZE
                into_nics[case.where.nic_indices[target]] += SIZE
        ranks, nics = range(case.where.num_ranks), range(case.where.num_nics)
        assert chunk.traffic == Traffic(
            by_link={kind: SIZE * sum(case.link(copy) is kind for copy in chunk.copies) for kind in LinkKind},
            sent=tuple(sent[rank] for rank in ranks),
            passed_on=tuple(passed_on[rank] for rank in ranks),
            received=tuple(received[rank] for rank in ranks),
            into_nics=tuple(into_nics[nic] for nic in nics),
            out_of_nics=tuple(out_of_nics[nic] for nic in nics),
        )


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_ranks_that_send_at_the_allowed_rate_are_done_within_the_bytes_in_a_row(case: Case, fan_out: bool) -> None:
    """Walk of all ranks: each sends from its slots in order, then passes on what has arrived; a byte takes a second."""
    for chunk in case.chunks(fan_out=fan_out):
        left_at, free_at = dict[int, int](), Counter[RankId]()
        for relays in (False, True):
            for index, copy in enumerate(chunk.copies):
                if copy.is_relay is relays and copy.source_rank != copy.target_rank:
                    ready = free_at[copy.source_rank]
                    if copy.is_relay:
                        ready = max(ready, left_at.get(copy.relay_of, 0))
                    left_at[index] = free_at[copy.source_rank] = ready + SIZE
        assert max(left_at.values(), default=0) <= chunk.traffic.bytes_in_a_row


@settings(max_examples=40, deadline=None)
@given(cases())
def test_an_expert_that_a_rank_gets_twice_crosses_once_too(case: Case) -> None:
    crossed = sum(case.link(copy) is LinkKind.CROSS_NODE for chunk in case.chunks(fan_out=True) for copy in chunk.copies)
    priced = residency_moves(case.live, case.target, case.where, (SIZE,) * case.live.num_layers, fan_out=True)
    assert priced.bytes_by_link[LinkKind.CROSS_NODE] == SIZE * crossed


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans(), st.integers(0, 3))
def test_chunks_stage_within_the_budget_what_is_passed_on_too(case: Case, fan_out: bool, more: int) -> None:
    slots = [rank for _, rank, _, _ in case.wanted()]
    by_layer = Counter((layer, rank) for layer, rank, _, _ in case.wanted())
    budget = SIZE * (max(by_layer.values(), default=1) + more)
    staged = 0
    for chunk in case.chunks(fan_out=fan_out, budget=budget):
        arrives = Counter(copy.target_rank for copy in chunk.copies)
        assert chunk.staged_bytes == tuple(SIZE * arrives[rank] for rank in case.where.rank_ids)
        assert max(chunk.staged_bytes) <= budget
        staged += sum(chunk.staged_bytes)
    assert staged == SIZE * len(slots)


@settings(max_examples=40, deadline=None)
@given(cases(distinct=True), st.booleans())
def test_every_rank_takes_the_chunks(case: Case, fan_out: bool) -> None:
    """Both ends follow one list, which each rank checks in full before a byte moves (pytorch#174288)."""
    covered = all(set(range(case.live.num_logical)) <= set(row) for row in case.target.physical_to_logical.tolist())
    live = {
        layer: LiveLayer(
            layer=layer,
            generation=GenerationNumber(0),
            digest=Placement((case.live,)).row_digests()[layer],
            row=tuple(case.live.row(layer.layer_id).tolist()),
        )
        for layer in case.live.layers
    }
    layer_shape = LayerShape(num_logical=case.live.num_logical, slots=case.live.slots_per_rank, expert_bytes=SIZE)
    for chunk in case.chunks(fan_out=fan_out):
        for rank in case.where.rank_ids:
            shape = RankShape(
                rank_id=rank,
                group_rank_ids=case.where.rank_ids,
                layers=dict.fromkeys(case.live.layers, layer_shape),
                replica_table_width=case.live.num_physical,
                staging_bytes=MANY,
            )
            stage = Stage(
                to=Address(rank, Incarnation(1), GroupId(1)),
                chunk_id=ChunkId(1),
                generation=GenerationNumber(1),
                weights_version=0,
                mesh_id=ChunkId(1),
                layers=chunk.layers,
                copies=chunk.copies,
                stage_timeout_s=1.0,
                arm_ttl_s=1.0,
            )
            refusal = check_stage(stage, shape, live, 0)
            assert refusal is None or (not covered and "would have no replica" in refusal[1])


def table(rows: list[list[int]], num_logical: int) -> Table:
    ranks = len(rows)
    return Table("m", (0,), num_logical, tuple(RankId(rank) for rank in range(ranks)), np.array(rows, np.int32).reshape(1, -1))


def test_one_expert_that_six_ranks_get_crosses_to_the_other_node_once() -> None:
    """Expert 0 is new on three ranks of its node and on three of another (vllm-ascend#2820, #2952)."""
    live = table([[0, 1], [1, 1], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2], [2, 2]], 3)
    target = table([[0, 1], [0, 1], [0, 1], [0, 1], [0, 2], [0, 2], [0, 2], [2, 2]], 3)
    case = Case(live, target, Topology.regular(num_ranks=8, num_nodes=2))
    (chunk,) = case.chunks(fan_out=True)
    assert [(copy.source_rank, copy.target_rank, copy.relay_of) for copy in chunk.copies] == [
        (0, 4, -1),
        (0, 1, -1),
        (0, 2, -1),
        (0, 3, -1),
        (4, 5, 0),
        (4, 6, 0),
    ]
    assert (chunk.traffic.by_link[LinkKind.SAME_NODE], chunk.traffic.by_link[LinkKind.CROSS_NODE]) == (5 * SIZE, SIZE)
    assert (chunk.traffic.bytes_in_a_row, max(chunk.traffic.into_nics)) == (4 * SIZE + 2 * SIZE, SIZE)
    (without,) = case.chunks(fan_out=False)
    assert [copy.source_rank for copy in without.copies] == [0] * 6


def test_experts_enter_a_node_over_different_nics() -> None:
    live = table([[0, 1], [0, 1], [2, 2], [2, 2]], 3)
    target = table([[0, 1], [0, 1], [0, 1], [1, 0]], 3)
    case = Case(live, target, Topology.regular(num_ranks=4, num_nodes=2).with_nics(2))
    (chunk,) = case.chunks(fan_out=True)
    direct = [copy for copy in chunk.copies if not copy.is_relay]
    assert sorted(copy.target_rank for copy in direct) == [2, 3]
    assert sorted(copy.source_rank for copy in direct) == [0, 1]


def test_layers_that_load_one_nic_each_take_turns() -> None:
    """Each layer brings one expert to both ranks of a node: the NICs of the node carry one each."""
    ranks = tuple(RankId(rank) for rank in range(3))
    live = Table("m", (0, 1), 2, ranks, np.array([[0, 1, 1], [0, 1, 1]], np.int32))
    target = Table("m", (0, 1), 2, ranks, np.array([[0, 0, 0], [0, 0, 0]], np.int32))
    case = Case(live, target, Topology(ranks, ("a", "b", "b"), nics=("x", "x", "y")))
    (chunk,) = case.chunks(fan_out=True)
    assert [copy.target_rank for copy in chunk.copies if not copy.is_relay] == [1, 2]
    assert residency_moves(live, target, case.where, (SIZE, SIZE), fan_out=True).bytes_into_busiest_nic == SIZE


def test_ranks_turn_to_different_targets() -> None:
    """All ranks swap all experts: in each round of copies no two go to one rank."""
    num_ranks = 4
    live = table([[rank] * num_ranks for rank in range(num_ranks)], num_ranks)
    target = table([list(range(num_ranks))] * num_ranks, num_ranks)
    (chunk,) = Case(live, target, Topology.regular(num_ranks=num_ranks)).chunks(fan_out=True)
    turns: dict[int, list[int]] = {}
    for copy in chunk.copies:
        turns.setdefault(copy.source_rank, []).append(copy.target_rank)
    for targets in zip(*turns.values(), strict=True):
        assert len(set(targets)) == num_ranks


def test_experts_leave_a_node_over_different_nics() -> None:
    """Ranks 0 and 1 share a NIC: two experts that all three ranks of the node hold leave by rank 2 too."""
    live = table([[0, 1], [0, 1], [0, 1], [2, 3]], 4)
    target = table([[0, 1], [2, 3], [0, 1], [0, 1]], 4)
    case = Case(live, target, Topology(live.rank_ids, ("a", "a", "a", "b"), nics=("x", "x", "y", "x")))
    (chunk,) = case.chunks(fan_out=True)
    assert sorted(copy.source_rank for copy in chunk.copies if copy.target_rank == 3) == [0, 2]


def test_traffic_in_words() -> None:
    by_link = {LinkKind.SAME_RANK: 1, LinkKind.SAME_NODE: 88_000_000, LinkKind.CROSS_NODE: 132_000_000}
    ranks, into_nics, out_of_nics = (0, 0), (44_000_000, 88_000_000), (132_000_000, 0)
    traffic = Traffic(
        by_link=by_link, sent=ranks, passed_on=ranks, received=ranks, into_nics=into_nics, out_of_nics=out_of_nics
    )
    assert str(traffic) == "88.0 MB within nodes, 132.0 MB between them (busiest NIC 88.0 MB in, 132.0 MB out)"
    near = dataclasses.replace(traffic, by_link={**by_link, LinkKind.CROSS_NODE: 0})
    assert str(near) == "88.0 MB within nodes, 0.0 MB between them"
