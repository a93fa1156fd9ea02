"""Weighted dispatch: which share of its expert's tokens each replica takes, by a linear program for each layer.

The program (OR-Tools GLOP) minimises the height of the busiest rank (work over capacity, its own work counted) over all ways
to split experts over the ranks that hold them; among the optima it takes the one with the fewest tokens across nodes, then the
one nearest to an even split. Shares are whole multiples of 2^-20, which float32 holds exactly: the shares of an expert add up
to exactly 1 in any order, and the last bits of the solver's answer do not reach a generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, copies_on_ranks, on_nodes, own_work, source_parts
from eplb_service.errors import EnvironmentFault, InvalidInputError, PolicyFailedError
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.layer_task import LayerTask
from eplb_service.topology import Topology

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

SHARE_UNITS = 1 << 20
"""Shares are multiples of one over this."""

HEIGHT_SLACK = 1e-9
"""How far (relative) the second stage may go above the least height: room for the solver's rounding."""

EVENNESS_PRICE = 1e-3
"""What a token off the even split costs against one that crosses nodes."""


def require_solver() -> None:
    """Make sure that there is a solver, before anything depends on it. Raises EnvironmentFault when there is none."""
    _solver()


def _solver() -> Any:  # OR-Tools has no types
    """A new linear program. Raises EnvironmentFault when OR-Tools or its solver is missing."""
    hint = "weighted dispatch needs it to plan shares: install eplb-service[planner], or use another dispatch"
    try:
        from ortools.linear_solver import pywraplp  # noqa: PLC0415  # only weighted dispatch needs it
    except ImportError as error:
        raise EnvironmentFault(f"OR-Tools cannot be imported ({error}); {hint}") from error
    solver = pywraplp.Solver.CreateSolver("GLOP")
    if solver is None:
        raise EnvironmentFault(f"OR-Tools has no GLOP solver in this build; {hint}")
    return solver


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """How one layer's experts are split over the ranks that hold them.

    height: work over capacity of the busiest rank, tokens. shares: shape (R, E), sums to 1 over ranks where an expert is held.
    """

    height: float
    shares: Float64Array


def best_split(
    copies: npt.NDArray[np.integer],
    load: Float64Array,
    capacity: Float64Array,
    base: Float64Array,
    crossing: Float64Array | None = None,
) -> Split:
    """The split with the least height. Copies: shape (R, E), on ranks that serve; load: (E,), tokens; capacity, base: (R,).

    crossing: shape (R, E), part of an expert's tokens that would cross nodes to be served there; None = unknown or all alike.
    Raises EnvironmentFault when there is no solver, PolicyFailedError when it fails.
    """
    held = copies > 0
    holders = held.sum(axis=0)
    shares = np.where(held, copies / np.maximum(copies.sum(axis=0), 1), 0.0)
    free = (holders > 1) & (load > 0)
    fixed = np.where(free[None, :], 0.0, shares) @ load + base
    floor = float((fixed / capacity).max())
    even = float(((shares @ load + base) / capacity).max())
    if free.any() and (crossing is not None or even > floor * (1 + HEIGHT_SLACK)):
        rank, expert = np.nonzero(held & free[None, :])
        cost = np.zeros(rank.size) if crossing is None else crossing[rank, expert] - crossing[rank, expert].min()
        shares[rank, expert] = _solve(rank, expert, shares[rank, expert], load, fixed, capacity, cost)
    return Split(height=float(((shares @ load + base) / capacity).max()), shares=shares)


