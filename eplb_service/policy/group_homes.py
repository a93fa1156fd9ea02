"""Which node is home to which expert group, layer by layer: where balance allows it and most experts already are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import own_work
from eplb_service.errors import InvalidInputError
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import FORBIDDEN, Layout
from eplb_service.policy.home_kernels import improve_homes
from eplb_service.policy.matching import cheapest_matching

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ROUNDS_MAX = 50
"""Exchanges between nodes made from one start, one after another."""

REPLICA_MAX = 0.97
"""Most that one replica carries, in rank heights: the other slots of its rank hold something too."""

TINY = 1e-300
"""Capacity of a node in an idle layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTask:
    """Groups to put on nodes, for one layer. G groups, N nodes that serve (in the order of `Layout.home_nodes`).

    group_load: shape (G,), tokens. capacity, base: of each node, shape (N,). fair: height of a perfectly balanced layer.
    away: experts of each group that a node does not hold, shape (G, N). may: whether pins and bars let it go there, (G, N).
    most: groups that a node gets at most; fewest: at least.
    """

    group_load: Float64Array
    capacity: Float64Array
    base: Float64Array
    fair: float
    away: Int64Array
    may: BoolArray
    most: int
    fewest: int

    def imbalance(self, home: Int64Array) -> float:
        """Busiest node's work for its capacity over the fair height. Home: node of each group, shape (G,)."""
        work = np.bincount(home, weights=self.group_load, minlength=self.capacity.size) + self.base
        return float((work / self.capacity).max() / self.fair) if self.fair > 0 else 1.0

    def moves(self, home: Int64Array) -> int:
        """Experts that have to come to their group's home."""
        return int(self.away[np.arange(home.size), home].sum())


def node_task(problem: PlanningProblem, layout: Layout, layer: int, load: Float64Array) -> NodeTask:
    """The task of one layer (its position in the table)."""
    limits, nodes = layout.limits, np.array(layout.home_nodes)
    num_groups, size = layout.num_groups, layout.num_logical // layout.num_groups
    row = np.where(limits.usable.reshape(-1), problem.current.physical_to_logical[layer], EMPTY_SLOT)
    held = residencies(row, num_ranks=limits.room.size, num_logical=layout.num_logical)
    alive = np.array(problem.topology.alive)
    base = own_work(problem.topology, load.sum())
    pinned = limits.marked(limits.pins, layer, layout.num_logical)
    barred = limits.marked(limits.bars, layer, layout.num_logical)
    away, may = np.zeros((num_groups, nodes.size), np.int64), np.ones((num_groups, nodes.size), np.bool_)
    for index, node in enumerate(nodes.tolist()):
        on_node = (layout.node_of == node) & (limits.room > 0)
        away[:, index] = (~held[on_node].any(axis=0)).reshape(num_groups, size).sum(axis=1)
        closed = barred[on_node].all(axis=0) | pinned[layout.node_of != node].any(axis=0)
        may[:, index] = ~closed.reshape(num_groups, size).any(axis=1)
    capacity = np.where(alive, limits.capacity, 0.0)
    return NodeTask(
        group_load=load.reshape(num_groups, size).sum(axis=1),
        capacity=np.array([capacity[layout.node_of == node].sum() for node in nodes]),
        base=np.array([base[layout.node_of == node].sum() for node in nodes]),
        fair=float((load.sum() + base.sum()) / capacity.sum()),
        away=away,
        may=may if layout.nodes else np.ones_like(may),
        most=-(-num_groups // nodes.size),
        fewest=num_groups // nodes.size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a choice of homes is judged by.

    target: imbalance of nodes that is good enough. price: None = strict groups: balance comes first, then moves; else what a
    replica off its group's node costs, in moves.
    """

    target: float
    price: float | None = None


def cheapest_homes(task: NodeTask) -> Int64Array:
    """Node of each group such that fewest experts move, shape (G,). Raises InvalidInputError when no assignment is allowed."""
    num_groups, num_nodes = task.away.shape
    places = np.repeat(np.arange(num_nodes), task.most)
    cost = np.full((places.size, places.size), 0, np.int64)
    cost[:num_groups] = np.where(task.may[:, places], task.away[:, places], FORBIDDEN)
    # Nodes get at least `fewest` groups: the rows beyond the groups may leave free only places above that.
    first = np.tile(np.arange(task.most), num_nodes)
    cost[num_groups:] = np.where(first < task.fewest, FORBIDDEN, 0)
    home = places[cheapest_matching(cost)[:num_groups]]
    if (~task.may[np.arange(num_groups), home]).any():
        group = int(np.argmax(~task.may[np.arange(num_groups), home]))
        raise InvalidInputError(
            f"strict groups, pins and bars leave no node for each of {num_groups} groups with at most {task.most} on one"
            f" (group {group} is left over); unpin or allow experts, or give groups a price"
        )
    return home


def packed_homes(task: NodeTask) -> Int64Array | None:
    """Node of each group, longest group first to the node that it leaves least loaded; None when pins and bars block that."""
    num_groups, num_nodes = task.away.shape
    home = np.full(num_groups, -1, np.int64)
    work, count = task.base.copy(), np.zeros(num_nodes, np.int64)
    left = num_groups
    for group in np.argsort(-task.group_load, kind="stable").tolist():
        # What is still to come must fill every node to `fewest`.
        short = np.maximum(task.fewest - count, 0)
        open_nodes = task.may[group] & (count < task.most) & ((short > 0) | (short.sum() < left))
        if not open_nodes.any():
            return None
        height = np.where(open_nodes, (work + task.group_load[group]) / task.capacity, np.inf)
        node = int(height.argmin())
        home[group], work[node], count[node], left = node, work[node] + task.group_load[group], count[node] + 1, left - 1
    return home


def choose_homes(task: NodeTask, load: Float64Array, aim: Aim, rank_height: float) -> Int64Array:
    """Node of each group, shape (G,), the best that exchanges find from where groups are now and from a balanced packing.

    Load: shape (E,). rank_height: work of one rank of a perfectly balanced layer. Raises InvalidInputError when pins and bars
    allow no assignment.
    """
    price = -1.0 if aim.price is None else aim.price
    # Ranks of a node are not perfectly even: nodes aim at half the distance to the target.
    target = aim.target if aim.price is None else 1.0 + (aim.target - 1.0) / 2.0
    best, chosen = (np.inf, np.inf), np.zeros(0, np.int64)
    for start in (cheapest_homes(task), packed_homes(task)):
        if start is None:
            continue
        home = start.copy()
        cost = improve_homes(
            home,
            load,
            task.group_load,
            task.away,
            task.may,
            task.fewest,
            task.most,
            task.base,
            np.maximum(task.capacity * task.fair, TINY),
            target,
            price,
            REPLICA_MAX * rank_height,
            ROUNDS_MAX,
        )
        if cost < best:
            best, chosen = cost, home
    return chosen


def home_of_experts(layout: Layout, homes: Sequence[int] | Int64Array) -> Int64Array:
    """Node index of each expert's group, shape (E,). Homes: positions within `Layout.home_nodes`, shape (G,)."""
    nodes = np.array(layout.home_nodes, np.int64)[np.asarray(homes)]
    result: Int64Array = np.repeat(nodes, layout.num_logical // layout.num_groups)
    return result
