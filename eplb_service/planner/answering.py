"""Answers the questions of an advised deployment: keep or move, in time, with a reason, and never a map that is not stored.

One question is answered at a time. It is recorded first (what it shows of the engine, its load as a window), then decided. A
plan that takes longer than the engine waits goes on, and what it found is kept for the next question.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine
from typing import Any

import structlog

from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.advising import Look, Sight, Told
from eplb_service.errors import ConflictError, EnvironmentFault, EplbError
from eplb_service.gate import VerdictCode
from eplb_service.generation import ROLLBACK
from eplb_service.ids import GenerationNumber
from eplb_service.placement import EMPTY_SLOT
from eplb_service.planner.advised import AdvisedDeployment
from eplb_service.planner.deciding import why_stale
from eplb_service.planner.documents import VerdictRecord
from eplb_service.planner.plans_in_time import PlansInTime
from eplb_service.planner.proposing import Choice, Decision
from eplb_service.planner.publishing import publish
from eplb_service.planner.steering import Steering

MARGIN = 0.1
"""Share of the time that an engine waits which is left for the answer's way back."""

LEAD_WAIT_S = 1.0
"""Longest wait for the lead of a deployment that was just heard of."""

EMPTY_SLOTS = "the plan leaves slots empty, and the engine's own map has none: it cannot be told to"


