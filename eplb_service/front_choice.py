"""Which point of the front to go to: of those that clear gain and noise, the one whose saving exceeds its cost most.

Several tables are joined at one price of a second of cost for all of them, so that no table pays more for its last hundredth
of balance than another would for its first tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eplb_service.costs import CostModel, MovePrice, Origin, price
from eplb_service.gains import KEEP, JointGain, joint_gain, moves_of, own_point, table_gains, worst_error_now
from eplb_service.moves import MoveSummary
from eplb_service.noise import confidence
from eplb_service.placement import Table
from eplb_service.verdict import GateConfig, GateInputs, Verdict, VerdictCode, keep

TRADE_OFFS = (0.0, *(2.0**power for power in range(-8, 9)))
"""Prices of a second of cost, in seconds saved, at which the points of several tables are joined: one price for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A point for every table. price: None without a cost model. is_own: it is the policy's own plan."""

    points: tuple[int, ...]
    moves: tuple[MoveSummary, ...]
    gain: JointGain
    num_flips: int
    is_own: bool
    price: MovePrice | None = None
    saved_s: float = 0.0

    @property
    def experts(self) -> int:
        return sum(part.experts for part in self.moves)

    @property
    def move_bytes(self) -> int:
        return sum(part.move_bytes for part in self.moves)

    @property
    def net_s(self) -> float:
        return self.saved_s - (self.price.total_s if self.price is not None else 0.0)


