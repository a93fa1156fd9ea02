"""What one rank holds of the MoE layers: slots full of experts, the tables that route to them, and what they served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agent.engine.port import RoutingTables
from agent.engine.reference.model import ExpertModel, device_of, expert_digest
from eplb_service.dispatch import Dispatch
from eplb_service.errors import BrokenInvariantError
from eplb_service.placement import EMPTY_SLOT, Int32Array, logical_to_physical
from eplb_service.replica_shares import Float32Array, even_shares, replica_shares, slot_shares


@dataclass(slots=True, eq=False)
class LayerExperts:
    """One MoE layer on one rank. What the hook writes is written in place: the storage of all tensors stays.

    Attributes:
        layer_id: Absolute layer id.
        slots: Tensors by name, shape (S, …): slot s holds the expert at `position * S + s` of the row.
        slot_views: For each local slot its tensors without the leading axis: views of `slots`, made once.
        tables: Routing tables (`RoutingTables`), int64.
        tickets: Shape (E,), int64: (token, choice) pairs sent to each expert so far, the counter of the round robin.
        dispatch: How it picks a replica (`reference.dispatch`).
        nearness: Shape (P,), int64: 0 for slots of this rank, 1 for those of its node, 2 for the others.
        tokens: Shape (S,), int64: real (token, choice) pairs computed by each local slot since the group formed.
        tokens_before_flip: `tokens` when the row, or its shares, last changed.
        flip_boundary: Step boundary of that change, or of the group's first step; -1 = never.
        sent: Shape (P,), int64: real pairs that this rank sent to each slot since the group formed.
        seen_row: Shape (P,), int64: the row at the last step, to see flips by.
        seen_shares: Shape (E, width), float32: the shares at the last step; None without weighted dispatch.
        num_unreachable: Experts that no slot holds, as of the last step.
    """

    layer_id: int
    slots: dict[str, Tensor]
    tables: RoutingTables
    tickets: Tensor
    dispatch: Dispatch
    nearness: Tensor
    tokens: Tensor
    tokens_before_flip: Tensor
    sent: Tensor
    seen_row: Tensor = field(init=False)
    seen_shares: Tensor | None = field(init=False)
    flip_boundary: int = -1
    num_unreachable: int = 0
    slot_views: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slot_views = [{name: tensor[slot] for name, tensor in self.slots.items()} for slot in range(self.num_slots)]
        self._see()

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.tokens.numel())

    @property
    def expert_bytes(self) -> int:
        """Bytes of all tensors of one expert."""
        return sum(tensor[0].nbytes for tensor in self.slots.values())

    def notice_flip(self, boundary: int, *, may_lack: bool = False) -> bool:
        """Whether the row, or its shares, changed since the last step; if so, start the count of tokens since the flip anew.

        may_lack: whether the map may leave experts without a replica, until they are brought back. Raises as `check_reachable`
        if not.
        """
        row, shares = self.tables.physical_to_logical, self.tables.replica_shares
        same_shares = shares is None or self.seen_shares is None or torch.equal(shares, self.seen_shares)
        if same_shares and torch.equal(row, self.seen_row):
            return False
        self._see()
        self.tokens_before_flip.copy_(self.tokens)
        self.flip_boundary = boundary
        if not may_lack:
            self.check_reachable()
        return True

    def check_reachable(self) -> None:
        """Raises BrokenInvariantError when an expert has no replica: its tokens could go nowhere (invariant 3)."""
        if self.num_unreachable:
            counts = self.tables.replica_counts
            raise BrokenInvariantError(
                f"layer {self.layer_id} routes by a map in which expert {int(counts.argmin())} has no replica"
                f" since boundary {self.flip_boundary}; row {self.seen_row.tolist()}"
            )

    def regroup(self, row: Int32Array, *, position: int, nodes: Sequence[str], table_width: int) -> None:
        """Tables for another number of ranks, written for `row`; what lies in the slots stays.

        Args:
            row: Shape (P,), int32, for the new P.
            position: The rank's place in the new group.
            nodes: Name of each rank's node.
            table_width: Most replicas of an expert that the tables can hold.
        """
        device = self.tables.physical_to_logical.device
        self.tables = tables_for(row, self.tickets.numel(), table_width, dispatch=self.dispatch, device=device)
        self.nearness = _nearness(len(row) // self.num_slots, self.num_slots, position, nodes).to(device)
        self.sent = torch.zeros(len(row), dtype=torch.int64, device=device)

    def derive_tables(self) -> None:
        """Write all tables anew from the row, physical_to_logical."""
        row = self.tables.physical_to_logical.cpu().numpy().astype(np.int32)
        width = int(self.tables.logical_to_physical.shape[1])
        device = self.tables.physical_to_logical.device
        self.tables = tables_for(row, self.tickets.numel(), width, dispatch=self.dispatch, device=device)

    def settle(self, boundary: int) -> None:
        """What the tables say now is what the group begins with, at this boundary; counts start anew."""
        self.tokens.zero_()
        self.tokens_before_flip.zero_()
        self.flip_boundary = boundary
        self._see()

    def _see(self) -> None:
        """Remember what the tables say."""
        self.seen_row = self.tables.physical_to_logical.clone()
        shares = self.tables.replica_shares
        self.seen_shares = None if shares is None else shares.clone()
        self.num_unreachable = int((self.tables.replica_counts < 1).sum())

    def slot_shares(self) -> Float32Array | None:
        """Share of its expert's tokens that each slot takes, shape (P,); None without weighted dispatch."""
        by_replica = self.tables.replica_shares
        if by_replica is None:
            return None
        logical = self.tables.logical_to_physical.cpu().numpy()
        return slot_shares(by_replica.cpu().numpy(), logical, num_physical=self.seen_row.numel())

    def slot_digests(self) -> tuple[int, ...]:
        """`expert_digest` of what lies in each local slot. Length S."""
        return tuple(expert_digest(view) for view in self.slot_views)


