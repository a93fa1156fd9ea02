"""The greedy policy: replicate the hottest per copy, pack longest first, improve by exchanges, keep experts where they are.

The first two steps are the published idea of DeepSeek's EPLB (global, or hierarchical by expert groups); distinct experts per
rank, exchanges against the busiest rank and the matching to the live placement are added here. A layer whose row is legal and
not improved keeps it, so a plan on the same load moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eplb_service.clock import Clock, SystemClock
from eplb_service.dispatch import Dispatch, own_work
from eplb_service.moves import count_moves, residencies
from eplb_service.policy import plain_layers
from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.colocate import colocated
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.groups import Layout, grouped_rows
from eplb_service.policy.kernels import loads_of_bins
from eplb_service.policy.layer_task import GROUPS_TARGET, Float64Array, Int32Array, Int64Array, LayerTask, layer_task
from eplb_service.policy.limits import Limits, legal_rows, limits_of
from eplb_service.policy.matching import row_near
from eplb_service.policy.move_limits import LayerPlan, within_move_limits
from eplb_service.policy.nearest_rows import nearest_plans
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.shares import with_shares
from eplb_service.policy.task_layers import plan_task

STEPS_PER_LAYER = 200
"""Exchanges tried for one layer when the problem gives no work budget."""

GOOD_ENOUGH = 1.001
"""Height over its lower bound at which no other allotment of copies is tried."""

TRIAL_WORK = 200_000
"""Bound on other allotments tried for one part, in slots x ranks each: many for small layers, few for large ones."""

RELATIVE_GAIN_MIN = 1e-9
"""A new row must be better than the current one by more than rounding, else the current one stays."""


class GreedyPolicy:
    """Fast heuristic; see the module."""

    name = "greedy"
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *, clock: Clock | None = None) -> None:
        """Clock: for the time limit of the search that nearest dispatch needs."""
        self._clock = clock or SystemClock()

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts, groups or moves do not fit the constraints.

        Status `limited`: limits on moves kept layers from their better row; they got what fits, or stay as they are.
        """
        deadline = self._clock.monotonic() + problem.time_limit_s

        def expired() -> bool:
            return self._clock.monotonic() >= deadline

        limits = limits_of(problem)
        loads = problem.total_loads
        plans, cut_off = plan_layers(problem, limits, loads), False
        if problem.dispatch is Dispatch.NEAREST:
            plans, cut_off = nearest_plans(problem, limits, plans, expired)
        rows, limited = within_move_limits(problem, limits, plans)
        rows, cut_short = colocated(problem, limits, rows, target=problem.max_imbalance, expired=expired)
        shares = with_shares(problem, rows)
        status = "limited" if limited else "heuristic"
        return RawPlan(physical_to_logical=rows, shares=shares, status=status, cut_off=cut_off or cut_short)


def height_of(row: npt.NDArray[np.integer], load: Float64Array, limits: Limits, base: Float64Array | None = None) -> float:
    """Largest work over capacity of a rank under even split. Row: shape (P,), legal; load: (E,); base: (R,), tokens."""
    bins = np.asarray(row, np.int32).reshape(limits.usable.shape)
    work = loads_of_bins(bins, load)
    return float(((work if base is None else work + base) / limits.capacity).max())


def plan_layers(problem: PlanningProblem, limits: Limits, loads: Float64Array) -> list[LayerPlan | None]:
    """The new row of each layer, None where the current one stays: it is idle and legal, or no better row was found.

    A row that only breaks a rule for new rows (an expert twice on a rank, a group on two nodes) is replaced, but may stay when
    moves are short. Loads: shape (L, E).
    """
    if limits.plain and (problem.constraints.num_groups or 1) == 1:
        return _plan_plain(problem, limits, loads)
    return _plan_tasks(problem, limits, loads)


def _steps_max(problem: PlanningProblem) -> int:
    return STEPS_PER_LAYER if problem.work_budget is None else problem.work_budget // problem.current.num_layers


def plan_parts(
    loads: Float64Array, room: Int64Array, capacity: Float64Array, bases: Float64Array, limits: Limits, steps_max: int
) -> Int32Array:
    """Bins of layers on ranks that serve, shape (L, R, S). Loads: (L, E), some in each; room, capacity: (R,); bases: (L, R)."""
    copies_max = min(limits.copies_max, room.size) if limits.distinct else limits.copies_max
    orders = np.argsort(-loads, axis=1)
    width, distinct = limits.usable.shape[1], limits.distinct
    bins, copies, heights, bounds = plain_layers.pack_layers(
        loads, orders, room, capacity, bases, width, copies_max, distinct, steps_max, 1.0
    )
    high = np.flatnonzero(heights > GOOD_ENOUGH * bounds)
    trials_max = TRIAL_WORK // (int(room.sum()) * room.size)
    if high.size and trials_max:
        varied = bins[high]
        plain_layers.vary_layers(
            varied,
            loads[high],
            copies[high],
            GOOD_ENOUGH * bounds[high],
            room,
            capacity,
            bases[high],
            copies_max,
            distinct,
            steps_max,
            trials_max,
        )
        bins[high] = varied
    result: Int32Array = bins
    return result


