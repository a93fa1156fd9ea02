"""Nearest dispatch as an engine with static tables carries it out: every rank sends all its tokens of an expert to one replica.

Read from SGLang 0.5.23 (`srt/eplb/expert_location.py`, dispatch `static`). `Dispatch.NEAREST` is what these tables do on
average over the picks that nothing prescribes, but for one case: of several copies on a rank's node, where more lie on other
nodes, an engine uses the first one alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Float64Array, reachable_slots, source_parts
from eplb_service.placement import Int32Array, Table
from eplb_service.topology import Topology

NO_SLOT = -1
WORD = (1 << 64) - 1


def _mixed(*keys: int) -> int:
    """A 64-bit number that looks random and is the same everywhere: splitmix64 (Steele, Lea, Flood 2014) over the keys."""
    state = 0
    for key in keys:
        state = (state ^ (key & WORD)) + 0x9E3779B97F4A7C15 & WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & WORD
        state ^= state >> 31
    return state


def static_targets(table: Table, topology: Topology, *, seed: int) -> Int32Array:
    """The slot that each rank sends all its tokens of each expert to. Shape (L, R, E), int32; -1 = sends none.

    The only copy; else the first copy on the own rank; else the first one on the own node where others lie elsewhere; else a
    fair pick: the ranks that are left are dealt to all copies in equal numbers, who gets one more and which is by the seed.
    Dead ranks neither send nor receive.
    """
    by_rank = reachable_slots(table, topology)
    alive = np.array(topology.alive_positions(), np.int64)
    node_of = np.array(topology.node_indices)
    targets = np.full((table.num_layers, table.num_ranks, table.num_logical), NO_SLOT, np.int32)
    for layer, row in enumerate(by_rank.reshape(table.num_layers, -1)):
        order = np.argsort(row, kind="stable")
        first = np.searchsorted(row[order], np.arange(table.num_logical + 1))
        for expert in range(table.num_logical):
            slots = order[first[expert] : first[expert + 1]]
            if slots.size == 1:
                targets[layer, alive, expert] = slots[0]
            elif slots.size > 1:
                keys = (seed, layer, expert)
                targets[layer, :, expert] = _picks(slots, table.slots_per_rank, alive, node_of, keys)
    return targets


def _picks(
    slots: npt.NDArray[np.int64],
    slots_per_rank: int,
    alive: npt.NDArray[np.int64],
    node_of: npt.NDArray[np.int64],
    keys: tuple[int, int, int],
) -> Int32Array:
    """Targets of every rank for one expert with several copies. Slots: ascending. Returns shape (R,)."""
    picks = np.full(node_of.size, NO_SLOT, np.int32)
    ranks = slots // slots_per_rank
    undecided = []
    for source in alive.tolist():
        here = slots[ranks == source]
        near = slots[node_of[ranks] == node_of[source]]
        if here.size:
            picks[source] = here[0]
        elif 0 < near.size < slots.size:
            picks[source] = near[0]
        else:
            undecided.append(source)
    each, rest = divmod(len(undecided), slots.size)
    lucky = sorted(range(slots.size), key=lambda copy: (_mixed(*keys, 1, copy), copy))[:rest]
    dealt = list(range(slots.size)) * each + lucky
    for source, copy in zip(sorted(undecided, key=lambda rank: (_mixed(*keys, 2, rank), rank)), dealt, strict=True):
        picks[source] = slots[copy]
    return picks


def static_shares(table: Table, topology: Topology, *, seed: int, source_loads: npt.ArrayLike | None = None) -> Float64Array:
    """Share of each expert's tokens that each rank receives by such tables. Shape (L, R, E), as `dispatch.rank_shares`.

    source_loads: shape (L, R, E), tokens that each rank sends; None = every rank that serves sends as many of each expert.
    """
    targets = static_targets(table, topology, seed=seed)
    parts = np.broadcast_to(source_parts(table, topology, source_loads), targets.shape)
    layer, source, expert = np.nonzero(targets >= 0)
    rank = targets[layer, source, expert] // table.slots_per_rank
    index = (layer * table.num_ranks + rank) * table.num_logical + expert
    sums = np.bincount(index, weights=parts[layer, source, expert], minlength=targets.size)
    shares: Float64Array = sums.astype(np.float64).reshape(targets.shape)
    return shares
