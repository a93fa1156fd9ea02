"""The exact model of one part of a layer: how many copies of each expert, and on which ranks, in OR-Tools CP-SAT.

One Boolean for each (expert, copies, rank): the expert has that many copies and one of them is there, which makes even split
linear. Three things keep it small and its bound strong: a copy above the known height is never allowed (so hot experts have at
least ceil(load / height) copies), no expert may take slots that the others need at least, and alike ranks are ordered.
One worker, a fixed seed and a budget in deterministic time: the same answer on any machine unless the wall clock cut it off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from eplb_service.policy.limits import Limits

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

VARIABLES_MAX = 40_000
EXACT_UNITS_MAX = 1 << 40
APPROXIMATE_UNITS = 1 << 30
CAPACITY_UNITS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Experts to put on ranks. load: shape (experts,), tokens; room, capacity: shape (ranks,), every rank has room."""

    load: Float64Array
    room: Int64Array
    capacity: Float64Array
    copies_max: int

    def trait(self, rank: int) -> tuple[float, float]:
        """What must be equal for two ranks to be interchangeable."""
        return float(self.room[rank]), float(self.capacity[rank])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """What the solver found. bins: experts of each rank, -1 padded, None = nothing better than the hint.

    lower_bound: proven height that no packing is below (0.0 = none). proven: the search ended by itself.
    """

    bins: Int32Array | None
    lower_bound: float
    proven: bool
    wall_s: float
    cut_off: bool


def copies_range(part: Part, height: float) -> tuple[Int64Array, Int64Array]:
    """Fewest and most copies of each expert in any packing not above `height`. Both: shape (experts,).

    Fewest: a copy may not exceed the height on the fastest rank. Most: what is left when every other expert has its fewest.
    """
    top = height * float(part.capacity.max()) * (1 + 1e-9)
    fewest = np.maximum(1, np.ceil(part.load / top)).astype(np.int64)
    spare = int(part.room.sum()) - int(fewest.sum())
    most = np.minimum(fewest + max(0, spare), min(part.copies_max, part.room.size))
    return fewest, np.maximum(most, fewest)


def num_variables(part: Part, height: float) -> int:
    """Size of the model, to decide whether to build it."""
    fewest, most = copies_range(part, height)
    return int((most - fewest + 1).sum()) * part.room.size


def _units(load: Float64Array, copies_max: int) -> float:
    """Integer units per token: exact when loads are whole numbers and the counts' common multiple is small."""
    multiple = math.lcm(*range(1, copies_max + 1))
    if (load == np.floor(load)).all() and float(load.sum()) * multiple <= EXACT_UNITS_MAX:
        return float(multiple)
    return APPROXIMATE_UNITS / float(load.sum())


