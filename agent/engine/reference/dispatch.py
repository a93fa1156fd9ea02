"""Which of an expert's replicas takes a token: the engine's own rule, over the tables that the hook writes.

    even      replicas in turn
    nearest   those on the token's own rank in turn, else those on its node, else all (as SGLang's static tables prefer)
    weighted  by share: a replica that is to take 30 % of its expert's tokens takes 3 of any 10 in a row, or nearly so

Each (token, choice) pair of an expert has a number, its ticket; the choice depends on ticket and tables alone, so the same
tokens take the same replicas again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent.engine.reference.experts import LayerExperts
from eplb_service.dispatch import Dispatch
from eplb_service.errors import BrokenInvariantError

_GOLDEN = 2_654_435_769  # 2**32 divided by the golden ratio: multiples of it modulo 2**32 fill the range evenly at any length
_RANGE = 1 << 32


def choose_replicas(experts: Tensor, layer: LayerExperts, *, real: bool) -> Tensor:
    """Pick a slot for every (token, choice) by the layer's dispatch.

    Reads the tables that the hook writes, and advances `layer.tickets`; both in place, without synchronising the device.

    Args:
        experts: Shape (m,), int64: logical experts of all (token, choice), tokens in batch order.
        layer: The layer's tables and tickets.
        real: Whether these are tokens of requests; dummy ones take no tickets.

    Returns:
        Physical slots, shape (m,), int64.
    """
    num_experts = layer.tickets.numel()
    order = torch.argsort(experts, stable=True)
    by_expert = experts[order]
    counts = torch.bincount(experts, minlength=num_experts)
    first = torch.cumsum(counts, 0) - counts
    # Number of the pair among those of its expert, in this batch and before.
    ticket = torch.arange(experts.numel(), device=experts.device) - (first - layer.tickets)[by_expert]
    physical = torch.empty_like(experts)
    physical[order] = _slots_for(ticket, by_expert, layer)
    if real:
        layer.tickets += counts
    return physical


def _slots_for(ticket: Tensor, experts: Tensor, layer: LayerExperts) -> Tensor:
    """Slot of each pair. Ticket, experts: shape (m,), int64."""
    tables = layer.tables
    if layer.dispatch is Dispatch.WEIGHTED:
        if tables.replica_shares is None:
            raise BrokenInvariantError(f"layer {layer.layer_id} dispatches by shares and has no table of them")
        return tables.logical_to_physical[experts, _by_share(ticket, tables.replica_shares[experts])]
    if layer.dispatch is Dispatch.NEAREST:
        slots, counts = _nearest(tables.logical_to_physical, layer.nearness)
        return slots[experts, ticket % counts[experts]]
    return tables.logical_to_physical[experts, ticket % tables.replica_counts[experts]]


def _by_share(ticket: Tensor, shares: Tensor) -> Tensor:
    """Replica of each pair: the one in whose part of 0..1 the ticket's point falls. Shares: shape (m, width). Shape (m,).

    Points of successive tickets (Kronecker sequence of the golden ratio) fill 0..1 evenly, so that after n tickets of an expert
    each replica is within about log(n) tokens of its share. A replica without a share gets none.
    """
    ends = torch.cumsum(shares.double(), dim=1)
    point = (ticket * _GOLDEN).remainder(_RANGE).double() / _RANGE
    return (point[:, None] >= ends / ends[:, -1:]).sum(dim=1)


def _nearest(slots_of_expert: Tensor, nearness: Tensor) -> tuple[Tensor, Tensor]:
    """Each expert's nearest slots first, and how many of them are as near as the first.

    Slots_of_expert: shape (E, width), -1 = none; nearness: shape (P,), less is nearer. Shapes (E, width) and (E,).
    """
    distance = torch.where(slots_of_expert >= 0, nearness[slots_of_expert.clamp_min(0)], nearness.numel())
    order = torch.argsort(distance, dim=1, stable=True)
    return slots_of_expert.gather(1, order), (distance == distance.min(dim=1, keepdim=True).values).sum(dim=1)
