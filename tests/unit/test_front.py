"""Fronts of layers, and plans joined from them, against slow versions that try everything."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem
from eplb_service.policy.front import Point, hull, joined_front, pareto, steps_by_worth, within_limits
from eplb_service.policy.move_limits import MoveAccount
from eplb_service.topology import Topology

NUM_SLOTS = 6


def points_of(pairs: list[tuple[int, float]]) -> list[Point]:
    return [Point(np.arange(NUM_SLOTS, dtype=np.int32), moves, tokens) for moves, tokens in pairs]


PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40).map(float)), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(PAIRS)
def test_front_holds_exactly_what_no_other_point_beats(pairs: list[tuple[int, float]]) -> None:
    front = pareto(points_of(pairs))
    kept = {(point.moves, point.tokens) for point in front}
    for moves, tokens in pairs:
        beaten = any(m <= moves and t <= tokens and (m, t) != (moves, tokens) for m, t in pairs)
        assert ((moves, tokens) in kept) == (not beaten)
    assert [point.moves for point in front] == sorted(point.moves for point in front)


@settings(max_examples=100, deadline=None)
@given(PAIRS)
def test_hull_gains_less_and_less_per_move_and_keeps_both_ends(pairs: list[tuple[int, float]]) -> None:
    front = pareto(points_of(pairs))
    convex = hull(front)
    assert (convex[0], convex[-1]) == (front[0], front[-1])
    slopes = [(a.tokens - b.tokens) / (b.moves - a.moves) for a, b in itertools.pairwise(convex)]
    assert slopes == sorted(slopes, reverse=True)
    for point in front:
        below = [p.tokens for p in convex if p.moves == point.moves]
        assert not below or below[0] == point.tokens


def layer_points(layer_rows: list[tuple[tuple[int, ...], float]]) -> list[Point]:
    linear = np.arange(NUM_SLOTS)
    points = []
    for row, tokens in layer_rows:
        array = np.array(row, np.int32)
        moves = len(set(row[:3]) - set(linear[:3])) + len(set(row[3:]) - set(linear[3:]))
        points.append(Point(array, moves, tokens))
    return points


ROWS = [(0, 1, 2, 3, 4, 5), (3, 1, 2, 0, 4, 5), (3, 4, 2, 0, 1, 5), (3, 4, 5, 0, 1, 2)]
"""Rows that move 0, 2, 4 and 6 experts."""


def account_of(num_layers: int, constraints: Constraints) -> MoveAccount:
    table = Table.linear(model="m", layer_ids=tuple(range(num_layers)), num_logical=6, rank_ids=(0, 1), slots_per_rank=3)
    problem = PlanningProblem(
        loads=np.ones((1, num_layers, 6)), topology=Topology.regular(num_ranks=2), current=table, constraints=constraints
    )
    return MoveAccount(problem)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_joined_plans_keep_the_limits_and_lose_at_most_one_step_against_trying_everything(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 3))
    fronts = []
    for _ in range(num_layers):
        gains = data.draw(st.lists(st.integers(1, 30), min_size=3, max_size=3))
        heights = (100.0 - np.cumsum([0, *gains])).tolist()
        fronts.append(pareto(layer_points(list(zip(ROWS, heights, strict=True)))))
    most = data.draw(st.integers(0, 6 * num_layers))
    start = [front[0] for front in fronts]
    chosen = within_limits(fronts, account_of(num_layers, Constraints(max_moves=most)), start)
    assert sum(point.moves for point in chosen) <= most
    best = min(
        sum(point.tokens for point in choice)
        for choice in itertools.product(*fronts)
        if sum(point.moves for point in choice) <= most
    )
    largest = max((step.worth * 6 for step in steps_by_worth(fronts)), default=0.0)
    assert sum(point.tokens for point in chosen) <= best + largest


def test_only_the_layers_that_gain_most_change_when_few_may_atom_1210() -> None:
    fronts = [pareto(layer_points([(ROWS[0], 100.0), (ROWS[1], 100.0 - gain)])) for gain in (5, 40, 1, 30, 7, 2, 3, 4)]
    start = [front[0] for front in fronts]
    chosen = within_limits(fronts, account_of(8, Constraints(max_layers=2)), start)
    assert [layer for layer, point in enumerate(chosen) if point.moves] == [1, 3]


def test_front_of_the_table_rises_in_moves_and_falls_in_height() -> None:
    fronts = [pareto(layer_points(list(zip(ROWS, heights, strict=True)))) for heights in ([9, 5, 4, 3.5], [20, 19, 10, 9])]
    maps = joined_front(fronts, points_max=10)
    tokens_of = [{tuple(point.row): (point.moves, point.tokens) for point in front} for front in fronts]
    sums = [np.sum([tokens_of[layer][tuple(row)] for layer, row in enumerate(rows)], axis=0) for rows in maps]
    assert sums[0].tolist() == [0, 29]
    assert sums[-1].tolist() == [12, 12.5]
    assert all(one[0] < other[0] and one[1] > other[1] for one, other in itertools.pairwise(sums))
    assert len(joined_front(fronts, points_max=3)) == 3
