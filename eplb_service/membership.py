"""Who belongs to a deployment's vote group: formed from what ranks say of themselves, never from a constant.

Registrations, control streams and deaths go in; out come the changes that `rollout` lives on. A group is *ready* when
every rank that its members name has registered in it and has a control stream. Ranks that disagree about what all must
share are refused, naming both values and both ranks: planning on either would move the wrong weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eplb_service.control import Address, LayerInfo, Registration
from eplb_service.ids import DeploymentId, GroupId, LayerRef, RankId
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Layers of one model with equal (E, slots per rank): one table of every placement of the group."""

    model: str
    layer_ids: tuple[int, ...]
    num_logical: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One forming of a deployment's vote group: registrations in column order of placements."""

    deployment: DeploymentId
    group_id: GroupId
    registrations: tuple[Registration, ...]
    topology: Topology
    tables: tuple[GroupTable, ...]
    layers: Mapping[LayerRef, LayerInfo]

    @property
    def addresses(self) -> Mapping[RankId, Address]:
        """Address of each rank, in column order."""
        return {registration.address.rank_id: registration.address for registration in self.registrations}

    @property
    def rank_ids(self) -> tuple[RankId, ...]:
        """Stable ids in column order."""
        return self.topology.rank_ids

    @property
    def observe_only(self) -> str:
        """Why nothing can be rolled out (some rank allocated no staging); empty when it can."""
        ...

    @property
    def staging_bytes(self) -> Mapping[RankId, int]:
        """Staging budget of each rank."""
        ...

    @property
    def expert_bytes(self) -> Mapping[LayerRef, int]:
        """Bytes of one expert of each layer."""
        ...


# ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Registered:
    """A rank said what it is (first time, after a restart, or again on a reconnect)."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Attached:
    """A control stream speaks for this rank now."""

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
    """A rank's pulse carried this weights version."""

    address: Address
    weights_version: int


MembershipEvent = Registered | Attached | Detached | Gone | WeightsSeen


# ── what follows: also the events of `rollout` ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GroupReady:
    """Every rank of a group is registered and attached for the first time."""

    group: Group


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The ready group is no more: a rank is gone or a new group took its place."""

    group_id: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class RankAttached:
    """A rank of the ready group has a control stream again."""

    address: Address


@dataclass(frozen=True, slots=True)
class RankDetached:
    """A rank of the ready group has no control stream now."""

    address: Address
    reason: str


MembershipChange = GroupReady | GroupLost | RankAttached | RankDetached


@dataclass(frozen=True, slots=True)
class Waiting:
    """No group yet. missing: rank id and what it lacks, ascending; empty when nobody registered."""

    group_id: GroupId | None
    missing: tuple[tuple[RankId, str], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The group that is planned for. away: ranks without a control stream now."""

    group: Group
    away: tuple[RankId, ...] = ()


class Membership:
    """Forms the groups of one deployment.

    handle(event, now) -> changes. Raises InvalidInputError (a registration that cannot be used), ConflictError (disagrees
    with its peers) and StaleError (of an older group or life); a refused event changes nothing.
    """

    def __init__(self, deployment: DeploymentId) -> None: ...

    @property
    def status(self) -> Waiting | Ready: ...

    def handle(self, event: MembershipEvent, now: float) -> tuple[MembershipChange, ...]: ...


