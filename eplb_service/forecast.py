"""Forecasts of expert load: each layer's popularity in the windows that the next plan will serve.

Popularity is a layer's share of tokens by expert. Every forecaster sees each closed window once and is asked, at any time, for
the mean popularity of windows `Lead.first` to `Lead.last` from now. None is believed by itself: `backtest` says whether one of
them has been better, on this deployment, than taking the windows that a plan is made from as they are (`last`).

- `Average`: tokens of all windows, older ones decayed by half every few windows. Wins where windows are small and noisy.
- `Trend`: Brown's double exponential smoothing (Brown 1959), damped, of the square roots of popularity. Square roots of
  multinomial shares have one variance whatever the share, and the square of whatever is extrapolated is a share again.
- `TimeOfDay`: popularity by bins of the day, averaged over days, and most of what the present is off its own bin.

All layers of all tables lie in one flat array (`Layout`), in single precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

DAY_S = 86_400.0

AVERAGE_HALF_LIVES = (4, 16, 64)
TREND_HALF_LIVES = (8, 32)
"""In windows."""

TREND_WARM = 3
"""Half-lives that a trend must have seen."""

DAMPED = 4
"""Half-lives of a trend after which it is taken to have slowed to half."""

NEWEST_DAY = 0.3
"""Least weight of a day in the profile: what was seen three days ago counts a third of what was seen today."""

BLEND = 0.75
"""Share of what the present is off its own time of day that is taken to last."""

TIMES_MAX = 8
"""Times at which the profile is looked up for one forecast."""

PROFILE_BYTES_MAX = 64 << 20
"""Most memory of a profile; it has fewer bins where tables are so large that it would take more."""


class Kind(StrEnum):
    """What a forecaster goes by."""

    EWMA = "ewma"
    TREND = "trend"
    TIME_OF_DAY = "time-of-day"


@dataclass(frozen=True, slots=True)
class Lead:
    """Windows that a plan made now will serve, counted from now: first = 1 is the next one. first <= last."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"window {self.first} from now" if self.first == self.last else f"windows {self.first} to {self.last} from now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """What a forecast starts from. last: tokens of the windows that a plan is made from, flat; they are `num_windows`.

    at_s: when the newest of them closed, wall clock; window_s: time between two windows.
    """

    last: Float32Array
    num_windows: int
    at_s: float
    window_s: float


class Layout:
    """Where the layers of some tables lie in a flat array. shapes: (L, E) of each table; size: cells of a flat array.

    >>> Layout([(1, 2)]).popularity(np.array([1, 3], np.float32)).tolist()
    [0.25, 0.75]
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.shapes = tuple(shapes)
        self.size = sum(layers * experts for layers, experts in self.shapes)
        self._widths = np.repeat([experts for _, experts in self.shapes], [layers for layers, _ in self.shapes])
        self._begins = np.cumsum(self._widths) - self._widths

    def flatten(self, tables: Sequence[Float64Array]) -> Float32Array:
        """Tables of shape (L, E), one after another."""
        return np.concatenate([table.ravel() for table in tables]).astype(np.float32)

    def split(self, flat: Float32Array) -> tuple[Float64Array, ...]:
        """What `flatten` was given, in double precision."""
        parts = np.split(flat, np.cumsum([layers * experts for layers, experts in self.shapes])[:-1])
        return tuple(part.reshape(shape).astype(np.float64) for part, shape in zip(parts, self.shapes, strict=True))

    def sums(self, flat: Float32Array) -> Float64Array:
        """Sum of each layer, in double precision."""
        result: Float64Array = np.add.reduceat(flat, self._begins, dtype=np.float64)
        return result

    def popularity(self, flat: Float32Array) -> Float32Array:
        """Shares of each layer's sum; 0 throughout a layer whose sum is 0."""
        sums = self.sums(flat)
        scale = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums > 0)
        return flat * np.repeat(scale.astype(np.float32), self._widths)

    def known(self, flat: Float32Array) -> npt.NDArray[np.bool_]:
        """Cells of layers whose sum is not 0."""
        return np.repeat(self.sums(flat) > 0, self._widths)


class Forecaster(Protocol):
    """One way to forecast. name: for programs; words: for people, after "planned for"."""

    kind: Kind
    name: str
    words: str

    def see(self, tokens: Float32Array, at_s: float) -> None:
        """A window closed: its tokens, flat, and when its middle was, on the wall clock."""
        ...

    def forecast(self, lead: Lead, present: Present) -> Float32Array | None:
        """Mean popularity over the windows ahead, flat; None while too little was seen. A layer not known is 0."""
        ...


