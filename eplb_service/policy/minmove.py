"""The minimal-move policy: every layer at or under a target with the fewest residencies moved, then better balance for free.

Each layer is searched by annealing from what is live (`layer_search`), by itself: its own seed and steps, so that neither the
order of layers nor the number of threads matters. A layer at or under the target stays as it is. Under limits on moves that are
too small for the target, the layers' Pareto fronts are joined into the plan that gains most within them (`front`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from eplb_service.clock import Clock, SystemClock
from eplb_service.dispatch import Dispatch
from eplb_service.policy.anneal_routes import routes_of
from eplb_service.policy.base import Effort, PlanningProblem, RawPlan
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.colocate import colocated
from eplb_service.policy.front import Point, front_within_limits, within_limits
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_plan import LayerPlanner
from eplb_service.policy.layer_search import MANY, seed_of
from eplb_service.policy.layer_task import Int32Array, layer_task
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.move_bounds import certificates
from eplb_service.policy.move_limits import MoveAccount, layers_to_mend
from eplb_service.policy.shares import front_shares, with_shares

DEFAULT_TARGET = 1.02
"""Imbalance to reach when the problem names none."""

STEPS = {Effort.QUICK: 8_000_000, Effort.NORMAL: 44_000_000, Effort.THOROUGH: 400_000_000}
"""Annealing steps over all layers: what the standard work (58 layers of 288 slots) takes 1, 5 and 30 s for on one core."""

STEPS_PER_SLOT = {Effort.QUICK: 600, Effort.NORMAL: 3_000, Effort.THOROUGH: 24_000}
"""Steps for each usable slot of a layer that are worth while: small tables take less than all of `STEPS`."""

STEPS_PER_LAYER_MIN = 60_000
"""Steps of a small layer when no work budget is given."""

QUICK_LOOK, LONG_LOOK, SECOND_LOOK, LEVELLING = 0.15, 0.6, 0.15, 0.1
"""Shares of a layer's steps that the passes over the layers take."""

LAST_LOOK = 0.05
"""Share of all steps that is kept for the layers in which no row at the target was found: a few have as many again."""

WITH_FRONT = 0.6
"""Share of the steps for the plan itself when a front is needed too."""


def steps_of(problem: PlanningProblem, limits: Limits) -> int:
    """Annealing steps of each layer, before the last look."""
    layers = problem.current.num_layers
    budget = STEPS[problem.effort] if problem.work_budget is None else problem.work_budget
    steps = int(budget * (1.0 - LAST_LOOK)) // layers
    if problem.work_budget is not None:
        return steps
    return min(steps, max(STEPS_PER_LAYER_MIN, STEPS_PER_SLOT[problem.effort] * limits.num_slots))


