"""One layer in arrays: what each constraint becomes there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.ids import RankId
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.groups import Layout
from eplb_service.policy.layer_task import LayerTask, layer_task
from eplb_service.policy.limits import limits_of
from eplb_service.topology import Topology

TOPOLOGY = Topology(
    tuple(RankId(rank) for rank in (4, 2, 9, 7)), ("a", "a", "b", "b"), (1.0, 2.0, 1.0, 1.0), base_load=(0.5, 0, 0, 1)
)
LOAD = np.array([[[8.0, 6, 4, 2, 2, 2]]])


def task_of(constraints: Constraints | None = None, topology: Topology = TOPOLOGY) -> LayerTask:
    current = Table.linear(model="m", layer_ids=(5,), num_logical=6, rank_ids=topology.rank_ids, slots_per_rank=3)
    problem = PlanningProblem(loads=LOAD, topology=topology, current=current, constraints=constraints or Constraints())
    limits = limits_of(problem)
    return layer_task(problem, limits, Layout.of(problem, limits), 0)


def test_own_work_of_ranks_is_in_mean_rank_loads_and_the_fair_height_counts_it() -> None:
    task = task_of()
    assert task.base.tolist() == [3.0, 0.0, 0.0, 6.0]
    assert task.fair == pytest.approx((24 + 9) / 5)
    assert task.heights().tolist() == pytest.approx([12.0, 3.0 / 2, 9.0, 9.0])


def test_dead_ranks_have_no_room_and_may_hold_nothing() -> None:
    task = task_of(topology=replace(TOPOLOGY, dead=frozenset({RankId(2)})))
    assert task.room.tolist() == [3, 0, 3, 3]
    assert not task.allowed[1].any()
    assert (task.held[1] == -1).all()
    assert task.base.tolist() == [4.0, 0.0, 0.0, 8.0]


def test_an_expert_in_a_slot_out_of_use_stays_on_its_rank_without_a_move() -> None:
    task = task_of(Constraints(unusable_slots=frozenset({(4, 0)})))
    assert task.held[0].tolist() == [-1, 1, 2]
    assert task.price[0].tolist() == [0, 0, 0, 1, 1, 1]


def test_pins_bars_and_protection_become_masks_and_copies() -> None:
    constraints = Constraints(
        pinned=frozenset({ExpertOnRank(0, 4), ExpertOnRank(0, 2, 5)}),
        barred=frozenset({ExpertOnRank(1, 9)}),
        resilience=Resilience(hot_share=0.5),
        max_replicas=3,
    )
    task = task_of(constraints)
    assert np.argwhere(task.pinned).tolist() == [[0, 0], [1, 0]]
    assert np.argwhere(~task.allowed).tolist() == [[2, 1]]
    assert task.spread.tolist() == [True, True, True, False, False, False]
    assert task.copies_min.tolist() == [3, 2, 2, 1, 1, 1]  # both pins of expert 0 are on one node: it needs a third copy
    assert task.copies_max.tolist() == [3] * 6
    assert task.domain_of.tolist() == [0, 0, 1, 1]
    by_rank = task_of(replace(constraints, resilience=Resilience(hot_share=0.5, domain=FailureDomain.RANK)))
    assert by_rank.copies_min.tolist() == [2, 2, 2, 1, 1, 1]
    assert by_rank.domain_of.tolist() == [0, 1, 2, 3]


def test_strict_groups_are_a_mask_and_soft_groups_a_price() -> None:
    strict = task_of(Constraints(num_groups=2))
    homes = [{int(node) for node in strict.node_of[strict.allowed[:, expert]]} for expert in range(6)]
    assert [len(home) for home in homes] == [1] * 6
    assert homes[0] == homes[1] == homes[2] != homes[3]
    soft = task_of(Constraints(num_groups=2, group_price=7.0))
    assert soft.allowed.all()
    away = soft.price >= 7.0
    assert away.sum() == 2 * 6
    assert ((soft.price - 7.0 * away) == task_of().price).all()
