"""Measure what the README says of the routing: `python -m examples.tiny_moe.measure`.

Loads are counted on held-out prompts by the serving path itself. Placements come from a few lines of longest-processing-time
greedy below, not from the project's policies: the figures are a fact about the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from examples.tiny_moe.config import TinyMoeError
from examples.tiny_moe.generate import run_experts
from examples.tiny_moe.model import Span, TinyMoe
from examples.tiny_moe.numerics import configure_torch
from examples.tiny_moe.text import KINDS, prompts

NUM_RANKS = 4
_SEQUENCES_A_STEP = 64

Loads = NDArray[np.int64]


def expert_loads(model: TinyMoe, texts: Sequence[bytes]) -> Loads:
    """Token assignments of each expert when the texts are prefilled.

    Returns:
        Shape (L, E), int64.
    """
    config = model.config
    loads = np.zeros((config.num_layers, config.num_experts), np.int64)
    for first in range(0, len(texts), _SEQUENCES_A_STEP):
        loads += _step_loads(model, texts[first : first + _SEQUENCES_A_STEP])
    return loads


def _step_loads(model: TinyMoe, texts: Sequence[bytes]) -> Loads:
    config = model.config
    spans: list[Span] = []
    start = 0
    for text in texts:
        spans.append(Span(model.new_cache(), start, len(text)))
        start += len(text)
    hidden = model.embed(torch.tensor(list(b"".join(texts)), dtype=torch.int64))
    loads = np.zeros((config.num_layers, config.num_experts), np.int64)
    for row, layer_id in enumerate(model.moe_layer_ids()):
        hidden = model.attend(layer_id, hidden, spans)
        routing = model.route(layer_id, hidden)
        loads[row] = np.bincount(routing.experts.flatten().numpy(), minlength=config.num_experts)
        hidden = model.combine(hidden, run_experts(model, layer_id, routing), routing.gates)
    return loads


def hottest_to_mean(loads: Loads) -> NDArray[np.float64]:
    """Load of the hottest expert over the mean of all. Shape (L, E) to (L,), float64."""
    ratio: NDArray[np.float64] = loads.max(axis=1) / loads.mean(axis=1)
    return ratio


def total_variation(one: Loads, other: Loads) -> NDArray[np.float64]:
    """Share of the assignments that would have to go elsewhere. Two of shape (L, E) to (L,), float64 in [0, 1]."""
    first, second = (loads / loads.sum(axis=1, keepdims=True) for loads in (one, other))
    distance: NDArray[np.float64] = np.abs(first - second).sum(axis=1) / 2
    return distance


def contiguous_placement(num_experts: int) -> list[list[int]]:
    """Experts in order, equally many on each rank, none redundant: what an engine starts with."""
    return [list(part) for part in np.array_split(range(num_experts), NUM_RANKS)]


def greedy_placement(load: Loads) -> list[list[int]]:
    """Longest processing time first, with one redundant slot a rank.

    The expert with the most load per replica gets each redundant replica; replicas, heaviest first, go to the least loaded
    rank that has a free slot and no replica of it yet.

    Args:
        load: Shape (E,), int64.

    Returns:
        For each rank its experts.
    """
    num_slots = len(load) // NUM_RANKS + 1
    replicas = np.ones(len(load), np.int64)
    for _ in range(num_slots * NUM_RANKS - len(load)):
        replicas[np.argmax(np.where(replicas < NUM_RANKS, load / replicas, -1.0))] += 1
    share = load / replicas
    placement: list[list[int]] = [[] for _ in range(NUM_RANKS)]
    total = [0.0] * NUM_RANKS
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(int(replicas[expert])):
            free = [rank for rank in range(NUM_RANKS) if len(placement[rank]) < num_slots]
            rank = min(free, key=lambda rank: (expert in placement[rank], total[rank], rank))
            placement[rank].append(expert)
            total[rank] += float(share[expert])
    return placement


def imbalance(load: Loads, placement: list[list[int]]) -> float:
    """Maximum rank load over mean rank load when replicas of an expert share its load evenly. Shape (E,), int64."""
    replicas = np.bincount([expert for rank in placement for expert in rank], minlength=len(load))
    ranks = [sum(float(load[expert] / replicas[expert]) for expert in rank) for rank in placement]
    return max(ranks) * len(ranks) / sum(ranks)


def worst_layer(loads: Loads, placements: Sequence[list[list[int]]]) -> float:
    """Imbalance of the worst layer, loads of shape (L, E) under one placement for each layer."""
    return max(imbalance(load, placement) for load, placement in zip(loads, placements, strict=True))


def report(model: TinyMoe, *, num_prompts: int, length: int, seed: int) -> list[str]:
    """Lines of the tables; plans are made on one sample of each kind and scored on another."""
    planned = {kind: expert_loads(model, prompts(kind, num_prompts, length=length, seed=seed)) for kind in KINDS}
    later = {kind: expert_loads(model, prompts(kind, num_prompts, length=length, seed=seed + 1)) for kind in KINDS}
    lines = [f"{num_prompts} held-out prompts of {length} bytes per kind and sample, {NUM_RANKS} ranks", ""]
    lines.append("hottest expert / mean, by layer; fewest assignments of any expert; dead experts")
    for kind in KINDS:
        ratios = " ".join(f"{ratio:5.2f}" for ratio in hottest_to_mean(later[kind]))
        lines.append(f"  {kind:<8} {ratios}   fewest {later[kind].min()}   dead {(later[kind] == 0).sum()}")
    together = sum(later.values(), start=np.zeros_like(later[KINDS[0]]))
    ratios = " ".join(f"{ratio:5.2f}" for ratio in hottest_to_mean(together))
    lines.append(f"  {'all':<8} {ratios}   fewest {together.min()}   dead {(together == 0).sum()}")
    lines += ["", "total variation of popularity, mean over layers (diagonal: two samples of one kind)"]
    lines.append(" " * 11 + "".join(f"{kind:>9}" for kind in KINDS))
    for one in KINDS:
        cells = "".join(f"{total_variation(planned[one], later[other]).mean():9.3f}" for other in KINDS)
        lines.append(f"  {one:<9}{cells}")
    lines += ["", "imbalance of the worst layer: traffic in rows, placement in columns (planned on the other sample)"]
    lines.append(" " * 11 + f"{'linear':>9}" + "".join(f"{kind:>9}" for kind in KINDS))
    linear = [contiguous_placement(model.config.num_experts)] * model.config.num_layers
    plans = {kind: [greedy_placement(load) for load in planned[kind]] for kind in KINDS}
    for traffic in KINDS:
        cells = "".join(f"{worst_layer(later[traffic], plan):9.2f}" for plan in (linear, *plans.values()))
        lines.append(f"  {traffic:<9}{cells}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how popular experts are, how that shifts between kinds, and what placements make of it."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m examples.tiny_moe.measure")
    parser.add_argument("--prompts", type=int, default=256, help="for each kind and sample")
    parser.add_argument("--length", type=int, default=128, help="bytes of a prompt")
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts")
    parser.add_argument("--weights", type=Path, default=None, help="another weights file than the shipped one")
    options = parser.parse_args(arguments)
    configure_torch()
    try:
        model = TinyMoe.load(options.weights)
        lines = report(model, num_prompts=options.prompts, length=options.length, seed=options.seed)
    except TinyMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
