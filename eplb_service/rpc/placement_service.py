"""PlacementService: who routes what now, and before. Answered from memory where it can, so that it needs no store."""
# ruff: noqa: N802, ARG002  (methods are named and called as gRPC wants it)

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from eplb_service.errors import ConflictError, NotFoundError
from eplb_service.generation import LiveMap
from eplb_service.moves import MoveSummary, residency_moves
from eplb_service.pb.v1 import placement_pb2, placement_pb2_grpc
from eplb_service.placement import Placement
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.planner import Planner
from eplb_service.planner.proposing import moves_between, same_shape
from eplb_service.rpc.views import diff_view, generation_view, live_view, rollout_events_view
from eplb_service.topology import LinkKind, Topology

Context = Any
LIST_DEFAULT = 20


class PlacementService(placement_pb2_grpc.PlacementServiceServicer):
    """See `proto/eplb/v1/placement.proto`."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._watchers: dict[str, int] = {}

    async def GetPlacement(self, request: placement_pb2.GetPlacementRequest, context: Context) -> placement_pb2.GenerationView:
        """One generation, by default what is live."""
        deployment = self._planner.deployment(request.deployment)
        if not request.generation:
            return live_view(deployment, _live_of(deployment))
        generation = await deployment.ledger.generation(request.generation)
        return generation_view(deployment.name, generation, with_placement=True)

    async def WatchPlacement(
        self, request: placement_pb2.WatchPlacementRequest, context: Context
    ) -> AsyncIterator[placement_pb2.GenerationView]:
        """The live placement now and after every change; a reader that is slow sees the newest, not every one."""
        deployment = self._planner.deployment(request.deployment)
        limit = deployment.context.config.limits.watchers
        if self._watchers.get(deployment.name, 0) >= limit:
            raise ConflictError(f"{limit} watch the placement of {deployment.name} already (limits.watchers)")
        self._watchers[deployment.name] = self._watchers.get(deployment.name, 0) + 1
        shown: tuple[object, ...] | None = None
        try:
            while True:
                live = deployment.live
                if live is not None:
                    digest = live.placement.digest()
                    if shown is None and digest == request.known_digest:
                        shown = _mark(deployment, live, digest)
                    if (mark := _mark(deployment, live, digest)) != shown:
                        shown = mark
                        yield live_view(deployment, live)
                await deployment.wait_for_change()
        finally:
            self._watchers[deployment.name] -= 1

    async def ListGenerations(
        self, request: placement_pb2.ListGenerationsRequest, context: Context
    ) -> placement_pb2.ListGenerationsResponse:
        """Generations, newest first, without their placements."""
        deployment = self._planner.deployment(request.deployment)
        generations = await deployment.ledger.newest(request.limit or LIST_DEFAULT)
        views = [generation_view(deployment.name, generation, with_placement=False) for generation in generations]
        return placement_pb2.ListGenerationsResponse(generations=views)

    async def GetRolloutEvents(
        self, request: placement_pb2.GetRolloutEventsRequest, context: Context
    ) -> placement_pb2.RolloutEvents:
        """What happened on a generation's way to the ranks."""
        deployment = self._planner.deployment(request.deployment)
        generation = await deployment.ledger.generation(request.generation)
        return rollout_events_view(deployment.name, await deployment.journals.of(generation.number))

    async def DiffPlacements(
        self, request: placement_pb2.DiffPlacementsRequest, context: Context
    ) -> placement_pb2.DiffPlacementsResponse:
        """What changes from one generation to another; 0 is the live map."""
        deployment = self._planner.deployment(request.deployment)
        before = await _placement_of(deployment, request.from_generation)
        after = await _placement_of(deployment, request.to_generation)
        if not same_shape(before, after):
            raise ConflictError(
                f"generations {request.from_generation} and {request.to_generation} of {deployment.name} are of other ranks,"
                " layers or slots: they cannot be compared slot by slot"
            )
        return diff_view(before, after, _moves(deployment, before, after))


def _live_of(deployment: Deployment) -> LiveMap:
    live = deployment.live
    if live is None:
        state, reason = deployment.state()
        raise NotFoundError(f"the live placement of {deployment.name} is not known yet: it is {state} ({reason})")
    return live


async def _placement_of(deployment: Deployment, number: int) -> Placement:
    if not number:
        return _live_of(deployment).placement
    return (await deployment.ledger.generation(number)).placement


def _mark(deployment: Deployment, live: LiveMap, digest: str) -> tuple[object, ...]:
    """What a watcher is told changes of: content, generations, and what became of the newest."""
    newest = deployment.ledger.generations.get(live.newest_generation)
    return (digest, live.generations, newest.state if newest is not None else None)


def _moves(deployment: Deployment, before: Placement, after: Placement) -> MoveSummary:
    """What the change moves: by the group's links and sizes, or counts alone while there is no such group."""
    group = deployment.group
    if group is not None and group.rank_ids == before.rank_ids:
        return moves_between(before, after, group)
    topology = Topology(before.rank_ids, ("unknown",) * len(before.rank_ids))
    parts = [residency_moves(old, new, topology) for old, new in zip(before.tables, after.tables, strict=True)]
    return MoveSummary(
        experts=sum(part.experts for part in parts),
        slots_rewritten=sum(part.slots_rewritten for part in parts),
        layers=sum(part.layers for part in parts),
        bytes_by_link=dict.fromkeys(LinkKind, 0),
        bytes_without_source=0,
        bytes_into_busiest_rank=0,
    )
