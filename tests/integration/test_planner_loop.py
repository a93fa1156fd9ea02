"""The planner with a store in memory and ranks that speak the protocol: windows → gate → generation → rollout → observed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from eplb_service.app import Service
from eplb_service.attach import Attach
from eplb_service.config import ServeConfig, load_config
from eplb_service.control import Stage
from eplb_service.errors import InvalidInputError, StoreUnavailableError
from eplb_service.ids import DeploymentId, Phase, chunk_epoch
from eplb_service.pb.v1 import admin_pb2, agent_pb2, placement_pb2
from eplb_service.policy.base import Effort, PlanningProblem, Proposal
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import warm_up_policy
from eplb_service.rpc import agent_service, convert
from eplb_service.store.base import Document, Leadership, Write
from eplb_service.store.memory import MemoryStore
from tests.integration.planner_fleet import Fleet, until, until_true

SCENARIO_S = 200.0
"""No scenario takes so long, on however busy a machine."""
QUICK = {
    "listen.port": "0",
    "metrics.enabled": "false",
    "planning.mode": "auto",
    "planning.policy": "greedy",
    "planning.interval_s": "0",
    "planning.windows": "2",
    "gate.min_generation_age_s": "0",
    "cost.seconds_per_step": "0.1",
    "cost.horizon_steps": "10000",
    "cost.bytes_per_s": "1e9",
    "cost.commit_stall_s": "0.001",
    "rollout.hello_timeout_s": "1",
    "rollout.backoff_s": "0.05",
    "log.level": "error",
}


@pytest.fixture(autouse=True, scope="module")
def warm_policies() -> None:
    """Compiled before any planner runs: `InlineSolver` plans on the planner's own loop, which must not stand still."""
    warm_up_policy(load_policy("greedy"), "greedy")


class InlineSolver:
    """Plans in this process: what is tested here is the planner, not the solver's process."""

    is_ready = True

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        begin_s = time.perf_counter()
        plan = load_policy(policy).plan(problem)
        return verify(problem, plan, policy=policy, solve_s=time.perf_counter() - begin_s)


