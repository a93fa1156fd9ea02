"""Sampling noise of imbalance: what a placement would show on a fresh window of the same load and size.

Rank loads of a layer are weighted sums of multinomial counts; for the sizes of windows they are close to normal. The largest
of independent normals has a distribution that is a product of normal ones, so its mean and variance are integrals over a
grid: no random numbers, the same answer on every machine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, rank_shares, serving_ranks
from eplb_service.placement import Table
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]

GRID_POINTS = 257
GRID_SIGMAS = 6.0
CELLS_MAX = 1 << 20
"""Most numbers of a grid that are held at once."""
SUB_WINDOWS_MIN = 4
"""Fewer sub-windows say too little of how the load varies; then plain multinomial noise is assumed."""

DRIFT_GROWTH = 4.0
"""Half means of a random walk of n steps differ by a variance of n/3 steps over 4/n of noise, window means by 2n/3 over 2/n."""


def normal_cdf(x: Float64Array) -> Float64Array:
    """Distribution function of the standard normal, to 1.5e-7 (Abramowitz and Stegun, formula 7.1.26)."""
    z = np.abs(x) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * z)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * polynomial * np.exp(-z * z)
    result: Float64Array = np.where(x >= 0, 1.0 - tail, tail)
    return result


def largest_of_normals(means: Float64Array, errors: Float64Array) -> tuple[float, float]:
    """Mean and standard deviation of the largest of independent normals. Both inputs: shape (n,)."""
    expected, spread = largest_by_row(np.asarray(means)[None], np.asarray(errors)[None])
    return float(expected[0]), float(spread[0])


def largest_by_row(means: Float64Array, errors: Float64Array) -> tuple[Float64Array, Float64Array]:
    """`largest_of_normals` of every row. Inputs: shape (rows, n); answers: shape (rows,)."""
    expected, spread = means.max(axis=1), np.zeros(means.shape[0])
    noisy = np.flatnonzero((errors > 0).any(axis=1))
    step = max(1, CELLS_MAX // (GRID_POINTS * max(1, means.shape[1])))
    for start in range(0, noisy.size, step):
        rows = noisy[start : start + step]
        expected[rows], spread[rows] = _largest(means[rows], errors[rows])
    return expected, spread


def _largest(means: Float64Array, errors: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Integrals over a grid of GRID_POINTS for each row, every row with some error."""
    low = (means - GRID_SIGMAS * errors).max(axis=1)
    high = (means + GRID_SIGMAS * errors).max(axis=1)
    near = (means + GRID_SIGMAS * errors >= low[:, None]).any(axis=0)  # the others are never the largest
    means, errors = means[:, near], errors[:, near]
    step = (high - low) / (GRID_POINTS - 1)
    grid = low[:, None] + step[:, None] * np.arange(GRID_POINTS)
    scale = np.where(errors > 0, errors, 1e-12 * np.maximum(1.0, np.abs(means)))
    below = normal_cdf(
        (grid[None] - means.T[:, :, None]) / scale.T[:, :, None]
    )  # (n, rows, points): the product runs along memory
    cumulative = np.clip(below.prod(axis=0), 0.0, 1.0)
    mass = np.diff(cumulative, prepend=0.0, axis=1)
    mass[:, -1] += 1.0 - cumulative[:, -1]
    middle = grid - step[:, None] / 2
    mean = (mass * middle).sum(axis=1)
    variance = (mass * (middle - mean[:, None]) ** 2).sum(axis=1)
    return mean, np.sqrt(np.maximum(0.0, variance))


def confidence(sigmas: float) -> float:
    """One-sided confidence that so many standard errors stand for.

    >>> round(confidence(3.0), 5)
    0.99865
    """
    return 0.5 * (1.0 + math.erf(sigmas / math.sqrt(2.0)))


