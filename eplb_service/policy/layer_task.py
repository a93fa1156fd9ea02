"""One layer's planning problem in arrays: what every search kernel works on, whatever the constraint behind a number is.

Constraints become bounds and prices here, once: a kernel never asks what a group, a pin or a dead rank is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import ExpertOnRank, FailureDomain, PlanningProblem
from eplb_service.policy.groups import Layout
from eplb_service.policy.limits import Limits

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTask:
    """A layer to plan. R ranks (dead ones have no room), S slots a rank, E experts, D failure domains.

    load: shape (E,), tokens, float64.
    held: shape (R, S), int32, the current row by rank, -1 = empty; what lies in slots that may not be used is -1 here.
    usable: shape (R, S). room: usable slots of each rank, shape (R,), int64.
    capacity: relative speed, shape (R,); 1.0 for dead ranks. base: work of its own, shape (R,), tokens.
    fair: height (work over capacity) of a perfectly balanced layer, over the ranks that are alive.
    allowed: shape (R, E), whether the rank may hold the expert (False: barred, off a strict group's node, no room).
    pinned: shape (R, E), residencies that must be there.
    price: shape (R, E), float64: what it costs, in moves, that the rank holds the expert: 1 where it does not yet, plus the
    group price off the group's node.
    copies_min, copies_max: fewest and most copies of each expert, shape (E,), int64.
    distinct: never two copies of an expert on one rank.
    spread: shape (E,), experts that must be on at least two failure domains. domain_of: domain of each rank, shape (R,).
    node_of: node index of each rank, shape (R,), int64.
    source_loads: shape (R, E), tokens that each rank sends, None = uniform sources; only nearest dispatch looks at it.
    layer_id, rank_ids: for messages; no rank ids = positions.
    """

    load: Float64Array
    held: Int32Array
    usable: BoolArray
    room: Int64Array
    capacity: Float64Array
    base: Float64Array
    fair: float
    allowed: BoolArray
    pinned: BoolArray
    price: Float64Array
    copies_min: Int64Array
    copies_max: Int64Array
    distinct: bool
    spread: BoolArray
    domain_of: Int64Array
    node_of: Int64Array
    source_loads: Float64Array | None = None
    layer_id: int = 0
    rank_ids: tuple[int, ...] = ()

    @property
    def num_logical(self) -> int:
        """E."""
        return int(self.load.size)

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.room.size)

    @property
    def where(self) -> str:
        """How messages call the layer."""
        return f"layer {self.layer_id}"

    def rank_name(self, position: int) -> int:
        """How messages call a rank: its id, or its position when the task knows no ids."""
        return int(self.rank_ids[position]) if self.rank_ids else position

    def heights(self, bins: Int32Array | None = None) -> Float64Array:
        """Work over capacity of each rank under even split, shape (R,). Bins: shape (R, S), None = what is held now."""
        placed = self.held if bins is None else bins
        copies = np.bincount(placed[placed >= 0], minlength=self.num_logical)
        share = np.append(self.load / np.maximum(copies, 1), 0.0)  # the last one is what an empty slot (-1) carries
        height: Float64Array = (share[placed].sum(axis=1) + self.base) / self.capacity
        return height


def layer_task(problem: PlanningProblem, limits: Limits, layout: Layout, layer: int) -> LayerTask:
    """The task of one layer (its position in the table). Limits and layout: of the same problem."""
    table, constraints, topology = problem.current, problem.constraints, problem.topology
    load = problem.total_loads[layer]
    row = table.physical_to_logical[layer]
    held = np.where(limits.usable, row.reshape(limits.usable.shape), EMPTY_SLOT).astype(np.int32)
    shape = (table.num_ranks, table.num_logical)
    allowed = np.broadcast_to(limits.room[:, None] > 0, shape).copy()
    price = (~residencies(held, num_ranks=table.num_ranks, num_logical=table.num_logical)).astype(np.float64)
    if layout.nodes:
        home = _home_nodes(layout, row, load)
        away = layout.node_of[:, None] != home[None, :]
        if constraints.group_price is None:
            allowed &= ~away
        else:
            price += constraints.group_price * away
    layer_id = table.layer_ids[layer]
    allowed &= ~_marked(constraints.barred, problem, layer_id)
    alive = np.array([rank not in topology.dead for rank in topology.rank_ids])
    base = np.zeros(table.num_ranks) if topology.base_load is None else np.array(topology.base_load, np.float64)
    base = np.where(alive, base, 0.0) * (load.sum() / max(1, int(alive.sum())))
    spread = np.zeros(table.num_logical, np.bool_)
    by_node = constraints.resilience is not None and constraints.resilience.domain is FailureDomain.NODE
    if constraints.resilience is not None:
        num_hot = int(np.ceil(constraints.resilience.hot_share * table.num_logical - 1e-9))
        spread[np.argsort(-load, kind="stable")[:num_hot]] = True
    return LayerTask(
        load=load.copy(),
        held=held,
        usable=limits.usable,
        room=limits.room,
        capacity=np.where(alive, limits.capacity, 1.0),
        base=base,
        fair=float((load.sum() + base.sum()) / limits.capacity[alive].sum()),
        allowed=allowed,
        pinned=_marked(constraints.pinned, problem, layer_id),
        price=price,
        copies_min=np.where(spread, 2, 1).astype(np.int64),
        copies_max=np.full(table.num_logical, limits.copies_max, np.int64),
        distinct=limits.distinct,
        spread=spread,
        domain_of=layout.node_of if by_node else np.arange(table.num_ranks, dtype=np.int64),
        node_of=layout.node_of,
        source_loads=None if problem.source_loads is None else problem.source_loads[layer],
    )


def _home_nodes(layout: Layout, row: Int32Array, load: Float64Array) -> Int64Array:
    """Node of each expert's group, shape (E,): the first way to spread groups over nodes that the layout knows."""
    home = np.zeros(load.size, np.int64)
    for ranks, experts in layout.alternatives(row, load)[0]:
        home[experts] = layout.node_of[ranks[0]]
    return home


def _marked(residency_set: frozenset[ExpertOnRank], problem: PlanningProblem, layer_id: int) -> BoolArray:
    """Shape (R, E): where the set names a residency of this layer."""
    marked = np.zeros((problem.current.num_ranks, problem.current.num_logical), np.bool_)
    for item in sorted(residency_set, key=lambda item: (item.expert, item.rank_id)):
        if item.layer_id is None or item.layer_id == layer_id:
            marked[problem.topology.position_of(item.rank_id), item.expert] = True
    return marked
