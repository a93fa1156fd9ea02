"""Faults that people met in other systems, each as it would happen here; names end in the public thread that told of it."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.engine.port import SlotTensor, TensorKind
from agent.hook.chunk_events import BeginStaging, StagingDone, StagingFailed
from agent.hook.loaded_check import KnownExperts
from agent.hook.manifest import settled
from agent.hook.routing import PreparedFlip
from agent.hook.stage_check import LayerShape, RankShape
from agent.hook.stager import Stager, Weights
from agent.transfer.gloo import Store, local_store
from agent.transfer.staging import ExpertLayout
from agent.transfer.streams import HostStreams
from agent.transfer.ways import Ways
from eplb_service.control import Arm, Armed, Copy, Disarmed, Flipped, LayerChange, RefusalCode, Refused, Staged
from eplb_service.ids import LayerRef, RankId
from tests.contract.transport_ranks import in_shared_memory
from tests.mixed_experts import BF16, LAYERS, slot_tensors, wrong
from tests.one_rank import LAYER, NEXT, NUM_LOGICAL, RANK, ROW, OneRank, expected, hooked, roll_out, stage_of
from tests.unit.hook_stager_parts import HERE, RANKS, SLOTS, Rank, started
from tests.unit.hook_stager_parts import stage_of as chunk_of

WAIT_S = 60.0
CPU = torch.device("cpu")


# ── derived state ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Forgetful(OneRank):
    """Its product of scales was made once, when the weights were loaded."""

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        """Never again."""


def outputs_that_differ(engine: OneRank) -> list[int]:
    """Experts whose output is not that of their own weights, scale and product."""
    inputs = torch.randn(4, engine.hidden, generator=torch.Generator().manual_seed(3))
    return [
        expert
        for expert in range(NUM_LOGICAL)
        if not torch.allclose(engine.forward(inputs, expert), expected(inputs, expert), rtol=1e-4, atol=1e-3)
    ]


def test_a_product_that_was_cached_at_load_is_made_anew_for_the_experts_that_moved_vllm_34646_vllm_37217() -> None:
    """Weights and scales moved, the cached a_scale x w_scale stayed: gsm8k fell from 0.95 to 0.007."""
    engine = OneRank(CPU, hidden=8)
    with hooked(engine) as (hook, agent):
        for sequence, (old, new) in enumerate(((ROW, NEXT), (NEXT, ROW), (ROW, NEXT)), start=1):
            roll_out(agent, old, new, sequence, lambda: hook.begin_step(num_real_tokens=1))
            assert outputs_that_differ(engine) == []
            assert engine.wrong() == []
    forgetful = Forgetful(CPU, hidden=8)  # what is compared does see it
    with hooked(forgetful) as (hook, agent):
        roll_out(agent, ROW, NEXT, 1, lambda: hook.begin_step(num_real_tokens=1))
        assert outputs_that_differ(forgetful) == [0, 1, 2]


def test_all_tables_come_from_the_one_row_however_stale_the_engine_s_others_were_vllm_36267() -> None:
    """Three maps that are kept in step by hand, of which one was sent without the others."""
    assert [part.name for part in dataclasses.fields(LayerChange)] == [
        *("layer", "old_digest", "new_digest", "new_row", "new_shares")
    ], "a chunk names the row, and no map that could disagree with it"
    engine = OneRank(CPU, hidden=8)
    with hooked(engine) as (hook, agent):
        engine.tables.logical_to_physical.fill_(99)
        engine.tables.replica_counts.fill_(-5)
        roll_out(agent, ROW, NEXT, 1, lambda: hook.begin_step(num_real_tokens=1))
    assert engine.tables.physical_to_logical.tolist() == [2, 0, 1, 1]
    assert engine.tables.logical_to_physical.tolist() == [[1, -1, -1], [2, 3, -1], [0, -1, -1]]
    assert engine.tables.replica_counts.tolist() == [1, 2, 1]


def exchanged(ranks: Sequence[Rank]) -> None:
    """The experts of both ranks' first slots change places in every layer."""
    new = (HERE[2], HERE[1], HERE[0], HERE[3])
    copies = tuple(
        Copy(
            layer=layer,
            expert=new[slot],
            source_rank=RANKS[new[slot] // SLOTS],
            source_slot=new[slot] % SLOTS,
            target_rank=RANKS[slot // SLOTS],
            target_slot=slot % SLOTS,
        )
        for layer in LAYERS
        for slot in (0, 2)
    )
    stage = chunk_of(1, 1, dict.fromkeys(LAYERS, new), copies)
    for rank in ranks:
        rank.begin(stage, dict.fromkeys(LAYERS, HERE))
    ends = [rank.ends.get(timeout=WAIT_S) for rank in ranks]
    for rank, (end, prepared) in zip(ranks, ends, strict=True):
        assert isinstance(end, StagingDone), end
        assert prepared is not None
        rank.flip(stage, prepared)


def test_a_rank_s_own_maps_stay_its_own_whatever_is_copied_from_a_peer_vllm_47206() -> None:
    """A bulk copy of all that a module holds brought another rank's expert mask along: accuracy 0."""
    ranks = started(local_store())
    try:
        for position, rank in enumerate(ranks):
            for layer in LAYERS:
                mask = torch.full((SLOTS, 4), 100 + position, dtype=torch.int32)
                rank.tensors[layer]["expert_mask"] = SlotTensor(mask, TensorKind.DERIVED)  # type: ignore[index]
                assert "expert_mask" not in {packed.name for packed in ExpertLayout.of(layer, rank.tensors[layer]).tensors}
        exchanged(ranks)
        for position, rank in enumerate(ranks):
            for layer in LAYERS:
                assert rank.tensors[layer]["expert_mask"].data.tolist() == [[100 + position] * 4] * SLOTS
                assert rank.tables[layer].physical_to_logical.tolist() == [2, 1, 0, 3]
                assert wrong(layer, rank.tensors[layer], 0, 2 if position == 0 else 0) == []
    finally:
        for rank in ranks:
            rank.stager.close(5)


# ── order of collectives, owners of weights ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_copy_and_serve_in_opposite_order_do_not_wait_in_a_circle_vllm_32860_deepep_496_vllm_35212(
    late: int,
) -> None:
    """One rank enters a collective of the engine, the other has its copies first: copies are on no communicator of serving.

    The collective ends when both ranks are in it; the late one goes there only once it has staged what the other sends.
    """
    ranks = started(local_store())
    collective = threading.Barrier(2)
    served: queue.SimpleQueue[str] = queue.SimpleQueue()
    stage = chunk_of(
        1,
        1,
        {BF16: (2, 1, 0, 3)},
        [
            Copy(layer=BF16, expert=2, source_rank=RANKS[1], source_slot=0, target_rank=RANKS[0], target_slot=0),
            Copy(layer=BF16, expert=0, source_rank=RANKS[0], source_slot=0, target_rank=RANKS[1], target_slot=0),
        ],
    )

    def serve(position: int) -> None:
        """The model thread of a rank."""
        if position == late:
            end, _ = ranks[position].ends.get(timeout=WAIT_S)
            assert isinstance(end, StagingDone), end
        collective.wait(WAIT_S)
        served.put(f"rank {position}")

    threads = [threading.Thread(target=serve, args=(position,)) for position in range(2)]
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + WAIT_S
        while collective.n_waiting == 0:  # the early one is in its collective before the chunk is even heard of
            assert time.monotonic() < until
            time.sleep(0.001)
        for rank in ranks:
            rank.begin(stage, dict.fromkeys(LAYERS, HERE))
        assert {served.get(timeout=WAIT_S) for _ in threads} == {"rank 0", "rank 1"}
        end, _ = ranks[1 - late].ends.get(timeout=WAIT_S)
        assert isinstance(end, StagingDone)
        assert not torch.distributed.is_initialized()  # nothing was added to what serving uses
    finally:
        for thread in threads:
            thread.join(WAIT_S)
        for rank in ranks:
            rank.stager.close(5)


def test_what_the_engine_writes_under_a_chunk_never_mixes_with_it_vllm_47288() -> None:
    """A preparation reads live weights while another part writes them: a new version closes the chunk, one owner at a time."""
    engine = OneRank(CPU, hidden=8)
    with hooked(engine) as (hook, agent):
        stage = stage_of(agent, ROW, NEXT, 1)
        agent.send(stage)
        agent.until(lambda: bool(agent.answers(Staged, stage.chunk_id)), "Staged")
        also = stage_of(agent, ROW, NEXT, 2)
        agent.send(also)
        agent.until(lambda: bool(agent.answers(Refused, also.chunk_id)), "Refused")
        assert agent.answers(Refused, also.chunk_id)[RANK].code is RefusalCode.BUSY
        engine.weight.mul_(2)  # the other owner, which says so
        engine.version = 1
        before = engine.weight.clone()
        hook.begin_step(num_real_tokens=1)
        agent.send(Arm(to=stage.to, chunk_id=stage.chunk_id))
        agent.until(
            lambda: bool(agent.answers(Refused, stage.chunk_id) or agent.answers(Disarmed, stage.chunk_id)),
            "that the chunk is closed",
        )
        for _ in range(4):
            hook.begin_step(num_real_tokens=1)
        assert not agent.answers(Armed, stage.chunk_id)
        assert not agent.answers(Flipped, stage.chunk_id)
        assert torch.equal(engine.weight, before)
        assert engine.tables.physical_to_logical.tolist() == list(ROW)


def test_weights_that_somebody_writes_without_a_word_are_not_carried_on_vllm_47288() -> None:
    engine = OneRank(CPU, hidden=8)
    with hooked(engine) as (_, agent):
        engine.weight[2, 0, 0] += 1
        stage = stage_of(agent, ROW, NEXT, 1)
        agent.send(stage)
        agent.until(lambda: bool(agent.answers(Refused, stage.chunk_id)), "Refused")
        refused = agent.answers(Refused, stage.chunk_id)[RANK]
        assert refused.code is RefusalCode.CHECKSUM
        assert f"expert 2 of {LAYER}" in refused.reason


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

MANY_LAYERS, EXPERT_BYTES, MANY_SLOTS = 61, 512 << 10, 2


def peak_bytes() -> int:
    """Most resident memory since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Begin to look for it anew; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def one_stager(
    position: int,
    group: tuple[RankId, ...],
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]],
    *,
    store: Store | None,
    num_logical: int,
    budget_bytes: int,
    ways: Ways,
) -> tuple[Stager, RankShape, queue.SimpleQueue[tuple[StagingDone | StagingFailed, PreparedFlip | None]]]:
    """A stager alone, and how its chunks end."""
    ends: queue.SimpleQueue[tuple[StagingDone | StagingFailed, PreparedFlip | None]] = queue.SimpleQueue()
    layouts = {layer: ExpertLayout.of(layer, named) for layer, named in tensors.items()}
    layer, layout = next(iter(layouts.items()))
    slots = tensors[layer][layout.tensors[0].name].data.shape[0]
    shape = RankShape(
        rank_id=group[position],
        group_rank_ids=group,
        layers={
            name: LayerShape(num_logical=num_logical, slots=slots, expert_bytes=packed.expert_bytes)
            for name, packed in layouts.items()
        },
        replica_table_width=4,
        staging_bytes=budget_bytes,
    )
    stager = Stager(
        shape=shape,
        nodes=("a",) * len(group),
        weights=Weights(tensors=tensors, layouts=layouts, device=CPU),
        budget_bytes=budget_bytes,
        store=store,
        ways=ways,
        streams=HostStreams(),
        rendezvous_timeout_s=WAIT_S,
        clock=time.monotonic,
        on_end=lambda end, prepared: ends.put((end, prepared)),
    )
    return stager, shape, ends


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums on one thread: how many others there are is no matter of memory here, only of time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sum_and_stage(num_layers: int) -> tuple[int, int]:
    """All layers of a rank, one after another; device memory taken, and by how much the resident memory grew at most."""
    layers = [LayerRef("m", layer_id) for layer_id in range(num_layers)]
    tensors = {layer: {"w": SlotTensor(torch.full((MANY_SLOTS, EXPERT_BYTES // 4), float(layer.layer_id)))} for layer in layers}
    for named in tensors.values():
        named["w"].data[1] += 0.5
    resident = forget_peak()
    rank = RankId(1)
    stager, _, ends = one_stager(
        0, (rank,), tensors, store=None, num_logical=2, budget_bytes=MANY_SLOTS * EXPERT_BYTES, ways=Ways()
    )
    stager.start(0, dict.fromkeys(layers, (0, 1)))
    try:
        for number, layer in enumerate(layers, start=1):
            named_copy = partial(Copy, layer=layer, source_rank=rank, target_rank=rank)
            copies = [named_copy(expert=1 - slot, source_slot=1 - slot, target_slot=slot) for slot in range(MANY_SLOTS)]
            stage = chunk_of(number, 1, {layer: (1, 0)}, copies)
            stager.begin(BeginStaging(stage, time.monotonic() + WAIT_S), {layer: (0, 1)})
            end, prepared = ends.get(timeout=WAIT_S)
            assert isinstance(end, StagingDone), end
            assert prepared is not None
        return stager.num_bytes, peak_bytes() - resident
    finally:
        stager.close(5)


def test_sixty_one_layers_are_summed_and_staged_in_the_memory_of_one_trtllm_10759_trtllm_11962(one_thread: None) -> None:
    """An old copy that is kept, or all layers buffered before the first is copied, takes the weights' size a second time."""
    sum_and_stage(1)  # what threads and libraries take once
    taken, grown = sum_and_stage(MANY_LAYERS)
    assert taken < 6 * EXPERT_BYTES  # staging of one layer, and the ring of two experts
    assert grown < MANY_LAYERS * MANY_SLOTS * EXPERT_BYTES / 4, "beyond that what summing one expert takes, in two threads"


# ── another world ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("same_node", ["send", "read"])
def test_a_rank_that_joined_later_is_sent_experts_and_sends_some_mooncake_2623(same_node: str) -> None:
    """Tables of peers that were sized to the first world left transfers to those that joined hanging."""

    small, large = (RankId(10), RankId(20)), (RankId(10), RankId(20), RankId(70))
    row = (0, 1, 2, 3)
    made = []
    store = local_store()
    for position in range(3):
        experts = row[position * SLOTS : (position + 1) * SLOTS] or (-1, -1)
        tensors = {BF16: in_shared_memory(settled(slot_tensors(BF16, experts)))}
        group = small if position < 2 else large
        made.append(
            one_stager(
                position,
                group,
                tensors,
                store=store if position < 2 else None,
                num_logical=4,
                budget_bytes=1 << 12,
                ways=Ways(same_node=same_node),
            )
        )
    stagers = [stager for stager, _, _ in made]
    together([partial(stager.start, 0, {BF16: row}) for stager in stagers[:2]])
    try:
        assert all(stager.rest(WAIT_S) for stager in stagers[:2])
        again = local_store()
        known = stagers[0].known

        def join(position: int) -> None:
            _, shape, _ = made[position]
            stagers[position].form_again(
                dataclasses.replace(shape, group_rank_ids=large), ("a",) * 3, again, known, weights_version=0
            )

        together([partial(join, position) for position in range(3)])
        assert isinstance(known, KnownExperts)
        if same_node == "read":
            assert stagers[2].reads_from == (10, 20)
            assert stagers[0].reads_from == (20, 70)
        wide = (*row, -1, -1)
        steps = [  # to the one that joined, then from it
            ((*row, 3, 0), [copy_of(3, (20, 1), (70, 0)), copy_of(0, (10, 0), (70, 1))]),
            ((0, 3, 2, 3, 3, 0), [copy_of(3, (70, 0), (10, 1))]),
        ]
        for number, (new, copies) in enumerate(steps, start=1):
            stage = chunk_of(number, 7, {BF16: new}, copies)
            for stager in stagers:
                stager.begin(BeginStaging(stage, time.monotonic() + WAIT_S), {BF16: wide})
            for position, (stager, _, ends) in enumerate(made):
                end, prepared = ends.get(timeout=WAIT_S)
                assert isinstance(end, StagingDone), end
                assert prepared is not None
                held = stager._weights.tensors[BF16]
                for entry in prepared.layers:
                    assert entry.tables.physical_to_logical.tolist() == list(new)
                    for slot, region in entry.staged:
                        stager._weights.layouts[BF16].unpack(region.device, held, slot)
                        assert wrong(BF16, held, slot, new[position * SLOTS + slot]) == []
                stager.note_flip(stage, prepared.checksums)
            wide = new
    finally:
        for stager in stagers:
            stager.close(5)


def copy_of(expert: int, source: tuple[int, int], target: tuple[int, int]) -> Copy:
    """From and to (rank, slot)."""
    return Copy(
        layer=BF16,
        expert=expert,
        source_rank=RankId(source[0]),
        source_slot=source[1],
        target_rank=RankId(target[0]),
        target_slot=target[1],
    )


def together(works: Sequence[Callable[[], Any]]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised below
            failed.put(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()
    if not failed.empty():
        raise failed.get()
