"""Lower bounds on imbalance that no placement can beat, so that a plan can say how far from the best it may be.

Under even split a layer's busiest rank carries at least the mean, and at least the hottest copy under the best allotment of
copies. Other dispatches may split an expert unevenly, so there only the mean holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.limits import Limits, limits_of

Float64Array = npt.NDArray[np.float64]


def hottest_copy(load: Float64Array, num_slots: int, copies_max: int) -> float:
    """Least possible load of the hottest copy, over all allotments of `num_slots` copies to experts. Load: shape (E,).

    The smallest T with sum of max(1, ceil(load / T)) <= num_slots and no expert above copies_max. T is load_e / c for some
    expert and count, so the search is over those values.

    >>> hottest_copy(np.array([600.0, 560, 120, 120, 20, 10, 10, 10]), 16, 8)
    120.0
    """
    counts = np.arange(1, max(1, min(copies_max, num_slots - load.size + 1)) + 1)
    values = np.unique(load[:, None] / counts[None, :])
    values = values[values >= load.max() / counts[-1]]
    low, high = 0, values.size - 1
    while low < high:
        middle = (low + high) // 2
        if _copies_needed(load, float(values[middle])) <= num_slots:
            high = middle
        else:
            low = middle + 1
    return float(values[low]) if values.size else 0.0


def _copies_needed(load: Float64Array, height: float) -> int:
    """Fewest copies such that none carries more than `height`."""
    if height <= 0:
        return load.size if not load.any() else int(np.iinfo(np.int64).max)
    return int(np.maximum(1, np.ceil(load / height * (1.0 - 1e-12))).sum())


def imbalance_bounds(problem: PlanningProblem, limits: Limits | None = None) -> tuple[float, ...]:
    """Per layer, a lower bound on imbalance under the problem's dispatch. Length L; 1.0 for a layer without load."""
    limits = limits or limits_of(problem)
    serving = limits.room > 0
    alive = np.array([rank not in problem.topology.dead for rank in problem.topology.rank_ids])
    bounds = []
    for load in problem.total_loads:
        total = float(load.sum())
        if total <= 0 or problem.dispatch not in (Dispatch.EVEN, Dispatch.HASHED):
            bounds.append(1.0)
            continue
        fair = total / float(limits.capacity[alive].sum())
        copy = hottest_copy(load, limits.num_slots, limits.copies_max) / float(limits.capacity[serving].max())
        bounds.append(max(1.0, copy / fair, float(limits.capacity[alive].sum() / limits.capacity[serving].sum())))
    return tuple(bounds)
