"""The thread that talks to the node's agent process over its Unix socket.

The agent process may come, go, hang or be of another release: the engine serves on, and nothing that it calls ever waits for
this thread. It connects again for ever, with growing pauses; one log line says why it is not connected and what to do, again
only when the reason changes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from typing import Protocol

from agent.frames import HEAD, Decoder, RegistrationAnswer, Welcome, encode, frame_lengths
from agent.hook.outbox import Outbox
from eplb_service.control import Arm, Disarm, Hello, Registration, Stage, ToRank
from eplb_service.errors import InvalidInputError
from eplb_service.window.report import LoadReport

CONNECT_TIMEOUT_S = 2.0
WELCOME_TIMEOUT_S = 5.0
RECONNECT_MIN_S = 0.1
READ_BYTES = 1 << 18
UNSENT_BYTES_MAX = 1 << 20

logger = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """What the link asks of the hook; called from the link's thread."""

    def registration(self) -> Registration:
        """What this rank is."""
        ...

    def on_attached(self) -> None:
        """The agent process is there; messages reach it from now on."""
        ...

    def on_message(self, message: ToRank) -> None:
        """The planner says something."""
        ...

    def on_answer(self, answer: RegistrationAnswer) -> None:
        """What the planner said to the registration."""
        ...

    def on_tick(self) -> None:
        """Called every `tick_s`, connected or not."""
        ...


class _LinkLostError(Exception):
    """This connection is over."""


class _RegistersAnewError(Exception):
    """The rank is in another group: it connects again to say so."""


