"""Plans for engines whose files name an expert for every slot: what a plan leaves empty gets one more copy of an expert.

A policy empties a slot when a copy less is the better balance, and our own engines live with that. SGLang, TensorRT-LLM and
vllm-ascend do not. Which copy does least harm is found by load: the one after which the layer's busiest rank has least to do,
then one that the rank holds already (it need not move), then the one that adds least.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError, PolicyFailedError
from eplb_service.offline.plan import Filled, OfflinePlan
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import FrontPoint, PlanningProblem, RawPlan
from eplb_service.policy.limits import Limits, limits_of
from eplb_service.policy.verify import verify

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


def filled_plan(plan: OfflinePlan, engine: str) -> OfflinePlan:
    """The plan with every usable slot filled, verified again; the same plan when none is empty. engine: for the sentence.

    Raises InvalidInputError when limits on moves do not leave room for the copies.
    """
    proposal, problem = plan.proposal, plan.problem
    rows = proposal.placement.physical_to_logical
    limits = limits_of(problem)
    num_empty = int((rows.reshape(len(rows), *limits.usable.shape)[:, limits.usable] == EMPTY_SLOT).sum())
    if not num_empty or proposal.placement.shares is not None:
        return plan
    raw = RawPlan(
        physical_to_logical=filled_rows(rows, problem, limits),
        lower_bound=proposal.lower_bound.per_layer,
        status="heuristic",  # what the policy said of its plan is not true of this one
        cut_off=proposal.cut_off,
    )
    try:
        made = verify(problem, raw, policy=proposal.policy, solve_s=proposal.solve_s)
    except PolicyFailedError as error:
        raise InvalidInputError(
            f"the plan leaves {num_empty} slots empty, files of {engine} name an expert for every slot, and the"
            " limits of the plan"
            f" leave no room to fill them ({error}): raise the limits on moves, or write --out eplb:FILE"
        ) from error
    point = FrontPoint(placement=made.placement, predicted=made.predicted, moves=made.moves)
    front = tuple(point if other.placement == proposal.placement else other for other in proposal.front)
    return replace(plan, proposal=replace(made, front=front), filled=Filled(slots=num_empty, before=proposal.predicted))


def filled_rows(rows: Int32Array, problem: PlanningProblem, limits: Limits) -> Int32Array:
    """Rows of shape (L, P) in which every usable slot holds an expert, where one may be there: not twice on a rank."""
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
    made = rows.copy()
    for layer, row in enumerate(made):
        if (row.reshape(limits.usable.shape)[limits.usable] == EMPTY_SLOT).any():
            made[layer] = _filled_row(layer, row, problem, limits, frugal=frugal)
    return made


def _filled_row(layer: int, row: Int32Array, problem: PlanningProblem, limits: Limits, *, frugal: bool) -> Int32Array:
    """One layer. frugal: moves are limited, so that a copy that need not move goes before balance."""
    load = problem.total_loads[layer]
    num_ranks, num_logical = limits.room.size, load.size
    slots = row.reshape(num_ranks, -1).copy()
    held = _held(slots, num_logical)
    before = _held(problem.current.by_rank()[layer], num_logical)
    allowed = ~limits.marked(limits.bars, layer, num_logical) & _group_allows(slots, problem)
    for rank, slot in np.argwhere(limits.usable & (slots == EMPTY_SLOT)).tolist():
        copies = held.sum(axis=0)
        candidates = np.flatnonzero(~held[rank] & allowed[rank] & (copies < limits.copies_max))
        if not candidates.size:
            continue
        share = load / np.maximum(copies, 1)
        height = held @ share
        lighter = (load / (copies + 1) - share)[candidates]
        after = height[:, None] + held[:, candidates] * lighter[None, :]
        after[rank] += (load / (copies + 1))[candidates]
        busiest = (after / limits.capacity[:, None]).max(axis=0)
        moves = ~before[rank, candidates] if not problem.from_nothing else np.zeros(candidates.size, np.bool_)
        added = (load / (copies + 1))[candidates]
        keys = (candidates, added, busiest, moves) if frugal else (candidates, added, moves, busiest)
        expert = candidates[np.lexsort(keys)[0]]
        slots[rank, slot] = expert
        held[rank, expert] = True
    return slots.reshape(-1)


def _held(slots: Int32Array, num_logical: int) -> BoolArray:
    """Whether a rank holds an expert. Shape (R, E)."""
    held = np.zeros((slots.shape[0], num_logical), np.bool_)
    rank, slot = np.nonzero(slots >= 0)
    held[rank, slots[rank, slot]] = True
    return held


def _group_allows(slots: Int32Array, problem: PlanningProblem) -> BoolArray:
    """Where strict groups let an expert be: on the node that its group is on. Shape (R, E)."""
    num_ranks, num_logical = slots.shape[0], problem.total_loads.shape[1]
    groups = problem.constraints.num_groups or 1
    if groups == 1 or problem.constraints.group_price is not None:
        return np.ones((num_ranks, num_logical), np.bool_)
    nodes = np.array(problem.topology.node_indices)
    size = num_logical // groups
    node_of_group = np.full(groups, -1)
    rank, slot = np.nonzero(slots >= 0)
    node_of_group[slots[rank, slot] // size] = nodes[rank]
    allows: BoolArray = np.equal(nodes[:, None], np.repeat(node_of_group, size)[None, :])
    return allows
