"""The copies that carry out a chunk: for every slot that gets another expert, where its bytes come from.

Every rank gets the same list, so both ends of a copy follow one plan (invariant 7; unequal lists were seen to hang,
pytorch#174288). Sources are nearest first: a slot of the same rank, of the same node, of another node. Where experts fan out,
an expert that a node has none of crosses to it once and is passed on from there to the other ranks that need it
(vllm-ascend#2820, #2952): `node_entries` says by which rank it enters. Among sources that are equally near, copies are spread
so that the busiest NIC, and the busiest rank, send as little as possible.

An expert that nobody who serves holds comes from a backup of the rank that is to have it, over no link (vllm#41204,
sglang#12068). It is never passed on, since a relay is of a copy from a live slot: each rank takes it from its own backup.

Order: what is passed on leaves first, so that it can be passed on while the rest is under way; relays come last. In between,
ranks turn to different targets (rank r to r + 1, r + 2, …), so that they do not all send to the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from eplb_service.control import NO_RANK, NOT_RELAYED, Copy
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.node_entries import Arrivals
from eplb_service.placement import EMPTY_SLOT
from eplb_service.rollout.spreading import Request, spread
from eplb_service.topology import Topology

FROM_BACKUP = -1
"""Rank position of the source of a copy that no rank gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLayer:
    """Slots of one layer that get another expert.

    old_row: what is live. wanted: (rank position, local slot, expert), ascending. arrivals: what is new to each rank.
    """

    layer: LayerRef
    expert_bytes: int
    old_row: tuple[int, ...]
    wanted: tuple[tuple[int, int, int], ...]
    arrivals: Arrivals


@dataclass(slots=True)
class _Planned:
    """One copy under way to be planned, by rank positions. of: the planned copy that it passes on; None = from a live slot.

    source: FROM_BACKUP = no rank gives it.
    """

    order: int
    target: int
    target_slot: int
    expert: int
    source: int = FROM_BACKUP
    source_slot: int = 0
    of: _Planned | None = None
    is_passed_on: bool = False


def plan_copies(
    layers: Sequence[WantedLayer], topology: Topology, *, fan_out: bool, restorers: AbstractSet[RankId] = frozenset()
) -> tuple[Copy, ...]:
    """A copy for every wanted slot of some layers that are carried together. fan_out: as in the layers' arrivals.

    restorers: ranks that can take experts which nobody holds from a backup of their own.
    Raises InvalidInputError when an expert is wanted that no rank which serves holds, on a rank without a backup.
    """
    plan = _Plan(layers, topology, fan_out, restorers)
    plan.classify()
    plan.choose_sources()
    return plan.copies()


