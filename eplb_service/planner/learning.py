"""What a deployment teaches its planner: what steps and moves cost, how long a gain lasts, how much of a promise comes true.

The numbers are made by pure modules (`calibration`, `horizon`, `validation`); this keeps them for one deployment, feeds them,
and turns them into a document for the store, so that a restart forgets nothing that took hours to learn.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eplb_service import control
from eplb_service.calibration import INTERFERENCE_SAMPLES_MIN, Learned, NicTransfers, StepSample, StepTimeModel, Transfer
from eplb_service.costs import MeasuredCosts
from eplb_service.dispatch import Dispatch
from eplb_service.errors import BrokenInvariantError
from eplb_service.flip_stall import ChunkFlip
from eplb_service.gate import CLEARED_NOISE, Verdict
from eplb_service.generation import LiveMap
from eplb_service.horizon import Horizon, PastPlan, WindowSum
from eplb_service.ids import GenerationNumber
from eplb_service.imbalance import Float64Array, Imbalance
from eplb_service.membership.machine import Group
from eplb_service.noise import overdispersion
from eplb_service.placement import Placement
from eplb_service.planner.documents import pack_loads, unpack_loads
from eplb_service.planner.forecasting import OFF, Forecasting
from eplb_service.planner.loads import loads_of, source_loads_of
from eplb_service.topology import Topology
from eplb_service.validation import Bias, changed_share
from eplb_service.window.report import CombinedWindow

PLANS_KEPT = 6
PLANS_APART = 4
"""Windows between two plans that are followed: neighbours say the same."""

HELD_KEPT = 8

HISTORY_BYTES_MAX = 64 << 20
"""Most memory of the windows that past plans are followed on: where tokens come from is large on large groups."""

STORE_EVERY = 16
"""Windows between two writes of what was learned."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A generation that was rolled back: no plan is carried out for the load that it was planned for, while it lasts.

    loads: that load, shape (L, E) for each table. at_s: when it was rolled back, wall clock.
    """

    generation: int
    reason: str
    loads: tuple[Float64Array, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was learned, in sentences and as numbers (units last)."""

    step_time: str
    moves: str
    horizon: str
    promises: str
    hold: str
    forecast: str
    numbers: Mapping[str, float]


