"""What the constraints of a problem leave: usable slots, copies, pins, bars, protected experts; whether a row is legal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.ids import ids_text
from eplb_service.moves import residencies
from eplb_service.placement import EMPTY_SLOT
from eplb_service.policy.base import ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.contradictions import check_constraints

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Constraints of a problem in arrays.

    usable: shape (R, S), whether a slot may hold an expert (rank serves, slot not out of use).
    room: usable slots of each rank, shape (R,). capacity: shape (R,), relative speed.
    copies_max: most copies of one expert. distinct: never two on one rank.
    pins, bars: shape (n, 3), layer position, rank position, expert; sorted; residencies that must, must not be there.
    protected: shape (L, E), experts that must be on two failure domains; None = none. domain_of: domain of each rank, (R,).
    """

    usable: BoolArray
    room: Int64Array
    capacity: npt.NDArray[np.float64]
    copies_max: int
    distinct: bool
    pins: Int64Array
    bars: Int64Array
    protected: BoolArray | None
    domain_of: Int64Array

    @property
    def num_slots(self) -> int:
        """Usable slots."""
        return int(self.room.sum())

    @property
    def plain(self) -> bool:
        """Whether no expert is treated unlike another: nothing pinned, barred or protected."""
        return not self.pins.size and not self.bars.size and self.protected is None

    def without_copy_rules(self) -> Limits:
        """The same slots, but any number of copies anywhere: what a row that stays as it is must satisfy in any case."""
        nothing = np.zeros((0, 3), np.int64)
        return replace(self, copies_max=int(self.room.sum()), distinct=False, pins=nothing, bars=nothing, protected=None)

    def marked(self, triples: Int64Array, layer: int, num_logical: int) -> BoolArray:
        """Where pins or bars name a residency of a layer. Shape (R, E)."""
        marks = np.zeros((self.room.size, num_logical), np.bool_)
        mine = triples[triples[:, 0] == layer]
        marks[mine[:, 1], mine[:, 2]] = True
        return marks


def limits_of(problem: PlanningProblem) -> Limits:
    """The limits of a problem.

    Raises InvalidInputError when experts do not fit, a constraint names what is not there, or two constraints contradict one
    another by arithmetic (`contradictions`); whether the rest can be met together is for `feasibility.check_feasible` to say.
    """
    table, topology, constraints = problem.current, problem.topology, problem.constraints
    usable = _usable_slots(problem)
    room = usable.sum(axis=1).astype(np.int64)
    if int(room.sum()) < table.num_logical:
        raise InvalidInputError(
            f"{table.num_logical} experts do not fit {int(room.sum())} usable slots"
            f" ({table.num_ranks} ranks x {table.slots_per_rank} slots, {len(topology.dead)} ranks dead,"
            f" {len(constraints.unusable_slots)} slots out of use); bring ranks back, or give each rank at least"
            f" {-(-table.num_logical // max(1, int((room > 0).sum())))} slots"
        )
    _check_numbers(problem)
    copies_max = int((room > 0).sum()) if constraints.distinct_ranks else int(room.sum())
    if constraints.max_replicas is not None:
        copies_max = min(copies_max, constraints.max_replicas)
    resilience = constraints.resilience
    by_node = resilience is not None and resilience.domain is FailureDomain.NODE
    domains = np.array(topology.node_indices, np.int64) if by_node else np.arange(table.num_ranks, dtype=np.int64)
    limits = Limits(
        usable=usable,
        room=room,
        capacity=np.ones(table.num_ranks) if topology.capacity is None else np.array(topology.capacity, np.float64),
        copies_max=copies_max,
        distinct=constraints.distinct_ranks,
        pins=_triples(constraints.pinned, problem, "pinned"),
        bars=_triples(constraints.barred, problem, "barred"),
        protected=None if resilience is None else protected_experts(problem.total_loads, resilience),
        domain_of=domains,
    )
    check_constraints(problem, limits)
    return limits


def _usable_slots(problem: PlanningProblem) -> BoolArray:
    """Shape (R, S): slots of ranks that serve, but for those out of use."""
    table, topology = problem.current, problem.topology
    usable = np.ones((table.num_ranks, table.slots_per_rank), np.bool_)
    for position, rank in enumerate(topology.rank_ids):
        if rank in topology.dead:
            usable[position] = False
    for rank_id, slot in sorted(problem.constraints.unusable_slots):
        if not 0 <= slot < table.slots_per_rank:
            raise InvalidInputError(
                f"unusable slot {slot} of rank {rank_id} does not exist; slots run to {table.slots_per_rank - 1}"
            )
        usable[topology.position_of(rank_id), slot] = False
    return usable


def _check_numbers(problem: PlanningProblem) -> None:
    """Numbers that mean nothing."""
    constraints = problem.constraints
    if constraints.max_replicas is not None and constraints.max_replicas < 1:
        raise InvalidInputError(f"max_replicas must be at least 1; got {constraints.max_replicas}")
    for name, most in constraints.move_limits.items():
        if most is not None and most < 0:
            raise InvalidInputError(f"{name} must be at least 0; got {most}")
    price = constraints.group_price
    if price is not None and not 0.0 <= price < float("inf"):
        raise InvalidInputError(f"group_price must be finite and at least 0 moves; got {price}; None makes groups strict")


