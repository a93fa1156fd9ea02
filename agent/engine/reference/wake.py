"""How a rank with new work rouses ranks that wait: an idle group runs no steps, so nobody is inside a collective to hear it.

One TCP connection between every two ranks carries two kinds of note. `WAKE n` says that the sender leaves its n-th idle
period; numbers keep a note that two ranks crossed from ending the next period too. `STOPPING` says that the sender was told
to stop and has no work; once all have said so, all leave, and nobody is left behind in a collective.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from enum import IntEnum

from torch._C._distributed_c10d import Store

from eplb_service.errors import DeadlineError, EnvironmentFault

_NOTE = struct.Struct("<BxxxxxxxQ")
_HELLO = struct.Struct("<I")


class _Kind(IntEnum):
    WAKE = 1
    STOPPING = 2


class WakeMesh:
    """Connections of one rank to all others of its group."""

    def __init__(self, store: Store, *, position: int, num_ranks: int, host: str, timeout_s: float) -> None:
        """Connect to every other rank; addresses go through the group's store.

        Raises:
            DeadlineError: a rank did not connect in time: names how many are missing.
        """
        self._num_ranks = num_ranks
        self._heard = 0
        self._stopping: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, socket.socket] = {}
        self._partial: dict[int, bytes] = {}
        try:
            self._connect(store, position, host, time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when a note has come, for a selector (on Linux an epoll descriptor can be waited for)."""
        descriptor = self._selector.fileno()
        return int(descriptor)

    def wake(self, period: int) -> None:
        """Tell all ranks that this one leaves its idle period number `period`."""
        self._tell(_Kind.WAKE, period)

    def stopping(self, position: int) -> None:
        """Tell all ranks that this one was told to stop and has no work."""
        self._stopping.add(position)
        self._tell(_Kind.STOPPING, 0)

    def woken(self, period: int) -> bool:
        """Whether some rank has left idle period number `period`."""
        return self._heard >= period

    @property
    def all_stopping(self) -> bool:
        """Whether every rank has said that it stops."""
        return len(self._stopping) == self._num_ranks

    def read(self) -> None:
        """Take in the notes that have come.

        Raises:
            EnvironmentFault: a rank that did not say that it stops is gone.
        """
        for key, _ in self._selector.select(0):
            peer: int = key.data
            try:
                chunk = self._peers[peer].recv(4096)
            except BlockingIOError:
                continue
            except ConnectionError:
                chunk = b""
            if not chunk:
                self._selector.unregister(self._peers[peer])
                if peer in self._stopping:
                    continue
                raise EnvironmentFault(f"the rank at position {peer} is gone (its connection closed while the group was idle)")
            data = self._partial.get(peer, b"") + chunk
            whole = len(data) - len(data) % _NOTE.size
            for kind, value in _NOTE.iter_unpack(data[:whole]):
                if kind == _Kind.WAKE:
                    self._heard = max(self._heard, value)
                else:
                    self._stopping.add(peer)
            self._partial[peer] = data[whole:]

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for connection in self._peers.values():
            connection.close()

    def _connect(self, store: Store, position: int, host: str, deadline: float) -> None:
        num_ranks = self._num_ranks
        with socket.create_server((host, 0), backlog=num_ranks) as listener:
            store.set(f"wake/{position}", f"{host}:{listener.getsockname()[1]}")
            for peer in range(position):
                address, _, port = store.get(f"wake/{peer}").decode().rpartition(":")
                connection = socket.create_connection((address, int(port)), timeout=_left(deadline, num_ranks, self._peers))
                connection.sendall(_HELLO.pack(position))
                self._add(peer, connection)
            while len(self._peers) < num_ranks - 1:
                listener.settimeout(_left(deadline, num_ranks, self._peers))
                try:
                    connection, _ = listener.accept()
                    connection.settimeout(_left(deadline, num_ranks, self._peers))
                    (peer,) = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
                except TimeoutError:
                    continue
                self._add(peer, connection)

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[peer] = connection
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _tell(self, kind: _Kind, value: int) -> None:
        note = _NOTE.pack(kind, value)
        for peer, connection in self._peers.items():
            try:
                connection.sendall(note)
            except OSError as error:
                if peer not in self._stopping:
                    raise EnvironmentFault(f"the rank at position {peer} cannot be reached ({error})") from error


def _left(deadline: float, num_ranks: int, peers: dict[int, socket.socket]) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError(
            f"{num_ranks - 1 - len(peers)} of {num_ranks - 1} other ranks did not connect in time;"
            " look at their output for why they did not start"
        )
    return left
