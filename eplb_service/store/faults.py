"""What redis-py's exceptions mean for people: one sentence each, and whether another try may help."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from redis import exceptions as redis_errors

from eplb_service.store.address import StoreAddress

VERSION_LEAST = (7, 0)
"""Redis 7.0 or any Valkey: the scripts declare their flags, which older servers cannot read."""

# Server error codes that another try cannot cure, and what to do about each.
_FINAL_CODES = {
    "OOM": "has no memory left (maxmemory is reached): raise maxmemory or free keys; with an eviction policy the store's keys "
    "may be lost, so use noeviction",
    "MISCONF": "cannot save to its disk and refuses writes: free space or fix its directory, its log says which",
    "NOPERM": "does not let this user run the commands needed: grant +@all on keys ~eplb:*, or at least INFO, EVAL, EVALSHA, "
    "SADD, SMEMBERS, LRANGE and what the scripts use",
    "NOREPLICAS": "refuses writes because too few replicas are connected: see min-replicas-to-write",
    "READONLY": "is a read-only replica: give the address of the primary",
}
# redis-py strips the code from the errors that it has a class for.
_CODE_BY_CLASS: dict[type[BaseException], str] = {
    redis_errors.OutOfMemoryError: "OOM",
    redis_errors.NoPermissionError: "NOPERM",
    redis_errors.ReadOnlyError: "READONLY",
}
_ANSWERS = (
    redis_errors.AuthenticationError,
    redis_errors.AuthorizationError,
    redis_errors.BusyLoadingError,
    redis_errors.ResponseError,
)
_CLUSTER_CODES = ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a try failed. `sentence` begins with the server's address and holds no password."""

    sentence: str
    final: bool
    """True when trying again cannot help."""
    timed_out: bool = False


def explain(error: BaseException, address: StoreAddress) -> Fault:
    """Say what an exception of redis-py, the socket or a deadline means."""
    # Refusals while a connection is being set up come wrapped in a plain ConnectionError.
    error = next((cause for cause in _chain(error) if isinstance(cause, _ANSWERS)), error)
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        return Fault(_password(error, address), final=True)
    if isinstance(error, redis_errors.BusyLoadingError):
        return Fault(f"store {address} is still loading its data: wait until it has read its files", final=False)
    if isinstance(error, TimeoutError | redis_errors.TimeoutError):
        tls = ", and that it speaks TLS" if address.tls else ""
        sentence = f"store {address} did not answer in time: check its load and the network{tls}"
        return Fault(sentence, final=False, timed_out=True)
    if isinstance(error, redis_errors.ResponseError):
        return _answered(error, address)
    tls_error = next((cause for cause in _chain(error) if isinstance(cause, ssl.SSLError)), None)
    if tls_error is not None:
        return Fault(_tls(tls_error, address), final=True)
    reason = _root_reason(error)
    if address.socket_path:
        return Fault(f"store {address} is unreachable ({reason}): is the server running, and its socket ours?", final=False)
    return Fault(
        f"store {address} is unreachable ({reason}): check that the server runs, that host {address.host!r} and port "
        f"{address.port} are right, that a firewall lets them through, and whether it wants TLS (rediss://)",
        final=False,
    )


def too_old(version: str, address: StoreAddress) -> str:
    """The server cannot run the scripts."""
    least = ".".join(map(str, VERSION_LEAST))
    return f"store {address} is Redis {version}, the least version is {least} (or any Valkey): upgrade it"


def replica_of(primary: str, address: StoreAddress) -> str:
    """The server is not the one to write to."""
    return f"store {address} is a read-only replica of {primary}: give the address of the primary"


def cluster(address: StoreAddress) -> str:
    """The server is a shard of a cluster."""
    return f"store {address} is a node of a Redis Cluster, which is not supported: give a single server"


def _password(error: BaseException, address: StoreAddress) -> str:
    if address.password is None:
        return f"store {address} wants a password (NOAUTH): put it into the URL, redis://:PASSWORD@host"
    if "without any password" in str(error) or "no password is set" in str(error):
        return f"store {address} has no password set, but one was given: leave it out or set it there (requirepass)"
    user = f"user {address.user!r}" if address.user else "the default user"
    return f"store {address} refused the password of {user} (WRONGPASS): check user and password"


def _answered(error: redis_errors.ResponseError, address: StoreAddress) -> Fault:
    text = str(error)
    code = _CODE_BY_CLASS.get(type(error), text.partition(" ")[0])
    if code in _FINAL_CODES:
        return Fault(f"store {address} {_FINAL_CODES[code]}", final=True)
    if isinstance(error, redis_errors.AskError) or code in _CLUSTER_CODES:
        return Fault(cluster(address), final=True)
    if "DB index is out of range" in text or "SELECT is not allowed" in text:
        return Fault(f"store {address} has no database {address.database}: use one below its `databases` (16)", final=True)
    if code in ("BUSY", "MASTERDOWN", "TRYAGAIN"):
        return Fault(f"store {address} is busy ({code}): another script runs, or it waits for its primary", final=False)
    return Fault(f"store {address} answered {text[:200]!r}: check that it is a Redis or Valkey server", final=True)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _tls(error: ssl.SSLError, address: StoreAddress) -> str:
    reason = getattr(error, "verify_message", "") or error.reason or "TLS failed"
    return (
        f"store {address} failed the TLS handshake ({reason}): check that it speaks TLS, that its certificate names "
        f"{address.host!r}, and that ?ca=FILE holds its authority"
    )


def _root_reason(error: BaseException) -> str:
    """The innermost reason (`Connection refused`), which names no credentials."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    text = str(error)
    return "connection closed by the server" if "closed" in text.lower() else text[:120] or type(error).__name__
