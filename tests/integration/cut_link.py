"""A link between two parts that a test can cut, hold and restore: a small proxy for TCP and Unix sockets.

`cut()`      every connection ends with a reset, new ones are refused: a host that is gone, a firewall that rejects
`hold()`     connections stand and nothing passes, new ones are taken and hear nothing: packets that are dropped
`restore()`  as before; what was under way when the link was held arrives now, late

Each of them returns when it holds: no byte passes after `cut` or `hold`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

ORDER_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 1.0
BUFFER_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 16
BACKLOG = 64

RESET = struct.pack("ii", 1, 0)
"""`SO_LINGER` by which a TCP socket's close is a reset."""


class LinkState(StrEnum):
    """What passes over a link."""

    OPEN = "open"
    HELD = "held"
    CUT = "cut"


@dataclass(slots=True, eq=False)
class _Side:
    """One end of a connection. unsent: bytes that it has not taken yet.

    ended: nothing more comes for it; once it has taken what is left, both ends are closed (who speaks here never half-closes).
    finished: it says nothing more itself.
    """

    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    peer: _Side | None = None
    ended: bool = False
    finished: bool = False


class CutLink:
    """Listens at `listen` and passes on to `target`; each is HOST:PORT or unix:PATH."""

    def __init__(self, listen: str, target: str) -> None:
        self.listen, self.target = listen, target
        self.state = LinkState.CUT
        self.num_connections = 0
        self._wanted = LinkState.OPEN
        self._closing = False
        self._reached = threading.Event()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._sides: list[_Side] = []
        self._unconnected: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name=f"link {listen}", daemon=True)
        self._thread.start()
        self._order(LinkState.OPEN)

    def cut(self) -> None:
        """End every connection and refuse new ones."""
        self._order(LinkState.CUT)

    def hold(self) -> None:
        """Let nothing pass, and end nothing."""
        self._order(LinkState.HELD)

    def restore(self) -> None:
        """Let everything pass again."""
        self._order(LinkState.OPEN)

    def close(self) -> None:
        """End the proxy; its socket is gone."""
        self._closing = True
        self._poke()
        self._thread.join(ORDER_TIMEOUT_S)
        assert not self._thread.is_alive(), f"the proxy of {self.listen} does not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, state: LinkState) -> None:
        with self._lock:
            self._reached.clear()
            self._wanted = state
            self._poke()
            assert self._reached.wait(ORDER_TIMEOUT_S), f"the proxy of {self.listen} is not {state} after {ORDER_TIMEOUT_S} s"

    def _poke(self) -> None:
        self._wake_write.send(b"\0")

    # ── the proxy's thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing:
            ready = self._selector.select()
            if any(key.fileobj is self._wake_read for key, _ in ready):
                self._obey()
                continue  # what was ready before may not be any more
            for key, events in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Side) and key.data in self._sides:
                    self._serve(key.data, events)
        self._end_all()
        self._stop_listening()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        wanted = self._wanted
        if wanted is not self.state and not self._closing:
            self.state = wanted
            if wanted is LinkState.CUT:
                self._stop_listening()
                self._end_all()
            elif self._listener is None:
                self._start_listening()
            for side in list(self._sides):
                self._watch(side)
            if wanted is LinkState.OPEN:
                waiting, self._unconnected = self._unconnected, []
                for connection in waiting:
                    self._connect(connection)
        self._reached.set()

    def _start_listening(self) -> None:
        self._listener = listening_socket(self.listen)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            if self.listen.startswith("unix:"):
                Path(self.listen.removeprefix("unix:")).unlink(missing_ok=True)

    def _end_all(self) -> None:
        for side in list(self._sides):
            self._end(side)
        for connection in self._unconnected:
            _reset(connection)
        self._unconnected.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if self.state is LinkState.HELD:
                self._unconnected.append(connection)
            else:
                self._connect(connection)

    def _connect(self, near: socket.socket) -> None:
        try:
            far = connected_socket(self.target)
        except OSError:
            _reset(near)  # nobody listens behind us: as if we were not there
            return
        sides = _Side(near), _Side(far)
        sides[0].peer, sides[1].peer = sides[1], sides[0]
        self.num_connections += 1
        for side in sides:
            side.connection.setblocking(False)
            self._sides.append(side)
            self._selector.register(side.connection, selectors.EVENT_READ, side)

    def _serve(self, side: _Side, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and side.unsent:
                del side.unsent[: side.connection.send(side.unsent)]
            if events & selectors.EVENT_READ and not side.finished:
                self._read(side)
        except BlockingIOError:
            pass
        except OSError:
            self._end(side)
            return
        assert side.peer is not None
        for one in (side, side.peer):
            if one.ended and not one.unsent:
                self._end(one)
                return
        self._watch(side)
        self._watch(side.peer)

    def _read(self, side: _Side) -> None:
        assert side.peer is not None
        data = side.connection.recv(READ_BYTES)
        if data:
            side.peer.unsent += data
        else:
            side.finished, side.peer.ended = True, True

    def _watch(self, side: _Side) -> None:
        """What is waited for: nothing while held, no more reading while the other end does not take it."""
        assert side.peer is not None
        events = 0
        if self.state is LinkState.OPEN:
            if not side.finished and len(side.peer.unsent) < BUFFER_BYTES_MAX:
                events |= selectors.EVENT_READ
            if side.unsent:
                events |= selectors.EVENT_WRITE
        registered = side.connection in self._selector.get_map()
        if events and registered:
            self._selector.modify(side.connection, events, side)
        elif events:
            self._selector.register(side.connection, events, side)
        elif registered:
            self._selector.unregister(side.connection)

    def _end(self, side: _Side) -> None:
        for one in (side, side.peer):
            if one is not None and one in self._sides:
                self._sides.remove(one)
                if one.connection in self._selector.get_map():
                    self._selector.unregister(one.connection)
                _reset(one.connection)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()


def listening_socket(address: str) -> socket.socket:
    """Listens at HOST:PORT or unix:PATH, whatever was there before."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        Path(path).unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX)
        made.bind(path)
        Path(path).chmod(0o600)
    else:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, _, port = address.rpartition(":")
        made.bind((host, int(port)))
    made.listen(BACKLOG)
    return made


def connected_socket(address: str) -> socket.socket:
    """A connection to HOST:PORT or unix:PATH. Raises OSError when nobody is there."""
    if address.startswith("unix:"):
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(CONNECT_TIMEOUT_S)
        try:
            made.connect(address.removeprefix("unix:"))
        except OSError:
            made.close()
            raise
        return made
    host, _, port = address.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
