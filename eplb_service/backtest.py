"""Whether a forecaster has been better, on this deployment, than the windows that a plan is made from as they are.

Every few windows each forecaster says what it expects of the windows that a plan made then would serve. When those have
closed, it is scored on what was seen in them, side by side with `last`.

*Score.* The squared distance between forecast and seen popularity, summed over experts, mean over layers weighted by tokens.
A rank's load under a plan that balances the forecast is off its fair share by a sum of such differences over the experts that
it holds; over R ranks the busiest is off by about sqrt(2 R ln R x score). Sampling noise of the window that was seen adds the
same to every score, so it is not in the differences.

*Confidence.* Forecasts of neighbouring windows share most of what they are scored on. So scores are averaged over batches as
long as one forecast spans (the windows behind it and those ahead), and the standard error is taken between batches, with what
neighbouring ones still have in common (triangular weights of overlap: a quarter) added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from eplb_service.forecast import DAY_S, Float32Array, Forecaster, Kind, Layout, Lead

BACKTESTS_MIN = 16
"""Fewer batches say too little of how much they differ."""

SIGMAS = 3.0

OVERLAP = 1.5
"""Variance of a mean of batches that overlap, over that of batches that do not: 1 + 2/4."""

LESS_OFF_MIN = 0.05
"""A forecaster must be off by so much less, as a share of what `last` is off …"""

SAVED_MIN = 0.01
"""… and save so much imbalance (see the module): the least gain that the gate moves for, as it is set by default."""

PENDING_MAX = 8
"""Forecasts under way at once, about: with long leads not every window is forecast from."""

BATCHES_HALF = 32.0
RECENT_HALF = 4.0
DAYS_HALF, RECENT_DAYS_HALF = 4.0, 1.0
"""After so many batches (of the time of day: days) what was found counts half; over all of it, and of late."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Decayed sums over batches of one forecaster. num: batches that were ever added.

    own, last: scores; gain: last - own; gain_sq: squares of that. recent_*: the same, forgotten sooner.
    """

    num: int = 0
    weight: float = 0.0
    weight_sq: float = 0.0
    own: float = 0.0
    last: float = 0.0
    gain_sq: float = 0.0
    recent_gain: float = 0.0

    def plus(self, *, own: float, last: float, keep: float, keep_recent: float) -> Evidence:
        """With one batch more. keep: weight of what was before, and of what was before of late."""
        gain = last - own
        return Evidence(
            num=self.num + 1,
            weight=keep * self.weight + 1.0,
            weight_sq=keep * keep * self.weight_sq + 1.0,
            own=keep * self.own + own,
            last=keep * self.last + last,
            gain_sq=keep * self.gain_sq + gain * gain,
            recent_gain=keep_recent * self.recent_gain + gain,
        )

    @property
    def gain(self) -> float:
        """Mean fall of the score against `last`."""
        return (self.last - self.own) / self.weight if self.weight > 0 else 0.0

    @property
    def error(self) -> float:
        """Its mean score: how far off it was, squared."""
        return self.own / self.weight if self.weight > 0 else 0.0

    @property
    def less_off(self) -> float:
        """By how much less it is off than `last`, as a share of that; the root of the mean square of either."""
        return 1.0 - math.sqrt(self.own / self.last) if self.last > 0 else 0.0

    @property
    def effective(self) -> float:
        """Batches that count."""
        return self.weight**2 / self.weight_sq if self.weight_sq > 0 else 0.0

    @property
    def sigmas(self) -> float:
        """Standard errors that the gain stands above nothing."""
        count = self.effective
        if count <= 1 or self.gain == 0:
            return 0.0
        variance = max(0.0, self.gain_sq / self.weight - self.gain**2) * count / (count - 1)
        error = math.sqrt(variance * OVERLAP / count)
        return self.gain / error if error > 0 else math.copysign(math.inf, self.gain)

    def saved(self, num_ranks: int) -> float:
        """Imbalance that is saved, about: what is off adds up by squares."""
        return math.sqrt(max(0.0, 2.0 * num_ranks * math.log(max(1, num_ranks)) * self.gain))

    def wins(self, num_ranks: int) -> bool:
        """Whether it is to be used: surely better than `last`, by what matters, and of late too."""
        return (
            self.num >= BACKTESTS_MIN
            and self.sigmas >= SIGMAS
            and self.recent_gain > 0
            and self.less_off >= LESS_OFF_MIN
            and self.saved(num_ranks) >= SAVED_MIN
        )


def score(forecasts: Sequence[Float32Array | None], seen: Float32Array, layout: Layout) -> list[float | None]:
    """Score of each forecast (see the module); None where there is none. The first is `last`.

    Layers that are not known to all forecasts, or counted nothing, are left out; all None when that leaves none.
    """
    tokens = layout.sums(seen)
    for forecast in forecasts:
        if forecast is not None:
            tokens = np.where(layout.sums(forecast) > 0, tokens, 0.0)
    if tokens.sum() <= 0:
        return [None] * len(forecasts)
    popularity = layout.popularity(seen)
    weights = tokens / tokens.sum()
    return [
        None if forecast is None else float((layout.sums((forecast - popularity) ** 2) * weights).sum())
        for forecast in forecasts
    ]


@dataclass(slots=True)
class _Pending:
    """Forecasts that wait for what they are of: windows `first` to `last` by the backtest's own count."""

    forecasts: list[Float32Array | None]
    first: int
    last: int
    seen: Float32Array


