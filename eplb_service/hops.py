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
from eplb_service.placement import Table
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHops:
    """Token assignments by the link that they take, in tokens, summed over layers. Experts that no rank serves are left out."""

    same_rank: float
    same_node: float
    cross_node: float

    @property
    def total(self) -> float:
        """All assignments."""
        return self.same_rank + self.same_node + self.cross_node

    @property
    def cross_node_share(self) -> float:
        """Share of the assignments that cross nodes; 0 without load."""
        return self.cross_node / self.total if self.total > 0 else 0.0

    def to_json(self) -> dict[str, float]:
        """As plain values, for output and the store."""
        return {"same_rank": self.same_rank, "same_node": self.same_node, "cross_node": self.cross_node}


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
    covered = copies_on_ranks(table, topology).any(axis=1)
    same_rank = float((at_home * tokens).sum())
    near = float((on_node * tokens).sum())
    return TokenHops(
        same_rank=same_rank,
        same_node=max(0.0, near - same_rank),
        cross_node=max(0.0, float((covered * tokens).sum()) - near),
    )


def _nearest_parts(table: Table, topology: Topology, parts: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Parts of each expert's tokens that find a copy on their own rank, and on their own node. Both of shape (L, E)."""
    copies = copies_on_ranks(table, topology).astype(np.float64)
    at_home: Float64Array = (parts * (copies > 0)).sum(axis=1)
    on_node: Float64Array = (on_nodes(parts, topology) * (on_nodes(copies, topology) > 0)).sum(axis=1)
    return at_home, on_node
