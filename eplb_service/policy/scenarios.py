"""What the next steps' load may look like, from a series of sub-windows: scenarios with weights, the recent ones heavier.

How fast the past fades is chosen by a backtest on the series itself: the decay whose forecasts of each next sub-window would
have been best. A part of the weight is spread evenly over all of them, so that bursts that come back are not forgotten.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

DECAYS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
"""Weight of a sub-window against the next one that a backtest chooses from; 1 = all alike, 0 = only the last counts."""

SUB_WINDOWS_FEW = 4
"""With fewer sub-windows a backtest says little: DECAY_UNKNOWN is taken."""

DECAY_UNKNOWN = 0.6
"""Decay when there is too little to choose by."""

EVEN_SHARE = 0.2
"""Part of the weight that all sub-windows share evenly."""

SCENARIOS_MAX = 16
"""Of more sub-windows than these the older ones are pooled."""

SQUARED_MAX = 1e100
"""Larger loads are scaled down (by a power of two, exactly) before they are squared."""


def scenarios_of(loads: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Scenarios of a series and their weights. Loads: shape (W, L, E), in time order.

    Returns shape (K, L, E) and shape (K,), adding up to 1. Sub-windows without any load count for nothing.

    >>> scenarios, weights = scenarios_of(np.array([[[1.0, 3.0]], [[2.0, 2.0]]]))
    >>> scenarios.shape, weights.round(3).tolist()
    ((2, 1, 2), [0.4, 0.6])
    """
    busy = loads[loads.any(axis=(1, 2))]
    if busy.shape[0] == 0:
        return loads[-1:], np.ones(1)
    num = busy.shape[0]
    weights = (1.0 - EVEN_SHARE) * decayed(num, best_decay(busy)) + EVEN_SHARE / num
    return pooled(busy, weights)


def decayed(num: int, decay: float) -> Float64Array:
    """Weights of `num` sub-windows in time order, adding up to 1."""
    weights = decay ** np.arange(num - 1, -1, -1, dtype=np.float64)
    result: Float64Array = weights / weights.sum()
    return result


def best_decay(loads: Float64Array) -> float:
    """The decay whose forecasts of each next sub-window had the least error; of equals the faster. Loads: shape (W, L, E)."""
    if loads.shape[0] < SUB_WINDOWS_FEW:
        return DECAY_UNKNOWN
    if (high := float(loads.max())) > SQUARED_MAX:
        loads = loads * 2.0 ** -np.frexp(high)[1]
    scale = loads.mean(axis=0) + 1e-9  # of counts: their variance grows with their mean
    errors = {decay: _forecast_error(loads, decay, scale) for decay in DECAYS}
    return min(errors, key=lambda decay: errors[decay])


def _forecast_error(loads: Float64Array, decay: float, scale: Float64Array) -> float:
    """Squared error of forecasts by decayed averages of what came before, in units of the mean load."""
    total, weight, error = np.zeros(loads.shape[1:]), 0.0, 0.0
    for now, following in itertools.pairwise(loads):
        total, weight = decay * total + now, decay * weight + 1.0
        error += float(((following - total / weight) ** 2 / scale).mean())
    return error


def pooled(loads: Float64Array, weights: Float64Array) -> tuple[Float64Array, Float64Array]:
    """At most SCENARIOS_MAX scenarios: the newest stay as they are, neighbours among the rest become their weighted mean."""
    num, single = loads.shape[0], SCENARIOS_MAX // 2
    if num <= SCENARIOS_MAX:
        return loads, weights
    old = np.array_split(np.arange(num - single), SCENARIOS_MAX - single)
    means = np.stack([np.average(loads[group], axis=0, weights=weights[group]) for group in old])
    sums = np.array([weights[group].sum() for group in old])
    return np.concatenate([means, loads[-single:]]), np.concatenate([sums, weights[-single:]])
