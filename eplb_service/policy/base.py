"""What a policy is given and what it must return.

A policy plans one table (layers of one model with equal E and P) at a time; the planner calls it once for each table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.node_visits import checked_pairs
from eplb_service.placement import Table
from eplb_service.policy.magnitudes import LOAD_MIN, check_magnitudes
from eplb_service.topology import Topology

SOURCE_TOLERANCE = 1e-6
"""Relative difference between loads and the sum of source loads that rounding may explain."""


class FailureDomain(StrEnum):
    """What may be lost at once."""

    RANK = "rank"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience:
    """Experts that must still have a replica after any one failure domain is lost.

    hot_share: share of each layer's experts, hottest first, that must be on at least two domains; 1.0 = all of them.
    """

    hot_share: float = 1.0
    domain: FailureDomain = FailureDomain.NODE

    def __post_init__(self) -> None:
        if not 0.0 < self.hot_share <= 1.0:
            raise InvalidInputError(f"the share of experts to protect must be above 0 and at most 1; got {self.hot_share}")


@dataclass(frozen=True, slots=True, order=True)
class ExpertOnRank:
    """An expert and a rank, for pinning and barring. layer_id None = every layer."""

    expert: int
    rank_id: int
    layer_id: int | None = None

    @classmethod
    def parse(cls, text: str) -> ExpertOnRank:
        """From `12@3` (expert 12 on rank 3 in every layer) or `12@3/5` (in layer 5). Raises InvalidInputError for others."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*@\s*(\d{1,9})\s*(?:/\s*(\d{1,9})\s*)?", text)
        if found is None:
            raise InvalidInputError(f"{text!r} is not EXPERT@RANK or EXPERT@RANK/LAYER, such as 12@3 or 12@3/5")
        return cls(int(found[1]), int(found[2]), None if found[3] is None else int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a placement must respect beside coverage.

    num_groups: expert groups G that share a node (hierarchical planning); None = no groups.
    group_price: None = groups are strict; else each replica off its group's node costs as much as this many moves.
    distinct_ranks: never two copies of an expert on one rank when it can be avoided.
    unusable_slots: (rank id, local slot) pairs that must stay empty.
    fill_slots: every other slot holds an expert, where one may be there: the engine's tables know no empty slot.
    pinned: residencies that must be there; barred: residencies that must not.
    resilience: experts that must outlive a lost rank or node; None = nothing beyond coverage.
    max_moves, max_move_bytes: most residencies to move, and their bytes, in this plan; None = no limit.
    max_moves_per_rank: most experts that one rank takes in, over all layers. max_moves_per_layer: most moves in one layer.
    max_layers: most layers that change.
    max_replicas: width of the engine's replica table; None = no limit.
    """

    num_groups: int | None = None
    group_price: float | None = None
    distinct_ranks: bool = True
    unusable_slots: frozenset[tuple[int, int]] = frozenset()
    fill_slots: bool = False
    pinned: frozenset[ExpertOnRank] = frozenset()
    barred: frozenset[ExpertOnRank] = frozenset()
    resilience: Resilience | None = None
    max_moves: int | None = None
    max_move_bytes: int | None = None
    max_moves_per_rank: int | None = None
    max_moves_per_layer: int | None = None
    max_layers: int | None = None
    max_replicas: int | None = None

    @property
    def move_limits(self) -> dict[str, int | None]:
        """What bounds how much a plan moves, by name."""
        return {
            "max_moves": self.max_moves,
            "max_move_bytes": self.max_move_bytes,
            "max_moves_per_rank": self.max_moves_per_rank,
            "max_moves_per_layer": self.max_moves_per_layer,
            "max_layers": self.max_layers,
        }

    def without_move_limits(self) -> Constraints:
        """The same, however much a plan moves."""
        unlimited: dict[str, Any] = dict.fromkeys(self.move_limits)
        return replace(self, **unlimited)


class Effort(StrEnum):
    """How long a policy searches when no work budget is given. Seconds are those of the standard work on one core."""

    QUICK = "quick"  # about 1 s
    NORMAL = "normal"  # about 5 s
    THOROUGH = "thorough"  # about 30 s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """Everything a policy may look at; equal problems give equal plans on any machine.

    loads: shape (W, L, E), float64, tokens; finite, >= 0, within `magnitudes`. W sub-windows in time order, at least 1.
    source_loads: shape (L, R, E), float64, tokens that each rank sent, over all sub-windows; None = every rank that serves sent
    as many of each expert. Nearest dispatch goes by it; under others it prices hops.
    together: shape (L, E, E), float64, tokens that chose both experts, over all sub-windows; symmetric, diagonal ignored, and
    no pair has more tokens than either of its experts. None = not known: policies look at loads alone.
    current: the placement that is live now (also fixes layers, ranks and slots).
    wanted: a placement to go to, for policies that are given one (`static`).
    from_nothing: current holds no weights worth keeping (a first, offline plan): move limits do not bind.
    max_imbalance: the target: every layer at or under it with the fewest moves. None = the policy's own choice.
    front: return the Pareto front (balance against moves) too, where the policy can.
    certify: spend time on lower bounds too, where the policy can.
    expert_bytes: bytes of one expert of each layer. Length L.
    fan_out: an expert crosses to a node once, then is passed on there.
    dispatch: how the engine picks a replica.
    time_limit_s: hard stop; work_budget: units of work (policy's own, over all layers) that bound the search on every machine
    alike; None = what `effort` stands for.
    """

    loads: npt.NDArray[np.float64]
    topology: Topology
    current: Table
    source_loads: npt.NDArray[np.float64] | None = None
    together: npt.NDArray[np.float64] | None = None
    wanted: Table | None = None
    dispatch: Dispatch = Dispatch.EVEN
    constraints: Constraints = field(default_factory=Constraints)
    expert_bytes: tuple[int, ...] = ()
    fan_out: bool = False
    from_nothing: bool = False
    max_imbalance: float | None = None
    front: bool = False
    certify: bool = False
    seed: int = 0
    time_limit_s: float = 10.0
    work_budget: int | None = None
    effort: Effort = Effort.NORMAL

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
        check_magnitudes(loads, self.current.layer_ids, self.topology, self.expert_bytes)
        if self.max_imbalance is not None and not 1.0 <= self.max_imbalance < float("inf"):
            raise InvalidInputError(f"max_imbalance must be finite and at least 1 (perfect balance); got {self.max_imbalance}")
        if not 0.0 <= self.time_limit_s < float("inf"):
            raise InvalidInputError(f"time_limit_s must be finite and >= 0; got {self.time_limit_s}")
        if self.work_budget is not None and self.work_budget < 0:
            raise InvalidInputError(f"work_budget must be at least 0; got {self.work_budget}")
        if self.wanted is not None and not self.wanted.same_shape(self.current):
            raise InvalidInputError(
                f"the wanted placement is for {self.wanted.num_layers} layers x {self.wanted.num_physical} slots of"
                f" {self.wanted.num_logical} experts on {self.wanted.num_ranks} ranks; the current one has"
                f" {self.current.num_layers} x {self.current.num_physical} of {self.current.num_logical}"
                f" on {self.current.num_ranks}"
            )
        object.__setattr__(self, "loads", _frozen(np.where(loads < LOAD_MIN, 0.0, loads)))
        self._check_optional_loads()

    def _check_optional_loads(self) -> None:
        """What may be known beside the loads, checked against them and frozen."""
        if self.source_loads is not None:
            object.__setattr__(self, "source_loads", _frozen(self._checked_sources(self.source_loads)))
        if self.together is not None:
            object.__setattr__(self, "together", checked_pairs(self.together, self.total_loads, self.current.layer_ids))

    def _checked_sources(self, given: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Source loads of the right shape whose sum over ranks is the load (to rounding)."""
        sources = np.asarray(given, np.float64)
        expected = (self.current.num_layers, self.current.num_ranks, self.current.num_logical)
        if sources.shape != expected:
            raise InvalidInputError(f"source loads must have shape (layers, ranks, experts) = {expected}; got {sources.shape}")
        if not np.isfinite(sources).all() or (sources < 0).any():
            layer, rank, expert = np.argwhere(~np.isfinite(sources) | (sources < 0))[0].tolist()
            raise InvalidInputError(
                f"source loads must be finite and >= 0; layer {self.current.layer_ids[layer]}, rank position {rank}, expert"
                f" {expert} is {sources[layer, rank, expert]}"
            )
        total = self.total_loads
        wrong = ~np.isclose(sources.sum(axis=1), total, rtol=SOURCE_TOLERANCE, atol=1e-9)
        if wrong.any():
            layer, expert = np.argwhere(wrong)[0].tolist()
            raise InvalidInputError(
                f"source loads must add up to the loads; layer {self.current.layer_ids[layer]} expert {expert} has"
                f" {sources[layer, :, expert].sum():g} over ranks against {total[layer, expert]:g}"
            )
        return sources

    @property
    def total_loads(self) -> npt.NDArray[np.float64]:
        """Loads summed over windows, shape (L, E)."""
        total: npt.NDArray[np.float64] = self.loads.sum(axis=0)
        return total


def _frozen(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A read-only copy."""
    copy = array.copy()
    copy.setflags(write=False)
    return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPlan:
    """What a policy returns: a map and remarks; everything else is computed by `verify`, not believed.

    physical_to_logical: shape (L, P), integers, -1 = empty.
    shares: shape (L, P), share of its expert's tokens that each slot takes, 0 where empty; None = the engine's own dispatch.
    lower_bound: per layer, a proven lower bound on imbalance under even split; empty = none claimed (the combinatorial one
    is used).
    moves_lower_bound: per layer, a proven lower bound on the moves of any placement within the problem's `max_imbalance`;
    empty = none claimed.
    front: other maps of shape (L, P), by ascending moves: points of the Pareto front, the plan's own map not among them.
    front_shares: shares of the maps of `front`, in their order; empty = the engine's own dispatch.
    status: one word per layer or for all (`heuristic`, `optimal`, `feasible`, …).
    cut_off: the time limit stopped the search before its work budget.
    """

    physical_to_logical: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32] | None = None
    lower_bound: tuple[float, ...] = ()
    moves_lower_bound: tuple[int, ...] = ()
    front: tuple[npt.NDArray[np.int32], ...] = ()
    front_shares: tuple[npt.NDArray[np.float32], ...] = ()
    status: str = "heuristic"
    cut_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A verified point of the Pareto front: a placement, the imbalance that it is predicted to have, what it moves."""

    placement: Table
    predicted: Imbalance
    moves: MoveSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintCosts:
    """What soft groups and resilience cost in a plan, and what a move limit left undone.

    off_node: replicas that are not on their group's node (where most of the group's replicas are), mean over layers; None = no
    groups.
    protected: experts that resilience asks for, over all layers; unprotected: those that are in one failure domain still.
    slots_for_protection: second copies that load alone does not call for, mean over layers.
    bound, bound_without: mean over layers of the lower bound on imbalance that copies allow (even split), with resilience and
    without it: the difference is what it costs at least.
    kept_faults: pins, bars and protected experts that the live placement breaks and the plan leaves so, since a limit on moves
    may forbid mending; one sentence each, the first few.
    num_kept_faults: how many there are.
    """

    off_node: float | None = None
    protected: int = 0
    unprotected: int = 0
    slots_for_protection: float = 0.0
    bound: float = 1.0
    bound_without: float = 1.0
    kept_faults: tuple[str, ...] = ()
    num_kept_faults: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A verified plan: the placement and what it would do.

    predicted: imbalance of the summed loads under the engine's dispatch, after; before: the same for the current placement.
    lower_bound: per layer, no placement of these slots is better (under even split).
    moves: residencies moved and their bytes by link kind.
    moves_lower_bound: proven least moves of any placement within the problem's max_imbalance, over all layers; None = unknown.
    front: the Pareto front by ascending moves, this plan among it, and keeping the current placement where that is legal;
    empty = not asked for, or the policy has none.
    costs: of soft groups and resilience; None = neither was asked for and no fault was kept.
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
    moves_lower_bound: int | None = None
    front: tuple[FrontPoint, ...] = ()
    costs: ConstraintCosts | None = None


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
