"""Where the experts of one layer go that no rank holds, with the fewest moves: a minimum-cost flow (OR-Tools), exact.

Every expert asks for one slot. One that it has already costs nothing; another costs a move, through the rank that takes it in,
which can take in so many. An expert with other copies may lose a slot, and the last copy of one may have to go elsewhere to
make room where a backup is. Costs are in levels, each above all that the ones below it can add up to: promises broken, moves,
copies lost (a free slot loses none), load that the other copies of a lost one take over (with a little for each further expert
that the same rank takes in), load of the rank that takes it in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ortools.graph.python import min_cost_flow

from eplb_service.errors import PolicyFailedError
from eplb_service.placement import EMPTY_SLOT

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

GRADES = 1000
"""Steps in which loads are told apart where nothing else tells slots, or ranks, apart."""

TURN = 10 * (GRADES + 1)
"""Cost of each further expert that a rank takes in of a layer, as they arrive one by one: a hundredth of the most load."""

MOVES_MAX = 512
"""Moves up to which the levels are kept apart; the product of all levels must fit 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """A layer in which experts have no slot. R ranks, S slots a rank, E experts.

    held: shape (R, S), int32, what serves; -1 = empty (also on ranks that do not serve).
    load: shape (E,), tokens. open_slots: shape (R, S), whether a slot may get another expert.
    takes: shape (R, E), whether the rank may be given the expert; ignored where it holds it. intake: shape (R,), most experts
    that a rank may be given.
    place_broken: shape (R, E), promises that are broken where the rank is given the expert; keep_broken: shape (R, S), where
    the slot loses what it holds.
    """

    held: Int32Array
    load: Float64Array
    open_slots: BoolArray
    takes: BoolArray
    intake: Int64Array
    place_broken: Int64Array
    keep_broken: Int64Array

    @property
    def copies(self) -> Int64Array:
        """Slots of each expert, shape (E,)."""
        return np.bincount(self.held[self.held != EMPTY_SLOT], minlength=self.load.size).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Filled:
    """The least change that gives every expert a slot. slots: (rank position, local slot, expert), ascending.

    short: experts that find none, whatever gives way; then slots is empty.
    """

    slots: tuple[tuple[int, int, int], ...]
    short: int = 0


def fewest_moves(gap: Gap) -> Filled:
    """Fill a gap: promises first, then moves, then copies, then load. Raises PolicyFailedError when the solver fails."""
    num_moves = max(1, int((gap.copies == 0).sum()))
    while True:
        filled = _solve(gap, min(num_moves, MOVES_MAX))
        if filled.short or len(filled.slots) <= min(num_moves, MOVES_MAX) or num_moves >= MOVES_MAX:
            return filled
        num_moves = len(filled.slots)  # experts had to give way: levels that hold for so many moves


def _solve(gap: Gap, num_moves: int) -> Filled:
    num_ranks, num_slots = gap.held.shape
    num_experts = gap.load.size
    entry, inside, slot = num_experts, num_experts + num_ranks, num_experts + 2 * num_ranks
    source = slot + num_ranks * num_slots
    sink = source + 1
    move, slot_costs, entry_costs = _costs(gap, num_moves)
    flow = min_cost_flow.SimpleMinCostFlow()

    def add(tails: Int64Array, heads: Int64Array, most: Int64Array | int, costs: Int64Array | int = 0) -> Int64Array:
        arcs = flow.add_arcs_with_capacity_and_unit_cost(*np.broadcast_arrays(tails, heads, most, costs))
        return np.asarray(arcs, np.int64)

    experts, ranks, places = (np.arange(size, dtype=np.int64) for size in (num_experts, num_ranks, num_ranks * num_slots))
    row = gap.held.reshape(-1).astype(np.int64)
    used = np.flatnonzero(row != EMPTY_SLOT)
    add(np.full(num_experts, source), experts, 1)
    add(row[used], slot + used, 1)
    is_there = np.zeros((num_ranks, num_experts + 1), np.bool_)
    is_there[np.arange(num_ranks)[:, None], gap.held] = True  # the last column takes empty slots
    rank, expert = np.nonzero(gap.takes & ~is_there[:, :-1])
    entering = add(expert, entry + rank, 1, move + entry_costs[rank, expert])
    for nth in range(min(int(gap.intake.max()), num_slots)):
        takes = ranks[gap.intake > nth]
        add(entry + takes, inside + takes, 1, nth * TURN)
    given = np.flatnonzero(gap.open_slots.reshape(-1))
    filling = add(inside + given // num_slots, slot + given, 1, slot_costs.reshape(-1)[given])
    add(slot + places, np.full(places.size, sink), 1)
    flow.set_nodes_supplies(np.array([source, sink]), np.array([num_experts, -num_experts]))
    status = flow.solve_max_flow_with_min_cost()
    if status != flow.OPTIMAL:
        raise PolicyFailedError(f"the flow of {num_experts} experts over {num_ranks} ranks ended with status {status}")
    short = num_experts - int(flow.maximum_flow())
    if short:
        return Filled((), short)
    enters = np.flatnonzero(np.asarray(flow.flows(entering), np.int64)) if entering.size else np.zeros(0, np.int64)
    taken = given[np.flatnonzero(np.asarray(flow.flows(filling), np.int64))] if filling.size else given
    arrived = np.lexsort((expert[enters], rank[enters]))  # by rank, as the slots are
    return Filled(
        tuple(
            (int(place) // num_slots, int(place) % num_slots, int(name))
            for place, name in zip(taken.tolist(), expert[enters][arrived].tolist(), strict=True)
        )
    )


def _costs(gap: Gap, num_moves: int) -> tuple[int, Int64Array, Int64Array]:
    """What a move costs; what each slot costs to fill, shape (R, S); what each rank costs to enter beside, shape (R, E)."""
    num_ranks, num_slots = gap.held.shape
    copies = np.append(gap.copies, 0)
    share = np.append(gap.load / np.maximum(gap.copies, 1), 0.0)
    height = share[gap.held].sum(axis=1)
    busy = np.empty(num_ranks, np.int64)
    busy[np.argsort(height, kind="stable")] = np.arange(num_ranks) * GRADES // max(1, num_ranks - 1)
    harm = np.where(copies > 1, np.append(gap.load, 0.0) / np.maximum(copies - 1, 1), 0.0)
    grade = np.rint(GRADES * harm / max(float(harm.max()), 1e-300)).astype(np.int64)
    fine_max = (GRADES + 1) * (GRADES + 1) + num_slots * TURN
    lost = num_moves * fine_max + 1
    move = num_moves * (lost + fine_max) + 1
    promise = 2 * (gap.load.size + 1) * move
    loses = (gap.held != EMPTY_SLOT) & (copies[gap.held] > 1)
    slots = np.where(loses, lost + (GRADES + 1) * grade[gap.held], 0) + promise * gap.keep_broken
    return move, slots.astype(np.int64), (busy[:, None] + promise * gap.place_broken).astype(np.int64)
