"""Runs policies in a process of their own, so that the event loop never waits for a solver and a bad policy costs nothing.

The worker is an own program started by exec, not a fork: no locks, threads or sockets of the planner are inherited, and the
caller's `__main__` is not run again. It is warm (compiled, imported, tried) before `start` returns, limited in memory, killed
with everything it started at the deadline, and replaced at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eplb_service.errors import (
    BrokenInvariantError,
    DeadlineError,
    EnvironmentFault,
    EplbError,
    InvalidInputError,
    NotFoundError,
    PolicyFailedError,
    UnsupportedError,
)
from eplb_service.policy.base import PlanningProblem, Proposal, RawPlan
from eplb_service.policy.verify import verify
from eplb_service.solver.frames import FRAME_BYTES_MAX, LENGTH, decode_reply

MEMORY_BYTES = 4 << 30
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
SOFT_SHARE = 0.8
"""Share of the deadline that the policy is told, so that one that listens stops by itself and returns the best it has."""

ERRORS: dict[str, type[EplbError]] = {
    "invalid_input": InvalidInputError,
    "not_found": NotFoundError,
    "unsupported": UnsupportedError,
    "policy_failed": PolicyFailedError,
}
QUIET_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker process and our end of its socket."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_reply(self) -> tuple[dict[str, Any], RawPlan | None]:
        """Next reply. Raises asyncio.IncompleteReadError when the worker ended."""
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise BrokenInvariantError(
                f"the solver's worker announced a reply of {length} bytes; at most {FRAME_BYTES_MAX} are read"
            )
        return decode_reply(await self.reader.readexactly(length))

    async def kill(self) -> int:
        """Kill the process and whatever it started; returns its exit code.

        By its group only: `process.kill` polls, which takes the exit code from asyncio's own watcher.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()
        try:
            return await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineError(f"the solver's process {self.process.pid} outlived a kill by {STOP_TIMEOUT_S:g} s") from None


