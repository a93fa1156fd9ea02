"""A rollout that takes long: what is said of it while it lasts, and what is counted once it is over, over restarts too."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_service.app import Service
from eplb_service.pb.v1 import placement_pb2
from eplb_service.store.memory import MemoryStore
from tests.integration.planner_fleet import Fleet, until
from tests.integration.test_planner_loop import (
    FlakyStore,
    InlineSolver,
    config_of,
    generation_of,
    reach,
    run,
    status_of,
    warm_policies,
)

__all__ = ["warm_policies"]  # a fixture

ACTIVE = placement_pb2.GENERATION_STATE_ACTIVE


def sample(service: Service, name: str, **labels: str) -> float:
    """A metric of the deployment; 0 where nothing was counted yet."""
    return service.metrics.registry.get_sample_value(name, {"deployment": "chat", **labels}) or 0.0


async def planner_on(store: MemoryStore) -> tuple[Service, str]:
    service = Service(config_of(), store=store, solver=InlineSolver())  # type: ignore[arg-type]
    return service, (await service.start()).address


async def is_serving(address: str) -> bool:
    """What a probe is told."""
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def test_while_ranks_stage_for_long_the_state_says_so_and_health_stays_serving_sglang_21004() -> None:
    async def scenario() -> None:
        service, address = await planner_on(FlakyStore())
        try:
            async with Fleet(address, hold_staging=True) as fleet:
                await reach(fleet, "ready")
                fleet.report(fleet.skewed())
                await until(lambda: all(rank.staged for rank in fleet.ranks), "all ranks staging")
                view = await status_of(fleet)
                assert view.state == "rolling_out"
                assert (view.rollout.generation, view.live_generation) == (1, 0)
                assert list(view.rollout.waiting_for) == [0, 1, 2, 3]
                assert await is_serving(address)
                for rank in fleet.ranks:  # bounded: one layer at a time, whatever the generation changes
                    assert rank.staged is not None
                    assert len({copy.layer for copy in rank.staged.copies}) <= fleet.layers_per_chunk
        finally:
            await service.stop()

    run(scenario())


def test_a_gauge_says_that_experts_move_and_a_restart_counts_no_generation_twice_vllm_49956() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        first, address = await planner_on(store)
        second: Service | None = None
        try:
            async with Fleet(address, hold_flips=True) as fleet:
                await reach(fleet, "ready")
                fleet.report(fleet.skewed())
                await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
                await until(lambda: sample(first, "eplb_rolling_out") == 1.0, "the gauge to rise")
                assert sample(first, "eplb_generations_total", outcome="active") == 0.0
                fleet.hold_flips = False
                fleet.vote()
                await generation_of(fleet, 1, ACTIVE)
                await until(lambda: sample(first, "eplb_rolling_out") == 0.0, "the gauge to fall")
                assert sample(first, "eplb_generations_total", outcome="active") == 1.0
                port = address.rpartition(":")[2]
                await first.stop()
                second = Service(config_of(listen__port=port), store=store, solver=InlineSolver())  # type: ignore[arg-type]
                await second.start()
                await until(lambda: sample(second, "eplb_generation") == 1.0, "the new planner to know what is live")
                assert sample(second, "eplb_rolling_out") == 0.0
                assert sample(second, "eplb_generations_total", outcome="active") == 0.0
                assert (await generation_of(fleet, 1, ACTIVE)).state == ACTIVE
        finally:
            await first.stop()
            if second is not None:
                await second.stop()

    run(scenario())
