"""Experts travel between ranks over gloo point-to-point, staged through host memory.

A second NCCL communicator beside cooperative all-to-all kernels deadlocks (vllm#32860, DeepEP#496); gloo uses no device at
all. Both ends of every copy walk the same list in the same order (pytorch#174288), every wait has the chunk's deadline, and a
copy that fails or is withdrawn abandons the whole mesh: bytes still under way can never be taken for those of a later chunk.

The mesh is full, of TCP connections of its own, found over the store under the chunk's mesh id.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from agent.engine.port import SlotTensor
from agent.transfer.checksum import checksum
from agent.transfer.gloo import GlooGroup, Store, Work, first_line, prefixed
from agent.transfer.staging import ExpertLayout, Region, Staging
from agent.transfer.streams import Streams
from eplb_service.control import Copy, LinkBytes, RefusalCode, Stage
from eplb_service.errors import EnvironmentFault
from eplb_service.ids import ChunkId, LayerRef, RankId

SEND_DEPTH = 2
_MIN_WAIT_S = 0.001
_POLL_S = 0.005
_GIVEN_UP = "given_up"


class TransferError(EnvironmentFault):
    """A copy failed. code: what the planner is told."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class GlooMesh:
    """Connections between all ranks of a group, for the chunks that name one mesh id."""

    def __init__(self, store: Store, mesh_id: ChunkId, position: int, num_ranks: int) -> None:
        self.mesh_id = mesh_id
        self._store = prefixed(f"mesh/{mesh_id}", store)
        self._position, self._num_ranks = position, num_ranks
        self._group: GlooGroup | None = None
        self._abandoned = threading.Event()

    def connect(self, timeout_s: float) -> None:
        """Meet all other ranks. Raises RuntimeError when one does not come, gives up, or this mesh is abandoned meanwhile.

        Ranks first say in the store that they are here: unlike the connecting itself, waiting for that can be ended.
        """
        if self._num_ranks == 1 or self._group is not None:
            return
        self._store.set(f"here/{self._position}", "")
        missing = [f"here/{position}" for position in range(self._num_ranks)]
        until = time.monotonic() + timeout_s
        while missing := [key for key in missing if not self._store.check([key])]:
            if self._store.check([_GIVEN_UP]):
                raise RuntimeError("a rank gave these connections up")
            if time.monotonic() > until:
                columns = ", ".join(key.removeprefix("here/") for key in missing)
                raise RuntimeError(f"ranks in columns {columns} did not come within {timeout_s:.3g} s")
            if self._abandoned.wait(_POLL_S):
                raise RuntimeError("abandoned while connecting")
        self._group = GlooGroup(self._store, self._position, self._num_ranks, max(until - time.monotonic(), _MIN_WAIT_S))

    def send(self, data: torch.Tensor, to: int, tag: int) -> Work:
        """Begin to send host memory to the rank at column `to`."""
        return self._live_group.send(data, to, tag)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Work:
        """Begin to fill host memory from the rank at column `source`."""
        return self._live_group.receive(data, source, tag)

    def abandon(self) -> None:
        """Close the connections, from any thread: every wait under way fails at once, here and at the peers."""
        self._abandoned.set()
        if self._group is not None:
            self._group.close_connections()

    def give_up(self) -> None:
        """Abandon it, and let ranks that still look for this one know."""
        self.abandon()
        with contextlib.suppress(RuntimeError):
            self._store.set(_GIVEN_UP, "")

    @property
    def is_abandoned(self) -> bool:
        """Whether it can carry nothing more."""
        return self._abandoned.is_set()

    @property
    def _live_group(self) -> GlooGroup:
        if self._group is None or self._abandoned.is_set():
            raise RuntimeError("the transfer connections were abandoned")
        return self._group


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """What a transfer needs of the rank that it runs on. checksums: of each local slot's expert, by layer (see `checksum`)."""

    rank_id: RankId
    group_rank_ids: tuple[RankId, ...]
    nodes: tuple[str, ...]
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]
    layouts: Mapping[LayerRef, ExpertLayout]
    checksums: Mapping[LayerRef, Sequence[int]]


@dataclass(slots=True)
class StagedCopy:
    """One expert in staging. expected: the checksum that its source holds."""

    copy: Copy
    region: Region
    expected: int = 0


@dataclass(slots=True)
class _Receiving:
    staged: StagedCopy
    data: Work
    checksum: torch.Tensor
    checksum_work: Work


@dataclass(slots=True)
class SendRing:
    """Host (and device) memory that experts leave through, allocated once: SEND_DEPTH experts may be under way."""

    device: list[torch.Tensor]
    host: list[torch.Tensor]
    under_way: deque[tuple[Copy, list[Work], torch.Tensor]] = field(default_factory=deque)
    sent: int = 0

    @classmethod
    def allocate(cls, layouts: Mapping[LayerRef, ExpertLayout], device: torch.device, streams: Streams) -> SendRing:
        """Room for the largest expert of any layer, SEND_DEPTH times."""
        size = max((layout.num_bytes for layout in layouts.values()), default=0)
        on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(SEND_DEPTH)]
        on_host = on_device if device.type == "cpu" else [streams.host_buffer(size) for _ in range(SEND_DEPTH)]
        return cls(on_device, on_host)


