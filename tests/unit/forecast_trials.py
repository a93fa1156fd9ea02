"""A deployment's windows in small, for trials of forecasts: what is drawn, what is used, what plans come to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from eplb_service.dispatch import imbalance_of
from eplb_service.planner.forecasting import Forecasting
from eplb_service.window.report import TableShape
from tests.unit.gate_trials import LINEAR, NUM_EXPERTS, NUM_LAYERS, TOPOLOGY, Float64Array, plan

SHAPE = TableShape(model="m", layer_ids=tuple(range(NUM_LAYERS)), num_logical=NUM_EXPERTS)
BEGIN_S = 1_700_006_400.0
"""Midnight, UTC."""

Path = Callable[[int], Float64Array]
"""True popularity of a window, shape (L, E)."""


class Trial:
    """One deployment. Windows close every `window_s`; a plan serves `serve_s`."""

    def __init__(
        self, *, tokens: int, seed: int = 0, window_s: float = 10.0, serve_s: float = 40.0, mode: str = "auto", bins: int = 24
    ) -> None:
        self.forecasting = Forecasting(mode=mode, day_bins=bins, num_windows=4)
        self.used: list[str] = []
        """What was used after each window."""
        self.windows: list[Float64Array] = []
        self._tokens, self._window_s, self._serve_s = tokens, window_s, serve_s
        self._random = np.random.default_rng(seed)

    def drive(self, path: Path, num_windows: int) -> Trial:
        """So many windows more."""
        for _ in range(num_windows):
            number = len(self.windows)
            loads = self._random.multinomial(self._tokens, path(number)).astype(np.float64)
            self.windows.append(loads)
            self.close(loads, BEGIN_S + (number + 1) * self._window_s)
            self.used.append(self.forecasting.used())
        return self

    def close(self, loads: Float64Array, at_s: float) -> None:
        """A window."""
        self.forecasting.window_closed([(SHAPE, loads)], at_s=at_s, commit_s=0.0, serve_s=self._serve_s, num_ranks=4)

    def last(self) -> Float64Array:
        """What a plan is made from without forecasts. Shape (L, E)."""
        total: Float64Array = np.sum(self.windows[-4:], axis=0)
        return total

    def forecast(self) -> Float64Array:
        """What a plan is made for. Shape (L, E)."""
        found = self.forecasting.forecast()
        assert found is not None
        return found.popularity[0][1]


def imbalance_later(planned_for: Float64Array, path: Path, begin: int, end: int) -> float:
    """Imbalance of the plan for a load, on the true load of windows begin … end - 1: mean over layers and windows."""
    table = plan(planned_for[None] * 1e6 / planned_for.sum(), LINEAR).placement
    return float(np.mean([imbalance_of(path(number) * 1e6, table, TOPOLOGY).mean for number in range(begin, end)]))
