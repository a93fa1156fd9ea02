"""Placements on the wire: packed [L, P] maps, and shares where there are any, beside their rank ids and layer ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eplb_service.errors import InvalidInputError
from eplb_service.pb.v1 import agent_pb2, common_pb2
from eplb_service.placement import Placement, Table
from eplb_service.rpc import fields
from eplb_service.rpc.arrays import array_from_pb, array_to_pb

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
TABLES_MAX = 4096

AgentMessage = agent_pb2.LayerChange | agent_pb2.LiveLayer


def row_to_pb(field: str, row: Sequence[int]) -> common_pb2.Array:
    """One layer's row, length P. Raises InvalidInputError for an entry that is no int32."""
    for entry in (min(row, default=0), max(row, default=0)):
        fields.whole(field, entry, least=INT32_MIN, most=INT32_MAX)
    return array_to_pb(np.array(row, np.int32), field)


def row_from_pb(message: common_pb2.Array, field: str) -> tuple[int, ...]:
    """One layer's row. Raises InvalidInputError for what is no array of integers."""
    return tuple(array_from_pb(message, field, dtypes="i", shape=("slots",)).tolist())


def shares_to_pb(field: str, shares: Sequence[float] | None) -> common_pb2.Array | None:
    """Shares of one layer's slots, length P; None = absent. Raises InvalidInputError for one that is no finite float32."""
    if shares is None:
        return None
    with np.errstate(over="ignore"):
        values = np.array(shares, np.float32)
    odd = [share for share, sent in zip(shares, values.tolist(), strict=True) if share != sent or abs(share) == float("inf")]
    if odd:
        raise InvalidInputError(f"{field}: {odd[0]!r} is no finite float32; shares are decided, digested and sent as such")
    return array_to_pb(values, field)


def shares_from_pb(message: AgentMessage, name: str, field: str) -> tuple[float, ...] | None:
    """Shares in the field `name` of a message, None where it is absent. What they may be, the receiver checks."""
    if not message.HasField(name):
        return None
    return tuple(array_from_pb(getattr(message, name), f"{field}.{name}", dtypes="f", shape=("slots",)).tolist())


def table_to_pb(table: Table) -> common_pb2.Table:
    """A table, with its shares where it has any."""
    return common_pb2.Table(
        model=fields.name("table.model", table.model),
        layer_ids=fields.ascending("table.layer_ids", table.layer_ids),
        num_logical=fields.whole("table.num_logical", table.num_logical, least=1, most=fields.EXTENT_MAX),
        rank_ids=[fields.rank_id("table.rank_ids", rank) for rank in table.rank_ids],
        physical_to_logical=array_to_pb(table.physical_to_logical, "table.physical_to_logical"),
        shares=None if table.shares is None else array_to_pb(table.shares, "table.shares"),
    )


def table_from_pb(message: common_pb2.Table, field: str = "table") -> Table:
    """A table. Raises InvalidInputError, naming the field.

    For a shape that does not fit its layer and rank ids, an expert out of range, or shares that do not say how each expert's
    tokens are split.
    """
    layer_ids = fields.ascending(f"{field}.layer_ids", message.layer_ids)
    array = array_from_pb(message.physical_to_logical, f"{field}.physical_to_logical", dtypes="i", shape=(len(layer_ids), "P"))
    shares = (
        array_from_pb(message.shares, f"{field}.shares", dtypes="f", shape=array.shape) if message.HasField("shares") else None
    )
    try:
        return Table(
            fields.name(f"{field}.model", message.model),
            layer_ids,
            fields.whole(f"{field}.num_logical", message.num_logical, least=1, most=fields.EXTENT_MAX),
            tuple(fields.rank_id(f"{field}.rank_ids", rank) for rank in message.rank_ids),
            array,
            shares,
        )
    except InvalidInputError as error:
        raise InvalidInputError(f"{field}: {error}") from None


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
