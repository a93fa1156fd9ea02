"""Ranks as threads of one process, each with a mixed model, staging and transports: what transports are tested with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agent.engine.port import SlotTensor
from agent.hook.manifest import settled
from agent.transfer.backup import BackupRead, HostBackup
from agent.transfer.checkpoint import Checkpoint, files_of
from agent.transfer.checksum import slot_checksums
from agent.transfer.chunk_transfer import ChunkTransfer
from agent.transfer.gloo import Store, local_store
from agent.transfer.gloo_peer import GlooPeer, SendRing
from agent.transfer.local_copy import LocalCopy
from agent.transfer.memory_handles import SharedHostHandles, allocate_shared
from agent.transfer.mesh import GlooMesh
from agent.transfer.nixl_read import NixlRead, make_agent, meet_agents
from agent.transfer.peer_memory import meet_neighbours
from agent.transfer.peer_read import PeerRead
from agent.transfer.staging import ExpertLayout, Staging, stored
from agent.transfer.streams import HostStreams, Streams
from agent.transfer.transport import LocalRank, StagedCopy, Transport
from eplb_service.control import NO_RANK, NO_THROTTLE, Address, Copy, LinkBytes, Stage, Throttle
from eplb_service.ids import ChunkId, GenerationNumber, GroupId, Incarnation, LayerRef, RankId
from tests.mixed_checkpoint import finish, parts_of, save
from tests.mixed_experts import BF16, FP8, LAYERS, slot_tensors, wrong

SLOTS = 2
RANK_IDS = (RankId(10), RankId(20), RankId(30))
STAGING_EXPERTS = 12
WAIT_S = 10.0

_mesh_ids = itertools.count(1)


@dataclass
class Rank:
    """One rank. experts: what its slots hold, by layer."""

    rank: LocalRank
    staging: Staging
    transfer: ChunkTransfer
    experts: dict[LayerRef, list[int]]
    meshes: list[GlooMesh]

    @classmethod
    def make(cls, position: int, kind: Kind, store: Store) -> Rank:
        """Rank of this column; expert e of each layer is in slot e % SLOTS of column e // SLOTS."""
        streams = HostStreams()
        experts = {layer: [position * SLOTS + slot for slot in range(SLOTS)] for layer in LAYERS}
        tensors = {layer: in_shared_memory(settled(slot_tensors(layer, experts[layer]))) for layer in LAYERS}
        layouts = {layer: ExpertLayout.of(layer, tensors[layer]) for layer in LAYERS}
        size = sum(layouts[layer].expert_bytes for layer in LAYERS) * STAGING_EXPERTS
        staging = Staging(size, layouts, torch.device("cpu"), streams, allocate=allocate_shared)
        scratch = torch.zeros(max(layout.num_bytes for layout in layouts.values()), dtype=torch.uint8)
        rank = LocalRank(
            rank_id=RANK_IDS[position],
            group_rank_ids=RANK_IDS,
            nodes=kind.nodes,
            tensors=tensors,
            layouts=layouts,
            checksums={layer: slot_checksums(layouts[layer], tensors[layer], SLOTS, scratch) for layer in LAYERS},
        )
        made = kind.transports(rank, staging, streams, store)
        return cls(rank, staging, ChunkTransfer(rank, staging, made, streams, time.monotonic), experts, [])

    def wrong(self, staged: Sequence[StagedCopy]) -> list[str]:
        """What lies in staging and is not the expert that the copy names."""
        found = []
        for entry in staged:
            layer, layout = entry.copy.layer, self.rank.layouts[entry.copy.layer]
            fresh = settled(slot_tensors(layer, [-1] * SLOTS))
            layout.unpack(entry.region.device, fresh, 0)
            found += [f"{entry.copy}: {name}" for name in wrong(layer, fresh, 0, entry.copy.expert)]
        return found


