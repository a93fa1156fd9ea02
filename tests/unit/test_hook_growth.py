"""A thousand generations through stager and flip: nothing grows, whatever became of them (tokenspeed#251, vllm#20901)."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.engine.port import RoutingTables, SlotTensor, TensorKind
from agent.hook.chunk_events import BeginStaging, StagingDone, StagingFailed
from agent.hook.manifest import settled
from agent.hook.routing import PreparedFlip, flip
from agent.hook.stage_check import LayerShape, RankShape
from agent.hook.stager import Stager, Weights
from agent.transfer.gloo import Store, local_store
from agent.transfer.staging import ExpertLayout, stored
from agent.transfer.streams import HostStreams
from agent.transfer.ways import Ways
from eplb_service.control import Address, Copy, LayerChange, RefusalCode, Stage
from eplb_service.ids import ChunkId, GenerationNumber, GroupId, Incarnation, LayerRef, RankId
from tests.contract.transport_ranks import in_shared_memory
from tests.mixed_experts import LAYERS, slot_tensors, wrong

RANKS = (RankId(10), RankId(20))
SLOTS = 2
HERE, THERE = (0, 1, 2, 3), (2, 1, 0, 3)
GENERATIONS, WARM_UP, FAILS_EVERY = 1000, 200, 40  # both counts end with a chunk that fails
GROWTH_BYTES = 1 << 20


@dataclass
class Rank:
    """One rank: its stager, its tensors and tables, and how its chunks ended."""

    stager: Stager
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]
    layouts: Mapping[LayerRef, ExpertLayout]
    tables: Mapping[LayerRef, RoutingTables]
    ends: queue.SimpleQueue[tuple[StagingDone | StagingFailed, PreparedFlip | None]] = field(default_factory=queue.SimpleQueue)

    @classmethod
    def make(cls, position: int, store: Store) -> Rank:
        experts = HERE[position * SLOTS : (position + 1) * SLOTS]
        tensors = {layer: in_shared_memory(settled(slot_tensors(layer, experts))) for layer in LAYERS}
        layouts = {layer: ExpertLayout.of(layer, tensors[layer]) for layer in LAYERS}
        ends: queue.SimpleQueue[tuple[StagingDone | StagingFailed, PreparedFlip | None]] = queue.SimpleQueue()
        sizes = {layer: layout.expert_bytes for layer, layout in layouts.items()}
        stager = Stager(
            shape=RankShape(
                rank_id=RANKS[position],
                group_rank_ids=RANKS,
                layers={layer: LayerShape(num_logical=4, slots=SLOTS, expert_bytes=size) for layer, size in sizes.items()},
                replica_table_width=2,
                staging_bytes=SLOTS * sum(sizes.values()),
            ),
            nodes=("a", "a"),
            weights=Weights(tensors=tensors, layouts=layouts, device=torch.device("cpu")),
            budget_bytes=SLOTS * sum(sizes.values()),
            store=store,
            ways=Ways(same_node="read"),
            streams=HostStreams(),
            rendezvous_timeout_s=20.0,
            clock=time.monotonic,
            on_end=lambda end, prepared: ends.put((end, prepared)),
        )
        by_expert = torch.tensor([[expert, -1] for expert in HERE])
        tables = {
            layer: RoutingTables(torch.tensor(HERE), by_expert.clone(), torch.ones(4, dtype=torch.int64)) for layer in LAYERS
        }
        return cls(stager, tensors, layouts, tables, ends)

    def begin(self, stage: Stage, rows: Mapping[LayerRef, tuple[int, ...]]) -> None:
        self.stager.begin(BeginStaging(stage, time.monotonic() + 20), dict(rows))

    def flip(self, stage: Stage, prepared: PreparedFlip) -> None:
        nobody: Any = _NothingDerived()
        flip(prepared, port=nobody, streams=HostStreams(), tensors=self.tensors, layouts=self.layouts, tables=self.tables)
        self.stager.note_flip(stage, prepared.checksums)


class _NothingDerived:
    def rederive(self, *_: object) -> None:
        return


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    store = local_store()
    made = [Rank.make(position, store) for position in range(2)]
    starting = [threading.Thread(target=rank.stager.start, args=(0, dict.fromkeys(LAYERS, HERE))) for rank in made]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(20)
    yield made
    for rank in made:
        rank.stager.close(5)


def chunk(number: int, mesh: int, layer: LayerRef, old: tuple[int, ...]) -> Stage:
    """Two experts of the ranks change places in a layer."""
    new = THERE if old == HERE else HERE
    copies = tuple(
        Copy(
            layer=layer,
            expert=expert,
            source_rank=RANKS[old.index(expert) // SLOTS],
            source_slot=old.index(expert) % SLOTS,
            target_rank=RANKS[slot // SLOTS],
            target_slot=slot % SLOTS,
        )
        for slot, expert in enumerate(new)
        if old[slot] != expert
    )
    values: dict[str, Any] = {"chunk_id": ChunkId(number), "mesh_id": ChunkId(mesh), "generation": GenerationNumber(number)}
    return Stage(
        to=Address(RANKS[0], Incarnation(1), GroupId(1)),
        weights_version=0,
        layers=(LayerChange(layer=layer, old_digest=0, new_digest=0, new_row=new),),
        copies=copies,
        stage_timeout_s=20,
        arm_ttl_s=20,
        **values,
    )


def held() -> dict[str, int]:
    """What this process holds of what could grow."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * 4096,
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "maps of shared memory": Path("/proc/self/maps").read_text().count("memfd:eplb"),
    }


