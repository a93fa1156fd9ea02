"""A deployment in numbers, for the metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from eplb_service.drain import DrainState
from eplb_service.planner.drained_view import drained_ranks
from eplb_service.telemetry import DeploymentGauges

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment


def gauges_of(deployment: Deployment) -> DeploymentGauges:
    """As it is now."""
    silence_s = deployment.context.config.rollout.rank_silence_s
    states = [deployment.carrier.rank_state(facts, silence_s) for facts in deployment.carrier.ranks.values()]
    last, live, progress = deployment.load.last, deployment.live, deployment.carrier.progress
    now_s = deployment.context.clock.monotonic()
    model, measured = deployment.learning.model, deployment.learning.measured()
    drained = drained_ranks(deployment)
    is_known = not any(found.state is DrainState.UNKNOWN for found in drained)
    return DeploymentGauges(
        imbalance_mean=last.imbalance.mean if last else None,
        imbalance_worst=last.imbalance.worst if last else None,
        window_coverage=last.window.coverage if last else None,
        rollout_age_s=now_s - deployment.outcomes.rollout_since_s if deployment.outcomes.rollout_since_s is not None else 0.0,
        rolling_out=deployment.state()[0] == "rolling_out",
        rollout_stalled=progress.stalled if progress is not None else False,
        ranks={state: states.count(state) for state in ("live", "away", "gone")},
        agents=deployment.carrier.num_agents,
        drained_ranks=Counter(found.state.value for found in drained),
        unreachable_experts=sum(len(experts) for experts in deployment.restoring.lost.values()),
        experts_alone_on_drained=max((found.alone for found in drained), default=0) if is_known else None,
        generation=live.newest_generation if live is not None else 0,
        epoch=deployment.leading.epoch,
        leading=deployment.leads,
        gain_share=deployment.learning.bias.share,
        seconds_per_token=model.seconds_per_token if model is not None else None,
        step_time_r_squared=model.r_squared if model is not None else None,
        horizon_steps=measured.horizon_steps,
        same_node_bytes_per_s=measured.bytes_per_s,
        cross_node_bytes_per_s=measured.cross_node_bytes_per_s,
        commit_stall_s=measured.commit_stall_s,
        forecast_used=deployment.learning.forecasting.used(),
        forecast_less_off=deployment.learning.forecasting.less_off(),
    )
