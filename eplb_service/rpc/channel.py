"""Channels to a planner: addresses, options, TLS. The server's options are here too, since the two must agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from eplb_service.control import PLANNER_PORT
from eplb_service.errors import InvalidInputError

MESSAGE_BYTES_MAX = 64 << 20
"""Largest message: a Live of 94 layers x 20k slots is 8 MB, a report of 8 sub-windows, 94 layers, 512 experts 3 MB."""

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
RECONNECT_FIRST_MS = 100
RECONNECT_MAX_MS = 5_000
CONNECT_TIMEOUT_MS = 5_000

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
    # By its name a pause, in gRPC core the time that one try to connect may take, handshakes included.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
    # Retries are ours: gRPC's own would hide from the session that a call was lost.
    ("grpc.enable_retries", 0),
    # A planner that comes back is another process: its channel must not be one that another client of this process holds.
    ("grpc.use_local_subchannel_pool", 1),
    # The planner is inside the cluster: a proxy set for the outside world does not apply.
    ("grpc.enable_http_proxy", 0),
]
"""For `grpc.aio` channels to a planner."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    # Without these a server answers our keepalive pings with GOAWAY "too_many_pings".
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a second planner on the same port must fail, not share it
]
"""For the planner's `grpc.aio` server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a TLS client. ca: who signed the planner's certificate; certificate and key: ours, for mutual TLS."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None


_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,6}))?")


def parse_target(address: str) -> str:
    """A planner's address as gRPC takes it: HOST:PORT, HOST (the default port), [IPV6]:PORT or unix:PATH.

    Raises InvalidInputError for anything else.

    >>> parse_target("planner"), parse_target("[::1]:7470"), parse_target("unix:/run/eplb.sock")
    ('planner:7470', '[::1]:7470', 'unix:/run/eplb.sock')
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    match = _HOST_PORT.fullmatch(address)
    if match is None:
        raise InvalidInputError(f"planner address {address[:200]!r} is not HOST:PORT, [IPV6]:PORT or unix:PATH")
    port = int(match["port"]) if match["port"] else PLANNER_PORT
    if not 1 <= port <= 65535:
        raise InvalidInputError(f"planner address {address[:200]!r}: port {port} is out of range; expected 1 to 65535")
    return f"{match['host']}:{port}"


def client_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials from PEM files. Raises InvalidInputError for a file that cannot be read, or a certificate without key."""
    if (tls.certificate is None) != (tls.key is None):
        raise InvalidInputError("a TLS client certificate and its key go together; give both or neither")
    return grpc.ssl_channel_credentials(_pem(tls.ca, "CA"), _pem(tls.key, "key"), _pem(tls.certificate, "certificate"))


def server_credentials(certificate: Path | None, key: Path | None, client_ca: Path | None) -> grpc.ServerCredentials | None:
    """Credentials of a planner's port; None without a certificate: then it is served in the clear.

    Raises InvalidInputError for a file that cannot be read, a certificate without key, a client CA without either.
    """
    if (certificate is None) != (key is None):
        raise InvalidInputError("listen.tls_cert and listen.tls_key go together; give both or neither")
    chain, secret, roots = _pem(certificate, "certificate"), _pem(key, "key"), _pem(client_ca, "client CA")
    if chain is None or secret is None:
        if roots is not None:
            raise InvalidInputError("listen.tls_client_ca needs TLS: give listen.tls_cert and listen.tls_key too")
        return None
    return grpc.ssl_server_credentials([(secret, chain)], roots, require_client_auth=roots is not None)


def _pem(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"TLS {what} file {path} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise InvalidInputError(
            f"TLS {what} file {path} of {len(content)} bytes holds no PEM block; expected -----BEGIN …-----"
        )
    return content


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """A channel to the planner at `address`; it connects at the first call. Raises InvalidInputError as `parse_target`."""
    target = parse_target(address)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    options: list[tuple[str, int | str]] = list(CLIENT_OPTIONS)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, client_credentials(tls), options=options)
