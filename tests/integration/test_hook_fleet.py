"""A fleet of four hooks in processes of their own: whole chunks, refusals, withdrawals, an agent process that goes away."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from eplb_service.control import Armed, Copy, Disarmed, Flipped, Live, RefusalCode, Refused, Staged, Throttle
from eplb_service.ids import LayerRef, RankId, chunk_id
from eplb_service.placement import Placement, Table, row_digest
from eplb_service.rollout.chunks import PlannedChunk, plan_chunks
from eplb_service.topology import LinkKind, Topology
from tests.integration.hook_fleet import EXPERT_BYTES, LAYERS, NUM_LOGICAL, SLOTS, FakeAgent, Fleet, copies

pytestmark = pytest.mark.process

SWAPPED = (5, 4, 2, 3, 1, 0, 0, 1)  # everything moves, two experts within their own rank
SPREAD = (0, 1, 2, 2, 4, 5, 3, -1)


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.integration.hook_fleet"])
    return context


@pytest.fixture(scope="module")
def fleet(context: multiprocessing.context.ForkServerContext) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        fleet = Fleet(context, folder)
        yield fleet
        assert max(fleet.close()) < 3.0


def test_all_ranks_register_with_equal_manifests_and_vote(fleet: Fleet) -> None:
    assert {status.off_reason for status in fleet.started} == {""}
    sizes = {status.staging_bytes for status in fleet.started}
    (size,) = sizes
    budget, padded = 2 * SLOTS * sum(EXPERT_BYTES.values()), 256 / min(EXPERT_BYTES.values())
    assert budget + 2 * max(EXPERT_BYTES.values()) <= size <= budget * padded + 3 * 256
    assert len({r.models for r in fleet.agent.registrations.values()}) == 1


def test_a_chunk_flips_at_one_boundary_on_all_ranks_and_weights_follow_the_map(fleet: Fleet) -> None:
    fleet.step(3)
    flipped = fleet.roll_out({LAYERS[0]: SWAPPED, LAYERS[1]: SPREAD})
    assert len({message.boundary for message in flipped.values()}) == 1
    for message in flipped.values():
        assert dict(message.digests) == {layer: row_digest(layer, np.array(fleet.rows[layer])) for layer in LAYERS}
    fleet.check()


def test_chunks_follow_one_another_over_the_same_connections(fleet: Fleet) -> None:
    for row in ((1, 0, 3, 2, 5, 4, 3, 2), (2, 2, 0, 0, 1, 3, 4, 5), (0, 1, 2, 3, 4, 5, 0, 1)):
        fleet.roll_out({LAYERS[1]: row, LAYERS[0]: row[::-1]})
        fleet.check()


def test_received_bytes_are_told_by_link(fleet: Fleet) -> None:
    row = list(fleet.rows[LAYERS[0]])
    row[0], row[7] = row[7], row[0]
    chunk = fleet.stage({LAYERS[0]: row})
    staged = fleet.expect(Staged, chunk)
    size = EXPERT_BYTES[LAYERS[0]]
    sources = {(c.source_rank, c.target_rank) for c in copies(LAYERS[0], fleet.rows[LAYERS[0]], row, fleet.ranks)}
    node = {10: 0, 20: 0, 30: 1, 40: 1}
    for rank, message in staged.items():
        mine = [source for source, target in sources if target == rank]
        assert message.received.same_rank == size * sum(source == rank for source in mine)
        assert message.received.same_node == size * sum(source != rank and node[source] == node[rank] for source in mine)
        assert message.received.cross_node == size * sum(node[source] != node[rank] for source in mine)
    fleet.disarm(chunk)
    fleet.expect(Disarmed, chunk)
    fleet.check()


def test_a_slot_that_is_filled_twice_is_refused(fleet: Fleet) -> None:
    layer = LAYERS[0]
    many = [c for c in copies(layer, fleet.rows[layer], fleet.rows[layer][::-1], fleet.ranks) if c.target_rank == 10] * 2
    chunk = fleet.stage({layer: fleet.rows[layer][::-1]}, copies=tuple(many))
    refused = fleet.expect(Refused, chunk)
    assert {message.code for message in refused.values()} == {RefusalCode.INVALID}
    fleet.step(4)
    fleet.check()


def test_changed_weights_under_an_old_checksum_are_refused_and_the_live_map_stays(fleet: Fleet) -> None:
    layer = LAYERS[0]
    row = list(fleet.rows[layer])
    row[0] = row[2]
    source = max(slot for slot, expert in enumerate(fleet.rows[layer]) if expert == row[2])
    fleet.ask(source // 2, "corrupt", layer, source % 2, 0.25)
    chunk = fleet.stage({layer: row})
    refused = fleet.expect(Refused, chunk, 1)
    assert refused[10].code is RefusalCode.CHECKSUM
    assert "checksum" in refused[10].reason
    fleet.ask(source // 2, "corrupt", layer, source % 2, -0.25)
    fleet.disarm(chunk)
    fleet.expect(Disarmed, chunk)
    fleet.check()
    fleet.roll_out({layer: row})  # over new connections
    fleet.check()


def test_a_rank_that_is_not_armed_blocks_the_flip_and_disarm_answers_after_the_vote(fleet: Fleet) -> None:
    row = fleet.rows[LAYERS[0]][::-1]
    chunk = fleet.stage({LAYERS[0]: row})
    fleet.expect(Staged, chunk)
    fleet.arm(chunk, only=(0, 1, 3))
    fleet.expect(Armed, chunk, 3)
    fleet.step(7)
    assert fleet.agent.answers(Flipped, chunk) == {}
    fleet.disarm(chunk)
    fleet.step(4)
    fleet.expect(Disarmed, chunk)
    fleet.check()


def test_an_agent_process_that_goes_away_does_not_stop_steps_and_is_told_everything_when_it_is_back(fleet: Fleet) -> None:
    row = fleet.rows[LAYERS[1]][::-1]
    chunk = fleet.stage({LAYERS[1]: row})
    fleet.expect(Staged, chunk)
    fleet.agent.close()
    fleet.step(20)
    fleet.agent = FakeAgent(fleet.agent.path)
    fleet.agent.until(lambda: len(fleet.agent.registrations) == 4, "registration again")
    fleet.expect(Staged, chunk)
    fleet.arm(chunk)
    fleet.expect(Armed, chunk)
    fleet.step(6)
    fleet.expect(Flipped, chunk)
    fleet.rows[LAYERS[1]] = row
    fleet.check()


def test_a_new_leader_closes_the_chunk_of_the_old_one_before_ranks_say_what_is_live(fleet: Fleet) -> None:
    chunk = fleet.stage({LAYERS[1]: fleet.rows[LAYERS[1]][::-1]})
    fleet.expect(Staged, chunk)
    fleet.arm(chunk, only=(0, 1, 2))
    fleet.expect(Armed, chunk, 3)
    fleet.step(2)  # a vote with the id is under way on three ranks
    fleet.hello(2)
    fleet.step(4)
    fleet.agent.until(lambda: sum(isinstance(m, Live) and m.epoch == 2 for m in fleet.agent.said) == 4, "Live of all")
    for message in fleet.agent.said:
        if isinstance(message, Live) and message.epoch == 2:
            assert message.closed_id >= chunk
            assert {layer.layer: layer.row for layer in message.layers} == fleet.rows
    fleet.mesh = chunk_id(2, 1)
    fleet.roll_out({LAYERS[1]: fleet.rows[LAYERS[1]][::-1]})
    fleet.check()


def test_windows_cover_the_same_boundaries_on_all_ranks_and_count_every_token(fleet: Fleet) -> None:
    fleet.step(-(fleet.boundary + 1) % 8)  # to a window's edge
    fleet.agent.windows.clear()
    first = (fleet.boundary + 1) // 8
    fleet.step(9)
    fleet.agent.until(lambda: len([w for w in fleet.agent.windows if w.window_index == first]) == 4, "window of all ranks")
    windows = [w for w in fleet.agent.windows if w.window_index == first]
    assert {(w.boundary_begin, w.boundary_end) for w in windows} == {(first * 8, first * 8 + 8)}
    for window in windows:
        assert window.tokens == 8 * 12
        assert window.step_time_max_s >= window.step_time_min_s > 0
        (table,) = window.tables
        assert table.layer_ids == (1, 4)
        assert table.counts.shape == (2, 2, NUM_LOGICAL)
        assert table.counts.tolist() == [[[4 * 2] * NUM_LOGICAL] * 2] * 2


# ── copies as the planner plans them ─────────────────────────────────────────────────────────────────────────────────────

FANNED_OUT = (4, 0, 4, 1, 2, 5, 3, 0)
NODES = ("node0", "node0", "node1", "node1")


def planned(fleet: Fleet, rows: Mapping[LayerRef, tuple[int, ...]]) -> PlannedChunk:
    """What the planner sends for these rows: an expert crosses to a node once."""
    ranks = tuple(RankId(10 * (position + 1)) for position in range(4))

    def placement(of: Mapping[LayerRef, Sequence[int]]) -> Placement:
        ids, made = tuple(layer.layer_id for layer in LAYERS), np.array([of[layer] for layer in LAYERS], np.int32)
        return Placement((Table(LAYERS[0].model, ids, NUM_LOGICAL, ranks, made),))

    (chunk,) = plan_chunks(
        placement(fleet.rows),
        placement({**fleet.rows, **rows}),
        topology=Topology(ranks, NODES),
        expert_bytes=EXPERT_BYTES,
        staging_bytes=dict.fromkeys(ranks, 1 << 30),
        fan_out=True,
    )
    return chunk


def test_an_expert_that_two_ranks_of_a_node_get_crosses_once_and_is_passed_on_vllm_ascend_2820(fleet: Fleet) -> None:
    rows = dict.fromkeys(LAYERS, FANNED_OUT)
    chunk = planned(fleet, rows)
    assert any(copy.is_relay for copy in chunk.copies)
    fleet.roll_out(rows, copies=chunk.copies)
    fleet.check()
    received = [message.received for message in fleet.agent.answers(Staged, chunk_id(fleet.epoch, fleet.sequence)).values()]
    assert {
        LinkKind.SAME_RANK: sum(links.same_rank for links in received),
        LinkKind.SAME_NODE: sum(links.same_node for links in received),
        LinkKind.CROSS_NODE: sum(links.cross_node for links in received),
    } == chunk.traffic.by_link


def test_a_throttled_chunk_takes_the_time_that_its_bytes_take_vllm_36271(fleet: Fleet) -> None:
    rows = dict.fromkeys(LAYERS, SWAPPED)
    chunk = planned(fleet, rows)
    rate = max(chunk.traffic.sent) / 0.4
    fleet.roll_out(rows, copies=chunk.copies, throttle=Throttle(bytes_per_s=rate))
    fleet.check()
    staged = fleet.agent.answers(Staged, chunk_id(fleet.epoch, fleet.sequence))
    for rank, sent in zip((10, 20, 30, 40), chunk.traffic.sent, strict=True):
        assert staged[rank].seconds >= sent / rate


def test_copies_wait_while_an_engine_is_under_pressure_vllm_43219(fleet: Fleet) -> None:
    paused = fleet.ask(0, "status").pauses
    fleet.ask(0, "pressure", True)
    rows = dict.fromkeys(LAYERS, (4, 5, 2, 3, 1, 0, 0, 1))
    chunk = fleet.stage(rows, copies=planned(fleet, rows).copies)
    fleet.agent.until(lambda: fleet.ask(0, "status").pauses > paused, "a pause of the first rank")
    assert 10 not in fleet.agent.answers(Staged, chunk)
    fleet.ask(0, "pressure", False)
    fleet.expect(Staged, chunk)
    status = fleet.ask(0, "status")
    assert (status.pauses, status.paused_s > 0) == (paused + 1, True)
    fleet.disarm(chunk)
    fleet.expect(Disarmed, chunk)
    fleet.check()


# ── ranks of a node that read one another's memory ───────────────────────────────────────────────────────────────────────

BACK = (0, 1, 3, 2, 4, 5, 1, 0)
PASSED_ON = (1, 4, 1, 3, 5, 0, 0, 2)


def test_processes_of_a_node_read_experts_out_of_one_anothers_memory_chunk_after_chunk(
    context: multiprocessing.context.ForkServerContext,
) -> None:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        fleet = Fleet(context, folder, config={"same_node_copies": "read"})
        assert [status.reads_from for status in fleet.started] == [(20,), (10,), (40,), (30,)]
        for row in (SWAPPED, BACK, SWAPPED):
            fleet.roll_out({LAYERS[0]: row, LAYERS[1]: row})
            fleet.check()
        _an_expert_crosses_once_and_is_read_out_of_the_staging_of_a_neighbour(fleet)
        _bytes_that_are_not_what_their_owner_loaded_are_refused_by_who_read_them(fleet)
        assert max(fleet.close()) < 3.0


def _an_expert_crosses_once_and_is_read_out_of_the_staging_of_a_neighbour(fleet: Fleet) -> None:
    layer, (first, second) = LAYERS[1], (RankId(10), RankId(20))
    across = Copy(layer=layer, expert=1, source_rank=RankId(30), source_slot=0, target_rank=first, target_slot=0)
    on = Copy(layer=layer, expert=1, source_rank=first, source_slot=0, target_rank=second, target_slot=0, relay_of=0)
    others = [copy for copy in copies(layer, SWAPPED, PASSED_ON, fleet.ranks) if copy.expert != 1]
    flipped = fleet.roll_out({layer: PASSED_ON}, copies=(across, on, *others))
    assert set(flipped) == {10, 20, 30, 40}
    fleet.check()


def _bytes_that_are_not_what_their_owner_loaded_are_refused_by_who_read_them(fleet: Fleet) -> None:
    layer = LAYERS[0]  # the first copy to rank 10 is read from rank 20
    fleet.ask(1, "corrupt", layer, 0, 1.0)
    row = (2, 4, 2, 3, 1, 5, 0, 1)
    chunk = fleet.stage({layer: row})
    refused: Refused = fleet.expect(Refused, chunk, 1)[10]
    assert refused.code is RefusalCode.CHECKSUM
    assert f"expert 2 of {layer} from rank 20 slot 0" in refused.reason
    fleet.disarm(chunk)
