"""Plans for engines that know no empty slot: every usable slot holds an expert, and `verify` insists on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError, PolicyFailedError
from eplb_service.offline.plan import fleet_topology, starting_table
from eplb_service.placement import EMPTY_SLOT, Int32Array, Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem, RawPlan
from eplb_service.policy.fill import filled
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy

EMPTIED = (11, 15)


def problem_of(
    *,
    seed: int = 0,
    constraints: Constraints | None = None,
    from_nothing: bool = False,
    num_layers: int = 2,
) -> PlanningProblem:
    """Four ranks of four slots on two nodes, all slots full."""
    topology = fleet_topology(num_ranks=4, nodes=2)
    return PlanningProblem(
        loads=np.random.default_rng(seed).gamma(0.5, 100, (1, num_layers, 8)),
        topology=topology,
        current=starting_table(num_layers=num_layers, num_logical=8, topology=topology, slots_per_rank=4),
        constraints=constraints or Constraints(fill_slots=True),
        expert_bytes=(1,) * num_layers,
        from_nothing=from_nothing,
        time_limit_s=60.0,
    )


def emptied(problem: PlanningProblem) -> RawPlan:
    """A plan that leaves slots empty whose experts other ranks have."""
    rows = problem.current.physical_to_logical.copy()
    rows[:, EMPTIED] = EMPTY_SLOT
    return RawPlan(physical_to_logical=rows, front=(rows,))


def has_empty(rows: Int32Array) -> bool:
    return bool((rows == EMPTY_SLOT).any())


@pytest.mark.parametrize("seed", range(8))
def test_empty_slots_get_the_copy_after_which_the_busiest_rank_has_least_to_do(seed: int) -> None:
    problem = problem_of(seed=seed, from_nothing=True)
    raw = emptied(problem)
    made = filled(problem, raw)
    assert made.status == "filled"
    assert np.array_equal(made.front[0], made.physical_to_logical)
    for layer in range(2):
        row = raw.physical_to_logical[layer].copy()
        for slot in EMPTIED:
            options = {}
            for expert in sorted(set(range(8)) - set(row[slot // 4 * 4 : slot // 4 * 4 + 4].tolist())):
                tried = row.copy()
                tried[slot] = expert
                share = np.append(problem.total_loads[layer] / np.bincount(tried[tried >= 0], minlength=8), 0.0)
                options[expert] = float(share[tried].reshape(4, 4).sum(axis=1).max())
            chosen = int(made.physical_to_logical[layer, slot])
            assert options[chosen] == pytest.approx(min(options.values()))
            row[slot] = chosen


def test_filling_keeps_bars_replica_limits_and_limits_on_moves() -> None:
    bars = frozenset(ExpertOnRank(expert, 3) for expert in (0, 1, 2))
    barred = problem_of(constraints=Constraints(fill_slots=True, barred=bars))
    assert not set(filled(barred, emptied(barred)).physical_to_logical.reshape(2, 4, 4)[:, 3, 3].tolist()) & {0, 1, 2}
    still = problem_of(constraints=Constraints(fill_slots=True, max_moves=0))
    assert np.array_equal(filled(still, emptied(still)).physical_to_logical, still.current.physical_to_logical)
    narrow = problem_of(constraints=Constraints(fill_slots=True, max_replicas=2))
    assert max(np.bincount(row[row >= 0]).max() for row in filled(narrow, emptied(narrow)).physical_to_logical) == 2


def test_what_is_full_or_no_map_stays_as_it_is() -> None:
    problem = problem_of()
    full = RawPlan(physical_to_logical=problem.current.physical_to_logical.copy())
    assert filled(problem, full) is full
    for nonsense in (np.zeros((1, 3), np.int32), np.full((2, 16), 99), np.full((2, 16), np.nan), None):
        raw = RawPlan(physical_to_logical=nonsense)  # type: ignore[arg-type]
        assert filled(problem, raw) is raw
    rows = emptied(problem).physical_to_logical
    odd: dict[str, Any]
    for odd in ({"front": None}, {"front": 5}, {"front_shares": None}, {"physical_to_logical": np.ma.array(rows)}):
        fields: dict[str, Any] = {"physical_to_logical": rows, **odd}
        raw = RawPlan(**fields)
        assert filled(problem, raw) is raw


@pytest.mark.parametrize("name", ["minmove", "greedy", "robust", "ilp", "elastic", "resilient"])
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_leaves_no_slot_empty_and_no_point_of_its_front_does(name: str, seed: int) -> None:
    problem = replace(problem_of(seed=seed, num_layers=3), front=True, work_budget=20_000, max_imbalance=1.1)
    proposal = verify(problem, run_policy(load_policy(name), problem), policy=name, solve_s=0.0)
    for placement in (proposal.placement, *(point.placement for point in proposal.front)):
        assert not has_empty(placement.physical_to_logical)


def test_minmove_that_fills_searches_without_empty_slots_instead_of_filling_afterwards() -> None:
    free = replace(problem_of(seed=5, num_layers=6), constraints=Constraints(), max_imbalance=1.05, work_budget=600_000)
    policy = load_policy("minmove")
    assert has_empty(run_policy(policy, free).physical_to_logical), "the case shows nothing"
    full = replace(free, constraints=Constraints(fill_slots=True))
    raw = run_policy(policy, full)
    assert raw.status != "filled"
    assert not has_empty(raw.physical_to_logical)


def test_an_empty_slot_that_could_hold_an_expert_is_refused_by_name() -> None:
    problem = problem_of()
    with pytest.raises(PolicyFailedError, match=r"layer 0: slot 11 is empty, but the engine's tables know no empty slot"):
        verify(problem, emptied(problem), policy="x", solve_s=0.0)
    others = frozenset(ExpertOnRank(expert, 3) for expert in (1, 2, 3, 4, 7))
    closed = replace(problem, constraints=Constraints(fill_slots=True, barred=others))
    rows = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 4, 5, 6, 0, EMPTY_SLOT]] * 2)
    proposal = verify(closed, RawPlan(physical_to_logical=rows), policy="x", solve_s=0.0)
    assert has_empty(proposal.placement.physical_to_logical)  # nothing that rank 3 may hold is left


def test_slots_that_must_be_filled_and_may_not_be_moved_into_contradict_one_another() -> None:
    problem = problem_of(constraints=Constraints(fill_slots=True, max_moves=3))
    now = problem.current.with_rows(dict(enumerate(emptied(problem).physical_to_logical)))
    with pytest.raises(InvalidInputError, match=r"4 empty slots .* at most 3 moves are allowed; raise max_moves"):
        run_policy(load_policy("minmove"), replace(problem, current=now))


def test_filling_that_takes_too_many_moves_falls_back_to_the_nearest_full_rows_or_says_so() -> None:
    topology = fleet_topology(num_ranks=3)
    rows = np.array([[0, 3, 1, 4, 2, 4, 4, 4, -1], [-1, 1, 3, 0, 2, 4, 3, -1, -1]], np.int32)
    current = Table("m", (3, 9), 5, topology.rank_ids, rows)
    loads = np.array([[[100.0, 2, 2, 0, 0], [100.0, 20, 0, 1, 7]]])
    for dispatch in (Dispatch.EVEN, Dispatch.WEIGHTED):
        asked = PlanningProblem(loads=loads, topology=topology, current=current, dispatch=dispatch, time_limit_s=60.0)
        for name in ("greedy", "minmove", "robust", "ilp"):
            six = replace(asked, constraints=Constraints(fill_slots=True, max_moves=6))
            proposal = verify(six, run_policy(load_policy(name), six), policy=name, solve_s=0.0)
            assert not has_empty(proposal.placement.physical_to_logical)
            five = replace(asked, constraints=Constraints(fill_slots=True, max_moves=5))
            with pytest.raises(InvalidInputError, match=r"4 are empty now, but even so 6 moves; at most 5 are allowed"):
                verify(five, run_policy(load_policy(name), five), policy=name, solve_s=0.0)


def test_points_of_a_front_that_cannot_be_filled_within_the_limits_are_dropped_with_their_shares() -> None:
    problem = problem_of(constraints=Constraints(fill_slots=True, max_moves=0))
    full = problem.current.physical_to_logical.copy()
    swapped = full.copy()
    swapped[0, 0], swapped[0, 4] = full[0, 4], EMPTY_SLOT
    shares = np.ones(full.shape, np.float32)
    made = filled(problem, RawPlan(physical_to_logical=full, front=(swapped, full), front_shares=(shares, shares * 2)))
    assert len(made.front) == len(made.front_shares) == 1
    assert np.array_equal(made.front_shares[0], shares * 2)
