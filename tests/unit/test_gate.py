from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.costs import CostModel
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.front_choice import replica_bytes
from eplb_service.gains import KEEP, own_point, points_of, table_gains
from eplb_service.gate import GateConfig, GateInputs, TableEvidence, Verdict, VerdictCode, decide
from eplb_service.ids import RankId
from eplb_service.moves import NO_MOVES
from eplb_service.noise import drift_dispersion, largest_by_row, largest_of_normals, normal_cdf, overdispersion, rank_moments
from eplb_service.placement import Table
from eplb_service.policy.base import FrontPoint, PlanningProblem
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.policy.verify import verify
from eplb_service.topology import Topology
from tests.unit.gate_trials import LINEAR as GATE_LINEAR
from tests.unit.gate_trials import asked, draw
from tests.unit.gate_trials import popularity as gate_popularity

TOPOLOGY = Topology.regular(num_ranks=8, num_nodes=2)
CHEAP = CostModel(seconds_per_step=0.02, horizon_steps=100_000, bytes_per_s=1e10, commit_stall_s=0.001)
CONFIG = GateConfig(min_sub_windows=1)
LINEAR = Table.linear(model="m", layer_ids=range(6), num_logical=32, rank_ids=TOPOLOGY.rank_ids, slots_per_rank=5)


def popularity(seed: int) -> npt.NDArray[np.float64]:
    weights = np.exp(np.random.default_rng(seed).normal(0, 1, (6, 32)))
    shares: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return shares


def sample(shares: npt.NDArray[np.float64], tokens: int, seed: int, num_windows: int = 1) -> npt.NDArray[np.float64]:
    random = np.random.default_rng(seed)
    drawn = [[random.multinomial(tokens // num_windows, layer) for layer in shares] for _ in range(num_windows)]
    return np.array(drawn, np.float64)


def evidence(loads: npt.NDArray[np.float64], current: Table, topology: Topology = TOPOLOGY) -> TableEvidence:
    problem = PlanningProblem(loads=loads, topology=topology, current=current, expert_bytes=(40_000_000,) * current.num_layers)
    proposal = verify(problem, GreedyPolicy().plan(problem), policy="greedy", solve_s=0.0)
    return TableEvidence(loads=loads, current=current, proposal=proposal)


def inputs(table: TableEvidence, **changes: Any) -> GateInputs:
    made = GateInputs(
        tables=(table,), topology=TOPOLOGY, dispatch=Dispatch.EVEN, coverage=1.0, generation_age_s=None, cost=CHEAP
    )
    return replace(made, **changes)


def verdict(table: TableEvidence, config: GateConfig = CONFIG, **changes: Any) -> Verdict:
    return decide(config, inputs(table, **changes))


SKEWED = evidence(sample(popularity(0), 200_000, 1), LINEAR)


def test_a_large_real_gain_that_pays_is_a_move_with_its_numbers() -> None:
    answer = verdict(SKEWED)
    assert answer.move
    assert answer.code is VerdictCode.MOVE
    assert answer.numbers["imbalance_mean_before"] == pytest.approx(SKEWED.proposal.before.mean)
    assert answer.numbers["saved_s"] > answer.numbers["cost_s"] > 0
    for number in ("mean over layers", "worst layer", f"{SKEWED.proposal.before.mean:.4f}", "100000 steps"):
        assert number in answer.reason


@pytest.mark.parametrize(
    ("changes", "config", "code", "words"),
    [
        ({"generation_age_s": 59.0}, CONFIG, VerdictCode.TOO_SOON, "59.0 s old, at least 60.0 s"),
        ({"coverage": 0.5}, CONFIG, VerdictCode.LOW_COVERAGE, "covers 50% of ranks and steps, at least 90%"),
        ({}, replace(CONFIG, min_tokens=300_000), VerdictCode.TOO_FEW_TOKENS, "holds 200000 token assignments"),
        ({}, replace(CONFIG, min_gain_mean=5.0, min_gain_worst=9.0), VerdictCode.GAIN_TOO_SMALL, "at least 5.0000 or 9.0000"),
        ({}, replace(CONFIG, noise_sigmas=1e4), VerdictCode.WITHIN_NOISE, "within 10000 standard errors"),
        ({"cost": None}, CONFIG, VerdictCode.NO_COST_MODEL, "no cost model is configured"),
        ({"cost": replace(CHEAP, horizon_steps=1)}, CONFIG, VerdictCode.COST_EXCEEDS_GAIN, "over 1 steps and costs"),
        ({"cost": replace(CHEAP, commit_stall_s=1e4)}, CONFIG, VerdictCode.COST_EXCEEDS_GAIN, "1e+04 s of stalls"),
    ],
)
def test_the_answer_is_keep_with_a_reason(changes: dict[str, Any], config: GateConfig, code: VerdictCode, words: str) -> None:
    answer = verdict(SKEWED, config, **changes)
    assert not answer.move
    assert answer.code is code
    assert answer.reason.startswith("keep: ")
    assert words in answer.reason


def test_a_proposal_that_changes_nothing_is_kept() -> None:
    planned = evidence(SKEWED.loads, SKEWED.proposal.placement)
    answer = verdict(planned)
    assert (answer.move, answer.code) == (False, VerdictCode.NO_CHANGE)


def test_a_slow_link_makes_the_same_gain_too_dear_vllm_50647() -> None:
    slow = replace(CHEAP, bytes_per_s=1e3)
    assert verdict(SKEWED, cost=slow).code is VerdictCode.COST_EXCEEDS_GAIN
    assert verdict(SKEWED, cost=replace(slow, copy_interference=0.0)).move


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2_000, 20_000, 500_000]))
def test_resample_of_the_same_load_from_its_own_plan_is_kept(seed: int, tokens: int) -> None:
    shares = popularity(seed)
    first = evidence(sample(shares, tokens, seed + 1), LINEAR)
    again = evidence(sample(shares, tokens, seed + 2), first.proposal.placement)
    eager = replace(CONFIG, min_gain_mean=0.0, min_gain_worst=0.0, min_tokens=0)
    answer = verdict(again, eager, cost=replace(CHEAP, horizon_steps=10**9))
    assert not answer.move, answer.reason


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_a_load_that_drifted_is_moved_for(seed: int) -> None:
    first = evidence(sample(popularity(seed), 500_000, seed + 1), LINEAR)
    drifted = evidence(sample(popularity(seed + 7), 500_000, seed + 2), first.proposal.placement)
    assert verdict(drifted).move


