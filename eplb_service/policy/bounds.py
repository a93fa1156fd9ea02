"""Lower bounds on imbalance that no placement can beat, so that a plan can say how far from the best it may be.

Whatever the dispatch, a layer's busiest rank carries at least

- the level to which all work rises when it is split at will over the ranks that have slots, each with its capacity and its own
  work (the mean, where nothing else is said);
- the hottest copy under the best allotment of copies: of an expert with c copies, one carries at least load / c;
- under strict groups, the mean of the busiest node: some node holds the hottest group, some node two of the N + 1 hottest, some
  node three of the 2 N + 1 hottest, and so on.

Under even split a rank also carries its pinned experts, each at its most copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, imbalance_of, own_work
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.limits import Limits, legal_rows, limits_of
from eplb_service.policy.row_check import spread_group

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

ROUNDING = 1e-12
"""Relative excess over a height that is rounding alone."""


def hottest_copy(load: Float64Array, num_slots: int, copies_max: int | Int64Array, copies_min: int | Int64Array = 1) -> float:
    """Least possible load of the hottest copy, over all allotments of `num_slots` copies to experts. Load: shape (E,).

    The smallest T with sum of max(copies_min, ceil(load / T)) <= num_slots and no expert above copies_max (numbers, or shape
    (E,)). T is load_e / c for some expert and count of at most ceil(load_e / mean), so the search is over those values.

    >>> hottest_copy(np.array([600.0, 560, 120, 120, 20, 10, 10, 10]), 16, 8)
    120.0
    """
    most = np.maximum(1, np.broadcast_to(copies_max, load.shape))
    least = max(float((load / most).max()), float(load.sum()) / max(1, num_slots))
    if least <= 0:
        return 0.0
    counts = np.minimum(np.maximum(1, np.ceil(load / least * (1 - ROUNDING))), most).astype(np.int64)
    count = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    values = np.unique(np.append(np.repeat(load, counts) / count, least))
    values = values[values >= least * (1 - ROUNDING)]
    low, high = 0, values.size - 1
    while low < high:
        middle = (low + high) // 2
        needed = np.maximum(copies_min, np.ceil(load / float(values[middle]) * (1 - ROUNDING)))
        if needed.sum() <= num_slots:
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def level(load: float, capacity: Float64Array, base: Float64Array) -> float:
    """Least height (work over capacity) of the busiest rank when load is split at will over ranks with work of their own.

    capacity, base: shape (ranks,).

    >>> level(6.0, np.array([1.0, 1.0, 1.0]), np.array([0.0, 0.0, 9.0]))
    9.0
    """
    order = np.argsort(base / capacity, kind="stable")
    speed, work = np.cumsum(capacity[order]), np.cumsum(base[order])
    heights = (load + work) / speed
    start = (base / capacity)[order]
    return float(max(heights[heights >= start * (1 - ROUNDING)][-1], start[-1]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fleet:
    """What bounds ask of the ranks, for one token of load in all: everything grows with the load.

    serving: ranks that have slots. capacity, base: of those, shape (serving,). alive_level: what ranks without slots carry.
    fair: height of a perfectly balanced layer. nodes: positions (into serving) of each node's ranks under strict groups.
    """

    serving: Int64Array
    capacity: Float64Array
    base: Float64Array
    alive_level: float
    fair: float
    nodes: tuple[Int64Array, ...]

    @classmethod
    def of(cls, problem: PlanningProblem, limits: Limits) -> _Fleet:
        """The fleet of a problem."""
        topology, constraints = problem.topology, problem.constraints
        alive = np.array(topology.alive)
        base = own_work(topology, 1.0)
        serving = np.flatnonzero(limits.room > 0)
        node_of = np.array(topology.node_indices)[serving]
        strict = (constraints.num_groups or 1) > 1 and constraints.group_price is None
        return cls(
            serving=serving,
            capacity=limits.capacity[serving],
            base=base[serving],
            alive_level=float((base[alive] / limits.capacity[alive]).max()),
            fair=float((1.0 + base.sum()) / limits.capacity[alive].sum()),
            nodes=tuple(np.flatnonzero(node_of == node) for node in np.unique(node_of)) if strict else (),
        )

    def lowest_with(self, tokens: float, load: float) -> float:
        """Least height of a rank that takes so many tokens, of a layer with so much load."""
        return float(((tokens + self.base * load) / self.capacity).min())


def imbalance_bounds(problem: PlanningProblem, limits: Limits | None = None) -> tuple[float, ...]:
    """Per layer, a lower bound on imbalance under the problem's dispatch. Length L; 1.0 for a layer without load."""
    limits = limits or limits_of(problem)
    fleet = _Fleet.of(problem, limits)
    flat = max(level(1.0, fleet.capacity, fleet.base), fleet.alive_level)
    even = problem.dispatch in (Dispatch.EVEN, Dispatch.HASHED)
    bounds = []
    for layer, load in enumerate(problem.total_loads):
        total = float(load.sum())
        if total <= 0:
            bounds.append(1.0)
            continue
        least, most = _copies(problem, limits, fleet, layer)
        height = fleet.lowest_with(hottest_copy(load, limits.num_slots, most, least), total)
        if fleet.nodes:
            height = max(height, _group_height(problem, fleet, load))
        if even and limits.pins.size:
            height = max(height, _pinned_height(limits, fleet, layer, load / most, total))
        bounds.append(max(1.0, flat / fleet.fair, height / (fleet.fair * total)))
    return tuple(bounds)


