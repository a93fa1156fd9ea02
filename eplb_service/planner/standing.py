"""What a deployment needs whether it pays or not: carried out before anything is planned for balance, tried until it is done.

Drained ranks are emptied so (`draining`), and experts that no rank holds are brought back (`restoring`). The gate is not asked,
and limits on moves do not bind. Where a rollout of it comes to nothing, or is stopped half way, the next one is made after a
pause from what is live then.
"""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from eplb_service.drain import serving
from eplb_service.errors import ConflictError
from eplb_service.imbalance import Imbalance
from eplb_service.membership.group import Group
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement
from eplb_service.planner.documents import RequestRecord, VerdictRecord
from eplb_service.planner.loads import imbalance_under
from eplb_service.planner.proposing import moves_between, why_not_carried
from eplb_service.planner.publishing import UNKNOWN, Content, publish

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment

RETRY_S = 15.0
"""Pause before what came to nothing, or was stopped half way, is planned again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be carried out. lower_bound: UNKNOWN where none is claimed. notes: what had to be given up for it."""

    target: Placement
    lower_bound: Imbalance = UNKNOWN
    notes: tuple[str, ...] = ()


class Standing(ABC):
    """One such need of one deployment."""

    word: str
    """What the verdict, and the generation's record, call it."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._not_before_s = float("-inf")
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name)

    @property
    @abstractmethod
    def is_due(self) -> bool:
        """Whether something is left to be done about it, and may be tried."""

    @property
    @abstractmethod
    def _asked(self) -> str:
        """What is to be done, for people: `drain rank 3`."""

    @abstractmethod
    def _why_not_yet(self) -> str:
        """What speaks against a generation for it now; empty when nothing does."""

    @abstractmethod
    async def _plan(self, members: Group, live: Placement, before: Imbalance) -> Plan:
        """Where to go from what is live. before: imbalance now. Raises EplbError where there is no way."""

    @abstractmethod
    def _reason(self, asked: str, moves: MoveSummary) -> str:
        """Why the generation is made, for people."""

    async def go_on(self) -> None:
        """Do what is left, once its time has come. Raises EplbError when it cannot be planned or published."""
        if self._deployment.context.clock.monotonic() < self._not_before_s:
            return
        async with self._deployment.planning:
            if self.is_due and not self._why_not_yet() and not self._why_no_orders():
                await self._publish(self._asked, None)

    def _wait(self, pause_s: float | None = None) -> None:
        """The next try comes after a pause, also where no window closes that would wake the loop."""
        pause_s = RETRY_S if pause_s is None else pause_s
        self._not_before_s = self._deployment.context.clock.monotonic() + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._deployment.plan_wanted.set)

    async def _publish(self, asked: str, record: RequestRecord | None) -> RequestRecord | None:
        """Plan and publish a generation. Call with `planning` held. Raises EplbError."""
        deployment = self._deployment
        group, live = deployment.members, deployment.known_live
        if group is None or live is None:
            raise ConflictError(f"{deployment.name} lost its group meanwhile; try again")
        why = self._why_not_yet()
        if why:
            raise ConflictError(f"nothing can be published now: {why}")
        self._wait()
        window, drained = deployment.window(), deployment.drained
        before = imbalance_under(window, live.placement, group) if window is not None else UNKNOWN
        plan = await self._plan(group, live.placement, before)
        if deployment.live is not live or deployment.drained != drained:
            raise ConflictError(
                f"the live map, or the drained ranks, changed while it was planned to {asked}; it is planned again"
            )
        why = why_not_carried(live.placement, plan.target, group, deployment.context.config.rollout.layers_per_chunk_max)
        if why:
            raise ConflictError(f"{deployment.name} cannot roll out what it takes to {asked}: {why}")
        moves = moves_between(live.placement, plan.target, group)
        after = dataclasses.replace(group, topology=serving(group.topology, plan.target, drained))
        verdict = self._verdict("; ".join([self._reason(asked, moves), *plan.notes]), move=True)
        deployment.record_verdict(verdict)
        content = Content(
            target=plan.target,
            before=before,
            predicted=imbalance_under(window, plan.target, after) if window is not None else UNKNOWN,
            lower_bound=plan.lower_bound,
            moves=moves,
            policy=self.word,
            reason=verdict.reason,
        )
        if record is not None:
            record = dataclasses.replace(record, verdict=verdict)
        return await publish(deployment, content, record, verdict)

    def _verdict(self, reason: str, *, move: bool) -> VerdictRecord:
        return VerdictRecord(move=move, code=self.word, reason=reason, decided_at_s=self._deployment.context.clock.wall())

    def _why_no_orders(self) -> str:
        settings = self._deployment.ledger.settings
        if settings.mode == "pinned":
            return "it is pinned: what is live stays; `eplb mode observe` or `eplb mode auto` lifts the pin"
        if settings.paused:
            return f"it is paused ({settings.pause_reason or 'no reason given'}); resume it first"
        return ""
