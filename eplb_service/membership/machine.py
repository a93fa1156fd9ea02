"""Who belongs to a deployment's vote group: formed from what ranks say of themselves, never from a constant.

Registrations, control streams and deaths go in; out come the changes that `rollout` lives on. A group is *ready* when every
rank that its members name has registered in it and has a control stream. Ranks that disagree about what all must share are
refused (`registration_check`), and so are ranks that would push out others that are alive (`rivals`). A stream that ends loses
the ready group nothing: its engine serves on and the stream comes back. An engine that is gone, a new life of a rank, or a new
group id ends it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

from eplb_service.control import Address, Registration
from eplb_service.errors import ConflictError, NotFoundError, StaleError
from eplb_service.ids import DeploymentId, GroupId, Incarnation, RankId
from eplb_service.membership.group import Group
from eplb_service.membership.registration_check import check_agreement, check_registration
from eplb_service.membership.rivals import SILENCE_S, Member, alive_rival, refusal

__all__ = [
    "Attached",
    "Detached",
    "Gone",
    "Group",  # users of a group find it beside what forms it
    "GroupLost",
    "GroupReady",
    "Heard",
    "Membership",
    "MembershipChange",
    "MembershipEvent",
    "RankAttached",
    "RankDetached",
    "Ready",
    "Registered",
    "Waiting",
    "WeightsSeen",
]

_REMEMBERED = 256
"""Superseded groups and replaced lives that are still told apart from new ones."""


# ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Registered:
    """A rank said what it is (first time, after a restart, or again on a reconnect)."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Attached:
    """A control stream speaks for this rank now. Repeating it says that the stream is a new one."""

    address: Address


@dataclass(frozen=True, slots=True)
class Detached:
    """The control stream that spoke for this rank ended. The rank itself may well be serving."""

    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The rank's engine, or its hook, is gone."""

    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsSeen:
    """A rank's pulse carried this weights version: those that register later are compared with it."""

    address: Address
    weights_version: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A rank said something, whatever it was: it lives."""

    address: Address


MembershipEvent = Registered | Attached | Detached | Gone | WeightsSeen | Heard


# ── what follows: also the events of `rollout` ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GroupReady:
    """Every rank of a group is registered and attached."""

    group: Group


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The ready group is no more: a rank is gone or restarted, or a new group took its place."""

    group_id: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class RankAttached:
    """A rank of the ready group has a new control stream."""

    address: Address


@dataclass(frozen=True, slots=True)
class RankDetached:
    """A rank of the ready group has no control stream now."""

    address: Address
    reason: str


MembershipChange = GroupReady | GroupLost | RankAttached | RankDetached


@dataclass(frozen=True, slots=True)
class Waiting:
    """No group yet. missing: rank id and what it lacks, in column order; empty while nobody is registered.

    since_s: on the clock of `now`; None while nobody is registered.
    """

    group_id: GroupId | None
    missing: tuple[tuple[RankId, str], ...]
    since_s: float | None = None

    @property
    def reason(self) -> str:
        """One sentence for people."""
        if not self.missing:
            return "no rank is registered"
        return "waiting for " + ", ".join(f"rank {rank} ({lack})" for rank, lack in self.missing)


@dataclass(frozen=True, slots=True)
class Ready:
    """The group that is planned for. away: ranks without a control stream now."""

    group: Group
    away: tuple[RankId, ...] = ()


