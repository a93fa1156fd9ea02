"""The reference engine as its hook sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import torch

from agent.engine.port import EngineDescription, RoutingTables, SlotTensor
from agent.engine.reference.experts import LayerExperts
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef


class ExitCode(IntEnum):
    """How a rank process ends."""

    STOPPED = 0  # asked to
    START_FAILED = 3  # configuration, model, or the other ranks
    STEP_FAILED = 4  # a step could not be completed: a peer is gone, an invariant is broken
    FAIL_STOP = 5  # the hook does not know how a commit came out: no further step may run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePort:
    """`EnginePort` of one rank.

    Attributes:
        description: What the engine is.
        layers: Slots and tables by layer.
        reason_file: Where `fail_stop` leaves its reason.
        device: Where the model runs.
    """

    description: EngineDescription
    layers: Mapping[LayerRef, LayerExperts]
    reason_file: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def describe(self) -> EngineDescription:
        """What the engine is."""
        return self.description

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        """All tensors of the layer's slots, scales too: live storage."""
        return {name: SlotTensor(tensor) for name, tensor in self._layer(layer).slots.items()}

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        """The tables that the dispatch reads: live storage."""
        return self._layer(layer).tables

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:  # noqa: ARG002 - the port's signature
        """Nothing: this engine reads the expert's own tensors at every step and derives none from them."""
        self._layer(layer)

    def weights_version(self) -> int:
        """Always 0: this engine loads once."""
        return 0

    def compute_stream(self) -> torch.cuda.Stream | None:
        """The device's current stream, on which every step runs; None on a CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def is_capturing(self) -> bool:
        """Never: this engine captures no graphs."""
        return False

    def fail_stop(self, reason: str) -> None:
        """Leave the reason and end the process at once: this engine cannot re-form its group."""
        leave(ExitCode.FAIL_STOP, reason, self.reason_file)

    def _layer(self, layer: LayerRef) -> LayerExperts:
        found = self.layers.get(layer)
        if found is None:
            raise InvalidInputError(f"the engine has no layer {layer}; it has {', '.join(map(str, self.layers))}")
        return found


def leave(code: ExitCode, reason: str, reason_file: Path) -> NoReturn:
    """End the process now, whatever its other threads do; destructors of process groups may wait for peers, so none run.

    The reason goes to standard error and, because that may go nowhere, to a file.
    """
    if reason:
        line = f"{reason_file.stem}: {code.name.lower().replace('_', ' ')}: {reason}\n"
        try:
            reason_file.write_text(line)
        except OSError as error:
            sys.stderr.write(f"{reason_file}: cannot be written ({error})\n")
        sys.stderr.write(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
