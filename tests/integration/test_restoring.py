"""Experts whose last copy went with a rank come back from the backups of the others, on a planner with protocol-speaking ranks.

vllm#41204, sglang#12068: a lost rank takes the only replica of some experts with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import grpc
import pytest

from agent.hook.stage_check import LayerShape, RankShape, check_stage
from eplb_service.control import Stage
from eplb_service.ids import GenerationNumber, RankId
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.policy.registry import load_policy
from eplb_service.policy.warm_up import warm_up_policy
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_changed_groups import formed_anew
from tests.integration.test_planner_loop import FlakyStore, generation_of, planner, reach, run, status_of

ACTIVE, STOPPED = placement_pb2.GENERATION_STATE_ACTIVE, placement_pb2.GENERATION_STATE_STOPPED
LOST = 1
"""The rank that is lost: experts 4 and 5 of each of the three layers live there alone."""


@pytest.fixture(autouse=True, scope="module")
def warm_policies() -> Iterator[None]:
    """Compiled before any planner runs: `InlineSolver` plans on the planner's own loop, which must not stand still."""
    warm_up_policy(load_policy("greedy"), "greedy")
    return iter([None])


def survivors(address: str, *, restorers: tuple[int, ...] = (0, 2, 3)) -> Fleet:
    """What is left of four ranks, which never linked: the group is formed without the one that was lost."""
    return formed_anew(Fleet(address, restorers=restorers), *(rank for rank in range(4) if rank != LOST))


async def restored(fleet: Fleet) -> admin_pb2.DeploymentStatus:
    """The status once every expert lives on a rank, and nothing is under way."""

    async def found() -> admin_pb2.DeploymentStatus | None:
        if not all(set(row) >= set(range(fleet.num_logical)) for row in fleet.ranks[0].rows.values()):
            return None
        status = await status_of(fleet)
        return status if status.state == "ready" and not status.unreachable else None

    status: admin_pb2.DeploymentStatus = await until_true(found, "every expert to be back")
    return status


async def told(fleet: Fleet, *words: str) -> admin_pb2.DeploymentStatus:
    """The status once it says this of the lost experts."""

    async def found() -> admin_pb2.DeploymentStatus | None:
        try:
            status = await status_of(fleet)
        except grpc.aio.AioRpcError:  # nobody of it has registered yet
            return None
        return status if all(word in status.restoring for word in words) else None

    status: admin_pb2.DeploymentStatus = await until_true(found, f"the status to say {words}")
    return status


def stages(fleet: Fleet) -> list[Stage]:
    """As the first rank got them."""
    return [message for message in fleet.got if isinstance(message, Stage) and message.to == fleet.ranks[0].address]


def test_lost_experts_come_back_at_once_in_observe_mode_without_load_and_with_no_move_too_many_vllm_41204() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (service, address), survivors(address) as left:
            live = {layer.layer: layer for layer in left._live(left.ranks[0], left.ranks[0].epoch_seen).layers}  # type: ignore[arg-type]
            view = await generation_of(left, 1, ACTIVE)
            assert (view.policy, view.moves.experts, view.moves.bytes_from_backups) == ("restore", 6, 6 * left.expert_bytes)
            assert "6 experts live on no rank: they come back from backups, with 6 moves" in view.reason
            status = await restored(left)
            assert (status.last_verdict.code, status.last_verdict.move) == ("restore", True)
            assert status.restoring == ""
            assert service.planner is not None
            assert service.planner.deployment("chat").gauges().unreachable_experts == 0
            copies = [copy for stage in stages(left) for copy in stage.copies]
            assert sorted((copy.layer.layer_id, copy.expert) for copy in copies) == [
                (layer, expert) for layer in range(3) for expert in (4, 5)
            ]
            assert all(copy.is_from_backup and not copy.is_relay for copy in copies)
            for stage in stages(left):  # as a real hook looks at it
                shape = RankShape(
                    rank_id=RankId(0),
                    group_rank_ids=tuple(RankId(rank) for rank in left.rank_ids),
                    layers={layer: LayerShape(num_logical=8, slots=3, expert_bytes=1000) for layer in live},
                    replica_table_width=16,
                    staging_bytes=left.staging_bytes,
                )
                assert check_stage(stage, shape, live, stage.weights_version) is None
            left.report(left.skewed())
            left.report(left.skewed())
            await until_true(lambda: _decided(left), "balance to be planned again")
            assert (await status_of(left)).live_generation == 1

    async def _decided(fleet: Fleet) -> bool:
        return (await status_of(fleet)).last_verdict.code != "restore"

    run(scenario())


