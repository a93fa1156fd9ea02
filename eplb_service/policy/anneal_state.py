"""The state that annealing works on: one layer's slots, who holds what, rank work; and the changes that keep all of it in step.

Slots are the usable ones, flat, by rank. Loads are in units of the fair height, so a rank's height (work over capacity) of 1 is
perfect. The parts of an expert's load that its holders serve are added and taken away by `serve`: the one place that knows the
dispatch.
"""
# compiled functions take positions only

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.policy.anneal_routes import EVEN, WEIGHTED, Routes, even_routes, serve_by_routes
from eplb_service.policy.compiled import compiled_nogil, inlined
from eplb_service.policy.layer_task import LayerTask

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

FIRST_POURS = 8
"""How often experts are poured anew over their copies before a search under weighted dispatch starts."""


class Layer(NamedTuple):
    """What does not change during a search. N usable slots, R ranks, E experts.

    load: shape (E,), in fair heights. rank_of: rank of each slot, shape (N,). frozen: slots that keep what they hold, (N,).
    home: expert that each slot holds now, -1 = empty, shape (N,). home_slot: the slot where a rank holds an expert now,
    shape (R, E), -1 = it does not, or that slot is frozen. fresh: 1 where a residency would be new, shape (R, E).
    price: cost of a residency, infinite where it is not allowed, shape (R, E). inverse: 1 / capacity, shape (R,).
    copies_min, copies_max: shape (E,). spread: shape (E,), 1 = on at least two domains. domain_of: shape (R,).
    movable: slots that are not frozen. dispatch and the rest: see `anneal_routes.Routes`.
    """

    load: Float64Array
    rank_of: Int32Array
    frozen: UInt8Array
    home: Int32Array
    home_slot: Int32Array
    fresh: UInt8Array
    price: Float64Array
    inverse: Float64Array
    base: Float64Array
    copies_min: Int64Array
    copies_max: Int64Array
    spread: UInt8Array
    domain_of: Int64Array
    movable: Int32Array
    dispatch: int
    node_of: Int64Array
    parts: Float64Array
    node_parts: Float64Array
    senders: Int64Array
    hop_price: float
    misplaced_price: float
    node_copies: Float64Array
    node_without: Float64Array


class State(NamedTuple):
    """What a search changes.

    expert_at: expert in each slot, shape (N,), -1 = empty. count_on: copies of an expert on a rank, shape (R, E).
    copies: shape (E,). holders: slots of each expert's copies, shape (E, most copies), the first copies[e] count.
    holder_index: position of a slot among its expert's holders, shape (N,). work: shape (R,), in fair heights.
    changed: slots that hold something else than their home, the first num_changed[0] count; changed_index: their position
    there, -1 = not changed, shape (N,).
    part: fair heights that each slot serves under weighted dispatch, shape (N,).
    route_price: price of each expert's routes (hops, misplacement), shape (E,).
    """

    expert_at: Int32Array
    count_on: UInt8Array
    copies: Int64Array
    holders: Int32Array
    holder_index: Int32Array
    work: Float64Array
    changed: Int32Array
    changed_index: Int32Array
    num_changed: Int64Array
    part: Float64Array
    route_price: Float64Array


def layer_of(task: LayerTask, bins: Int32Array, routes: Routes | None = None) -> tuple[Layer, Int32Array]:
    """The constant arrays of a task and its slots, filled as `bins` says. Bins: shape (R, S), a legal start, slots aligned.

    routes: the layer's own; None = even split. Returns the layer and the start, shape (N,).
    """
    where = np.argwhere(task.usable)
    rank_of = where[:, 0].astype(np.int32)
    home = task.held[task.usable].astype(np.int32)
    start = bins[task.usable].astype(np.int32)
    num_ranks, num_logical = task.num_ranks, task.num_logical
    frozen = np.zeros(rank_of.size, np.uint8)
    for rank, expert in np.argwhere(task.pinned).tolist():
        held = np.flatnonzero((rank_of == rank) & (start == expert))
        frozen[held[:1]] = 1
    home_slot = np.full((num_ranks, num_logical), -1, np.int32)
    fresh = (task.price > 0).astype(np.uint8)
    for slot in range(rank_of.size - 1, -1, -1):
        if home[slot] >= 0:
            fresh[rank_of[slot], home[slot]] = 0
            home_slot[rank_of[slot], home[slot]] = -1 if frozen[slot] and start[slot] != home[slot] else slot
    scale = 1.0 / task.fair if task.fair > 0 else 1.0
    layer = Layer(
        load=task.load * scale,
        rank_of=rank_of,
        frozen=frozen,
        home=home,
        home_slot=home_slot,
        fresh=fresh,
        price=np.where(task.allowed, task.price, np.inf),
        inverse=1.0 / task.capacity,
        base=task.base * scale,
        copies_min=np.minimum(task.copies_min, task.copies_max),
        copies_max=task.copies_max,
        spread=task.spread.astype(np.uint8),
        domain_of=task.domain_of,
        movable=np.flatnonzero(frozen == 0).astype(np.int32),
        **(routes or even_routes())._asdict(),
    )
    return layer, start


