"""Layers whose experts are stored as engines store them: bf16, fp8 and int4 with their scales, views of every kind among them.

Layer 0: bf16, column-major. Layer 1: fp8 with block scales, of which one axis is broadcast, behind an offset. Layer 2: packed
int4 with scales and zero points, each slot strided. All have an empty tensor, layer 1 one for all slots (stride 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from agent.engine.port import SlotTensor, TensorKind
from eplb_service.ids import LayerRef

MODEL = "mixed"
LAYERS = tuple(LayerRef(MODEL, layer_id) for layer_id in (0, 1, 2))
BF16, FP8, INT4 = LAYERS
EXPERT_BYTES = {BF16: 8 * 6 * 2, FP8: 16 * 8 + 4 * 4 + 4, INT4: 6 * 5 + 6 * 2 + 6}
"""Of one expert, as it is stored."""


def expert_values(layer: LayerRef, expert: int) -> dict[str, torch.Tensor]:
    """What the checkpoint has of one expert: the raw bytes or values of each tensor that belongs to it."""
    made = torch.Generator().manual_seed(1000 * layer.layer_id + expert + 1)

    def raw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)

    if layer == BF16:
        return {"weight": torch.randn(8, 6, generator=made).to(torch.bfloat16)}
    if layer == FP8:
        return {
            "weight": raw(16, 8).view(torch.float8_e4m3fn),  # NaN among them: bytes count, not values
            "weight_scale_inv": torch.rand(4, 1, generator=made),
            "alpha": torch.rand((), generator=made),
        }
    return {
        "qweight": raw(6, 5),
        "scales": torch.rand(6, generator=made).to(torch.float16),
        "qzeros": raw(6),
    }


def slot_tensors(layer: LayerRef, experts: Sequence[int]) -> dict[str, SlotTensor]:
    """The layer's tensors with these experts in their slots; -1 = what nobody reads."""
    named = [expert_values(layer, expert) for expert in experts]
    values = {name: [tensors[name] for tensors in named] for name in named[0]}
    tensors = {"bias": SlotTensor(torch.zeros(0, dtype=torch.bfloat16))}
    if layer == BF16:
        tensors["weight"] = SlotTensor(_column_major(values["weight"]))
    elif layer == FP8:
        tensors["weight"] = SlotTensor(_behind_offset(values["weight"]))
        tensors["weight_scale_inv"] = SlotTensor(torch.stack(values["weight_scale_inv"]).expand(-1, -1, 3))
        tensors["alpha"] = SlotTensor(torch.stack(values["alpha"]))
        tensors["input_scale"] = SlotTensor(torch.tensor([0.25]).expand(len(experts)))
        product = tensors["alpha"].data * 0.25
        tensors["product"] = SlotTensor(product, TensorKind.DERIVED)
    else:
        tensors["qweight"] = SlotTensor(_every_second(values["qweight"]), layout="packed_int4")
        tensors["scales"] = SlotTensor(_every_second(values["scales"]))
        tensors["qzeros"] = SlotTensor(_every_second(values["qzeros"]))
    return tensors


def wrong(layer: LayerRef, tensors: Mapping[str, SlotTensor], slot: int, expert: int) -> list[str]:
    """Tensors of a slot that are not, bit for bit, those of the expert."""
    return [
        name
        for name, value in expert_values(layer, expert).items()
        if not torch.equal(_bytes(tensors[name].data[slot]), _bytes(value.expand(tensors[name].data[slot].shape)))
    ]


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().reshape(-1).view(torch.uint8)


def _column_major(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([value.T.contiguous() for value in values]).transpose(1, 2)


def _behind_offset(values: list[torch.Tensor]) -> torch.Tensor:
    size = values[0].numel()
    storage = torch.zeros(24 + size * len(values), dtype=torch.uint8).view(values[0].dtype)
    view = storage[24:].view(len(values), *values[0].shape)
    for slot, value in enumerate(values):
        view[slot].copy_(value)
    return view


def _every_second(values: list[torch.Tensor]) -> torch.Tensor:
    storage = torch.zeros(2 * len(values) + 1, *values[0].shape, dtype=values[0].dtype)
    view = storage[1::2]
    for slot, value in enumerate(values):
        view[slot].copy_(value)
    return view
