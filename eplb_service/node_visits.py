"""How many nodes a token visits: expert-parallel dispatch sends a token once to each node that serves one of its experts.

What is known of a layer is how many tokens chose each pair of experts. Where each choice picks its replica by itself (even,
hashed and weighted dispatch), experts a and b meet on a node with probability `sum over nodes n of p[a, n] p[b, n]`, p being
the part of an expert's tokens that a node serves. Under nearest dispatch the same is taken for each sending node, and averaged
over them. The *pair share* is the mean of that over pairs, weighted by their tokens: the part of them served on one node.

From pairs alone the number of nodes has bounds only. Of the k choices of a token X_n go to node n; the node is visited when
X_n >= 1, and X - X(X-1)/2 <= [X >= 1] <= X - X(X-1)/k for X = 0..k. Summed over nodes and tokens: with P pairs a token served
on one node, k - P <= nodes visited <= k - 2P/k. With the choices themselves the number is exact: see `distinct_nodes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, Float64Array, copies_on_ranks, on_nodes, rank_shares, source_parts
from eplb_service.errors import InvalidInputError
from eplb_service.placement import Table
from eplb_service.topology import Topology

PAIR_TOLERANCE = 1e-6
"""Relative: how far pairs may be from symmetric, or above the loads, by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVisits:
    """What a placement does to pairs of experts, over all layers that have any.

    pair_share: part of the pairs of choices that is served on one node, weighted by tokens. least, most: bounds on the nodes
    that a token visits in a layer, mean over tokens and layers. exact: the expected number under independent choice of
    replicas, where tokens' choices were given; None = unknown.
    """

    pair_share: float
    least: float
    most: float
    exact: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """As plain values."""
        return {"pair_share": self.pair_share, "least": self.least, "most": self.most, "exact": self.exact}


def checked_pairs(
    given: npt.ArrayLike, loads: Float64Array, layer_ids: tuple[int, ...], what: str = "together"
) -> Float64Array:
    """Tokens that chose both of two experts, shape (L, E, E), float64, read-only, 0 on the diagonal. Loads: shape (L, E).

    Raises InvalidInputError for another shape, values that are not finite or below 0, pairs that differ from their mirror image
    and pairs with more tokens than one of their experts.
    """
    num_layers, num_logical = loads.shape
    expected = (num_layers, num_logical, num_logical)
    pairs = np.array(given, np.float64)
    if pairs.shape != expected:
        raise InvalidInputError(f"{what} must have shape (layers, experts, experts) = {expected}; got {pairs.shape}")
    pairs[:, np.arange(num_logical), np.arange(num_logical)] = 0.0
    most = np.minimum(loads[:, :, None], loads[:, None, :])
    for wrong, why in (
        (~np.isfinite(pairs) | (pairs < 0), "pairs must be finite and >= 0"),
        (~np.isclose(pairs, pairs.transpose(0, 2, 1), rtol=PAIR_TOLERANCE, atol=1e-9), "pairs must be symmetric"),
        (pairs > most * (1 + PAIR_TOLERANCE) + 1e-9, "no pair can have more tokens than either of its experts"),
    ):
        if wrong.any():
            layer, one, other = np.argwhere(wrong)[0].tolist()
            raise InvalidInputError(
                f"{what}: layer {layer_ids[layer]}, experts {one} and {other}: {pairs[layer, one, other]:g} tokens chose both,"
                f" {pairs[layer, other, one]:g} the other way round, with loads {loads[layer, one]:g} and"
                f" {loads[layer, other]:g}; {why}"
            )
    np.minimum(pairs, most, out=pairs)  # an expert without tokens is in no pair, not even by rounding
    pairs.setflags(write=False)
    return pairs


