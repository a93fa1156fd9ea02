"""Groups that lose ranks or get new ones, on a planner with ranks that speak the protocol: planned over who is there."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from eplb_service.attach import Gone
from eplb_service.control import LinkBytes, Staged
from eplb_service.ids import ChunkId, LayerRef
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.policy.registry import load_policy
from eplb_service.policy.warm_up import warm_up_policy
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_planner_loop import FlakyStore, generation_of, planner, reach, run, status_of

ACTIVE, STOPPED = placement_pb2.GENERATION_STATE_ACTIVE, placement_pb2.GENERATION_STATE_STOPPED


@pytest.fixture(autouse=True, scope="module")
def warm_policies() -> Iterator[None]:
    """Compiled before any planner runs: `InlineSolver` plans on the planner's own loop, which must not stand still."""
    warm_up_policy(load_policy("greedy"), "greedy")
    return iter([None])


def formed_anew(before: Fleet, *rank_ids: int) -> Fleet:
    """The ranks of a fleet in another group: those that were there keep their lives and what they hold, new ones hold nothing.

    An engine that re-forms in place does that; so rows are those of the ranks that are left.
    """
    after = Fleet(
        before.target,
        num_logical=before.num_logical,
        num_layers=before.num_layers,
        slots=before.slots,
        group_id=before.group_id + 1,
        rank_ids=rank_ids,
        restorers=before.restorers,
    )
    for layer, row in before.ranks[0].rows.items():
        held = {rank: row[place * before.slots : (place + 1) * before.slots] for place, rank in enumerate(before.rank_ids)}
        new = tuple(expert for rank in rank_ids for expert in held.get(rank, (-1,) * before.slots))
        for rank in after.ranks:
            rank.rows[layer] = new
    return after


async def formed(fleet: Fleet) -> admin_pb2.DeploymentStatus:
    """The status once the planner is ready for this very group."""

    async def found() -> admin_pb2.DeploymentStatus | None:
        status = await status_of(fleet)
        here = [(rank.address.rank_id, rank.address.group_id, rank.state) for rank in status.ranks]
        wanted = [(rank, fleet.group_id, "live") for rank in sorted(fleet.rank_ids)]
        return status if status.state == "ready" and here == wanted else None

    status: admin_pb2.DeploymentStatus = await until_true(found, f"group {fleet.group_id} to be ready")
    return status


def test_the_first_rank_is_lost_and_the_others_are_planned_for_under_their_own_ids_vllm_38862() -> None:
    async def scenario() -> None:
        async with planner() as (_, address):
            async with Fleet(address, slots=4) as fleet:
                await reach(fleet, "ready")
            async with formed_anew(fleet, 1, 2, 3) as left:
                await formed(left)
                for _ in range(2):
                    left.report(left.skewed())
                active = await generation_of(left, 1, ACTIVE)
                assert list(active.placement.tables[0].rank_ids) == [1, 2, 3]
                assert left.live_generations == {1}
                assert left.all_route_alike()
                status = await status_of(left)
                assert [rank.address.rank_id for rank in status.ranks] == [1, 2, 3]
                assert not status.unreachable

    run(scenario())


def test_experts_that_only_the_lost_rank_held_are_named_and_nothing_is_planned_until_they_are_back_sglang_33111() -> None:
    async def scenario() -> None:
        async with planner() as (service, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
            async with formed_anew(fleet, 0, 2, 3) as left:
                status = await formed(left)
                assert [(found.layer.layer_id, list(found.experts)) for found in status.unreachable] == [
                    (layer, [4, 5]) for layer in range(3)
                ]
                assert "6 experts live on no rank (layer tiny/0: 4, 5; " in status.reason
                assert service.planner is not None
                assert service.planner.deployment("chat").gauges().unreachable_experts == 6
                for _ in range(2):
                    left.report(left.skewed())
                order = admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True)
                for refused in (
                    left.admin.Rebalance(order, timeout=20),
                    left.admin.Drain(admin_pb2.DrainRequest(deployment="chat", rank_ids=[3], idempotency_key="d"), timeout=20),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await refused
                    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert (await status_of(left)).live_generation == 0
            again = formed_anew(left, 0, 2, 3)
            for rank in again.ranks:
                rank.rows = dict.fromkeys(rank.rows, (0, 1, 2, 6, 7, 3, 4, 5, 0))  # the engine loaded what was missing
            async with again:
                assert not (await formed(again)).unreachable
                for _ in range(2):
                    again.report(again.skewed(hot=3))
                await generation_of(again, 1, ACTIVE)

    run(scenario())


def test_a_group_that_changes_while_a_chunk_is_armed_ends_the_rollout_and_late_answers_change_nothing_sglang_22872() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address):
            async with Fleet(address, slots=4) as fleet:
                await reach(fleet, "ready")
                fleet.hold_flips = True
                for _ in range(2):
                    fleet.report(fleet.skewed())
                await until(lambda: all(rank.armed_id for rank in fleet.ranks), "an armed chunk")
                lost, late = fleet.ranks[2].address, fleet.ranks[0].armed_id
                for _ in range(3):  # the same notice again and again
                    fleet._say(Gone(sender=lost, reason="killed"))
                status = await reach(fleet, "waiting")
                assert "rank 2 (gone: killed)" in status.reason
                stopped = await generation_of(fleet, 1, STOPPED)
                assert "rank 2 is gone: killed" in stopped.stop_reason
            async with formed_anew(fleet, 0, 1, 3) as left:
                await formed(left)
                # what belongs to the group that was: a notice, and an answer to its chunk
                left._say(Gone(sender=lost, reason="killed"))
                left._say(Staged(sender=fleet.ranks[0].address, chunk_id=ChunkId(late), seconds=0.1, received=LinkBytes()))
                for _ in range(2):
                    left.report(left.skewed())
                active = await generation_of(left, 2, ACTIVE)
                assert list(active.placement.tables[0].rank_ids) == [0, 1, 3]
                assert (await status_of(left)).state == "ready"

    run(scenario())


