"""Checks what a policy returned and computes what it would do: nothing that a policy says of itself is believed.

Imports no search: only topology, placement, imbalance, dispatch, moves, the arithmetic of constraints (`limits`,
`contradictions`, `row_check`, `plan_costs`) and bounds, each tested against a slow oracle.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, check_shares, imbalance_of
from eplb_service.errors import PolicyFailedError
from eplb_service.imbalance import Imbalance
from eplb_service.moves import NO_MOVES, residency_moves
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import FrontPoint, PlanningProblem, Proposal, RawPlan
from eplb_service.policy.bounds import heights_that_may_stay, imbalance_bounds
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.plan_costs import costs_of
from eplb_service.policy.row_check import Changes, limits_may_forbid, move_fault, row_faults

BOUND_TOLERANCE = 1e-6
"""A claimed bound may exceed the imbalance of the very plan by rounding only (relative)."""


def _is_finite(number: float | np.floating | np.integer) -> bool:
    """Whether a number is finite and no integer beyond floats."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _fail(policy: str, what: str) -> PolicyFailedError:
    return PolicyFailedError(f"policy {policy!r} returned an unusable plan: {what}; the live placement stays")


def _checked_plan(raw: object, policy: str) -> RawPlan:
    """The plan as what it claims to be, or PolicyFailedError."""
    if not isinstance(raw, RawPlan):
        raise _fail(policy, f"a {type(raw).__name__} instead of a RawPlan")
    status: object = raw.status
    cut_off: object = raw.cut_off
    if not isinstance(status, str) or not isinstance(cut_off, bool):
        raise _fail(policy, f"status {status!r} and cut_off {cut_off!r} instead of a word and a yes or no")
    for name in ("lower_bound", "moves_lower_bound", "front", "front_shares"):
        given: object = getattr(raw, name)
        if not isinstance(given, tuple | list):
            raise _fail(policy, f"{name} is a {type(given).__name__} instead of a tuple")
    return raw


def _checked_map(given: object, problem: PlanningProblem, policy: str) -> Int32Array:
    """A map, shape (L, P), int32, or PolicyFailedError."""
    if not isinstance(given, np.ndarray):
        raise _fail(policy, f"physical_to_logical is a {type(given).__name__} instead of an array")
    table = problem.current
    if given.dtype.kind not in "iu":
        nan = given.dtype.kind == "f" and bool(np.isnan(given.astype(np.float64)).any())
        raise _fail(policy, f"physical_to_logical is {given.dtype}{' and holds NaN' if nan else ''}; expert ids are integers")
    array: npt.NDArray[np.integer] = np.asarray(given)  # of a masked array or a matrix what it holds
    if array.shape != table.physical_to_logical.shape:
        raise _fail(policy, f"a map of shape {array.shape}; expected {table.num_layers} layers x {table.num_physical} slots")
    wrong = np.argwhere((array < EMPTY_SLOT) | (array >= table.num_logical))
    if wrong.size:
        layer, slot = wrong[0].tolist()
        raise _fail(
            policy,
            f"layer {table.layer_ids[layer]} slot {slot} holds expert {int(array[layer, slot])};"
            f" ids run from 0 to {table.num_logical - 1}, -1 is an empty slot",
        )
    return array.astype(np.int32)


def _checked_table(rows: Int32Array, shares: object, problem: PlanningProblem, policy: str) -> Table:
    """The placement that a map and its shares make, or PolicyFailedError. Without shares a weighted engine splits evenly."""
    current = problem.current
    table = Table(current.model, current.layer_ids, current.num_logical, current.rank_ids, rows)
    if shares is None:
        return table.with_even_shares() if problem.dispatch is Dispatch.WEIGHTED else table
    if problem.dispatch is not Dispatch.WEIGHTED:
        raise _fail(policy, f"shares for an engine that dispatches by {problem.dispatch.value}, not by weights")
    fault = check_shares(table, shares)
    if fault is not None:
        raise _fail(policy, fault)
    given = np.asarray(shares, np.float32)
    return Table(current.model, current.layer_ids, current.num_logical, current.rank_ids, rows, given)


