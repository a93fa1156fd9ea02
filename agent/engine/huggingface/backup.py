"""The files that a transformers model was loaded from, as a source of experts that no rank holds any more.

Files hold experts one by one, a tensor for each projection, or stacked as transformers runs them; which it is, and under what
names, is read from the files. That the same comes of them as slots hold is tried on an expert of every layer, not believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agent.engine.huggingface.engine import HuggingFaceEngine
from agent.transfer.checkpoint import Checkpoint, Row, files_of
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef

GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What files call the projections of one expert: gate and up, which transformers holds as one tensor, and down."""

GATE_UP, DOWN = "gate_up_proj", "down_proj"

_EXPERTS = re.compile(r"(?P<where>(?:.*\.)?layers\.(?P<layer>\d+)\.(?:[^.]+\.)*?experts)\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class _Layer:
    """How the files hold the experts of one layer.

    where: what their names begin with. names: of gate, up and down; () = stacked. dtypes: of what slots hold, by name.
    """

    where: str
    names: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]

    def parts(self, expert: int) -> Sequence[str | Row]:
        """What one expert is made from."""
        if self.names:
            return [f"{self.where}.{expert}.{name}.weight" for name in self.names]
        return [Row(f"{self.where}.{name}", expert) for name in self.dtypes]

    def finished(self, expert: int, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As in a slot."""
        if self.names:
            gate, up, down = (parts[f"{self.where}.{expert}.{name}.weight"] for name in self.names)
            values = {GATE_UP: torch.cat([gate, up]), DOWN: down}
        else:
            values = {name: parts[f"{self.where}.{name}"] for name in self.dtypes}
        return {name: tensor.to(self.dtypes[name]) for name, tensor in values.items()}


def checkpoint_backup(engine: HuggingFaceEngine, folder: Path) -> Checkpoint:
    """A source for `Hook(…, sources=…)`: experts from the safetensors files in a folder. To be made before the first flip.

    Raises InvalidInputError when the files lack an expert, or hold others than the engine's slots.
    """
    files = files_of(folder)
    layers: dict[LayerRef, _Layer] = {}
    checkpoint = Checkpoint(
        files,
        lambda layer, expert: layers[layer].parts(expert),
        lambda layer, expert, parts: layers[layer].finished(expert, parts),
    )
    names: dict[int, dict[str, set[str]]] = {}
    for name in checkpoint.shapes:
        found = _EXPERTS.fullmatch(name)
        if found is not None:
            names.setdefault(int(found["layer"]), {}).setdefault(found["where"], set()).add(found["rest"])
    port = engine.port
    position = port.description.group_rank_ids.index(port.description.address.rank_id)
    for ref, experts in port.layers.items():
        dtypes = {name: tensor.dtype for name, tensor in experts.slots.items()}
        num_experts = int(experts.tables.replica_counts.numel())
        layers[ref] = _layer_of(ref, names.get(ref.layer_id, {}), dtypes, num_experts, folder)
        expert = int(experts.tables.physical_to_logical[position * experts.num_slots])
        values = checkpoint.values(ref, expert)
        held = experts.slot_views[0]
        for name, tensor in held.items():
            if values is None or not torch.equal(values[name].to(tensor.device), tensor):
                raise InvalidInputError(
                    f"{folder} has another {name} of expert {expert} of {ref} than this rank holds: it is not what the model"
                    " was loaded from, or its tensors are put together in another way"
                )
    return checkpoint


def _layer_of(
    ref: LayerRef, found: Mapping[str, set[str]], dtypes: Mapping[str, torch.dtype], num_experts: int, folder: Path
) -> _Layer:
    """How the files hold a layer. found: what follows each beginning of names of its experts."""
    for where, rest in sorted(found.items()):
        for names in GATED:
            wanted = {f"{expert}.{name}.weight" for expert in range(num_experts) for name in names}
            if wanted <= rest and set(dtypes) == {GATE_UP, DOWN}:
                return _Layer(where, names, dtypes)
        if set(dtypes) <= rest:
            return _Layer(where, (), dtypes)
    shown = ", ".join(f"{where}.{name}" for where, rest in sorted(found.items()) for name in _some(rest)) or "nothing"
    raise InvalidInputError(
        f"{folder} does not hold the {num_experts} experts of {ref} in a way that this adapter knows; its slots hold"
        f" {', '.join(sorted(dtypes))}, the files {shown}"
    )


def _some(names: Iterable[str]) -> list[str]:
    return sorted(names)[:4]
