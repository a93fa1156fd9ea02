"""Whether a problem's constraints can be met together, decided exactly, before a policy searches."""

from __future__ import annotations

from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.groups import Layout, grouped_rows
from eplb_service.policy.layer_task import layer_task
from eplb_service.policy.limits import legal_rows, limits_of
from eplb_service.policy.residency_flow import required_residencies


def check_feasible(problem: PlanningProblem) -> None:
    """Raises InvalidInputError naming constraints that contradict one another, or experts, ranks and slots that do not fit.

    A layer whose current row keeps every rule shows by itself that they can be met; the others are decided by a flow.
    """
    limits = limits_of(problem)
    layout = Layout.of(problem, limits)
    if limits.plain:
        return
    fine = legal_rows(problem.current.physical_to_logical, limits, problem.current.num_logical) & grouped_rows(problem)
    for layer in range(problem.current.num_layers):
        if not fine[layer]:
            required_residencies(layer_task(problem, limits, layout, layer))
