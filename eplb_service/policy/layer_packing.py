"""Packing problems of one layer for the exact model: the whole layer, or what a few ranks hold."""

from __future__ import annotations

import numpy as np

from eplb_service.policy.layer_task import BoolArray, Int32Array, Int64Array, LayerTask
from eplb_service.policy.one_slot import fewest_by_rules
from eplb_service.policy.packing_model import NOWHERE, SEVERAL, Packing

ROUNDING = 1e-9
"""Relative excess over a height that is rounding alone."""


def copies_range(task: LayerTask, height: float) -> tuple[Int64Array, Int64Array] | None:
    """Fewest and most copies of each expert in any packing not above `height`. Both: shape (E,). None = there is none.

    Fewest: a copy may not exceed the height on the fastest rank. Most: what is left when every other expert has its fewest.
    """
    serving = task.room > 0
    top = float((height * (1 + ROUNDING) * task.capacity - task.base)[serving].max(initial=0.0))
    if top <= 0 and task.load.any():
        return None
    wanted = np.ceil(task.load / top * (1 - ROUNDING)) if top > 0 else np.ones(task.num_logical)
    fewest = np.maximum(fewest_by_rules(task), np.minimum(wanted, task.num_ranks + 1).astype(np.int64))
    spare = int(task.room.sum()) - int(fewest.sum())
    most = np.minimum(np.minimum(fewest + max(0, spare), task.copies_max), task.allowed[serving].sum(axis=0))
    return None if spare < 0 or (most < fewest).any() else (fewest, most)


def whole_layer(
    task: LayerTask, height: float, off_home: BoolArray, off_home_max: int, group_of: Int64Array | None
) -> tuple[Packing, Int64Array] | None:
    """The packing of all experts, and the ranks it is on. off_home: shape (R, E). None = nothing is at or under the height.

    group_of: shape (E,), experts that must share a node, whichever; None = no such rule.
    """
    bounds = copies_range(task, height)
    if bounds is None:
        return None
    fewest, most = bounds
    ranks = np.flatnonzero(task.room > 0)
    number = most - fewest + 1
    first = np.concatenate([[0], np.cumsum(number)])
    expert = np.repeat(np.arange(task.num_logical), number)
    copies = fewest[expert] + np.arange(expert.size) - first[expert]
    packing = Packing(
        first=first,
        copies=copies,
        share=task.load[expert] / copies,
        room=task.room[ranks],
        capacity=task.capacity[ranks],
        base=task.base[ranks],
        allowed=task.allowed[ranks],
        pinned=task.pinned[ranks],
        price=task.price[ranks],
        off_home=off_home[ranks],
        off_home_max=off_home_max,
        spread=task.spread,
        domain_of=task.domain_of[ranks],
        elsewhere=np.full(task.num_logical, NOWHERE),
        group_of=group_of,
        node_of=None if group_of is None else task.node_of[ranks],
    )
    return packing, ranks


def few_ranks(
    task: LayerTask, bins: Int32Array, ranks: Int64Array, off_home: BoolArray, off_home_max: int
) -> tuple[Packing, Int64Array]:
    """The packing of what some ranks hold, with as many copies as now, and the experts it is of. Bins: shape (R, S), distinct.

    off_home_max: over the whole layer.
    """
    copies_in = np.bincount(bins[ranks][bins[ranks] >= 0], minlength=task.num_logical)
    copies = np.bincount(bins[bins >= 0], minlength=task.num_logical)
    experts = np.flatnonzero(copies_in)
    outside = np.ones(task.num_ranks, np.bool_)
    outside[ranks] = False
    elsewhere = np.full(experts.size, NOWHERE)
    for position, expert in enumerate(experts.tolist()):
        if task.spread[expert]:
            domains = np.unique(task.domain_of[outside & (bins == expert).any(axis=1)])
            elsewhere[position] = NOWHERE if domains.size == 0 else domains[0] if domains.size == 1 else SEVERAL
    away = sum(int(off_home[rank, held[held >= 0]].sum()) for rank, held in enumerate(bins) if outside[rank])
    packing = Packing(
        first=np.arange(experts.size + 1),
        copies=copies_in[experts],
        share=task.load[experts] / copies[experts],
        room=task.room[ranks],
        capacity=task.capacity[ranks],
        base=task.base[ranks],
        allowed=task.allowed[np.ix_(ranks, experts)],
        pinned=task.pinned[np.ix_(ranks, experts)],
        price=task.price[np.ix_(ranks, experts)],
        off_home=off_home[np.ix_(ranks, experts)],
        off_home_max=off_home_max - away,
        spread=task.spread[experts],
        domain_of=task.domain_of[ranks],
        elsewhere=elsewhere,
    )
    return packing, experts
