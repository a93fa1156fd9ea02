"""Load windows: which reports are believed, and their sum over ranks and time.

Ranks of a group step in lock-step, so window k = step boundaries [kW, (k+1)W) of one group id is the same steps everywhere:
the ranks are added up by (group id, k). A report is idempotent by (rank, incarnation, group, k).

A window *closes* when every rank of its group has reported it, or when the group is LATENESS_WINDOWS further. The group is as
far as its second rank, so one rank that runs ahead closes nothing. A report for a closed window is late, and one that is far
from all others is not believed by itself (`claims`). Only closed windows are combined. Memory is bounded by windows and by
bytes: the oldest window goes first, and what goes is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from eplb_service.errors import InvalidInputError
from eplb_service.ids import GroupId, Incarnation, RankId
from eplb_service.window.claims import FAR_WINDOWS, Claims
from eplb_service.window.combined import GroupWindow, combine_windows
from eplb_service.window.report import (
    Accepted,
    Alarm,
    CombinedTable,
    CombinedWindow,
    CountBasis,
    Expected,
    LoadReport,
    Refusal,
    Refused,
    Semantics,
    TableCounts,
    TableShape,
)
from eplb_service.window.report_check import CountArray, check_identity, check_range, extract_counts, one_layer_alarm

__all__ = [
    "LATENESS_WINDOWS",
    "Accepted",
    "Alarm",
    "CombinedTable",
    "CombinedWindow",
    "CountBasis",
    "Expected",
    "LoadReport",
    "Refusal",
    "Refused",
    "Semantics",
    "TableCounts",
    "TableShape",
    "Windows",
]

LATENESS_WINDOWS = 2


@dataclass(slots=True)
class _Rank:
    """What was last taken from a rank in one life and group."""

    incarnation: Incarnation
    group_id: GroupId
    last_index: int = -1


@dataclass(slots=True)
class Windows:
    """The windows of one deployment, as a state machine: `offer` reports, `combine` what closed.

    windows_max, bytes_max: bounds on what is kept. counters: reports by outcome (`accepted` or the refusal), windows dropped
    for room by `windows_dropped`.
    """

    windows_max: int = 64
    bytes_max: int = 256 << 20
    counters: Counter[str] = field(default_factory=Counter)
    _windows: dict[tuple[GroupId, int], GroupWindow] = field(default_factory=dict)
    _ranks: dict[RankId, _Rank] = field(default_factory=dict)
    _horizon: int = 0
    _group_id: GroupId | None = None
    _group_order: int = 0
    _claims: Claims = field(default_factory=Claims)

    def __post_init__(self) -> None:
        if self.windows_max < 1 or self.bytes_max < 1:
            raise InvalidInputError(f"windows_max and bytes_max must be >= 1; got {self.windows_max} and {self.bytes_max}")

    def offer(self, report: LoadReport, expected: Expected) -> Accepted | Refused:
        """Take a report or say why not. Never raises on a bad one, which changes nothing unless it is far from all others."""
        answer = self._take(report, expected)
        self.counters["accepted" if isinstance(answer, Accepted) else answer.reason.value] += 1
        return answer

    def combine(self, num_windows: int, *, live_digest: int | None = None) -> CombinedWindow | None:
        """Sum of the last `num_windows` closed windows, None when none is closed.

        live_digest: only windows served wholly by this live vector (to compare what was predicted with what was observed).
        Windows of other tables than the newest one (the model was re-registered) are left out.
        """
        if num_windows < 1:
            raise InvalidInputError(f"num_windows must be >= 1; got {num_windows}")
        chosen = [
            window
            for window in self._in_order()
            if window.is_closed and (live_digest is None or window.live_digests == {live_digest})
        ]
        if not chosen:
            return None
        chosen = [window for window in chosen if window.shapes == chosen[-1].shapes][-num_windows:]
        return combine_windows(chosen)

    @property
    def num_kept(self) -> int:
        """Windows kept, open ones included."""
        return len(self._windows)

    @property
    def num_closed(self) -> int:
        """Closed windows that `combine` can use."""
        return sum(window.is_closed for window in self._windows.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the counts kept."""
        return sum(window.size_bytes for window in self._windows.values())

    def _in_order(self) -> list[GroupWindow]:
        """Windows by group, then by index: oldest first."""
        return sorted(self._windows.values(), key=lambda window: (window.group_order, window.window_index))

    def _take(self, report: LoadReport, expected: Expected) -> Accepted | Refused:
        refused = check_identity(report, expected) or check_range(report, expected)
        if refused is not None:
            return refused
        counts = extract_counts(report, expected)
        if isinstance(counts, Refused):
            return counts
        refused = self._check_distance(report, expected)
        refused = refused or self._check_order(report, expected, counts) or self._check_against_window(report, counts)
        if refused is not None:
            return refused
        self._enter_group(expected)
        return self._add(report, expected, counts)

    def _enter_group(self, expected: Expected) -> None:
        """A new forming of the group closes whatever the old one left open."""
        if self._group_id != expected.group_id:
            for window in self._windows.values():
                window.is_closed = True
            self._group_id, self._horizon, self._claims = expected.group_id, 0, Claims()
            self._group_order += 1

    def _check_distance(self, report: LoadReport, expected: Expected) -> Refused | None:
        """A window far from where the group is: believed, and the group with it, once enough ranks say the same."""
        k, reached = report.window_index, self._progress(expected)
        if self._group_id != expected.group_id or reached is None or not self._claims.is_far(k, reached):
            return None
        believed = self._claims.is_believed(report.rank_id, k, reached, len(expected.incarnations))
        if k > reached and not believed:
            return Refused(
                reason=Refusal.FAR_AHEAD,
                sentence=f"window {k} of rank {report.rank_id} is {k - reached} windows ahead of its group, which is at"
                f" {reached}; more than {FAR_WINDOWS} are believed once another rank reports the same",
            )
        if k < reached and believed:
            self._go_back(expected, k)
        return None

    def _go_back(self, expected: Expected, k: int) -> None:
        """Most ranks are at window k: what was taken of windows far beyond was a mistake."""
        beyond = k + FAR_WINDOWS
        self._ranks = {
            rank: state
            for rank, state in self._ranks.items()
            if state.group_id != expected.group_id or state.last_index <= beyond
        }
        kept = {key: window for key, window in self._windows.items() if key[0] != expected.group_id or key[1] <= beyond}
        self.counters["windows_dropped"] += len(self._windows) - len(kept)
        self._windows = kept
        self._horizon = min(self._horizon, max(0, k - LATENESS_WINDOWS + 1))

    def _check_order(self, report: LoadReport, expected: Expected, counts: Mapping[TableShape, CountArray]) -> Refused | None:
        """Duplicate, late, out of order."""
        rank, k = report.rank_id, report.window_index
        window = self._windows.get((report.group_id, k))
        if window is not None and rank in window.counts and window.reports[rank].incarnation == report.incarnation:
            if window.holds(report, counts):
                return Refused(reason=Refusal.DUPLICATE, sentence=f"window {k} of rank {rank} was taken before")
            return Refused(
                reason=Refusal.CONFLICTING_DUPLICATE,
                sentence=f"window {k} of rank {rank} was taken before with other counts; the first report stands",
            )
        last = self._ranks.get(rank)
        same_life = last is not None and (last.incarnation, last.group_id) == (report.incarnation, report.group_id)
        if self._group_id == expected.group_id and (k < self._horizon or (window is not None and window.is_closed)):
            return Refused(
                reason=Refusal.LATE,
                sentence=f"window {k} of rank {rank} came after it was closed; windows from {self._horizon} on are open",
            )
        if same_life and last is not None and k <= last.last_index:
            return Refused(
                reason=Refusal.OUT_OF_ORDER,
                sentence=f"window {k} of rank {rank} came after its window {last.last_index}; a rank reports in order",
            )
        return None

    def _check_against_window(self, report: LoadReport, counts: Mapping[TableShape, CountArray]) -> Refused | None:
        """Agreement with what other ranks reported of the same window, and room for it."""
        size = sum(array.nbytes for array in counts.values())
        where = f"window {report.window_index} of rank {report.rank_id}"
        if size > self.bytes_max:
            return Refused(
                reason=Refusal.TOO_LARGE,
                sentence=f"{where} holds {size} bytes of counts; at most {self.bytes_max} bytes are kept",
            )
        window = self._windows.get((report.group_id, report.window_index))
        if window is None:
            return None
        first = next(iter(window.reports.values()))
        if first.semantics is not report.semantics:
            return Refused(
                reason=Refusal.MIXED_SEMANTICS,
                sentence=f"{where} counts {report.semantics} but rank {first.rank_id} counts {first.semantics}",
            )
        if window.shapes != tuple(counts):
            return Refused(reason=Refusal.WRONG_SHAPE, sentence=f"{where} counts other tables than rank {first.rank_id} did")
        num_sub_windows = next(iter(counts.values())).shape[0]
        if num_sub_windows != window.num_sub_windows:
            return Refused(
                reason=Refusal.WRONG_SHAPE,
                sentence=f"{where} has {num_sub_windows} sub-windows, rank {first.rank_id} has {window.num_sub_windows}",
            )
        return None

    def _add(self, report: LoadReport, expected: Expected, counts: dict[TableShape, CountArray]) -> Accepted:
        key = (report.group_id, report.window_index)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = GroupWindow(
                group_id=report.group_id,
                group_order=self._group_order,
                window_index=report.window_index,
                num_ranks=len(expected.incarnations),
                window_steps=expected.window_steps,
                shapes=tuple(counts),
            )
        alarms = one_layer_alarm(report, counts) | window.add(report, counts)
        self._claims.forget(report.rank_id)
        self._ranks[report.rank_id] = _Rank(report.incarnation, report.group_id, report.window_index)
        self._ranks = {rank: state for rank, state in self._ranks.items() if rank in expected.incarnations}
        closed = self._close(report, expected, window)
        self._bound()
        return Accepted(closed=closed, alarms=alarms)

    def _close(self, report: LoadReport, expected: Expected, window: GroupWindow) -> tuple[tuple[GroupId, int], ...]:
        """Close the report's window if it is complete, and those too old to wait for."""
        self._horizon = max(self._horizon, (self._progress(expected) or 0) - LATENESS_WINDOWS + 1)
        closed = []
        for other in self._in_order():
            complete = other is window and set(expected.incarnations) <= set(other.reports)
            overdue = other.group_id == report.group_id and other.window_index < self._horizon
            if not other.is_closed and (complete or overdue):
                other.is_closed = True
                closed.append((other.group_id, other.window_index))
        return tuple(closed)

    def _progress(self, expected: Expected) -> int | None:
        """How far the group is: the window of its second rank, or of its first when it has or heard no more than that.

        None while no rank of it was heard.
        """
        latest = sorted(state.last_index for state in self._ranks.values() if state.group_id == expected.group_id)
        if not latest:
            return None
        return latest[-2] if len(latest) > 1 and len(expected.incarnations) > 2 else latest[-1]

    def _bound(self) -> None:
        """Drop the oldest windows until both bounds hold; the newest stays."""
        while len(self._windows) > 1 and (len(self._windows) > self.windows_max or self.kept_bytes > self.bytes_max):
            oldest = self._in_order()[0]
            del self._windows[oldest.group_id, oldest.window_index]
            self.counters["windows_dropped"] += 1
