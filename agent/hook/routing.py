"""The flip: what lies in staging becomes what the engine computes with, in place, on its compute stream.

Tensors and tables are written, never replaced: captured graphs keep their addresses (FastDeploy#4599). The one source is the
new row with its shares; all tables derive from it (vllm#36267). Weights come first, then the tables, in one uninterrupted run
of work on the stream that runs the model, so that no kernel of the model sees one without the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from agent.engine.port import EnginePort, RoutingTables, SlotTensor
from agent.hook.stage_check import LayerShape
from agent.transfer.staging import ExpertLayout, Region
from agent.transfer.streams import EventPair, Streams
from eplb_service.control import LiveLayer
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef
from eplb_service.placement import logical_to_physical
from eplb_service.replica_shares import as_array, as_values, checked_shares, replica_shares, slot_shares

FLIP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class LayerTables:
    """A layer's tables for a row, with the shapes and types of the engine's, on its device."""

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    replica_counts: torch.Tensor
    replica_shares: torch.Tensor | None

    @classmethod
    def derive(
        cls,
        row: Sequence[int],
        num_logical: int,
        width: int,
        device: torch.device,
        *,
        shares: Sequence[float] | None = None,
    ) -> LayerTables:
        """All tables from the row and, under weighted dispatch, the shares of its slots.

        Raises InvalidInputError when an expert has more than `width` replicas.
        """
        physical = np.array([row], dtype=np.int32)
        logical = logical_to_physical(physical, num_logical, width)
        counts = np.bincount(physical[0][physical[0] >= 0], minlength=num_logical)
        by_slot = as_array(shares)
        by_replica = None if by_slot is None else torch.from_numpy(replica_shares(by_slot[None], logical)[0])
        arrays = (physical[0], logical[0], counts)
        placed, by_expert, copies = (torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True) for array in arrays)
        return cls(placed, by_expert, copies, None if by_replica is None else by_replica.to(device, non_blocking=True))

    def write(self, tables: RoutingTables) -> None:
        """Into the engine's own storage."""
        tables.physical_to_logical.copy_(self.physical_to_logical, non_blocking=True)
        tables.logical_to_physical.copy_(self.logical_to_physical, non_blocking=True)
        tables.replica_counts.copy_(self.replica_counts, non_blocking=True)
        if self.replica_shares is not None and tables.replica_shares is not None:
            tables.replica_shares.copy_(self.replica_shares, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LayerFlip:
    """What a flip does to one layer here. staged: local slot → its new expert's bytes; changed: slots that held another."""

    layer: LayerRef
    tables: LayerTables
    staged: tuple[tuple[int, Region], ...]
    changed: tuple[int, ...]


@dataclass(slots=True)
class PreparedFlip:
    """Everything that a flip needs, on the device.

    checksums: (layer, local slot) → checksum of what lies in staging for it. ready: recorded on the staging stream; begun,
    copied_out: on the compute stream, before the flip and after it.
    """

    layers: tuple[LayerFlip, ...]
    checksums: Mapping[tuple[LayerRef, int], int] = field(default_factory=dict)
    ready: EventPair = field(default_factory=EventPair)
    begun: EventPair = field(default_factory=EventPair)
    copied_out: EventPair = field(default_factory=EventPair)

    @property
    def stall_s(self) -> float:
        """Time that the flip took of the compute stream, once `copied_out` is reached: the host only enqueues it."""
        return self.copied_out.seconds_since(self.begun)


def flip(
    prepared: PreparedFlip,
    *,
    port: EnginePort,
    streams: Streams,
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]],
    layouts: Mapping[LayerRef, ExpertLayout],
    tables: Mapping[LayerRef, RoutingTables] | None,
) -> None:
    """Enqueue the whole flip on the compute stream; `prepared.copied_out` says when the device is through.

    tables: None = weights only.
    """
    with streams.on_compute_stream(), torch.no_grad():
        prepared.begun.record(streams, timed=True)
        prepared.ready.hold_current_stream(FLIP_TIMEOUT_S)
        for entry in prepared.layers:
            for slot, region in entry.staged:
                layouts[entry.layer].unpack(region.device, tensors[entry.layer], slot)
        for entry in prepared.layers:
            if tables is not None:
                entry.tables.write(tables[entry.layer])
            if entry.changed:
                port.rederive(entry.layer, entry.changed)
        prepared.copied_out.record(streams, timed=True)


def write_tables(
    live: Mapping[LayerRef, LiveLayer],
    tables: Mapping[LayerRef, RoutingTables],
    layers: Mapping[LayerRef, LayerShape],
    *,
    width: int,
    device: torch.device,
    streams: Streams,
) -> None:
    """Write the tables of all layers for a map, in place, and wait for the device. Experts without a slot get none.

    Raises InvalidInputError when an expert has more than `width` replicas.
    """
    with streams.on_compute_stream(), torch.no_grad():
        for layer, known in live.items():
            derived = LayerTables.derive(known.row, layers[layer].num_logical, width, device, shares=known.shares)
            derived.write(tables[layer])
        streams.record().wait_host()


def check_loaded(layer: LayerRef, tables: RoutingTables, row: Sequence[int]) -> None:
    """Raises InvalidInputError when the engine routes by another row than the one it says it loaded."""
    found = tables.physical_to_logical.tolist()
    differ = [slot for slot, (a, b) in enumerate(zip(found, row, strict=True)) if a != b]
    if differ:
        slot = differ[0]
        raise InvalidInputError(
            f"layer {layer}: the engine's table has expert {found[slot]} in slot {slot}, it says that it loaded {row[slot]};"
            f" {len(differ)} slots differ"
        )


def loaded_shares(layer: LayerRef, tables: RoutingTables, row: Sequence[int], num_logical: int) -> tuple[float, ...] | None:
    """Shares that the engine's dispatch reads before anything was flipped, of each slot; None where it has no such table.

    Raises InvalidInputError when they are none: they do not add up, or lie beside the replicas.
    """
    if tables.replica_shares is None:
        return None
    by_replica = tables.replica_shares.cpu().numpy()
    physical = np.array([row], dtype=np.int32)
    logical = logical_to_physical(physical, num_logical, by_replica.shape[1])[0]
    held = logical >= 0
    if by_replica[~held].any():
        expert, replica = np.argwhere(~held & (by_replica != 0))[0].tolist()
        raise InvalidInputError(
            f"layer {layer}: the engine's table gives replica {replica} of expert {expert} the share"
            f" {float(by_replica[expert, replica])!r}, but it has {int(held[expert].sum())} replicas"
        )
    shares = slot_shares(by_replica, logical, num_physical=len(row))
    return as_values(checked_shares(shares[None], physical, num_logical, layers=(str(layer),))[0])