class Solver:
    """`await start()`, then `await solve(...)` as often as needed, one at a time; `await close()` at the end.

    policies: names that must work before `start` returns; others are loaded when first asked for.
    memory_bytes: bound on the worker's private memory. restarts: workers that had to be replaced so far.
    """

    def __init__(
        self,
        *,
        policies: Sequence[str] = ("minmove",),
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._policies = tuple(policies)
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._lock = asyncio.Lock()
        self._worker: _Worker | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False
        self._number = 0
        self.restarts = 0

    @property
    def is_ready(self) -> bool:
        """Whether a warm worker waits for problems or works on one."""
        return self._worker is not None and self._worker.process.returncode is None

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return self._worker.process.pid if self._worker is not None else None

    async def start(self) -> None:
        """Start the worker and wait until it is warm.

        Raises EnvironmentFault when it cannot start, DeadlineError when it takes too long, PolicyFailedError when a named
        policy does not work.
        """
        if self._closed:
            raise InvalidInputError("this solver was closed; make a new one")
        if self._worker is None:
            self._worker = await self._spawn()

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        """A verified proposal, within `deadline_s` of the worker being free.

        Raises PolicyFailedError when the policy raised, ran out of time or memory, ended the process or returned nonsense;
        InvalidInputError, NotFoundError or UnsupportedError when the question was wrong; EnvironmentFault when no worker can
        be started. After any failure of the worker the next call finds a new one.
        """
        if not 0 < deadline_s < float("inf"):
            raise InvalidInputError(f"deadline_s must be finite and > 0; got {deadline_s}")
        async with self._lock:
            worker = await self._warm_worker()
            self._number += 1
            problem = replace(problem, time_limit_s=min(problem.time_limit_s, SOFT_SHARE * deadline_s))
            answered = False
            try:
                head, plan = await asyncio.wait_for(self._ask(worker, policy, problem), deadline_s)
                answered = True
            except TimeoutError:
                raise PolicyFailedError(
                    f"policy {policy!r} did not answer within {deadline_s:g} s and was stopped; the live placement stays"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                code = await worker.kill()
                raise PolicyFailedError(
                    f"policy {policy!r} ended the solver's process ({self._how_it_ended(code)}); the live placement stays"
                ) from None
            finally:
                if not answered:
                    self._replace(worker)
        if plan is None:
            raise ERRORS.get(head.get("error", ""), PolicyFailedError)(head.get("message", f"policy {policy!r} gave no answer"))
        return await asyncio.to_thread(verify, problem, plan, policy=policy, solve_s=float(head["solve_s"]))

    async def close(self) -> None:
        """Stop the worker; a solve that is running fails. Safe to call twice."""
        self._closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            with contextlib.suppress(asyncio.CancelledError, EplbError):
                await self._replacing
            self._replacing = None
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()

    async def _ask(self, worker: _Worker, policy: str, problem: PlanningProblem) -> tuple[dict[str, Any], RawPlan | None]:
        """Send a problem and wait for its reply."""
        request = await asyncio.to_thread(pickle.dumps, (self._number, policy, problem))
        worker.writer.write(LENGTH.pack(len(request)) + request)
        await worker.writer.drain()
        head, plan = await worker.read_reply()
        if head.get("number") != self._number:
            raise BrokenInvariantError(f"the solver's worker answered problem {head.get('number')} instead of {self._number}")
        return head, plan

    async def _warm_worker(self) -> _Worker:
        """The worker, after a replacement that may be under way."""
        if self._replacing is not None:
            await asyncio.shield(self._replacing)
            self._replacing = None
        if self._closed:
            raise InvalidInputError("this solver was closed; make a new one")
        if self._worker is None or self._worker.process.returncode is not None:
            if self._worker is not None:
                await self._worker.kill()
                self.restarts += 1
            self._worker = await self._spawn()
        return self._worker

    def _replace(self, worker: _Worker) -> None:
        """Kill a worker and start the next one, without making anybody wait for it."""
        self._worker = None
        if self._closed:
            return  # `close` killed it
        self.restarts += 1
        self._replacing = asyncio.ensure_future(self._kill_and_spawn(worker))

    async def _kill_and_spawn(self, worker: _Worker) -> None:
        await worker.kill()
        # A failure to start is found, and told, by the next call, which tries once more.
        with contextlib.suppress(EplbError):
            self._worker = await self._spawn()

    async def _spawn(self) -> _Worker:
        """A warm worker, or an error; nothing is left behind."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003  # the standard library's signature
        with theirs:
            # Connected before the process exists, so that no await lies between its start and the `try` that ends it.
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "eplb_service.solver.worker",
                    *(str(theirs.fileno()), str(os.getpid()), str(self._memory_bytes), *self._policies),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**os.environ, **QUIET_THREADS},
                )
            except OSError as error:
                writer.close()
                raise EnvironmentFault(f"the solver's process cannot be started: {error}") from error
            except BaseException:
                writer.close()
                raise
        worker = _Worker(process, reader, writer)
        ready = False
        try:
            head, _ = await asyncio.wait_for(worker.read_reply(), self._start_timeout_s)
            faults = head.get("faults", {})
            if faults:
                raise PolicyFailedError(f"the solver cannot start: {'; '.join(faults[name] for name in sorted(faults))}")
            ready = True
        except TimeoutError:
            raise DeadlineError(f"the solver's process was not ready within {self._start_timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await worker.kill()
            raise EnvironmentFault(f"the solver's process ended while it started ({self._how_it_ended(code)})") from None
        finally:
            if not ready:
                await worker.kill()
        return worker

    def _how_it_ended(self, code: int) -> str:
        """An exit code in words."""
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        memory = f", perhaps out of the {self._memory_bytes >> 20} MiB that it may use" if code in (-6, -9, -11) else ""
        return f"signal {name}{memory}"