def node_shares(
    table: Table, topology: Topology, dispatch: Dispatch, source_loads: npt.ArrayLike | None = None
) -> tuple[Float64Array, Float64Array]:
    """Part of each expert's tokens that each node serves, for each kind of sender; and the senders' weights, adding up to 1.

    Shapes (S, L, N, E) and (S,). Senders are told apart under nearest dispatch only: then they are the nodes, weighted by the
    tokens that their ranks send. 0 for an expert without a replica that serves.
    """
    if dispatch is not Dispatch.NEAREST:
        return on_nodes(rank_shares(table, topology, dispatch, source_loads), topology)[None], np.ones(1)
    copies = on_nodes(copies_on_ranks(table, topology).astype(np.float64), topology)
    alive = np.bincount(np.array(topology.node_indices), weights=np.array(topology.alive, np.float64))
    sent = alive
    if source_loads is not None:
        sources = np.asarray(source_loads, np.float64) * np.array(topology.alive, np.float64)[None, :, None]
        source_parts(table, topology, sources)  # checks the shape
        total = on_nodes(sources, topology).sum(axis=(0, 2))
        sent = total if total.sum() > 0 else alive
    even = copies / np.maximum(copies.sum(axis=1, keepdims=True), 1.0)
    shares = np.repeat(even[None], topology.num_nodes, axis=0)
    for sender in range(topology.num_nodes):
        here = copies[:, sender, :] > 0
        alone = np.zeros_like(even)
        alone[:, sender, :] = 1.0
        shares[sender] = np.where(here[:, None, :], alone, even)
    return shares, sent / sent.sum()


def visits_of(
    loads: npt.ArrayLike,
    together: Float64Array,
    table: Table,
    topology: Topology,
    dispatch: Dispatch = Dispatch.EVEN,
    source_loads: npt.ArrayLike | None = None,
) -> NodeVisits:
    """Pair share and bounds of a placement. Loads: shape (L, E), tokens; together: (L, E, E), as from `checked_pairs`.

    The bounds take the pairs for all those of the tokens that make up the load: k - 1 is pairs per choice. A node cannot be
    visited twice, nor more nodes than serve, nor fewer than one.

    >>> table = Table("m", (0,), 4, (0, 1), np.array([[0, 1, 2, 3]], np.int32))
    >>> pairs = np.zeros((1, 4, 4))
    >>> pairs[0, [0, 1, 2, 3], [1, 0, 3, 2]] = 6.0
    >>> pairs[0, [0, 2], [2, 0]] = 4.0
    >>> visits_of([[10, 6, 10, 6]], pairs, table, Topology.regular(num_ranks=2, num_nodes=2)).to_json()
    {'pair_share': 0.75, 'least': 1.25, 'most': 1.25, 'exact': None}
    """
    tokens = np.asarray(loads, np.float64)
    shares, weights = node_shares(table, topology, dispatch, source_loads)
    met = np.zeros(table.num_layers)
    for weight, share in zip(weights.tolist(), shares, strict=True):
        met += weight * 0.5 * ((share @ together) * share).sum(axis=(1, 2))
    pairs = together.sum(axis=(1, 2)) / 2.0
    used = pairs > 0
    if not used.any():
        return NodeVisits(pair_share=0.0, least=0.0, most=0.0)
    assignments = tokens.sum(axis=1)[used]
    choices = 1.0 + 2.0 * pairs[used] / np.maximum(assignments, 1e-300)
    each = met[used] * choices / np.maximum(assignments, 1e-300)  # pairs of a token on one node
    nodes = len({topology.node_indices[position] for position in topology.alive_positions()})
    least = np.clip(choices - each, 1.0, None)
    most = np.minimum(np.maximum(choices - 2.0 * each / choices, least), nodes)
    count = assignments / choices
    return NodeVisits(
        pair_share=float(met[used].sum() / pairs[used].sum()),
        least=float((np.minimum(least, most) * count).sum() / count.sum()),
        most=float((most * count).sum() / count.sum()),
    )


def distinct_nodes(choices: npt.NDArray[np.integer], shares: Float64Array, weights: Float64Array) -> tuple[float, int]:
    """Expected distinct nodes, summed over tokens and layers, and how many (token, layer) there are with a choice.

    Choices: shape (tokens, L, k), expert ids, -1 = none. Shares, weights: of `node_shares`. Each choice picks its replica by
    itself: a node is missed with the product of what each choice misses it by.
    """
    total = 0.0
    for weight, share in zip(weights.tolist(), shares, strict=True):
        missed_by = np.concatenate([1.0 - share, np.ones((*share.shape[:2], 1))], axis=2)  # the last column: no choice
        for layer in range(choices.shape[1]):
            chosen = choices[:, layer, :]
            missed = missed_by[layer][:, chosen].prod(axis=2)
            total += weight * float((1.0 - missed).sum())
    return total, int((choices >= 0).any(axis=2).sum())
