"""Experts that no rank holds come back with the fewest moves, and nothing else changes (vllm#41204, sglang#12068).

The slow obvious way: every way to fill a layer's slots, the best of those that cover every expert.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import RankId
from eplb_service.moves import count_moves, residencies
from eplb_service.placement import EMPTY_SLOT, Table
from eplb_service.policy.base import Constraints, ExpertOnRank, FailureDomain, PlanningProblem, Resilience
from eplb_service.policy.restore import Restorers, restored
from eplb_service.topology import Topology

SIZE = 10


def problem_of(
    rows: list[list[int]], num_logical: int, num_ranks: int, *, constraints: Constraints | None = None, **more: object
) -> PlanningProblem:
    ranks = tuple(RankId(10 + rank) for rank in range(num_ranks))
    table = Table("m", tuple(range(len(rows))), num_logical, ranks, np.array(rows, np.int32))
    given: dict[str, object] = {
        "loads": np.ones((1, len(rows), num_logical)),
        "topology": Topology(ranks, tuple(f"n{rank // 2}" for rank in range(num_ranks))),
        "current": table,
        "constraints": constraints or Constraints(),
        "expert_bytes": (SIZE,) * len(rows),
    }
    return PlanningProblem(**{**given, **more})  # type: ignore[arg-type]


def everyone(problem: PlanningProblem, **changes: object) -> Restorers:
    known = Restorers(ranks=set(problem.current.rank_ids), drained=frozenset(), staging_bytes=1 << 30)
    return replace(known, **changes)  # type: ignore[arg-type]


def slow_fewest(problem: PlanningProblem, restorers: Restorers) -> int | None:
    """Least moves of any layer that covers every expert by the hard rules; None when there is none. One layer, few slots."""
    table = problem.current
    old, ranks, width = table.physical_to_logical[0], table.num_ranks, table.slots_per_rank
    shape = {"num_ranks": ranks, "num_logical": table.num_logical}
    held = residencies(old, **shape)
    nobody = ~held.any(axis=0)
    best: int | None = None
    choices = [
        [int(value)] if table.rank_ids[slot // width] in restorers.drained else range(-1, table.num_logical)
        for slot, value in enumerate(old.tolist())
    ]
    for row in itertools.product(*choices):
        new = np.array(row)
        there = residencies(new, **shape)
        rewritten = ((new != old) & (new != EMPTY_SLOT)).reshape(ranks, width).sum(axis=1)
        fresh = np.asarray((there & nobody).any(axis=1))
        if (
            not there.any(axis=0).all()
            or (rewritten * SIZE > restorers.staging_bytes).any()
            or any(fresh[place] and rank not in restorers.ranks for place, rank in enumerate(table.rank_ids))
            or any(len(set(part) - {-1}) < sum(value >= 0 for value in part) for part in new.reshape(ranks, width).tolist())
        ):
            continue
        moves = count_moves(old, new, **shape)
        best = moves if best is None else min(best, moves)
    return best


@st.composite
def gaps(draw: st.DrawFn) -> tuple[PlanningProblem, Restorers]:
    """A layer of few slots in which experts may have no slot; some ranks have no backup, some are drained."""
    num_ranks, width = draw(st.sampled_from([(2, 2), (3, 1), (2, 3), (3, 2)]))
    num_logical = draw(st.integers(2, min(4, num_ranks * width)))
    row: list[int] = []
    for _ in range(num_ranks):
        experts = draw(st.permutations(range(num_logical)))[:width]
        row += [expert if draw(st.integers(0, 2)) else -1 for expert in [*experts, *[-1] * width][:width]]
    loads = np.array(draw(st.lists(st.integers(0, 9), min_size=num_logical, max_size=num_logical)), np.float64)
    problem = problem_of([row], num_logical, num_ranks, loads=loads[None, None, :])
    ids = problem.current.rank_ids
    able = draw(st.sets(st.sampled_from(ids), min_size=1))
    drained = draw(st.sets(st.sampled_from(ids), max_size=1))
    staged = draw(st.sampled_from([1, 2, 9]))
    return problem, Restorers(ranks=able, drained=drained, staging_bytes=staged * SIZE + SIZE // 2)


@settings(max_examples=60, deadline=None)
@given(gaps())
def test_every_expert_is_covered_with_the_fewest_moves_of_all_placements_that_cover_it(
    case: tuple[PlanningProblem, Restorers],
) -> None:
    problem, restorers = case
    fewest = slow_fewest(problem, restorers)
    if fewest is None:
        with pytest.raises(InvalidInputError, match=r"live on no rank"):
            restored(problem, restorers)
        return
    found = restored(problem, restorers)
    table, old = found.table, problem.current
    shape = {"num_ranks": table.num_ranks, "num_logical": table.num_logical}
    before, after = old.physical_to_logical[0], table.physical_to_logical[0]
    assert not table.uncovered()
    assert count_moves(before, after, **shape) == fewest
    held, there = residencies(before, **shape), residencies(after, **shape)
    nobody = ~held.any(axis=0)
    for place, rank in enumerate(table.rank_ids):
        span = slice(place * table.slots_per_rank, (place + 1) * table.slots_per_rank)
        changed = int((before[span] != after[span]).sum())
        assert changed * SIZE <= restorers.staging_bytes
        assert changed == 0 or rank not in restorers.drained
        assert rank in restorers.ranks or not (there[place] & nobody).any()
        assert ((before[span] == EMPTY_SLOT) | (after[span] != EMPTY_SLOT)).all()  # nothing is emptied
    assert (there.sum(axis=0)[nobody] == 1).all()  # exactly what is needed
    assert int((before != after).sum()) == fewest  # and nothing else


def test_a_placement_without_gaps_stays_as_it_is() -> None:
    problem = problem_of([[0, 1, 2, 0], [2, 1, 0, -1]], 3, 2)
    found = restored(problem, everyone(problem))
    assert found.table is not None
    assert np.array_equal(found.table.physical_to_logical, problem.current.physical_to_logical)
    assert found.given_up == ()


def test_a_free_slot_goes_first_then_the_copy_whose_loss_weighs_least() -> None:
    loads = np.array([9.0, 1.0, 5.0, 3.0])
    free = problem_of([[0, 1, 0, -1, 1, 2]], 4, 3, loads=loads[None, None])
    assert restored(free, everyone(free)).table.physical_to_logical.tolist() == [[0, 1, 0, 3, 1, 2]]
    full = problem_of([[0, 1, 0, 2, 1, 2]], 4, 3, loads=loads[None, None])
    assert 3 in restored(full, everyone(full)).table.physical_to_logical[0]
    row = restored(full, everyone(full)).table.physical_to_logical[0].tolist()
    assert (row.count(0), row.count(1), row.count(2)) == (2, 1, 2)  # expert 1 has the least load


def test_the_last_copy_of_another_goes_to_a_rank_with_room_where_only_a_full_rank_has_a_backup() -> None:
    problem = problem_of([[0, 1, 2, -1]], 4, 2)
    found = restored(problem, everyone(problem, ranks={RankId(10)}))
    row = found.table.physical_to_logical[0].tolist()
    assert 3 in row[:2]
    assert sorted(row) == [0, 1, 2, 3]


def test_a_drained_rank_keeps_what_it_holds_and_gets_nothing() -> None:
    problem = problem_of([[0, -1, -1, 1, 2, -1]], 4, 3)
    found = restored(problem, everyone(problem, drained={RankId(10), RankId(11)}))
    assert found.table.physical_to_logical.tolist() == [[0, -1, -1, 1, 2, 3]]


def test_pins_and_bars_are_kept_where_they_can_be_also_by_experts_that_come_back() -> None:
    pinned = Constraints(
        pinned=frozenset({ExpertOnRank(3, 12), ExpertOnRank(0, 10), ExpertOnRank(0, 99)}),
        barred=frozenset({ExpertOnRank(4, 11)}),
    )
    problem = problem_of([[0, 1, -1, -1, 1, 0]], 5, 3, constraints=pinned)
    problem = replace(problem, current=problem.current.with_rows({0: np.array([0, 1, 2, -1, 1, 0])}))
    found = restored(problem, everyone(problem))
    row = found.table.by_rank()[0].tolist()
    assert 3 in row[2]
    assert 0 in row[0]
    assert 4 not in row[1]
    assert found.given_up == ()


def test_what_cannot_be_kept_is_given_up_and_said() -> None:
    barred = Constraints(barred=frozenset({ExpertOnRank(2, 10), ExpertOnRank(2, 11)}), pinned=frozenset({ExpertOnRank(1, 10)}))
    problem = problem_of([[0, 1, -1, -1]], 3, 2, constraints=barred)
    found = restored(problem, everyone(problem))
    assert found.given_up == ("experts on a rank that they are barred from: 1",)
    pinned = Constraints(pinned=frozenset({ExpertOnRank(2, 10)}))
    problem = problem_of([[0, 1, -1, -1]], 3, 2, constraints=pinned)
    found = restored(problem, everyone(problem, ranks={RankId(11)}))
    assert found.given_up == ("experts that are not on the rank to which they are pinned: 1",)


def test_an_expert_comes_back_to_the_node_of_its_strict_group() -> None:
    groups = Constraints(num_groups=2)
    problem = problem_of([[0, -1, 2, -1, 3, 4, 5, -1]], 6, 4, constraints=groups)
    found = restored(problem, everyone(problem))
    row = found.table.physical_to_logical[0].tolist()
    assert row.index(1) < 4
    assert found.given_up == ()


def test_a_copy_in_a_second_failure_domain_is_not_what_makes_room_where_another_copy_can() -> None:
    by_node = Constraints(resilience=Resilience(hot_share=0.4, domain=FailureDomain.NODE))
    loads = np.array([1.0, 9.0, 9.0, 9.0, 9.0])  # experts 1 and 2 are protected: on both nodes
    row = [1, 2, 0, 3, 1, 2, 0, 3]
    problem = problem_of([row], 5, 4, constraints=by_node, loads=loads[None, None])
    found = restored(problem, everyone(problem))
    new = found.table.physical_to_logical[0].tolist()
    assert (new.count(1), new.count(2)) == (2, 2)
    assert 4 in new
    assert found.given_up == ()


def test_more_experts_than_the_ranks_with_a_backup_have_room_for_are_said_with_numbers() -> None:
    problem = problem_of([[0, 1, 2, -1, -1, -1]], 6, 3)
    with pytest.raises(InvalidInputError) as caught:
        restored(problem, everyone(problem, ranks={RankId(10)}, drained={RankId(11)}))
    assert str(caught.value) == (
        "layer m/0: 1 of the 3 experts that live on no rank find no slot: the ranks that can restore them (10) have 2 slots,"
        " 0 of them free or with an expert that another slot holds too; start more ranks with a backup, or with more slots"
    )
    with pytest.raises(InvalidInputError, match="no rank that may be given experts has a backup"):
        restored(problem, everyone(problem, ranks=frozenset()))


def test_weighted_dispatch_gets_shares_of_the_layers_that_change_and_keeps_the_others() -> None:
    rows = np.array([[0, 1, 0, 1], [0, 1, 2, -1]], np.int32)
    shares = np.array([[0.25, 0.5, 0.75, 0.5], [1, 1, 1, 0]], np.float32)
    problem = problem_of(rows.tolist(), 3, 2, dispatch=Dispatch.WEIGHTED)
    table = Table("m", (0, 1), 3, problem.current.rank_ids, rows, shares)
    found = restored(replace(problem, current=table), everyone(problem)).table
    assert not found.uncovered()
    assert found.shares is not None
    assert found.shares[1].tolist() == shares[1].tolist()
    row = found.physical_to_logical[0]
    for expert in range(3):
        assert found.shares[0][row == expert].sum() == 1.0


def test_layers_of_real_width_take_one_move_for_every_expert_that_is_missing() -> None:
    random = np.random.default_rng(7)
    ranks = tuple(RankId(rank) for rank in range(31))
    rows = []
    for _ in range(3):
        row = np.concatenate([random.permutation(256), random.permutation(256)[:32]])  # of 32 ranks, one of which is lost
        rows.append(row[9:])
    table = Table("m", (0, 1, 2), 256, ranks, np.array(rows, np.int32))
    missing = len(table.uncovered())
    assert missing > 0
    problem = PlanningProblem(
        loads=random.gamma(1.0, 1.0, (1, 3, 256)),
        topology=Topology(ranks, tuple(f"n{rank // 8}" for rank in ranks)),
        current=table,
        expert_bytes=(SIZE,) * 3,
    )
    found = restored(problem, everyone(problem, staging_bytes=9 * SIZE))
    shape = {"num_ranks": 31, "num_logical": 256}
    moves = [
        count_moves(old, new, **shape)
        for old, new in zip(table.physical_to_logical, found.table.physical_to_logical, strict=True)
    ]
    assert not found.table.uncovered()
    assert sum(moves) == missing
