"""Makes a layer's row legal with the fewest new residencies: whatever the constraints are, near what is held now.

First what is easy: drop what may not be there, put what is missing on free or spare slots. Every expert then costs the one move
that it must, so that answer cannot be bettered. Where it does not work out, a minimum-cost flow decides.
"""

from __future__ import annotations

import numpy as np

from eplb_service.moves import align_slots
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.layer_task import Float64Array, Int32Array, Int64Array, LayerTask
from eplb_service.policy.residency_flow import required_residencies


def repair_bins(task: LayerTask) -> Int32Array:
    """A legal layer near the held one: the experts of each rank, shape (R, S), int32, -1 padded at the end.

    Of all legal layers it has the fewest residencies that are not held now; with group prices, the least price. What is held
    and not in the way stays. Raises InvalidInputError naming what cannot be met when no legal layer exists.
    """
    counts = _mended(task)
    if counts is None:
        counts = _filled(task, required_residencies(task))
    return _as_bins(task, counts)


def repaired_row(task: LayerTask) -> Int32Array:
    """`repair_bins` as a row, shape (P,): experts that stay keep their slots. Raises InvalidInputError as it does."""
    return align_slots(task.held.reshape(-1), repair_bins(task).reshape(-1), num_ranks=task.num_ranks, usable=task.usable)


class _Layer:
    """Copies of each expert on each rank, shape (R, E), while they are changed; knows which of them could go."""

    def __init__(self, task: LayerTask, counts: Int64Array) -> None:
        self.task = task
        self.counts = counts
        self.copies = counts.sum(axis=0)
        self.domains = np.zeros((int(task.domain_of.max()) + 1, task.num_logical), np.int64)
        np.add.at(self.domains, task.domain_of, counts)

    def change(self, rank: int, expert: int, by: int) -> None:
        """Add or take copies."""
        self.counts[rank, expert] += by
        self.copies[expert] += by
        self.domains[self.task.domain_of[rank], expert] += by

    def lacks(self, expert: int) -> bool:
        """Whether an expert has too few copies, or all in one domain where it must outlive one."""
        few = self.copies[expert] < self.task.copies_min[expert]
        return bool(few or (self.task.spread[expert] and (self.domains[:, expert] > 0).sum() < 2))

    def spare(self, rank: int) -> Int64Array:
        """Experts of a rank that could lose a copy there without breaking anything."""
        task, here = self.task, self.counts[rank]
        loose = (here > task.pinned[rank]) & (self.copies > task.copies_min)
        stays = self.domains[task.domain_of[rank]] > 1
        return np.flatnonzero(loose & (~task.spread | stays | ((self.domains > 0).sum(axis=0) > 2)))

    def harm(self, expert: Int64Array) -> Float64Array:
        """Load that each remaining copy would carry after the loss of one."""
        result: Float64Array = self.task.load[expert] / np.maximum(self.copies[expert] - 1, 1)
        return result

    def heights(self) -> Float64Array:
        """Work over capacity of each rank, shape (R,)."""
        share = self.task.load / np.maximum(self.copies, 1)
        result: Float64Array = (self.counts @ share + self.task.base) / self.task.capacity
        return result


def _held_counts(task: LayerTask) -> Int64Array:
    """Copies that are held and may be, shape (R, E)."""
    counts = np.zeros((task.num_ranks, task.num_logical), np.int64)
    rank, slot = np.nonzero(task.held != EMPTY_SLOT)
    np.add.at(counts, (rank, task.held[rank, slot]), 1)
    counts[~task.allowed] = 0
    return np.minimum(counts, 1) if task.distinct else counts


def _mended(task: LayerTask) -> Int64Array | None:
    """What is held, with pins, without what is too much, and each missing copy on a free or spare slot; None = not so easy."""
    if (task.pinned & ~task.allowed).any():
        return None
    layer = _Layer(task, np.maximum(_held_counts(task), task.pinned))
    if not _trim(layer):
        return None
    lacking = np.flatnonzero([layer.lacks(expert) for expert in range(task.num_logical)])
    for expert in sorted(lacking.tolist(), key=lambda name: (-task.load[name], name)):
        while layer.lacks(expert):
            if not _place(layer, expert):
                return None
    return layer.counts


def _trim(layer: _Layer) -> bool:
    """Drop copies beyond the room of ranks and the most copies of experts; False when that would break something."""
    task = layer.task
    for rank in np.flatnonzero(layer.counts.sum(axis=1) > task.room).tolist():
        while int(layer.counts[rank].sum()) > task.room[rank]:
            spare = layer.spare(rank)
            if not spare.size:
                return False
            layer.change(rank, int(spare[np.argmin(layer.harm(spare))]), -1)
    for expert in np.flatnonzero(layer.copies > task.copies_max).tolist():
        while layer.copies[expert] > task.copies_max[expert]:
            ranks = [rank for rank in np.flatnonzero(layer.counts[:, expert]).tolist() if expert in layer.spare(rank)]
            if not ranks:
                return False
            layer.change(max(ranks), expert, -1)
    return True


def _place(layer: _Layer, expert: int) -> bool:
    """Put one more copy of an expert on a free slot of the least busy rank, else on the spare copy that is missed least."""
    task = layer.task
    may = task.allowed[:, expert] & (layer.copies[expert] < task.copies_max[expert])
    if task.distinct:
        may &= layer.counts[:, expert] == 0
    if task.spread[expert] and int((layer.domains[:, expert] > 0).sum()) == 1:
        may &= layer.domains[task.domain_of, expert] == 0
    fill, heights = layer.counts.sum(axis=1), layer.heights()
    free = np.flatnonzero(may & (fill < task.room))
    if free.size:
        layer.change(min(free.tolist(), key=lambda rank: (task.price[rank, expert], heights[rank], rank)), expert, 1)
        return True
    best: tuple[float, float, int, int] | None = None
    for rank in np.flatnonzero(may & (task.room > 0)).tolist():
        spare = layer.spare(rank)
        if spare.size:
            harm = layer.harm(spare)
            least = int(np.argmin(harm))
            found = (float(task.price[rank, expert]), float(harm[least]), rank, int(spare[least]))
            best = found if best is None else min(best, found)
    if best is None:
        return False
    _, _, rank, other = best
    layer.change(rank, other, -1)
    layer.change(rank, expert, 1)
    return True


def _filled(task: LayerTask, required: Int64Array) -> Int64Array:
    """The required copies, and what else is held as far as there is room: what carries most load first."""
    layer = _Layer(task, required.copy())
    left = _held_counts(task) - required
    for rank in range(task.num_ranks):
        free = int(task.room[rank] - layer.counts[rank].sum())
        others = np.repeat(np.arange(task.num_logical), np.maximum(left[rank], 0))
        for expert in sorted(others.tolist(), key=lambda name: (-layer.harm(np.array([name]))[0], name)):
            if free > 0 and layer.copies[expert] < task.copies_max[expert]:
                layer.change(rank, expert, 1)
                free -= 1
    return layer.counts


def _as_bins(task: LayerTask, counts: Int64Array) -> Int32Array:
    """Bins from copies: what is held first, in the order of its slots, then what is new, by ascending id."""
    bins = np.full(task.held.shape, EMPTY_SLOT, np.int32)
    for rank, wanted in enumerate(counts):
        left = wanted.copy()
        experts: list[int] = []
        for expert in task.held[rank].tolist():
            if expert != EMPTY_SLOT and left[expert]:
                experts.append(expert)
                left[expert] -= 1
        experts += np.repeat(np.arange(left.size), left).tolist()
        bins[rank, : len(experts)] = experts
    return bins
