"""One layer of the exact policy: the best row known, what is proven of it, and the searches that better either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from eplb_service.policy.layer_packing import few_ranks, whole_layer
from eplb_service.policy.layer_task import BoolArray, Float64Array, Int32Array, Int64Array, LayerTask
from eplb_service.policy.move_bounds import moves_bound
from eplb_service.policy.move_limits import packed
from eplb_service.policy.packing_model import VARIABLES_MAX, Aim, Solution, solve
from eplb_service.policy.task_layers import is_met

OPTIMAL_GAP = 1e-6
"""Relative gap below which a row counts as optimal: the rounding of loads to integers."""

GAIN_MIN = 1e-9
"""Relative gain in height below which a row is not better: rounding."""

RANKS_AT_ONCE = 4
"""Ranks that are packed anew together where the whole layer is too large: the busiest one and some others."""

WORK_AT_ONCE = 0.1
"""Deterministic time for those."""

TRIES_MAX = 12
"""Choices of other ranks that are tried in vain before a layer is left."""

WORK_MIN = 0.002
"""Least deterministic time that a search is charged, for building its model."""

BUILD_S_PER_VARIABLE = 4e-5
"""Seconds that building takes at most, for each variable of a model: one that would end after the time limit is not begun."""

TARGET_SHARE = 0.5
"""Share of a layer's deterministic time for finding a row at the target when none is known."""

BOUND_SHARE = 0.25
"""Share of a layer's deterministic time for the bound on moves, where the exact model can be built after it."""

BOUND_UNITS_PER_S = 2.0
"""Work of the bound on moves (see `move_bounds`) for one unit of deterministic time: both about a second."""


