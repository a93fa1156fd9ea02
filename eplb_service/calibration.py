"""What an imbalanced step costs, learned from the deployment itself: step time against the load of its busiest ranks.

    step time = a + b x (busiest ranks' load) + c x (all ranks' load)

`b` is what one token more on the busiest rank of a layer costs; `c` is what a token costs wherever it is served (attention,
dense layers). While imbalance hardly changes, the two loads rise and fall together and `b` cannot be told from `c`; then the
step time is regressed on the busiest ranks' load alone, which may claim too much, until imbalance itself has changed, as it
does with the first move. The fit is robust (Huber's weights: a window with a pause in it does not bend the line), memory is
bounded, and a fit that is not good enough to price a move is not used, with the reason.

Rates of the links, stalls of flips and interference are learned from rollouts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from eplb_service.flip_stall import Stalls

Float64Array = npt.NDArray[np.float64]

SAMPLES_MAX = 256
SAMPLES_MIN = 12
"""Fewer windows say too little of the noise in step times."""

SPREAD_MIN = 0.01
"""The load must vary by at least this (standard deviation over mean) for its effect to be seen."""

RELATIVE_ERROR_MAX = 0.25
"""A slope whose standard error is larger than this share of it is not used: four standard errors clear of nothing."""

HUBER = 1.345
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class StepSample:
    """One window: mean step time in seconds, and what one step served, in tokens summed over layers.

    busiest: load of each layer's busiest rank (imbalance x mean rank load). mean: mean rank load of each layer.
    """

    seconds: float
    busiest: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """A fit that is good enough. error: standard error of seconds_per_token; residual_s: of one window's step time.

    separated: the cost of tokens as such was told from that of the busiest rank.
    """

    seconds_per_token: float
    error: float
    intercept_s: float
    per_mean_token_s: float
    residual_s: float
    r_squared: float
    num_windows: int
    separated: bool

    def predict(self, *, busiest: float, mean: float) -> float:
        """Step time in seconds."""
        return self.intercept_s + self.seconds_per_token * busiest + self.per_mean_token_s * mean

    def __str__(self) -> str:
        kind = "apart from what every token costs" if self.separated else "what every token costs included"
        return (
            f"{self.seconds_per_token * 1e6:.4g} ± {self.error * 1e6:.2g} us of step time for a token more on the busiest ranks"
            f" ({kind}; R² {self.r_squared:.2f} over {self.num_windows} windows)"
        )


@dataclass(frozen=True, slots=True)
class NotUsable:
    """Why a move cannot be priced from step times yet."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class _Fit:
    coefficients: Float64Array
    errors: Float64Array
    residual: float
    r_squared: float


def _huber(columns: Float64Array, y: Float64Array) -> _Fit | None:
    """Iteratively reweighted least squares, a fixed number of rounds. Columns: shape (n, p). None when they are collinear."""
    weights = np.ones(y.size)
    scale = np.sqrt((columns**2).mean(axis=0))
    scaled = columns / np.where(scale > 0, scale, 1.0)
    normal = scaled.T @ scaled
    solution: npt.NDArray[np.floating] = np.zeros(columns.shape[1])
    residuals = y
    for _ in range(ROUNDS):
        normal = (scaled * weights[:, None]).T @ scaled
        if np.linalg.cond(normal) > 1e10:
            return None
        solution = np.linalg.solve(normal, (scaled * weights[:, None]).T @ y)
        residuals = y - scaled @ solution
        spread = 1.4826 * float(np.median(np.abs(residuals)))
        floor = max(spread, 1e-12 * float(np.abs(y).mean()))
        weights = np.minimum(1.0, HUBER * floor / np.maximum(np.abs(residuals), 1e-300))
    freedom = max(1.0, float(weights.sum()) - columns.shape[1])
    variance = float((weights * residuals**2).sum()) / freedom
    middle = float((weights * y).sum() / weights.sum())
    total = float((weights * (y - middle) ** 2).sum())
    errors = np.sqrt(np.maximum(0.0, np.diag(np.linalg.inv(normal)) * variance))
    safe = np.where(scale > 0, scale, 1.0)
    explained = 1.0 - float((weights * residuals**2).sum()) / total if total > 0 else 0.0
    return _Fit((solution / safe).astype(np.float64), errors / safe, float(np.sqrt(variance)), explained)


