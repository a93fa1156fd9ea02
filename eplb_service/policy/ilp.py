"""The exact policy: CP-SAT for each layer, started from a heuristic's row, never worse than it, honest about what it proved.

Without a target it looks for the best balance, from greedy's rows; with one for the fewest moves to it, from the better of
greedy's and minmove's rows. A layer is proven by combinatorial bounds (`bounds`), by the bound on moves (`move_bounds`) or by
the exact model (`packing_model`); one that is too large for the model is bettered a few ranks at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from eplb_service.clock import Clock, SystemClock
from eplb_service.dispatch import Dispatch
from eplb_service.moves import align_slots, count_moves, residencies
from eplb_service.policy.base import Effort, PlanningProblem, RawPlan
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.exact_layer import ExactLayer
from eplb_service.policy.greedy import GreedyPolicy, plan_layers
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import Int32Array, LayerTask, layer_task
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.matching import row_near
from eplb_service.policy.minmove import MinMovePolicy
from eplb_service.policy.move_limits import LayerPlan, packed, within_move_limits
from eplb_service.policy.packing_model import VARIABLES_MAX
from eplb_service.policy.shares import with_shares

WORK = {Effort.QUICK: 1.0, Effort.NORMAL: 6.0, Effort.THOROUGH: 40.0}
"""CP-SAT's deterministic time for all layers, about seconds, when the problem gives no work budget."""

WORK_PER_LAYER = 4.0
"""Most for one layer then."""

HINT_SHARE = 0.4
"""Share of the time limit that minmove may take for rows to start from."""

ROUNDING = 1e-9
"""Relative difference of heights that is rounding alone."""


