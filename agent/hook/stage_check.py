"""Whether a Stage can be carried out here: checked in full before a byte moves.

Each refusal closes a way in which a map and its weights were seen to part (vllm#41141, sglang#33111, vllm-ascend#9151).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.control import Copy, LayerChange, LiveLayer, RefusalCode, Stage
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.placement import EMPTY_SLOT, row_digest
from eplb_service.replica_shares import Float32Array, as_array, checked_shares

Refusal = tuple[RefusalCode, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What a row of a layer must be like. slots: per rank; expert_bytes: of all tensors of one expert."""

    num_logical: int
    slots: int
    expert_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """What a rank knows of itself and its group. group_rank_ids: in column order of rows.

    weighted: the engine's dispatch takes shares: every change of a layer must bring them, and no other engine gets any.
    """

    rank_id: RankId
    group_rank_ids: tuple[RankId, ...]
    layers: Mapping[LayerRef, LayerShape]
    replica_table_width: int
    staging_bytes: int
    weighted: bool = False


def check_stage(stage: Stage, shape: RankShape, live: Mapping[LayerRef, LiveLayer], weights_version: int) -> Refusal | None:
    """Why the chunk cannot be staged, or None."""
    if stage.weights_version != weights_version:
        return RefusalCode.WEIGHTS_VERSION, (
            f"planned on weights version {stage.weights_version}, this rank serves version {weights_version}; plan again"
        )
    if not stage.layers:
        return RefusalCode.INVALID, "the chunk changes no layer"
    if len({change.layer for change in stage.layers}) != len(stage.layers):
        return RefusalCode.INVALID, f"a layer appears twice among {[str(change.layer) for change in stage.layers]}"
    for change in stage.layers:
        refusal = _check_row(change, shape, live)
        if refusal is not None:
            return refusal
    return _check_copies(stage, shape, live) or _check_budget(stage, shape)


def _check_row(change: LayerChange, shape: RankShape, live: Mapping[LayerRef, LiveLayer]) -> Refusal | None:
    layer, known = change.layer, shape.layers.get(change.layer)
    if known is None:
        return RefusalCode.INVALID, f"this rank serves no MoE layer {layer}"
    num_physical = known.slots * len(shape.group_rank_ids)
    if len(change.new_row) != num_physical:
        return RefusalCode.INVALID, f"layer {layer}: row of {len(change.new_row)} slots, expected {num_physical}"
    if change.old_digest != live[layer].digest:
        return RefusalCode.OLD_DIGEST, (
            f"layer {layer}: planned from row {change.old_digest:#x}, this rank routes by {live[layer].digest:#x}"
            f" of generation {live[layer].generation}"
        )
    if min(change.new_row) < EMPTY_SLOT or max(change.new_row) >= known.num_logical:
        return (
            RefusalCode.INVALID,
            f"layer {layer}: experts must be -1 to {known.num_logical - 1}; got {min(change.new_row)} to {max(change.new_row)}",
        )
    return _check_content(change, known, shape, live[layer].row)


def _check_content(change: LayerChange, known: LayerShape, shape: RankShape, routed: Sequence[int]) -> Refusal | None:
    """The new row and its shares, which are of the layer's size, against what they claim to be and what the engine holds.

    routed: the row that the layer routes by now.
    """
    layer, row = change.layer, np.array(change.new_row, dtype=np.int32)
    try:
        shares = _shares_of(change, row, shape)
    except InvalidInputError as error:
        return RefusalCode.INVALID, str(error)
    digest = row_digest(layer, row, shares)
    if digest != change.new_digest:
        return RefusalCode.NEW_DIGEST, f"layer {layer}: the row has digest {digest:#x}, the message says {change.new_digest:#x}"
    replicas = np.bincount(row[row >= 0], minlength=known.num_logical)
    lost = np.setdiff1d(np.array(routed), row[row >= 0])  # an expert that died with a rank may stay away; no other may go
    if lost[lost >= 0].size:
        return RefusalCode.INVALID, f"layer {layer}: expert {int(lost[lost >= 0][0])} would have no replica"
    if int(replicas.max()) > shape.replica_table_width:
        return RefusalCode.INVALID, (
            f"layer {layer}: expert {int(replicas.argmax())} has {int(replicas.max())} replicas,"
            f" this engine's tables hold {shape.replica_table_width}"
        )
    return None


def _shares_of(change: LayerChange, row: npt.NDArray[np.int32], shape: RankShape) -> Float32Array | None:
    """Shares of a new row, None without weighted dispatch. Raises InvalidInputError where the engine cannot take them."""
    given = as_array(change.new_shares)
    if given is None and shape.weighted:
        raise InvalidInputError(f"layer {change.layer}: it comes without shares, this engine dispatches by them")
    if given is None:
        return None
    if not shape.weighted:
        raise InvalidInputError(f"layer {change.layer}: it comes with shares, this engine's dispatch knows none")
    num_logical = shape.layers[change.layer].num_logical
    checked: Float32Array = checked_shares(given[None], row[None], num_logical, layers=(str(change.layer),))[0]
    return checked


