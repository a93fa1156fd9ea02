"""Annealing of one layer against many scenarios of its load: the busiest rank of each counts, not that of their average.

The cost of a scenario is a power mean of the ranks' heights, which is near their maximum but also sees the ranks just below it:
with loads that will be somewhat different next time, any of them may be the busiest. Powers and roots are squarings and square
roots, so that the same input gives the same row on any machine; budgets count steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.policy.compiled import compiled_nogil, inlined, unowned
from eplb_service.policy.kernels import BoolArray, Float64Array, Int32Array, Int64Array

SQUARINGS = 4
"""The power mean's exponent is 2 to this: 16, of the order of one over the relative noise of a rank's load."""

REPLACE_SHARE = 80
"""Proposals in 256 that change which experts have copies; the others exchange two slots."""

RECKON_STEPS = 4096
"""Steps after which heights are added up anew, so that rounding does not build up."""


class RobustLayer(NamedTuple):
    """A layer in arrays. K scenarios, R ranks, E experts, N usable slots, rank by rank.

    loads: shape (E, K), tokens of each scenario over the fair height of their weighted mean; base: shape (R, K), likewise.
    weights: shape (K,), adding up to 1. inverse: 1 / capacity, shape (R,). num_serving: ranks that count in the mean.
    rank_of: shape (N,). movable: slots that are not pinned. closed: shape (R, E), ranks that may not hold the expert.
    price: shape (R, E), in moves; fresh: shape (R, E), residencies that are moves. copies_min, copies_max: shape (E,).
    spread: shape (E,), experts to keep on two domains; domain_of: shape (R,).
    """

    loads: Float64Array
    base: Float64Array
    weights: Float64Array
    inverse: Float64Array
    num_serving: int
    rank_of: Int64Array
    movable: Int64Array
    closed: BoolArray
    price: Float64Array
    fresh: BoolArray
    copies_min: Int64Array
    copies_max: Int64Array
    spread: BoolArray
    domain_of: Int64Array


class RobustState(NamedTuple):
    """Where a search stands.

    expert_at: shape (N,), -1 = empty. count_on: shape (R, E). copies: shape (E,). height, power: shape (R, K), of each rank in
    each scenario, and its 16th power; power_sum: shape (K,). moves: shape (1,). new_height, new_power, new_sum: scratch.
    """

    expert_at: Int32Array
    count_on: Int64Array
    copies: Int64Array
    height: Float64Array
    power: Float64Array
    power_sum: Float64Array
    moves: Int64Array
    new_height: Float64Array
    new_power: Float64Array
    new_sum: Float64Array


class RobustRecord(NamedTuple):
    """Best cost seen with each number of moves, shape (M + 1,), and its slots, shape (M + 1, N)."""

    costs: Float64Array
    rows: Int32Array


@inlined
def cost_of(layer: RobustLayer, power_sum: Float64Array) -> float:
    """Weighted mean over scenarios of the power mean of heights; 1 = perfectly balanced."""
    total = 0.0
    for scenario in range(power_sum.size):
        root = max(power_sum[scenario], 0.0) / layer.num_serving
        for _ in range(SQUARINGS):
            root = np.sqrt(root)
        total += layer.weights[scenario] * root
    return total


@inlined
def reckon(layer: RobustLayer, state: RobustState) -> float:
    """Heights, copies and moves of the slots as they are; the cost."""
    num_ranks, num_scenarios = state.height.shape
    state.count_on[:] = 0
    state.copies[:] = 0
    for slot in range(state.expert_at.size):
        expert = state.expert_at[slot]
        if expert >= 0:
            state.count_on[layer.rank_of[slot], expert] += 1
            state.copies[expert] += 1
    state.moves[0] = 0
    state.power_sum[:] = 0.0
    for rank in range(num_ranks):
        for scenario in range(num_scenarios):
            state.height[rank, scenario] = layer.base[rank, scenario] * layer.inverse[rank]
        for expert in range(state.copies.size):
            count = state.count_on[rank, expert]
            if count == 0:
                continue
            state.moves[0] += layer.fresh[rank, expert]
            share = count * layer.inverse[rank] / state.copies[expert]
            for scenario in range(num_scenarios):
                state.height[rank, scenario] += layer.loads[expert, scenario] * share
        for scenario in range(num_scenarios):
            power = state.height[rank, scenario]
            for _ in range(SQUARINGS):
                power *= power
            state.power[rank, scenario] = power
            state.power_sum[scenario] += power
    return cost_of(layer, state.power_sum)


@inlined
def add_to_rank(layer: RobustLayer, state: RobustState, rank: int, expert: int, share: float) -> None:
    """Put a share of an expert's load more on a rank's new heights."""
    for scenario in range(state.power_sum.size):
        state.new_height[rank, scenario] += layer.loads[expert, scenario] * share * layer.inverse[rank]


@inlined
def finish_rank(state: RobustState, rank: int) -> None:
    """Powers of a rank's new heights, and the new sums."""
    for scenario in range(state.new_sum.size):
        power = state.new_height[rank, scenario]
        for _ in range(SQUARINGS):
            power *= power
        state.new_power[rank, scenario] = power
        state.new_sum[scenario] += power - state.power[rank, scenario]


