"""What is stored of forecasts: evidence of backtests, and the profile of the day in 16 bits for each expert and bin.

Readers raise ValueError, TypeError or KeyError for anything that was not written here.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

import numpy as np

from eplb_service.backtest import Backtest, Evidence
from eplb_service.forecast import Lead, TimeOfDay
from eplb_service.window.report import TableShape

EXPERTS_MAX = 1 << 16
"""Most experts of a layer that is to be believed."""

PROFILE_TEXT_MAX = 8 << 20
"""Largest profile that is stored, as text; a larger one is learned anew after a restart."""

OCTAVE_MAX = 16
"""Bits of the longest lead that is to be believed."""

ROOT_STEPS = 65_535
"""Square roots of popularity are stored in 16 bits: an expert of 1/256 to 0.05 % of that."""


class PackedDay:
    """A profile as text. Each bin is packed again only when it changed, once a day."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[int, str]] = {}

    def pack(self, day: TimeOfDay) -> dict[str, object] | None:
        """As plain values; None where it is too large to be stored."""
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


def pack_evidence(backtest: Backtest) -> dict[str, dict[str, list[float]]]:
    """Evidence of every lead, as plain values."""
    return {
        str(octave): {name: list(astuple(found)) for name, found in evidence.items()}
        for octave, evidence in sorted(backtest.by_octave.items())
        if evidence
    }


def read_evidence(tree: Any, backtest: Backtest) -> dict[int, dict[str, Evidence]]:
    """What `pack_evidence` gave, of the forecasters that there are."""
    found: dict[int, dict[str, Evidence]] = {}
    for octave, evidence in dict(tree).items():
        if not 1 <= int(octave) <= OCTAVE_MAX:
            raise ValueError(f"backtests of leads of {octave} bits")
        found[int(octave)] = {
            forecaster.name: evidence_of(evidence[forecaster.name])
            for forecaster in backtest.forecasters
            if forecaster.name in evidence
        }
    return found


def read_lead(tree: Any, most: int) -> Lead | None:
    """A lead of at most so many windows."""
    if tree is None:
        return None
    first, last = map(whole, tree)
    if not 1 <= first <= last <= most:
        raise ValueError(f"a forecast of windows {first} to {last}")
    return Lead(first, last)


def read_shapes(tree: Any) -> tuple[TableShape, ...]:
    """Tables, at least one."""
    shapes = tuple(
        TableShape(model=str(model), layer_ids=tuple(map(whole, layers)), num_logical=whole(experts))
        for model, layers, experts in tree
    )
    if not shapes or any(not shape.layer_ids or not 1 <= shape.num_logical <= EXPERTS_MAX for shape in shapes):
        raise ValueError(f"forecasts of no table, or of layers without experts or with more than {EXPERTS_MAX}")
    return shapes


def day_of(backtest: Backtest) -> TimeOfDay:
    """The one forecaster with a profile."""
    return next(forecaster for forecaster in backtest.forecasters if isinstance(forecaster, TimeOfDay))


def evidence_of(values: Sequence[Any]) -> Evidence:
    """What `astuple` made of it."""
    if len(values) != len(fields(Evidence)):
        raise ValueError(f"{len(values)} sums of backtests")
    num, *sums = values
    found = Evidence(whole(num), *map(float, sums))
    if not all(map(math.isfinite, astuple(found))) or min(astuple(found)[:-1]) < 0:
        raise ValueError("a sum of backtests is not finite, or negative")
    return found


def whole(value: Any) -> int:
    """A count."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def seconds(value: Any) -> float:
    """A time."""
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"windows of {value} s")
    return float(value)


def read_day(day: TimeOfDay, tree: Mapping[str, Any]) -> bool:
    """Fill a profile. Returns False, with nothing filled, when it has other bins than are wanted now."""
    visits = np.array([whole(count) for count in tree["visits"]], np.int64)
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