def heights_that_may_stay(problem: PlanningProblem, limits: Limits) -> tuple[float, ...]:
    """Imbalance of each layer's live row where it may stay, which no bound may be above. Length L; inf where it may not.

    A row with faults that no new row may have (duplicates, too many copies, spread groups: see `row_check`) can be better than
    every legal one. Under weighted dispatch its shares are planned anew: a bound on them, and inf for rows without faults.
    """
    table, least = problem.current, limits.without_copy_rules()
    rows = np.where(limits.usable.reshape(-1)[None, :], table.physical_to_logical, EMPTY_SLOT)
    stays = legal_rows(rows, least, table.num_logical)
    if problem.dispatch is Dispatch.WEIGHTED:
        stays &= ~legal_rows(rows, limits, table.num_logical) | _spread(rows, problem)
        free = replace(problem, constraints=replace(problem.constraints, num_groups=None, group_price=None))
        reached = imbalance_bounds(free, least) if stays.any() else (np.inf,) * table.num_layers
    else:
        live = Table(table.model, table.layer_ids, table.num_logical, table.rank_ids, rows)
        reached = imbalance_of(problem.total_loads, live, problem.topology, problem.dispatch, problem.source_loads).per_layer
    return tuple(height if may else np.inf for height, may in zip(reached, stays.tolist(), strict=True))


def _spread(rows: Int32Array, problem: PlanningProblem) -> npt.NDArray[np.bool_]:
    """Whether a layer's row has a strict group on several nodes. Rows: shape (L, P). Shape (L,)."""
    strict = has_strict_groups(problem)
    return np.array([strict and spread_group(row, problem) is not None for row in rows], np.bool_)


def _copies(problem: PlanningProblem, limits: Limits, fleet: _Fleet, layer: int) -> tuple[int | Int64Array, Int64Array]:
    """Fewest copies (pins, resilience) and most copies (the engine's table, bars, room on a node) of each expert."""
    size = problem.current.num_logical
    top = limits.copies_max
    if fleet.nodes:
        beside = size // (problem.constraints.num_groups or 1) - 1  # experts of its group that share the node
        room = [limits.room[fleet.serving[node]] for node in fleet.nodes]
        ranks = [slots.size if limits.distinct else int(slots.sum()) for slots in room]
        top = min(top, max(1, *(min(most, int(slots.sum()) - beside) for most, slots in zip(ranks, room, strict=True))))
    most = np.full(size, top, np.int64)
    if limits.plain:
        return 1, most
    if limits.bars.size:
        open_room = ~limits.marked(limits.bars, layer, size)[fleet.serving]
        slots = np.minimum(limits.room[fleet.serving], 1) if limits.distinct else limits.room[fleet.serving]
        most = np.minimum(most, (open_room * slots[:, None]).sum(axis=0))
    least = limits.marked(limits.pins, layer, size).sum(axis=0)
    if limits.protected is not None:
        least = np.maximum(least, np.where(limits.protected[layer], 2, 1))
    return np.maximum(least, 1), np.maximum(most, 1)


def _pinned_height(limits: Limits, fleet: _Fleet, layer: int, share: Float64Array, total: float) -> float:
    """Height of the rank that its pinned experts load most, each at its least share. Share: shape (E,), tokens."""
    pinned = limits.marked(limits.pins, layer, share.size)[fleet.serving] @ share
    return float(((pinned + fleet.base * total) / fleet.capacity).max())


def _group_height(problem: PlanningProblem, fleet: _Fleet, load: Float64Array) -> float:
    """Mean height of the busiest node under strict groups, at least. Load: shape (E,)."""
    num_groups = problem.constraints.num_groups or 1
    number = len(fleet.nodes)
    if load.size % num_groups:
        return 0.0
    groups = np.sort(load.reshape(num_groups, -1).sum(axis=1))[::-1]
    speed = np.array([fleet.capacity[node].sum() for node in fleet.nodes])
    own = np.array([fleet.base[node].sum() for node in fleet.nodes]) * float(load.sum())
    height = 0.0
    for together in range(1, (num_groups - 1) // number + 2):
        last = (together - 1) * number + 1  # of so many groups, `together` share a node
        carried = float(groups[last - together : last].sum())
        height = max(height, float(((carried + own) / speed).min()))
    return height
