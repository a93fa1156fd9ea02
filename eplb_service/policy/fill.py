"""Plans for engines that know no empty slot (`Constraints.fill_slots`): what a policy leaves empty gets one more copy.

A policy empties a slot where a copy less is the better balance, and engines that route by our tables live with that. The tables
of vLLM, SGLang and TensorRT-LLM do not. Which copy does least harm is found by load: the one after which the layer's busiest
rank has least to do, then one that the rank holds already (it need not move), then the one that adds least.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT, Int32Array
from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.row_check import empty_slots, experts_that_may_join


def filled(problem: PlanningProblem, raw: RawPlan) -> RawPlan:
    """A plan, and its front, with every usable slot filled where an expert may be there; the same plan where none is empty.

    What is no map at all is left for `verify` to name.
    """
    maps = [raw.physical_to_logical, *raw.front]
    if not all(_is_map(rows, problem) for rows in maps):
        return raw
    limits = limits_of(problem)
    own, *front = [filled_rows(rows, problem, limits) for rows in maps]
    if all(new is old for new, old in zip((own, *front), maps, strict=True)):
        return raw
    status = raw.status if own is maps[0] else "filled"  # what was said of the plan is not true of this one
    return replace(raw, physical_to_logical=own, front=tuple(front), status=status)


def _is_map(rows: object, problem: PlanningProblem) -> bool:
    """Whether something of a policy's is a map of the problem's table."""
    table = problem.current
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "iu" or rows.shape != table.physical_to_logical.shape:
        return False
    return bool((rows >= EMPTY_SLOT).all() and (rows < table.num_logical).all())


def filled_rows(rows: Int32Array, problem: PlanningProblem, limits: Limits) -> Int32Array:
    """Rows of shape (L, P) in which every usable slot holds an expert, where one may; the rows given where none changes."""
    constraints = problem.constraints
    frugal = not problem.from_nothing and any(
        limit is not None
        for limit in (
            constraints.max_moves,
            constraints.max_moves_per_rank,
            constraints.max_moves_per_layer,
            constraints.max_layers,
            constraints.max_move_bytes,
        )
    )
    empty = (rows.reshape(-1, *limits.usable.shape) == EMPTY_SLOT) & limits.usable
    made = rows.copy()
    for layer in np.flatnonzero(empty.any(axis=(1, 2))).tolist():
        made[layer] = _filled_row(layer, rows[layer], problem, limits, frugal=frugal)
    return rows if np.array_equal(made, rows) else made


def _filled_row(layer: int, row: Int32Array, problem: PlanningProblem, limits: Limits, *, frugal: bool) -> Int32Array:
    """One layer. frugal: moves are limited, so that a copy that need not move goes before balance."""
    load = problem.loads[:, layer].sum(axis=0)
    num_ranks, num_logical = limits.room.size, load.size
    made = row.copy()
    held = residencies(row, num_ranks=num_ranks, num_logical=num_logical)
    before = residencies(problem.current.physical_to_logical[layer], num_ranks=num_ranks, num_logical=num_logical)
    for slot in empty_slots(row, limits):
        rank = slot // limits.usable.shape[1]
        candidates = np.flatnonzero(experts_that_may_join(layer, made, rank, problem, limits))
        if not candidates.size:
            continue
        copies = held.sum(axis=0)
        share = load / np.maximum(copies, 1)
        height = held @ share
        lighter = (load / (copies + 1) - share)[candidates]
        after = height[:, None] + held[:, candidates] * lighter[None, :]
        added = (load / (copies + 1))[candidates]
        after[rank] += added
        busiest = (after / limits.capacity[:, None]).max(axis=0)
        moves = ~before[rank, candidates] if not problem.from_nothing else np.zeros(candidates.size, np.bool_)
        keys = (candidates, added, busiest, moves) if frugal else (candidates, added, moves, busiest)
        expert = candidates[np.lexsort(keys)[0]]
        made[slot] = expert
        held[rank, expert] = True
    return made
