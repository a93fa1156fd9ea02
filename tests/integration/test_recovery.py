"""A rank is killed under a fleet that serves: the others go on, the planner brings lost experts back, a new rank joins.

Real processes: four ranks, agent process, planner with its own store. Every token of every request of the ranks that are left
is compared with the oracle's, throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from eplb_service.cli.generations import state_text
from eplb_service.failpoints import VARIABLE
from tests.integration.surviving_fleet import SurvivingFleet, held_by

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
EXPERTS, RANKS = 32, 4
SLOTS = EXPERTS // 3 + 1
"""Three ranks hold every expert, with one slot to spare; of 44 slots of four ranks, 12 hold a second copy."""


def options_of(*rank_ids: int) -> dict[str, Any]:
    return {
        "rank_ids": rank_ids,
        "in_flight": 2,
        "slots_per_rank": SLOTS,
        "hook_options": {
            "reconnect_max_s": 0.2,
            "pulse_period_s": 0.3,
            "vote_timeout_s": 5.0,
            "rendezvous_timeout_s": 20.0,
        },
    }


@pytest.fixture
def fleet() -> Iterator[SurvivingFleet]:
    with SurvivingFleet(**options_of(4, 5, 6, 7)) as running:
        running.serve_tokens(50)
        running.start_service()
        yield running
        running.stop_ranks()


def test_a_lost_rank_s_experts_come_back_and_no_token_of_the_others_is_lost_vllm_41204(fleet: SurvivingFleet) -> None:
    fleet.lose(5)
    fleet.until(lambda: fleet.ranks_of_the_planner() == (4, 6, 7), "the planner to know the group that is left")
    fleet.until(fleet.is_covered, "every expert to be on a rank again")
    fleet.until_ready()
    status = fleet.status()
    assert not status.unreachable
    assert status.restoring == ""
    restored = fleet.generations()[int(status.live_generation)]
    assert state_text(restored.state) == "active"
    fleet.serve_tokens(50)
    fleet.settle()
    assert len(fleet.served) > 0


@pytest.mark.long
@pytest.mark.parametrize("lost", [4, 6])
def test_a_fleet_that_lost_a_rank_takes_a_new_one_in_which_gets_experts_vllm_38862(fleet: SurvivingFleet, lost: int) -> None:
    fleet.lose(lost)
    left = tuple(rank for rank in (4, 5, 6, 7) if rank != lost)
    fleet.until(lambda: fleet.ranks_of_the_planner() == left, "the planner to know the group that is left")
    fleet.until(fleet.is_covered, "every expert to be on a rank again")
    fleet.settle()
    fleet.join(9, "node1")
    fleet.until(lambda: fleet.ranks_of_the_planner() == (*left, 9), "the planner to know the new rank")
    fleet.until_ready()
    assert held_by(fleet.serving.inspect()[0], 3) == 0
    fleet.serve_tokens(200)
    view = fleet.until_over(fleet.rebalance())
    assert state_text(view.state) == "active"
    assert held_by(fleet.serving.inspect()[0], 3) > 0
    fleet.serve_tokens(100)
    fleet.settle()


class DiesAsItVotes(SurvivingFleet):
    """The rank at position 2 ends just after it has cast its vote for a chunk: the others cannot know how that vote ended."""

    @property
    def rank_environments(self) -> Mapping[int, Mapping[str, str]]:
        return {2: {VARIABLE: f"hook.vote.cast=exit:{self.folder / 'voted'}"}}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rank_that_is_lost_in_the_vote_of_a_chunk_ends_no_other_and_leaves_one_map() -> None:
    with DiesAsItVotes(**options_of(4, 5, 6, 7)) as fleet:
        fleet.serve_tokens(50)
        fleet.start_service()
        fleet.serve_tokens(200)
        number = fleet.rebalance()
        fleet.until((fleet.folder / "voted").exists, "the vote of the first chunk")
        fleet.until(lambda: fleet.ranks.config.rank_ids == (4, 5, 7), "a group without the rank that died")
        fleet.until(lambda: fleet.ranks_of_the_planner() == (4, 5, 7), "the planner to know the group that is left")
        fleet.until(fleet.is_covered, "every expert to be on a rank again")
        fleet.until_over(number)
        fleet.serve_tokens(50)
        fleet.settle()
        assert {fleet.ranks.process(rank).exitcode for rank in (4, 5, 7)} == {None}
        fleet.stop_ranks()
