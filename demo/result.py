"""What a run of the demo found: plain values, printed as a table, as JSON, and drawn in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.imbalance import Imbalance

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; the demo exits 0 only if all do."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Imbalance of one load window under what was live. seconds: since the start of serving."""

    seconds: float
    window_index: int
    generation: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same later window scored under the placement before and after a generation.

    rank_loads_before, rank_loads_after: shape (L, R), tokens. generation: the one that made the difference.
    of_prompts_before: it was planned mostly from other prompts than it then served, so it need not be better on these.
    """

    generation: int
    previous: int
    tokens: int
    layers: tuple[str, ...]
    rank_loads_before: Float64Array
    rank_loads_after: Float64Array
    of_prompts_before: bool = False

    @property
    def before(self) -> Imbalance:
        """Under the placement that was live before."""
        return Imbalance.of(self.rank_loads_before)

    @property
    def after(self) -> Imbalance:
        """Under the generation."""
        return Imbalance.of(self.rank_loads_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """One generation, as the planner recorded it, and when it was seen live. Seconds since the start of serving.

    by_operator: ordered past the gate (`eplb rollback`, `eplb rebalance --force`): it need not be a gain.
    """

    generation: int
    phase: str
    reason: str
    seconds: float
    predicted_mean: float
    predicted_worst: float
    observed_mean: float | None
    observed_worst: float | None
    moves: int
    bytes_moved: int
    rollout_s: float
    flip_boundaries: tuple[int, ...]
    state: str
    by_operator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One kind of prompts. Seconds since the start of serving."""

    kind: str
    begin_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class DemoResult:
    """Everything that a run found."""

    ranks: int
    policy: str
    seconds: float
    setup_s: float
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    generations: list[GenerationRow] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    requests: int = 0
    tokens_served: int = 0
    tokens_checked: int = 0
    token_mismatches: int = 0
    restarts: dict[str, int] = field(default_factory=dict)

    @property
    def flips(self) -> int:
        """Generations that became live on every layer while requests were served."""
        return sum(1 for row in self.generations if row.state in {"active", "superseded"})

    @property
    def passed(self) -> bool:
        """Whether every check holds (and there was at least one)."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens for each second of serving."""
        return self.tokens_served / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain values. Arrays of rank loads are left out: the report draws them."""
        return {
            "passed": self.passed,
            "tokens_checked": self.tokens_checked,
            "token_mismatches": self.token_mismatches,
            "flips": self.flips,
            "ranks": self.ranks,
            "policy": self.policy,
            "seconds": round(self.seconds, 2),
            "setup_s": round(self.setup_s, 2),
            "requests": self.requests,
            "tokens_served": self.tokens_served,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "restarts": self.restarts,
            "phases": [asdict(phase) for phase in self.phases],
            "generations": [asdict(row) for row in self.generations],
            "comparisons": [comparison_json(item) for item in self.comparisons],
            "checks": [asdict(check) for check in self.checks],
            "samples": [asdict(sample) for sample in self.samples],
        }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The gain of one generation on the same later window."""
    return {
        "generation": comparison.generation,
        "previous": comparison.previous,
        "tokens": comparison.tokens,
        "worst_before": comparison.before.worst,
        "worst_after": comparison.after.worst,
        "mean_before": comparison.before.mean,
        "mean_after": comparison.after.mean,
        "per_layer_before": list(comparison.before.per_layer),
        "per_layer_after": list(comparison.after.per_layer),
        "of_prompts_before": comparison.of_prompts_before,
    }


def relative_loads(rank_loads: Float64Array) -> Float64Array:
    """Rank loads over the layer's mean, shape (L, R); 1 everywhere is perfect balance; idle layers are 1."""
    mean = rank_loads.mean(axis=1, keepdims=True)
    return np.where(mean > 0, rank_loads / np.where(mean > 0, mean, 1.0), 1.0)


def phase_of(phases: Sequence[Phase], seconds: float) -> str:
    """Kind of prompts at a time; the last phase has no end while it runs."""
    named = [phase.kind for phase in phases if phase.begin_s <= seconds]
    return named[-1] if named else ""
