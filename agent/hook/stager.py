"""The worker thread that brings a chunk into staging and prepares everything that its flip needs.

One chunk at a time. Every BeginStaging is answered by exactly one StagingDone or StagingFailed, and only when nothing of this
chunk can write to staging any more: that answer is what makes staging free for the next chunk (vllm#32881).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from agent.engine.port import SlotTensor
from agent.hook.chunk_events import NO_CHUNK, BeginStaging, StagingDone, StagingFailed
from agent.hook.loaded_check import KnownExperts, Rows, check_loaded_slots
from agent.hook.routing import LayerFlip, LayerTables, PreparedFlip
from agent.hook.stage_check import RankShape, local_changes
from agent.transfer import transports
from agent.transfer.backup import BackupRead, ExpertSource
from agent.transfer.checksum import slot_checksums
from agent.transfer.chunk_transfer import ChunkTransfer
from agent.transfer.gloo import Store, first_line, local_store
from agent.transfer.gloo_peer import SendRing
from agent.transfer.memory_handles import allocate_shared
from agent.transfer.mesh import GlooMesh
from agent.transfer.pace import Pressure
from agent.transfer.staging import ExpertLayout, Staging
from agent.transfer.streams import DeviceEvent, Streams
from agent.transfer.transport import LocalRank, StagedCopy, TransferError
from agent.transfer.ways import Ways
from eplb_service.control import RefusalCode, Stage
from eplb_service.failpoints import reach
from eplb_service.ids import ChunkId, LayerRef, RankId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The expert tensors of this rank and how they are packed."""

    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]
    layouts: Mapping[LayerRef, ExpertLayout]
    device: torch.device


