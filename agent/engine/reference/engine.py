"""One step of one rank: attention over its own requests, experts over all ranks, in lock-step with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from agent.engine.reference.dispatch import choose_replicas
from agent.engine.reference.exchange import ExpertExchange
from agent.engine.reference.experts import LayerExperts
from agent.engine.reference.model import RowSpan, ServedModel, TokenDraw, device_of
from agent.engine.reference.scheduler import Generation
from eplb_service.ids import LayerRef


class StepStatus(Protocol):
    """What the engine asks a hook about (`agent.hook.config.HookStatus`)."""

    @property
    def generations(self) -> Mapping[LayerRef, int]:
        """What each MoE layer is routed by now; a layer that is missing is as loaded (0)."""
        ...

    @property
    def boundary(self) -> int:
        """Step boundaries begun so far; where the group forms again, those of the rank that is ahead."""
        ...


class StepHook(Protocol):
    """What an engine calls on its hook (`agent.hook.hook.Hook`)."""

    def start(self) -> None:
        """Once, before the first step."""
        ...

    def begin_step(self, *, num_real_tokens: int) -> None:
        """Before the first kernel of a step, real or dummy, on every rank."""
        ...

    def record(self, layer: LayerRef, experts: Tensor) -> None:
        """Logical experts that the router chose for real tokens. Shape (n, k), int64."""
        ...

    def reform(self) -> None:
        """The engine is in another group; once, between two steps, on every rank that was in one before."""
        ...

    def close(self) -> None:
        """The engine runs no more steps."""
        ...

    @property
    def status(self) -> StepStatus:
        """What it is doing."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedStatus:
    """Status of a hook that counts nothing."""

    generations: Mapping[LayerRef, int] = field(default_factory=dict)
    boundary: int = 0


class NoHook:
    """An engine that nobody watches: it keeps the placement that it loaded."""

    def start(self) -> None:
        """Nothing to do."""

    def begin_step(self, *, num_real_tokens: int) -> None:
        """Nothing to do."""

    def record(self, layer: LayerRef, experts: Tensor) -> None:
        """Nothing to do."""

    def reform(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    @property
    def status(self) -> StepStatus:
        """All layers are as loaded."""
        return LoadedStatus()


class ReferenceEngine:
    """A rank's model, its slots, and the steps that it takes with the other ranks.

    Every rank calls `step` as often as the others: within it are collectives.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        layers: Sequence[LayerExperts],
        exchange: ExpertExchange,
        hook: StepHook,
        model_name: str,
        dummy_tokens: int,
        survives: bool = False,
    ) -> None:
        """Serve `model` with this rank's `layers`; see `FleetConfig` for the rest.

        boundary, real_tokens, dummy_steps: counts so far. steps: completed in this group. generations: of each layer in the
        step that was last begun.
        """
        self._model = model
        self._layers = {layer.layer_id: layer for layer in layers}
        self._refs = {layer.layer_id: LayerRef(model_name, layer.layer_id) for layer in layers}
        self._exchange = exchange
        self._hook = hook
        self._dummy_tokens = dummy_tokens
        self._survives = survives
        self._device = device_of(model)
        self.boundary = 0
        self.steps = 0
        self.real_tokens = 0
        self.dummy_steps = 0
        self.generations: tuple[int, ...] = (0,) * len(self._layers)

    @property
    def layers(self) -> Sequence[LayerExperts]:
        """This rank's MoE layers, ascending."""
        return list(self._layers.values())

    @property
    def num_unreachable(self) -> int:
        """Experts that no slot holds, over all layers: while there are any, no request can be served."""
        return sum(layer.num_unreachable for layer in self._layers.values())

    def regroup(self, exchange: ExpertExchange, *, boundary: int) -> None:
        """Go on in another group, whose tables are written. boundary: of its first step, equal on all ranks."""
        self._exchange = exchange
        self.boundary = boundary
        self.steps = 0
        for layer in self._layers.values():
            layer.settle(boundary)

    def step(self, batch: Sequence[Generation]) -> Sequence[int]:
        """Feed each request's pending tokens through the model; returns the token that follows, for each.

        An empty batch makes this a dummy step: the rank still computes its experts for the others.

        Raises:
            BrokenInvariantError: an expert has no replica. An engine that survives only takes no tokens then.
        """
        fed = [token for generation in batch for token in generation.pending()]
        real = bool(batch)
        self._hook.begin_step(num_real_tokens=len(fed))
        for layer in self._layers.values():
            layer.notice_flip(self.boundary, may_lack=self._survives)
            if real:
                layer.check_reachable()
        live = self._hook.status.generations
        self.generations = tuple(live.get(ref, 0) for ref in self._refs.values())
        self.boundary += 1
        num_real, spans = len(fed), _spans(batch)
        if not real and self._dummy_tokens and not self.num_unreachable:
            fed, spans = [0] * self._dummy_tokens, [RowSpan(self._model.new_cache(), 0, self._dummy_tokens)]
        hidden = self._forward(fed, spans, real=real)
        self.steps += 1
        self.real_tokens += num_real
        self.dummy_steps += not real
        if not real:
            return []
        last_rows = [span.start + span.count - 1 for span in spans]
        draws = [TokenDraw(generation.request.request_id, generation.cache.length) for generation in batch]
        return self._model.next_tokens(hidden[last_rows], draws)

    def _forward(self, fed: Sequence[int], spans: Sequence[RowSpan], *, real: bool) -> Tensor:
        """All layers; returns the last hidden rows, (n, D)."""
        model = self._model
        hidden = model.embed(torch.tensor(fed, dtype=torch.int64, device=self._device))
        for layer_id in range(model.config.num_layers):
            if fed:
                hidden = model.attend(layer_id, hidden, spans)
            layer = self._layers.get(layer_id)
            if layer is not None:
                hidden = self._mixture(layer, hidden, real=real)
        return hidden

    def _mixture(self, layer: LayerExperts, hidden: Tensor, *, real: bool) -> Tensor:
        """One MoE layer over all ranks. Shape (n, D) to (n, D)."""
        if not hidden.shape[0]:
            self._exchange.run(layer, hidden, layer.tickets.new_empty(0), real=real)
            return hidden
        routed = self._model.route(layer.layer_id, hidden)
        if real:
            self._hook.record(self._refs[layer.layer_id], routed.experts)
        physical = choose_replicas(routed.experts.flatten(), layer, real=real)
        outputs = self._exchange.run(layer, routed.inputs, physical, real=real)
        return self._model.combine(hidden, outputs.view(*routed.experts.shape, -1), routed.gates)


def _spans(batch: Sequence[Generation]) -> list[RowSpan]:
    """Rows of each request, in batch order."""
    spans: list[RowSpan] = []
    start = 0
    for generation in batch:
        count = len(generation.pending())
        spans.append(RowSpan(generation.cache, start, count))
        start += count
    return spans