def test_a_thousand_generations_leave_nothing_behind_tokenspeed_251_vllm_20901(ranks: list[Rank]) -> None:
    """Most flip; some are refused for a checksum and some withdrawn, and those after them find new connections."""
    rows: dict[LayerRef, tuple[int, ...]] = dict.fromkeys(LAYERS, HERE)
    mesh, before = 1, dict[str, int]()
    for number in range(1, GENERATIONS + 1):
        layer = LAYERS[number % len(LAYERS)]
        stage = chunk(number, mesh, layer, rows[layer])
        if number % FAILS_EVERY == 0:
            _fail(ranks, stage, rows, withdrawn=number % (2 * FAILS_EVERY) == 0)
            mesh = number + 1
        else:
            _flip(ranks, stage, rows)
            rows[layer] = stage.layers[0].new_row
        if number == WARM_UP:
            before = held()
    after = held()
    for position, rank in enumerate(ranks):
        for layer, row in rows.items():
            for slot in range(SLOTS):
                assert wrong(layer, rank.tensors[layer], slot, row[position * SLOTS + slot]) == []
    assert after["bytes"] - before["bytes"] <= GROWTH_BYTES, (before, after)
    assert {**after, "bytes": 0} == {**before, "bytes": 0}


def _flip(ranks: list[Rank], stage: Stage, rows: Mapping[LayerRef, tuple[int, ...]]) -> None:
    for rank in ranks:
        rank.begin(stage, rows)
    ends = [rank.ends.get(timeout=20) for rank in ranks]  # nobody flips before all have staged: slots are being read
    for rank, (end, prepared) in zip(ranks, ends, strict=True):
        assert isinstance(end, StagingDone), end
        assert prepared is not None
        rank.flip(stage, prepared)


def _fail(ranks: list[Rank], stage: Stage, rows: Mapping[LayerRef, tuple[int, ...]], *, withdrawn: bool) -> None:
    """A chunk that its planner withdraws while a peer does not come, or whose bytes are not those that were loaded."""
    if withdrawn:
        ranks[0].begin(stage, rows)
        ranks[0].stager.cancel(stage.chunk_id)
        end, _ = ranks[0].ends.get(timeout=20)
        assert isinstance(end, StagingFailed)
        assert end.code is RefusalCode.WITHDRAWN
        return
    raw = ranks[0].tensors[stage.layers[0].layer]
    data = next(stored(tensor.data) for name, tensor in raw.items() if "weight" in name and tensor.kind is TensorKind.EXPERT)
    before = data[0].clone()
    data[0] += 1
    for rank in ranks:
        rank.begin(stage, rows)
    ends = [rank.ends.get(timeout=20)[0] for rank in ranks]
    data[0] = before
    assert isinstance(ends[1], StagingFailed)
    assert ends[1].code is RefusalCode.CHECKSUM