def rank_imbalance(table: Table, loads: npt.NDArray[np.float64]) -> float:
    """Mean over layers, by hand: every copy of an expert takes the same share."""
    found = []
    for row, load in zip(table.by_rank(), loads.sum(axis=0), strict=True):
        copies = np.bincount(row.ravel(), minlength=load.size)
        work = (load / copies)[row].sum(axis=1)
        found.append(work.max() / work.mean())
    return float(np.mean(found))


def test_a_trial_is_recommended_by_what_later_windows_show_refused_or_left_open_vllm_ascend_16800() -> None:
    """What a deployment that is only looked at is told, from its own windows."""
    config = replace(CONFIG, min_sub_windows=4, min_tokens=1000)
    table = evidence(sample(popularity(3), 100_000, 1, num_windows=4), LINEAR)
    trial = verdict(table, config)
    assert (trial.move, trial.code) == (True, VerdictCode.MOVE)
    later = sample(popularity(3), 100_000, 2, num_windows=4)
    shown = rank_imbalance(LINEAR, later) - rank_imbalance(table.proposal.placement, later)
    fitted = table.proposal.before.mean - table.proposal.predicted.mean
    assert abs(trial.gain - shown) < abs(fitted - shown)
    assert trial.gain == pytest.approx(shown, rel=0.05)
    not_now = verdict(evidence(later, table.proposal.placement), config)
    assert (not_now.move, not_now.code) == (False, VerdictCode.GAIN_TOO_SMALL)
    for tokens, windows, code in ((100_000, 2, VerdictCode.TOO_FEW_WINDOWS), (400, 4, VerdictCode.TOO_FEW_TOKENS)):
        left_open = verdict(evidence(sample(popularity(3), tokens, 1, num_windows=windows), LINEAR), config)
        assert (left_open.move, left_open.code) == (False, code)


def test_a_load_that_sways_about_what_was_committed_moves_nothing_vllm_ascend_15668_vllm_ascend_16183() -> None:
    """Gains count from the placement that is live, not from the one of the start: a plan is not undone and done again."""
    home, away = popularity(0), popularity(1)
    committed = evidence(sample(home, 500_000, 1), LINEAR).proposal.placement
    answers = [
        verdict(evidence(sample((1 - sway) * home + sway * away, 500_000, seed), committed))
        for seed, sway in enumerate((0.0, 0.005, 0.0, 0.005), start=2)
    ]
    assert not any(answer.move for answer in answers), [answer.reason for answer in answers]
    assert verdict(evidence(sample(0.3 * home + 0.7 * away, 500_000, 9), committed)).move