def bins_of(task: LayerTask, expert_at: Int32Array) -> Int32Array:
    """Slots (N,) as rows by rank, shape (R, S), -1 = empty."""
    bins = np.full(task.usable.shape, -1, np.int32)
    bins[task.usable] = expert_at
    return bins


@compiled_nogil
def new_state(layer: Layer, start: Int32Array, width: int) -> State:
    """A state filled from slots. Width: most copies that one expert can come to have."""
    num_slots, num_ranks, num_logical = layer.rank_of.size, layer.inverse.size, layer.load.size
    state = State(
        np.full(num_slots, -1, np.int32),
        np.zeros((num_ranks, num_logical), np.uint8),
        np.zeros(num_logical, np.int64),
        np.full((num_logical, width), -1, np.int32),
        np.full(num_slots, -1, np.int32),
        np.zeros(num_ranks),
        np.full(num_slots, -1, np.int32),
        np.full(num_slots, -1, np.int32),
        np.zeros(1, np.int64),
        np.zeros(num_slots),
        np.zeros(num_logical),
    )
    refill(layer, state, start)
    return state


@inlined
def refill(layer: Layer, state: State, start: Int32Array) -> None:
    """Set every slot, from nothing."""
    state.copies[:] = 0
    state.count_on[:] = 0
    state.expert_at[:] = -1
    state.changed_index[:] = -1
    state.num_changed[0] = 0
    for slot in range(start.size):
        put(layer, state, slot, start[slot])
        note_change(layer, state, slot)
    if layer.dispatch == WEIGHTED:
        start_parts(layer, state)
    reckon(layer, state)


@inlined
def reckon(layer: Layer, state: State) -> None:
    """Rank work and prices of routes from nothing: ends what rounding has added up to."""
    for rank in range(state.work.size):
        state.work[rank] = layer.base[rank]
    for expert in range(layer.load.size):
        if layer.dispatch == WEIGHTED:
            for index in range(state.copies[expert]):
                slot = state.holders[expert, index]
                state.work[layer.rank_of[slot]] += state.part[slot]
        else:
            state.route_price[expert] = serve(layer, state, expert, 1.0)


@inlined
def start_parts(layer: Layer, state: State) -> None:
    """A first split of experts over their copies under weighted dispatch: even, then poured a few times."""
    for slot in range(state.part.size):
        expert = state.expert_at[slot]
        state.part[slot] = 0.0 if expert < 0 else layer.load[expert] / state.copies[expert]
    reckon(layer, state)
    for turn in range(FIRST_POURS * layer.load.size):
        expert = turn % layer.load.size
        serve(layer, state, expert, -1.0)
        serve(layer, state, expert, 1.0)


@inlined
def serve(layer: Layer, state: State, expert: int, sign: float) -> float:
    """Add (sign 1) or take away (sign -1) what the holders of an expert serve of it. Returns the price of its routes."""
    number = state.copies[expert]
    if number == 0:
        return 0.0
    if layer.dispatch == EVEN:
        part = sign * layer.load[expert] / number
        for index in range(number):
            state.work[layer.rank_of[state.holders[expert, index]]] += part
        return 0.0
    return serve_by_routes(
        layer.dispatch,
        layer.node_of,
        layer.parts,
        layer.node_parts,
        layer.senders,
        layer.hop_price,
        layer.misplaced_price,
        layer.node_copies,
        layer.node_without,
        layer.rank_of,
        layer.inverse,
        state.holders[expert, :number],
        state.count_on,
        state.work,
        state.part,
        expert,
        layer.load[expert],
        sign,
    )


