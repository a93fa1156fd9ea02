"""The gate on recorded routing of a public model, window after window: what it moves for, and what that brings afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.costs import CostModel
from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.gate import GateConfig, GateInputs, TableEvidence, decide
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
TOPOLOGY = Topology.regular(num_ranks=8, num_nodes=2)
CONFIG = GateConfig()
COST = CostModel(seconds_per_step=0.02, horizon_steps=100_000, bytes_per_s=1e10, commit_stall_s=0.001)

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded traces in {TRACES}"),
]


def windows_of(name: str) -> npt.NDArray[np.float64]:
    with np.load(TRACES / f"gpt-oss-20b_windows_{name}.npz") as archive:
        counts: npt.NDArray[np.float64] = archive[archive.files[0]].astype(np.float64)
    return counts


def follow(counts: npt.NDArray[np.float64], length: int) -> tuple[int, int, list[float], list[float]]:
    """Decide every `length` windows. Returns decisions, moves, and the imbalance seen next: by the gate, by the first plan."""
    _, num_layers, num_logical = counts.shape
    current = Table.linear(
        model="m", layer_ids=range(num_layers), num_logical=num_logical, rank_ids=TOPOLOGY.rank_ids, slots_per_rank=5
    )
    first: Table | None = None
    decisions = moved = 0
    by_gate, by_first = [], []
    for end in range(length, len(counts) - length + 1, length):
        loads, following = counts[end - length : end], counts[end : end + length].sum(axis=0)
        problem = PlanningProblem(loads=loads, topology=TOPOLOGY, current=current, expert_bytes=(13_000_000,) * num_layers)
        proposal = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
        table = TableEvidence(loads=loads, current=current, proposal=proposal)
        inputs = GateInputs(
            tables=(table,), topology=TOPOLOGY, dispatch=Dispatch.EVEN, coverage=1.0, generation_age_s=None, cost=COST
        )
        decisions += 1
        if decide(CONFIG, inputs).move:
            moved += 1
            current = proposal.placement
        first = first or current
        by_gate.append(imbalance_of(following, current, TOPOLOGY).mean)
        by_first.append(imbalance_of(following, first, TOPOLOGY).mean)
    return decisions, moved, by_gate, by_first


def test_traffic_that_drifts_is_followed_and_later_windows_are_better_for_it() -> None:
    decisions, moved, by_gate, by_first = follow(windows_of("drift"), 8)
    assert 2 <= moved < decisions
    assert np.mean(by_gate) - 1 < 0.5 * (np.mean(by_first) - 1)


def test_traffic_whose_mix_stays_is_mostly_left_alone() -> None:
    decisions, moved, by_gate, by_first = follow(windows_of("mixed"), 16)
    assert decisions == 5
    assert 1 <= moved <= 2
    assert np.mean(by_gate) < np.mean(by_first) + 0.01