@dataclass(frozen=True)
class Kind:
    """What transports the ranks have, and on which nodes they are. asks_backup: nobody gives what is not a relay."""

    transports: Callable[[LocalRank, Staging, Streams, Store], Sequence[Transport]]
    nodes: tuple[str, ...]
    asks_backup: bool = False

    def asked(self, copies: Sequence[Copy]) -> list[Copy]:
        """The copies as they are asked for."""
        if not self.asks_backup:
            return list(copies)
        return [copy if copy.is_relay else replace(copy, source_rank=NO_RANK, source_slot=0) for copy in copies]


def by_gloo(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Sequence[Transport]:
    """What every rank has."""
    return LocalCopy(rank), GlooPeer(rank, SendRing.allocate(rank.layouts, torch.device("cpu"), streams), streams)


def by_reading(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Sequence[Transport]:
    """Within a node out of one another's memory, across nodes by gloo."""
    neighbours = meet_neighbours(store, rank, staging, SharedHostHandles(), WAIT_S)
    assert neighbours.problems == {}
    local, gloo = by_gloo(rank, staging, streams, store)
    return local, PeerRead(rank, neighbours, streams), gloo


def by_nixl(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Sequence[Transport]:
    """Over NIXL what lies as it is packed, the rest by gloo."""
    agent = make_agent()
    reachable = meet_agents(store, rank, staging, agent, WAIT_S)
    assert reachable.problems == {}
    local, gloo = by_gloo(rank, staging, streams, store)
    return local, NixlRead(rank, reachable, agent, streams), gloo


BACKUP = HostBackup(1 << 20)
"""Of bf16 and fp8 experts; those of int4 are read from the checkpoint."""


def by_backup(folder: Path) -> Callable[[LocalRank, Staging, Streams, Store], Sequence[Transport]]:
    """From host memory and from a checkpoint in a folder."""
    num_experts = SLOTS * len(RANK_IDS)
    save(folder, num_experts)
    layouts = {layer: ExpertLayout.of(layer, settled(slot_tensors(layer, (0, 1)))) for layer in LAYERS}
    wanted = [(layer, expert) for layer in (BF16, FP8) for expert in range(num_experts)]
    assert BACKUP.fill(Checkpoint(files_of(folder), parts_of, finish), wanted, layouts) == len(wanted)

    def transports(rank: LocalRank, staging: Staging, streams: Streams, store: Store) -> Sequence[Transport]:
        checkpoint = Checkpoint(files_of(folder), parts_of, finish)
        scratch = torch.zeros(max(layout.num_bytes for layout in rank.layouts.values()), dtype=torch.uint8)
        experts = range(num_experts)
        known = {
            layer: dict(enumerate(slot_checksums(layout, settled(slot_tensors(layer, experts)), num_experts, scratch)))
            for layer, layout in rank.layouts.items()
        }
        return BackupRead((BACKUP, checkpoint), known, rank.layouts), *by_gloo(rank, staging, streams, store)

    return transports


def in_shared_memory(tensors: Mapping[str, SlotTensor]) -> dict[str, SlotTensor]:
    """The same, stored in memory that others can read, strides and offsets kept."""
    made = {}
    for name, tensor in tensors.items():
        storage = tensor.data.untyped_storage()
        memory = allocate_shared(storage.nbytes())
        memory.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        typed = torch.empty(0, dtype=tensor.data.dtype).set_(memory.untyped_storage())
        data = typed.as_strided(tensor.data.shape, tensor.data.stride(), tensor.data.storage_offset())
        made[name] = replace(tensor, data=data)
    return made


@dataclass
class Group:
    """All ranks, a store between them, and a thread for each."""

    ranks: list[Rank]
    store: Store
    pool: ThreadPoolExecutor
    kind: Kind

    @classmethod
    def make(cls, kind: Kind) -> Group:
        """Ranks of a kind, which find one another."""
        store, pool = local_store(), ThreadPoolExecutor(8)
        making = [pool.submit(Rank.make, column, kind, store) for column in range(len(RANK_IDS))]
        return cls([rank.result(WAIT_S) for rank in making], store, pool, kind)

    @contextmanager
    def spoiled(self, layer: LayerRef, column: int, slot: int) -> Iterator[None]:
        """While this lasts, what this slot's expert comes from is not what was loaded."""
        expert, experts = column * SLOTS + slot, BACKUP._experts
        raw = experts[layer, expert] if self.kind.asks_backup else stored(_first(self.ranks[column].rank, layer))[slot]
        before = raw.clone()
        raw += 1
        try:
            yield
        finally:
            raw.copy_(before)

    def connect(self) -> list[GlooMesh]:
        """New connections, of all ranks."""
        mesh_id = ChunkId(next(_mesh_ids))
        meshes = [GlooMesh(self.store, mesh_id, column, len(self.ranks)) for column in range(len(self.ranks))]
        for done in [self.pool.submit(mesh.connect, WAIT_S) for mesh in meshes]:
            done.result(WAIT_S)
        for rank, mesh in zip(self.ranks, meshes, strict=True):
            rank.meshes.append(mesh)
        return meshes

    def begin(
        self,
        copies: Sequence[Copy],
        meshes: Sequence[GlooMesh],
        *,
        timeout_s: float = WAIT_S,
        only: Sequence[int] | None = None,
        throttle: Throttle = NO_THROTTLE,
    ) -> Mapping[int, Future[tuple[list[StagedCopy], LinkBytes]]]:
        """Let ranks (all) stage these copies."""
        deadline = time.monotonic() + timeout_s
        columns = range(len(self.ranks)) if only is None else only

        def run(column: int) -> tuple[list[StagedCopy], LinkBytes]:
            rank = self.ranks[column]
            rank.staging.clear()
            try:
                return rank.transfer.run(stage(self.kind.asked(copies), throttle), meshes[column], deadline)
            except BaseException:
                meshes[column].abandon()
                rank.transfer.quiesce()
                raise

        return {column: self.pool.submit(run, column) for column in columns}

    def stage(self, copies: Sequence[Copy], meshes: Sequence[GlooMesh], *, throttle: Throttle = NO_THROTTLE) -> list[LinkBytes]:
        """Stage them on all ranks; everything must arrive, and be right. Returns what each received."""
        received = []
        for column, done in self.begin(copies, meshes, throttle=throttle).items():
            staged, links = done.result(2 * WAIT_S)
            received.append(links)
            assert {entry.index for entry in staged} == {
                index for index, copy in enumerate(copies) if copy.target_rank == RANK_IDS[column]
            }
            assert self.ranks[column].wrong(staged) == []
        return received

    def close(self) -> None:
        """End everything."""
        for rank in self.ranks:
            for mesh in rank.meshes:
                mesh.abandon()
        self.pool.shutdown(wait=True)


def stage(copies: Sequence[Copy], throttle: Throttle = NO_THROTTLE) -> Stage:
    """A Stage of which only the copies and the throttle count here."""
    values: dict[str, Any] = {"chunk_id": ChunkId(1), "generation": GenerationNumber(1), "mesh_id": ChunkId(1)}
    values["throttle"] = throttle
    address = Address(RANK_IDS[0], Incarnation(1), GroupId(1))
    return Stage(to=address, weights_version=0, layers=(), copies=tuple(copies), stage_timeout_s=9, arm_ttl_s=9, **values)


def copy(layer: LayerRef, source: tuple[int, int], target: tuple[int, int], *, relay_of: int = -1, expert: int = -1) -> Copy:
    """From (column, slot) to (column, slot); of a relay, its expert must be said."""
    return Copy(
        layer=layer,
        expert=source[0] * SLOTS + source[1] if expert < 0 else expert,
        source_rank=RANK_IDS[source[0]],
        source_slot=source[1],
        target_rank=RANK_IDS[target[0]],
        target_slot=target[1],
        relay_of=relay_of,
    )


def _first(rank: LocalRank, layer: LayerRef) -> torch.Tensor:
    return rank.tensors[layer][rank.layouts[layer].tensors[0].name].data