class Stager:
    """Runs copies for the hook. `begin`, `cancel` and `forget` may be called from any thread.

    ways: how experts go between ranks.
    pressure: what the engine says of it; None = nothing.
    sources: backups of this rank, the first that has an expert gives it; they hold the weights that are loaded at the start.
    on_end: told how each chunk's copy ended, with what its flip needs when it ended well; from the worker thread.
    """

    def __init__(
        self,
        *,
        shape: RankShape,
        nodes: tuple[str, ...],
        weights: Weights,
        budget_bytes: int,
        store: Store | None,
        ways: Ways,
        streams: Streams,
        rendezvous_timeout_s: float,
        clock: Callable[[], float],
        on_end: Callable[[StagingDone | StagingFailed, PreparedFlip | None], None],
        pressure: Pressure | None = None,
        sources: Sequence[ExpertSource] = (),
    ) -> None:
        self._weights, self._streams, self._clock, self._on_end = weights, streams, clock, on_end
        self._rendezvous_timeout_s = rendezvous_timeout_s
        self._ways, self._pressure, self._sources = ways, pressure, tuple(sources)
        self._known = KnownExperts()
        allocate = allocate_shared if ways.same_node == "read" else None
        self._staging = Staging(budget_bytes, weights.layouts, weights.device, streams, allocate=allocate)
        self._ring = SendRing.allocate(weights.layouts, weights.device, streams)
        self._checksums: dict[LayerRef, list[int]] = {}
        self._checksums_of: int | None = None
        self._weights_ready: DeviceEvent | None = None
        self._enter(shape, nodes, store)
        self._lock = threading.Lock()
        self._mesh: GlooMesh | None = None
        self._spent_mesh_id = NO_CHUNK  # mesh ids only grow, as chunk ids do
        self._cancelled: set[ChunkId] = set()
        self._busy_with: ChunkId | None = None
        self._at_rest = threading.Event()
        self._at_rest.set()
        self._queue: queue.SimpleQueue[tuple[BeginStaging, Mapping[LayerRef, tuple[int, ...]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="eplb-stage", daemon=True)

    def weights_written(self, event: DeviceEvent) -> None:
        """The engine's weights are complete once this event is reached: nothing of them is read before."""
        self._weights_ready = event

    def start(self, weights_version: int, rows: Rows) -> None:
        """Meet the ranks of this node, compute the checksums of what was loaded and compare replicas, then start the thread.

        rows: what was loaded, by layer. Raises ConflictError when a slot does not hold what they say, DeadlineError when a rank
        of the group does not say in time what memory it shares, or what it loaded.
        """
        self._meet()
        self._compute_checksums(weights_version)
        known = check_loaded_slots(self._store, self._shape, rows, self._checksums, self._rendezvous_timeout_s)
        self._know(KnownExperts(weights_version, known))
        self._thread.start()

    def rest(self, timeout_s: float) -> bool:
        """Cancel the copy under way and wait until it ended and was told of; whether it did. Connections are given up."""
        with self._lock:
            busy = self._busy_with
        if busy is not None:
            self.cancel(busy)
        if not self._at_rest.wait(timeout_s):
            return False
        self._drop_mesh()
        return True

    def form_again(
        self, shape: RankShape, nodes: tuple[str, ...], store: Store, known: KnownExperts, weights_version: int
    ) -> None:
        """Go on in another group, at `rest`, with the same memory and the checksums of the slots as they are.

        On a rank that joins this is the start. known: what the ranks of the group know together. Raises DeadlineError when a
        rank does not say in time what memory it shares.
        """
        self._enter(shape, nodes, store)
        self._meet()
        if self._checksums_of is None:
            self._compute_checksums(weights_version)
        self._know(known)
        if not self._thread.is_alive():
            self._thread.start()

    @property
    def known(self) -> KnownExperts:
        """What every expert must be when it comes from a backup."""
        return self._known

    @property
    def num_bytes(self) -> int:
        """Memory on the device that this takes, all of it from the start: staging, and what experts leave through."""
        return self._staging.num_bytes + self._ring.num_bytes

    @property
    def reads_from(self) -> tuple[RankId, ...]:
        """Ranks whose memory experts are read from."""
        return self._transports.reads_from

    def begin(self, order: BeginStaging, old_rows: Mapping[LayerRef, tuple[int, ...]]) -> None:
        """Copy a chunk. old_rows: live row of each of its layers."""
        with self._lock:
            self._busy_with = order.stage.chunk_id
            self._at_rest.clear()
        self._queue.put((order, old_rows))

    def cancel(self, chunk: ChunkId) -> None:
        """End a chunk's copy soon: its connections are closed, which ends every wait on them."""
        with self._lock:
            if self._busy_with != chunk:
                return
            self._cancelled.add(chunk)
            mesh = self._mesh
        if mesh is not None:
            mesh.abandon()

    def note_flip(self, stage: Stage, staged: Mapping[tuple[LayerRef, int], int]) -> None:
        """A chunk is live: its slots hold experts with these checksums now. staged: (layer, local slot) → checksum."""
        for (layer, slot), value in staged.items():
            self._checksums[layer][slot] = value
        logger.debug("chunk.flipped %#x: %d slots hold other experts", stage.chunk_id, len(staged))

    def close(self, timeout_s: float) -> None:
        """End the thread; a copy under way is cancelled."""
        with self._lock:
            busy = self._busy_with
        if busy is not None:
            self.cancel(busy)
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _enter(self, shape: RankShape, nodes: tuple[str, ...], store: Store | None) -> None:
        """Be a rank of a group; experts are sent until its ranks have met."""
        self._shape, self._store = shape, store
        self._position = shape.group_rank_ids.index(shape.rank_id)
        self._rank = LocalRank(
            rank_id=shape.rank_id,
            group_rank_ids=shape.group_rank_ids,
            nodes=nodes,
            tensors=self._weights.tensors,
            layouts=self._weights.layouts,
            checksums=self._checksums,
        )
        self._transports = transports.sending(self._rank, self._ring, self._streams)
        self._transfer = self._make_transfer()

    def _meet(self) -> None:
        """Find out with the other ranks by which ways experts go."""
        if self._store is not None:
            self._transports = transports.meet(
                self._ways, self._store, self._rank, self._staging, self._ring, self._streams, self._rendezvous_timeout_s
            )
            self._transfer = self._make_transfer()

    def _know(self, known: KnownExperts) -> None:
        self._known = known
        self._transfer = self._make_transfer()

    def _make_transfer(self) -> ChunkTransfer:
        backup = BackupRead(self._sources, self._known.checksums, self._weights.layouts)
        ways = (backup, *self._transports.all)
        return ChunkTransfer(self._rank, self._staging, ways, self._streams, self._clock, self._pressure)

    # ── worker thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        self._streams.bind_thread()
        while (item := self._queue.get()) is not None:
            order, old_rows = item
            end, prepared = self._stage(order, old_rows)
            with self._lock:
                self._busy_with = None
                self._cancelled.discard(order.stage.chunk_id)
            reach("hook.staging.done")
            try:
                self._on_end(end, prepared)
            finally:
                with self._lock:
                    if self._busy_with is None:
                        self._at_rest.set()

    def _stage(
        self, order: BeginStaging, old_rows: Mapping[LayerRef, tuple[int, ...]]
    ) -> tuple[StagingDone | StagingFailed, PreparedFlip | None]:
        stage, began = order.stage, self._clock()
        chunk = stage.chunk_id
        try:
            self._staging.clear()
            reach("hook.staging.begin")
            if self._checksums_of != stage.weights_version:
                self._compute_checksums(stage.weights_version)
            if self._known.checksums and self._known.weights_version != stage.weights_version:
                self._know(self._known.of(stage.weights_version))  # no backup holds these weights
            mesh = self._mesh_for(stage, order.deadline)
            reach("hook.staging.connected")
            staged, received = self._transfer.run(stage, mesh, order.deadline)
            prepared = self._prepare(stage, old_rows, staged)
        except TransferError as error:
            code, reason = error.code, str(error)
        except Exception as error:  # whatever goes wrong in here refuses one chunk and never reaches the engine
            logger.exception("chunk.staging failed")
            code, reason = RefusalCode.TRANSFER, f"{type(error).__name__}: {first_line(error)}"
        else:
            return StagingDone(chunk, self._clock() - began, received), prepared
        self._quiesce()
        if chunk in self._cancelled:
            code, reason = RefusalCode.WITHDRAWN, "withdrawn while it was copied"
        return StagingFailed(chunk, code, reason), None

    def _mesh_for(self, stage: Stage, deadline: float) -> GlooMesh:
        """The connections that this chunk is to use: the present ones, or new ones found by all ranks under its mesh id."""
        with self._lock:
            mesh, cancelled = self._mesh, stage.chunk_id in self._cancelled
        if cancelled:
            raise TransferError(RefusalCode.WITHDRAWN, "withdrawn before it was copied")
        if mesh is not None and mesh.mesh_id == stage.mesh_id and not mesh.is_abandoned:
            return mesh
        if stage.mesh_id <= self._spent_mesh_id:
            raise TransferError(
                RefusalCode.TRANSFER, f"the connections of mesh {stage.mesh_id:#x} were abandoned here; use a new mesh id"
            )
        self._drop_mesh()
        if self._store is None and len(self._shape.group_rank_ids) > 1:
            raise TransferError(RefusalCode.TRANSFER, "this rank found no other ranks at start")
        mesh = GlooMesh(self._store or local_store(), stage.mesh_id, self._position, len(self._shape.group_rank_ids))
        with self._lock:
            self._mesh = mesh  # from here on `cancel` can end the wait for the others
            cancelled = stage.chunk_id in self._cancelled
        if cancelled:
            raise TransferError(RefusalCode.WITHDRAWN, "withdrawn before it was copied")
        try:
            mesh.connect(max(min(self._rendezvous_timeout_s, deadline - self._clock()), 0.01))
        except RuntimeError as error:
            raise TransferError(RefusalCode.TRANSFER, f"not all ranks connected: {first_line(error)}") from error
        return mesh

    def _drop_mesh(self) -> None:
        with self._lock:
            mesh, self._mesh = self._mesh, None
        if mesh is not None:
            self._spent_mesh_id = max(self._spent_mesh_id, mesh.mesh_id)
            mesh.give_up()

    def _quiesce(self) -> None:
        """Make sure that nothing of a failed copy writes to staging any more: no connection, no work on the side stream."""
        self._drop_mesh()
        self._transfer.quiesce()

    def _compute_checksums(self, weights_version: int) -> None:
        with self._streams.on_side_stream():
            if self._weights_ready is not None:
                self._weights_ready.hold_current_stream()
            for layer, layout in self._weights.layouts.items():
                tensors = self._weights.tensors[layer]
                slots = self._shape.layers[layer].slots
                self._checksums[layer] = slot_checksums(layout, tensors, slots, self._ring.device[0])
        self._checksums_of = weights_version

    def _prepare(self, stage: Stage, old_rows: Mapping[LayerRef, tuple[int, ...]], staged: list[StagedCopy]) -> PreparedFlip:
        by_layer: defaultdict[LayerRef, list[StagedCopy]] = defaultdict(list)
        for entry in staged:
            by_layer[entry.copy.layer].append(entry)
        layers = []
        with self._streams.on_side_stream():
            for change in stage.layers:
                shape = self._shape.layers[change.layer]
                tables = LayerTables.derive(
                    change.new_row,
                    shape.num_logical,
                    self._shape.replica_table_width,
                    self._weights.device,
                    shares=change.new_shares,
                )
                first = self._position * shape.slots
                changed = local_changes(change, old_rows[change.layer], shape.slots, self._position)
                layers.append(
                    LayerFlip(
                        layer=change.layer,
                        tables=tables,
                        staged=tuple((entry.copy.target_slot, entry.region) for entry in by_layer[change.layer]),
                        changed=tuple(slot for slot in changed if change.new_row[first + slot] >= 0),
                    )
                )
            prepared = PreparedFlip(
                tuple(layers), {(entry.copy.layer, entry.copy.target_slot): entry.expected for entry in staged}
            )
            prepared.ready.record(self._streams)
        return prepared
