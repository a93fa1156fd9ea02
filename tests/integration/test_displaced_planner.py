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
        async with planner(store, store__owner="old", store__lease_s="1") as (first, where), Fleet(where) as fleet:
            await reach(fleet, "ready")
            assert first.planner is not None
            leading = first.planner.deployment("chat").leading
            leading.lose("a test says so")
            await until(lambda: leading.epoch == 2, "the lead to be taken anew")
            await reach(fleet, "ready")
            assert not fleet.endings  # nobody else led meanwhile: the streams stay
            async with planner(store, store__owner="new", store__lease_s="1") as (second, _):
                assert second.planner is not None
                assert leading._leadership is not None
                await store.resign(leading._leadership)
                await until(lambda: fleet.endings, "the stream to end")
                assert second.planner.deployment("chat").leading.epoch == 3
                assert fleet.endings[0].code() is grpc.StatusCode.UNAVAILABLE
                ended = error_of(fleet.endings[0], where)
                assert isinstance(ended, EnvironmentFault)
                assert "this planner leads chat no more" in str(ended)
                assert "'new' leads" in str(ended)
                await until(lambda: fleet.connections == 2, "the agent process to connect again")
                assert (await status_of(fleet)).state == "waiting"
                await until(
                    lambda: first.planner is not None and first.planner.deployment("chat").carrier.num_agents == 1, "it"
                )
                assert len(fleet.endings) == 1  # let go once: what leads here again is taken up

    run(scenario())


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
                assert "leads moe no more" in agent.stderr
            finally:
                if agent.process is not None and agent.process.returncode is None:
                    agent.process.kill()
                    await agent.ended()
                await fake.kill()

    agents.run(work)
