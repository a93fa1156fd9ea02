"""Forecasts of one deployment's load: windows in; the load that the next plan is to be made for, and why, out.

The forecasters and their judge are pure (`forecast`, `backtest`); this keeps them for one deployment, says which windows a plan
made now would serve, puts a forecast in the place of a window, and keeps what was learned over restarts and new groups: load is
counted by expert, so other ranks change nothing of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eplb_service.backtest import BACKTESTS_MIN, SAVED_MIN, SIGMAS, Backtest, Winner, winners
from eplb_service.forecast import (
    LAST,
    Float32Array,
    Float64Array,
    Kind,
    Layout,
    Lead,
    Present,
    forecasters,
    rescaled,
    rescaled_sources,
)
from eplb_service.planner.forecast_document import (
    PackedDay,
    day_of,
    pack_evidence,
    read_day,
    read_evidence,
    read_lead,
    read_shapes,
    seconds,
    whole,
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
        self._packed_day = PackedDay()

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
        self._packed_day = PackedDay()
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
            "evidence": pack_evidence(backtest),
            "day": self._packed_day.pack(day_of(backtest)),
        }

    def remembered(self, tree: Any) -> Forecasting:
        """One with these settings that goes on from what `to_json` gave. Raises ValueError, TypeError or KeyError otherwise."""
        fresh = Forecasting(mode=self._mode, day_bins=self._day_bins, num_windows=self._recent.maxlen or 1)
        if tree is None or self._mode == OFF:
            return fresh
        backtest = fresh._begin(read_shapes(tree["shapes"]))
        backtest.by_octave = read_evidence(tree["evidence"], backtest)
        backtest.lead = read_lead(tree["lead"], LEAD_MAX)
        fresh._window_s = None if tree["window_s"] is None else seconds(tree["window_s"])
        fresh._num_ranks = whole(tree["num_ranks"])
        if tree["day"] is None or not read_day(day_of(backtest), tree["day"]):
            for evidence in backtest.by_octave.values():
                evidence.pop(Kind.TIME_OF_DAY.value, None)
        return fresh
