"""Ranks that are to be stopped: what is left on them, whether the others can hold it, and what may never go there."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from eplb_service.drain import (
    DrainState,
    RankDrain,
    drained_ranks,
    is_drained,
    keeping_drained,
    left_on,
    serving,
    staying,
    why_not_drained,
    why_off_limits,
)
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.placement import Placement, Table
from eplb_service.policy.base import Constraints, ExpertOnRank, PlanningProblem
from eplb_service.policy.drained import with_drained_kept, without_drained
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy
from eplb_service.topology import Topology

WORK = 60_000


def ranks(*ids: int) -> frozenset[RankId]:
    return frozenset(RankId(rank) for rank in ids)


def table(*rows: list[int], ids: tuple[int, ...] = (0, 1, 2), num_logical: int = 4, model: str = "m") -> Table:
    layers = tuple(range(len(rows)))
    return Table(model, layers, num_logical, tuple(RankId(rank) for rank in ids), np.array(rows, np.int32))


def by_hand(placement: Placement, drained: frozenset[RankId]) -> dict[int, tuple[int, int]]:
    """Held and alone of each drained rank, by looking at one slot after another."""
    found = {int(rank): (0, 0) for rank in placement.rank_ids if rank in drained}
    for each in placement.tables:
        for layer in each.by_rank().tolist():
            stay = {expert for rank, held in zip(each.rank_ids, layer, strict=True) if rank not in drained for expert in held}
            for rank, held in zip(each.rank_ids, layer, strict=True):
                experts = set(held) - {-1}
                if rank in drained:
                    before = found[int(rank)]
                    found[int(rank)] = (before[0] + len(experts), before[1] + len(experts - stay))
    return found


def test_what_is_left_on_drained_ranks_is_what_a_look_at_every_slot_finds() -> None:
    random = np.random.default_rng(4)
    for _ in range(30):
        ids = tuple(random.permutation(9)[:4].tolist())
        tables = tuple(
            table(*random.integers(-1, 6, (2, 12)).tolist(), ids=ids, num_logical=6, model=name) for name in ("target", "draft")
        )
        placement = Placement(tables)
        for size in range(1, 5):
            for chosen in combinations(ids, size):
                found = {int(left.rank_id): (left.held, left.alone) for left in left_on(placement, ranks(*chosen))}
                assert found == by_hand(placement, ranks(*chosen))


def test_an_expert_that_two_drained_ranks_share_is_alone_on_both() -> None:
    placement = Placement((table([0, 1, 2, 3, 3, 2]),))
    assert [left.alone for left in left_on(placement, ranks(1, 2))] == [2, 2]
    assert [left.alone for left in left_on(placement, ranks(2))] == [0]


def test_states_and_sentences_tell_when_a_rank_may_be_stopped_dynamo_13580() -> None:
    empty, copies, alone = (RankDrain(rank_id=RankId(3), held=held, alone=many) for held, many in ((0, 0), (4, 0), (4, 1)))
    assert empty.state(may_keep=False) is copies.state(may_keep=True) is DrainState.SAFE_TO_STOP
    assert copies.state(may_keep=False) is alone.state(may_keep=True) is DrainState.DRAINING
    assert empty.sentence(may_keep=False) == "rank 3 holds no expert that another has not: safe to stop"
    assert "safe to stop (4 copies stay on it" in copies.sentence(may_keep=True)
    assert "4 experts over all layers, all of them live elsewhere too: do not stop it yet" in copies.sentence(may_keep=False)
    assert "1 of them live on no rank that stays: do not stop it yet" in alone.sentence(may_keep=True)


def test_ranks_that_are_away_or_of_which_nothing_is_known_are_told_apart() -> None:
    placement = Placement((table([0, 1, 2, 3, -1, -1]),))
    shown = drained_ranks(ranks(2, 9), placement, may_keep=False, why_unknown="")
    assert [(one.rank_id, one.state) for one in shown] == [(2, DrainState.SAFE_TO_STOP), (9, DrainState.ABSENT)]
    (unknown,) = drained_ranks(ranks(2), None, may_keep=False, why_unknown="chat is waiting")
    assert unknown.state is DrainState.UNKNOWN
    assert "chat is waiting" in unknown.sentence


@pytest.mark.parametrize(
    ("drained", "words"),
    [
        ((), ""),
        ((0,), ""),
        (
            (0, 2),
            r".*\(1\) have 1 x 2 = 2 slots for the 4 experts .* at least 4 .*: let at least 2 ranks stay, or .* 4 slots each",
        ),
        ((0, 1, 2), "no rank would stay for the 4 experts .*: let at least 2 ranks stay"),
    ],
)
def test_ranks_that_cannot_be_spared_are_refused_with_the_least_number(drained: tuple[int, ...], words: str) -> None:
    why = why_not_drained((table([0, 1, 2, 3, 0, 1]),), ranks(*drained))
    assert re.fullmatch(words, why), why


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_least_number_of_ranks_is_what_holds_all_experts_be_it_one_dynamo_12937(num_ranks: int) -> None:
    wide = table([0, 1, 2, 3] * num_ranks, ids=tuple(range(num_ranks)))  # each rank has room for all four experts
    assert why_not_drained((wide,), ranks(*range(1, num_ranks))) == ""
    assert "no rank would stay" in why_not_drained((wide,), ranks(*range(num_ranks)))
    problem = PlanningProblem(loads=np.ones((1, 1, 4)), topology=Topology.regular(num_ranks=num_ranks), current=wide)
    policy = load_policy("greedy")
    proposal = verify(problem, run_policy(policy, problem), policy="greedy", solve_s=0.0)
    assert proposal.predicted.worst == 1.0


def test_only_ranks_that_hold_nothing_count_as_serving_no_expert() -> None:
    topology = Topology.regular(num_ranks=3)
    assert serving(topology, Placement((table([0, 1, 2, 3, 0, -1]),)), ranks(2)) == topology
    emptied = serving(topology, Placement((table([0, 1, 2, 3, -1, -1]),)), ranks(2))
    assert emptied.dead == ranks(2)
    other = Placement((table([0, 1, 2, 3], ids=(0, 1)),))
    assert serving(topology, other, ranks(2)) == topology
    assert staying(replace(topology, dead=ranks(0)), ranks(2, 7)).dead == ranks(0, 2)


def test_a_change_that_brings_something_to_a_drained_rank_is_named_and_one_that_leaves_it_there_is_not() -> None:
    before = Placement((table([0, 1, 2, 3, 0, -1]),))
    assert why_off_limits(before, before, ranks(2)) == ""
    swapped = Placement((table([0, 1, 2, 3, -1, 0]),))
    assert why_off_limits(before, swapped, ranks(2)) == ""
    brought = Placement((table([0, 1, 2, 3, 0, 1]),))
    assert "puts expert 1 of layer m/0 on rank 2, which is drained: `eplb undrain 2`" in why_off_limits(
        before, brought, ranks(2)
    )
    assert why_off_limits(before, brought, ranks(1)) == ""


def problem_of(current: Table, **changes: object) -> PlanningProblem:
    given = PlanningProblem(
        loads=np.ones((1, current.num_layers, current.num_logical)),
        topology=Topology(current.rank_ids, ("a",) * current.num_ranks),
        current=current,
        work_budget=WORK,
        max_imbalance=1e6,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("drained", [(5,), (0,), (9, 0)])
def test_a_drain_moves_what_is_alone_there_and_nothing_else(drained: tuple[int, ...]) -> None:
    """Ids with gaps and in any order, the first rank among those drained (vllm#38862)."""
    current = Table.linear(model="m", layer_ids=range(3), num_logical=16, rank_ids=(5, 0, 9, 2, 7), slots_per_rank=6)
    problem, notes = without_drained(problem_of(current), ranks(*drained))
    proposal = verify(problem, run_policy(load_policy("elastic"), problem), policy="elastic", solve_s=0.0)
    placement, before = Placement((proposal.placement,)), Placement((current,))
    assert notes == ()
    assert is_drained(placement, ranks(*drained), may_keep=False)
    held = {rank for rank in current.rank_ids if rank not in ranks(*drained)}
    orphans = sum(
        16 - len({int(e) for rank in held for e in current.local_experts(layer, rank)} - {-1}) for layer in current.layer_ids
    )
    assert proposal.moves.experts == orphans
    assert why_off_limits(before, placement, ranks(*drained)) == ""


def test_an_engine_without_empty_slots_keeps_copies_on_the_drained_rank_and_every_expert_elsewhere() -> None:
    current = Table.linear(model="m", layer_ids=range(2), num_logical=8, rank_ids=(0, 1, 2), slots_per_rank=6)
    given = problem_of(current, constraints=Constraints(fill_slots=True), max_imbalance=1.2)
    problem, _ = without_drained(given, ranks(1))
    proposal = verify(problem, run_policy(load_policy("elastic"), problem), policy="elastic", solve_s=0.0)
    kept = with_drained_kept(proposal, current, ranks(1)).placement
    assert (kept.physical_to_logical >= 0).all()
    assert np.array_equal(kept.by_rank()[:, 1], current.by_rank()[:, 1])
    assert is_drained(Placement((kept,)), ranks(1), may_keep=True)
    assert not is_drained(Placement((kept,)), ranks(1), may_keep=False)


def test_copies_that_are_kept_take_no_tokens_under_weighted_dispatch() -> None:
    live = table([0, 1, 2, 3, 2, 3]).with_even_shares()
    planned = table([0, 1, 2, 3, -1, -1]).with_even_shares()
    kept = keeping_drained(planned, live, ranks(2))
    assert kept.shares is not None
    assert kept.physical_to_logical.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert kept.shares.tolist() == [[1, 1, 1, 1, 0, 0]]


def test_constraints_that_the_others_cannot_meet_are_given_up_and_named() -> None:
    current = table([0, 1, 2, 3, 0, 1])
    pinned = Constraints(pinned=frozenset({ExpertOnRank(0, 2)}))
    problem, notes = without_drained(problem_of(current, constraints=pinned), ranks(2))
    assert problem.constraints.pinned == frozenset()
    assert notes == ("1 pins to dead ranks [2] are given up",)
    same, none = without_drained(problem_of(current, constraints=pinned), ranks())
    assert (same.constraints, none) == (pinned, ())
    with pytest.raises(InvalidInputError, match="4 experts do not fit 2 usable slots"):
        without_drained(problem_of(current), ranks(1, 2))
