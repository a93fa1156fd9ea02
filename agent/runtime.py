"""The agent process: runs what the session decides, between the hooks' socket and the planner.

    hook ──frames──► LinkServer ──HookSaid──► Session ──ToPlanner──► control stream ──► planner
    hook ◄─frames─── LinkServer ◄──ToHook──── Session ◄─PlannerSaid── control stream ◄── planner
                                                 └─QueueReport─► Reporter ─► report stream ─► planner
    engine ◄─frames─► LinkServer ◄─► AdviceDesk ◄─► planner    (engines that move their own weights: no session)

One event loop; the session is called for one event at a time and its effects run before the next. It stays up while the
planner is away. A broken invariant ends it with the reason: a supervisor starts it anew, the hooks link again and hold all
the state that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.advice_desk import AdviceDesk
from agent.control_link import ControlLink
from agent.link_server import LinkServer, ToHookMessage
from agent.planner_client import PlannerClient
from agent.report_link import ReportLink
from agent.reporter import Reporter
from agent.session import Session
from agent.session_events import (
    CloseLink,
    CloseStream,
    Effect,
    Event,
    ForgetReports,
    HookGone,
    HookMessage,
    HookSaid,
    LinkId,
    Log,
    Notice,
    OpenStream,
    PlannerSaid,
    QueueReport,
    Register,
    RegisterAccepted,
    RegisterFailed,
    StreamClosed,
    StreamId,
    Tick,
    ToHook,
    ToPlanner,
)
from eplb_service import __version__
from eplb_service.advice import AdviceRequest
from eplb_service.attach import FromAgent
from eplb_service.control import Arm, Flipped, Pulse, Stage, Staged, ToRank
from eplb_service.errors import BrokenInvariantError, EnvironmentFault, EplbError, InvalidInputError
from eplb_service.failpoints import reach
from eplb_service.log import get_logger
from eplb_service.rpc.channel import TlsFiles

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent process is started with.

    planner: HOST:PORT, [IPV6]:PORT or unix:PATH. socket: where hooks link. node: name of this node, None = as the hooks say.
    ready_file: written (the process id) once hooks can link, removed at the end.
    """

    planner: str
    socket: Path
    node: str | None = None
    tls: TlsFiles | None = None
    ready_file: Path | None = None


async def run_agent(config: AgentConfig, *, stop: asyncio.Event | None = None) -> None:
    """Run until SIGTERM, SIGINT or `stop`. Raises InvalidInputError or EnvironmentFault for what it cannot start with."""
    await AgentProcess(config).run(stop or asyncio.Event())


