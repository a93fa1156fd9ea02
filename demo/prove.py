"""What must hold at the end of a run, each checked from evidence that the service did not produce, where there is any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.engine.reference.messages import Inspection
from agent.engine.reference.model import expert_digest
from demo.ledger import Ledger
from demo.model import load
from demo.oracle import OracleProcess
from demo.result import Check, DemoResult
from demo.serving import Serving

FLIPS_MIN = 2
SERVED_SHARE_MIN = 0.9
"""Share of the slots that a generation filled that must then have served: a cold expert may see no token in seconds."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at. inspections: of all ranks, at the end; generations: the planner's records."""

    serving: Serving
    oracle: OracleProcess
    ledger: Ledger
    inspections: Sequence[Inspection]
    generations: Sequence[Any]


def prove(result: DemoResult, evidence: Evidence) -> list[Check]:
    """Every check of the demo, in the order in which they are shown."""
    return [
        _tokens(evidence),
        _across(evidence),
        _flips(result),
        _one_placement(evidence),
        _same_step(result, evidence),
        _same_rows(evidence),
        _weights_follow_the_map(evidence),
        _moved_slots_served(evidence),
        _chosen_by_the_gate(result),
        _gain(result),
    ]


def _tokens(evidence: Evidence) -> Check:
    oracle = evidence.oracle
    wrong = [judged for judged in oracle.judged if judged.mismatches]
    detail = f"{oracle.tokens_checked:,} tokens of {len(oracle.judged)} requests, {oracle.mismatches} differ"
    if wrong:
        first = wrong[0]
        detail += f"; first: request {first.request_id}, token {first.first_difference} should be {first.expected}"
    name = "every token equals the same model's in one plain process"
    complete = len(oracle.judged) == evidence.serving.requests and not oracle.waiting
    return Check(name, passed=complete and oracle.tokens_checked > 0 and oracle.mismatches == 0, detail=detail)


def _across(evidence: Evidence) -> Check:
    count = evidence.serving.across_a_flip
    return Check(
        "requests were served across flips", passed=count > 0, detail=f"{count} requests began before a flip and ended after it"
    )


def _flips(result: DemoResult) -> Check:
    detail = f"{result.flips} generations; at least {FLIPS_MIN}"
    return Check("generations went live while requests were served", passed=result.flips >= FLIPS_MIN, detail=detail)


def _one_placement(evidence: Evidence) -> Check:
    serving = evidence.serving
    steps = serving.boundaries_compared
    return Check(
        "one placement per batch: at every step all ranks routed by the same generations",
        passed=steps > 0 and bool(serving.flip_boundaries),
        detail=f"{steps:,} steps of ranks compared",  # a difference would have ended the run
    )


def _same_step(result: DemoResult, evidence: Evidence) -> Check:
    recorded = sorted({step for row in result.generations for step in row.flip_boundaries})
    seen = evidence.serving.flip_boundaries
    return Check(
        "the planner recorded the steps at which tokens really changed placement",
        passed=bool(seen) and set(seen) <= set(recorded),
        detail=f"recorded {recorded}, seen in the tokens {seen}",
    )


def _same_rows(evidence: Evidence) -> Check:
    digests = [tuple(layer.row_digest for layer in inspection.layers) for inspection in evidence.inspections]
    return Check(
        "all ranks hold the same routing tables",
        passed=len(set(digests)) == 1,
        detail=f"{len(digests)} ranks, {len(digests[0])} layers, {len(set(digests))} different sets of row digests",
    )


def _weights_follow_the_map(evidence: Evidence) -> Check:
    model = load()
    right = {}
    for layer_id in model.moe_layer_ids():
        stacked = model.expert_tensors(layer_id)
        experts = next(iter(stacked.values())).shape[0]
        for expert in range(experts):
            right[layer_id, expert] = expert_digest({name: tensor[expert] for name, tensor in stacked.items()})
    slots, wrong = 0, []
    for position, inspection in enumerate(evidence.inspections):
        for layer in inspection.layers:
            held = layer.row[position * len(layer.slot_digests) : (position + 1) * len(layer.slot_digests)]
            for slot, (expert, digest) in enumerate(zip(held, layer.slot_digests, strict=True)):
                if expert < 0:
                    continue
                slots += 1
                if digest != right[layer.layer_id, expert]:
                    wrong.append(f"rank {inspection.rank_id} layer {layer.layer_id} slot {slot}")
    detail = f"{slots} slots compared with the checkpoint, all tensors" + (f"; wrong: {', '.join(wrong[:4])}" if wrong else "")
    return Check("weights follow the map: every slot holds its expert's tensors", passed=slots > 0 and not wrong, detail=detail)


def _moved_slots_served(evidence: Evidence) -> Check:
    moved = evidence.ledger.moved_slots()
    total, served = sum(item.moved for item in moved), sum(item.served for item in moved)
    detail = f"{served} of {total} slots that were filled anew (at least {SERVED_SHARE_MIN:.0%})"
    passed = total > 0 and served >= SERVED_SHARE_MIN * total
    return Check("slots that moved then served tokens", passed=passed, detail=detail)


def _chosen_by_the_gate(result: DemoResult) -> Check:
    rows = [row for row in result.generations if not row.by_operator]
    ordered = [row.generation for row in result.generations if row.by_operator]
    without = [row.generation for row in rows if not row.reason]
    moved = sum(row.moves for row in rows)
    return Check(
        "the gate chose every generation that nobody ordered from windows, and weights moved",
        passed=bool(rows) and not without and moved > 0,
        detail=f"{len(rows)} generations, {moved} experts moved"
        + (f"; without a reason: {without}" if without else "")
        + (f"; ordered by an operator: {ordered}" if ordered else ""),
    )


def _gain(result: DemoResult) -> Check:
    ordered = {row.generation for row in result.generations if row.by_operator}
    chosen = [comparison for comparison in result.comparisons if comparison.generation not in ordered]
    gains = [comparison for comparison in chosen if not comparison.of_prompts_before]
    overtaken = [comparison.generation for comparison in chosen if comparison.of_prompts_before]
    text = ", ".join(f"generation {c.generation}: {c.before.worst:.3f} -> {c.after.worst:.3f}" for c in gains)
    return Check(
        "on the same later window every generation of the gate's is better than the one before (worst layer)",
        passed=len(gains) >= FLIPS_MIN and all(c.after.worst < c.before.worst for c in gains),
        detail=(text or "no generation served long enough to compare")
        + (f"; planned mostly from other prompts than it then served, not compared: {overtaken}" if overtaken else "")
        + (f"; ordered by an operator, not compared: {sorted(ordered)}" if ordered else ""),
    )
