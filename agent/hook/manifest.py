"""What a rank's tensors are, in a form that ranks can compare, and whether the engine's description is true of them.

A tensor missing on one rank, converted, re-laid or of another type would move half an expert: every such difference shows here
before anything moves (sglang#17158, vllm#47588, TensorRT-LLM#14862).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from agent.engine.port import EngineDescription, EngineModel, RoutingTables, SlotTensor, TensorKind
from agent.transfer.checksum import WORD_BYTES, checksum
from agent.transfer.staging import ExpertLayout, is_broadcast_over_slots
from eplb_service.control import LayerInfo, LayerTensors, ModelInfo
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef

Tensors = Mapping[LayerRef, Mapping[str, SlotTensor]]


def layer_manifest(tensors: Mapping[str, SlotTensor]) -> dict[str, str]:
    """What each tensor of a layer is, in words that are equal on all ranks: type, shape without the slot axis, kind, layout.

    >>> layer_manifest({"scale": SlotTensor(torch.zeros(4, 2))})
    {'scale': 'float32 [2] expert linear'}
    """
    return {
        name: f"{str(tensor.data.dtype).removeprefix('torch.')} {_slot_shape(tensor)} {tensor.kind.value} {tensor.layout}"
        for name, tensor in sorted(tensors.items())
    }


def manifest_digest(model: EngineModel, tensors: Tensors) -> str:
    """Hex BLAKE2b-16 of the manifests of all layers of a model."""
    return _digest([[layer_id, manifest] for layer_id, manifest in _manifests(model, tensors).items()])


def _manifests(model: EngineModel, tensors: Tensors) -> dict[int, dict[str, str]]:
    """Of every layer of a model, by its id."""
    return {info.layer_id: layer_manifest(tensors[LayerRef(model.name, info.layer_id)]) for info in model.layers}


def manifest_facts(tensors: Tensors) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Digest of each layer's manifest by a readable name, and by the same name what it is the digest of."""
    manifests = {f"tensors of layer {layer}": layer_manifest(tensors[layer]) for layer in sorted(tensors)}
    return {name: _digest(manifest) for name, manifest in manifests.items()}, manifests


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def settled(tensors: Mapping[str, SlotTensor]) -> dict[str, SlotTensor]:
    """The tensors of a layer with the kind that they really have.

    One that is the same memory for all slots (stride 0) belongs to no expert: it is SHARED, and its one entry is compared.
    """
    return {
        name: replace(tensor, data=tensor.data[0], kind=TensorKind.SHARED)
        if tensor.kind is TensorKind.EXPERT and is_broadcast_over_slots(tensor.data)
        else tensor
        for name, tensor in tensors.items()
    }


def _slot_shape(tensor: SlotTensor) -> str:
    """Shape without the slot axis; `1x3` = an axis of 3 that is stored once (stride 0)."""
    first = 0 if tensor.kind is TensorKind.SHARED else 1
    axes = list(zip(tensor.data.shape, tensor.data.stride(), strict=True))[first:]
    return f"[{', '.join(f'1x{size}' if stride == 0 and size > 1 else str(size) for size, stride in axes)}]"


def shared_facts(tensors: Tensors) -> dict[str, str]:
    """Checksum of every SHARED tensor by a readable name: equal on all ranks or nothing may move."""
    facts = {}
    for layer in sorted(tensors):
        for name, tensor in sorted(tensors[layer].items()):
            if tensor.kind is TensorKind.SHARED:
                data = tensor.data.contiguous().reshape(-1).view(torch.uint8)
                padded = torch.nn.functional.pad(data, (0, -data.numel() % WORD_BYTES))
                facts[f"shared tensor {name} of layer {layer}"] = f"{int(checksum(padded)) & (1 << 64) - 1:#x}"
    return facts


def model_infos(description: EngineDescription, tensors: Tensors) -> tuple[ModelInfo, ...]:
    """The models as the planner is told of them."""
    return tuple(
        ModelInfo(
            name=model.name,
            digest=model.digest,
            manifest_digest=manifest_digest(model, tensors),
            layers=model.layers,
            tensors=_alike(model, tensors),
        )
        for model in description.models
    )


