"""The planner's gRPC services against messages that are valid but for a field or two: never a crash, never a changed map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.app import Service
from eplb_service.attach import Attach, FromAgent, Gone
from eplb_service.control import Address, Armed, Committed, Disarmed, Flipped, LinkBytes, Pulse, RefusalCode, Refused, Staged
from eplb_service.ids import ChunkId, DeploymentId, RankId
from eplb_service.pb.v1 import admin_pb2, agent_pb2, placement_pb2
from eplb_service.rpc import convert
from tests.hostile_messages import broken
from tests.integration.planner_fleet import Fleet, until
from tests.integration.test_planner_loop import FlakyStore, InlineSolver, config_of, generation_of, reach, warm_policies

__all__ = ["warm_policies"]
WRONG = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
"""What no message may be answered with: the planner's fault, not the caller's."""


@dataclass
class Bench:
    """A planner with a fleet that serves, and a loop that the examples run on."""

    runner: asyncio.Runner
    service: Service
    fleet: Fleet
    rows: list[dict[Any, tuple[int, ...]]]

    def call(self, method: Any, request: Message) -> None:
        """One unary call, answered or refused by name."""
        self.runner.run(self._call(method, request))

    async def _call(self, method: Any, request: Message) -> None:
        try:
            await method(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            self.judge(error, request)

    def judge(self, error: grpc.aio.AioRpcError, request: object) -> None:
        if error.details() == "Internal error from Core":
            return  # this end's own: the planner ended the call while it was sending
        assert error.code() not in WRONG, f"{error.code()}: {error.details()} for {request}"
        assert error.details(), f"a refusal without a word for {request}"

    async def check_whole(self) -> None:
        """Everybody still routes as before."""
        await reach(self.fleet, "ready")
        assert [dict(rank.rows) for rank in self.fleet.ranks] == self.rows
        assert self.service.planner is not None
        live = self.service.planner.deployment("chat").live
        assert live is not None
        assert {layer.layer: layer.row for layer in live.layers} == self.rows[0]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:

        async def start() -> tuple[Service, Fleet]:
            service = Service(config_of(gate__min_tokens="0"), store=FlakyStore(), solver=InlineSolver())  # type: ignore[arg-type]
            ready = await service.start()
            fleet = await Fleet(ready.address).__aenter__()
            await reach(fleet, "ready")
            return service, fleet

        service, fleet = runner.run(start())
        made = Bench(runner, service, fleet, [dict(rank.rows) for rank in fleet.ranks])
        yield made
        runner.run(made.check_whole())

        async def end() -> None:
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)  # and all is well enough for a rollout
            assert fleet.all_route_alike()
            await fleet.__aexit__()
            await service.stop()

        runner.run(end())


def registration_of(fleet: Fleet) -> agent_pb2.RegisterRequest:
    return convert.registration_to_pb(fleet.registration(fleet.ranks[1]))


def test_registrations(bench: Bench) -> None:
    """sglang#6081: a fallback model says E = 1."""

    @settings(max_examples=100, deadline=None)
    @given(broken(registration_of(bench.fleet)))
    def fuzz(request: agent_pb2.RegisterRequest) -> None:
        if request.address.incarnation == registration_of(bench.fleet).address.incarnation:
            request.address.incarnation += 1  # what a rank says anew of itself, in the same life, may form its group anew
        bench.call(bench.fleet.agent.Register, request)

    fuzz()
    bench.runner.run(bench.check_whole())


ORDERS = [
    ("placement", "GetPlacement", placement_pb2.GetPlacementRequest(deployment="chat", generation=1)),
    ("placement", "ListGenerations", placement_pb2.ListGenerationsRequest(deployment="chat", limit=3)),
    ("placement", "GetRolloutEvents", placement_pb2.GetRolloutEventsRequest(deployment="chat", generation=1)),
    ("placement", "DiffPlacements", placement_pb2.DiffPlacementsRequest(deployment="chat", from_generation=0, to_generation=1)),
    ("admin", "Status", admin_pb2.StatusRequest(deployment="chat")),
    ("admin", "Plan", admin_pb2.PlanRequest(deployment="chat", policy="greedy")),
    ("admin", "Rebalance", admin_pb2.RebalanceRequest(deployment="chat", idempotency_key="k", force=True)),
    ("admin", "Rollback", admin_pb2.RollbackRequest(deployment="chat", idempotency_key="k", generation=7)),
    ("admin", "SetMode", admin_pb2.SetModeRequest(deployment="chat", mode="observe")),
]


@pytest.mark.parametrize(("service", "method", "request_"), ORDERS, ids=[method for _, method, _ in ORDERS])
def test_questions_and_orders(bench: Bench, service: str, method: str, request_: Message) -> None:
    call = getattr(getattr(bench.fleet, service), method)

    @settings(max_examples=25, deadline=None)
    @given(broken(request_))
    def fuzz(request: Message) -> None:
        if method == "Rollback" and getattr(request, "generation", 1) == 0:
            return  # an order that can be followed
        bench.call(call, request)

    fuzz()
    mode = admin_pb2.SetModeRequest(deployment="chat", mode="auto")
    bench.call(bench.fleet.admin.SetMode, mode)
    bench.runner.run(bench.check_whole())


