"""Keeps the ranks busy with requests, follows every token back, and hands finished requests to the oracle."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agent.engine.reference.client import RankClient
from agent.engine.reference.messages import Ended, EndReason, FromEngine, Inspection, NewTokens, Rejected
from demo.oracle import Served
from demo.traffic import Prompt, Traffic
from eplb_service.errors import BrokenInvariantError

RATE_WINDOW_S = 3.0
INSPECT_TIMEOUT_S = 15.0
STEPS_KEPT = 4096
"""Steps whose routing is remembered to compare ranks by: lock-step ranks are never so far apart."""


@dataclass(slots=True)
class _Open:
    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    generations: list[tuple[int, ...]] = field(default_factory=list)


class Serving:
    """Requests under way on every rank. `finished` is called with each one that has all its tokens."""

    def __init__(
        self, clients: list[RankClient], traffic: Traffic, *, in_flight: int, finished: Callable[[Served], None]
    ) -> None:
        self._clients = clients
        self._traffic = traffic
        self._in_flight = in_flight
        self._finished = finished
        self._open: list[dict[int, _Open]] = [{} for _ in clients]
        self._recent: deque[tuple[float, int]] = deque()
        self._routed_by: dict[int, tuple[int, ...]] = {}
        self._past_flips: list[int] = []
        self.accepting = True
        self.requests = 0
        self.tokens = 0
        self.across_a_flip = 0
        self.boundaries_compared = 0

    @property
    def running(self) -> list[int]:
        """Requests under way on each rank."""
        return [len(requests) for requests in self._open]

    @property
    def flip_boundaries(self) -> list[int]:
        """First boundary at which the generations that tokens were routed by changed, ascending."""
        return [*self._past_flips, *self._flips_among(sorted(self._routed_by))]

    def _flips_among(self, steps: list[int]) -> list[int]:
        return [b for a, b in itertools.pairwise(steps) if self._routed_by[a] != self._routed_by[b]]

    def pump(self, now: float, *, wait_s: float = 0.0) -> None:
        """Take what the ranks have sent, then refill them. Raises BrokenInvariantError when two ranks routed differently."""
        for position, client in enumerate(self._clients):
            while self.accepting and len(self._open[position]) < self._in_flight:
                self._submit(position, client)
            for message in client.receive(timeout_s=wait_s / len(self._clients)):
                self._take(position, message, now)
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()

    def tokens_per_s(self, now: float) -> float:
        """Rate over the last seconds."""
        if not self._recent:
            return 0.0
        return sum(count for _, count in self._recent) / max(0.5, min(RATE_WINDOW_S, now - self._recent[0][0] + 0.1))

    def inspect(self) -> list[Inspection]:
        """What every rank holds now; each answers between two of its steps."""
        return [client.inspect(timeout_s=INSPECT_TIMEOUT_S) for client in self._clients]

    def close(self) -> None:
        """Close the connections; ranks drop what was asked through them."""
        for client in self._clients:
            client.close()

    def _submit(self, position: int, client: RankClient) -> None:
        prompt = self._traffic.next()
        self._open[position][prompt.request_id] = _Open(prompt)
        client.submit(
            request_id=prompt.request_id, prompt=list(prompt.text), max_new_tokens=prompt.max_new_tokens, kind=prompt.kind
        )

    def _take(self, position: int, message: FromEngine, now: float) -> None:
        if isinstance(message, NewTokens):
            self._compare_routing(position, message)
            for new in message.tokens:
                request = self._open[position][new.request_id]
                request.tokens.append(new.token)
                request.boundaries.append(message.boundary)
                request.generations.append(message.generations)
            self.tokens += len(message.tokens)
            self._recent.append((now, len(message.tokens)))
        elif isinstance(message, Ended):
            self._end(position, message)
        elif isinstance(message, Rejected):
            raise BrokenInvariantError(
                f"request {message.request_id} was rejected although the queue had room: {message.reason}"
            )

    def _end(self, position: int, message: Ended) -> None:
        request = self._open[position].pop(message.request_id)
        if message.reason is not EndReason.LENGTH:
            return
        self.requests += 1
        self.across_a_flip += len(set(request.generations)) > 1
        self._finished(
            Served(
                message.request_id,
                request.prompt.kind,
                request.prompt.text,
                tuple(request.tokens),
                tuple(request.boundaries),
                tuple(request.generations),
            )
        )

    def _compare_routing(self, position: int, message: NewTokens) -> None:
        """Invariant 1: at any step all ranks route by the same generations."""
        known = self._routed_by.setdefault(message.boundary, message.generations)
        if known != message.generations:
            raise BrokenInvariantError(
                f"at step {message.boundary} rank position {position} routed its layers by generations {message.generations},"
                f" another rank by {known}: one batch saw two placements"
            )
        self.boundaries_compared += 1
        if len(self._routed_by) > 2 * STEPS_KEPT:
            self._forget_old_steps()

    def _forget_old_steps(self) -> None:
        """All ranks have passed steps that are so old; their flips are kept."""
        steps = sorted(self._routed_by)
        self._past_flips += self._flips_among(steps[: -STEPS_KEPT + 1])
        for step in steps[:-STEPS_KEPT]:
            del self._routed_by[step]