def _dispersion(before: Float64Array, after: Float64Array) -> float:
    """Variance of the change in popularity over what multinomial sampling makes of it, 1 = sampling alone.

    Both: shape (pairs, L, E), tokens. Mean over pairs and experts, median over layers; layers idle in some pair are left out.
    """
    total_before, total_after = before.sum(axis=2), after.sum(axis=2)
    busy = ((total_before > 0) & (total_after > 0)).all(axis=0)
    if not busy.any():
        return 1.0
    first, second = before[:, busy], after[:, busy]
    weight_first, weight_second = total_before[:, busy, None], total_after[:, busy, None]
    change = first / weight_first - second / weight_second
    pooled = (first + second).sum(axis=0) / (weight_first + weight_second).sum(axis=0)
    seen = (change**2 / (1.0 / weight_first + 1.0 / weight_second)).sum(axis=2).mean(axis=0)
    multinomial = (pooled * (1.0 - pooled)).sum(axis=1)
    ratio = np.divide(seen, multinomial, out=np.ones_like(seen), where=multinomial > 0)
    return float(np.median(ratio))


def overdispersion(loads: Float64Array) -> float:
    """How much more the load varies between neighbouring sub-windows than multinomial sampling would; at least 1.

    Loads: shape (W, L, E). Tokens of one prompt go together, so real load is clumped. Slow drift hardly counts here. 1.0 when
    there are fewer than SUB_WINDOWS_MIN sub-windows.
    """
    return 1.0 if loads.shape[0] < SUB_WINDOWS_MIN else max(1.0, _dispersion(loads[:-1], loads[1:]))


def drift_dispersion(loads: Float64Array) -> float:
    """Dispersion of the *next* window around this one: clumping, and drift as far as the two halves of this window show it.

    Loads: shape (W, L, E). Where popularity wanders as a random walk, the means of two windows differ by DRIFT_GROWTH times
    what the means of the two halves do (in units of their sampling noise). At least `overdispersion`.
    """
    clumped = overdispersion(loads)
    if loads.shape[0] < SUB_WINDOWS_MIN:
        return clumped
    half = loads.shape[0] // 2
    halves = _dispersion(loads[:half].sum(axis=0)[None], loads[-half:].sum(axis=0)[None])
    return clumped + DRIFT_GROWTH * max(0.0, halves - clumped)


def error_dispersion(loads: Float64Array, squared_error: float) -> float:
    """Dispersion that makes sampling noise as large as a measured error of popularity.

    Loads: shape (L, E), tokens. squared_error: sum over experts of squared differences of shares, mean over layers weighted by
    tokens. Multinomial sampling of n tokens makes it (1 - sum of squared shares) / n.
    """
    total = loads.sum(axis=1)
    busy = total > 0
    if not busy.any():
        return 1.0
    popularity = loads[busy] / total[busy, None]
    sampled = float((1.0 - (popularity**2).sum(axis=1)).sum()) / float(total[busy].sum())
    return squared_error / sampled if sampled > 0 else 1.0


def rank_moments(
    loads: Float64Array,
    table: Table,
    topology: Topology,
    dispatch: Dispatch,
    dispersion: float,
    source_loads: Float64Array | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Mean and standard error of each rank's work over its fair share. Loads: shape (L, E). Both: shape (L, alive ranks).

    source_loads: shape (L, R, E), see `dispatch.rank_shares`. The largest value of a layer is its imbalance, own work of ranks
    (`Topology.base_load`) counted and without noise. A layer without load has (1, 0). Where the replica of a single token is
    chance (by a hash, a weight, or the rank that it happens to come from) that adds binomial noise.
    """
    alive, capacity, base = serving_ranks(topology)
    base = base / max(1, alive.size)
    shares = rank_shares(table, topology, dispatch, source_loads)[:, alive, :]
    total = loads.sum(axis=1)
    safe = np.where(total > 0, total, 1.0)
    popularity = loads / safe[:, None]
    first = np.einsum("lre,le->lr", shares, popularity)
    second = np.einsum("lre,le->lr", shares**2, popularity)
    variance = np.maximum(0.0, second - first**2) * dispersion
    if dispatch is not Dispatch.EVEN:
        variance = variance + np.einsum("lre,le->lr", shares * (1.0 - shares), popularity)
    fair = (1.0 + base.sum()) * capacity / capacity.sum()
    means = np.where(total[:, None] > 0, (first + base) / fair, 1.0)
    errors = np.where(total[:, None] > 0, np.sqrt(variance / safe[:, None]) / fair, 0.0)
    return means, errors
