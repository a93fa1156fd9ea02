"""Doubles for tests of the agent process: a planner that speaks gRPC, a hook that speaks frames. Every wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from agent.frames import HEAD, Decoder, RegistrationAnswer, Welcome, encode, frame_lengths
from eplb_service.attach import Attach, FromAgent
from eplb_service.control import (
    Address,
    Arm,
    Disarm,
    Hello,
    LayerInfo,
    LinkBytes,
    ModelInfo,
    Pulse,
    Registration,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.errors import EplbError, NotFoundError
from eplb_service.ids import DeploymentId, Epoch, GenerationNumber, GroupId, Incarnation, Phase, RankId, chunk_id
from eplb_service.pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from eplb_service.rpc.channel import SERVER_OPTIONS
from eplb_service.rpc.convert import from_agent_from_pb, registration_from_pb, report_from_pb, to_rank_to_pb
from eplb_service.rpc.status import StatusInterceptor
from eplb_service.window.report import LoadReport, Semantics, TableCounts

DEADLINE_S = 60.0
TO_HOOK: tuple[type, ...] = (Welcome, RegistrationAnswer, Hello, Stage, Arm, Disarm)
_T = TypeVar("_T")


def address(rank: int, incarnation: int = 100, group: int = 7) -> Address:
    return Address(RankId(rank), Incarnation(incarnation), GroupId(group))


def registration(who: Address, *, digest: str = "d") -> Registration:
    layer = LayerInfo(layer_id=1, num_logical=4, slots=3, expert_bytes=64)
    return Registration(
        deployment=DeploymentId("moe"), address=who, node="n0", group_rank_ids=(RankId(0), RankId(1)), phase=Phase.MIXED,
        stage=0, models=(ModelInfo(name="m", digest=digest, manifest_digest="b", layers=(layer,)),), capacity=1.0,
        dispatch="even", vote_period=4, window_steps=16, sub_windows=1, staging_bytes=1 << 20, replica_table_width=4,
        weights_version=0,
    )  # fmt: skip


def stage(to: Address, epoch: int = 1, sequence: int = 1) -> Stage:
    chunk = chunk_id(epoch, sequence)
    return Stage(
        to=to, chunk_id=chunk, generation=GenerationNumber(1), weights_version=0, mesh_id=chunk, layers=(), copies=(),
        stage_timeout_s=5.0, arm_ttl_s=5.0,
    )  # fmt: skip


def staged(sender: Address, epoch: int = 1, sequence: int = 1) -> Staged:
    return Staged(sender=sender, chunk_id=chunk_id(epoch, sequence), seconds=0.5, received=LinkBytes(same_node=64))


def pulse(sender: Address, *, boundary: int = 1, dropped: int = 0) -> Pulse:
    return Pulse(
        sender=sender, boundary=boundary, idle=False, voting=True, off_reason="", windows_dropped=dropped, weights_version=0
    )


def report(who: Address, window: int) -> LoadReport:
    return LoadReport(
        rank_id=who.rank_id, incarnation=who.incarnation, group_id=who.group_id, window_index=window,
        boundary_begin=window * 16, boundary_end=window * 16 + 16, forward_passes=16, tokens=8,
        semantics=Semantics.LOCAL_TOKENS, phase=Phase.MIXED, live_digest_begin=1, live_digest_end=1,
        tables=(TableCounts(model="m", layer_ids=(1,), counts=np.full((1, 1, 4), window, np.int32)),),
    )  # fmt: skip


class Changes:
    """Lets tests wait until something holds."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def changed(self) -> None:
        self._event.set()

    async def until(self, get: Callable[[], _T], what: str) -> _T:
        """The first truthy value; fails with `what` at the deadline."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (value := get()):
                    self._event.clear()
                    await self._event.wait()
                return value
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}") from None


@dataclass(eq=False)
class FakePlanner(agent_pb2_grpc.AgentServiceServicer, Changes):
    """Takes registrations, says Hello when asked to, keeps what it is told. refuse: error for a rank's registration."""

    epoch: int = 1
    refuse: dict[int, EplbError] = field(default_factory=dict)
    registered: list[Registration] = field(default_factory=list)
    heard: list[FromAgent] = field(default_factory=list)
    reports: list[tuple[str, LoadReport]] = field(default_factory=list)
    streams: list[asyncio.Queue[ToRank | None]] = field(default_factory=list)
    reply_code: str = ""
    port: int = 0
    _server: Any = None

    def __post_init__(self) -> None:
        Changes.__init__(self)

    async def start(self) -> None:
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[StatusInterceptor(lambda method, error: print(method, repr(error)))]
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        """End at once, as a process that is killed: open streams break."""
        await self._server.stop(grace=None)
        self.streams.clear()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def say(self, order: ToRank) -> None:
        """On the newest control stream."""
        self.streams[-1].put_nowait(order)

    def attached(self) -> list[Address]:
        return [rank for message in self.heard if isinstance(message, Attach) for rank in message.ranks]

    async def Register(self, request: agent_pb2.RegisterRequest, context: Any) -> agent_pb2.RegisterResponse:  # noqa: N802
        value = registration_from_pb(request)
        self.registered.append(value)
        self.changed()
        if value.address.rank_id in self.refuse:
            raise self.refuse[value.address.rank_id]
        return agent_pb2.RegisterResponse(protocol=1, planner="fake")

    async def Control(self, requests: AsyncIterator[agent_pb2.ControlFromAgent], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        orders: asyncio.Queue[ToRank | None] = asyncio.Queue()
        self.streams.append(orders)
        known = {value.address for value in self.registered}

        async def listen() -> None:
            async for request in requests:
                message = from_agent_from_pb(request)
                self.heard.append(message)
                known.update(value.address for value in self.registered)
                if isinstance(message, Attach):
                    for rank in message.ranks:
                        orders.put_nowait(Hello(to=rank, epoch=Epoch(self.epoch)) if rank in known else None)
                self.changed()
            orders.put_nowait(None)

        listener = asyncio.create_task(listen())
        try:
            while (order := await orders.get()) is not None:
                yield to_rank_to_pb(order)
            if not listener.done():
                raise NotFoundError("a rank of the Attach is not registered here")
        finally:
            listener.cancel()

    async def Report(self, requests: AsyncIterator[agent_pb2.LoadReport], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            deployment, value = report_from_pb(request)
            self.reports.append((deployment, value))
            self.changed()
            who = common_pb2.Address(rank_id=value.rank_id, incarnation=value.incarnation, group_id=value.group_id)
            code = self.reply_code
            yield agent_pb2.ReportReply(
                address=who,
                window_index=value.window_index,
                accepted=not code,
                code=code,
                reason=f"it is {code}" if code else "",
            )


class FakeHook(Changes):
    """One hook's end of the link."""

    def __init__(self, who: Address, *, digest: str = "d") -> None:
        super().__init__()
        self.address = who
        self.registration = registration(who, digest=digest)
        self.heard: list[Any] = []
        self.closed = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def link(self, path: Path) -> None:
        """Connect and say who we are."""
        async with asyncio.timeout(DEADLINE_S):
            reader, self._writer = await asyncio.open_unix_connection(str(path))
        self.closed = False
        self._reading = asyncio.create_task(self._read(reader))
        await self.say(self.registration)

    async def say(self, message: object) -> None:
        await self.say_bytes(encode(message))

    async def say_bytes(self, frame: bytes) -> None:
        assert self._writer is not None
        self._writer.write(frame)
        async with asyncio.timeout(DEADLINE_S):
            await self._writer.drain()

    async def hear(self, kind: type[_T], count: int = 1) -> _T:
        """The count-th message of a kind."""

        def heard() -> list[_T]:
            found = [message for message in self.heard if isinstance(message, kind)]
            return found if len(found) >= count else []

        return (await self.until(heard, f"rank {self.address.rank_id} hears {kind.__name__} number {count}"))[count - 1]

    async def unlinked(self) -> None:
        await self.until(lambda: self.closed, "the link is closed")

    async def drop(self) -> None:
        """Break the link."""
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=DEADLINE_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = Decoder(TO_HOOK)
        try:
            while True:
                head_length, payload_length = frame_lengths(await reader.readexactly(HEAD.size))
                self.heard.append(
                    decoder.decode(await reader.readexactly(head_length), await reader.readexactly(payload_length))
                )
                self.changed()
        except (asyncio.IncompleteReadError, OSError):
            self.closed = True
            self.changed()
