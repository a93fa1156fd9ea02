"""The agent process's end of the hooks' Unix socket: frames in, frames out, each link by itself. Engines ask over it too.

Whatever a hook sends, well formed or not, at most its own link closes. Each link has a bounded send queue; a hook that does
not read what it is sent loses its link (it links again and is asked anew) rather than holding memory or other ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.frames import HEAD, Decoder, RegistrationAnswer, Welcome, encode, frame_lengths
from agent.session_events import HookMessage, LinkId
from agent.socket_path import SocketClaim, claim_socket
from eplb_service.advice import Advice, AdviceRequest
from eplb_service.control import (
    Armed,
    Committed,
    Disarmed,
    Flipped,
    Live,
    Pulse,
    Refused,
    Registration,
    Staged,
    ToRank,
)
from eplb_service.errors import InvalidInputError
from eplb_service.window.report import LoadReport

FROM_HOOK: tuple[type, ...] = (
    *(Registration, LoadReport, Live, Staged, Refused, Armed, Committed, Flipped, Disarmed, Pulse),
    AdviceRequest,
)
"""What hooks may say, and engines that move their own weights."""

LINKS_MAX = 256
QUEUE_FRAMES_MAX = 256
HEAD_BYTES_MAX = 32 << 20
PAYLOAD_BYTES_MAX = 64 << 20
"""Tighter than what a frame can be: a Live of 94 layers x 20k slots has a head of about 10 MB, a report a payload of 3 MB."""
FRAME_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2.0

ToHookMessage = ToRank | RegistrationAnswer | Welcome | Advice


@dataclass(slots=True, eq=False)
class _Link:
    """One connected hook. closing: why its link ends, "" = it does not. A None in the queue ends it after what precedes."""

    link_id: LinkId
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    queue: asyncio.Queue[ToHookMessage | None] = field(default_factory=lambda: asyncio.Queue(QUEUE_FRAMES_MAX))
    closing: str = ""
    tasks: list[asyncio.Task[str]] = field(default_factory=list)


class LinkServer:
    """Listens at a path and speaks frames with every hook that connects.

    on_message(link, message) and on_gone(link, reason) are called from the event loop; on_gone once for each link.
    on_sent(message) after a message has left for the hook.
    """

    def __init__(
        self,
        path: Path,
        *,
        release: str,
        on_message: Callable[[LinkId, HookMessage | AdviceRequest], None],
        on_gone: Callable[[LinkId, str], None],
        on_sent: Callable[[ToHookMessage], None] = lambda _message: None,
    ) -> None:
        self._path = path
        self._release = release
        self._on_message = on_message
        self._on_gone = on_gone
        self._on_sent = on_sent
        self._decoder = Decoder(FROM_HOOK)
        self._links: dict[LinkId, _Link] = {}
        self._last_id = 0
        self._claim: SocketClaim | None = None
        self._server: asyncio.Server | None = None
        self._owners: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises InvalidInputError or EnvironmentFault as `socket_path.claim_socket` does."""
        self._claim = claim_socket(self._path)
        self._server = await asyncio.start_unix_server(self._accept, sock=self._claim.listener, limit=1 << 20)

    async def close(self) -> None:
        """End every link, stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            self._end(link, "the agent process stops")
        if self._owners:
            await asyncio.wait(self._owners, timeout=CLOSE_TIMEOUT_S)
        if self._claim is not None:
            self._claim.release()

    def send(self, link_id: LinkId, message: ToHookMessage) -> None:
        """Queue a message for a hook; one whose queue is full loses its link. Unknown links are ignored."""
        link = self._links.get(link_id)
        if link is None or link.closing:
            return
        try:
            link.queue.put_nowait(message)
        except asyncio.QueueFull:
            self._end(link, f"the hook does not read: {QUEUE_FRAMES_MAX} messages are waiting for it")

    def close_link(self, link_id: LinkId, reason: str) -> None:
        """End a link after what was queued for it. Unknown links are ignored."""
        link = self._links.get(link_id)
        if link is None or link.closing:
            return
        link.closing = reason
        try:
            link.queue.put_nowait(None)
        except asyncio.QueueFull:
            self._end(link, reason)

    def _end(self, link: _Link, reason: str) -> None:
        link.closing = link.closing or reason
        for task in link.tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Own one connection from the first byte to the last."""
        task = asyncio.current_task()
        assert task is not None
        self._owners.add(task)
        task.add_done_callback(self._owners.discard)
        refusal = _peer_refusal(writer) or (f"{LINKS_MAX} hooks are linked already" if len(self._links) >= LINKS_MAX else "")
        if refusal:
            writer.close()
            return
        self._last_id += 1
        link = _Link(LinkId(self._last_id), reader, writer)
        link.queue.put_nowait(Welcome(version=self._release))
        self._links[link.link_id] = link
        link.tasks = [asyncio.create_task(self._read(link)), asyncio.create_task(self._write(link))]
        try:
            done, _ = await asyncio.wait(link.tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = next(task for task in link.tasks if task in done)
            link.closing = link.closing or ("" if ended.cancelled() else ended.result()) or "the link was closed"
            self._links.pop(link.link_id, None)
            self._on_gone(link.link_id, link.closing)
        finally:
            await self._drop(link)

    async def _drop(self, link: _Link) -> None:
        """End both directions of a link and forget it."""
        self._links.pop(link.link_id, None)
        link.closing = link.closing or "the link was closed"
        for task in link.tasks:
            task.cancel()
        await asyncio.wait(link.tasks)
        link.writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await link.writer.wait_closed()
        link.writer.transport.abort()

    async def _read(self, link: _Link) -> str:
        """Hand every frame on; returns why there are no more."""
        try:
            while True:
                # A hook may be silent for as long as its engine loads weights; a frame once begun must end.
                prefix = await link.reader.readexactly(1)
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    prefix += await link.reader.readexactly(HEAD.size - 1)
                    head_length, payload_length = _bounded(*frame_lengths(prefix))
                    head = await link.reader.readexactly(head_length)
                    payload = await link.reader.readexactly(payload_length)
                message = self._decoder.decode(head, payload)
                if link.closing:
                    continue
                self._on_message(link.link_id, message)  # type: ignore[arg-type]  # the decoder knows FROM_HOOK only
        except asyncio.IncompleteReadError as error:
            return (
                f"the hook closed the link in the middle of a frame, {len(error.partial)} bytes in"
                if error.partial
                else ("the hook closed the link")
            )
        except InvalidInputError as error:
            return f"the hook sent what is no message: {error}"
        except TimeoutError:
            return f"the hook did not finish a frame within {FRAME_TIMEOUT_S:.0f} s"
        except OSError as error:
            return f"the link failed: {error.strerror or error}"

    async def _write(self, link: _Link) -> str:
        """Send what is queued; returns why nothing more is sent."""
        try:
            while (message := await link.queue.get()) is not None:
                link.writer.write(encode(message))
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    await link.writer.drain()
                self._on_sent(message)
        except TimeoutError:
            return f"the hook did not read for {FRAME_TIMEOUT_S:.0f} s"
        except OSError as error:
            return f"the link failed: {error.strerror or error}"
        return link.closing


def _bounded(head_length: int, payload_length: int) -> tuple[int, int]:
    if head_length > HEAD_BYTES_MAX or payload_length > PAYLOAD_BYTES_MAX:
        raise InvalidInputError(
            f"frame too large for a hook: head {head_length} of at most {HEAD_BYTES_MAX} bytes,"
            f" payload {payload_length} of at most {PAYLOAD_BYTES_MAX}"
        )
    return head_length, payload_length


def _peer_refusal(writer: asyncio.StreamWriter) -> str:
    """Why a connection is not taken; empty when it is. The socket's mode says the same: this holds where modes do not."""
    peer = writer.get_extra_info("socket")
    if not hasattr(socket, "SO_PEERCRED"):
        return ""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    allowed: Sequence[int] = (os.getuid(), 0)
    return "" if uid in allowed else f"user {uid} may not link: the socket belongs to user {os.getuid()}"
