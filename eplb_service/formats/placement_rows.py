"""What placement files of all formats have in common: rows of expert ids, checked, made into a table, and back.

Formats differ in what they say beside the rows. SGLang has a row for every layer, dense ones too; TensorRT-LLM names MoE
layers by absolute id; vllm-ascend numbers MoE layers from 0. Neither of the first two says how many ranks or experts there
are. What a file does not say is taken from what is expected, and what it says must agree with that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.formats.files import VALUES_MAX, short_text
from eplb_service.ids import RankId, ids_text
from eplb_service.placement import EMPTY_SLOT, Table

Int64Array = npt.NDArray[np.int64]

ID_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a file must agree with, and is taken to describe where it does not say. None = the file's own.

    layer_ids: absolute ids of the layers that are wanted, ascending. num_rows, positions: how many rows an array without ids
    may have when it has dense layers too, and which of these are wanted. rank_ids: in column order.
    """

    model: str | None = None
    num_logical: int | None = None
    rank_ids: tuple[RankId, ...] | None = None
    layer_ids: tuple[int, ...] | None = None
    num_layers: int | None = None
    num_rows: int | None = None
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRows:
    """What a placement file says. None = it does not say.

    rows: shape (L, P), int64, experts by slot, rank-major; -1 = empty. layer_ids: absolute ids of the rows; None = MoE layers
    in order. rank_ids: ranks by their ids; num_ranks: a format that has ranks by position alone. for_all_layers: the one row
    is meant for every layer. num_layers: rows of an engine that counts dense layers too. layer_updates_per_iter: of
    TensorRT-LLM's YAML, kept by a conversion.
    """

    rows: Int64Array
    layer_ids: tuple[int, ...] | None = None
    rank_ids: tuple[RankId, ...] | None = None
    num_ranks: int | None = None
    num_logical: int | None = None
    model: str | None = None
    shares: npt.NDArray[np.float64] | None = None
    for_all_layers: bool = False
    num_layers: int | None = None
    layer_updates_per_iter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFile:
    """A placement that was read. notes: what was filled in, a sentence each. The last two as in PlacementRows."""

    table: Table
    notes: tuple[str, ...] = ()
    num_layers: int | None = None
    layer_updates_per_iter: int = 0


def rows_of(by_layer: Mapping[int, object], where: str, layer_word: str = "layer") -> Int64Array:
    """Lists of expert ids, one a layer, as an array of shape (L, P).

    Raises InvalidInputError naming the layer, and the slot that holds no whole number; floats are none, also whole ones.
    """
    if not by_layer:
        raise InvalidInputError(f"{where} has no MoE layer: a placement has a row of expert ids for each")
    lengths: dict[int, int] = {}
    for layer, row in by_layer.items():
        if not isinstance(row, list) or not row:
            raise InvalidInputError(f"{where}: {layer_word} {layer} must be a list of expert ids; got {short_text(row)}")
        lengths[layer] = len(row)
        for slot, expert in enumerate(row):
            if type(expert) is not int or abs(expert) > ID_MAX:
                raise InvalidInputError(
                    f"{where}: {layer_word} {layer} slot {slot} is {short_text(expert)}; expert ids are whole numbers"
                )
        if sum(lengths.values()) > VALUES_MAX:
            raise InvalidInputError(f"{where} has more than {VALUES_MAX:,} slots in all")
    first, width = next(iter(lengths.items()))
    for layer, length in lengths.items():
        if length != width:
            raise InvalidInputError(
                f"{where}: {layer_word} {layer} has {length} slots, {layer_word} {first} has {width}; all layers have as many"
            )
    return np.array(list(by_layer.values()), np.int64)


