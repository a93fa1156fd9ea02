"""Compiled: one layer's experts change places so that those chosen together by one token end up on one node.

A walk of simulated annealing by exchanges of two slots, and of two whole ranks where moves are free. What is gained is pair
weight that is served on one node; ranks above the height limit and moves above their number cost a price that rises, so that a
walk may pass through rows that break one of the two; only rows that keep both are recorded. All else holds at every step.
Random numbers are integers of a fixed generator and budgets count steps: the same input gives the same row on any machine.
"""

from __future__ import annotations

import numpy as np

from eplb_service.policy.anneal import PATIENCE, SCALE
from eplb_service.policy.colocate_state import EXTRA, MOVES, NUM_OVER, OVERLOAD, TOGETHER, Best, Bounds, Cooling, Ground, Walk
from eplb_service.policy.compiled import compiled_nogil, inlined, unowned
from eplb_service.policy.layer_task import BoolArray, Int32Array, Int64Array

TRIES = 8
"""Draws of a slot that holds a newcomer before any slot will do."""

RANKS, BACK, NEWCOMERS = 8, 72, 112
"""256ths of the proposals: exchange two ranks (where moves are free); bring an expert back to a rank that holds it now;
exchange a newcomer for another one or for anything. The rest exchanges any two slots."""

MULTIPLIER = np.uint64(2685821657736338717)


@inlined
def below(random: Int64Array, number: int) -> int:
    """A random number below `number` (at most 2^31), from the highest 31 of 63 bits (xorshift64*; S. Vigna, 2016)."""
    bits = np.uint64(random[0])
    bits ^= bits >> np.uint64(12)
    bits ^= bits << np.uint64(25)
    bits ^= bits >> np.uint64(27)
    random[0] = np.int64(bits)
    return int((int((bits * MULTIPLIER) >> np.uint64(33)) * number) >> 31)


@inlined
def height_with(ground: Ground, walk: Walk, rank: int, skipped: int, expert: int, part: float) -> float:
    """Height of a rank when one of its slots holds another expert. Added up anew, so that rounding does not build up."""
    work = ground.base[rank]
    for slot in range(ground.first[rank], ground.first[rank + 1]):
        if slot == skipped:
            if expert >= 0:
                work += part * ground.load[expert]
        elif walk.slots[slot] >= 0:
            work += walk.part[slot] * ground.load[walk.slots[slot]]
    return float(work / ground.capacity[rank])


@inlined
def may_go(ground: Ground, walk: Walk, expert: int, source: int, target: int) -> bool:
    """Whether a copy may leave a rank for another one that has no copy, by everything but height, moves and price."""
    if not ground.allowed[target, expert] or walk.copies[target, expert] > 0:
        return False
    if ground.pinned[source, expert] and walk.copies[source, expert] == 1:
        return False
    if not ground.spread[expert]:
        return True
    left, entered = ground.domain_of[source], ground.domain_of[target]
    if left == entered or walk.domains[left, expert] > 1 or walk.domains[entered, expert] == 0:
        return True
    held = 0
    for domain in range(walk.domains.shape[0]):
        held += walk.domains[domain, expert] > 0
    return held > 2  # two must be left


@inlined
def trade(ground: Ground, walk: Walk, one: int, other: int, source: int, target: int) -> None:
    """Exchange what two slots hold; note counts, domains, what nodes serve and how they pull. Heights are not touched."""
    left, entered = ground.node_of[source], ground.node_of[target]
    for side in range(2):
        slot, sign = (one, 1) if side == 0 else (other, -1)
        expert, part = walk.slots[slot], sign * walk.part[slot]
        if expert < 0:
            continue
        walk.copies[source, expert] -= sign
        walk.copies[target, expert] += sign
        walk.domains[ground.domain_of[source], expert] -= sign
        walk.domains[ground.domain_of[target], expert] += sign
        if left != entered:
            walk.served[left, expert] -= part
            walk.served[entered, expert] += part
            for facing in range(ground.weight.shape[0]):
                pulled = part * ground.weight[expert, facing]
                walk.pull[left, facing] -= pulled
                walk.pull[entered, facing] += pulled
    walk.slots[one], walk.slots[other] = walk.slots[other], walk.slots[one]
    walk.part[one], walk.part[other] = walk.part[other], walk.part[one]


