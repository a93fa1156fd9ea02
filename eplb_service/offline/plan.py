"""Plans from files, without a planner: what `eplb plan --load FILE` does.

Without a current placement the plan starts from the linear one, which is where engines start by themselves: slots are kept and
moves counted against it, and the result says so (`moves_against`: `linear`). With one, against that (`current`). A plan from
nothing (`from_nothing`) is not held to limits on moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from eplb_service.dispatch import Dispatch
from eplb_service.errors import EplbError, InvalidInputError, PolicyFailedError
from eplb_service.formats.files import VALUES_MAX
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem, Policy, Proposal
from eplb_service.policy.limits import limits_of
from eplb_service.policy.registry import load_policy, policy_names
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.topology import Topology

PREFERRED_POLICIES = ("minmove", "greedy")

RANKS_MAX = 65_536
"""Most ranks of a plan from files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """A verified plan and what it was made for.

    unprotected: the plan of the same problem without resilience, when it asks for that: the difference is its cost.
    """

    proposal: Proposal
    problem: PlanningProblem
    moves_against: str
    unprotected: Proposal | None = None


def default_policy(problem: PlanningProblem) -> str:
    """The policy that is used when none is named.

    `static` to a given placement; `greedy` from nothing, where moves cost nothing, unless a search prices what it does not
    (nearest dispatch, soft groups); else the fewest moves.
    """
    if problem.wanted is not None:
        return "static"
    if problem.from_nothing and problem.dispatch is not Dispatch.NEAREST and problem.constraints.group_price is None:
        return "greedy"
    return next(name for name in PREFERRED_POLICIES if name in policy_names())


def fleet_topology(
    *,
    num_ranks: int,
    nodes: int | Sequence[str] = 1,
    capacity: Sequence[float] | None = None,
    base_load: Sequence[float] | None = None,
    nics: int | Sequence[str] | None = None,
    dead: Iterable[int] = (),
) -> Topology:
    """Ranks 0..R-1. nodes: how many, in blocks as even as possible; or the node of each rank by name.

    nics: how many on every node, for blocks of its ranks; or the NIC of each rank by name (names are per node); None = each
    rank has its own.
    Raises InvalidInputError when the numbers do not go together.
    """
    if num_ranks < 1:
        raise InvalidInputError(f"ranks must be at least 1; got ranks={num_ranks}")
    if num_ranks > RANKS_MAX:
        raise InvalidInputError(f"ranks must be at most {RANKS_MAX:,}; got ranks={num_ranks:,}")
    names = Topology.regular(num_ranks=num_ranks, num_nodes=nodes).nodes if isinstance(nodes, int) else tuple(nodes)
    topology = Topology(
        rank_ids=tuple(RankId(rank) for rank in range(num_ranks)),
        nodes=names,
        capacity=None if capacity is None else tuple(capacity),
        dead=frozenset(RankId(rank) for rank in dead),
        base_load=None if base_load is None else tuple(base_load),
        nics=None if nics is None or isinstance(nics, int) else tuple(nics),
    )
    return topology.with_nics(nics) if isinstance(nics, int) else topology


def starting_table(
    *,
    num_layers: int,
    num_logical: int,
    topology: Topology,
    slots_per_rank: int,
    current: Table | None = None,
    model: str = "model",
    layer_ids: Sequence[int] | None = None,
) -> Table:
    """The placement to plan from: the current one, else the linear one, that engines start with.

    Model and layer ids are those of the current placement, else `model` and layer_ids, else 0..L-1. Raises InvalidInputError
    when experts, slots and ranks do not fit, or the current placement is of another shape.
    """
    if slots_per_rank < 1:
        raise InvalidInputError(f"slots per rank must be at least 1; got {slots_per_rank}")
    if num_layers * topology.num_ranks * slots_per_rank > VALUES_MAX:
        raise InvalidInputError(
            f"{num_layers} layers x {topology.num_ranks:,} ranks x {slots_per_rank:,} slots are"
            f" {num_layers * topology.num_ranks * slots_per_rank:,}; at most {VALUES_MAX:,} are planned"
        )
    ids = range(num_layers) if layer_ids is None else layer_ids
    linear = Table.linear(
        model=model if current is None else current.model,
        layer_ids=ids if current is None or current.num_layers != num_layers else current.layer_ids,
        num_logical=num_logical,
        rank_ids=topology.rank_ids,
        slots_per_rank=slots_per_rank,
    )
    if current is None:
        return linear
    if not linear.same_shape(current):
        raise InvalidInputError(
            f"the current placement is for {current.num_layers} layers x {current.num_physical} slots of {current.num_logical}"
            f" experts on {current.num_ranks} ranks; the plan is for {num_layers} x {linear.num_physical} of {num_logical}"
            f" on {topology.num_ranks}"
        )
    return current


def plan_offline(problem: PlanningProblem, *, policy: str | None = None, moves_against: str = "current") -> OfflinePlan:
    """Plan and verify. policy: None = `default_policy`.

    Raises NotFoundError for an unknown policy, InvalidInputError when experts, slots, groups, nodes, ranks and constraints do
    not go together, PolicyFailedError when the policy's answer is unusable.
    """
    name = default_policy(problem) if policy is None else policy
    limits_of(problem)  # what does not fit or contradicts itself is said before a policy is loaded and compiled
    solver = load_policy(name)
    try:
        warm_up_policy(solver, name, together=problem.together is not None)
        proposal = _solved(solver, name, problem)
        unprotected = None
        if problem.constraints.resilience is not None:
            bare = replace(problem, constraints=replace(problem.constraints, resilience=None), front=False, certify=False)
            unprotected = _solved(solver, name, bare)
    except EplbError:
        raise
    except Exception as error:
        raise PolicyFailedError(f"policy {name!r} raised {type(error).__name__}: {error}") from error
    return OfflinePlan(proposal=proposal, problem=problem, moves_against=moves_against, unprotected=unprotected)


def _solved(solver: Policy, name: str, problem: PlanningProblem) -> Proposal:
    started = time.perf_counter()
    raw = run_policy(solver, problem)
    return verify(problem, raw, policy=name, solve_s=time.perf_counter() - started)