def test_lost_experts_are_moved_for_at_once_whatever_else_holds() -> None:
    topology = replace(TOPOLOGY, dead=frozenset({RankId(3)}))
    broken = evidence(SKEWED.loads[:, :, :30], Table.linear(
        model="m", layer_ids=range(6), num_logical=30, rank_ids=TOPOLOGY.rank_ids, slots_per_rank=5
    ), topology)  # fmt: skip
    answer = verdict(broken, cost=None, topology=topology, generation_age_s=0.0, coverage=0.0)
    assert answer.move
    assert answer.code is VerdictCode.COVERAGE_BROKEN
    assert answer.numbers["uncovered_before"] > answer.numbers["uncovered_after"] == 0


def test_idle_deployment_is_kept() -> None:
    idle = evidence(np.zeros((1, 6, 32)), LINEAR)
    assert verdict(idle).code is VerdictCode.NO_CHANGE
    forced = replace(SKEWED, loads=idle.loads)
    assert verdict(forced, replace(CONFIG, min_tokens=0)).code is VerdictCode.TOO_FEW_TOKENS


def test_gate_without_tables_and_bad_settings_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one table"):
        decide(CONFIG, replace(inputs(SKEWED), tables=()))
    with pytest.raises(InvalidInputError, match="bytes_per_s"):
        replace(CHEAP, bytes_per_s=0.0)
    with pytest.raises(InvalidInputError, match="copy_interference"):
        replace(CHEAP, copy_interference=1.5)
    with pytest.raises(InvalidInputError, match="min_coverage"):
        GateConfig(min_coverage=2.0)
    with pytest.raises(InvalidInputError, match="noise_sigmas"):
        GateConfig(noise_sigmas=float("nan"))
    with pytest.raises(InvalidInputError, match="min_sub_windows"):
        GateConfig(min_sub_windows=0)


def test_largest_of_normals_equals_simulation() -> None:
    random = np.random.default_rng(0)
    for means, errors in (([1.0, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]), ([1.0, 1.2, 0.5], [0.2, 0.05, 0.01]), ([3.0], [0.5])):
        drawn = random.normal(means, errors, (400_000, len(means))).max(axis=1)
        mean, spread = largest_of_normals(np.array(means), np.array(errors))
        assert mean == pytest.approx(drawn.mean(), abs=2e-3)
        assert spread == pytest.approx(drawn.std(), abs=2e-3)
    assert largest_of_normals(np.array([1.0, 2.0]), np.zeros(2)) == (2.0, 0.0)


def test_normal_distribution_function_has_its_known_values() -> None:
    assert normal_cdf(np.array([-1.959964, 0.0, 1.0])).tolist() == pytest.approx([0.025, 0.5, 0.8413447], abs=2e-7)


def test_fresh_imbalance_equals_what_resampling_shows() -> None:
    shares = popularity(3)
    loads = shares * 4000
    expected_means, expected_errors = rank_moments(loads, LINEAR, TOPOLOGY, Dispatch.EVEN, 1.0)
    by_layer, _ = largest_by_row(expected_means, expected_errors)
    worst, worst_error = largest_of_normals(expected_means.ravel(), expected_errors.ravel())
    seen = []
    for seed in range(300):
        means, _ = rank_moments(sample(shares, 4000, seed)[0], LINEAR, TOPOLOGY, Dispatch.EVEN, 1.0)
        seen.append(means.max(axis=1))
    layers = np.array(seen)
    assert by_layer.mean() == pytest.approx(layers.mean(), rel=0.01)
    assert worst == pytest.approx(layers.max(axis=1).mean(), rel=0.02)
    assert worst_error == pytest.approx(layers.max(axis=1).std(), rel=0.3)


def test_hashed_dispatch_adds_the_noise_of_the_hash() -> None:
    loads = popularity(3) * 4000
    _, even = rank_moments(loads, LINEAR, TOPOLOGY, Dispatch.EVEN, 1.0)
    _, hashed = rank_moments(loads, LINEAR, TOPOLOGY, Dispatch.HASHED, 1.0)
    assert (hashed >= even).all()
    assert (hashed > even).any()


def test_tokens_that_go_together_widen_the_noise() -> None:
    shares = popularity(1)
    independent = sample(shares, 80_000, 5, num_windows=8)
    assert overdispersion(independent) < 1.6
    clumped = sample(shares, 8_000, 5, num_windows=8) * 10
    assert overdispersion(clumped) == pytest.approx(10, rel=0.3)
    assert overdispersion(independent[:3]) == 1.0
    assert overdispersion(np.zeros((8, 2, 4))) == 1.0


