"""An offline plan as plain values: all that the page shows, for programs; it can be read back as a current placement."""

from __future__ import annotations

from eplb_service.formats.eplb_json import placement_document
from eplb_service.formats.recording import LoadRecording
from eplb_service.imbalance import Imbalance
from eplb_service.offline.facts import PlanFacts, facts_of, why_it_stopped
from eplb_service.offline.plan import OfflinePlan
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem


def plan_document(
    plan: OfflinePlan, facts: PlanFacts | None = None, recording: LoadRecording | None = None
) -> dict[str, object]:
    """The plan as plain values. recording: what the loads were read from, to be told.

    Beside the placement document: policy, status, cut_off, stopped {code, reason}, imbalance {mean, worst, per_layer}, and
    imbalance_before, lower_bound of the same shape, target {max_imbalance, met, layers_over}, moves {experts, per_layer, …,
    lower_bound}, moves_against, limits, redundancy, front, cost of resilience, what was left undone, tokens by link,
    node_visits {before, planned}, and asked: what the plan was made for. solve_s leaves out loading and compiling the policy.
    """
    proposal, problem = plan.proposal, plan.problem
    facts = facts_of(problem, proposal) if facts is None else facts
    stop = why_it_stopped(problem, proposal, facts)
    return {
        **placement_document(proposal.placement),
        "policy": proposal.policy,
        "status": proposal.status,
        "cut_off": proposal.cut_off,
        "stopped": {"code": stop.code, "reason": stop.reason},
        "solve_s": proposal.solve_s,
        "dispatch": problem.dispatch.value,
        "nodes": list(problem.topology.nodes),
        "imbalance": _imbalance(proposal.predicted),
        "imbalance_before": _imbalance(proposal.before),
        "lower_bound": _imbalance(proposal.lower_bound),
        "target": None
        if facts.layers_over is None
        else {
            "max_imbalance": problem.max_imbalance,
            "met": not facts.layers_over,
            "layers_over": list(facts.layers_over),
        },
        "moves": {
            **proposal.moves.to_json(),
            "per_layer": list(facts.moves_per_layer),
            "per_rank": list(facts.moves_per_rank),
            "lower_bound": proposal.moves_lower_bound,
        },
        "moves_against": plan.moves_against,
        "limits": [
            {"name": limit.name, "used": limit.used, "most": limit.most, "reached": limit.is_reached, "where": limit.where}
            for limit in facts.limits
        ],
        "redundancy": {
            "experts_per_layer": facts.redundant_experts,
            "bytes_per_rank": facts.redundant_bytes_per_rank,
        },
        "staging": None
        if facts.staging is None
        else {"least_bytes_per_rank": facts.staging.least, "sending_bytes_per_rank": facts.staging.sending},
        "off_node_replicas": list(facts.off_node) if facts.off_node else None,
        "tokens_by_link": None
        if facts.hops is None
        else {"before": facts.hops[0].to_json(), "planned": facts.hops[1].to_json()},
        "node_visits": None
        if facts.visits is None
        else {"before": facts.visits[0].to_json(), "planned": facts.visits[1].to_json()},
        "resilience_cost": _resilience_cost(plan),
        "left_undone": [] if proposal.costs is None else list(proposal.costs.kept_faults),
        "front": front_document(plan),
        "load": None if recording is None else recording_document(recording),
        "asked": _asked(problem),
    }


def recording_document(recording: LoadRecording) -> dict[str, object]:
    """What a recording is, without its loads."""
    return {
        "source": recording.source,
        "windows": recording.loads.shape[0],
        "experts": recording.loads.shape[2],
        "layer_ids": list(recording.layer_ids),
        "dense_layer_ids": list(recording.dense_layer_ids),
        "notes": list(recording.notes),
    }


def front_document(plan: OfflinePlan) -> list[dict[str, object]]:
    """The Pareto front by ascending moves; empty when it was not asked for or the policy has none."""
    return [
        {
            "moves": point.moves.experts,
            "move_bytes": point.moves.move_bytes,
            "imbalance": {"mean": point.predicted.mean, "worst": point.predicted.worst},
            "is_plan": point.placement == plan.proposal.placement,
            "physical_to_logical": point.placement.physical_to_logical.tolist(),
        }
        for point in plan.proposal.front
    ]


def _imbalance(imbalance: Imbalance) -> dict[str, object]:
    return {"mean": imbalance.mean, "worst": imbalance.worst, "per_layer": list(imbalance.per_layer)}


def _resilience_cost(plan: OfflinePlan) -> dict[str, object] | None:
    """What resilience adds to the plan that the same problem has without it; None when it was not asked for."""
    if plan.unprotected is None:
        return None
    with_it, without = plan.proposal, plan.unprotected
    costs = with_it.costs
    return {
        "protected": 0 if costs is None else costs.protected,
        "unprotected": 0 if costs is None else costs.unprotected,
        "moves": with_it.moves.experts - without.moves.experts,
        "imbalance_mean": with_it.predicted.mean - without.predicted.mean,
        "imbalance_worst": with_it.predicted.worst - without.predicted.worst,
    }


def _asked(problem: PlanningProblem) -> dict[str, object]:
    """What the plan was made for, so that a file of plans explains itself."""
    topology = problem.topology
    return {
        "max_imbalance": problem.max_imbalance,
        "from_nothing": problem.from_nothing,
        "effort": problem.effort.value,
        "work_budget": problem.work_budget,
        "time_limit_s": problem.time_limit_s,
        "seed": problem.seed,
        "certify": problem.certify,
        "source_loads": "given" if problem.source_loads is not None else "uniform",
        "together": None if problem.together is None else "given",
        "capacity": None if topology.capacity is None else list(topology.capacity),
        "base_load": None if topology.base_load is None else list(topology.base_load),
        "nics": None if topology.nics is None else list(topology.nics),
        "dead_ranks": sorted(int(rank) for rank in topology.dead),
        **_constraints(problem.constraints),
    }


def _constraints(constraints: Constraints) -> dict[str, object]:
    resilience = constraints.resilience
    return {
        "groups": constraints.num_groups,
        "soft_groups": constraints.group_price,
        "fill_slots": constraints.fill_slots,
        "unusable_slots": [f"{rank}:{slot}" for rank, slot in sorted(constraints.unusable_slots)],
        "pins": _residencies(constraints.pinned),
        "bars": _residencies(constraints.barred),
        "resilient": None if resilience is None else f"{resilience.hot_share:g}:{resilience.domain.value}",
        **constraints.move_limits,
        "max_replicas": constraints.max_replicas,
    }


def _residencies(named: frozenset[ExpertOnRank]) -> list[str]:
    ordered = sorted(named, key=lambda item: (item.expert, item.rank_id, -1 if item.layer_id is None else item.layer_id))
    return [f"{item.expert}@{item.rank_id}" + ("" if item.layer_id is None else f"/{item.layer_id}") for item in ordered]