class Average:
    """Decayed sum of tokens. Memory: one flat array."""

    kind = Kind.EWMA

    def __init__(self, layout: Layout, half_life: int) -> None:
        self.name, self.words = f"{self.kind.value}-{half_life}", f"a mean that halves in {half_life} windows"
        self._layout, self._half_life = layout, half_life
        self._keep = np.float32(0.5 ** (1.0 / half_life))
        self._sum = np.zeros(layout.size, np.float32)
        self._num_seen = 0

    def see(self, tokens: Float32Array, at_s: float) -> None:  # noqa: ARG002  # windows are its clock
        """See `Forecaster.see`."""
        self._sum *= self._keep
        self._sum += tokens
        self._num_seen += 1

    def forecast(self, lead: Lead, present: Present) -> Float32Array | None:  # noqa: ARG002  # the same however far ahead
        """See `Forecaster.forecast`."""
        return self._layout.popularity(self._sum) if self._num_seen >= self._half_life else None


class Trend:
    """Damped linear trend of the square roots of popularity. Memory: two flat arrays."""

    kind = Kind.TREND

    def __init__(self, layout: Layout, half_life: int) -> None:
        self.name, self.words = f"{self.kind.value}-{half_life}", f"a trend over {half_life} windows"
        self._layout, self._half_life = layout, half_life
        self._gain = np.float32(1.0 - 0.5 ** (1.0 / half_life))
        self._once = np.zeros(layout.size, np.float32)
        self._twice = np.zeros(layout.size, np.float32)
        self._num_seen = 0

    def see(self, tokens: Float32Array, at_s: float) -> None:  # noqa: ARG002  # windows are its clock
        """See `Forecaster.see`. Layers without tokens stay as they are."""
        roots, busy = np.sqrt(self._layout.popularity(tokens)), self._layout.known(tokens)
        new = busy & ~self._layout.known(self._once)
        gain = np.where(busy, self._gain, np.float32(0))
        self._once += gain * (roots - self._once)
        self._twice += gain * (self._once - self._twice)
        self._once[new] = self._twice[new] = roots[new]
        self._num_seen += 1

    def forecast(self, lead: Lead, present: Present) -> Float32Array | None:  # noqa: ARG002  # from what it saw itself
        """See `Forecaster.forecast`."""
        if self._num_seen < TREND_WARM * self._half_life:
            return None
        slope = (self._once - self._twice) * (self._gain / (1 - self._gain))
        roots = 2 * self._once - self._twice + slope * np.float32(self._steps(lead))
        return self._layout.popularity(np.maximum(roots, 0) ** 2)

    def _steps(self, lead: Lead) -> float:
        """Windows of undamped trend that the mean over the windows ahead is away."""
        keep = 0.5 ** (1.0 / (DAMPED * self._half_life))
        reached = np.cumsum(keep ** np.arange(1, lead.last + 1))
        return float(reached[lead.first - 1 :].mean())


