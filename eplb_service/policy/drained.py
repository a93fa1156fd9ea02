"""Plans while ranks are drained: over the ranks that stay, with the constraints that these can meet."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from eplb_service.drain import keeping_drained, staying
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem, Proposal
from eplb_service.policy.survivors import met_by_survivors


def without_drained(problem: PlanningProblem, drained: AbstractSet[RankId]) -> tuple[PlanningProblem, tuple[str, ...]]:
    """The problem without slots on drained ranks, and a sentence for each constraint that the others cannot meet.

    Raises InvalidInputError when the experts do not fit the slots that are left.
    """
    topology = staying(problem.topology, drained)
    if not topology.dead:
        return problem, ()
    return met_by_survivors(replace(problem, topology=topology))


def with_drained_kept(proposal: Proposal, live: Table, drained: AbstractSet[RankId]) -> Proposal:
    """The plan, and every point of its front, with drained ranks holding what they hold: see `keeping_drained`."""
    return replace(
        proposal,
        placement=keeping_drained(proposal.placement, live, drained),
        front=tuple(replace(point, placement=keeping_drained(point.placement, live, drained)) for point in proposal.front),
    )
