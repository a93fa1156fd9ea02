"""A layer as a market of copies, and the search for prices that prove the most moves; see `move_prices`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.moves import residencies
from eplb_service.policy.layer_task import BoolArray, Float64Array, Int64Array, LayerTask
from eplb_service.policy.move_prices import COUNTED_ARRIVALS, ONE, VALUE_MAX, Deals, Tables, demand, supply
from eplb_service.policy.one_slot import copies_needed

UNITS = 1024
"""Units that the load limit of the fastest rank is cut into; loads are rounded down to them, which keeps the bound valid."""

COARSE = 8
"""By how much coarse units are larger."""

UNITS_MIN = 64
"""Fewest units."""

TABLE_CELLS_MAX = 8_000_000
"""Most cells in a table of one rank; with very many slots a rank there are fewer units."""

CHOICES_PER_LOAD = 8.0
"""Numbers of copies that an expert with the load of a whole rank is looked at with, beyond what it needs."""

CHOICES_MAX = 24
"""Most numbers of copies beyond that."""

FIRST_LOAD_PRICES = (4.0, 2.0, 1.0, 0.5)
"""Prices of a rank's whole load, in moves, to start from: the one with the best bound is taken."""

HALF = 0.5
"""What a move is first taken to cost the rank that gives, in moves; the rank that takes in bears the rest."""

PATIENCE = 10
"""Steps without a better bound after which steps get shorter."""

SHORTER = 0.6
"""By how much."""

SHORTEST = 0.002
"""Relative step length at which the search ends."""

MEMORY = 0.8
"""Share of the last direction in the next one."""

TOWARDS_LOAD = 5.0
"""How much faster prices move together, in proportion to load, than one by one."""

EXCESS = 1e-9
"""Relative excess over the target that is rounding alone."""


def free_residencies(task: LayerTask) -> BoolArray:
    """Shape (R, E): residencies that may be in the new row and are no move."""
    there = residencies(task.held.reshape(-1), num_ranks=task.num_ranks, num_logical=task.num_logical) | (task.price < 1.0)
    free: BoolArray = there & task.allowed & (task.room > 0)[:, None]
    return free


def load_limits(task: LayerTask, height: float) -> Float64Array:
    """Tokens that each rank may take at most, shape (R,); 0 for ranks without room."""
    limit = np.maximum(0.0, height * (1 + EXCESS) * task.capacity - task.base)
    result: Float64Array = np.where(task.room > 0, limit, 0.0)
    return result


def ranks_needed(task: LayerTask, height: float) -> Int64Array:
    """Fewest ranks that each expert must be on: none may carry more of it than the height allows. Shape (E,)."""
    most = float(load_limits(task, height).max())
    if most <= 0:
        return np.ones(task.num_logical, np.int64)
    needed = np.maximum(1, np.ceil(task.load / most * (1 - EXCESS)))
    result: Int64Array = np.minimum(needed, task.num_ranks).astype(np.int64)
    return result


