"""Placements on the wire: packed [L, P] maps beside their rank ids and layer ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.pb.v1 import common_pb2
from eplb_service.placement import Placement, Table
from eplb_service.rpc import fields
from eplb_service.rpc.arrays import array_from_pb, array_to_pb

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
TABLES_MAX = 4096


def row_to_pb(field: str, row: Sequence[int]) -> common_pb2.Array:
    """One layer's row, length P. Raises InvalidInputError for an entry that is no int32."""
    for entry in (min(row, default=0), max(row, default=0)):
        fields.whole(field, entry, least=INT32_MIN, most=INT32_MAX)
    return array_to_pb(np.array(row, np.int32), field)


def table_to_pb(table: Table, shares: npt.NDArray[np.floating] | None = None) -> common_pb2.Table:
    """A table, with the share of its expert's tokens that each slot takes where a policy gave them: shape (L, P)."""
    if shares is not None and shares.shape != table.physical_to_logical.shape:
        raise InvalidInputError(
            f"shares of model {table.model!r} have shape {shares.shape}; expected {table.physical_to_logical.shape}"
        )
    return common_pb2.Table(
        model=fields.name("table.model", table.model),
        layer_ids=fields.ascending("table.layer_ids", table.layer_ids),
        num_logical=fields.whole("table.num_logical", table.num_logical, least=1, most=fields.EXTENT_MAX),
        rank_ids=[fields.rank_id("table.rank_ids", rank) for rank in table.rank_ids],
        physical_to_logical=array_to_pb(table.physical_to_logical, "table.physical_to_logical"),
        shares=None if shares is None else array_to_pb(shares.astype(np.float32), "table.shares"),
    )


def table_from_pb(message: common_pb2.Table, field: str = "table") -> Table:
    """A table. Raises InvalidInputError for a shape that does not fit its layer and rank ids, or an expert out of range."""
    layer_ids = fields.ascending(f"{field}.layer_ids", message.layer_ids)
    array = array_from_pb(message.physical_to_logical, f"{field}.physical_to_logical", dtypes="i", shape=(len(layer_ids), "P"))
    try:
        return Table(
            fields.name(f"{field}.model", message.model),
            layer_ids,
            fields.whole(f"{field}.num_logical", message.num_logical, least=1, most=fields.EXTENT_MAX),
            tuple(fields.rank_id(f"{field}.rank_ids", rank) for rank in message.rank_ids),
            array,
        )
    except InvalidInputError as error:
        raise InvalidInputError(f"{field}: {error}") from None


def shares_from_pb(message: common_pb2.Table, field: str = "table") -> npt.NDArray[np.float32] | None:
    """Shares of a table, shape (L, P), finite and >= 0; None when the engine's own dispatch applies."""
    if not message.HasField("shares"):
        return None
    shape = tuple(message.physical_to_logical.shape)
    shares = array_from_pb(message.shares, f"{field}.shares", dtypes="f", shape=shape)
    if not np.isfinite(shares).all() or (shares < 0).any():
        raise InvalidInputError(f"{field}.shares: entries must be finite and >= 0; the least is {shares.min(initial=0.0)}")
    return shares.astype(np.float32)


def placement_to_pb(placement: Placement) -> common_pb2.Placement:
    """All tables of a deployment, with their digest."""
    return common_pb2.Placement(tables=[table_to_pb(table) for table in placement.tables], digest=placement.digest())


def placement_from_pb(message: common_pb2.Placement, field: str = "placement") -> Placement:
    """All tables of a deployment. Raises InvalidInputError when they do not make a placement or have another digest."""
    fields.whole(f"{field}.tables", len(message.tables), least=1, most=TABLES_MAX)
    placement = Placement(tuple(table_from_pb(table, f"{field}.tables[{i}]") for i, table in enumerate(message.tables)))
    digest = placement.digest()
    if message.digest and message.digest != digest:
        raise InvalidInputError(f"{field}: its tables have digest {digest}, but it claims {message.digest[:64]!r}")
    return placement
