"""Brings back experts that no rank holds any more (vllm#41204, sglang#12068): a placement that covers every expert again.

Only what that takes is changed, with the fewest moves (`restore_flow`): balance is planned again once every expert is served.
An expert is brought back on a rank that has a backup to take it from. It gets a free slot, else one of an expert that has
another copy; where there is none, the last copy of another expert goes to a rank with room first. Drained ranks keep what they
hold and get nothing. Pins, bars, strict groups and copies in two failure domains are kept as far as they can be, also for the
experts that come back; what is given up is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import ExpertOnRank, FailureDomain, PlanningProblem
from eplb_service.policy.contradictions import has_strict_groups
from eplb_service.policy.limits import protected_experts
from eplb_service.policy.restore_flow import Filled, Gap, fewest_moves
from eplb_service.policy.shares import with_shares

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Restored:
    """table: every expert has a slot. given_up: a sentence for each kind of promise that could not be kept."""

    table: Table
    given_up: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorers:
    """Who can bring experts back. ranks: those with a backup of their own. drained: get nothing.

    staging_bytes: that a rank can stage of one layer.
    """

    ranks: AbstractSet[RankId]
    drained: AbstractSet[RankId]
    staging_bytes: int


def restored(problem: PlanningProblem, restorers: Restorers) -> Restored:
    """The current placement, and a slot for every expert that has none in it. Limits on moves do not bind.

    Raises InvalidInputError, with the numbers, where the ranks that can restore experts have no room for them.
    """
    table = problem.current
    rules = _Rules.of(problem, restorers)
    rows: dict[int, Int32Array] = {}
    broken: dict[str, int] = {}
    for layer in np.flatnonzero((rules.copies_of(table.physical_to_logical) == 0).any(axis=1)).tolist():
        gap = rules.gap(problem, layer)
        filled = fewest_moves(gap)
        if filled.short:
            raise InvalidInputError(_shortage(problem, restorers, gap, filled, layer))
        row = table.by_rank()[layer].copy()
        for rank, slot, expert in filled.slots:
            row[rank, slot] = expert
        rows[table.layer_ids[layer]] = row.reshape(-1)
        for what, count in rules.broken_by(layer, gap, row).items():
            broken[what] = broken.get(what, 0) + count
    new = table.physical_to_logical.copy()
    for layer_id, changed in rows.items():
        new[table.layer_ids.index(layer_id)] = changed
    shares = with_shares(problem, new)
    mine = None if shares is None else {layer_id: shares[table.layer_ids.index(layer_id)] for layer_id in rows}
    given_up = tuple(f"{what}: {count}" for what, count in broken.items() if count)
    return Restored(table.with_rows(rows, mine), given_up)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rules:
    """What a problem's constraints are to this, in arrays. R ranks, E experts, L layers.

    serves, is_open, has_backup: shape (R,): it is alive; it may be given experts; it can take in those that nobody holds.
    pinned, barred: shape (L, R, E). protected: shape (L, E). domain_of, node_of: shape (R,). group_size: experts of a strict
    group, 0 = none.
    """

    serves: BoolArray
    is_open: BoolArray
    has_backup: BoolArray
    pinned: BoolArray
    barred: BoolArray
    protected: BoolArray
    domain_of: Int64Array
    node_of: Int64Array
    group_size: int
    staging_bytes: int

    @classmethod
    def of(cls, problem: PlanningProblem, restorers: Restorers) -> _Rules:
        table, topology, constraints = problem.current, problem.topology, problem.constraints
        ranks = topology.rank_ids
        serves = np.array(topology.alive)
        resilience, nodes = constraints.resilience, np.array(topology.node_indices, np.int64)
        by_node = resilience is not None and resilience.domain is FailureDomain.NODE
        groups = constraints.num_groups or 1
        return cls(
            serves=serves,
            is_open=serves & np.array([rank not in restorers.drained for rank in ranks]),
            has_backup=np.array([rank in restorers.ranks for rank in ranks]),
            pinned=_marked(table, constraints.pinned),
            barred=_marked(table, constraints.barred),
            protected=np.zeros((table.num_layers, table.num_logical), np.bool_)
            if resilience is None
            else protected_experts(problem.total_loads, resilience),
            domain_of=nodes if by_node else np.arange(len(ranks), dtype=np.int64),
            node_of=nodes,
            group_size=table.num_logical // groups if has_strict_groups(problem) and table.num_logical % groups == 0 else 0,
            staging_bytes=restorers.staging_bytes,
        )

    def held(self, rows: npt.NDArray[np.integer]) -> BoolArray:
        """Whether a rank that serves holds an expert. Rows: shape (…, P). Shape (…, R, E)."""
        there = residencies(rows, num_ranks=self.serves.size, num_logical=self.protected.shape[1])
        held: BoolArray = np.logical_and(there, self.serves[:, None])
        return held

    def copies_of(self, rows: npt.NDArray[np.integer]) -> Int64Array:
        """Ranks that serve each expert. Rows: shape (L, P). Shape (L, E)."""
        copies: Int64Array = np.sum(self.held(rows), axis=1, dtype=np.int64)
        return copies

    def gap(self, problem: PlanningProblem, layer: int) -> Gap:
        """One layer (its position) as the flow sees it."""
        table, constraints = problem.current, problem.constraints
        row = np.where(self.serves[:, None], table.by_rank()[layer], EMPTY_SLOT).astype(np.int32)
        held = self.held(row.reshape(-1))
        missing = np.logical_not(held.any(axis=0))
        open_slots = np.broadcast_to(self.is_open[:, None], row.shape).copy()
        for rank_id, slot in constraints.unusable_slots:
            open_slots[problem.topology.position_of(rank_id), slot] = False
        size = problem.expert_bytes[layer] if problem.expert_bytes else 0
        most = min(self.staging_bytes // size, row.shape[1]) if size else row.shape[1]
        return Gap(
            held=row,
            load=problem.total_loads[layer],
            open_slots=open_slots,
            takes=self.is_open[:, None] & (self.has_backup[:, None] | ~missing[None, :]),
            intake=np.full(self.serves.size, most, np.int64),
            place_broken=self._broken_by_placing(layer, held, missing),
            keep_broken=self._broken_by_losing(layer, row, held),
        )

    def _broken_by_placing(self, layer: int, held: BoolArray, missing: BoolArray) -> Int64Array:
        pinned = self.pinned[layer]
        off_pin = ~pinned & (pinned.any(axis=0) & missing)[None, :]
        broken: Int64Array = np.add(self.barred[layer], off_pin, dtype=np.int64) + self._off_home(held)
        return broken

    def _broken_by_losing(self, layer: int, row: Int32Array, held: BoolArray) -> Int64Array:
        rank = np.broadcast_to(np.arange(row.shape[0])[:, None], row.shape)
        alone = (row[:, :, None] == row[:, None, :]).sum(axis=2) == 1  # the rank has it in no other slot
        domains = self._domains(held)
        mates = np.array([held[self.domain_of == self.domain_of[place]].sum(axis=0) for place in range(row.shape[0])])
        last_there = mates == 1  # shape (R, E): of its domain no other rank holds it
        unprotects = self.protected[layer][None, :] & (domains.sum(axis=0) == 2)[None, :] & last_there
        lost = (self.pinned[layer].astype(np.int64) + unprotects) * held
        return np.where((row != EMPTY_SLOT) & alone, lost[rank, row], 0).astype(np.int64)

    def _domains(self, held: BoolArray) -> BoolArray:
        """Whether a failure domain holds an expert, shape (D, E)."""
        domains = np.zeros((int(self.domain_of.max()) + 1, held.shape[1]), np.bool_)
        np.logical_or.at(domains, self.domain_of, held)
        return domains

    def _off_home(self, held: BoolArray) -> BoolArray:
        """Whether a rank is off the nodes where the rest of an expert's strict group is. Shape (R, E)."""
        num_ranks, num_logical = held.shape
        if not self.group_size:
            return np.zeros((num_ranks, num_logical), np.bool_)
        by_group = np.asarray(held.reshape(num_ranks, -1, self.group_size).any(axis=2))
        on_node = np.array([by_group[self.node_of == node].any(axis=0) for node in self.node_of])  # (R, G)
        off = ~on_node & np.asarray(by_group.any(axis=0))
        return np.repeat(off, self.group_size, axis=1)

    def broken_by(self, layer: int, gap: Gap, row: Int32Array) -> Mapping[str, int]:
        """Promises that a new row breaks and the old one did not. Row: shape (R, S)."""
        before, after = self.held(gap.held.reshape(-1)), self.held(row.reshape(-1))
        new, missing = after & ~before, ~before.any(axis=0)
        pinned = self.pinned[layer]
        off_pin = missing & pinned.any(axis=0) & ~(after & pinned).any(axis=0)
        was, still = self._domains(before).sum(axis=0) >= 2, self._domains(after).sum(axis=0) >= 2
        return {
            "experts that are not on the rank to which they are pinned": int((pinned & before & ~after).sum() + off_pin.sum()),
            "experts on a rank that they are barred from": int((new & self.barred[layer]).sum()),
            "experts off the node of their group": int((new & self._off_home(before)).sum()),
            "experts that were to outlive a failure and no longer do": int((self.protected[layer] & was & ~still).sum()),
        }


