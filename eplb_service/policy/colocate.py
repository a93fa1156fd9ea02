"""Co-location: after a policy's plan, experts that tokens choose together change places so that they end up on one node.

Engines send a token once to each node that holds one of its experts, so every pair on one node saves traffic. No rank of a
layer gets above the plan's own height or the target's, whichever is more, no layer moves more, every constraint and limit
holds, and copies stay as many as they are: only places change. Which layers change at all is the policy's choice: one that it
leaves as it is keeps its row, unless the plan starts from nothing.

Under nearest dispatch the pass does nothing: there the search itself prices assignments that cross nodes (`anneal_routes`), and
copies are placed so that senders find one at home. With strict groups neither: they say what shares a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eplb_service.dispatch import Dispatch
from eplb_service.moves import align_slots, residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import Effort, PlanningProblem
from eplb_service.policy.colocate_kernel import wander
from eplb_service.policy.colocate_state import EXTRA, MOVES, TOGETHER, Best, Bounds, Cooling, Ground, Walk, mean_gain, walk_from
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_search import MANY, seed_of
from eplb_service.policy.layer_task import Float64Array, Int32Array, Int64Array, LayerTask, layer_task
from eplb_service.policy.limits import Limits
from eplb_service.policy.move_limits import MoveAccount
from eplb_service.policy.shares import with_shares
from eplb_service.policy.task_layers import is_met

STEPS = {Effort.QUICK: 8_000_000, Effort.NORMAL: 40_000_000, Effort.THOROUGH: 250_000_000}
"""Exchanges proposed over all layers."""

STEPS_PER_SLOT = {Effort.QUICK: 2_000, Effort.NORMAL: 10_000, Effort.THOROUGH: 60_000}
"""Exchanges proposed for each usable slot of a layer: small tables take less than all of `STEPS`."""

STEPS_OF_A_RUN = 40
"""Steps for each pair of slots that one walk can use; where there are more, several walks find more."""

RUNS_MAX = 8
PIECE = 1 << 16
"""Steps between two looks at the clock."""

GAIN_MIN = 1e-9
"""Share of the pairs that must be gained: less is rounding."""

COOLING = Cooling(warm=1.0, cold=0.3, light=1.0, heavy=1500.0, cheap=0.3, dear=20.0)
"""How walks go where moves are free; `light` and `heavy` are for one mean copy and scaled to a layer's slots."""

NEAR = COOLING._replace(warm=0.5, light=100.0, cheap=6.0)
"""How they go where moves are counted: a row that is once far from the live one does not find back."""

SALT = 0xC0
"""Keeps the walks' random numbers apart from those of other searches of the same layer."""


def colocated(
    problem: PlanningProblem, limits: Limits, rows: Int32Array, *, target: float | None, expired: Callable[[], bool]
) -> tuple[Int32Array, bool]:
    """The rows of a plan with more pairs on one node, shape (L, P); and whether the time was over before the steps were.

    Rows: a plan that keeps every limit of the problem; it comes back as it is when nothing is known of pairs. target: imbalance
    that every layer may rise to; None = none may rise.
    """
    serving = {problem.topology.node_indices[position] for position in np.flatnonzero(limits.room > 0).tolist()}
    if problem.together is None or len(serving) == 1 or problem.dispatch is Dispatch.NEAREST or has_strict_groups(problem):
        return rows, False
    shares = with_shares(problem, rows)
    layout, account, result, cut_off = Layout.of(problem, limits), MoveAccount(problem), rows.copy(), False
    account.take_all(rows)
    live = np.where(limits.usable.reshape(-1), problem.current.physical_to_logical, EMPTY_SLOT)
    for layer, row in enumerate(rows):
        pairs = problem.together[layer]
        if not pairs.any() or (not problem.from_nothing and np.array_equal(row, live[layer])):
            continue
        task = layer_task(problem, limits, layout, layer)
        if not is_met(task, row.reshape(task.held.shape)):
            continue  # a limit on moves left it so
        search = _LayerWalk(problem, task, layout.kinds, target, None if shares is None else shares[layer], expired)
        search.run(row, pairs, account.intake_left(layer))
        cut_off |= search.cut_off
        if search.found is None:
            continue
        aligned = align_slots(live[layer], search.found, num_ranks=task.num_ranks, usable=task.usable.reshape(-1))
        account.take(layer, aligned)
        result[layer] = aligned
    return result, cut_off