@inlined
def try_slots(  # noqa: C901, PLR0911, PLR0912  # every rule once, in the order of their cost
    ground: Ground, bounds: Bounds, walk: Walk, one: int, other: int, heavy: float, dear: float, patience: float, unit: float
) -> bool:
    """Exchange two slots when the gain, less what overload and moves cost, is worth it. patience: how much worse it may get."""
    a, b = walk.slots[one], walk.slots[other]
    source, target = ground.rank_of[one], ground.rank_of[other]
    if a == b or source == target:
        return False
    if a >= 0 and not may_go(ground, walk, a, source, target):
        return False
    if b >= 0 and not may_go(ground, walk, b, target, source):
        return False
    x, y = walk.part[one], walk.part[other]
    into_source, into_target, extra = 0, 0, 0.0
    if a >= 0:
        into_target += ground.is_new[target, a]
        extra += ground.extra[target, a]
        if walk.copies[source, a] == 1:
            into_source -= ground.is_new[source, a]
            extra -= ground.extra[source, a]
    if b >= 0:
        into_source += ground.is_new[source, b]
        extra += ground.extra[source, b]
        if walk.copies[target, b] == 1:
            into_target -= ground.is_new[target, b]
            extra -= ground.extra[target, b]
    if extra > 0.0 and walk.level[EXTRA] + extra > bounds.extra:
        return False
    if into_source > 0 and walk.intake[source] + into_source > bounds.intake[source]:
        return False
    if into_target > 0 and walk.intake[target] + into_target > bounds.intake[target]:
        return False
    gain, left, entered = 0.0, ground.node_of[source], ground.node_of[target]
    if left != entered:
        if a >= 0:
            gain += x * (walk.pull[entered, a] - walk.pull[left, a])
        if b >= 0:
            gain += y * (walk.pull[left, b] - walk.pull[entered, b])
        if a >= 0 and b >= 0:
            gain -= 2.0 * x * y * ground.weight[a, b]
    moves = walk.counter[MOVES]
    more = max(0, moves + into_source + into_target - bounds.moves) - max(0, moves - bounds.moves)
    loss = dear * more - gain / unit
    if loss > patience and heavy * walk.level[OVERLOAD] < loss - patience:
        return False
    source_height = height_with(ground, walk, source, one, b, y)
    target_height = height_with(ground, walk, target, other, a, x)
    before = max(0.0, walk.height[source] - bounds.height) + max(0.0, walk.height[target] - bounds.height)
    after = max(0.0, source_height - bounds.height) + max(0.0, target_height - bounds.height)
    if loss + heavy * (after - before) / ground.fair > patience:
        return False
    trade(ground, walk, one, other, source, target)
    walk.counter[NUM_OVER] += (source_height > bounds.height) + (target_height > bounds.height)
    walk.counter[NUM_OVER] -= (walk.height[source] > bounds.height) + (walk.height[target] > bounds.height)
    walk.height[source], walk.height[target] = source_height, target_height
    walk.level[OVERLOAD] = 0.0 if walk.counter[NUM_OVER] == 0 else walk.level[OVERLOAD] + (after - before) / ground.fair
    walk.level[TOGETHER] += gain
    walk.level[EXTRA] += extra
    walk.counter[MOVES] += into_source + into_target
    walk.intake[source] += into_source
    walk.intake[target] += into_target
    return True


