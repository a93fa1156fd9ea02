"""Server logs, made up from a seed: the kind of text that no machine is sure to have."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

_HOSTS = ("web-01", "web-02", "api-7f9c", "api-b21d", "db-primary", "db-replica-2", "cache-3", "edge-fra1", "edge-iad2")
_PATHS = (
    "/",
    "/login",
    "/api/v1/users",
    "/api/v1/orders",
    "/static/app.js",
    "/healthz",
    "/metrics",
    "/search",
    "/cart",
)
_AGENTS = (
    "Mozilla/5.0 (X11; Linux x86_64)",
    "curl/8.5.0",
    "kube-probe/1.29",
    "python-requests/2.32",
    "Go-http-client/2.0",
)
_LOGGERS = (
    "scheduler",
    "worker.pool",
    "http.server",
    "auth.session",
    "queue.consumer",
    "storage.s3",
    "billing.invoice",
)
_EVENTS = (
    "connection established",
    "connection closed by peer",
    "retrying after timeout",
    "cache miss",
    "lease renewed",
    "job finished",
    "checkpoint written",
    "slow query",
    "rate limit exceeded",
    "token refreshed",
    "leader elected",
    "snapshot uploaded",
)
_STATUSES = (200, 200, 200, 200, 200, 201, 204, 301, 304, 400, 401, 403, 404, 429, 500, 502, 503)
_LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "INFO", "WARNING", "ERROR")
_UNITS = ("sshd", "systemd", "kernel", "cron", "nginx", "dockerd", "kubelet")


def _address(choose: random.Random) -> str:
    return f"10.{choose.randrange(4)}.{choose.randrange(256)}.{choose.randrange(1, 255)}"


def _access_line(choose: random.Random, now: datetime, _host: str) -> str:
    path = choose.choice(_PATHS)
    if choose.random() < 0.3:
        path += f"?id={choose.randrange(100_000)}"
    method = choose.choice(("GET", "GET", "GET", "POST", "PUT", "DELETE"))
    return (
        f'{_address(choose)} - - [{now:%d/%b/%Y:%H:%M:%S +0000}] "{method} {path} HTTP/1.1" '
        f'{choose.choice(_STATUSES)} {choose.randrange(120, 65_000)} "-" "{choose.choice(_AGENTS)}"'
    )


def _application_line(choose: random.Random, now: datetime, _host: str) -> str:
    level, logger, event = choose.choice(_LEVELS), choose.choice(_LOGGERS), choose.choice(_EVENTS)
    detail = choose.choice(
        (
            f"peer={_address(choose)}:{choose.randrange(1024, 65_536)}",
            f"job_id={choose.randrange(16**8):08x} attempt={choose.randrange(1, 6)}",
            f"took {choose.randrange(1, 9_000)} ms",
            f"shard={choose.randrange(64)} offset={choose.randrange(10**9)}",
        )
    )
    return f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} {level:<7} [{logger}] {event}: {detail}"


def _system_line(choose: random.Random, now: datetime, host: str) -> str:
    unit, pid = choose.choice(_UNITS), choose.randrange(300, 40_000)
    message = choose.choice(
        (
            f"Accepted publickey for deploy from {_address(choose)} port {choose.randrange(1024, 65_536)} ssh2",
            f"Started Session {choose.randrange(1, 9_999)} of user root.",
            f"eth0: link up, {choose.choice((1000, 10_000))}Mbps, full-duplex",
            f"Out of memory: Killed process {choose.randrange(300, 40_000)} (java)",
            f"(root) CMD (/usr/lib/sa/sa1 1 {choose.randrange(1, 9)})",
            f"Container {choose.randrange(16**12):012x} exited with code {choose.choice((0, 0, 1, 137, 143))}",
        )
    )
    return f"{now:%b %d %H:%M:%S} {host} {unit}[{pid}]: {message}"


def _key_value_line(choose: random.Random, now: datetime, host: str) -> str:
    return (
        f"ts={now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03d}Z level={choose.choice(_LEVELS).lower()} host={host} "
        f'component={choose.choice(_LOGGERS)} msg="{choose.choice(_EVENTS)}" '
        f"duration_ms={choose.randrange(1, 5_000)} trace={choose.randrange(16**16):016x}"
    )


def _json_line(choose: random.Random, now: datetime, host: str) -> str:
    return (
        f'{{"time": "{now:%Y-%m-%dT%H:%M:%SZ}", "severity": "{choose.choice(_LEVELS)}", "host": "{host}", '
        f'"status": {choose.choice(_STATUSES)}, "latency": {choose.random():.4f}, '
        f'"path": "{choose.choice(_PATHS)}", "message": "{choose.choice(_EVENTS)}"}}'
    )


def log_text(seed: int, *, max_bytes: int) -> bytes:
    """A log file of one service: one format, one clock, whole lines, at most `max_bytes` bytes."""
    choose = random.Random(f"log:{seed}")
    write_line = choose.choice((_access_line, _application_line, _system_line, _key_value_line, _json_line))
    host = choose.choice(_HOSTS)
    now = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=choose.randrange(86_400 * 365))
    lines: list[bytes] = []
    total = 0
    while True:
        now += timedelta(milliseconds=int(choose.expovariate(1 / 700)) + 1)
        line = write_line(choose, now, host).encode() + b"\n"
        if total + len(line) > max_bytes:
            return b"".join(lines)
        lines.append(line)
        total += len(line)