@dataclass(slots=True, eq=False)
class Prices:
    """Where the search for prices stands. arrival: shape (J,), kept: shape of all prices of residencies; both in moves.

    bound: the best so far, in units; the prices are those that gave it. constant: moves that are needed in any case.
    """

    arrival: Float64Array
    kept: Float64Array
    bound: int
    constant: int

    @property
    def moves(self) -> int:
        """Moves that are proven: the bound rounded up."""
        return self.constant - (-self.bound // ONE)


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Numbers of copies that each expert is looked at with: first (E + 1,), expert and copies (J,); beyond: see `Deals`."""

    first: Int64Array
    expert: Int64Array
    copies: Int64Array
    beyond: Int64Array


def _choices_of(task: LayerTask, most: float, have: Int64Array) -> _Choices | None:
    """Most: load that a rank may carry. have: copies that are there, shape (E,). None: an expert may not have enough copies."""
    fewest = copies_needed(task, most * (1 + EXCESS))
    top = np.minimum(task.copies_max, int((task.room > 0).sum()))
    if most <= 0 or (fewest > top).any():
        return None
    more = np.minimum(1 + np.floor(CHOICES_PER_LOAD * task.load / most), CHOICES_MAX).astype(np.int64)
    last = np.maximum(fewest, np.minimum(np.maximum(fewest, have) + more, top))
    number = last - fewest + 1
    first = np.concatenate([[0], np.cumsum(number)])
    expert = np.repeat(np.arange(task.num_logical), number)
    return _Choices(
        first,
        expert,
        fewest[expert] + np.arange(expert.size) - first[expert],
        np.where(last < top, np.maximum(0, last + 1 - have), -1),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """A layer to price. deals: with fine and with coarse loads. share, share_kept: load of one copy over the most that a rank
    may carry, by price. extra: by choice, what a residency is worth first beside its load. constant: see `Prices`.
    """

    fine: Deals
    coarse: Deals
    share: Float64Array
    choice_of_kept: Int64Array
    extra: Float64Array
    constant: int

    @classmethod
    def of(cls, task: LayerTask, height: float) -> Market | None:
        """None when some expert may not have as many copies as it needs. Pins that are not there yet are moves in any case."""
        free = free_residencies(task)
        there = free | (task.pinned & (task.room > 0)[:, None])
        limits = load_limits(task, height)
        choices = _choices_of(task, float(limits.max()), there.sum(axis=0))
        if choices is None:
            return None
        serving = np.flatnonzero(task.room > 0)
        rank_of, expert_of = (np.ascontiguousarray(index) for index in np.nonzero(there[serving]))
        number = np.diff(choices.first)[expert_of]
        first_kept = np.concatenate([[0], np.cumsum(number)])
        by_expert = np.argsort(expert_of, kind="stable")
        share = task.load[choices.expert] / choices.copies / float(limits.max())
        deals = Deals(
            first_choice=choices.first,
            copies=choices.copies,
            weight=np.zeros(0, np.int64),
            beyond=choices.beyond,
            first_held=np.searchsorted(rank_of, np.arange(serving.size + 1)),
            expert_of=expert_of,
            forced=task.pinned[serving][rank_of, expert_of],
            first_kept=first_kept,
            first_holder=np.searchsorted(expert_of[by_expert], np.arange(task.num_logical + 1)),
            holders=by_expert,
            room=task.room[serving],
            limit=np.zeros(0, np.int64),
        )
        units = max(UNITS_MIN, min(UNITS, TABLE_CELLS_MAX // (int(task.room.max()) + 1) ** 2))
        have = there.sum(axis=0)[choices.expert]
        worth = HALF * (np.minimum(have, 1) - np.maximum(0, choices.copies - have))
        return cls(
            fine=_in_units(deals, share, limits[serving], units),
            coarse=_in_units(deals, share, limits[serving], max(UNITS_MIN, units // COARSE)),
            share=share,
            choice_of_kept=np.repeat(choices.first[expert_of] - first_kept[:-1], number) + np.arange(int(first_kept[-1])),
            extra=worth / np.maximum(1, np.minimum(choices.copies, have)),
            constant=int((there & ~free).sum()),
        )

    def first_prices(self) -> tuple[Prices, int]:
        """Prices to start from, and the cells that finding them took."""
        tables, tried, cells = _tables(self.coarse), [], 0
        for per_load in FIRST_LOAD_PRICES:
            arrival = HALF + per_load * self.share
            kept = np.maximum(0.0, per_load * self.share + self.extra)[self.choice_of_kept]
            step = _step(self.coarse, tables, arrival, kept)
            tried.append(Prices(arrival, kept, step.bound, self.constant))
            cells += step.cells
        return max(tried, key=lambda prices: prices.bound), cells

    def climb(self, prices: Prices, *, coarse: bool, cells: int, length: float, enough: int) -> int:
        """Raise the bound step by step along the deals that do not agree (a subgradient; B. T. Polyak, 1969).

        cells: what may be spent; returns what was. Ends early when the bound proves `enough` moves or steps have become short.
        """
        deals = self.coarse if coarse else self.fine
        tables, share_kept = _tables(deals), self.share[self.choice_of_kept]
        arrival, kept, way = prices.arrival.copy(), prices.kept.copy(), _Way.none(prices)
        highest = VALUE_MAX / ONE / float(deals.room.max())
        spent = idle = 0
        while spent < cells and length > SHORTEST and prices.moves < enough:
            step = _step(deals, tables, arrival, kept)
            spent, idle = spent + step.cells, idle + 1
            if step.bound > prices.bound:
                idle = 0 if step.bound > prices.bound + ONE // 1000 else idle
                prices.bound, prices.arrival, prices.kept = step.bound, arrival, kept
            if idle >= PATIENCE:
                idle, length, way = 0, length * SHORTER, _Way.none(prices)
                arrival, kept = prices.arrival, prices.kept
            way = way.turned(step, float((step.arrival * self.share).sum() + (step.kept * share_kept).sum()))
            if way.size <= 0.0:
                break
            aim = min(float(enough - self.constant), max(prices.bound, 0) / ONE * 1.2 + 2.0)
            stride = length * max(aim - step.bound / ONE, 0.1) / way.size
            arrival = np.clip(arrival + stride * (way.arrival + TOWARDS_LOAD * way.load * self.share), 0.0, highest)
            kept = np.clip(kept + stride * (way.kept + TOWARDS_LOAD * way.load * share_kept), 0.0, highest)
        return spent


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What prices lead to: the bound in units, what is supplied less what is wanted by price, cells visited."""

    bound: int
    arrival: Float64Array
    kept: Float64Array
    cells: int


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """The direction of the search: by price, and of all prices in proportion to load."""

    arrival: Float64Array
    kept: Float64Array
    load: float

    @classmethod
    def none(cls, prices: Prices) -> _Way:
        """No direction yet."""
        return cls(np.zeros_like(prices.arrival), np.zeros_like(prices.kept), 0.0)

    def turned(self, step: _Step, load: float) -> _Way:
        """A new direction that remembers the old one."""
        return _Way(
            MEMORY * self.arrival + (1.0 - MEMORY) * step.arrival,
            MEMORY * self.kept + (1.0 - MEMORY) * step.kept,
            MEMORY * self.load + (1.0 - MEMORY) * load,
        )

    @property
    def size(self) -> float:
        """Square of its length."""
        return float((self.arrival**2).sum() + (self.kept**2).sum() + TOWARDS_LOAD * self.load**2)


def _step(deals: Deals, tables: Tables, arrival: Float64Array, kept: Float64Array) -> _Step:
    """The bound that prices prove and where they do not agree."""
    wish_arrival, wish_kept = np.zeros_like(arrival), np.zeros_like(kept)
    whole_arrival, whole_kept = np.rint(arrival * ONE).astype(np.int32), np.rint(kept * ONE).astype(np.int32)
    charged = supply(deals, whole_arrival, whole_kept, wish_arrival, wish_kept)
    gained, cells = demand(deals, whole_arrival, whole_kept, tables, wish_arrival, wish_kept)
    return _Step(int(charged) - int(gained), wish_arrival, wish_kept, int(cells))


def _in_units(deals: Deals, share: Float64Array, limits: Float64Array, units: int) -> Deals:
    """The deals with loads in units, limits in units too: both rounded so that whatever fits still fits."""
    return deals._replace(
        weight=np.maximum(0, np.floor(share * units - EXCESS)).astype(np.int64),
        limit=np.floor(limits / float(limits.max()) * units + EXCESS).astype(np.int64),
    )


def _tables(deals: Deals) -> Tables:
    """Room for the search."""
    slots, units = int(deals.room.max()), int(deals.limit.max())
    held = int(np.diff(deals.first_held).max())
    rows = min(slots, COUNTED_ARRIVALS) + 1
    return Tables(
        kept=np.zeros((held + 1, min(slots, held) + 1, units + 1), np.int32),
        best=np.zeros((rows, units + 1), np.int32),
        taken=np.zeros((deals.copies.size, rows, units + 1), np.bool_),
        items=np.zeros(deals.copies.size, np.int64),
    )