@dataclass(slots=True)
class _Batch:
    """Scores of one batch. begin: window that its first forecast was made after. sums: (num, own, last) of each forecaster."""

    begin: int
    sums: list[tuple[int, float, float]]


@dataclass(slots=True)
class Backtest:
    """Scores forecasters as windows close. by_octave: evidence by name, for leads within a factor of two apart.

    A forecast of the next window says little of one of the fiftieth, and a deployment whose windows take longer by night than
    by day must not forget either. Memory: about PENDING_MAX x (forecasters + 2) flat arrays.
    """

    layout: Layout
    forecasters: tuple[Forecaster, ...]
    by_octave: dict[int, dict[str, Evidence]] = field(default_factory=dict)
    lead: Lead | None = None
    _pending: list[_Pending] = field(default_factory=list)
    _batch: _Batch | None = None
    _batch_at_s: float | None = None
    _now: int = 0
    _next: int = 0

    def interrupted(self) -> None:
        """Windows are missing: what waits for them is dropped."""
        self._pending.clear()
        self._batch, self._batch_at_s, self._next = None, None, self._now

    @property
    def evidence(self) -> dict[str, Evidence]:
        """By name, for the present lead."""
        octave = self.lead.last.bit_length() if self.lead is not None else 0
        return self.by_octave.setdefault(octave, {})

    def lead_is(self, lead: Lead) -> None:
        """Plans serve these windows now."""
        if lead != self.lead:
            self.lead = lead
            self.interrupted()

    def closed(self, tokens: Float32Array, at_s: float, num_windows: int) -> None:
        """A window closed; the forecasters have not seen it yet. at_s: wall clock. num_windows: that a plan is made from."""
        self._now += 1
        for pending in self._pending:
            if pending.first <= self._now:
                pending.seen += tokens
        while self._pending and self._pending[0].last <= self._now:
            self._scored(self._pending.pop(0), at_s, num_windows)

    def _scored(self, pending: _Pending, at_s: float, num_windows: int) -> None:
        lead = self.lead
        scores = score(pending.forecasts, pending.seen, self.layout)
        last = scores[0]
        if last is None or lead is None:
            return
        made = pending.last - lead.last
        if self._batch is not None and made >= self._batch.begin + num_windows + lead.last:
            self._close(self._batch, at_s)
            self._batch = None
        if self._batch is None:
            self._batch = _Batch(made, [(0, 0.0, 0.0)] * len(self.forecasters))
        for number, own in enumerate(scores[1:]):
            if own is not None:
                count, owns, lasts = self._batch.sums[number]
                self._batch.sums[number] = (count + 1, owns + own, lasts + last)

    def _close(self, batch: _Batch, at_s: float) -> None:
        """Take the batch up; one that began after an interruption is as good as any."""
        days = 0.0 if self._batch_at_s is None else max(0.0, at_s - self._batch_at_s) / DAY_S
        self._batch_at_s = at_s
        for forecaster, (count, own, last) in zip(self.forecasters, batch.sums, strict=True):
            if count == 0:
                continue
            ages = (1.0, BATCHES_HALF, RECENT_HALF)
            if forecaster.kind is Kind.TIME_OF_DAY:
                ages = (days, DAYS_HALF, RECENT_DAYS_HALF)
            age, half, recent = ages
            self.evidence[forecaster.name] = self.evidence.get(forecaster.name, Evidence()).plus(
                own=own / count, last=last / count, keep=0.5 ** (age / half), keep_recent=0.5 ** (age / recent)
            )

    def made(self, forecasts: Sequence[Float32Array | None]) -> None:
        """What `last` and every forecaster say after this window."""
        lead = self.lead
        if lead is None:
            return
        self._pending.append(
            _Pending(list(forecasts), self._now + lead.first, self._now + lead.last, np.zeros(self.layout.size, np.float32))
        )
        self._next = self._now + math.ceil(lead.last / PENDING_MAX)

    @property
    def wants(self) -> bool:
        """Whether forecasts are to be made after this window."""
        return self.lead is not None and self._now >= self._next


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """A forecaster that may be used, and what speaks for it."""

    forecaster: Forecaster
    evidence: Evidence


def winners(
    forecasters: Sequence[Forecaster], evidence: Mapping[str, Evidence], kinds: frozenset[Kind], num_ranks: int
) -> list[Winner]:
    """The forecasters of these kinds that win, by what they gain, most first."""
    winning = [
        Winner(forecaster=forecaster, evidence=evidence[forecaster.name])
        for forecaster in forecasters
        if forecaster.kind in kinds and forecaster.name in evidence and evidence[forecaster.name].wins(num_ranks)
    ]
    return sorted(winning, key=lambda found: -found.evidence.gain)
