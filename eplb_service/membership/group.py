"""One forming of a deployment's vote group: its ranks, where they are, and what they serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eplb_service.control import (
    CAPABILITY_RESTORE,
    PROTOCOL_VERSION_OF_RELAYS,
    Address,
    LayerInfo,
    LiveLayer,
    Registration,
)
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.generation import LiveMap
from eplb_service.ids import DeploymentId, GenerationNumber, GroupId, LayerRef, RankId
from eplb_service.placement import Placement, Table, row_digest
from eplb_service.replica_shares import Float32Array
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
                nics=_nics(registrations),
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
    def fan_out(self) -> bool:
        """Whether an expert crosses to a node once and is passed on there: all ranks know relays."""
        return self.protocol >= PROTOCOL_VERSION_OF_RELAYS

    @property
    def restorers(self) -> frozenset[RankId]:
        """Ranks that can take experts which no rank holds from a backup of their own."""
        return frozenset(
            registration.address.rank_id
            for registration in self.registrations
            if CAPABILITY_RESTORE in registration.capabilities
        )

    @property
    def observe_only(self) -> str:
        """Why nothing can be rolled out (a rank allocated no staging); empty when it can."""
        without = [rank for rank, budget in self.staging_bytes.items() if not budget]
        return f"rank{'s' * (len(without) > 1)} {_listed(without)} allocated no staging" if without else ""

    @property
    def is_weighted(self) -> bool:
        """Whether the engine splits an expert's tokens by shares that come with the placement."""
        return self.registrations[0].dispatch == Dispatch.WEIGHTED

    def with_fitting_shares(self, placement: Placement) -> Placement:
        """A placement as this group's engine takes it: with even shares where it is weighted and none are given.

        Raises InvalidInputError when the placement has shares and the engine's dispatch knows none.
        """
        if self.is_weighted and not placement.has_shares:
            return placement.with_even_shares()
        problem = self.shares_problem(placement)
        if problem:
            raise InvalidInputError(problem)
        return placement

    def shares_problem(self, placement: Placement) -> str:
        """Why a placement and the engine's dispatch do not go together; empty when they do."""
        if placement.has_shares == self.is_weighted:
            return ""
        if self.is_weighted:
            return "the engine dispatches by shares and the placement has none: give every slot its share"
        word = self.registrations[0].dispatch
        return f"the placement has shares and the engine's dispatch is {word!r}, which knows none: plan without shares"

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
        expert that the layer has not, when shares are missing under weighted dispatch, there without it, or do not add up, and
        when a digest is not that of its row and shares.
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
            known = Table(
                table.model, table.layer_ids, table.num_logical, self.rank_ids, rows, self._shares_of(mine, num_slots)
            )
            tables.append(known)
            for layer in mine:
                digest = row_digest(layer.layer, known.row(layer.layer.layer_id), known.shares_row(layer.layer.layer_id))
                if digest != layer.digest:
                    raise InvalidInputError(f"layer {layer.layer} claims digest {layer.digest:#x}, its row has {digest:#x}")
            generations.extend(layer.generation for layer in mine)
        return LiveMap(Placement(tuple(tables)), tuple(generations))

    def _shares_of(self, layers: list[LiveLayer], num_slots: int) -> Float32Array | None:
        """Shares of the layers of a table, shape (L, P); None without weighted dispatch."""
        for layer in layers:
            if (layer.shares is not None) != self.is_weighted:
                has, word = ("no shares", "shares") if self.is_weighted else ("shares", "none")
                raise InvalidInputError(
                    f"layer {layer.layer} has {has}; dispatch {self.registrations[0].dispatch!r} wants {word}"
                )
            if layer.shares is not None and len(layer.shares) != num_slots:
                raise InvalidInputError(f"layer {layer.layer} has {len(layer.shares)} shares for {num_slots} slots")
        return np.array([layer.shares for layer in layers], np.float32) if self.is_weighted else None


def _nics(registrations: tuple[Registration, ...]) -> tuple[str, ...] | None:
    """NIC of each rank; None where no rank names one. On a node that names none every rank has its own."""
    if not any(registration.nic for registration in registrations):
        return None
    return tuple(registration.nic or f"rank{registration.address.rank_id}" for registration in registrations)


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
