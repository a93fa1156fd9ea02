"""What a placement would gain on the *next* window, and how sure that is: for each point of each table's Pareto front.

What the live placement shows on the window is one fresh draw of the load; what a proposal shows is too good, since it was
fitted to that very window. So a proposal is scored by what it would show on a fresh window of the same size: the expectation
of the largest of its noisy rank loads. Without this, every window would seem to justify a new plan (a resample of the same
load too). A layer whose row stays has no gain and no noise: both placements show the same there, whatever the window.

Noise is multinomial per layer, widened by what the sub-windows show: clumping (tokens of one prompt go together), and for the
proposal also drift (a load that wandered within the window will not be in the next one what it was on average in this).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.errors import InvalidInputError
from eplb_service.moves import NO_MOVES, MoveSummary
from eplb_service.noise import (
    drift_dispersion,
    error_dispersion,
    largest_by_row,
    largest_of_normals,
    overdispersion,
    rank_moments,
)
from eplb_service.placement import Table
from eplb_service.policy.base import FrontPoint, Proposal
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]

PREDICTION_VARIANCE = 2.0
"""A proposal is fitted to one noisy window and scored on another one of that size: the variances of the two add up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableEvidence:
    """One table of the deployment.

    loads: shape (W, L, E), tokens, the window that the proposal was made from. source_loads: shape (L, R, E), tokens that each
    rank sent; None = all alike. flips: chunks that each of `points` takes, None = it cannot be carried out; empty = one each.
    expert_bytes: bytes of one expert of each layer; empty = 0.
    counted: where `loads` are a forecast: the windows as they were counted, whose noise counts too; else None.
    forecast_error: mean squared distance between such forecasts and what was seen then (see `backtest`).
    """

    loads: Float64Array
    current: Table
    proposal: Proposal
    source_loads: Float64Array | None = None
    flips: tuple[int | None, ...] = ()
    expert_bytes: tuple[int, ...] = ()
    counted: Float64Array | None = None
    forecast_error: float = 0.0

    @property
    def points(self) -> tuple[FrontPoint, ...]:
        """See `points_of`."""
        return points_of(self.proposal, self.current)

    def flips_of(self, point: int) -> int | None:
        """Chunks that a point takes; None when it cannot be carried out. KEEP takes none."""
        if point == KEEP:
            return 0
        return self.flips[point] if self.flips else 1


KEEP = -1
"""Stands for the point at which a table stays as it is."""


def points_of(proposal: Proposal, current: Table) -> tuple[FrontPoint, ...]:
    """Placements to choose from, by ascending moves: the Pareto front, or the plan alone; never the current placement.

    Where the engine dispatches by shares every point has some: even ones, where the policy gave none.
    """
    own = plan_of(proposal, current)
    points = [_with_shares(point, current) for point in proposal.front] or [own]
    changing = [point for point in points if point.placement != current]
    if own.placement != current and all(point.placement != own.placement for point in changing):
        changing.append(own)
    return tuple(sorted(changing, key=lambda point: (point.moves.experts, point.predicted.mean)))


def plan_of(proposal: Proposal, current: Table) -> FrontPoint:
    """The policy's own plan as a point."""
    own = FrontPoint(placement=proposal.placement, predicted=proposal.predicted, moves=proposal.moves)
    return _with_shares(own, current)


def _with_shares(point: FrontPoint, current: Table) -> FrontPoint:
    if current.shares is None or point.placement.shares is not None:
        return point
    return replace(point, placement=point.placement.with_even_shares())


def own_point(proposal: Proposal, current: Table, points: Sequence[FrontPoint]) -> int:
    """Position of the policy's own plan among the points; KEEP when it is the current placement."""
    own = plan_of(proposal, current).placement
    return next((index for index, point in enumerate(points) if point.placement == own), KEEP)


def moves_of(points: Sequence[FrontPoint], point: int) -> MoveSummary:
    """What a point moves."""
    return NO_MOVES if point == KEEP else points[point].moves


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerGains:
    """What one point of a table gains on the next window. L layers, R ranks that serve.

    gain, error: fall of imbalance and its standard error, shape (L,); 0 where the row stays.
    changed: shape (L,). means, errors: of the rank loads after, over their fair share, shape (changed layers, R).
    """

    gain: Float64Array
    error: Float64Array
    changed: npt.NDArray[np.bool_]
    means: Float64Array
    errors: Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class TableGains:
    """Scores the points of one table. before: realised imbalance, shape (L,); weight: tokens of each layer, shape (L,).

    now_means, now_errors: of the rank loads now, over their fair share, shape (L, R).
    """

    before: Float64Array
    weight: Float64Array
    now_means: Float64Array
    now_errors: Float64Array
    points: tuple[LayerGains, ...]

    @property
    def keep(self) -> LayerGains:
        """The point at which nothing changes."""
        none = np.zeros(self.before.size)
        empty = np.zeros((0, self.now_means.shape[1]))
        return LayerGains(gain=none, error=none, changed=none > 0, means=empty, errors=empty)

    def at(self, point: int) -> LayerGains:
        """A point by its position, or KEEP."""
        return self.keep if point == KEEP else self.points[point]