@inlined
def try_ranks(ground: Ground, walk: Walk, source: int, target: int, patience: float, unit: float) -> bool:
    """Exchange all that two ranks of one kind on two nodes hold, where moves are free: heights only change places."""
    left, entered = ground.node_of[source], ground.node_of[target]
    if left == entered or ground.kinds[source] != ground.kinds[target]:
        return False
    first, second, size = ground.first[source], ground.first[target], ground.first[source + 1] - ground.first[source]
    gain, extra = 0.0, 0.0
    for side in range(2):
        own, sign = (first, 1.0) if side == 0 else (second, -1.0)
        for index in range(size):
            expert = walk.slots[own + index]
            if expert < 0:
                continue
            part = walk.part[own + index]
            gain += sign * part * (walk.pull[entered, expert] - walk.pull[left, expert])
            extra += sign * (ground.extra[target, expert] - ground.extra[source, expert])
            for again in range(2):
                facing, factor = (first, sign) if again == 0 else (second, -sign)
                for place in range(size):
                    other = walk.slots[facing + place]
                    if other >= 0:
                        gain += factor * part * walk.part[facing + place] * ground.weight[expert, other]
    if extra > 0.0 or -gain / unit > patience:
        return False
    for index in range(size):
        trade(ground, walk, first + index, second + index, source, target)
    walk.height[source], walk.height[target] = walk.height[target], walk.height[source]
    walk.level[TOGETHER] += gain
    walk.level[EXTRA] += extra
    return True


@inlined
def newcomer(rank_of: Int64Array, is_new: BoolArray, slots: Int32Array, random: Int64Array) -> int:
    """A slot whose expert is a move, or any slot when none is found in a few draws."""
    slot = below(random, slots.size)
    for _ in range(TRIES):
        expert = slots[slot]
        if expert >= 0 and is_new[rank_of[slot], expert]:
            break
        slot = below(random, slots.size)
    return slot


@inlined
def slot_back(ground: Ground, walk: Walk, one: int) -> int:
    """A slot of a rank that holds the expert of slot `one` now, -1 when there is none."""
    expert = walk.slots[one]
    if expert < 0:
        return -1
    number = ground.live_first[expert + 1] - ground.live_first[expert]
    if number == 0:
        return -1
    rank = ground.live_ranks[ground.live_first[expert] + below(walk.random, number)]
    size = ground.first[rank + 1] - ground.first[rank]
    return ground.first[rank] + below(walk.random, size) if size > 0 else -1


@compiled_nogil
def wander(
    ground: Ground, bounds: Bounds, walk: Walk, best: Best, cooling: Cooling, unit: float, begin: int, end: int, total: int
) -> None:
    """Steps `begin` to `end` of a walk of `total` steps; what is found goes to `best`. unit: the mean gain of an exchange."""
    ground, bounds, walk, best = unowned(ground), unowned(bounds), unowned(walk), unowned(best)
    num_slots, num_ranks = walk.slots.size, ground.node_of.size
    temperature, heavy, dear = cooling.warm, cooling.light, cooling.cheap
    for step in range(begin, end):
        if step % 64 == 0 or step == begin:
            done = step / total
            temperature = cooling.warm * (cooling.cold / cooling.warm) ** done
            heavy = cooling.light * (cooling.heavy / cooling.light) ** done
            dear = cooling.cheap * (cooling.dear / cooling.cheap) ** done
        patience = temperature * PATIENCE[below(walk.random, SCALE)]
        kind = below(walk.random, 256)
        if bounds.free and kind < RANKS:
            changed = try_ranks(ground, walk, below(walk.random, num_ranks), below(walk.random, num_ranks), patience, unit)
        else:
            one, other = 0, 0
            if bounds.free or kind >= RANKS + BACK + NEWCOMERS:
                one, other = below(walk.random, num_slots), below(walk.random, num_slots)
            elif kind < RANKS + BACK:
                one = newcomer(ground.rank_of, ground.is_new, walk.slots, walk.random)
                other = slot_back(ground, walk, one)
            else:
                one = newcomer(ground.rank_of, ground.is_new, walk.slots, walk.random)
                other = below(walk.random, num_slots)
                if kind % 2:
                    other = newcomer(ground.rank_of, ground.is_new, walk.slots, walk.random)
            changed = other >= 0 and try_slots(ground, bounds, walk, one, other, heavy, dear, patience, unit)
        legal = walk.counter[NUM_OVER] == 0 and walk.counter[MOVES] <= bounds.moves
        if changed and legal and walk.level[TOGETHER] > best.value[0]:
            best.value[0] = walk.level[TOGETHER]
            best.slots[:] = walk.slots
            best.part[:] = walk.part
