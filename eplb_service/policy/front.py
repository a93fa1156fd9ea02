"""Pareto fronts of layers (height against moves), joined into plans of a whole table: under limits on moves, or as a front.

A layer's points are rows by ascending moves and falling height. What a step from one point to a later one gains is counted in
tokens of the busiest rank, since that is what every step of the engine waits for; steps are taken by gain per move.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.layer_task import Int32Array
from eplb_service.policy.move_limits import MoveAccount

POINTS_MAX = 24
"""Most plans of a front."""

GAIN_MIN = 1e-9
"""Relative gain in height below which a row is no better: rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A row of a layer. row: shape (P,). moves: new residencies. tokens: work over capacity of the busiest rank."""

    row: Int32Array
    moves: int
    tokens: float


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Going from a layer's chosen point to a later one. worth: tokens gained per move."""

    layer: int
    point: Point
    worth: float


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats: ascending moves, falling height. Of equals the first stays."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.moves, point.tokens)):
        if not kept or point.tokens < kept[-1].tokens * (1.0 - GAIN_MIN):
            kept.append(point)
    return tuple(kept)


def hull(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points of a Pareto front that gain most per move, each against the one before: its convex part."""
    kept: list[Point] = []
    for point in points:
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-2], point):
            kept.pop()
        kept.append(point)
    return tuple(kept)


def _slope(one: Point, other: Point) -> float:
    """Tokens gained per move between two points."""
    return (one.tokens - other.tokens) / max(1, other.moves - one.moves)


def steps_by_worth(fronts: Sequence[Sequence[Point]]) -> list[Step]:
    """All steps along the hulls of the layers' fronts, most tokens per move first; a layer's own steps stay in order."""
    steps = []
    for layer, front in enumerate(fronts):
        points = hull(front)
        steps += [Step(layer, later, _slope(earlier, later)) for earlier, later in itertools.pairwise(points)]
    return sorted(steps, key=lambda step: (-step.worth, step.layer, step.point.moves))


def joined_front(fronts: Sequence[Sequence[Point]], points_max: int = POINTS_MAX) -> list[Int32Array]:
    """Maps of the whole table, shape (L, P), by ascending moves: each of the least mean height for its moves.

    fronts: each layer's Pareto front, its first point the row that costs least. At most points_max maps, spread over the moves.
    """
    chosen = [front[0] for front in fronts]
    states = [tuple(chosen)]
    for step in steps_by_worth(fronts):
        chosen[step.layer] = step.point
        states.append(tuple(chosen))
    totals = np.array([sum(point.moves for point in state) for state in states])
    wanted = np.linspace(totals[0], totals[-1], points_max)
    picks = sorted({int(np.abs(totals - moves).argmin()) for moves in wanted.tolist()})
    return [np.stack([point.row for point in states[pick]]) for pick in picks]


def front_within_limits(problem: PlanningProblem, fronts: Sequence[Sequence[Point]]) -> tuple[Int32Array, ...]:
    """The maps of `joined_front` that keep all limits on moves."""
    return tuple(rows for rows in joined_front(fronts) if MoveAccount(problem).take_all(rows))


def within_limits(fronts: Sequence[Sequence[Point]], account: MoveAccount, start: Sequence[Point]) -> list[Point]:
    """One point a layer such that the limits hold and the tokens gained are about the most.

    start: what each layer holds before any step (taken in the account already where it changes something). Steps along the
    hulls are taken by worth where they fit; then what is left is spent on single points. When few layers may change, only those
    are considered that gain most.
    """
    chosen = list(start)
    order = sorted(range(len(fronts)), key=lambda layer: (-_most_gain(fronts[layer], start[layer]), layer))
    open_layers = set(order[: min(account.layers, len(order))])
    for step in steps_by_worth(fronts):
        layer, point = step.layer, step.point
        if layer in open_layers and point.moves > chosen[layer].moves and account.take(layer, point.row):
            chosen[layer] = point
    for layer in sorted(open_layers, key=lambda layer: (-_most_gain(fronts[layer], chosen[layer]), layer)):
        for point in reversed(fronts[layer]):
            if point.tokens >= chosen[layer].tokens or point.moves <= chosen[layer].moves:
                break
            if account.take(layer, point.row):
                chosen[layer] = point
                break
    return chosen


def _most_gain(front: Sequence[Point], chosen: Point) -> float:
    """Tokens that the best point of a front gains over the chosen one."""
    return chosen.tokens - front[-1].tokens
