"""What an engine's file cannot say, found in the problem: nobody waits for a plan that cannot be written. Pure."""

from __future__ import annotations

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.policy.base import PlanningProblem


def check_can_hold(engine: str, problem: PlanningProblem) -> None:
    """Raises InvalidInputError when every plan for a problem has shares or empty slots, which files of `engine` cannot say."""
    if problem.dispatch is Dispatch.WEIGHTED:
        raise InvalidInputError(
            f"plans for weighted dispatch have shares, which files of {engine} cannot say: plan under the engine's own dispatch"
        )
    why = _why_slots_stay_empty(problem)
    if why:
        raise InvalidInputError(f"{why}, so slots would stay empty; files of {engine} name an expert for every slot")


def _why_slots_stay_empty(problem: PlanningProblem) -> str:
    """Why no plan fills all slots, with its numbers; empty where nothing plain speaks against it."""
    constraints, table, topology = problem.constraints, problem.current, problem.topology
    if constraints.unusable_slots:
        rank, slot = min(constraints.unusable_slots)
        return f"slot {slot} of rank {rank} is unusable"
    if topology.dead:
        return f"rank {min(topology.dead)} is dead: plan for the ranks that serve alone"
    nodes = set(topology.nodes)
    grouped = constraints.num_groups is not None and constraints.group_price is None
    num_experts = table.num_logical // len(nodes) if grouped else table.num_logical
    where = " on its node" if grouped and len(nodes) > 1 else ""
    for layer in table.layer_ids:
        for rank in table.rank_ids:
            barred = {bar.expert for bar in constraints.barred if bar.rank_id == rank and bar.layer_id in (None, layer)}
            allowed = min(num_experts, table.num_logical - len(barred))
            if allowed < table.slots_per_rank:
                return f"layer {layer}: rank {rank} has {table.slots_per_rank} slots and may hold {allowed} experts{where}"
    most = max(topology.nodes.count(node) for node in nodes) if grouped else topology.num_ranks
    copies = most if constraints.max_replicas is None else min(most, constraints.max_replicas)
    if table.num_logical * copies < table.num_physical:
        return f"{table.num_logical} experts of {copies} copies at most do not fill {table.num_physical} slots"
    return ""
