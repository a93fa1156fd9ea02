"""A planner that lost the lead to another one lets the agents go, over a connection that may lead elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.frames import Welcome
from eplb_service.control import Hello
from eplb_service.errors import EnvironmentFault
from eplb_service.rpc.status import error_of
from tests.integration import test_agent_process as agents
from tests.integration.agent_doubles import FakeHook, FakePlanner, address
from tests.integration.planner_fleet import Fleet, until
from tests.integration.test_planner_loop import FlakyStore, planner, reach, run, status_of

pytestmark = pytest.mark.process


def test_streams_end_with_a_word_to_connect_anew_once_another_planner_leads_and_not_before() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, store__owner="old") as (first, where), Fleet(where) as fleet:
            await reach(fleet, "ready")
            assert first.planner is not None
            old = first.planner.deployment("chat").leading
            old.lose("a test says so")
            await until(lambda: old.epoch > 1, "the lead to be taken anew")
            await reach(fleet, "ready")
            assert not let_go(fleet)  # nobody else led meanwhile: the streams stay
            async with planner(store, store__owner="new") as (second, _):
                assert second.planner is not None
                new = second.planner.deployment("chat").leading
                assert old._leadership is not None
                await store.resign(old._leadership)
                await until(lambda: new.epoch > 0, "the other to lead")
                before = fleet.connections
                old.lose("another leads")
                (ended,) = await until(lambda: let_go(fleet), "the stream to end")
                assert ended.code() is grpc.StatusCode.UNAVAILABLE
                told = error_of(ended, where)
                assert isinstance(told, EnvironmentFault)
                assert "'new' leads" in str(told)
                await until(lambda: fleet.connections > before, "the agent process to connect again")
                assert (await status_of(fleet)).state == "waiting"
                assert len(let_go(fleet)) == 1  # once: should the lead come back here, its streams are here

    run(scenario())


def let_go(fleet: Fleet) -> list[grpc.aio.AioRpcError]:
    return [ending for ending in fleet.endings if "this planner leads chat no more" in (ending.details() or "")]


class Elsewhere(FakePlanner):
    """Notes over which connection each stream came, and ends the first one as a planner does that leads no more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peers: list[str] = []

    async def Control(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.peers.append(context.peer())
        self.changed()
        if len(self.peers) == 1:
            raise EnvironmentFault("this planner leads moe no more: connect anew")
        async for order in super().Control(requests, context):
            yield order


def test_an_agent_process_whose_stream_ended_comes_back_over_another_connection() -> None:
    async def work() -> None:
        with tempfile.TemporaryDirectory(prefix="eplb-") as name:
            fake = Elsewhere()
            await fake.start()
            agent = agents.Agent(Path(name), fake.target)
            try:
                await agent.start()
                await agent.ready()
                hook = FakeHook(address(0))
                await hook.link(agent.socket)
                await hook.hear(Welcome)
                await hook.hear(Hello)
                assert len(fake.peers) == 2
                assert fake.peers[0] != fake.peers[1]
                await agent.stderr_has("leads moe no more")
            finally:
                if agent.process is not None and agent.process.returncode is None:
                    agent.process.kill()
                    await agent.ended()
                await fake.kill()

    agents.run(work)
