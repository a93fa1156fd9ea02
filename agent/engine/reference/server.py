"""The loop of a rank: steps while any rank of the group has work, sleep while none has."""

from __future__ import annotations

import torch.distributed as dist

from agent.engine.reference.config import RankConfig
from agent.engine.reference.engine import ReferenceEngine, StepHook
from agent.engine.reference.experts import LayerExperts
from agent.engine.reference.front_door import Arrival, FrontDoor
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
from agent.engine.reference.wake import WakeMesh
from eplb_service.ids import LayerRef
from eplb_service.placement import row_digest
from eplb_service.replica_shares import as_values


class RankServer:
    """Takes requests, runs steps in lock-step with the other ranks, delivers tokens."""

    def __init__(
        self,
        *,
        config: RankConfig,
        engine: ReferenceEngine,
        hook: StepHook,
        scheduler: Scheduler,
        door: FrontDoor,
        mesh: WakeMesh,
    ) -> None:
        self.engine = engine
        self.door = door
        self._config = config
        self._hook = hook
        self._scheduler = scheduler
        self._mesh = mesh
        self._state = RankState.SERVING
        self._idle_period = 0
        self._stop_asked = False
        self._stop_told = False
        self._drains: list[tuple[int, int]] = []
        self._agreed = engine.layers[0].tokens.new_zeros(1)

    def serve(self) -> None:
        """Steps while any rank has work; sleep while none has; returns when all ranks were told to stop.

        Raises:
            EplbError: an invariant is broken or a peer is gone.
            RuntimeError: a collective failed.
        """
        while True:
            self._take(timeout_s=0.0)
            paused = self.door.paused()
            if self._anyone_has_work(mine=self._scheduler.has_work(paused=paused)):
                batch = self._scheduler.next_batch(paused=paused)
                self._deliver(self._scheduler.advance(batch, self.engine.step(batch)))
            elif not self._rest():
                return

    def close(self) -> None:
        """Close the hook, then all connections."""
        self._hook.close()
        self._mesh.close()
        self.door.close()

    def _anyone_has_work(self, *, mine: bool) -> bool:
        """The agreement before each step: all ranks run it, or none does."""
        self._agreed.fill_(int(mine))
        dist.all_reduce(self._agreed, op=dist.ReduceOp.MAX)
        return bool(self._agreed.item())

    def _rest(self) -> bool:
        """Sleep until some rank has work (True), or all were told to stop (False). All ranks enter this at the same step."""
        self._idle_period += 1
        self._state = RankState.IDLE
        while True:
            if self._scheduler.has_work(paused=self.door.paused()):
                self._mesh.wake(self._idle_period)
                break
            # Before the look at who stops: a rank that woke us and stopped after that waits for us in the agreement.
            if self._mesh.woken(self._idle_period):
                break
            if self._stop_asked and not self._stop_told and self._scheduler.empty:
                self._stop_told = True
                self._mesh.stopping(self._config.position)
            if self._mesh.all_stopping:
                return False
            self._take(timeout_s=None)
        self._state = RankState.SERVING
        return True

    def _take(self, *, timeout_s: float | None) -> None:
        """Act on what clients say."""
        for arrival in self.door.take(timeout_s=timeout_s):
            self._act(arrival)
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
            rank_id=self._config.rank_id,
            state=self._state,
            boundary=self.engine.boundary,
            real_tokens=self.engine.real_tokens,
            dummy_steps=self.engine.dummy_steps,
            waiting=self._scheduler.num_waiting,
            running=self._scheduler.num_running,
            layers=tuple(
                inspect_layer(layer, self._config.fleet.model_name, generation)
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