class IlpPolicy:
    """Proves or improves; see the module.

    Status: `optimal` when every layer is proven (to have the best balance, or with a target the fewest moves), `feasible` when
    some layer is better than the row it started from but not all are proven, `not_improved` when neither; `limited` when limits
    on moves kept layers from their better row. What was too large for the exact model stands behind the word, with numbers.
    work_budget: thousandths of CP-SAT's deterministic time, over all layers.
    """

    name = "ilp"
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *, clock: Clock | None = None) -> None:
        """Clock: for the time limit."""
        self._clock = clock or SystemClock()

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts, groups or moves do not fit the constraints."""
        if problem.dispatch not in (Dispatch.EVEN, Dispatch.HASHED):  # the models know even split only
            return replace(GreedyPolicy(clock=self._clock).plan(problem), status="not_improved")
        table = _TablePlan(problem, self._clock, self._clock.monotonic() + problem.time_limit_s)
        table.search()
        return table.result()


@dataclass(slots=True, eq=False)
class _TablePlan:
    """The plan of a table in the making. hints: rows to start from, shape (L, P); plans: greedy's."""

    problem: PlanningProblem
    clock: Clock
    deadline: float
    limits: Limits = field(init=False)
    layout: Layout = field(init=False)
    plans: list[LayerPlan | None] = field(init=False)
    hints: Int32Array = field(init=False)
    layers: list[ExactLayer] = field(init=False)

    def __post_init__(self) -> None:
        """Rows to start from, and a search for each layer."""
        problem = self.problem
        self.limits = limits_of(problem)
        self.layout = Layout.of(problem, self.limits)
        self.plans = plan_layers(problem, self.limits, problem.total_loads)
        self.hints = problem.current.physical_to_logical.copy()
        for layer, plan in enumerate(self.plans):
            if plan is not None:
                self.hints[layer] = plan.row
        bounds = imbalance_bounds(problem, self.limits)
        free = replace(problem, constraints=replace(problem.constraints, num_groups=None, group_price=None))
        free_layout = Layout.of(free, self.limits)
        tasks = [layer_task(free, self.limits, free_layout, layer) for layer in range(len(self.plans))]
        if problem.max_imbalance is not None:
            self._take_moves_hints(tasks, problem.max_imbalance)
        self.layers = [self._layer(layer, task, bounds[layer]) for layer, task in enumerate(tasks)]

    def _seconds_left(self) -> float:
        return self.deadline - self.clock.monotonic()

    def _take_moves_hints(self, tasks: list[LayerTask], target: float) -> None:
        """Minmove's row where it is better: at the target with fewer moves, or nearer to it."""
        seconds = max(0.0, self._seconds_left() * HINT_SHARE)
        quick = replace(self.problem, certify=False, front=False, work_budget=None, time_limit_s=seconds)
        rows = MinMovePolicy(clock=self.clock).plan(quick).physical_to_logical
        for layer, task in enumerate(tasks):
            mine, other = (self._worth(task, row, target) for row in (self.hints[layer], rows[layer]))
            if other < mine:
                self.hints[layer] = rows[layer]

    def _worth(self, task: LayerTask, row: Int32Array, target: float) -> tuple[float, int]:
        """What makes a row better than another: height above the target, then moves."""
        height = float(task.heights(row.reshape(task.held.shape)).max())
        held = residencies(row, num_ranks=task.num_ranks, num_logical=task.num_logical)
        return max(0.0, height - target * task.fair * (1 + ROUNDING)), int((held & (task.price >= 1.0)).sum())

    def _layer(self, layer: int, task: LayerTask, bound: float) -> ExactLayer:
        """The search of one layer. Soft groups: prices and homes are those of the layer's own task."""
        problem, size = self.problem, task.num_logical
        price, off_home = task.price, np.zeros(task.price.shape, np.bool_)
        groups = problem.constraints.num_groups or 1
        strict = has_strict_groups(problem)
        if groups > 1 and not strict:
            price = layer_task(problem, self.limits, self.layout, layer).price
            off_home = price > task.price
        return ExactLayer(
            task=task,
            price=price,
            group_of=np.arange(size) // (size // groups) if strict else None,
            off_home=off_home,
            target=problem.max_imbalance,
            bins=packed(self.hints[layer].reshape(task.held.shape)),
            bound=bound * task.fair,
            seed=problem.seed,
            seconds_left=self._seconds_left,
        )

    def search(self) -> None:
        """Search layer by layer, those with the largest gap first."""
        order = sorted(range(len(self.layers)), key=lambda layer: (-self.layers[layer].gap, layer))
        open_layers = [layer for layer in order if not self.layers[layer].optimal]
        given = self.problem.work_budget
        work = WORK[self.problem.effort] if given is None else given / 1000
        for number, layer in enumerate(open_layers):
            share = work / (len(open_layers) - number)
            work -= self.layers[layer].search(share if given is not None else min(share, WORK_PER_LAYER))

    def result(self) -> RawPlan:
        """The plan with what was proven of the rows that were finally chosen."""
        plans = [self._plan_of(layer) for layer in range(len(self.layers))]
        rows, limited = within_move_limits(self.problem, self.limits, plans)
        claims, proven = [], True
        for layer, row in zip(self.layers, rows, strict=True):
            layer.bins = packed(row.reshape(layer.task.held.shape))
            claims.append(min(layer.bound, layer.height) / layer.task.fair if layer.task.fair > 0 else 1.0)
            proven &= layer.optimal
        targeted = self.problem.max_imbalance is not None
        return RawPlan(
            physical_to_logical=rows,
            shares=with_shares(self.problem, rows),
            lower_bound=tuple(claims),
            moves_lower_bound=tuple(layer.moves_bound or 0 for layer in self.layers) if targeted else (),
            status="limited" if limited else self._status(proven=proven),
            cut_off=any(layer.cut_off for layer in self.layers),
        )

    def _plan_of(self, layer: int) -> LayerPlan | None:
        """The best row of a layer, its experts in the slots they hold; None = the live row stays."""
        known, current = self.layers[layer], self.problem.current.physical_to_logical[layer]
        task, plan = known.task, self.plans[layer]
        row = self.hints[layer]
        if known.improved and known.by_moves:
            row = align_slots(current, known.bins.reshape(-1), num_ranks=task.num_ranks, usable=task.usable.reshape(-1))
        elif known.improved:
            row = row_near(known.bins, current, task.usable, self.layout.kinds, task.num_logical)
        if np.array_equal(row, current):
            return None
        before = float(task.heights().max()) if plan is None else plan.before
        moves = count_moves(current, row, num_ranks=task.num_ranks, num_logical=task.num_logical)
        return LayerPlan(row, before, float(task.heights(row.reshape(task.held.shape)).max()), moves)

    def _status(self, *, proven: bool) -> str:
        """The word, and what was too large for the exact model."""
        word = "optimal" if proven else "feasible" if any(layer.improved for layer in self.layers) else "not_improved"
        large = [layer.too_large for layer in self.layers if layer.too_large and not layer.optimal]
        if not large:
            return word
        return (
            f"{word} ({len(large)} of {len(self.layers)} layers too large for the exact model:"
            f" {max(large)} variables, at most {VARIABLES_MAX})"
        )
