"""Inner loops of the choice of homes for expert groups, compiled. G groups, N nodes, E experts; home: node of each group."""
# compiled functions take positions only

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.policy.compiled import compiled

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

EXPORTS_MAX = 64
"""Replicas off their group's node that are counted in a layer; more count as this many."""

ROUNDING = 1e-9
"""Excess over a node's capacity that is rounding, relative."""


@compiled
def replicas_off_node(  # noqa: C901  # one greedy choice; a call costs in its innermost loop
    home: Int64Array, load: Float64Array, work: Float64Array, capacity: Float64Array, target: float, largest: float
) -> int:
    """Replicas that must leave their group's node until no node is above the target; about as few as it takes.

    Home: node of each group; load: of each expert, shape (E,); work: of each node with all its groups; capacity: of each node,
    in the same unit, times the target the most work; largest: most that one replica may carry. The busiest node gives the
    replica that just suffices to the node with most room, else the largest that fits there.
    """
    size = load.size // home.size
    gone = np.zeros(load.size, np.bool_)
    work = work.copy()
    number = 0
    while number < EXPORTS_MAX:
        giver, taker = 0, 0
        for node in range(1, work.size):
            if work[node] - target * capacity[node] > work[giver] - target * capacity[giver]:
                giver = node
            if work[node] - target * capacity[node] < work[taker] - target * capacity[taker]:
                taker = node
        over = work[giver] - target * capacity[giver]
        if over <= ROUNDING * capacity[giver]:
            return number
        room = target * capacity[taker] - work[taker]
        chosen, part = -1, 0.0
        for expert in range(load.size):
            if home[expert // size] != giver or gone[expert]:
                continue
            amount = load[expert] / max(1.0, np.ceil(load[expert] / largest))
            if amount > room:
                continue
            enough, was_enough = amount >= over, part >= over
            if chosen < 0 or (enough and (not was_enough or amount < part)) or (not was_enough and amount > part):
                chosen, part = expert, amount
        if chosen < 0 or part <= 0.0:
            return EXPORTS_MAX
        gone[chosen] = True
        work[giver] -= part
        work[taker] += part
        number += 1
    return number


@compiled
def cost_of_homes(
    home: Int64Array,
    load: Float64Array,
    group_load: Float64Array,
    away: Int64Array,
    base: Float64Array,
    capacity: Float64Array,
    target: float,
    price: float,
    largest: float,
) -> tuple[float, float]:
    """What a choice of homes costs; smaller is better. Price: negative = strict groups. Capacity: work of a fair node."""
    work = base.copy()
    moves = 0
    for group in range(home.size):
        work[home[group]] += group_load[group]
        moves += away[group, home[group]]
    if price < 0.0:
        return max((work / capacity).max(), target), float(moves)
    number = replicas_off_node(home, load, work, capacity, target, largest)
    return (price + 1.0) * number + moves, (work / capacity).max()


@compiled
def changed_homes(home: Int64Array, count: Int64Array, fewest: int, most: int, one: int, other: int) -> Int64Array:
    """Homes after one change; the same homes when it is none.

    one, other below G: two groups exchange nodes; one below G, other above: the group goes to node other - G; both above: the
    nodes exchange all their groups. Count: groups of each node.
    """
    num_groups = home.size
    changed = home.copy()
    if one < other < num_groups:
        changed[one], changed[other] = home[other], home[one]
    elif one < num_groups <= other:
        if count[other - num_groups] < most and count[home[one]] > fewest:
            changed[one] = other - num_groups
    elif num_groups <= one < other:
        for group in range(num_groups):
            if home[group] == one - num_groups:
                changed[group] = other - num_groups
            elif home[group] == other - num_groups:
                changed[group] = one - num_groups
    return changed


@compiled
def improve_homes(  # noqa: PLR0917  # compiled functions take positions only
    home: Int64Array,
    load: Float64Array,
    group_load: Float64Array,
    away: Int64Array,
    may: BoolArray,
    fewest: int,
    most: int,
    base: Float64Array,
    capacity: Float64Array,
    target: float,
    price: float,
    largest: float,
    rounds_max: int,
) -> tuple[float, float]:
    """Make the cheapest change of homes, in place, as long as one is cheaper. Returns the cost."""
    num_groups, num_nodes = away.shape
    best = cost_of_homes(home, load, group_load, away, base, capacity, target, price, largest)
    for _ in range(rounds_max):
        count = np.zeros(num_nodes, np.int64)
        for group in range(num_groups):
            count[home[group]] += 1
        found, chosen = best, home
        for one in range(num_groups + num_nodes):
            for other in range(one + 1, num_groups + num_nodes):
                trial = changed_homes(home, count, fewest, most, one, other)
                allowed = True
                for group in range(num_groups):
                    allowed = allowed and may[group, trial[group]]
                if allowed:
                    cost = cost_of_homes(trial, load, group_load, away, base, capacity, target, price, largest)
                    if cost < found:
                        found, chosen = cost, trial
        if found >= best:
            break
        best = found
        home[:] = chosen
    return best