def _plan_plain(problem: PlanningProblem, limits: Limits, loads: Float64Array) -> list[LayerPlan | None]:
    """Plans where every expert and slot is like any other."""
    layout = Layout.of(problem, limits)
    bases = own_work(problem.topology, loads.sum(axis=1))
    serving = np.flatnonzero(limits.room > 0)
    busy = np.asarray(loads.any(axis=1))
    planned = np.where(busy[:, None], loads, 1.0)
    bins = plan_parts(planned, limits.room[serving], limits.capacity[serving], bases[:, serving], limits, _steps_max(problem))
    rows = problem.current.physical_to_logical.reshape(loads.shape[0], *limits.usable.shape).copy()
    new_rows, legal, before, after, moves = plain_layers.settle_layers(
        loads,
        rows,
        bins,
        serving,
        limits.usable,
        limits.capacity,
        bases,
        layout.kinds,
        limits.copies_max,
        limits.distinct,
    )
    can_stay = np.isfinite(before)
    wanted = np.where(busy, ~legal | (after < before * (1.0 - RELATIVE_GAIN_MIN)), ~can_stay)
    plans: list[LayerPlan | None] = []
    for layer, row in enumerate(new_rows.reshape(loads.shape[0], -1)):
        if not wanted[layer]:
            plans.append(None)
        elif busy[layer]:
            plans.append(LayerPlan(row, float(before[layer]), float(after[layer]), int(moves[layer])))
        else:
            plans.append(_mended(problem, layer_task(problem, limits, layout, layer), layer, can_stay=False))
    return plans


def _mended(problem: PlanningProblem, task: LayerTask, layer: int, *, can_stay: bool) -> LayerPlan:
    """The nearest legal row of a layer without load. can_stay: the current one reaches every expert."""
    row = repaired_row(task)
    shape = {"num_ranks": task.num_ranks, "num_logical": task.num_logical}
    moves = count_moves(problem.current.physical_to_logical[layer], row, **shape)
    return LayerPlan(row, 0.0 if can_stay else np.inf, 0.0, moves)


def _plan_tasks(problem: PlanningProblem, limits: Limits, loads: Float64Array) -> list[LayerPlan | None]:
    """Plans where constraints treat experts or ranks unlike."""
    table = problem.current
    rows, shape = table.physical_to_logical, {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
    layout = Layout.of(problem, limits)
    legal = legal_rows(rows, limits, table.num_logical) & grouped_rows(problem)
    reachable = legal_rows(rows, limits.without_copy_rules(), table.num_logical)
    bases = own_work(problem.topology, loads.sum(axis=1))
    plans: list[LayerPlan | None] = []
    for layer, load in enumerate(loads):
        if not load.any():
            task = None if legal[layer] else layer_task(problem, limits, layout, layer)
            plans.append(None if task is None else _mended(problem, task, layer, can_stay=bool(reachable[layer])))
            continue
        row = _row_of(problem, limits, layout, load, layer)
        before = height_of(rows[layer], load, limits, bases[layer]) if reachable[layer] else np.inf
        after = height_of(row, load, limits, bases[layer])
        worth_it = not legal[layer] or after < before * (1.0 - RELATIVE_GAIN_MIN)
        plans.append(LayerPlan(row, before, after, count_moves(rows[layer], row, **shape)) if worth_it else None)
    return plans


def _row_of(problem: PlanningProblem, limits: Limits, layout: Layout, load: Float64Array, layer: int) -> Int32Array:
    """A new row of a layer, shape (P,), near the current one."""
    current = problem.current.physical_to_logical[layer]
    if has_strict_groups(problem) and limits.plain:
        bins = _by_nodes(problem, limits, layout, load, layer)
    else:
        task = layer_task(problem, limits, layout, layer)
        held = residencies(current, num_ranks=task.num_ranks, num_logical=task.num_logical)
        bins = plan_task(
            task,
            off_home=(task.price - ~held) > 0,
            target=problem.max_imbalance or GROUPS_TARGET,
            steps_max=_steps_max(problem),
        )
    return row_near(bins, current, limits.usable, layout.kinds, load.size)


def _by_nodes(problem: PlanningProblem, limits: Limits, layout: Layout, load: Float64Array, layer: int) -> Int32Array:
    """Bins of a layer with strict groups: every node with its groups is planned by itself. Shape (R, S)."""
    base = own_work(problem.topology, load.sum())
    best, lowest = np.full(limits.usable.shape, -1, np.int32), np.inf
    for parts in layout.alternatives(problem.current.physical_to_logical[layer], load):
        bins = np.full(limits.usable.shape, -1, np.int32)
        for ranks, experts in parts:
            own = load[experts][None] if load[experts].any() else np.ones((1, experts.size))
            part = plan_parts(own, limits.room[ranks], limits.capacity[ranks], base[ranks][None], limits, _steps_max(problem))[
                0
            ]
            bins[ranks] = np.where(part >= 0, experts[part], -1)
        height = float(((loads_of_bins(bins, load) + base) / limits.capacity).max())
        if height < lowest:
            best, lowest = bins, height
    return best
