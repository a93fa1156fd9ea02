"""Whether the rows of a map respect a problem's constraints, and its moves the limits on moves; part of `verify`.

A row that stays as it is may keep duplicates, too many copies and groups on several nodes that it has: mending those costs
moves that nobody asked for. A pin that is not met, a barred expert that is held and a protected expert in one failure domain
must be mended; the plan may leave them only where the live row has the very same fault and a limit on moves may forbid mending.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.moves import MoveSummary, residencies
from eplb_service.placement import EMPTY_SLOT, Int32Array
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.limits import Limits, broken_promises, row_fault

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """What a map changes.

    received: residencies that were not there, shape (L, R). layers: rows in which a usable slot differs.
    """

    received: Int64Array
    layers: int
    summary: MoveSummary

    @classmethod
    def between(cls, rows: Int32Array, problem: PlanningProblem, limits: Limits, summary: MoveSummary) -> Changes:
        """From the live map to a new one. Rows: shape (L, P)."""
        shape = {"num_ranks": problem.current.num_ranks, "num_logical": problem.current.num_logical}
        new = residencies(rows, **shape) & ~residencies(problem.current.physical_to_logical, **shape)
        received = new.sum(axis=2)
        differs = (rows != problem.current.physical_to_logical) & limits.usable.reshape(-1)[None, :]
        return cls(received=received, layers=int(differs.any(axis=1).sum()), summary=summary)


def move_fault(changes: Changes, problem: PlanningProblem) -> str | None:
    """Which limit on moves a plan breaks, None when it keeps all."""
    if problem.from_nothing:
        return None
    constraints, table = problem.constraints, problem.current
    experts, received = changes.summary.experts, changes.received
    if constraints.max_moves is not None and experts > constraints.max_moves:
        return f"{experts} moves; at most {constraints.max_moves} are allowed"
    if constraints.max_move_bytes is not None and changes.summary.move_bytes > constraints.max_move_bytes:
        return f"{changes.summary.move_bytes} bytes to move; at most {constraints.max_move_bytes} are allowed"
    if constraints.max_layers is not None and changes.layers > constraints.max_layers:
        return f"{changes.layers} layers change; at most {constraints.max_layers} may"
    per_layer, per_rank = received.sum(axis=1), received.sum(axis=0)
    if constraints.max_moves_per_layer is not None and int(per_layer.max()) > constraints.max_moves_per_layer:
        worst = int(per_layer.argmax())
        return (
            f"layer {table.layer_ids[worst]}: {per_layer[worst]} moves; at most {constraints.max_moves_per_layer} are allowed"
        )
    if constraints.max_moves_per_rank is not None and int(per_rank.max()) > constraints.max_moves_per_rank:
        worst = int(per_rank.argmax())
        return f"rank {table.rank_ids[worst]} takes in {per_rank[worst]} experts; at most {constraints.max_moves_per_rank} may"
    return None


def limits_may_forbid(changes: Changes, problem: PlanningProblem, limits: Limits) -> bool:
    """Whether the limits on moves leave less than rewriting one whole layer may take, so that mending it may be forbidden."""
    if problem.from_nothing:
        return False
    constraints, row = problem.constraints, limits.num_slots
    left: list[tuple[int | None, int, int]] = [
        (constraints.max_moves, changes.summary.experts, row),
        (constraints.max_move_bytes, changes.summary.move_bytes, row * max(problem.expert_bytes, default=0)),
        (constraints.max_layers, changes.layers, 1),
        (constraints.max_moves_per_layer, 0, row),
        (constraints.max_moves_per_rank, int(changes.received.sum(axis=0).max()), int(limits.room.max())),
    ]
    return any(most is not None and most - spent < wanted for most, spent, wanted in left)


def row_faults(
    rows: Int32Array, problem: PlanningProblem, limits: Limits, *, may_keep: bool
) -> tuple[str | None, tuple[str, ...]]:
    """The first fault that cannot stand (None = none), and faults that the live rows have and that may stay.

    may_keep: whether limits on moves may forbid mending.
    """
    table = problem.current
    live = np.where(limits.usable.reshape(-1)[None, :], table.physical_to_logical, EMPTY_SLOT)
    kept: list[str] = []
    for layer, row in enumerate(rows):
        name = f"layer {table.layer_ids[layer]}"
        unchanged = np.array_equal(row, live[layer])
        fault = row_fault(row, limits, table.num_logical)
        if fault is not None and not (unchanged and row_fault(row, limits.without_copy_rules(), table.num_logical) is None):
            return f"{name}: {fault}", ()
        broken = broken_promises(row, limits, layer, table.num_logical)
        if broken:
            known = broken_promises(live[layer], limits, layer, table.num_logical)
            for key, told in broken.items():
                if key not in known or not may_keep:
                    return f"{name}: {told}", ()
                kept.append(f"{name}: {told}")
        if problem.constraints.fill_slots and not (unchanged and may_keep):
            open_slot = next((slot for slot in empty_slots(row, limits) if _is_open(layer, row, slot, problem, limits)), None)
            if open_slot is not None:
                return f"{name}: slot {open_slot} is empty, but the engine's tables know no empty slot", ()
        if not unchanged and has_strict_groups(problem) and (spread := spread_group(row, problem)) is not None:
            groups = problem.constraints.num_groups
            return f"{name}: expert group {spread} of {groups} is spread over several nodes", ()
    return None, tuple(kept)


def empty_slots(row: npt.NDArray[np.integer], limits: Limits) -> list[int]:
    """Slots of a row, shape (P,), that are usable and hold nothing, ascending."""
    slots: list[int] = np.flatnonzero((np.asarray(row) == EMPTY_SLOT) & limits.usable.reshape(-1)).tolist()
    return slots


def experts_that_may_join(
    layer: int, row: npt.NDArray[np.integer], rank: int, problem: PlanningProblem, limits: Limits
) -> npt.NDArray[np.bool_]:
    """Experts of which a rank (its position) may take one more copy beside what a layer's row holds. Row: (P,). Shape (E,)."""
    table = problem.current
    held = residencies(row, num_ranks=table.num_ranks, num_logical=table.num_logical)
    used = np.asarray(row)[np.asarray(row) != EMPTY_SLOT]
    copies = np.bincount(used, minlength=table.num_logical)
    barred = limits.marked(limits.bars, layer, table.num_logical)[rank]
    may: npt.NDArray[np.bool_] = ~held[rank] & ~barred & (copies < limits.copies_max)
    if has_strict_groups(problem):
        nodes = np.array(problem.topology.node_indices)
        elsewhere = held[nodes != nodes[rank]].any(axis=0).reshape(problem.constraints.num_groups or 1, -1).any(axis=1)
        may &= ~np.repeat(elsewhere, table.num_logical // elsewhere.size)
    return may


def _is_open(layer: int, row: npt.NDArray[np.integer], slot: int, problem: PlanningProblem, limits: Limits) -> bool:
    """Whether some expert may be in an empty slot."""
    return bool(experts_that_may_join(layer, row, slot // problem.current.slots_per_rank, problem, limits).any())


def spread_group(row: npt.NDArray[np.int32], problem: PlanningProblem) -> int | None:
    """The first group that is on several nodes. Row: shape (P,)."""
    table, num_groups = problem.current, problem.constraints.num_groups or 1
    node_of_slot = np.repeat(np.array(problem.topology.node_indices), table.slots_per_rank)
    used = row != EMPTY_SLOT
    group = row[used] // (table.num_logical // num_groups)
    on_node = np.zeros((num_groups, problem.topology.num_nodes), np.bool_)
    on_node[group, node_of_slot[used]] = True
    several = np.flatnonzero(on_node.sum(axis=1) > 1)
    return int(several[0]) if several.size else None
