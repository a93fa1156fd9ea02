"""Which layers change, and how far, when limits on moves leave no room for every layer's new row.

Layers that cannot stay come first, with the fewest moves that make them legal, then those that break a promise (a pin, a bar,
an expert to protect). What is left goes to the layers that gain most per move; one whose new row does not fit gets as many
exchanges against its busiest rank as do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eplb_service.errors import InvalidInputError
from eplb_service.moves import align_slots, residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import Int32Array, Int64Array, LayerTask, layer_task
from eplb_service.policy.limits import Limits, legal_rows, limits_of, row_fault
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.task_layers import is_met, relieve

STEPS_IN_PART = 200
"""Most exchanges of a layer whose new row does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """A candidate row of one layer.

    row: shape (P,). before, after: height of the current and the new row (busiest rank's work for its capacity, tokens); before
    is infinite when the current row cannot stay (experts unreachable, slots dead or out of use). moves: from the current row.
    """

    row: Int32Array
    before: float
    after: float
    moves: int


def moves_are_limited(problem: PlanningProblem) -> bool:
    """Whether anything bounds how much a plan moves; from nothing, nothing does."""
    return not problem.from_nothing and any(limit is not None for limit in problem.constraints.move_limits.values())


class MoveAccount:
    """What limits on moves leave, and what chosen rows take of it."""

    def __init__(self, problem: PlanningProblem) -> None:
        table = problem.current
        self._problem = problem
        unlimited = np.iinfo(np.int64).max
        self.moves, self.bytes, self.per_rank, self.per_layer, self.layers = (
            unlimited if limit is None or problem.from_nothing else int(limit)
            for limit in problem.constraints.move_limits.values()
        )
        self.binds = moves_are_limited(problem)
        self._taken = np.zeros((table.num_layers, table.num_ranks), np.int64)
        self._changed = np.zeros(table.num_layers, np.bool_)
        # What goes out of slots that may not be used is no change that anybody chose.
        self._live = np.where(limits_of(problem).usable.reshape(-1), table.physical_to_logical, EMPTY_SLOT)
        self._expert_bytes = np.array(problem.expert_bytes or (0,) * table.num_layers, np.int64)

    def received(self, layer: int, row: Int32Array) -> Int64Array:
        """Experts that each rank would take in, shape (R,)."""
        table = self._problem.current
        shape = {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
        new = residencies(row, **shape) & ~residencies(table.physical_to_logical[layer], **shape)
        received: Int64Array = new.sum(axis=1)
        return received

    def why_not(self, layer: int, row: Int32Array) -> str | None:
        """The limit that a layer's row would break beside the rows that were taken, None when it fits."""
        received = self.received(layer, row)
        changes = not np.array_equal(row, self._live[layer])
        total = self._taken.copy()
        total[layer] = received
        num_layers = int(self._changed.sum()) - int(self._changed[layer]) + int(changes)
        move_bytes = int(total.sum(axis=1) @ self._expert_bytes)
        per_rank = total.sum(axis=0)
        allowed = "are needed but at most {} are allowed; raise"
        if total.sum() > self.moves:
            return f"{total.sum()} moves {allowed.format(self.moves)} max_moves"
        if move_bytes > self.bytes:
            return f"moves of {move_bytes} bytes {allowed.format(self.bytes)} max_move_bytes"
        if received.sum() > self.per_layer:
            return f"{received.sum()} moves in one layer {allowed.format(self.per_layer)} max_moves_per_layer"
        if per_rank.max() > self.per_rank:
            return f"{per_rank.max()} moves into one rank {allowed.format(self.per_rank)} max_moves_per_rank"
        if num_layers > self.layers:
            return f"{num_layers} layers must change but at most {self.layers} may; raise max_layers"
        return None

    def take(self, layer: int, row: Int32Array) -> bool:
        """Take a row if it fits."""
        if self.why_not(layer, row) is not None:
            return False
        self._taken[layer] = self.received(layer, row)
        self._changed[layer] = not np.array_equal(row, self._live[layer])
        return True

    def take_all(self, rows: Iterable[Int32Array]) -> bool:
        """Take the rows of all layers, in order, if they fit together."""
        return all(self.take(layer, row) for layer, row in enumerate(rows))

    def mend(self, layer: int, row: Int32Array, *, must: bool) -> bool:
        """Take a row that mends the live one, if it fits. Raises InvalidInputError when it must and does not."""
        if self.take(layer, row):
            return True
        if must:
            why = self.why_not(layer, row)
            raise InvalidInputError(f"to reach every expert without slots that are dead or out of use, {why}")
        return False

    def moves_left(self, layer: int) -> int:
        """Most moves that a layer which has none yet could make."""
        size = int(self._expert_bytes[layer])
        used = int(self._taken.sum())
        by_bytes = (self.bytes - int(self._taken.sum(axis=1) @ self._expert_bytes)) // size if size else self.moves
        return max(0, min(self.moves - used, by_bytes, self.per_layer))

    def intake_left(self, layer: int) -> Int64Array:
        """Most experts that each rank may take in within a layer, beside what the other layers took. Shape (R,)."""
        others = self._taken.sum(axis=0) - self._taken[layer]
        left: Int64Array = np.maximum(self.per_rank - others, 0)
        return left

    def may_change(self, layer: int) -> bool:
        """Whether a layer has changed, or may still."""
        return bool(self._changed[layer]) or int(self._changed.sum()) < self.layers


def layers_to_mend(problem: PlanningProblem, limits: Limits, broken: Sequence[int]) -> list[tuple[int, bool]]:
    """Layers whose live rows are not legal, and whether they must be mended: first those that cannot stay at all."""
    table, least = problem.current, limits.without_copy_rules()
    must = {layer: row_fault(table.physical_to_logical[layer], least, table.num_logical) is not None for layer in broken}
    return sorted(must.items(), key=lambda item: (not item[1], item[0]))


def within_move_limits(problem: PlanningProblem, limits: Limits, plans: list[LayerPlan | None]) -> tuple[Int32Array, bool]:
    """Rows of all layers, shape (L, P), and whether limits on moves kept some layer from its new row.

    Raises InvalidInputError when not even the moves fit that make every expert reachable without dead or unusable slots.
    """
    rows = problem.current.physical_to_logical.copy()
    chosen = {layer: plan for layer, plan in enumerate(plans) if plan is not None}
    account = MoveAccount(problem)
    if not account.binds or all(account.take(layer, plan.row) for layer, plan in chosen.items()):
        for layer, plan in chosen.items():
            rows[layer] = plan.row
        return rows, False
    return _share_out(problem, limits, chosen, rows), True


def _share_out(problem: PlanningProblem, limits: Limits, chosen: dict[int, LayerPlan], rows: Int32Array) -> Int32Array:
    """The rows when not all of them fit: what must change, then what gains most per move."""
    account = MoveAccount(problem)
    layout = Layout.of(problem, limits)
    tasks = {layer: layer_task(problem, limits, layout, layer) for layer in chosen}
    height = {layer: plan.before for layer, plan in chosen.items()}
    spent = dict.fromkeys(chosen, 0)
    for layer, must in _to_mend(problem, limits, chosen):
        row = repaired_row(tasks[layer])
        if account.mend(layer, row, must=must):
            rows[layer] = row
            spent[layer] = int(account.received(layer, row).sum())
            height[layer] = _height(tasks[layer], row)

    def worth(layer: int) -> float:
        gain = (height[layer] - chosen[layer].after) / tasks[layer].fair if tasks[layer].fair > 0 else 0.0
        return gain / max(1, chosen[layer].moves - spent[layer])

    for layer in sorted(chosen, key=lambda layer: (-worth(layer), layer)):
        if worth(layer) <= 0:
            continue
        if account.take(layer, chosen[layer].row):
            rows[layer] = chosen[layer].row
        elif spent[layer] == 0:
            part = _in_part(tasks[layer], account, layer, rows[layer])
            if part is not None:
                rows[layer] = part
    return rows


def _to_mend(problem: PlanningProblem, limits: Limits, chosen: dict[int, LayerPlan]) -> list[tuple[int, bool]]:
    """Layers to mend first and whether they must be: those that cannot stay, then those that break a promise."""
    cannot_stay = [layer for layer, plan in chosen.items() if not np.isfinite(plan.before)]
    if limits.plain:
        return [(layer, True) for layer in cannot_stay]
    promises = replace(limits, copies_max=limits.num_slots, distinct=False)
    kept = legal_rows(problem.current.physical_to_logical, promises, problem.current.num_logical)
    broken = [layer for layer in chosen if not kept[layer] and layer not in cannot_stay]
    return [(layer, True) for layer in cannot_stay] + [(layer, False) for layer in broken]


def _height(task: LayerTask, row: Int32Array) -> float:
    return float(task.heights(np.asarray(row, np.int32).reshape(task.held.shape)).max())


def _in_part(task: LayerTask, account: MoveAccount, layer: int, row: Int32Array) -> Int32Array | None:
    """A row with as many exchanges against the busiest rank as moves are left, which it takes; None when none fits or helps."""
    if not is_met(task, task.held):
        return None
    off_home = task.price > 1.0  # an exchange may bring no more replicas off their group's node
    steps = account.moves_left(layer) // 2
    while steps > 0:
        bins = relieve(task, packed(task.held), barred=~task.allowed | off_home, goal=0.0, steps_max=min(steps, STEPS_IN_PART))
        part = align_slots(row, bins.reshape(-1), num_ranks=task.num_ranks, usable=task.usable)
        if _height(task, part) >= _height(task, row):
            return None
        if account.take(layer, part):
            return part
        steps //= 2
    return None


def packed(held: Int32Array) -> Int32Array:
    """Rows of slots as bins: the experts first, -1 at the end."""
    bins = np.full(held.shape, -1, np.int32)
    for rank, experts in enumerate(held):
        present = experts[experts >= 0]
        bins[rank, : present.size] = present
    return bins