@inlined
def put(layer: Layer, state: State, slot: int, expert: int) -> None:
    """Fill a slot (-1 = empty it); holders and counts follow, work does not."""
    old = state.expert_at[slot]
    rank = layer.rank_of[slot]
    if old >= 0:
        index = state.holder_index[slot]
        last = state.holders[old, state.copies[old] - 1]
        state.holders[old, index] = last
        state.holder_index[last] = index
        state.copies[old] -= 1
        state.count_on[rank, old] -= 1
    state.expert_at[slot] = expert
    if expert >= 0:
        state.holders[expert, state.copies[expert]] = slot
        state.holder_index[slot] = state.copies[expert]
        state.copies[expert] += 1
        state.count_on[rank, expert] += 1


@inlined
def note_change(layer: Layer, state: State, slot: int) -> None:
    """Keep the list of changed slots: call after the slot was filled."""
    index = state.changed_index[slot]
    if state.expert_at[slot] != layer.home[slot]:
        if index < 0:
            number = state.num_changed[0]
            state.changed[number] = slot
            state.changed_index[slot] = number
            state.num_changed[0] = number + 1
    elif index >= 0:
        number = state.num_changed[0] - 1
        last = state.changed[number]
        state.changed[index] = last
        state.changed_index[last] = index
        state.changed_index[slot] = -1
        state.num_changed[0] = number


@inlined
def exchange(layer: Layer, state: State, slot: int, other: int) -> None:
    """Two slots exchange what they hold; holders and counts follow, work and the list of changes do not."""
    first, second = state.expert_at[slot], state.expert_at[other]
    first_index, second_index = state.holder_index[slot], state.holder_index[other]
    rank, other_rank = layer.rank_of[slot], layer.rank_of[other]
    state.expert_at[slot] = second
    state.expert_at[other] = first
    state.part[slot], state.part[other] = state.part[other], state.part[slot]
    if first >= 0:
        state.holders[first, first_index] = other
        state.holder_index[other] = first_index
        state.count_on[rank, first] -= 1
        state.count_on[other_rank, first] += 1
    if second >= 0:
        state.holders[second, second_index] = slot
        state.holder_index[slot] = second_index
        state.count_on[other_rank, second] -= 1
        state.count_on[rank, second] += 1


@inlined
def settle(layer: Layer, state: State, slot: int) -> None:
    """Move an expert that came to this slot into the slot where its rank holds it now, and keep the list of changes."""
    note_change(layer, state, slot)
    expert = state.expert_at[slot]
    if expert >= 0:
        own = layer.home_slot[layer.rank_of[slot], expert]
        if own >= 0 and own != slot and state.expert_at[own] != expert:
            exchange(layer, state, slot, own)
            note_change(layer, state, slot)
            note_change(layer, state, own)


@inlined
def is_spread(layer: Layer, state: State, expert: int) -> bool:
    """Whether an expert is on at least two failure domains."""
    for index in range(1, state.copies[expert]):
        first = layer.domain_of[layer.rank_of[state.holders[expert, 0]]]
        if layer.domain_of[layer.rank_of[state.holders[expert, index]]] != first:
            return True
    return False


@compiled_nogil
def price_of(layer: Layer, expert_at: Int32Array) -> float:
    """Price of all residencies."""
    total = 0.0
    for slot in range(expert_at.size):
        if expert_at[slot] >= 0:
            total += layer.price[layer.rank_of[slot], expert_at[slot]]
    return total


@compiled_nogil
def moves_of(layer: Layer, expert_at: Int32Array) -> int:
    """Residencies that are new."""
    total = 0
    for slot in range(expert_at.size):
        if expert_at[slot] >= 0:
            total += layer.fresh[layer.rank_of[slot], expert_at[slot]]
    return total


@inlined
def height_of_work(layer: Layer, work: Float64Array) -> float:
    """Largest work over capacity."""
    highest = 0.0
    for rank in range(work.size):
        highest = max(highest, work[rank] * layer.inverse[rank])
    return highest


@compiled_nogil
def worth_of(layer: Layer, slots: Int32Array, width: int) -> tuple[float, int, float, float]:
    """Height, moves, price of residencies and price of routes of a row. Slots: shape (N,); width: as in `new_state`."""
    state = new_state(layer, slots, width)
    return height_of_work(layer, state.work), moves_of(layer, slots), price_of(layer, slots), state.route_price.sum()
