"""One layer's planning problem in arrays: what every search kernel works on, whatever the constraint behind a number is.

Constraints become bounds and prices here, once: a kernel never asks what a group, a pin or a dead rank is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import own_work
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.contradictions import copies_needed
from eplb_service.policy.group_homes import Aim, choose_homes, home_of_experts, node_task
from eplb_service.policy.groups import Layout
from eplb_service.policy.limits import Limits
from eplb_service.policy.residency_flow import is_possible

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

GROUPS_TARGET = 1.01
"""Imbalance of nodes that is good enough for homes of groups when the problem names no target."""


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
    distinct: never two copies of an expert on one rank. full: no slot is left empty (see `Constraints.fill_slots`).
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
    full: bool = False

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


def layer_task(
    problem: PlanningProblem, limits: Limits, layout: Layout, layer: int, home: Int64Array | None = None
) -> LayerTask:
    """The task of one layer (its position in the table). Limits and layout: of the same problem.

    home: node index of each expert's group, shape (E,); None = chosen here (`group_homes`; without groups there is none).
    Raises InvalidInputError when strict groups, pins, bars and protected experts cannot be met together.
    """
    task = _without_groups(problem, limits, layout, layer)
    if not layout.home_nodes:
        return task
    if home is not None:
        return _with_homes(problem, task, home)
    nodes = node_task(problem, layout, layer, task.load)
    price = problem.constraints.group_price
    aim = Aim(target=problem.max_imbalance or GROUPS_TARGET, price=price)
    serving = task.capacity[task.room > 0]
    homes = choose_homes(nodes, task.load, aim, task.fair * float(serving.mean()))
    grouped = _with_homes(problem, task, home_of_experts(layout, homes))
    if price is not None or limits.plain or is_possible(grouped):
        return grouped
    from eplb_service.policy.group_model import exact_homes  # noqa: PLC0415  (a second to import, rarely needed)

    homes = exact_homes(task, np.array(layout.home_nodes, np.int64), nodes)
    return _with_homes(problem, task, home_of_experts(layout, homes))


def _without_groups(problem: PlanningProblem, limits: Limits, layout: Layout, layer: int) -> LayerTask:
    """The task by everything but groups."""
    table, topology = problem.current, problem.topology
    load = problem.loads[:, layer].sum(axis=0)
    row = table.physical_to_logical[layer].reshape(limits.usable.shape)
    alive = np.array(topology.alive)
    base = own_work(topology, load.sum())
    # A rank that holds an expert in a slot that goes out of use can keep it in another slot without a move.
    price = (~residencies(row.reshape(-1), num_ranks=table.num_ranks, num_logical=table.num_logical)).astype(np.float64)
    pinned = limits.marked(limits.pins, layer, table.num_logical)
    spread = np.zeros(table.num_logical, np.bool_) if limits.protected is None else limits.protected[layer].copy()
    task = LayerTask(
        load=load.copy(),
        held=np.where(limits.usable, row, EMPTY_SLOT).astype(np.int32),
        usable=limits.usable,
        room=limits.room,
        capacity=np.where(alive, limits.capacity, 1.0),
        base=base,
        fair=float((load.sum() + base.sum()) / limits.capacity[alive].sum()),
        allowed=~limits.marked(limits.bars, layer, table.num_logical) & (limits.room > 0)[:, None],
        pinned=pinned,
        price=price,
        copies_min=copies_needed(pinned, spread, limits.domain_of),
        copies_max=np.full(table.num_logical, limits.copies_max, np.int64),
        distinct=limits.distinct,
        spread=spread,
        domain_of=limits.domain_of,
        node_of=layout.node_of,
        source_loads=None if problem.source_loads is None else problem.source_loads[layer],
        layer_id=table.layer_ids[layer],
        rank_ids=table.rank_ids,
        full=problem.constraints.fill_slots,
    )
    return _with_copies_bounded(task)


def _with_homes(problem: PlanningProblem, task: LayerTask, home: Int64Array) -> LayerTask:
    """The task with groups on their homes, or priced off them. Home: node index of each expert's group, shape (E,)."""
    away = task.node_of[:, None] != home[None, :]
    if problem.constraints.group_price is None:
        return _with_copies_bounded(replace(task, allowed=task.allowed & ~away))
    return replace(task, price=task.price + problem.constraints.group_price * away)


def _with_copies_bounded(task: LayerTask) -> LayerTask:
    """No more copies of an expert than ranks that may hold it, where no rank may hold two."""
    if not task.distinct:
        return task
    return replace(task, copies_max=np.minimum(task.copies_max, task.allowed.sum(axis=0)))
