"""Load reports on the wire. What the wire cannot hold is refused here; whether a report is believed, `window` decides."""

from __future__ import annotations

from eplb_service.errors import InvalidInputError
from eplb_service.ids import DeploymentId
from eplb_service.pb.v1 import agent_pb2, common_pb2
from eplb_service.rpc import fields
from eplb_service.rpc.arrays import array_from_pb, array_to_pb
from eplb_service.window.report import CountBasis, LoadReport, Semantics, TableCounts

UNKNOWN_LAYER = (1 << 32) - 1
"""Layer id on the wire of counts whose layer the recorder did not know."""

TABLES_MAX = 256

_SEMANTICS: dict[int, Semantics] = {
    agent_pb2.REPORT_SEMANTICS_LOCAL_TOKENS: Semantics.LOCAL_TOKENS,
    agent_pb2.REPORT_SEMANTICS_GLOBAL_TOKENS: Semantics.GLOBAL_TOKENS,
}
_BASES: dict[int, CountBasis] = {
    agent_pb2.COUNT_BASIS_LOGICAL: CountBasis.LOGICAL,
    agent_pb2.COUNT_BASIS_CONVERTED_AT_END: CountBasis.CONVERTED_AT_END,
}


def report_to_pb(deployment: DeploymentId, report: LoadReport) -> agent_pb2.LoadReport:
    """One rank's window. Raises InvalidInputError for counts that do not travel (see `arrays`) or numbers out of range.

    Step times are passed on as they are, infinite or not: the planner answers such a report with its reason.
    """
    return agent_pb2.LoadReport(
        deployment=fields.deployment_id("report.deployment", deployment),
        address=common_pb2.Address(
            rank_id=fields.rank_id("report.rank_id", report.rank_id),
            incarnation=fields.whole("report.incarnation", report.incarnation),
            group_id=fields.whole("report.group_id", report.group_id),
        ),
        window_index=fields.whole("report.window_index", report.window_index),
        boundary_begin=fields.whole("report.boundary_begin", report.boundary_begin),
        boundary_end=fields.whole("report.boundary_end", report.boundary_end),
        forward_passes=fields.whole("report.forward_passes", report.forward_passes),
        tokens=fields.whole("report.tokens", report.tokens),
        semantics={meaning: number for number, meaning in _SEMANTICS.items()}[report.semantics],  # type: ignore[arg-type]
        phase=fields.phase_to_pb(report.phase),
        warmup=report.warmup,
        live_digest_begin=fields.whole("report.live_digest_begin", report.live_digest_begin),
        live_digest_end=fields.whole("report.live_digest_end", report.live_digest_end),
        step_time_min_s=report.step_time_min_s,
        step_time_mean_s=report.step_time_mean_s,
        step_time_max_s=report.step_time_max_s,
        tables=[_table_to_pb(table) for table in report.tables],
        basis={meaning: number for number, meaning in _BASES.items()}[report.basis],  # type: ignore[arg-type]
    )


def report_from_pb(message: agent_pb2.LoadReport) -> tuple[DeploymentId, LoadReport]:
    """One rank's window and whose it is. Raises InvalidInputError naming the field that does not fit."""
    address = fields.address_from_pb(message.address, "report.address")
    fields.whole("report.tables", len(message.tables), most=TABLES_MAX)
    num_layers = sum(len(table.layer_ids) for table in message.tables)
    fields.whole("report.tables.layer_ids", num_layers, most=fields.LAYERS_MAX)
    report = LoadReport(
        rank_id=address.rank_id,
        incarnation=address.incarnation,
        group_id=address.group_id,
        window_index=fields.whole("report.window_index", message.window_index),
        boundary_begin=fields.whole("report.boundary_begin", message.boundary_begin),
        boundary_end=fields.whole("report.boundary_end", message.boundary_end),
        forward_passes=fields.whole("report.forward_passes", message.forward_passes),
        tokens=fields.whole("report.tokens", message.tokens),
        semantics=fields.choice("report.semantics", message.semantics, _SEMANTICS),
        phase=fields.choice("report.phase", message.phase, fields.PHASES),
        warmup=message.warmup,
        live_digest_begin=fields.whole("report.live_digest_begin", message.live_digest_begin),
        live_digest_end=fields.whole("report.live_digest_end", message.live_digest_end),
        step_time_min_s=message.step_time_min_s,
        step_time_mean_s=message.step_time_mean_s,
        step_time_max_s=message.step_time_max_s,
        tables=tuple(_table_from_pb(table, f"report.tables[{i}]") for i, table in enumerate(message.tables)),
        basis=fields.choice("report.basis", message.basis, _BASES),
    )
    return fields.deployment_id("report.deployment", message.deployment), report


def _table_to_pb(table: TableCounts) -> agent_pb2.TableCounts:
    layer_ids = [
        UNKNOWN_LAYER if layer is None else fields.whole("report.tables.layer_ids", layer, most=fields.EXTENT_MAX)
        for layer in table.layer_ids
    ]
    counts = array_to_pb(table.counts, "report.tables.counts")
    return agent_pb2.TableCounts(model=fields.name("report.tables.model", table.model), layer_ids=layer_ids, counts=counts)


def _table_from_pb(message: agent_pb2.TableCounts, field: str) -> TableCounts:
    for layer in message.layer_ids:
        if fields.EXTENT_MAX < layer < UNKNOWN_LAYER:
            raise InvalidInputError(f"{field}.layer_ids: {layer} is out of range; expected 0 to {fields.EXTENT_MAX}")
    shape = ("sub-windows", len(message.layer_ids), "E")
    return TableCounts(
        model=fields.name(f"{field}.model", message.model),
        layer_ids=tuple(None if layer == UNKNOWN_LAYER else layer for layer in message.layer_ids),
        counts=array_from_pb(message.counts, f"{field}.counts", dtypes="iuf", shape=shape),
    )
