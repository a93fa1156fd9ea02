"""Splits the way from the live map to a generation into chunks that fit the staging budget.

Layers are independent, so a chunk is some whole layers: staged together, flipped at one step. What is copied for it says
`copies`.

Every slot that gets another expert is filled through staging, also from the same rank: at the flip all slots of a layer are
written at once, and two experts that swap places would overwrite each other. Sources are slots of the *live* map: these
stay untouched until the flip.

Under weighted dispatch a layer also changes when its shares alone do: it is staged, voted and flipped like any other, with no
copy and no byte of staging, so it fits any chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from eplb_service.control import Copy, LayerChange
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.moves import residencies
from eplb_service.node_entries import NodeEntries
from eplb_service.placement import EMPTY_SLOT, Int32Array, Placement, Table
from eplb_service.replica_shares import as_values
from eplb_service.rollout.copies import WantedLayer, plan_copies
from eplb_service.rollout.traffic import Traffic, traffic_of
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Layers that flip together, and the copies that fill their slots.

    staged_bytes: bytes that each rank stages, in column order: all that ends there, passed on or not. traffic: of the copies.
    """

    layers: tuple[LayerChange, ...]
    copies: tuple[Copy, ...]
    staged_bytes: tuple[int, ...]
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class _Layer:
    """One changed layer."""

    change: LayerChange
    wanted: WantedLayer
    staged_bytes: tuple[int, ...]


def plan_chunks(
    live: Placement,
    target: Placement,
    *,
    topology: Topology,
    expert_bytes: Mapping[LayerRef, int],
    staging_bytes: Mapping[RankId, int],
    layers_max: int | None = None,
    flip_bytes_max: int | None = None,
    fan_out: bool = False,
    restorers: AbstractSet[RankId] = frozenset(),
) -> tuple[PlannedChunk, ...]:
    """Chunks from `live` to `target`, changed layers only. Empty when nothing changes.

    Layers are taken in table order into the first chunk where no rank would stage more than the smallest budget. A slot
    that keeps its expert, or becomes empty (-1), needs no copy; nor does a layer whose shares alone change.

    topology: the ranks in column order. expert_bytes: of every changed layer. staging_bytes: budget of every rank.
    layers_max: most layers in a chunk; None = as the budget allows. flip_bytes_max: most bytes that a flip writes on a rank, so
    that it ends in time (`flip_stall`); None = no limit; a layer of more goes alone. fan_out: an expert crosses to a node once,
    and is passed on there; only for ranks that know relays (`Copy.relay_of`). restorers: ranks that take an expert which no
    rank that serves holds from a backup of their own.
    Raises InvalidInputError when the two differ in shape or ranks, when one has shares and the other none, when a single layer
    needs more staging than the smallest budget, when a dead rank gets an expert, and when an expert that must be copied is held
    by no rank that serves and is to go to one without a backup.
    """
    _check_shapes(live, target, topology)
    budget = min((staging_bytes[rank] for rank in topology.rank_ids), default=0)
    most = budget if flip_bytes_max is None else min(budget, flip_bytes_max)
    groups: list[list[_Layer]] = []
    filled: list[list[int]] = []
    for layer in _changed_layers(live, target, topology, expert_bytes, fan_out=fan_out):
        _check_fits(layer, budget, topology)
        for group, staged in zip(groups, filled, strict=True):
            room = all(have + more <= most for have, more in zip(staged, layer.staged_bytes, strict=True))
            if room and (layers_max is None or len(group) < layers_max):
                group.append(layer)
                staged[:] = [have + more for have, more in zip(staged, layer.staged_bytes, strict=True)]
                break
        else:
            groups.append([layer])
            filled.append(list(layer.staged_bytes))
    chunks = []
    for group, staged in zip(groups, filled, strict=True):
        copies = plan_copies([layer.wanted for layer in group], topology, fan_out=fan_out, restorers=restorers)
        traffic = traffic_of(copies, topology, expert_bytes)
        chunks.append(PlannedChunk(tuple(layer.change for layer in group), copies, tuple(staged), traffic))
    return tuple(chunks)


def _check_shapes(live: Placement, target: Placement, topology: Topology) -> None:
    if live.has_shares != target.has_shares:
        with_them, without = ("live map", "target") if live.has_shares else ("target", "live map")
        raise InvalidInputError(f"the {with_them} has shares and the {without} has none: a deployment has one dispatch")
    same = len(live.tables) == len(target.tables) and all(
        mine.same_shape(theirs) for mine, theirs in zip(live.tables, target.tables, strict=True)
    )
    if not same or live.rank_ids != topology.rank_ids:
        raise InvalidInputError(
            f"the live map and the target must have the same tables over the ranks {list(topology.rank_ids)};"
            f" got {_shape_of(live)} and {_shape_of(target)}"
        )


def _shape_of(placement: Placement) -> str:
    tables = ", ".join(
        f"{table.model!r}: {table.num_layers} layers x {table.num_physical} slots, E={table.num_logical}"
        for table in placement.tables
    )
    return f"[{tables}] over ranks {list(placement.rank_ids)}"


def _changed_layers(
    live: Placement, target: Placement, topology: Topology, expert_bytes: Mapping[LayerRef, int], *, fan_out: bool
) -> list[_Layer]:
    changed = []
    old_digests, new_digests = live.row_digests(), target.row_digests()
    for before, after in zip(live.tables, target.tables, strict=True):
        entries = NodeEntries(topology, fan_out=fan_out)
        for layer, old, new in zip(before.layers, before.physical_to_logical, after.physical_to_logical, strict=True):
            if old_digests[layer] == new_digests[layer]:
                continue
            wanted = _wanted(layer, old, new, before, expert_bytes[layer], topology, entries)
            staged = [0] * topology.num_ranks
            for position, _, _ in wanted.wanted:
                staged[position] += expert_bytes[layer]
            change = LayerChange(
                layer=layer,
                old_digest=old_digests[layer],
                new_digest=new_digests[layer],
                new_row=tuple(new.tolist()),
                new_shares=as_values(target.shares_row(layer)),
            )
            changed.append(_Layer(change, wanted, tuple(staged)))
    return changed


def _wanted(
    layer: LayerRef, old: Int32Array, new: Int32Array, table: Table, size: int, topology: Topology, entries: NodeEntries
) -> WantedLayer:
    """What a layer's ranks need. Rows: shape (P,). Raises InvalidInputError when a dead rank gets an expert."""
    alive, wanted = topology.alive, []
    for index in ((old != new) & (new != EMPTY_SLOT)).nonzero()[0].tolist():
        position, slot = divmod(index, table.slots_per_rank)
        if not alive[position]:
            raise InvalidInputError(
                f"layer {layer}: dead rank {topology.rank_ids[position]} gets expert {int(new[index])}; leave its slots empty"
            )
        wanted.append((position, slot, int(new[index])))
    shape = {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
    return WantedLayer(
        layer=layer,
        expert_bytes=size,
        old_row=tuple(old.tolist()),
        wanted=tuple(wanted),
        arrivals=entries.arrivals(residencies(old, **shape), residencies(new, **shape), expert_bytes=size),
    )


def _check_fits(layer: _Layer, budget: int, topology: Topology) -> None:
    most = max(layer.staged_bytes)
    if most > budget:
        position = layer.staged_bytes.index(most)
        raise InvalidInputError(
            f"layer {layer.change.layer} alone stages {most} bytes on rank {topology.rank_ids[position]} but the smallest"
            f" staging budget is {budget} bytes: allocate at least {most} bytes of staging, or move fewer experts of a layer"
        )