class FlakyStore(MemoryStore):
    """A store that can be taken away."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.is_away = False

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailableError("the store was taken away by the test")

    async def ping(self) -> str:
        self._check()
        return "memory"

    async def lead(self, deployment: DeploymentId, **options: Any) -> Leadership:
        self._check()
        return await super().lead(deployment, **options)

    async def renew(self, leadership: Leadership) -> None:
        self._check()
        await super().renew(leadership)

    async def read(self, deployment: DeploymentId, names: tuple[str, ...]) -> dict[str, Document]:
        self._check()
        return await super().read(deployment, names)

    async def write(self, deployment: DeploymentId, write: Write) -> dict[str, int]:
        self._check()
        return await super().write(deployment, write)


def config_of(**more: str) -> ServeConfig:
    return load_config(flags=QUICK | {key.replace("__", "."): value for key, value in more.items()}).config


@asynccontextmanager
async def planner(store: MemoryStore | None = None, /, **settings: str) -> AsyncIterator[tuple[Service, str]]:
    service = Service(config_of(**settings), store=store or FlakyStore(), solver=InlineSolver())  # type: ignore[arg-type]
    ready = await service.start()
    try:
        yield service, ready.address
    finally:
        await service.stop()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, SCENARIO_S))


async def status_of(fleet: Fleet) -> admin_pb2.DeploymentStatus:
    reply = await fleet.admin.Status(admin_pb2.StatusRequest(deployment=fleet.deployment), timeout=5)
    found: admin_pb2.DeploymentStatus = reply.deployments[0]
    return found


async def reach(fleet: Fleet, state: str) -> admin_pb2.DeploymentStatus:
    async with asyncio.timeout(90):
        while True:
            try:
                status = await status_of(fleet)
            except grpc.aio.AioRpcError:
                status = admin_pb2.DeploymentStatus()
            if status.state == state:
                return status
            await asyncio.sleep(0.01)


async def first_generation(fleet: Fleet) -> placement_pb2.GenerationView:
    """Load that is worth a generation, and that generation once it is live everywhere."""
    await reach(fleet, "ready")
    fleet.report(fleet.skewed())
    return await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)


async def generation_of(fleet: Fleet, number: int, state: int) -> placement_pb2.GenerationView:
    async with asyncio.timeout(90):
        while True:
            try:
                view = await fleet.placement.GetPlacement(
                    placement_pb2.GetPlacementRequest(deployment=fleet.deployment, generation=number), timeout=5
                )
                if view.state == state:
                    found: placement_pb2.GenerationView = view
                    return found
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
                    raise
            await asyncio.sleep(0.01)


async def verdict_of(fleet: Fleet) -> admin_pb2.VerdictView:
    async with asyncio.timeout(90):
        while True:
            status = await status_of(fleet)
            if status.HasField("last_verdict"):
                found: admin_pb2.VerdictView = status.last_verdict
                return found
            await asyncio.sleep(0.01)


def test_skewed_windows_become_a_generation_that_is_rolled_out_and_observed() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            for _ in range(2):
                fleet.report(fleet.skewed())
            active = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            assert len(active.flip_boundaries) == fleet.num_layers
            assert fleet.live_generations == {1}
            assert fleet.all_route_alike()
            assert active.before.worst_layer > 1.5 > active.predicted.worst_layer >= active.lower_bound.worst_layer
            assert not active.HasField("observed")
            fleet.report(fleet.skewed())
            await until(lambda: len(fleet.replies) == 12, "replies to all reports")
            observed = (await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)).observed
            assert observed.worst_layer == pytest.approx(active.predicted.worst_layer)
            assert all(reply.accepted for reply in fleet.replies), [reply.reason for reply in fleet.replies]

    run(scenario())


def test_gate_keeps_what_is_balanced() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            for _ in range(3):
                fleet.report(fleet.even())
            verdict = await verdict_of(fleet)
            assert not verdict.move
            assert verdict.code == "gain_too_small"
            assert "no plan was made" in verdict.reason
            assert (await status_of(fleet)).live_generation == 0
            assert fleet.live_generations == {0}

    run(scenario())


def test_observe_mode_shows_what_it_would_do_and_publishes_nothing() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (service, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            verdict = await verdict_of(fleet)
            assert verdict.move
            listed = await fleet.placement.ListGenerations(placement_pb2.ListGenerationsRequest(deployment="chat"))
            assert not listed.generations
            plan = await fleet.admin.Plan(admin_pb2.PlanRequest(deployment="chat"))
            assert plan.verdict.move
            assert plan.proposal.moves.experts > 0
            await fleet.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="auto"))
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            assert service.planner is not None
            assert (await status_of(fleet)).settings.mode == "auto"

    run(scenario())


def test_a_pinned_deployment_keeps_what_is_live_also_over_a_restart_until_the_pin_is_lifted() -> None:
    """HYGON-AI/vllm-plugin-das#69, #70: a static map was overwritten by the periodic rebalance."""

    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, planning__mode="auto") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            pinned = await fleet.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="pinned"))
            assert pinned.mode == "pinned"
        async with planner(store, planning__mode="auto", store__owner="another") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            assert (await status_of(fleet)).settings.mode == "pinned"  # the store wins over the configuration
            fleet.report(fleet.skewed())
            assert (await verdict_of(fleet)).move
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "pinned" in (caught.value.details() or "")
            listed = await fleet.placement.ListGenerations(placement_pb2.ListGenerationsRequest(deployment="chat"))
            assert not listed.generations
            await fleet.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="auto"))
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)

    run(scenario())


def test_same_idempotency_key_gives_the_same_answer_also_after_a_restart() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        request = admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="monday", force=True)
        async with planner(store, planning__mode="observe") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await verdict_of(fleet)
            first, again = await asyncio.gather(fleet.admin.Rebalance(request), fleet.admin.Rebalance(request))
            assert first == again
            assert first.generation == 1
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            assert await fleet.admin.Rebalance(request) == first
        async with planner(store, planning__mode="observe", store__owner="another") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            assert await fleet.admin.Rebalance(request) == first
            other = admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="monday", force=False)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fleet.admin.Rebalance(other)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "monday" in (caught.value.details() or "")

    run(scenario())


def test_rollback_publishes_a_new_generation_with_the_old_content() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            loaded = dict(fleet.ranks[0].rows)
            fleet.report(fleet.skewed())
            await verdict_of(fleet)
            await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="a", force=True))
            first = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            reply = await fleet.admin.Rollback(admin_pb2.RollbackRequest(deployment="chat", generation=0, idempotency_key="b"))
            assert reply.generation == 2
            await generation_of(fleet, 2, placement_pb2.GENERATION_STATE_ACTIVE)
            assert fleet.ranks[0].rows == loaded
            await fleet.admin.Rollback(admin_pb2.RollbackRequest(deployment="chat", generation=1, idempotency_key="c"))
            third = await generation_of(fleet, 3, placement_pb2.GENERATION_STATE_ACTIVE)
            assert third.placement_digest == first.placement_digest
            old = await fleet.placement.GetPlacement(placement_pb2.GetPlacementRequest(deployment="chat", generation=1))
            assert old.state == placement_pb2.GENERATION_STATE_SUPERSEDED
            assert old.placement == first.placement
            with pytest.raises(grpc.aio.AioRpcError, match="no generation 9; the newest is 3"):
                await fleet.admin.Rollback(admin_pb2.RollbackRequest(deployment="chat", generation=9, idempotency_key="d"))

    run(scenario())