def _predicted(table: Table, problem: PlanningProblem) -> Imbalance:
    """Imbalance of the summed loads under the deployment's dispatch."""
    return imbalance_of(problem.total_loads, table, problem.topology, problem.dispatch, problem.source_loads)


def _checked_point(
    rows: Int32Array, shares: object, problem: PlanningProblem, limits: Limits, policy: str
) -> tuple[FrontPoint, tuple[str, ...]]:
    """A placement that respects every constraint, with what it would do; and the faults of the live one that it keeps."""
    table = _checked_table(rows, shares, problem, policy)
    moves = residency_moves(problem.current, table, problem.topology, problem.expert_bytes, fan_out=problem.fan_out)
    changes = Changes.between(rows, problem, limits, moves)
    fault, kept = row_faults(rows, problem, limits, may_keep=limits_may_forbid(changes, problem, limits))
    fault = fault or move_fault(changes, problem)
    if fault is not None:
        raise _fail(policy, fault)
    return FrontPoint(placement=table, predicted=_predicted(table, problem), moves=moves), kept


def _bounds(
    raw: RawPlan, rows: Int32Array, problem: PlanningProblem, limits: Limits, after: Imbalance, policy: str
) -> Imbalance:
    """The better of the combinatorial bound and the policy's own claim, which its own plan must not refute."""
    kept = heights_that_may_stay(problem, limits)
    bounds = tuple(map(min, imbalance_bounds(problem, limits), kept))
    if not raw.lower_bound:
        return Imbalance(tuple(map(min, bounds, after.per_layer)))
    if len(raw.lower_bound) != problem.current.num_layers:
        raise _fail(policy, f"{len(raw.lower_bound)} lower bounds for {problem.current.num_layers} layers")
    even = imbalance_of(problem.total_loads, _checked_table(rows, None, problem, policy), problem.topology)
    best = []
    known = zip(bounds, raw.lower_bound, even.per_layer, kept, strict=True)
    for layer, (own, claimed, reached, stays) in enumerate(known):
        given: object = claimed
        if not isinstance(given, int | float | np.floating | np.integer) or not _is_finite(given):
            raise _fail(policy, f"layer {problem.current.layer_ids[layer]}: claims that no placement is below {given!r}")
        if claimed > reached * (1 + BOUND_TOLERANCE):
            raise _fail(
                policy,
                f"layer {problem.current.layer_ids[layer]}: claims that no placement is below {claimed},"
                f" its own plan has {reached:.6f}",
            )
        best.append(max(own, min(float(claimed), reached, stays)) if problem.dispatch in ("even", "hashed") else own)
    return Imbalance(tuple(min(bound, reached) for bound, reached in zip(best, after.per_layer, strict=True)))


def _moves_bound(
    raw: RawPlan, points: tuple[FrontPoint, ...], problem: PlanningProblem, limits: Limits, policy: str
) -> int | None:
    """The policy's claim on the fewest moves to the target, which no placement at hand must refute; None = no claim, no target.

    points: placements known to be legal.
    """
    if not raw.moves_lower_bound:
        return None
    table = problem.current
    if len(raw.moves_lower_bound) != table.num_layers:
        raise _fail(policy, f"{len(raw.moves_lower_bound)} lower bounds on moves for {table.num_layers} layers")
    for layer, claimed in enumerate(raw.moves_lower_bound):
        given: object = claimed
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
            raise _fail(policy, f"layer {table.layer_ids[layer]}: claims at least {given!r} moves; give a whole number from 0")
    if problem.max_imbalance is None:
        return None
    for point in points:
        changes = Changes.between(point.placement.physical_to_logical, problem, limits, point.moves)
        moved, reached = changes.received.sum(axis=1), np.array(point.predicted.per_layer)
        refuted = np.flatnonzero((reached <= problem.max_imbalance) & (np.array(raw.moves_lower_bound) > moved))
        if refuted.size:
            layer = int(refuted[0])
            raise _fail(
                policy,
                f"layer {table.layer_ids[layer]}: claims that no placement within {problem.max_imbalance} takes fewer than"
                f" {raw.moves_lower_bound[layer]} moves, its own has {reached[layer]:.6f} with {moved[layer]}",
            )
    return sum(int(claimed) for claimed in raw.moves_lower_bound)