class _Plan:
    """The copies of one chunk in the making. `sent`: bytes that each rank sends to others."""

    def __init__(
        self,
        layers: Sequence[WantedLayer],
        topology: Topology,
        fan_out: bool,  # noqa: FBT001
        restorers: AbstractSet[RankId],
    ) -> None:
        self._layers, self._topology, self._fan_out, self._restorers = layers, topology, fan_out, restorers
        self._node_of, self._nic_of = topology.node_indices, topology.nic_indices
        self._sent = [0] * topology.num_ranks
        self._done: list[_Planned] = []
        self._near: list[tuple[_Planned, list[tuple[int, int]]]] = []  # with slots of its node, (rank position, slot)
        self._crossing: list[tuple[_Planned, list[tuple[int, int]]]] = []  # with slots of other nodes

    def classify(self) -> None:
        """Settle what leaves no choice: copies inside a rank, from backups, and relays."""
        for order, layer in enumerate(self._layers):
            slots_of, lost = _live_slots(layer, self._topology), layer.arrivals.without_source
            entering = self._entering(order, layer)
            brought: dict[tuple[int, int], _Planned] = {}  # by (expert, rank), of experts that are new there
            for position, slot, expert in layer.wanted:
                entry = entering.get((expert, self._node_of[position]))
                is_entry = entry is not None and (entry.target, entry.target_slot) == (position, slot)
                copy = entry if entry is not None and is_entry else _Planned(order, position, slot, expert)
                first = brought.get((expert, position))
                if lost[position, expert]:
                    self._take_from_backup(copy, layer)
                elif first is not None and self._fan_out:
                    self._pass_on(first.of or first, copy)
                elif entry is not None and not is_entry:
                    self._pass_on(entry, copy)
                else:
                    self._list_sources(copy, layer, slots_of)
                if layer.arrivals.moved[position, expert]:
                    brought.setdefault((expert, position), copy)

    def _entering(self, order: int, layer: WantedLayer) -> dict[tuple[int, int], _Planned]:
        """Copies by which experts enter nodes where other ranks wait for them too: by (expert, node)."""
        arrivals = layer.arrivals
        waiting = {(expert, self._node_of[rank]) for rank, expert in np.argwhere(arrivals.passed_on).tolist()}
        entering: dict[tuple[int, int], _Planned] = {}
        for position, slot, expert in layer.wanted if waiting else ():
            key = (expert, self._node_of[position])
            if key in waiting and arrivals.crossing[position, expert]:
                entering.setdefault(key, _Planned(order, position, slot, expert))
        return entering

    def _list_sources(self, copy: _Planned, layer: WantedLayer, slots_of: dict[int, list[tuple[int, int]]]) -> None:
        """Note the slots that are nearest to where the copy goes."""
        arrivals, rank, expert = layer.arrivals, copy.target, copy.expert
        if not arrivals.moved[rank, expert]:
            copy.source, copy.source_slot = next(held for held in slots_of[expert] if held[0] == rank)
            self._done.append(copy)
        elif arrivals.near[rank, expert]:
            node = self._node_of[rank]
            self._near.append((copy, [held for held in slots_of[expert] if self._node_of[held[0]] == node]))
        else:
            self._crossing.append((copy, slots_of[expert]))

    def _take_from_backup(self, copy: _Planned, layer: WantedLayer) -> None:
        rank = self._topology.rank_ids[copy.target]
        if rank not in self._restorers:
            raise InvalidInputError(
                f"layer {layer.layer}: no rank that serves holds expert {copy.expert}, which rank {rank} slot"
                f" {copy.target_slot} is to get, and that rank has no backup to take it from"
            )
        self._done.append(copy)

    def _pass_on(self, first: _Planned, copy: _Planned) -> None:
        first.is_passed_on = True
        copy.of, copy.source, copy.source_slot = first, first.target, first.target_slot
        if copy.source != copy.target:
            self._sent[copy.source] += self._size(copy)
        self._done.append(copy)

    def choose_sources(self) -> None:
        """NICs first where ranks share them, since they are the narrowest; then ranks."""
        if self._topology.nics is None:
            self._by_rank([*self._crossing, *self._near])
            return
        self._by_nic(self._crossing)
        self._by_rank(self._near)

    def _by_nic(self, wanted: list[tuple[_Planned, list[tuple[int, int]]]]) -> None:
        nics = [sorted({self._nic_of[rank] for rank, _ in slots}) for _, slots in wanted]
        requests = [Request(self._size(copy), tuple(mine)) for (copy, _), mine in zip(wanted, nics, strict=True)]
        chosen = spread(requests, [0] * self._topology.num_nics)
        behind = [
            (copy, [held for held in slots if self._nic_of[held[0]] == nic])
            for (copy, slots), nic in zip(wanted, chosen, strict=True)
        ]
        self._by_rank(behind)

    def _by_rank(self, wanted: list[tuple[_Planned, list[tuple[int, int]]]]) -> None:
        requests = [Request(self._size(copy), tuple(sorted({rank for rank, _ in slots}))) for copy, slots in wanted]
        for (copy, slots), rank in zip(wanted, spread(requests, self._sent), strict=True):
            copy.source, copy.source_slot = next(held for held in slots if held[0] == rank)
            self._sent[rank] += self._size(copy)
            self._done.append(copy)

    def _size(self, copy: _Planned) -> int:
        return self._layers[copy.order].expert_bytes

    def copies(self) -> tuple[Copy, ...]:
        """All of them, in the order in which they leave."""
        ids, num_ranks = self._topology.rank_ids, self._topology.num_ranks
        ordered = sorted(
            self._done,
            key=lambda copy: (
                copy.of is not None,
                not copy.is_passed_on,
                copy.order,
                (copy.target - copy.source - 1) % num_ranks,  # copies inside a rank last
                copy.target,
                copy.target_slot,
            ),
        )
        index_of = {id(copy): index for index, copy in enumerate(ordered)}
        return tuple(
            Copy(
                layer=self._layers[copy.order].layer,
                expert=copy.expert,
                source_rank=NO_RANK if copy.source == FROM_BACKUP else ids[copy.source],
                source_slot=copy.source_slot,
                target_rank=ids[copy.target],
                target_slot=copy.target_slot,
                relay_of=NOT_RELAYED if copy.of is None else index_of[id(copy.of)],
            )
            for copy in ordered
        )


def _live_slots(layer: WantedLayer, topology: Topology) -> dict[int, list[tuple[int, int]]]:
    """(rank position, local slot) of each expert on the ranks that serve, ascending."""
    slots_per_rank, alive = len(layer.old_row) // topology.num_ranks, topology.alive
    slots: dict[int, list[tuple[int, int]]] = {}
    for index, expert in enumerate(layer.old_row):
        position, slot = divmod(index, slots_per_rank)
        if expert != EMPTY_SLOT and alive[position]:
            slots.setdefault(expert, []).append((position, slot))
    return slots