class _Model:
    """The CP-SAT model of a part, with its variables by (expert, copies, rank)."""

    def __init__(self, part: Part, height: float, bins: Int32Array) -> None:
        self.part = part
        self.model = cp_model.CpModel()
        self.fewest, self.most = copies_range(part, height)
        self.units = _units(part.load, int(self.most.max()))
        self.height = self.model.new_int_var(0, math.ceil(height * self.units) + 1, "height")
        self.has: dict[tuple[int, int], cp_model.IntVar] = {}
        self.on: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self._add_copies()
        self._add_ranks()
        self._add_hint(bins)
        self.model.minimize(self.height)

    def _copies(self, expert: int) -> range:
        return range(int(self.fewest[expert]), int(self.most[expert]) + 1)

    def _add_copies(self) -> None:
        """Each expert has one number of copies and is on as many ranks; all fit the slots."""
        slots = []
        for expert in range(self.part.load.size):
            for copies in self._copies(expert):
                has = self.has[expert, copies] = self.model.new_bool_var("")
                places = []
                for rank in range(self.part.room.size):
                    place = self.on[expert, copies, rank] = self.model.new_bool_var("")
                    self.model.add_implication(place, has)
                    places.append(place)
                self.model.add(sum(places) == copies * has)
                slots.append(copies * has)
            self.model.add_exactly_one(self.has[expert, copies] for copies in self._copies(expert))
        self.model.add(sum(slots) <= int(self.part.room.sum()))

    def _add_ranks(self) -> None:
        """Room and height of each rank. Of ranks that are alike, those with the hottest expert come first (symmetry)."""
        even = bool((self.part.capacity == 1.0).all())
        hottest = int(self.part.load.argmax())
        previous: tuple[float, float] | None = None
        has_hottest: list[cp_model.LinearExprT] = []
        for rank in range(self.part.room.size):
            held = [(key, place) for key, place in self.on.items() if key[2] == rank]
            self.model.add(sum(place for _, place in held) <= int(self.part.room[rank]))
            load = sum(self._share(expert, copies) * place for (expert, copies, _), place in held)
            speed = math.ceil(float(self.part.capacity[rank]) * CAPACITY_UNITS)
            self.model.add(load <= self.height if even else CAPACITY_UNITS * load <= speed * self.height)
            has_hottest.append(sum(place for (expert, _, _), place in held if expert == hottest))
            if self.part.trait(rank) == previous:
                self.model.add(has_hottest[rank - 1] >= has_hottest[rank])
            previous = self.part.trait(rank)

    def _share(self, expert: int, copies: int) -> int:
        """Units of one copy, rounded down, so that the model's optimum is never above the real one."""
        return math.floor(float(self.part.load[expert]) * self.units / copies * (1 + 1e-15))

    def _add_hint(self, bins: Int32Array) -> None:
        """Start from a known packing, its ranks put into the model's order."""
        counts = np.bincount(bins[bins >= 0], minlength=self.part.load.size)
        hottest = int(self.part.load.argmax())
        order = list(range(self.part.room.size))
        for trait in dict.fromkeys(self.part.trait(rank) for rank in order):
            places = [rank for rank in range(len(order)) if self.part.trait(rank) == trait]
            for position, rank in zip(places, sorted(places, key=lambda rank: hottest not in bins[rank]), strict=True):
                order[position] = rank
        held_by = [set(bins[rank][bins[rank] >= 0].tolist()) for rank in order]
        for (expert, copies), chosen in self.has.items():
            self.model.add_hint(chosen, bool(counts[expert] == copies))
        for (expert, copies, rank), place in self.on.items():
            self.model.add_hint(place, bool(counts[expert] == copies) and expert in held_by[rank])

    def bins(self, solver: cp_model.CpSolver, width: int) -> Int32Array:
        """The packing that the solver found."""
        bins = np.full((self.part.room.size, width), -1, np.int32)
        fill = [0] * self.part.room.size
        for (expert, _, rank), place in self.on.items():
            if solver.boolean_value(place):
                bins[rank, fill[rank]] = expert
                fill[rank] += 1
        return bins


def solve_part(part: Part, hint: Int32Array, height: float, *, work: float, time_limit_s: float, seed: int) -> Solution:
    """Search for a packing below `height`, the height of the hint. work: CP-SAT deterministic time.

    Hint: shape (ranks, S), -1 padded, no expert twice on a rank.
    """
    model = _Model(part, height, hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = seed & 0x7FFFFFFF
    solver.parameters.max_deterministic_time = work
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    proven = status == cp_model.OPTIMAL
    return Solution(
        bins=model.bins(solver, hint.shape[1]) if found else None,
        lower_bound=max(0.0, solver.best_objective_bound / model.units),
        proven=proven,
        wall_s=solver.wall_time,
        cut_off=not proven and solver.wall_time >= time_limit_s,
    )


def part_of(load: Float64Array, ranks: Int64Array, limits: Limits) -> Part:
    """The part of a layer on some ranks."""
    return Part(load=load, room=limits.room[ranks], capacity=limits.capacity[ranks], copies_max=limits.copies_max)