class AgentProcess:
    """One agent process; see the module."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._log = get_logger(process="agent")
        self._client = PlannerClient(config.planner, config.tls)
        self._session = Session(node=config.node, jitter_seed=hash_of_process())
        self._reporter = Reporter()
        self._server = LinkServer(
            config.socket,
            release=__version__,
            on_message=self._on_hook_message,
            on_gone=self._on_link_gone,
            on_sent=self._on_sent_to_hook,
        )
        self._desk = AdviceDesk(self._client.advise, self._server.send, self._log)
        self._reports = ReportLink(self._client, self._reporter, self._session)
        self._streams: dict[StreamId, ControlLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[Event] = deque()
        self._busy = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._stop = asyncio.Event()
        self._fault: BaseException | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop."""
        self._stop = stop
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            await self._server.start()
            self._own(self._reports.run())
            self._write_ready_file()
            self._log.info("agent.started", planner=self._config.planner, socket=str(self._config.socket), release=__version__)
            await stop.wait()
            self._log.info("agent.stopped")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self._close()
        if self._fault is not None:
            self._log.error("agent.failed", exc_info=self._fault)
            raise BrokenInvariantError(f"the agent process met a bug and stopped: {self._fault!r}; its log has the trace")

    async def _close(self) -> None:
        """End the stream, then the links. Nobody says Gone: the engines live, and link again to the next agent process."""
        self._closing = True
        if self._config.ready_file is not None:
            self._config.ready_file.unlink(missing_ok=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(self._desk.close(), *(link.finish() for link in self._streams.values()))
                await self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _write_ready_file(self) -> None:
        path = self._config.ready_file
        if path is None:
            return
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            partial.write_text(f"{os.getpid()}\n")
            partial.replace(path)
        except OSError as error:
            raise InvalidInputError(f"ready file {path} cannot be written: {error.strerror}") from None

    # ── events in, effects out ───────────────────────────────────────────────────────────────────────────────────────────

    def dispatch(self, event: Event) -> None:
        """Take an event; what its effects cause in turn waits until they have all run."""
        if self._closing or self._fault is not None:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                now = asyncio.get_running_loop().time()
                for effect in self._session.handle(self._events.popleft(), now):
                    self._run(effect)
        except Exception as fault:  # noqa: BLE001  (a bug: stop with it rather than go on in an unknown state)
            self._fault = fault
            self._events.clear()
            self._stop.set()
        finally:
            self._busy = False
        self._reports.wake()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_at_s = self._session.due_at_s()
        self._timer = None
        if due_at_s is not None and self._fault is None:
            self._timer = asyncio.get_running_loop().call_at(due_at_s, self.dispatch, Tick())

    def _run(self, effect: Effect) -> None:
        match effect:
            case ToHook(link=link, message=message):
                self._server.send(link, message)
            case CloseLink(link=link, reason=reason):
                self._server.close_link(link, reason)
            case Log(event=event, level=level, fields=fields):
                getattr(self._log, level)(event, **fields)
            case Notice(sentence=sentence):
                sys.stderr.write(f"eplb agent: {sentence}\n")
                sys.stderr.flush()
            case QueueReport(report=report):
                self._reporter.offer(report)
            case ForgetReports(rank_id=rank_id):
                self._reporter.forget(rank_id)
            case _:
                self._run_planner_effect(effect)

    def _run_planner_effect(self, effect: Register | OpenStream | CloseStream | ToPlanner) -> None:
        match effect:
            case Register():
                self._own(self._register(effect))
            case OpenStream(stream=stream):
                link = ControlLink(
                    self._client.control(),
                    on_order=self._planner_said(stream),
                    on_sent=self._on_sent_to_planner,
                    log=self._log,
                )
                self._streams[stream] = link
                self._own(self._follow(stream, link))
            case CloseStream(stream=stream):
                closing = self._streams.pop(stream, None)
                if closing is not None:
                    self._own(closing.finish())
            case ToPlanner(stream=stream, message=message):
                if isinstance(message, Pulse):
                    lost = self._reporter.dropped(message.sender.rank_id)
                    message = replace(message, windows_dropped=message.windows_dropped + lost)
                self._streams[stream].send(message)

    def _planner_said(self, stream: StreamId) -> Callable[[ToRank], None]:
        return lambda order: self.dispatch(PlannerSaid(stream, order))

    async def _follow(self, stream: StreamId, link: ControlLink) -> None:
        reason = await link.run()
        if self._streams.pop(stream, None) is not None:
            self._own(self._client.connect_anew())
            self.dispatch(StreamClosed(stream, reason))

    async def _register(self, effect: Register) -> None:
        try:
            await self._client.register(effect.registration)
        except EnvironmentFault as away:
            self.dispatch(RegisterFailed(effect.attempt, refused=False, reason=str(away)))
        except EplbError as refusal:
            self.dispatch(RegisterFailed(effect.attempt, refused=True, reason=str(refusal)))
        else:
            self.dispatch(RegisterAccepted(effect.attempt))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that this process owns: a failure of it that nobody expected ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()
            self._stop.set()

    # ── the hooks' socket, and failpoints ────────────────────────────────────────────────────────────────────────────────

    def _on_hook_message(self, link: LinkId, message: HookMessage | AdviceRequest) -> None:
        if isinstance(message, AdviceRequest):
            self._desk.ask(link, message)
            return
        if isinstance(message, Flipped):
            reach("agent.flipped.received")
        self.dispatch(HookSaid(link, message))

    def _on_link_gone(self, link: LinkId, reason: str) -> None:
        self._desk.gone(link)
        self.dispatch(HookGone(link, reason))

    def _on_sent_to_hook(self, message: ToHookMessage) -> None:
        if isinstance(message, Stage):
            reach("agent.stage.forwarded")
        elif isinstance(message, Arm):
            reach("agent.arm.forwarded")

    def _on_sent_to_planner(self, message: FromAgent) -> None:
        if isinstance(message, Staged):
            reach("agent.staged.forwarded")


def hash_of_process() -> int:
    """A number that differs between the processes of a fleet."""
    return hash((socket.gethostname(), os.getpid()))
