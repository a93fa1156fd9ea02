"""Who belongs to a deployment's vote group: formed from what ranks say of themselves, never from a constant.

Registrations, control streams and deaths go in; out come the changes that `rollout` lives on. A group is *ready* when every
rank that its members name has registered in it and has a control stream. Ranks that disagree about what all must share are
refused (`registration_check`). A stream that ends loses the ready group nothing: its engine serves on and the stream comes
back. An engine that is gone, a new life of a rank, or a new group id ends it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eplb_service.control import Address, LayerInfo, LiveLayer, Registration
from eplb_service.errors import InvalidInputError, NotFoundError, StaleError
from eplb_service.generation import LiveMap
from eplb_service.ids import DeploymentId, GenerationNumber, GroupId, Incarnation, LayerRef, RankId
from eplb_service.placement import Placement, Table, row_digest
from eplb_service.registration_check import check_agreement, check_registration
from eplb_service.topology import Topology

_REMEMBERED = 256
"""Superseded groups and replaced lives that are still told apart from new ones."""


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Layers of one model with equal (E, slots per rank): one table of every placement of the group."""

    model: str
    layer_ids: tuple[int, ...]
    num_logical: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One forming of a deployment's vote group. registrations: in column order of placements."""

    deployment: DeploymentId
    group_id: GroupId
    registrations: tuple[Registration, ...]
    topology: Topology
    tables: tuple[GroupTable, ...]
    layers: Mapping[LayerRef, LayerInfo]

    @classmethod
    def of(cls, registrations: tuple[Registration, ...]) -> Group:
        """From registrations that agree, one for each rank, in column order."""
        first = registrations[0]
        return cls(
            deployment=first.deployment,
            group_id=first.address.group_id,
            registrations=registrations,
            topology=Topology(
                tuple(registration.address.rank_id for registration in registrations),
                tuple(registration.node for registration in registrations),
                tuple(registration.capacity for registration in registrations),
            ),
            tables=_tables(first),
            layers={LayerRef(model.name, layer.layer_id): layer for model in first.models for layer in model.layers},
        )

    @property
    def addresses(self) -> Mapping[RankId, Address]:
        """Address of each rank, in column order."""
        return {registration.address.rank_id: registration.address for registration in self.registrations}

    @property
    def rank_ids(self) -> tuple[RankId, ...]:
        """Stable ids in column order."""
        return self.topology.rank_ids

    @property
    def vote_period(self) -> int:
        """K."""
        return self.registrations[0].vote_period

    @property
    def replica_table_width(self) -> int:
        """Most replicas of an expert that the tables of every rank hold."""
        return min(registration.replica_table_width for registration in self.registrations)

    @property
    def protocol(self) -> int:
        """Highest protocol version that all ranks speak."""
        return min(registration.protocol_max for registration in self.registrations)

    @property
    def observe_only(self) -> str:
        """Why nothing can be rolled out (a rank allocated no staging); empty when it can."""
        without = [rank for rank, budget in self.staging_bytes.items() if not budget]
        return f"rank{'s' * (len(without) > 1)} {_listed(without)} allocated no staging" if without else ""

    @property
    def staging_bytes(self) -> Mapping[RankId, int]:
        """Staging budget of each rank."""
        return {registration.address.rank_id: registration.staging_bytes for registration in self.registrations}

    @property
    def expert_bytes(self) -> Mapping[LayerRef, int]:
        """Bytes of one expert of each layer."""
        return {layer: info.expert_bytes for layer, info in self.layers.items()}

    def live_map(self, layers: tuple[LiveLayer, ...]) -> LiveMap:
        """What a rank says that it routes by, in the order of the group's tables.

        Raises InvalidInputError when layers are missing, unknown or twice there, when a row has another length or an
        expert that the layer has not, and when a digest is not that of its row.
        """
        given = {layer.layer: layer for layer in layers}
        odd = sorted(set(given) ^ set(self.layers))
        if odd or len(given) != len(layers):
            raise InvalidInputError(
                f"a live map must have each of the {len(self.layers)} layers of the group once; got {len(layers)},"
                f" {f'for one, {odd[0]} is missing or unknown' if odd else 'some twice'}"
            )
        tables: list[Table] = []
        generations: list[GenerationNumber] = []
        for table in self.tables:
            num_slots = table.slots * len(self.rank_ids)
            mine = [given[LayerRef(table.model, layer_id)] for layer_id in table.layer_ids]
            for layer in mine:
                if len(layer.row) != num_slots:
                    raise InvalidInputError(f"row of layer {layer.layer} has {len(layer.row)} slots, the group {num_slots}")
            rows = np.array([layer.row for layer in mine], np.int32)
            tables.append(Table(table.model, table.layer_ids, table.num_logical, self.rank_ids, rows))
            for layer, row in zip(mine, rows, strict=True):
                if row_digest(layer.layer, row) != layer.digest:
                    raise InvalidInputError(
                        f"layer {layer.layer} claims digest {layer.digest:#x}, its row has {row_digest(layer.layer, row):#x}"
                    )
            generations.extend(layer.generation for layer in mine)
        return LiveMap(Placement(tuple(tables)), tuple(generations))


def _tables(registration: Registration) -> tuple[GroupTable, ...]:
    """Tables of a deployment: models in their order, shapes of a model in order of their first layer."""
    tables = []
    for model in registration.models:
        shapes: dict[tuple[int, int], list[int]] = {}
        for layer in sorted(model.layers, key=lambda layer: layer.layer_id):
            shapes.setdefault((layer.num_logical, layer.slots), []).append(layer.layer_id)
        for (num_logical, slots), layer_ids in shapes.items():
            tables.append(GroupTable(model.name, tuple(layer_ids), num_logical, slots))
    return tuple(tables)


def _listed(ranks: list[RankId]) -> str:
    return ", ".join(str(rank) for rank in ranks)


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


MembershipEvent = Registered | Attached | Detached | Gone | WeightsSeen


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

    Raises InvalidInputError (a registration that cannot be used), ConflictError (one that disagrees with its peers),
    StaleError (an older group or life) and NotFoundError (a stream for a rank that never registered). A refused event changes
    nothing. Detached, Gone and WeightsSeen of anyone unknown or older are dropped.
    """

    def __init__(self, deployment: DeploymentId) -> None:
        self._deployment = deployment
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
        changes = self._handle(event)
        lost = any(isinstance(change, GroupLost) for change in changes)
        if self._ready is not None or (not self._ranks and not self._why_missing):
            self._waiting_since_s = None
        elif lost or self._waiting_since_s is None:
            self._waiting_since_s = now
        return changes

    def _handle(self, event: MembershipEvent) -> tuple[MembershipChange, ...]:
        match event:
            case Registered(registration):
                return self._on_registered(registration)
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

    def _on_registered(self, registration: Registration) -> tuple[MembershipChange, ...]:
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
            changes = self._lose(f"group {address.group_id} superseded it")
            self._supersede(address.group_id)
        else:
            changes = self._replace(registration)
        self._ranks[address.rank_id] = registration
        self._why_missing.pop(address.rank_id, None)
        return (*changes, *self._form())

    def _replace(self, registration: Registration) -> tuple[MembershipChange, ...]:
        """Room for a registration of a rank of the present group: the first, a repeated one, or that of a new life."""
        address = registration.address
        before = self._ranks.get(address.rank_id)
        again = before is not None and before.address == address
        peers = [peer for rank, peer in self._ranks.items() if rank != address.rank_id]
        check_agreement(registration, peers, weights_too=not (again and self._ready))
        if before is None:
            return ()
        if not again:
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
