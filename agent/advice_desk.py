"""Questions of engines that move their own weights, on their way to the planner: every one is answered, in time.

A question comes over a link of its own kind, that of a rank which registers nothing. The planner's answer goes back over it;
where there is none (the planner away, a deadline, a refusal, a question that does not fit the wire) the answer is to keep, with
the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agent.session_events import LinkId
from eplb_service.advice import NO_GENERATION, Advice, AdviceRequest
from eplb_service.errors import DeadlineError, EplbError, InvalidInputError
from eplb_service.log import ReasonLog

MARGIN = 0.05
"""Share of the time that an engine waits which is left for the answer's way over the socket."""

TIMEOUT_MAX_S = 600.0
QUESTIONS_MAX = 64
"""Questions under way at once: one for each model and stage of the engines of a node is usual."""


class AdviceDesk:
    """The questions under way in an agent process.

    advise: asks the planner, within so many seconds; raises EplbError. send: gives an answer to a link.
    """

    def __init__(
        self,
        advise: Callable[[AdviceRequest, float], Awaitable[Advice]],
        send: Callable[[LinkId, Advice], None],
        log: Any,
    ) -> None:
        self._advise, self._send, self._log = advise, send, log
        self._under_way: dict[asyncio.Task[None], LinkId] = {}
        self._reasons = ReasonLog()

    @property
    def num_under_way(self) -> int:
        """Questions that are not answered yet."""
        return len(self._under_way)

    def ask(self, link: LinkId, question: AdviceRequest) -> None:
        """Pass a question on; its answer is sent to the link."""
        if len(self._under_way) >= QUESTIONS_MAX:
            self._send(link, keep(question, f"keep: {QUESTIONS_MAX} questions are under way in this agent process already"))
            return
        task = asyncio.get_running_loop().create_task(self._answer(link, question))
        self._under_way[task] = link
        task.add_done_callback(lambda done: self._under_way.pop(done, None))

    def gone(self, link: LinkId) -> None:
        """Nobody waits for the answers of a link any more."""
        for task, owner in self._under_way.items():
            if owner == link:
                task.cancel()

    async def close(self) -> None:
        """Give every question up."""
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, link: LinkId, question: AdviceRequest) -> None:
        try:
            answer = await self._asked(question)
        except EplbError as error:
            if self._reasons.is_news(question.deployment, str(error)):
                self._log.warning("question.unanswered", deployment=question.deployment, reason=str(error))
            answer = keep(question, f"keep: {error}")
        except Exception as error:  # noqa: BLE001  (a bug here must not cost the engine its answer)
            self._log.exception("question.broke", deployment=question.deployment)
            answer = keep(question, f"keep: the agent process failed ({type(error).__name__}); see its log")
        else:
            if self._reasons.clear(question.deployment):
                self._log.info("question.answered", deployment=question.deployment)
        self._send(link, answer)

    async def _asked(self, question: AdviceRequest) -> Advice:
        waits_s = question.timeout_s
        if not 0 < waits_s <= TIMEOUT_MAX_S:
            raise InvalidInputError(
                f"a question that waits {waits_s} s cannot be answered: give above 0 and at most {TIMEOUT_MAX_S:.0f} s"
            )
        budget_s = waits_s * (1 - MARGIN)
        try:
            async with asyncio.timeout(budget_s):
                return await self._advise(question, budget_s)
        except TimeoutError:
            raise DeadlineError(f"the planner did not answer within the {waits_s:g} s that the engine waits") from None


def keep(question: AdviceRequest, reason: str) -> Advice:
    """The answer where the planner gave none: the map of the question stays."""
    return Advice(
        origin=question.origin,
        sequence=question.sequence,
        move=False,
        generation=NO_GENERATION,
        digest=question.digest,
        reason=reason,
    )