def test_rollback_withdraws_the_rollout_that_is_under_way() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Fleet(address, hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await verdict_of(fleet)
            await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="a", force=True))
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
            reply = await fleet.admin.Rollback(admin_pb2.RollbackRequest(deployment="chat", generation=0, idempotency_key="b"))
            assert reply.generation == 2
            stopped = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_SUPERSEDED)
            assert "rollback" in stopped.stop_reason
            await generation_of(fleet, 2, placement_pb2.GENERATION_STATE_ACTIVE)
            assert fleet.live_generations == {0}

    run(scenario())


def test_pause_stops_after_the_open_chunk_and_holds_until_resumed() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address, hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "the first chunk armed")
            paused = await fleet.admin.Pause(admin_pb2.PauseRequest(deployment="chat", reason="load test"))
            assert paused.paused
            fleet.hold_flips = False
            fleet.vote()
            stopped = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_STOPPED)
            assert "load test" in stopped.stop_reason
            assert len(stopped.flip_boundaries) == 1
            assert fleet.live_generations == {0, 1}
            assert fleet.all_route_alike()
            with pytest.raises(grpc.aio.AioRpcError, match="paused"):
                await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True))
            fleet.report(fleet.skewed())
            await until(lambda: len(fleet.replies) == 8, "replies")
            assert (await status_of(fleet)).settings.pause_reason == "load test"
            await fleet.admin.Resume(admin_pb2.ResumeRequest(deployment="chat"))
            fleet.report(fleet.skewed())
            await generation_of(fleet, 2, placement_pb2.GENERATION_STATE_ACTIVE)

    run(scenario())


@pytest.mark.parametrize("moment", ["staging", "armed"])
def test_new_leader_finishes_the_rollout_of_one_that_stopped(moment: str) -> None:
    async def scenario() -> None:
        store = FlakyStore()
        first = Service(config_of(), store=store, solver=InlineSolver())  # type: ignore[arg-type]
        ready = await first.start()
        second: Service | None = None
        try:
            held = {"hold_staging": True} if moment == "staging" else {"hold_flips": True}
            async with Fleet(ready.address, **held) as fleet:  # type: ignore[arg-type]
                await reach(fleet, "ready")
                fleet.report(fleet.skewed())
                if moment == "staging":
                    await until(lambda: all(rank.staged for rank in fleet.ranks), "all ranks staging")
                else:
                    await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
                await first.stop()
                fleet.hold_staging = fleet.hold_flips = False
                if moment == "armed":
                    fleet.vote()  # armed hooks vote without any planner
                    assert fleet.live_generations == {0, 1}
                second = Service(config_of(listen__port=str(ready.port)), store=store, solver=InlineSolver())  # type: ignore[arg-type]
                await second.start()
                await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
                assert fleet.live_generations == {1}
                assert fleet.all_route_alike()
                assert (await status_of(fleet)).epoch == 2
                assert max(fleet.hellos) == 2
        finally:
            await first.stop()
            if second is not None:
                await second.stop()

    run(scenario())


def test_store_away_stops_planning_but_not_queries_nor_an_open_chunk() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address, hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "the first chunk armed")
            store.is_away = True
            fleet.hold_flips = False
            fleet.vote()
            await until(lambda: fleet.live_generations == {1}, "all chunks to flip without the store")
            status = await fleet.admin.Status(admin_pb2.StatusRequest(deployment="chat"))

            async def store_is_missed() -> bool:
                return not (await fleet.admin.Status(admin_pb2.StatusRequest())).store_ok

            await until_true(store_is_missed, "status to say that the store is away")
            live = await fleet.placement.GetPlacement(placement_pb2.GetPlacementRequest(deployment="chat"))
            assert set(live.layer_generations) == {1}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fleet.admin.Rebalance(
                    admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True), timeout=5
                )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            fleet.report(fleet.skewed(hot=5))
            fleet.report(fleet.skewed(hot=5))
            await until(lambda: len(fleet.replies) == 12, "replies while the store is away")
            assert (await status_of(fleet)).live_generation == 1
            store.is_away = False
            fleet.report(fleet.skewed(hot=5))
            await generation_of(fleet, 2, placement_pb2.GENERATION_STATE_ACTIVE)
            names = [name for name, _ in await store.list(DeploymentId("chat"), "generation/", limit=10)]
            assert names == ["generation/2", "generation/1"]
            assert status.deployments[0].epoch == (await status_of(fleet)).epoch

    run(scenario())


