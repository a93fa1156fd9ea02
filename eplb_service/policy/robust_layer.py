"""One layer of the robust policy: its scenarios in arrays, its search, and the points found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.moves import residencies
from eplb_service.policy.anneal import PATIENCE
from eplb_service.policy.front import Point, pareto
from eplb_service.policy.layer_task import BoolArray, Float64Array, Int32Array, LayerTask
from eplb_service.policy.matching import align
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.robust_kernel import RobustLayer, RobustRecord, RobustState, anneal_scenarios
from eplb_service.policy.task_layers import is_met

TEMPERATURE = 0.1
"""Temperature at first, in what a move is worth usually."""


@dataclass(slots=True, eq=False)
class ScenarioLayer:
    """A layer to search.

    loads: shape (K, E), tokens in each scenario; weights: shape (K,), adding up to 1. fresh: shape (R, E), residencies that are
    moves. rest: the live row, shape (P,), mended where it is not legal. start: the row that searches begin with. legal: the
    live row keeps every constraint.
    """

    task: LayerTask
    loads: Float64Array
    weights: Float64Array
    fresh: BoolArray
    rest: Int32Array
    start: Int32Array
    legal: bool

    @classmethod
    def of(cls, task: LayerTask, loads: Float64Array, weights: Float64Array, row: Int32Array) -> ScenarioLayer:
        """From the live row, shape (P,); one that is not legal is repaired. Raises InvalidInputError when that cannot be."""
        fresh = ~residencies(row, num_ranks=task.num_ranks, num_logical=task.num_logical)
        legal = is_met(task, task.held) and bool((row.reshape(task.held.shape)[~task.usable] < 0).all())
        rest = row if legal else repaired_row(task)
        return cls(task, loads, weights, fresh, rest, rest, legal)

    @property
    def idle(self) -> bool:
        """Whether no scenario has any load."""
        return not self.loads.any()

    @property
    def fair(self) -> float:
        """Height of perfect balance in the mean of the scenarios, tokens."""
        tokens = float(self.weights @ self.loads.sum(axis=1))
        own = self.task.load.sum()
        return self.task.fair * (tokens / float(own) if own > 0 else 1.0)

    def bases(self) -> Float64Array:
        """Work of its own of each rank in each scenario, shape (R, K), tokens: in proportion to the scenario's."""
        own = float(self.task.load.sum())
        tokens = self.loads.sum(axis=1)
        base: Float64Array = self.task.base[:, None] * (tokens / own if own > 0 else np.zeros_like(tokens))[None, :]
        return base

    def moves_of(self, row: Int32Array) -> int:
        """Moves from the live row."""
        there = residencies(row, num_ranks=self.task.num_ranks, num_logical=self.task.num_logical)
        return int((there & self.fresh).sum())

    def expected(self, row: Int32Array) -> float:
        """Expected imbalance: the scenarios' mean height of the busiest rank over the fair one. Row: shape (P,)."""
        if self.idle:
            return 1.0
        bins = np.asarray(row, np.int32).reshape(self.task.held.shape)
        copies = np.bincount(bins[bins >= 0], minlength=self.task.num_logical)
        share = np.vstack([(self.loads / np.maximum(copies, 1)).T, np.zeros(self.weights.size)])
        work = share[bins].sum(axis=1) + self.bases()
        return float((work / self.task.capacity[:, None]).max(axis=0) @ self.weights) / self.fair

    def search(self, worths: tuple[float, ...], *, usual_worth: float, steps: int, seed: int) -> tuple[Point, ...]:
        """The points found by ascending moves and falling cost; what `rest` and `start` hold among them if nothing beats it.

        worths: what a move must save, in expected imbalance, in each of as many searches that share the steps.
        """
        arrays, slots = self._arrays()
        if not arrays.movable.size:
            steps = 0  # all that is there is pinned: nothing to try
        first = self.start.reshape(-1)[slots].astype(np.int32)
        record = RobustRecord(np.full(slots.size + 1, np.inf), np.tile(first, (slots.size + 1, 1)))
        rest = _state_of(arrays, self.rest[slots].astype(np.int32))
        anneal_scenarios(arrays, rest, record, PATIENCE, 0.0, 0.0, 0, seed)
        for index, worth in enumerate(worths):
            state = _state_of(arrays, first)
            temperature = TEMPERATURE * max(worth, usual_worth)
            anneal_scenarios(arrays, state, record, PATIENCE, worth, temperature, steps // len(worths), seed + index)
        points = []
        for moves in np.flatnonzero(np.isfinite(record.costs)).tolist():
            row = np.full(self.start.size, -1, np.int32)
            row[slots] = record.rows[moves]
            aligned = align(row.reshape(self.task.held.shape), self.task.held, self.task.usable)
            points.append(Point(aligned.reshape(-1), moves, float(record.costs[moves])))
        return pareto(points)

    def _arrays(self) -> tuple[RobustLayer, npt.NDArray[np.int64]]:
        """The layer for the kernel, and the positions of its slots in a row."""
        task = self.task
        slots = np.flatnonzero(task.usable.reshape(-1))
        rank_of = slots // task.held.shape[1]
        expert_at = self.start.reshape(-1)[slots]
        pinned = (expert_at >= 0) & task.pinned[rank_of, expert_at]
        closed = ~task.allowed
        return RobustLayer(
            loads=np.ascontiguousarray(self.loads.T) / self.fair,
            base=self.bases() / self.fair,
            weights=self.weights,
            inverse=1.0 / task.capacity,
            num_serving=int((task.room > 0).sum()),
            rank_of=rank_of,
            movable=np.flatnonzero(~pinned),
            closed=closed,
            price=task.price,
            fresh=self.fresh,
            copies_min=task.copies_min,
            copies_max=task.copies_max,
            spread=task.spread,
            domain_of=task.domain_of,
        ), slots


def _state_of(layer: RobustLayer, expert_at: Int32Array) -> RobustState:
    """A state that holds what the slots hold; heights are reckoned by the search."""
    num_ranks, num_logical = layer.closed.shape
    num_scenarios = layer.weights.size
    return RobustState(
        expert_at=expert_at.copy(),
        count_on=np.zeros((num_ranks, num_logical), np.int64),
        copies=np.zeros(num_logical, np.int64),
        height=np.zeros((num_ranks, num_scenarios)),
        power=np.zeros((num_ranks, num_scenarios)),
        power_sum=np.zeros(num_scenarios),
        moves=np.zeros(1, np.int64),
        new_height=np.zeros((num_ranks, num_scenarios)),
        new_power=np.zeros((num_ranks, num_scenarios)),
        new_sum=np.zeros(num_scenarios),
    )
