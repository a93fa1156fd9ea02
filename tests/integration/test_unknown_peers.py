"""Registrations of peers that nobody knows, huge ones and many of them: each is bounded, and a fleet gets in all the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from eplb_service.attach import Attach
from eplb_service.clock import ManualClock
from eplb_service.control import Registration
from eplb_service.ids import DeploymentId, RankId
from eplb_service.pb.v1 import agent_pb2, common_pb2
from eplb_service.planner.newcomers import KEPT_S, Newcomers
from eplb_service.rpc import convert
from tests.integration.planner_fleet import Fleet, until_true
from tests.integration.test_planner_loop import FlakyStore, planner, reach, run, status_of, warm_policies

__all__ = ["warm_policies"]


async def register(fleet: Fleet, registration: Registration) -> None:
    await fleet.agent.Register(convert.registration_to_pb(registration), timeout=5)


async def refusal(fleet: Fleet, request: agent_pb2.RegisterRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.agent.Register(request, timeout=10)
    return refused.value.code(), refused.value.details() or ""


def stranger(fleet: Fleet, number: int) -> Registration:
    return replace(fleet.registration(fleet.ranks[0]), deployment=DeploymentId(f"stranger-{number}"))


def test_names_that_nobody_speaks_for_are_kept_in_bounds_not_led_and_keep_nobody_out() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, limits__deployments="8") as (service, address), Fleet(address, hold_hello=True) as fleet:
            made = service.planner
            assert made is not None
            tasks = len(asyncio.all_tasks())
            for number in range(100):
                await register(fleet, stranger(fleet, number))
            assert [deployment.name for deployment in made.deployments] == [f"stranger-{number}" for number in range(92, 100)]
            assert await store.deployments() == []
            assert len(asyncio.all_tasks()) <= tasks + 2
            state, reason = made.deployment("stranger-99").state()
            assert state == "waiting"
            assert "does not lead" in reason
            fleet.hold_hello = False
            await reach(fleet, "ready")
            assert await store.deployments() == ["chat"]
            for number in range(100):  # and they go on
                await register(fleet, stranger(fleet, number))
            assert (await status_of(fleet)).state == "ready"
            assert fleet.connections == 1

    run(scenario())


def test_deployments_with_control_streams_are_bounded_and_the_one_too_many_is_told() -> None:
    async def scenario() -> None:
        async with (
            planner(limits__deployments="2") as (_, address),
            Fleet(address) as fleet,
            Fleet(address, deployment="b") as b,
        ):
            await reach(fleet, "ready")
            await reach(b, "ready")
            code, said = await refusal(fleet, convert.registration_to_pb(stranger(fleet, 1)))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert said == "deployment stranger-1 is one too many: this planner takes 2 (limits.deployments)"

    run(scenario())


def test_two_that_wait_for_the_last_place_share_it_in_order_of_their_streams() -> None:
    async def scenario() -> None:
        async with planner(limits__deployments="1") as (_, address), Fleet(address, hold_hello=True) as fleet:
            waiting = [stranger(fleet, number) for number in (1, 2)]
            for registration in waiting:
                await register(fleet, registration)  # the second takes the place of the first, which registers again
            await register(fleet, waiting[0])
            streams = [fleet.agent.Control() for _ in waiting]
            await streams[0].write(attach(waiting[0]))
            await register_in_vain(fleet, waiting[1])
            await streams[1].write(attach(waiting[1]))
            async with asyncio.timeout(90):
                assert await streams[1].code() is grpc.StatusCode.NOT_FOUND
            streams[0].cancel()

    run(scenario())


def attach(registration: Registration) -> agent_pb2.ControlFromAgent:
    return convert.from_agent_to_pb(Attach(deployment=registration.deployment, ranks=(registration.address,)))


async def register_in_vain(fleet: Fleet, registration: Registration) -> None:
    """Until the planner is full, which it is once the other's stream was heard."""

    async def is_full() -> bool:
        try:
            await register(fleet, registration)
        except grpc.aio.AioRpcError as error:
            return f"{registration.deployment} is one too many" in (error.details() or "")
        return False

    await until_true(is_full, "the planner to be full")


def test_huge_registrations_are_refused_with_the_numbers() -> None:
    """sglang#6081: what a rank says of its model is not believed for its size."""

    async def scenario() -> None:
        async with (
            planner(limits__ranks="64", limits__message_bytes="1048576") as (service, address),
            Fleet(address, hold_hello=True) as fleet,
        ):
            usual = fleet.registration(fleet.ranks[0])
            ranks = replace(usual, group_rank_ids=tuple(RankId(rank) for rank in range(65)))
            assert (
                "names 65 ranks; this planner takes at most 64 (limits.ranks)"
                in (await refusal(fleet, convert.registration_to_pb(ranks)))[1]
            )
            layers = convert.registration_to_pb(usual)
            layers.models[0].layers.extend([agent_pb2.LayerInfo(layer_id=9, num_logical=1, slots=1, expert_bytes=1)] * 4096)
            assert "models.layers: 4099 is out of range; expected 0 to 4096" in (await refusal(fleet, layers))[1]
            slots = convert.registration_to_pb(usual)
            for layer in slots.models[0].layers:
                layer.slots = (1 << 31) - 1
            assert "6442450941 slots in all its layers: 25769803764 on 4 ranks, at most" in (await refusal(fleet, slots))[1]
            names = convert.registration_to_pb(usual)
            names.node = "n" * 100_000
            assert "node: 'nnnn" in (await refusal(fleet, names))[1]
            code, _ = await refusal(fleet, agent_pb2.RegisterRequest(deployment="x", node="n" * (2 << 20)))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            odd = agent_pb2.RegisterRequest(address=common_pb2.Address(rank_id=(1 << 32) - 1), deployment="x")
            assert "address.rank_id: 4294967295" in (await refusal(fleet, odd))[1]
            assert service.planner is not None
            assert service.planner.deployments == ()
            fleet.hold_hello = False
            await reach(fleet, "ready")

    run(scenario())


class _Named:
    """Stands for a steering: only its deployment's name is looked at."""

    def __init__(self, name: str) -> None:
        self.deployment = self
        self.name = DeploymentId(name)


def test_what_nobody_speaks_for_is_forgotten_after_a_while() -> None:
    clock, newcomers = ManualClock(), Newcomers(3)
    for name in "abc":
        assert newcomers.keep(_Named(name), clock.monotonic()) is None  # type: ignore[arg-type]
        clock.advance(KEPT_S / 4)
    newcomers.keep(_Named("a"), clock.monotonic())  # type: ignore[arg-type]  # asked again
    assert newcomers.keep(_Named("d"), clock.monotonic()) == "b"  # type: ignore[arg-type]
    clock.advance(0.8 * KEPT_S)
    assert newcomers.get(DeploymentId("c"), clock.monotonic()) is None
    assert newcomers.get(DeploymentId("a"), clock.monotonic()) is not None
    assert newcomers.take(DeploymentId("d")) is not None
    assert newcomers.take(DeploymentId("d")) is None
    clock.advance(KEPT_S)
    assert newcomers.get(DeploymentId("a"), clock.monotonic()) is None
    assert len(newcomers) == 0
