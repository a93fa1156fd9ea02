"""Simulated annealing of one layer: few moves under a height limit, or the least height within a price; one loop for both.

A search walks from the current row by changes of one or two slots. Temperature is low and near constant; the weight of overload
rises, then follows the state: up while some rank is above the limit, down while none is. Random numbers are integers of a fixed
generator and budgets count steps, so the same input gives the same row on any machine.
"""
# ruff: noqa: FBT001  # compiled functions take positions only

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eplb_service.policy.anneal_changes import (
    LIMIT,
    MOVES,
    NUM_HOT,
    OVERLOAD,
    PRICE,
    PRICE_WEIGHT,
    RANDOM,
    ROUTE_MAX,
    ROUTE_PRICE,
    TEMPERATURE,
    WEIGHT,
    Scratch,
    measure,
    measure_overload,
    pour_again,
    try_change,
    try_swap,
)
from eplb_service.policy.anneal_routes import EVEN_WITH_HOPS, WEIGHTED
from eplb_service.policy.anneal_state import Float64Array, Int32Array, Layer, State, height_of_work, reckon
from eplb_service.policy.compiled import compiled_nogil, inlined, unowned

BLOCK = 64
"""Steps between two looks at temperature, weight and hot ranks."""

RECKON_STEPS = 1 << 16
"""Steps after which rank work is added up anew, so that rounding does not build up. A multiple of BLOCK."""

NO_OVERLOAD = 1e-9
"""Overload in fair heights that is rounding."""

GAIN_MIN = 1e-9
"""Difference in price or height that is more than rounding."""

LOWERED_BY = 1e-4
"""How far below the best height the limit goes, in fair heights, when the least height is looked for."""

POURS = 64
"""256ths of the steps that pour an expert anew over its copies, under weighted dispatch."""

SCALE = 1 << 10
PATIENCE = np.array([round(-math.log((index + 0.5) / SCALE), 9) for index in range(SCALE)])
"""-ln of evenly spread numbers in (0, 1): how many temperatures the energy may rise. Rounded, so that no libm matters."""


class Schedule(NamedTuple):
    """How a search goes.

    temperature_first, temperature_last: in moves. weight_first: moves for one fair height of overload; it rises over the first
    `ramp` of the steps by e^weight_rise; after that it is multiplied each block by 1 + rise or 1 - fall, and is at least
    weight_min. Shares of proposals, in 256ths, adding up: `swap`, `back`, `replace`; the rest shifts a replica.
    empty: 16ths of the replacements that leave the slot empty; 0 = no slot is emptied.
    hot, changed: 256ths of first slots that are drawn from hot ranks; from changed slots (of the others).
    lower: look for the least height, not the least price.
    """

    temperature_first: float
    temperature_last: float
    weight_first: float
    weight_rise: float
    ramp: float
    rise: float
    fall: float
    weight_min: float
    swap: int
    back: int
    replace: int
    empty: int
    hot: int
    changed: int
    lower: bool


class Record(NamedTuple):
    """What a search has found.

    best: slots of the best state within the limit, shape (N,); value: its price (its height when `lower`), inf = none yet,
    shape (1,). heights, rows: least height seen with each number of moves and its slots, shapes (M + 1,), (M + 1, N).
    """

    best: Int32Array
    value: Float64Array
    heights: Float64Array
    rows: Int32Array


@inlined
def draw(scratch: Scratch) -> int:
    """63 random bits (xorshift64*; S. Vigna, 2016)."""
    bits = np.uint64(scratch.counter[RANDOM])
    bits ^= bits >> np.uint64(12)
    bits ^= bits << np.uint64(25)
    bits ^= bits >> np.uint64(27)
    scratch.counter[RANDOM] = np.int64(bits)
    return int((bits * np.uint64(2685821657736338717)) >> np.uint64(1))


@inlined
def pick(bits: int, number: int) -> int:
    """A number below `number` (at most 2^31) from the highest 31 of 63 random bits."""
    return int(((bits >> 32) * number) >> 31)


@inlined
def slot_of_hot_rank(scratch: Scratch, bits: int) -> int:
    """A slot of a rank above the limit, -1 when there is none."""
    number = scratch.counter[NUM_HOT]
    if number == 0:
        return -1
    rank = scratch.hot[(bits & 0xFFFF) * number >> 16]
    first = scratch.first_slot[rank]
    return int(first + pick(bits, scratch.first_slot[rank + 1] - first))


@inlined
def first_slot(layer: Layer, state: State, scratch: Scratch, schedule: Schedule, bits: int) -> int:
    """The slot that a proposal starts from."""
    other = draw(scratch)
    if bits & 255 < schedule.hot and scratch.counter[NUM_HOT] > 0:
        return slot_of_hot_rank(scratch, other)
    if bits >> 8 & 255 < schedule.changed and state.num_changed[0] > 0:
        return int(state.changed[pick(other, state.num_changed[0])])
    return int(layer.movable[pick(other, layer.movable.size)])


