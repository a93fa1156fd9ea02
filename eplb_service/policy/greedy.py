"""The greedy policy: replicate the hottest per copy, pack longest first, improve by exchanges, keep experts where they are.

The first two steps are the published idea of DeepSeek's EPLB (global, or hierarchical by expert groups); distinct experts per
rank, exchanges against the busiest rank and the matching to the live placement are added here. A layer whose row is legal and
not improved keeps it, so a plan on the same load moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.moves import count_moves
from eplb_service.policy import kernels
from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.groups import Layout, grouped_rows
from eplb_service.policy.limits import Limits, legal_rows, limits_of
from eplb_service.policy.repair import repair_row

STEPS_PER_LAYER = 200
"""Exchanges tried for one layer when the problem gives no work budget."""

GOOD_ENOUGH = 1.001
"""Height over its lower bound at which no other allotment of copies is tried."""

TRIAL_WORK = 200_000
"""Bound on other allotments tried for one part, in slots x ranks each: many for small layers, few for large ones."""

RELATIVE_GAIN_MIN = 1e-9
"""A new row must be better than the current one by more than rounding, else the current one stays."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """A candidate row of one layer.

    before, after: height of the current and the new row (busiest rank's load for its capacity, tokens); before is infinite when
    the current row cannot stay (experts unreachable, slots dead or out of use). moves: from the current row.
    """

    row: npt.NDArray[np.int32]
    before: float
    after: float
    moves: int


def height_of(row: npt.NDArray[np.integer], load: npt.NDArray[np.float64], limits: Limits) -> float:
    """Largest rank load over capacity under even split. Row: shape (P,), legal; load: shape (E,)."""
    bins = np.asarray(row, np.int32).reshape(limits.usable.shape)
    return float((kernels.loads_of_bins(bins, load) / limits.capacity).max())


class GreedyPolicy:
    """Fast heuristic; see the module."""

    name = "greedy"
    options: Mapping[str, str] = MappingProxyType({})

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts, groups or moves do not fit the constraints."""
        limits = limits_of(problem)
        loads = problem.total_loads
        candidates = plan_layers(problem, limits, loads)
        return RawPlan(physical_to_logical=within_move_budget(problem, limits, loads, candidates), status="heuristic")


def plan_layers(problem: PlanningProblem, limits: Limits, loads: npt.NDArray[np.float64]) -> list[LayerPlan | None]:
    """The new row of each layer, None where the current one stays: it is idle and reachable, or no better row was found.

    A row that only breaks a rule for new rows (an expert twice on a rank, a group on two nodes) is replaced, but may stay when
    moves are short.
    """
    table = problem.current
    rows = table.physical_to_logical
    shape = {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
    steps_max = STEPS_PER_LAYER if problem.work_budget is None else problem.work_budget // table.num_layers
    legal = legal_rows(rows, limits, table.num_logical) & grouped_rows(problem)
    reachable = legal_rows(rows, limits.without_copy_rules(), table.num_logical)
    layout = Layout.of(problem, limits)
    plans: list[LayerPlan | None] = []
    for layer, load in enumerate(loads):
        idle = not load.any()
        if idle and reachable[layer]:
            plans.append(None)
            continue
        current = rows[layer]
        if idle and not layout.nodes:
            row = repair_row(current, load, limits, table.num_logical)
        else:
            row = plan_row(layout, limits, current, np.ones_like(load) if idle else load, steps_max)
        before = height_of(current, load, limits) if reachable[layer] else np.inf
        after = height_of(row, load, limits)
        worth_it = after < before * (1.0 - RELATIVE_GAIN_MIN) or not legal[layer]
        plans.append(LayerPlan(row, before, after, count_moves(current, row, **shape)) if worth_it else None)
    return plans


def plan_row(
    layout: Layout, limits: Limits, current: npt.NDArray[np.int32], load: npt.NDArray[np.float64], steps_max: int
) -> npt.NDArray[np.int32]:
    """A row for one layer: every part (a node with its expert groups, or everything) planned by itself. Returns shape (P,)."""
    best, lowest = np.full(limits.usable.shape, -1, np.int32), np.inf
    for parts in layout.alternatives(current, load):
        bins = np.full(limits.usable.shape, -1, np.int32)
        for ranks, experts in parts:
            part = plan_part(load[experts], limits.room[ranks], limits.capacity[ranks], limits, steps_max)
            bins[ranks] = np.where(part >= 0, experts[part], -1)
        height = float((kernels.loads_of_bins(bins, load) / limits.capacity).max())
        if height < lowest:
            best, lowest = bins, height
    return kernels.row_near(best, current, limits.usable, layout.kinds, load.size)


def plan_part(
    load: npt.NDArray[np.float64],
    room: npt.NDArray[np.int64],
    capacity: npt.NDArray[np.float64],
    limits: Limits,
    steps_max: int,
) -> npt.NDArray[np.int32]:
    """Bins for the experts of one part on its ranks. Load: shape (experts,); room, capacity: shape (ranks,)."""
    num_slots, width = int(room.sum()), limits.usable.shape[1]
    copies_max = min(limits.copies_max, room.size) if limits.distinct else limits.copies_max
    copies = kernels.allot_copies(load, num_slots, copies_max)
    bins = kernels.pack_and_improve(load, copies, room, capacity, width, limits.distinct, steps_max)
    hottest = float((load / copies).max() / capacity.max())
    goal = GOOD_ENOUGH * max(hottest, float(load.sum() / capacity.sum()))
    trials_max = TRIAL_WORK // (num_slots * room.size)
    return kernels.vary_copies(load, copies, bins, room, capacity, copies_max, limits.distinct, steps_max, goal, trials_max)


def within_move_budget(
    problem: PlanningProblem, limits: Limits, loads: npt.NDArray[np.float64], candidates: list[LayerPlan | None]
) -> npt.NDArray[np.int32]:
    """Rows of all layers, shape (L, P): all candidates, or under max_moves those with most gain per move.

    Layers whose current row cannot stay come first, with the fewest moves that make them legal when the budget is short (their
    whole new row when expert groups matter). Raises InvalidInputError when not even those fit.
    """
    rows = problem.current.physical_to_logical.copy()
    budget = None if problem.from_nothing else problem.constraints.max_moves
    chosen = {layer: plan for layer, plan in enumerate(candidates) if plan is not None}
    if budget is None or sum(plan.moves for plan in chosen.values()) <= budget:
        for layer, plan in chosen.items():
            rows[layer] = plan.row
        return rows
    shape = {"num_ranks": problem.current.num_ranks, "num_logical": problem.current.num_logical}
    spent, height = dict.fromkeys(chosen, 0), {layer: plan.before for layer, plan in chosen.items()}
    for layer, plan in chosen.items():
        if not np.isfinite(plan.before):
            grouped = (problem.constraints.num_groups or 1) > 1
            rows[layer] = plan.row if grouped else repair_row(rows[layer], loads[layer], limits, problem.current.num_logical)
            spent[layer] = count_moves(problem.current.physical_to_logical[layer], rows[layer], **shape)
            height[layer] = height_of(rows[layer], loads[layer], limits)
    left = budget - sum(spent.values())
    if left < 0:
        raise InvalidInputError(
            f"{sum(spent.values())} moves are needed to reach every expert without slots that are dead or out of use"
            f" but at most {budget} are allowed; raise max_moves"
        )

    def worth(layer: int) -> float:
        mean = float(loads[layer].sum() / limits.capacity[limits.room > 0].sum())
        gain = (height[layer] - chosen[layer].after) / mean if mean > 0 else 0.0
        return gain / max(1, chosen[layer].moves - spent[layer])

    for layer in sorted(chosen, key=lambda layer: (-worth(layer), layer)):
        extra = chosen[layer].moves - spent[layer]
        if worth(layer) > 0 and extra <= left:
            rows[layer] = chosen[layer].row
            left -= extra
    return rows