def _solve(
    rank: Int64Array,
    expert: Int64Array,
    start: Float64Array,
    load: Float64Array,
    fixed: Float64Array,
    capacity: Float64Array,
    cost: Float64Array,
) -> Float64Array:
    """Shares of the residencies that are free to choose, shape (n,) as `rank`, `expert`, the even split `start` and `cost`.

    Each share is its even value plus what it gets more or less of; numbers are in units of the fair height.
    """
    solver = _solver()
    unit = float((load.sum() + fixed.sum()) / capacity.sum())
    more = [solver.NumVar(0.0, 1.0 - float(part), "") for part in start]
    less = [solver.NumVar(0.0, float(part), "") for part in start]
    lowest = float((fixed / capacity).max()) / unit
    height = solver.NumVar(lowest, solver.infinity(), "")
    whole = {int(index): solver.Constraint(0.0, 0.0) for index in np.unique(expert)}
    even = fixed + np.bincount(rank, weights=start * load[expert], minlength=fixed.size)
    busy = {}
    for index in np.unique(rank).tolist():
        busy[index] = solver.Constraint(-solver.infinity(), -float(even[index]) / unit)
        busy[index].SetCoefficient(height, -float(capacity[index]))
    for here, held, up, down in zip(rank.tolist(), expert.tolist(), more, less, strict=True):
        tokens = float(load[held]) / unit
        whole[held].SetCoefficient(up, 1.0)
        whole[held].SetCoefficient(down, -1.0)
        busy[here].SetCoefficient(up, tokens)
        busy[here].SetCoefficient(down, -tokens)
    objective = solver.Objective()
    objective.SetMinimization()
    objective.SetCoefficient(height, 1.0)
    _run(solver)
    height.SetUb(max(lowest, height.solution_value()) * (1 + HEIGHT_SLACK))
    objective.Clear()
    objective.SetMinimization()
    for up, down, tokens, price in zip(more, less, (load[expert] / unit).tolist(), cost.tolist(), strict=True):
        objective.SetCoefficient(up, tokens * (EVENNESS_PRICE + price))
        objective.SetCoefficient(down, tokens * (EVENNESS_PRICE - price))
    _run(solver)
    moved = np.array([up.solution_value() - down.solution_value() for up, down in zip(more, less, strict=True)])
    parts: Float64Array = np.clip(start + moved, 0.0, 1.0)
    sums = np.bincount(expert, weights=parts, minlength=load.size)
    return parts / sums[expert]


def _run(solver: Any) -> None:  # OR-Tools has no types
    """Solve to the end. Raises PolicyFailedError with the solver's status when it does not get there."""
    status = solver.Solve()
    if status != solver.OPTIMAL:
        raise PolicyFailedError(
            f"the linear program for weighted shares ended with status {status} of GLOP"
            f" ({solver.NumVariables()} variables, {solver.NumConstraints()} rows); the live shares stay"
        )


def rounded_shares(by_rank: npt.NDArray[np.integer], shares: Float64Array) -> Float32Array:
    """Shares of slots from shares of ranks. Slots: shape (R, S), -1 = empty; shares: shape (R, E). Returns shape (P,), float32.

    Copies on one rank get equal parts. Each share is rounded down to a multiple of 1 / SHARE_UNITS; what is missing to 1 goes
    to the slots that lost most, ties to the lowest slot. An expert that has no share on any of its slots is split evenly.

    >>> rounded_shares(np.array([[0, 1], [1, -1]]), np.array([[1.0, 1 / 3], [0.0, 2 / 3]])).tolist()
    [1.0, 0.33333301544189453, 0.6666669845581055, 0.0]
    """
    num_ranks, num_logical = shares.shape
    row = np.asarray(by_rank).reshape(-1)
    slots = np.flatnonzero(row >= 0)
    held, rank = row[slots], slots // (row.size // num_ranks)
    local = np.bincount(rank * num_logical + held, minlength=num_ranks * num_logical)[rank * num_logical + held]
    wanted = shares[rank, held] / local
    total = np.bincount(held, weights=wanted, minlength=num_logical)[held]
    copies = np.bincount(held, minlength=num_logical)[held]
    units = np.where(total > 0, wanted / np.where(total > 0, total, 1.0), 1.0 / copies) * SHARE_UNITS
    whole = np.floor(units)
    missing = SHARE_UNITS - np.bincount(held, weights=whole, minlength=num_logical)[held]
    order = np.lexsort((slots, whole - units, held))  # by expert, then most lost first
    first = np.searchsorted(held[order], held[order])
    place = np.empty(slots.size, np.int64)
    place[order] = np.arange(slots.size) - first
    result = np.zeros(row.size, np.float32)
    result[slots] = (whole + (place < missing)) / SHARE_UNITS
    return result


