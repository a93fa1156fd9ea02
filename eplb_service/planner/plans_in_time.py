"""Decisions within the time that an engine waits; one that comes too late is kept, and may answer the next question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from eplb_service.errors import DeadlineError
from eplb_service.planner.advised import AdvisedDeployment
from eplb_service.planner.deciding import decide, why_stale
from eplb_service.planner.loads import imbalance_under
from eplb_service.planner.proposing import Decision


class PlansInTime:
    """The plans of one advised deployment. own: makes a task of it that ends with the deployment."""

    def __init__(
        self, deployment: AdvisedDeployment, own: Callable[[Coroutine[Any, Any, Decision]], asyncio.Task[Decision]]
    ) -> None:
        self._deployment, self._own = deployment, own
        self._plan: asyncio.Task[Decision] | None = None
        self._ready: Decision | None = None

    async def decision(self, ends_at_s: float) -> Decision:
        """A decision from the last questions, or the one that was too late for an earlier question. ends_at_s: monotonic.

        Raises DeadlineError when there is none yet, and what `deciding.decide` raises.
        """
        ready, self._ready = self._ready, None
        if ready is not None and not why_stale(self._deployment, ready) and self._still_holds(ready):
            return ready
        while True:
            if self._plan is None:
                self._plan = self._own(self._decided())
            plan = self._plan
            done, _ = await asyncio.wait({plan}, timeout=max(0.0, ends_at_s - self._deployment.context.clock.monotonic()))
            if not done:
                plan.add_done_callback(self._keep)
                raise DeadlineError(self._too_slow())
            self._plan = self._ready = None
            decision, live = plan.result(), self._deployment.live
            if live is not None and decision.live_digest == live.digest:
                return decision  # else it was begun for an earlier question, under another map

    async def _decided(self) -> Decision:
        async with self._deployment.planning:
            return await decide(self._deployment, self._deployment.ledger.settings.policy)

    def _keep(self, plan: asyncio.Task[Decision]) -> None:
        """A plan is there that came too late for its question."""
        if self._plan is plan:
            self._plan = None
            if not plan.cancelled() and plan.exception() is None:
                self._ready = plan.result()

    def _still_holds(self, decision: Decision) -> bool:
        """Whether a decision for an earlier question goes for the load of this one: half of its gain at least is there."""
        if not decision.verdict.move:
            return True
        window, live, group = self._deployment.window(), self._deployment.live, self._deployment.group
        if window is None or live is None or group is None:
            return False
        now = imbalance_under(window, live.placement, group)
        then = imbalance_under(window, decision.target, group)
        return now.mean - then.mean >= (decision.before.mean - decision.predicted.mean) / 2

    def _too_slow(self) -> str:
        return (
            "planning takes longer than the engine waits: raise its deadline, or lower planning.effort; the plan is kept for"
            f" the next question, if it comes with the same map within {self._deployment.proposal_ttl_s:.0f} s"
        )
