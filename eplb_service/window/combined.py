"""One load window by source rank, and the sum of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eplb_service.ids import GroupId, RankId
from eplb_service.noise import Float64Array
from eplb_service.window.report import (
    Alarm,
    CombinedTable,
    CombinedWindow,
    LoadReport,
    Semantics,
    TableShape,
)
from eplb_service.window.report_check import CountArray


@dataclass(slots=True, eq=False)
class GroupWindow:
    """Window k of one group: the counts of each rank that reported it.

    group_order: how many groups were formed before (windows sort by it, then by k). num_ranks: ranks of the group.
    reports: what each rank said, without its counts; counts: shape (V, L, E) by rank and table.
    """

    group_id: GroupId
    group_order: int
    window_index: int
    num_ranks: int
    window_steps: int
    shapes: tuple[TableShape, ...]
    is_closed: bool = False
    size_bytes: int = 0
    reports: dict[RankId, LoadReport] = field(default_factory=dict)
    counts: dict[RankId, Mapping[TableShape, CountArray]] = field(default_factory=dict)
    alarms: dict[Alarm, str] = field(default_factory=dict)

    @property
    def num_sub_windows(self) -> int:
        """V."""
        return int(next(iter(next(iter(self.counts.values())).values())).shape[0])

    @property
    def semantics(self) -> Semantics:
        """Whose tokens the reports count; all agree."""
        return next(iter(self.reports.values())).semantics

    @property
    def live_digests(self) -> set[int]:
        """Live vectors that served the window."""
        return {digest for report in self.reports.values() for digest in (report.live_digest_begin, report.live_digest_end)}

    def holds(self, report: LoadReport, counts: Mapping[TableShape, CountArray]) -> bool:
        """Whether this very report was taken before."""
        mine = self.counts[report.rank_id]
        return report.facts() == self.reports[report.rank_id].facts() and all(
            shape in mine and np.array_equal(mine[shape], array) for shape, array in counts.items()
        )

    def add(self, report: LoadReport, counts: Mapping[TableShape, CountArray]) -> dict[Alarm, str]:
        """Keep a report's counts. Returns an alarm when a global report of the same steps disagrees with an earlier one."""
        alarms: dict[Alarm, str] = {}
        if report.semantics is Semantics.GLOBAL_TOKENS:
            for rank, other in self.reports.items():
                same_steps = (other.boundary_begin, other.boundary_end) == (report.boundary_begin, report.boundary_end)
                if same_steps and not all(np.array_equal(self.counts[rank][shape], counts[shape]) for shape in counts):
                    alarms[Alarm.GLOBAL_REPORTS_DIFFER] = (
                        f"window {self.window_index}: ranks {rank} and {report.rank_id} both claim to count all tokens"
                        f" but differ; their semantics may be local"
                    )
                    break
        self.size_bytes += sum(array.nbytes for array in counts.values())
        if report.rank_id in self.counts:
            self.size_bytes -= sum(array.nbytes for array in self.counts[report.rank_id].values())
        self.reports[report.rank_id] = replace(report, tables=())
        self.counts[report.rank_id] = counts
        self.alarms.update(alarms)
        return alarms

    def _best_global(self) -> RankId:
        """Rank whose global report covers most steps; the lowest id on ties."""
        return min(self.reports, key=lambda rank: (-self.reports[rank].num_steps, rank))

    def loads(self, shape: TableShape) -> Float64Array:
        """Sum over ranks, shape (V, L, E), float64.

        Local tokens are added up and never scaled: what a missing rank served is not known. Global tokens are taken from one
        report, once, and scaled up to the whole window when it covers only part of the steps.
        """
        if self.semantics is Semantics.GLOBAL_TOKENS:
            rank = self._best_global()
            scale = self.window_steps / self.reports[rank].num_steps
            return self.counts[rank][shape].astype(np.float64) * scale
        total = np.zeros(next(iter(self.counts.values()))[shape].shape, np.float64)
        for rank in sorted(self.counts):
            total += self.counts[rank][shape]
        return total

    @property
    def covered_steps(self) -> int:
        """Rank-steps that the reports hold; a global report holds every rank's tokens of its steps."""
        if self.semantics is Semantics.GLOBAL_TOKENS:
            return self.reports[self._best_global()].num_steps * self.num_ranks
        return sum(report.num_steps for report in self.reports.values())

    @property
    def tokens(self) -> int:
        """Tokens of the window over ranks, counted once and not scaled."""
        if self.semantics is Semantics.GLOBAL_TOKENS:
            return self.reports[self._best_global()].tokens
        return sum(report.tokens for report in self.reports.values())

    @property
    def steps(self) -> int:
        """Lock-step forwards."""
        return max(report.forward_passes for report in self.reports.values())

    def slowest(self) -> LoadReport | None:
        """The report with the longest mean step time, None when nobody measured."""
        timed = [self.reports[rank] for rank in sorted(self.reports) if self.reports[rank].step_time_mean_s > 0]
        return max(timed, key=lambda report: report.step_time_mean_s) if timed else None


def _source_loads(windows: Sequence[GroupWindow], shape: TableShape, sources: Sequence[RankId]) -> Float64Array:
    """Sums over time by source rank, shape (sources, L, E)."""
    result = np.zeros((len(sources), len(shape.layer_ids), shape.num_logical), np.float64)
    for window in windows:
        for position, rank in enumerate(sources):
            if rank in window.counts:
                result[position] += window.counts[rank][shape].sum(axis=0, dtype=np.int64)
    return result


def _step_times(windows: Sequence[GroupWindow]) -> tuple[float, float, float]:
    """Min, mean (weighted by forwards) and max step time over windows, each of its slowest rank."""
    slowest = [report for window in windows if (report := window.slowest()) is not None]
    if not slowest:
        return 0.0, 0.0, 0.0
    passes = sum(max(1, report.forward_passes) for report in slowest)
    mean = sum(report.step_time_mean_s * max(1, report.forward_passes) for report in slowest) / passes
    return min(report.step_time_min_s for report in slowest), mean, max(report.step_time_max_s for report in slowest)


def combine_windows(windows: Sequence[GroupWindow]) -> CombinedWindow:
    """Sum of closed windows with the same tables, oldest first. At least one."""
    local = all(window.semantics is Semantics.LOCAL_TOKENS for window in windows)
    sources = tuple(sorted({rank for window in windows for rank in window.counts}))
    digests = set().union(*(window.live_digests for window in windows))
    alarms: dict[Alarm, str] = {}
    for window in windows:
        alarms.update(window.alarms)
    tables = tuple(
        CombinedTable(
            shape=shape,
            loads=np.concatenate([window.loads(shape) for window in windows]),
            source_loads=_source_loads(windows, shape, sources)
            if local
            else np.zeros((0, len(shape.layer_ids), shape.num_logical)),
        )
        for shape in windows[-1].shapes
    )
    shortest, mean, longest = _step_times(windows)
    return CombinedWindow(
        windows=tuple((window.group_id, window.window_index) for window in windows),
        tables=tables,
        sources=sources if local else (),
        coverage=sum(window.covered_steps for window in windows)
        / sum(window.num_ranks * window.window_steps for window in windows),
        tokens=sum(window.tokens for window in windows),
        steps=sum(window.steps for window in windows),
        live_digest=digests.pop() if len(digests) == 1 else None,
        step_time_min_s=shortest,
        step_time_mean_s=mean,
        step_time_max_s=longest,
        alarms=alarms,
    )
