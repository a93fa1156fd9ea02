"""Continuous batching of one rank: which requests the next step feeds. Pure: no torch, no sockets, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.engine.reference.messages import Ended, EndReason, NewToken, Rejected, Submit


@dataclass(slots=True, eq=False)
class Generation:
    """A request under way. owner: the client that it came from. cache: made when it is first fed."""

    request: Submit
    owner: int
    tokens: list[int] = field(default_factory=list)
    cache: Any = None

    def pending(self) -> Sequence[int]:
        """Tokens to feed at the next step: the whole prompt at first, then the newest token."""
        return self.tokens[-1:] if self.tokens else self.request.prompt

    @property
    def num_held(self) -> int:
        """Tokens whose keys and values the cache holds: all that were fed in steps that ended well."""
        return len(self.request.prompt) + len(self.tokens) - 1 if self.tokens else 0

    @property
    def finished(self) -> bool:
        """Whether all tokens that were asked for are there."""
        return len(self.tokens) >= self.request.max_new_tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step brought for one request. ended: set with its last token."""

    owner: int
    token: NewToken
    ended: Ended | None


class Scheduler:
    """Requests of one rank: a bounded queue, then a batch that grows and shrinks between steps.

    A prompt is fed whole in one step and its request stays in the batch until it ends, so no request waits half done.
    """

    def __init__(
        self,
        *,
        batch_max: int,
        queue_max: int,
        prefill_tokens_max: int,
        context: int,
        vocabulary: int,
        new_cache: Callable[[], Any],
    ) -> None:
        """See `FleetConfig` for the bounds; `context` and `vocabulary` are the model's."""
        self._batch_max = batch_max
        self._queue_max = queue_max
        self._prefill_tokens_max = prefill_tokens_max
        self._context = context
        self._vocabulary = vocabulary
        self._new_cache = new_cache
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._draining = False

    @property
    def num_waiting(self) -> int:
        """Requests that were never fed."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def empty(self) -> bool:
        """No request is here at all."""
        return not self._waiting and not self._running

    def drain(self) -> None:
        """Reject whatever comes from now on."""
        self._draining = True

    def submit(self, request: Submit, owner: int) -> Rejected | None:
        """Queue a request, or say why not."""
        reason = self._objection(request)
        if reason:
            return Rejected(request_id=request.request_id, reason=reason)
        self._waiting.append(Generation(request, owner))
        return None

    def next_batch(self, *, paused: Collection[int] = ()) -> list[Generation]:
        """Requests for the next step: those under way, then waiting ones while there is room; those of paused owners rest."""
        room = self._batch_max - len(self._running)
        prefill_tokens = 0
        passed_over: list[Generation] = []
        while self._waiting and room > 0:
            candidate = self._waiting[0]
            num_tokens = len(candidate.request.prompt)
            if candidate.owner in paused:
                passed_over.append(self._waiting.popleft())
                continue
            if prefill_tokens and prefill_tokens + num_tokens > self._prefill_tokens_max:
                break
            self._waiting.popleft()
            candidate.cache = self._new_cache()
            self._running.append(candidate)
            prefill_tokens += num_tokens
            room -= 1
        self._waiting.extendleft(reversed(passed_over))
        return [generation for generation in self._running if generation.owner not in paused]

    def has_work(self, *, paused: Collection[int] = ()) -> bool:
        """Whether `next_batch` would return anything."""
        if any(generation.owner not in paused for generation in self._running):
            return True
        return len(self._running) < self._batch_max and any(generation.owner not in paused for generation in self._waiting)

    def advance(self, batch: Sequence[Generation], tokens: Sequence[int]) -> list[Progress]:
        """Take in one token for each request of the batch; requests that are complete leave."""
        progress: list[Progress] = []
        for generation, token in zip(batch, tokens, strict=True):
            generation.tokens.append(token)
            new = NewToken(request_id=generation.request.request_id, index=len(generation.tokens) - 1, token=token)
            ended = _ended(generation, EndReason.LENGTH) if generation.finished else None
            progress.append(Progress(generation.owner, new, ended))
        self._running = [generation for generation in self._running if not generation.finished]
        return progress

    def rewind(self) -> None:
        """A step failed half way: its batch is as it was before it, and the next step takes the same tokens up again."""
        for generation in self._running:
            generation.cache.truncate(generation.num_held)

    def cancel(self, *, owner: int | None = None) -> list[tuple[int, Ended]]:
        """Drop the requests of one owner, or all; returns (owner, message) for each."""
        dropped = [g for g in (*self._running, *self._waiting) if owner is None or g.owner == owner]
        self._running = [g for g in self._running if g not in dropped]
        self._waiting = deque(g for g in self._waiting if g not in dropped)
        return [(generation.owner, _ended(generation, EndReason.CANCELLED)) for generation in dropped]

    def _objection(self, request: Submit) -> str:
        """Why a request cannot be taken up; empty when it can."""
        length = len(request.prompt)
        if self._draining:
            return "this rank is draining and takes no more requests; send it to another rank"
        if len(self._waiting) >= self._queue_max:
            return f"{len(self._waiting)} requests wait already, of at most {self._queue_max}; try again later"
        if length < 1:
            return "the prompt is empty; pass at least 1 token"
        if not all(0 <= token < self._vocabulary for token in request.prompt):
            return f"the prompt has tokens outside 0..{self._vocabulary - 1}; tokenise it for this model"
        # The last token is generated but never fed back.
        if request.max_new_tokens < 1 or length + request.max_new_tokens - 1 > self._context:
            return (
                f"{length} prompt tokens and {request.max_new_tokens} new ones do not fit the context of {self._context};"
                f" ask for 1 to {max(0, self._context + 1 - length)} new tokens"
            )
        if not 0 <= request.request_id < 1 << 63:
            return f"request id {request.request_id} is outside 0..2^63-1"
        return ""


def _ended(generation: Generation, reason: EndReason) -> Ended:
    request = generation.request
    return Ended(request_id=request.request_id, kind=request.kind, reason=reason, num_tokens=len(generation.tokens))
