"""Rows on moves: how few reach a target, from an unbalanced start, after noise, after drift; and how near the proof is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.measuring import Measured, Peers, Row, peers_from_own_plans, peers_text, percent, proposal_of, share_of_slots
from benchmarks.standard import drifted_load, problem_of, resampled, standard_load
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, Effort, PlanningProblem, Proposal

NOISE_TOKENS = 2_000_000
ROUNDING = 1e-9


def layers_over(proposal: Proposal, target: float) -> int:
    """Layers above a target."""
    return sum(value > target * (1 + ROUNDING) for value in proposal.predicted.per_layer)


def moves_text(proposal: Proposal, cpu_s: float, target: float) -> str:
    """`2,214 moves, worst layer 1.0100, 4.9 s`."""
    over = layers_over(proposal, target)
    missed = f", {over} LAYERS OVER" if over else ""
    return f"{proposal.moves.experts:,} moves, worst layer {proposal.predicted.worst:.4f}, {cpu_s:.1f} s{missed}"


def planned_to(target: float, seed: int, effort: Effort, **asked: Any) -> tuple[Proposal, float, PlanningProblem]:
    """The standard work of a seed planned to a target, from the linear placement."""
    problem = problem_of(standard_load(seed), max_imbalance=target, effort=effort, **asked)
    return *proposal_of("minmove", problem), problem


def moves_row(target: float, effort: Effort, *, least: int, least_s: float, aim: int, aim_effort: Effort, aim_s: float) -> Any:
    """What measures moves to a target: at the effort of the figure, and of the aim where that is another one."""

    def measure(peers: Peers, seed: int) -> Measured:
        proposal, cpu_s, problem = planned_to(target, seed, effort)
        text = moves_text(proposal, cpu_s, target)
        met = not layers_over(proposal, target)
        aimed, aimed_s = proposal, cpu_s
        if aim_effort is not effort and seed == 0:
            aimed, aimed_s, _ = planned_to(target, seed, aim_effort)
            text += f"; {aim_effort.value}: {moves_text(aimed, aimed_s, target)}"
        if seed == 0:
            spare, _, _ = planned_to(target, seed, effort, constraints=Constraints())
            text += f"; {spare.moves.experts:,} where slots may stay empty"
        reached = not layers_over(aimed, target)
        return Measured(
            ours=text,
            least=met and proposal.moves.experts <= least and cpu_s <= least_s,
            aim=reached and aimed.moves.experts <= aim and aimed_s <= aim_s,
            peers=peers_text(peers, problem, lambda scored: f"{scored.moves.experts:,} (worst {scored.imbalance.worst:.4f})"),
        )

    return measure


def starts(seed: int) -> dict[str, Table]:
    """Plans for the standard load of a seed, by policy: by the fewest moves to the target, and from nothing."""
    fewest, _, _ = planned_to(1.02, seed, Effort.NORMAL)
    full, _ = proposal_of("greedy", problem_of(standard_load(seed)))
    return {"minmove": fewest.placement, "greedy": full.placement}


def resample(peers: Peers, seed: int) -> Measured:
    """Noise alone: a plan for W, then 2 M tokens a layer of W; how much is moved with the gate off."""
    load = standard_load(seed)
    before = problem_of(load)
    again = problem_of(resampled(load, NOISE_TOKENS, seed + 1), max_imbalance=1.02, effort=Effort.QUICK)
    told, shares = [], []
    for start, first in starts(seed).items():
        proposal, _ = proposal_of("minmove", replace(again, current=first))
        shares.append(share_of_slots(proposal.moves, proposal.placement))
        told.append(
            f"from {start}'s plan {percent(shares[-1])} of slots ({proposal.moves.experts} moves; worst layer stays at"
            f" {proposal.predicted.worst:.4f})"
        )
    return Measured(
        ours="; ".join(told),
        least=max(shares) <= 0.001,
        aim=max(shares) == 0,
        peers=peers_from_own_plans(peers, before, again, lambda scored: percent(share_of_slots(scored.moves, again.current))),
    )


def drift(peers: Peers, seed: int) -> Measured:
    """Half of the load becomes another one; from plans for the first."""
    before = problem_of(standard_load(seed))
    problem = problem_of(drifted_load(seed), max_imbalance=1.02, effort=Effort.NORMAL)
    told, shares = [], []
    for start, first in starts(seed).items():
        proposal, cpu_s = proposal_of("minmove", replace(problem, current=first))
        shares.append(share_of_slots(proposal.moves, proposal.placement) if not layers_over(proposal, 1.02) else 1.0)
        told.append(f"from {start}'s plan {percent(shares[-1])} of slots, {moves_text(proposal, cpu_s, 1.02)}")
    return Measured(
        ours="; ".join(told),
        least=max(shares) <= 0.09,
        aim=max(shares) <= 0.07,
        peers=peers_from_own_plans(
            peers, before, problem, lambda scored: percent(share_of_slots(scored.moves, problem.current))
        ),
    )


def certificate(peers: Peers, seed: int) -> Measured:
    """How far from the proven least number of moves the plan is."""
    del peers
    proposal, cpu_s, _ = planned_to(1.02, seed, Effort.NORMAL, certify=True)
    bound = proposal.moves_lower_bound
    if not bound:
        return Measured(ours=f"{proposal.moves.experts:,} moves, no bound", least=False, aim=False)
    ratio = proposal.moves.experts / bound
    met = not layers_over(proposal, 1.02)
    return Measured(
        ours=f"{ratio:.2f}: {proposal.moves.experts:,} moves, bound >= {bound:,}, {cpu_s:.1f} s",
        least=met and ratio <= 1.5,
        aim=met and ratio <= 1.3,
    )


SWIFT = "SwiftBalancer: 4,777 (mean 1.0102), published"
ROWS = (
    Row(
        name="moves-1.01",
        what="every layer at or under 1.01: experts moved",
        at_least="2,300 in 5 s",
        aim="2,000 in 30 s",
        published=SWIFT,
        seeded=True,
        measure=moves_row(1.01, Effort.NORMAL, least=2300, least_s=5.0, aim=2000, aim_effort=Effort.THOROUGH, aim_s=30.0),
    ),
    Row(
        name="moves-1.02",
        what="every layer at or under 1.02, 1 s in all: experts moved",
        at_least="2,400, no layer over",
        aim="2,200",
        seeded=True,
        measure=moves_row(1.02, Effort.QUICK, least=2400, least_s=1.0, aim=2200, aim_effort=Effort.QUICK, aim_s=1.0),
    ),
    Row(
        name="moves-1.05",
        what="every layer at or under 1.05: experts moved",
        at_least="1,600 in 5 s",
        aim="1,420",
        seeded=True,
        measure=moves_row(1.05, Effort.NORMAL, least=1600, least_s=5.0, aim=1420, aim_effort=Effort.NORMAL, aim_s=5.0),
    ),
    Row(
        name="resample-gate-off",
        what="plan for W, then 2 M tokens a layer of W, target 1.02, gate off: slots moved",
        at_least="0.1 %",
        aim="0",
        seeded=True,
        measure=resample,
    ),
    Row(
        name="drift",
        what="drift 0.5 W + 0.5 W', every layer at or under 1.02: share of slots moved",
        at_least="9 %",
        aim="7 %",
        seeded=True,
        measure=drift,
    ),
    Row(
        name="certificate",
        what="certificate at 1.02: moves / bound",
        at_least="1.5",
        aim="1.3",
        published="none",
        seeded=True,
        measure=certificate,
    ),
)
