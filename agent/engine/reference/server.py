"""The loop of a rank: steps while any rank of the group has work, sleep while none has."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum

import torch.distributed as dist

from agent.engine.reference.engine import ReferenceEngine, StepHook
from agent.engine.reference.experts import LayerExperts
from agent.engine.reference.front_door import Arrival, FrontDoor
from agent.engine.reference.group import RankGroup
from agent.engine.reference.messages import (
    Drain,
    Drained,
    Inspect,
    Inspection,
    LayerInspection,
    NewToken,
    NewTokens,
    RankState,
    Stop,
    Submit,
)
from agent.engine.reference.scheduler import Progress, Scheduler
from eplb_service.errors import EnvironmentFault
from eplb_service.ids import LayerRef
from eplb_service.placement import row_digest
from eplb_service.replica_shares import as_values

UNREACHABLE_PAUSE_S = 0.005
"""Between steps that no request can be in, since experts live on no rank: they run for the votes that bring those back."""


class _Next(IntEnum):
    """What a rank is for; the group does the greatest of what its ranks are for."""

    REST = 0
    STEP = 1
    HALT = 2


class Served(Enum):
    """Why the loop ended."""

    STOPPED = "stopped"  # all ranks were told to stop
    HALTED = "halted"  # the launcher wants another group; all ranks ended at the same step boundary


class RankServer:
    """Takes requests, runs steps in lock-step with the other ranks, delivers tokens.

    is_halted: asked before every step; whether the launcher wants another group.
    """

    def __init__(
        self,
        *,
        group: RankGroup,
        engine: ReferenceEngine,
        hook: StepHook,
        scheduler: Scheduler,
        door: FrontDoor,
        is_halted: Callable[[], bool],
    ) -> None:
        self.engine = engine
        self.door = door
        self._hook = hook
        self._scheduler = scheduler
        self._is_halted = is_halted
        self._state = RankState.SERVING
        self._stop_asked = False
        self._drains: list[tuple[int, int]] = []
        self._agreed = engine.layers[0].tokens.new_zeros(1)
        self.enter(group)

    def enter(self, group: RankGroup) -> None:
        """Serve in this group from now on. A step that failed in the one before is as if it had not begun."""
        self._group = group
        self._idle_period = 0
        self._stop_told = False
        self._state = RankState.SERVING
        self._lost: EnvironmentFault | None = None
        self.door.watch(group.mesh, self._hear)
        self._scheduler.rewind()

    def leave(self) -> None:
        """Close all connections to the other ranks; clients stay."""
        self.door.forget(self._group.mesh)
        self._group.leave()

    def serve(self) -> Served:
        """Steps while any rank has work; sleep while none has; returns when all ranks are to stop, or to stand still.

        Raises:
            EplbError: an invariant is broken or a peer is gone.
            RuntimeError: a collective failed.
        """
        while True:
            unreachable = self.engine.num_unreachable > 0
            self._take(timeout_s=UNREACHABLE_PAUSE_S if unreachable else 0.0)
            paused = self.door.paused()
            agreed = self._agree(self._wish(unreachable=unreachable, has_work=self._scheduler.has_work(paused=paused)))
            if agreed is _Next.HALT:
                return Served.HALTED
            if agreed is _Next.STEP:
                batch = [] if unreachable else self._scheduler.next_batch(paused=paused)
                self._deliver(self._scheduler.advance(batch, self.engine.step(batch)))
            elif not self._rest():
                return Served.STOPPED

    def close(self) -> None:
        """Close the hook, then all connections."""
        self._hook.close()
        self._group.mesh.close()
        self.door.close()

    def _wish(self, *, unreachable: bool, has_work: bool) -> _Next:
        """Experts that live on no rank are work for all: they come back by votes, and those need steps."""
        if self._is_halted():
            return _Next.HALT
        return _Next.STEP if has_work or (unreachable and not self._stop_asked) else _Next.REST

    def _agree(self, mine: _Next) -> _Next:
        """The agreement before each step: all ranks run it, or none does."""
        self._agreed.fill_(int(mine))
        dist.all_reduce(self._agreed, op=dist.ReduceOp.MAX)
        return _Next(int(self._agreed.item()))

    def _rest(self) -> bool:
        """Sleep until some rank has work or is halted (True), or all were told to stop (False).

        All ranks enter this at the same step.
        """
        mesh = self._group.mesh
        self._idle_period += 1
        self._state = RankState.IDLE
        while True:
            if self._scheduler.has_work(paused=self.door.paused()) or self._is_halted():
                mesh.wake(self._idle_period)
                break
            # Before the look at who stops: a rank that woke us and stopped after that waits for us in the agreement.
            if mesh.woken(self._idle_period):
                break
            if self._stop_asked and not self._stop_told and self._scheduler.empty:
                self._stop_told = True
                mesh.stopping(self._group.position)
            if mesh.all_stopping:
                return False
            self._take(timeout_s=None)
        self._state = RankState.SERVING
        return True

    def _hear(self) -> None:
        """Notes of other ranks. That one is gone is kept until what clients said has been taken in."""
        try:
            self._group.mesh.read()
        except EnvironmentFault as error:
            self._lost = error

    def _take(self, *, timeout_s: float | None) -> None:
        """Act on what clients say. Raises EnvironmentFault when a rank that waited with this one is gone."""
        for arrival in self.door.take(timeout_s=timeout_s):
            self._act(arrival)
        if self._lost is not None:
            raise self._lost
        if self._drains and self._scheduler.empty:
            for client, tag in self._drains:
                self.door.send(client, Drained(tag=tag))
            self._drains.clear()

    def _act(self, arrival: Arrival) -> None:
        client, message = arrival.client, arrival.message
        match message:
            case Submit():
                rejected = self._scheduler.submit(message, client)
                if rejected is not None:
                    self.door.send(client, rejected)
            case Inspect():
                self.door.send(client, self._inspection(message.tag))
            case Drain():
                self._scheduler.drain()
                self._drains.append((client, message.tag))
            case Stop():
                self._stop_asked = True
                self._scheduler.drain()
                if message.cancel:
                    for owner, ended in self._scheduler.cancel():
                        self.door.send(owner, ended)
            case None:
                self._scheduler.cancel(owner=client)

    def _deliver(self, progress: list[Progress]) -> None:
        """Send each client its new tokens in one message, then what ended."""
        by_owner: dict[int, list[NewToken]] = {}
        for item in progress:
            by_owner.setdefault(item.owner, []).append(item.token)
        for owner, tokens in by_owner.items():
            boundary = self.engine.boundary - 1
            new = NewTokens(boundary=boundary, generations=self.engine.generations, tokens=tuple(tokens))
            self.door.send(owner, new)
        for item in progress:
            if item.ended is not None:
                self.door.send(item.owner, item.ended)

    def _inspection(self, tag: int) -> Inspection:
        return Inspection(
            tag=tag,
            rank_id=self._group.fleet.rank_ids[self._group.position],
            state=self._state,
            boundary=self.engine.boundary,
            real_tokens=self.engine.real_tokens,
            dummy_steps=self.engine.dummy_steps,
            waiting=self._scheduler.num_waiting,
            running=self._scheduler.num_running,
            layers=tuple(
                inspect_layer(layer, self._group.fleet.model_name, generation)
                for layer, generation in zip(self.engine.layers, self.engine.generations, strict=True)
            ),
        )


def inspect_layer(layer: LayerExperts, model_name: str, generation: int) -> LayerInspection:
    """What a layer holds and has served, read from its live tensors."""
    row, shares = layer.tables.physical_to_logical.cpu(), layer.slot_shares()
    return LayerInspection(
        layer_id=layer.layer_id,
        generation=generation,
        row=tuple(row.tolist()),
        row_digest=row_digest(LayerRef(model_name, layer.layer_id), row.numpy(), shares),
        shares=as_values(shares),
        slot_digests=layer.slot_digests(),
        tokens=tuple(layer.tokens.tolist()),
        tokens_since_flip=tuple((layer.tokens - layer.tokens_before_flip).tolist()),
        flip_boundary=layer.flip_boundary,
        sent=tuple(layer.sent.tolist()),
    )