def test_store_that_lost_its_data_is_led_with_a_higher_epoch_and_no_number_is_used_twice() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address) as fleet:
            first = await first_generation(fleet)
            before = (await status_of(fleet)).epoch
            store._states.clear()
            fleet.report(fleet.skewed(hot=5))
            fleet.report(fleet.skewed(hot=5))

            async def leads_anew() -> bool:
                return (await status_of(fleet)).epoch > before

            await until_true(leads_anew, "a higher epoch")
            await reach(fleet, "ready")
            fleet.report(fleet.skewed(hot=5))
            await until(lambda: max(fleet.live_generations) > 1, "a generation after the loss")
            assert max(fleet.live_generations) == 2
            again = await fleet.placement.GetPlacement(placement_pb2.GetPlacementRequest(deployment="chat", generation=1))
            assert again.placement == first.placement

    run(scenario())


def test_two_leaders_that_got_the_same_epoch_from_a_store_that_lost_its_data_share_no_chunk_id() -> None:
    async def chunk_ids() -> set[int]:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            return {message.chunk_id for message in fleet.got if isinstance(message, Stage)}

    async def scenario() -> None:
        first, second = await chunk_ids(), await chunk_ids()
        assert {chunk_epoch(chunk) for chunk in first | second} == {1}
        assert not first & second

    run(scenario())


def test_second_planner_waits_while_the_first_leads_and_says_so() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, store__owner="first") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            async with planner(store, store__owner="second") as (_, other):
                async with Fleet(other, group_id=78) as stranger:
                    waiting = await reach(stranger, "waiting")
                    async with asyncio.timeout(90):
                        while "'first' leads" not in waiting.reason:
                            waiting = await status_of(stranger)
                            await asyncio.sleep(0.01)
                assert (await status_of(fleet)).state == "ready"

    run(scenario())


