"""One control stream at work: what is queued goes out in order, what comes in is handed on, until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from agent.planner_client import ControlStream
from eplb_service.attach import FromAgent
from eplb_service.control import ToRank
from eplb_service.errors import EplbError, InvalidInputError

QUEUE_MESSAGES_MAX = 1024
FINISH_TIMEOUT_S = 2.0


class ControlLink:
    """Owns one `ControlStream`. on_order(order) for each message of the planner; on_sent(message) after a write."""

    def __init__(
        self,
        stream: ControlStream,
        *,
        on_order: Callable[[ToRank], None],
        on_sent: Callable[[FromAgent], None],
        log: Any,
    ) -> None:
        self._stream = stream
        self._on_order = on_order
        self._on_sent = on_sent
        self._log = log
        self._queue: asyncio.Queue[FromAgent | None] = asyncio.Queue(QUEUE_MESSAGES_MAX)
        self._overflow = asyncio.Event()
        self._read_to_end = asyncio.Event()
        self._done = asyncio.Event()

    def send(self, message: FromAgent) -> None:
        """Queue a message. A queue that is full ends the stream: a planner that does not keep up asks anew."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._overflow.set()

    async def run(self) -> str:
        """Serve the stream to its end; returns why it ended."""
        tasks = [asyncio.create_task(part) for part in (self._write(), self._read(), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = next(task for task in tasks if task in done)
            return "the call was cancelled" if ended.cancelled() else ended.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._stream.cancel()
            self._done.set()

    async def finish(self) -> None:
        """Let what is queued go out, then end the stream; bounded."""
        try:
            async with asyncio.timeout(2 * FINISH_TIMEOUT_S):
                await self._queue.put(None)
                await self._done.wait()
        except TimeoutError:
            self._overflow.set()

    async def _write(self) -> str:
        while (message := await self._queue.get()) is not None:
            try:
                await self._stream.send(message)
            except InvalidInputError as error:
                self._log.error("fact.refused", kind=type(message).__name__, reason=str(error))
            except EplbError as error:
                return str(error)
            else:
                self._on_sent(message)
        await self._stream.end_writing()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                await self._read_to_end.wait()
        return "this process ended the stream"

    async def _read(self) -> str:
        try:
            while (order := await self._stream.receive()) is not None:
                if isinstance(order, InvalidInputError):
                    self._log.error("order.refused", reason=str(order))
                else:
                    self._on_order(order)
        except EplbError as error:
            return str(error)
        finally:
            self._read_to_end.set()
        return "the planner ended the control stream"

    async def _watch(self) -> str:
        await self._overflow.wait()
        return f"the planner does not read: {QUEUE_MESSAGES_MAX} messages are waiting for it"