@inlined
def may_hold(layer: RobustLayer, state: RobustState, rank: int, expert: int) -> bool:
    """Whether a rank may take a copy: it is not barred and has none."""
    return expert < 0 or not (layer.closed[rank, expert] or state.count_on[rank, expert] > 0)


@inlined
def stays_spread(layer: RobustLayer, state: RobustState, expert: int, without: int, with_rank: int) -> bool:
    """Whether an expert is on two domains still after it left a rank (and went to another; -1 = to none)."""
    if expert < 0 or not layer.spread[expert]:
        return True
    domain = -1 if with_rank < 0 else layer.domain_of[with_rank]
    for rank in range(state.count_on.shape[0]):
        if state.count_on[rank, expert] - (rank == without) <= 0:
            continue
        if domain >= 0 and layer.domain_of[rank] != domain:
            return True
        domain = layer.domain_of[rank]
    return False


@inlined
def price_of(layer: RobustLayer, state: RobustState, rank: int, old: int, new: int) -> tuple[float, int]:
    """Price and moves of replacing a copy on a rank by another expert's; -1 = none."""
    price, moves = 0.0, 0
    if new >= 0:
        price += layer.price[rank, new]
        moves += layer.fresh[rank, new]
    if old >= 0 and state.count_on[rank, old] == 1:
        price -= layer.price[rank, old]
        moves -= layer.fresh[rank, old]
    return price, moves


@inlined
def try_exchange(  # noqa: C901  # one look at two slots: what forbids it, what it costs, what it changes
    layer: RobustLayer, state: RobustState, slot: int, other: int, cost: float, worth: float, slack: float
) -> float:
    """Two slots exchange what they hold if that costs at most `slack` more, moves at `worth` each. Returns the cost after."""
    rank, other_rank = layer.rank_of[slot], layer.rank_of[other]
    first, second = state.expert_at[slot], state.expert_at[other]
    if rank == other_rank or first == second:
        return cost
    if not (may_hold(layer, state, other_rank, first) and may_hold(layer, state, rank, second)):
        return cost
    if not stays_spread(layer, state, first, rank, other_rank) or not stays_spread(layer, state, second, other_rank, rank):
        return cost
    price, moves = price_of(layer, state, rank, first, second)
    other_price, other_moves = price_of(layer, state, other_rank, second, first)
    state.new_sum[:] = state.power_sum
    for side in (rank, other_rank):
        for scenario in range(state.new_sum.size):
            state.new_height[side, scenario] = state.height[side, scenario]
    if first >= 0:
        add_to_rank(layer, state, rank, first, -1.0 / state.copies[first])
        add_to_rank(layer, state, other_rank, first, 1.0 / state.copies[first])
    if second >= 0:
        add_to_rank(layer, state, rank, second, 1.0 / state.copies[second])
        add_to_rank(layer, state, other_rank, second, -1.0 / state.copies[second])
    finish_rank(state, rank)
    finish_rank(state, other_rank)
    new_cost = cost_of(layer, state.new_sum)
    if new_cost - cost + worth * (price + other_price) > slack:
        return cost
    state.power_sum[:] = state.new_sum
    for side in (rank, other_rank):
        for scenario in range(state.new_sum.size):
            state.height[side, scenario] = state.new_height[side, scenario]
            state.power[side, scenario] = state.new_power[side, scenario]
    if first >= 0:
        state.count_on[rank, first] -= 1
        state.count_on[other_rank, first] += 1
    if second >= 0:
        state.count_on[other_rank, second] -= 1
        state.count_on[rank, second] += 1
    state.expert_at[slot], state.expert_at[other] = second, first
    state.moves[0] += moves + other_moves
    return new_cost


