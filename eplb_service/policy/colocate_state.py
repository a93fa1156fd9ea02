"""What a walk of co-location works on: a layer in arrays, the bounds of its rows, and where the walk stands."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.policy.layer_task import BoolArray, Float64Array, Int32Array, Int64Array

NUM_OVER, MOVES = 0, 1
TOGETHER, OVERLOAD, EXTRA = 0, 1, 2


class Ground(NamedTuple):
    """What does not change in a layer. N usable slots, rank by rank; R ranks, E experts, M nodes, D failure domains.

    weight: shape (E, E), symmetric, 0 on the diagonal, pairs add up to 1. load: (E,). fair: fair height.
    rank_of: (N,). first: (R + 1,), where each rank's slots begin. node_of, domain_of, kinds: (R,). base, capacity: (R,).
    allowed, pinned, is_new: (R, E); is_new: whether holding the expert there is a move. extra: (R, E), price beside moves.
    live_first, live_ranks: ranks that hold each expert now, (E + 1,) and flat. spread: (E,).
    """

    weight: Float64Array
    load: Float64Array
    fair: float
    rank_of: Int64Array
    first: Int64Array
    node_of: Int64Array
    domain_of: Int64Array
    kinds: Int64Array
    base: Float64Array
    capacity: Float64Array
    allowed: BoolArray
    pinned: BoolArray
    is_new: BoolArray
    extra: Float64Array
    live_first: Int64Array
    live_ranks: Int64Array
    spread: BoolArray


class Bounds(NamedTuple):
    """What a row must keep. height: of every rank; moves; extra: price beside moves; intake: newcomers of each rank, (R,)."""

    height: float
    moves: int
    extra: float
    intake: Int64Array
    free: bool


class Walk(NamedTuple):
    """The state. slots, part: expert (-1 = empty) in each slot and its share of that expert's tokens, (N,). height: (R,).

    copies: on ranks, (R, E). domains: copies in failure domains, (D, E). served: part of each expert's tokens on a node,
    (M, E); pull: served @ weight. intake: (R,). level: TOGETHER, OVERLOAD, EXTRA. counter: NUM_OVER, MOVES. random: (1,).
    """

    slots: Int32Array
    part: Float64Array
    height: Float64Array
    copies: Int64Array
    domains: Int64Array
    served: Float64Array
    pull: Float64Array
    intake: Int64Array
    level: Float64Array
    counter: Int64Array
    random: Int64Array


class Best(NamedTuple):
    """The best row that keeps the bounds: slots and parts, (N,), and its share of pairs together, (1,)."""

    slots: Int32Array
    part: Float64Array
    value: Float64Array


class Cooling(NamedTuple):
    """First and last values, from one to the other by equal ratios, all in mean gains.

    warm, cold: temperature. light, heavy: price of a fair height of overload. cheap, dear: of a move too many.
    """

    warm: float
    cold: float
    light: float
    heavy: float
    cheap: float
    dear: float


def walk_from(ground: Ground, height_max: float, slots: Int32Array, part: Float64Array, seed: int) -> Walk:
    """A walk that starts from a row. Slots, part: shape (N,). height_max: what counts as overload."""
    num_ranks, num_logical = ground.allowed.shape
    num_nodes = int(ground.node_of.max()) + 1
    used = np.flatnonzero(slots >= 0)
    expert, rank = slots[used], ground.rank_of[used]
    copies = np.zeros((num_ranks, num_logical), np.int64)
    domains = np.zeros((int(ground.domain_of.max()) + 1, num_logical), np.int64)
    served = np.zeros((num_nodes, num_logical))
    work = ground.base.copy()
    np.add.at(copies, (rank, expert), 1)
    np.add.at(domains, (ground.domain_of[rank], expert), 1)
    np.add.at(served, (ground.node_of[rank], expert), part[used])
    np.add.at(work, rank, part[used] * ground.load[expert])  # in the order of slots, as the walk adds it up
    pull = served @ ground.weight
    held = copies > 0
    height = work / ground.capacity
    over = np.maximum(height - height_max, 0.0)
    intake = (held & ground.is_new).sum(axis=1)
    return Walk(
        slots=slots.copy(),
        part=part.copy(),
        height=height,
        copies=copies,
        domains=domains,
        served=served,
        pull=pull,
        intake=intake.astype(np.int64),
        level=np.array([0.5 * (served * pull).sum(), over.sum() / ground.fair, ground.extra[held].sum()]),
        counter=np.array([(height > height_max).sum(), intake.sum()], np.int64),
        random=np.full(1, seed, np.int64),
    )


def mean_gain(ground: Ground, walk: Walk) -> float:
    """Mean size of what an exchange of two experts on two nodes gains or loses; 0 when no exchange does."""
    used = np.flatnonzero(walk.slots >= 0)
    expert, part, node = walk.slots[used], walk.part[used], ground.node_of[ground.rank_of[used]]
    pulled = walk.pull[:, expert][node]  # of the expert of a column, by the node of a row
    own = walk.pull[node, expert]
    gain = part[None, :] * (pulled - own[None, :])
    gain = gain + gain.T - 2.0 * part[:, None] * part[None, :] * ground.weight[expert[:, None], expert[None, :]]
    apart = (node[:, None] != node[None, :]) & (expert[:, None] != expert[None, :])
    return float(np.abs(gain[apart]).mean()) if apart.any() else 0.0