def _marked(table: Table, named: frozenset[ExpertOnRank]) -> BoolArray:
    """Residencies that pins or bars name, as far as there are such ranks, layers and experts. Shape (L, R, E)."""
    marks = np.zeros((table.num_layers, table.num_ranks, table.num_logical), np.bool_)
    position = {int(rank): place for place, rank in enumerate(table.rank_ids)}
    for item in named:
        if item.rank_id in position and item.expert < table.num_logical:
            layers = [place for place, layer_id in enumerate(table.layer_ids) if item.layer_id in (None, layer_id)]
            marks[layers, position[item.rank_id], item.expert] = True
    return marks


def _shortage(problem: PlanningProblem, restorers: Restorers, gap: Gap, filled: Filled, layer: int) -> str:
    """Why the experts of a layer cannot come back, in numbers."""
    table, copies = problem.current, np.append(gap.copies, 2)  # the last one is an empty slot: room too
    lost = int((gap.copies == 0).sum())
    able = [place for place, rank in enumerate(table.rank_ids) if rank in restorers.ranks and bool(gap.open_slots[place].any())]
    where = table.layers[layer]
    if not able:
        return f"layer {where}: {lost} experts live on no rank, and no rank that may be given experts has a backup"
    slots, room = len(able) * table.slots_per_rank, int((copies[gap.held[able]] > 1).sum())
    ranks = ", ".join(str(table.rank_ids[place]) for place in able)
    staged = int(gap.intake.max())
    staging = f", and staging for {staged} each" if staged < table.slots_per_rank else ""
    return (
        f"layer {where}: {filled.short} of the {lost} experts that live on no rank find no slot: the ranks that can restore"
        f" them ({ranks}) have {slots} slots, {room} of them free or with an expert that another slot holds too{staging};"
        " start more ranks with a backup, or with more slots"
    )