def array_rows(array: npt.NDArray[np.generic], where: str) -> Int64Array:
    """An array of expert ids as (L, P). Raises InvalidInputError for other types and axes."""
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{where}: a placement holds expert ids, which are integers; got {array.dtype}")
    if array.ndim not in (1, 2) or array.size == 0:
        raise InvalidInputError(f"{where}: a placement has shape (layers, slots); got {array.shape}")
    bad = np.argwhere(np.less(array, EMPTY_SLOT) | np.greater(array, ID_MAX))
    if bad.size:
        *layer, slot = bad[0].tolist()
        raise InvalidInputError(
            f"{where}: {f'layer row {layer[0]} ' if layer else ''}slot {slot} is {array[tuple(bad[0])]}; ids are"
            " >= 0, -1 is an empty slot"
        )
    rows: Int64Array = np.atleast_2d(array.astype(np.int64))
    return rows


def placement_from_rows(
    given: PlacementRows, expected: Expectation, where: str, default_row: Sequence[int] | None = None
) -> PlacementFile:
    """The table that a file describes, with every expert in a slot.

    default_row: how the engine fills a layer that its file leaves out; None = such a layer is refused. Raises
    InvalidInputError naming layer and slot of what cannot be.
    """
    rank_ids = _ranks(given, expected, where)
    num_logical = _num_logical(given, expected, where)
    rows, layer_ids, shares, notes = _wanted_layers(given, expected, where, default_row)
    if rows.shape[1] % len(rank_ids):
        fits = -(-rows.shape[1] // len(rank_ids)) * len(rank_ids)
        raise InvalidInputError(
            f"{where}: {rows.shape[1]} slots do not divide over {len(rank_ids)} ranks; {fits} would"
            f" ({max(0, fits - num_logical)}"
            f" redundant experts)"
        )
    try:
        table = Table(expected.model or given.model or "model", layer_ids, num_logical, rank_ids, rows.astype(np.int32))
        table = table if shares is None else table.with_shares(shares)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error
    _check_covered(table, where, is_sure=given.num_logical is not None or expected.num_logical is not None)
    return PlacementFile(
        table=table, notes=notes, num_layers=given.num_layers, layer_updates_per_iter=given.layer_updates_per_iter
    )


def _ranks(given: PlacementRows, expected: Expectation, where: str) -> tuple[RankId, ...]:
    wanted, num_ranks = expected.rank_ids, given.num_ranks
    if given.rank_ids is not None:
        if wanted not in (None, given.rank_ids):
            texts = [short_text([int(rank) for rank in ids or ()]) for ids in (given.rank_ids, wanted)]
            raise InvalidInputError(f"{where} has rank_ids {texts[0]}, expected {texts[1]}")
        return given.rank_ids
    if num_ranks is not None:
        if wanted is not None and len(wanted) != num_ranks:
            raise InvalidInputError(f"{where} is for {num_ranks} ranks, expected {len(wanted)}")
        return wanted or tuple(RankId(rank) for rank in range(num_ranks))
    if wanted is None:
        raise InvalidInputError(f"{where} does not say how many ranks its {given.rows.shape[1]} slots are on: give --ranks")
    return wanted


def _num_logical(given: PlacementRows, expected: Expectation, where: str) -> int:
    if given.num_logical is not None and expected.num_logical not in (None, given.num_logical):
        raise InvalidInputError(f"{where} has num_logical {given.num_logical}, expected {expected.num_logical}")
    known = given.num_logical if expected.num_logical is None else expected.num_logical
    return max(1, int(given.rows.max()) + 1) if known is None else known


def _wanted_layers(
    given: PlacementRows, expected: Expectation, where: str, default_row: Sequence[int] | None
) -> tuple[Int64Array, tuple[int, ...], npt.NDArray[np.float64] | None, tuple[str, ...]]:
    """Rows, ids and shares of the layers that are wanted; notes about layers that the file does not have."""
    rows, wanted = given.rows, expected.layer_ids
    if given.for_all_layers:
        count = expected.num_layers if wanted is None else len(wanted)
        if count is None:
            raise InvalidInputError(f"{where} is one list for all layers, and does not say which these are: give --layer-ids")
        return np.repeat(rows, count, axis=0), wanted or tuple(range(count)), None, ()
    if given.layer_ids is None:
        rows = _by_position(rows, expected, where)
        return rows, wanted or tuple(range(rows.shape[0])), given.shares, ()
    if wanted is None:
        if expected.num_layers not in (None, len(given.layer_ids)):
            if expected.num_rows == len(given.layer_ids):
                kept = list(expected.positions)
                shares = None if given.shares is None else given.shares[kept]
                return rows[kept], tuple(given.layer_ids[row] for row in kept), shares, ()
            raise InvalidInputError(f"{where}: a placement of {len(given.layer_ids)} layers, expected {expected.num_layers}")
        return rows, given.layer_ids, given.shares, ()
    index = {layer: row for row, layer in enumerate(given.layer_ids)}
    missing = tuple(layer for layer in wanted if layer not in index)
    if missing and (default_row is None or len(missing) == len(wanted)):
        raise InvalidInputError(
            f"{where} has layers {ids_text(given.layer_ids)}, but none for layer {ids_text(missing)} (layer_ids, expected"
            f" {ids_text(wanted)})"
        )
    made = np.array([rows[index[layer]] if layer in index else default_row for layer in wanted], np.int64)
    notes = (f"layer {ids_text(missing)} is not in {where}: taken to be as the engine starts it",) if missing else ()
    shares = None if given.shares is None else given.shares[[index[layer] for layer in wanted]]
    return made, wanted, shares, notes


def _by_position(rows: Int64Array, expected: Expectation, where: str) -> Int64Array:
    """Rows without ids: as many as there are MoE layers, or a row for dense layers too, which is left out."""
    count = expected.num_layers if expected.layer_ids is None else len(expected.layer_ids)
    if count is None or rows.shape[0] == count:
        return rows
    if expected.num_rows == rows.shape[0]:
        return rows[list(expected.positions)]
    raise InvalidInputError(f"{where}: a placement of {rows.shape[0]} layers, expected {count}")


def _check_covered(table: Table, where: str, *, is_sure: bool) -> None:
    """Raises InvalidInputError when an expert has no slot. is_sure: their number was said, not guessed by the largest id."""
    missing = table.uncovered()
    if not missing:
        return
    layer, expert = missing[0]
    largest = int(table.physical_to_logical.max())
    row, slot = np.argwhere(table.physical_to_logical == largest)[0].tolist()
    guess = f"; by its largest id, layer {table.layer_ids[row]} slot {slot}, there are {largest + 1} experts: or give --experts"
    raise InvalidInputError(
        f"{where}: layer {layer.layer_id} has no slot for expert {expert} ({len(missing)} are"
        f" missing){'' if is_sure else guess}"
    )


def check_writable(table: Table, engine: str, *, may_repeat: bool) -> None:
    """Raises InvalidInputError for what an engine's file cannot say: empty slots, shares, two copies on one rank."""
    if table.shares is not None:
        raise InvalidInputError(
            f"the placement has shares of weighted dispatch, which files of {engine} cannot say: plan under the"
            " engine's own dispatch"
        )
    empty = np.argwhere(table.physical_to_logical == EMPTY_SLOT)
    if empty.size:
        row, slot = empty[0].tolist()
        raise InvalidInputError(
            f"layer {table.layer_ids[row]} slot {slot} (rank {slot // table.slots_per_rank}) is empty,"
            f" {len(empty)} in all; files of"
            f" {engine} name an expert for every slot"
        )
    if may_repeat:
        return
    ordered = np.sort(table.by_rank(), axis=2)
    repeats = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if repeats.size:
        row, rank, at = repeats[0].tolist()
        expert = int(ordered[row, rank, at])
        slots = rank * table.slots_per_rank + np.flatnonzero(table.by_rank()[row, rank] == expert)
        raise InvalidInputError(
            f"layer {table.layer_ids[row]} has expert {expert} in slots {slots[0]} and {slots[1]}, both on rank"
            f" {rank}; {engine} loads"
            " one of them and sends tokens to both"
        )
