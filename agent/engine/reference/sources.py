"""Where experts come from that no rank holds any more: the files that the model was loaded from, and the model itself.

Every rank of this engine has the whole model in memory beside its slots (an expert's slot is filled from it at the start), so
nothing more is held for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from agent.engine.reference.model import ExpertModel
from agent.transfer.backup import ExpertSource
from agent.transfer.checkpoint import Checkpoint
from agent.transfer.staging import ExpertLayout
from eplb_service.ids import LayerRef


@runtime_checkable
class LoadedFromFiles(Protocol):
    """A model may have this beside `ServedModel`: it knows the safetensors files that it was loaded from."""

    def weights_files(self) -> Sequence[Path]:
        """The files; empty = it was made otherwise."""
        ...

    def names_in_files(self, layer_id: int, expert: int) -> Mapping[str, str]:
        """Of each of `expert_tensors`, the name of this expert's part in the files; it has the same bytes there."""
        ...


class LoadedModel:
    """An `ExpertSource` over the model that a rank has loaded."""

    name = "the loaded model"

    def __init__(self, model: ExpertModel) -> None:
        self._model = model

    def read(self, layer: LayerRef, expert: int, layout: ExpertLayout, region: Tensor) -> bool:
        """Pack the expert's tensors."""
        tensors = self._model.expert_tensors(layer.layer_id)
        layout.pack_values({name: tensor[expert].cpu() for name, tensor in tensors.items()}, region)
        return True


def expert_sources(model: ExpertModel) -> tuple[ExpertSource, ...]:
    """What a rank's hook may restore experts from, by preference."""
    loaded = LoadedModel(model)
    if not isinstance(model, LoadedFromFiles) or not model.weights_files():
        return (loaded,)
    names_in_files = model.names_in_files

    def parts_of(layer: LayerRef, expert: int) -> Sequence[str]:
        return tuple(names_in_files(layer.layer_id, expert).values())

    def finish(layer: LayerRef, expert: int, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {name: parts[in_file] for name, in_file in names_in_files(layer.layer_id, expert).items()}

    return Checkpoint(tuple(model.weights_files()), parts_of, finish), loaded