def _triples(named: frozenset[ExpertOnRank], problem: PlanningProblem, how: str) -> Int64Array:
    """Layer position, rank position and expert of each residency named, sorted, each once. Shape (n, 3)."""
    table = problem.current
    triples: set[tuple[int, int, int]] = set()
    for item in named:
        if not 0 <= item.expert < table.num_logical:
            raise InvalidInputError(
                f"expert {item.expert} is {how} but model {table.model!r} has experts 0 to {table.num_logical - 1}"
            )
        if item.layer_id is not None and item.layer_id not in table.layer_ids:
            raise InvalidInputError(
                f"expert {item.expert} is {how} in layer {item.layer_id}, which is not among the layers"
                f" {ids_text(table.layer_ids)} of model {table.model!r}"
            )
        rank = problem.topology.position_of(item.rank_id)
        layers = range(table.num_layers) if item.layer_id is None else [table.layer_ids.index(item.layer_id)]
        triples.update((layer, rank, item.expert) for layer in layers)
    return np.array(sorted(triples), np.int64).reshape(-1, 3)


def protected_experts(loads: npt.NDArray[np.float64], resilience: Resilience) -> BoolArray:
    """Each layer's hottest experts, as many as the share asks for (rounded up); ties go to the lowest id. Shape (L, E)."""
    num_logical = loads.shape[1]
    num_hot = min(num_logical, int(np.ceil(resilience.hot_share * num_logical - 1e-9)))
    protected = np.zeros(loads.shape, np.bool_)
    np.put_along_axis(protected, np.argsort(-loads, axis=1, kind="stable")[:, :num_hot], values=True, axis=1)
    return protected


def row_fault(row: npt.NDArray[np.integer], limits: Limits, num_logical: int) -> str | None:
    """Why a layer's row breaks the slot and copy rules, None when it does not. Row: shape (P,), ids within -1..E-1.

    Pins, bars and protected experts: see `broken_promises`.
    """
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


def broken_promises(row: npt.NDArray[np.integer], limits: Limits, layer: int, num_logical: int) -> dict[tuple[int, int], str]:
    """Pins that a layer's row lacks, barred experts that it holds, protected experts in fewer than two failure domains.

    Row: shape (P,); what lies in slots that may not be used does not count. Keys are (rank position, expert), -1 as rank for a
    protected expert; values say what is wrong.
    """
    broken: dict[tuple[int, int], str] = {}
    if limits.plain:
        return broken
    usable = np.where(limits.usable, np.asarray(row).reshape(limits.usable.shape), EMPTY_SLOT).reshape(-1)
    held = residencies(usable, num_ranks=limits.room.size, num_logical=num_logical)
    for _, rank, expert in limits.pins[limits.pins[:, 0] == layer].tolist():
        if not held[rank, expert]:
            broken[rank, expert] = f"expert {expert} is pinned to rank position {rank} but is not there"
    for _, rank, expert in limits.bars[limits.bars[:, 0] == layer].tolist():
        if held[rank, expert]:
            broken[rank, expert] = f"rank position {rank} holds expert {expert}, which is barred from it"
    if limits.protected is not None:
        domains = np.zeros((int(limits.domain_of.max()) + 1, num_logical), np.bool_)
        np.logical_or.at(domains, limits.domain_of, held)
        for expert in np.flatnonzero(limits.protected[layer] & (domains.sum(axis=0) < 2)).tolist():
            broken[-1, expert] = f"expert {expert} must be in two failure domains but is in {int(domains[:, expert].sum())}"
    return broken


def legal_rows(rows: npt.NDArray[np.integer], limits: Limits, num_logical: int) -> BoolArray:
    """Whether each layer's row keeps the limits: no `row_fault`, no `broken_promises`. Rows: all layers, (L, P). Shape (L,)."""
    by_rank = np.asarray(rows).reshape(-1, *limits.usable.shape)
    num_layers = by_rank.shape[0]
    legal: BoolArray = np.logical_not(((by_rank >= 0) & ~limits.usable).any(axis=(1, 2)))
    held = np.where(by_rank >= 0, by_rank, num_logical).reshape(num_layers, -1)
    start = np.arange(num_layers)[:, None] * (num_logical + 1)
    copies = np.bincount((start + held).reshape(-1), minlength=num_layers * (num_logical + 1))
    copies = copies.reshape(num_layers, num_logical + 1)[:, :num_logical]
    legal &= (copies > 0).all(axis=1) & (copies <= limits.copies_max).all(axis=1)
    if limits.distinct:
        ordered = np.sort(by_rank, axis=2)
        legal &= ~((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=(1, 2))
    if not limits.plain:
        for layer in np.flatnonzero(legal).tolist():
            legal[layer] = not broken_promises(by_rank[layer], limits, layer, num_logical)
    return legal