@inlined
def try_replace(  # noqa: C901  # as above
    layer: RobustLayer, state: RobustState, slot: int, new: int, cost: float, worth: float, slack: float
) -> float:
    """A copy of another expert takes the place of a spare one, or of none, under the same rule as `try_exchange`."""
    rank, old = layer.rank_of[slot], state.expert_at[slot]
    if new == old or layer.closed[rank, new] or state.count_on[rank, new] > 0 or state.copies[new] >= layer.copies_max[new]:
        return cost
    if old >= 0 and (state.copies[old] <= layer.copies_min[old] or not stays_spread(layer, state, old, rank, -1)):
        return cost
    price, moves = price_of(layer, state, rank, old, new)
    state.new_sum[:] = state.power_sum
    gain = 1.0 / (state.copies[new] + 1)
    loss = 1.0 / (state.copies[old] - 1) if old >= 0 else 0.0
    for side in range(state.height.shape[0]):
        had_new = state.count_on[side, new]
        had_old = state.count_on[side, old] if old >= 0 else 0
        here = 1 if side == rank else 0
        if had_new + had_old + here == 0:
            continue
        for scenario in range(state.new_sum.size):
            state.new_height[side, scenario] = state.height[side, scenario]
        add_to_rank(layer, state, side, new, (had_new + here) * gain - had_new / state.copies[new])
        if old >= 0 and had_old > 0:
            add_to_rank(layer, state, side, old, (had_old - here) * loss - had_old / state.copies[old])
        finish_rank(state, side)
    new_cost = cost_of(layer, state.new_sum)
    if new_cost - cost + worth * price > slack:
        return cost
    state.power_sum[:] = state.new_sum
    for side in range(state.height.shape[0]):
        had_old = state.count_on[side, old] if old >= 0 else 0
        if state.count_on[side, new] + had_old == 0 and side != rank:
            continue
        for scenario in range(state.new_sum.size):
            state.height[side, scenario] = state.new_height[side, scenario]
            state.power[side, scenario] = state.new_power[side, scenario]
    if old >= 0:
        state.count_on[rank, old] -= 1
        state.copies[old] -= 1
    state.count_on[rank, new] += 1
    state.copies[new] += 1
    state.expert_at[slot] = new
    state.moves[0] += moves
    return new_cost


@inlined
def note(state: RobustState, record: RobustRecord, cost: float) -> None:
    """Record the state where it is the best with as many moves."""
    moves = state.moves[0]
    if moves < record.costs.size and cost < record.costs[moves] - 1e-12:
        record.costs[moves] = cost
        record.rows[moves] = state.expert_at


@compiled_nogil
def anneal_scenarios(
    layer: RobustLayer,
    state: RobustState,
    record: RobustRecord,
    patience: Float64Array,
    worth: float,
    temperature: float,
    steps: int,
    seed: int,
) -> None:
    """Search from the state by exchanges and replacements. worth: cost that a move must save; temperature: of the cost.

    The temperature falls evenly to none. Patience: -ln of evenly spread numbers in (0, 1). Keeps up the record.
    """
    layer, state, record = unowned(layer), unowned(state), unowned(record)
    cost = reckon(layer, state)
    note(state, record, cost)
    bits = np.uint64(seed) * np.uint64(2862933555777941757) + np.uint64(3037000493)
    bits |= np.uint64(1)
    num_movable, num_logical = layer.movable.size, state.copies.size
    for step in range(steps):
        if step % RECKON_STEPS == RECKON_STEPS - 1:
            cost = reckon(layer, state)
        bits ^= bits >> np.uint64(12)
        bits ^= bits << np.uint64(25)
        bits ^= bits >> np.uint64(27)
        drawn = np.int64((bits * np.uint64(2685821657736338717)) >> np.uint64(1))
        slack = temperature * (steps - step) / steps * patience[(drawn & 0xFFFF) % patience.size]
        slot = layer.movable[((drawn >> 24 & 0xFFFFF) * num_movable) >> 20]
        pick = drawn >> 44 & 0x7FFFF
        if (drawn >> 16 & 255) < REPLACE_SHARE:
            new_cost = try_replace(layer, state, slot, int((pick * num_logical) >> 19), cost, worth, slack)
        else:
            other = layer.movable[(pick * num_movable) >> 19]
            new_cost = try_exchange(layer, state, slot, other, cost, worth, slack)
        if new_cost != cost:
            cost = new_cost
            note(state, record, cost)