def test_planner_that_took_the_same_name_by_mistake_does_not_make_the_lead_go_to_and_fro() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, store__owner="twin", store__lease_s="1") as (first, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            async with planner(store, store__owner="twin", store__lease_s="1") as (second, _):
                assert first.planner is not None
                assert second.planner is not None
                old, new = first.planner.deployment("chat").leading, second.planner.deployment("chat").leading
                await until(lambda: new.epoch == 2, "the second to lead")
                await until(lambda: old.epoch == 0 and "'twin' leads in epoch 2" in old.why_not, "the first to step down")
                status = await status_of(fleet)
                assert status.state == "waiting"
                assert "does not lead" in status.reason
                assert new.epoch == 2
            await until(lambda: old.epoch == 3, "the first to lead again once the second resigned")
            await reach(fleet, "ready")

    run(scenario())


def test_agent_process_that_goes_away_leaves_its_ranks_away_and_takes_them_up_again() -> None:
    async def scenario() -> None:
        async with planner() as (_, address):
            async with Fleet(address) as first:
                await reach(first, "ready")
                rows = [dict(rank.rows) for rank in first.ranks]
            async with Fleet(address, hold_hello=True) as second:

                async def all_away() -> bool:
                    ranks = (await status_of(second)).ranks
                    return len(ranks) == 4 and all(rank.state == "away" for rank in ranks)

                await until_true(all_away, "ranks without a stream to be shown as away")
                second.hold_hello = False
                await reach(second, "ready")
                assert [dict(rank.rows) for rank in second.ranks] == rows
                second.report(second.skewed())
                await generation_of(second, 1, placement_pb2.GENERATION_STATE_ACTIVE)

    run(scenario())


def test_unknown_deployment_names_those_that_are_known() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            for call in (
                fleet.admin.Status(admin_pb2.StatusRequest(deployment="chatt")),
                fleet.placement.GetPlacement(placement_pb2.GetPlacementRequest(deployment="chatt")),
                fleet.admin.Pause(admin_pb2.PauseRequest(deployment="")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
                assert "known: chat" in (caught.value.details() or "")

    run(scenario())


def test_status_says_why_nothing_is_moved_where_an_engine_cannot_trtllm_18626() -> None:
    """A balancer that is configured and silently does nothing: here status says what the engine's own hook says."""

    async def scenario() -> None:
        async with planner() as (_, address):
            fleet = Fleet(address)
            fleet.staging_bytes, fleet.off_reason = 0, "layer moe/3: the engine's table has expert 7 in slot 2"

            async def reason() -> str:
                said = (await status_of(fleet)).reason
                return said if fleet.off_reason in said else ""

            async with fleet:
                await reach(fleet, "observe_only")
                said = await until_true(reason, "the reason of a pulse")
                assert said.endswith(f" allocated no staging: {fleet.off_reason}")
                assert {rank.off_reason for rank in (await status_of(fleet)).ranks} == {fleet.off_reason}

    run(scenario())


def test_rank_that_disagrees_about_the_model_is_refused_naming_both() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            odd = convert.registration_to_pb(fleet.registration(fleet.ranks[1]))
            odd.models[0].layers[0].num_logical = 9
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fleet.agent.Register(odd)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert (await status_of(fleet)).state == "ready"

    run(scenario())


def test_hostile_messages_are_answered_and_planning_goes_on() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            bad = [
                agent_pb2.LoadReport(),
                agent_pb2.LoadReport(deployment="chat", window_index=1 << 63),
                agent_pb2.LoadReport(deployment="x"),
            ]
            replies = [reply async for reply in fleet.agent.Report(iter(bad))]
            assert [reply.accepted for reply in replies] == [False] * 3
            assert all(reply.reason for reply in replies)
            for first in (
                agent_pb2.ControlFromAgent(),
                agent_pb2.ControlFromAgent(attach=agent_pb2.Attach(deployment="chat/../x")),
                agent_pb2.ControlFromAgent(pulse=agent_pb2.Pulse()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in fleet.agent.Control(iter([first])):
                        pass
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fleet.agent.Register(agent_pb2.RegisterRequest())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for key in ("", "x" * 129, "a\nb"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key=key))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)

    run(scenario())


def test_watch_shows_every_state_that_the_live_map_settles_in() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            seen: list[placement_pb2.GenerationView] = []

            async def watch() -> None:
                request = placement_pb2.WatchPlacementRequest(deployment="chat")
                async for view in fleet.placement.WatchPlacement(request):  # seen while it goes on
                    seen.append(view)  # noqa: PERF401

            task = asyncio.create_task(watch())
            await until(lambda: seen, "the placement as it is now")
            assert set(seen[0].layer_generations) == {0}
            fleet.report(fleet.skewed())
            await until(lambda: seen[-1].state == placement_pb2.GENERATION_STATE_ACTIVE and seen[-1].generation == 1, "the end")
            assert set(seen[-1].layer_generations) == {1}
            diff = await fleet.placement.DiffPlacements(
                placement_pb2.DiffPlacementsRequest(deployment="chat", from_generation=1, to_generation=0)
            )
            assert not diff.changes
            task.cancel()

    run(scenario())


def test_bad_policy_in_the_configuration_ends_the_start() -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidInputError, match=r"planning\.policy is 'greedyy'.*use elastic or greedy or"):
            await Service(config_of(planning__policy="greedyy"), store=FlakyStore(), solver=InlineSolver()).start()  # type: ignore[arg-type]

    run(scenario())


def no_costs() -> dict[str, str]:
    """Settings without a given cost model: what steps and moves cost is to be measured."""
    return {key: value for key, value in QUICK.items() if not key.startswith("cost.")}


async def generations_of(fleet: Fleet) -> list[placement_pb2.GenerationView]:
    listed = await fleet.placement.ListGenerations(placement_pb2.ListGenerationsRequest(deployment=fleet.deployment), timeout=5)
    return list(listed.generations)


async def judged(fleet: Fleet, number: int) -> placement_pb2.GenerationView:
    """The generation once it was judged."""
    found: placement_pb2.GenerationView | None = None

    async def is_judged() -> bool:
        nonlocal found
        request = placement_pb2.GetPlacementRequest(deployment=fleet.deployment, generation=number)
        found = await fleet.placement.GetPlacement(request, timeout=5)
        return bool(found.outcome)

    await until_true(is_judged, f"generation {number} to be judged")
    assert found is not None
    return found


def test_generation_is_judged_against_what_the_placement_before_would_have_shown() -> None:
    async def scenario() -> None:
        settings = {"validation__windows": "3", "gate__min_generation_age_s": "3600"}
        async with planner(None, **settings) as (service, address), Fleet(address) as fleet:
            active = await first_generation(fleet)
            assert active.promised_gain == pytest.approx(
                active.before.mean_over_layers - active.predicted.mean_over_layers, abs=0.05
            )
            for _ in range(3):
                fleet.report(fleet.skewed())
            view = await judged(fleet, 1)
            assert view.outcome == "kept"
            assert len(view.observed_windows) == 3
            for window in view.observed_windows:
                assert window.previous_worst_layer == pytest.approx(active.before.worst_layer)
                assert window.worst_layer == pytest.approx(active.predicted.worst_layer)
            assert "brought" in view.judgement
            learned = (await status_of(fleet)).learned
            assert learned.numbers["gain_share"] == pytest.approx(1.0, abs=0.1)
            assert learned.numbers["commit_stall_s"] == pytest.approx(0.001)
            sample = service.metrics.registry.get_sample_value(
                "eplb_generations_validated_total", {"deployment": "chat", "outcome": "kept"}
            )
            assert sample == 1.0

    run(scenario())


def test_planner_that_restarts_goes_on_judging_what_its_predecessor_saw() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        settings = {"validation__windows": "3", "gate__min_generation_age_s": "3600"}
        async with planner(store, **settings) as (_, address), Fleet(address) as fleet:
            await first_generation(fleet)
            for _ in range(2):
                fleet.report(fleet.skewed())

            async def seen_twice() -> bool:
                request = placement_pb2.GetPlacementRequest(deployment="chat", generation=1)
                return len((await fleet.placement.GetPlacement(request, timeout=5)).observed_windows) == 2

            await until_true(seen_twice, "two windows under the generation")
        more = settings | {"store__owner": "another"}
        async with planner(store, **more) as (_, address), Fleet(address) as again:
            for rank, before in zip(again.ranks, fleet.ranks, strict=True):
                rank.rows, rank.generations = dict(before.rows), dict(before.generations)
            again.window_index = fleet.window_index
            await reach(again, "ready")
            again.report(again.skewed())
            view = await judged(again, 1)
            assert view.outcome == "kept"
            assert [window.window_index for window in view.observed_windows] == [1, 2, 3]

    run(scenario())


def test_generation_that_is_worse_than_what_was_before_is_rolled_back_by_itself() -> None:
    """Its own load went away at once, and under the new one the old placement would have been better."""

    async def scenario() -> None:
        settings = {"validation__windows": "2", "gate__min_generation_age_s": "3600"}
        async with planner(None, **settings) as (service, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            loaded = dict(fleet.ranks[0].rows)
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            for _ in range(2):
                fleet.report(fleet.skewed(hot=2))
            second = await generation_of(fleet, 2, placement_pb2.GENERATION_STATE_ACTIVE)
            assert fleet.ranks[0].rows == loaded
            assert second.policy == "rollback"
            assert "generation 1 is rolled back: worse by imbalance" in second.reason
            assert (await judged(fleet, 1)).outcome == "worse"
            status = await status_of(fleet)
            assert status.learned.numbers["gain_share"] < 0.5
            assert "generation 1 was rolled back" in status.learned.hold
            rolled = service.metrics.registry.get_sample_value("eplb_generations_rolled_back_total", {"deployment": "chat"})
            assert rolled == 1.0

    run(scenario())


def test_generation_made_by_order_of_an_operator_is_judged_and_left_alone() -> None:
    async def scenario() -> None:
        settings = {
            "validation__windows": "2",
            "gate__min_generation_age_s": "3600",
            "gate__min_gain_mean": "9",
            "gate__min_gain_worst": "9",
        }
        async with planner(None, **settings) as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await verdict_of(fleet)
            await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="a", force=True))
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            for _ in range(3):
                fleet.report(fleet.skewed(hot=2))
            view = await judged(fleet, 1)
            assert view.outcome == "worse"
            assert not view.HasField("promised_gain")
            fleet.report(fleet.skewed(hot=2))
            await until(lambda: len(fleet.replies) == 20, "replies to all reports")
            assert [view.generation for view in await generations_of(fleet)] == [1]

    run(scenario())


def test_steps_that_became_slower_undo_a_generation_and_its_load_is_left_alone_over_a_restart() -> None:
    """The plan balances better, and every step takes longer for it: never in a loop."""

    async def scenario() -> None:
        store = FlakyStore()
        settings = {"validation__windows": "2"}
        async with planner(store, planning__mode="observe", **settings) as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            for index in range(16):
                loads = fleet.skewed() * (8 + index % 5) // 10
                fleet.report(loads, step_s=0.002 + 1e-6 * fleet.busiest(loads))
            await until(lambda: len(fleet.replies) == 64, "replies to all reports")
            await fleet.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="auto"))
            fleet.report(fleet.skewed(), step_s=0.002 + 1e-6 * fleet.busiest(fleet.skewed()))
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
            for _ in range(2):
                fleet.report(fleet.skewed(), step_s=0.05)
            second = await generation_of(fleet, 2, placement_pb2.GENERATION_STATE_ACTIVE)
            assert "worse by step time" in second.reason
            for _ in range(2):
                fleet.report(fleet.skewed(), step_s=0.01)

            async def is_held() -> bool:
                return (await status_of(fleet)).last_verdict.code == "rolled_back"

            await until_true(is_held, "the gate to hold")
            assert [view.generation for view in await generations_of(fleet)] == [2, 1]
        more = settings | {"planning__mode": "auto", "store__owner": "another"}
        async with planner(store, **more) as (_, address), Fleet(address) as again:
            for rank, before in zip(again.ranks, fleet.ranks, strict=True):
                rank.rows, rank.generations = dict(before.rows), dict(before.generations)
            await reach(again, "ready")
            again.report(again.skewed())
            verdict = await verdict_of(again)
            assert (verdict.move, verdict.code) == (False, "rolled_back")
            assert "generation 1 was rolled back" in verdict.reason
            again.report(again.skewed(hot=5))
            again.report(again.skewed(hot=5))
            await generation_of(again, 3, placement_pb2.GENERATION_STATE_ACTIVE)

    run(scenario())


