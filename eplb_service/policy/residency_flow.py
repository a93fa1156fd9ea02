"""The cheapest residencies that a layer cannot do without, exactly: a minimum-cost flow (OR-Tools) from experts to ranks.

Each expert asks for as many ranks as it has copies at least, in distinct failure domains where it must outlive one; each rank
offers its room. The flow is integral, so the answer is exact; when it falls short, its cut names what cannot be met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from ortools.graph.python import min_cost_flow

from eplb_service.errors import InvalidInputError

if TYPE_CHECKING:
    from eplb_service.policy.layer_task import LayerTask

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

PRICE_UNITS = 1_000_000
"""Whole numbers that one move costs in the flow; what is below only breaks ties between ranks."""

PRICE_MAX = 1e6
"""Prices above this many moves count as this many."""

NAMED_MAX = 8
"""Experts that a message names."""


def required_residencies(task: LayerTask) -> Int64Array:
    """Copies of each expert on each rank, shape (R, E): pins and the cheapest others that reach `copies_min` and `spread`.

    Raises InvalidInputError naming experts, ranks and slots when no placement has them.
    """
    pins = task.pinned.sum(axis=0)
    wanted = np.maximum(task.copies_min - pins, 0)
    free = task.room - task.pinned.sum(axis=1)
    _check_bounds(task, free)
    expert, rank, split = _arcs(task, wanted)
    num_experts, num_ranks = task.num_logical, task.num_ranks
    source, first_rank = num_experts, num_experts + 1
    sink = first_rank + num_ranks
    # One node for each (spread expert, domain): at most one of the expert's copies goes through it.
    middle, arc_of_middle = np.unique(expert[split] * num_ranks + task.domain_of[rank[split]], return_inverse=True)
    tail = expert.copy()
    tail[split] = sink + 1 + arc_of_middle
    each = np.where(task.distinct, 1, wanted[expert])
    each[split] = 1
    flow = min_cost_flow.SimpleMinCostFlow()
    add = flow.add_arcs_with_capacity_and_unit_cost
    add(np.full(num_experts, source), np.arange(num_experts), wanted, np.zeros(num_experts, np.int64))
    add(middle // num_ranks, sink + 1 + np.arange(middle.size), np.ones(middle.size, np.int64), np.zeros(middle.size, np.int64))
    arcs = add(tail, first_rank + rank, each, _costs(task, expert, rank))
    add(first_rank + np.arange(num_ranks), np.full(num_ranks, sink), free, np.zeros(num_ranks, np.int64))
    flow.set_nodes_supplies(np.array([source, sink]), np.array([wanted.sum(), -wanted.sum()]))
    flow.solve_max_flow_with_min_cost()
    used = np.asarray(flow.flows(arcs), np.int64) if arcs.size else np.zeros(0, np.int64)
    counts = task.pinned.astype(np.int64)
    np.add.at(counts, (rank, expert), used)
    short = np.flatnonzero(counts.sum(axis=0) < task.copies_min)
    if short.size:
        raise InvalidInputError(_shortage(task, counts, short))
    return counts


def is_possible(task: LayerTask) -> bool:
    """Whether some placement of the layer meets the task."""
    try:
        required_residencies(task)
    except InvalidInputError:
        return False
    return True


def _check_bounds(task: LayerTask, free: Int64Array) -> None:
    """Raises InvalidInputError for what contradicts itself before any expert competes with another."""
    if (free < 0).any():
        rank = int(np.argmax(free < 0))
        raise InvalidInputError(
            f"{task.where}: {int(task.pinned[rank].sum())} experts are pinned to rank {task.rank_name(rank)}, which has"
            f" {int(task.room[rank])} usable slots; pin fewer or give it more slots"
        )
    both = np.argwhere(task.pinned & ~task.allowed)
    if both.size:
        rank, expert = both[0].tolist()
        raise InvalidInputError(
            f"{task.where}: expert {expert} is pinned to rank {task.rank_name(rank)}, where it may not be (barred, or off the"
            f" node of its group)"
        )
    if (task.copies_min > task.copies_max).any():
        expert = int(np.argmax(task.copies_min > task.copies_max))
        raise InvalidInputError(
            f"{task.where}: expert {expert} needs {int(task.copies_min[expert])} copies (pins, resilience) but may have"
            f" {int(task.copies_max[expert])}; raise max_replicas or ask for less"
        )


def _arcs(task: LayerTask, wanted: Int64Array) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Where each expert that wants copies may get one: experts and ranks, and whether its copies must be in other domains."""
    open_ranks = task.allowed & (wanted > 0)[None, :] & (task.room > 0)[:, None]
    if task.distinct:
        open_ranks &= ~task.pinned
    domains = _domains_with_pins(task)
    several = task.spread & (domains.sum(axis=0) < 2)
    # A spread expert whose pins all lie in one domain needs its other copies elsewhere.
    open_ranks &= ~(domains[task.domain_of] & several[None, :])
    expert, rank = np.nonzero(open_ranks.T)
    split = task.spread[expert] & (domains.sum(axis=0) == 0)[expert]
    return expert.astype(np.int64), rank.astype(np.int64), split


