"""The agent process's gRPC client: registrations, questions, one control stream, one report stream; every failure one sentence.

Waits are bounded: calls by a deadline, writes by a deadline, and reads, which last as long as the planner has nothing to
say, by the channel's keepalive (a host that is gone or a stopped process ends the stream within 15 s).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import grpc

from eplb_service.advice import Advice, AdviceRequest
from eplb_service.attach import FromAgent
from eplb_service.control import Registration, ToRank
from eplb_service.errors import DeadlineError, EnvironmentFault, EplbError, InvalidInputError
from eplb_service.ids import DeploymentId
from eplb_service.pb.v1 import adviser_pb2, adviser_pb2_grpc, agent_pb2, agent_pb2_grpc
from eplb_service.rpc.channel import TlsFiles, open_channel, parse_target
from eplb_service.rpc.convert import from_agent_to_pb, registration_to_pb, report_to_pb, to_rank_from_pb
from eplb_service.rpc.convert_advice import advice_from_pb, advice_request_to_pb
from eplb_service.rpc.status import error_of
from eplb_service.window.report import LoadReport

REGISTER_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class _Stream(Generic[_Request, _Reply]):
    """One bidirectional call, whose failures are EplbErrors."""

    def __init__(self, call: grpc.aio.StreamStreamCall[_Request, _Reply], address: str) -> None:
        self._call = call
        self._address = address

    async def write(self, request: _Request) -> None:
        """Send. Raises what `status.error_of` makes of a broken stream, DeadlineError when the planner does not read."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._call.write(request)
        except TimeoutError:
            raise DeadlineError(f"planner at {self._address} did not read for {WRITE_TIMEOUT_S:.0f} s") from None
        except asyncio.InvalidStateError:  # the call ended before this write
            ended = await self.failure()
            raise ended or EnvironmentFault(f"planner at {self._address} ended the stream") from None
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None

    async def read(self) -> _Reply | None:
        """The next reply; None when the planner ended the stream in good order. Raises as `write`."""
        try:
            reply = await self._call.read()
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None
        if reply is grpc.aio.EOF:
            ended = await self.failure()
            if ended is not None:
                raise ended
            return None
        return reply  # type: ignore[return-value]  # EOF is ruled out above

    async def failure(self) -> EplbError | None:
        """Why the call ended; None when it ended in good order."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                code, detail = await self._call.code(), await self._call.details()
                trailing = await self._call.trailing_metadata()
        except TimeoutError:
            return DeadlineError(f"planner at {self._address} ended the stream without a status")
        if code is grpc.StatusCode.OK:
            return None
        return error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=detail), self._address)

    async def end_writing(self) -> None:
        """Say that nothing more comes; the planner then ends the stream, which whoever reads will see."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._call.done_writing()
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            self.cancel()

    def cancel(self) -> None:
        """End the call now."""
        self._call.cancel()


class ControlStream(_Stream[agent_pb2.ControlFromAgent, agent_pb2.ControlToAgent]):
    """The control stream in our own values."""

    async def send(self, message: FromAgent) -> None:
        """Send a message. Raises InvalidInputError for one that does not fit the wire: the stream is as before then."""
        await self.write(from_agent_to_pb(message))

    async def receive(self) -> ToRank | InvalidInputError | None:
        """The next order; an error for one that makes no sense (the stream goes on); None at the end."""
        reply = await self.read()
        if reply is None:
            return None
        try:
            return to_rank_from_pb(reply)
        except InvalidInputError as error:
            return error


class ReportStream(_Stream[agent_pb2.LoadReport, agent_pb2.ReportReply]):
    """The report stream."""

    async def send(self, deployment: DeploymentId, report: LoadReport) -> None:
        """Send a report. Raises InvalidInputError for one that does not fit the wire: the stream is as before then."""
        await self.write(report_to_pb(deployment, report))

    async def replies(self) -> AsyncIterator[agent_pb2.ReportReply]:
        """Every reply until the stream ends."""
        while (reply := await self.read()) is not None:
            yield reply


class PlannerClient:
    """A channel to the planner at `address` (see `channel.parse_target`); it reconnects by itself."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        """Raises InvalidInputError for a malformed address or unreadable TLS files; nothing is connected yet."""
        parse_target(address)
        self.address = address
        self._tls = tls
        self._connect()

    def _connect(self) -> None:
        self._channel = open_channel(self.address, self._tls)
        self._stub: Any = agent_pb2_grpc.AgentServiceStub(self._channel)
        self._adviser: Any = adviser_pb2_grpc.AdviserServiceStub(self._channel)

    async def connect_anew(self) -> None:
        """Calls from now on go over a new connection; those under way end soon.

        The address may be a name that leads to another planner now, and an open connection stays with the old one.
        """
        old = self._channel
        self._connect()
        await old.close(grace=CLOSE_TIMEOUT_S)

    async def register(self, registration: Registration) -> agent_pb2.RegisterResponse:
        """Announce a rank. Raises the planner's refusal, or EnvironmentFault and DeadlineError when it is not there."""
        request = registration_to_pb(registration)
        try:
            reply: agent_pb2.RegisterResponse = await self._stub.Register(request, timeout=REGISTER_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from None
        return reply

    async def advise(self, question: AdviceRequest, timeout_s: float) -> Advice:
        """Ask what an engine that moves its own weights should do.

        Raises the planner's refusal, EnvironmentFault and DeadlineError when it is not there, InvalidInputError for a question
        that does not fit the wire, or an answer that is none.
        """
        request = advice_request_to_pb(question)
        try:
            reply: adviser_pb2.AdviseReply = await self._adviser.Advise(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from None
        return advice_from_pb(reply, question)

    def control(self) -> ControlStream:
        """Open a control stream; that it failed shows at the first read or write."""
        return ControlStream(self._stub.Control(), self.address)

    def reports(self) -> ReportStream:
        """Open a report stream; that it failed shows at the first read or write."""
        return ReportStream(self._stub.Report(), self.address)

    async def close(self) -> None:
        """End all calls and the channel."""
        await self._channel.close(grace=CLOSE_TIMEOUT_S)