def test_load_that_wanders_makes_the_next_window_less_certain() -> None:
    steady = sample(popularity(1), 80_000, 5, num_windows=8)
    assert drift_dispersion(steady) < 3
    random = np.random.default_rng(6)
    walk = np.cumsum(random.normal(0, 0.1, (8, 6, 32)), axis=0)
    weights = popularity(1) * np.exp(walk)
    wandering = np.array([sample(step / step.sum(axis=1, keepdims=True), 10_000, k)[0] for k, step in enumerate(weights)])
    assert drift_dispersion(wandering) > 3 * overdispersion(wandering)
    assert drift_dispersion(steady[:3]) == 1.0


# ── the front ────────────────────────────────────────────────────────────────────────────────────────────────────────────

FRONT_LOADS = draw(np.random.default_rng(3), gate_popularity(3), 200_000)
PER_MOVE = CostModel(seconds_per_step=0.02, horizon_steps=10_000, bytes_per_s=1e9, commit_stall_s=0.0)


def judged(**changes: Any) -> Verdict:
    return decide(GateConfig(), asked(FRONT_LOADS, GATE_LINEAR, **({"cost": PER_MOVE} | changes)))


def test_of_the_front_the_point_with_the_best_net_gain_is_chosen_and_the_reason_says_which() -> None:
    cheap, dear = judged(), judged(cost=replace(PER_MOVE, horizon_steps=45))
    assert (cheap.move, dear.move) == (True, True)
    assert cheap.chosen[0] is not None
    assert dear.chosen[0] is not None
    assert dear.chosen[0].moves.experts < cheap.chosen[0].moves.experts
    assert "the policy's own plan" in dear.reason
    assert f"point 1 of 2 of the front, {dear.chosen[0].moves.experts} moves net" in dear.reason
    evidence_ = asked(FRONT_LOADS, GATE_LINEAR, cost=PER_MOVE).tables[0]
    best = max(decide(GateConfig(), asked_for(point, horizon_steps=45)).numbers["net_s"] for point in evidence_.points)
    assert dear.numbers["net_s"] == pytest.approx(best)


def asked_for(point: FrontPoint, *, horizon_steps: float) -> GateInputs:
    """The same question with this point as the only proposal."""
    inputs_ = asked(FRONT_LOADS, GATE_LINEAR, cost=replace(PER_MOVE, horizon_steps=horizon_steps))
    table = inputs_.tables[0]
    only = replace(table.proposal, placement=point.placement, predicted=point.predicted, moves=point.moves, front=())
    return replace(inputs_, tables=(replace(table, proposal=only),))


def test_layers_that_stay_have_neither_gain_nor_noise() -> None:
    inputs_ = asked(FRONT_LOADS, GATE_LINEAR, cost=PER_MOVE)
    gains = table_gains(inputs_.tables[0], inputs_.topology, Dispatch.EVEN)
    for point, table in zip(gains.points, inputs_.tables[0].points, strict=True):
        stays = (table.placement.physical_to_logical == GATE_LINEAR.physical_to_logical).all(axis=1)
        assert (point.gain[stays] == 0).all()
        assert (point.error[stays] == 0).all()
        assert (point.error[~stays] > 0).all()
    assert gains.points[0].changed.sum() == 1


def test_a_point_that_cannot_be_rolled_out_is_not_chosen() -> None:
    inputs_ = asked(FRONT_LOADS, GATE_LINEAR, cost=PER_MOVE)
    flips = (1,) * (len(inputs_.tables[0].points) - 1) + (None,)
    answer = decide(GateConfig(), replace(inputs_, tables=(replace(inputs_.tables[0], flips=flips),)))
    assert answer.move
    assert answer.chosen[0] == inputs_.tables[0].points[-2]
    none = decide(GateConfig(), replace(inputs_, tables=(replace(inputs_.tables[0], flips=(None,) * len(flips)),)))
    assert none.code is VerdictCode.CANNOT_ROLL_OUT