@dataclass(slots=True, eq=False)
class ExactLayer:
    """One layer.

    task: without homes for groups. price: shape (R, E), what a residency costs, group prices included. group_of: shape (E,),
    strict groups, None = none. off_home: shape (R, E), residencies whose number must not grow (soft groups).
    target: most imbalance; None = the best balance.
    bins: the best row known, shape (R, S), -1 padded at the end. bound: proven, no row is lower (tokens over capacity).
    moves_bound: proven, no row at the target takes fewer moves; None = nothing. seconds_left: until the hard stop.
    too_large: variables of the whole model where it was not built for its size.
    """

    task: LayerTask
    price: Float64Array
    group_of: Int64Array | None
    off_home: BoolArray
    target: float | None
    bins: Int32Array
    bound: float
    seed: int
    seconds_left: Callable[[], float]
    moves_bound: int | None = None
    too_large: int = 0
    improved: bool = False
    cut_off: bool = False
    legal: bool = field(init=False)

    def __post_init__(self) -> None:
        """Find out whether the row keeps all rules: the models know no others."""
        self.legal = is_met(self.task, self.bins) and self._groups_stay()
        if self.task.fair <= 0 or not self.task.load.any():
            self.bound = self.height

    @property
    def height(self) -> float:
        """Of the best row known."""
        return float(self.task.heights(self.bins).max())

    @property
    def limit(self) -> float:
        """Height at the target."""
        return np.inf if self.target is None else self.target * self.task.fair * (1 + GAIN_MIN)

    @property
    def cost(self) -> float:
        """Price of the best row known."""
        return self._price_of(self.bins)

    @property
    def moves(self) -> int:
        """Residencies of the best row known that are new."""
        new = self.task.price >= 1.0
        return sum(int(new[rank, held[held >= 0]].sum()) for rank, held in enumerate(self.bins))

    @property
    def by_moves(self) -> bool:
        """Whether the target is met, so that moves are what can be better."""
        return self.target is not None and self.height <= self.limit

    @property
    def gap(self) -> float:
        """Relative gap to what is proven: of moves at the target, else of height."""
        if self.by_moves:
            return float(self.moves - (self.moves_bound or 0))
        return self.height / self.bound - 1.0 if self.bound > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether nothing better is possible, up to rounding."""
        return self.gap <= (0.0 if self.by_moves else OPTIMAL_GAP)

    def _price_of(self, bins: Int32Array) -> float:
        return float(sum(self.price[rank, held[held >= 0]].sum() for rank, held in enumerate(bins)))

    def _groups_stay(self) -> bool:
        """Whether every strict group of the row is on one node."""
        if self.group_of is None:
            return True
        at = {
            (int(self.group_of[e]), int(self.task.node_of[rank])) for rank, held in enumerate(self.bins) for e in held if e >= 0
        }
        return len(at) == np.unique(self.group_of).size

    def _off_home_count(self) -> int:
        return sum(int(self.off_home[rank, held[held >= 0]].sum()) for rank, held in enumerate(self.bins))

    def search(self, work: float) -> float:
        """Better the row and prove more within an amount of deterministic time; returns what was used."""
        used = 0.0
        if self.target is not None and not self.by_moves and not self.optimal:
            used += self._whole(work * TARGET_SHARE, by_price=True)
        if self.legal and not self.by_moves and not self.optimal:
            used += self._lower(work - used)
        if self.by_moves:
            used += self._bound_moves((work - used) * (BOUND_SHARE if self._is_small() else 1.0))
            if not self.optimal:
                used += self._whole(work - used, by_price=True)
        return used

    def _lower(self, work: float) -> float:
        """A lower row: by the whole model, or by packing a few ranks at a time where that is too large."""
        used = self._whole(work, by_price=False)
        tries = 0
        while self.too_large and not self.optimal and tries < TRIES_MAX and used < work and not self._over():
            gained, cost = self._repack(min(WORK_AT_ONCE, work - used), tries)
            tries = 0 if gained else tries + 1
            used += cost
        return used

    def _over(self, variables: int = 0) -> bool:
        """Whether the time is over, or would be when a model of so many variables is built; that is noted."""
        over = self.seconds_left() <= variables * BUILD_S_PER_VARIABLE
        self.cut_off |= over
        return over

    def _is_small(self) -> bool:
        """Whether the exact model of the moves can be built."""
        made = whole_layer(self.task, self.limit, self.off_home, self._off_home_count(), self.group_of)
        return made is not None and made[0].num_variables <= VARIABLES_MAX

    def _whole(self, work: float, *, by_price: bool) -> float:
        """The exact model of the layer. Returns the deterministic time used."""
        height = self.limit if by_price else self.height
        made = whole_layer(replace(self.task, price=self.price), height, self.off_home, self._off_home_count(), self.group_of)
        if made is None or work <= 0:
            return 0.0
        packing, ranks = made
        if packing.num_variables > VARIABLES_MAX:
            self.too_large = packing.num_variables
            return 0.0
        if self._over(packing.num_variables):
            return 0.0
        bound = float(self.moves_bound or 0) if by_price else self.bound
        aim = Aim(height=height, bound=bound, by_price=by_price)
        solution = solve(packing, aim, self.bins[ranks], work=work, seconds_left=self.seconds_left, seed=self.seed)
        if not solution.proven and self.seconds_left() <= 0:
            self.cut_off = True
        if solution.bins is not None:
            bins = np.full_like(self.bins, -1)
            bins[ranks] = solution.bins
            self._take(bins, by_price=by_price)
        self._note_bound(solution, by_price=by_price)
        return max(solution.work, WORK_MIN)

    def _note_bound(self, solution: Solution, *, by_price: bool) -> None:
        """Keep what the whole model proved; nothing where rows that it does not know (an expert twice on a rank) are legal."""
        if not self.task.distinct or self.off_home.any():
            return
        if by_price and solution.bound == np.inf:
            self.bound = max(self.bound, min(self.limit * (1 - GAIN_MIN), self.height))
        elif by_price and self.by_moves:
            self.moves_bound = max(self.moves_bound or 0, min(self.moves, int(np.ceil(solution.bound - 1e-6))))
        else:
            self.bound = max(self.bound, min(solution.bound, self.height))

    def _bound_moves(self, work: float) -> float:
        """The dual bound on moves."""
        if self.moves_bound is not None or work <= 0:
            return 0.0
        if self.seconds_left() <= work:
            self.cut_off = True
            return 0.0
        units = work * BOUND_UNITS_PER_S
        self.moves_bound = moves_bound(self.task, self.target or 1.0, work=units, enough=self.moves)
        self.moves_bound = min(self.moves_bound, self.moves)
        return work if self.moves_bound < self.moves else WORK_MIN

    def _repack(self, work: float, turn: int) -> tuple[bool, float]:
        """Pack the busiest rank and a few others anew: the least busy ones, other ones with every turn. Gained, time used."""
        heights = self.task.heights(self.bins)
        busiest = int(heights.argmax())
        near = np.flatnonzero((self.task.room > 0) & (np.arange(heights.size) != busiest))
        if self.group_of is not None:
            near = near[self.task.node_of[near] == self.task.node_of[busiest]]
        order = near[np.argsort(heights[near], kind="stable")]
        others = np.roll(order, -turn * (RANKS_AT_ONCE - 1))[: RANKS_AT_ONCE - 1]
        ranks = np.sort(np.append(others, busiest))
        packing, experts = few_ranks(self.task, self.bins, ranks, self.off_home, self._off_home_count())
        if others.size == 0 or packing.num_variables > VARIABLES_MAX or self._over(packing.num_variables):
            return False, work
        index = np.full(self.task.num_logical + 1, -1, np.int32)
        index[experts] = np.arange(experts.size)
        aim = Aim(height=float(heights[busiest]), bound=self.bound)
        hint = index[self.bins[ranks]]
        solution = solve(packing, aim, hint, work=work, seconds_left=self.seconds_left, seed=self.seed)
        if solution.bins is None:
            return False, max(solution.work, WORK_MIN)
        bins = self.bins.copy()
        bins[ranks] = np.where(solution.bins >= 0, experts[solution.bins], -1)
        return self._take(bins, by_price=False), max(solution.work, WORK_MIN)

    def _take(self, bins: Int32Array, *, by_price: bool) -> bool:
        """Keep bins that are better and keep all rules."""
        bins = packed(bins)
        if not is_met(self.task, bins):
            return False
        height = float(self.task.heights(bins).max())
        if by_price:
            cheaper = not self.by_moves or self._price_of(bins) < self.cost - GAIN_MIN
            better = height <= self.limit and cheaper
        else:
            before = np.sort(self.task.heights(self.bins))[::-1]
            after = np.sort(self.task.heights(bins))[::-1]
            lower = height < self.height * (1 - GAIN_MIN)
            better = lower or (height <= self.height and _fewer_at_top(after, before))
        if better:
            self.bins = bins
            self.improved = True
        return better


def _fewer_at_top(after: Float64Array, before: Float64Array) -> bool:
    """Whether fewer ranks are as high as the busiest."""
    top = before[0] * (1 - GAIN_MIN)
    return int((after >= top).sum()) < int((before >= top).sum())
