"""The planner's gRPC server: four services, health and reflection, on one port."""

from __future__ import annotations

import socket

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from eplb_service.errors import EnvironmentFault
from eplb_service.pb.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    adviser_pb2,
    adviser_pb2_grpc,
    agent_pb2,
    agent_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from eplb_service.planner.planner import Planner
from eplb_service.rpc.admin_service import AdminService
from eplb_service.rpc.adviser_service import AdviserService
from eplb_service.rpc.agent_service import AgentService
from eplb_service.rpc.channel import SERVER_OPTIONS
from eplb_service.rpc.placement_service import PlacementService
from eplb_service.rpc.status import StatusInterceptor

CONCURRENT_CALLS_MAX = 8192
LIVENESS = "liveness"
"""Health of this name says SERVING as long as the process answers at all: for who restarts what hangs."""
SERVICE_NAMES = (
    agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name,
    placement_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    adviser_pb2.DESCRIPTOR.services_by_name["AdviserService"].full_name,
)


class RpcServer:
    """Serves a planner. Health says NOT_SERVING until `set_serving`. credentials: None = in the clear."""

    def __init__(
        self, planner: Planner, *, host: str, port: int, message_bytes: int, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self._host, self._port, self._credentials = host, port, credentials
        self._health = health_aio.HealthServicer()
        self._agents = AgentService(planner)
        self._log = structlog.get_logger("eplb.planner")
        self._serving: bool | None = None
        options = [
            *(option for option in SERVER_OPTIONS if not option[0].endswith("message_length")),
            ("grpc.max_receive_message_length", message_bytes),
            ("grpc.max_send_message_length", message_bytes),
        ]
        self._server = grpc.aio.server(
            options=options, interceptors=[StatusInterceptor(self._failed)], maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self._agents, self._server)
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(PlacementService(planner), self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(planner), self._server)
        adviser_pb2_grpc.add_AdviserServiceServicer_to_server(AdviserService(planner), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICE_NAMES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Serve; returns the port. Raises EnvironmentFault when it cannot be had."""
        reason = self._why_not_bind()
        if reason:
            raise EnvironmentFault(
                f"gRPC cannot be served on {self._host}:{self._port}: {reason}; free the port, stop the planner that has it,"
                " or choose another with --port (0 picks one)"
            )
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(f"{host}:{self._port}")
            else:
                port = self._server.add_secure_port(f"{host}:{self._port}", self._credentials)
        except RuntimeError as error:
            raise EnvironmentFault(f"gRPC cannot be served on {self._host}:{self._port}: {error}") from None
        await self.set_serving(serving=False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return port

    async def set_serving(self, *, serving: bool) -> None:
        """What health says, for the server and each service."""
        if serving == self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status)
        self._log.info("health.changed", serving=serving)

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, end the streams, let calls end within the grace."""
        await self._health.enter_graceful_shutdown()
        self._agents.close("the planner stops")
        await self._server.stop(grace_s)

    def _why_not_bind(self) -> str:
        """Try the port: gRPC itself says less about why. With port 0 only the address is tried."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            return f"address {self._host!r} cannot be resolved ({error.strerror})"
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                return error.strerror or str(error)
            return ""

    def _failed(self, method: str, error: Exception) -> None:
        self._log.error("call.failed", method=method, exc_info=error)
