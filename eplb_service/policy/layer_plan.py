"""The plan of one layer: which searches are run, one after another, and which of the rows they found is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eplb_service.policy.front import Point, pareto
from eplb_service.policy.layer_search import Expired, Found, LayerSearch
from eplb_service.policy.layer_task import Int32Array, Int64Array, LayerTask
from eplb_service.policy.one_slot import fewest_moves_one_slot
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.task_layers import is_met

ROUNDING = 1e-9
"""Excess over a height, in fair heights, that is rounding."""

MARGIN_MAX = 0.008
"""Room that a new row leaves below the target, in fair heights, at most."""

AIM_MIN = 1.012
"""Aims are not lowered below this to leave room: from here on, balance costs moves steeply."""

NOISE_MULTIPLE = 2.0
"""Standard deviations of a rank's load, by the sampling noise of its own count, that a new row leaves room for."""

MARGIN_MOVES = 0.15
"""Share of the fewest moves found that may be spent on that room."""

LADDER = 6
"""Heights, evenly spread by ratio, between the plan's and the live row's, that are searched for a front."""

IMPROVING = 0.1
"""Share of the steps for a better row within the limits on moves."""

BOUND_SLACK = 1e-3
"""How close to a lower bound above the target a layer need come, relative."""

LOWEST_SLACK = 1e-3
"""How close to the best height found a layer need come when no row reaches the target, relative."""


def margin_of(task: LayerTask, target: float) -> float:
    """Room to leave below the target, in fair heights, so that the next window's noise does not lift the row over it."""
    tokens = float(task.load.sum())
    if tokens <= 0:
        return 0.0
    noise = NOISE_MULTIPLE * float(np.sqrt((task.room > 0).sum() / tokens))
    return max(0.0, min(noise, MARGIN_MAX, target - AIM_MIN))


