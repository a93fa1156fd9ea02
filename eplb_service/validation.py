"""After the commit: whether a generation brings what it promised, compared like with like.

Load that drifts after a commit is not the generation's fault. So the new and the previous placement are scored on the *same*
windows, those served under the new one: what the previous placement would have shown there is a counterfactual. Where step
times are understood (`calibration`), the measured ones are compared with what the model expects of either placement, less
what they were off by already before the commit (contexts that grow, clocks that fall: not the generation's fault either).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eplb_service.calibration import StepTimeModel
from eplb_service.dispatch import Dispatch, imbalance_of, rank_shares
from eplb_service.errors import InvalidInputError
from eplb_service.horizon import WindowSum, imbalance_by_load
from eplb_service.noise import confidence, largest_by_row, rank_moments
from eplb_service.placement import Table
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """windows: full windows under a generation after which it is judged.

    noise_sigmas: standard errors that a loss must stand clear of. min_loss: least loss of imbalance (mean over layers) that a
    rollback is worth. roll_back: whether a generation that makes things worse is rolled back (in mode auto).
    changed_share: share of the tokens that must go to other experts than those that a generation was planned for, before
    anything is moved again after it was rolled back. hold_s: after so long that is forgotten.
    """

    windows: int = 4
    noise_sigmas: float = 3.0
    min_loss: float = 0.01
    roll_back: bool = True
    changed_share: float = 0.1
    hold_s: float = 21_600.0

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise InvalidInputError(f"a generation is judged after at least 1 window; got {self.windows}")
        for name in ("noise_sigmas", "min_loss", "changed_share", "hold_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidInputError(f"{name} must be finite and >= 0; got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One full window under a generation. imbalance, previous: mean over layers weighted by load, worst layer, of both.

    error: standard error of the difference of the means, from sampling. step_s: measured, 0 = not.
    expected_step_s, previous_step_s: what the step-time model expects of the new and of the previous placement, 0 = no model.
    step_error_s: standard error of one window's step time about the model.
    """

    window_index: int
    mean: float
    worst: float
    previous_mean: float
    previous_worst: float
    error: float
    step_s: float = 0.0
    expected_step_s: float = 0.0
    previous_step_s: float = 0.0
    step_error_s: float = 0.0

    @property
    def gain(self) -> float:
        """Fall of imbalance that the generation brings on this window."""
        return self.previous_mean - self.mean


def observe(
    window: WindowSum,
    tables: Sequence[Table],
    previous: Sequence[Table],
    *,
    topology: Topology,
    dispatch: Dispatch,
    model: StepTimeModel | None,
    offset_s: float = 0.0,
) -> Observation:
    """Score both placements on a window. offset_s: by how much steps took longer than the model says before the commit."""
    means, worsts, errors = [], [], []
    for placement in (tables, previous):
        shares = [
            rank_shares(table, topology, dispatch, source) for table, source in zip(placement, window.sources, strict=True)
        ]
        means.append(imbalance_by_load(window.loads, topology, shares))
        layers: list[float] = []
        spread: list[Float64Array] = []
        for table, load, source in zip(placement, window.loads, window.sources, strict=True):
            layers.extend(imbalance_of(load, table, topology, dispatch, source).per_layer)
            spread.append(largest_by_row(*rank_moments(load, table, topology, dispatch, window.dispersion, source))[1])
        worsts.append(max(layers))
        every = np.concatenate(spread)
        errors.append(float(np.sqrt((every**2).sum()) / every.size))
    mean_load = sum(float(load.sum()) for load in window.loads) / len(topology.alive_positions()) / max(1, window.steps)
    expected = [0.0, 0.0]
    if model is not None and window.step_s > 0:
        expected = [model.predict(busiest=mean * mean_load, mean=mean_load) + offset_s for mean in means]
    return Observation(
        window_index=window.index,
        mean=means[0],
        worst=worsts[0],
        previous_mean=means[1],
        previous_worst=worsts[1],
        error=math.hypot(*errors),
        step_s=window.step_s,
        expected_step_s=expected[0],
        previous_step_s=expected[1],
        step_error_s=model.residual_s if model is not None and window.step_s > 0 else 0.0,
    )


