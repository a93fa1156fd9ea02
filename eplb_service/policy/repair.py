"""Makes a row legal with few moves: empties what may not be used and places experts that have lost their last replica."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.limits import Limits


def _drop_illegal(slots: npt.NDArray[np.int32], limits: Limits, num_logical: int) -> None:
    """Empty dead and unusable slots, second copies on a rank, and copies beyond the most allowed (the last ones go)."""
    slots[~limits.usable] = EMPTY_SLOT
    copies = np.zeros(num_logical, np.int64)
    for rank, held in enumerate(slots):
        seen: set[int] = set()
        for slot, expert in enumerate(held.tolist()):
            if expert == EMPTY_SLOT:
                continue
            if (limits.distinct and expert in seen) or copies[expert] >= limits.copies_max:
                slots[rank, slot] = EMPTY_SLOT
                continue
            seen.add(expert)
            copies[expert] += 1


def _slot_for(
    slots: npt.NDArray[np.int32], load: npt.NDArray[np.float64], limits: Limits, num_logical: int
) -> tuple[int, int] | None:
    """Where to put an expert: a free slot of the least loaded rank, else the slot of the copy whose loss raises least load."""
    copies = np.bincount(slots[slots >= 0], minlength=num_logical)
    share = load / np.maximum(copies, 1)
    rank_load = np.array([share[held[held >= 0]].sum() for held in slots]) / limits.capacity
    free = np.argwhere((slots == EMPTY_SLOT) & limits.usable)
    if free.size:
        rank, slot = min(free.tolist(), key=lambda where: (rank_load[where[0]], where))
        return rank, slot
    spare = [
        (load[slots[r, s]] / (copies[slots[r, s]] - 1), r, s)
        for r, s in np.argwhere(slots >= 0).tolist()
        if copies[slots[r, s]] > 1
    ]
    if not spare:
        return None
    _, rank, slot = min(spare)
    return rank, slot


def repair_row(
    row: npt.NDArray[np.integer], load: npt.NDArray[np.float64], limits: Limits, num_logical: int
) -> npt.NDArray[np.int32]:
    """A legal row near the given one: one move for each expert that no legal slot holds. Row: shape (P,); load: shape (E,).

    Raises InvalidInputError when the experts do not fit the usable slots.
    """
    slots = np.asarray(row, np.int32).reshape(limits.usable.shape).copy()
    _drop_illegal(slots, limits, num_logical)
    missing = sorted(set(range(num_logical)) - set(slots[slots >= 0].tolist()), key=lambda expert: (-load[expert], expert))
    for expert in missing:
        where = _slot_for(slots, load, limits, num_logical)
        if where is None:
            raise InvalidInputError(f"{num_logical} experts do not fit {limits.num_slots} usable slots")
        slots[where] = expert
    return slots.reshape(-1)
