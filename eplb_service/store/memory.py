"""A store in memory, for tests and simulations: the contract as plain Python, with the clock passed in.

`DeploymentState` is the pure core, which the Lua scripts of `store/lua/` mirror line by line; `MemoryStore` gives it the
shape of a `Store`. Nothing here waits, so a simulation may drive it from any scheduler.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from eplb_service.errors import ConflictError
from eplb_service.ids import DeploymentId, Epoch
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
    number_of,
)
from eplb_service.store.refusals import (
    conflicting_versions,
    epochs_used_up,
    fenced_renew,
    fenced_write,
    lead_held,
    reused_write_id,
)

_Answer = dict[str, int] | ConflictError | Epoch


@dataclass(slots=True)
class _Fence:
    """Who leads: the epoch never goes back; an empty owner has resigned."""

    epoch: int = 0
    owner: str = ""
    expires_at_s: float = 0.0


@dataclass(slots=True)
class DeploymentState:
    """All that a store holds of one deployment."""

    fence: _Fence = field(default_factory=_Fence)
    documents: dict[str, Document] = field(default_factory=dict)
    deleted_version: int = 0
    """The highest version that was ever deleted: new names start above it."""
    journal: deque[bytes] = field(default_factory=lambda: deque(maxlen=JOURNAL_KEPT))
    answers: OrderedDict[str, tuple[str, _Answer]] = field(default_factory=OrderedDict)
    """write id -> (fingerprint, answer), oldest first."""

    def lead(self, *, owner: str, lease_s: float, floor: int, write_id: str, now_s: float) -> Epoch:
        """Take the lead; see `Store.lead`."""
        fingerprint = f"lead {floor} {owner}"
        known = self._recall(write_id, fingerprint)
        if isinstance(known, int):
            return known
        fence = self.fence
        left_s = fence.expires_at_s - now_s
        if fence.owner not in ("", owner) and left_s > 0:
            raise lead_held(fence.owner, fence.epoch, left_s)
        epoch = 1 + max(fence.epoch, floor)
        if epoch > EPOCH_MAX:
            raise epochs_used_up(epoch)
        self.fence = _Fence(epoch, owner, now_s + lease_s)
        self._remember(write_id, fingerprint, Epoch(epoch))
        return Epoch(epoch)

    def renew(self, leadership: Leadership, *, now_s: float) -> None:
        """Extend the lease; see `Store.renew`."""
        fence = self.fence
        if (fence.epoch, fence.owner) != (leadership.epoch, leadership.owner):
            raise fenced_renew(leadership, fence.epoch, fence.owner)
        fence.expires_at_s = now_s + leadership.lease_s

    def resign(self, leadership: Leadership) -> None:
        """Give the lead up; see `Store.resign`."""
        if (self.fence.epoch, self.fence.owner) == (leadership.epoch, leadership.owner):
            self.fence.owner = ""
            self.fence.expires_at_s = 0.0

    def write(self, write: Write) -> dict[str, int]:
        """Apply a write; see `Store.write`."""
        fingerprint = fingerprint_of(write)
        known = self._recall(write.write_id, fingerprint)
        if isinstance(known, dict):
            return dict(known)
        if isinstance(known, ConflictError):
            raise ConflictError(*known.args)
        if write.epoch != self.fence.epoch or not self.fence.owner:
            raise fenced_write(write.epoch, self.fence.epoch, self.fence.owner)
        found = {name: self._version(name) for name in write.expects}
        wrong = {name: version for name, version in found.items() if version != write.expects[name]}
        if wrong:
            conflict = conflicting_versions(write, wrong)
            self._remember(write.write_id, fingerprint, conflict)
            raise conflict
        versions = self._apply(write)
        self._remember(write.write_id, fingerprint, dict(versions))
        return versions

    def list(self, prefix: str, *, limit: int, newest_first: bool) -> Listing:
        """Documents of a directory; see `Store.list`."""
        names = [name for name in self.documents if directory_of(name) == prefix]
        names.sort(key=lambda name: (number_of(name), name), reverse=newest_first)
        return [(name, self.documents[name]) for name in names[:limit]]

    def _apply(self, write: Write) -> dict[str, int]:
        versions: dict[str, int] = {}
        # Deleted first, so that what this same write creates already starts above it.
        for name in write.deletes:
            self.deleted_version = max(self.deleted_version, self._version(name))
            self.documents.pop(name, None)
        for name, value in write.puts.items():
            versions[name] = 1 + (self._version(name) or self.deleted_version)
            self.documents[name] = Document(bytes(value), versions[name])
        self.journal.extend(write.journal)
        return versions

    def _version(self, name: str) -> int:
        document = self.documents.get(name)
        return document.version if document else 0

    def _recall(self, write_id: str, fingerprint: str) -> _Answer | None:
        known = self.answers.get(write_id)
        if known is None:
            return None
        if known[0] != fingerprint:
            raise reused_write_id(write_id)
        return known[1]

    def _remember(self, write_id: str, fingerprint: str, answer: _Answer) -> None:
        self.answers[write_id] = (fingerprint, answer)
        while len(self.answers) > REPLIES_KEPT:
            self.answers.popitem(last=False)


class MemoryStore:
    """A `Store` that lives as long as this object; `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[DeploymentId, DeploymentState] = {}

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close: the documents stay, as a server's would, for a planner that starts again."""

    async def ping(self) -> str:
        """Name what answers."""
        return "memory"

    async def deployments(self) -> DeploymentIds:
        """Every deployment that was ever led, sorted."""
        return sorted(deployment for deployment, state in self._states.items() if state.fence.epoch)

    async def lead(self, deployment: DeploymentId, *, owner: str, lease_s: float, floor: int, write_id: str) -> Leadership:
        """Take the lead; see `Store.lead`."""
        check_lead(owner, lease_s, floor, write_id)
        state, now_s = self._state(deployment), self._clock()
        epoch = state.lead(owner=owner, lease_s=lease_s, floor=floor, write_id=write_id, now_s=now_s)
        return Leadership(deployment=deployment, epoch=epoch, owner=owner, lease_s=lease_s)

    async def renew(self, leadership: Leadership) -> None:
        """Extend the lease; see `Store.renew`."""
        self._state(leadership.deployment).renew(leadership, now_s=self._clock())

    async def resign(self, leadership: Leadership) -> None:
        """Give the lead up; see `Store.resign`."""
        self._state(leadership.deployment).resign(leadership)

    async def read(self, deployment: DeploymentId, names: tuple[str, ...]) -> dict[str, Document]:
        """Documents by name; see `Store.read`."""
        check_names(names)
        documents = self._state(deployment).documents
        return {name: documents[name] for name in names if name in documents}

    async def list(self, deployment: DeploymentId, prefix: str, *, limit: int, newest_first: bool = True) -> Listing:
        """Documents of a directory; see `Store.list`."""
        check_listing(prefix, limit)
        return self._state(deployment).list(prefix, limit=limit, newest_first=newest_first)

    async def write(self, deployment: DeploymentId, write: Write) -> dict[str, int]:
        """Apply a write; see `Store.write`."""
        check_write(write)
        return self._state(deployment).write(write)

    async def journal(self, deployment: DeploymentId, *, limit: int) -> JournalEntries:
        """The newest journal entries, oldest first; see `Store.journal`."""
        check_limit(limit)
        return [*self._state(deployment).journal][-limit:]

    def _state(self, deployment: DeploymentId) -> DeploymentState:
        check_deployment(deployment)
        return self._states.setdefault(deployment, DeploymentState())