@dataclass(slots=True, eq=False)
class _LayerWalk:
    """The walks of one layer. shares: of the planned row's slots, shape (P,); None = even. found: a better row, shape (P,)."""

    problem: PlanningProblem
    task: LayerTask
    kinds: Int64Array
    target: float | None
    shares: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None
    expired: Callable[[], bool]
    found: Int32Array | None = None
    cut_off: bool = False

    def run(self, row: Int32Array, pairs: Float64Array, intake_max: Int64Array) -> None:
        """Walk from a row, shape (P,), until the steps or the time are over. Pairs: shape (E, E), tokens."""
        task, usable = self.task, self.task.usable.reshape(-1)
        slots = row[usable].astype(np.int32)
        copies = np.bincount(slots[slots >= 0], minlength=task.num_logical)
        even = np.where(slots >= 0, 1.0 / np.maximum(copies, 1)[np.maximum(slots, 0)], 0.0)
        part = even if self.shares is None else self.shares[usable].astype(np.float64)
        ground = self._ground(pairs)
        free = self.problem.from_nothing
        start = walk_from(ground, np.inf, slots, part, 1)
        height = float(start.height.max()) if self.target is None else max(float(start.height.max()), self.target * task.fair)
        intake = np.maximum(intake_max, start.intake)
        moves = MANY if free else int(start.counter[MOVES])
        bounds = Bounds(height, moves, float(start.level[EXTRA]) + GAIN_MIN, intake, free)
        best = Best(slots.copy(), part.copy(), np.full(1, float(start.level[TOGETHER]) + GAIN_MIN))
        begin = best.value[0]
        steps = self._steps()
        runs = int(np.clip(steps // (STEPS_OF_A_RUN * slots.size**2), 1, RUNS_MAX))
        for index in range(runs):
            seed = seed_of(self.problem.seed, SALT, self.task.layer_id, index)
            walk = walk_from(ground, height, slots, part, seed)
            self._wander(ground, bounds, walk, best, steps // runs)
        if best.value[0] > begin:
            found = np.full(row.size, EMPTY_SLOT, np.int32)
            found[usable] = best.slots
            self.found = found

    def _wander(self, ground: Ground, bounds: Bounds, walk: Walk, best: Best, steps: int) -> None:
        """One walk, piece by piece."""
        unit = mean_gain(ground, walk)
        if unit <= 0.0 or ground.fair <= 0.0:
            return
        each = walk.slots.size / max(1, int((self.task.room > 0).sum()))
        cooling = COOLING if bounds.free else NEAR
        cooling = cooling._replace(light=cooling.light * each, heavy=cooling.heavy * each)
        for begin in range(0, steps, PIECE):
            if self.expired():
                self.cut_off = True
                return
            wander(ground, bounds, walk, best, cooling, unit, begin, min(begin + PIECE, steps), steps)

    def _steps(self) -> int:
        """Exchanges proposed in the layer."""
        layers = self.problem.current.num_layers
        if self.problem.work_budget is not None:
            return self.problem.work_budget // layers
        per_slot = STEPS_PER_SLOT[self.problem.effort] * int(self.task.room.sum())
        return min(STEPS[self.problem.effort] // layers, per_slot)

    def _ground(self, pairs: Float64Array) -> Ground:
        """The layer in the kernel's arrays."""
        task, table = self.task, self.problem.current
        weight = pairs.astype(np.float64).copy()
        np.fill_diagonal(weight, 0.0)
        row = table.physical_to_logical[table.layer_ids.index(task.layer_id)]
        held = residencies(row, num_ranks=task.num_ranks, num_logical=task.num_logical)
        expert, rank = np.nonzero(held.T & (task.room > 0)[None, :])
        is_new = np.zeros_like(held) if self.problem.from_nothing else ~held
        return Ground(
            weight=weight / (weight.sum() / 2.0 or 1.0),
            load=task.load,
            fair=task.fair,
            rank_of=np.repeat(np.arange(task.num_ranks), task.room),
            first=np.concatenate(([0], np.cumsum(task.room))).astype(np.int64),
            node_of=task.node_of.astype(np.int64),
            domain_of=task.domain_of.astype(np.int64),
            kinds=self.kinds,
            base=task.base,
            capacity=task.capacity,
            allowed=task.allowed,
            pinned=task.pinned,
            is_new=is_new,
            extra=task.price - ~held,
            live_first=np.searchsorted(expert, np.arange(task.num_logical + 1)).astype(np.int64),
            live_ranks=rank.astype(np.int64),
            spread=task.spread,
        )