def fit_step_times(samples: Iterable[StepSample]) -> StepTimeModel | NotUsable:
    """The model of some windows, or why there is none."""
    kept = [sample for sample in samples if sample.seconds > 0 and sample.busiest > 0]
    if len(kept) < SAMPLES_MIN:
        return NotUsable(f"step times of {len(kept)} windows are known, {SAMPLES_MIN} are needed")
    seconds = np.array([sample.seconds for sample in kept])
    busiest = np.array([sample.busiest for sample in kept])
    mean = np.array([sample.mean for sample in kept])
    spread = float(busiest.std() / busiest.mean())
    if spread < SPREAD_MIN:
        return NotUsable(
            f"the load of the busiest ranks varied by {spread:.2%} over {len(kept)} windows, {SPREAD_MIN:.0%} is needed to see"
            " what it costs"
        )
    ones = np.ones(seconds.size)
    alone = _huber(np.stack([ones, busiest], axis=1), seconds)
    both = _huber(np.stack([ones, busiest, mean], axis=1), seconds)
    if alone is None:
        return NotUsable("the load of the busiest ranks hardly varied")
    slope, error = float(alone.coefficients[1]), float(alone.errors[1])
    if both is not None and float(both.errors[1]) <= RELATIVE_ERROR_MAX * abs(slope):
        # Imbalance varied enough to tell the two apart: whatever it says, believe it.
        slope, error = float(both.coefficients[1]), float(both.errors[1])
        chosen, per_mean, separated = both, float(both.coefficients[2]), True
    else:
        chosen, per_mean, separated = alone, 0.0, False
    if slope <= 0 or error > RELATIVE_ERROR_MAX * slope:
        return NotUsable(
            f"step times do not follow the load of the busiest ranks: {slope * 1e6:.3g} ± {error * 1e6:.2g} us a token"
            f" (R² {chosen.r_squared:.2f} over {len(kept)} windows)"
        )
    return StepTimeModel(
        seconds_per_token=slope,
        error=error,
        intercept_s=float(chosen.coefficients[0]),
        per_mean_token_s=per_mean,
        residual_s=chosen.residual,
        r_squared=chosen.r_squared,
        num_windows=len(kept),
        separated=separated,
    )


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

FORGET = 0.97
"""Weight of a transfer after the next one: the last 30 or so count."""

TRANSFER_BYTES_MIN = 1 << 16
"""Less than this measures latency, not bandwidth."""


