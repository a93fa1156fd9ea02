"""The exact policy: CP-SAT for each layer, started from the greedy plan, never worse than it, honest about what it proved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eplb_service.moves import count_moves
from eplb_service.policy import kernels
from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.greedy import height_of, plan_layers
from eplb_service.policy.groups import Layout, Part
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.matching import row_near
from eplb_service.policy.move_limits import LayerPlan, within_move_limits
from eplb_service.policy.packing_model import VARIABLES_MAX, num_variables, part_of, solve_part

WORK_PER_LAYER = 4000
"""Thousandths of CP-SAT's deterministic time for one layer, when the problem gives no work budget."""

OPTIMAL_GAP = 1e-6
"""Relative gap below which a plan counts as optimal: the rounding of loads to integers."""


@dataclass(slots=True, eq=False)
class _Search:
    """Where the search stands. Heights by layer: of the row chosen so far, and proven lower bounds."""

    problem: PlanningProblem
    limits: Limits
    layout: Layout
    loads: npt.NDArray[np.float64]
    plans: list[LayerPlan | None]
    heights: list[float]
    bounds: list[float]
    seconds_left: float
    cut_off: bool = False
    improved: bool = False

    def gap(self, layer: int) -> float:
        """Relative gap of a layer's row to its bound."""
        return self.heights[layer] / self.bounds[layer] - 1.0 if self.bounds[layer] > 0 else 0.0

    def row(self, layer: int) -> npt.NDArray[np.int32]:
        """The row chosen so far."""
        plan = self.plans[layer]
        row: npt.NDArray[np.int32] = self.problem.current.physical_to_logical[layer] if plan is None else plan.row
        return row


class IlpPolicy:
    """Optimal plans for small layers; see the module. Layers too large for the model keep the greedy row.

    Status: `optimal` when every layer is proven, `feasible` when some layer is better than greedy's but not all are proven,
    `not_improved` when nothing better than greedy was found and not all is proven.
    """

    name = "ilp"
    options: Mapping[str, str] = MappingProxyType({})

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts, groups or moves do not fit the constraints."""
        search = _start(problem)
        work = (problem.work_budget or WORK_PER_LAYER * problem.current.num_layers) / problem.current.num_layers / 1000
        for layer in sorted(range(problem.current.num_layers), key=lambda layer: (-search.gap(layer), layer)):
            if search.gap(layer) > OPTIMAL_GAP:
                _solve_layer(search, layer, work)
        rows, _ = within_move_limits(problem, search.limits, search.plans)
        return _result(search, rows)


def _start(problem: PlanningProblem) -> _Search:
    """The greedy plan, its heights and the combinatorial bounds."""
    limits = limits_of(problem)
    loads = problem.total_loads
    plans = plan_layers(problem, limits, loads)
    bounds = [
        bound * _fair(limits, problem, load) for bound, load in zip(imbalance_bounds(problem, limits), loads, strict=True)
    ]
    search = _Search(problem, limits, Layout.of(problem, limits), loads, plans, [], bounds, problem.time_limit_s)
    search.heights = [height_of(search.row(layer), loads[layer], limits) for layer in range(len(plans))]
    return search


def _fair(limits: Limits, problem: PlanningProblem, load: npt.NDArray[np.float64]) -> float:
    """Height of a perfectly balanced layer: total load over the capacity of the ranks that serve."""
    alive = [rank not in problem.topology.dead for rank in problem.topology.rank_ids]
    return float(load.sum() / limits.capacity[alive].sum())


def _as_bins(row: npt.NDArray[np.int32], limits: Limits) -> npt.NDArray[np.int32]:
    """Experts of each rank of a row, -1 padded at the end."""
    bins = row.reshape(limits.usable.shape).copy()
    for held in bins:
        held[:] = np.concatenate([held[held >= 0], held[held < 0]])
    return bins


def _is_distinct(bins: npt.NDArray[np.int32]) -> bool:
    """Whether no rank holds an expert twice."""
    return all(np.unique(held[held >= 0]).size == int((held >= 0).sum()) for held in bins)


def _solve_layer(search: _Search, layer: int, work: float) -> None:
    """Try to better one layer's row, part by part, and to prove it."""
    limits, load, table = search.limits, search.loads[layer], search.problem.current
    known = _as_bins(search.row(layer), limits)
    if not _is_distinct(known):
        return
    parts = _parts_of(search, known)
    bins, proven_bound, floor = known.copy(), 0.0, 0.0
    rank_heights = kernels.loads_of_bins(known, load) / limits.capacity
    for ranks, experts in sorted(parts, key=lambda part: (-rank_heights[part[0]].max(), part[0][0])):
        height = float(rank_heights[ranks].max())
        if height <= floor:
            break  # the layer is as high as a part that was tried already
        index = np.full(table.num_logical + 1, -1, np.int64)
        index[experts] = np.arange(experts.size)
        part = part_of(load[experts], ranks, limits)
        if num_variables(part, height) > VARIABLES_MAX:
            break
        if search.seconds_left <= 0:
            search.cut_off = True
            break
        hint = index[known[ranks]].astype(np.int32)
        solution = solve_part(part, hint, height, work=work, time_limit_s=search.seconds_left, seed=search.problem.seed)
        search.seconds_left -= solution.wall_s
        search.cut_off |= solution.cut_off
        proven_bound = solution.lower_bound
        if solution.bins is not None:
            bins[ranks] = np.where(solution.bins >= 0, experts[solution.bins], -1)
        floor = max(floor, float((kernels.loads_of_bins(bins, load) / limits.capacity)[ranks].max()))
    if len(parts) == 1 and limits.distinct:
        search.bounds[layer] = max(search.bounds[layer], min(proven_bound, search.heights[layer]))
    _take_if_better(search, layer, bins)


