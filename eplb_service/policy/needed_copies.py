"""Copies that any row under a height limit has: put in place before a search, which may never find the way to them."""

from __future__ import annotations

import numpy as np

from eplb_service.policy.anneal_state import Float64Array, Int32Array, Int64Array, Layer
from eplb_service.policy.layer_task import BoolArray


def with_copies(layer: Layer, slots: Int32Array, limit: float) -> tuple[Layer, Int32Array]:
    """The layer and the row with as many copies of each expert as any row under a height limit has: ceil(load / limit).

    A search that starts without them may never find the way: the overload of a copy must first get worse somewhere else. The
    missing copies take spare slots of the least loaded ranks that may hold them, or slots whose expert can go to a spare one;
    what finds no place is left to the search.
    """
    speed = 1.0 / float(layer.inverse[layer.rank_of].min())
    needed = np.ceil(layer.load / (limit * speed) * (1.0 - 1e-12)).astype(np.int64)
    needed = np.minimum(np.maximum(needed, layer.copies_min), layer.copies_max)
    copies = np.bincount(slots[slots >= 0], minlength=layer.load.size)
    if (copies >= needed).all():
        return layer._replace(copies_min=np.minimum(needed, copies)), slots
    slots = slots.copy()
    for expert in np.flatnonzero(copies < needed).tolist():
        while copies[expert] < needed[expert]:
            spare = _spare_slots(layer, slots, copies, needed)
            slot = _slot_for_copy(layer, slots, copies, spare, expert)
            if slot < 0:
                slot = _slot_after_shift(layer, slots, copies, spare, expert)
            if slot < 0:
                break
            slots[slot] = expert
            copies = np.bincount(slots[slots >= 0], minlength=layer.load.size)
    return layer._replace(copies_min=np.minimum(needed, copies)), slots


def _spare_slots(layer: Layer, slots: Int32Array, copies: Int64Array, needed: Int64Array) -> BoolArray:
    """Slots that are free, or hold a copy that its expert does not need. Shape (N,)."""
    spare = np.append((copies > needed) & (layer.spread == 0), True)
    found: BoolArray = spare[slots] & (layer.frozen == 0)
    return found


def _may_take(layer: Layer, slots: Int32Array, expert: int) -> BoolArray:
    """Slots on ranks that may hold an expert and do not. Shape (N,)."""
    holding = np.zeros(layer.base.size, np.bool_)
    holding[layer.rank_of[slots == expert]] = True
    may: BoolArray = np.isfinite(layer.price[layer.rank_of, expert]) & ~holding[layer.rank_of] & (layer.frozen == 0)
    return may


def _height_without(layer: Layer, slots: Int32Array, copies: Int64Array) -> Float64Array:
    """Height of each slot's rank without what the slot holds, under even split. Shape (N,)."""
    part = np.append(layer.load / np.maximum(copies, 1), 0.0)
    work = layer.base + np.bincount(layer.rank_of, weights=part[slots], minlength=layer.base.size)
    height: Float64Array = (work[layer.rank_of] - part[slots]) * layer.inverse[layer.rank_of]
    return height


def _slot_for_copy(layer: Layer, slots: Int32Array, copies: Int64Array, spare: BoolArray, expert: int) -> int:
    """The spare slot where a copy of an expert makes its rank least loaded; -1 = there is none."""
    may = spare & _may_take(layer, slots, expert)
    return int(np.where(may, _height_without(layer, slots, copies), np.inf).argmin()) if may.any() else -1


def _slot_after_shift(layer: Layer, slots: Int32Array, copies: Int64Array, spare: BoolArray, expert: int) -> int:
    """The slot that is best for a copy of an expert, once what it holds has gone to a spare slot (in place); -1 = none."""
    height = _height_without(layer, slots, copies)
    for slot in np.argsort(np.where(_may_take(layer, slots, expert), height, np.inf), kind="stable").tolist():
        moved = int(slots[slot])
        if not _may_take(layer, slots, expert)[slot]:
            break
        if moved < 0 or layer.spread[moved]:
            continue
        room = spare & _may_take(layer, slots, moved)
        if room.any():
            slots[int(np.where(room, height, np.inf).argmin())] = moved
            return int(slot)
    return -1