class Outcome(StrEnum):
    """What became of a promise."""

    PENDING = "pending"
    KEPT = "kept"
    SMALLER = "smaller"
    WORSE = "worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether a generation kept its promise. reason: one sentence with the numbers. gain: observed, mean over the windows.

    step_gain_s: seconds of a step that it saves by the clock, None = step times are not understood.
    """

    outcome: Outcome
    reason: str
    gain: float = 0.0
    step_gain_s: float | None = None


def judge(config: ValidationConfig, promised: float, observations: Sequence[Observation]) -> Judgement:
    """The answer after `config.windows` windows. promised: fall of imbalance, mean over layers weighted by load."""
    seen = len(observations)
    if seen < config.windows:
        return Judgement(outcome=Outcome.PENDING, reason=f"seen in {seen} of {config.windows} windows")
    gains = np.array([observation.gain for observation in observations])
    gain = float(gains.mean())
    sampling = math.sqrt(sum(observation.error**2 for observation in observations)) / seen
    between = float(gains.std(ddof=1)) / math.sqrt(seen) if seen > 1 else 0.0
    margin = config.noise_sigmas * max(sampling, between)
    step_gain, step_margin = _step_gain(config, observations)
    told = (
        f"promised a gain of {promised:.4f}, brought {gain:.4f} ± {margin:.4f} over {seen} windows against what the previous"
        " placement would have shown there"
    )
    if step_gain is not None:
        told += f"; steps took {step_gain * 1e3:+.3g} ± {step_margin * 1e3:.2g} ms less than they would have"
    sure = f"at {confidence(config.noise_sigmas):.2%} confidence"
    loses_balance = gain < -margin and -gain >= config.min_loss and bool((gains < 0).all())
    if loses_balance or _loses_time(observations, step_gain, step_margin):
        what = "imbalance" if loses_balance else "step time"
        return Judgement(outcome=Outcome.WORSE, reason=f"worse by {what} {sure}: {told}", gain=gain, step_gain_s=step_gain)
    outcome = Outcome.KEPT if gain + margin >= promised else Outcome.SMALLER
    word = "kept" if outcome is Outcome.KEPT else "smaller than promised"
    return Judgement(outcome=outcome, reason=f"{word}: {told}", gain=gain, step_gain_s=step_gain)


def _step_gain(config: ValidationConfig, observations: Sequence[Observation]) -> tuple[float | None, float]:
    """Seconds of a step saved by the clock, and the margin of noise; None when some window has no model or no time."""
    if not all(observation.expected_step_s > 0 for observation in observations):
        return None, 0.0
    saved = np.array([observation.previous_step_s - observation.step_s for observation in observations])
    seen = saved.size
    model = max(observation.step_error_s for observation in observations) / math.sqrt(seen)
    between = float(saved.std(ddof=1)) / math.sqrt(seen) if seen > 1 else 0.0
    return float(saved.mean()), config.noise_sigmas * max(model, between)


def _loses_time(observations: Sequence[Observation], step_gain: float | None, margin: float) -> bool:
    """Whether every window was slower than under the previous placement, beyond noise and beyond what its balance explains."""
    if step_gain is None or step_gain >= -margin:
        return False
    return all(
        observation.step_s > max(observation.previous_step_s, observation.expected_step_s) for observation in observations
    )


# ── what is learned from it ──────────────────────────────────────────────────────────────────────────────────────────────

PRIOR_GAIN = 0.05
"""Gain, kept in full, that a deployment is believed to have shown before anything was observed."""

FORGET = 0.8
SHARE_MIN, SHARE_MAX = 0.25, 1.25


@dataclass(frozen=True, slots=True)
class Bias:
    """How much of what was promised came true, over the generations of a deployment; the older count less.

    promised, observed: sums of gains.

    >>> Bias().after(promised=0.2, observed=0.1).share
    0.6
    """

    promised: float = 0.0
    observed: float = 0.0

    @property
    def share(self) -> float:
        """Share of a promised gain that is believed to come true: shrunk towards all of it, and bounded."""
        share = (self.observed + PRIOR_GAIN) / (self.promised + PRIOR_GAIN)
        return round(min(SHARE_MAX, max(SHARE_MIN, share)), 12)

    @property
    def value(self) -> float:
        """Predicted minus observed, as a share of what was predicted."""
        return 1.0 - self.share

    def after(self, *, promised: float, observed: float) -> Bias:
        """With one generation more. promised: as the policy's plan promised it, before any bias was taken off."""
        return Bias(FORGET * self.promised + max(0.0, promised), FORGET * self.observed + observed)


def changed_share(before: Sequence[Float64Array], now: Sequence[Float64Array]) -> float:
    """Share of the tokens that go to other experts than before, beyond sampling noise; mean over the layers of all tables.

    Each: shape (L, E), tokens. Two samples of one load differ by about sum sqrt(2 p (1 - p) / pi n): that is taken off.
    """
    moved, layers = 0.0, 0
    for first, second in zip(before, now, strict=True):
        totals = first.sum(axis=1), second.sum(axis=1)
        busy = (totals[0] > 0) & (totals[1] > 0)
        layers += first.shape[0]
        if not busy.any():
            moved += float(((totals[0] > 0) != (totals[1] > 0)).sum())
            continue
        old, new = first[busy] / totals[0][busy, None], second[busy] / totals[1][busy, None]
        pooled = (first[busy] + second[busy]) / (totals[0] + totals[1])[busy, None]
        variance = pooled * (1 - pooled) * (1 / totals[0][busy, None] + 1 / totals[1][busy, None])
        noise = np.sqrt(2 * variance / np.pi).sum(axis=1)
        moved += float(np.maximum(0.0, np.abs(old - new).sum(axis=1) - noise).sum()) / 2
    return moved / max(1, layers)
