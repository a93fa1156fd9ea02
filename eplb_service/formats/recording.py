"""A load recording: what was counted, for which layers, and what was left out on the way.

Engines count all layers of a model by their absolute ids, dense ones too, whose rows stay zero; some keep a ring of passes
that was not filled. Both are left out here, once for all formats, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import VALUES_MAX, check_size
from eplb_service.ids import ids_text

Float64Array = npt.NDArray[np.float64]

COUNT_MAX = 2**53
"""Larger counts are no counts of tokens: from here on float64 skips whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecording:
    """Loads of the MoE layers in a file.

    source: the format in words, such as `SGLang, mode stat`.
    loads: shape (W, L, E), float64, token assignments.
    layer_ids: absolute ids of the L layers; has_layer_ids: the file says them (else they are positions of its rows).
    num_layers: layers of the model by this file, dense ones too; None = the file has rows of MoE layers only.
    dense_layer_ids: layers without one token, left out.
    notes: what else was left out or taken once, a sentence each.

    >>> loads = np.array([[[0, 0], [3, 1]]])
    >>> recording_of(loads, source="example").layer_ids
    (1,)
    """

    source: str
    loads: Float64Array
    layer_ids: tuple[int, ...]
    has_layer_ids: bool = False
    num_layers: int | None = None
    dense_layer_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def row_ids(self) -> tuple[int, ...]:
        """Layers that have a row in the file, left out or not, ascending."""
        return tuple(sorted((*self.layer_ids, *self.dense_layer_ids)))

    @property
    def row_positions(self) -> tuple[int, ...]:
        """Where the L layers stand among the rows of the file."""
        index = {layer: position for position, layer in enumerate(self.row_ids)}
        return tuple(index[layer] for layer in self.layer_ids)


def recording_of(
    loads: npt.NDArray[np.generic],
    *,
    source: str,
    layer_ids: Sequence[int] | None = None,
    has_dense_rows: bool = True,
    notes: Sequence[str] = (),
) -> LoadRecording:
    """A recording from loads of shape (W, L, E): layers without a token are left out, unless all are.

    layer_ids: None = rows are layers 0..L-1. has_dense_rows: whether the file counts layers that have no experts.
    """
    ids = tuple(range(loads.shape[1])) if layer_ids is None else tuple(layer_ids)
    empty = np.logical_not(loads.any(axis=(0, 2))).tolist()
    dense = () if all(empty) else tuple(layer for layer, is_empty in zip(ids, empty, strict=True) if is_empty)
    kept = loads if not dense else loads[:, [not is_empty for is_empty in empty]]
    return LoadRecording(
        source=source,
        loads=np.asarray(kept, np.float64),
        layer_ids=tuple(layer for layer in ids if layer not in set(dense)),
        has_layer_ids=layer_ids is not None,
        num_layers=max(ids) + 1 if has_dense_rows else None,
        dense_layer_ids=dense,
        notes=tuple(notes),
    )


def engine_recording(
    counts: Float64Array, *, source: str, where: str, layer_ids: Sequence[int], has_dense_rows: bool, notes: Sequence[str] = ()
) -> LoadRecording:
    """A recording of an engine, from whole counts of shape (W, L, E): passes without a token are left out too.

    Raises InvalidInputError when nothing was counted, or all of it in one layer of many.
    """
    busy = counts.any(axis=(1, 2))
    if not busy.any():
        raise InvalidInputError(
            f"{where} holds no token ({counts.shape[0]} windows x {counts.shape[1]} layers x {counts.shape[2]} experts, all"
            " zero): start the engine's recording, serve requests, then dump it"
        )
    said = list(notes)
    if not busy.all():
        said.append(f"{int((~busy).sum()):,} of {busy.size:,} windows hold no token and are left out")
    made = recording_of(
        counts[busy] if not busy.all() else counts,
        source=source,
        layer_ids=layer_ids,
        has_dense_rows=has_dense_rows,
        notes=said,
    )
    if len(made.layer_ids) == 1 and len(made.dense_layer_ids) > 1:
        raise InvalidInputError(
            f"{where} counts tokens in layer {made.layer_ids[0]} alone, of {counts.shape[1]}: the engine's"
            " recorder did not know"
            " which layer it was in, so these are no loads to plan from"
        )
    return made


def summed_windows(recording: LoadRecording, num_windows: int) -> LoadRecording:
    """The same loads in fewer windows: neighbours are added up, in parts as even as possible.

    Raises InvalidInputError when there are not as many.
    """
    have = recording.loads.shape[0]
    if num_windows > have:
        raise InvalidInputError(f"{num_windows} windows of a recording that has {have}; it can be summed into at most {have}")
    starts = [index * have // num_windows for index in range(num_windows)]
    return replace(recording, loads=np.add.reduceat(recording.loads, starts, axis=0))


def checked_loads(array: npt.NDArray[np.generic], where: str) -> Float64Array:
    """Loads as (W, L, E), float64; a matrix is one window.

    Raises InvalidInputError on a wrong shape or type, negative, NaN or infinite values.
    """
    if array.dtype.kind not in "iuf":
        raise InvalidInputError(f"{where}: loads must be numbers; got {array.dtype}")
    if array.ndim not in (2, 3):
        raise InvalidInputError(
            f"{where}: loads must have shape (layers, experts) or (windows, layers, experts); got {array.shape}"
        )
    if array.size == 0:
        raise InvalidInputError(f"{where} is empty: loads of shape {array.shape} hold no number")
    check_size(array.shape, where)
    loads = np.array(array, np.float64)
    loads = loads[None] if loads.ndim == 2 else loads
    bad = np.argwhere(~np.isfinite(loads) | (loads < 0))
    if bad.size:
        window, layer, expert = bad[0].tolist()
        raise InvalidInputError(
            f"{where}: window {window} layer row {layer} expert {expert} is {loads[window, layer, expert]}"
            f" ({len(bad)} such value{'s' if len(bad) > 1 else ''}); loads must be finite and >= 0"
        )
    return loads


def checked_counts(array: object, where: str, axes: tuple[str, ...]) -> Float64Array:
    """Counts that an engine made, as float64 of one axis for each name. They are whole numbers from 0 to COUNT_MAX.

    Raises InvalidInputError naming the first value that is none; a negative one is most often an int32 that overflowed.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
        got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInputError(f"{where} must be an array of counts; got {got}")
    if array.ndim != len(axes) or array.size == 0:
        raise InvalidInputError(f"{where} must have the axes ({', '.join(axes)}), none of them empty; got shape {array.shape}")
    if array.size > VALUES_MAX:
        check_size(array.shape, where)
    counts = array.astype(np.float64)
    bad = np.argwhere(~((counts >= 0) & (counts <= COUNT_MAX) & (counts == np.floor(counts))))
    if bad.size:
        at = tuple(bad[0].tolist())
        named = " ".join(f"{axis} {index}" for axis, index in zip(axes, at, strict=True))
        overflow = " (an int32 that overflowed?)" if counts[at] < 0 else ""
        more = f", and {len(bad) - 1:,} more such value{'s' if len(bad) > 2 else ''}" if len(bad) > 1 else ""
        raise InvalidInputError(f"{where}: {named} is {array[at]}{overflow}{more}; counts are whole numbers >= 0, below 2^53")
    return counts


def left_out_text(recording: LoadRecording) -> str:
    """The dense layers of a recording in words; "" without any."""
    dense = recording.dense_layer_ids
    if not dense:
        return ""
    return f"layer{'s' if len(dense) > 1 else ''} {ids_text(dense)} left out, dense: no token"
