"""A store in a Redis or Valkey server.

Keys of a deployment share the hash tag `{deployment}`, so that each script touches one slot:

    eplb:{d}:fence          hash   epoch, owner, expires_ms, lease_ms, deleted_version
    eplb:{d}:values         hash   name -> value
    eplb:{d}:versions       hash   name -> version
    eplb:{d}:names:DIR/     zset   names of a directory, scored by their number
    eplb:{d}:journal        list   the last JOURNAL_KEPT entries
    eplb:{d}:replies        hash   "ID fingerprint", "ID answer" of the last REPLIES_KEPT requests
    eplb:{d}:reply_order    list   their ids, oldest first
    eplb:deployments        set    every deployment that was led

Changes are Lua scripts, which a server runs one at a time and keeps whole in its log. redis-py's own retries are off: each
operation here has one deadline, within which tries that cannot have been refused for good are repeated with back-off.
A try whose answer is lost may have been applied; the repeat carries the same write id, so it is answered, not applied again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from eplb_service.errors import BrokenInvariantError, DeadlineError, StoreUnavailableError
from eplb_service.ids import DeploymentId, Epoch
from eplb_service.store import faults
from eplb_service.store.address import StoreAddress, parse_address
from eplb_service.store.base import (
    EPOCH_MAX,
    JOURNAL_KEPT,
    REPLIES_KEPT,
    DeploymentIds,
    Document,
    JournalEntries,
    Leadership,
    Listing,
    Write,
    check_deployment,
    check_lead,
    check_limit,
    check_listing,
    check_names,
    check_write,
    directory_of,
    fingerprint_of,
    is_deployment,
    number_of,
)
from eplb_service.store.connection import Argument, Script, StoreTimes, open_client, send
from eplb_service.store.refusals import (
    conflicting_versions,
    epochs_used_up,
    fenced_renew,
    fenced_write,
    lead_held,
    reused_write_id,
)

T = TypeVar("T")
_DEPLOYMENTS = "eplb:deployments"
_FIXED_KEYS = ("fence", "values", "versions", "replies", "reply_order", "journal")


class RedisStore:
    """A `Store` on a server that someone else runs; see `StoreAddress` for the forms of the URL.

    `jitter` gives numbers in [0, 1) that spread the retries of planners. One event loop at a time.
    """

    def __init__(
        self,
        url: str,
        *,
        password: str | None = None,
        times: StoreTimes | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.use(url, password=password)
        self._times = times or StoreTimes()
        self._jitter = jitter
        self._client: Redis | None = None
        self._scripts = {name: Script(name) for name in ("lead", "renew", "resign", "write", "read", "list")}
        self._failing: str | None = None

    def use(self, url: str, *, password: str | None = None) -> None:
        """Set the server that the next `start` connects to."""
        self.address: StoreAddress = parse_address(url, password=password)
        self._log = structlog.get_logger("eplb.store").bind(store=str(self.address))

    async def start(self) -> None:
        """Connect and prove that the server is one that we can write to; see `Store.start`."""
        if self._client is None:
            self._client = open_client(self.address, self._times)
        try:
            info = await self._call("start", lambda client: send(client, "INFO"))
            self._check_server(info)
        except BaseException:
            await self.close()
            raise
        self._log.info("store.connected", server=_server_name(info))

    async def close(self) -> None:
        """Close the connections; see `Store.close`."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose(close_connection_pool=True)

    async def ping(self) -> str:
        """Ask the server who it is; see `Store.ping`."""
        info = await self._call("ping", lambda client: send(client, "INFO", "server"))
        return f"{_server_name(info)} at {self.address}"

    async def deployments(self) -> DeploymentIds:
        """Every deployment that was ever led; see `Store.deployments`."""
        members = await self._call("deployments", lambda client: send(client, "SMEMBERS", _DEPLOYMENTS))
        names = sorted(DeploymentId(member.decode(errors="replace")) for member in members)
        known = [name for name in names if is_deployment(name)]
        if len(known) < len(names):
            odd = [name[:80] for name in names if name not in known][:5]
            self._log.error("deployments.odd", names=odd, advice=f"set {_DEPLOYMENTS} holds names that no planner wrote")
        return known

    async def lead(self, deployment: DeploymentId, *, owner: str, lease_s: float, floor: int, write_id: str) -> Leadership:
        """Take the lead; see `Store.lead`."""
        check_lead(owner, lease_s, floor, write_id)
        keys = _keys(deployment, "fence", "replies", "reply_order")
        fingerprint = f"lead {floor} {owner}"
        arguments: list[Argument] = [write_id, fingerprint, owner, _ms(lease_s), floor, REPLIES_KEPT, EPOCH_MAX]
        verdict, _, rest = (await self._run_script("lead", keys, arguments)).decode().partition(" ")
        if verdict == "led":
            # Registered only after the lead is held, and idempotent: a set in another slot than the deployment's.
            await self._call("lead", lambda client: send(client, "SADD", _DEPLOYMENTS, deployment))
            return Leadership(deployment=deployment, epoch=Epoch(int(rest)), owner=owner, lease_s=lease_s)
        if verdict == "held":
            epoch, left_ms, holder = rest.split(" ", 2)
            raise lead_held(holder, int(epoch), int(left_ms) / 1000)
        if verdict == "exhausted":
            raise epochs_used_up(int(rest))
        raise _refused(verdict, write_id)

    async def renew(self, leadership: Leadership) -> None:
        """Extend the lease; see `Store.renew`."""
        arguments: list[Argument] = [leadership.epoch, leadership.owner, _ms(leadership.lease_s)]
        answer = await self._run_script("renew", _keys(leadership.deployment, "fence"), arguments)
        verdict, _, rest = answer.decode().partition(" ")
        if verdict != "renewed":
            epoch, _, holder = rest.partition(" ")
            raise fenced_renew(leadership, int(epoch), holder)

    async def resign(self, leadership: Leadership) -> None:
        """Give the lead up; see `Store.resign`."""
        keys = _keys(leadership.deployment, "fence")
        await self._run_script("resign", keys, [leadership.epoch, leadership.owner])

    async def read(self, deployment: DeploymentId, names: tuple[str, ...]) -> dict[str, Document]:
        """Documents by name; see `Store.read`."""
        check_names(names)
        found = await self._run_script("read", _keys(deployment, "values", "versions"), list(names))
        pairs = zip(names, found[::2], found[1::2], strict=True)
        return {name: Document(value, _version(name, version)) for name, value, version in pairs if version is not None}

    async def list(self, deployment: DeploymentId, prefix: str, *, limit: int, newest_first: bool = True) -> Listing:
        """Documents of a directory; see `Store.list`."""
        check_listing(prefix, limit)
        keys = _keys(deployment, "values", "versions", f"names:{prefix}")
        found = await self._run_script("list", keys, [limit, "newest" if newest_first else "oldest"])
        triples = zip(found[::3], found[1::3], found[2::3], strict=True)
        return [(name.decode(), Document(value, _version(name.decode(), version))) for name, value, version in triples]

    async def write(self, deployment: DeploymentId, write: Write) -> dict[str, int]:
        """Apply a write; see `Store.write`."""
        check_write(write)
        directories = sorted({directory_of(name) for name in (*write.puts, *write.deletes)} - {""})
        keys = _keys(deployment, *_FIXED_KEYS, *(f"names:{directory}" for directory in directories))
        answer = await self._run_script("write", keys, _write_arguments(write, directories))
        verdict, *rest = answer.decode().split(" ")
        if verdict == "written":
            return dict(zip(write.puts, map(int, rest), strict=True))
        if verdict == "conflict":
            raise conflicting_versions(write, dict(zip(rest[::2], map(int, rest[1::2]), strict=True)))
        if verdict == "fenced":
            raise fenced_write(write.epoch, int(rest[0]), " ".join(rest[1:]))
        raise _refused(verdict, write.write_id)

    async def journal(self, deployment: DeploymentId, *, limit: int) -> JournalEntries:
        """The newest journal entries, oldest first; see `Store.journal`."""
        check_limit(limit)
        (key,) = _keys(deployment, "journal")
        entries = await self._call("journal", lambda client: send(client, "LRANGE", key, -limit, -1))
        return [bytes(entry) for entry in entries]

    async def _run_script(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        script = self._scripts[name]
        return await self._call(name, lambda client: script.run(client, keys, arguments))

    async def _call(self, operation: str, attempt: Callable[[Redis], Awaitable[T]]) -> T:
        """Repeat an attempt until it answers, cannot be helped, or the operation's deadline is reached."""
        clock, times = asyncio.get_running_loop().time, self._times
        begin_s = clock()
        num_tries = 0
        fault: faults.Fault | None = None
        while True:
            client = self._client
            if client is None:
                raise StoreUnavailableError(f"store {self.address} is not started, or closed: start it before {operation!r}")
            num_tries += 1
            left_s = times.operation_s - (clock() - begin_s)
            try:
                async with asyncio.timeout(min(times.try_s, left_s)):
                    answer = await attempt(client)
            except (redis_errors.RedisError, OSError) as error:
                found = faults.explain(error, self.address)
                if fault is None or not found.timed_out or left_s >= times.try_s:
                    fault = found  # a last try that the deadline cut short says less than the one before it
            else:
                self._note_recovery()
                return answer
            self._note_failure(operation, fault)
            pause_s = times.pause_s(num_tries, self._jitter())
            if fault.final or clock() + pause_s - begin_s >= times.operation_s:
                raise self._unavailable(operation, fault, num_tries, begin_s)
            await asyncio.sleep(pause_s)

    def _unavailable(self, operation: str, fault: faults.Fault, num_tries: int, begin_s: float) -> Exception:
        circumstances = self._circumstances(begin_s)
        if fault.final:
            return StoreUnavailableError(f"{fault.sentence}{circumstances}")
        took_s = asyncio.get_running_loop().time() - begin_s
        tried = f"{operation!r} was tried {num_tries} times in {took_s:.1f} s"
        return (DeadlineError if fault.timed_out else StoreUnavailableError)(f"{fault.sentence}; {tried}{circumstances}")

    def _circumstances(self, since_s: float) -> str:  # noqa: ARG002  for stores that run the server
        """What else is known about why the server did not answer since then; empty here."""
        return ""

    def _note_failure(self, operation: str, fault: faults.Fault) -> None:
        if fault.sentence != self._failing:
            self._failing = fault.sentence
            self._log.warning("store.call_failed", operation=operation, reason=fault.sentence)

    def _note_recovery(self) -> None:
        if self._failing is not None:
            self._log.info("store.recovered", was=self._failing)
            self._failing = None

    def _check_server(self, info: dict[str, Any]) -> None:
        version = str(info.get("redis_version", "0"))
        major_minor = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if "valkey_version" not in info and major_minor < faults.VERSION_LEAST:
            raise StoreUnavailableError(faults.too_old(version, self.address))
        if info.get("cluster_enabled"):
            raise StoreUnavailableError(faults.cluster(self.address))
        if info.get("role") == "slave":
            primary = f"{info.get('master_host')}:{info.get('master_port')}"
            raise StoreUnavailableError(faults.replica_of(primary, self.address))
        if info.get("maxmemory") and info.get("maxmemory_policy") not in (None, "noeviction"):
            self._log.warning("store.evicting", policy=info["maxmemory_policy"], advice="set maxmemory-policy noeviction")


def _keys(deployment: DeploymentId, *names: str) -> list[str]:
    check_deployment(deployment)
    return [f"eplb:{{{deployment}}}:{name}" for name in names]


def _write_arguments(write: Write, directories: list[str]) -> list[Argument]:
    """The arguments of `lua/write.lua`; directories are named by their position in KEYS."""
    position = {directory: len(_FIXED_KEYS) + 1 + index for index, directory in enumerate(directories)}
    arguments: list[Argument] = [write.write_id, fingerprint_of(write), write.epoch, REPLIES_KEPT, JOURNAL_KEPT]
    arguments.append(len(write.expects))
    for name, version in write.expects.items():
        arguments += [name, version]
    arguments.append(len(write.puts))
    for name, value in write.puts.items():
        arguments += [name, value, position.get(directory_of(name), 0), number_of(name)]
    arguments.append(len(write.deletes))
    for name in write.deletes:
        arguments += [name, position.get(directory_of(name), 0)]
    arguments.append(len(write.journal))
    arguments += write.journal
    return arguments


def _refused(verdict: str, write_id: str) -> Exception:
    if verdict == "reused":
        return reused_write_id(write_id)
    return BrokenInvariantError(f"the store answered {verdict[:40]!r} to request {write_id!r}, which no script says")


def _version(name: str, stored: bytes | None) -> int:
    """A document's version. Raises BrokenInvariantError for one that no script wrote."""
    if stored is None or not stored.isdigit():
        raise BrokenInvariantError(f"document {name!r} in the store has version {stored and stored[:40]!r}, which is no number")
    return int(stored)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _server_name(info: dict[str, Any]) -> str:
    if "valkey_version" in info:
        return f"valkey {info['valkey_version']}"
    return f"redis {info.get('redis_version', '?')}"
