"""The plan of one layer: which searches are run, one after another, and which of the rows they found is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eplb_service.moves import align_slots
from eplb_service.policy.anneal_routes import Routes
from eplb_service.policy.front import Point, pareto
from eplb_service.policy.layer_search import Expired, Found, LayerSearch
from eplb_service.policy.layer_task import Int32Array, Int64Array, LayerTask
from eplb_service.policy.matching import row_near
from eplb_service.policy.one_slot import fewest_moves_one_slot
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.task_layers import is_met, plan_task

ROUNDING = 1e-9
"""Excess over a height, in fair heights, that is rounding."""

NOISE_MULTIPLE = 4.0
"""Standard deviations of a rank's load, by the sampling noise of its count, that explain an excess over the target."""

NOISE_SHARE_MAX = 0.7
"""Most that noise may explain, as a share of the target's distance from perfect balance: 1.02 is held to 1.034."""

TOKENS_MIN = 10_000
"""Tokens that a rank serves on average from which on loads are taken for counts with sampling noise; below they are exact."""

LADDER = 6
"""Heights, evenly spread by ratio, between the plan's and the live row's, that are searched for a front."""

IMPROVING = 0.1
"""Share of the steps for a better row within the limits on moves."""

GREEDY_STEPS = 200
"""Exchanges of the greedy row that a search starts from when it has found none at the target itself."""

BOUND_SLACK = 1e-3
"""How close to a lower bound above the target a layer need come, relative."""

LOWEST_SLACK = 1e-3
"""How close to the best height found a layer need come when no row reaches the target, relative."""


def noise_allowance(task: LayerTask, target: float) -> float:
    """Excess over the target, in fair heights, that sampling noise alone explains: no reason to move anything.

    A rank that serves n tokens on average shows n plus or minus sqrt(n) of them, whatever the placement: a plan that just meets
    the target is over it in the next window by as much, and would be planned anew for nothing.
    """
    tokens = float(task.load.sum()) / max(1, int((task.room > 0).sum()))
    if tokens < TOKENS_MIN:
        return 0.0
    return min(NOISE_MULTIPLE / float(np.sqrt(tokens)), NOISE_SHARE_MAX * (target - 1.0))