def test_a_rank_that_joins_is_waited_for_then_filled_before_anything_is_routed_to_it_sglang_33111() -> None:
    async def scenario() -> None:
        async with planner() as (_, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
            grown = formed_anew(fleet, 0, 1, 2, 3, 9)
            assert grown.ranks[0].rows[LayerRef("tiny", 0)][12:] == (-1, -1, -1)
            grown.hold_staging = True
            async with grown:
                status = await formed(grown)
                assert len(status.ranks) == 5
                for _ in range(2):
                    grown.report(grown.skewed())
                await until(lambda: all(rank.staged for rank in grown.ranks), "a chunk to be staged")
                copies = [copy for rank in grown.ranks if rank.staged is not None for copy in rank.staged.copies]
                assert any(copy.target_rank == 9 for copy in copies)
                assert set(grown.ranks[0].rows[LayerRef("tiny", 0)][12:]) == {-1}  # not routed to yet
                grown.hold_staging = False
                for rank in grown.ranks:
                    assert rank.staged is not None
                    grown._say(Staged(sender=rank.address, chunk_id=rank.staged.chunk_id, seconds=0.1, received=LinkBytes()))
                await generation_of(grown, 1, ACTIVE)
                assert any(expert >= 0 for row in grown.ranks[0].rows.values() for expert in row[12:])

    run(scenario())


def test_a_drained_rank_that_is_stopped_is_absent_and_kept_empty_when_it_comes_back() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
                order = admin_pb2.DrainRequest(deployment="chat", rank_ids=[1], idempotency_key="d")
                await fleet.admin.Drain(order, timeout=20)
                await until_true(lambda: _drains(fleet, "safe_to_stop"), "rank 1 to be empty")
            async with formed_anew(fleet, 0, 2, 3) as left:
                await until_true(lambda: _drains(left, "absent"), "rank 1 to be away")
                assert not (await status_of(left)).unreachable
            async with formed_anew(left, 0, 1, 2, 3) as back:
                await until_true(lambda: _drains(back, "safe_to_stop"), "rank 1 to be known again")
                back.report(np.full((3, 8), 6000, np.int64))

    async def _drains(fleet: Fleet, state: str) -> bool:
        status = await status_of(fleet)
        return status.state == "ready" and [(found.rank_id, found.state) for found in status.drains] == [(1, state)]

    run(scenario())


def test_a_group_too_small_for_what_is_drained_says_so_and_goes_on_once_the_rank_is_given_back() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
                order = admin_pb2.DrainRequest(deployment="chat", rank_ids=[1], idempotency_key="d")
                await fleet.admin.Drain(order, timeout=20)
            left = formed_anew(fleet, 1, 2, 3)
            for rank in left.ranks:
                rank.rows = dict.fromkeys(rank.rows, (0, 1, 2, 6, 7, 3, 4, 5, 0))
            async with left:
                status = await formed(left)
                assert (
                    "rank 1 is drained, and the ranks that stay (2, 3) have 2 x 3 = 6 slots for the 8 experts" in status.reason
                )
                assert "let at least 3 ranks stay" in status.reason
                assert "or `eplb undrain 1`" in status.reason
                await left.admin.Undrain(admin_pb2.UndrainRequest(deployment="chat", rank_ids=[1]), timeout=20)
                assert "drained" not in (await status_of(left)).reason
                for _ in range(2):
                    left.report(left.skewed(hot=3))
                await left.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="auto"))
                await until_true(lambda: _moved(left), "a generation")

    async def _moved(fleet: Fleet) -> bool:
        fleet.report(fleet.skewed(hot=3))
        return (await status_of(fleet)).live_generation > 0

    run(scenario())