@inlined
def propose_exchange(layer: Layer, state: State, scratch: Scratch, slot: int, other: int) -> int:
    """Two slots exchange what they hold, if they may. Returns the number of slots that change, 0 = no proposal."""
    rank, other_rank = layer.rank_of[slot], layer.rank_of[other]
    if rank == other_rank or layer.frozen[other]:
        return 0
    first, second = state.expert_at[slot], state.expert_at[other]
    if first == second:
        return 0
    if first >= 0 and state.count_on[other_rank, first] > 0:
        return 0
    if second >= 0 and state.count_on[rank, second] > 0:
        return 0
    scratch.slots[0], scratch.slots[1] = slot, other
    scratch.experts[0], scratch.experts[1] = second, first
    return 2


@inlined
def other_slot(layer: Layer, state: State, scratch: Scratch, slot: int, back: bool) -> int:
    """The slot to exchange with: one that holds the expert at home in `slot` when going back, else any, or a changed one.

    -1 when that expert is home already.
    """
    bits = draw(scratch)
    if back:
        home = layer.home[slot]
        if home < 0 or home == state.expert_at[slot] or state.count_on[layer.rank_of[slot], home] > 0:
            return -1
        return int(state.holders[home, pick(bits, state.copies[home])])
    if bits & 1 and state.num_changed[0] > 0:
        return int(state.changed[pick(bits, state.num_changed[0])])
    return int(layer.movable[pick(bits, layer.movable.size)])


@inlined
def propose_replacement(layer: Layer, state: State, scratch: Scratch, schedule: Schedule, slot: int) -> int:
    """A copy of another expert in the place of a spare one: of what was there, one of a hot rank, or any; or none at all."""
    old, home = state.expert_at[slot], layer.home[slot]
    bits = draw(scratch)
    if bits >> 19 & 15 < schedule.empty:
        new = -1
    elif bits >> 16 & 3 == 0 and home != old:
        new = int(home)
    else:
        hot = slot_of_hot_rank(scratch, bits) if bits >> 18 & 1 else -1
        new = int(state.expert_at[hot]) if hot >= 0 else pick(bits, layer.load.size)
    if new == old or (new < 0 and schedule.empty == 0):
        return 0
    if new >= 0 and (state.count_on[layer.rank_of[slot], new] > 0 or state.copies[new] >= layer.copies_max[new]):
        return 0
    scratch.slots[0] = slot
    scratch.experts[0] = new
    return 1


@inlined
def propose_shift(layer: Layer, state: State, scratch: Scratch, slot: int) -> int:
    """An expert moves into the place of a spare copy, and a copy of a third one comes to where it was."""
    old = state.expert_at[slot]
    bits = draw(scratch)
    other = slot_of_hot_rank(scratch, bits) if bits >> 16 & 1 else -1
    if other < 0:
        other = int(layer.movable[pick(bits, layer.movable.size)])
    moved = state.expert_at[other]
    rank, other_rank = layer.rank_of[slot], layer.rank_of[other]
    if rank == other_rank or layer.frozen[other] or moved < 0 or moved == old or state.count_on[rank, moved] > 0:
        return 0
    new = int(layer.home[other]) if bits >> 17 & 1 else -1
    if new < 0:
        more = draw(scratch)
        hot = slot_of_hot_rank(scratch, more) if bits >> 18 & 1 else -1
        new = int(state.expert_at[hot]) if hot >= 0 else pick(more, layer.load.size)
    if new < 0:
        return 0
    if new in (moved, old) or state.count_on[other_rank, new] > 0 or state.copies[new] >= layer.copies_max[new]:
        return 0
    scratch.slots[0], scratch.slots[1] = slot, other
    scratch.experts[0], scratch.experts[1] = moved, new
    return 2


@inlined
def find_hot_ranks(layer: Layer, state: State, scratch: Scratch) -> None:
    """List the ranks above the limit that have slots."""
    number = 0
    for rank in range(state.work.size):
        above = state.work[rank] * layer.inverse[rank] > scratch.level[LIMIT]
        if above and scratch.first_slot[rank + 1] > scratch.first_slot[rank]:
            scratch.hot[number] = rank
            number += 1
    scratch.counter[NUM_HOT] = number


