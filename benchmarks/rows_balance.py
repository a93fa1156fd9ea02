"""Rows on balance: full plans, other dispatches, groups, and cases whose optimum is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.measuring import (
    Measured,
    NotBuiltError,
    Peers,
    Row,
    peers_from_own_plans,
    peers_text,
    proposal_of,
    scored_peer,
    share_of_slots,
)
from benchmarks.rows_moves import ROUNDING, layers_over
from benchmarks.standard import drifted_load, problem_of, standard_load
from eplb_service.dispatch import Dispatch
from eplb_service.imbalance import imbalance_per_layer
from eplb_service.moves import count_moves
from eplb_service.policy.base import Constraints, Effort, PlanningProblem, Proposal
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import limits_of
from eplb_service.policy.one_slot import fewest_moves_one_slot
from eplb_service.policy.plan_costs import off_node_replicas
from eplb_service.static_dispatch import static_shares

GOLDEN = (600.0, 560.0, 120.0, 120.0, 20.0, 10.0, 10.0, 10.0)
GOLDEN_OPTIMUM = 196 + 2 / 3
REPEAT = 5
NODES, GROUPS, GROUP_PRICE = 4, 8, 20.0


def full_plan(peers: Peers, seed: int) -> Measured:
    """Greedy from nothing: gap to the bound."""
    problem = problem_of(standard_load(seed), from_nothing=True)
    proposal, cpu_s = proposal_of("greedy", problem, repeat=REPEAT)
    gaps = np.array(proposal.predicted.per_layer) / np.array(proposal.lower_bound.per_layer)
    close = gaps.mean() <= 1.0005 and gaps.max() <= 1.001
    return Measured(
        ours=f"{gaps.mean():.5f} / {gaps.max():.4f}, {cpu_s * 1000:.0f} ms",
        least=bool(close and cpu_s <= 0.020),
        aim=bool(close and cpu_s <= 0.010),
        peers=peers_text(
            peers,
            problem,
            lambda s: f"{s.imbalance.mean:.4f} / {s.imbalance.worst:.4f}, {s.cpu_s * 1000:.0f} ms",
            repeat=REPEAT,
        ),
    )


def nearest(peers: Peers, seed: int) -> Measured:
    """Every rank sends as many tokens; each goes to a replica on its own rank, else on its node, else to any."""
    problem = problem_of(
        standard_load(seed), num_nodes=NODES, dispatch=Dispatch.NEAREST, max_imbalance=1.005, effort=Effort.NORMAL
    )
    proposal, cpu_s = proposal_of("minmove", problem)
    mean, worst = proposal.predicted.mean, proposal.predicted.worst
    whole = imbalance_under_tables(problem, proposal)
    return Measured(
        ours=f"{mean:.4f} / {worst:.4f}, whole sources {whole:.4f}, {proposal.moves.experts:,} moves, {cpu_s:.1f} s",
        least=mean <= 1.01 and worst <= 1.015,
        aim=mean <= 1.005 and worst <= 1.015 and whole <= 1.015,
        peers=peers_text(peers, problem, lambda s: f"{s.imbalance.mean:.3f} / {s.imbalance.worst:.3f}"),
    )


def imbalance_under_tables(problem: PlanningProblem, proposal: Proposal) -> float:
    """Mean over layers when every rank sends all its tokens of an expert to one copy, as static tables in engines do."""
    shares = static_shares(proposal.placement, problem.topology, seed=0)
    loads = np.einsum("lre,le->lr", shares, problem.total_loads)
    return float(imbalance_per_layer(loads).mean())


def soft_groups(peers: Peers, seed: int) -> Measured:
    """Groups that prefer a node, at a high price: how many replicas leave it all the same, for balance."""
    strict = problem_of(standard_load(seed), num_nodes=NODES, constraints=Constraints(num_groups=GROUPS))
    problem = problem_of(
        standard_load(seed),
        num_nodes=NODES,
        constraints=Constraints(num_groups=GROUPS, group_price=GROUP_PRICE),
        max_imbalance=1.01,
        effort=Effort.THOROUGH,
    )
    proposal, cpu_s = proposal_of("minmove", problem)
    away = float(off_node_replicas(proposal.placement.physical_to_logical, problem).mean())
    over = layers_over(proposal, 1.01)
    missed = f", {over} LAYERS OVER" if over else ""
    return Measured(
        ours=f"{away:.2f} a layer, worst layer {proposal.predicted.worst:.4f}{missed}, {cpu_s:.1f} s",
        least=not over and away <= 4.0,
        aim=not over and away <= 3.5,
        peers=peers_text(peers, strict, lambda s: f"strict {s.imbalance.mean:.4f} / {s.imbalance.worst:.3f}"),
    )


def one_slot(peers: Peers, seed: int) -> Measured:
    """As many slots as ranks: balance and moves have provable optima."""
    before = problem_of(standard_load(seed), num_ranks=320, slots_per_rank=1, num_nodes=40)
    first, _ = proposal_of("greedy", before)
    problem = problem_of(drifted_load(seed), num_ranks=320, slots_per_rank=1, num_nodes=40, current=first.placement)
    proposal, cpu_s = proposal_of("minmove", problem)
    bounds = proposal.lower_bound.per_layer
    gap = max(reached / bound for reached, bound in zip(proposal.predicted.per_layer, bounds, strict=True))
    moves, least = proposal.moves.experts, fewest_moves_at(problem, bounds)
    exact = gap <= 1 + ROUNDING and moves == least
    return Measured(
        ours=f"gap {gap:.6f}, {moves:,} moves, proven >= {least:,}, {cpu_s:.1f} s",
        least=exact,
        aim=exact,
        peers=peers_from_own_plans(
            peers, before, problem, lambda s: f"{share_of_slots(s.moves, problem.current):.0%} of slots"
        ),
    )


def fewest_moves_at(problem: PlanningProblem, targets: Sequence[float]) -> int:
    """Exact fewest moves of layers with one slot a rank, each at or under its own target."""
    limits = limits_of(problem)
    layout, table = Layout.of(problem, limits), problem.current
    total = 0
    for layer, target in enumerate(targets):
        row = fewest_moves_one_slot(layer_task(problem, limits, layout, layer), target * (1 + ROUNDING))
        if row is None:
            raise NotBuiltError(f"no exact answer for layer {layer}")
        before, after = table.physical_to_logical[layer], row.reshape(-1)
        total += count_moves(before, after, num_ranks=table.num_ranks, num_logical=table.num_logical)
    return total


def golden(peers: Peers, seed: int) -> Measured:
    """Eight experts on eight ranks of two slots: the optimum is known, greedy planners miss it."""
    del seed
    problem = problem_of(np.array([GOLDEN]), num_ranks=8, slots_per_rank=2)
    proposal, cpu_s = proposal_of("ilp", problem)
    mean = sum(GOLDEN) / 8
    height, bound = proposal.predicted.worst * mean, proposal.lower_bound.worst * mean
    proven = height <= GOLDEN_OPTIMUM * (1 + 1e-6) and bound >= GOLDEN_OPTIMUM * (1 - 1e-6)
    others = "; ".join(
        f"{name}: {scored_peer(planner, problem, repeat=1).imbalance.worst * mean:.0f}" for name, planner in peers.items()
    )
    return Measured(
        ours=f"{height:.2f}, {'proven' if proven else f'bound {bound:.2f}'}, {cpu_s:.2f} s",
        least=proven and cpu_s < 5,
        aim=proven and cpu_s < 0.1,
        peers=others,
    )


ROWS = (
    Row(
        name="full-plan",
        what="full plan from nothing: gap to the bound, mean / worst layer, and time",
        at_least="1.0005 / 1.001, 20 ms",
        aim="10 ms",
        seeded=True,
        measure=full_plan,
    ),
    Row(
        name="one-slot",
        what="320 slots on 320 ranks, drift: gap to the best balance, moves against their proven least",
        at_least="exact optimum of both",
        aim="same",
        seeded=True,
        measure=one_slot,
    ),
    Row(
        name="nearest",
        what="nearest dispatch (8 ranks a node), uniform sources: mean / worst imbalance",
        at_least="1.01 / 1.015",
        aim="1.005, whole sources 1.015",
        seeded=True,
        measure=nearest,
    ),
    Row(
        name="soft-groups",
        what="8 soft groups on 4 nodes, every layer at or under 1.01: replicas off their group's node",
        at_least="4 a layer",
        aim="3.5 a layer",
        seeded=True,
        measure=soft_groups,
    ),
    Row(
        name="golden",
        what="golden case (8 experts, 8 ranks x 2 slots): busiest rank",
        at_least="196.67 proven, 5 s",
        aim="0.1 s",
        published="FlashLB: 205, published",
        measure=golden,
    ),
)