class FrontChoice:
    """Scores the points that a deployment may move to, and answers for the best."""

    def __init__(self, config: GateConfig, inputs: GateInputs) -> None:
        self._config, self._inputs, self._cost = config, inputs, inputs.cost
        self._tables = [table_gains(table, inputs.topology, inputs.dispatch) for table in inputs.tables]
        self._now_error = worst_error_now(self._tables)
        self._points = [table.points for table in inputs.tables]
        own = tuple(own_point(table.proposal, table.current, table.points) for table in inputs.tables)
        self._candidates = [self._candidate(points, is_own=points == own) for points in self._joined(own)]

    def _joined(self, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Points for every table, each combination once: all of a single table's, or those best at one price for all tables."""
        if self._cost is None:
            usable = all(table.flips_of(point) is not None for table, point in zip(self._inputs.tables, own, strict=True))
            return [own] if usable and any(point != KEEP for point in own) else []
        options = [
            [KEEP, *(index for index in range(len(table.points)) if table.flips_of(index) is not None)]
            for table in self._inputs.tables
        ]
        if len(options) == 1:
            return [(point,) for point in options[0] if point != KEEP]
        total = float(sum(table.weight.sum() for table in self._tables))
        joined: dict[tuple[int, ...], None] = {}
        for trade_off in TRADE_OFFS:
            picked = []
            for number, indices in enumerate(options):
                scores = [self._score(number, index, total, trade_off) for index in indices]
                picked.append(indices[scores.index(max(scores))])
            joined[tuple(picked)] = None
        if all(point in indices for point, indices in zip(own, options, strict=True)):
            joined[own] = None
        return [points for points in joined if any(point != KEEP for point in points)]

    def _score(self, number: int, point: int, total: float, trade_off: float) -> float:
        """Seconds that a point of one table saves, less its price at this trade-off."""
        if self._cost is None or point == KEEP:
            return 0.0
        table = self._tables[number]
        gain = float((table.at(point).gain * table.weight).sum()) / max(total, 1.0) * self._inputs.gain_share
        flips = self._inputs.tables[number].flips_of(point) or 0
        cost = price(self._cost, [self._points[number][point].moves], num_flips=flips, replica_bytes=self._bytes(number, point))
        return self._cost.saved_s(gain) - trade_off * cost.total_s

    def _candidate(self, points: tuple[int, ...], *, is_own: bool) -> _Candidate:
        moves = tuple(moves_of(table, point) for table, point in zip(self._points, points, strict=True))
        flips = sum(table.flips_of(point) or 0 for table, point in zip(self._inputs.tables, points, strict=True))
        made = _Candidate(
            points=points,
            moves=moves,
            gain=joint_gain(self._tables, points, share=self._inputs.gain_share, now_error=self._now_error),
            num_flips=max(1, flips),
            is_own=is_own,
        )
        if self._cost is None:
            return made
        more = sum(self._bytes(number, point) for number, point in enumerate(points))
        return replace(
            made,
            price=price(self._cost, moves, num_flips=made.num_flips, replica_bytes=more),
            saved_s=self._cost.saved_s(made.gain.by_load),
        )

    def _bytes(self, number: int, point: int) -> int:
        """Bytes that replicas hold more than now, when a table goes to a point."""
        if point == KEEP:
            return 0
        table = self._inputs.tables[number]
        return replica_bytes(self._points[number][point].placement, table.expert_bytes) - replica_bytes(
            table.current, table.expert_bytes
        )

    # ── the answer ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def verdict(self) -> Verdict:
        """The best point that clears everything, else why the best one does not."""
        if not self._candidates:
            return keep(VerdictCode.CANNOT_ROLL_OUT, "keep: no point of the proposal can be rolled out", {})
        best = max(self._candidates, key=lambda candidate: (self._rank(candidate), candidate.net_s, -candidate.experts))
        return self._judged(best)

    def _rank(self, candidate: _Candidate) -> int:
        """How many of the questions a candidate answers well, in their order."""
        if not self._is_large(candidate.gain):
            return 0
        if not self._is_clear(candidate.gain):
            return 1
        return 3 if self._pays(candidate) else 2

    def _is_large(self, gain: JointGain) -> bool:
        return gain.mean.value >= self._config.min_gain_mean or gain.worst.value >= self._config.min_gain_worst

    def _is_clear(self, gain: JointGain) -> bool:
        sigmas = self._config.noise_sigmas
        return gain.mean.is_clear(self._config.min_gain_mean, sigmas) or gain.worst.is_clear(
            self._config.min_gain_worst, sigmas
        )

    def _pays(self, candidate: _Candidate) -> bool:
        return candidate.price is not None and candidate.saved_s > self._config.min_return * candidate.price.total_s

    def _judged(self, candidate: _Candidate) -> Verdict:
        config, rank = self._config, self._rank(candidate)
        mean, worst = candidate.gain.mean, candidate.gain.worst
        margins = f"{config.noise_sigmas * mean.error:.4f} and {config.noise_sigmas * worst.error:.4f}"
        sure = f"{config.noise_sigmas:g} standard errors ({confidence(config.noise_sigmas):.4%} confidence)"
        gains = (
            f"mean over layers {mean.before:.4f} -> {mean.after:.4f} (gain {mean.value:.4f}),"
            f" worst layer {worst.before:.4f} -> {worst.after:.4f} (gain {worst.value:.4f})"
        )
        if mean.share != 1.0:
            gains += f", {mean.share:.0%} of what the plan promises, as earlier plans came true"
        if rank == 0:
            wanted = f"at least {config.min_gain_mean:.4f} or {config.min_gain_worst:.4f} is wanted"
            return self._answer(candidate, VerdictCode.GAIN_TOO_SMALL, f"keep: {gains}; {wanted}")
        if rank == 1:
            return self._answer(
                candidate,
                VerdictCode.WITHIN_NOISE,
                f"keep: {gains}; that is within {sure} of sampling noise ({margins})",
            )
        gains += f", clear of sampling noise ({margins}) by {sure}"
        if self._cost is None or candidate.price is None:
            reason = f"keep: {gains}, but {self._inputs.no_cost_reason}, so the move cannot be priced"
            return self._answer(candidate, VerdictCode.NO_COST_MODEL, reason)
        told = f"{gains}; {_price_text(self._cost, candidate)}{self._choice_text(candidate)}"
        if rank == 2:
            least = "" if config.min_return == 1 else f", {config.min_return:g} s must be saved for each that it costs"
            return self._answer(candidate, VerdictCode.COST_EXCEEDS_GAIN, f"keep: {told}{least}")
        return self._answer(candidate, VerdictCode.MOVE, f"move: {told}")

    def _choice_text(self, candidate: _Candidate) -> str:
        """Which point of how many it is, and how the policy's own plan compares."""
        if len(self._candidates) < 2:
            return ""
        ordered = sorted(self._candidates, key=lambda other: (other.experts, other.net_s))
        text = f"; point {ordered.index(candidate) + 1} of {len(ordered)} of the front, {candidate.experts} moves"
        own = next((other for other in ordered if other.is_own), None)
        if own is None or own is candidate:
            return text + " (the policy's own plan)" if own is candidate else text
        return (
            f"{text} net {candidate.net_s:.3g} s (the policy's own plan, {own.experts} moves to"
            f" {own.gain.mean.after:.4f}, nets {own.net_s:.3g} s)"
        )

    def _answer(self, candidate: _Candidate, code: VerdictCode, reason: str) -> Verdict:
        mean, worst, sigmas = candidate.gain.mean, candidate.gain.worst, self._config.noise_sigmas
        tables = self._inputs.tables
        now = sum(replica_bytes(table.current, table.expert_bytes) for table in tables)
        numbers = {
            "imbalance_mean_before": mean.before,
            "imbalance_mean_after": mean.after,
            "imbalance_worst_before": worst.before,
            "imbalance_worst_after": worst.after,
            "noise_margin_mean": sigmas * mean.error,
            "noise_margin_worst": sigmas * worst.error,
            "confidence": confidence(sigmas),
            "gain_share": mean.share,
            "moves": float(candidate.experts),
            "move_bytes": float(candidate.move_bytes),
            "flips": float(candidate.num_flips),
            "points": float(len(self._candidates)),
            "replica_bytes": float(now + sum(self._bytes(*pair) for pair in enumerate(candidate.points))),
        }
        if self._cost is not None and candidate.price is not None:
            numbers |= {
                "saved_s": candidate.saved_s,
                "cost_s": candidate.price.total_s,
                "copy_s": candidate.price.copy_s,
                "nic_s": candidate.price.nic_s,
                "stall_s": candidate.price.stall_s,
                "net_s": candidate.net_s,
                "horizon_steps": self._cost.horizon_steps,
                "seconds_per_step": self._cost.seconds_per_step,
            }
        chosen = tuple(
            None if point == KEEP else points[point] for points, point in zip(self._points, candidate.points, strict=True)
        )
        return Verdict(
            move=code is VerdictCode.MOVE,
            code=code,
            reason=reason,
            numbers=numbers,
            chosen=chosen,
            gain=candidate.gain.by_load,
        )


def replica_bytes(placement: Table, expert_bytes: Sequence[int]) -> int:
    """Bytes that copies beyond the first of each expert hold. expert_bytes: of each layer; empty = 0."""
    if not expert_bytes:
        return 0
    extra = np.maximum(placement.replica_counts - 1, 0).sum(axis=1, dtype=np.int64)
    return sum(int(copies) * size for copies, size in zip(extra.tolist(), expert_bytes, strict=True))


def _price_text(cost: CostModel, candidate: _Candidate) -> str:
    """What it saves and costs, with what the numbers rest on."""
    cost_of_it = candidate.price
    if cost_of_it is None:
        return ""
    unsure = [
        f"{label} {cost.origin(name).value}"
        for label, name in (
            ("step cost", "seconds_per_step"),
            ("horizon", "horizon_steps"),
            ("bandwidth", "bytes_per_s"),
            ("stall", "commit_stall_s"),
            ("interference", "copy_interference"),
        )
        if cost.origin(name) is not Origin.GIVEN
    ]
    memory = f", {cost_of_it.memory_s:.3g} s of replica memory" if cost_of_it.memory_s else ""
    nic = f", {cost_of_it.nic_s:.3g} s of it waiting for the busiest NIC," if cost_of_it.nic_s else ""
    return (
        f"it saves {candidate.saved_s:.3g} s over {cost.horizon_steps:.0f} steps and costs {cost_of_it.total_s:.3g} s"
        f" ({cost_of_it.copy_s:.3g} s of copying{nic} at {cost.copy_interference:.0%} interference,"
        f" {cost_of_it.stall_s:.3g} s of stalls{memory})" + (f" [{', '.join(unsure)}]" if unsure else "")
    )
