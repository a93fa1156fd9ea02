"""How far tokens travel to their experts: assignments that stay on the rank, on the node, or cross nodes.

Token assignments are counted, one for each expert that a token is sent to; a link that carries a token once for several
experts behind it carries less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, Float64Array, copies_on_ranks, on_nodes, rank_shares, source_parts
from eplb_service.errors import InvalidInputError
from eplb_service.moves import on_nics
from eplb_service.placement import Table
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHops:
    """Token assignments by the link that they take, in tokens, summed over layers. Experts that no rank serves are left out.

    into_busiest_nic: those that come from other nodes over the busiest NIC of each layer (layers are dispatched one after
    another); None where no NICs are named. num_nics: NICs with a rank that serves, 0 where none are named.
    """

    same_rank: float
    same_node: float
    cross_node: float
    into_busiest_nic: float | None = None
    num_nics: int = 0

    @property
    def total(self) -> float:
        """All assignments."""
        return self.same_rank + self.same_node + self.cross_node

    @property
    def cross_node_share(self) -> float:
        """Share of the assignments that cross nodes; 0 without load."""
        return self.cross_node / self.total if self.total > 0 else 0.0

    @property
    def busiest_nic_share(self) -> float:
        """Share of what crosses nodes that comes in over the busiest NIC; 0 without any, and where no NICs are named."""
        return (self.into_busiest_nic or 0.0) / self.cross_node if self.cross_node > 0 else 0.0

    @property
    def nic_imbalance(self) -> float:
        """Busiest NIC over the mean of those that serve; 1 is perfect, also where nothing crosses or no NICs are named."""
        return self.busiest_nic_share * self.num_nics if self.cross_node > 0 and self.num_nics else 1.0

    def to_json(self) -> dict[str, float]:
        """As plain values, for output and the store; what NICs take only where they are named."""
        links = {"same_rank": self.same_rank, "same_node": self.same_node, "cross_node": self.cross_node}
        if self.into_busiest_nic is None:
            return links
        nics = {"into_busiest_nic": self.into_busiest_nic, "nic_imbalance": self.nic_imbalance}
        return {**links, **nics, "busiest_nic_share": self.busiest_nic_share}


def token_hops(
    loads: npt.ArrayLike,
    table: Table,
    topology: Topology,
    dispatch: Dispatch = Dispatch.EVEN,
    source_loads: npt.ArrayLike | None = None,
) -> TokenHops:
    """Where the tokens of a window go, seen from the ranks that send them. Loads: shape (L, E), tokens.

    source_loads: shape (L, R, E), see `dispatch.rank_shares`; None = every rank that serves sends as many of each expert.
    Raises InvalidInputError on a wrong shape.

    >>> table = Table("m", (0,), 2, (0, 1), np.array([[0, 1, 1, -1]], np.int32))
    >>> token_hops([[10, 4]], table, Topology.regular(num_ranks=2, num_nodes=2), Dispatch.NEAREST).to_json()
    {'same_rank': 7.0, 'same_node': 0.0, 'cross_node': 7.0}
    """
    tokens = np.asarray(loads, np.float64)
    if tokens.shape != (table.num_layers, table.num_logical):
        raise InvalidInputError(
            f"loads must have shape ({table.num_layers} layers, {table.num_logical} experts); got {tokens.shape}"
        )
    parts = source_parts(table, topology, source_loads)
    if dispatch is Dispatch.NEAREST:
        at_home, on_node = _nearest_parts(table, topology, parts)
    else:
        shares = rank_shares(table, topology, dispatch)
        at_home = (parts * shares).sum(axis=1)
        on_node = (on_nodes(parts, topology) * on_nodes(shares, topology)).sum(axis=1)
    busiest, num_nics = None, 0
    if topology.nics is not None:
        busiest, num_nics = _into_busiest_nics(_from_afar(tokens, table, topology, dispatch, parts), topology)
    covered = copies_on_ranks(table, topology).any(axis=1)
    same_rank = float((at_home * tokens).sum())
    near = float((on_node * tokens).sum())
    return TokenHops(
        same_rank=same_rank,
        same_node=max(0.0, near - same_rank),
        cross_node=max(0.0, float((covered * tokens).sum()) - near),
        into_busiest_nic=busiest,
        num_nics=num_nics,
    )


def _from_afar(tokens: Float64Array, table: Table, topology: Topology, dispatch: Dispatch, parts: Float64Array) -> Float64Array:
    """Tokens that each rank receives from other nodes, (L, R). Tokens: shape (L, E); parts: see `source_parts`."""
    node_of = np.array(topology.node_indices)
    sent = on_nodes(parts, topology)
    if dispatch is Dispatch.NEAREST:  # what nodes without a copy send goes to all copies alike
        copies = copies_on_ranks(table, topology).astype(np.float64)
        abroad = np.where(on_nodes(copies, topology) > 0, 0.0, sent).sum(axis=1, keepdims=True)
        far = copies / np.maximum(copies.sum(axis=1, keepdims=True), 1.0) * abroad
    else:
        far = rank_shares(table, topology, dispatch) * (1.0 - sent[:, node_of, :])
    received: Float64Array = (far @ tokens[:, :, None])[:, :, 0]
    return received


def _into_busiest_nics(from_afar: Float64Array, topology: Topology) -> tuple[float, int]:
    """Tokens over the busiest NIC of each layer, summed over layers, and NICs with a rank that serves. From afar: (L, R)."""
    serving = {nic for nic, alive in zip(topology.nic_indices, topology.alive, strict=True) if alive}
    return float(on_nics(from_afar, topology).max(axis=1).sum()), len(serving)


def _nearest_parts(table: Table, topology: Topology, parts: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Parts of each expert's tokens that find a copy on their own rank, and on their own node. Both of shape (L, E)."""
    copies = copies_on_ranks(table, topology).astype(np.float64)
    at_home: Float64Array = (parts * (copies > 0)).sum(axis=1)
    on_node: Float64Array = (on_nodes(parts, topology) * (on_nodes(copies, topology) > 0)).sum(axis=1)
    return at_home, on_node
