"""Questions of engines through a real agent process: frames on its socket in, the planner's answer or a reasoned keep out."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from agent.frames import HEAD, Decoder, Welcome, encode, frame_lengths
from eplb_service import __version__
from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.errors import EnvironmentFault, EplbError
from eplb_service.ids import DeploymentId, GenerationNumber
from eplb_service.pb.v1 import adviser_pb2, adviser_pb2_grpc
from eplb_service.rpc.channel import SERVER_OPTIONS
from eplb_service.rpc.convert_advice import advice_request_from_pb, advice_to_pb
from eplb_service.rpc.status import StatusInterceptor
from tests.integration.agent_doubles import DEADLINE_S, Changes
from tests.integration.test_agent_process import Agent

pytestmark = pytest.mark.process


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        yield Path(name)


def question(sequence: int = 1, *, deployment: str = "vllm-chat", timeout_s: float = 10.0) -> AdviceRequest:
    current = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]], np.int32)
    return AdviceRequest(
        deployment=DeploymentId(deployment),
        engine="vllm 0.33.0",
        origin=9,
        sequence=sequence,
        model="tiny",
        layer_ids=(3, 4),
        rank_ids=(0, 1),
        nodes=("a", "a"),
        num_logical=4,
        dispatch="hashed",
        num_groups=1,
        load=np.arange(8, dtype=np.float64).reshape(2, 4),
        current=current,
        digest=map_digest(current),
        expert_bytes=(10, 10),
        steps=100,
        step_time_s=0.01,
        timeout_s=timeout_s,
    )


class FakeAdviser(adviser_pb2_grpc.AdviserServiceServicer, Changes):
    """Says move to every question; `hold` keeps answers back, `refuse` raises."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[AdviceRequest] = []
        self.deadlines: list[float] = []
        self.ended: list[int] = []
        self.refuse: EplbError | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def Advise(self, request: adviser_pb2.AdviseRequest, context: Any) -> adviser_pb2.AdviseReply:  # noqa: N802
        asked = advice_request_from_pb(request)
        self.heard.append(asked)
        self.deadlines.append(context.time_remaining())
        self.changed()
        try:
            await self.go.wait()
        finally:
            self.ended.append(asked.sequence)
            self.changed()
        if self.refuse is not None:
            raise self.refuse
        rows = np.ascontiguousarray(asked.current[:, ::-1])
        return advice_to_pb(
            Advice(
                origin=asked.origin,
                sequence=asked.sequence,
                move=True,
                generation=GenerationNumber(asked.sequence),
                digest=map_digest(rows),
                reason="move: it pays",
                rows=rows,
            )
        )


