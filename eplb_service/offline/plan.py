"""Plans from files, without a planner: what `eplb plan --load FILE` does.

Without a current placement the plan starts from the linear one, which is where engines start by themselves: slots are kept and
moves counted against it, and the result says so (`moves_against`: `linear`). With one, against that (`current`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch
from eplb_service.errors import EplbError, InvalidInputError, PolicyFailedError
from eplb_service.imbalance import Imbalance
from eplb_service.offline.placement_file import placement_document
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem, Proposal
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.topology import Topology

TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """A verified plan and what it was made for."""

    proposal: Proposal
    topology: Topology
    dispatch: Dispatch
    moves_against: str

    def to_json(self) -> dict[str, object]:
        """The plan as plain values; it can be read back as a current placement.

        Beside the placement document: imbalance {mean, worst, per_layer}, imbalance_before and lower_bound {mean, worst},
        moves {experts, slots_rewritten, …}, moves_against, policy, status, cut_off, dispatch, nodes, and
        solve_s, which leaves out loading and compiling the policy.
        """
        proposal = self.proposal
        return {
            **placement_document(proposal.placement),
            "policy": proposal.policy,
            "status": proposal.status,
            "cut_off": proposal.cut_off,
            "solve_s": proposal.solve_s,
            "dispatch": self.dispatch.value,
            "nodes": list(self.topology.nodes),
            "imbalance": {**_aggregates(proposal.predicted), "per_layer": list(proposal.predicted.per_layer)},
            "imbalance_before": _aggregates(proposal.before),
            "lower_bound": _aggregates(proposal.lower_bound),
            "moves": proposal.moves.to_json(),
            "moves_against": self.moves_against,
        }


def _aggregates(imbalance: Imbalance) -> Mapping[str, float]:
    return {"mean": imbalance.mean, "worst": imbalance.worst}


def offline_topology(*, num_ranks: int, num_nodes: int, slots_per_rank: int, num_logical: int) -> Topology:
    """Ranks 0..R-1 over nodes in blocks. Raises InvalidInputError when numbers or experts do not fit."""
    if slots_per_rank < 1:
        raise InvalidInputError(f"slots per rank must be at least 1; got {slots_per_rank}")
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=num_nodes)
    if num_ranks * slots_per_rank < num_logical:
        raise InvalidInputError(
            f"{num_logical} experts do not fit {num_ranks} ranks x {slots_per_rank} slots = {num_ranks * slots_per_rank};"
            f" use at least {-(-num_logical // num_ranks)} slots per rank"
        )
    return topology


def plan_offline(
    loads: npt.NDArray[np.float64],
    *,
    num_ranks: int,
    slots_per_rank: int,
    num_nodes: int = 1,
    num_groups: int | None = None,
    policy: str = "greedy",
    current: Table | None = None,
    dispatch: Dispatch = Dispatch.EVEN,
    expert_bytes: int = 0,
    max_moves: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    model: str = "model",
) -> OfflinePlan:
    """Plan loads of shape (W, L, E), as `load_file.read_loads` gives them.

    Model and layer ids are those of the current placement, else `model` and 0..L-1; ranks are 0..R-1.

    current: the placement to start from, None = linear. Raises NotFoundError for an unknown policy, InvalidInputError when
    experts, slots, groups, nodes and ranks do not go together, PolicyFailedError when the policy's answer is unusable.
    """
    array = np.asarray(loads, np.float64)
    if array.ndim != 3:
        raise InvalidInputError(f"loads must have shape (windows, layers, experts); got {array.shape}")
    _, num_layers, num_logical = array.shape
    topology = offline_topology(
        num_ranks=num_ranks, num_nodes=num_nodes, slots_per_rank=slots_per_rank, num_logical=num_logical
    )
    solver = load_policy(policy)
    linear = Table.linear(
        model=model if current is None else current.model,
        layer_ids=range(num_layers) if current is None or current.num_layers != num_layers else current.layer_ids,
        num_logical=num_logical,
        rank_ids=topology.rank_ids,
        slots_per_rank=slots_per_rank,
    )
    if current is not None and not linear.same_shape(current):
        raise InvalidInputError(
            f"the current placement is for {current.num_layers} layers x {current.num_physical} slots of {current.num_logical}"
            f" experts on {current.num_ranks} ranks; the plan is for {num_layers} x {linear.num_physical} of {num_logical}"
            f" on {num_ranks}"
        )
    problem = PlanningProblem(
        loads=array,
        topology=topology,
        current=linear if current is None else current,
        dispatch=dispatch,
        constraints=Constraints(num_groups=num_groups, max_moves=max_moves),
        expert_bytes=(expert_bytes,) * num_layers,
        seed=seed,
        time_limit_s=time_limit_s,
    )
    try:
        warm_up_policy(solver, policy)
        started = time.perf_counter()
        raw = run_policy(solver, problem)
        solve_s = time.perf_counter() - started
    except EplbError:
        raise
    except Exception as error:
        raise PolicyFailedError(f"policy {policy!r} raised {type(error).__name__}: {error}") from error
    return OfflinePlan(
        proposal=verify(problem, raw, policy=policy, solve_s=solve_s),
        topology=topology,
        dispatch=dispatch,
        moves_against="linear" if current is None else "current",
    )
