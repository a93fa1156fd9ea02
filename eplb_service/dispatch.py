"""How the engine picks a replica for a token, and the rank loads that follow from it.

Every function here answers in expectation: what a rank receives on average when the tokens of the window come again.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.imbalance import Imbalance
from eplb_service.placement import Int32Array, Table
from eplb_service.replica_shares import checked_shares
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]


class Dispatch(StrEnum):
    """How an engine picks one of an expert's replicas.

    EVEN: every replica gets the same share (DeepSeek EPLB's model).
    HASHED: by a hash of the token's index, modulo the replica count (vLLM); even in expectation.
    NEAREST: a replica on the token's own rank, else on its node, else any; ties are shared evenly (SGLang's static tables).
    WEIGHTED: shares that the planner gives with the placement; even where a placement carries none (how an engine starts).
    """

    EVEN = "even"
    HASHED = "hashed"
    NEAREST = "nearest"
    WEIGHTED = "weighted"


def reachable_slots(table: Table, topology: Topology) -> Int32Array:
    """The map with the slots of dead ranks emptied. Shape (L, R, S), int32, -1 = empty or dead."""
    by_rank = table.by_rank().copy()
    by_rank[:, ~np.array(topology.alive), :] = -1
    return by_rank


def copies_on_ranks(table: Table, topology: Topology) -> Int32Array:
    """Copies of each expert on each rank that serves. Shape (L, R, E), int32; rows of dead ranks are 0."""
    copies: Int32Array = _summed_by_rank(reachable_slots(table, topology), table.num_logical, None).astype(np.int32)
    return copies


def _summed_by_rank(by_rank: Int32Array, num_logical: int, weights: Float64Array | None) -> npt.NDArray[np.float64]:
    """Number of slots (or their weights) of each expert on each rank. Slots, weights: shape (L, R, S). Shape (L, R, E)."""
    num_layers, num_ranks, _ = by_rank.shape
    width = num_logical + 1  # the last column counts empty slots
    row_start = np.arange(num_layers * num_ranks).reshape(num_layers, num_ranks, 1) * width
    held = np.where(by_rank >= 0, by_rank, num_logical)
    values = None if weights is None else weights.reshape(-1)
    sums = np.bincount((row_start + held).reshape(-1), weights=values, minlength=num_layers * num_ranks * width)
    result: Float64Array = sums.reshape(num_layers, num_ranks, width)[:, :, :-1].astype(np.float64)
    return result


def rank_shares(
    table: Table, topology: Topology, dispatch: Dispatch, source_loads: npt.ArrayLike | None = None
) -> Float64Array:
    """Share of each expert's tokens that each rank receives. Shape (L, R, E), float64; sums to 1 over ranks where covered.

    source_loads: shape (L, R, E), tokens of each expert that each rank sends; None = every rank that serves sends as many of
    each. Only nearest dispatch looks at them. Dead ranks send nothing: what they sent is taken to come from the others alike.
    An expert without a reachable replica has share 0 everywhere. Raises InvalidInputError when table, topology and sources do
    not fit one another.
    """
    if table.rank_ids != topology.rank_ids:
        raise InvalidInputError(f"topology lists ranks {list(topology.rank_ids)} but the placement {list(table.rank_ids)}")
    if dispatch is Dispatch.WEIGHTED and table.shares is not None:
        return _weighted_shares(table, topology)
    copies = copies_on_ranks(table, topology).astype(np.float64)
    if dispatch is Dispatch.NEAREST:
        return _nearest_shares(copies, source_parts(table, topology, source_loads), topology)
    return _even_shares(copies)


def _even_shares(copies: Float64Array) -> Float64Array:
    """The same share for every copy. Copies: shape (L, R, E)."""
    even: Float64Array = copies / np.maximum(copies.sum(axis=1, keepdims=True), 1.0)
    return even


def _weighted_shares(table: Table, topology: Topology) -> Float64Array:
    """The table's own shares over the slots that serve, scaled to 1; even where all of an expert's weight is on dead ranks."""
    by_rank = reachable_slots(table, topology)
    weights = np.zeros(by_rank.shape) if table.shares is None else table.shares.reshape(by_rank.shape).astype(np.float64)
    shares = _summed_by_rank(by_rank, table.num_logical, np.where(by_rank >= 0, weights, 0.0))
    total = shares.sum(axis=1, keepdims=True)
    even = _even_shares(_summed_by_rank(by_rank, table.num_logical, None))
    result: Float64Array = np.where(total > 0, shares / np.where(total > 0, total, 1.0), even)
    return result


def source_parts(table: Table, topology: Topology, source_loads: npt.ArrayLike | None = None) -> Float64Array:
    """Part of each expert's tokens that each rank sends. Shape (L, R, E), or (1, R, 1) when all ranks send alike.

    Dead ranks send 0; an expert of which no serving rank sent a token comes from all of them alike.
    """
    alive = np.array(topology.alive, np.float64)
    alike: Float64Array = (alive / max(1.0, alive.sum()))[None, :, None]
    if source_loads is None:
        return alike
    sources = np.asarray(source_loads, np.float64)
    expected = (table.num_layers, table.num_ranks, table.num_logical)
    if sources.shape != expected:
        raise InvalidInputError(f"source loads must have shape (layers, ranks, experts) = {expected}; got {sources.shape}")
    if not np.isfinite(sources).all() or (sources < 0).any():
        layer, rank, expert = np.argwhere(~np.isfinite(sources) | (sources < 0))[0].tolist()
        raise InvalidInputError(
            f"source loads must be finite and >= 0; layer {table.layer_ids[layer]}, rank {table.rank_ids[rank]}, expert"
            f" {expert} is {sources[layer, rank, expert]}"
        )
    sources = sources * alive[None, :, None]
    total = sources.sum(axis=1, keepdims=True)
    parts: Float64Array = np.where(total > 0, sources / np.where(total > 0, total, 1.0), alike)
    return parts


def serving_ranks(topology: Topology) -> tuple[npt.NDArray[np.int64], Float64Array, Float64Array]:
    """Positions of the ranks that serve, their capacities and their own work in mean rank loads. Each: shape (serving,)."""
    alive = np.array(topology.alive_positions(), np.int64)
    capacity = np.array(topology.capacity or (1.0,) * topology.num_ranks)
    base = np.array(topology.base_load or (0.0,) * topology.num_ranks)
    return alive, capacity[alive], base[alive]


def own_work(topology: Topology, tokens: npt.ArrayLike) -> Float64Array:
    """Work of each rank beside the tokens of layers, in tokens; 0 for dead ranks. Tokens: of each layer, shape (…). (…, R)."""
    base = topology.base_load or (0.0,) * topology.num_ranks
    mean = np.asarray(tokens, np.float64)[..., None] / max(1, len(topology.alive_positions()))
    work: Float64Array = mean * np.where(topology.alive, base, 0.0)
    return work


def on_nodes(values: Float64Array, topology: Topology) -> Float64Array:
    """Sums over the ranks of each node. Values: shape (…, R, E); returns (…, N, E)."""
    members = np.array(topology.node_indices)[None, :] == np.arange(topology.num_nodes)[:, None]
    sums: Float64Array = members.astype(np.float64) @ values
    return sums


def _nearest_shares(copies: Float64Array, parts: Float64Array, topology: Topology) -> Float64Array:
    """Shares under nearest dispatch. Copies: shape (L, R, E); parts: see `source_parts`.

    A copy gets what its own rank sends, an equal part of what the ranks of its node without a copy send, and an equal part of
    what nodes without a copy send.
    """
    held = copies > 0
    node_of = np.array(topology.node_indices)
    copies_on_node = on_nodes(copies, topology)
    without = on_nodes(np.where(held, 0.0, parts), topology)
    near = np.where(copies_on_node > 0, without / np.maximum(copies_on_node, 1.0), 0.0)
    far = np.where(copies_on_node > 0, 0.0, without).sum(axis=1) / np.maximum(copies.sum(axis=1), 1.0)
    shares: Float64Array = np.where(held, parts, 0.0) + copies * (near[:, node_of, :] + far[:, None, :])
    return shares


def rank_loads(
    loads: npt.ArrayLike,
    table: Table,
    topology: Topology,
    dispatch: Dispatch = Dispatch.EVEN,
    source_loads: npt.ArrayLike | None = None,
) -> Float64Array:
    """Tokens that each rank receives. Loads: shape (L, E), tokens. Returns shape (L, R), float64; dead ranks have 0.

    source_loads: see `rank_shares`. The load of an expert without a reachable replica reaches no rank and is left out: callers
    that need coverage ask `Table.uncovered`. Raises InvalidInputError on a wrong shape.

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
    shares = rank_shares(table, topology, dispatch, source_loads)
    result: Float64Array = (shares @ load_array[:, :, None])[:, :, 0]
    return result


