"""Copies of experts that nobody who serves holds: from the backup of the rank that gets them, and no other (vllm#41204).

The rest of a chunk is planned as ever: see `test_copies`, whose cases these are, with some experts taken from all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef, RankId
from eplb_service.moves import residency_moves
from eplb_service.placement import EMPTY_SLOT, Placement, Table
from eplb_service.rollout.chunk_count import count_chunks
from eplb_service.rollout.chunks import PlannedChunk, plan_chunks
from eplb_service.topology import LinkKind, Topology
from tests.unit.test_copies import MANY, SIZE, Case, cases


def chunks_of(case: Case, restorers: frozenset[RankId], *, fan_out: bool) -> tuple[PlannedChunk, ...]:
    return plan_chunks(
        Placement((case.live,)),
        Placement((case.target,)),
        topology=case.where,
        expert_bytes=dict.fromkeys(case.live.layers, SIZE),
        staging_bytes=dict.fromkeys(case.where.rank_ids, MANY),
        fan_out=fan_out,
        restorers=restorers,
    )


@st.composite
def losses(draw: st.DrawFn) -> tuple[Case, set[int]]:
    """A case in which some experts, which the target has, are on no rank that serves."""
    case = draw(cases(distinct=True))
    lost = draw(st.sets(st.integers(0, case.live.num_logical - 1), min_size=1, max_size=3))
    serves = np.repeat(np.array(case.where.alive), case.live.slots_per_rank)
    rows = np.where(np.isin(case.live.physical_to_logical, sorted(lost)) & serves, EMPTY_SLOT, case.live.physical_to_logical)
    live = Table("m", case.live.layer_ids, case.live.num_logical, case.live.rank_ids, rows.astype(np.int32))
    return replace(case, live=live), lost


@settings(max_examples=60, deadline=None)
@given(losses(), st.booleans())
def test_lost_experts_come_from_the_backup_of_each_rank_that_gets_them_and_all_else_from_ranks(
    found: tuple[Case, set[int]], fan_out: bool
) -> None:
    case, lost = found
    ranks = frozenset(case.where.rank_ids)
    filled: Counter[tuple[LayerRef, int, int, int]] = Counter()
    from_backups = 0
    for chunk in chunks_of(case, ranks, fan_out=fan_out):
        mine = [copy for copy in chunk.copies if copy.is_from_backup]
        from_backups += len(mine)
        assert chunk.traffic.from_backups == SIZE * len(mine)
        over_links = SIZE * (len(chunk.copies) - len(mine))
        assert sum(chunk.traffic.by_link.values()) == over_links
        assert ("from backups" in str(chunk.traffic)) == bool(mine)
        for copy in chunk.copies:
            filled[copy.layer, case.where.position_of(copy.target_rank), copy.target_slot, copy.expert] += 1
            assert copy.is_from_backup == (not case.holders(copy.layer, copy.expert))
            if copy.is_from_backup:
                assert copy.expert in lost
                assert (copy.source_slot, copy.is_relay) == (0, False)
            if copy.is_relay:
                assert not chunk.copies[copy.relay_of].is_from_backup
    assert filled == case.wanted()
    priced = residency_moves(case.live, case.target, case.where, (SIZE,) * case.live.num_layers, fan_out=fan_out)
    assert priced.bytes_without_source == SIZE * from_backups


@settings(max_examples=60, deadline=None)
@given(losses(), st.data())
def test_a_lost_expert_that_a_rank_without_a_backup_is_to_get_is_refused_by_name(
    found: tuple[Case, set[int]], data: st.DataObject
) -> None:
    case, lost = found
    getting = {case.where.rank_ids[rank] for layer, rank, _, expert in case.wanted() if not case.holders(layer, expert)}
    assume(getting)
    without = data.draw(st.sampled_from(sorted(getting)))
    restorers = frozenset(case.where.rank_ids) - {without}
    with pytest.raises(InvalidInputError, match=f"rank {without} slot .* has no backup"):
        chunks_of(case, restorers, fan_out=True)
    sizes, staging = [SIZE] * case.live.num_layers, dict.fromkeys(case.where.rank_ids, MANY)
    given_to = {"topology": case.where, "expert_bytes": sizes, "staging_bytes": staging}
    assert count_chunks(case.live, case.target, **given_to, restorers=restorers) is None  # type: ignore[arg-type]
    counted = count_chunks(case.live, case.target, **given_to, restorers=restorers | {without})  # type: ignore[arg-type]
    assert counted == len(chunks_of(case, restorers | {without}, fan_out=True))
    assert lost


def test_two_slots_that_want_one_lost_expert_both_take_it_from_backups_since_a_relay_is_of_a_live_slot() -> None:
    ranks = (RankId(0), RankId(1))
    live = Table("m", (0,), 3, ranks, np.array([[0, -1, 1, -1]], np.int32))
    target = live.with_rows({0: np.array([0, 2, 1, 2])})
    (chunk,) = chunks_of(Case(live, target, Topology(ranks, ("a", "a"))), frozenset(ranks), fan_out=True)
    assert [(copy.target_rank, copy.is_from_backup, copy.is_relay) for copy in chunk.copies] == [
        (0, True, False),
        (1, True, False),
    ]
    assert chunk.traffic.bytes_in_a_row == 0
    assert set(chunk.traffic.by_link.values()) == {0}
    assert LinkKind.SAME_NODE in chunk.traffic.by_link
