"""A policy in forty lines: the busiest and the idlest rank of each layer trade experts, as long as that helps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from eplb_service.policy.base import PlanningProblem, RawPlan
from eplb_service.policy.limits import legal_rows, limits_of

TRADES_MAX = 4


class TradePolicy:
    """At most four trades a layer, two moves each: for fleets where every copy is dear. Ranks count as equally fast."""

    name = "trade"
    options: Mapping[str, str] = MappingProxyType({})

    def plan(self, problem: PlanningProblem) -> RawPlan:
        """Plan one table; a layer in which no trade is allowed stays as it is."""
        limits, table = limits_of(problem), problem.current
        rows = table.physical_to_logical.copy()
        budget = problem.constraints.max_moves if problem.constraints.max_moves is not None else rows.size
        for layer, load in enumerate(problem.total_loads):
            for _ in range(TRADES_MAX):
                traded = self._trade(rows[layer], load / np.maximum(1, table.replica_counts[layer]), limits.room > 0)
                if traded is None or budget < 2 or not legal_rows(traded[None], limits, table.num_logical)[0]:
                    break
                rows[layer], budget = traded, budget - 2
        return RawPlan(physical_to_logical=rows)

    def _trade(
        self, row: npt.NDArray[np.int32], share: npt.NDArray[np.float64], serves: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int32] | None:
        """The row after the trade that lowers the busiest rank most; None when none does. Share: load of a copy, shape (E,)."""
        held = row.reshape(serves.size, -1).copy()
        weight = np.where(held >= 0, share[held], 0.0)
        height = np.where(serves, weight.sum(axis=1), np.nan)
        busy, idle = int(np.nanargmax(height)), int(np.nanargmin(height))
        less = weight[busy][:, None] - weight[idle][None, :]  # what the busy rank gets rid of
        higher = np.maximum(height[busy] - less, height[idle] + less)
        apart = ~np.isin(held[busy], held[idle])[:, None] & ~np.isin(held[idle], held[busy])[None, :]
        higher[~apart | (held[busy] < 0)[:, None]] = np.inf
        give, take = np.unravel_index(int(higher.argmin()), higher.shape)
        if higher[give, take] >= height[busy] * (1 - 1e-9):
            return None
        held[busy, give], held[idle, take] = held[idle, take], held[busy, give]
        return held.reshape(-1)
