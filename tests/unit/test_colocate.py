"""Co-location: pairs end up on one node as far as every choice of places allows, and no rule of the plan is broken for it."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.errors import InvalidInputError
from eplb_service.node_visits import visits_of
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem, Proposal
from eplb_service.policy.colocate import colocated
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.limits import limits_of
from eplb_service.policy.minmove import MinMovePolicy
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy
from eplb_service.topology import Topology
from tests.unit.constraint_oracle import moves_of, tiny_problems

EXPERTS, RANKS, SLOTS = 6, 4, 2
STEPS = 20_000


def tokens_of(seed: int, num_layers: int, num_logical: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Loads (L, E) and pairs (L, E, E) of 400 tokens a layer that choose two experts, some pairs far more often than others."""
    random = np.random.default_rng(seed)
    pairs = np.zeros((num_layers, num_logical, num_logical))
    for layer in range(num_layers):
        ones, others = np.triu_indices(num_logical, 1)
        weight = random.exponential(1.0, ones.size) ** 2
        pairs[layer, ones, others] = random.multinomial(400, weight / weight.sum())
    pairs += pairs.transpose(0, 2, 1)
    return pairs.sum(axis=2), pairs


def problem_of(
    seed: int, *, num_layers: int = 1, nodes: int = 2, target: float = 1.3, from_nothing: bool = True
) -> PlanningProblem:
    loads, pairs = tokens_of(seed, num_layers, EXPERTS)
    topology = Topology.regular(num_ranks=RANKS, num_nodes=nodes)
    current = Table.linear(
        model="m", layer_ids=range(num_layers), num_logical=EXPERTS, rank_ids=topology.rank_ids, slots_per_rank=SLOTS
    )
    return PlanningProblem(
        loads=loads[None],
        topology=topology,
        current=current,
        together=pairs,
        max_imbalance=target,
        from_nothing=from_nothing,
        work_budget=STEPS * num_layers,
        time_limit_s=1000.0,
    )


def proposal_of(problem: PlanningProblem, policy: str = "greedy") -> Proposal:
    return verify(problem, run_policy(load_policy(policy), problem), policy=policy, solve_s=0.0)


def pair_share(problem: PlanningProblem, rows: npt.NDArray[np.int32]) -> float:
    assert problem.together is not None
    now = problem.current
    table = Table(now.model, now.layer_ids, now.num_logical, now.rank_ids, rows)
    return visits_of(problem.total_loads, problem.together, table, problem.topology).pair_share


def every_row(planned: list[int]) -> set[tuple[tuple[int, ...], ...]]:
    """All ways to lay out the same copies with no expert twice on a rank; the order of slots in a rank is left out."""
    found: set[tuple[tuple[int, ...], ...]] = set()

    def lay(left: tuple[int, ...], ranks: tuple[tuple[int, ...], ...]) -> None:
        if not left:
            found.add(ranks)
            return
        for held in sorted(set(itertools.combinations(left, SLOTS))):
            if len(set(held)) == SLOTS:
                rest = list(left)
                for expert in held:
                    rest.remove(expert)
                lay(tuple(rest), (*ranks, held))

    lay(tuple(sorted(planned)), ())
    return found


def best_by_trying(problem: PlanningProblem, before: Proposal) -> float:
    """The largest pair share of the plan's own copies at no more than its height (or the target's) and moves."""
    highest = max(before.predicted.worst, problem.max_imbalance or 1.0) * (1 + 1e-9)
    most = before.moves.experts
    best = 0.0
    for ranks in every_row(before.placement.physical_to_logical[0].tolist()):
        row = [expert for held in ranks for expert in held]
        if not problem.from_nothing and len(moves_of(0, row, problem)) > most:
            continue
        table = replace(before.placement, physical_to_logical=np.array([row], np.int32))
        if imbalance_of(problem.total_loads, table, problem.topology).worst <= highest:
            best = max(best, pair_share(problem, table.physical_to_logical))
    return best


@pytest.mark.parametrize(("from_nothing", "gap_max"), [(True, 0.002), (False, 0.002)])
def test_small_layers_come_within_a_hair_of_every_layout_tried(from_nothing: bool, gap_max: float) -> None:
    gaps, gains = [], []
    for seed in range(6):
        problem = problem_of(seed, from_nothing=from_nothing)
        policy = "greedy" if from_nothing else "minmove"
        before = proposal_of(replace(problem, together=None), policy)
        after = proposal_of(problem, policy)
        best, reached = best_by_trying(problem, before), pair_share(problem, after.placement.physical_to_logical)
        assert reached <= best + 1e-9
        gaps.append(best - reached)
        gains.append(reached - pair_share(problem, before.placement.physical_to_logical))
    assert min(gains) >= -1e-9
    assert np.mean(gaps) <= gap_max
    assert np.mean(gains) > (0.05 if from_nothing else 0.005)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(tiny_problems(), st.integers(0, 1000), st.sampled_from(["greedy", "minmove"]))
