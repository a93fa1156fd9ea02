"""Policies on the standard work: imbalance, moves, slots rewritten and time, beside engines' own planners in the same run.

    python benchmarks/planner.py [--repeat 5] [--peer-sglang DIR] [--peer-vllm DIR]

A peer is the folder of an unzipped wheel (`pip download --no-deps sglang==0.5.23`, then unzip), kept outside this repository.
Time is processor time of the calling thread, the least of the repeats, after a warm-up; peers get float32 torch tensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import imbalance_of
from eplb_service.errors import EplbError
from eplb_service.moves import residency_moves
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem
from eplb_service.policy.bounds import imbalance_bounds
from eplb_service.policy.registry import load_policy, policy_names
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]
Planner = Callable[[PlanningProblem], npt.NDArray[np.int32]]

GOLDEN = (600.0, 560.0, 120.0, 120.0, 20.0, 10.0, 10.0, 10.0)


@dataclass(frozen=True, slots=True)
class Work:
    """A problem with a title."""

    title: str
    problem: PlanningProblem


def problem_of(
    loads: Float64Array, *, num_ranks: int, slots_per_rank: int, num_nodes: int = 1, num_groups: int | None = None
) -> PlanningProblem:
    """From the linear placement. Loads: shape (L, E)."""
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=num_nodes)
    current = Table.linear(
        model="standard",
        layer_ids=range(loads.shape[0]),
        num_logical=loads.shape[1],
        rank_ids=topology.rank_ids,
        slots_per_rank=slots_per_rank,
    )
    return PlanningProblem(
        loads=loads[None], topology=topology, current=current, constraints=Constraints(num_groups=num_groups), time_limit_s=60.0
    )


def works() -> Iterator[Work]:
    """The standard work, by groups too; its load sampled again from its own plan; the golden case."""
    weights = np.exp(np.random.default_rng(0).normal(0, 1, (58, 256))) * 1000
    standard = problem_of(weights, num_ranks=32, slots_per_rank=9)
    yield Work("standard work: 58 layers x 256 experts, 288 slots on 32 ranks, from slot i = expert i % 256", standard)
    grouped = problem_of(weights, num_ranks=32, slots_per_rank=9, num_nodes=4, num_groups=8)
    yield Work("standard work, 8 groups on 4 nodes", grouped)
    random = np.random.default_rng(1)
    sampled = np.array([random.multinomial(2_000_000, layer / layer.sum()) for layer in weights], np.float64)
    planned = Table(
        "standard",
        standard.current.layer_ids,
        256,
        standard.current.rank_ids,
        load_policy("greedy").plan(standard).physical_to_logical,
    )
    again = PlanningProblem(loads=sampled[None], topology=standard.topology, current=planned)
    yield Work("sampling noise alone: 2 M tokens a layer of the same load, from greedy's plan (a gate would keep)", again)
    yield Work(
        "golden case: 8 experts, 8 ranks x 2 slots; exact optimum 1.0851",
        problem_of(np.array([GOLDEN]), num_ranks=8, slots_per_rank=2),
    )


def module_of(folder: Path, name: str) -> ModuleType:
    """A module of a peer by file, without importing the package that it belongs to (those want a GPU)."""
    package = f"peer_{abs(hash(str(folder)))}"
    if package not in sys.modules:
        holder = ModuleType(package)
        holder.__path__ = [str(folder)]
        sys.modules[package] = holder
    full = f"{package}.{name}"
    spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
    if spec is None or spec.loader is None or not (folder / f"{name}.py").is_file():
        sys.exit(f"there is no {name}.py in {folder}; give the folder of the unzipped wheel")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def _as_map(result: Any) -> npt.NDArray[np.int32]:
    """A peer's answer (a tensor, or a tuple that starts with one) as (L, P)."""
    tensor = result[0] if isinstance(result, tuple) else result
    array: npt.NDArray[np.int32] = tensor.numpy().astype(np.int32)
    return array


