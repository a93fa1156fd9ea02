"""What the warm-up compiles is what plans use: otherwise a first plan waits for the compiler, for seconds."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy import kernels
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.topology import Topology


def compiled_versions() -> dict[str, int]:
    """Kernel → number of type signatures that it was compiled for in this process."""
    found = {name: getattr(kernels, name) for name in dir(kernels)}
    return {name: len(kernel.signatures) for name, kernel in found.items() if hasattr(kernel, "signatures")}


def compiled_late() -> dict[str, int]:
    """Kernels that plans compile beyond the warm-up, with how many versions. For a process of its own."""
    warm_up_policy(GreedyPolicy(), "greedy")
    warm = compiled_versions()
    ranks = tuple(RankId(rank) for rank in range(4))
    current = Table.linear(model="m", layer_ids=(0, 3), num_logical=32, rank_ids=ranks, slots_per_rank=9)
    loads = np.random.default_rng(0).gamma(1.0, 100.0, (6, 2, 32)).round()
    problem = PlanningProblem(loads=loads, topology=Topology.regular(num_ranks=4, num_nodes=2), current=current)
    for given in (problem, pickle.loads(pickle.dumps(problem))):  # as the solver's process gets it
        run_policy(GreedyPolicy(), given)
    return {name: count - warm[name] for name, count in compiled_versions().items() if count != warm[name]}


def test_plans_here_and_in_the_solver_s_process_need_nothing_that_the_warm_up_did_not_compile() -> None:
    program = "from tests.unit.test_warm_up import compiled_late; print(compiled_late())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "{}"
