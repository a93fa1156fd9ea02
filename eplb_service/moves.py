"""What it costs to go from one placement to another: residencies that move, slots that are rewritten, bytes by link.

A residency is an expert held by a (layer, rank). One that was not there before costs one move, that expert's bytes, from the
nearest rank that serves and holds it. A slot whose expert was already on the rank costs a copy inside the rank, no move.

Where experts fan out on nodes (`NodeEntries`), those bytes are what the copies of a rollout carry (`rollout.copies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.node_entries import NodeEntries
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.topology import LinkKind, Topology

Number = TypeVar("Number", bound=np.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSummary:
    """What a change of placement moves.

    experts: residencies that were not there before (moves). layers: layers with at least one rewritten slot.
    slots_rewritten: slots that get another expert than they held, filled from wherever (emptied slots cost nothing).
    bytes_by_link: bytes copied by the kind of link that they take; SAME_RANK are copies between slots of a rank.
    bytes_without_source: bytes of moves whose expert no serving rank holds (host backup or checkpoint must supply them).
    bytes_into_busiest_rank: most bytes that one rank receives, from others or without a source; ranks receive side by side.
    bytes_into_busiest_nic: most bytes that come in over one NIC (`Topology.nics`), from other nodes or without a source; 0
    where no NICs are named.
    """

    experts: int
    slots_rewritten: int
    layers: int
    bytes_by_link: Mapping[LinkKind, int]
    bytes_without_source: int
    bytes_into_busiest_rank: int
    bytes_into_busiest_nic: int = 0

    @property
    def move_bytes(self) -> int:
        """Bytes of all moves: everything but the copies inside a rank."""
        links = self.bytes_by_link[LinkKind.SAME_NODE] + self.bytes_by_link[LinkKind.CROSS_NODE]
        return links + self.bytes_without_source

    def to_json(self) -> dict[str, object]:
        """As plain values, for output and the store."""
        return {
            "experts": self.experts,
            "slots_rewritten": self.slots_rewritten,
            "layers": self.layers,
            "move_bytes": self.move_bytes,
            "bytes_by_link": {kind.value: self.bytes_by_link[kind] for kind in LinkKind},
            "bytes_without_source": self.bytes_without_source,
            "bytes_into_busiest_rank": self.bytes_into_busiest_rank,
            "bytes_into_busiest_nic": self.bytes_into_busiest_nic,
        }


NO_MOVES = MoveSummary(
    experts=0,
    slots_rewritten=0,
    layers=0,
    bytes_by_link=dict.fromkeys(LinkKind, 0),
    bytes_without_source=0,
    bytes_into_busiest_rank=0,
)


def residencies(rows: npt.NDArray[np.integer], *, num_ranks: int, num_logical: int) -> npt.NDArray[np.bool_]:
    """Whether a rank holds an expert. Rows: shape (…, P). Returns shape (…, R, E)."""
    by_rank = np.asarray(rows).reshape(-1, rows.shape[-1] // num_ranks)
    held = np.zeros((by_rank.shape[0], num_logical + 1), np.bool_)  # the last column takes empty slots
    held[np.arange(by_rank.shape[0])[:, None], by_rank] = True
    return held[:, :-1].reshape(*rows.shape[:-1], num_ranks, num_logical)


def count_moves(before: npt.NDArray[np.integer], after: npt.NDArray[np.integer], *, num_ranks: int, num_logical: int) -> int:
    """Moves of one layer. Rows: shape (P,).

    >>> count_moves(np.array([0, 1, 2, 3]), np.array([1, 0, 2, 0]), num_ranks=2, num_logical=4)
    1
    """
    held = residencies(before, num_ranks=num_ranks, num_logical=num_logical)
    wanted = residencies(after, num_ranks=num_ranks, num_logical=num_logical)
    return int((wanted & ~held).sum())


def residency_moves(
    before: Table, after: Table, topology: Topology, expert_bytes: Sequence[int] = (), *, fan_out: bool = False
) -> MoveSummary:
    """What going from one placement to another moves. Dead ranks are no source.

    expert_bytes: bytes of one expert of each layer, length L; empty = 0 bytes each (moves are still counted).
    fan_out: an expert that several ranks of a node need crosses to it once, and is passed on there.
    Raises InvalidInputError when the two do not describe the same layers, ranks and slots.
    """
    if not before.same_shape(after) or before.rank_ids != topology.rank_ids:
        raise InvalidInputError(
            f"placements to compare differ in layers, experts, ranks or slots:"
            f" {before.num_layers} layers x {before.num_physical} slots over {before.num_ranks} ranks against"
            f" {after.num_layers} x {after.num_physical} over {after.num_ranks}, topology of {topology.num_ranks} ranks"
        )
    if expert_bytes and len(expert_bytes) != before.num_layers:
        raise InvalidInputError(f"{len(expert_bytes)} expert sizes for {before.num_layers} layers")
    sizes = list(expert_bytes) or [0] * before.num_layers
    entries = NodeEntries(topology, fan_out=fan_out)
    by_link = dict.fromkeys(LinkKind, 0)
    without_source = experts = rewritten_slots = layers = 0
    received, from_host = np.zeros((2, topology.num_ranks), np.int64)
    for layer, size in enumerate(sizes):
        old, new = before.physical_to_logical[layer], after.physical_to_logical[layer]
        rewritten = int(((new != old) & (new != EMPTY_SLOT)).sum())
        if not rewritten:
            continue
        shape = {"num_ranks": before.num_ranks, "num_logical": before.num_logical}
        arrivals = entries.arrivals(residencies(old, **shape), residencies(new, **shape), expert_bytes=size)
        num_moved, crossing = int(arrivals.moved.sum()), int(arrivals.crossing.sum())
        unsourced = arrivals.without_source.sum(axis=1)
        num_unsourced = int(unsourced.sum())
        by_link[LinkKind.SAME_NODE] += (num_moved - crossing - num_unsourced) * size
        by_link[LinkKind.CROSS_NODE] += crossing * size
        by_link[LinkKind.SAME_RANK] += (rewritten - num_moved) * size
        without_source += num_unsourced * size
        received += arrivals.moved.sum(axis=1) * size
        from_host += unsourced * size
        experts += num_moved
        rewritten_slots += rewritten
        layers += 1
    into_nics = entries.into_nics + on_nics(from_host, topology)
    return MoveSummary(
        experts=experts,
        slots_rewritten=rewritten_slots,
        layers=layers,
        bytes_by_link=by_link,
        bytes_without_source=without_source,
        bytes_into_busiest_rank=int(received.max()),
        bytes_into_busiest_nic=0 if topology.nics is None else int(into_nics.max()),
    )


def on_nics(values: npt.NDArray[Number], topology: Topology) -> npt.NDArray[Number]:
    """Sums over the ranks behind each NIC. Values: shape (…, R). Returns shape (…, NICs)."""
    sums = np.zeros((topology.num_nics, *values.shape[:-1]), values.dtype)
    np.add.at(sums, np.array(topology.nic_indices), np.moveaxis(values, -1, 0))
    return np.moveaxis(sums, 0, -1)


def align_slots(
    before: npt.NDArray[np.integer],
    after: npt.NDArray[np.integer],
    *,
    num_ranks: int,
    usable: npt.NDArray[np.bool_] | None = None,
) -> Int32Array:
    """Rearrange `after` inside each rank so that experts stay in the slots they hold. Rows and mask: shape (P,).

    The multiset of experts of each rank is that of `after`; an expert that the rank held in a usable slot stays there, the
    others fill the usable slots that are left, by ascending expert id. Raises InvalidInputError when a rank gets more experts
    than it has usable slots.

    >>> align_slots(np.array([5, 6, 7, 8]), np.array([7, 5, 8, 6]), num_ranks=2).tolist()
    [5, 7, 6, 8]
    """
    old = np.asarray(before).reshape(num_ranks, -1)
    new = np.asarray(after).reshape(num_ranks, -1)
    mask = np.ones(old.shape, np.bool_) if usable is None else usable.reshape(old.shape)
    aligned = np.full(old.shape, EMPTY_SLOT, np.int32)
    for rank in range(num_ranks):
        wanted = sorted(int(expert) for expert in new[rank] if expert != EMPTY_SLOT)
        room = int(mask[rank].sum())
        if len(wanted) > room:
            raise InvalidInputError(f"rank position {rank} gets {len(wanted)} experts but has {room} usable slots")
        for slot, expert in enumerate(old[rank].tolist()):
            if mask[rank, slot] and expert in wanted:
                aligned[rank, slot] = expert
                wanted.remove(expert)
        free = [slot for slot in range(old.shape[1]) if mask[rank, slot] and aligned[rank, slot] == EMPTY_SLOT]
        for slot, expert in zip(free, wanted, strict=False):
            aligned[rank, slot] = expert
    return aligned.reshape(-1)
