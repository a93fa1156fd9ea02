"""What the constraints of a problem leave: usable slots, copies of an expert, ranks that serve; whether a row is legal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.policy.base import PlanningProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Constraints of a problem in arrays.

    usable: shape (R, S), whether a slot may hold an expert (rank serves, slot not out of use).
    room: usable slots of each rank, shape (R,). capacity: shape (R,), relative speed.
    copies_max: most copies of one expert. distinct: never two on one rank.
    """

    usable: npt.NDArray[np.bool_]
    room: npt.NDArray[np.int64]
    capacity: npt.NDArray[np.float64]
    copies_max: int
    distinct: bool

    @property
    def num_slots(self) -> int:
        """Usable slots."""
        return int(self.room.sum())

    def without_copy_rules(self) -> Limits:
        """The same slots, but any number of copies anywhere: what a row that stays as it is must still satisfy."""
        return replace(self, copies_max=int(self.room.sum()), distinct=False)


def limits_of(problem: PlanningProblem) -> Limits:
    """The limits of a problem. Raises InvalidInputError when experts do not fit or a constraint names what is not there."""
    table, topology, constraints = problem.current, problem.topology, problem.constraints
    usable = np.ones((table.num_ranks, table.slots_per_rank), np.bool_)
    for position, rank in enumerate(topology.rank_ids):
        if rank in topology.dead:
            usable[position] = False
    for rank_id, slot in sorted(constraints.unusable_slots):
        if not 0 <= slot < table.slots_per_rank:
            raise InvalidInputError(
                f"unusable slot {slot} of rank {rank_id} does not exist; slots run to {table.slots_per_rank - 1}"
            )
        usable[topology.position_of(rank_id), slot] = False
    room = usable.sum(axis=1).astype(np.int64)
    if int(room.sum()) < table.num_logical:
        raise InvalidInputError(
            f"{table.num_logical} experts do not fit {int(room.sum())} usable slots"
            f" ({table.num_ranks} ranks x {table.slots_per_rank} slots, {len(topology.dead)} ranks dead,"
            f" {len(constraints.unusable_slots)} slots out of use)"
        )
    if constraints.max_replicas is not None and constraints.max_replicas < 1:
        raise InvalidInputError(f"max_replicas must be at least 1; got {constraints.max_replicas}")
    if constraints.max_moves is not None and constraints.max_moves < 0:
        raise InvalidInputError(f"max_moves must be at least 0; got {constraints.max_moves}")
    copies_max = int((room > 0).sum()) if constraints.distinct_ranks else int(room.sum())
    if constraints.max_replicas is not None:
        copies_max = min(copies_max, constraints.max_replicas)
    capacity = np.ones(table.num_ranks) if topology.capacity is None else np.array(topology.capacity, np.float64)
    return Limits(usable=usable, room=room, capacity=capacity, copies_max=copies_max, distinct=constraints.distinct_ranks)


def row_fault(row: npt.NDArray[np.integer], limits: Limits, num_logical: int) -> str | None:
    """Why a layer's row breaks the limits, None when it does not. Row: shape (P,), ids within -1..E-1."""
    by_rank = np.asarray(row).reshape(limits.usable.shape)
    bad = np.argwhere((by_rank >= 0) & ~limits.usable)
    if bad.size:
        rank, slot = bad[0].tolist()
        return f"rank position {rank} slot {slot} holds expert {int(by_rank[rank, slot])} but is dead or out of use"
    copies = np.bincount(by_rank[by_rank >= 0], minlength=num_logical)
    if (copies == 0).any():
        missing = np.flatnonzero(copies == 0)
        return f"expert {int(missing[0])} has no slot ({missing.size} of {num_logical} have none)"
    if limits.distinct:
        held = np.sort(by_rank, axis=1)
        twice = np.argwhere((held[:, 1:] == held[:, :-1]) & (held[:, 1:] >= 0))
        if twice.size:
            rank, slot = twice[0].tolist()
            return f"rank position {rank} holds expert {int(held[rank, slot])} twice"
    if int(copies.max()) > limits.copies_max:
        return f"expert {int(copies.argmax())} has {int(copies.max())} replicas; at most {limits.copies_max} are allowed"
    return None


def legal_rows(rows: npt.NDArray[np.integer], limits: Limits, num_logical: int) -> npt.NDArray[np.bool_]:
    """Whether each layer's row keeps the limits: `row_fault(...) is None` for all layers at once. Rows: (L, P). Shape (L,)."""
    by_rank = np.asarray(rows).reshape(-1, *limits.usable.shape)
    num_layers = by_rank.shape[0]
    legal: npt.NDArray[np.bool_] = np.logical_not(((by_rank >= 0) & ~limits.usable).any(axis=(1, 2)))
    held = np.where(by_rank >= 0, by_rank, num_logical).reshape(num_layers, -1)
    start = np.arange(num_layers)[:, None] * (num_logical + 1)
    copies = np.bincount((start + held).reshape(-1), minlength=num_layers * (num_logical + 1))
    copies = copies.reshape(num_layers, num_logical + 1)[:, :num_logical]
    legal &= (copies > 0).all(axis=1) & (copies <= limits.copies_max).all(axis=1)
    if limits.distinct:
        ordered = np.sort(by_rank, axis=2)
        legal &= ~((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=(1, 2))
    return legal