@dataclass(slots=True)
class LinkRates:
    """Seconds for each byte from the same node and from others: least squares over what ranks received, old ones forgotten.

    Bytes from other nodes are those of a NIC where ranks share NICs (`NicTransfers`), and the rate across is that of a NIC.

    moments: sums of within x within, within x across, across x across, within x time, across x time; within and across are
    shares of what a rank received, time is in seconds for each byte.
    """

    moments: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, *, same_node: int, cross_node: int, seconds: float) -> None:
        """A rank received so many bytes in this time."""
        if same_node + cross_node < TRANSFER_BYTES_MIN or not 0 < seconds < float("inf"):
            return
        total = same_node + cross_node  # seconds for each byte: a rank that received much is not much truer
        within, across, time = same_node / total, cross_node / total, seconds / total
        new = (within * within, within * across, across * across, within * time, across * time)
        self.moments = [FORGET * old + value for old, value in zip(self.moments, new, strict=True)]

    def rates(self) -> tuple[float | None, float | None]:
        """Bytes per second within a node, and across; None for what was not seen, or cannot be told apart."""
        ww, wa, aa, wt, at = self.moments
        determinant = ww * aa - wa * wa
        if ww > 0 and aa > 0 and determinant > 1e-6 * ww * aa:
            within, across = (wt * aa - at * wa) / determinant, (at * ww - wt * wa) / determinant
            if within > 0 and across > 0:
                return 1 / within, 1 / across
        # One kind only, or the two always in one proportion: a rate for both kinds together.
        if ww <= 0 and aa <= 0:
            return None, None
        if aa <= 0:
            return ww / wt, None
        if ww <= 0:
            return None, aa / at
        together = (ww + 2 * wa + aa) / (wt + at)
        return together, together


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was received in one chunk: bytes from the own node and from others, and seconds until all of it was there."""

    same_node: int
    cross_node: int
    seconds: float


@dataclass(slots=True)
class NicTransfers:
    """What ranks received, put together by the NICs that they share: the rate of a NIC is measured, not a rank's part of it.

    Ranks behind one NIC receive at the same time, and each waits for as long as all of their bytes take: the bytes of one for
    that time would be a part of the rate, and all of them one after another would count the time several times. So a NIC
    counts once a chunk, when the last of its ranks has told: bytes from other nodes of them all, with the time, and the bytes
    from the own node, of the slowest that received any. Ranks that received from their own node alone count by themselves. A
    NIC of which a rank does not tell before the next chunk is not counted.
    """

    _chunk_id: int = -1
    _told: dict[int, Transfer] = field(default_factory=dict)

    def add(self, chunk_id: int, position: int, transfer: Transfer, nic_of: Sequence[int]) -> tuple[Transfer, ...]:
        """The rank at this position told; what can be counted now. nic_of: see `Topology.nic_indices`. Repeats are dropped."""
        if chunk_id > self._chunk_id:
            self._chunk_id, self._told = chunk_id, {}
        if chunk_id < self._chunk_id or position in self._told:
            return ()
        self._told[position] = transfer
        counted = [] if transfer.cross_node else [transfer]
        sharing = [other for other, nic in enumerate(nic_of) if nic == nic_of[position]]
        if all(other in self._told for other in sharing):
            crossing = [self._told[other] for other in sharing if self._told[other].cross_node]
            if crossing:
                slowest = max(crossing, key=lambda told: told.seconds)
                counted.append(replace(slowest, cross_node=sum(told.cross_node for told in crossing)))
        return tuple(counted)


@dataclass(slots=True)
class Recent:
    """The last few values of something, and their mean."""

    kept: int = 64
    values: deque[float] = field(default_factory=deque)

    def add(self, value: float) -> None:
        """One more; the oldest beyond `kept` goes."""
        if 0 <= value < float("inf"):
            self.values.append(value)
        while len(self.values) > self.kept:
            self.values.popleft()

    def mean(self, at_least: int = 1) -> float | None:
        """None while there are fewer values."""
        return sum(self.values) / len(self.values) if len(self.values) >= at_least else None


INTERFERENCE_SAMPLES_MIN = 3


@dataclass(slots=True)
class Learned:
    """All that is learned of what steps and rollouts cost."""

    steps: deque[StepSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    links: LinkRates = field(default_factory=LinkRates)
    stalls: Stalls = field(default_factory=Stalls)
    interference: Recent = field(default_factory=Recent)
    _fitted: StepTimeModel | NotUsable | None = None

    def step(self, sample: StepSample) -> None:
        """A window without copies under way."""
        self.steps.append(sample)
        self._fitted = None

    def step_while_copying(self, sample: StepSample) -> None:
        """A window during which weights were copied: how much longer its steps took than they would have."""
        model = self.model()
        if isinstance(model, StepTimeModel) and sample.seconds > 0:
            expected = model.predict(busiest=sample.busiest, mean=sample.mean)
            self.interference.add(min(1.0, max(0.0, 1.0 - expected / sample.seconds)))

    def model(self) -> StepTimeModel | NotUsable:
        """The fit of the windows so far."""
        if self._fitted is None:
            self._fitted = fit_step_times(self.steps)
        return self._fitted

    def to_json(self) -> dict[str, object]:
        """As plain values, for the store."""
        return {
            "steps": [[sample.seconds, sample.busiest, sample.mean] for sample in self.steps],
            "links": self.links.moments,
            "stalls": {str(chunk): seconds for chunk, seconds in self.stalls.chunks.items()},
            "stall_bytes": {str(chunk): size for chunk, size in self.stalls.staged_bytes.items()},
            "interference": list(self.interference.values),
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, object]) -> Learned:
        """What `to_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        learned = cls()
        for sample in _list(tree["steps"]):
            seconds, busiest, mean = map(_number, _list(sample))
            learned.steps.append(StepSample(seconds, busiest, mean))
        moments = [_number(value) for value in _list(tree["links"])]
        if len(moments) != len(learned.links.moments):
            raise ValueError(f"{len(moments)} moments of link rates")
        learned.links.moments = moments
        stalls, sizes = tree["stalls"], tree.get("stall_bytes", {})  # the second was added later
        if not isinstance(stalls, dict) or not isinstance(sizes, dict):
            raise TypeError("stalls are no map")
        for chunk, seconds in stalls.items():
            size = sizes.get(chunk)
            learned.stalls.add(int(chunk), _number(seconds), None if size is None else int(_number(size)))
        for value in _list(tree["interference"]):
            learned.interference.add(_number(value))
        return learned


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} instead of a list")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return float(value)