def _domains_with_pins(task: LayerTask) -> BoolArray:
    """Shape (D, E): whether a domain has a pinned copy of an expert."""
    domains = np.zeros((int(task.domain_of.max()) + 1, task.num_logical), np.bool_)
    np.logical_or.at(domains, task.domain_of, task.pinned)
    return domains


def _costs(task: LayerTask, expert: Int64Array, rank: Int64Array) -> Int64Array:
    """Cost of each arc: the price of the residency; of equal ones, new ones go to the ranks with least load now."""
    price = np.minimum(task.price[rank, expert], PRICE_MAX)
    order = np.empty(task.num_ranks, np.int64)
    order[np.argsort(task.heights(), kind="stable")] = np.arange(task.num_ranks)
    cost: Int64Array = np.rint(price * PRICE_UNITS).astype(np.int64) + np.where(price > 0, order[rank], 0)
    return cost


def _shortage(task: LayerTask, counts: Int64Array, short: Int64Array) -> str:
    """What the cut says: experts that compete for ranks without room, how many slots they need there and how many there are.

    Reached from experts that lack copies: ranks that could still take one, and whatever could give way there. A spread expert
    goes to a domain at most once, so domains that it already uses are closed to it but for a change of rank.
    """
    expert, rank, split = _arcs(task, np.maximum(task.copies_min - task.pinned.sum(axis=0), 0))
    placed = (counts - task.pinned)[rank, expert]
    domain = task.domain_of[rank]
    taken = set(zip(expert[split & (placed > 0)].tolist(), domain[split & (placed > 0)].tolist(), strict=True))
    experts, ranks, queue = set(short.tolist()), set[int](), list(short.tolist())
    inside: set[tuple[int, int]] = set()  # spread copies that may change ranks within their domain

    def reach(positions: npt.NDArray[np.int64]) -> None:
        for position in sorted(set(positions.tolist()) - ranks):
            ranks.add(position)
            for arc in np.flatnonzero((rank == position) & (placed > 0)).tolist():
                rival = int(expert[arc])
                if split[arc] and (rival, int(domain[arc])) not in inside:
                    inside.add((rival, int(domain[arc])))
                    reach(rank[(expert == rival) & (domain == domain[arc])])
                if rival not in experts:
                    experts.add(rival)
                    queue.append(rival)

    while queue:
        name = queue.pop()
        mine = expert == name
        closed = np.array([(name, int(place)) in taken for place in domain[mine]], np.bool_) & split[mine]
        reach(rank[mine][~closed])
    names, where = sorted(experts), sorted(ranks)
    named = ", ".join(str(name) for name in names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")
    room = int((task.room - task.pinned.sum(axis=1))[where].sum())
    missing = int((task.copies_min - counts.sum(axis=0))[short].sum())
    return (
        f"{task.where}: experts {named} need {room + missing} slots on ranks {[task.rank_name(r) for r in where]}, which have"
        f" {room} beside what is pinned there; allow {'them' if len(names) > 1 else 'it'} more ranks, give those ranks more"
        f" slots, or ask for fewer pins, bars or protected experts"
    )
