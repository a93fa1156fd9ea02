"""What soft groups and resilience cost in a placement, counted from the placement alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb_service.placement import EMPTY_SLOT, Int32Array
from eplb_service.policy.base import ConstraintCosts, PlanningProblem
from eplb_service.policy.limits import Limits

Int64Array = npt.NDArray[np.int64]

FAULTS_TOLD_MAX = 5


def costs_of(rows: Int32Array, problem: PlanningProblem, limits: Limits, kept_faults: Sequence[str]) -> ConstraintCosts | None:
    """Costs of a verified placement, None when there is nothing to tell. Rows: shape (L, P)."""
    grouped = (problem.constraints.num_groups or 1) > 1
    if not grouped and limits.protected is None and not kept_faults:
        return None
    off_node = float(off_node_replicas(rows, problem).mean()) if grouped else None
    told = tuple(kept_faults[:FAULTS_TOLD_MAX])
    if limits.protected is None:
        return ConstraintCosts(off_node=off_node, kept_faults=told, num_kept_faults=len(kept_faults))
    with_it, without, slots = _bounds_by_copies(problem, limits, limits.protected)
    return ConstraintCosts(
        off_node=off_node,
        protected=int(limits.protected.sum()),
        unprotected=int((limits.protected & (domains_held(rows, limits, problem.current.num_logical) < 2)).sum()),
        slots_for_protection=float(slots.mean()),
        bound=float(with_it.mean()),
        bound_without=float(without.mean()),
        kept_faults=told,
        num_kept_faults=len(kept_faults),
    )


def off_node_replicas(rows: Int32Array, problem: PlanningProblem) -> Int64Array:
    """Replicas of each layer that are not on the node where most of their group's are (ties: the first). Shape (L,)."""
    table = problem.current
    num_groups, num_nodes = problem.constraints.num_groups or 1, problem.topology.num_nodes
    node_of_slot = np.repeat(np.array(problem.topology.node_indices), table.slots_per_rank)
    off = np.zeros(table.num_layers, np.int64)
    for layer, row in enumerate(rows):
        used = row != EMPTY_SLOT
        group = row[used] // (table.num_logical // num_groups)
        on_node = np.bincount(group * num_nodes + node_of_slot[used], minlength=num_groups * num_nodes)
        on_node = on_node.reshape(num_groups, num_nodes)
        off[layer] = on_node.sum() - on_node.max(axis=1).sum()
    return off


def domains_held(rows: Int32Array, limits: Limits, num_logical: int) -> Int64Array:
    """Failure domains that hold each expert in a usable slot. Shape (L, E)."""
    num_layers = rows.shape[0]
    by_rank = np.where(limits.usable, rows.reshape(num_layers, *limits.usable.shape), num_logical)
    by_rank = np.where(by_rank == EMPTY_SLOT, num_logical, by_rank)
    held = np.zeros((num_layers, int(limits.domain_of.max()) + 1, num_logical + 1), np.bool_)
    layer, rank, _ = np.indices(by_rank.shape)
    held[layer, limits.domain_of[rank], by_rank] = True
    domains: Int64Array = held[:, :, :-1].sum(axis=1)
    return domains


def _bounds_by_copies(
    problem: PlanningProblem, limits: Limits, protected: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], Int64Array]:
    """Per layer: the hottest copy at best over the mean, with protection and without; second copies only for protection."""
    speed = float(limits.capacity[limits.room > 0].max())
    capacity = float(limits.capacity[limits.room > 0].sum())
    with_it, without, slots = [], [], []
    for load, asked in zip(problem.total_loads, protected, strict=True):
        fair = load.sum() / capacity * speed
        free = _hottest_first(load, np.ones(load.size, np.int64), limits)
        bound = _hottest_first(load, np.where(asked, 2, 1), limits)
        without.append(max(1.0, float((load / free).max() / fair)) if fair > 0 else 1.0)
        with_it.append(max(1.0, float((load / bound).max() / fair)) if fair > 0 else 1.0)
        slots.append(int((asked & (free < 2)).sum()))
    return np.array(with_it), np.array(without), np.array(slots, np.int64)


def _hottest_first(load: npt.NDArray[np.float64], copies: Int64Array, limits: Limits) -> Int64Array:
    """Copies of each expert when those left go one by one to the hottest per copy: no allotment has a cooler hottest copy."""
    copies = copies.astype(np.int64)
    per_copy = np.where(copies < limits.copies_max, load / copies, -1.0)
    for _ in range(limits.num_slots - int(copies.sum())):
        expert = int(per_copy.argmax())
        if per_copy[expert] <= 0:
            break
        copies[expert] += 1
        per_copy[expert] = load[expert] / copies[expert] if copies[expert] < limits.copies_max else -1.0
    return copies
