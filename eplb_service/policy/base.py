"""What a policy is given and what it must return.

A policy plans one table (layers of one model with equal E and P) at a time; the planner calls it once for each table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Table
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a placement must respect beside coverage.

    num_groups: expert groups G that share a node (hierarchical planning); None = no groups.
    distinct_ranks: never two copies of an expert on one rank when it can be avoided.
    unusable_slots: (rank id, local slot) pairs that must stay empty.
    max_moves: most residencies to move in this plan; None = no limit.
    max_replicas: width of the engine's replica table; None = no limit.
    """

    num_groups: int | None = None
    distinct_ranks: bool = True
    unusable_slots: frozenset[tuple[int, int]] = frozenset()
    max_moves: int | None = None
    max_replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """Everything a policy may look at; equal problems give equal plans on any machine.

    loads: shape (W, L, E), float64, tokens; finite, >= 0. W sub-windows in time order, at least 1.
    current: the placement that is live now (also fixes layers, ranks and slots).
    from_nothing: current holds no weights worth keeping (a first, offline plan): max_moves does not bind.
    expert_bytes: bytes of one expert of each layer. Length L.
    dispatch: how the engine picks a replica.
    time_limit_s: hard stop; work_budget: units of work (policy's own) that bound the search on every machine alike.
    """

    loads: npt.NDArray[np.float64]
    topology: Topology
    current: Table
    dispatch: Dispatch = Dispatch.EVEN
    constraints: Constraints = field(default_factory=Constraints)
    expert_bytes: tuple[int, ...] = ()
    from_nothing: bool = False
    seed: int = 0
    time_limit_s: float = 10.0
    work_budget: int | None = None

    def __post_init__(self) -> None:
        loads = np.asarray(self.loads, np.float64)
        expected = (self.current.num_layers, self.current.num_logical)
        if loads.ndim != 3 or loads.shape[0] < 1 or loads.shape[1:] != expected:
            raise InvalidInputError(
                f"loads must have shape (windows, {expected[0]} layers, {expected[1]} experts); got {loads.shape}"
            )
        if not np.isfinite(loads).all() or (loads < 0).any():
            window, layer, expert = np.argwhere(~np.isfinite(loads) | (loads < 0))[0].tolist()
            raise InvalidInputError(
                f"loads must be finite and >= 0; window {window} layer {self.current.layer_ids[layer]} expert {expert}"
                f" is {loads[window, layer, expert]}"
            )
        if self.topology.rank_ids != self.current.rank_ids:
            raise InvalidInputError(
                f"topology lists ranks {list(self.topology.rank_ids)} but the placement {list(self.current.rank_ids)}"
            )
        if self.expert_bytes and len(self.expert_bytes) != self.current.num_layers:
            raise InvalidInputError(f"{len(self.expert_bytes)} expert sizes for {self.current.num_layers} layers")
        frozen = loads.copy()
        frozen.setflags(write=False)
        object.__setattr__(self, "loads", frozen)

    @property
    def total_loads(self) -> npt.NDArray[np.float64]:
        """Loads summed over windows, shape (L, E)."""
        total: npt.NDArray[np.float64] = self.loads.sum(axis=0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPlan:
    """What a policy returns: a map and remarks; everything else is computed by `verify`, not believed.

    physical_to_logical: shape (L, P), integers, -1 = empty.
    lower_bound: per layer, a proven lower bound on imbalance under even split; empty = none claimed (the combinatorial one
    is used).
    status: one word per layer or for all (`heuristic`, `optimal`, `feasible`, …).
    cut_off: the time limit stopped the search before its work budget.
    """

    physical_to_logical: npt.NDArray[np.int32]
    lower_bound: tuple[float, ...] = ()
    status: str = "heuristic"
    cut_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A verified plan: the placement and what it would do.

    predicted: imbalance of the summed loads under the engine's dispatch, after; before: the same for the current placement.
    lower_bound: per layer, no placement of these slots is better (under even split).
    moves: residencies moved and their bytes by link kind.
    """

    policy: str
    placement: Table
    before: Imbalance
    predicted: Imbalance
    lower_bound: Imbalance
    moves: MoveSummary
    solve_s: float
    status: str
    cut_off: bool


class LoadShape(Enum):
    """What a policy wants its loads as: the series of sub-windows, or their total as a series of one."""

    SERIES = "series"
    TOTAL = "total"


def load_shape_of(policy: object) -> LoadShape:
    """The shape that a policy declares by an attribute `load_shape`; SERIES when it declares none.

    Raises InvalidInputError when it declares something else.
    """
    declared: object = getattr(policy, "load_shape", LoadShape.SERIES)
    if not isinstance(declared, LoadShape):
        raise InvalidInputError(f"a policy's load_shape must be one of {[shape.name for shape in LoadShape]}; got {declared!r}")
    return declared


def reduced_to_shape(problem: PlanningProblem, shape: LoadShape) -> PlanningProblem:
    """The problem with its loads in the shape that a policy declares: (W, L, E), or their sum as (1, L, E)."""
    if shape is LoadShape.SERIES or problem.loads.shape[0] == 1:
        return problem
    return replace(problem, loads=problem.total_loads[None])


class Policy(Protocol):
    """A pure function of the problem. Registered under the entry point group `eplb.policies` as a class without arguments.

    An optional attribute `load_shape` (a LoadShape) says what the loads are reduced to before `plan` sees them.
    """

    @property
    def name(self) -> str:
        """What `--policy` calls it."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """Options that it takes, with a sentence on each (empty for none)."""
        ...

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table. Raises InvalidInputError when no placement satisfies the constraints."""
        ...