@dataclass(slots=True, eq=False)
class LayerPlanner:
    """One layer. target: most imbalance; bound: a lower bound on imbalance; steps: annealing steps in all.

    settled: no search is needed. legal: whether the live row may stay. chosen: the row that is taken; at first the live one,
    mended. best: the cheapest row at the target; aimed: the cheapest at the aim; fallback: what is taken when no row at the
    target is known; None = none yet.
    """

    task: LayerTask
    target: float
    bound: float
    steps: int
    seed: int
    moves_max: int
    intake_max: Int64Array
    even: bool
    legal: bool = field(init=False)
    settled: bool = field(init=False, default=False)
    chosen: Found = field(init=False)
    best: Found | None = field(init=False, default=None)
    aimed: Found | None = field(init=False, default=None)
    fallback: Found | None = field(init=False, default=None)
    search: LayerSearch = field(init=False)

    def __post_init__(self) -> None:
        """Mend the row where it is not legal; find out whether a search is needed."""
        self.legal = is_met(self.task, self.task.held)
        start = self.task.held if self.legal else repaired_row(self.task).reshape(self.task.held.shape)
        self.search = LayerSearch(self.task, start, self.seed, self.moves_max, self.intake_max)
        self.chosen = self.search.rest
        self.settled = not self.task.load.any() or self.chosen.height <= self.target + ROUNDING
        if self.even and not self.settled and int(self.task.room.max()) <= 1:
            self._settle_exactly()

    @property
    def reachable(self) -> float:
        """The target, or what is next to the lower bound where that is higher."""
        return max(self.target, self.bound * (1.0 + BOUND_SLACK))

    @property
    def aim(self) -> float:
        """The height that is looked for first: the target less room for noise."""
        return max(self.reachable - margin_of(self.task, self.target), min(self.reachable, self.bound * (1.0 + BOUND_SLACK)))

    @property
    def met(self) -> bool:
        """Whether the chosen row is at or under the target."""
        return not self.task.load.any() or self.chosen.height <= self.target + ROUNDING

    def _settle_exactly(self) -> None:
        """One slot a rank needs no search: the fewest moves, or the best balance where the target is out of reach."""
        bins = fewest_moves_one_slot(self.task, self.target)
        if bins is None:
            return
        exact = self.search.found(bins[self.task.usable].astype(np.int32))
        if exact.moves <= self.moves_max:
            self.chosen = exact
            self.settled = True

    def look(self, share: float, expired: Expired) -> None:
        """Look for the fewest moves to the aim with a share of the steps."""
        if self.settled:
            return
        self._note(self.search.fewest(self.aim, int(self.steps * share), expired))

    def look_at_target(self, share: float, expired: Expired) -> None:
        """Look for the fewest moves to the target itself, if the aim is lower; for the best there is, if none was found."""
        if self.settled:
            return
        steps = int(self.steps * share)
        if self.best is None:
            self._look_for_lowest(steps, expired)
        elif self.aim < self.reachable:
            self._note(self.search.fewest(self.reachable, steps, expired))

    def _look_for_lowest(self, steps: int, expired: Expired) -> None:
        """No row at the target is known: the best balance, then few moves to come close to it."""
        low = self.search.lowest(self.search.lowest_known(), np.inf, steps // 2, expired)
        close = max(self.reachable, low.height * (1.0 + LOWEST_SLACK))
        found = self.search.fewest(close, steps - steps // 2, expired)
        self.fallback = low if found is None or found.moves >= low.moves else found
        self._note(self.fallback)

    def level(self, share: float, expired: Expired) -> None:
        """Better balance at the price of the row that was chosen, or at what room for noise may cost."""
        if self.settled or self.chosen is self.search.rest:
            return
        price_max = self.chosen.price if self.best is None or self.chosen is self.aimed else self._affordable(self.best)
        self.chosen = self.search.lowest(self.chosen, price_max, int(self.steps * share), expired)

    def _affordable(self, best: Found) -> float:
        """The most that a row with room for noise may cost."""
        return best.price + (int(best.moves * MARGIN_MOVES) if self.aim < self.reachable else 0)

    def _note(self, found: Found | None) -> None:
        """Know a row, and choose among those known."""
        if (
            found is not None
            and found.height <= self.reachable + ROUNDING
            and (self.best is None or found.price < self.best.price)
        ):
            self.best = found
        if found is not None and found.height <= self.aim + ROUNDING and (self.aimed is None or found.price < self.aimed.price):
            self.aimed = found
        if self.best is None:
            self.chosen = self.chosen if self.fallback is None else self.fallback
        elif self.aimed is not None and self.aimed.price <= self._affordable(self.best):
            self.chosen = self.aimed
        else:
            self.chosen = self.best

    def widen(self, share: float, expired: Expired) -> None:
        """Fill the archive between the row that costs nothing and the plan, and a little beyond, for a front."""
        worst, floor = self.search.rest.height - 1.0, max(self.bound - 1.0, 0.0)
        near = max(self.aim - 1.0, 1e-3)
        if not self.task.load.any() or worst <= 0 or int(self.task.room.max()) < 1:
            return
        limits = [1.0 + max(floor, near / 2.0)]
        limits += [1.0 + near * (worst / near) ** (step / LADDER) for step in range(1, LADDER)] if worst > near else []
        for limit in limits:
            self.search.fewest(limit, int(self.steps * share / len(limits)), expired)

    def front(self, start: Point) -> tuple[Point, ...]:
        """The layer's Pareto front, in tokens: of the start, of the chosen row and of what the searches saw."""
        search, fair = self.search, self.task.fair
        points = [start, self.point(self.chosen)]
        points += [
            Point(search.row(search.rows[moves]), moves, float(search.heights[moves] * fair))
            for moves in np.flatnonzero(np.isfinite(search.heights)).tolist()
        ]
        return pareto(points)

    @property
    def row(self) -> Int32Array:
        """The chosen row, shape (P,)."""
        return self.search.row(self.chosen.slots)

    @property
    def held(self) -> Point:
        """The live row as it is, legal or not."""
        return Point(self.task.held.reshape(-1), 0, float(self.task.heights().max()))

    def gap(self, point: Point) -> float:
        """Tokens of the busiest rank above the target."""
        return point.tokens - self.target * self.task.fair

    def improve(self, point: Point, moves_max: int, intake_max: Int64Array, expired: Expired) -> Point:
        """The least height that a short search finds from a row within other limits on moves."""
        self.search.moves_max, self.search.intake_max = moves_max, np.minimum(intake_max, self.intake_max)
        begin = self.search.found(point.row.reshape(self.task.held.shape)[self.task.usable])
        return self.point(self.search.lowest(begin, np.inf, int(self.steps * IMPROVING), expired))

    def point(self, found: Found) -> Point:
        """A row that was found as a point of a front."""
        return Point(self.search.row(found.slots), found.moves, found.height * self.task.fair)
