"""How long a gain lasts: what past plans would have gained, and lost again, on the windows that came after them.

A plan made at t, and the placement that it would have replaced, are both scored on every later window: the same load, two
placements. Their difference over what was promised is the share of the gain that was there k windows later. Its sum over k is
the number of windows that a promised gain is worth: the horizon. Nothing is assumed about *how* a load drifts: under a load
that swings to and fro the shares cancel out, and the horizon is short, however good each plan looks on its own window.

Beyond the windows seen, the gain is taken to last as long again at the level of its last quarter (or of all of it, if that is
lower): what is new tends to go soon, what has lasted tends to stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, rank_shares, serving_ranks
from eplb_service.placement import Table
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]

SHARE_MAX = 1.5

OLDER = 0.6
"""Weight of a plan against the one made after it: a first plan, from a poor placement, must not drown what later ones teach."""

LAGS_MIN = 2
"""Fewer windows after a plan say nothing of how fast it goes stale."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowSum:
    """One window, summed. index: k. loads: for each table shape (L, E), tokens; sources: shape (L, R, E) or None, likewise.

    steps: lock-step forwards. live_digest: of the one live map that served it, None = several. dispersion: `overdispersion`.
    coverage: share of ranks and steps that reported. step_s: mean step time of the slowest rank, 0 = not measured.
    """

    index: int
    loads: tuple[Float64Array, ...]
    sources: tuple[Float64Array | None, ...]
    steps: int
    live_digest: int | None
    coverage: float
    dispersion: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PastPlan:
    """A plan that was made after window `index`: what it would replace, what it proposed, and the gain that it promised.

    promised: fall of imbalance, mean over layers weighted by load; > 0.
    """

    index: int
    before: tuple[Table, ...]
    after: tuple[Table, ...]
    promised: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """steps: that a promised gain is worth. half_life_steps: until half of it was gone, None = not within the windows seen.

    shares: share of the promised gain k windows later, k = 1…. num_plans: plans that this is a mean of.
    """

    steps: float
    half_life_steps: float | None
    shares: tuple[float, ...]
    num_plans: int

    def __str__(self) -> str:
        lasted = (
            f"half of it is gone after {self.half_life_steps:.0f}"
            if self.half_life_steps is not None
            else f"it has not halved within the {len(self.shares)} windows seen"
        )
        return f"a gain is worth {self.steps:.0f} steps: {lasted} (from {self.num_plans} past plans)"


def imbalance_by_load(loads: Sequence[Float64Array], topology: Topology, shares: Sequence[Float64Array]) -> float:
    """Imbalance, mean over the layers of all tables weighted by their tokens. shares: of each table, see `rank_shares`."""
    alive, capacity, base = serving_ranks(topology)
    busiest = fair = 0.0
    for load, share in zip(loads, shares, strict=True):
        work = (share @ load[:, :, None])[:, alive, 0]
        work = work + base * work.mean(axis=1, keepdims=True)
        busiest += float((work / capacity).max(axis=1).sum())
        fair += float(work.sum() / capacity.sum())
    return busiest / fair if fair > 0 else 1.0


def gains_after(plan: PastPlan, windows: Sequence[WindowSum], topology: Topology, dispatch: Dispatch) -> dict[int, float]:
    """What a plan gains over the placement that it would replace, on each later window. By lag in windows, from 1."""
    fixed = dispatch is not Dispatch.NEAREST
    kept: list[list[Float64Array]] = []
    result: dict[int, float] = {}
    for window in windows:
        if window.index <= plan.index:
            continue
        if not kept or not fixed:
            kept = [
                [rank_shares(table, topology, dispatch, source) for table, source in zip(tables, window.sources, strict=True)]
                for tables in (plan.before, plan.after)
            ]
        before, after = (imbalance_by_load(window.loads, topology, shares) for shares in kept)
        result[window.index - plan.index] = before - after
    return result


def measure_horizon(
    plans: Sequence[PastPlan], windows: Sequence[WindowSum], topology: Topology, dispatch: Dispatch
) -> Horizon | None:
    """The horizon from past plans and the windows that are kept, oldest first; None while too few windows followed."""
    series = [(plan, gains_after(plan, windows, topology, dispatch)) for plan in plans if plan.promised > 0]
    series = [(plan, gains) for plan, gains in series if gains]
    if not series or not windows:
        return None
    weights = [OLDER**age for age in reversed(range(len(series)))]
    shares: list[float] = []
    for lag in range(1, max(max(gains) for _, gains in series) + 1):
        known = [
            (weight, min(SHARE_MAX, max(-SHARE_MAX, gains[lag] / plan.promised)))
            for weight, (plan, gains) in zip(weights, series, strict=True)
            if lag in gains
        ]
        if sum(weight for weight, _ in known) < sum(weights) / 2:
            break  # only older plans reach as far
        shares.append(sum(weight * share for weight, share in known) / sum(weight for weight, _ in known))
    if len(shares) < LAGS_MIN:
        return None
    steps_each = sum(window.steps for window in windows) / len(windows)
    last = shares[-max(1, len(shares) // 4) :]
    onward = max(0.0, min(sum(last) / len(last), sum(shares) / len(shares))) * len(shares)
    return Horizon(
        steps=max(1.0, steps_each * (sum(shares) + onward)),
        half_life_steps=_half_life(shares, steps_each),
        shares=tuple(shares),
        num_plans=len(series),
    )


def _half_life(shares: Sequence[float], steps_each: float) -> float | None:
    """Steps until the share first falls to half of what it was at first."""
    first = shares[0]
    if first <= 0:
        return 0.0
    for lag, share in enumerate(shares):
        if share <= first / 2:
            before = shares[lag - 1]
            return steps_each * (lag + (before - first / 2) / (before - share))
    return None
