"""The fewest moves when no rank has more than one usable slot: exact, so that such layers need no search.

A rank then carries one copy or nothing, so the height is that of the hottest copy and only the number of copies of each expert
counts: at least ceil(load / height), and each copy that an expert lacks is one move into a slot that an expert with a copy too
many gives up. Where bars, pins, node spread or group prices say which rank may hold what, the same question is an assignment,
solved as a flow of least cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.layer_task import Float64Array, Int32Array, Int64Array, LayerTask

PRICE_UNITS = 1_000_000
"""Units of a move in the flow's integer costs: group prices are rounded to a millionth of a move."""

ROUNDING = 1e-12
"""Relative excess over the height that is rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slots:
    """The ranks that have a slot, shape (slots,). ranks: their positions, ascending. held: what each holds, -1 = nothing."""

    ranks: Int64Array
    held: Int64Array


def fewest_moves_one_slot(task: LayerTask, target: float) -> Int32Array | None:
    """The row with the fewest moves whose imbalance under even split is at most `target`; with group prices, the least price.

    When no row is that good: the best balance there is, with the fewest moves that reach it. Returns shape (R, S) like
    `task.held`, None for a layer that this does not cover: a rank with two usable slots, ranks that differ in capacity or in
    work of their own, experts that fit in no way.
    """
    serving = np.flatnonzero(task.room > 0)
    if serving.size == 0 or int(task.room.max()) > 1 or np.unique(task.capacity[serving]).size > 1:
        return None
    if np.unique(task.base[serving]).size > 1:
        return None
    slots = _Slots(ranks=serving, held=np.where(task.usable, task.held, EMPTY_SLOT)[serving].max(axis=1).astype(np.int64))
    speed, base = float(task.capacity[serving[0]]), float(task.base[serving[0]])
    wanted = max(target * task.fair, float((task.base / task.capacity).max())) * speed - base
    heights = _copy_heights(task, serving.size)
    heights = np.concatenate([[wanted], heights[heights > wanted]])
    assigned = _lowest(task, slots, heights)
    if assigned is None:
        return None
    row = np.full(task.held.shape, EMPTY_SLOT, np.int32)
    row[serving, task.usable[serving].argmax(axis=1)] = assigned
    return row


def _copy_heights(task: LayerTask, num_slots: int) -> Float64Array:
    """Every load that a copy can have, ascending, from the least that the number of slots allows for all of them together."""
    most = max(1, num_slots - task.num_logical + 1)
    heights = np.unique(task.load[:, None] / np.arange(1, most + 1)[None, :])
    low, high = 0, heights.size
    while low < high:
        middle = (low + high) // 2
        if copies_needed(task, float(heights[middle])).sum() <= num_slots:
            high = middle
        else:
            low = middle + 1
    return heights[low:]


def fewest_by_rules(task: LayerTask) -> Int64Array:
    """Fewest copies of each expert that pins, resilience and coverage ask for, whatever the load. Shape (E,)."""
    fewest = np.maximum(task.copies_min, np.where(task.spread, 2, 1))
    for expert in np.flatnonzero(task.pinned.any(axis=0)).tolist():
        domains = np.unique(task.domain_of[task.pinned[:, expert]])
        pins = int(task.pinned[:, expert].sum())
        fewest[expert] = max(int(fewest[expert]), pins + (bool(task.spread[expert]) and domains.size < 2))
    return fewest


def copies_needed(task: LayerTask, height: float) -> Int64Array:
    """Fewest copies of each expert such that none carries more than `height` tokens and the layer's rules hold. Shape (E,).

    Beyond the number of slots where no number of copies is enough.
    """
    never = int(task.room.sum()) + 1
    if height <= 0:
        wanted = np.where(task.load > 0, never, 1)
    else:
        wanted = np.ceil(np.minimum(task.load / height * (1.0 - ROUNDING), never)).astype(np.int64)
    needed = np.maximum(wanted, fewest_by_rules(task))
    result: Int64Array = np.where(needed > task.copies_max, never, needed)
    return result


def _lowest(task: LayerTask, slots: _Slots, heights: Float64Array) -> Int64Array | None:
    """What each slot holds at the first of the heights (ascending) that is possible, None when none is."""
    for height in heights[:2].tolist():  # the second is the optimum where only numbers of copies matter
        assigned = _assigned(task, slots, height)
        if assigned is not None:
            return assigned
    best = _assigned(task, slots, float(heights[-1]))
    low, high = 2, heights.size - 1
    while best is not None and low < high:
        middle = (low + high) // 2
        assigned = _assigned(task, slots, float(heights[middle]))
        if assigned is None:
            low = middle + 1
        else:
            high, best = middle, assigned
    return best


def _assigned(task: LayerTask, slots: _Slots, height: float) -> Int64Array | None:
    """What each slot holds at the least price such that no copy is above the height, None when that is impossible."""
    needed = copies_needed(task, height)
    if needed.sum() > slots.ranks.size:
        return None
    if _any_expert_anywhere(task, slots):
        return _by_count(task, slots, needed)
    return _by_flow(task, slots, needed)


def _any_expert_anywhere(task: LayerTask, slots: _Slots) -> bool:
    """Whether only the numbers of copies matter: no bars, pins, group prices, nor experts to spread over shared domains."""
    ranks = slots.ranks
    if task.pinned.any() or not task.allowed[ranks].all():
        return False
    if task.spread.any() and np.unique(task.domain_of[ranks]).size < ranks.size:
        return False
    held = slots.held[:, None] == np.arange(task.num_logical)[None, :]
    return bool((task.price[ranks] == np.where(held, 0.0, 1.0)).all())


def _by_count(task: LayerTask, slots: _Slots, needed: Int64Array) -> Int64Array:
    """Experts short of copies take empty slots, then those of the copies whose loss leaves the least load on the others."""
    held = slots.held.copy()
    copies = np.bincount(held[held >= 0], minlength=task.num_logical)
    arrivals = np.repeat(np.arange(task.num_logical), np.maximum(0, needed - copies))
    for expert in np.flatnonzero(copies > task.copies_max).tolist():
        held[np.flatnonzero(held == expert)[int(task.copies_max[expert]) :]] = EMPTY_SLOT
        copies[expert] = task.copies_max[expert]
    for _ in range(arrivals.size - int((held < 0).sum())):
        left = np.where(copies > needed, task.load / np.maximum(copies - 1, 1), np.inf)
        expert = int(left.argmin())
        held[np.flatnonzero(held == expert)[-1]] = EMPTY_SLOT
        copies[expert] -= 1
    node_of = task.node_of[slots.ranks].tolist()
    empty = np.flatnonzero(held < 0).tolist()
    for expert in arrivals.tolist():
        near = {node_of[slot] for slot in np.flatnonzero(slots.held == expert).tolist()}
        place = next((slot for slot in empty if node_of[slot] in near), empty[0])
        held[place] = expert
        empty.remove(place)
    return held


def _by_flow(task: LayerTask, slots: _Slots, needed: Int64Array) -> Int64Array | None:
    """The assignment of least price as a flow: expert -> (its failure domains) -> slot. None when there is none.

    Exactly the copies needed flow: a row with more keeps its rules when copies are taken away, and costs no less. Copies that
    are there, cost nothing and are in nobody's way stay beside them.
    """
    from ortools.graph.python import min_cost_flow  # noqa: PLC0415  (a while to import, rarely needed)

    size = slots.ranks.size
    pinned = task.pinned[slots.ranks]
    if task.pinned.sum() > pinned.sum() or (pinned.sum(axis=1) > 1).any() or (pinned & ~task.allowed[slots.ranks]).any():
        return None
    held = np.where(pinned.any(axis=1), pinned.argmax(axis=1), EMPTY_SLOT)
    supply = needed - pinned.sum(axis=0)
    flow = min_cost_flow.SimpleMinCostFlow()
    sink, extra = size + task.num_logical, size + task.num_logical + 1
    domain_of = task.domain_of[slots.ranks]
    arcs: list[tuple[int, int, int]] = []
    for expert in np.flatnonzero(supply > 0).tolist():
        places = np.flatnonzero((held < 0) & task.allowed[slots.ranks, expert])
        prices = np.round(task.price[slots.ranks[places], expert] * PRICE_UNITS).astype(np.int64).tolist()
        node_in = dict.fromkeys(np.unique(domain_of[places]).tolist(), size + expert)
        if task.spread[expert]:
            for domain in node_in:
                room = int(needed[expert]) - 1 - int(pinned[domain_of == domain, expert].sum())
                flow.add_arc_with_capacity_and_unit_cost(size + expert, extra, room, 0)
                node_in[domain], extra = extra, extra + 1
        for place, price in zip(places.tolist(), prices, strict=True):
            flow.add_arc_with_capacity_and_unit_cost(node_in[int(domain_of[place])], place, 1, price)
            arcs.append((flow.num_arcs() - 1, place, expert))
        flow.set_node_supply(size + expert, int(supply[expert]))
    for place in np.flatnonzero(held < 0).tolist():
        flow.add_arc_with_capacity_and_unit_cost(place, sink, 1, 0)
    flow.set_node_supply(sink, -int(supply.sum()))
    if supply.any() and flow.solve() != flow.OPTIMAL:
        return None
    for arc, place, expert in arcs:
        if flow.flow(arc):
            held[place] = expert
    return _with_free_copies(task, slots, held)


def _with_free_copies(task: LayerTask, slots: _Slots, held: Int64Array) -> Int64Array:
    """Slots that nobody needs keep what they hold, where that is allowed and costs nothing."""
    copies = np.bincount(held[held >= 0], minlength=task.num_logical)
    for place in np.flatnonzero((held < 0) & (slots.held >= 0)).tolist():
        rank, expert = int(slots.ranks[place]), int(slots.held[place])
        if task.allowed[rank, expert] and task.price[rank, expert] <= 0 and copies[expert] < task.copies_max[expert]:
            held[place] = expert
            copies[expert] += 1
    return held
