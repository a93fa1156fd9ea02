"""How many chunks `plan_chunks` would make, without making them: for the many points of a front that are only looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from eplb_service.ids import RankId
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT, Table
from eplb_service.topology import Topology


def count_chunks(
    live: Table,
    target: Table,
    *,
    topology: Topology,
    expert_bytes: Sequence[int],
    staging_bytes: Mapping[RankId, int],
    layers_max: int | None = None,
    flip_bytes_max: int | None = None,
    restorers: AbstractSet[RankId] = frozenset(),
) -> int | None:
    """Chunks of one table; None when it cannot be carried out (staging too small for a layer, or an expert without source).

    expert_bytes: of each layer; the other arguments as for `plan_chunks`, whose rule of filling chunks this follows.
    """
    budget = min((staging_bytes[rank] for rank in topology.rank_ids), default=0)
    most = budget if flip_bytes_max is None else min(budget, flip_bytes_max)
    shape = (live.num_layers, live.num_ranks, live.slots_per_rank)
    old, new = live.physical_to_logical.reshape(shape), target.physical_to_logical.reshape(shape)
    rewritten = ((old != new) & (new != EMPTY_SLOT)).sum(axis=2, dtype=np.int64)
    staged = rewritten * np.array(expert_bytes, np.int64)[:, None]
    alive = np.array(topology.alive)
    has_backup = np.array([rank in restorers for rank in topology.rank_ids])
    if (staged > budget).any() or rewritten[:, ~alive].any():
        return None
    changed = (old != new).any(axis=(1, 2))
    if live.shares is not None or target.shares is not None:
        both = live.shares is not None and target.shares is not None
        changed |= (np.asarray(live.shares) != np.asarray(target.shares)).any(axis=1) if both else True
    groups: list[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]]] = []
    for layer in np.flatnonzero(changed).tolist():
        if not _is_sourced(old[layer], new[layer], alive, has_backup, live.num_logical):
            return None
        more = staged[layer]
        for index, (size, filled) in enumerate(groups):
            if (filled + more <= most).all() and (layers_max is None or size < layers_max):
                groups[index] = (size + 1, filled + more)
                break
        else:
            groups.append((1, more))
    return len(groups)


def _is_sourced(
    old: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    new: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    alive: np.ndarray[tuple[int], np.dtype[np.bool_]],
    has_backup: np.ndarray[tuple[int], np.dtype[np.bool_]],
    num_logical: int,
) -> bool:
    """Whether every expert that a slot is to get is held by a rank that serves, or the slot's rank has a backup.

    Rows: shape (R, S); masks: shape (R,).
    """
    held = np.asarray(residencies(old.reshape(-1), num_ranks=old.shape[0], num_logical=num_logical)[alive]).any(axis=0)
    wanted = (old != new) & (new != EMPTY_SLOT) & ~has_backup[:, None]
    return bool(np.asarray(held)[new[wanted]].all())
