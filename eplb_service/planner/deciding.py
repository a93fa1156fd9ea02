"""From what is known of a deployment to a decision, and whether one still holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb_service.errors import ConflictError
from eplb_service.generation import LiveMap
from eplb_service.planner.proposing import Decision

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment


async def decide(deployment: Deployment, policy: str, *, dry: bool = False) -> Decision:
    """A decision from the last windows. Call with `planning` held. dry: nothing will follow from it.

    Raises ConflictError when there is none to make.
    """
    group, live = deployment.group, deployment.known_live
    window = deployment.window()
    if group is None or live is None:
        raise ConflictError(f"{deployment.name} cannot be planned, it is {deployment.state_text()}")
    if deployment.restoring.lost:
        raise ConflictError(f"{deployment.name} cannot be planned for balance: {deployment.restoring.why}")
    if window is None:
        raise ConflictError(f"{deployment.name} has no closed load window yet; ranks report one every few steps, try again")
    decision = await deployment.context.proposer.propose(
        group=group,
        live=live,
        window=window,
        policy=policy,
        drained=deployment.drained,
        generation_age_s=_generation_age_s(deployment, live),
        known=deployment.known(live, window),
        now_s=deployment.context.clock.monotonic(),
    )
    deployment.context.metrics.solved(deployment.name, policy, decision.solve_s)
    deployment.learning.horizon = decision.horizon
    moves = decision.verdict.move and not dry and deployment.ledger.settings.mode == "auto"
    deployment.learning.planned(decision.verdict, live.placement, decision.target, moves=moves)
    deployment.decision = decision
    return decision


def why_stale(deployment: Deployment, decision: Decision) -> str:
    """Why a proposal must not be published any more; empty while it may."""
    age_s, most_s = deployment.context.clock.monotonic() - decision.made_at_s, deployment.proposal_ttl_s
    if deployment.live is None or deployment.live.digest != decision.live_digest:
        return "the proposal was made for another live map than there is now"
    if decision.drained != deployment.drained:
        return "ranks were drained, or given back, since the proposal was made"
    if age_s > most_s:
        return f"the proposal is {age_s:.0f} s old, at most {most_s:.0f} s are allowed{deployment.proposal_ttl_from}"
    return ""


def _generation_age_s(deployment: Deployment, live: LiveMap) -> float | None:
    generation = deployment.ledger.generations.get(live.newest_generation)
    if generation is None:
        return None
    since_s = generation.active_at_s
    if since_s is None:
        since_s = generation.created_at_s + generation.rollout_s
    return max(0.0, deployment.context.clock.wall() - since_s)
