"""One ordered lane of fenced writes for a leadership: what must be stored before it is acted on, and what may lag behind.

All writes of a deployment go through one lane, so that a state that was written behind never overtakes a later one. A write
whose answer was lost is sent again with the same id until it is answered or the leadership ends; writes that lag behind
are merged while they wait, and the journal is bounded and says when it dropped something.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from eplb_service import failpoints
from eplb_service.errors import EnvironmentFault, EplbError, FencedError, StoreUnavailableError
from eplb_service.store.base import Leadership, Store, Write

RETRY_S = 0.2
JOURNAL_WAITING_MAX = 1024
COMMITS_WAITING_MAX = 64


@dataclass(slots=True)
class _Job:
    """A write that waits. future: set for those that somebody waits for; these are never merged."""

    puts: dict[str, bytes]
    deletes: tuple[str, ...] = ()
    expects: dict[str, int] = field(default_factory=dict)
    journal: list[bytes] = field(default_factory=list)
    future: asyncio.Future[None] | None = None
    failpoint: str = ""


class WriteLane:
    """The writes of one leadership, in order.

    on_health: called with whether the store answered and why not. on_fenced: called once, when another planner leads.
    new_id: gives a unique write id.
    """

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        *,
        new_id: Callable[[], str],
        on_health: Callable[[str], None],
        on_fenced: Callable[[str], None],
    ) -> None:
        self._store = store
        self._leadership = leadership
        self.epoch = leadership.epoch
        self._new_id = new_id
        self._on_health = on_health
        self._on_fenced = on_fenced
        self._jobs: deque[_Job] = deque()
        self._under_way: _Job | None = None
        self._journal: deque[bytes] = deque()
        self._dropped = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = ""
        self._log = structlog.get_logger("eplb.store").bind(deployment=leadership.deployment, epoch=leadership.epoch)
        self._task = asyncio.create_task(self._run(), name=f"writes of {leadership.deployment}")

    async def commit(
        self, puts: Mapping[str, bytes], *, expects: Mapping[str, int] | None = None, deletes: tuple[str, ...] = ()
    ) -> None:
        """Store this; returns once it is stored.

        Raises FencedError (another planner leads), ConflictError (a version differs), StoreUnavailableError (too many wait).
        A cancelled caller does not cancel the write.
        """
        if self._ended:
            raise FencedError(self._ended)
        if sum(job.future is not None for job in self._jobs) >= COMMITS_WAITING_MAX:
            raise StoreUnavailableError(f"{COMMITS_WAITING_MAX} writes wait for the store already; try again when it answers")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieved)
        self._add(_Job(puts=dict(puts), deletes=deletes, expects=dict(expects or {}), future=future))
        await asyncio.shield(future)

    def behind(self, puts: Mapping[str, bytes], *, failpoint: str = "") -> None:
        """Store this when the store can; later values of a name replace earlier ones that still wait."""
        if self._ended:
            return
        last = self._jobs[-1] if self._jobs else None
        if last is not None and last.future is None:
            last.puts.update(puts)
            last.failpoint = failpoint or last.failpoint
            self._wake.set()
        else:
            self._add(_Job(puts=dict(puts), failpoint=failpoint))

    def note(self, entry: Mapping[str, object]) -> None:
        """Append to the journal when the store can."""
        if self._ended:
            return
        self._journal.append(json.dumps(entry, separators=(",", ":")).encode())
        while len(self._journal) > JOURNAL_WAITING_MAX:
            self._journal.popleft()
            self._dropped += 1
        self._idle.clear()
        self._wake.set()

    @property
    def num_waiting(self) -> int:
        """Writes that wait."""
        return len(self._jobs)

    async def close(self, drain_s: float) -> None:
        """Write what waits, for at most so long, then stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        self._end("the planner gave up its leadership")
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._idle.clear()
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._jobs or self._journal:
                job = self._jobs.popleft() if self._jobs else _Job(puts={})
                job.journal = self._take_journal()
                self._under_way = job
                if not await self._write(job):
                    return
                self._under_way = None
            self._idle.set()

    def _take_journal(self) -> list[bytes]:
        entries = list(self._journal)
        self._journal.clear()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            entries.insert(0, json.dumps({"event": "journal.incomplete", "dropped": dropped}).encode())
        return entries

    async def _write(self, job: _Job) -> bool:
        """Write until answered; False ends the lane."""
        leadership = self._leadership
        write = Write(
            write_id=self._new_id(),
            epoch=leadership.epoch,
            puts=job.puts,
            deletes=job.deletes,
            expects=job.expects,
            journal=tuple(job.journal),
        )
        while True:
            try:
                await self._store.write(leadership.deployment, write)
            except FencedError as error:
                self._on_health("")
                _fail(job, error)
                self._end(str(error))
                self._on_fenced(str(error))
                return False
            except EnvironmentFault as error:
                self._on_health(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            except EplbError as error:
                self._on_health("")
                if job.future is None:
                    self._log.error("write.refused", names=sorted(job.puts), reason=str(error))
                _fail(job, error)
            else:
                self._on_health("")
                if job.future is not None and not job.future.done():
                    job.future.set_result(None)
                if job.failpoint:
                    await failpoints.reach_async(job.failpoint)
            return True

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        if self._under_way is not None:  # whether it was applied is unknown; whoever waits for it must not wait for ever
            _fail(self._under_way, FencedError(reason))
        while self._jobs:
            _fail(self._jobs.popleft(), FencedError(reason))
        self._journal.clear()
        self._idle.set()


def _fail(job: _Job, error: Exception) -> None:
    if job.future is not None and not job.future.done():
        job.future.set_exception(error)


def _retrieved(future: asyncio.Future[None]) -> None:
    """A waiter that was cancelled leaves its exception: looked at here, so that asyncio does not complain."""
    if not future.cancelled():
        future.exception()
