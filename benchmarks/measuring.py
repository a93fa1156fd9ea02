"""Runs a planner on a problem, times it and scores its answer; how rows of the tables are described."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from benchmarks.peers import Planner
from eplb_service.dispatch import imbalance_of
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary, residency_moves
from eplb_service.placement import EMPTY_SLOT, Table
from eplb_service.policy.base import PlanningProblem, Proposal
from eplb_service.policy.registry import load_policy, policy_names
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy

Peers = Mapping[str, Planner]
"""Engines' planners by name; empty where no folder was given."""


class NotBuiltError(Exception):
    """A row asks for something that this build does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A planner's answer. doubled: ranks with two copies of one expert, over all layers.

    cpu_s: processor time of the whole process, in seconds of one core.
    """

    imbalance: Imbalance
    moves: MoveSummary
    doubled: int
    cpu_s: float


def proposal_of(policy: str, problem: PlanningProblem, *, repeat: int = 1) -> tuple[Proposal, float]:
    """The verified plan of one of our policies, and the least processor time in s, after a warm-up."""
    if policy not in policy_names():
        raise NotBuiltError(f"no policy {policy}")
    solver = load_policy(policy)
    warm_up_policy(solver, policy)
    raw, used_s = None, []
    for _ in range(max(1, repeat)):
        started = time.process_time()
        raw = run_policy(solver, problem)
        used_s.append(time.process_time() - started)
    return verify(problem, raw, policy=policy, solve_s=min(used_s)), min(used_s)


def scored_peer(planner: Planner, problem: PlanningProblem, *, repeat: int = 3) -> Scored:
    """A peer's answer under the problem's dispatch; the least processor time after one call to warm up."""
    rows = planner(problem)
    used_s = []
    for _ in range(repeat):
        started = time.process_time()
        rows = planner(problem)
        used_s.append(time.process_time() - started)
    return score(problem, rows, min(used_s))


def score(problem: PlanningProblem, rows: npt.NDArray[np.int32], cpu_s: float = 0.0) -> Scored:
    """Imbalance and moves of any map, computed as `verify` does."""
    now = problem.current
    after = Table(now.model, now.layer_ids, now.num_logical, now.rank_ids, rows)
    return Scored(
        imbalance=imbalance_of(problem.total_loads, after, problem.topology, problem.dispatch),
        moves=residency_moves(now, after, problem.topology),
        doubled=_doubled(after),
        cpu_s=cpu_s,
    )


def _doubled(table: Table) -> int:
    """Ranks that hold an expert twice, over all layers; empty slots are no copies."""
    held = np.sort(table.by_rank(), axis=2)
    return int(((held[:, :, 1:] == held[:, :, :-1]) & (held[:, :, 1:] != EMPTY_SLOT)).any(axis=2).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one row came to. least, aim: whether those figures are met; None = not measured.

    ours, peers: the figures, as they stand in the table.
    """

    ours: str
    least: bool | None
    aim: bool | None
    peers: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table of figures. measure: from the peers and a seed of the load to what it came to.

    published: a peer's figure that is not measured here, with its source. seeded: other seeds are measured too.
    """

    name: str
    what: str
    at_least: str
    aim: str
    measure: Callable[[Peers, int], Measured] = field(repr=False)
    published: str = ""
    seeded: bool = False


def peers_text(peers: Peers, problem: PlanningProblem, say: Callable[[Scored], str], *, repeat: int = 1) -> str:
    """A figure of every peer that was given, in one cell."""
    return "; ".join(f"{name}: {say(scored_peer(planner, problem, repeat=repeat))}" for name, planner in peers.items())


def peers_from_own_plans(peers: Peers, first: PlanningProblem, then: PlanningProblem, say: Callable[[Scored], str]) -> str:
    """The same for a second problem that each peer meets from its own plan for the first one."""
    told = []
    for name, planner in peers.items():
        now = then.current
        start = Table(now.model, now.layer_ids, now.num_logical, now.rank_ids, planner(first))
        told.append(f"{name}: {say(scored_peer(planner, replace(then, current=start), repeat=1))}")
    return "; ".join(told)


def share_of_slots(moves: MoveSummary, table: Table) -> float:
    """Residencies moved over all slots of the table."""
    return moves.experts / (table.num_layers * table.num_physical)


def percent(value: float) -> str:
    """A share: three digits below a percent, else one."""
    return f"{value:.2%}" if 0 < value < 0.01 else f"{value:.1%}"
