"""The robust policy: balance in every scenario of the load that the sub-windows suggest, not of their average alone.

A plan on sums treats an expert that is busy now and then like one that is busy always, and what balances on average leaves
some rank behind in every single step. Here each layer is searched by annealing against the sub-windows themselves
(`scenarios`), from what is live, with a price on moves: a change must lower what the busiest rank is expected to carry by more
than its moves are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from eplb_service.clock import Clock, SystemClock
from eplb_service.dispatch import Dispatch
from eplb_service.policy.base import Effort, LoadShape, PlanningProblem, RawPlan
from eplb_service.policy.front import Point, front_within_limits, within_limits
from eplb_service.policy.greedy import plan_layers
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_search import seed_of
from eplb_service.policy.layer_task import Float64Array, Int32Array, layer_task
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.minmove import MinMovePolicy
from eplb_service.policy.move_limits import MoveAccount, layers_to_mend
from eplb_service.policy.robust_layer import ScenarioLayer
from eplb_service.policy.scenarios import scenarios_of
from eplb_service.policy.shares import front_shares, with_shares
from eplb_service.policy.task_layers import is_met

WORTH_OF_LAYER = 0.1
"""Fall of expected imbalance that moving all slots of a layer must bring; one move of N slots must bring 1/N of it."""

FRONT_WORTHS = (4.0, 2.0, 1.0, 0.5, 0.2, 0.0)
"""What moves must bring, in usual worths, in the searches for a layer's whole front."""

STEPS_PER_SLOT = {Effort.QUICK: 100, Effort.NORMAL: 500, Effort.THOROUGH: 3_000}
"""Annealing steps for each usable slot of a layer when no work budget is given."""


