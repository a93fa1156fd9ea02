"""How a server is talked to: the client, its bounds in time, and scripts by their digest."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.connection import (
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from eplb_service.errors import InvalidInputError
from eplb_service.store.address import StoreAddress

Argument = str | bytes | int
_CONNECTIONS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTimes:
    """Bounds on one operation, in seconds: everything in it, one try, and the pauses between tries."""

    operation_s: float = 6.0
    try_s: float = 1.5
    pause_first_s: float = 0.02
    pause_max_s: float = 0.5

    def pause_s(self, num_tries: int, jitter: float) -> float:
        """Pause after so many failed tries: doubled each time, then scaled by (1 + jitter) / 2 for jitter in [0, 1)."""
        doubled: float = self.pause_first_s * 2.0 ** min(num_tries - 1, 30)
        return min(self.pause_max_s, doubled) * (1.0 + jitter) / 2.0


class Script:
    """A Lua script by its digest; sent whole when the server does not know it (yet, or after a restart)."""

    def __init__(self, name: str) -> None:
        self._text = (resources.files("eplb_service.store") / "lua" / f"{name}.lua").read_text("utf-8")
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run it; errors are redis-py's."""
        with contextlib.suppress(redis_errors.NoScriptError):
            return await send(client, "EVALSHA", self._digest, len(keys), *keys, *arguments)
        return await send(client, "EVAL", self._text, len(keys), *keys, *arguments)


async def send(client: Redis, *arguments: Argument) -> Any:
    """Send one command; errors are redis-py's."""
    return await client.execute_command(*arguments)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped


def open_client(address: StoreAddress, times: StoreTimes) -> Redis:
    """A client that connects when first used, within `times.try_s`, and never retries by itself."""
    options: dict[str, Any] = {
        "db": address.database,
        "username": address.user,
        "password": address.password,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": times.try_s,
        "socket_connect_timeout": times.try_s,
        "protocol": 2,
    }
    kind: type[Any] = Connection
    if address.socket_path:
        kind = UnixDomainSocketConnection
        options["path"] = address.socket_path
    else:
        options |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if address.tls:
        kind = SSLConnection
        options["ssl_ca_certs"] = _readable(address.ca_path)
    pool = BlockingConnectionPool(max_connections=_CONNECTIONS_MAX, timeout=times.try_s, connection_class=kind, **options)
    return Redis(connection_pool=pool)


def _readable(ca_path: str | None) -> str | None:
    if ca_path is not None:
        try:
            Path(ca_path).read_bytes()
        except OSError as error:
            sentence = f"certificate file {ca_path!r} of the store cannot be read: {error.strerror}"
            raise InvalidInputError(sentence) from error
    return ca_path
