"""Checks of one load report by itself: shape, signs, order of its own numbers. Each refusal closes a kind of field report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_service.window.report import Alarm, CountBasis, Expected, LoadReport, Refusal, Refused, TableCounts, TableShape

SUB_WINDOWS_MAX = 256

CountArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]


def _refused(reason: Refusal, sentence: str) -> Refused:
    return Refused(reason=reason, sentence=sentence)


def check_identity(report: LoadReport, expected: Expected) -> Refused | None:
    """Whether the report is from a rank, life and group that serve now, of batches that count."""
    rank = report.rank_id
    if rank not in expected.incarnations:
        return _refused(
            Refusal.UNKNOWN_RANK, f"rank {rank} is not among the ranks {sorted(expected.incarnations)} of this group"
        )
    if report.incarnation != expected.incarnations[rank]:
        return _refused(
            Refusal.WRONG_INCARNATION,
            f"rank {rank} reports as incarnation {report.incarnation} but serves as {expected.incarnations[rank]}",
        )
    if report.group_id != expected.group_id:
        return _refused(
            Refusal.WRONG_GROUP, f"rank {rank} reports for group {report.group_id} but serves in {expected.group_id}"
        )
    if report.warmup:
        return _refused(Refusal.WARMUP, f"window {report.window_index} of rank {rank} holds warm-up batches and is dropped")
    if expected.phase is not None and report.phase is not expected.phase:
        return _refused(
            Refusal.WRONG_PHASE, f"window {report.window_index} of rank {rank} is {report.phase}, planned is {expected.phase}"
        )
    return check_generation(report, expected)


def check_generation(report: LoadReport, expected: Expected) -> Refused | None:
    """Whether the counts belong to live maps that are known, and to one map where it mattered."""
    digests = {report.live_digest_begin, report.live_digest_end}
    if report.basis is CountBasis.CONVERTED_AT_END and len(digests) > 1:
        return _refused(
            Refusal.MIXED_GENERATIONS,
            f"window {report.window_index} of rank {report.rank_id} spans a flip ({report.live_digest_begin:#x} to"
            f" {report.live_digest_end:#x}) and was converted only at its end; count logical experts or convert at the flip",
        )
    if expected.live_digests is not None and not digests <= expected.live_digests:
        unknown = min(digests - expected.live_digests)
        return _refused(
            Refusal.WRONG_GENERATION,
            f"window {report.window_index} of rank {report.rank_id} was served by live map {unknown:#x}, which is none of the"
            f" {len(expected.live_digests)} that this deployment may serve by now",
        )
    return None


def check_range(report: LoadReport, expected: Expected) -> Refused | None:
    """Boundaries within the window, numbers of steps, tokens and seconds that can be."""
    begin, end = report.window_index * expected.window_steps, (report.window_index + 1) * expected.window_steps
    if report.window_index < 0 or not begin <= report.boundary_begin < report.boundary_end <= end:
        return _refused(
            Refusal.BAD_BOUNDARIES,
            f"rank {report.rank_id} reports boundaries [{report.boundary_begin}, {report.boundary_end}) for window"
            f" {report.window_index}, which is [{begin}, {end})",
        )
    if report.forward_passes < 0 or report.tokens < 0:
        return _refused(
            Refusal.NEGATIVE,
            f"rank {report.rank_id} window {report.window_index}: {report.forward_passes} forwards and {report.tokens} tokens;"
            f" neither can be negative",
        )
    times = (report.step_time_min_s, report.step_time_mean_s, report.step_time_max_s)
    if not (0 <= times[0] <= times[1] <= times[2] < float("inf")):
        return _refused(
            Refusal.BAD_STEP_TIMES,
            f"rank {report.rank_id} window {report.window_index}: step times min {times[0]}, mean {times[1]}, max {times[2]} s;"
            f" they must be finite and ascend from 0",
        )
    return None


def _check_rows(report: LoadReport, counts: TableCounts) -> Refused | None:
    """One block of counts by itself: integers, not negative, each row with its layer id, once."""
    where = f"rank {report.rank_id} window {report.window_index} model {counts.model!r}"
    array = np.asarray(counts.counts)
    if any(layer is None for layer in counts.layer_ids):
        row = counts.layer_ids.index(None)
        return _refused(Refusal.MISSING_LAYER_ID, f"{where}: row {row} has no layer id; the recorder lost its layer context")
    if array.dtype.kind not in "iu":
        return _refused(Refusal.NOT_INTEGER, f"{where}: counts are {array.dtype}; token assignments are integers")
    if array.ndim != 3 or array.shape[1] != len(counts.layer_ids) or not 1 <= array.shape[0] <= SUB_WINDOWS_MAX:
        return _refused(
            Refusal.WRONG_SHAPE,
            f"{where}: counts of shape {array.shape} for {len(counts.layer_ids)} layers;"
            f" expected (1 to {SUB_WINDOWS_MAX} sub-windows, layers, experts)",
        )
    if len(set(counts.layer_ids)) != len(counts.layer_ids):
        return _refused(Refusal.WRONG_SHAPE, f"{where}: a layer id appears twice in {list(counts.layer_ids)}")
    if array.size and int(array.min()) < 0:
        sub, row, expert = np.argwhere(array < 0)[0].tolist()
        return _refused(
            Refusal.NEGATIVE,
            f"{where}: sub-window {sub} layer {counts.layer_ids[row]} expert {expert} counts"
            f" {int(array[sub, row, expert])} tokens",
        )
    return None


def _rows_of(report: LoadReport, model: str) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    for counts in report.tables:
        if counts.model == model:
            for row, layer in enumerate(counts.layer_ids):
                if layer is not None:
                    yield layer, np.asarray(counts.counts)[:, row, :]


def _missing_or_unknown(report: LoadReport, expected: Expected) -> Refused | None:
    """Every expected layer once with its E; other layers only if they counted nothing (dense layers have ids, no experts)."""
    for model in sorted({counts.model for counts in report.tables} | {shape.model for shape in expected.tables}):
        widths = {layer: shape.num_logical for shape in expected.tables if shape.model == model for layer in shape.layer_ids}
        seen: set[int] = set()
        where = f"rank {report.rank_id} window {report.window_index} model {model!r}"
        for layer, row in _rows_of(report, model):
            if layer not in widths and not row.any():
                continue
            if layer not in widths or layer in seen:
                what = "is counted twice" if layer in seen else f"is not an MoE layer of it (those are {sorted(widths)})"
                return _refused(Refusal.WRONG_SHAPE, f"{where}: layer {layer} {what}")
            if row.shape[-1] != widths[layer]:
                return _refused(
                    Refusal.WRONG_SHAPE, f"{where}: layer {layer} counts {row.shape[-1]} experts but has {widths[layer]}"
                )
            seen.add(layer)
        if set(widths) - seen:
            return _refused(Refusal.WRONG_SHAPE, f"{where}: layers {sorted(set(widths) - seen)} are missing")
    return None


def extract_counts(report: LoadReport, expected: Expected) -> Refused | dict[TableShape, CountArray]:
    """The counts by expected table, shape (V, L, E), rows in the table's layer order; or why they cannot be used."""
    for counts in report.tables:
        refused = _check_rows(report, counts)
        if refused is not None:
            return refused
    refused = _missing_or_unknown(report, expected)
    if refused is not None:
        return refused
    lengths = {np.asarray(counts.counts).shape[0] for counts in report.tables}
    if len(lengths) > 1:
        return _refused(
            Refusal.WRONG_SHAPE,
            f"rank {report.rank_id} window {report.window_index}: tables of {sorted(lengths)} sub-windows; all need as many",
        )
    result: dict[TableShape, CountArray] = {}
    for shape in expected.tables:
        rows = dict(_rows_of(report, shape.model))
        stacked = np.stack([rows[layer] for layer in shape.layer_ids], axis=1)
        if stacked.dtype.kind == "u" and stacked.size and int(stacked.max()) > np.iinfo(np.int64).max:
            return _refused(Refusal.NOT_INTEGER, f"rank {report.rank_id} window {report.window_index}: a count exceeds 2^63-1")
        small = not stacked.size or int(stacked.max()) <= np.iinfo(np.int32).max
        result[shape] = stacked.astype(np.int32) if small else stacked.astype(np.int64)
    return result


def one_layer_alarm(report: LoadReport, tables: dict[TableShape, CountArray]) -> dict[Alarm, str]:
    """Whether all counts of a model with several layers fell on one of them (a recorder without layer context)."""
    for model in sorted({shape.model for shape in tables}):
        layers = [layer for shape in tables if shape.model == model for layer in shape.layer_ids]
        busy = [
            shape.layer_ids[row]
            for shape, counts in tables.items()
            if shape.model == model
            for row in np.flatnonzero(counts.any(axis=(0, 2))).tolist()
        ]
        if len(layers) > 1 and len(busy) == 1:
            return {
                Alarm.ONE_LAYER_ONLY: f"rank {report.rank_id} window {report.window_index}: of {len(layers)} layers of model"
                f" {model!r} only layer {busy[0]} counted tokens; its recorder may put all layers on one"
            }
    return {}
