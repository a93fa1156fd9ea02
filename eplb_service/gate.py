"""The gate: keep the live placement, or move to the proposed one, with a reason that a person can read.

The default answer is keep. A move must clear, in this order: a plan that changes something, age of the live generation,
coverage and tokens of the window, the least gain, sampling noise, and its own cost.

*Gain* is judged on the mean over layers (step time is a sum over layers) and on the worst layer. What the live placement
shows on the window is one fresh draw of the load; what the proposal shows is too good, since it was fitted to that very
window. So the proposal is scored by what it would show on a *fresh* window of the same size: the expectation of the largest of
its noisy rank loads. Without this, every window would seem to justify a new plan (a resample of the same load too).
*Noise* is multinomial per layer, widened by what the sub-windows show: clumping (tokens of one prompt go together), and for the
proposal also drift (a load that wandered within the window will not be in the next one what it was on average in this).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, imbalance_of, reachable_slots
from eplb_service.errors import InvalidInputError
from eplb_service.noise import drift_dispersion, fresh_imbalance, overdispersion, rank_moments
from eplb_service.placement import Table
from eplb_service.policy.base import Proposal
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What imbalance and moves cost, in seconds; measured by the operator or calibrated from step times.

    seconds_per_step: time of one step spent where ranks wait for the busiest, at imbalance 1 (its excess over 1 is lost time).
    horizon_steps: steps until the load is expected to drift away.
    bytes_per_s: rate at which one rank receives weights.
    copy_interference: share of serving time lost while weights are copied.
    commit_stall_s: time that one chunk's flip stops every rank.
    """

    seconds_per_step: float
    horizon_steps: int
    bytes_per_s: float
    commit_stall_s: float
    copy_interference: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "horizon_steps", "bytes_per_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidInputError(f"{name} of the cost model must be finite and > 0; got {value}")
        if not 0 <= self.commit_stall_s < float("inf") or not 0 <= self.copy_interference <= 1:
            raise InvalidInputError(
                f"commit_stall_s must be >= 0 and copy_interference between 0 and 1;"
                f" got {self.commit_stall_s} and {self.copy_interference}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """When a move is worth considering.

    min_gain_mean, min_gain_worst: least fall in imbalance (mean over layers, worst layer); one of the two suffices.
    min_generation_age_s: least time since the live generation became active.
    min_coverage: least coverage of the combined window. min_tokens: least token assignments per layer, on average.
    noise_sigmas: standard errors that the gain must stand clear of.
    cost: None = a move cannot be priced, so every verdict is keep.
    """

    min_gain_mean: float = 0.01
    min_gain_worst: float = 0.05
    min_generation_age_s: float = 60.0
    min_coverage: float = 0.9
    min_tokens: int = 1000
    noise_sigmas: float = 3.0
    cost: CostModel | None = None

    def __post_init__(self) -> None:
        for name in ("min_gain_mean", "min_gain_worst", "min_generation_age_s", "min_tokens", "noise_sigmas"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidInputError(f"{name} must be finite and >= 0; got {getattr(self, name)}")
        if not 0 <= self.min_coverage <= 1:
            raise InvalidInputError(f"min_coverage must be between 0 and 1; got {self.min_coverage}")


class VerdictCode(StrEnum):
    """Why the gate said move or keep."""

    MOVE = "move"
    COVERAGE_BROKEN = "coverage_broken"
    NO_CHANGE = "no_change"
    TOO_SOON = "too_soon"
    LOW_COVERAGE = "low_coverage"
    TOO_FEW_TOKENS = "too_few_tokens"
    GAIN_TOO_SMALL = "gain_too_small"
    WITHIN_NOISE = "within_noise"
    NO_COST_MODEL = "no_cost_model"
    COST_EXCEEDS_GAIN = "cost_exceeds_gain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The gate's answer. reason: one sentence with the numbers; numbers: the same, by name, units last."""

    move: bool
    code: VerdictCode
    reason: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEvidence:
    """One table of the deployment. loads: shape (W, L, E), tokens, the window that the proposal was made from."""

    loads: npt.NDArray[np.float64]
    current: Table
    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class GateInputs:
    """What the gate looks at. generation_age_s: seconds since the live generation became active, None = none of ours is.

    num_chunks: flips that the rollout will take.
    """

    tables: tuple[TableEvidence, ...]
    topology: Topology
    dispatch: Dispatch
    coverage: float
    generation_age_s: float | None
    num_chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gain:
    """Fall in imbalance and the noise margin that it must clear, for one aggregate (`mean` or `worst`)."""

    before: float
    after: float
    margin: float

    @property
    def value(self) -> float:
        return self.before - self.after

    def is_clear(self, minimum: float) -> bool:
        return self.value >= minimum and self.value > self.margin


PREDICTION_VARIANCE = 2.0
"""A proposal is fitted to one noisy window and scored on another one of that size: the variances of the two add up."""


def _gains(config: GateConfig, inputs: GateInputs) -> tuple[_Gain, _Gain]:
    """Gain in the mean over layers and in the worst layer."""
    before_layers: list[float] = []
    now, then = [], []
    for table in inputs.tables:
        total = table.loads.sum(axis=0)
        before_layers.extend(imbalance_of(total, table.current, inputs.topology, inputs.dispatch).per_layer)
        now.append(rank_moments(total, table.current, inputs.topology, inputs.dispatch, overdispersion(table.loads)))
        ahead = drift_dispersion(table.loads)
        means, errors = rank_moments(total, table.proposal.placement, inputs.topology, inputs.dispatch, ahead)
        then.append((means, errors * math.sqrt(PREDICTION_VARIANCE)))
    before, after = fresh_imbalance(now), fresh_imbalance(then)
    mean = _Gain(
        before=float(np.mean(before_layers)),
        after=after.mean,
        margin=config.noise_sigmas * math.hypot(before.mean_error, after.mean_error),
    )
    worst = _Gain(
        before=max(before_layers),
        after=after.worst,
        margin=config.noise_sigmas * math.hypot(before.worst_error, after.worst_error),
    )
    return mean, worst


def _keep(code: VerdictCode, reason: str, numbers: Mapping[str, float]) -> Verdict:
    return Verdict(move=False, code=code, reason=reason, numbers=numbers)


def _uncovered(inputs: GateInputs) -> tuple[int, int]:
    """(layer, expert) pairs that no serving rank holds: now, and under the proposal."""
    missing = []
    for pick in ("current", "proposal"):
        count = 0
        for table in inputs.tables:
            placement = table.current if pick == "current" else table.proposal.placement
            for row in reachable_slots(placement, inputs.topology).reshape(placement.num_layers, -1):
                count += placement.num_logical - np.unique(row[row >= 0]).size
        missing.append(count)
    return missing[0], missing[1]


def _before_gain(config: GateConfig, inputs: GateInputs) -> Verdict | None:
    """Reasons to answer before any gain is looked at."""
    experts = sum(table.proposal.moves.experts for table in inputs.tables)
    if all(table.current == table.proposal.placement for table in inputs.tables):
        return _keep(VerdictCode.NO_CHANGE, "keep: the policy proposes the placement that is live", {"moves": 0.0})
    missing_now, missing_then = _uncovered(inputs)
    if missing_then < missing_now:
        return Verdict(
            move=True,
            code=VerdictCode.COVERAGE_BROKEN,
            reason=f"move: {missing_now} experts have no serving replica, {missing_then} after {experts} moves",
            numbers={"uncovered_before": float(missing_now), "uncovered_after": float(missing_then), "moves": float(experts)},
        )
    age = inputs.generation_age_s
    if age is not None and age < config.min_generation_age_s:
        return _keep(
            VerdictCode.TOO_SOON,
            f"keep: the live generation is {age:.1f} s old, at least {config.min_generation_age_s:.1f} s must pass",
            {"generation_age_s": age, "min_generation_age_s": config.min_generation_age_s},
        )
    if inputs.coverage < config.min_coverage:
        return _keep(
            VerdictCode.LOW_COVERAGE,
            f"keep: the window covers {inputs.coverage:.0%} of ranks and steps, at least {config.min_coverage:.0%} is needed",
            {"coverage": inputs.coverage, "min_coverage": config.min_coverage},
        )
    layers = sum(table.current.num_layers for table in inputs.tables)
    per_layer = sum(float(table.loads.sum()) for table in inputs.tables) / max(1, layers)
    if per_layer < config.min_tokens or per_layer == 0:
        return _keep(
            VerdictCode.TOO_FEW_TOKENS,
            f"keep: the window holds {per_layer:.0f} token assignments a layer; {max(1, config.min_tokens)} or more are needed",
            {"tokens_per_layer": per_layer, "min_tokens": float(config.min_tokens)},
        )
    return None


def decide(config: GateConfig, inputs: GateInputs) -> Verdict:
    """Keep or move. Raises InvalidInputError when there is no table to decide on."""
    if not inputs.tables:
        raise InvalidInputError("the gate needs at least one table; the deployment has no MoE layers")
    early = _before_gain(config, inputs)
    if early is not None:
        return early
    mean, worst = _gains(config, inputs)
    numbers = {
        "imbalance_mean_before": mean.before,
        "imbalance_mean_after": mean.after,
        "imbalance_worst_before": worst.before,
        "imbalance_worst_after": worst.after,
        "noise_margin_mean": mean.margin,
        "noise_margin_worst": worst.margin,
        "moves": float(sum(table.proposal.moves.experts for table in inputs.tables)),
        "move_bytes": float(sum(table.proposal.moves.move_bytes for table in inputs.tables)),
    }
    gains = (
        f"mean over layers {mean.before:.4f} -> {mean.after:.4f} (gain {mean.value:.4f}),"
        f" worst layer {worst.before:.4f} -> {worst.after:.4f} (gain {worst.value:.4f})"
    )
    if mean.value < config.min_gain_mean and worst.value < config.min_gain_worst:
        return _keep(
            VerdictCode.GAIN_TOO_SMALL,
            f"keep: {gains}; at least {config.min_gain_mean:.4f} or {config.min_gain_worst:.4f} is wanted",
            numbers,
        )
    if not mean.is_clear(config.min_gain_mean) and not worst.is_clear(config.min_gain_worst):
        return _keep(
            VerdictCode.WITHIN_NOISE,
            f"keep: {gains}; that is within {config.noise_sigmas:g} standard errors of sampling noise"
            f" ({mean.margin:.4f} and {worst.margin:.4f})",
            numbers,
        )
    return _price(config.cost, inputs, mean, gains, numbers)


def _price(cost: CostModel | None, inputs: GateInputs, mean: _Gain, gains: str, numbers: Mapping[str, float]) -> Verdict:
    """The last question: whether the time saved until the load drifts pays for the move."""
    if cost is None:
        return _keep(
            VerdictCode.NO_COST_MODEL, f"keep: {gains}, but no cost model is configured, so the move cannot be priced", numbers
        )
    saved_s = cost.seconds_per_step * mean.value * cost.horizon_steps
    copy_s = sum(table.proposal.moves.bytes_into_busiest_rank for table in inputs.tables) / cost.bytes_per_s
    stall_s = cost.commit_stall_s * inputs.num_chunks
    cost_s = copy_s * cost.copy_interference + stall_s
    numbers = {**numbers, "saved_s": saved_s, "cost_s": cost_s, "copy_s": copy_s, "stall_s": stall_s}
    price = (
        f"it saves {saved_s:.3g} s over {cost.horizon_steps} steps and costs {cost_s:.3g} s"
        f" ({copy_s:.3g} s of copying at {cost.copy_interference:.0%} interference, {stall_s:.3g} s of stalls)"
    )
    if saved_s <= cost_s:
        return _keep(VerdictCode.COST_EXCEEDS_GAIN, f"keep: {gains}; {price}", numbers)
    return Verdict(move=True, code=VerdictCode.MOVE, reason=f"move: {gains}; {price}", numbers=numbers)
