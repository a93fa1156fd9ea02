"""The elastic policy: plan over the ranks that are left, or over a grown set, with most experts staying where they are.

It is minimal-move planning: experts that lost their last replica come first, whatever limits on moves leave for balance; and it
names a target that a fleet in trouble reaches with few moves when the problem names none. New ranks hold nothing (-1) in the
current rows; dead ones are named by the topology. `survivors` carries placements and constraints over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.minmove import MinMovePolicy

DEFAULT_TARGET = 1.05
"""Imbalance to reach when the problem names none: orphans and a first balance now, the rest when the fleet is whole again."""


class ElasticPolicy:
    """Plans over survivors or a grown set; see the module. Status and units of the work budget are those of `minmove`."""

    name = "elastic"
    options: Mapping[str, str] = MappingProxyType({})

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when experts do not fit the slots that serve, saying what is needed."""
        target = DEFAULT_TARGET if problem.max_imbalance is None else problem.max_imbalance
        plan = MinMovePolicy().plan(replace(problem, max_imbalance=target))
        if problem.max_imbalance is None:
            return replace(plan, moves_lower_bound=())  # it was for our target, which the problem does not know
        return plan
