"""The engine as its hook sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from agent.engine.port import EngineDescription, RoutingTables, SlotTensor
from agent.engine.reference.experts import LayerExperts
from agent.engine.reference.port import ExitCode
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef


class HuggingFacePort:
    """`EnginePort` of one rank over the slots and tables of its layers."""

    def __init__(
        self,
        description: EngineDescription,
        layers: Mapping[LayerRef, LayerExperts],
        *,
        device: torch.device,
        on_fail_stop: Callable[[str], None] | None = None,
    ) -> None:
        """on_fail_stop: called on any thread with the reason; must not return to serving. None = end the process."""
        self._description, self._layers, self._device = description, layers, device
        self._on_fail_stop = on_fail_stop or end_process
        self._weights_version = 0

    def describe(self) -> EngineDescription:
        """What the engine is."""
        return self._description

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        """All tensors of the layer's slots: live storage."""
        return {name: SlotTensor(tensor) for name, tensor in self._layer(layer).slots.items()}

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        """The tables that the dispatch reads: live storage."""
        return self._layer(layer).tables

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:  # noqa: ARG002 - the port's signature
        """Nothing: experts are computed from the slots' own tensors, none is derived from them."""
        self._layer(layer)

    def weights_version(self) -> int:
        """How often the weights were changed from outside (`weights_changed`)."""
        return self._weights_version

    def weights_changed(self) -> None:
        """To be called after anything but the hook has written slots: a reload, a sync from a trainer."""
        self._weights_version += 1

    def compute_stream(self) -> torch.cuda.Stream | None:
        """The device's current stream, on which every step runs; None on a CPU."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def fail_stop(self, reason: str) -> None:
        """The group's ranks may route by different maps: no further step may run here."""
        self._on_fail_stop(reason)

    def _layer(self, layer: LayerRef) -> LayerExperts:
        found = self._layers.get(layer)
        if found is None:
            raise InvalidInputError(f"the engine has no layer {layer}; it has {', '.join(map(str, self._layers))}")
        return found


def end_process(reason: str) -> None:
    """Say why and end the process at once: its other threads may be inside a collective that never ends."""
    sys.stderr.write(f"fail stop: {reason}\n")
    sys.stderr.flush()
    os._exit(ExitCode.FAIL_STOP)
