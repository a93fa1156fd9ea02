"""Where a Redis or Valkey server is, from a URL; prints without its password."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from eplb_service.errors import InvalidInputError

DEFAULT_PORT = 6379
FORMS = "redis://[user:password@]host[:port][/database], rediss://… (TLS, ?ca=FILE), unix:///path/to/socket[?database=N]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """How to reach a server. `str()` names it for people and never shows the password."""

    host: str = ""
    port: int = DEFAULT_PORT
    socket_path: str = ""
    """Of a Unix socket; then host and port mean nothing."""
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_path: str | None = None
    """PEM file of the authority that signed the server's certificate; None = the system's."""

    def __str__(self) -> str:
        database = f" database {self.database}" if self.database else ""
        if self.socket_path:
            return f"unix://{self.socket_path}{database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}{database}"


def parse_address(url: str, *, password: str | None = None) -> StoreAddress:
    """Read a store's URL; `password` (from a file or the environment) wins over one in the URL.

    Raises InvalidInputError, which repeats nothing that may hold a password.

    >>> str(parse_address("redis://:secret@cache:6380/2"))
    'redis://cache:6380 database 2'
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInputError(f"store URL cannot be read (brackets only around an IPv6 address): use {FORMS}") from error
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise InvalidInputError(f"store URL starts with {parts.scheme or 'no scheme'!r}: use {FORMS}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unix, tls = parts.scheme == "unix", parts.scheme == "rediss"
    known = {"database", "ca"} if tls else {"database"}
    if options.keys() - known or parts.fragment:
        raise InvalidInputError(
            f"store URL has an option that {parts.scheme}:// does not know, or an unescaped character "
            f"('#', '?', '/', '@' in a password are written %23, %3F, %2F, %40): use {FORMS}"
        )
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise InvalidInputError(f"store URL has a port that is no number from 1 to 65535: use {FORMS}") from error
    path = unquote(parts.path)
    if unix and (parts.hostname or not path.startswith("/")):
        raise InvalidInputError(f"store URL unix:// names no absolute socket path: use {FORMS}")
    if not unix and not parts.hostname:
        raise InvalidInputError(f"store URL names no host: use {FORMS}")
    try:
        (parts.hostname or "").encode("idna")  # what a resolver does first; it refuses empty and long labels
    except UnicodeError as error:
        raise InvalidInputError(f"store URL names a host that is no host name: use {FORMS}") from error
    database = options.get("database") or ("" if unix else path.strip("/")) or "0"
    if not (database.isascii() and database.isdecimal()):
        raise InvalidInputError(f"store URL has a database that is no number: use {FORMS}")
    secret = password if password is not None else (unquote(parts.password) if parts.password else None)
    return StoreAddress(
        host="" if unix else parts.hostname or "",
        port=port,
        socket_path=path if unix else "",
        database=int(database),
        user=unquote(parts.username) if parts.username else None,
        password=secret,
        tls=tls,
        ca_path=options.get("ca") or None,
    )
