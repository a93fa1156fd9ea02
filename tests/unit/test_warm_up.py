"""What the warm-up compiles is what plans use: otherwise a first plan waits for the compiler, for seconds."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from eplb_service.dispatch import Dispatch
from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, Resilience
from eplb_service.policy.registry import load_policy
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.topology import Topology

WARM = ("greedy", "minmove")
"""Policies of a first plan: what starts from nothing, and the default."""


def compiled_versions() -> dict[str, int]:
    """Kernel → number of type signatures that it was compiled for in this process, over all modules of policies."""
    versions: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("eplb_service.policy."):
            found = {f"{name}.{part}": getattr(module, part) for part in dir(module)}
            versions |= {part: len(kernel.signatures) for part, kernel in found.items() if hasattr(kernel, "signatures")}
    return versions


def compiled_late() -> dict[str, int]:
    """Kernels that plans compile beyond the warm-up, with how many versions. For a process of its own."""
    policies = {name: load_policy(name) for name in WARM}
    for name, policy in policies.items():
        warm_up_policy(policy, name)
    warm = compiled_versions()
    ranks = tuple(RankId(rank) for rank in range(4))
    current = Table.linear(model="m", layer_ids=(0, 3), num_logical=32, rank_ids=ranks, slots_per_rank=9)
    larger = Table.linear(model="m", layer_ids=(0, 3), num_logical=32, rank_ids=ranks, slots_per_rank=14)
    loads = np.random.default_rng(0).gamma(1.0, 100.0, (6, 2, 32)).round()
    plain = PlanningProblem(
        loads=loads, topology=Topology.regular(num_ranks=4, num_nodes=2), current=current, work_budget=5_000
    )
    sources = np.repeat(loads.sum(axis=0)[:, None, :] / 4, 4, axis=1)
    there = frozenset({ExpertOnRank(2, 3)})
    constraints = [
        Constraints(max_moves=5),
        Constraints(max_moves_per_rank=1),
        Constraints(num_groups=4),
        Constraints(num_groups=4, group_price=20.0),
        Constraints(num_groups=4, fill_slots=True),
        Constraints(fill_slots=True),
        Constraints(pinned=there),
        Constraints(barred=there),
        Constraints(unusable_slots=frozenset({(0, 1)})),
        Constraints(resilience=Resilience(hot_share=0.1)),
        Constraints(max_replicas=2),
        Constraints(distinct_ranks=False),
    ]
    topology = plain.topology
    problems = [plain, replace(plain, front=True), replace(plain, certify=True), replace(plain, from_nothing=True)]
    problems += [replace(plain, dispatch=dispatch) for dispatch in Dispatch]
    problems += [replace(plain, dispatch=Dispatch.NEAREST, source_loads=sources)]
    problems += [replace(plain, constraints=constraint) for constraint in constraints]
    problems += [replace(plain, topology=replace(topology, capacity=(1.0, 2.0, 1.0, 1.0)))]
    problems += [replace(plain, topology=replace(topology, base_load=(0.1, 0.2, 0.0, 0.0)))]
    problems += [replace(plain, current=larger, topology=replace(topology, dead=frozenset({RankId(3)})))]
    for problem in problems:
        for given in (problem, pickle.loads(pickle.dumps(problem))):  # as the solver's process gets it
            for policy in policies.values():
                run_policy(policy, given)
    return {name: count - warm.get(name, 0) for name, count in compiled_versions().items() if count != warm.get(name, 0)}


def test_plans_here_and_in_the_solver_s_process_need_nothing_that_the_warm_up_did_not_compile() -> None:
    program = "from tests.unit.test_warm_up import compiled_late; print(compiled_late())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True, timeout=500)
    assert done.stdout.strip() == "{}"