def test_no_rule_is_broken_whatever_the_constraints(problem: PlanningProblem, seed: int, policy: str) -> None:
    assume(problem.current.num_logical > 1)
    loads, pairs = tokens_of(seed, problem.current.num_layers, problem.current.num_logical)
    problem = replace(problem, loads=loads[None], work_budget=1000 * problem.current.num_layers, time_limit_s=1000.0)
    solver = GreedyPolicy() if policy == "greedy" else MinMovePolicy()
    try:
        raw = run_policy(solver, problem)
    except InvalidInputError:
        assume(False)
    before = verify(problem, raw, policy=policy, solve_s=0.0)
    asked = replace(problem, together=pairs)
    after = verify(asked, run_policy(solver, asked), policy=policy, solve_s=0.0)  # every constraint and every limit on moves
    default = 1.02 if policy == "minmove" else 1.0
    highest = [max(height, problem.max_imbalance or default) for height in before.predicted.per_layer]
    assert all(height <= most + 1e-9 for height, most in zip(after.predicted.per_layer, highest, strict=True))
    for layer in range(problem.current.num_layers):
        old, new = (plan.placement.physical_to_logical[layer].tolist() for plan in (before, after))
        assert sorted(old) == sorted(new), "copies stay as many as they are"
        if not problem.from_nothing:
            assert len(moves_of(layer, new, problem)) <= len(moves_of(layer, old, problem))
    was, now = (pair_share(asked, plan.placement.physical_to_logical) for plan in (before, after))
    assert now >= was - 1e-9


@pytest.mark.parametrize("policy", ["greedy", "minmove", "elastic"])
def test_same_problem_gives_the_same_plan_and_another_seed_another_search(policy: str) -> None:
    problem = problem_of(5, num_layers=3, from_nothing=policy == "greedy")
    first, again = (proposal_of(problem, policy) for _ in range(2))
    np.testing.assert_array_equal(first.placement.physical_to_logical, again.placement.physical_to_logical)
    sent = pickle.loads(pickle.dumps(problem))  # how a problem goes to the solver's process
    np.testing.assert_array_equal(proposal_of(sent, policy).placement.physical_to_logical, first.placement.physical_to_logical)


def test_weighted_shares_go_with_their_copies() -> None:
    problem = replace(problem_of(3, num_layers=4), dispatch=Dispatch.WEIGHTED)
    before, after = proposal_of(replace(problem, together=None)), proposal_of(problem)
    highest = [max(height, 1.3) for height in before.predicted.per_layer]
    assert all(height <= most + 1e-6 for height, most in zip(after.predicted.per_layer, highest, strict=True))
    assert problem.together is not None
    was, now = (
        visits_of(problem.total_loads, problem.together, plan.placement, problem.topology, Dispatch.WEIGHTED).pair_share
        for plan in (before, after)
    )
    assert now > was + 0.05


@pytest.mark.parametrize(
    "problem",
    [
        replace(problem_of(1), together=None),
        problem_of(1, nodes=1),
        replace(problem_of(1), dispatch=Dispatch.NEAREST),
        replace(problem_of(1), constraints=Constraints(num_groups=2)),
        replace(problem_of(1), together=np.zeros((1, EXPERTS, EXPERTS))),
    ],
    ids=["nothing known", "one node", "nearest dispatch", "strict groups", "no pairs"],
)
def test_rows_come_back_as_they_are_where_there_is_nothing_to_gain(problem: PlanningProblem) -> None:
    rows = GreedyPolicy().plan(replace(problem, together=None)).physical_to_logical
    found, cut_off = colocated(problem, limits_of(problem), rows, target=1.5, expired=lambda: False)
    np.testing.assert_array_equal(found, rows)
    assert not cut_off


def test_time_that_is_over_leaves_the_plan_and_says_so() -> None:
    problem = problem_of(1)
    rows = GreedyPolicy().plan(replace(problem, together=None)).physical_to_logical
    found, cut_off = colocated(problem, limits_of(problem), rows, target=1.5, expired=lambda: True)
    np.testing.assert_array_equal(found, rows)
    assert cut_off


def test_a_layer_that_is_good_enough_stays_as_it_is() -> None:
    problem = problem_of(2, num_layers=2, from_nothing=False)
    settled = proposal_of(replace(problem, together=None), "minmove").placement
    after = proposal_of(replace(problem, current=settled), "minmove")
    assert (after.moves.experts, after.placement) == (0, settled)


def test_pairs_are_checked_against_the_loads() -> None:
    problem = problem_of(1)
    assert problem.together is not None
    with pytest.raises(InvalidInputError, match="no pair can have more tokens"):
        replace(problem, together=problem.together * 1000)
    with pytest.raises(ValueError, match="read-only"):
        problem.together[0, 0, 1] = 5.0