def test_without_given_costs_a_move_waits_until_step_times_say_what_imbalance_costs() -> None:
    async def scenario() -> None:
        config = load_config(flags=no_costs()).config
        service = Service(config, store=FlakyStore(), solver=InlineSolver())  # type: ignore[arg-type]
        ready = await service.start()
        try:
            async with Fleet(ready.address) as fleet:
                await reach(fleet, "ready")
                fleet.report(fleet.skewed())
                verdict = await verdict_of(fleet)
                assert (verdict.move, verdict.code) == (False, "no_cost_model")
                assert "step times of 1 windows are known, 12 are needed" in verdict.reason
                for index in range(14):
                    loads = fleet.skewed() * (8 + index % 5) // 10
                    fleet.report(loads, step_s=0.002 + 3e-5 * fleet.busiest(loads))
                active = await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
                assert "step cost measured" in active.reason
                learned = (await status_of(fleet)).learned
                assert learned.numbers["seconds_per_token"] == pytest.approx(3e-5, rel=0.1)
                assert "R²" in learned.step_time
        finally:
            await service.stop()

    run(scenario())


def test_windows_that_an_average_forecasts_better_are_planned_for_by_it_also_by_a_planner_that_restarts() -> None:
    """Small windows of one load. In mode observe, so that nothing but the windows happens."""

    async def scenario() -> None:
        store, random = FlakyStore(), np.random.default_rng(0)
        options = {"planning__mode": "observe", "planning__policy": "static", "gate__min_tokens": "0"}
        async with planner(store, **options) as (service, address), Fleet(address) as fleet:
            weights = random.exponential(1.0, fleet.num_logical)

            def report(count: int) -> None:
                for _ in range(count):
                    fleet.report(random.multinomial(300, weights / weights.sum(), size=fleet.num_layers))

            await reach(fleet, "ready")
            report(1)
            await until(lambda: len(fleet.replies) == fleet.num_ranks, "replies to the first window")
            said = (await status_of(fleet)).learned.forecast
            assert said == "planned from the last windows: 0 of 16 backtests of forecasts are done"
            report(110)
            await until(lambda: len(fleet.replies) == 111 * fleet.num_ranks, "replies to all windows")
            learned = (await status_of(fleet)).learned
            assert learned.forecast.startswith("planned for a forecast by a mean that halves in")
            used = [name for name, value in learned.numbers.items() if name.endswith("_used") and value == 1]
            assert used[0].startswith("forecast_ewma_")
            assert learned.numbers[used[0].replace("used", "less_off")] > 0.05
            plan = await fleet.admin.Plan(admin_pb2.PlanRequest(deployment="chat", policy="greedy"))
            assert "; planned for a forecast by a mean that halves in" in plan.verdict.reason
            deployment = service.planner.deployment(DeploymentId("chat"))  # type: ignore[union-attr]
            deployment.store_learned()
        async with planner(store, store__owner="another", **options) as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            learned = (await status_of(fleet)).learned
            assert learned.forecast.endswith("wins its backtests, but must see more windows")

    run(scenario())