def crossing_parts(table: Table, topology: Topology, source_loads: npt.ArrayLike | None) -> Float64Array | None:
    """Part of each expert's tokens that comes from other nodes than a rank's, (L, R, E); None when no sources are known."""
    if source_loads is None or topology.num_nodes == 1:
        return None
    near = on_nodes(source_parts(table, topology, source_loads), topology)
    crossing: Float64Array = 1.0 - near[:, np.array(topology.node_indices), :]
    return crossing


def weighted_shares(
    table: Table, topology: Topology, loads: npt.ArrayLike, source_loads: npt.ArrayLike | None = None
) -> Float32Array:
    """The shares with the least imbalance for every layer's slots. Loads: shape (L, E), tokens. Shape (L, P), float32.

    source_loads: shape (L, R, E), tokens that each rank sends; with them, fewest tokens cross nodes at that imbalance. Slots of
    dead ranks get 0 (an expert that only dead ranks hold is split evenly over its slots). Raises what `best_split` raises.
    """
    tokens = np.asarray(loads, np.float64)
    if tokens.shape != (table.num_layers, table.num_logical):
        raise InvalidInputError(
            f"loads must have shape ({table.num_layers} layers, {table.num_logical} experts); got {tokens.shape}"
        )
    capacity = np.ones(topology.num_ranks) if topology.capacity is None else np.array(topology.capacity)
    copies = copies_on_ranks(table, topology)
    crossing = crossing_parts(table, topology, source_loads)
    shares = np.zeros(table.physical_to_logical.shape, np.float32)
    for layer, load in enumerate(tokens):
        covered = np.where(copies[layer].any(axis=0), load, 0.0)
        split = best_split(
            copies[layer], covered, capacity, own_work(topology, covered.sum()), None if crossing is None else crossing[layer]
        )
        shares[layer] = rounded_shares(table.by_rank()[layer], split.shares)
    return shares


def with_shares(problem: PlanningProblem, rows: npt.NDArray[np.integer]) -> Float32Array | None:
    """What a plan's `shares` must be: the best ones of its rows under weighted dispatch, None under any other.

    Rows: shape (L, P). Raises what `best_split` raises.
    """
    if problem.dispatch is not Dispatch.WEIGHTED:
        return None
    current = problem.current
    table = Table(current.model, current.layer_ids, current.num_logical, current.rank_ids, np.asarray(rows, np.int32))
    return weighted_shares(table, problem.topology, problem.total_loads, problem.source_loads)


def front_shares(problem: PlanningProblem, front: Sequence[npt.NDArray[np.integer]]) -> tuple[Float32Array, ...]:
    """What a plan's `front_shares` must be: the best ones of each map of its front under weighted dispatch, else none.

    Layers with a row that an earlier map has too are split once. Front: maps of shape (L, P). Raises what `best_split` raises.
    """
    known: dict[tuple[int, bytes], Float32Array] = {}
    shares = []
    for rows in front if problem.dispatch is Dispatch.WEIGHTED else ():
        keys = [(layer, np.asarray(row, np.int32).tobytes()) for layer, row in enumerate(rows)]
        if any(key not in known for key in keys):
            new = with_shares(problem, rows)
            if new is not None:
                known.update(zip(keys, new, strict=True))
        shares.append(np.stack([known[key] for key in keys]))
    return tuple(shares)


def weighted_height(task: LayerTask, held: npt.NDArray[np.integer]) -> float:
    """Least height that shares can give a layer's slots: work over capacity of the busiest rank, tokens.

    Held: shape (R, S), -1 = empty. A proven bound for that row under any dispatch, since every dispatch is some split. Raises
    what `best_split` raises.
    """
    copies = np.zeros((task.num_ranks, task.num_logical + 1), np.int64)
    np.add.at(copies, (np.arange(task.num_ranks)[:, None], held), 1)
    return best_split(copies[:, :-1], task.load, task.capacity, task.base).height
