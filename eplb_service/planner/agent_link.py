"""What the planner has to say to one agent process: a bounded queue, so that one slow process holds up nobody else."""

from __future__ import annotations

import asyncio

from eplb_service.control import Address, ToRank
from eplb_service.ids import RankId

QUEUE_MAX = 2048
"""Messages that wait for an agent process. More than that and its stream is ended: it comes back and asks anew."""


class AgentLink:
    """One control stream. Messages leave in order; `close` ends the stream with a reason."""

    def __init__(self, peer: str, *, queue_max: int = QUEUE_MAX) -> None:
        self.peer = peer
        self.ranks: dict[RankId, Address] = {}
        """Ranks that this stream speaks for."""
        self.closed_reason = ""
        self.leads_elsewhere = False
        """Whether it was closed since another planner is to speak to its ranks now."""
        self._queue: asyncio.Queue[ToRank | None] = asyncio.Queue()
        self._queue_max = queue_max

    @property
    def num_waiting(self) -> int:
        """Messages that wait to be sent."""
        return self._queue.qsize()

    def send(self, message: ToRank) -> bool:
        """Queue a message; False when the stream is closed, or was closed now because it does not keep up."""
        if self.closed_reason:
            return False
        if self._queue.qsize() >= self._queue_max:
            self.close(f"the agent process at {self.peer} does not read: {self._queue_max} messages wait for it")
            return False
        self._queue.put_nowait(message)
        return True

    def close(self, reason: str) -> None:
        """End the stream; idempotent."""
        if not self.closed_reason:
            self.closed_reason = reason
            self._queue.put_nowait(None)

    def send_elsewhere(self, reason: str) -> None:
        """End the stream so that the agent process connects anew: what gives planners their name leads to another one now."""
        if not self.closed_reason:
            self.leads_elsewhere = True
            self.close(reason)

    async def next(self) -> ToRank | None:
        """The next message; None once the stream is closed (what waited is dropped: the agent asks anew)."""
        if self.closed_reason:
            return None
        return await self._queue.get()
