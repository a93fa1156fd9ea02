"""AdviserService: engines that move their own weights ask what to do."""
# ruff: noqa: N802  (methods are named and called as gRPC wants it)

from __future__ import annotations

import dataclasses
from typing import Any

import structlog

from eplb_service.errors import EplbError
from eplb_service.log import ReasonLog
from eplb_service.pb.v1 import adviser_pb2, adviser_pb2_grpc
from eplb_service.planner.planner import Planner
from eplb_service.rpc.convert_advice import advice_request_from_pb, advice_to_pb

Context = Any


class AdviserService(adviser_pb2_grpc.AdviserServiceServicer):
    """See `proto/eplb/v1/adviser.proto`."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._reasons = ReasonLog()
        self._log = structlog.get_logger("eplb.planner")

    async def Advise(self, request: adviser_pb2.AdviseRequest, context: Context) -> adviser_pb2.AdviseReply:
        """Keep or move. The answer is there before the caller's deadline, whatever the request says of its own."""
        asked = advice_request_from_pb(request)
        left_s = context.time_remaining()
        if left_s is not None:
            asked = dataclasses.replace(asked, timeout_s=min(asked.timeout_s, max(0.0, left_s)))
        try:
            answer = await self._planner.ask(asked)
        except EplbError as error:
            if self._reasons.is_news(asked.deployment, str(error)):
                self._log.warning("question.refused", deployment=asked.deployment, reason=str(error), peer=context.peer())
            raise
        self._reasons.clear(asked.deployment)
        return advice_to_pb(answer)
