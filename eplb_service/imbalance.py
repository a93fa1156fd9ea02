"""How uneven the ranks are: the one definition of imbalance, max rank load / mean rank load of a layer.

1 is perfect; a layer without load has 1. Balancedness is its inverse. Aggregates are named: mean over layers, worst layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


def imbalance_per_layer(
    rank_loads: npt.ArrayLike, capacity: npt.ArrayLike | None = None, base_load: npt.ArrayLike | None = None
) -> Float64Array:
    """Imbalance of each layer. Rank loads: shape (L, R), tokens; capacity: shape (R,), relative, > 0. Returns (L,).

    base_load: shape (R,), work of each rank beside these tokens, in mean rank loads. With it and capacities, imbalance is
    max(work / capacity) over (total work / total capacity), where work = tokens + base_load * mean tokens.

    >>> imbalance_per_layer([[10, 10], [30, 10], [0, 0]]).tolist()
    [1.0, 1.5, 1.0]
    >>> imbalance_per_layer([[10, 10]], base_load=[0.0, 1.0]).round(3).tolist()
    [1.333]
    """
    loads = np.asarray(rank_loads, np.float64)
    speed = np.ones(loads.shape[-1]) if capacity is None else np.asarray(capacity, np.float64)
    total = loads.sum(axis=-1)
    if base_load is not None:
        loads = loads + np.asarray(base_load, np.float64) * loads.mean(axis=-1, keepdims=True)
    mean = loads.sum(axis=-1) / speed.sum()
    worst = (loads / speed).max(axis=-1)
    return np.where(total > 0, worst / np.where(total > 0, mean, 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Imbalance of a placement under a load: per layer, mean over layers, worst layer."""

    per_layer: tuple[float, ...]

    @classmethod
    def of(
        cls, rank_loads: npt.ArrayLike, capacity: npt.ArrayLike | None = None, base_load: npt.ArrayLike | None = None
    ) -> Imbalance:
        """From rank loads of shape (L, R)."""
        return cls(tuple(imbalance_per_layer(rank_loads, capacity, base_load).tolist()))

    @property
    def mean(self) -> float:
        """Mean over layers."""
        return float(np.mean(self.per_layer))

    @property
    def worst(self) -> float:
        """Worst layer."""
        return max(self.per_layer)
