"""What annealing must know of a dispatch that is not an even split: who sends what, and what each copy then serves.

Nearest dispatch has a closed form for each expert. Under weighted dispatch a search keeps a split of each expert over its
copies: whenever an expert's copies change, and now and then in between, it is poured anew over them until all are as high as
one another, so that its overload goes where there is room; the linear program of `shares` then splits the row that was found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, on_nodes, source_parts
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.compiled import compiled_nogil

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

EVEN, EVEN_WITH_HOPS, NEAREST, WEIGHTED = range(4)
"""How the copies of an expert share its tokens; hashed dispatch is even. With hops: sources are known, hops priced."""

HOP_PRICE = 1.0
"""What it costs, in moves, that a fair height of tokens crosses nodes: a move saves far less than that."""

ROUNDING = 1e-12
"""Difference in heights (fair height 1) that is rounding."""

MISPLACED_PRICE = 100.0
"""What it costs, in moves, that a fair height of tokens may go to another copy than equal parts say, where an engine routes by
static tables (see `static_dispatch`): there are nearly always placements as good on which both
agree. Where none is found the target goes first: then it costs nothing."""


class Routes(NamedTuple):
    """Where a layer's tokens come from. R ranks, N nodes, E experts; shapes (1, …) where the dispatch does not ask.

    dispatch: EVEN, EVEN_WITH_HOPS, NEAREST or WEIGHTED. node_of: node of each rank, shape (R,).
    parts: part of each expert's tokens that a rank sends, shape (R, E). node_parts: that a node sends, shape (N, E).
    senders: ranks that send, shape (N,). hop_price, misplaced_price: see above; 0 where they do not matter.
    node_copies, node_without: room for `serve_nearest`, shape (N,): one search at a time.
    """

    dispatch: int
    node_of: Int64Array
    parts: Float64Array
    node_parts: Float64Array
    senders: Int64Array
    hop_price: float
    misplaced_price: float
    node_copies: Float64Array
    node_without: Float64Array


def even_routes() -> Routes:
    """Even split, wherever tokens come from."""
    none = np.zeros((1, 1))
    return Routes(EVEN, np.zeros(1, np.int64), none, none, np.zeros(1, np.int64), 0.0, 0.0, np.zeros(1), np.zeros(1))


def routes_of(problem: PlanningProblem, layer: int) -> Routes:
    """The routes of one layer (its position in the table), with room of their own.

    Hops matter where they differ between placements: under nearest dispatch, and under even split from known sources.
    """
    topology, sources = problem.topology, problem.source_loads
    if problem.dispatch is Dispatch.WEIGHTED:
        return even_routes()._replace(dispatch=WEIGHTED)
    nearest = problem.dispatch is Dispatch.NEAREST
    if not nearest and (topology.num_nodes == 1 or sources is None):
        return even_routes()
    shape = (topology.num_ranks, problem.current.num_logical)
    given = source_parts(problem.current, topology, sources)
    parts = np.broadcast_to(given[layer if given.shape[0] > 1 else 0], shape).copy()  # writable: one kernel for all
    alive = np.array(topology.alive, np.float64)
    return Routes(
        dispatch=NEAREST if nearest else EVEN_WITH_HOPS,
        node_of=np.array(topology.node_indices, np.int64),
        parts=parts,
        node_parts=np.ascontiguousarray(on_nodes(parts, topology)),
        senders=on_nodes(alive[:, None], topology)[:, 0].astype(np.int64),
        hop_price=HOP_PRICE if topology.num_nodes > 1 else 0.0,
        misplaced_price=MISPLACED_PRICE if nearest else 0.0,
        node_copies=np.zeros(topology.num_nodes),
        node_without=np.zeros(topology.num_nodes),
    )


@compiled_nogil
def serve_by_routes(  # noqa: PLR0917  # compiled functions take positions only; a few arrays cost less than the whole layer
    dispatch: int,
    node_of: Int64Array,
    parts: Float64Array,
    node_parts: Float64Array,
    senders: Int64Array,
    hop_price: float,
    misplaced_price: float,
    node_copies: Float64Array,
    node_without: Float64Array,
    rank_of: Int32Array,
    inverse: Float64Array,
    holders: Int32Array,
    count_on: UInt8Array,
    work: Float64Array,
    part: Float64Array,
    expert: int,
    load: float,
    sign: float,
) -> float:
    """Add (sign 1) or take away (sign -1) what the copies of an expert serve, unless it is plainly even. Returns a price.

    Holders: slots of the copies, shape (c,), at least one. Work: shape (R,). Part: see `pour`.
    """
    if dispatch == NEAREST:
        return serve_nearest(
            node_of,
            parts,
            node_parts,
            senders,
            hop_price,
            misplaced_price,
            node_copies,
            node_without,
            rank_of,
            holders,
            count_on,
            work,
            expert,
            load,
            sign,
        )
    if dispatch == WEIGHTED and sign > 0.0:
        pour(rank_of, inverse, holders, count_on, work, part, expert, load)
        return 0.0
    near = 0.0
    for index in range(holders.size):
        rank = rank_of[holders[index]]
        if dispatch == WEIGHTED:
            work[rank] -= part[holders[index]]
        else:
            work[rank] += sign * load / holders.size
            near += node_parts[node_of[rank], expert]
    return hop_price * load * (1.0 - near / holders.size)


@compiled_nogil
def serve_nearest(  # noqa: PLR0917  # compiled functions take positions only; fewer arrays cost less than the whole layer
    node_of: Int64Array,
    parts: Float64Array,
    node_parts: Float64Array,
    senders: Int64Array,
    hop_price: float,
    misplaced_price: float,
    node_copies: Float64Array,
    node_without: Float64Array,
    rank_of: Int32Array,
    holders: Int32Array,
    count_on: UInt8Array,
    work: Float64Array,
    expert: int,
    load: float,
    sign: float,
) -> float:
    """Add (sign 1) or take away (sign -1) what copies serve under nearest dispatch. Returns the price of hops and misplacement.

    A copy serves what its own rank sends, an equal part of what
    other ranks of its node send, and an equal part of what nodes without a copy send.
    """
    number = holders.size
    far, num_nodes, senders_far = 1.0, 0, senders.sum()
    for index in range(number):
        rank = rank_of[holders[index]]
        node = node_of[rank]
        if node_copies[node] == 0.0:
            num_nodes += 1
            far -= node_parts[node, expert]
            senders_far -= senders[node]
            node_without[node] = node_parts[node, expert]
        node_copies[node] += 1.0
        node_without[node] -= parts[rank, expert] / count_on[rank, expert]
    far = max(0.0, far)
    misplaced = 0.0
    for index in range(number):
        rank = rank_of[holders[index]]
        node = node_of[rank]
        on_node = node_copies[node]
        near = max(0.0, node_without[node]) / on_node
        work[rank] += sign * load * (parts[rank, expert] / count_on[rank, expert] + near + far / number)
        if num_nodes > 1:
            misplaced += near * (on_node - 1.0) / on_node  # static tables: the first copy on a node serves all of it
    undealt, dealt = far, senders_far
    if num_nodes == 1:
        undealt, dealt = max(0.0, node_without[node_of[rank_of[holders[0]]]]) + far, senders.sum() - number
    if dealt > 0:
        rest = dealt % number  # static tables: so many copies serve one rank more than the others
        misplaced += undealt / dealt * rest * (number - rest) / number
    for index in range(number):
        node_copies[node_of[rank_of[holders[index]]]] = 0.0
    return load * (hop_price * far + misplaced_price * misplaced)


@compiled_nogil
def pour(
    rank_of: Int32Array,
    inverse: Float64Array,
    holders: Int32Array,
    count_on: UInt8Array,
    work: Float64Array,
    part: Float64Array,
    expert: int,
    load: float,
) -> None:
    """Split an expert over its copies (weighted dispatch) so that the highest rank among theirs becomes as low as can be.

    Work: shape (R,), without the expert; it is added. Part: shape (slots,), what each slot serves; set for the holders.
    """
    for index in range(holders.size):
        part[holders[index]] = 0.0
    level, dropped = 0.0, True
    while dropped:  # the level at which all stand that are not above it anyway
        tokens, width = load, 0.0
        for index in range(holders.size):
            rank = rank_of[holders[index]]
            if part[holders[index]] == 0.0:
                tokens += work[rank] / count_on[rank, expert]
                width += 1.0 / (inverse[rank] * count_on[rank, expert])
        level, dropped = tokens / width, False
        for index in range(holders.size):
            if (
                part[holders[index]] == 0.0
                and work[rank_of[holders[index]]] * inverse[rank_of[holders[index]]] > level + ROUNDING
            ):
                part[holders[index]] = -1.0
                dropped = True
    for index in range(holders.size):
        slot = holders[index]
        rank = rank_of[slot]
        part[slot] = 0.0 if part[slot] < 0.0 else max(0.0, level / inverse[rank] - work[rank]) / count_on[rank, expert]
    for index in range(holders.size):
        work[rank_of[holders[index]]] += part[holders[index]]


@compiled_nogil
def hop_change(node_of: Int64Array, node_parts: Float64Array, expert: int, rank: int, other_rank: int, part: float) -> float:
    """Tokens more that cross nodes when a copy goes to another rank and goes on to serve equal parts; 0 for no expert (-1)."""
    if expert < 0:
        return 0.0
    return float(part * (node_parts[node_of[rank], expert] - node_parts[node_of[other_rank], expert]))


@compiled_nogil
def saved_parts(
    copies: Int64Array,
    holders: Int32Array,
    part: Float64Array,
    experts: Int32Array,
    num_experts: int,
    slots: Int32Array,
    parts: Float64Array,
) -> int:
    """Note what the copies of experts serve under weighted dispatch: in `slots` and `parts`. Returns their number."""
    number = 0
    for index in range(num_experts):
        expert = experts[index]
        for copy in range(copies[expert]):
            slots[number] = holders[expert, copy]
            parts[number] = part[holders[expert, copy]]
            number += 1
    return number
