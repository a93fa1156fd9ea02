"""Plans for engines that know no empty slot (`Constraints.fill_slots`): what a policy leaves empty gets one more copy.

A policy empties a slot where a copy less is the better balance, and engines that route by our tables live with that. The tables
of vLLM, SGLang and TensorRT-LLM do not. Which copy does least harm is found by load: the one after which the layer's busiest
rank has least to do, then one that the rank holds already (it need not move), then the one that adds least.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb_service.errors import InvalidInputError
from eplb_service.moves import residencies, residency_moves
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.groups import Layout, grouped_rows
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import Limits, legal_rows, limits_of, row_fault
from eplb_service.policy.move_limits import moves_are_limited
from eplb_service.policy.repair import repaired_row
from eplb_service.policy.row_check import Changes, empty_slots, experts_that_may_join, move_fault
from eplb_service.policy.shares import with_shares


def filled(problem: PlanningProblem, raw: RawPlan) -> RawPlan:
    """A plan, and its front, with every usable slot filled where an expert may be there; the same plan where none is empty.

    Where that takes more moves than the limits leave, layers fall back to what is nearest to the live row and full; points of
    the front that do not fit are dropped. What is no map at all is left for `verify` to name, and so is a plan that was over
    its limits before. Raises InvalidInputError when the slots cannot be filled within the limits.
    """
    several: tuple[object, ...] = (raw.front, raw.front_shares)
    if not all(isinstance(given, tuple | list) for given in several):
        return raw
    maps = [raw.physical_to_logical, *raw.front]
    if not all(_is_map(rows, problem) for rows in maps):
        return raw
    limits = limits_of(problem)
    own, *front = [filled_rows(rows, problem, limits) for rows in maps]
    if all(new is old for new, old in zip((own, *front), maps, strict=True)):
        return raw
    status = raw.status if own is maps[0] else "filled"  # what was said of the plan is not true of this one
    if own is not maps[0] and _over(own, problem, limits) is not None and _over(maps[0], problem, limits) is None:
        own = _within_limits(own, problem, limits)
        raw = replace(raw, shares=None if raw.shares is None else with_shares(problem, own))
    fitting = [
        place
        for place, (new, old) in enumerate(zip(front, raw.front, strict=True))
        if new is old or _over(new, problem, limits) is None
    ]
    shares = raw.front_shares
    return replace(
        raw,
        physical_to_logical=own,
        front=tuple(front[place] for place in fitting),
        front_shares=tuple(shares[place] for place in fitting) if len(shares) == len(front) else shares,
        status=status,
    )


def _over(rows: Int32Array, problem: PlanningProblem, limits: Limits) -> str | None:
    """Which limit on moves a map breaks."""
    table = problem.current
    after = Table(table.model, table.layer_ids, table.num_logical, table.rank_ids, rows)
    summary = residency_moves(table, after, problem.topology, problem.expert_bytes, fan_out=problem.fan_out)
    return move_fault(Changes.between(rows, problem, limits, summary), problem)


def _within_limits(rows: Int32Array, problem: PlanningProblem, limits: Limits) -> Int32Array:
    """Rows in which layers are near the live ones until the limits on moves hold: those first that this spares most moves.

    Near: the live row, where it is legal, else the nearest one that is; then filled.
    """
    table, layout = problem.current, Layout.of(problem, limits)
    back = np.where(limits.usable.reshape(-1)[None, :], table.physical_to_logical, EMPTY_SLOT)
    empty = int(((back == EMPTY_SLOT) & limits.usable.reshape(-1)).sum())
    legal = legal_rows(back, limits, table.num_logical) & grouped_rows(problem)
    for layer in np.flatnonzero(~legal).tolist():
        back[layer] = repaired_row(layer_task(problem, limits, layout, layer))
    back = filled_rows(back, problem, limits)
    shape = {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
    before = residencies(table.physical_to_logical, **shape)
    moves, fewer = ((residencies(some, **shape) & ~before).sum(axis=(1, 2)) for some in (rows, back))
    made = rows.copy()
    for layer in np.argsort(fewer - moves, kind="stable").tolist():
        made[layer] = back[layer]
        if _over(made, problem, limits) is None:
            return made
    raise InvalidInputError(
        f"every slot is to be filled, and {empty} are empty now, but even so {_over(made, problem, limits)}; raise that limit,"
        f" or plan without fill_slots"
    )


def _is_map(rows: object, problem: PlanningProblem) -> bool:
    """Whether something of a policy's is a map of the problem's table."""
    table = problem.current
    if type(rows) is not np.ndarray or rows.dtype.kind not in "iu" or rows.shape != table.physical_to_logical.shape:
        return False
    return bool((rows >= EMPTY_SLOT).all() and (rows < table.num_logical).all())


def filled_rows(rows: Int32Array, problem: PlanningProblem, limits: Limits) -> Int32Array:
    """Rows of shape (L, P) in which every usable slot holds an expert, where one may; the rows given where none changes."""
    frugal = moves_are_limited(problem)
    empty = (rows.reshape(-1, *limits.usable.shape) == EMPTY_SLOT) & limits.usable
    table = problem.current
    live = np.where(limits.usable.reshape(-1)[None, :], table.physical_to_logical, EMPTY_SLOT)
    made = rows.copy()
    for layer in np.flatnonzero(empty.any(axis=(1, 2))).tolist():
        row = _filled_row(layer, rows[layer], problem, limits, frugal=frugal)
        if row_fault(row, limits, table.num_logical) is None or not np.array_equal(rows[layer], live[layer]):
            made[layer] = row  # a live row with faults may stay as it is, but not change
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
