"""Searches of one layer by annealing, in Python's hands: stages one after another, and the best rows that they have found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from eplb_service.policy.anneal import BLOCK, GAIN_MIN, NO_OVERLOAD, Record, Schedule, anneal
from eplb_service.policy.anneal_changes import LIMIT, PRICE_CEILING, PRICE_MAX, PRICE_WEIGHT, ROUTE_MAX, new_scratch
from eplb_service.policy.anneal_routes import WEIGHTED, Routes
from eplb_service.policy.anneal_state import (
    Float64Array,
    Int32Array,
    Int64Array,
    Layer,
    bins_of,
    layer_of,
    new_state,
    worth_of,
)
from eplb_service.policy.layer_task import LayerTask
from eplb_service.policy.needed_copies import with_copies
from eplb_service.policy.shares import weighted_height

PIECE = 1024 * BLOCK
"""Steps between two looks at the clock."""

ARCHIVE_SLOTS = 1 << 21
"""Bound on the slots of all rows that one layer's archive keeps."""

MANY = 1 << 40
"""More moves than any layer has."""

ROUTES_SLACK = 1e-6
"""How much dearer routes may get for a lower height, in moves: rounding."""

FEWEST = Schedule(
    temperature_first=0.15,
    temperature_last=0.2,
    weight_first=3.0,
    weight_rise=round(math.log(200 / 3), 9),
    ramp=0.7,
    rise=0.01,
    fall=0.03,
    weight_min=5.0,
    swap=128,
    back=11,
    replace=106,
    empty=1,
    hot=60,
    changed=210,
    lower=False,
)
"""How the fewest moves are looked for. Tried against some hundred other schedules on tables of 64 to 512 experts, 8 to 64 ranks
and several skews, planned from linear maps and after drift: better in sum, though not on each."""

CHEAPER = FEWEST._replace(weight_first=20.0, weight_rise=round(math.log(10.0), 9), ramp=0.5)
"""How a balanced row that moves much is brought nearer to the live one: overload weighs from the first step on."""

LOWEST = FEWEST._replace(weight_first=100.0, weight_rise=round(math.log(10.0), 9), lower=True)
"""How the least height within a price is looked for."""

GROUPED = FEWEST._replace(
    temperature_first=0.06,
    temperature_last=0.02,
    weight_first=0.7,
    weight_rise=round(math.log(50.0), 9),
    ramp=0.4,
    rise=0.002,
    fall=0.002,
    weight_min=1.5,
    hot=100,
)
"""The same where some residencies are dear (soft groups), in units of that price: few decide, so it is warm and slow."""

DEAR, DEAREST = 2.0, 20.0
"""Price above that of a move from which residencies are dear, and above which dearer ones are looked for no differently."""


def schedule_for(task: LayerTask) -> Schedule:
    """How the fewest moves of a layer are looked for."""
    price = float(np.where(task.allowed, task.price, 0.0).max()) - 1.0
    if price <= DEAR:
        return FEWEST
    price = min(price, DEAREST)
    return GROUPED._replace(
        temperature_first=GROUPED.temperature_first * price,
        temperature_last=GROUPED.temperature_last * price,
        weight_first=GROUPED.weight_first * price,
        weight_min=GROUPED.weight_min * price,
    )


STEPS_OF_A_RUN = 60
"""Steps for each pair of slots that one search can use; where there are more, several searches find more."""

RUNS_MAX = 16
"""Most searches instead of one."""

WARMER = (1.0, 4.0, 2.0, 8.0)
"""Factors of the temperature of one search after another: in tiny layers each change is dear."""

Expired = Callable[[], bool]
"""Whether the time is over."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A row of a layer. slots: experts of its usable slots, (N,). height: over the fair one. moves, price: of residencies.

    routes: price of hops and of what static tables misplace, 0 under plain even split.
    """

    slots: Int32Array
    height: float
    moves: int
    price: float
    routes: float = 0.0

    @property
    def cost(self) -> float:
        """Price of residencies and routes."""
        return self.price + self.routes


