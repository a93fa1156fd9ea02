"""Lower bounds on moves: how many residencies must be new in any placement that is balanced enough, under even split.

One slot a rank: exact (`one_slot`). In general the better of two bounds: experts whose copies are on too few ranks for their
load (each missing one is a move), and a dual bound that weighs for every rank what it can keep and take in against what that
costs elsewhere (`move_deals`, `move_prices`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from eplb_service.dispatch import Dispatch
from eplb_service.moves import residencies
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import Int32Array, LayerTask, layer_task
from eplb_service.policy.limits import Limits, limits_of, row_fault
from eplb_service.policy.move_deals import EXCESS, Market, free_residencies, ranks_needed
from eplb_service.policy.one_slot import fewest_moves_one_slot

WORK_PER_LAYER = 0.5
"""Work for one layer's bound when nothing else is said: about 0.2 s for 288 slots on 32 ranks."""

CELLS = 1_000_000_000
"""Table cells of one unit of work: less than half a second on one core of 2025."""

COARSE_SHARE = 0.5
"""Share of the work spent on tables with coarse loads, where steps cost little."""

FIRST_LENGTH, SECOND_LENGTH = 0.5, 0.05
"""Relative length of the first step, on coarse and on fine tables."""


def moves_bound(task: LayerTask, target: float, *, work: float = WORK_PER_LAYER, enough: int | None = None) -> int:
    """A proven lower bound on the moves of any legal row of the layer whose imbalance is at most `target`, under even split.

    Moves are residencies that `task.held` lacks; those of price below 1 count as there. When no row reaches the target the
    bound means nothing. work: see `CELLS`; equal work gives an equal bound on any machine. enough: moves that are known to do;
    the search ends when they are proven to be the fewest.
    """
    height = target * task.fair
    if _held_does(task, height):
        return 0
    if enough is None:
        enough = int(task.room.sum())
    exact = _exact(task, target)
    if exact is not None:
        return exact
    missing = int(np.maximum(0, ranks_needed(task, height) - free_residencies(task).sum(axis=0)).sum())
    if not task.distinct or missing >= enough:
        return missing
    return max(missing, _dual_bound(task, height, work, enough))


def _held_does(task: LayerTask, height: float) -> bool:
    """Whether keeping everything is good enough, with whatever rules it breaks."""
    covered = np.bincount(task.held[task.held >= 0], minlength=task.num_logical) > 0
    return bool(covered.all() and task.heights().max() <= height * (1 + EXCESS))


def _exact(task: LayerTask, target: float) -> int | None:
    """The fewest moves where no rank has two slots and moves are all that has a price; None elsewhere."""
    if int(task.room.max()) > 1 or ((task.price != 0.0) & (task.price != 1.0)).any():
        return None
    row = fewest_moves_one_slot(task, target)
    if row is None or float(task.heights(row).max()) > target * task.fair * (1 + EXCESS):
        return None
    experts = row.max(axis=1)
    ranks = np.flatnonzero(experts >= 0)
    return round(float(task.price[ranks, experts[ranks]].sum()))


def _dual_bound(task: LayerTask, height: float, work: float, enough: int) -> int:
    """The bound by prices, first on coarse tables, then on fine ones. 0 when some expert cannot have the copies it needs."""
    market = Market.of(task, height)
    if market is None:
        return 0
    budget = max(1, int(work * CELLS))
    prices, cells = market.first_prices()
    used = market.climb(prices, coarse=True, cells=int(budget * COARSE_SHARE) - cells, length=FIRST_LENGTH, enough=enough)
    market.climb(prices, coarse=False, cells=budget - used - cells, length=SECOND_LENGTH, enough=enough)
    return max(0, prices.moves)


def certificates(
    problem: PlanningProblem,
    target: float,
    rows: Int32Array,
    *,
    work: float = WORK_PER_LAYER,
    expired: Callable[[], bool] = bool,
) -> tuple[int, ...]:
    """Per layer, a lower bound on the moves of any placement with an imbalance of at most `target`. Length L.

    rows: a plan, shape (L, P); a layer that it does not bring to the target is bounded for the balance that it does reach
    (which any placement at the target has too). Groups and their prices are left out: which node a group goes to is free.
    Nothing (0) is claimed under dispatch other than even split, and for a live row that breaks rules which limits on moves
    may keep it from mending. work: for each layer. expired: whether the time is over; layers still to come get no claim (0).
    """
    layers = problem.current.num_layers
    if problem.dispatch not in (Dispatch.EVEN, Dispatch.HASHED):
        return (0,) * layers
    limits = limits_of(problem)
    ungrouped = replace(problem, constraints=replace(problem.constraints, num_groups=None, group_price=None))
    layout = Layout.of(ungrouped, limits)
    tasks = [layer_task(ungrouped, limits, layout, layer) for layer in range(layers)]
    return tuple(
        0 if expired() else _certificate(task, target, row.reshape(task.held.shape), limits, work)
        for task, row in zip(tasks, rows, strict=True)
    )


def _certificate(task: LayerTask, target: float, row: Int32Array, limits: Limits, work: float) -> int:
    """The bound of one layer whose plan is the row."""
    if task.fair <= 0 or row_fault(task.held.reshape(-1), limits, task.num_logical) is not None:
        return 0
    there = residencies(row.reshape(-1), num_ranks=task.num_ranks, num_logical=task.num_logical)
    moves = int((there & (task.price > 0)).sum())
    reached = float(task.heights(row).max()) / task.fair
    return min(moves, moves_bound(task, max(target, reached), work=work, enough=moves))