class Answering(Steering):
    """Decides, publishes and answers for one advised deployment."""

    def __init__(self, deployment: AdvisedDeployment) -> None:
        super().__init__(deployment)
        self.advised = deployment
        self._turn = asyncio.Lock()
        self._last: Advice | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._plans = PlansInTime(deployment, lambda work: self._own(work, "plan"))
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name, advised=True)

    def start(self) -> None:
        """Begin to lead. Nothing is planned until a question comes."""
        self.deployment.start()

    async def stop(self, timeout_s: float) -> None:
        """Cancel what is not stored yet, then give the lead up."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await super().stop(timeout_s)

    async def ask(self, request: AdviceRequest) -> Advice:
        """The answer to a question. The caller may go away meanwhile: it asks again, and gets the same one.

        Raises EnvironmentFault (this planner does not lead), ConflictError (a rival asks), InvalidInputError.
        """
        ends_at_s = self._now() + request.timeout_s * (1 - MARGIN)
        return await asyncio.shield(self._own(self._ask(request, ends_at_s), "question"))

    async def _ask(self, request: AdviceRequest, ends_at_s: float) -> Advice:
        try:
            await self._until_led(ends_at_s)
            answer = await self._in_turn(request, ends_at_s)
        except EplbError:
            self._note_answer("refused", "")
            raise
        self._note_answer("move" if answer.move else "keep", answer.reason)
        return answer

    def _note_answer(self, kind: str, reason: str) -> None:
        questions = self.advised.questions
        questions.answers[kind] += 1
        questions.last_reason = reason or questions.last_reason
        self.deployment.context.metrics.question_answered(self.deployment.name, kind)

    async def _until_led(self, ends_at_s: float) -> None:
        """Return once this planner leads. Raises EnvironmentFault saying who does, ConflictError for another's deployment."""
        wait_s = min(LEAD_WAIT_S, ends_at_s - self._now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, wait_s)):
                while not self.advised.leads:
                    await self.advised.wait_for_change()
        if not self.advised.leads:
            raise EnvironmentFault(f"this planner does not lead {self.deployment.name}: {self.deployment.leading.why_not}")
        if self.advised.not_ours:
            raise ConflictError(self.advised.not_ours)

    async def _in_turn(self, request: AdviceRequest, ends_at_s: float) -> Advice:
        try:
            async with asyncio.timeout(max(0.0, ends_at_s - self._now())):
                await self._turn.acquire()
        except TimeoutError:
            return self._keep(request, "keep: an earlier question of this engine is still being answered")
        try:
            return await self._answer_one(request, ends_at_s)
        finally:
            self._turn.release()

    async def _answer_one(self, request: AdviceRequest, ends_at_s: float) -> Advice:
        seen = self.advised.take(request, self.deployment.context.clock.wall())
        if seen.sight is Sight.RIVAL:
            raise ConflictError(f"{self.deployment.name}: {seen.reason}")
        last = self._last
        if (
            seen.sight is Sight.REPEATED
            and last is not None
            and (last.origin, last.sequence)
            == (
                request.origin,
                request.sequence,
            )
        ):
            return last
        if seen.sight is Sight.LATE:
            return self._keep(request, f"keep: {seen.reason}")
        try:
            answer = await self._decided(request, seen, ends_at_s)
        except EplbError as error:
            self.deployment.last_error = str(error)
            answer = self._keep(request, f"keep: {error}")
        except Exception as error:  # noqa: BLE001  (whatever it is, the engine gets an answer, and the next question may do)
            self._log.exception("question.broke")
            answer = self._keep(request, f"keep: the planner failed ({type(error).__name__}); see its log")
        self._last = answer
        return answer

    # ── what is decided ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _decided(self, request: AdviceRequest, seen: Look, ends_at_s: float) -> Advice:
        told = self._to_tell()
        if told is not None:
            return self._move(request, told)
        why = self._why_keep(seen)
        if why:
            return self._keep(request, f"keep: {why}")
        verdict = await self._considered(ends_at_s)
        told = self._to_tell()
        if told is not None:
            return self._move(request, told)
        if verdict.move and self.deployment.ledger.settings.mode != "auto":
            return self._keep(request, f"keep: mode {self.deployment.ledger.settings.mode}; the gate said {verdict.reason}")
        if verdict.move:
            newest = self.deployment.ledger.generations[self.deployment.ledger.highest]
            return self._keep(request, f"keep: generation {newest.number} was {newest.stop_reason or 'given up'}")
        return self._keep(request, verdict.reason)

    def _to_tell(self) -> Told | None:
        """What the engine is to be told. An order that was overtaken by another map ends here."""
        engine = self.advised.engine
        told = engine.told if engine is not None else None
        if engine is None or told is None or not self.advised.leads:
            return None
        if told.times:
            return told
        generation = self.deployment.ledger.generations[told.generation]
        previous = self.deployment.ledger.previous
        if generation.policy == ROLLBACK or previous is None or previous.generation != generation.number:
            return told
        if previous.placement != engine.live.placement:
            self.advised.cancel_rollout(
                "not told: the engine routes by another map than it was planned from", by="planner", withdraw=False
            )
            return None
        return told

    def _why_keep(self, seen: Look) -> str:
        """What speaks against any move now, beside the gate; empty when nothing does."""
        deployment, engine = self.deployment, self.advised.engine
        why = deployment.why_not_plan()
        if why:
            return why
        if deployment.ledger.settings.mode == "pinned":
            return f"{deployment.name} is pinned; `eplb mode auto` lifts the pin"
        if engine is not None and engine.rest:
            self.advised.rested()
            last = f"generation {engine.lapsed.generation}" if engine.lapsed is not None else "what it was told"
            because = seen.reason if seen.sight is Sight.IGNORED else f"the engine did not follow {last}"
            return f"{because}; {engine.rest} questions are answered keep before it is told to move again"
        return ""

    async def _considered(self, ends_at_s: float) -> VerdictRecord:
        """The gate's answer, and in mode auto a generation where it says move. Raises EplbError where nothing came of it."""
        deployment = self.deployment
        await self._in_time(self._own(self._validate(), "validation"), ends_at_s, "validation")
        if self._to_tell() is not None:
            return self._verdict_now()
        if self.draining.is_due:
            await self._in_time(self._own(self.draining.go_on(), "drain"), ends_at_s, "draining")
            return self._verdict_now()
        early = self._too_few() or self._screened()
        if early is not None:
            deployment.record_verdict(early)
            return early
        decision = await self._plans.decision(ends_at_s)
        verdict = self._verdict(decision)
        deployment.record_verdict(verdict)
        deployment.last_error = ""
        if verdict.move and deployment.ledger.settings.mode == "auto":
            task = self._own(self._publish(decision, verdict), "publication")
            await self._in_time(task, ends_at_s, "storing the generation")
        return self._verdict_now()

    def _verdict_now(self) -> VerdictRecord:
        """The last verdict that was recorded; there is one wherever this is called."""
        verdict = self.deployment.verdict
        if verdict is None:
            raise EnvironmentFault(f"{self.deployment.name} has no verdict yet")
        return verdict

    def _too_few(self) -> VerdictRecord | None:
        """The gate's answer without a plan: too few questions were asked under the live map."""
        window, least = self.advised.window(), self.deployment.context.gate.min_sub_windows
        num = len(window.windows) if window is not None else 0
        if num >= least:
            return None
        reason = (
            f"keep: {num} of {least} questions were asked under the live map alone; fewer do not tell skew from chance"
            " (gate.min_sub_windows)"
        )
        return VerdictRecord(
            move=False,
            code=VerdictCode.TOO_FEW_WINDOWS.value,
            reason=reason,
            decided_at_s=self.deployment.context.clock.wall(),
            numbers={"sub_windows": float(num), "min_sub_windows": float(least)},
        )

    async def _publish(self, decision: Decision, verdict: VerdictRecord) -> None:
        """Store a generation: then it is what the engine is to be told."""
        deployment = self.deployment
        async with deployment.planning:
            why = deployment.why_not_plan() or why_stale(deployment, decision)
            if why or deployment.ledger.settings.mode != "auto":
                reason = f"keep: {why or 'the mode was changed meanwhile'}"
                deployment.record_verdict(dataclasses.replace(verdict, move=False, code="expired", reason=reason))
                return
            await publish(deployment, self._content(decision, decision.choice, verdict.reason), None, verdict)

    async def _in_time(self, task: asyncio.Task[None], ends_at_s: float, what: str) -> None:
        """Wait for a task, not longer than the engine does; it goes on. Raises EnvironmentFault, and what it raises."""
        done, _ = await asyncio.wait({task}, timeout=max(0.0, ends_at_s - self._now()))
        if not done:
            raise EnvironmentFault(
                f"{what} takes longer than the engine waits; what comes of it is told with its next question"
            )
        task.result()

    # ── what an engine cannot do ─────────────────────────────────────────────────────────────────────────────────────────

    def _verdict(self, decision: Decision) -> VerdictRecord:
        verdict = super()._verdict(decision)
        if verdict.move and self._leaves_slots_empty(decision.choice):
            reason = f"keep: {EMPTY_SLOTS} (the gate said {verdict.reason})"
            return dataclasses.replace(verdict, move=False, code=VerdictCode.CANNOT_ROLL_OUT.value, reason=reason)
        return verdict

    def _why_not_carried(self, choice: Choice) -> str:
        return super()._why_not_carried(choice) or (EMPTY_SLOTS if self._leaves_slots_empty(choice) else "")

    def _leaves_slots_empty(self, choice: Choice) -> bool:
        live = self.advised.live
        if live is None:
            return False
        now, then = (placement.tables[0].physical_to_logical for placement in (live.placement, choice.target))
        return bool((then == EMPTY_SLOT).any() and not (now == EMPTY_SLOT).any())

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, request: AdviceRequest, told: Told) -> Advice:
        generation = self.advised.told()
        again = f" (told {'once' if told.times == 1 else f'{told.times} times'} before)" if told.times else ""
        self._log.info("advice.given", generation=generation.number, sequence=request.sequence, again=bool(told.times))
        return Advice(
            origin=request.origin,
            sequence=request.sequence,
            move=True,
            generation=generation.number,
            digest=map_digest(told.rows),
            reason=generation.reason + again,
            rows=told.rows,
        )

    def _keep(self, request: AdviceRequest, reason: str) -> Advice:
        live = self.advised.live
        return Advice(
            origin=request.origin,
            sequence=request.sequence,
            move=False,
            generation=live.newest_generation if live is not None else GenerationNumber(0),
            digest=request.digest,
            reason=reason,
        )

    def _now(self) -> float:
        return self.deployment.context.clock.monotonic()

    def _own(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        """A task that is ended with the deployment."""
        task = asyncio.create_task(work, name=f"{what} of {self.deployment.name}")
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited may be gone: looked at here
