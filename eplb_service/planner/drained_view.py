"""What drained ranks mean to one deployment: how far each is, what may not go there, whether the others hold all experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb_service import drain
from eplb_service.drain import DrainedRank, listed, why_not_drained
from eplb_service.placement import Placement

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment


def drained_ranks(deployment: Deployment) -> tuple[DrainedRank, ...]:
    """How far each drained rank is, by what ranks said last."""
    if not deployment.drained:
        return ()
    why = f"{deployment.name} is {deployment.state_text()}"
    return drain.drained_ranks(deployment.drained, deployment.told_placement, may_keep=deployment.keeps_copies, why_unknown=why)


def why_off_limits(deployment: Deployment, target: Placement) -> str:
    """What a placement would bring to a drained rank, as a sentence; empty when nothing."""
    live = deployment.live
    return drain.why_off_limits(live.placement, target, deployment.drained) if live is not None and deployment.drained else ""


def why_drained_too_far(deployment: Deployment) -> str:
    """What ranks that stay cannot hold, where the group changed since ranks were drained; empty when they can hold all."""
    live = deployment.known_live
    why = why_not_drained(live.placement.tables, deployment.drained) if live is not None and deployment.drained else ""
    drained = listed(sorted(deployment.drained))
    return f"rank {drained} is drained, and {why}; or `eplb undrain {drained.replace(',', '')}`" if why else ""
