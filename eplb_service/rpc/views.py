"""What the planner knows, as messages for people and programs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.config import changed
from eplb_service.flip_stall import FlipStall
from eplb_service.generation import Generation, GenerationState, LiveMap
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.pb.v1 import admin_pb2, common_pb2, placement_pb2
from eplb_service.placement import Placement
from eplb_service.planner.asked import Asked
from eplb_service.planner.carrier import RankFacts
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.documents import Settings, VerdictRecord
from eplb_service.planner.drained_view import drained_ranks
from eplb_service.planner.planner import Planner
from eplb_service.planner.proposing import Decision
from eplb_service.rollout.events import RolloutState
from eplb_service.rollout.journal import Journal
from eplb_service.rpc.arrays import array_to_pb
from eplb_service.rpc.convert import address_to_pb, layer_to_pb, phase_to_pb, placement_to_pb
from eplb_service.topology import LinkKind
from eplb_service.validation import Observation

_STATES = {
    GenerationState.PUBLISHED: placement_pb2.GENERATION_STATE_PUBLISHED,
    GenerationState.ROLLING_OUT: placement_pb2.GENERATION_STATE_ROLLING_OUT,
    GenerationState.ACTIVE: placement_pb2.GENERATION_STATE_ACTIVE,
    GenerationState.STOPPED: placement_pb2.GENERATION_STATE_STOPPED,
    GenerationState.SUPERSEDED: placement_pb2.GENERATION_STATE_SUPERSEDED,
}

_ROLLOUT_WORDS = {
    RolloutState.WAITING: "",
    RolloutState.IDLE: "",
    RolloutState.OUTRANKED: "",
    RolloutState.PERSISTING: "staging",
}
"""Where the wire's words are coarser than the machine's."""


def imbalance_view(value: Imbalance) -> common_pb2.Imbalance | None:
    """None (absent on the wire) for a load that nobody measured."""
    if not value.per_layer:
        return None
    return common_pb2.Imbalance(mean_over_layers=value.mean, worst_layer=value.worst, per_layer=value.per_layer)


def moves_view(moves: MoveSummary) -> common_pb2.MoveSummary:
    """What a change moves."""
    links = moves.bytes_by_link
    return common_pb2.MoveSummary(
        experts=moves.experts,
        slots_rewritten=moves.slots_rewritten,
        bytes=common_pb2.LinkBytes(
            same_rank=links[LinkKind.SAME_RANK],
            same_node=links[LinkKind.SAME_NODE],
            cross_node=links[LinkKind.CROSS_NODE],
        ),
        bytes_from_backups=moves.bytes_without_source,
    )


def settings_view(deployment: str, settings: Settings) -> admin_pb2.SettingsView:
    """Effective settings."""
    return admin_pb2.SettingsView(
        deployment=deployment,
        mode=settings.mode,
        paused=settings.paused,
        pause_reason=settings.pause_reason,
        policy=settings.policy,
        drained_rank_ids=settings.drained,
    )


def drain_views(deployment: Deployment) -> list[admin_pb2.DrainView]:
    """How far each drained rank is."""
    return [
        admin_pb2.DrainView(
            rank_id=found.rank_id,
            state=found.state.value,
            experts_held=found.held,
            experts_alone=found.alone,
            reason=found.sentence,
        )
        for found in drained_ranks(deployment)
    ]


def verdict_view(verdict: VerdictRecord) -> admin_pb2.VerdictView:
    """A gate's answer."""
    return admin_pb2.VerdictView(
        move=verdict.move,
        code=verdict.code,
        reason=verdict.reason,
        decided_at_s=verdict.decided_at_s,
        numbers=verdict.numbers,
    )


def flip_stall_view(stall: FlipStall) -> placement_pb2.FlipStall:
    """How long the longest flip held up steps."""
    return placement_pb2.FlipStall(expected_s=stall.expected_s, limit_s=stall.limit_s, measured_s=stall.measured_s)


def generation_view(deployment: str, generation: Generation, *, with_placement: bool) -> placement_pb2.GenerationView:
    """A generation and what became of it."""
    return placement_pb2.GenerationView(
        deployment=deployment,
        generation=generation.number,
        placement=placement_to_pb(generation.placement) if with_placement else None,
        state=_STATES[generation.state],
        reason=generation.reason,
        stop_reason=generation.stop_reason,
        policy=generation.policy,
        created_at_s=generation.created_at_s,
        active_at_s=generation.active_at_s or 0.0,
        before=imbalance_view(generation.before),
        predicted=imbalance_view(generation.predicted),
        lower_bound=imbalance_view(generation.lower_bound),
        observed=imbalance_view(generation.observed) if generation.observed is not None else None,
        moves=moves_view(generation.moves),
        flip_boundaries=generation.flip_boundaries,
        rollout_s=generation.rollout_s,
        epoch=generation.epoch,
        placement_digest=generation.digest,
        promised_gain=generation.promised_gain,
        observed_windows=[observed_window_view(observation) for observation in generation.observations],
        outcome=generation.outcome,
        judgement=generation.judgement,
        flip_stall=flip_stall_view(generation.flip_stall) if generation.flip_stall is not None else None,
        copied_s=generation.copied_s,
        copy_held_steps=generation.copy_held_steps,
    )


