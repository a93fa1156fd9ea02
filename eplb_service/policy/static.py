"""The static policy: go to a placement that is given (pinned by an operator, or imported), as far as limits on moves allow.

Rows are taken exactly as they are wanted, slot by slot. When not all fit, layers that cannot stay come first, then those that
are worst balanced now, so that a placement that takes several plans to reach helps from the first one on; of a layer whose row
does not fit, as many of its hottest new residencies as do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.errors import InvalidInputError
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.contradictions import copies_needed, has_strict_groups
from eplb_service.policy.groups import Layout, grouped_rows
from eplb_service.policy.layer_task import LayerTask, layer_task
from eplb_service.policy.limits import Limits, broken_promises, legal_rows, limits_of, row_fault
from eplb_service.policy.move_limits import MoveAccount
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.shares import with_shares

REACHED = "reached"
PARTIAL = "partial"


class StaticPolicy:
    """Goes to `problem.wanted`; see the module.

    Status: `reached` when every layer has its wanted row, `partial` when limits on moves left some for later plans.
    """

    name = "static"
    options: Mapping[str, str] = MappingProxyType({})

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError without a wanted placement, or when it breaks a constraint."""
        if problem.wanted is None:
            raise InvalidInputError(
                "policy 'static' goes to a placement that is given, and none is: name one (`eplb plan --to FILE`, or a pinned"
                " generation), or plan with another policy"
            )
        limits = limits_of(problem)
        wanted = problem.wanted
        _check_wanted(problem, wanted, limits)
        rows, missed = _rows(problem, wanted, limits)
        return RawPlan(
            physical_to_logical=rows,
            shares=_shares(problem, wanted, rows),
            status=PARTIAL if missed else REACHED,
        )


def _check_wanted(problem: PlanningProblem, wanted: Table, limits: Limits) -> None:
    """Raises InvalidInputError when a wanted row breaks a constraint: an operator's mistake, to be told before any move."""
    grouped = grouped_rows(replace(problem, current=wanted))
    live = np.where(limits.usable.reshape(-1), problem.current.physical_to_logical, EMPTY_SLOT)
    for layer, row in enumerate(wanted.physical_to_logical):
        if np.array_equal(row, live[layer]):  # a row that stays may keep duplicates that it has
            fault = row_fault(row, limits.without_copy_rules(), wanted.num_logical)
        else:
            fault = row_fault(row, limits, wanted.num_logical)
            if fault is None and not grouped[layer]:
                fault = f"some of {problem.constraints.num_groups} strict expert groups is on several nodes"
        fault = fault or next(iter(broken_promises(row, limits, layer, wanted.num_logical).values()), None)
        if fault is not None:
            dead = sorted(problem.topology.dead)
            hint = f"; ranks {dead} are dead: policy 'elastic' plans without them" if dead else ""
            raise InvalidInputError(
                f"the wanted placement breaks a constraint in layer {wanted.layer_ids[layer]}: {fault}; change the placement or"
                f" the constraint{hint}"
            )


def _rows(problem: PlanningProblem, wanted: Table, limits: Limits) -> tuple[Int32Array, bool]:
    """Rows of all layers, shape (L, P), and whether some layer did not get the row that it is to have."""
    live, goal = problem.current.physical_to_logical, wanted.physical_to_logical
    stays = legal_rows(live, limits.without_copy_rules(), wanted.num_logical)
    fine = legal_rows(live, limits, wanted.num_logical)
    before = imbalance_of(
        problem.total_loads, problem.current, problem.topology, problem.dispatch, problem.source_loads
    ).per_layer
    account, layout = MoveAccount(problem), Layout.of(problem, limits)
    rows, missed = live.copy(), []
    order = sorted(range(wanted.num_layers), key=lambda layer: (bool(stays[layer]), bool(fine[layer]), -before[layer], layer))
    for layer in order:
        if account.take(layer, goal[layer]):
            rows[layer] = goal[layer]
        else:
            missed.append(layer)
    for layer in missed:
        part = _towards(problem, limits, layout, layer, account, must=not stays[layer])
        rows[layer] = live[layer] if part is None else part
    return rows, bool(missed)


def _towards(
    problem: PlanningProblem, limits: Limits, layout: Layout, layer: int, account: MoveAccount, *, must: bool
) -> Int32Array | None:
    """A row with as many of the wanted residencies as moves are left for, the hottest first; None when the live one stays.

    must: the live row cannot stay. Raises InvalidInputError when it cannot and nothing fits.
    """
    table, wanted = problem.current, problem.wanted
    if wanted is None or (has_strict_groups(problem) and not must):
        return None
    shape = {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
    goal = residencies(wanted.physical_to_logical[layer], **shape)
    task = layer_task(problem, limits, layout, layer)
    kept = goal & residencies(task.held.reshape(-1), **shape) & task.allowed
    new = np.argwhere(goal & ~kept & task.allowed)
    new = new[np.lexsort((new[:, 0], new[:, 1], -task.load[new[:, 1]]))]
    number = min(account.moves_left(layer), new.shape[0])
    why = None
    while True:
        pinned = task.pinned | kept
        pinned[new[:number, 0], new[:number, 1]] = True
        copies_min = np.maximum(copies_needed(pinned, task.spread, task.domain_of), task.copies_min)
        row = _repaired(replace(task, pinned=pinned, copies_min=copies_min))
        if row is not None:
            why = account.why_not(layer, row)
            if why is None and (number > 0 or must) and account.take(layer, row):
                return row
        if number == 0:
            break
        number //= 2
    if not must:
        return None
    raise InvalidInputError(f"layer {task.layer_id} cannot stay as it is; to mend it, {why}")


def _repaired(task: LayerTask) -> Int32Array | None:
    """The row nearest to the held one, None when the task cannot be met."""
    try:
        return repaired_row(task)
    except InvalidInputError:
        return None


def _shares(problem: PlanningProblem, wanted: Table, rows: Int32Array) -> npt.NDArray[np.float32] | None:
    """Shares of a weighted engine: those that come with the wanted rows; without any, the best for these rows.

    None = not weighted. A layer that keeps its live row keeps its live shares; one in between splits evenly.
    """
    if problem.dispatch is not Dispatch.WEIGHTED:
        return None
    if wanted.shares is None:
        return with_shares(problem, rows)
    shares = np.zeros(rows.shape, np.float32)
    for layer, row in enumerate(rows):
        if np.array_equal(row, wanted.physical_to_logical[layer]):
            shares[layer] = wanted.shares[layer]
        elif problem.current.shares is not None and np.array_equal(row, problem.current.physical_to_logical[layer]):
            shares[layer] = problem.current.shares[layer]
        else:
            copies = np.bincount(row[row != EMPTY_SLOT], minlength=wanted.num_logical)
            shares[layer] = np.where(row == EMPTY_SLOT, 0.0, 1.0 / np.maximum(copies, 1)[row])
    return shares
