"""AdminService: look, plan, steer."""
# ruff: noqa: N802, ARG002  (methods are named and called as gRPC wants it)

from __future__ import annotations

from typing import Any

from eplb_service.pb.v1 import admin_pb2, admin_pb2_grpc
from eplb_service.planner.documents import RequestRecord
from eplb_service.planner.planner import Planner
from eplb_service.rpc.views import drain_views, plan_view, settings_view, status_view, verdict_view

Context = Any


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See `proto/eplb/v1/admin.proto`."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusResponse:
        """Deployments, their ranks, what is going on and why."""
        chosen = (self._planner.deployment(request.deployment),) if request.deployment else self._planner.deployments
        return status_view(self._planner, chosen)

    async def Plan(self, request: admin_pb2.PlanRequest, context: Context) -> admin_pb2.PlanResponse:
        """A plan from the present windows; nothing is published."""
        decision, verdict = await self._planner.steering(request.deployment).dry_run(request.policy)
        return plan_view(request.deployment, decision, verdict)

    async def Rebalance(self, request: admin_pb2.RebalanceRequest, context: Context) -> admin_pb2.RebalanceResponse:
        """Plan, publish and roll out now."""
        steering = self._planner.steering(request.deployment)
        return _answer(await steering.rebalance(key=request.idempotency_key, force=request.force, policy=request.policy))

    async def Rollback(self, request: admin_pb2.RollbackRequest, context: Context) -> admin_pb2.RebalanceResponse:
        """Publish a new generation with the content of an older one."""
        steering = self._planner.steering(request.deployment)
        return _answer(await steering.rollback(key=request.idempotency_key, generation=request.generation))

    async def Pause(self, request: admin_pb2.PauseRequest, context: Context) -> admin_pb2.SettingsView:
        """No new generations."""
        return settings_view(request.deployment, await self._planner.steering(request.deployment).pause(request.reason))

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.SettingsView:
        """Undo pause."""
        return settings_view(request.deployment, await self._planner.steering(request.deployment).resume())

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Move every expert off ranks that are to be stopped."""
        steering = self._planner.steering(request.deployment)
        ranks = tuple(request.rank_ids)
        record = await steering.drain(key=request.idempotency_key, ranks=ranks, node=request.node)
        return admin_pb2.DrainResponse(
            generation=record.generation,
            verdict=verdict_view(record.verdict),
            drains=drain_views(steering.deployment),
            rank_ids=sorted(steering.draining.named_by(ranks, request.node)),
        )

    async def Undrain(self, request: admin_pb2.UndrainRequest, context: Context) -> admin_pb2.SettingsView:
        """Give ranks back to planning."""
        steering = self._planner.steering(request.deployment)
        settings = await steering.draining.undrain(tuple(request.rank_ids), request.node)
        return settings_view(request.deployment, settings)

    async def SetMode(self, request: admin_pb2.SetModeRequest, context: Context) -> admin_pb2.SettingsView:
        """`observe` or `auto`."""
        return settings_view(request.deployment, await self._planner.steering(request.deployment).set_mode(request.mode))


def _answer(record: RequestRecord) -> admin_pb2.RebalanceResponse:
    return admin_pb2.RebalanceResponse(generation=record.generation, verdict=verdict_view(record.verdict))
