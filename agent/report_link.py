"""The report stream at work: sends what the reporter has for ranks that the planner knows, and comes back when it breaks."""

from __future__ import annotations

import asyncio

from agent.planner_client import PlannerClient, ReportStream
from agent.reporter import Reporter
from agent.session import Session
from eplb_service.control import Address
from eplb_service.errors import EplbError, InvalidInputError
from eplb_service.log import ReasonLog, get_logger
from eplb_service.pb.v1 import agent_pb2
from eplb_service.rpc.convert import address_from_pb

REPLY_TIMEOUT_S = 30.0
BACKOFF_S = (0.2, 5.0)


class ReportLink:
    """Owns the report stream; `run` until cancelled."""

    def __init__(self, client: PlannerClient, reporter: Reporter, session: Session) -> None:
        self._client = client
        self._reporter = reporter
        self._session = session
        self._wake = asyncio.Event()
        self._log = get_logger(process="agent")
        self._reasons = ReasonLog()

    def wake(self) -> None:
        """There may be something to send, or someone to send it for."""
        self._wake.set()

    async def run(self) -> None:
        """Send for ever. A stream is opened when there is something to send."""
        failures = 0
        while True:
            await self._until_ready()
            answered = self._reporter.num_answered
            try:
                await self._serve(self._client.reports())
                reason = "the planner ended the report stream"
            except EplbError as error:
                reason = str(error)
            self._reporter.stream_lost()
            if self._reasons.is_news("stream", reason):
                self._log.warning("report_stream.lost", reason=reason)
            failures = 0 if self._reporter.num_answered > answered else failures + 1
            first_s, longest_s = BACKOFF_S
            await asyncio.sleep(min(longest_s, first_s * 2 ** min(failures, 16)))

    async def _until_ready(self) -> None:
        while not self._reporter.has_next(self._session.attached()):
            self._wake.clear()
            await self._wake.wait()

    async def _serve(self, stream: ReportStream) -> None:
        """One stream to its end. Raises the EplbError that ended it."""
        reading = asyncio.create_task(self._read(stream))
        writing = asyncio.create_task(self._write(stream))
        try:
            done, _ = await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
            stream.cancel()

    async def _write(self, stream: ReportStream) -> None:
        while True:
            self._wake.clear()
            report = self._reporter.take(self._session.attached())
            if report is None:
                await self._pause()
                continue
            deployment = self._session.deployment
            assert deployment is not None  # an attached rank has one
            try:
                await stream.send(deployment, report)
            except InvalidInputError as error:
                self._reporter.unsendable(report)
                if self._reasons.is_news(f"rank {report.rank_id}", str(error)):
                    self._log.error("report.refused", rank=int(report.rank_id), reason=str(error))

    async def _pause(self) -> None:
        """Wait for something to send; a planner that leaves reports unanswered for too long loses the stream."""
        if not self._reporter.num_in_flight:
            await self._wake.wait()
            return
        answered = self._reporter.num_answered
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._wake.wait()
        except TimeoutError:
            if self._reporter.num_answered == answered:
                waiting = self._reporter.num_in_flight
                raise EplbError(f"the planner left {waiting} load reports unanswered for {REPLY_TIMEOUT_S:.0f} s") from None

    async def _read(self, stream: ReportStream) -> None:
        async for reply in stream.replies():
            self._answered(reply)
            self._wake.set()

    def _answered(self, reply: agent_pb2.ReportReply) -> None:
        try:
            address: Address = address_from_pb(reply.address)
        except InvalidInputError as error:
            self._log.error("report_reply.refused", reason=str(error))
            return
        self._reasons.clear("stream")
        key = (address.rank_id, address.incarnation, address.group_id, reply.window_index)
        if self._reporter.answered(key, accepted=reply.accepted, code=reply.code):
            self._log.warning("report.refused", rank=int(address.rank_id), code=reply.code, reason=reply.reason)
