"""Which expert each slot holds: the one source from which every other map is derived.

A `Table` is the placement of layers with equal (E, slots) of one model; a `Placement` is all tables of a deployment. Both
are immutable. Under weighted dispatch a table also says which share of its expert's tokens each slot takes. Digests are
BLAKE2b over a canonical little-endian encoding, so that every process and language that knows the rule computes the same
(used by the wire protocol, the store and the hook).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId, ids_text
from eplb_service.replica_shares import Float32Array, checked_shares, even_shares, type_of_shares

type_of_map = np.dtype("<i4")
Int32Array = npt.NDArray[np.int32]
EMPTY_SLOT = -1


def row_digest(layer: LayerRef, row: npt.NDArray[np.integer], shares: npt.NDArray[np.float32] | None = None) -> int:
    """Digest of what one layer routes by. Row: shape (P,), physical to logical. Unsigned 63 bits, never 0.

    shares: shape (P,), under weighted dispatch; other shares for the same slots are another digest.
    BLAKE2b-8 over `model NUL layer_id(<i4) P(<i4) row(<i4…)`, followed by `shares(<f4…)` where there are any; top bit cleared,
    0 replaced by 1: 0 stays free for "unknown".
    """
    encoded = np.ascontiguousarray(row, dtype=type_of_map)
    head = layer.model.encode() + b"\0" + np.array([layer.layer_id, encoded.size], dtype=type_of_map).tobytes()
    tail = b"" if shares is None else np.ascontiguousarray(shares, dtype=type_of_shares).tobytes()
    value = int.from_bytes(hashlib.blake2b(head + encoded.tobytes() + tail, digest_size=8).digest(), "little")
    return (value & (1 << 63) - 1) or 1


def fewest_slots(num_logical: int, num_ranks: int, *, at_least: int = 0) -> str:
    """What to use where experts do not fit ranks evenly, one clause. at_least: slots that there are to be, over all ranks.

    >>> fewest_slots(256, 3)
    'use at least 86 slots per rank (258 slots, 2 redundant experts)'
    """
    slots = -(-max(num_logical, at_least) // max(1, num_ranks))
    total = slots * max(1, num_ranks)
    return f"use at least {slots} slots per rank ({total} slots, {total - num_logical} redundant experts)"


@dataclass(frozen=True, eq=False)
class Table:
    """Placement of the layers of one model that share E and P.

    model: model name within the deployment.
    layer_ids: absolute layer ids, ascending. Length L.
    num_logical: E.
    rank_ids: stable rank ids in column order. Length R.
    physical_to_logical: shape (L, P), int32, -1 = empty slot; physical index = rank position * slots_per_rank + local slot.
    shares: shape (L, P), float32: share of its expert's tokens that each slot takes, 0 on empty slots; the shares of an expert
        add up to 1. None = the engine's own dispatch. Part of the table's identity.

    >>> table = Table("m", (3,), 2, (RankId(0), RankId(1)), np.array([[0, 1, 1, -1]], np.int32))
    >>> table.slots_per_rank, table.replica_counts.tolist()
    (2, [[1, 2]])
    """

    model: str
    layer_ids: tuple[int, ...]
    num_logical: int
    rank_ids: tuple[RankId, ...]
    physical_to_logical: Int32Array
    shares: Float32Array | None = None

    def __post_init__(self) -> None:
        array = np.asarray(self.physical_to_logical)
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise InvalidInputError(
                f"physical_to_logical of model {self.model!r} must be integers of shape (layers, slots);"
                f" got {array.dtype} of shape {array.shape}"
            )
        if array.shape[0] != len(self.layer_ids):
            raise InvalidInputError(f"{len(self.layer_ids)} layer ids but {array.shape[0]} rows in model {self.model!r}")
        if list(self.layer_ids) != sorted(set(self.layer_ids)) or any(layer < 0 for layer in self.layer_ids):
            raise InvalidInputError(f"layer ids must be ascending, unique and >= 0; got {list(self.layer_ids)}")
        if self.num_logical < 1:
            raise InvalidInputError(f"model {self.model!r} has {self.num_logical} experts; a table needs at least 1")
        if not self.rank_ids or len(set(self.rank_ids)) != len(self.rank_ids):
            raise InvalidInputError(f"rank ids must be unique and at least one; got {list(self.rank_ids)}")
        if array.shape[1] == 0 or array.shape[1] % len(self.rank_ids):
            raise InvalidInputError(
                f"{array.shape[1]} slots do not divide over {len(self.rank_ids)} ranks, and every rank has as many;"
                f" {fewest_slots(self.num_logical, len(self.rank_ids), at_least=array.shape[1])}"
            )
        if array.size and (int(array.min()) < EMPTY_SLOT or int(array.max()) >= self.num_logical):
            layer, slot = np.argwhere((array < EMPTY_SLOT) | (array >= self.num_logical))[0].tolist()
            raise InvalidInputError(
                f"layer {self.layer_ids[layer]} slot {slot} of model {self.model!r} holds expert {int(array[layer, slot])};"
                f" ids run from 0 to {self.num_logical - 1}, -1 is an empty slot"
            )
        frozen = array.astype(np.int32, copy=True)
        frozen.setflags(write=False)
        object.__setattr__(self, "physical_to_logical", frozen)
        if self.shares is not None:
            names = tuple(str(layer) for layer in self.layers)
            object.__setattr__(self, "shares", checked_shares(self.shares, frozen, self.num_logical, layers=names))

    @classmethod
    def linear(
        cls, *, model: str, layer_ids: Sequence[int], num_logical: int, rank_ids: Sequence[int], slots_per_rank: int
    ) -> Table:
        """Slot i holds expert i % E in every layer: how engines start. Raises InvalidInputError when slots < E."""
        num_slots = len(rank_ids) * slots_per_rank
        if num_slots < num_logical:
            raise InvalidInputError(
                f"{num_logical} experts do not fit {len(rank_ids)} ranks x {slots_per_rank} slots = {num_slots};"
                f" {fewest_slots(num_logical, len(rank_ids))}"
            )
        row = (np.arange(num_slots) % num_logical).astype(np.int32)
        return cls(model, tuple(layer_ids), num_logical, tuple(RankId(r) for r in rank_ids), np.tile(row, (len(layer_ids), 1)))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layer_ids)

    @property
    def num_physical(self) -> int:
        """P."""
        return int(self.physical_to_logical.shape[1])

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.rank_ids)

    @property
    def slots_per_rank(self) -> int:
        """S = P / R."""
        return self.num_physical // self.num_ranks

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        """The layers as references, in row order."""
        return tuple(LayerRef(self.model, layer_id) for layer_id in self.layer_ids)

    def row(self, layer_id: int) -> Int32Array:
        """Row of a layer, shape (P,). Raises InvalidInputError when the table has no such layer."""
        if layer_id not in self.layer_ids:
            raise InvalidInputError(f"model {self.model!r} has no MoE layer {layer_id}; its layers are {list(self.layer_ids)}")
        row: Int32Array = self.physical_to_logical[self.layer_ids.index(layer_id)]
        return row

    def shares_row(self, layer_id: int) -> Float32Array | None:
        """Shares of a layer's slots, shape (P,); None where the engine's own dispatch applies."""
        self.row(layer_id)
        return None if self.shares is None else self.shares[self.layer_ids.index(layer_id)]

    @cached_property
    def replica_counts(self) -> Int32Array:
        """Number of slots that hold each expert. Shape (L, E), int32."""
        counts = np.zeros((self.num_layers, self.num_logical), np.int32)
        for layer, row in enumerate(self.physical_to_logical):
            counts[layer] = np.bincount(row[row >= 0], minlength=self.num_logical)
        counts.setflags(write=False)
        return counts

    @cached_property
    def logical_to_physical(self) -> Int32Array:
        """Slots of each expert, ascending, padded with -1. Shape (L, E, max replicas), int32."""
        return logical_to_physical(self.physical_to_logical, self.num_logical, max(1, int(self.replica_counts.max())))

    def by_rank(self) -> Int32Array:
        """The same map as (L, R, S)."""
        return self.physical_to_logical.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)

    def local_experts(self, layer_id: int, rank_id: int) -> Int32Array:
        """Experts in the slots of one rank, shape (S,), -1 = empty."""
        if rank_id not in self.rank_ids:
            raise InvalidInputError(f"rank {rank_id} is not among the ranks {ids_text(self.rank_ids)}")
        position = self.rank_ids.index(RankId(rank_id))
        held: Int32Array = self.row(layer_id).reshape(self.num_ranks, self.slots_per_rank)[position]
        return held

    def uncovered(self) -> list[tuple[LayerRef, int]]:
        """(layer, expert) pairs without any slot: invariant 3 wants this empty in every live map."""
        missing = np.argwhere(self.replica_counts == 0)
        return [(LayerRef(self.model, self.layer_ids[layer]), int(expert)) for layer, expert in missing.tolist()]

    def with_rows(
        self,
        rows: Mapping[int, npt.NDArray[np.integer]],
        shares: Mapping[int, npt.NDArray[np.float32]] | None = None,
    ) -> Table:
        """A copy in which the given layers (by layer id) have new rows, new shares, or both.

        A table with shares keeps having them: a layer whose slots change needs new ones, since old shares belong to old
        slots. A table without takes none: use `with_shares`. Raises InvalidInputError for either, and for unknown layers.
        """
        array = self.physical_to_logical.copy()
        given = shares or {}
        if given and self.shares is None:
            raise InvalidInputError(f"shares for layers {sorted(given)} of model {self.model!r}, whose table has none")
        for layer_id, row in rows.items():
            if self.shares is not None and layer_id not in given and not np.array_equal(self.row(layer_id), row):
                raise InvalidInputError(f"layer {layer_id} of model {self.model!r} gets other slots: it needs new shares too")
            self.row(layer_id)
            array[self.layer_ids.index(layer_id)] = row
        taken = None if self.shares is None else self.shares.copy()
        for layer_id, part in given.items():
            self.row(layer_id)
            if taken is not None:
                taken[self.layer_ids.index(layer_id)] = part
        return Table(self.model, self.layer_ids, self.num_logical, self.rank_ids, array, taken)

    def with_shares(self, shares: npt.NDArray[np.floating] | None) -> Table:
        """The same slots with these shares, shape (L, P), or with none."""
        return Table(self.model, self.layer_ids, self.num_logical, self.rank_ids, self.physical_to_logical, shares)

    def with_even_shares(self) -> Table:
        """The same slots; every replica of an expert takes the same share of its tokens."""
        return self.with_shares(even_shares(self.physical_to_logical, self.num_logical))

    def same_shape(self, other: Table) -> bool:
        """Whether both describe the same layers of the same model over the same ranks and slots."""
        return (
            self.model == other.model
            and self.layer_ids == other.layer_ids
            and self.num_logical == other.num_logical
            and self.rank_ids == other.rank_ids
            and self.num_physical == other.num_physical
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return (
            self.same_shape(other)
            and bool(np.array_equal(self.physical_to_logical, other.physical_to_logical))
            and self._shares_bytes() == other._shares_bytes()
        )

    def __hash__(self) -> int:
        maps = (self.physical_to_logical.tobytes(), self._shares_bytes())
        return hash((self.model, self.layer_ids, self.num_logical, self.rank_ids, *maps))

    def _shares_bytes(self) -> bytes | None:
        """The shares in their canonical encoding."""
        return None if self.shares is None else np.ascontiguousarray(self.shares, dtype=type_of_shares).tobytes()


def logical_to_physical(physical_to_logical: Int32Array, num_logical: int, width: int) -> Int32Array:
    """Slots of each expert, ascending, padded with -1. Input (L, P); output (L, E, width), int32.

    Raises InvalidInputError when an expert has more than `width` replicas.
    """
    num_layers, _ = physical_to_logical.shape
    table = np.full((num_layers, num_logical, width), -1, np.int32)
    for layer, row in enumerate(physical_to_logical):
        slots = np.flatnonzero(row >= 0)
        order = slots[np.argsort(row[slots], kind="stable")]
        experts = row[order]
        first = np.searchsorted(experts, np.arange(num_logical))
        copy = np.arange(order.size) - first[experts]
        if order.size and int(copy.max()) >= width:
            expert = int(experts[int(copy.argmax())])
            raise InvalidInputError(
                f"layer row {layer}: expert {expert} has {int(copy.max()) + 1} replicas but the replica table is {width} wide"
            )
        table[layer, experts, copy] = order
    return table


@dataclass(frozen=True, slots=True)
class Placement:
    """Every table of a deployment: the content of a generation.

    The order of the tables is part of its identity. A layer appears once. Either all tables have shares or none has: a
    deployment has one dispatch.
    """

    tables: tuple[Table, ...]

    def __post_init__(self) -> None:
        if not self.tables:
            raise InvalidInputError("a placement needs at least one table; the deployment registered no MoE layers")
        layers = [layer for table in self.tables for layer in table.layers]
        if len(set(layers)) != len(layers):
            twice = sorted({str(layer) for layer in layers if layers.count(layer) > 1})
            raise InvalidInputError(f"layers appear in more than one table: {', '.join(twice)}")
        if len({table.rank_ids for table in self.tables}) != 1:
            raise InvalidInputError("all tables of a placement must list the same ranks in the same order")
        without = [table.model for table in self.tables if table.shares is None]
        if without and len(without) < len(self.tables):
            raise InvalidInputError(
                f"{len(without)} of {len(self.tables)} tables have no shares (models {', '.join(sorted(set(without)))}):"
                " a deployment has one dispatch, so all tables have shares or none has"
            )

    @property
    def rank_ids(self) -> tuple[RankId, ...]:
        """Stable rank ids in column order."""
        return self.tables[0].rank_ids

    @property
    def has_shares(self) -> bool:
        """Whether it says which share of an expert's tokens each slot takes."""
        return self.tables[0].shares is not None

    def layers(self) -> Iterator[tuple[LayerRef, Table, Int32Array]]:
        """Every layer with its table and its row of shape (P,)."""
        for table in self.tables:
            for layer, row in zip(table.layers, table.physical_to_logical, strict=True):
                yield layer, table, row

    def table_of(self, layer: LayerRef) -> Table:
        """The table that holds a layer. Raises InvalidInputError when none does."""
        for table in self.tables:
            if table.model == layer.model and layer.layer_id in table.layer_ids:
                return table
        raise InvalidInputError(f"the placement has no layer {layer}")

    def row(self, layer: LayerRef) -> Int32Array:
        """Row of a layer, shape (P,)."""
        return self.table_of(layer).row(layer.layer_id)

    def shares_row(self, layer: LayerRef) -> Float32Array | None:
        """Shares of a layer's slots, shape (P,); None where the engine's own dispatch applies."""
        return self.table_of(layer).shares_row(layer.layer_id)

    def row_digests(self) -> dict[LayerRef, int]:
        """Digest of what each layer routes by: its row, and its shares where it has any."""
        return {layer: row_digest(layer, row, table.shares_row(layer.layer_id)) for layer, table, row in self.layers()}

    def with_rows(
        self,
        rows: Mapping[LayerRef, npt.NDArray[np.integer]],
        shares: Mapping[LayerRef, npt.NDArray[np.float32]] | None = None,
    ) -> Placement:
        """A copy in which the given layers have new rows, new shares, or both; see `Table.with_rows`."""
        given = shares or {}
        known = {layer for table in self.tables for layer in table.layers}
        unknown = sorted(str(layer) for layer in {*rows, *given} if layer not in known)
        if unknown:
            raise InvalidInputError(f"the placement has no layer {', '.join(unknown)}")
        tables = []
        for table in self.tables:
            mine = {layer.layer_id: row for layer, row in rows.items() if layer in table.layers}
            parts = {layer.layer_id: part for layer, part in given.items() if layer in table.layers}
            tables.append(table.with_rows(mine, parts) if mine or parts else table)
        return Placement(tuple(tables))

    def with_even_shares(self) -> Placement:
        """The same slots; every replica of an expert takes the same share of its tokens."""
        return Placement(tuple(table.with_even_shares() for table in self.tables))

    def without_shares(self) -> Placement:
        """The same slots, under the engine's own dispatch."""
        return self if not self.has_shares else Placement(tuple(table.with_shares(None) for table in self.tables))

    def digest(self) -> str:
        """Hex BLAKE2b-16 over every table, its shares too where it has any: with its number, the identity of a generation."""
        state = hashlib.blake2b(digest_size=16)
        for table in self.tables:
            head = [table.num_logical, table.num_physical, len(table.rank_ids), *table.rank_ids, *table.layer_ids]
            state.update(table.model.encode() + b"\0" + np.array(head, dtype=type_of_map).tobytes())
            state.update(np.ascontiguousarray(table.physical_to_logical, dtype=type_of_map).tobytes())
            if table.shares is not None:
                state.update(b"\0shares\0" + np.ascontiguousarray(table.shares, dtype=type_of_shares).tobytes())
        return state.hexdigest()
