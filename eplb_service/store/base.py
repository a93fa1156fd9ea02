"""What a store promises: versioned documents for each deployment, fenced by the epoch of the planner that leads it.

A store is the planner's memory between two lives. Every write says which epoch it is made in and is refused once a newer
leader exists; it applies whole or not at all; and it carries an id, so that a write whose answer was lost can be sent
again and answers as it did the first time. One contract test (`tests/contract/test_store_contract.py`) holds every
implementation to this page.

Order within `write` (the same in every implementation):

    1. a known `write_id` with the same content   answers as the first time (versions, or the same ConflictError)
       a known `write_id` with other content      ConflictError
    2. epoch is not the fence's current epoch     FencedError
    3. a name in `expects` has another version    ConflictError, nothing written
    4. puts, deletes, journal entries             applied together, the answer remembered
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from eplb_service.errors import InvalidInputError
from eplb_service.ids import DeploymentId, Epoch

REPLIES_KEPT = 1024
"""Answers remembered for each deployment (the last so many write ids): a replay that comes later is a new write."""

JOURNAL_KEPT = 4096
"""Journal entries kept for each deployment; older ones are dropped."""

VALUE_BYTES_MAX = 64 << 20
"""Most bytes of all values and journal entries of one write together."""

NAMES_MAX = 1024
"""Most names that one write or read may touch."""

LEASE_S_MAX = 86_400.0
"""Longest lease: a day."""

EPOCH_MAX = (1 << 31) - 1

_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*\Z")
_DEPLOYMENT = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_NAME_CHARS_MAX = 200
_ID_CHARS_MAX = 128
_NUMBER_DIGITS_MAX = 15  # exact in the double that a sorted set scores by


# Inside a class that has a method `list`, the type `list` cannot be named: these can.
DeploymentIds = list[DeploymentId]
JournalEntries = list[bytes]


@dataclass(frozen=True, slots=True)
class Document:
    """A value and its version.

    `version` counts the writes of its name, from 1. A version is never used twice for a name: one that is created after
    something was deleted from its deployment starts above the highest version that was ever deleted there.
    """

    value: bytes
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Changes that apply together, or not at all.

    Publishing generation 12 exactly once, as the leader of epoch 3:

    >>> write = Write(write_id="w1", epoch=3, puts={"generation/12": b"...", "latest": b"12"}, expects={"generation/12": 0})
    """

    write_id: str
    """Unique; replaying it answers as the first time (the last `REPLIES_KEPT` of a deployment are remembered)."""
    epoch: int
    """Must be exactly the fence's current epoch."""
    puts: Mapping[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    """Names to remove; a name that is absent already is no error."""
    expects: Mapping[str, int] = field(default_factory=dict)
    """The version that a name must have now; 0 = absent."""
    journal: tuple[bytes, ...] = ()
    """Entries appended to the deployment's bounded journal, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The right to write to a deployment, until someone with a higher epoch takes it."""

    deployment: DeploymentId
    epoch: Epoch
    owner: str
    lease_s: float


Listing = list[tuple[str, Document]]
"""(name, document) pairs in the order asked for."""


class Store(Protocol):
    """Versioned documents of deployments.

    Every method ends within the store's own deadline and raises `StoreUnavailableError` or `DeadlineError` (the outcome
    of a write is then unknown: send the same `write_id` again), `InvalidInputError` for arguments that no store takes.
    """

    async def start(self) -> None:
        """Connect (or start the server) and prove that the store can be used."""

    async def close(self) -> None:
        """Give everything back; idempotent."""

    async def ping(self) -> str:
        """One line about what answers (`valkey 9.1.2 at unix:///…`)."""

    async def deployments(self) -> DeploymentIds:
        """Every deployment that was ever led, sorted."""

    async def lead(self, deployment: DeploymentId, *, owner: str, lease_s: float, floor: int, write_id: str) -> Leadership:
        """Take the lead with epoch 1 + max(stored, floor); the same owner may, and gets a higher epoch.

        Raises ConflictError, with the holder and what is left of its lease, while another owner's lease is alive.
        """

    async def renew(self, leadership: Leadership) -> None:
        """Extend the lease by its length from now, also when it lapsed and nobody took it.

        Raises FencedError when another epoch leads, or this one was resigned or is unknown to the store.
        """

    async def resign(self, leadership: Leadership) -> None:
        """Let the next leader in at once; does nothing if this epoch leads no more. Later writes in it are refused."""

    async def read(self, deployment: DeploymentId, names: tuple[str, ...]) -> dict[str, Document]:
        """The documents of these names as of one moment; absent names are left out."""

    async def list(self, deployment: DeploymentId, prefix: str, *, limit: int, newest_first: bool = True) -> Listing:
        """Documents of a directory (`prefix` ends with "/": `generation/`), by the number that ends the name, then by name.

        `newest_first` starts at the highest number; names without a number count as 0.
        """

    async def write(self, deployment: DeploymentId, write: Write) -> dict[str, int]:
        """Apply a write; returns the new version of every name put.

        Raises FencedError (naming both epochs) or ConflictError (naming the versions); either way nothing was written.
        """

    async def journal(self, deployment: DeploymentId, *, limit: int) -> JournalEntries:
        """The newest `limit` journal entries, oldest first."""


def directory_of(name: str) -> str:
    """The directory a name is listed in: `generation/` for `generation/12`, empty for `latest`."""
    return name[: name.rfind("/") + 1]


def number_of(name: str) -> int:
    """The number that a name is listed by: 12 for `generation/12`, 0 where the last part is no number."""
    leaf = name[name.rfind("/") + 1 :]
    return int(leaf) if leaf.isdecimal() and len(leaf) <= _NUMBER_DIGITS_MAX else 0


def fingerprint_of(write: Write) -> str:
    """Digest of all that a write says, to tell a replay from a reused id."""
    digest = hashlib.blake2b(digest_size=16)

    def add(*parts: bytes) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)

    add(b"epoch", str(write.epoch).encode())
    for name in sorted(write.puts):
        add(b"put", name.encode(), write.puts[name])
    for name in sorted(write.deletes):
        add(b"delete", name.encode())
    for name in sorted(write.expects):
        add(b"expect", name.encode(), str(write.expects[name]).encode())
    for entry in write.journal:
        add(b"journal", entry)
    return digest.hexdigest()


