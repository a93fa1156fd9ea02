"""Experts that no rank holds any more come back from ranks' own backups, at once and in every mode (vllm#41204, sglang#12068).

A token that chooses such an expert cannot be served, so neither the gate nor a load window is waited for. Ranks that refuse
(their backup lacks the expert, or has other bytes than the group loaded) are asked again after growing pauses, a few times;
then a person has to look, and the next group, or `eplb resume`, begins anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from eplb_service.coverage import RESTART, unreachable, why_uncovered
from eplb_service.errors import EplbError
from eplb_service.generation import RESTORE
from eplb_service.ids import LayerRef
from eplb_service.imbalance import Imbalance
from eplb_service.membership.group import Group
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement
from eplb_service.planner import standing
from eplb_service.planner.standing import Plan, Standing
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.restore import Restorers, restored
from eplb_service.rollout.events import Finished, Outcome

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment

REFUSALS_MAX = 4
"""Rollouts that end with a refusal before it is left to a person; each tries every chunk several times."""


class Restoring(Standing):
    """Brings experts back in one deployment."""

    word = RESTORE

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self._refusals = 0
        self._last = ""
        """Why the last try came to nothing."""

    @property
    def lost(self) -> Mapping[LayerRef, tuple[int, ...]]:
        """Experts that live on no rank, by what ranks said last; none while that is not known."""
        told = self._deployment.told_placement
        return unreachable(told) if told is not None else {}

    @property
    def why(self) -> str:
        """Which experts live on no rank, and what is done about it; empty when there are none."""
        lost = self.lost
        return why_uncovered(lost, self.story) if lost else ""

    @property
    def is_due(self) -> bool:
        """Whether experts live on no rank, a rank has a backup, and it was not given up."""
        members = self._deployment.members
        return members is not None and bool(members.restorers) and self._refusals < REFUSALS_MAX and bool(self.lost)

    @property
    def story(self) -> str:
        """What is done about experts that live on no rank, or why nothing is; empty where there are none."""
        deployment, members = self._deployment, self._deployment.members
        if not self.lost or members is None:
            return ""
        if not members.restorers:
            return f"no rank has a backup to take them from (`sources` of its hook): {RESTART}"
        progress = deployment.carrier.progress
        number = progress.generation if progress is not None else None
        under_way = deployment.ledger.generations.get(number) if number is not None else None
        if under_way is not None and under_way.policy == RESTORE:
            return f"generation {number} brings them back from backups"
        why = self._why_no_orders() or self._why_not_yet()
        if why:
            return f"they come back from backups once that can be: {why}"
        if self._refusals >= REFUSALS_MAX:
            return (
                f"given up after {self._refusals} rollouts that ranks refused, the last: {self._last}; mend that and"
                f" `eplb resume`, or {RESTART}"
            )
        if self._last:
            return f"they are to come back from backups; it is tried again, for now {self._last}"
        return "they come back from backups"

    def start_over(self) -> None:
        """The group, or who leads it, changed, or a person says so: what was refused before may not be now."""
        self._refusals, self._last = 0, ""
        self._not_before_s = float("-inf")

    def ended(self, finished: Finished) -> None:
        """A generation that was to bring experts back is active, or was stopped."""
        if finished.outcome is Outcome.ACTIVE:
            self.start_over()
            return
        self._last = f"generation {finished.generation}: {finished.reason}"
        if not finished.refused:
            self._wait()
            return
        self._refusals += 1
        if self._refusals < REFUSALS_MAX:
            self._wait(standing.RETRY_S * 2.0**self._refusals)
        else:
            self._log.error("restore.given_up", refusals=self._refusals, reason=finished.reason)
            self._deployment.note("restore.given_up", f"{self._refusals} rollouts were refused, the last: {finished.reason}")

    async def go_on(self) -> None:
        """Bring them back, once their time has come. Raises EplbError when it cannot be planned or published."""
        try:
            await super().go_on()
        except EplbError as error:
            self._last = str(error)
            raise

    @property
    def _asked(self) -> str:
        return "bring experts back that live on no rank"

    def _why_not_yet(self) -> str:
        deployment, members = self._deployment, self._deployment.members
        return (
            deployment.why_not_begin()
            or deployment.carrier.waiting_reason
            or (members.observe_only if members is not None else "")
        )

    def _reason(self, asked: str, moves: MoveSummary) -> str:  # noqa: ARG002  (nobody asked)
        lost = sum(len(experts) for experts in self.lost.values())
        return f"move: {lost} experts live on no rank: they come back from backups, with {moves.experts} moves"

    async def _plan(self, members: Group, live: Placement, before: Imbalance) -> Plan:  # noqa: ARG002  (balance comes later)
        deployment = self._deployment
        proposer, window = deployment.context.proposer, deployment.window()
        restorers = Restorers(
            ranks=members.restorers, drained=deployment.drained, staging_bytes=min(members.staging_bytes.values())
        )
        tables, notes = [], list[str]()
        for table in live.tables:
            problem = proposer.problem(table, window, members)
            found = await asyncio.to_thread(restored, problem if window is not None else _without_load(problem), restorers)
            tables.append(found.table)
            notes += found.given_up
        return Plan(target=Placement(tuple(tables)), notes=tuple(f"given up: {note}" for note in dict.fromkeys(notes)))


def _without_load(problem: PlanningProblem) -> PlanningProblem:
    """Which experts are the hottest is not known: no copy is kept for being one of theirs, unless all experts are protected."""
    constraints = problem.constraints
    if constraints.resilience is None or constraints.resilience.hot_share >= 1.0:
        return problem
    return dataclasses.replace(problem, constraints=dataclasses.replace(constraints, resilience=None))