class RobustPolicy:
    """Balance over scenarios; see the module.

    Status: `heuristic`; with a target `target_met` or `target_missed`, by the expected imbalance; `limited` when limits on
    moves kept some layer from its row. work_budget: annealing steps over all layers. It plans as for even split whatever the
    dispatch.
    """

    name = "robust"
    options: Mapping[str, str] = MappingProxyType({})
    load_shape = LoadShape.SERIES

    def __init__(self, *, clock: Clock | None = None) -> None:
        """Clock: for the time limit."""
        self._clock = clock or SystemClock()

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts, groups or moves do not fit the constraints."""
        deadline = self._clock.monotonic() + problem.time_limit_s
        table = _Table(problem, self._clock)
        table.start()
        table.search(lambda: self._clock.monotonic() >= deadline)
        return table.result()


@dataclass(slots=True, eq=False)
class _Table:
    """The plan of a table in the making. mean: of the scenarios, shape (L, E). fronts: points of each layer, by moves."""

    problem: PlanningProblem
    clock: Clock
    mean: Float64Array = field(init=False)
    limits: Limits = field(init=False)
    layers: list[ScenarioLayer] = field(init=False)
    fronts: list[tuple[Point, ...]] = field(init=False, default_factory=list)
    cut_off: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Scenarios and a task for each layer."""
        problem, table = self.problem, self.problem.current
        self.limits = limits_of(problem)
        layout = Layout.of(problem, self.limits)
        scenarios, weights = scenarios_of(problem.loads)
        self.layers = [
            ScenarioLayer.of(
                layer_task(problem, self.limits, layout, layer), scenarios[:, layer], weights, table.physical_to_logical[layer]
            )
            for layer in range(table.num_layers)
        ]
        self.mean = np.tensordot(weights, scenarios, axes=1)

    def start(self) -> None:
        """Begin with a plan for the scenarios' mean where that is better than what is live, moves counted."""
        problem = replace(
            self.problem, loads=self.mean[None], source_loads=None, together=None, dispatch=Dispatch.EVEN, certify=False
        )
        if problem.from_nothing:
            plans = plan_layers(problem, self.limits, self.mean)
            rows = [layer.start if plan is None else plan.row for layer, plan in zip(self.layers, plans, strict=True)]
        elif problem.work_budget == 0:
            return
        else:
            short = replace(
                problem,
                effort=Effort.QUICK,
                front=False,
                work_budget=None if problem.work_budget is None else problem.work_budget // 4,
                time_limit_s=problem.time_limit_s / 4,
            )
            rows = list(MinMovePolicy(clock=self.clock).plan(short).physical_to_logical)
        for layer, row in zip(self.layers, rows, strict=True):
            if self._priced(layer, row) < self._priced(layer, layer.start):
                layer.start = row

    def _priced(self, layer: ScenarioLayer, row: Int32Array) -> float:
        """Expected imbalance of a row, and what its moves are worth; infinite for a row that is not legal."""
        bins = np.asarray(row, np.int32).reshape(layer.task.held.shape)
        if not is_met(layer.task, bins):
            return np.inf
        worth = 0.0 if self.problem.from_nothing else self._worth(layer)
        return layer.expected(row) + worth * layer.moves_of(row)

    def search(self, expired: Callable[[], bool]) -> None:
        """Find the points of every layer; a layer that time does not suffice for has only its start."""
        problem = self.problem
        whole = problem.front or problem.max_imbalance is not None or MoveAccount(problem).binds
        for layer, layer_id in zip(self.layers, problem.current.layer_ids, strict=True):
            start = Point(layer.start, layer.moves_of(layer.start), layer.expected(layer.start))
            if layer.idle or (self.cut_off or expired()):
                self.cut_off |= not layer.idle
                self.fronts.append((start,))
                continue
            usual = self._worth(layer)
            worths = tuple(usual * factor for factor in FRONT_WORTHS) if whole else (0.0 if problem.from_nothing else usual,)
            steps = STEPS_PER_SLOT[problem.effort] * self.limits.num_slots
            if problem.work_budget is not None:
                steps = problem.work_budget // len(self.layers)
            self.fronts.append(layer.search(worths, usual_worth=usual, steps=steps, seed=seed_of(problem.seed, layer_id)))

    def _worth(self, layer: ScenarioLayer) -> float:
        """What one move must bring."""
        return WORTH_OF_LAYER / max(1, int(layer.task.room.sum()))

    def result(self) -> RawPlan:
        """The plan, with a front when asked."""
        problem = self.problem
        chosen = [self._choose(layer, front) for layer, front in zip(self.layers, self.fronts, strict=True)]
        limited = not MoveAccount(problem).take_all(point.row for point in chosen)
        if limited:
            chosen = self._within_limits(chosen)
        rows = np.stack([point.row for point in chosen])
        front = self._joined() if problem.front else ()
        return RawPlan(
            physical_to_logical=rows,
            shares=with_shares(problem, rows),
            front=front,
            front_shares=front_shares(problem, front),
            status="limited" if limited else self._status(chosen),
            cut_off=self.cut_off,
        )

    def _choose(self, layer: ScenarioLayer, front: tuple[Point, ...]) -> Point:
        """The point to go to: what moves are worth, or the fewest moves to the target (the least cost when none is there)."""
        target = self.problem.max_imbalance
        if self.problem.from_nothing:
            return front[-1]
        if target is None:
            worth = self._worth(layer)
            return min(front, key=lambda point: (point.tokens + worth * point.moves, point.moves))
        return next((point for point in front if layer.expected(point.row) <= target), front[-1])

    def _status(self, chosen: list[Point]) -> str:
        """How well the plan did."""
        target = self.problem.max_imbalance
        if target is None:
            return "heuristic"
        met = all(layer.expected(point.row) <= target for layer, point in zip(self.layers, chosen, strict=True))
        return "target_met" if met else "target_missed"

    def _within_limits(self, wanted: list[Point]) -> list[Point]:
        """Points that keep the limits on moves: what must be mended, then what gains most tokens per move, to `wanted` at most.

        Raises InvalidInputError when not even the moves fit that make every expert reachable.
        """
        account = MoveAccount(self.problem)
        rows = self.problem.current.physical_to_logical
        start, fronts = [], []
        broken = [layer for layer, state in enumerate(self.layers) if not state.legal]
        mended = {
            layer
            for layer, must in layers_to_mend(self.problem, self.limits, broken)
            if account.mend(layer, self.layers[layer].rest, must=must)
        }
        for layer, state in enumerate(self.layers):
            is_open = state.legal or layer in mended
            row = state.rest if is_open else rows[layer]
            first = Point(row, state.moves_of(row), state.expected(row) * state.fair)
            start.append(first)
            points = [first]
            if is_open:
                points += [
                    Point(point.row, point.moves, point.tokens * state.fair)
                    for point in self.fronts[layer]
                    if first.moves < point.moves <= wanted[layer].moves
                ]
            fronts.append(tuple(points))
        return within_limits(fronts, account, start)

    def _joined(self) -> tuple[Int32Array, ...]:
        """Maps of the whole table along the front that keep all limits."""
        scaled = [
            tuple(Point(point.row, point.moves, point.tokens * layer.fair) for point in front)
            for layer, front in zip(self.layers, self.fronts, strict=True)
        ]
        return front_within_limits(self.problem, scaled)
