"""Two ranks as threads of one process, each with a stager of its own over a mixed model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent.engine.port import RoutingTables, SlotTensor
from agent.hook.chunk_events import BeginStaging, StagingDone, StagingFailed
from agent.hook.manifest import settled
from agent.hook.routing import PreparedFlip, flip
from agent.hook.stage_check import LayerShape, RankShape
from agent.hook.stager import Stager, Weights
from agent.transfer.backup import ExpertSource
from agent.transfer.gloo import Store
from agent.transfer.staging import ExpertLayout
from agent.transfer.streams import HostStreams
from agent.transfer.ways import Ways
from eplb_service.control import Address, Copy, LayerChange, Stage
from eplb_service.ids import ChunkId, GenerationNumber, GroupId, Incarnation, LayerRef, RankId
from tests.contract.transport_ranks import in_shared_memory
from tests.mixed_experts import LAYERS, slot_tensors

RANKS = (RankId(10), RankId(20))
SLOTS = 2
HERE = (0, 1, 2, 3)
"""What the slots of both ranks hold at the start, in every layer."""


@dataclass
class Rank:
    """One rank: its stager, its tensors and tables, and how its chunks ended."""

    stager: Stager
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]
    layouts: Mapping[LayerRef, ExpertLayout]
    tables: Mapping[LayerRef, RoutingTables]
    ends: queue.SimpleQueue[tuple[StagingDone | StagingFailed, PreparedFlip | None]] = field(default_factory=queue.SimpleQueue)

    @classmethod
    def make(cls, position: int, store: Store, *, sources: Sequence[ExpertSource] = ()) -> Rank:
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
            sources=sources,
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


def started(store: Store, *, sources: Sequence[ExpertSource] = ()) -> list[Rank]:
    """Both ranks, which have found one another."""
    made = [Rank.make(position, store, sources=sources) for position in range(len(RANKS))]
    starting = [threading.Thread(target=rank.stager.start, args=(0, dict.fromkeys(LAYERS, HERE))) for rank in made]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(20)
    return made


def stage_of(
    number: int, mesh: int, rows: Mapping[LayerRef, tuple[int, ...]], copies: Sequence[Copy], *, version: int = 0
) -> Stage:
    """A chunk of new rows, checked by nobody."""
    values: dict[str, Any] = {"chunk_id": ChunkId(number), "mesh_id": ChunkId(mesh), "generation": GenerationNumber(number)}
    return Stage(
        to=Address(RANKS[0], Incarnation(1), GroupId(1)),
        weights_version=version,
        layers=tuple(LayerChange(layer=layer, old_digest=0, new_digest=0, new_row=row) for layer, row in rows.items()),
        copies=tuple(copies),
        stage_timeout_s=20,
        arm_ttl_s=20,
        **values,
    )
