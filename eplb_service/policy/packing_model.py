"""The exact model of a packing problem in OR-Tools CP-SAT: how many copies of each expert, and on which ranks.

One Boolean for each (expert, number of copies, rank): the expert has that many copies and one of them is there, which makes
even split linear. The objective is the height of the busiest rank, or the price of all residencies under a limit on heights.
What keeps the search short: a copy above the known height is never allowed (so hot experts have at least ceil(load / height)
copies), no expert may take slots that the others need at least, bounds proven elsewhere are rows, and ranks that are alike are
ordered. One worker, a fixed seed and a budget in deterministic time: the same answer on any machine unless the wall clock cut
it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from eplb_service.policy.layer_task import BoolArray, Float64Array, Int32Array, Int64Array

VARIABLES_MAX = 40_000
"""Variables of the largest model that is built: about 150 MB of memory and a second to build (measured up to 27,000)."""

EXACT_UNITS_MAX = 1 << 40
APPROXIMATE_UNITS = 1 << 30
CAPACITY_UNITS = 1000
PRICE_UNITS = 1000
"""Units of a move in the price objective: group prices are rounded to thousandths of a move."""

LP_BY_PRICE = 1
"""How much CP-SAT relaxes the model of prices; for heights relaxations are weak and only cost time."""

NOWHERE, SEVERAL = -1, -2
"""Domains of copies outside a packing: none, more than one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Experts to put on ranks. n experts, m ranks (all with room), J options: an expert with a number of copies.

    first: options of expert e are first[e] to first[e + 1] - 1. copies: shape (J,), copies on these ranks. share: shape (J,),
    tokens of one copy. room, capacity, base: shape (m,). allowed, pinned, price: shape (m, n). off_home: shape (m, n),
    residencies of which there may be at most off_home_max. spread: shape (n,), experts that must be in two domains.
    domain_of: shape (m,). elsewhere: shape (n,), the domain of the copies outside, or NOWHERE or SEVERAL.
    group_of: shape (n,), experts of equal number share a node; node_of: shape (m,); None = no such rule.
    """

    first: Int64Array
    copies: Int64Array
    share: Float64Array
    room: Int64Array
    capacity: Float64Array
    base: Float64Array
    allowed: BoolArray
    pinned: BoolArray
    price: Float64Array
    off_home: BoolArray
    off_home_max: int
    spread: BoolArray
    domain_of: Int64Array
    elsewhere: Int64Array
    group_of: Int64Array | None = None
    node_of: Int64Array | None = None

    @property
    def num_experts(self) -> int:
        """Experts, n."""
        return self.first.size - 1

    @property
    def num_ranks(self) -> int:
        """Ranks, m."""
        return int(self.room.size)

    @property
    def num_variables(self) -> int:
        """Size of the model, to decide whether to build it."""
        return int((np.diff(self.first) * self.allowed.sum(axis=0)).sum())

    def options(self, expert: int) -> range:
        """Option numbers of an expert."""
        return range(int(self.first[expert]), int(self.first[expert + 1]))

    def traits(self) -> list[tuple[object, ...]]:
        """What must be equal for two ranks to be interchangeable, as far as heights go."""
        by_domain = bool(self.spread.any()) and np.unique(self.domain_of).size < self.num_ranks
        return [
            (
                float(self.capacity[rank]),
                float(self.base[rank]),
                int(self.room[rank]),
                self.allowed[rank].tobytes(),
                self.pinned[rank].tobytes(),
                self.off_home[rank].tobytes(),
                int(self.domain_of[rank]) if by_domain or (self.elsewhere >= 0).any() else 0,
                0 if self.node_of is None else int(self.node_of[rank]),
            )
            for rank in range(self.num_ranks)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What to look for. height: of the hint, or the limit; bound: proven already, in tokens or in moves.

    by_price: the least price at a height of at most `height`, rather than the least height.
    """

    height: float
    bound: float = 0.0
    by_price: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """What the solver found. bins: experts of each rank, -1 padded; None = nothing.

    bound: proven, no packing is below (tokens over capacity, or moves). proven: the search ended by itself. work: deterministic
    time that it took.
    """

    bins: Int32Array | None
    bound: float
    proven: bool
    work: float


def _units(packing: Packing) -> float:
    """Integer units per token: exact when all shares are whole multiples of a common part, else as fine as is safe."""
    total = float((packing.share * packing.copies)[packing.first[:-1]].sum() + packing.base.sum())
    multiple = math.lcm(*np.unique(packing.copies).tolist()) if packing.copies.max() <= 40 else 0
    whole = packing.share * multiple
    if multiple and (np.abs(whole - np.round(whole)) < 1e-9).all() and total * multiple <= EXACT_UNITS_MAX:
        return float(multiple)
    return APPROXIMATE_UNITS / max(total, 1e-300)


