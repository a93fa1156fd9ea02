"""The vote: one small all-reduce inside the engine's own lock-step, which alone gives a common step.

Every K-th boundary every rank casts `[b, -b, id, -id]`, int64, and the element-wise minimum says whether all are at the same
boundary and whether all cast the same id. It is read at the next vote. A rank that cast an id waits for that one; one that
cast 0 never waits. Stopped peers made survivors of a vote disagree about its outcome, so for a rank that cast an id an error
or a time-out means *unknown*, not *no*.

A rank that leaves casts boundary LEAVING with id 0: its peers learn that it is gone from a completed vote, not from a time-out.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch

from agent.hook.ballot import LEAVING, ballot, read_ballot
from agent.hook.chunk_events import NO_CHUNK, Outcome
from agent.transfer.gloo import Work, first_line
from eplb_service.ids import ChunkId

MARGIN_S = 2.0
"""How much longer than gloo's own time-out a wait may take before it counts as lost."""

logger = logging.getLogger(__name__)


class VoteGroup(Protocol):
    """Where votes are cast; a `GlooGroup` is one."""

    def all_reduce_min(self, values: torch.Tensor, timeout_s: float) -> Work:
        """Begin the element-wise minimum over all ranks, in place."""
        ...

    def close_connections(self) -> None:
        """End every wait on it, from any thread."""
        ...


@dataclass(slots=True, eq=False)
class Vote:
    """One vote of this rank. values: shape (4,), int64; after the reduction the minimum over ranks."""

    boundary: int
    chunk_id: ChunkId
    values: torch.Tensor
    ballot: Work
    resolved: threading.Event = field(default_factory=threading.Event)
    told: bool = False


def read(vote: Vote) -> tuple[Outcome, str]:
    """The outcome of a completed vote, and a sentence when it is not plain."""
    return read_ballot(vote.values.tolist(), boundary=vote.boundary, chunk=vote.chunk_id)


class Voter:
    """Casts this rank's votes and finds out how they ended.

    on_resolved: told of every vote with an id, once. on_off: told once why no more votes are cast. Both from any thread.
    """

    def __init__(
        self,
        group: VoteGroup,
        *,
        timeout_s: float,
        on_resolved: Callable[[ChunkId, Outcome, str], None],
        on_off: Callable[[str], None],
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._on_resolved = on_resolved
        self._on_off = on_off
        self._off = self._abandoned = False
        self._lock = threading.Lock()
        self._cast: Vote | None = None
        self._zeros: deque[Vote] = deque()
        self._queue: queue.SimpleQueue[Vote | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait_for_votes, name="eplb-vote", daemon=True)

    def start(self) -> None:
        """Start the waiter thread: it resolves votes that were cast for an id, also while the engine runs no steps."""
        self._waiter.start()

    @property
    def is_off(self) -> bool:
        """Whether no more votes are cast here."""
        return self._off

    def collect(self) -> None:
        """Before the next vote: see the one cast for an id through, look at the others without waiting."""
        vote, self._cast = self._cast, None
        if vote is not None and not vote.resolved.wait(self._timeout_s + 2 * MARGIN_S):
            self._tell(vote, Outcome.UNKNOWN, f"no answer within {self._timeout_s + 2 * MARGIN_S:g} s")
        while self._zeros and self._zeros[0].ballot.is_completed():
            self._look_at_zero(self._zeros.popleft())

    def cast(self, boundary: int, chunk_id: ChunkId) -> None:
        """Take part in this boundary's vote. Never blocks on a peer."""
        if self._off:
            return
        vote = self._begin(boundary, chunk_id, self._timeout_s)
        if vote is None:
            if chunk_id != NO_CHUNK:
                self._on_resolved(chunk_id, Outcome.UNKNOWN, "the vote could not be cast")
        elif chunk_id == NO_CHUNK:
            self._zeros.append(vote)
        else:
            self._cast = vote
            self._queue.put(vote)

    def leave(self, timeout_s: float) -> None:
        """Say good-bye: peers stop voting by a completed vote. Then wait for the threads, at most `timeout_s`."""
        self.collect()
        if not self._off:
            vote = self._begin(LEAVING, NO_CHUNK, timeout_s)
            self._off = True
            if vote is not None:
                try:
                    vote.ballot.wait(timedelta(seconds=timeout_s))
                except RuntimeError as error:
                    logger.info("vote.left alone: %s", first_line(error))
        self._queue.put(None)
        if self._waiter.is_alive():
            self._waiter.join(timeout_s)

    def abandon(self) -> None:
        """The group ended: nothing more is told of its votes, and its waits end. Never blocks on a peer.

        The waiter thread goes on until the wait that it is in has ended, and takes the group's connections with it.
        """
        with self._lock:
            self._off = self._abandoned = True
        self._cast = None
        self._queue.put(None)
        self._group.close_connections()

    def _begin(self, boundary: int, chunk_id: ChunkId, timeout_s: float) -> Vote | None:
        values = torch.tensor(ballot(boundary, chunk_id), dtype=torch.int64)
        try:
            return Vote(boundary, chunk_id, values, self._group.all_reduce_min(values, timeout_s))
        except RuntimeError as error:
            self._turn_off(f"the vote at boundary {boundary} could not be cast: {first_line(error)}")
            return None

    def _look_at_zero(self, vote: Vote) -> None:
        try:
            vote.ballot.wait(timedelta(seconds=MARGIN_S))
        except RuntimeError as error:
            self._turn_off(f"the vote at boundary {vote.boundary} failed: {first_line(error)}")
            return
        outcome, detail = read(vote)
        if outcome is Outcome.DIVERGED:
            self._turn_off(detail)

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            first, self._off = not self._off, True
        if first:
            self._on_off(reason)

    def _wait_for_votes(self) -> None:
        while (vote := self._queue.get()) is not None:
            try:
                vote.ballot.wait(timedelta(seconds=self._timeout_s + MARGIN_S))
                outcome, detail = read(vote)
            except RuntimeError as error:
                outcome, detail = Outcome.UNKNOWN, first_line(error)
            self._tell(vote, outcome, detail)

    def _tell(self, vote: Vote, outcome: Outcome, detail: str) -> None:
        """Once for each vote: the waiter and a `collect` that gave up may both want to."""
        with self._lock:
            if vote.told or self._abandoned:
                return
            vote.told = True
        if outcome in (Outcome.DIVERGED, Outcome.UNKNOWN):
            self._turn_off(detail)
        try:
            self._on_resolved(vote.chunk_id, outcome, detail)
        finally:
            vote.resolved.set()