class Learning:
    """What was learned of one deployment. forecasting: None = none."""

    def __init__(self, *, windows_kept: int, forecasting: Forecasting | None = None) -> None:
        self.forecasting = forecasting or Forecasting(mode=OFF, day_bins=1, num_windows=1)
        self.costs = Learned()
        self.bias = Bias()
        self.horizon: Horizon | None = None
        """As measured last."""
        self.held: deque[Held] = deque(maxlen=HELD_KEPT)
        self.baseline: tuple[StepTimeModel, float] | None = None
        """Step-time model before the last rollout, and seconds that steps took longer than it says; None = not known."""
        self.serves: tuple[GenerationNumber, int, int] | None = None
        """Generation that was planned for a forecast, with the first and last window that it is to serve. Not stored."""
        self.history: deque[WindowSum] = deque(maxlen=windows_kept)
        self.plans: deque[PastPlan] = deque(maxlen=PLANS_KEPT)
        self._windows_until_stored = STORE_EVERY
        self._nic_transfers = NicTransfers()

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def group_changed(self) -> None:
        """Windows are counted anew, over other ranks perhaps."""
        self.history.clear()
        self.plans.clear()
        self.serves = None
        self.forecasting.group_changed()
        self._nic_transfers = NicTransfers()

    def window_closed(
        self,
        window: CombinedWindow,
        imbalance: Imbalance,
        live: LiveMap,
        group: Group,
        dispatch: Dispatch,
        *,
        copying: bool | None,
        at_s: float,
        commit_s: float,
        serve_s: float,
    ) -> bool:
        """One more window; imbalance: under the live map. Returns whether it is time to store what was learned.

        at_s: wall clock. commit_s, serve_s: see `Forecasting.window_closed`.
        copying: weights are copied at its end; None: a rollout is under way and copies nothing just now, so that its steps are
        neither free of a rollout nor a measure of copying.
        """
        counted = [loads_of(window, table) for table in live.placement.tables]
        index = window.windows[-1][1]
        if self.history and self.history[-1].index >= index:
            return False
        loads = tuple(part.loads.sum(axis=0) for part in counted)
        self.history.append(
            WindowSum(
                index=index,
                loads=loads,
                sources=tuple(source_loads_of(part, window, group, dispatch) for part in counted),
                steps=window.steps,
                live_digest=window.live_digest,
                coverage=window.coverage,
                dispersion=max(overdispersion(part.loads) for part in counted),
                step_s=window.step_time_mean_s,
            )
        )
        self._bound_history()
        self.forecasting.window_closed(
            [(part.shape, load) for part, load in zip(counted, loads, strict=True)],
            at_s=at_s,
            commit_s=commit_s,
            serve_s=serve_s,
            num_ranks=len(group.topology.alive_positions()),
        )
        self._learn_step(window, loads, imbalance, live, group, copying=copying)
        self._windows_until_stored -= 1
        if self._windows_until_stored <= 0:
            self._windows_until_stored = STORE_EVERY
            return True
        return False

    def _bound_history(self) -> None:
        """The oldest go until what is kept fits; the last two stay."""
        sizes = [sum(array.nbytes for array in (*one.loads, *one.sources) if array is not None) for one in self.history]
        total = sum(sizes)
        for size in sizes[:-2]:
            if total <= HISTORY_BYTES_MAX:
                return
            self.history.popleft()
            total -= size

    def _learn_step(
        self,
        window: CombinedWindow,
        loads: tuple[Float64Array, ...],
        imbalance: Imbalance,
        live: LiveMap,
        group: Group,
        *,
        copying: bool | None,
    ) -> None:
        if (
            copying is None
            or window.step_time_mean_s <= 0
            or window.steps <= 0
            or (window.live_digest != live.digest and not copying)
        ):
            return
        mean = np.concatenate([load.sum(axis=1) for load in loads]) / len(group.topology.alive_positions()) / window.steps
        busiest = float((np.array(imbalance.per_layer) * mean).sum())
        sample = StepSample(seconds=window.step_time_mean_s, busiest=busiest, mean=float(mean.sum()))
        if copying:
            self.costs.step_while_copying(sample)
        else:
            self.costs.step(sample)

    def heard(self, message: control.FromRank, group: Group | None) -> None:
        """A rank staged or flipped a chunk. group: the ready one; what others received over unknown NICs is not counted."""
        if isinstance(message, control.Staged):
            if group is not None and message.sender.rank_id in group.rank_ids:
                self._learn_links(message, group.topology)
        elif isinstance(message, control.Flipped):
            self.costs.stalls.add(message.chunk_id, message.stall_s)

    def flipped(self, flip: ChunkFlip) -> None:
        """A chunk flipped on all ranks."""
        self.costs.stalls.add(flip.chunk_id, flip.measured_s, flip.staged_bytes)

    def _learn_links(self, message: control.Staged, topology: Topology) -> None:
        received, links = message.received, self.costs.links
        one = Transfer(same_node=received.same_node, cross_node=received.cross_node, seconds=message.seconds)
        told: tuple[Transfer, ...] = (one,)
        if topology.nics is not None:
            position = topology.position_of(message.sender.rank_id)
            told = self._nic_transfers.add(message.chunk_id, position, one, topology.nic_indices)
        for transfer in told:
            links.add(same_node=transfer.same_node, cross_node=transfer.cross_node, seconds=transfer.seconds)

    def planned(self, verdict: Verdict, before: Placement, after: Placement, *, moves: bool) -> None:
        """A plan whose gain stood clear of noise is followed, whatever the gate said: how soon does it go stale?

        moves: it is carried out; then it is followed however near to the last one it is.
        """
        if verdict.code not in CLEARED_NOISE or verdict.gain <= 0 or not self.history:
            return
        index = self.history[-1].index
        if self.plans and not moves and index - self.plans[-1].index < PLANS_APART:
            return
        self.plans.append(PastPlan(index=index, before=before.tables, after=after.tables, promised=verdict.gain))

    # ── what follows from it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def model(self) -> StepTimeModel | None:
        """How step time follows the load of the busiest ranks; None while that is not known well enough."""
        model = self.costs.model()
        return model if isinstance(model, StepTimeModel) else None

    def measured(self) -> MeasuredCosts:
        """All that is known of costs."""
        model = self.costs.model()
        within, across = self.costs.links.rates()
        return MeasuredCosts(
            seconds_per_token=model.seconds_per_token if isinstance(model, StepTimeModel) else None,
            step_time=str(model),
            horizon_steps=self.horizon.steps if self.horizon is not None else None,
            bytes_per_s=within,
            cross_node_bytes_per_s=across,
            commit_stall_s=self.costs.stalls.mean_s(),
            stalls=self.costs.stalls.model(),
            copy_interference=self.costs.interference.mean(INTERFERENCE_SAMPLES_MIN),
        )

    def facts(self) -> Facts:
        """For people and programs."""
        measured, model = self.measured(), self.model
        parts = [
            f"{rate / 1e9:.3g} GB/s {where}"
            for rate, where in ((measured.bytes_per_s, "within a node"), (measured.cross_node_bytes_per_s, "across nodes"))
            if rate is not None
        ]
        if measured.commit_stall_s is not None:
            parts.append(f"a flip stalls {measured.commit_stall_s * 1e3:.3g} ms")
        if measured.copy_interference is not None:
            parts.append(f"copies take {measured.copy_interference:.0%} of the serving time")
        numbers = {
            "gain_share": self.bias.share,
            "seconds_per_token": measured.seconds_per_token,
            "step_time_r_squared": model.r_squared if model is not None else None,
            "step_time_windows": float(len(self.costs.steps)),
            "horizon_steps": measured.horizon_steps,
            "half_life_steps": self.horizon.half_life_steps if self.horizon is not None else None,
            "same_node_bytes_per_s": measured.bytes_per_s,
            "cross_node_bytes_per_s": measured.cross_node_bytes_per_s,
            "commit_stall_s": measured.commit_stall_s,
            "copy_interference": measured.copy_interference,
            **self.forecasting.numbers(),
        }
        promised = self.bias.promised > 0
        return Facts(
            step_time=measured.step_time,
            moves=", ".join(parts),
            horizon=str(self.horizon) if self.horizon is not None else "",
            promises=f"{self.bias.share:.0%} of what a plan promises is believed, as earlier ones came true"
            if promised
            else "",
            forecast=self.forecasting.sentence(),
            hold=f"generation {self.held[-1].generation} was rolled back: {self.held[-1].reason}" if self.held else "",
            numbers={name: value for name, value in numbers.items() if value is not None},
        )

    def rollout_begins(self, windows: int) -> None:
        """Fix what steps are compared with afterwards: the model as it is, and what the last windows were off it."""
        model = self.model
        if model is None:
            self.baseline = None
            return
        recent = list(self.costs.steps)[-windows:]
        off = [sample.seconds - model.predict(busiest=sample.busiest, mean=sample.mean) for sample in recent]
        self.baseline = (model, sum(off) / len(off) if off else 0.0)

    def why_held(self, loads: tuple[Float64Array, ...], *, now_s: float, least_change: float, hold_s: float) -> str:
        """Why nothing is to be moved under this load; empty when nothing speaks against it. now_s: wall clock."""
        for held in list(self.held):
            if now_s - held.at_s > hold_s:
                self.held.remove(held)
        for held in reversed(self.held):
            fits = len(loads) == len(held.loads) and all(
                mine.shape == theirs.shape for mine, theirs in zip(loads, held.loads, strict=True)
            )
            change = changed_share(held.loads, loads) if fits else 1.0
            if change < least_change:
                return (
                    f"generation {held.generation} was rolled back ({held.reason}); nothing is moved until the load is another"
                    f" than it was planned for: {change:.1%} of the tokens go elsewhere by now, {least_change:.1%} is a change"
                )
        return ""

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def to_document(self) -> bytes:
        """For the store: all but the windows."""
        horizon = self.horizon
        tree: dict[str, Any] = {
            "costs": self.costs.to_json(),
            "bias": [self.bias.promised, self.bias.observed],
            "horizon": None
            if horizon is None
            else [horizon.steps, horizon.half_life_steps, list(horizon.shares), horizon.num_plans],
            "held": [_held_tree(held) for held in self.held],
            "forecasts": self.forecasting.to_json(),
        }
        return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()

    def read_document(self, data: bytes) -> None:
        """Take up what `to_document` gave. Raises BrokenInvariantError when it cannot be read; then nothing changed."""
        try:
            tree = json.loads(data)
            costs = Learned.from_json(tree["costs"])
            bias = Bias(*(float(value) for value in tree["bias"]))
            horizon = _horizon(tree["horizon"])
            held = deque((_held(part) for part in tree["held"]), maxlen=HELD_KEPT)
            forecasting = self.forecasting.remembered(tree.get("forecasts"))  # documents of 0.1.0 have none
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BrokenInvariantError(
                f"what was learned of this deployment cannot be read ({error}); it is learned anew"
            ) from None
        self.costs, self.bias, self.horizon, self.held = costs, replace(bias), horizon, held
        self.forecasting = forecasting


def _horizon(tree: Any) -> Horizon | None:
    if tree is None:
        return None
    steps, half_life, shares, plans = tree
    return Horizon(
        steps=float(steps),
        half_life_steps=None if half_life is None else float(half_life),
        shares=tuple(map(float, shares)),
        num_plans=int(plans),
    )


def _held_tree(held: Held) -> dict[str, Any]:
    return {"generation": held.generation, "reason": held.reason, "loads": pack_loads(held.loads), "at_s": held.at_s}


def _held(tree: Mapping[str, Any]) -> Held:
    return Held(
        generation=int(tree["generation"]),
        reason=str(tree["reason"]),
        loads=unpack_loads(tree["loads"]),
        at_s=float(tree["at_s"]),
    )
