"""Placements and constraints carried over to another set of ranks: some died or left, others joined.

What an engine's group does when it shrinks or grows is decided elsewhere (membership); here is what a planner needs for the new
set: the rows that are there already, and the constraints that can still be met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import Constraints, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.feasibility import check_feasible
from eplb_service.topology import Topology

SOFT_PRICE = 1.0
"""Price, in moves, of a replica off its group's node, where strict groups no longer divide over the nodes that serve."""


def onto_ranks(table: Table, topology: Topology, *, slots_per_rank: int | None = None) -> Table:
    """A placement as it lies on another set of ranks: those in both keep what they hold, new ones are empty, dead ones too.

    Ranks are told apart by their ids, whatever their order or gaps. Experts that only lost ranks held have no slot in the
    result: a policy places them again. slots_per_rank: of the new set, None = as before. Shares are scaled to the replicas that
    are left. Raises InvalidInputError when ranks would have fewer slots than they fill.

    >>> from eplb_service.ids import RankId
    >>> table = Table("m", (0,), 3, (RankId(0), RankId(1), RankId(2)), np.array([[0, 1, 2]], np.int32))
    >>> survivors = Topology((RankId(0), RankId(2), RankId(5)), ("a", "a", "b"))
    >>> onto_ranks(table, survivors).physical_to_logical.tolist()
    [[0, 2, -1]]
    """
    width = table.slots_per_rank if slots_per_rank is None else slots_per_rank
    kept = min(width, table.slots_per_rank)
    shape = (table.num_layers, topology.num_ranks, width)
    rows = np.full(shape, EMPTY_SLOT, np.int32)
    shares = None if table.shares is None else np.zeros(shape, np.float64)
    for position, rank in enumerate(topology.rank_ids):
        if rank in topology.dead or rank not in table.rank_ids:
            continue
        before = table.rank_ids.index(rank)
        held = table.by_rank()[:, before]
        if (held[:, kept:] != EMPTY_SLOT).any():
            layer, slot = np.argwhere(held[:, kept:] != EMPTY_SLOT)[0].tolist()
            raise InvalidInputError(
                f"rank {rank} holds expert {int(held[layer, kept + slot])} in slot {kept + slot} of layer"
                f" {table.layer_ids[layer]} but is to have {width} slots; give it at least {kept + slot + 1}"
            )
        rows[:, position, :kept] = held[:, :kept]
        if shares is not None and table.shares is not None:
            shares[:, position, :kept] = table.shares.reshape(table.num_layers, table.num_ranks, -1)[:, before, :kept]
    flat = rows.reshape(table.num_layers, -1)
    scaled = None if shares is None else _scaled(shares.reshape(flat.shape), flat, table.num_logical)
    return Table(table.model, table.layer_ids, table.num_logical, topology.rank_ids, flat, scaled)


def _scaled(shares: npt.NDArray[np.float64], rows: Int32Array, num_logical: int) -> npt.NDArray[np.float32]:
    """Shares that add up to 1 for every expert that has slots; even where what is left of them is 0. Both: shape (L, P)."""
    result = np.zeros(rows.shape, np.float64)
    for layer, row in enumerate(rows):
        used = row != EMPTY_SLOT
        total = np.bincount(row[used], weights=shares[layer][used], minlength=num_logical)
        copies = np.bincount(row[used], minlength=num_logical)
        lost = total <= 0
        weight = np.where(lost[row], 1.0, shares[layer])
        result[layer] = np.where(used, weight / np.where(lost, np.maximum(copies, 1), total)[row], 0.0)
    return result.astype(np.float32)


def met_by_survivors(problem: PlanningProblem) -> tuple[PlanningProblem, tuple[str, ...]]:
    """The problem with the constraints that ranks which serve can still meet, and a sentence for each that was given up.

    A fleet that lost a rank must serve on, and place its orphans, even where it can no longer keep every promise. Given up in
    this order, each only as far as it must be: pins to dead ranks, resilience, strict groups (they become soft), bars, pins.
    Raises InvalidInputError when the experts do not fit the slots that are left.
    """
    notes: list[str] = []
    constraints, dead = problem.constraints, problem.topology.dead
    lost = frozenset(pin for pin in constraints.pinned if pin.rank_id in dead)
    if lost:
        notes.append(f"{len(lost)} pins to dead ranks {sorted({pin.rank_id for pin in lost})} are given up")
        constraints = replace(constraints, pinned=constraints.pinned - lost)
    steps, given_up = _weaker(constraints, problem), list[int]()
    told: dict[int, str] = {}
    for index in range(len(steps)):
        why = _unmet(problem, constraints, steps, given_up)
        if why is None:
            break
        given_up.append(index)
        told[index] = f"{steps[index][1]}: {why}"
    for index in given_up.copy():  # what did not help is kept
        fewer = [other for other in given_up if other != index]
        if _unmet(problem, constraints, steps, fewer) is None:
            given_up = fewer
    met = replace(problem, constraints=_weakened(constraints, steps, given_up))
    check_feasible(met)
    return met, (*notes, *(told[index] for index in given_up))


Weakening = tuple[Callable[[Constraints], Constraints], str]
"""How to give something up, and how to say it."""


def _weakened(constraints: Constraints, steps: list[Weakening], given_up: list[int]) -> Constraints:
    """The constraints without what is given up."""
    for index in given_up:
        constraints = steps[index][0](constraints)
    return constraints


def _unmet(problem: PlanningProblem, constraints: Constraints, steps: list[Weakening], given_up: list[int]) -> str | None:
    """Why the constraints without what is given up cannot be met, None when they can."""
    try:
        check_feasible(replace(problem, constraints=_weakened(constraints, steps, given_up)))
    except InvalidInputError as error:
        return str(error)
    return None


def _weaker(constraints: Constraints, problem: PlanningProblem) -> list[Weakening]:
    """What to give up, one after another."""
    steps: list[Weakening] = []
    resilience = constraints.resilience
    if resilience is not None:
        share = _share_that_fits(problem, resilience) or resilience.hot_share
        less = Resilience(hot_share=share, domain=resilience.domain)
        if share < resilience.hot_share:
            steps.append((lambda known: replace(known, resilience=less), f"a share of {share:g} of the experts is protected"))
        if resilience.domain is FailureDomain.NODE:
            by_rank = Resilience(hot_share=share, domain=FailureDomain.RANK)
            steps.append(
                (lambda known: replace(known, resilience=by_rank), "the loss of a rank is provided for, not of a node")
            )
        steps.append((lambda known: replace(known, resilience=None), "no expert is protected"))
    if (constraints.num_groups or 1) > 1 and constraints.group_price is None:
        steps.append((lambda known: replace(known, group_price=SOFT_PRICE), "groups are soft"))
    if constraints.barred:
        steps.append((lambda known: replace(known, barred=frozenset()), "nothing is barred"))
    if constraints.pinned:
        steps.append((lambda known: replace(known, pinned=frozenset()), "nothing is pinned"))
    return steps


def _share_that_fits(problem: PlanningProblem, resilience: Resilience) -> float | None:
    """The largest share of experts for whose second copies there are slots, None when there are none or enough."""
    table, topology = problem.current, problem.topology
    slots = sum(table.slots_per_rank for rank in topology.rank_ids if rank not in topology.dead)
    slots -= sum(rank not in topology.dead for rank, _ in problem.constraints.unusable_slots)
    spare = slots - table.num_logical
    share = spare / table.num_logical
    return share if 0 < share < resilience.hot_share else None
