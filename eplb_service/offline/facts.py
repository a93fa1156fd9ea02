"""What an operator wants to know of a plan beyond its placement: was the target met, what stopped it, what does it cost.

Everything is recomputed from the problem and the verified proposal; nothing is taken from what a policy says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.hops import TokenHops, token_hops
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT, Table
from eplb_service.policy.base import Effort, PlanningProblem, Proposal
from eplb_service.policy.plan_costs import off_node_replicas

TARGET_TOLERANCE = 1e-9
"""Relative: a layer is at its target up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """How much of a limit a plan used. name: as in `Constraints`; where: the rank or layer that used most, "" for the whole."""

    name: str
    used: int
    most: int
    where: str = ""

    @property
    def is_reached(self) -> bool:
        """Nothing is left of it."""
        return self.used >= self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts of one plan. Layer-wise values are in the order of the table.

    moves_per_layer: residencies moved. layers_over: ids of layers above the target; None = no target was given.
    redundant_experts: slots beyond E that hold something, most over layers. redundant_bytes_per_rank: memory of the copies
    beyond one of each expert, over all layers, on the average rank. off_node: replicas off their group's node (where most of
    the group's are) per layer; () without soft groups. hops: where the tokens go under the dispatch, before and after; None =
    the fleet is one node.
    """

    moves_per_layer: tuple[int, ...]
    moves_per_rank: tuple[int, ...]
    layers_over: tuple[int, ...] | None
    limits: tuple[LimitUse, ...]
    redundant_experts: int
    redundant_bytes_per_rank: int
    off_node: tuple[int, ...] = ()
    hops: tuple[TokenHops, TokenHops] | None = None

    @property
    def reached(self) -> tuple[LimitUse, ...]:
        """Limits of which nothing is left."""
        return tuple(limit for limit in self.limits if limit.is_reached)


def facts_of(problem: PlanningProblem, proposal: Proposal) -> PlanFacts:
    """The facts of a proposal."""
    moved = moved_residencies(problem.current, proposal.placement)
    per_layer, per_rank = moved.sum(axis=(1, 2)), moved.sum(axis=(0, 2))
    over = None
    if problem.max_imbalance is not None:
        highest = problem.max_imbalance * (1 + TARGET_TOLERANCE)
        ids = proposal.placement.layer_ids
        over = tuple(layer for layer, value in zip(ids, proposal.predicted.per_layer, strict=True) if value > highest)
    soft = (problem.constraints.num_groups or 1) > 1 and problem.constraints.group_price is not None
    copies = (proposal.placement.physical_to_logical != EMPTY_SLOT).sum(axis=1) - proposal.placement.num_logical
    sizes = np.array(problem.expert_bytes or (0,) * problem.current.num_layers, dtype=object)
    return PlanFacts(
        moves_per_layer=tuple(per_layer.tolist()),
        moves_per_rank=tuple(per_rank.tolist()),
        layers_over=over,
        limits=_limits_used(problem, proposal, per_layer, per_rank),
        redundant_experts=int(copies.max()),
        redundant_bytes_per_rank=int((copies.astype(object) * sizes).sum()) // len(problem.topology.alive_positions()),
        off_node=tuple(off_node_replicas(proposal.placement.physical_to_logical, problem).tolist()) if soft else (),
        hops=_hops(problem, proposal) if problem.topology.num_nodes > 1 else None,
    )


def _hops(problem: PlanningProblem, proposal: Proposal) -> tuple[TokenHops, TokenHops]:
    before, after = (
        token_hops(problem.total_loads, table, problem.topology, problem.dispatch, problem.source_loads)
        for table in (problem.current, proposal.placement)
    )
    return before, after


def moved_residencies(before: Table, after: Table) -> npt.NDArray[np.bool_]:
    """Residencies that were not there before, shape (L, R, E)."""
    shape = {"num_ranks": before.num_ranks, "num_logical": before.num_logical}
    pairs = zip(before.physical_to_logical, after.physical_to_logical, strict=True)
    return np.array([residencies(new, **shape) & ~residencies(old, **shape) for old, new in pairs])


def _limits_used(
    problem: PlanningProblem, proposal: Proposal, per_layer: npt.NDArray[np.int64], per_rank: npt.NDArray[np.int64]
) -> tuple[LimitUse, ...]:
    """Use of every limit on moves that the problem has."""
    constraints, moves = problem.constraints, proposal.moves
    layer, rank = int(per_layer.argmax()), int(per_rank.argmax())
    rows = [
        ("max_moves", moves.experts, constraints.max_moves, ""),
        ("max_moves_per_rank", int(per_rank[rank]), constraints.max_moves_per_rank, f"rank {problem.topology.rank_ids[rank]}"),
        (
            "max_moves_per_layer",
            int(per_layer[layer]),
            constraints.max_moves_per_layer,
            f"layer {problem.current.layer_ids[layer]}",
        ),
        (
            "max_layers",
            int((proposal.placement.physical_to_logical != problem.current.physical_to_logical).any(axis=1).sum()),
            constraints.max_layers,
            "",
        ),
        ("max_move_bytes", moves.move_bytes, constraints.max_move_bytes, ""),
    ]
    if problem.from_nothing:
        return ()
    return tuple(LimitUse(name=name, used=used, most=most, where=where) for name, used, most, where in rows if most is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a search ended. code: `cut_off`, `target_met`, `limit`, `optimal` or `budget`; reason: the same in words."""

    code: str
    reason: str


def why_it_stopped(problem: PlanningProblem, proposal: Proposal, facts: PlanFacts) -> Stop:
    """The first of: cut off, target met, optimal, a limit used up, end of the search budget."""
    if proposal.cut_off:
        return Stop(
            code="cut_off", reason=f"cut off by the time limit of {problem.time_limit_s:g} s; another machine may differ"
        )
    if facts.layers_over == ():
        return Stop(code="target_met", reason="target met in every layer")
    if proposal.status == "optimal":
        return Stop(code="optimal", reason="proven optimal")
    if facts.reached:
        names = ", ".join(f"--{limit.name.replace('_', '-')} {limit.most}" for limit in facts.reached)
        return Stop(code="limit", reason=f"limited by {names}")
    if facts.layers_over and facts.limits:
        return Stop(code="budget", reason="end of the search within the limits on moves")
    if facts.layers_over and proposal.policy != "greedy":
        how = "--effort thorough" if problem.effort is not Effort.THOROUGH else "a larger --work-budget"
        return Stop(code="budget", reason=f"end of the search budget; {how} searches longer")
    return Stop(code="budget", reason="end of the search")
