"""Planners of engines, run in this process on the same input: folders of unzipped wheels, kept outside this repository."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.policy.base import PlanningProblem

Planner = Callable[[PlanningProblem], npt.NDArray[np.int32]]
"""From a problem to a map of shape (L, P)."""


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


def one_threaded_torch() -> Any:
    """torch, on one core as everything here is."""
    import torch  # noqa: PLC0415  # only peers need it

    torch.set_num_threads(1)
    return torch


def _as_map(result: Any) -> npt.NDArray[np.int32]:
    """A peer's answer (a tensor, or a tuple that starts with one) as (L, P)."""
    tensor = result[0] if isinstance(result, tuple) else result
    array: npt.NDArray[np.int32] = tensor.numpy().astype(np.int32)
    return array


def peer_sglang(folder: Path) -> dict[str, Planner]:
    """SGLang's algorithms `deepseek` and `deepseek_vec`."""
    torch = one_threaded_torch()
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
    torch = one_threaded_torch()
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