def _dispersions(table: TableEvidence) -> tuple[float, float]:
    """Noise of this window, and of the next one around it, over multinomial sampling.

    A forecast is as uncertain as the windows behind it and as forecasts were before, whichever is more. What the live placement
    shows under it is forecast too. Neither is ever less than for the windows as they are.
    """
    clumped, ahead = overdispersion(table.loads), drift_dispersion(table.loads)
    if table.counted is None:
        return clumped, ahead
    off = error_dispersion(table.loads.sum(axis=0), table.forecast_error)
    clumped = max(clumped, overdispersion(table.counted), off)
    return clumped, max(clumped, ahead, drift_dispersion(table.counted))


def table_gains(table: TableEvidence, topology: Topology, dispatch: Dispatch) -> TableGains:
    """Every point of a table scored. Raises what `imbalance_of` raises."""
    total = table.loads.sum(axis=0)
    before = np.array(imbalance_of(total, table.current, topology, dispatch, table.source_loads).per_layer)
    clumped, ahead = _dispersions(table)
    means, errors = rank_moments(total, table.current, topology, dispatch, clumped, table.source_loads)
    _, now_error = largest_by_row(means, errors)
    points = []
    for point in table.points:
        changed = _changed_layers(table.current, point.placement)
        rows = np.flatnonzero(changed)
        sources = None if table.source_loads is None else table.source_loads[rows]
        part = _layers_of(point.placement, rows)
        after_means, after_errors = rank_moments(total[rows], part, topology, dispatch, ahead, sources)
        after_errors = after_errors * math.sqrt(PREDICTION_VARIANCE)
        after, after_error = largest_by_row(after_means, after_errors)
        gain, error = np.zeros(before.size), np.zeros(before.size)
        gain[rows] = before[rows] - after
        error[rows] = np.hypot(now_error[rows], after_error)
        points.append(LayerGains(gain=gain, error=error, changed=changed, means=after_means, errors=after_errors))
    return TableGains(before, total.sum(axis=1), means, errors, tuple(points))


def _changed_layers(before: Table, after: Table) -> npt.NDArray[np.bool_]:
    """Layers whose slots, or whose shares, differ. Shape (L,)."""
    changed: npt.NDArray[np.bool_] = (before.physical_to_logical != after.physical_to_logical).any(axis=1)
    if before.shares is None and after.shares is None:
        return changed
    if before.shares is None or after.shares is None:
        return np.ones(before.num_layers, np.bool_)
    other: npt.NDArray[np.bool_] = (before.shares != after.shares).any(axis=1)
    return changed | other


def _layers_of(table: Table, rows: npt.NDArray[np.intp]) -> Table:
    """Some layers of a table, at least one."""
    if rows.size == 0:
        raise InvalidInputError(f"no layer of model {table.model!r} changes: there is nothing to score")
    shares = None if table.shares is None else table.shares[rows]
    layer_ids = tuple(table.layer_ids[row] for row in rows.tolist())
    return Table(table.model, layer_ids, table.num_logical, table.rank_ids, table.physical_to_logical[rows], shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Fall of imbalance of one aggregate (`mean` over layers, or `worst` layer) and the standard error of that.

    share: of the promised gain that is believed to come true (1 minus what was learned of this deployment).
    """

    before: float
    after: float
    error: float
    share: float = 1.0

    @property
    def value(self) -> float:
        """The gain that is believed in."""
        return (self.before - self.after) * self.share

    def is_clear(self, minimum: float, sigmas: float) -> bool:
        """Whether it is at least the minimum, and stands clear of sampling noise."""
        return self.value >= minimum and self.value > sigmas * self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGain:
    """Gain of one point of every table together. by_load: of the mean over layers weighted by their tokens, as time is."""

    mean: Gain
    worst: Gain
    by_load: float


def worst_error_now(tables: Sequence[TableGains]) -> float:
    """Standard error of the worst layer's imbalance as things are."""
    means = np.concatenate([table.now_means.ravel() for table in tables])
    errors = np.concatenate([table.now_errors.ravel() for table in tables])
    return largest_of_normals(means, errors)[1]


def joint_gain(tables: Sequence[TableGains], points: Sequence[int], *, share: float, now_error: float) -> JointGain:
    """Gain over all layers of all tables, when each goes to its point.

    share: see `Gain`. now_error: see `worst_error_now`.
    """
    chosen = [table.at(point) for table, point in zip(tables, points, strict=True)]
    before = np.concatenate([table.before for table in tables])
    gain = np.concatenate([part.gain for part in chosen])
    error = np.concatenate([part.error for part in chosen])
    weight = np.concatenate([table.weight for table in tables])
    changed = np.concatenate([part.changed for part in chosen])
    worst, worst_error = float(before.max()), 0.0
    if changed.any():
        staying = before[~changed]
        means = [part.means.ravel() for part in chosen] + ([staying.max(keepdims=True)] if staying.size else [])
        errors = [part.errors.ravel() for part in chosen] + ([np.zeros(1)] if staying.size else [])
        worst, worst_error = largest_of_normals(np.concatenate(means), np.concatenate(errors))
        worst_error = math.hypot(worst_error, now_error)
    mean = float(before.mean())
    return JointGain(
        mean=Gain(
            before=mean,
            after=mean - float(gain.mean()),
            error=float(np.sqrt((error**2).sum()) / error.size),
            share=share,
        ),
        worst=Gain(before=float(before.max()), after=worst, error=worst_error, share=share),
        by_load=float((gain * weight).sum() / weight.sum()) * share if weight.sum() > 0 else 0.0,
    )