class Asker:
    """The engine's end of one link."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = Decoder((Welcome, Advice))

    async def link(self) -> Welcome:
        async with asyncio.timeout(DEADLINE_S):
            self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        welcome = await self.hear()
        assert isinstance(welcome, Welcome)
        return welcome

    async def say(self, *messages: object) -> None:
        self._writer.write(b"".join(map(encode, messages)))
        async with asyncio.timeout(DEADLINE_S):
            await self._writer.drain()

    async def hear(self) -> object:
        async with asyncio.timeout(DEADLINE_S):
            head, payload = frame_lengths(await self._reader.readexactly(HEAD.size))
            return self._decoder.decode(await self._reader.readexactly(head), await self._reader.readexactly(payload))

    async def answer(self) -> Advice:
        answer = await self.hear()
        assert isinstance(answer, Advice)
        return answer

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            assert await self._reader.read() == b""

    def drop(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[FakeAdviser, Agent, Any]]:
    """A planner that advises, and an agent process that is ready."""
    adviser = FakeAdviser()
    server = grpc.aio.server(
        options=SERVER_OPTIONS, interceptors=[StatusInterceptor(lambda method, error: print(method, repr(error)))]
    )
    adviser_pb2_grpc.add_AdviserServiceServicer_to_server(adviser, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agent = Agent(folder, f"127.0.0.1:{port}")
    try:
        await agent.start()
        await agent.ready()
        yield adviser, agent, server
    finally:
        if agent.process is not None and agent.process.returncode is None:
            agent.process.kill()
            await agent.ended()
        await server.stop(grace=None)


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_question_is_passed_on_unregistered_and_comes_back_whole(folder: Path) -> None:
    async def story() -> None:
        async with scene(folder) as (adviser, agent, _):
            engine = Asker(agent.socket)
            assert (await engine.link()).version == __version__
            asked = question()
            await engine.say(asked)
            answer = await engine.answer()
            heard = adviser.heard[0]
            for part in dataclasses.fields(AdviceRequest):
                mine, theirs = getattr(asked, part.name), getattr(heard, part.name)
                if isinstance(mine, np.ndarray):
                    np.testing.assert_array_equal(mine, theirs)
                    assert mine.dtype == theirs.dtype
                else:
                    assert mine == theirs, part.name
            assert answer.move
            assert answer.rows is not None
            np.testing.assert_array_equal(answer.rows, asked.current[:, ::-1])
            assert (answer.digest, answer.generation, answer.reason) == (map_digest(answer.rows), 1, "move: it pays")
            assert 0 < adviser.deadlines[0] <= asked.timeout_s  # never longer than the engine waits

    run(story())


def test_trouble_is_a_keep_with_its_reason_and_the_link_stays(folder: Path) -> None:
    """Hazards: a planner that does not lead, one that is too slow, a question that cannot be, a planner that is gone."""

    async def story() -> None:
        async with scene(folder) as (adviser, agent, server):
            engine = Asker(agent.socket)
            await engine.link()

            async def kept(asked: AdviceRequest, *words: str) -> None:
                await engine.say(asked)
                answer = await engine.answer()
                assert (answer.origin, answer.sequence) == (asked.origin, asked.sequence)
                assert (answer.move, answer.generation, answer.rows) == (False, 0, None)
                assert answer.digest == asked.digest
                for word in words:
                    assert word in answer.reason, answer.reason

            adviser.refuse = EnvironmentFault("this planner does not lead vllm-chat: planner b leads")
            await kept(question(1), "planner b leads")
            adviser.refuse = None
            adviser.go.clear()
            await kept(question(2, timeout_s=0.3), "0.3 s")
            adviser.go.set()
            await kept(dataclasses.replace(question(3), digest=4), "digest: 0x4")
            await kept(dataclasses.replace(question(4), load=np.full((2, 4), -1.0)), "-1.0 token assignments")
            await kept(question(5, deployment="no name"), "deployment: 'no name'")
            await kept(dataclasses.replace(question(6), timeout_s=float("inf")), "waits inf s")
            await kept(dataclasses.replace(question(7), current=question().current.astype(np.int64)), "current: int64")
            await engine.say(question(8))
            assert (await engine.answer()).move  # all that was the same link
            await server.stop(grace=None)
            await kept(question(9), "planner at 127.0.0.1", "not reachable")

    run(story())


def test_several_questions_under_way_and_one_bad_client_closes_its_own_link_only(folder: Path) -> None:
    async def story() -> None:
        async with scene(folder) as (adviser, agent, _):
            engine, other, rogue = (Asker(agent.socket) for _ in range(3))
            for one in (engine, other, rogue):
                await one.link()
            adviser.go.clear()
            await engine.say(question(1), question(2, deployment="drafter"))
            await other.say(question(3, deployment="stage1"))
            await rogue.say(question(4, deployment="rogue"))
            await adviser.until(lambda: len(adviser.heard) == 4, "four questions are with the planner")
            with socket.socket(socket.AF_UNIX) as half:  # hangs up in the middle of a question
                half.connect(str(agent.socket))
                half.sendall(encode(question())[:200])
            rogue._writer.write(b"EPL1" + b"\xff" * 8)
            await rogue.ended()
            await adviser.until(lambda: 4 in adviser.ended, "the question of the closed link is given up")
            adviser.go.set()
            assert {(await engine.answer()).generation for _ in range(2)} == {1, 2}
            assert (await other.answer()).generation == 3
            other.drop()
            await engine.say(question(5))
            assert (await engine.answer()).generation == 5

    run(story())


def test_more_questions_than_are_carried_at_once_are_kept(folder: Path) -> None:
    async def story() -> None:
        async with scene(folder) as (adviser, agent, _):
            engine = Asker(agent.socket)
            await engine.link()
            adviser.go.clear()
            await engine.say(*(question(number, deployment=f"d{number}") for number in range(1, 66)))
            answer = await engine.answer()
            assert (answer.sequence, answer.move) == (65, False)
            assert "64 questions are under way" in answer.reason
            adviser.go.set()
            assert {(await engine.answer()).sequence for _ in range(64)} == set(range(1, 65))

    run(story())
