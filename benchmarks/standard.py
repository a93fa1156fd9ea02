"""The standard work and its relatives: problems that are the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]

LAYERS, EXPERTS, RANKS, SLOTS = 58, 256, 32, 9
TIME_LIMIT_S = 120.0
"""Hard stop, far above every row's budget: a loaded machine must not cut a plan."""


def standard_load(seed: int = 0) -> Float64Array:
    """Log-normal load, sigma 1, shape (58, 256)."""
    load: Float64Array = np.exp(np.random.default_rng(seed).normal(0, 1, (LAYERS, EXPERTS))) * 1000
    return load


def drifted_load(seed: int = 0) -> Float64Array:
    """Half the standard load, half another one of its kind."""
    return 0.5 * standard_load(seed) + 0.5 * standard_load(seed + 1000)


def resampled(load: Float64Array, tokens: int, seed: int) -> Float64Array:
    """The same popularity, counted on a fresh window of so many tokens a layer."""
    random = np.random.default_rng(seed)
    return np.array([random.multinomial(tokens, layer / layer.sum()) for layer in load], np.float64)


def problem_of(
    loads: Float64Array,
    *,
    num_ranks: int = RANKS,
    slots_per_rank: int = SLOTS,
    num_nodes: int = 1,
    current: Table | None = None,
    constraints: Constraints | None = None,
    expert_bytes: int = 0,
    **asked: Any,
) -> PlanningProblem:
    """A problem that starts from slot i = expert i % E, or from a table. Loads: shape (L, E), or (windows, L, E).

    constraints: when none are given, every slot is filled, as in the plans of engines' planners.
    """
    loads = loads if loads.ndim == 3 else loads[None]
    topology = Topology.regular(num_ranks=num_ranks, num_nodes=num_nodes)
    linear = Table.linear(
        model="standard",
        layer_ids=range(loads.shape[1]),
        num_logical=loads.shape[2],
        rank_ids=topology.rank_ids,
        slots_per_rank=slots_per_rank,
    )
    return PlanningProblem(
        loads=loads,
        topology=topology,
        current=linear if current is None else current,
        constraints=constraints or Constraints(fill_slots=True),
        expert_bytes=(expert_bytes,) * loads.shape[1],
        time_limit_s=TIME_LIMIT_S,
        **asked,
    )
