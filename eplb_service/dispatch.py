"""How the engine picks a replica for a token, and the rank loads that follow from it.

Every function here answers in expectation: what a rank receives on average when the tokens of the window come again.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError, UnsupportedError
from eplb_service.imbalance import Imbalance
from eplb_service.placement import Int32Array, Table
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]


class Dispatch(StrEnum):
    """How an engine picks one of an expert's replicas.

    EVEN: every replica gets the same share (DeepSeek EPLB's model).
    HASHED: by a hash of the token's index, modulo the replica count (vLLM); even in expectation.
    NEAREST: a replica on the token's own rank, else on its node, else any; ties are shared evenly (SGLang's static tables).
    WEIGHTED: shares that the planner gives with the placement.
    """

    EVEN = "even"
    HASHED = "hashed"
    NEAREST = "nearest"
    WEIGHTED = "weighted"


def reachable_slots(table: Table, topology: Topology) -> Int32Array:
    """The map with the slots of dead ranks emptied. Shape (L, R, S), int32, -1 = empty or dead."""
    by_rank = table.by_rank().copy()
    dead = [position for position, rank in enumerate(topology.rank_ids) if rank in topology.dead]
    by_rank[:, dead, :] = -1
    return by_rank


def copies_on_ranks(table: Table, topology: Topology) -> Int32Array:
    """Copies of each expert on each rank that serves. Shape (L, R, E), int32; rows of dead ranks are 0."""
    by_rank = reachable_slots(table, topology)
    num_layers, num_ranks, _ = by_rank.shape
    width = table.num_logical + 1  # the last column counts empty slots
    row_start = np.arange(num_layers * num_ranks).reshape(num_layers, num_ranks, 1) * width
    held = np.where(by_rank >= 0, by_rank, table.num_logical)
    counts = np.bincount((row_start + held).reshape(-1), minlength=num_layers * num_ranks * width)
    copies: Int32Array = counts.reshape(num_layers, num_ranks, width)[:, :, :-1].astype(np.int32)
    return copies


def rank_shares(table: Table, topology: Topology, dispatch: Dispatch) -> Float64Array:
    """Share of each expert's tokens that each rank receives. Shape (L, R, E), float64; sums to 1 over ranks where covered.

    Sources are uniform: every rank that serves sends the same number of tokens of every expert. An expert without a
    reachable replica has share 0 everywhere. Raises UnsupportedError for WEIGHTED, whose shares are not known here.
    """
    if table.rank_ids != topology.rank_ids:
        raise InvalidInputError(f"topology lists ranks {list(topology.rank_ids)} but the placement {list(table.rank_ids)}")
    if dispatch is Dispatch.WEIGHTED:
        raise UnsupportedError(
            "weighted dispatch needs the shares of each replica, which placements do not carry yet; use even, hashed or nearest"
        )
    copies = copies_on_ranks(table, topology)
    if dispatch is Dispatch.NEAREST:
        return _nearest_shares(copies.astype(np.float64), topology)
    total = copies.sum(axis=1, keepdims=True)
    even: Float64Array = copies / np.maximum(total, 1)
    return even


def _nearest_shares(copies: Float64Array, topology: Topology) -> Float64Array:
    """Shares under nearest dispatch with uniform sources. Copies: shape (L, R, E)."""
    alive = list(topology.alive_positions())
    node_of = np.array(topology.node_indices)
    total = copies.sum(axis=1)
    shares = np.zeros_like(copies)
    on_node = np.zeros((topology.num_nodes, *total.shape))
    for node in range(topology.num_nodes):
        on_node[node] = copies[:, node_of == node, :].sum(axis=1)
    for source in alive:
        node = int(node_of[source])
        here = copies[:, source, :] > 0
        near = ~here & (on_node[node] > 0)
        far = ~here & ~near & (total > 0)
        shares[:, source, :] += here
        neighbours = node_of == node
        near_share = np.divide(1.0, on_node[node], out=np.zeros_like(total), where=near)
        shares[:, neighbours, :] += copies[:, neighbours, :] * near_share[:, None, :]
        far_share = np.divide(1.0, total, out=np.zeros_like(total), where=far)
        shares += copies * far_share[:, None, :]
    result: Float64Array = shares / max(1, len(alive))
    return result


def rank_loads(loads: npt.ArrayLike, table: Table, topology: Topology, dispatch: Dispatch = Dispatch.EVEN) -> Float64Array:
    """Tokens that each rank receives. Loads: shape (L, E), tokens. Returns shape (L, R), float64; dead ranks have 0.

    The load of an expert without a reachable replica reaches no rank and is left out: callers that need coverage ask
    `Table.uncovered`. Raises InvalidInputError on a wrong shape and UnsupportedError for weighted dispatch.

    >>> from eplb_service.topology import Topology
    >>> table = Table("m", (0,), 2, (0, 1), np.array([[0, 1, 1, -1]], np.int32))
    >>> rank_loads([[10, 4]], table, Topology.regular(num_ranks=2)).tolist()
    [[12.0, 2.0]]
    """
    load_array = np.asarray(loads, np.float64)
    if load_array.shape != (table.num_layers, table.num_logical):
        raise InvalidInputError(
            f"loads must have shape ({table.num_layers} layers, {table.num_logical} experts); got {load_array.shape}"
        )
    result: Float64Array = (rank_shares(table, topology, dispatch) @ load_array[:, :, None])[:, :, 0]
    return result


def imbalance_of(loads: npt.ArrayLike, table: Table, topology: Topology, dispatch: Dispatch = Dispatch.EVEN) -> Imbalance:
    """Imbalance of a placement under loads of shape (L, E), over the ranks that serve, by their capacities and own work.

    Raises InvalidInputError when every rank is dead, and what `rank_loads` raises.
    """
    alive = list(topology.alive_positions())
    if not alive:
        raise InvalidInputError(f"all {topology.num_ranks} ranks are dead; nothing can be served")
    capacity = None if topology.capacity is None else [topology.capacity[position] for position in alive]
    base_load = None if topology.base_load is None else [topology.base_load[position] for position in alive]
    return Imbalance.of(rank_loads(loads, table, topology, dispatch)[:, alive], capacity, base_load)
