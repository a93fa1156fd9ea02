"""The clients of one rank: takes their messages between steps, and never waits for them."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.engine.reference.messages import TO_ENGINE, FrameStream, ToEngine
from eplb_service.errors import EnvironmentFault, InvalidInputError

_LOG = logging.getLogger(__name__)
_CLIENTS_MAX = 32


class HasFileno(Protocol):
    """Whatever a selector can wait for."""

    def fileno(self) -> int:
        """Descriptor."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message of a client; None: the client is gone, and nobody waits for its requests."""

    client: int
    message: ToEngine | None


class FrontDoor:
    """A listening Unix socket, the clients that came through it, and whatever else the rank waits for while it is idle."""

    def __init__(self, path: Path, *, output_bytes_max: int) -> None:
        """Listen at `path`. Raises EnvironmentFault when that cannot be done."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
            self._listener.listen(_CLIENTS_MAX)
        except OSError as error:
            self._listener.close()
            raise EnvironmentFault(
                f"cannot listen at {path} ({error}); use a short run directory that exists and is not in use by another fleet"
            ) from error
        self._listener.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._output_bytes_max = output_bytes_max
        self._clients: dict[int, FrameStream] = {}
        self._next_client = 0

    def watch(self, source: HasFileno, callback: Callable[[], None]) -> None:
        """Call `callback` from `take` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: HasFileno) -> None:
        """Watch it no longer; to be called before it is closed."""
        self._selector.unregister(source)

    def paused(self) -> frozenset[int]:
        """Clients that do not read what they are sent: their requests rest until they do."""
        return frozenset(client for client, stream in self._clients.items() if stream.outgoing_bytes > self._output_bytes_max)

    def send(self, client: int, message: object) -> None:
        """Send to a client that is still there; what it does not read at once waits."""
        stream = self._clients.get(client)
        if stream is None:
            return
        try:
            stream.send(message)
        except ConnectionError:
            return  # the next `take` sees the end of the connection and says so
        self._watch_client(client, stream)

    def take(self, *, timeout_s: float | None) -> Sequence[Arrival]:
        """What came from clients, after waiting up to `timeout_s` (None: as long as it takes) for anything at all.

        Returns early, perhaps with nothing, when something else that is watched is readable.
        """
        arrivals: list[Arrival] = []
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, int):
                arrivals.extend(self._serve(key.data, events))
            else:
                key.data()
        return arrivals

    def close(self) -> None:
        """Give queued output a last push, and close everything."""
        for stream in self._clients.values():
            try:
                stream.flush()
            except ConnectionError:
                _LOG.debug("a client left before its last messages")
            stream.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if len(self._clients) >= _CLIENTS_MAX:
            _LOG.warning("refused a client: %d are connected, of at most %d", len(self._clients), _CLIENTS_MAX)
            connection.close()
            return
        client, self._next_client = self._next_client, self._next_client + 1
        stream = FrameStream(connection, TO_ENGINE)
        self._clients[client] = stream
        self._selector.register(stream, selectors.EVENT_READ, client)

    def _serve(self, client: int, events: int) -> list[Arrival]:
        stream = self._clients[client]
        try:
            if events & selectors.EVENT_WRITE:
                stream.flush()
                self._watch_client(client, stream)
            if not events & selectors.EVENT_READ:
                return []
            return [Arrival(client, message) for message in stream.receive() if isinstance(message, ToEngine)]
        except ConnectionError:
            pass
        except InvalidInputError as error:
            _LOG.warning("closed the connection of a client: %s", error)
        self._selector.unregister(stream)
        stream.close()
        del self._clients[client]
        return [Arrival(client, None)]

    def _watch_client(self, client: int, stream: FrameStream) -> None:
        """Wait for room in the socket only while something waits to go out."""
        writing = selectors.EVENT_WRITE if stream.outgoing_bytes else 0
        self._selector.modify(stream, selectors.EVENT_READ | writing, client)