@dataclass(slots=True, eq=False)
class LayerSearch:
    """Searches of one layer. Start: shape (R, S), a legal row, as near the live one as legality allows.

    moves_max: most moves of the layer; intake_max: of each rank, shape (R,). routes: of its tokens; None = even split.
    rest: the start as found. heights, rows: the archive: least height with each number of moves, and its slots.
    cut_off: whether the time was over before the steps were.
    """

    task: LayerTask
    start: Int32Array
    seed: int
    moves_max: int
    intake_max: Int64Array
    routes: Routes | None = None
    rest: Found = field(init=False)
    layer: Layer = field(init=False)
    heights: Float64Array = field(init=False)
    rows: Int32Array = field(init=False)
    cut_off: bool = field(init=False, default=False)
    _searches: int = field(init=False, default=0)
    _width: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Arrays of the layer, and an archive that holds the start."""
        self.layer, slots = layer_of(self.task, self.start, self.routes)
        copies = np.bincount(slots[slots >= 0], minlength=self.task.num_logical)
        # Copies beyond the first on a rank are there from the start; one more may be there in the midst of a change.
        self._width = min(int(copies.max()) + self.task.num_ranks, slots.size) + 1
        self.rest = self.found(slots)
        most = min(slots.size, self.moves_max, max(self.rest.moves, ARCHIVE_SLOTS // slots.size))
        self.heights = np.full(most + 1, np.inf)
        self.rows = np.zeros((most + 1, slots.size), np.int32)
        if self.rest.moves <= most:
            self.heights[self.rest.moves] = self.rest.height
            self.rows[self.rest.moves] = slots

    def found(self, slots: Int32Array) -> Found:
        """What a row is worth, with the best shares under weighted dispatch. Slots: shape (N,)."""
        height, moves, price, routes = worth_of(self.layer, slots, self._width)
        if self.layer.dispatch == WEIGHTED and self.task.fair > 0:
            height = weighted_height(self.task, bins_of(self.task, slots)) / self.task.fair
        return Found(slots.copy(), float(height), int(moves), float(price), float(routes))

    def row(self, slots: Int32Array) -> Int32Array:
        """A row of all slots, shape (P,), -1 = empty."""
        return bins_of(self.task, slots).reshape(-1)

    def fewest(self, limit: float, steps: int, expired: Expired, schedule: Schedule | None = None) -> Found | None:
        """Look for the cheapest row at or under a height limit, from the start. None when none was found.

        Steps that are more than a search can use go to several, at temperatures of their own.
        """
        layer, slots = with_copies(self.layer, self.rest.slots, limit)
        begin = self.found(slots)
        if begin.moves > self.moves_max:
            layer, begin = self.layer, self.rest
        best = begin if begin.height <= limit + NO_OVERLOAD else None
        schedule = schedule or schedule_for(self.task)
        runs = int(np.clip(steps // (STEPS_OF_A_RUN * slots.size**2), 1, RUNS_MAX))
        for run in range(runs):
            warmer = WARMER[run % len(WARMER)]
            warm = schedule._replace(
                temperature_first=schedule.temperature_first * warmer, temperature_last=schedule.temperature_last * warmer
            )
            record = self._run(layer, begin.slots, limit, np.inf, steps // runs, expired, warm)
            if np.isfinite(record.value[0]):
                found = self.found(record.best)
                if found.moves <= self.moves_max and (best is None or found.cost < best.cost):
                    best = found
        return best

    def cheaper(self, begin: Found, limit: float, steps: int, expired: Expired) -> Found:
        """Look for a cheaper row at or under a height limit, from a row that is. That row when none is cheaper."""
        layer, _ = with_copies(self.layer, begin.slots, limit)
        record = self._run(layer, begin.slots, limit, np.inf, steps, expired, CHEAPER)
        if not np.isfinite(record.value[0]):
            return begin
        found = self.found(record.best)
        return found if found.cost < begin.cost and found.moves <= self.moves_max else begin

    def lowest_known(self) -> Found:
        """The row of least height in the archive; of equals the one with the fewest moves."""
        moves = int(self.heights.argmin())
        return self.rest if self.rest.height <= self.heights[moves] else self.found(self.rows[moves])

    def widen(self, limits: Sequence[float], steps: int, expired: Expired) -> None:
        """Fill the archive by searches at several limits, each with as many steps."""
        for limit in limits:
            self.fewest(limit, steps, expired)

    def lowest(self, begin: Found, price_max: float, steps: int, expired: Expired, schedule: Schedule = LOWEST) -> Found:
        """Look for the least height at no more than a price, from a row within it. Returns that row when none is lower.

        With a price that binds, routes may not get dearer either.
        """
        routes_max = begin.routes + ROUTES_SLACK if np.isfinite(price_max) else np.inf
        limit = begin.height * (1.0 - GAIN_MIN) - 1e-4
        record = self._run(self.layer, begin.slots, limit, price_max, steps, expired, schedule, routes_max)
        return self.found(record.best) if record.value[0] < begin.height else begin

    def ignore_static_tables(self) -> None:
        """Pay no more for what static tables misplace: very hot experts may leave no balanced row on which they agree."""
        self.layer = self.layer._replace(misplaced_price=0.0)

    def cheapest_routes(self, limit: float, steps: int, expired: Expired) -> Found | None:
        """Look for the row with the cheapest routes at or under a height limit, whatever it moves. None when none was found."""
        record = self._run(self.layer, self.rest.slots, limit, np.inf, steps, expired, FEWEST, price_weight=0.0)
        return self.found(record.best) if np.isfinite(record.value[0]) else None

    def _run(
        self,
        layer: Layer,
        slots: Int32Array,
        limit: float,
        price_max: float,
        steps: int,
        expired: Expired,
        schedule: Schedule,
        routes_max: float = np.inf,
        price_weight: float = 1.0,
    ) -> Record:
        """One search, piece by piece until its steps or the time are over."""
        self._searches += 1
        schedule = schedule._replace(empty=0) if self.task.full else schedule
        state = new_state(layer, slots, self._width)
        scratch = new_scratch(layer, self.moves_max, self.intake_max, seed_of(self.seed, self._searches))
        scratch.level[LIMIT] = limit
        scratch.level[PRICE_MAX] = min(price_max + NO_OVERLOAD, PRICE_CEILING)
        scratch.level[ROUTE_MAX] = routes_max
        scratch.level[PRICE_WEIGHT] = 0.0 if schedule.lower else price_weight
        record = Record(slots.copy(), np.full(1, np.inf), self.heights, self.rows)
        for first in range(0, steps, PIECE):
            if expired():
                self.cut_off = True
                break
            anneal(layer, state, scratch, schedule, record, first, min(first + PIECE, steps), steps)
        return record


def seed_of(*parts: int) -> int:
    """A positive seed below 2^63 from integers (splitmix64; G. Steele and others, 2014), never 0."""
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & (1 << 64) - 1
        mixed ^= mixed >> 31
    return (mixed >> 1) or 1