class TimeOfDay:
    """Popularity by bins of the day (UTC), a mean over days in which newer ones count more. Memory: `bins` + 1 flat arrays."""

    kind = Kind.TIME_OF_DAY

    def __init__(self, layout: Layout, bins: int) -> None:
        self.name, self.words = self.kind.value, "the time of day"
        self.bins = max(1, min(bins, PROFILE_BYTES_MAX // (4 * max(1, layout.size))))
        self.profile = np.zeros((self.bins, layout.size), np.float32)
        """Popularity of each bin."""
        self.visits = np.zeros(self.bins, np.int64)
        """Days that each bin holds."""
        self._layout = layout
        self._tokens = np.zeros(layout.size, np.float32)
        self._visit: int | None = None
        """The bin that is being counted: bins since 1970."""

    def _number(self, at_s: float) -> int:
        return int(at_s * self.bins // DAY_S)

    def see(self, tokens: Float32Array, at_s: float) -> None:
        """See `Forecaster.see`. A bin enters the profile when the next one begins."""
        number = self._number(at_s)
        if self._visit is not None and number != self._visit:
            self._enter(self._visit % self.bins)
        self._visit = number
        self._tokens += tokens

    def _enter(self, bin_index: int) -> None:
        """Take the bin that was counted up into the profile."""
        seen, was = self._layout.popularity(self._tokens), self.profile[bin_index]
        busy, new = self._layout.known(self._tokens), ~self._layout.known(was)
        weight = np.float32(max(NEWEST_DAY, 1.0 / (int(self.visits[bin_index]) + 1)))
        self.profile[bin_index] = np.where(busy, np.where(new, seen, was + weight * (seen - was)), was)
        self.visits[bin_index] += 1
        self._tokens[:] = 0

    def forecast(self, lead: Lead, present: Present) -> Float32Array | None:
        """See `Forecaster.forecast`. None until all the bins it needs were seen on an earlier day."""
        ahead = self._mean_of(present, np.linspace(lead.first, lead.last, min(TIMES_MAX, lead.last - lead.first + 1)))
        now = self._mean_of(present, np.linspace(1 - present.num_windows, 0, min(TIMES_MAX, present.num_windows)))
        if ahead is None or now is None:
            return None
        last = self._layout.popularity(present.last)
        roots = np.sqrt(ahead) + np.float32(BLEND) * (np.sqrt(last) - np.sqrt(now))
        shifted = self._layout.popularity(np.maximum(roots, 0) ** 2)
        usable = self._layout.known(ahead) & self._layout.known(now) & self._layout.known(last)
        return np.where(usable, shifted, last)

    def _mean_of(self, present: Present, windows: Float64Array) -> Float32Array | None:
        """Mean of the profile over the middles of some windows, counted from now."""
        at_s = present.at_s + (windows - 0.5) * present.window_s
        bins = [self._number(float(time_s)) % self.bins for time_s in at_s]
        if not all(self.visits[bin_index] for bin_index in bins):
            return None
        found: Float32Array = self.profile[bins].mean(axis=0, dtype=np.float32)
        return found


LAST = "last"
NAMES = (
    LAST,
    *(f"{Kind.EWMA.value}-{half_life}" for half_life in AVERAGE_HALF_LIVES),
    *(f"{Kind.TREND.value}-{half_life}" for half_life in TREND_HALF_LIVES),
    Kind.TIME_OF_DAY.value,
)
"""Names of all forecasters, and of none: the windows that a plan is made from as they are."""


def forecasters(layout: Layout, day_bins: int) -> tuple[Forecaster, ...]:
    """All that there are, in a fixed order. Memory: day_bins + 8 flat arrays."""
    return (
        *(Average(layout, half_life) for half_life in AVERAGE_HALF_LIVES),
        *(Trend(layout, half_life) for half_life in TREND_HALF_LIVES),
        TimeOfDay(layout, day_bins),
    )


# ── what follows from a forecast ─────────────────────────────────────────────────────────────────────────────────────────


def rescaled(loads: Float64Array, popularity: Float64Array) -> Float64Array:
    """A series of windows with this popularity and its own tokens. Loads: shape (W, L, E); popularity: shape (L, E).

    Each expert's series keeps its shape over time, and each layer its total. An expert that was not seen at all gets its tokens
    as the layer's come. Layers without tokens, or of unknown popularity, stay as they are.
    """
    total = loads.sum(axis=0)
    by_layer = total.sum(axis=1, keepdims=True)
    wanted = np.where((by_layer > 0) & (popularity.sum(axis=1, keepdims=True) > 0), popularity * by_layer, total)
    factor = np.divide(wanted, total, out=np.zeros_like(total), where=total > 0)
    unseen = np.where(total > 0, 0.0, wanted)
    in_time = np.divide(loads.sum(axis=2), by_layer[:, 0], out=np.zeros(loads.shape[:2]), where=by_layer[:, 0] > 0)
    result: Float64Array = loads * factor + in_time[:, :, None] * unseen
    return result


def rescaled_sources(sources: Float64Array, before: Float64Array, after: Float64Array) -> Float64Array:
    """Tokens by source as they must be for loads that went from `before` to `after`. Sources: shape (S, L, E); both: (L, E).

    An expert that was not seen at all gets its tokens from where the layer's come.
    """
    factor = np.divide(after, before, out=np.zeros_like(before), where=before > 0)
    by_source = sources.sum(axis=2)
    whole = by_source.sum(axis=0)
    origin = np.divide(by_source, whole, out=np.zeros_like(by_source), where=whole > 0)
    result: Float64Array = sources * factor + origin[:, :, None] * np.where(before > 0, 0.0, after)
    return result