def test_several_tables_are_joined_at_one_price_so_that_none_pays_more_for_a_second_than_another() -> None:
    """Two tables, one with little to gain: at a price at which only the large gain pays, the other stays as it is."""
    even = np.full_like(FRONT_LOADS, FRONT_LOADS.mean())
    even[:, :, 0] *= 1.3
    large, small = (asked(loads, GATE_LINEAR, cost=PER_MOVE).tables[0] for loads in (FRONT_LOADS, even))
    inputs_ = replace(asked(FRONT_LOADS, GATE_LINEAR, cost=replace(PER_MOVE, horizon_steps=120)), tables=(large, small))
    dear = decide(GateConfig(), inputs_)
    assert dear.move
    assert dear.chosen[0] is not None
    assert dear.chosen[1] is None
    free = decide(GateConfig(), replace(inputs_, cost=replace(PER_MOVE, horizon_steps=10**9)))
    assert all(point is not None for point in free.chosen)
    brute = []
    for points in itertools.product(*([KEEP, *range(len(table.points))] for table in (large, small))):
        if any(point != KEEP for point in points):
            alone = replace(
                inputs_, tables=tuple(_only(table, point) for table, point in zip((large, small), points, strict=True))
            )
            brute.append(decide(GateConfig(), alone).numbers.get("net_s", -1e9))
    assert dear.numbers["net_s"] == pytest.approx(max(brute))


def _only(table: TableEvidence, point: int) -> TableEvidence:
    chosen = (
        FrontPoint(placement=table.current, predicted=table.proposal.before, moves=NO_MOVES)
        if point == KEEP
        else table.points[point]
    )
    proposal = replace(table.proposal, placement=chosen.placement, predicted=chosen.predicted, moves=chosen.moves, front=())
    return replace(table, proposal=proposal)


def test_what_earlier_plans_taught_is_taken_off_the_gain_and_said() -> None:
    full, half = judged(), judged(gain_share=0.5)
    assert half.gain == pytest.approx(full.gain / 2)
    assert half.numbers["saved_s"] == pytest.approx(full.numbers["saved_s"] / 2)
    assert "50% of what the plan promises" in half.reason
    short = replace(PER_MOVE, horizon_steps=30)
    assert [judged(gain_share=share, cost=short).move for share in (1.0, 0.5)] == [True, False]


@pytest.mark.parametrize(
    ("changes", "config", "code", "words"),
    [
        ({"hold": "generation 3 was rolled back"}, GateConfig(), VerdictCode.ROLLED_BACK, "generation 3 was rolled back"),
        ({}, GateConfig(min_sub_windows=5), VerdictCode.TOO_FEW_WINDOWS, "known in 4 sub-windows, 5 are needed"),
        ({"odd_load": "rank 1 counts one layer"}, GateConfig(), VerdictCode.ODD_LOAD, "rank 1 counts one layer"),
        ({}, GateConfig(min_return=1e6), VerdictCode.COST_EXCEEDS_GAIN, "1e+06 s must be saved for each that it costs"),
    ],
)
def test_the_answer_is_keep_for_holds_and_poor_windows(
    changes: dict[str, Any], config: GateConfig, code: VerdictCode, words: str
) -> None:
    answer = decide(config, asked(FRONT_LOADS, GATE_LINEAR, **({"cost": PER_MOVE} | changes)))
    assert (answer.move, answer.code) == (False, code)
    assert words in answer.reason


def test_counts_on_one_layer_of_many_are_kept_sglang_25948() -> None:
    loads = FRONT_LOADS.copy()
    loads[:, 1:] = 0
    answer = decide(GateConfig(min_tokens=0), asked(loads, GATE_LINEAR, cost=PER_MOVE))
    assert (answer.move, answer.code) == (False, VerdictCode.ODD_LOAD)
    assert "only 1 of 4 layers counted tokens" in answer.reason


def test_memory_that_replicas_hold_is_shown_and_priced_only_if_asked() -> None:
    table = asked(FRONT_LOADS, GATE_LINEAR).tables[0]
    assert judged().numbers["replica_bytes"] == replica_bytes(GATE_LINEAR, table.expert_bytes) == 4 * 4 * 40_000_000
    assert "replica memory" not in judged().reason
    lean = GATE_LINEAR.physical_to_logical.copy()
    lean[:, 16:] = -1
    bare = replace(GATE_LINEAR, physical_to_logical=lean)
    priced = decide(GateConfig(), asked(FRONT_LOADS, bare, cost=replace(PER_MOVE, replica_s_per_gib=2.0)))
    more = priced.numbers["replica_bytes"]
    assert more > 0
    assert priced.numbers["cost_s"] == pytest.approx(priced.numbers["copy_s"] + 2.0 * more / (1 << 30))
    assert "replica memory" in priced.reason


def test_under_weighted_dispatch_points_without_shares_get_even_ones() -> None:
    weighted = GATE_LINEAR.with_even_shares()
    proposal = asked(FRONT_LOADS, GATE_LINEAR).tables[0].proposal
    points = points_of(proposal, weighted)
    assert points
    assert all(point.placement.shares is not None for point in points)
    assert own_point(proposal, weighted, points) != KEEP