def rollout_events_view(deployment: str, journal: Journal) -> placement_pb2.RolloutEvents:
    """What happened on a generation's way to the ranks."""
    return placement_pb2.RolloutEvents(
        deployment=deployment,
        generation=journal.generation,
        events=[
            placement_pb2.RolloutEvent(
                at_s=event.at_s,
                epoch=event.epoch,
                event=event.event,
                text=event.text,
                chunk_id=event.chunk_id,
                rank_id=event.rank_id,
            )
            for event in journal.events
        ],
        dropped=journal.num_dropped,
        incomplete=journal.incomplete,
    )


def observed_window_view(observation: Observation) -> placement_pb2.ObservedWindow:
    """One window under a generation."""
    return placement_pb2.ObservedWindow(
        window_index=observation.window_index,
        mean=observation.mean,
        worst_layer=observation.worst,
        previous_mean=observation.previous_mean,
        previous_worst_layer=observation.previous_worst,
        step_s=observation.step_s,
        expected_step_s=observation.expected_step_s,
        previous_step_s=observation.previous_step_s,
    )


def live_view(deployment: Deployment, live: LiveMap) -> placement_pb2.GenerationView:
    """The live map: the generation that put the newest layer there, with what is really routed."""
    newest = deployment.ledger.generations.get(live.newest_generation)
    if newest is not None:
        view = generation_view(deployment.name, newest, with_placement=False)
    else:
        view = placement_pb2.GenerationView(deployment=deployment.name, generation=live.newest_generation)
        view.reason = "as loaded by the engine" if not live.newest_generation else "no record of this generation is left"
        if not live.newest_generation:
            view.state = placement_pb2.GENERATION_STATE_ACTIVE
    view.placement.CopyFrom(placement_to_pb(live.placement))
    view.placement_digest = view.placement.digest
    view.layer_generations.extend(live.generations)
    return view


def proposal_view(deployment: str, decision: Decision) -> placement_pb2.GenerationView:
    """A plan that was not published: generation 0."""
    return placement_pb2.GenerationView(
        deployment=deployment,
        placement=placement_to_pb(decision.target),
        policy=decision.policy,
        reason=decision.verdict.reason,
        before=imbalance_view(decision.before),
        predicted=imbalance_view(decision.predicted),
        lower_bound=imbalance_view(decision.lower_bound),
        moves=moves_view(decision.moves),
        placement_digest=decision.target.digest(),
    )


def plan_view(deployment: str, decision: Decision, verdict: VerdictRecord) -> admin_pb2.PlanResponse:
    """A dry run: what the gate would do, and all that it could choose from."""
    choices = zip(decision.points, decision.target.tables, decision.own.target.tables, strict=True) if decision.points else ()
    return admin_pb2.PlanResponse(
        proposal=proposal_view(deployment, decision),
        verdict=verdict_view(verdict),
        solve_s=decision.solve_s,
        front=[
            admin_pb2.FrontPointView(
                model=point.placement.model,
                predicted=common_pb2.Imbalance(mean_over_layers=point.predicted.mean, worst_layer=point.predicted.worst),
                moves=moves_view(point.moves),
                is_choice=point.placement == chosen,
                is_own=point.placement == own,
            )
            for points, chosen, own in choices
            for point in points
        ],
        moves_lower_bound=decision.moves_lower_bound,
        cut_off=decision.cut_off,
        cannot_roll_out=decision.cannot_roll_out,
    )


def diff_view(before: Placement, after: Placement, moves: MoveSummary) -> placement_pb2.DiffPlacementsResponse:
    """Every slot that gets another expert, or another share of its expert's tokens."""
    changes = []
    for (layer, table, old), (_, _, new) in zip(before.layers(), after.layers(), strict=True):
        shares = (before.shares_row(layer), after.shares_row(layer))
        for index in np.flatnonzero((old != new) | _other_shares(*shares)).tolist():
            position, slot = divmod(index, table.slots_per_rank)
            from_share, to_share = (None if row is None else float(row[index]) for row in shares)
            changes.append(
                placement_pb2.SlotChange(
                    layer=layer_to_pb(layer),
                    rank_id=table.rank_ids[position],
                    slot=slot,
                    from_expert=int(old[index]),
                    to_expert=int(new[index]),
                    from_share=from_share,
                    to_share=to_share,
                )
            )
    return placement_pb2.DiffPlacementsResponse(changes=changes, moves=moves_view(moves))


def _other_shares(
    before: npt.NDArray[np.float32] | None, after: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.bool_] | np.bool_:
    """Which slots of a layer take another share; none where either has no shares: the engine's own dispatch is no number."""
    return np.False_ if before is None or after is None else before != after


