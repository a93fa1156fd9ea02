"""The resilient policy: minimal moves to a placement that survives the loss of a node (or rank).

Resilience is a constraint that every policy keeps (`Constraints.resilience`). Under this name it is asked for even when the
problem does not: as many of the hottest experts as there are slots for are put on two nodes, on two ranks where all share one
node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from eplb_service.errors import InvalidInputError
from eplb_service.policy.base import FailureDomain, PlanningProblem, RawPlan, Resilience
from eplb_service.policy.feasibility import check_feasible
from eplb_service.policy.minmove import MinMovePolicy


class ResilientPolicy:
    """Protects what it can; see the module. Status and units of the work budget are those of `minmove`."""

    name = "resilient"
    options: Mapping[str, str] = MappingProxyType({})

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when no expert can be protected, saying what is needed."""
        return MinMovePolicy().plan(protected_problem(problem))


def protected_problem(problem: PlanningProblem) -> PlanningProblem:
    """The problem, with the most resilience that it allows where it asks for none.

    Raises InvalidInputError when constraints allow none.
    """
    constraints = problem.constraints
    if constraints.resilience is not None:
        return problem
    table, topology = problem.current, problem.topology
    serving = list(topology.alive_positions())
    nodes = {topology.node_indices[position] for position in serving}
    slots = len(serving) * table.slots_per_rank
    slots -= sum(rank not in topology.dead for rank, _ in constraints.unusable_slots)
    spare = slots - table.num_logical
    domains = (FailureDomain.NODE, FailureDomain.RANK) if len(nodes) > 1 else (FailureDomain.RANK,)
    told = f"{slots} usable slots leave none for second copies of {table.num_logical} experts; give ranks more slots"
    share = min(1.0, max(0, spare) / table.num_logical)
    for domain in domains:
        number = int(share * table.num_logical + 1e-9)
        while number > 0:
            asked = Resilience(hot_share=number / table.num_logical, domain=domain)
            trial = replace(problem, constraints=replace(constraints, resilience=asked))
            try:
                check_feasible(trial)
            except InvalidInputError as error:
                told = str(error)
                number //= 2
            else:
                return trial
    raise InvalidInputError(f"policy 'resilient' finds no expert that it could protect: {told}")