def peer_sglang(folder: Path) -> dict[str, Planner]:
    """SGLang's algorithms `deepseek` and `deepseek_vec`."""
    import torch  # noqa: PLC0415  # only peers need it

    algorithms = folder / "sglang" / "srt" / "eplb" / "eplb_algorithms"
    plain, vectorised = module_of(algorithms, "deepseek"), module_of(algorithms, "deepseek_vec")

    def deepseek(problem: PlanningProblem) -> npt.NDArray[np.int32]:
        groups = problem.constraints.num_groups
        return _as_map(
            plain.rebalance_experts(
                weight=torch.tensor(problem.total_loads, dtype=torch.float32),
                num_replicas=problem.current.num_physical,
                num_groups=groups,
                num_nodes=problem.topology.num_nodes,
                num_gpus=problem.current.num_ranks,
                enable_hierarchical=groups is not None,
            )
        )

    def deepseek_vec(problem: PlanningProblem) -> npt.NDArray[np.int32]:
        groups = problem.constraints.num_groups
        return _as_map(
            vectorised.rebalance_experts(
                tokens_per_expert=torch.tensor(problem.loads, dtype=torch.float32),
                num_physical_experts=problem.current.num_physical,
                num_local_physical_experts=problem.current.slots_per_rank,
                num_groups=groups,
                num_nodes=problem.topology.num_nodes,
                enable_hierarchical=groups is not None,
            )
        )

    return {"SGLang deepseek": deepseek, "SGLang deepseek_vec": deepseek_vec}


def peer_vllm(folder: Path) -> dict[str, Planner]:
    """The default policy of vLLM."""
    import torch  # noqa: PLC0415  # only peers need it

    policy = module_of(folder / "vllm" / "distributed" / "eplb" / "policy", "default").DefaultEplbPolicy

    def default(problem: PlanningProblem) -> npt.NDArray[np.int32]:
        return _as_map(
            policy.rebalance_experts(
                torch.tensor(problem.total_loads, dtype=torch.float32),
                problem.current.num_physical,
                problem.constraints.num_groups or 1,
                problem.topology.num_nodes,
                problem.current.num_ranks,
                torch.tensor(problem.current.physical_to_logical, dtype=torch.int64),
            )
        )

    return {"vLLM default": default}


def measure(planner: Planner, problem: PlanningProblem, repeat: int) -> tuple[npt.NDArray[np.int32], float]:
    """The plan and the least time in ms, after one call to warm up."""
    rows = planner(problem)
    used_s = []
    for _ in range(repeat):
        started = time.thread_time()
        rows = planner(problem)
        used_s.append(time.thread_time() - started)
    return rows, min(used_s) * 1000


def row_of(name: str, work: Work, rows: npt.NDArray[np.int32], time_ms: float | None) -> str:
    """One line of the table."""
    problem = work.problem
    after = Table(problem.current.model, problem.current.layer_ids, problem.current.num_logical, problem.current.rank_ids, rows)
    imbalance = imbalance_of(problem.total_loads, after, problem.topology)
    moves = residency_moves(problem.current, after, problem.topology)
    stacked = sum(len(set(held)) < len(held) for layer in after.by_rank().tolist() for held in layer)
    spent = "-" if time_ms is None else f"{time_ms:.1f}"
    cost = f"{moves.experts:>9}{moves.slots_rewritten:>11}{stacked:>9}{spent:>11}"
    return f"  {name:<22}{imbalance.mean:>9.4f}{imbalance.worst:>9.4f}{cost}"


def main() -> None:
    """Print a table for each work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="timed calls of each planner (default 5)")
    parser.add_argument("--peer-sglang", type=Path, metavar="DIR", help="folder of an unzipped sglang wheel")
    parser.add_argument("--peer-vllm", type=Path, metavar="DIR", help="folder of an unzipped vllm wheel")
    options = parser.parse_args()
    planners: dict[str, Planner] = {}
    for name in policy_names():
        policy = load_policy(name)
        planners[name] = lambda problem, policy=policy: policy.plan(problem).physical_to_logical  # type: ignore[misc]
    if options.peer_sglang:
        planners |= peer_sglang(options.peer_sglang)
    if options.peer_vllm:
        planners |= peer_vllm(options.peer_vllm)
    for work in works():
        bound = imbalance_bounds(work.problem)
        print(f"\n{work.title}\n  lower bound: mean {np.mean(bound):.4f}, worst {max(bound):.4f}")
        print(f"  {'planner':<22}{'mean':>9}{'worst':>9}{'moves':>9}{'rewritten':>11}{'stacked':>9}{'time, ms':>11}")
        print(row_of("as it is", work, work.problem.current.physical_to_logical, None))
        for name, planner in planners.items():
            try:
                rows, time_ms = measure(planner, work.problem, 1 if name == "ilp" else options.repeat)
            except EplbError as error:
                print(f"  {name:<22}{error}")
                continue
            print(row_of(name, work, rows, time_ms))
    print("\nmoves: residencies (layer, rank, expert) that were not there; stacked: ranks with two copies of one expert")


if __name__ == "__main__":
    main()
