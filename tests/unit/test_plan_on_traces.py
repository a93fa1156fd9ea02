"""Plans on recorded routing of a public model, scored on windows that they have not seen: what sub-windows bring."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measuring import NotBuiltError
from benchmarks.traces import (
    HISTORY,
    LEAST_OVER_PEER,
    PEER_MEANS,
    TRACES,
    follow,
    policy_planner,
    windows_of,
)
from eplb_service.dispatch import imbalance_of
from eplb_service.placement import Table
from eplb_service.policy.base import Effort, PlanningProblem
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.robust import RobustPolicy
from eplb_service.topology import Topology

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded traces in {TRACES}"),
]


@pytest.mark.parametrize(("name", "first", "moved_max"), [("drift", 40, 0.07), ("mixed", 40, 0.05)])
def test_traffic_is_followed_as_engines_do_with_a_fraction_of_their_moves(name: str, first: int, moved_max: float) -> None:
    came = follow(policy_planner("robust"), windows_of(name)[first : first + 20], HISTORY)
    assert came.moved <= moved_max, "engines move three quarters of the slots"
    assert came.mean <= PEER_MEANS[name] + LEAST_OVER_PEER


@pytest.mark.parametrize("name", ["drift", "mixed"])
def test_a_plan_on_sub_windows_is_better_on_unseen_ones_than_a_plan_on_their_sum(name: str) -> None:
    counts = windows_of(name)
    topology = Topology.regular(num_ranks=8)
    current = Table.linear(model="m", layer_ids=range(24), num_logical=32, rank_ids=topology.rank_ids, slots_per_rank=5)
    means: dict[str, list[float]] = {"series": [], "sum": [], "greedy": []}
    for start in range(0, 80, 16):
        seen, unseen = counts[start : start + 8], counts[start + 8 : start + 12]
        sums = seen.sum(axis=0, keepdims=True)
        for kind, policy, loads in (
            ("series", RobustPolicy(), seen),
            ("sum", RobustPolicy(), sums),
            ("greedy", GreedyPolicy(), sums),
        ):
            problem = PlanningProblem(
                loads=loads, topology=topology, current=current, from_nothing=True, effort=Effort.QUICK, time_limit_s=1000.0
            )
            rows = policy.plan(problem).physical_to_logical
            after = Table("m", current.layer_ids, 32, current.rank_ids, rows)
            means[kind] += [imbalance_of(window, after, topology).mean for window in unseen]
    assert np.mean(means["series"]) < np.mean(means["sum"]) - 0.002
    assert np.mean(means["series"]) < np.mean(means["greedy"]) - 0.002


def test_a_trace_that_is_not_there_is_told_by_its_name() -> None:
    with pytest.raises(NotBuiltError, match="windows_sideways"):
        windows_of("sideways")
