"""The words of load windows: what a rank reports, what is expected of it, how it is answered, and the sum of reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eplb_service.ids import GroupId, Incarnation, Phase, RankId


class Semantics(StrEnum):
    """Whose tokens a report counts: those of its own rank, or those of all ranks (then every rank reports the same)."""

    LOCAL_TOKENS = "local_tokens"
    GLOBAL_TOKENS = "global_tokens"


class CountBasis(StrEnum):
    """How counts became logical: counted so (or converted at every flip), or converted once by the map at the window's end."""

    LOGICAL = "logical"
    CONVERTED_AT_END = "converted_at_end"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableCounts:
    """Counts of one model's layers.

    layer_ids: absolute layer id of each row; None = the recorder did not know it (such a report is refused).
    counts: shape (V, L, E), integers, token assignments to logical experts; V sub-windows in time order.
    """

    model: str
    layer_ids: tuple[int | None, ...]
    counts: npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadReport:
    """What one rank counted in one window.

    boundary_begin, boundary_end: step boundaries covered, [begin, end), within [kW, (k+1)W).
    forward_passes: forwards in the window, dummy ones included; tokens: tokens counted (before top-k).
    live_digest_begin, live_digest_end: digest of the live vector at either end; they differ when a flip fell in between.
    step_time_*_s: over the forwards of the window; 0 when there was none.
    """

    rank_id: RankId
    incarnation: Incarnation
    group_id: GroupId
    window_index: int
    boundary_begin: int
    boundary_end: int
    forward_passes: int
    tokens: int
    semantics: Semantics
    phase: Phase
    live_digest_begin: int
    live_digest_end: int
    tables: tuple[TableCounts, ...]
    warmup: bool = False
    basis: CountBasis = CountBasis.LOGICAL
    step_time_min_s: float = 0.0
    step_time_mean_s: float = 0.0
    step_time_max_s: float = 0.0

    @property
    def num_steps(self) -> int:
        """Step boundaries covered."""
        return self.boundary_end - self.boundary_begin

    def facts(self) -> tuple[object, ...]:
        """Everything but the counts, to tell a duplicate from a conflict."""
        return tuple(getattr(self, item.name) for item in fields(self) if item.name != "tables")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """What a report must count of one table: absolute layer ids, ascending, and E."""

    model: str
    layer_ids: tuple[int, ...]
    num_logical: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the planner knows of the deployment when a report comes in.

    incarnations: of every rank of the group that serves. window_steps: W.
    live_digests: live vectors that a report may name; None = any.
    phase: only batches of this phase count; None = all do.
    """

    group_id: GroupId
    incarnations: Mapping[RankId, Incarnation]
    window_steps: int
    tables: tuple[TableShape, ...]
    live_digests: frozenset[int] | None = None
    phase: Phase | None = None


class Refusal(StrEnum):
    """Why a report was not taken."""

    UNKNOWN_RANK = "unknown_rank"
    WRONG_INCARNATION = "wrong_incarnation"
    WRONG_GROUP = "wrong_group"
    WARMUP = "warmup"
    WRONG_PHASE = "wrong_phase"
    WRONG_GENERATION = "wrong_generation"
    MIXED_GENERATIONS = "mixed_generations"
    DUPLICATE = "duplicate"
    CONFLICTING_DUPLICATE = "conflicting_duplicate"
    LATE = "late"
    OUT_OF_ORDER = "out_of_order"
    FAR_AHEAD = "far_ahead"
    BAD_BOUNDARIES = "bad_boundaries"
    MISSING_LAYER_ID = "missing_layer_id"
    WRONG_SHAPE = "wrong_shape"
    NOT_INTEGER = "not_integer"
    NEGATIVE = "negative"
    BAD_STEP_TIMES = "bad_step_times"
    MIXED_SEMANTICS = "mixed_semantics"
    TOO_LARGE = "too_large"


class Alarm(StrEnum):
    """Something odd in a report that was taken."""

    ONE_LAYER_ONLY = "one_layer_only"
    GLOBAL_REPORTS_DIFFER = "global_reports_differ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The report counts. closed: windows that it closed, as (group id, k); alarms with a sentence each."""

    closed: tuple[tuple[GroupId, int], ...] = ()
    alarms: Mapping[Alarm, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The report does not count. A refused report is answered and never sent again."""

    reason: Refusal
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CombinedTable:
    """Loads of one table over the combined windows.

    loads: shape (W, L, E), float64, tokens; sub-windows of all windows in time order.
    source_loads: shape (sources, L, E), sums over time by source rank, in the order of `CombinedWindow.sources`
    (empty under global semantics, where the source of a token is not known).
    """

    shape: TableShape
    loads: npt.NDArray[np.float64]
    source_loads: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CombinedWindow:
    """The last closed windows, summed over ranks.

    windows: (group id, k) of each, oldest first. coverage: share of ranks x steps that reported.
    tokens, steps: over all ranks, and lock-step forwards. live_digest: the one live vector of all reports, None = several.
    step_time_*_s: of the slowest rank of each window (lock-step), over windows; 0 when nobody measured.
    """

    windows: tuple[tuple[GroupId, int], ...]
    tables: tuple[CombinedTable, ...]
    sources: tuple[RankId, ...]
    coverage: float
    tokens: int
    steps: int
    live_digest: int | None
    step_time_min_s: float
    step_time_mean_s: float
    step_time_max_s: float
    alarms: Mapping[Alarm, str]
