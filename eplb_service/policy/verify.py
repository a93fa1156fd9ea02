"""Checks what a policy returned and computes what it would do: nothing that a policy says of itself is believed.

Imports only topology, placement, imbalance, dispatch, moves, limits and bounds, each tested against a slow oracle.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import imbalance_of
from eplb_service.errors import PolicyFailedError
from eplb_service.imbalance import Imbalance
from eplb_service.moves import residency_moves
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import PlanningProblem, Proposal, RawPlan
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.limits import Limits, limits_of, row_fault

BOUND_TOLERANCE = 1e-6
"""A claimed bound may exceed the imbalance of the very plan by rounding only (relative)."""


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
    return raw


def _checked_map(raw: RawPlan, problem: PlanningProblem, policy: str) -> Int32Array:
    """The map of a plan, shape (L, P), int32, or PolicyFailedError."""
    given: object = raw.physical_to_logical
    if not isinstance(given, np.ndarray):
        raise _fail(policy, f"physical_to_logical is a {type(given).__name__} instead of an array")
    table = problem.current
    if given.dtype.kind not in "iu":
        nan = given.dtype.kind == "f" and bool(np.isnan(given.astype(np.float64)).any())
        raise _fail(policy, f"physical_to_logical is {given.dtype}{' and holds NaN' if nan else ''}; expert ids are integers")
    array: npt.NDArray[np.integer] = given
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


def _check_rows(rows: Int32Array, problem: PlanningProblem, limits: Limits, policy: str) -> None:
    """Every row within the limits. A row that stays as it is may keep duplicates that it has, nothing worse."""
    table = problem.current
    for layer, row in enumerate(rows):
        fault = row_fault(row, limits, table.num_logical)
        if fault is None:
            continue
        unchanged = np.array_equal(row, table.physical_to_logical[layer])
        if unchanged and row_fault(row, limits.without_copy_rules(), table.num_logical) is None:
            continue
        raise _fail(policy, f"layer {table.layer_ids[layer]}: {fault}")
    groups = problem.constraints.num_groups
    if groups is not None and groups > 1:
        _check_groups(rows, problem, groups, policy)


def _check_groups(rows: Int32Array, problem: PlanningProblem, num_groups: int, policy: str) -> None:
    """The experts of each group on one node, in every row that changes."""
    table = problem.current
    node_of_slot = np.repeat(np.array(problem.topology.node_indices), table.slots_per_rank)
    size = table.num_logical // num_groups
    for layer, row in enumerate(rows):
        if np.array_equal(row, table.physical_to_logical[layer]):
            continue
        used = row >= 0
        nodes = {(int(expert) // size, int(node)) for expert, node in zip(row[used], node_of_slot[used], strict=True)}
        if len(nodes) > num_groups:
            spread = next(group for group in range(num_groups) if sum(1 for other, _ in nodes if other == group) > 1)
            raise _fail(
                policy, f"layer {table.layer_ids[layer]}: expert group {spread} of {num_groups} is spread over several nodes"
            )


def _bounds(raw: RawPlan, problem: PlanningProblem, limits: Limits, after: Imbalance, policy: str) -> Imbalance:
    """The better of the combinatorial bound and the policy's own claim, which its own plan must not refute."""
    bounds = imbalance_bounds(problem, limits)
    if not raw.lower_bound:
        return Imbalance(bounds)
    if len(raw.lower_bound) != problem.current.num_layers:
        raise _fail(policy, f"{len(raw.lower_bound)} lower bounds for {problem.current.num_layers} layers")
    even = imbalance_of(problem.total_loads, _with_rows(problem.current, raw.physical_to_logical), problem.topology)
    best = []
    for layer, (own, claimed, reached) in enumerate(zip(bounds, raw.lower_bound, even.per_layer, strict=True)):
        if not math.isfinite(claimed) or claimed > reached * (1 + BOUND_TOLERANCE):
            raise _fail(
                policy,
                f"layer {problem.current.layer_ids[layer]}: claims that no placement is below {claimed},"
                f" its own plan has {reached:.6f}",
            )
        best.append(max(own, min(float(claimed), reached)) if problem.dispatch in ("even", "hashed") else own)
    return Imbalance(tuple(min(bound, reached) for bound, reached in zip(best, after.per_layer, strict=True)))


def _with_rows(table: Table, rows: npt.NDArray[np.integer]) -> Table:
    return Table(table.model, table.layer_ids, table.num_logical, table.rank_ids, rows.astype(np.int32))


def verify(problem: PlanningProblem, raw: object, *, policy: str, solve_s: float) -> Proposal:
    """The proposal that a policy's answer amounts to. Raises PolicyFailedError naming layer, slot and numbers.

    Checked: types, shape, id range, every expert placed, dead and unusable slots empty, no expert twice on a rank, replicas
    within the engine's table, groups on one node, moves within max_moves (unless the problem starts from nothing), bounds that
    the plan itself does not refute. A layer whose row is unchanged may keep duplicates that it already had.
    """
    limits = limits_of(problem)
    plan = _checked_plan(raw, policy)
    rows = _checked_map(plan, problem, policy)
    _check_rows(rows, problem, limits, policy)
    after_table = _with_rows(problem.current, rows)
    moves = residency_moves(problem.current, after_table, problem.topology, problem.expert_bytes)
    most = problem.constraints.max_moves
    if most is not None and not problem.from_nothing and moves.experts > most:
        raise _fail(policy, f"{moves.experts} moves; at most {most} are allowed")
    loads = problem.total_loads
    after = imbalance_of(loads, after_table, problem.topology, problem.dispatch)
    return Proposal(
        policy=policy,
        placement=after_table,
        before=imbalance_of(loads, problem.current, problem.topology, problem.dispatch),
        predicted=after,
        lower_bound=_bounds(plan, problem, limits, after, policy),
        moves=moves,
        solve_s=solve_s,
        status=plan.status,
        cut_off=plan.cut_off,
    )
