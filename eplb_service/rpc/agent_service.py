"""AgentService: ranks register, report load, and are led through rollouts by one stream for each agent process."""
# ruff: noqa: N802, ARG002  (methods are named and called as gRPC wants it)

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog

from eplb_service import failpoints
from eplb_service.attach import Attach
from eplb_service.control import Arm, Stage
from eplb_service.errors import DeadlineError, EnvironmentFault, EplbError, InvalidInputError, NotFoundError
from eplb_service.log import ReasonLog
from eplb_service.pb.v1 import agent_pb2, agent_pb2_grpc
from eplb_service.planner.agent_link import AgentLink
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.planner import Planner
from eplb_service.rpc.convert import (
    from_agent_from_pb,
    registration_from_pb,
    report_from_pb,
    to_rank_to_pb,
)
from eplb_service.window.report import Accepted

Context = Any
ATTACH_TIMEOUT_S = 10.0
"""Streams that say nothing count against what the server carries at once: they end."""
_FAILPOINTS = {Stage: "planner.stage.sent", Arm: "planner.arm.sent"}


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """See `proto/eplb/v1/agent.proto`. Errors travel by the table of `rpc/status.py`."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._links: set[AgentLink] = set()
        self._reasons = ReasonLog()
        self._log = structlog.get_logger("eplb.planner")

    async def Register(self, request: agent_pb2.RegisterRequest, context: Context) -> agent_pb2.RegisterResponse:
        """Announce one rank."""
        registration = registration_from_pb(request)
        try:
            protocol = self._planner.register(registration)
        except EplbError as error:
            subject = f"{registration.deployment}/{registration.address.rank_id}"
            if self._reasons.is_news(subject, str(error)):
                self._log.warning("rank.refused", rank=subject, reason=str(error), peer=context.peer())
            raise
        return agent_pb2.RegisterResponse(protocol=protocol, planner=self._planner.name)

    async def Report(
        self, request_iterator: AsyncIterator[agent_pb2.LoadReport], context: Context
    ) -> AsyncIterator[agent_pb2.ReportReply]:
        """Take load windows; a report that cannot be read is answered as `invalid`, and the stream goes on."""
        async for message in request_iterator:
            reply = agent_pb2.ReportReply(address=message.address, window_index=message.window_index)
            try:
                name, report = report_from_pb(message)
                answer = self._planner.deployment(name).report(report)
            except InvalidInputError as error:
                reply.code, reply.reason = "invalid", str(error)
            except NotFoundError as error:
                reply.code, reply.reason = "unknown_deployment", str(error)
            else:
                if isinstance(answer, Accepted):
                    reply.accepted, reply.code = True, "accepted"
                else:
                    reply.code, reply.reason = answer.reason.value, answer.sentence
            yield reply

    async def Control(
        self, request_iterator: AsyncIterator[agent_pb2.ControlFromAgent], context: Context
    ) -> AsyncIterator[agent_pb2.ControlToAgent]:
        """The control stream of one agent process. Its first message is `Attach`."""
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                first = await anext(aiter(request_iterator), None)
        except TimeoutError:
            raise DeadlineError(f"this control stream said nothing for {ATTACH_TIMEOUT_S:g} s; it begins with Attach") from None
        attach = from_agent_from_pb(first) if first is not None else None
        if not isinstance(attach, Attach):
            raise InvalidInputError("the first message of a control stream must be Attach, naming a deployment and its ranks")
        deployment = self._planner.deployment(attach.deployment)
        self._check_room(deployment)
        link = AgentLink(context.peer())
        self._links.add(link)
        reader: asyncio.Task[None] | None = None
        why = "the agent process closed its stream"
        try:
            deployment.receive(link, attach)
            self._planner.attached(deployment)
            reader = asyncio.create_task(self._read(request_iterator, deployment, link), name=f"control of {link.peer}")
            while (message := await link.next()) is not None:
                yield to_rank_to_pb(message)
                failpoint = _FAILPOINTS.get(type(message))
                if failpoint is not None and not link.num_waiting:
                    await failpoints.reach_async(failpoint)
            why = link.closed_reason
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
            if link.leads_elsewhere:
                raise EnvironmentFault(why)
        finally:
            self._links.discard(link)
            if reader is not None:
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await reader
            deployment.detach(link, why)

    async def _read(
        self, request_iterator: AsyncIterator[agent_pb2.ControlFromAgent], deployment: Deployment, link: AgentLink
    ) -> None:
        """Take messages in until the stream ends; then the link is closed, which ends the other direction."""
        why = "the agent process closed its stream"
        try:
            async for envelope in request_iterator:
                message = from_agent_from_pb(envelope)
                if isinstance(message, Attach) and message.deployment != deployment.name:
                    raise InvalidInputError(
                        f"a control stream of {deployment.name} cannot attach to {message.deployment}: open another one"
                    )
                deployment.receive(link, message)
        except EplbError as error:
            why = str(error)
            raise
        finally:
            link.close(why)

    def close(self, reason: str) -> None:
        """End every control stream: the planner stops."""
        for link in list(self._links):
            link.close(reason)

    def _check_room(self, deployment: Deployment) -> None:
        limit = deployment.context.config.limits.watchers
        if len(self._links) >= limit * max(1, len(self._planner.deployments)):
            raise InvalidInputError(
                f"{len(self._links)} control streams are open; at most {limit} for a deployment (limits.watchers)"
            )