class Link:
    """One hook's connection. `wake` may be called from any thread."""

    def __init__(
        self, path: str, owner: LinkOwner, outbox: Outbox, *, release: str, tick_s: float, reconnect_max_s: float
    ) -> None:
        self._path, self._owner, self._outbox = path, owner, outbox
        self._release, self._tick_s, self._reconnect_max_s = release, tick_s, reconnect_max_s
        self._decoder = Decoder((Welcome, RegistrationAnswer, Hello, Stage, Arm, Disarm))
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)  # noqa: FBT003  (positional only)
        self._wake_write.setblocking(False)  # noqa: FBT003  (positional only)
        self._closing = threading.Event()
        self._next_tick = 0.0
        self._said = ""
        self._unsent = bytearray()
        self._windows_unsent = 0
        self._received = bytearray()
        self._poked = False
        self._registers_anew = False
        self.is_connected = False
        self._thread = threading.Thread(target=self._run, name="eplb-link", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to send. Costs a system call only when the thread does not know yet."""
        if self.is_connected and not self._poked:
            self._poke()

    def register_anew(self) -> None:
        """What `LinkOwner.registration` says has changed: connect again and say it. From any thread."""
        self._registers_anew = True
        self._poke()

    def _poke(self) -> None:
        self._poked = True
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    def close(self, timeout_s: float) -> None:
        """Send what is queued, if the other side takes it, and end the thread."""
        self._closing.set()
        self._poke()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ── the link's thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        pause_s = RECONNECT_MIN_S
        while not self._closing.is_set():
            try:
                with self._connect() as connection:
                    pause_s = RECONNECT_MIN_S
                    self._serve(connection)
            except _RegistersAnewError:
                pause_s = 0.0
            except (_LinkLostError, OSError, InvalidInputError) as error:
                self._say(f"no agent process at {self._path}: {error}; start `eplb agent` on this node (the engine serves on)")
            except Exception:
                logger.exception("hook.link failed; it connects again")
            finally:
                self.is_connected = False
                self._outbox.detach(windows_unsent=self._windows_unsent)
                self._windows_unsent = 0
            self._pause(pause_s)
            pause_s = min(max(pause_s * 2, RECONNECT_MIN_S), self._reconnect_max_s)

    def _say(self, reason: str) -> None:
        if reason != self._said and not self._closing.is_set():
            self._said = reason
            logger.warning("hook.detached: %s", reason)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(self._path)
            connection.setblocking(False)  # noqa: FBT003  (positional only)
        except OSError as error:
            connection.close()
            words = {errno.ENOENT: "there is no such socket", errno.ECONNREFUSED: "nobody listens on this socket"}
            raise _LinkLostError(words.get(error.errno or 0, str(error))) from None
        return connection

    def _serve(self, connection: socket.socket) -> None:
        self._unsent.clear()
        self._received.clear()
        welcome_by = time.monotonic() + WELCOME_TIMEOUT_S
        while True:
            attached = self.is_connected
            if attached:
                self._refill()
            if self._closing.is_set() and (not attached or not self._unsent):
                return
            if self._registers_anew and attached:
                raise _RegistersAnewError
            if not attached and time.monotonic() > welcome_by:
                raise _LinkLostError(f"it took the connection but said nothing for {WELCOME_TIMEOUT_S:g} s")
            ready = self._wait(self._until_tick(), connection)
            self._drain_wake()
            if ready & select.POLLOUT:
                self._write(connection)
            if ready & ~select.POLLOUT:
                for message in self._read(connection):
                    self._on_frame(message)
            self._tick_if_due()

    def _refill(self) -> None:
        """Encode what waits, as long as the other side takes it; a slow one leaves it in the bounded outbox."""
        while len(self._unsent) < UNSENT_BYTES_MAX and (message := self._outbox.take()) is not None:
            self._unsent += encode(message)
            self._windows_unsent += isinstance(message, LoadReport)

    def _write(self, connection: socket.socket) -> None:
        try:
            sent = connection.send(self._unsent)
        except BlockingIOError:
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._windows_unsent = 0

    def _read(self, connection: socket.socket) -> list[object]:
        try:
            data = connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise _LinkLostError("it closed the connection")
        self._received += data
        messages = []
        while len(self._received) >= HEAD.size:
            head, payload = frame_lengths(bytes(self._received[: HEAD.size]))
            end = HEAD.size + head + payload
            if len(self._received) < end:
                break
            body = bytes(self._received[HEAD.size : end])
            del self._received[:end]
            messages.append(self._decoder.decode(body[:head], body[head:]))
        return messages

    def _on_frame(self, message: object) -> None:
        match message:
            case Welcome() if message.version != self._release:
                raise _LinkLostError(
                    f"it is of release {message.version}, this hook of {self._release}; install the same release on both sides"
                )
            case Welcome():
                self._registers_anew = False
                self._unsent += encode(self._owner.registration())
                self._outbox.attach()
                self.is_connected = True
                self._said = ""
                logger.info("hook.attached: agent process at %s", self._path)
                self._owner.on_attached()
            case _ if not self.is_connected:
                raise _LinkLostError(f"it sent {type(message).__name__} before Welcome")
            case RegistrationAnswer():
                self._owner.on_answer(message)
            case Hello() | Stage() | Arm() | Disarm():
                self._owner.on_message(message)

    def _pause(self, seconds: float) -> None:
        """Wait before the next try; ticks go on."""
        until = time.monotonic() + seconds
        while not self._closing.is_set() and (left := until - time.monotonic()) > 0:
            self._wait(min(left, self._until_tick()))
            self._drain_wake()
            self._tick_if_due()

    def _wait(self, timeout_s: float, connection: socket.socket | None = None) -> int:
        """Until something can be done; returns what the connection is ready for (`select` ends at 1024 open files)."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if connection is not None:
            poller.register(connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = dict(poller.poll(timeout_s * 1000.0))
        return ready.get(connection.fileno(), 0) if connection is not None else 0

    def _until_tick(self) -> float:
        return max(0.0, self._next_tick - time.monotonic())

    def _tick_if_due(self) -> None:
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self._owner.on_tick()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        self._poked = False  # after reading: what was queued under the old mark is taken before the next wait