@pytest.mark.parametrize("skew", [0, 1])
def test_while_no_forecast_wins_every_answer_is_as_without_forecasts(skew: int) -> None:
    async def scenario() -> None:
        answers = []
        for forecast in ("auto", "off"):
            async with planner(planning__mode="observe", planning__forecast=forecast) as (_, address), Fleet(address) as fleet:
                await reach(fleet, "ready")
                for hot in range(4):
                    fleet.report(fleet.skewed(hot * skew))
                await until(lambda: len(fleet.replies) == 4 * fleet.num_ranks, "replies to all windows")
                plan = await fleet.admin.Plan(admin_pb2.PlanRequest(deployment="chat"))
                plan.proposal.created_at_s = plan.verdict.decided_at_s = plan.solve_s = 0
                answers.append(plan.SerializeToString(deterministic=True))
                said = (await status_of(fleet)).learned.forecast
                assert said.startswith("planned from the last windows")
        assert answers[0] == answers[1]

    run(scenario())


def test_proposal_that_is_too_old_is_not_published() -> None:
    async def scenario() -> None:
        async with planner(planning__proposal_ttl_s="1e-9") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            verdict = await verdict_of(fleet)
            assert (verdict.move, verdict.code) == (False, "expired")
            assert "proposal_ttl_s" in verdict.reason
            with pytest.raises(grpc.aio.AioRpcError, match="nothing was published"):
                await fleet.admin.Rebalance(admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True))
            assert not await generations_of(fleet)

    run(scenario())


