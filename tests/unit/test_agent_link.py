"""One control stream's queue: in order, bounded, closed with a reason."""

from __future__ import annotations

import asyncio

from eplb_service.control import Address, Arm
from eplb_service.ids import ChunkId, GroupId, Incarnation, RankId
from eplb_service.planner.agent_link import AgentLink

TO = Address(RankId(0), Incarnation(1), GroupId(2))


def arm(number: int) -> Arm:
    return Arm(to=TO, chunk_id=ChunkId(number))


def test_messages_leave_in_order() -> None:
    async def scenario() -> None:
        link = AgentLink("peer")
        assert all(link.send(arm(number)) for number in range(1, 4))
        assert [await link.next() for _ in range(3)] == [arm(1), arm(2), arm(3)]

    asyncio.run(scenario())


def test_process_that_does_not_read_loses_its_stream_and_nobody_waits_for_it() -> None:
    async def scenario() -> None:
        link = AgentLink("10.0.0.7:5", queue_max=3)
        assert [link.send(arm(number)) for number in range(1, 6)] == [True, True, True, False, False]
        assert link.closed_reason == "the agent process at 10.0.0.7:5 does not read: 3 messages wait for it"
        assert await link.next() is None

    asyncio.run(scenario())


def test_first_reason_of_a_close_stays_and_wakes_the_sender() -> None:
    async def scenario() -> None:
        link = AgentLink("peer")
        waiting = asyncio.create_task(link.next())
        await asyncio.sleep(0)
        link.close("first")
        link.close("second")
        assert await waiting is None
        assert link.closed_reason == "first"
        assert not link.send(arm(1))

    asyncio.run(scenario())