def check_deployment(deployment: str) -> None:
    """Raise InvalidInputError unless this can name a deployment."""
    if not _DEPLOYMENT.match(deployment):
        raise InvalidInputError(f"deployment {deployment!r} is no name: use 1 to 128 letters, digits, '.', '_' and '-'")


def is_deployment(name: str) -> bool:
    """Whether this can name a deployment."""
    return _DEPLOYMENT.match(name) is not None


def check_names(names: tuple[str, ...]) -> None:
    """Raise InvalidInputError unless all these can name documents, and are not too many."""
    if len(names) > NAMES_MAX:
        raise InvalidInputError(f"{len(names)} names at once, at most {NAMES_MAX} are allowed: split the request")
    for name in names:
        if len(name) > _NAME_CHARS_MAX or not _NAME.match(name):
            raise InvalidInputError(
                f"document name {name[:_NAME_CHARS_MAX]!r} ({len(name)} characters) is not usable: use parts of letters, "
                f"digits, '.', '_' and '-' joined by '/', at most {_NAME_CHARS_MAX} characters"
            )


def check_listing(prefix: str, limit: int) -> None:
    """Raise InvalidInputError unless a directory can be listed so."""
    if not prefix.endswith("/"):
        raise InvalidInputError(f"cannot list {prefix!r}: give a directory that ends with '/', as in 'generation/'")
    check_names((prefix[:-1],))
    check_limit(limit)


def check_limit(limit: int) -> None:
    """Raise InvalidInputError unless this many entries can be asked for."""
    if not 1 <= limit <= JOURNAL_KEPT:
        raise InvalidInputError(f"limit {limit} is out of range: ask for 1 to {JOURNAL_KEPT} entries")


def check_write(write: Write) -> None:
    """Raise InvalidInputError unless this write can be applied by every store."""
    check_write_id(write.write_id)
    if not 1 <= write.epoch <= EPOCH_MAX:
        raise InvalidInputError(f"epoch {write.epoch} of a write is out of range 1..{EPOCH_MAX}: lead first")
    check_names((*write.puts, *write.deletes, *write.expects))
    both = sorted(set(write.puts) & set(write.deletes))
    if both:
        raise InvalidInputError(f"a write both puts and deletes {both[0]!r}: choose one")
    if len(set(write.deletes)) != len(write.deletes):
        raise InvalidInputError(f"a write deletes a name twice: {', '.join(write.deletes)}")
    negative = {name: version for name, version in write.expects.items() if version < 0}
    if negative:
        raise InvalidInputError(f"expected versions are 0 (absent) or more, got {negative}")
    if len(write.journal) > JOURNAL_KEPT:
        raise InvalidInputError(f"{len(write.journal)} journal entries in a write, at most {JOURNAL_KEPT} are kept")
    num_bytes = sum(map(len, write.puts.values())) + sum(map(len, write.journal))
    if num_bytes > VALUE_BYTES_MAX:
        raise InvalidInputError(f"a write of {num_bytes} bytes, at most {VALUE_BYTES_MAX} are allowed: split it")


def check_write_id(write_id: str) -> None:
    """Raise InvalidInputError unless this can identify a write."""
    if not 1 <= len(write_id) <= _ID_CHARS_MAX:
        raise InvalidInputError(f"write id {write_id[:40]!r} has {len(write_id)} characters: use 1 to {_ID_CHARS_MAX}")


def check_lead(owner: str, lease_s: float, floor: int, write_id: str) -> None:
    """Raise InvalidInputError unless leadership can be asked for so."""
    check_write_id(write_id)
    if not 1 <= len(owner) <= _ID_CHARS_MAX or not owner.isprintable():
        raise InvalidInputError(
            f"owner {owner[:40]!r} ({len(owner)} characters) is not usable: use 1 to {_ID_CHARS_MAX} printable characters"
        )
    if not 0.001 <= lease_s <= LEASE_S_MAX:
        raise InvalidInputError(f"lease of {lease_s} s is out of range: use 0.001 to {LEASE_S_MAX:.0f} s")
    if not 0 <= floor < EPOCH_MAX:
        raise InvalidInputError(f"epoch floor {floor} is out of range 0..{EPOCH_MAX - 1}")
