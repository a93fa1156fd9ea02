"""What ports of engines share whose experts lie in `LayerExperts`: slots and tables that a hook may write in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agent.engine.port import EngineDescription, RoutingTables, SlotTensor
from agent.engine.reference.experts import LayerExperts
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef


@dataclass(slots=True, kw_only=True)
class SlotPort:
    """The part of an `EnginePort` that follows from slots and tables.

    Attributes:
        description: What the engine is, in its present group.
        layers: Slots and tables by layer.
        device: Where the model runs.
    """

    description: EngineDescription
    layers: Mapping[LayerRef, LayerExperts]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def describe(self) -> EngineDescription:
        """What the engine is."""
        return self.description

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        """All tensors of the layer's slots, scales too: live storage."""
        return {name: SlotTensor(tensor) for name, tensor in self._layer(layer).slots.items()}

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        """The tables that the dispatch reads: live storage, until the group forms again."""
        return self._layer(layer).tables

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:  # noqa: ARG002 - the port's signature
        """Nothing: experts are computed from the slots' own tensors at every step, none is derived from them."""
        self._layer(layer)

    def compute_stream(self) -> torch.cuda.Stream | None:
        """The device's current stream, on which every step runs; None on a CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _layer(self, layer: LayerRef) -> LayerExperts:
        found = self.layers.get(layer)
        if found is None:
            raise InvalidInputError(f"the engine has no layer {layer}; it has {', '.join(map(str, self.layers))}")
        return found
