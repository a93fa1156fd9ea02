"""The gate: keep the live placement, or move to a point of the proposed front, with a reason that a person can read.

The default answer is keep. A move must clear, in this order: a plan that changes something, age of the live generation,
coverage and quality of the windows, the least gain, sampling noise, and its own cost (see `costs`). What a placement gains on
the next window, and how sure that is, is judged by `gains`: on the mean over layers (step time is a sum over layers) and on
the worst layer. Of the points that clear all that, the one with the best net gain is taken (`front_choice`): rarely the best
balance, since the last hundredths cost most moves.
"""

from __future__ import annotations

import numpy as np

from eplb_service.dispatch import reachable_slots
from eplb_service.errors import InvalidInputError
from eplb_service.front_choice import FrontChoice
from eplb_service.gains import KEEP, TableEvidence
from eplb_service.placement import Table
from eplb_service.policy.base import FrontPoint
from eplb_service.topology import Topology
from eplb_service.verdict import CLEARED_NOISE, GateConfig, GateInputs, Verdict, VerdictCode, keep

__all__ = ["CLEARED_NOISE", "GateConfig", "GateInputs", "TableEvidence", "Verdict", "VerdictCode", "decide"]


def _missing(placement: Table, topology: Topology) -> int:
    """(layer, expert) pairs that no serving rank holds."""
    count = 0
    for row in reachable_slots(placement, topology).reshape(placement.num_layers, -1):
        count += placement.num_logical - np.unique(row[row >= 0]).size
    return count


def _restored_coverage(inputs: GateInputs) -> Verdict | None:
    """A move at once where experts have no serving replica: to the cheapest points that lack fewest."""
    now = then = experts = 0
    chosen: list[FrontPoint | None] = []
    for table in inputs.tables:
        missing = _missing(table.current, inputs.topology)
        now += missing
        options = [
            (_missing(point.placement, inputs.topology), point.moves.experts, index)
            for index, point in enumerate(table.points)
            if table.flips_of(index) is not None
        ]
        best = min(options, default=(missing, 0, KEEP)) if missing else (0, 0, KEEP)
        chosen.append(None if best[2] == KEEP else table.points[best[2]])
        then += best[0]
        experts += best[1]
    if then >= now:
        return None
    return Verdict(
        move=True,
        code=VerdictCode.COVERAGE_BROKEN,
        reason=f"move: {now} experts have no serving replica, {then} after {experts} moves",
        numbers={"uncovered_before": float(now), "uncovered_after": float(then), "moves": float(experts)},
        chosen=tuple(chosen),
    )


def _before_gain(config: GateConfig, inputs: GateInputs) -> Verdict | None:
    """Reasons to answer before any gain is looked at."""
    if not any(table.points for table in inputs.tables):
        return keep(VerdictCode.NO_CHANGE, "keep: the policy proposes the placement that is live", {"moves": 0.0})
    restored = _restored_coverage(inputs)
    if restored is not None:
        return restored
    age = inputs.generation_age_s
    if age is not None and age < config.min_generation_age_s:
        return keep(
            VerdictCode.TOO_SOON,
            f"keep: the live generation is {age:.1f} s old, at least {config.min_generation_age_s:.1f} s must pass",
            {"generation_age_s": age, "min_generation_age_s": config.min_generation_age_s},
        )
    if inputs.hold:
        return keep(VerdictCode.ROLLED_BACK, f"keep: {inputs.hold}", {})
    return _poor_windows(config, inputs)


def _poor_windows(config: GateConfig, inputs: GateInputs) -> Verdict | None:
    """Whether the windows are too thin, too empty or too odd to plan from."""
    if inputs.coverage < config.min_coverage:
        return keep(
            VerdictCode.LOW_COVERAGE,
            f"keep: the window covers {inputs.coverage:.0%} of ranks and steps, at least {config.min_coverage:.0%} is needed",
            {"coverage": inputs.coverage, "min_coverage": config.min_coverage},
        )
    totals = np.concatenate([table.loads.sum(axis=(0, 2)) for table in inputs.tables])
    per_layer, busy = float(totals.mean()), int((totals > 0).sum())
    if per_layer < config.min_tokens or per_layer == 0:
        return keep(
            VerdictCode.TOO_FEW_TOKENS,
            f"keep: the window holds {per_layer:.0f} token assignments a layer; {max(1, config.min_tokens)} or more are needed",
            {"tokens_per_layer": per_layer, "min_tokens": float(config.min_tokens)},
        )
    if inputs.odd_load or busy < config.min_busy_layers * totals.size:
        odd = inputs.odd_load or (
            f"only {busy} of {totals.size} layers counted tokens, at least {config.min_busy_layers:.0%} must;"
            " a recorder without layer context puts all counts on one"
        )
        return keep(
            VerdictCode.ODD_LOAD, f"keep: {odd}", {"busy_layers": float(busy), "min_busy_layers": config.min_busy_layers}
        )
    parts = min(table.loads.shape[0] for table in inputs.tables)
    if parts < config.min_sub_windows:
        return keep(
            VerdictCode.TOO_FEW_WINDOWS,
            f"keep: the load is known in {parts} sub-windows, {config.min_sub_windows} are needed to tell noise from drift",
            {"sub_windows": float(parts), "min_sub_windows": float(config.min_sub_windows)},
        )
    return None


def decide(config: GateConfig, inputs: GateInputs) -> Verdict:
    """Keep or move. Raises InvalidInputError when there is no table to decide on."""
    if not inputs.tables:
        raise InvalidInputError("the gate needs at least one table; the deployment has no MoE layers")
    return _before_gain(config, inputs) or FrontChoice(config, inputs).verdict()
