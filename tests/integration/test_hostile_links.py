"""One agent process between a planner and hooks that say what is valid but for a field or two: it serves the others on."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent.frames import HEAD, MAGIC, encode, frame_lengths
from agent.runtime import AgentConfig, run_agent
from eplb_service.control import Arm, Armed, Committed, Disarm, Disarmed, Flipped, Hello, RefusalCode, Refused, ToRank
from eplb_service.ids import Epoch, chunk_id
from eplb_service.rpc.convert import to_rank_to_pb
from tests.hostile_messages import broken
from tests.integration import agent_doubles
from tests.integration.agent_doubles import (
    DEADLINE_S,
    FakeHook,
    FakePlanner,
    address,
    pulse,
    registration,
    report,
    stage,
    staged,
)

CHUNK = chunk_id(Epoch(1), 1)


@dataclass
class Bench:
    """The agent process on this loop, a planner, and rank 0 that is attached."""

    runner: asyncio.Runner
    planner: FakePlanner
    hook: FakeHook
    path: Path
    agent: asyncio.Task[None]

    async def check_alive(self, epoch: int) -> None:
        """Rank 0 still hears its planner, and is heard."""
        assert not self.agent.done(), self.agent
        heard = len([order for order in self.hook.heard if isinstance(order, Hello) and order.epoch == epoch])
        hello = Hello(to=address(0), epoch=Epoch(epoch))
        await self.planner.until(lambda: bool(self.planner.streams), "a control stream")
        self.planner.say(hello)
        await self.hook.until(
            lambda: len([order for order in self.hook.heard if isinstance(order, Hello) and order.epoch == epoch]) > heard,
            "rank 0 to hear a Hello",
        )
        told = len(self.planner.heard)
        await self.hook.say(pulse(address(0)))
        await self.planner.until(lambda: pulse(address(0)) in self.planner.heard[told:], "its pulse")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(
        agent_doubles, "to_rank_to_pb", lambda order: order if isinstance(order, Message) else to_rank_to_pb(order)
    )
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder, asyncio.Runner() as runner:
        path, stop = Path(folder) / "s", asyncio.Event()

        async def start() -> Bench:
            planner = FakePlanner()
            await planner.start()
            config = AgentConfig(planner=planner.target, socket=path, ready_file=Path(folder) / "r")
            agent = asyncio.create_task(run_agent(config, stop=stop))
            async with asyncio.timeout(DEADLINE_S):
                while not (Path(folder) / "r").exists():  # noqa: ASYNC110  (a file appears)
                    await asyncio.sleep(0.002)
            hook = FakeHook(address(0))
            await hook.link(path)
            await hook.hear(Hello)
            return Bench(runner, planner, hook, path, agent)

        made = runner.run(start())
        yield made

        async def end() -> None:
            await made.hook.drop()
            stop.set()
            await made.agent
            await made.planner.kill()

        runner.run(end())


ORDERS: list[ToRank] = [
    Hello(to=address(0), epoch=Epoch(1)),
    stage(address(0)),
    Arm(to=address(0), chunk_id=CHUNK),
    Disarm(to=address(0), chunk_id=CHUNK, epoch=Epoch(1)),
]


def test_orders_that_make_no_sense_are_refused_and_the_stream_goes_on(bench: Bench) -> None:
    """sglang#22872: a control message that is not understood must not take what comes after it along."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(ORDERS).map(to_rank_to_pb).flatmap(broken), min_size=1, max_size=4))
    def fuzz(orders: list[Any]) -> None:
        bench.runner.run(said(orders))

    async def said(orders: list[Any]) -> None:
        await bench.planner.until(lambda: bool(bench.planner.streams), "a control stream")
        for order in orders:
            bench.planner.say(order)
        await asyncio.sleep(0)
        assert not bench.agent.done()

    fuzz()
    streams = len(bench.planner.streams)
    known = {type(order).__name__ for order in ORDERS} | {"Welcome", "RegistrationAnswer"}
    assert {type(message).__name__ for message in bench.hook.heard} <= known
    assert all(order.to == address(0) for order in bench.hook.heard if hasattr(order, "to"))
    bench.runner.run(bench.check_alive((1 << 31) - 1))  # whatever epochs were made up, this is none below
    assert len(bench.planner.streams) == streams == 1


FACTS: list[object] = [
    registration(address(1)),
    staged(address(1)),
    pulse(address(1)),
    report(address(1), 1),
    Armed(sender=address(1), chunk_id=CHUNK),
    Committed(sender=address(1), chunk_id=CHUNK, boundary=3),
    Flipped(sender=address(1), chunk_id=CHUNK, boundary=3, digests=(), stall_s=0.1),
    Disarmed(sender=address(1), chunk_id=CHUNK),
    Refused(sender=address(1), chunk_id=CHUNK, code=RefusalCode.BUSY, reason="busy"),
]
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, 1 << 80, 1.5, 1e308, "", "x", "é" * 3000, [], [0], {}, "busy"]
)


def places_of(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON tree, as (holder, key)."""
    keys = list(tree) if isinstance(tree, dict) else list(range(min(len(tree), 3))) if isinstance(tree, list) else []
    return [place for key in keys for place in ((tree, key), *places_of(tree[key]))]


@st.composite
def odd_frames(draw: Any) -> bytes:
    """A valid frame with one or two values of its JSON replaced, at whatever depth."""
    frame = encode(draw(st.sampled_from(FACTS)))
    length, _ = frame_lengths(frame[: HEAD.size])
    head, payload = json.loads(frame[HEAD.size : HEAD.size + length]), frame[HEAD.size + length :]
    for _ in range(draw(st.integers(0, 2))):
        places = places_of(head)
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        holder[key] = draw(ODD)
    encoded = json.dumps(head).encode()
    assume(b'"rank_id": 0' not in encoded)  # whoever may use the socket may speak for rank 0, and would take its place
    return HEAD.pack(MAGIC, len(encoded), len(payload)) + encoded + payload


def test_facts_that_make_no_sense_cost_their_hook_its_link_and_nobody_else_anything(bench: Bench) -> None:
    """A fact of one hook that the planner could not read would end the control stream of all ranks of the node."""

    @settings(max_examples=60, deadline=None)
    @given(st.lists(odd_frames(), min_size=1, max_size=4), st.booleans())
    def fuzz(frames: list[bytes], registered: bool) -> None:
        bench.runner.run(said(frames, registered=registered))

    async def said(frames: list[bytes], *, registered: bool) -> None:
        reader, writer = await asyncio.open_unix_connection(str(bench.path))
        if registered:
            writer.write(encode(registration(address(1))))
        writer.write(b"".join(frames))
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(1 << 16):
                pass
        writer.transport.abort()
        assert not bench.agent.done(), bench.agent

    fuzz()
    bench.runner.run(bench.check_alive(2))
    assert len(bench.planner.streams) == 1, "the control stream of rank 0 went on throughout"
    assert not bench.hook.closed