class _Model:
    """The CP-SAT model of a packing, with its variables by (option, rank)."""

    def __init__(self, packing: Packing, aim: Aim) -> None:
        self.packing = packing
        self.aim = aim
        self.model = cp_model.CpModel()
        self.units = _units(packing)
        self.has: dict[int, cp_model.IntVar] = {}
        self.on: dict[tuple[int, int], cp_model.IntVar] = {}
        self.expert_of = np.repeat(np.arange(packing.num_experts), np.diff(packing.first))
        top = math.ceil(aim.height * self.units) + 1
        least = 0 if aim.by_price else min(top, math.floor(aim.bound * self.units * (1 - 1e-12)))
        self.height = self.model.new_int_var(least, top, "height")
        self._add_copies()
        self._add_ranks()
        self._add_rules()
        self._add_objective()

    def _places(self, expert: int, ranks: list[int]) -> list[cp_model.IntVar]:
        """Variables of an expert on any of some ranks."""
        return [self.on[option, rank] for option in self.packing.options(expert) for rank in ranks if (option, rank) in self.on]

    def _add_copies(self) -> None:
        """Each expert has one number of copies and is on as many ranks."""
        packing = self.packing
        for expert in range(packing.num_experts):
            options = packing.options(expert)
            ranks = np.flatnonzero(packing.allowed[:, expert]).tolist()
            for option in options:
                places = [self.model.new_bool_var("") for _ in ranks]
                self.on.update({(option, rank): place for rank, place in zip(ranks, places, strict=True)})
                copies = int(packing.copies[option])
                if len(options) == 1:
                    self.model.add(cp_model.LinearExpr.sum(places) == copies)
                    continue
                has = self.has[option] = self.model.new_bool_var("")
                self.model.add(cp_model.LinearExpr.sum(places) == copies * has)
                for place in places if copies > 1 else []:
                    self.model.add_implication(place, has)
            if len(options) > 1:
                self.model.add_exactly_one(self.has[option] for option in options)
        if self.has:
            slots = [(var, int(packing.copies[option])) for option, var in self.has.items()]
            fixed = sum(
                int(packing.copies[packing.first[e]]) for e in range(packing.num_experts) if len(packing.options(e)) == 1
            )
            total = cp_model.LinearExpr.weighted_sum([var for var, _ in slots], [copies for _, copies in slots])
            self.model.add(total <= int(packing.room.sum()) - fixed)

    def _add_ranks(self) -> None:
        """Room and height of each rank. Of ranks that are alike, those with the hottest expert come first (symmetry)."""
        packing = self.packing
        even = bool((packing.capacity == 1.0).all())
        held: list[list[tuple[int, cp_model.IntVar]]] = [[] for _ in range(packing.num_ranks)]
        for (option, rank), place in self.on.items():
            held[rank].append((option, place))
        for rank, mine in enumerate(held):
            places = [place for _, place in mine]
            self.model.add(cp_model.LinearExpr.sum(places) <= int(packing.room[rank]))
            load = cp_model.LinearExpr.weighted_sum(places, [self._share(option) for option, _ in mine])
            work = load + math.floor(float(packing.base[rank]) * self.units)
            if self.aim.by_price:
                self.model.add(work <= math.ceil(self.aim.height * float(packing.capacity[rank]) * self.units))
            elif even:
                self.model.add(work <= self.height)
            else:
                self.model.add(work * CAPACITY_UNITS <= self.height * math.ceil(float(packing.capacity[rank]) * CAPACITY_UNITS))
        if not self.aim.by_price:
            self._order_ranks()

    def _order_ranks(self) -> None:
        """Ranks that are alike: those with the hottest expert come first."""
        hottest = int((self.packing.share * self.packing.copies)[self.packing.first[:-1]].argmax())
        alike: dict[tuple[object, ...], int] = {}
        for rank, trait in enumerate(self.packing.traits()):
            before = alike.get(trait)
            if before is not None:
                mine = cp_model.LinearExpr.sum(self._places(hottest, [rank]))
                self.model.add(cp_model.LinearExpr.sum(self._places(hottest, [before])) >= mine)
            alike[trait] = rank

    def _share(self, option: int) -> int:
        """Units of one copy, rounded down, so that the model's optimum is never above the real one."""
        return math.floor(float(self.packing.share[option]) * self.units * (1 + 1e-15))

    def _add_rules(self) -> None:
        """Pins, experts in two domains, groups on one node, residencies off their home."""
        packing, every = self.packing, list(range(self.packing.num_ranks))
        for rank, expert in np.argwhere(packing.pinned).tolist():
            self.model.add(cp_model.LinearExpr.sum(self._places(expert, [rank])) >= 1)
        for expert in np.flatnonzero(packing.spread & (packing.elsewhere != SEVERAL)).tolist():
            outside = int(packing.elsewhere[expert])
            for domain in np.unique(packing.domain_of).tolist() if outside == NOWHERE else [outside]:
                others = [rank for rank in every if packing.domain_of[rank] != domain]
                self.model.add(cp_model.LinearExpr.sum(self._places(expert, others)) >= 1)
        if packing.group_of is not None and packing.node_of is not None:
            self._add_groups(packing.group_of, packing.node_of)
        if packing.off_home.any():
            off = [place for (option, rank), place in self.on.items() if packing.off_home[rank, self.expert_of[option]]]
            self.model.add(cp_model.LinearExpr.sum(off) <= packing.off_home_max)

    def _add_groups(self, group_of: Int64Array, node_of: Int64Array) -> None:
        """Each group is on one node."""
        at = {
            (group, node): self.model.new_bool_var("")
            for group in np.unique(group_of).tolist()
            for node in np.unique(node_of).tolist()
        }
        for group in np.unique(group_of).tolist():
            self.model.add_exactly_one(var for (other, _), var in at.items() if other == group)
        for (option, rank), place in self.on.items():
            self.model.add_implication(place, at[int(group_of[self.expert_of[option]]), int(node_of[rank])])

    def _add_objective(self) -> None:
        """The height, or the price of all residencies with what is proven of it."""
        if not self.aim.by_price:
            self.model.minimize(self.height)
            return
        costs = [
            (place, round(float(self.packing.price[rank, self.expert_of[option]]) * PRICE_UNITS))
            for (option, rank), place in self.on.items()
        ]
        costs = [(place, cost) for place, cost in costs if cost]
        price = cp_model.LinearExpr.weighted_sum([place for place, _ in costs], [cost for _, cost in costs])
        self.model.add(price >= math.ceil(self.aim.bound * PRICE_UNITS))
        self.model.minimize(price)

    def add_hint(self, bins: Int32Array) -> None:
        """Start from a known packing, its ranks put into the model's order."""
        packing = self.packing
        counts = np.bincount(bins[bins >= 0], minlength=packing.num_experts)
        order = list(range(packing.num_ranks))
        if not self.aim.by_price:
            hottest, traits = int((packing.share * packing.copies)[packing.first[:-1]].argmax()), packing.traits()
            for trait in dict.fromkeys(traits):
                places = [rank for rank in range(len(order)) if traits[rank] == trait]
                for position, rank in zip(places, sorted(places, key=lambda rank: hottest not in bins[rank]), strict=True):
                    order[position] = rank
        held_by = [set(bins[rank][bins[rank] >= 0].tolist()) for rank in order]
        right = packing.copies == counts[self.expert_of]
        for option, chosen in self.has.items():
            self.model.add_hint(chosen, bool(right[option]))
        for (option, rank), place in self.on.items():
            self.model.add_hint(place, bool(right[option]) and int(self.expert_of[option]) in held_by[rank])

    def bins(self, solver: cp_model.CpSolver, width: int) -> Int32Array:
        """The packing that the solver found."""
        bins = np.full((self.packing.num_ranks, width), -1, np.int32)
        fill = [0] * self.packing.num_ranks
        for (option, rank), place in self.on.items():
            if solver.boolean_value(place):
                bins[rank, fill[rank]] = self.expert_of[option]
                fill[rank] += 1
        return bins


def solve(
    packing: Packing, aim: Aim, hint: Int32Array, *, work: float, seconds_left: Callable[[], float], seed: int
) -> Solution:
    """Search from a hint, shape (m, S), -1 padded, no expert twice on a rank.

    work: CP-SAT deterministic time. seconds_left: until the hard stop, asked again when the model is built.
    """
    model = _Model(packing, aim)
    model.add_hint(hint)
    left = seconds_left()
    if left <= 0:
        return Solution(bins=None, bound=0.0, proven=False, work=0.0)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = LP_BY_PRICE if aim.by_price else 0
    solver.parameters.random_seed = seed & 0x7FFFFFFF
    solver.parameters.max_deterministic_time = work
    solver.parameters.max_time_in_seconds = left
    status = solver.solve(model.model)
    units = PRICE_UNITS if aim.by_price else model.units
    known = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solution(
        bins=model.bins(solver, hint.shape[1]) if known else None,
        bound=max(0.0, solver.best_objective_bound / units) if status != cp_model.INFEASIBLE else math.inf,
        proven=status == cp_model.OPTIMAL,
        work=float(solver.response_proto.deterministic_time),
    )
