"""Greedy plans of layers whose constraints treat experts or ranks unlike: pins, bars, groups, experts to spread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb_service.policy.exchanges import improve_in_order, note_bins
from eplb_service.policy.kernels import Rules, allot_in_order, pack_in_order
from eplb_service.policy.layer_task import BoolArray, Int32Array, Int64Array, LayerTask
from eplb_service.policy.repair import repair_bins


def plan_task(task: LayerTask, *, off_home: BoolArray, target: float, steps_max: int) -> Int32Array:
    """Bins of a layer, shape (R, S): pinned copies first, then longest first where each may be; improved by exchanges.

    off_home: shape (R, E), where a soft group would rather not be: only used when experts find no place without, or as long as
    the layer is above `target` (imbalance). Raises InvalidInputError when no placement meets the constraints.
    """
    copies = task.copies_min.copy()
    order = np.argsort(-task.load / copies, kind="stable")
    share = allot_in_order(task.load, order, copies, task.copies_max, int(task.room.sum()))
    order = np.argsort(-share, kind="stable")
    pinned = task.pinned.astype(np.int64)
    to_place, room = copies - pinned.sum(axis=0), task.room - pinned.sum(axis=1)
    bins, rank_load = np.full(task.held.shape, -1, np.int32), task.base + pinned @ share
    rules = rules_of(task, ~task.allowed | off_home)
    pack_in_order(bins, rank_load, order, to_place, share, room, task.capacity, rules)
    left = to_place - residency_counts(bins, task.num_logical).sum(axis=0)
    if off_home.any() and left.any():
        rules = rules_of(task, ~task.allowed)
        note_bins(rules, bins)
        pack_in_order(bins, rank_load, order, left, share, room, task.capacity, rules)
    found = with_pins(task, bins)
    if not is_met(task, found):
        found = repair_bins(near(task, found))
    found = relieve(task, found, barred=~task.allowed | off_home, goal=0.0, steps_max=steps_max)
    if off_home.any():
        found = relieve(task, found, barred=~task.allowed, goal=target * task.fair, steps_max=steps_max)
    return found


def relieve(task: LayerTask, bins: Int32Array, *, barred: BoolArray, goal: float, steps_max: int) -> Int32Array:
    """Bins after exchanges of what is not pinned against the busiest rank, until it is at `goal`, or nothing helps."""
    counts = np.bincount(bins[bins >= 0], minlength=task.num_logical)
    share = task.load / np.maximum(counts, 1)
    rules = rules_of(task, barred)
    movable = np.full(bins.shape, -1, np.int32)
    for rank, held in enumerate(bins.tolist()):
        left = [expert for expert in held if expert >= 0]
        for expert in np.flatnonzero(task.pinned[rank]).tolist():
            left.remove(expert)
        movable[rank, : len(left)] = left
    note_bins(rules, movable)
    order = np.argsort(-share, kind="stable")
    room = task.room - task.pinned.sum(axis=1)
    rank_load = task.heights(bins) * task.capacity
    improve_in_order(movable, order, share, rank_load, room, task.capacity, rules, steps_max, goal)
    return with_pins(task, movable)


def rules_of(task: LayerTask, barred: BoolArray) -> Rules:
    """The rules of a layer in which only pinned copies are placed. Barred: shape (R, E)."""
    closed = barred | task.pinned if task.distinct else barred.copy()
    return Rules(closed, task.pinned.copy(), task.spread, task.domain_of, task.distinct)


def with_pins(task: LayerTask, bins: Int32Array) -> Int32Array:
    """Bins of copies that are not pinned, and the pinned ones behind them."""
    result = bins.copy()
    for rank, expert in np.argwhere(task.pinned).tolist():
        result[rank, int((result[rank] >= 0).sum())] = expert
    return result


def near(task: LayerTask, bins: Int32Array) -> LayerTask:
    """The task as if the bins were what is held: to repair them rather than the live row."""
    held = np.full(task.held.shape, -1, np.int32)
    for rank, wanted in enumerate(bins):
        free = np.flatnonzero(task.usable[rank])
        experts = wanted[wanted >= 0]
        held[rank, free[: experts.size]] = experts
    return replace(task, held=held, price=(~residency_counts(bins, task.num_logical).astype(np.bool_)).astype(np.float64))


def residency_counts(bins: Int32Array, num_logical: int) -> Int64Array:
    """Copies of each expert on each rank, shape (R, E)."""
    counts = np.zeros((bins.shape[0], num_logical), np.int64)
    rank, slot = np.nonzero(bins >= 0)
    np.add.at(counts, (rank, bins[rank, slot]), 1)
    return counts


def is_met(task: LayerTask, bins: Int32Array) -> bool:
    """Whether bins respect everything that the task asks for."""
    counts = residency_counts(bins, task.num_logical)
    copies = counts.sum(axis=0)
    if (copies < task.copies_min).any() or (copies > task.copies_max).any():
        return False
    if (counts[~task.allowed] > 0).any() or (counts < task.pinned).any() or (task.distinct and counts.max() > 1):
        return False
    if (counts.sum(axis=1) > task.room).any():
        return False
    domains = np.zeros((int(task.domain_of.max()) + 1, task.num_logical), np.int64)
    np.add.at(domains, task.domain_of, counts)
    return bool(((domains > 0).sum(axis=0)[task.spread] > 1).all())