@inlined
def turn_block(layer: Layer, state: State, scratch: Scratch, schedule: Schedule, step: int, steps: int) -> None:
    """Temperature, weight and hot ranks for the next steps."""
    share = step / steps
    spread = schedule.temperature_last - schedule.temperature_first
    scratch.level[TEMPERATURE] = schedule.temperature_first + spread * share
    if step == 0:
        scratch.level[WEIGHT] = schedule.weight_first
    elif share < schedule.ramp:
        blocks = max(1.0, steps * schedule.ramp / BLOCK)
        scratch.level[WEIGHT] *= 1.0 + schedule.weight_rise / blocks
    elif scratch.level[OVERLOAD] <= NO_OVERLOAD:
        scratch.level[WEIGHT] = max(scratch.level[WEIGHT] * (1.0 - schedule.fall), schedule.weight_min)
    else:
        scratch.level[WEIGHT] = min(scratch.level[WEIGHT] * (1.0 + schedule.rise), 1e6)
    if step % RECKON_STEPS == 0:
        reckon(layer, state)
        measure(layer, state, scratch)
    find_hot_ranks(layer, state, scratch)


@inlined
def note(layer: Layer, state: State, scratch: Scratch, schedule: Schedule, record: Record) -> None:
    """Record the state after a change where it is the best so far."""
    moves = scratch.counter[MOVES]
    within = scratch.level[OVERLOAD] <= NO_OVERLOAD
    if not within and moves >= record.heights.size:
        return
    height = height_of_work(layer, state.work)
    if moves < record.heights.size and height < record.heights[moves] - GAIN_MIN:
        record.heights[moves] = height
        record.rows[moves] = state.expert_at
    if not within or height > scratch.level[LIMIT] + NO_OVERLOAD or scratch.level[ROUTE_PRICE] > scratch.level[ROUTE_MAX]:
        return
    value = scratch.level[PRICE] * scratch.level[PRICE_WEIGHT] + scratch.level[ROUTE_PRICE]
    value = height if schedule.lower else value
    if value < record.value[0] - GAIN_MIN:
        record.value[0] = value
        record.best[:] = state.expert_at
    if schedule.lower:
        scratch.level[LIMIT] = record.value[0] - LOWERED_BY
        measure_overload(layer, state, scratch)


@inlined
def propose(layer: Layer, state: State, scratch: Scratch, schedule: Schedule, slot: int, kind: int) -> int:
    """A change that starts from a slot; `kind` (8 bits) says which. Returns the number of slots that change, 0 = none."""
    if kind < schedule.swap + schedule.back:
        other = other_slot(layer, state, scratch, slot, kind < schedule.back)
        return propose_exchange(layer, state, scratch, slot, other) if other >= 0 else 0
    old = state.expert_at[slot]
    if old >= 0 and state.copies[old] <= layer.copies_min[old]:
        return 0
    if kind < schedule.swap + schedule.back + schedule.replace:
        return propose_replacement(layer, state, scratch, schedule, slot)
    return propose_shift(layer, state, scratch, slot)


@inlined
def single_copies(state: State, scratch: Scratch) -> bool:
    """Whether the two slots of a change hold experts with one copy: what their ranks serve is the same under any dispatch."""
    first, second = scratch.experts[0], scratch.experts[1]
    return bool((first < 0 or state.copies[first] == 1) and (second < 0 or state.copies[second] == 1))


@compiled_nogil
def anneal(
    layer: Layer,
    state: State,
    scratch: Scratch,
    schedule: Schedule,
    record: Record,
    first_step: int,
    last_step: int,
    steps: int,
) -> None:
    """Steps first_step to last_step - 1 of a search of `steps`: a search may be run in pieces, with the same outcome.

    A piece but the last ends on a multiple of BLOCK. The record is kept up; state and scratch are where the search stands.
    """
    layer, state, scratch, record = unowned(layer), unowned(state), unowned(scratch), unowned(record)
    if layer.movable.size == 0:
        return
    for step in range(first_step, last_step):
        if step % BLOCK == 0:
            turn_block(layer, state, scratch, schedule, step, steps)
        bits = draw(scratch)
        slack = scratch.level[TEMPERATURE] * PATIENCE[bits >> 16 & (SCALE - 1)]
        kind = bits >> 26 & 255
        slot = first_slot(layer, state, scratch, schedule, bits)
        if layer.dispatch == WEIGHTED and bits >> 34 & 255 < POURS:
            if state.expert_at[slot] >= 0 and state.copies[state.expert_at[slot]] > 1:
                pour_again(layer, state, scratch, state.expert_at[slot])
                note(layer, state, scratch, schedule, record)
            continue
        if layer.frozen[slot]:
            continue
        count = propose(layer, state, scratch, schedule, slot, kind)
        if count == 0:
            continue
        if kind < schedule.swap + schedule.back and (layer.dispatch <= EVEN_WITH_HOPS or single_copies(state, scratch)):
            done = try_swap(layer, state, scratch, slack)
        else:
            done = try_change(layer, state, scratch, count, slack)
        if done:
            note(layer, state, scratch, schedule, record)