class MinMovePolicy:
    """Fewest moves to a target; see the module.

    Status: `target_met`, or `optimal` when the certificates prove that no plan there takes fewer moves; `within_noise` when the
    only layers above the target are so by no more than sampling noise, and stay as they are; `target_missed` when no search
    reached it in some layer (it then has the best balance found, with few moves); `limited` when limits on moves kept some
    layer above it. work_budget: annealing steps over all layers.
    """

    name = "minmove"
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *, threads: int = 1, clock: Clock | None = None) -> None:
        """Threads: layers planned at a time; the plan is the same with any number. Clock: for the time limit."""
        self._threads = threads
        self._clock = clock or SystemClock()

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts, groups or moves do not fit the constraints."""
        deadline = self._clock.monotonic() + problem.time_limit_s
        table = _TablePlan(problem, lambda: self._clock.monotonic() >= deadline, self._threads)
        table.search()
        return table.result()


@dataclass(slots=True, eq=False)
class _TablePlan:
    """The plan of a table in the making."""

    problem: PlanningProblem
    expired: Callable[[], bool]
    threads: int
    limits: Limits = field(init=False)
    planners: list[LayerPlanner] = field(init=False)
    target: float = field(init=False)
    cut_off: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """A planner for each layer."""
        problem = self.problem
        self.limits = limits_of(problem)
        self.target = problem.max_imbalance or DEFAULT_TARGET
        layout, steps = Layout.of(problem, self.limits), steps_of(problem, self.limits)
        account, bounds = MoveAccount(problem), imbalance_bounds(problem, self.limits)
        intake_max = np.full(problem.current.num_ranks, min(account.per_rank, MANY), np.int64)
        self.planners = [
            LayerPlanner(
                task=layer_task(problem, self.limits, layout, layer),
                target=self.target,
                bound=bounds[layer],
                steps=steps,
                seed=seed_of(problem.seed, layer_id),
                moves_max=min(account.per_layer, account.moves, MANY),
                intake_max=intake_max,
                even=problem.dispatch in (Dispatch.EVEN, Dispatch.HASHED),
                kinds=layout.kinds,
                routes=routes_of(problem, layer),
            )
            for layer, layer_id in enumerate(problem.current.layer_ids)
        ]

    def search(self) -> None:
        """Run the passes, each over all layers, so that time that runs out leaves every layer something."""
        limited = MoveAccount(self.problem).binds
        share = WITH_FRONT if self.problem.front or limited else 1.0
        self._each(lambda planner: planner.look(QUICK_LOOK * share, self.expired))
        self._each(lambda planner: planner.look(LONG_LOOK * share, self.expired))
        self._each(lambda planner: planner.look_again(SECOND_LOOK * share, self.expired))
        missed = [planner for planner in self.planners if planner.missed]
        if missed:
            more = min(1.0, LAST_LOOK * len(self.planners) / len(missed))
            self._each(lambda planner: planner.last_look(more * share, self.expired))
        self._each(lambda planner: planner.level(LEVELLING * share, self.expired))
        if self.problem.front or (limited and not self._fits()):
            self._each(lambda planner: planner.widen(1.0 - share, self.expired))

    def _each(self, task: Callable[[LayerPlanner], None]) -> None:
        """One pass over the layers."""
        busy = [planner for planner in self.planners if not planner.settled]
        if self.threads > 1 and len(busy) > 1:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(task, busy))
        else:
            for planner in busy:
                task(planner)

    def _fits(self) -> bool:
        """Whether the chosen rows keep all limits on moves."""
        return MoveAccount(self.problem).take_all(planner.row for planner in self.planners)

    def result(self) -> RawPlan:
        """The plan, with a front when asked."""
        limited = not self._fits()
        rows = self._limited_rows() if limited else np.stack([planner.row for planner in self.planners])
        rows, cut_short = colocated(self.problem, self.limits, rows, target=self.target, expired=self.expired)
        front = self._front() if self.problem.front else ()
        bounds = certificates(self.problem, self.target, rows, expired=self.expired) if self.problem.certify else ()
        return RawPlan(
            physical_to_logical=rows,
            shares=with_shares(self.problem, rows),
            front=front,
            front_shares=front_shares(self.problem, front),
            moves_lower_bound=bounds,
            status=self._status(bounds, limited=limited),
            cut_off=cut_short or any(planner.search.cut_off for planner in self.planners),
        )

    def _status(self, bounds: tuple[int, ...], *, limited: bool) -> str:
        """The status word. Bounds: on the moves of each layer, () = not asked for."""
        if limited:
            return "limited"
        if all(planner.met for planner in self.planners):
            moved = sum(planner.chosen.moves for planner in self.planners)
            return "optimal" if bounds and moved == sum(bounds) else "target_met"
        return "within_noise" if all(planner.met or planner.excused for planner in self.planners) else "target_missed"

    def _limited_rows(self) -> Int32Array:
        """The rows that gain most within the limits on moves, shape (L, P)."""
        account = MoveAccount(self.problem)
        start, open_layers = self._mended(account)
        fronts = [
            planner.front(start[layer]) if layer in open_layers else (start[layer],)
            for layer, planner in enumerate(self.planners)
        ]
        chosen = within_limits(fronts, account, start)
        for layer in sorted(open_layers, key=lambda layer: (-self.planners[layer].gap(chosen[layer]), layer)):
            planner, taken = self.planners[layer], chosen[layer]
            if planner.settled or not account.may_change(layer):
                continue
            better = planner.improve(taken, taken.moves + account.moves_left(layer), account.intake_left(layer), self.expired)
            if better.tokens < taken.tokens and account.take(layer, better.row):
                chosen[layer] = better
        return np.stack([point.row for point in chosen])

    def _mended(self, account: MoveAccount) -> tuple[list[Point], set[int]]:
        """What each layer starts from when moves are short, taken in the account, and the layers that may go on from there.

        Rows that cannot stay come first, then those that break a promise; of these, what does not fit stays as it is. Raises
        InvalidInputError when not even the moves fit that make every expert reachable.
        """
        start = [planner.held for planner in self.planners]
        open_layers = {layer for layer, planner in enumerate(self.planners) if planner.legal}
        broken = [layer for layer, planner in enumerate(self.planners) if not planner.legal]
        for layer, must in layers_to_mend(self.problem, self.limits, broken):
            rest = self.planners[layer].point(self.planners[layer].search.rest)
            if account.mend(layer, rest.row, must=must):
                start[layer] = rest
                open_layers.add(layer)
        return start, open_layers

    def _front(self) -> tuple[Int32Array, ...]:
        """Maps of the whole table along the front that keep all limits."""
        fronts = [planner.front(planner.point(planner.search.rest)) for planner in self.planners]
        return front_within_limits(self.problem, fronts)
