"""Rows for nearest dispatch from rows for even split: the same copies are far from even where neighbours use the nearest one.

Each row is annealed without regard to moves: few hops and little for static tables to misplace, under a height limit that is
near perfect balance; where that is out of reach, the least height.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from eplb_service.moves import count_moves
from eplb_service.policy.anneal_routes import routes_of
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_search import MANY, LayerSearch, seed_of
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import Limits
from eplb_service.policy.move_limits import LayerPlan
from eplb_service.policy.task_layers import is_met

NEAR_BALANCE = 1.003
"""Imbalance that is as good as perfect: at or below it a row stays, and fewer hops are worth more than better balance."""

STEPS_PER_SLOT = 600
"""Annealing steps for each usable slot of a layer, when the problem gives no work budget."""

GAIN_MIN = 1e-9
"""Relative gain in height below which a row is no better: rounding."""


def nearest_plans(
    problem: PlanningProblem, limits: Limits, plans: list[LayerPlan | None], expired: Callable[[], bool]
) -> tuple[list[LayerPlan | None], bool]:
    """Plans of layers under nearest dispatch from plans for even split; None = the current row stays. Length L.

    An idle layer stays as it is planned, and so does one whose row keeps to other homes of strict groups than the task's.
    Returns also whether the time was over before the steps were.
    """
    table, layout = problem.current, Layout.of(problem, limits)
    steps = STEPS_PER_SLOT * limits.num_slots
    if problem.work_budget is not None:
        steps = problem.work_budget // table.num_layers
    limit = max(NEAR_BALANCE, problem.max_imbalance or NEAR_BALANCE)
    result, cut_off = list(plans), False
    for layer, plan in enumerate(plans):
        task = layer_task(problem, limits, layout, layer)
        start = task.held if plan is None else plan.row.reshape(task.held.shape)
        if not task.load.any() or not is_met(task, start):
            continue
        intake_max = np.full(task.num_ranks, MANY, np.int64)
        search = LayerSearch(task, start, seed_of(problem.seed, task.layer_id), MANY, intake_max, routes_of(problem, layer))
        usable = bool((task.held == table.physical_to_logical[layer].reshape(task.held.shape)).all())
        live = search.found(task.held[task.usable]) if usable and is_met(task, task.held) else None
        if live is not None and live.height <= limit * (1.0 + GAIN_MIN):
            result[layer] = None
            continue
        low = search.cheapest_routes(limit, steps, expired)
        if low is None:
            search.ignore_static_tables()
            low = search.lowest(search.lowest_known(), np.inf, steps, expired)
        cut_off |= search.cut_off
        if live is not None and live.height <= low.height * (1.0 + GAIN_MIN):
            result[layer] = None
            continue
        row = search.row(low.slots)
        before = live.height * task.fair if live is not None else np.inf if plan is None else plan.before
        moves = count_moves(table.physical_to_logical[layer], row, num_ranks=table.num_ranks, num_logical=table.num_logical)
        result[layer] = LayerPlan(row, before, low.height * task.fair, moves)
    return result, cut_off