def _check_copies(stage: Stage, shape: RankShape, live: Mapping[LayerRef, LiveLayer]) -> Refusal | None:
    """Every slot whose expert changes is filled by exactly one copy: of a slot that holds it now, a relay, or from a backup."""
    changes = {change.layer: change for change in stage.layers}
    position = {rank: index for index, rank in enumerate(shape.group_rank_ids)}
    filled: Counter[tuple[LayerRef, int]] = Counter()
    for index, copy in enumerate(stage.copies):
        change = changes.get(copy.layer)
        is_source = copy.is_from_backup or copy.source_rank in position
        if change is None or not is_source or copy.target_rank not in position:
            return RefusalCode.INVALID, f"{describe(copy)}: layer or rank is not part of this chunk and group"
        slots = shape.layers[copy.layer].slots
        if not (0 <= copy.source_slot < slots and 0 <= copy.target_slot < slots):
            return RefusalCode.INVALID, f"{describe(copy)}: slots run from 0 to {slots - 1}"
        target = position[copy.target_rank] * slots + copy.target_slot
        wrong = _wrong_with_source(index, stage.copies, _held(copy, position, slots, live[copy.layer].row))
        if wrong is not None:
            return RefusalCode.INVALID, f"{describe(copy)}: {wrong}"
        if change.new_row[target] != copy.expert:
            return RefusalCode.INVALID, f"{describe(copy)}: the new row puts expert {change.new_row[target]} there"
        filled[copy.layer, target] += 1
    for change in stage.layers:
        old = live[change.layer].row
        for slot, expert in enumerate(change.new_row):
            wanted = int(expert not in (old[slot], EMPTY_SLOT))
            if filled[change.layer, slot] != wanted:
                return RefusalCode.INVALID, (
                    f"layer {change.layer} slot {slot}: expert {old[slot]} → {expert} needs {wanted} copies, the chunk has"
                    f" {filled[change.layer, slot]}"
                )
    return None


def _held(copy: Copy, position: Mapping[RankId, int], slots: int, row: Sequence[int]) -> int:
    """What the source of a copy holds now; of a backup, which is asked later, the expert itself."""
    return copy.expert if copy.is_from_backup else row[position[copy.source_rank] * slots + copy.source_slot]


def _wrong_with_source(index: int, copies: Sequence[Copy], held: int) -> str | None:
    """Why the copy at an index cannot find its expert, or None. held: what its source slot holds now."""
    relay = copies[index]
    if relay.is_from_backup and (relay.is_relay or relay.source_slot):
        return "a copy from a backup has no source slot and passes on nothing"
    if not relay.is_relay:
        return None if held == relay.expert >= 0 else f"the source slot holds expert {held}"
    if not 0 <= relay.relay_of < index:
        return f"it is copy {index} and a relay of copy {relay.relay_of}; relays are of earlier copies, 0 to {index - 1}"
    first = copies[relay.relay_of]
    if first.is_relay:
        return f"it is a relay of copy {relay.relay_of}, itself a relay of copy {first.relay_of}; relays are one deep"
    if (first.layer, first.expert) != (relay.layer, relay.expert):
        return f"copy {relay.relay_of}, which it passes on, is of {first.layer} expert {first.expert}"
    if (first.target_rank, first.target_slot) != (relay.source_rank, relay.source_slot):
        return f"copy {relay.relay_of}, which it passes on, goes to rank {first.target_rank} slot {first.target_slot}"
    return None


def _check_budget(stage: Stage, shape: RankShape) -> Refusal | None:
    mine = [copy for copy in stage.copies if copy.target_rank == shape.rank_id]
    need = sum(shape.layers[copy.layer].expert_bytes for copy in mine)
    if need > shape.staging_bytes:
        return RefusalCode.BUDGET, (
            f"{len(mine)} experts of {need} bytes exceed the staging budget of {shape.staging_bytes} bytes; use smaller chunks"
        )
    return None


def describe(copy: Copy) -> str:
    """One copy in words."""
    return (
        f"{'relay' if copy.is_relay else 'copy'} of {copy.layer} expert {copy.expert} from {copy.source}"
        f" to rank {copy.target_rank} slot {copy.target_slot}"
    )


def local_changes(change: LayerChange, old_row: Sequence[int], slots: int, position: int) -> list[int]:
    """Local slots of the rank at `position` whose expert changes."""
    first = position * slots
    return [slot for slot in range(slots) if change.new_row[first + slot] != old_row[first + slot]]