class Membership:
    """Forms the groups of one deployment: `handle(event, now) -> changes`.

    Raises InvalidInputError (a registration that cannot be used), ConflictError (one that disagrees with its peers, or comes
    in place of a rank that is alive), StaleError (an older group or life) and NotFoundError (a stream for a rank that never
    registered). A refused event changes nothing. Detached, Gone, WeightsSeen and Heard of anyone unknown or older are dropped.
    silence_s: how long a rank counts as alive after it was last heard.
    """

    def __init__(self, deployment: DeploymentId, *, silence_s: float = SILENCE_S) -> None:
        self._deployment = deployment
        self._silence_s = silence_s
        self._members: dict[RankId, Member] = {}
        """Ranks of the present group as last seen, those gone too."""
        self._group_id: GroupId | None = None
        self._ranks: dict[RankId, Registration] = {}
        self._attached: set[Address] = set()
        self._why_missing: dict[RankId, str] = {}
        self._ready: Group | None = None
        self._waiting_since_s: float | None = None
        self._superseded: deque[GroupId] = deque(maxlen=_REMEMBERED)
        self._replaced: deque[tuple[RankId, Incarnation]] = deque(maxlen=_REMEMBERED)

    @property
    def status(self) -> Waiting | Ready:
        """Ready, or what is waited for."""
        if self._ready is not None:
            addresses = self._ready.addresses
            return Ready(self._ready, tuple(rank for rank, address in addresses.items() if address not in self._attached))
        if not self._ranks and not self._why_missing:
            return Waiting(self._group_id, ())
        return Waiting(self._group_id, tuple(self._missing()), self._waiting_since_s)

    def handle(self, event: MembershipEvent, now: float) -> tuple[MembershipChange, ...]:
        """Take one event in; the changes are in order. now: monotonic clock, seconds."""
        changes = self._handle(event, now)
        self._see(event, now)
        lost = any(isinstance(change, GroupLost) for change in changes)
        if self._ready is not None or (not self._ranks and not self._why_missing):
            self._waiting_since_s = None
        elif lost or self._waiting_since_s is None:
            self._waiting_since_s = now
        return changes

    def _see(self, event: MembershipEvent, now: float) -> None:
        """Who was heard, or said to be gone, just now."""
        match event:
            case Registered(registration):
                self._members[registration.address.rank_id] = Member(registration, now)
            case Attached(address) | WeightsSeen(address) | Heard(address):
                if self._is_member(address):
                    self._members[address.rank_id] = Member(self._ranks[address.rank_id], now)
            case Gone(address):
                last = self._members.get(address.rank_id)
                if last is not None and last.registration.address == address:
                    self._members[address.rank_id] = Member(last.registration, now, is_gone=True)
            case Detached():
                pass

    def _handle(self, event: MembershipEvent, now: float) -> tuple[MembershipChange, ...]:
        match event:
            case Registered(registration):
                return self._on_registered(registration, now)
            case Attached(address):
                return self._on_attached(address)
            case Detached(address, reason):
                return self._on_detached(address, reason)
            case Gone(address, reason):
                return self._on_gone(address, reason)
            case WeightsSeen(address, version):
                if self._is_member(address):
                    rank = address.rank_id
                    self._ranks[rank] = dataclasses.replace(self._ranks[rank], weights_version=version)
                return ()
            case Heard():
                return ()

    def _on_registered(self, registration: Registration, now: float) -> tuple[MembershipChange, ...]:
        address = registration.address
        check_registration(registration, self._deployment)
        if address.group_id in self._superseded:
            raise StaleError(
                f"rank {address.rank_id} registers in group {address.group_id}, which group {self._group_id} superseded:"
                f" re-form the group"
            )
        if (address.rank_id, address.incarnation) in self._replaced:
            raise StaleError(f"a newer life of rank {address.rank_id} replaced incarnation {address.incarnation}")
        if address.group_id != self._group_id:
            self._check_rival(registration, now)
            changes = self._lose(f"group {address.group_id} superseded it")
            self._supersede(address.group_id)
        else:
            changes = self._replace(registration, now)
        self._ranks[address.rank_id] = registration
        self._why_missing.pop(address.rank_id, None)
        return (*changes, *self._form())

    def _check_rival(self, registration: Registration, now: float) -> None:
        rival = alive_rival(registration, self._members.values(), now=now, silence_s=self._silence_s)
        if rival is not None:
            raise ConflictError(refusal(registration, rival, self._silence_s))

    def _replace(self, registration: Registration, now: float) -> tuple[MembershipChange, ...]:
        """Room for a registration of a rank of the present group: the first, a repeated one, or that of a new life."""
        address = registration.address
        before = self._ranks.get(address.rank_id)
        again = before is not None and before.address == address
        peers = [peer for rank, peer in self._ranks.items() if rank != address.rank_id]
        check_agreement(registration, peers, weights_too=not (again and self._ready))
        if before is None:
            return ()
        if not again:
            self._check_rival(registration, now)
            self._attached.discard(before.address)
            self._replaced.append((address.rank_id, before.address.incarnation))
            return self._lose(f"rank {address.rank_id} restarted (incarnation {address.incarnation})")
        if dataclasses.replace(before, weights_version=registration.weights_version) != registration:
            return self._lose(f"rank {address.rank_id} registered anew with other settings")
        return ()

    def _on_attached(self, address: Address) -> tuple[MembershipChange, ...]:
        if address.group_id in self._superseded or (address.rank_id, address.incarnation) in self._replaced:
            raise StaleError(f"rank {address.rank_id} attaches for an older group or life: register again")
        if not self._is_member(address):
            raise NotFoundError(f"rank {address.rank_id} attaches before it registered here: register first")
        self._attached.add(address)
        if self._ready is not None:
            return (RankAttached(address),)
        return self._form()

    def _on_detached(self, address: Address, reason: str) -> tuple[MembershipChange, ...]:
        if address not in self._attached:
            return ()
        self._attached.discard(address)
        return (RankDetached(address, reason),) if self._ready is not None else ()

    def _on_gone(self, address: Address, reason: str) -> tuple[MembershipChange, ...]:
        if not self._is_member(address):
            return ()
        self._attached.discard(address)
        del self._ranks[address.rank_id]
        self._why_missing[address.rank_id] = f"gone: {reason}"
        return self._lose(f"rank {address.rank_id} is gone: {reason}")

    def _is_member(self, address: Address) -> bool:
        known = self._ranks.get(address.rank_id)
        return known is not None and known.address == address

    def _lose(self, reason: str) -> tuple[MembershipChange, ...]:
        if self._ready is None:
            return ()
        lost = GroupLost(self._ready.group_id, reason)
        self._ready = None
        return (lost,)

    def _supersede(self, group_id: GroupId) -> None:
        if self._group_id is not None:
            self._superseded.append(self._group_id)
        self._group_id = group_id
        self._ranks.clear()
        self._attached.clear()
        self._why_missing.clear()
        self._members.clear()

    def _rank_ids(self) -> tuple[RankId, ...]:
        """Column order, as the members name it."""
        for registration in self._ranks.values():
            return registration.group_rank_ids
        return tuple(sorted(self._why_missing))

    def _missing(self) -> list[tuple[RankId, str]]:
        missing = []
        for rank in self._rank_ids():
            registration = self._ranks.get(rank)
            if registration is None:
                missing.append((rank, self._why_missing.get(rank, "not registered")))
            elif registration.address not in self._attached:
                missing.append((rank, "no control stream"))
        return missing

    def _form(self) -> tuple[MembershipChange, ...]:
        if self._ready is not None or not self._ranks or self._missing():
            return ()
        self._ready = Group.of(tuple(self._ranks[rank] for rank in self._rank_ids()))
        return (GroupReady(self._ready),)