def imbalance_of(
    loads: npt.ArrayLike,
    table: Table,
    topology: Topology,
    dispatch: Dispatch = Dispatch.EVEN,
    source_loads: npt.ArrayLike | None = None,
) -> Imbalance:
    """Imbalance of a placement under loads of shape (L, E), over the ranks that serve, by their capacities and own work.

    source_loads: see `rank_shares`. Raises InvalidInputError when every rank is dead, and what `rank_loads` raises.
    """
    alive = list(topology.alive_positions())
    if not alive:
        raise InvalidInputError(f"all {topology.num_ranks} ranks are dead; nothing can be served")
    capacity = None if topology.capacity is None else [topology.capacity[position] for position in alive]
    base_load = None if topology.base_load is None else [topology.base_load[position] for position in alive]
    return Imbalance.of(rank_loads(loads, table, topology, dispatch, source_loads)[:, alive], capacity, base_load)


def check_shares(table: Table, shares: object) -> str | None:
    """Why shares cannot be those of a table's slots, None when they can. Shares: shape (L, P), of any origin.

    >>> table = Table("m", (7,), 1, (0, 1), np.array([[0, 0]], np.int32))
    >>> check_shares(table, np.array([[0.5, 0.6]]))
    'layer m/7: the shares of expert 0 on its 2 slots add up to 1.1; they must add up to 1 (within 1e-05)'
    """
    if not isinstance(shares, np.ndarray):
        return f"shares are a {type(shares).__name__} instead of an array"
    try:
        checked_shares(shares, table.physical_to_logical, table.num_logical, layers=tuple(str(ref) for ref in table.layers))
    except InvalidInputError as error:
        return str(error)
    return None
