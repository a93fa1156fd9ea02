"""Requests of a soak: each is answered, or fails with a reason, within a deadline; how long serving ever stood still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agent.engine.reference.client import RankClient
from agent.engine.reference.messages import Ended, EndReason, FromEngine, NewTokens
from demo.oracle import Served
from demo.traffic import Traffic
from tests.integration.surviving_fleet import SurvivingServing

REQUEST_DEADLINE_S = 240.0
"""A request that a fleet which lives has not answered by then hangs: longer than any fault, and a busy machine, may take."""


@dataclass(slots=True)
class Books:
    """Of all lives of a fleet together. stalls_s: the longest time without a token, by what was wrong meanwhile."""

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    stalls_s: dict[str, float] = field(default_factory=dict)
    slowest_s: float = 0.0
    hanging: list[str] = field(default_factory=list)

    def note_stall(self, seconds: float, during: str) -> None:
        """Keep the longest of each kind."""
        self.stalls_s[during] = max(self.stalls_s.get(during, 0.0), seconds)


class BookedServing(SurvivingServing):
    """Requests of one life of a fleet. A rank that is gone is asked no more, and what it had under way has failed."""

    def __init__(
        self,
        clients: list[RankClient],
        traffic: Traffic,
        *,
        in_flight: int,
        finished: Callable[[Served], None],
        books: Books,
    ) -> None:
        super().__init__(clients, traffic, in_flight=in_flight, finished=finished)
        self._books = books
        self._since: dict[int, float] = {}
        self._now = 0.0
        self._last_token: float | None = None

    def pump(self, now: float, *, wait_s: float = 0.0) -> None:
        """As `Serving.pump`, with the books kept."""
        self._now = now
        if self._last_token is None:
            self._last_token = now
        super().pump(now, wait_s=wait_s)
        under_way = {request for requests in self._open for request in requests}
        for request in self._since.keys() - under_way:  # its rank is gone
            del self._since[request]
            self._books.failed += 1

    def silence_s(self, now: float) -> float:
        """Seconds since the last token while requests are under way; 0 when none is."""
        if not any(self.running) or self._last_token is None:
            return 0.0
        return now - self._last_token

    def look_for_hanging(self, now: float) -> None:
        """Put requests that are late on the list, once each."""
        late = [request for request, since in self._since.items() if now - since > REQUEST_DEADLINE_S]
        for request in late:
            self._books.hanging.append(f"request {request} has no end after {now - self._since.pop(request):.0f} s")

    def fail_all(self) -> int:
        """The fleet is gone: whoever asked is told so. Returns how many."""
        count = len(self._since)
        self._books.failed += count
        self._since.clear()
        return count

    def _submit(self, position: int, client: RankClient) -> None:
        before = set(self._open[position])
        super()._submit(position, client)
        self._books.submitted += 1
        if not any(self.running) or self._last_token is None or not self._since:
            self._last_token = self._now  # nothing was under way: silence begins with this request
        for request in self._open[position].keys() - before:
            self._since[request] = self._now

    def _take(self, position: int, message: FromEngine, now: float) -> None:
        if isinstance(message, NewTokens):
            self._last_token = now
            self._books.tokens += len(message.tokens)
        super()._take(position, message, now)

    def _end(self, position: int, message: Ended) -> None:
        since = self._since.pop(message.request_id, None)
        if message.reason is EndReason.LENGTH:
            self._books.answered += 1
            if since is not None:
                self._books.slowest_s = max(self._books.slowest_s, self._now - since)
        else:
            self._books.failed += 1
        super()._end(position, message)