def _parts_of(search: _Search, bins: npt.NDArray[np.int32]) -> list[Part]:
    """The parts that a legal packing consists of: what each node holds when groups matter, else everything."""
    serving = np.flatnonzero(search.limits.room > 0)
    if not search.layout.nodes:
        return [(serving, np.arange(search.problem.current.num_logical))]
    node_of = search.layout.node_of
    parts = []
    for node in search.layout.nodes:
        ranks = serving[node_of[serving] == node]
        held = np.unique(bins[ranks])
        parts.append((ranks, held[held >= 0].astype(np.int64)))
    return parts


def _take_if_better(search: _Search, layer: int, bins: npt.NDArray[np.int32]) -> None:
    """Turn bins into a row near the live one and keep it when it is lower than what was known."""
    limits, table = search.limits, search.problem.current
    current = table.physical_to_logical[layer]
    row = row_near(bins, current, limits.usable, search.layout.kinds, table.num_logical)
    height = height_of(row, search.loads[layer], limits)
    if height >= search.heights[layer] * (1 - 1e-9):
        return
    plan = search.plans[layer]
    before = search.heights[layer] if plan is None else plan.before
    moves = count_moves(current, row, num_ranks=table.num_ranks, num_logical=table.num_logical)
    search.plans[layer] = LayerPlan(row, before, height, moves)
    search.heights[layer] = height
    search.improved = True


def _result(search: _Search, rows: npt.NDArray[np.int32]) -> RawPlan:
    """The plan with what was proven of the rows that were finally chosen."""
    heights = [height_of(row, load, search.limits) for row, load in zip(rows, search.loads, strict=True)]
    optimal = all(height <= bound * (1 + OPTIMAL_GAP) for height, bound in zip(heights, search.bounds, strict=True))
    claims = []
    for height, bound, load in zip(heights, search.bounds, search.loads, strict=True):
        fair = _fair(search.limits, search.problem, load)
        claims.append(min(bound, height) / fair if fair > 0 else 1.0)
    return RawPlan(
        physical_to_logical=rows,
        lower_bound=tuple(claims),
        status="optimal" if optimal else "feasible" if search.improved else "not_improved",
        cut_off=search.cut_off,
    )