def deployment_view(deployment: Deployment) -> admin_pb2.DeploymentStatus:
    """Everything that is going on in a deployment, and why."""
    state, reason = deployment.state()
    group, live, last = deployment.group, deployment.live, deployment.load.last
    outcomes = deployment.load.outcomes
    view = admin_pb2.DeploymentStatus(
        deployment=deployment.name,
        state=state,
        reason=reason,
        settings=settings_view(deployment.name, deployment.ledger.settings),
        epoch=deployment.leading.epoch,
        rollout=_rollout_view(deployment),
        last_verdict=verdict_view(deployment.verdict) if deployment.verdict is not None else None,
        live_generation=live.newest_generation if live is not None else 0,
        windows_accepted=outcomes["accepted"],
        windows_refused={
            code: count for code, count in sorted(outcomes.items()) if code not in ("accepted", "windows_dropped")
        },
        layers=[layer_to_pb(layer) for layer in live.layer_generations] if live is not None else [],
        learned=learned_view(deployment),
        ranks=[_rank_view(deployment, deployment.carrier.ranks[rank]) for rank in sorted(deployment.carrier.ranks)],
        drains=drain_views(deployment),
        unreachable=[
            admin_pb2.UnreachableView(layer=layer_to_pb(layer), experts=experts)
            for layer, experts in deployment.restoring.lost.items()
        ],
        restoring=deployment.restoring.story,
    )
    if deployment.asked is not None:
        view.advised.CopyFrom(_advised_view(deployment.asked, deployment.context.clock.monotonic()))
    if group is not None:
        view.phase = phase_to_pb(group.registrations[0].phase)
    if last is not None:
        view.imbalance.CopyFrom(imbalance_view(last.imbalance) or common_pb2.Imbalance())
        view.window_coverage = last.window.coverage
        view.window_index = last.window.windows[-1][1]
        view.window_tokens = last.window.tokens
        view.rank_loads.CopyFrom(array_to_pb(last.rank_loads.astype(np.float32), "rank_loads"))
    return view


def _advised_view(asked: Asked, now_s: float) -> admin_pb2.AdvisedView:
    """Who asks, how often, and what was answered."""
    return admin_pb2.AdvisedView(
        engine=asked.engine,
        last_question_s_ago=now_s - asked.times[-1] if asked.times else None,
        interval_s=asked.interval_s,
        answers=dict(sorted(asked.answers.items())),
        told_generation=asked.told,
        last_reason=asked.last_reason,
    )


def learned_view(deployment: Deployment) -> admin_pb2.LearnedView:
    """What the deployment taught."""
    facts = deployment.learning.facts()
    return admin_pb2.LearnedView(
        step_time=facts.step_time,
        moves=facts.moves,
        horizon=facts.horizon,
        promises=facts.promises,
        hold=facts.hold,
        forecast=facts.forecast,
        numbers=facts.numbers,
    )


def _rollout_view(deployment: Deployment) -> admin_pb2.RolloutStatus:
    progress = deployment.carrier.progress
    if progress is None:
        return admin_pb2.RolloutStatus(last_error=deployment.last_error)
    now_s = deployment.context.clock.monotonic()
    return admin_pb2.RolloutStatus(
        generation=progress.generation or 0,
        state=_ROLLOUT_WORDS.get(progress.state, progress.state.value),
        chunks_done=progress.chunks_done,
        chunks_total=progress.chunks_total,
        chunk_id=progress.chunk_id,
        age_s=now_s - deployment.outcomes.rollout_since_s if deployment.outcomes.rollout_since_s is not None else 0.0,
        stalled=progress.stalled,
        last_error=progress.last_error or deployment.last_error,
        waiting_for=progress.waiting_for,
    )


def _rank_view(deployment: Deployment, facts: RankFacts) -> admin_pb2.RankStatus:
    return admin_pb2.RankStatus(
        address=address_to_pb(facts.address),
        node=facts.node,
        nic=facts.nic,
        state=deployment.carrier.rank_state(facts, deployment.context.config.rollout.rank_silence_s),
        voting=facts.voting,
        off_reason=facts.gone_reason or facts.off_reason,
        boundary=facts.boundary,
        idle=facts.idle,
        staging_bytes=facts.staging_bytes,
        windows_dropped=facts.windows_dropped,
        last_seen_s_ago=max(0.0, deployment.context.clock.monotonic() - facts.last_seen_s),
        chunk_state=facts.chunk_state,
    )


def status_view(planner: Planner, deployments: tuple[Deployment, ...]) -> admin_pb2.StatusResponse:
    """The planner and some of its deployments."""
    return admin_pb2.StatusResponse(
        planner=planner.name,
        version=planner.version,
        store=planner.store_name,
        store_ok=not planner.context.health.reason,
        deployments=[deployment_view(deployment) for deployment in deployments],
        uptime_s=planner.context.clock.monotonic() - planner.started_at_s,
        configuration=changed(planner.context.config),
    )
