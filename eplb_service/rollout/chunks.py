"""Splits the way from the live map to a generation into chunks that fit the staging budget, and picks each copy's source.

Layers are independent, so a chunk is some whole layers: staged together, flipped at one step. Every rank gets the same list
of copies, so both ends of a copy follow one plan and no rank computes it for itself (invariant 7).

Every slot that gets another expert is filled through staging, also from the same rank: at the flip all slots of a layer are
written at once, and two experts that swap places would overwrite each other. Sources are slots of the *live* map: these
stay untouched until the flip.

Under weighted dispatch a layer also changes when its shares alone do: it is staged, voted and flipped like any other, with no
copy and no byte of staging, so it fits any chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eplb_service.control import Copy, LayerChange
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.placement import EMPTY_SLOT, Placement
from eplb_service.replica_shares import as_values
from eplb_service.topology import LinkKind, Topology

_NEAREST_FIRST = (LinkKind.SAME_RANK, LinkKind.SAME_NODE, LinkKind.CROSS_NODE)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Layers that flip together, and the copies that fill their slots.

    staged_bytes: bytes that each rank stages, in column order. Copies are in order of (layer, target rank, target slot).
    """

    layers: tuple[LayerChange, ...]
    copies: tuple[Copy, ...]
    staged_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One changed layer. wanted: (rank position, local slot, expert) of every slot that gets another expert."""

    change: LayerChange
    old_row: tuple[int, ...]
    wanted: tuple[tuple[int, int, int], ...]
    staged_bytes: tuple[int, ...]


def plan_chunks(
    live: Placement,
    target: Placement,
    *,
    topology: Topology,
    expert_bytes: Mapping[LayerRef, int],
    staging_bytes: Mapping[RankId, int],
    layers_max: int | None = None,
) -> tuple[PlannedChunk, ...]:
    """Chunks from `live` to `target`, changed layers only. Empty when nothing changes.

    Layers are taken in table order into the first chunk where no rank would stage more than the smallest budget. A slot
    that keeps its expert, or becomes empty (-1), needs no copy; nor does a layer whose shares alone change. Sources are nearest
    first (same rank, same node, cross node), among equals the rank that sends least in this chunk.

    topology: the ranks in column order. expert_bytes: of every changed layer. staging_bytes: budget of every rank.
    layers_max: most layers in a chunk; None = as the budget allows.
    Raises InvalidInputError when the two differ in shape or ranks, when one has shares and the other none, when a single layer
    needs more staging than the smallest budget, when a dead rank gets an expert, and when an expert that must be copied is held
    by no rank that serves.
    """
    _check_shapes(live, target, topology)
    budget = min((staging_bytes[rank] for rank in topology.rank_ids), default=0)
    groups: list[list[_Layer]] = []
    filled: list[list[int]] = []
    for layer in _changed_layers(live, target, topology, expert_bytes):
        _check_fits(layer, budget, topology)
        for group, staged in zip(groups, filled, strict=True):
            room = all(have + more <= budget for have, more in zip(staged, layer.staged_bytes, strict=True))
            if room and (layers_max is None or len(group) < layers_max):
                group.append(layer)
                staged[:] = [have + more for have, more in zip(staged, layer.staged_bytes, strict=True)]
                break
        else:
            groups.append([layer])
            filled.append(list(layer.staged_bytes))
    return tuple(
        PlannedChunk(tuple(layer.change for layer in group), _sourced(group, topology, expert_bytes), tuple(staged))
        for group, staged in zip(groups, filled, strict=True)
    )


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
    live: Placement, target: Placement, topology: Topology, expert_bytes: Mapping[LayerRef, int]
) -> list[_Layer]:
    changed = []
    old_digests, new_digests = live.row_digests(), target.row_digests()
    for (layer, table, old), (_, _, new) in zip(live.layers(), target.layers(), strict=True):
        if old_digests[layer] == new_digests[layer]:
            continue
        wanted = []
        staged = [0] * topology.num_ranks
        for index in (old != new).nonzero()[0].tolist():
            expert = int(new[index])
            position, slot = divmod(index, table.slots_per_rank)
            if expert == EMPTY_SLOT:
                continue
            if topology.rank_ids[position] in topology.dead:
                raise InvalidInputError(
                    f"layer {layer}: dead rank {topology.rank_ids[position]} gets expert {expert}; leave its slots empty"
                )
            wanted.append((position, slot, expert))
            staged[position] += expert_bytes[layer]
        change = LayerChange(
            layer=layer,
            old_digest=old_digests[layer],
            new_digest=new_digests[layer],
            new_row=tuple(new.tolist()),
            new_shares=as_values(target.shares_row(layer)),
        )
        changed.append(_Layer(change, tuple(old.tolist()), tuple(wanted), tuple(staged)))
    return changed


def _check_fits(layer: _Layer, budget: int, topology: Topology) -> None:
    most = max(layer.staged_bytes)
    if most > budget:
        position = layer.staged_bytes.index(most)
        raise InvalidInputError(
            f"layer {layer.change.layer} alone stages {most} bytes on rank {topology.rank_ids[position]} but the smallest"
            f" staging budget is {budget} bytes: allocate at least {most} bytes of staging, or move fewer experts of a layer"
        )


def _sourced(group: list[_Layer], topology: Topology, expert_bytes: Mapping[LayerRef, int]) -> tuple[Copy, ...]:
    """A source for every wanted slot. Those with the fewest sources choose first, so that the others can keep clear of them."""
    sent = [0] * topology.num_ranks
    requests = []
    for order, layer in enumerate(group):
        slots_of = _live_slots(layer, topology)
        for position, slot, expert in layer.wanted:
            candidates = _nearest(slots_of.get(expert, []), position, topology)
            if not candidates:
                raise InvalidInputError(
                    f"layer {layer.change.layer}: no rank that serves holds expert {expert}, which rank"
                    f" {topology.rank_ids[position]} slot {slot} is to get"
                )
            ranks = len({source for source, _ in candidates})
            requests.append((ranks, order, position, slot, expert, candidates))
    chosen: dict[tuple[int, int, int], Copy] = {}
    for _, order, position, slot, expert, candidates in sorted(requests):
        source, source_slot = min(candidates, key=lambda candidate: (sent[candidate[0]], candidate))
        layer_ref = group[order].change.layer
        if source != position:
            sent[source] += expert_bytes[layer_ref]
        chosen[order, position, slot] = Copy(
            layer=layer_ref,
            expert=expert,
            source_rank=topology.rank_ids[source],
            source_slot=source_slot,
            target_rank=topology.rank_ids[position],
            target_slot=slot,
        )
    return tuple(chosen[key] for key in sorted(chosen))


def _live_slots(layer: _Layer, topology: Topology) -> dict[int, list[tuple[int, int]]]:
    """(rank position, local slot) of each expert on the ranks that serve, ascending."""
    slots_per_rank = len(layer.old_row) // topology.num_ranks
    slots: dict[int, list[tuple[int, int]]] = {}
    for index, expert in enumerate(layer.old_row):
        position, slot = divmod(index, slots_per_rank)
        if expert != EMPTY_SLOT and topology.rank_ids[position] not in topology.dead:
            slots.setdefault(expert, []).append((position, slot))
    return slots


def _nearest(slots: list[tuple[int, int]], target: int, topology: Topology) -> list[tuple[int, int]]:
    """Those of the slots that are nearest to a rank."""
    for kind in _NEAREST_FIRST:
        near = [(position, slot) for position, slot in slots if topology.link(position, target) is kind]
        if near:
            return near
    return []