class GlooTransfer:
    """Carries one chunk's copies. Used by one worker thread; `mesh.abandon` by any."""

    def __init__(self, rank: LocalRank, staging: Staging, ring: SendRing, streams: Streams, clock: Callable[[], float]) -> None:
        self._rank = rank
        self._staging = staging
        self._ring = ring
        self._streams = streams
        self._clock = clock
        self._position = {rank_id: index for index, rank_id in enumerate(rank.group_rank_ids)}

    def run(self, stage: Stage, mesh: GlooMesh, deadline: float) -> tuple[list[StagedCopy], LinkBytes]:
        """Bring every copy that ends here into staging, verified. Raises TransferError; then staging holds nothing of use.

        deadline: on this object's clock.
        """
        self._ring.under_way.clear()
        try:
            with self._streams.on_side_stream():
                receiving = self._post_receives(stage, mesh)
                staged = [entry.staged for entry in receiving] + self._send_and_copy(stage, mesh, deadline)
                self._finish_receives(receiving, deadline)
                self._finish_sends(0, deadline)
                self._verify(staged)
        except RuntimeError as error:
            raise TransferError(RefusalCode.TRANSFER, f"a copy failed: {first_line(error)}") from error
        return staged, self._link_bytes(staged)

    def _post_receives(self, stage: Stage, mesh: GlooMesh) -> list[_Receiving]:
        """All at once: a sender then never waits for a receiver that waits for another sender."""
        receiving = []
        for index, copy in enumerate(stage.copies):
            if copy.target_rank == self._rank.rank_id and copy.source_rank != self._rank.rank_id:
                source = self._position[copy.source_rank]
                region = self._staging.take(copy.layer)
                value = torch.zeros(1, dtype=torch.int64)
                data = mesh.receive(region.host, source, 2 * index)
                receiving.append(_Receiving(StagedCopy(copy, region), data, value, mesh.receive(value, source, 2 * index + 1)))
        return receiving

    def _send_and_copy(self, stage: Stage, mesh: GlooMesh, deadline: float) -> list[StagedCopy]:
        local = []
        for index, copy in enumerate(stage.copies):
            if copy.source_rank != self._rank.rank_id:
                continue
            layout, tensors = self._rank.layouts[copy.layer], self._rank.tensors[copy.layer]
            expected = self._rank.checksums[copy.layer][copy.source_slot]
            if copy.target_rank == self._rank.rank_id:
                region = self._staging.take(copy.layer)
                layout.pack(tensors, copy.source_slot, region.device)
                local.append(StagedCopy(copy, region, expected))
                continue
            self._finish_sends(SEND_DEPTH - 1, deadline)
            turn = self._ring.sent % SEND_DEPTH
            self._ring.sent += 1
            packed, host = self._ring.device[turn][: layout.num_bytes], self._ring.host[turn][: layout.num_bytes]
            layout.pack(tensors, copy.source_slot, packed)
            if host is not packed and host.data_ptr() != packed.data_ptr():
                host.copy_(packed, non_blocking=True)
            self._streams.record().wait_host()  # the bytes are in host memory before they leave
            to, value = self._position[copy.target_rank], torch.tensor([expected], dtype=torch.int64)
            works = [mesh.send(host, to, 2 * index), mesh.send(value, to, 2 * index + 1)]
            self._ring.under_way.append((copy, works, value))
        return local

    def _finish_sends(self, most: int, deadline: float) -> None:
        """Wait until at most `most` experts are under way."""
        while len(self._ring.under_way) > most:
            copy, works, _ = self._ring.under_way.popleft()
            for work in works:
                self._wait(work, deadline, f"rank {copy.target_rank} took no expert {copy.expert} of {copy.layer}")

    def _finish_receives(self, receiving: list[_Receiving], deadline: float) -> None:
        for entry in receiving:
            copy = entry.staged.copy
            what = f"rank {copy.source_rank} sent no expert {copy.expert} of {copy.layer}"
            self._wait(entry.data, deadline, what)
            self._wait(entry.checksum_work, deadline, what)
            entry.staged.expected = int(entry.checksum[0])
            region = entry.staged.region
            if region.host.data_ptr() != region.device.data_ptr():
                region.device.copy_(region.host, non_blocking=True)

    def _wait(self, work: Work, deadline: float, what: str) -> None:
        left = max(deadline - self._clock(), _MIN_WAIT_S)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise TransferError(RefusalCode.TRANSFER, f"{what}: {first_line(error)}") from error

    def _verify(self, staged: list[StagedCopy]) -> None:
        """Compare what lies in staging, on the device that will use it, with what the source says of its bytes."""
        sums = [checksum(entry.region.device) for entry in staged]
        found = torch.stack(sums).tolist() if sums else []
        for entry, value in zip(staged, found, strict=True):
            if value != entry.expected:
                copy = entry.copy
                raise TransferError(
                    RefusalCode.CHECKSUM,
                    f"expert {copy.expert} of {copy.layer} from rank {copy.source_rank} slot {copy.source_slot}: checksum"
                    f" {value & (1 << 64) - 1:#x}, its source has {entry.expected & (1 << 64) - 1:#x} since load or flip",
                )

    def _link_bytes(self, staged: list[StagedCopy]) -> LinkBytes:
        node = {rank_id: self._rank.nodes[index] for rank_id, index in self._position.items()}
        count = {"same_rank": 0, "same_node": 0, "cross_node": 0}
        for entry in staged:
            source = entry.copy.source_rank
            near = "same_node" if node[source] == node[self._rank.rank_id] else "cross_node"
            link = "same_rank" if source == self._rank.rank_id else near
            count[link] += self._rank.layouts[entry.copy.layer].expert_bytes
        return LinkBytes(**count)


def slot_checksums(layout: ExpertLayout, tensors: Mapping[str, SlotTensor], num_slots: int, scratch: torch.Tensor) -> list[int]:
    """Checksum of every slot's expert as it is now. scratch: at least layout.num_bytes on the weights' device."""
    region = scratch[: layout.num_bytes]
    sums = []
    for slot in range(num_slots):
        layout.pack(tensors, slot, region)
        sums.append(checksum(region))
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