def test_load_reports(bench: Bench) -> None:
    """Those that are believed may be planned from; none of them here holds enough."""
    fleet = bench.fleet
    bench.call(fleet.admin.SetMode, admin_pb2.SetModeRequest(deployment="chat", mode="observe"))
    queue: asyncio.Queue[agent_pb2.LoadReport] = asyncio.Queue()
    fleet._reports, kept = queue, fleet._reports
    fleet.report(fleet.skewed())
    fleet._reports = kept
    fleet.window_index = 0
    valid = [queue.get_nowait() for _ in range(queue.qsize())]

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(valid).flatmap(broken))
    def fuzz(report: agent_pb2.LoadReport) -> None:
        bench.runner.run(answered(report))

    async def answered(report: agent_pb2.LoadReport) -> None:
        try:
            (reply,) = [reply async for reply in fleet.agent.Report(iter([report]), timeout=10)]
        except grpc.aio.AioRpcError as error:
            bench.judge(error, report)
        else:
            assert reply.accepted or (reply.code and reply.reason)

    fuzz()
    bench.call(fleet.admin.SetMode, admin_pb2.SetModeRequest(deployment="chat", mode="auto"))
    bench.runner.run(bench.check_whole())


def facts_of(address: Address) -> list[FromAgent]:
    chunk = ChunkId((1 << 32) + 1)
    return [
        Staged(sender=address, chunk_id=chunk, seconds=0.1, received=LinkBytes(same_node=1)),
        Armed(sender=address, chunk_id=chunk),
        Refused(sender=address, chunk_id=chunk, code=RefusalCode.BUSY, reason="busy"),
        Committed(sender=address, chunk_id=chunk, boundary=3),
        Flipped(sender=address, chunk_id=chunk, boundary=3, digests=(), stall_s=0.0),
        Disarmed(sender=address, chunk_id=chunk),
        Gone(sender=address, reason="bye"),
        Pulse(sender=address, boundary=1, idle=False, voting=True, off_reason="", windows_dropped=0, weights_version=1),
    ]


def test_control_streams(bench: Bench) -> None:
    """A stream that speaks for a rank of a deployment of its own, and says things about the ranks of another."""
    fleet = bench.fleet
    own = convert.registration_to_pb(fleet.registration(fleet.ranks[0]))
    own.deployment = "odd"
    del own.group_rank_ids[1:]
    for layer in own.models[0].layers:
        layer.slots = 8
    bench.call(fleet.agent.Register, own)
    mine = Address(RankId(0), fleet.ranks[0].address.incarnation, fleet.ranks[0].address.group_id)
    attach = convert.from_agent_to_pb(Attach(deployment=DeploymentId("odd"), ranks=(mine,)))
    of_others = [convert.from_agent_to_pb(fact) for rank in fleet.ranks for fact in facts_of(rank.address)]
    valid = [attach, *of_others, *(convert.from_agent_to_pb(fact) for fact in facts_of(mine))]

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.sampled_from(valid).flatmap(broken) | st.sampled_from(of_others), min_size=1, max_size=4), st.booleans())
    def fuzz(messages: list[agent_pb2.ControlFromAgent], attached: bool) -> None:
        bench.runner.run(said([attach, *messages] if attached else messages))

    async def said(messages: list[agent_pb2.ControlFromAgent]) -> None:
        async def sending() -> AsyncIterator[agent_pb2.ControlFromAgent]:
            for message in messages:
                yield message

        try:
            async with asyncio.timeout(90):
                async for _ in fleet.agent.Control(sending()):
                    pass
        except grpc.aio.AioRpcError as error:
            bench.judge(error, messages)

    fuzz()
    bench.runner.run(bench.check_whole())
    assert fleet.connections == 1, "nobody but its own agent process can end a fleet's stream"


def test_a_stream_that_takes_a_rank_and_lies_for_it_changes_no_map(bench: Bench) -> None:
    """It knows the address, as an agent process does: the rank's own comes back and is asked what is live."""
    fleet = bench.fleet
    taken = fleet.ranks[2].address
    attach = convert.from_agent_to_pb(Attach(deployment=DeploymentId("chat"), ranks=(taken,)))

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.sampled_from(facts_of(taken)).map(convert.from_agent_to_pb).flatmap(broken), max_size=3))
    def fuzz(messages: list[agent_pb2.ControlFromAgent]) -> None:
        bench.runner.run(steal([attach, *messages]))

    async def steal(messages: list[agent_pb2.ControlFromAgent]) -> None:
        before = fleet.connections
        stream = fleet.agent.Control()
        try:
            for message in messages:
                await stream.write(message)
            await until(lambda: fleet.connections > before, "the rank's own agent process to come back")
        except grpc.aio.AioRpcError as error:
            bench.judge(error, messages)
        except asyncio.InvalidStateError:  # the stream was ended under the last write
            assert await stream.code() not in WRONG
        stream.cancel()
        await reach(fleet, "ready")

    fuzz()
    bench.runner.run(bench.check_whole())
