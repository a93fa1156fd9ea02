"""What an operator wants to know of a plan beyond its placement: was the target met, what stopped it, what does it cost.

Everything is recomputed from the problem and the verified proposal; nothing is taken from what a policy says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from eplb_service.hops import TokenHops, token_hops
from eplb_service.node_visits import NodeVisits, node_shares, visits_of
from eplb_service.offline.together_file import TokenChoices
from eplb_service.placement import EMPTY_SLOT, Table
from eplb_service.policy.base import Effort, PlanningProblem, Proposal
from eplb_service.policy.limits import limits_of
from eplb_service.policy.plan_costs import off_node_replicas
from eplb_service.policy.row_check import Changes
from eplb_service.staging_memory import StagingMemory

TARGET_TOLERANCE = 1e-9
"""Relative: a layer is at its target up to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """How much of a limit a plan used.

    name: as in `Constraints`; where: the rank or layer that used most, "" for the whole. step: the least that one more takes.
    """

    name: str
    used: int
    most: int
    where: str = ""
    step: int = 1

    @property
    def is_reached(self) -> bool:
        """Not one more fits."""
        return self.used + self.step > self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts of one plan. Layer-wise values are in the order of the table.

    moves_per_layer: residencies moved. layers_over: ids of layers above the target; None = no target was given.
    redundant_experts: slots beyond E that hold something, most over layers. redundant_bytes_per_rank: memory of the copies
    beyond one of each expert, over all layers, on the average rank. staging: memory that a rank needs to carry this out; None =
    bytes are not known. off_node: replicas off their group's node (where most of
    the group's are) per layer; () without soft groups. hops: where the tokens go under the dispatch, before and after; None =
    the fleet is one node. visits: what becomes of pairs of experts, before and after; None = they are not known.
    """

    moves_per_layer: tuple[int, ...]
    moves_per_rank: tuple[int, ...]
    layers_over: tuple[int, ...] | None
    limits: tuple[LimitUse, ...]
    redundant_experts: int
    redundant_bytes_per_rank: int
    staging: StagingMemory | None = None
    off_node: tuple[int, ...] = ()
    hops: tuple[TokenHops, TokenHops] | None = None
    visits: tuple[NodeVisits, NodeVisits] | None = None

    @property
    def reached(self) -> tuple[LimitUse, ...]:
        """Limits of which nothing is left."""
        return tuple(limit for limit in self.limits if limit.is_reached)


def facts_of(problem: PlanningProblem, proposal: Proposal, choices: TokenChoices | None = None) -> PlanFacts:
    """The facts of a proposal. choices: tokens' own, for the exact number of nodes that they visit."""
    changes = Changes.between(proposal.placement.physical_to_logical, problem, limits_of(problem), proposal.moves)
    over = None
    if problem.max_imbalance is not None:
        highest = problem.max_imbalance * (1 + TARGET_TOLERANCE)
        ids = proposal.placement.layer_ids
        over = tuple(layer for layer, value in zip(ids, proposal.predicted.per_layer, strict=True) if value > highest)
    soft = (problem.constraints.num_groups or 1) > 1 and problem.constraints.group_price is not None
    copies = (proposal.placement.physical_to_logical != EMPTY_SLOT).sum(axis=1) - proposal.placement.num_logical
    sizes = np.array(problem.expert_bytes or (0,) * problem.current.num_layers, dtype=object)
    return PlanFacts(
        moves_per_layer=tuple(changes.received.sum(axis=1).tolist()),
        moves_per_rank=tuple(changes.received.sum(axis=0).tolist()),
        layers_over=over,
        limits=_limits_used(problem, changes),
        redundant_experts=int(copies.max()),
        redundant_bytes_per_rank=int((copies.astype(object) * sizes).sum()) // len(problem.topology.alive_positions()),
        staging=StagingMemory.of((problem.current.slots_per_rank, size) for size in problem.expert_bytes)
        if problem.expert_bytes and any(problem.expert_bytes)
        else None,
        off_node=tuple(off_node_replicas(proposal.placement.physical_to_logical, problem).tolist()) if soft else (),
        hops=_hops(problem, proposal) if problem.topology.num_nodes > 1 else None,
        visits=None
        if problem.together is None
        else (_visits(problem, problem.current, choices), _visits(problem, proposal.placement, choices)),
    )


def _hops(problem: PlanningProblem, proposal: Proposal) -> tuple[TokenHops, TokenHops]:
    before, after = (
        token_hops(problem.total_loads, table, problem.topology, problem.dispatch, problem.source_loads)
        for table in (problem.current, proposal.placement)
    )
    return before, after


def _visits(problem: PlanningProblem, table: Table, choices: TokenChoices | None) -> NodeVisits:
    """Nodes that tokens visit in a placement."""
    where = (table, problem.topology, problem.dispatch, problem.source_loads)
    together = np.zeros(0) if problem.together is None else problem.together
    visits = visits_of(problem.total_loads, together, *where)
    return visits if choices is None else replace(visits, exact=choices.mean_nodes(*node_shares(*where)))


def _limits_used(problem: PlanningProblem, changes: Changes) -> tuple[LimitUse, ...]:
    """Use of every limit on moves that the problem has, counted as `verify` does."""
    if problem.from_nothing:
        return ()
    constraints, per_layer, per_rank = problem.constraints, changes.received.sum(axis=1), changes.received.sum(axis=0)
    layer, rank = int(per_layer.argmax()), int(per_rank.argmax())
    rank_name, layer_name = f"rank {problem.topology.rank_ids[rank]}", f"layer {problem.current.layer_ids[layer]}"
    rows = (
        ("max_moves", changes.summary.experts, constraints.max_moves, ""),
        ("max_moves_per_rank", int(per_rank[rank]), constraints.max_moves_per_rank, rank_name),
        ("max_moves_per_layer", int(per_layer[layer]), constraints.max_moves_per_layer, layer_name),
        ("max_layers", changes.layers, constraints.max_layers, ""),
        ("max_move_bytes", changes.summary.move_bytes, constraints.max_move_bytes, ""),
    )
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
        names = ", ".join(f"--{limit.name.replace('_', '-')}" for limit in facts.reached)
        return Stop(code="limit", reason=f"limited by {names}")
    if facts.layers_over and facts.limits:
        return Stop(code="budget", reason="end of the search within the limits on moves")
    if facts.layers_over and proposal.policy != "greedy":
        how = "--effort thorough" if problem.effort is not Effort.THOROUGH else "a larger --work-budget"
        return Stop(code="budget", reason=f"end of the search budget; {how} searches longer")
    return Stop(code="budget", reason="end of the search")