def test_windows_of_another_phase_are_not_planned_from_vllm_ascend_10647() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed(), phase=Phase.PREFILL)
            await until(lambda: len(fleet.replies) == 4, "replies")
            assert not any(reply.accepted for reply in fleet.replies)
            status = await status_of(fleet)
            assert status.windows_refused["wrong_phase"] == 4
            assert not status.HasField("last_verdict")

    run(scenario())


def test_counts_that_all_fall_on_one_layer_are_not_planned_from_sglang_25948() -> None:
    async def scenario() -> None:
        async with planner(gate__min_tokens="0") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            loads = fleet.skewed()
            loads[1:] = 0
            fleet.report(loads)
            verdict = await verdict_of(fleet)
            assert (verdict.move, verdict.code) == (False, "odd_load")
            assert "only 1 of 3 layers counted tokens" in verdict.reason

    run(scenario())


class WatchedSolver(InlineSolver):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.problems: list[PlanningProblem] = []

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        self.problems.append(problem)
        return await super().solve(problem, policy, deadline_s)


def test_policy_is_told_what_was_asked_for_and_where_tokens_come_from() -> None:
    async def scenario() -> None:
        solver = WatchedSolver()
        config = config_of(planning__max_imbalance="1.1", planning__effort="quick", planning__max_moves="7")
        service = Service(config, store=FlakyStore(), solver=solver)  # type: ignore[arg-type]
        ready = await service.start()
        try:
            async with Fleet(ready.address, dispatch="nearest") as fleet:
                await reach(fleet, "ready")
                fleet.report(fleet.skewed(), only_rank=2)
                await verdict_of(fleet)
                problem = solver.problems[0]
                assert problem.source_loads is not None
                assert np.array_equal(problem.source_loads[:, 2], fleet.skewed())
                assert not problem.source_loads[:, [0, 1, 3]].any()
                assert (problem.max_imbalance, problem.effort, problem.front) == (1.1, Effort.QUICK, True)
                assert problem.constraints.max_moves == 7
        finally:
            await service.stop()

    run(scenario())


def test_config_file_reaches_the_planner(tmp_path: Path) -> None:
    file = tmp_path / "planner.toml"
    file.write_text("[planning]\nmode = 'auto'\n[rollout]\ntries_max = 2\n")
    config = load_config(file=file).config
    assert (config.planning.mode, config.rollout.settings().tries_max) == ("auto", 2)


def test_stream_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_service, "ATTACH_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            silent = fleet.agent.Control()
            async with asyncio.timeout(90):
                assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "begins with Attach" in (await silent.details() or "")
            assert fleet.connections == 1

    run(scenario())


def test_agent_process_whose_rank_another_stream_took_learns_it_and_takes_it_back() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            thief = fleet.agent.Control()
            taken = Attach(deployment=DeploymentId("chat"), ranks=(fleet.ranks[1].address,))
            await thief.write(convert.from_agent_to_pb(taken))
            assert await thief.read() is not grpc.aio.EOF  # it is asked what is live: it speaks for the rank now
            await until(lambda: fleet.connections == 2, "the agent process to come back")
            thief.cancel()
            await first_generation(fleet)

    run(scenario())
