"""What the gate is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from eplb_service.costs import CostModel
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.gains import TableEvidence
from eplb_service.policy.base import FrontPoint
from eplb_service.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """When a move is worth considering.

    min_gain_mean, min_gain_worst: least fall in imbalance (mean over layers, worst layer); one of the two suffices.
    min_generation_age_s: least time since the live generation became active.
    min_coverage: least coverage of the combined window. min_tokens: least token assignments per layer, on average.
    min_sub_windows: least sub-windows that the window holds (fewer show nothing of how clumped the load is).
    min_busy_layers: least share of the layers that counted tokens at all.
    noise_sigmas: standard errors that the gain must stand clear of.
    min_return: seconds that a move must save for each second that it costs.
    """

    min_gain_mean: float = 0.01
    min_gain_worst: float = 0.05
    min_generation_age_s: float = 60.0
    min_coverage: float = 0.9
    min_tokens: int = 1000
    min_sub_windows: int = 4
    min_busy_layers: float = 0.5
    noise_sigmas: float = 3.0
    min_return: float = 1.25

    def __post_init__(self) -> None:
        for name in ("min_gain_mean", "min_gain_worst", "min_generation_age_s", "min_tokens", "noise_sigmas", "min_return"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidInputError(f"{name} must be finite and >= 0; got {getattr(self, name)}")
        for name in ("min_coverage", "min_busy_layers"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInputError(f"{name} must be between 0 and 1; got {getattr(self, name)}")
        if self.min_sub_windows < 1:
            raise InvalidInputError(f"min_sub_windows must be at least 1; got {self.min_sub_windows}")


class VerdictCode(StrEnum):
    """Why the gate said move or keep."""

    MOVE = "move"
    COVERAGE_BROKEN = "coverage_broken"
    NO_CHANGE = "no_change"
    TOO_SOON = "too_soon"
    ROLLED_BACK = "rolled_back"
    LOW_COVERAGE = "low_coverage"
    TOO_FEW_TOKENS = "too_few_tokens"
    TOO_FEW_WINDOWS = "too_few_windows"
    ODD_LOAD = "odd_load"
    GAIN_TOO_SMALL = "gain_too_small"
    WITHIN_NOISE = "within_noise"
    NO_COST_MODEL = "no_cost_model"
    COST_EXCEEDS_GAIN = "cost_exceeds_gain"
    CANNOT_ROLL_OUT = "cannot_roll_out"


CLEARED_NOISE = frozenset({VerdictCode.MOVE, VerdictCode.NO_COST_MODEL, VerdictCode.COST_EXCEEDS_GAIN})
"""Verdicts on a gain that stands clear of noise: what these placements go on to gain tells how fast the load drifts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The gate's answer. reason: one sentence with the numbers; numbers: the same, by name, units last.

    chosen: for each table the point that the answer is about, None where the table stays; empty when no point was looked at.
    gain: fall of imbalance that is believed in, mean over layers weighted by load.
    """

    move: bool
    code: VerdictCode
    reason: str
    numbers: Mapping[str, float]
    chosen: tuple[FrontPoint | None, ...] = ()
    gain: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateInputs:
    """What the gate looks at. generation_age_s: seconds since the live generation became active, None = none of ours is.

    cost: None = a move cannot be priced, for the reason `no_cost_reason`, so every verdict on a gain is keep.
    gain_share: share of a promised gain that is believed to come true. odd_load: what is wrong with the windows, if anything.
    hold: why nothing is to be moved now (after a generation that was rolled back); empty when nothing speaks against it.
    """

    tables: tuple[TableEvidence, ...]
    topology: Topology
    dispatch: Dispatch
    coverage: float
    generation_age_s: float | None
    cost: CostModel | None = None
    no_cost_reason: str = "no cost model is configured"
    gain_share: float = 1.0
    odd_load: str = ""
    hold: str = ""


def keep(code: VerdictCode, reason: str, numbers: Mapping[str, float]) -> Verdict:
    """An answer of no, with its reason."""
    return Verdict(move=False, code=code, reason=reason, numbers=numbers)