def _current_point(problem: PlanningProblem, limits: Limits) -> FrontPoint | None:
    """Keeping what is there, None where that is not legal."""
    nothing = np.zeros((problem.current.num_layers, problem.current.num_ranks), np.int64)
    may_keep = limits_may_forbid(Changes(received=nothing, layers=0, summary=NO_MOVES), problem, limits)
    fault, _ = row_faults(problem.current.physical_to_logical, problem, limits, may_keep=may_keep)
    if fault is not None:
        return None
    return FrontPoint(placement=problem.current, predicted=_predicted(problem.current, problem), moves=NO_MOVES)


def _front(raw: RawPlan, plan: FrontPoint, problem: PlanningProblem, limits: Limits, policy: str) -> tuple[FrontPoint, ...]:
    """The plan, keeping what is there (where that is legal) and the policy's other points, each checked like the plan.

    By ascending moves; of equal ones (to empty a slot is no move) the better balanced comes later. Points that another one
    beats or equals in moves, mean and worst layer are dropped, but for the plan and the current one.
    """
    if not problem.front or not raw.front:
        return ()
    current = _current_point(problem, limits)
    fixed = [plan] if current is None or current.placement == plan.placement else [current, plan]
    shares: tuple[object, ...] = tuple(raw.front_shares) or (None,) * len(raw.front)
    if len(shares) != len(raw.front):
        raise _fail(policy, f"{len(shares)} front_shares for a front of {len(raw.front)} maps")
    others = [
        _checked_point(_checked_map(given, problem, policy), split, problem, limits, policy)[0]
        for given, split in zip(raw.front, shares, strict=True)
    ]
    points = list(fixed)
    for point in sorted(others, key=_rank_of):
        if not any(_beats(known, point) for known in points):
            points = [known for known in points if known in fixed or not _beats(point, known)] + [point]
    return tuple(sorted(points, key=lambda point: (point.moves.experts, -point.predicted.mean, -point.predicted.worst)))


def _rank_of(point: FrontPoint) -> tuple[int, float, float]:
    """Order of points on a front."""
    return point.moves.experts, point.predicted.mean, point.predicted.worst


def _beats(one: FrontPoint, other: FrontPoint) -> bool:
    """Whether a point is no worse than another in moves, mean and worst layer."""
    return all(mine <= theirs for mine, theirs in zip(_rank_of(one), _rank_of(other), strict=True))


def verify(problem: PlanningProblem, raw: object, *, policy: str, solve_s: float) -> Proposal:
    """The proposal that a policy's answer amounts to. Raises PolicyFailedError naming layer, slot and numbers.

    Checked, for the plan and every point of its front: types, shape, id range, every expert placed, dead and unusable slots
    empty, no expert twice on a rank, replicas within the engine's table, strict groups on one node, pins, bars and resilience,
    all limits on moves (unless the problem starts from nothing); shares; bounds that no placement at hand refutes. What a row
    may keep as it is: see `row_check`.
    """
    limits = limits_of(problem)
    plan = _checked_plan(raw, policy)
    rows = _checked_map(plan.physical_to_logical, problem, policy)
    point, kept = _checked_point(rows, plan.shares, problem, limits, policy)
    front = _front(plan, point, problem, limits, policy)
    return Proposal(
        policy=policy,
        placement=point.placement,
        before=_predicted(problem.current, problem),
        predicted=point.predicted,
        lower_bound=_bounds(plan, rows, problem, limits, point.predicted, policy),
        moves=point.moves,
        solve_s=solve_s,
        status=plan.status,
        cut_off=plan.cut_off,
        moves_lower_bound=_moves_bound(plan, (point, *front), problem, limits, policy),
        front=front,
        costs=costs_of(rows, problem, limits, kept),
    )