def linear_row(*, num_experts: int, num_physical: int) -> Int32Array:
    """How the engine starts: slot i holds expert i % E. Shape (P,), int32."""
    return (np.arange(num_physical) % num_experts).astype(np.int32)


def load_layer(
    model: ExpertModel,
    layer_id: int,
    row: Int32Array,
    *,
    position: int,
    slots: int,
    table_width: int,
    dispatch: Dispatch = Dispatch.EVEN,
    nodes: Sequence[str] = (),
) -> LayerExperts:
    """Fill a rank's slots of one layer from the checkpoint.

    Args:
        model: Where the experts come from.
        layer_id: Absolute layer id.
        row: Shape (P,), int32, -1 = empty slot (its tensors are zeros).
        position: The rank's place in the group.
        slots: S.
        table_width: Most replicas of an expert that the tables can hold.
        dispatch: How replicas are picked; a weighted engine starts with even shares.
        nodes: Name of each rank's node; empty = all on one.
    """
    device = device_of(model)
    num_experts = model.config.num_experts
    held: Sequence[int] = row[position * slots : (position + 1) * slots].tolist()
    storage = {name: _gather(checkpoint, held) for name, checkpoint in sorted(model.expert_tensors(layer_id).items())}
    tables = tables_for(row, num_experts, table_width, dispatch=dispatch, device=device)
    zeros = torch.zeros(slots, dtype=torch.int64, device=device)
    return LayerExperts(
        layer_id=layer_id,
        slots=storage,
        tables=tables,
        # Ranks start at different replicas: else every rank's first token of an expert meets at the same one.
        tickets=torch.full((num_experts,), position, dtype=torch.int64, device=device),
        dispatch=dispatch,
        nearness=_nearness(len(row) // slots, slots, position, nodes).to(device),
        tokens=zeros,
        tokens_before_flip=zeros.clone(),
        sent=torch.zeros(len(row), dtype=torch.int64, device=device),
    )


def tables_for(
    row: Int32Array, num_experts: int, table_width: int, *, dispatch: Dispatch, device: torch.device
) -> RoutingTables:
    """Routing tables of one row, shape (P,), int32; even shares where dispatch is by shares."""
    replicas = np.bincount(row[row >= 0], minlength=num_experts)
    logical = logical_to_physical(row[None], num_experts, table_width)
    shares = None
    if dispatch is Dispatch.WEIGHTED:
        shares = torch.from_numpy(replica_shares(even_shares(row[None], num_experts), logical)[0]).to(device)
    return RoutingTables(
        physical_to_logical=torch.from_numpy(row.astype(np.int64)).to(device),
        logical_to_physical=torch.from_numpy(logical[0].astype(np.int64)).to(device),
        replica_counts=torch.from_numpy(replicas.astype(np.int64)).to(device),
        replica_shares=shares,
    )


def carried_row(row: Int32Array, old_ranks: Sequence[int], new_ranks: Sequence[int]) -> Int32Array:
    """A row of another group: ranks in both keep their slots, those of new ranks are empty. (P,) to (P',), int32.

    >>> carried_row(np.array([0, 1, 2, 0], np.int32), (4, 5), (5, 6)).tolist()
    [2, 0, -1, -1]
    """
    by_rank = dict(zip(old_ranks, row.reshape(len(old_ranks), -1), strict=True))
    empty = np.full(len(row) // len(old_ranks), EMPTY_SLOT, np.int32)
    return np.concatenate([by_rank.get(rank, empty) for rank in new_ranks]).astype(np.int32)


def _nearness(num_ranks: int, slots: int, position: int, nodes: Sequence[str]) -> Tensor:
    """How far every slot is from a rank. Shape (P,), int64."""
    same_node = [not nodes or node == nodes[position] for node in nodes or range(num_ranks)]
    distance = torch.tensor([1 if near else 2 for near in same_node])
    distance[position] = 0
    return distance.repeat_interleave(slots)


def _gather(checkpoint: Tensor, held: Sequence[int]) -> Tensor:
    """Tensors of the experts of some slots, stacked; zeros for an empty slot. (E, …) to (S, …)."""
    stacked = torch.zeros((len(held), *checkpoint.shape[1:]), dtype=checkpoint.dtype, device=checkpoint.device)
    for slot, expert in enumerate(held):
        if expert >= 0:
            stacked[slot] = checkpoint[expert]
    return stacked


def check_row_independence(model: ExpertModel, layer: LayerExperts, inputs: Tensor) -> None:
    """Prove on this machine that an expert's output for a row does not depend on the rows beside it.

    Args:
        model: The model; its own factory checks attention, router and head.
        layer: A layer of which the first slot is tried.
        inputs: Shape (n, D): rows such as the router passes on.

    Raises:
        BrokenInvariantError: a row changed with its batch: tokens would depend on the placement.
    """
    tensors = layer.slot_views[0]
    alone = torch.cat([model.run_expert(tensors, row[None]) for row in inputs])
    for size in range(2, inputs.shape[0] + 1):
        together = torch.cat([model.run_expert(tensors, part) for part in torch.split(inputs, size)])
        if not torch.equal(together, alone):
            raise BrokenInvariantError(
                f"layer {layer.layer_id}: an expert's outputs for {inputs.shape[0]} rows changed when they were computed {size}"
                " at a time, so tokens would depend on the placement; use another build of torch on this machine"
            )