def test_experts_come_back_only_on_ranks_with_a_backup_and_never_on_a_drained_one_sglang_12068() -> None:
    async def scenario() -> None:
        async with planner() as (_, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
                order = admin_pb2.DrainRequest(deployment="chat", rank_ids=[LOST], idempotency_key="d")
                await fleet.admin.Drain(order, timeout=20)
            async with survivors(address, restorers=(0, 3)) as left:
                await restored(left)
                copies = [copy for stage in stages(left) for copy in stage.copies if copy.is_from_backup]
                assert {copy.target_rank for copy in copies} <= {0, 3}

    run(scenario())


def test_without_a_backup_lost_experts_are_named_with_what_to_do_and_nothing_is_planned() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), survivors(address, restorers=()) as left:
            status = await told(left, "no rank has a backup", "restart the ranks")
            assert "6 experts live on no rank (layer tiny/0: 4, 5; " in status.reason
            for request in (
                left.admin.Plan(admin_pb2.PlanRequest(deployment="chat"), timeout=20),
                left.admin.Rebalance(
                    admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True), timeout=20
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await request
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "no rank has a backup" in (caught.value.details() or "")
            assert not stages(left)

    run(scenario())


def test_while_paused_or_pinned_nothing_is_brought_back_and_the_status_says_so() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
                await fleet.admin.Pause(admin_pb2.PauseRequest(deployment="chat", reason="maintenance"), timeout=20)
            async with survivors(address) as left:
                await told(left, "once that can be", "paused (maintenance)")
                await left.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="pinned"), timeout=20)
                await left.admin.Resume(admin_pb2.ResumeRequest(deployment="chat"), timeout=20)
                await told(left, "once that can be", "it is pinned")
                assert not stages(left)
                left.report(left.skewed(hot=2))  # experts 0, 1 and 2 have another copy
                await until_true(lambda: _seen(left), "a window")
                await left.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="observe"), timeout=20)
                await restored(left)
                view = await generation_of(left, 1, ACTIVE)
                assert view.before.worst_layer > 1
                for row in left.ranks[0].rows.values():
                    assert row.count(2) == 2  # the busiest of them lost none

    async def _seen(fleet: Fleet) -> bool:
        return (await status_of(fleet)).windows_accepted >= len(fleet.ranks)

    run(scenario())


def test_ranks_that_refuse_are_asked_a_few_times_then_a_person_is_told_why_until_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eplb_service.planner.standing.RETRY_S", 0.02)

    async def scenario() -> None:
        async with planner(rollout__tries_max="1") as (_, address):
            left = survivors(address)
            left.no_backup = "its checksum differs"
            async with left:
                status = await told(left, "given up after 4 rollouts", "its checksum differs", "`eplb resume`")
                assert "its checksum differs" in status.reason
                refused = len(stages(left))
                assert refused == 4
                for _ in range(2):
                    left.report(left.skewed())
                left.no_backup = ""
                await generation_of(left, 4, STOPPED)
                assert len(stages(left)) == refused  # not tried in a loop
                await left.admin.Resume(admin_pb2.ResumeRequest(deployment="chat"), timeout=20)
                await restored(left)
                journal = await left.placement.GetPlacement(
                    placement_pb2.GetPlacementRequest(deployment="chat", generation=5), timeout=5
                )
                assert journal.policy == "restore"

    run(scenario())


def test_a_restoration_that_was_stopped_half_way_goes_on_from_what_is_live_then() -> None:
    async def scenario() -> None:
        async with planner(rollout__layers_per_chunk_max="1") as (_, address):
            left = survivors(address)
            left.hold_flips = True
            async with left:
                await until(lambda: all(rank.armed_id for rank in left.ranks), "an armed chunk")
                status = await told(left, "generation 1 brings them back")
                assert status.state == "rolling_out"
                await left.admin.Pause(admin_pb2.PauseRequest(deployment="chat", reason="wait"), timeout=20)
                left.hold_flips = False
                left.vote()
                stopped = await generation_of(left, 1, STOPPED)
                assert "paused" in stopped.stop_reason
                assert sum(4 in row for row in left.ranks[0].rows.values()) == 1  # one layer of three
                await left.admin.Resume(admin_pb2.ResumeRequest(deployment="chat"), timeout=20)
                view = await generation_of(left, 2, ACTIVE)
                assert (view.policy, view.moves.experts) == ("restore", 4)
                await restored(left)

    run(scenario())


def test_a_new_leader_carries_on_with_what_its_predecessor_began_to_bring_back() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, rollout__layers_per_chunk_max="1") as (_, address):
            left = survivors(address)
            left.hold_staging = True
            async with left:
                await until(lambda: all(rank.staged for rank in left.ranks), "a chunk to be staged")
        async with planner(store, store__owner="another") as (_, address):
            again = formed_anew(left, *left.rank_ids)
            again.target, again.group_id = address, left.group_id
            again.ranks = [dataclasses.replace(rank, staged=None) for rank in left.ranks]
            async with again:
                await restored(again)
                view = await generation_of(again, GenerationNumber(1), ACTIVE)
                assert view.policy == "restore"

    run(scenario())


def test_experts_that_find_no_room_are_said_with_numbers_and_come_back_once_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eplb_service.planner.standing.RETRY_S", 0.05)

    async def scenario() -> None:
        async with planner() as (_, address):
            async with Fleet(address) as fleet:
                await reach(fleet, "ready")
                order = admin_pb2.DrainRequest(deployment="chat", rank_ids=[3], idempotency_key="d")
                await fleet.admin.Drain(order, timeout=20)
            async with survivors(address, restorers=(3,)) as left:
                await told(left, "2 experts live on no rank, and no rank that may be given experts has a backup")
                await left.admin.Undrain(admin_pb2.UndrainRequest(deployment="chat", rank_ids=[3]), timeout=20)
                await restored(left)
                assert {copy.target_rank for stage in stages(left) for copy in stage.copies if copy.is_from_backup} == {3}

    run(scenario())