def _alike(model: EngineModel, tensors: Tensors) -> tuple[LayerTensors, ...]:
    """Layers by what their tensors are: most are alike."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for layer_id, manifest in _manifests(model, tensors).items():
        found.setdefault(tuple(manifest.items()), []).append(layer_id)
    return tuple(LayerTensors(layer_ids=tuple(ids), tensors=manifest) for manifest, ids in found.items())


def check_layer(
    layer: LayerRef,
    info: LayerInfo,
    tensors: Mapping[str, SlotTensor],
    tables: RoutingTables,
    num_physical: int,
    width: int,
    *,
    weighted: bool = False,
) -> ExpertLayout:
    """The layer's packing. Raises InvalidInputError when tensors or tables are not what the engine says of them."""
    layout = ExpertLayout.of(layer, tensors)
    for name, tensor in tensors.items():
        if tensor.kind is TensorKind.SHARED or tensor.data.numel() == 0:
            continue
        if tensor.data.dim() == 0 or tensor.data.shape[0] != info.slots:
            raise InvalidInputError(
                f"layer {layer}: tensor {name} of shape {tuple(tensor.data.shape)} needs the {info.slots} slots as first axis"
            )
    if layout.expert_bytes != info.expert_bytes or not layout.tensors:
        raise InvalidInputError(
            f"layer {layer}: expert tensors {[t.name for t in layout.tensors]} hold {layout.expert_bytes} bytes an expert, the"
            f" engine says {info.expert_bytes}; a tensor is missing or declared twice"
        )
    check_tables(layer, info, tables, num_physical, width, weighted=weighted)
    return layout


def check_tables(
    layer: LayerRef, info: LayerInfo, tables: RoutingTables, num_physical: int, width: int, *, weighted: bool
) -> None:
    """Raises InvalidInputError when a table is not of the type and shape that rows of `num_physical` slots need."""
    wanted = {
        "physical_to_logical": (num_physical,),
        "logical_to_physical": (info.num_logical, width),
        "replica_counts": (info.num_logical,),
    }
    for name, shape in wanted.items():
        table: torch.Tensor = getattr(tables, name)
        if tuple(table.shape) != shape or table.dtype != torch.int64:
            raise InvalidInputError(
                f"layer {layer}: table {name} must be int64 of shape {shape}; it is {table.dtype} of {tuple(table.shape)}"
            )
    shares = tables.replica_shares
    if weighted and (shares is None or tuple(shares.shape) != (info.num_logical, width) or shares.dtype != torch.float32):
        found = "missing" if shares is None else f"{shares.dtype} of {tuple(shares.shape)}"
        raise InvalidInputError(
            f"layer {layer}: the engine dispatches by shares, so table replica_shares must be float32 of shape"
            f" {(info.num_logical, width)}; it is {found}"
        )


def check_initial_row(
    layer: LayerRef, info: LayerInfo, row: np.ndarray[tuple[int], np.dtype[np.int32]], num_physical: int, *, joins: bool
) -> None:
    """Raises InvalidInputError when the row that the engine says it loaded cannot be one. joins: it may hold nothing."""
    if row.shape != (num_physical,) or row.min(initial=0) < -1 or row.max(initial=0) >= info.num_logical:
        raise InvalidInputError(
            f"layer {layer}: the loaded row must name experts -1 to {info.num_logical - 1} in {num_physical} slots;"
            f" it has {row.size} slots and ids {int(row.min(initial=0))} to {int(row.max(initial=0))}"
        )
    if joins and int(row.max(initial=-1)) >= 0:
        raise InvalidInputError(
            f"layer {layer}: a rank that joins has empty slots, so its row is -1 everywhere; it names expert {int(row.max())}"
        )
    missing = [] if joins else sorted(set(range(info.num_logical)) - set(row.tolist()))
    if missing:
        raise InvalidInputError(f"layer {layer}: {len(missing)} experts were loaded into no slot, the first is {missing[0]}")
