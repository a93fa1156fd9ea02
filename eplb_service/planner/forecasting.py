"""Forecasts of one deployment's load: windows in; the load that the next plan is to be made for, and why, out.

The forecasters and their judge are pure (`forecast`, `backtest`); this keeps them for one deployment, says which windows a plan
made now would serve, puts a forecast in the place of a window, and keeps what was learned over restarts and new groups: load is
counted by expert, so other ranks change nothing of it.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

from eplb_service.backtest import BACKTESTS_MIN, SAVED_MIN, SIGMAS, Backtest, Evidence, Winner, winners
from eplb_service.forecast import (
    LAST,
    Float32Array,
    Float64Array,
    Kind,
    Layout,
    Lead,
    Present,
    TimeOfDay,
    forecasters,
    rescaled,
    rescaled_sources,
)
from eplb_service.window.report import CombinedTable, CombinedWindow, TableShape

AUTO, OFF = "auto", "off"
MODES = (AUTO, OFF, *(kind.value for kind in Kind))

LEAD_MAX = 64
"""Windows that a forecast reaches at most."""

LAST_MAX = 64
"""Windows that `last` is made of at most: they are kept."""

FOLLOW = 0.1
"""Weight of the newest gap between windows in their mean."""

STANDSTILL = 20.0
"""A gap of so many mean gaps is no window that took long: nothing was served, or nobody listened."""

LEAD_CHANGE = 1.5
"""The windows that forecasts are of change when the last of them comes so many times later or sooner."""

EXPERTS_MAX = 1 << 16
"""Most experts of a layer in a document that is to be believed."""

PROFILE_TEXT_MAX = 8 << 20
"""Largest profile that is stored, as text; a larger one is learned anew after a restart."""

ROOT_STEPS = 65_535
"""Square roots of popularity are stored in 16 bits: an expert of 1/256 to 0.05 % of that."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadForecast:
    """What the next plan is made for. popularity: shape (L, E) of each table. words: a sentence with why.

    error: mean squared distance (`backtest.score`) between such forecasts and what was seen. lead: the windows it is of.
    """

    name: str
    words: str
    error: float
    lead: Lead
    popularity: tuple[tuple[TableShape, Float64Array], ...]

    def served_after(self, index: int) -> tuple[int, int]:
        """Index of the first and last window that it is of, when it was made after window `index`."""
        return index + self.lead.first, index + self.lead.last

    def applied(self, window: CombinedWindow) -> CombinedWindow:
        """The window with this popularity, and with its own tokens, by layer and source. Tables not forecast stay."""
        known = dict(self.popularity)
        return replace(window, tables=tuple(self._applied(table, known.get(table.shape)) for table in window.tables))

    @staticmethod
    def _applied(table: CombinedTable, popularity: Float64Array | None) -> CombinedTable:
        if popularity is None:
            return table
        loads, sources = rescaled(table.loads, popularity), table.source_loads
        if sources.shape[0]:
            sources = rescaled_sources(sources, table.loads.sum(axis=0), loads.sum(axis=0))
        return CombinedTable(shape=table.shape, loads=loads, source_loads=sources)