@dataclass(slots=True, eq=False)
class LayerPlanner:
    """One layer. target: most imbalance; bound: a lower bound on imbalance; steps: annealing steps in all.

    even: whether copies share evenly. kinds: ranks of equal numbers may exchange what they hold, shape (R,). routes: of the
    layer's tokens; None = even split.
    settled: no search is needed. legal: whether the live row may stay. chosen: the row that is taken; at first the live one,
    mended. best: the cheapest row at the target; fallback: what is taken when no row at the target is known; None = none yet.
    """

    task: LayerTask
    target: float
    bound: float
    steps: int
    seed: int
    moves_max: int
    intake_max: Int64Array
    even: bool
    kinds: Int64Array
    routes: Routes | None = None
    legal: bool = field(init=False)
    settled: bool = field(init=False, default=False)
    chosen: Found = field(init=False)
    best: Found | None = field(init=False, default=None)
    fallback: Found | None = field(init=False, default=None)
    search: LayerSearch = field(init=False)

    def __post_init__(self) -> None:
        """Mend the row where it is not legal; find out whether a search is needed."""
        self.legal = is_met(self.task, self.task.held)
        start = self.task.held if self.legal else repaired_row(self.task).reshape(self.task.held.shape)
        self.search = LayerSearch(self.task, start, self.seed, self.moves_max, self.intake_max, self.routes)
        self.chosen = self.search.rest
        allowance = noise_allowance(self.task, self.target) if self.legal else 0.0
        self.settled = not self.task.load.any() or self.chosen.height <= self.target + allowance + ROUNDING
        if self.even and not self.settled and int(self.task.room.max()) <= 1:
            self._settle_exactly()

    @property
    def reachable(self) -> float:
        """The target, or what is next to the lower bound where that is higher."""
        return max(self.target, self.bound * (1.0 + BOUND_SLACK))

    @property
    def met(self) -> bool:
        """Whether the chosen row is at or under the target."""
        return not self.task.load.any() or self.chosen.height <= self.target + ROUNDING

    @property
    def missed(self) -> bool:
        """Whether no search found a row at the target, or next to the bound."""
        return self.best is None and not self.settled

    @property
    def excused(self) -> bool:
        """Whether the live row is over the target by no more than sampling noise, and was left for that."""
        return self.settled and not self.met and self.chosen is self.search.rest

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
        """Look for the fewest moves to the target with a share of the steps."""
        if not self.settled:
            self._note(self.search.fewest(self.reachable, int(self.steps * share), expired))

    def look_again(self, share: float, expired: Expired) -> None:
        """Look once more, or for the best balance there is when no row at the target is known."""
        if self.best is not None:
            self.look(share, expired)
        elif not self.settled and not expired():  # greedy's row is no answer to a search that had no time
            self._look_for_lowest(int(self.steps * share), expired)

    def last_look(self, share: float, expired: Expired) -> None:
        """Where no row at the target is known: once more, and the lower of the two is taken."""
        if not self.missed or expired():
            return
        known = self.fallback
        self._look_for_lowest(int(self.steps * share), expired)
        if self.best is None and known is not None and self.fallback is not None and known.height <= self.fallback.height:
            self.fallback = known
            self._note(known)

    def _look_for_lowest(self, steps: int, expired: Expired) -> None:
        """No row at the target is known: the best balance, then few moves to come close to it.

        Under nearest dispatch first the target again, whatever static tables would make of it.
        """
        if self.search.layer.misplaced_price > 0.0:
            self.search.ignore_static_tables()
            self._note(self.search.fewest(self.reachable, steps // 2, expired))
            if self.best is not None:
                return
            steps -= steps // 2
        low = self.search.lowest(self._lowest_begin(), np.inf, steps // 4, expired)
        close = max(self.reachable, low.height * (1.0 + LOWEST_SLACK))
        low = self.search.cheaper(low, close, steps // 2, expired)
        found = self.search.fewest(close, steps - 3 * (steps // 4), expired)
        self.fallback = low if found is None or found.cost >= low.cost else found
        self._note(self.fallback)

    def _lowest_begin(self) -> Found:
        """The lowest row known; where moves are not limited, greedy's too, which is built from nothing."""
        known = self.search.lowest_known()
        if not self.even or self.moves_max < int(self.task.room.sum()):
            return known
        off_home = self.task.price > 1.0
        bins = plan_task(self.task, off_home=off_home, target=self.target, steps_max=GREEDY_STEPS)
        live = self.task.held.reshape(-1)
        row = row_near(bins, live, self.task.usable, self.kinds, self.task.num_logical).reshape(self.task.held.shape)
        if not is_met(self.task, row):
            return known
        if self.task.pinned.any():  # a search leaves those slots alone in which the start holds what is pinned
            start = self.search.start.reshape(-1)
            row = align_slots(start, row.reshape(-1), num_ranks=self.task.num_ranks, usable=self.task.usable).reshape(row.shape)
        greedy = self.search.found(row[self.task.usable])
        return greedy if greedy.height < known.height else known

    def level(self, share: float, expired: Expired) -> None:
        """Better balance at the price of the row that was chosen."""
        if self.settled or self.chosen is self.search.rest:
            return
        self.chosen = self.search.lowest(self.chosen, self.chosen.price, int(self.steps * share), expired)

    def _note(self, found: Found | None) -> None:
        """Know a row, and choose among those known."""
        within = found is not None and found.height <= self.reachable + ROUNDING
        if found is not None and within and (self.best is None or found.cost < self.best.cost):
            self.best = found
        self.chosen = self.best or self.fallback or self.chosen

    def widen(self, share: float, expired: Expired) -> None:
        """Fill the archive between the row that costs nothing and the plan, and a little beyond, for a front."""
        worst, floor = self.search.rest.height - 1.0, max(self.bound - 1.0, 0.0)
        near = max(self.reachable - 1.0, 1e-3)
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