class Forecasting:
    """What is forecast for one deployment, and whether that is to be believed.

    mode: one of MODES. num_windows: closed windows that a plan is made from. Memory: about 100 arrays of all layers by experts
    in single precision, and one for each bin of the day and each of those windows.
    """

    def __init__(self, *, mode: str, day_bins: int, num_windows: int) -> None:
        self._mode, self._day_bins = mode, day_bins
        self._shapes: tuple[TableShape, ...] = ()
        self._recent: deque[Float32Array] = deque(maxlen=min(num_windows, LAST_MAX))
        self._backtest: Backtest | None = None
        self._window_s: float | None = None
        self._at_s: float | None = None
        self._num_ranks = 1
        self._packed: dict[int, tuple[int, str]] = {}

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def group_changed(self) -> None:
        """Windows are missing, and the next ones may be served by other ranks."""
        self._at_s = None
        if self._backtest is not None:
            self._backtest.interrupted()

    def window_closed(
        self,
        tables: Sequence[tuple[TableShape, Float64Array]],
        *,
        at_s: float,
        commit_s: float,
        serve_s: float,
        num_ranks: int,
    ) -> None:
        """One more window; loads: shape (L, E) each. at_s: wall clock.

        commit_s: time from a plan to its commit. serve_s: least time that a plan serves until another may follow.
        """
        if self._mode == OFF or not tables:
            return
        shapes = tuple(shape for shape, _ in tables)
        backtest = self._backtest if shapes == self._shapes else None
        if backtest is None:
            backtest = self._begin(shapes)
        self._num_ranks = num_ranks
        self._clock(at_s, backtest)
        backtest.lead_is(self._lead(backtest.lead, commit_s, serve_s))
        tokens = backtest.layout.flatten([loads for _, loads in tables])
        backtest.closed(tokens, at_s, len(self._recent) or 1)
        for forecaster in backtest.forecasters:
            forecaster.see(tokens, at_s - (self._window_s or 0.0) / 2)
        self._recent.append(tokens)
        if backtest.wants and len(self._recent) == self._recent.maxlen:
            backtest.made(self._forecasts(backtest))

    def _begin(self, shapes: tuple[TableShape, ...]) -> Backtest:
        """Start anew for these tables."""
        layout = Layout([(len(shape.layer_ids), shape.num_logical) for shape in shapes])
        self._shapes = shapes
        self._backtest = backtest = Backtest(layout, forecasters(layout, self._day_bins))
        self._recent.clear()
        self._packed.clear()
        return backtest

    def _clock(self, at_s: float, backtest: Backtest) -> None:
        """Learn how long a window takes. Clocks that were set back, and standstills, teach nothing."""
        before, self._at_s = self._at_s, at_s
        gap_s = at_s - before if before is not None else -1.0
        if gap_s < 0:
            return
        if self._window_s is None:
            self._window_s = gap_s
        elif gap_s > STANDSTILL * max(self._window_s, 1.0):
            backtest.interrupted()
        else:
            self._window_s += FOLLOW * (gap_s - self._window_s)

    def _lead(self, current: Lead | None, commit_s: float, serve_s: float) -> Lead:
        """The windows from the commit of a plan made now until another may follow; it changes only when that does, by much."""
        window_s = max(self._window_s or 0.0, 1e-3)
        commit = min(LEAD_MAX // 2, math.ceil(commit_s / window_s)) if self._window_s else 0
        serves = min(LEAD_MAX - commit, max(1, round(serve_s / window_s))) if self._window_s else self._recent.maxlen or 1
        lead = Lead(commit + 1, commit + serves)
        if current is not None:
            ratio = lead.last / current.last
            if abs(lead.last - current.last) <= 1 or 1 / LEAD_CHANGE <= ratio <= LEAD_CHANGE:
                return current
        return lead

    def _present(self) -> Present:
        last: Float32Array = np.stack(self._recent).sum(axis=0, dtype=np.float32)
        return Present(last=last, num_windows=len(self._recent), at_s=self._at_s or 0.0, window_s=self._window_s or 0.0)

    def _forecasts(self, backtest: Backtest) -> list[Float32Array | None]:
        """`last`, then those of all forecasters."""
        lead, present = backtest.lead, self._present()
        if lead is None:
            return []
        return [
            backtest.layout.popularity(present.last),
            *(forecaster.forecast(lead, present) for forecaster in backtest.forecasters),
        ]

    # ── what follows from it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _kinds(self) -> frozenset[Kind]:
        return frozenset(Kind) if self._mode == AUTO else frozenset(kind for kind in Kind if kind.value == self._mode)

    def _winners(self) -> list[Winner]:
        backtest = self._backtest
        if backtest is None:
            return []
        return winners(backtest.forecasters, backtest.evidence, self._kinds, self._num_ranks)

    def _found(self) -> tuple[Winner, Lead, Float32Array] | None:
        """The best of the winners that have seen enough, the windows that it is asked for, and what it says of them."""
        backtest = self._backtest
        if backtest is None or backtest.lead is None or not self._recent or self._at_s is None:
            return None
        for found in self._winners():
            popularity = found.forecaster.forecast(backtest.lead, self._present())
            if popularity is not None:
                return found, backtest.lead, popularity
        return None

    def forecast(self) -> LoadForecast | None:
        """What to plan for; None: the windows as they are."""
        backtest, answer = self._backtest, self._found()
        if backtest is None or answer is None:
            return None
        found, lead, popularity = answer
        return LoadForecast(
            name=found.forecaster.name,
            words=self._words(found, lead),
            error=found.evidence.error,
            lead=lead,
            popularity=tuple(zip(self._shapes, backtest.layout.split(popularity), strict=True)),
        )

    @staticmethod
    def _words(found: Winner, lead: Lead) -> str:
        evidence = found.evidence
        return (
            f"planned for a forecast by {found.forecaster.words}, of {lead}: {evidence.less_off:.0%} less off than the last"
            f" windows, by {evidence.sigmas:.1f} standard errors over {evidence.effective:.0f} backtests"
        )

    def sentence(self) -> str:
        """Which forecast is used, and why, or why none; empty while there is nothing to say."""
        backtest = self._backtest
        if self._mode == OFF:
            return "planned from the last windows: forecasts are off (planning.forecast)"
        if backtest is None or backtest.lead is None:
            return ""
        answer, winning = self._found(), self._winners()
        if answer is not None:
            return self._words(*answer[:2])
        if winning:
            return f"planned from the last windows: {winning[0].forecaster.words} wins its backtests, but must see more windows"
        tested = [
            Winner(forecaster=forecaster, evidence=backtest.evidence[forecaster.name])
            for forecaster in backtest.forecasters
            if forecaster.kind in self._kinds and forecaster.name in backtest.evidence
        ]
        most = max((one.evidence.num for one in tested), default=0)
        if most < BACKTESTS_MIN:
            return f"planned from the last windows: {most} of {BACKTESTS_MIN} backtests of forecasts are done"
        best = max((one for one in tested if one.evidence.num >= BACKTESTS_MIN), key=lambda one: one.evidence.less_off)
        off = best.evidence.less_off
        return (
            f"planned from the last windows: no forecast is better by {SIGMAS:g} standard errors and {SAVED_MIN:g} of imbalance"
            f" (the nearest, by {best.forecaster.words}, is {abs(off):.0%} {'less' if off >= 0 else 'more'} off,"
            f" {best.evidence.sigmas:+.1f} standard errors over {best.evidence.effective:.0f} backtests)"
        )

    def less_off(self) -> dict[str, float]:
        """By how much each forecaster is less off than `last`, by name, as a share; those without backtests are left out."""
        evidence = self._backtest.evidence if self._backtest is not None else {}
        return {name: found.less_off for name, found in evidence.items() if found.weight > 0}

    def used(self) -> str:
        """Name of the forecaster that is used; `last` for none."""
        answer = self._found()
        return answer[0].forecaster.name if answer is not None else LAST

    def numbers(self) -> dict[str, float]:
        """All of it, units last."""
        backtest, used, numbers = self._backtest, self.used(), dict[str, float]()
        if backtest is None or backtest.lead is None:
            return numbers
        numbers |= {"forecast_first_windows": float(backtest.lead.first), "forecast_last_windows": float(backtest.lead.last)}
        for name, found in backtest.evidence.items():
            word = f"forecast_{name.replace('-', '_')}"
            numbers |= {
                f"{word}_used": float(name == used),
                f"{word}_less_off": found.less_off,
                f"{word}_sigmas": max(-1e9, min(1e9, found.sigmas)),
                f"{word}_saved_imbalance": found.saved(self._num_ranks),
                f"{word}_backtests": found.effective,
            }
        return numbers

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def to_json(self) -> dict[str, object] | None:
        """As plain values: the evidence and the profile of the day. Levels and trends are seen anew in a few windows."""
        backtest = self._backtest
        if backtest is None:
            return None
        return {
            "shapes": [[shape.model, list(shape.layer_ids), shape.num_logical] for shape in self._shapes],
            "lead": None if backtest.lead is None else [backtest.lead.first, backtest.lead.last],
            "window_s": self._window_s,
            "num_ranks": self._num_ranks,
            "evidence": {
                str(octave): {name: list(astuple(found)) for name, found in evidence.items()}
                for octave, evidence in sorted(backtest.by_octave.items())
                if evidence
            },
            "day": self._day_to_json(backtest),
        }

    def _day_to_json(self, backtest: Backtest) -> dict[str, object] | None:
        day = _day_of(backtest)
        if 3 * day.profile.size > PROFILE_TEXT_MAX:
            return None
        for number in np.flatnonzero(day.visits).tolist():
            visits = int(day.visits[number])
            if self._packed.get(number, (0, ""))[0] != visits:
                roots = np.rint(np.sqrt(day.profile[number]) * ROOT_STEPS).astype("<u2")
                self._packed[number] = (visits, base64.b64encode(roots.tobytes()).decode("ascii"))
        return {
            "visits": day.visits.tolist(),
            "profile": {str(number): text for number, (_, text) in sorted(self._packed.items())},
        }

    def remembered(self, tree: Any) -> Forecasting:
        """One with these settings that goes on from what `to_json` gave. Raises ValueError, TypeError or KeyError otherwise."""
        fresh = Forecasting(mode=self._mode, day_bins=self._day_bins, num_windows=self._recent.maxlen or 1)
        if tree is None or self._mode == OFF:
            return fresh
        shapes = tuple(
            TableShape(model=str(model), layer_ids=tuple(map(_whole, layers)), num_logical=_whole(experts))
            for model, layers, experts in tree["shapes"]
        )
        if not shapes or any(not shape.layer_ids or not 1 <= shape.num_logical <= EXPERTS_MAX for shape in shapes):
            raise ValueError(f"forecasts of no table, or of layers without experts or with more than {EXPERTS_MAX}")
        backtest = fresh._begin(shapes)
        for octave, evidence in dict(tree["evidence"]).items():
            if not 1 <= int(octave) <= LEAD_MAX.bit_length():
                raise ValueError(f"backtests of leads of {octave} bits")
            backtest.by_octave[int(octave)] = {
                forecaster.name: _evidence(evidence[forecaster.name])
                for forecaster in backtest.forecasters
                if forecaster.name in evidence
            }
        if tree["lead"] is not None:
            first, last = map(_whole, tree["lead"])
            if not 1 <= first <= last <= LEAD_MAX:
                raise ValueError(f"a forecast of windows {first} to {last}")
            backtest.lead = Lead(first, last)
        fresh._window_s = None if tree["window_s"] is None else _seconds(tree["window_s"])
        fresh._num_ranks = _whole(tree["num_ranks"])
        if tree["day"] is None or not _read_day(_day_of(backtest), tree["day"]):
            for evidence in backtest.by_octave.values():
                evidence.pop(Kind.TIME_OF_DAY.value, None)
        return fresh


def _day_of(backtest: Backtest) -> TimeOfDay:
    """The one forecaster with a profile."""
    return next(forecaster for forecaster in backtest.forecasters if isinstance(forecaster, TimeOfDay))


def _evidence(values: Sequence[Any]) -> Evidence:
    """What `astuple` made of it."""
    if len(values) != len(fields(Evidence)):
        raise ValueError(f"{len(values)} sums of backtests")
    num, *sums = values
    found = Evidence(_whole(num), *map(float, sums))
    if not all(map(math.isfinite, astuple(found))) or min(astuple(found)[:-1]) < 0:
        raise ValueError("a sum of backtests is not finite, or negative")
    return found


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _seconds(value: Any) -> float:
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"windows of {value} s")
    return float(value)


def _read_day(day: TimeOfDay, tree: Mapping[str, Any]) -> bool:
    """Fill a profile. Returns False, with nothing filled, when it has other bins than are wanted now."""
    visits = np.array([_whole(count) for count in tree["visits"]], np.int64)
    if visits.size != day.bins:
        return False
    if (visits < 0).any():
        raise ValueError("bins of the day that were seen less than never")
    for number in np.flatnonzero(visits).tolist():
        roots = np.frombuffer(base64.b64decode(tree["profile"][str(number)], validate=True), "<u2")
        if roots.size != day.profile.shape[1]:
            raise ValueError(f"a bin of the day has {roots.size} experts instead of {day.profile.shape[1]}")
        day.profile[number] = (roots.astype(np.float32) / ROOT_STEPS) ** 2
    day.visits[:] = visits
    return True
