"""A checkpoint of the mixed model, stored otherwise than its engine holds it: gate and up apart, int4 turned round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from eplb_service.ids import LayerRef
from tests.mixed_experts import BF16, FP8, INT4, LAYERS, expert_values


def parts_of(layer: LayerRef, expert: int) -> list[str]:
    """Names of all that an expert is made from."""
    names = {
        BF16: ("gate_proj.weight", "up_proj.weight"),
        FP8: ("weight", "weight_scale_inv", "alpha"),
        INT4: ("qweight", "scales", "qzeros"),
    }[layer]
    return [f"model.layers.{layer.layer_id}.experts.{expert}.{name}" for name in names]


def finish(layer: LayerRef, _expert: int, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """What the engine does with a checkpoint's tensors: gate and up become one, int4 is turned round."""
    values = list(parts.values())
    if layer == BF16:
        return {"weight": torch.cat(values)}
    if layer == FP8:
        return dict(zip(("weight", "weight_scale_inv", "alpha"), values, strict=True))
    return {"qweight": values[0].T, "scales": values[1], "qzeros": values[2]}


def save(folder: Path, num_experts: int) -> None:
    """Two files, with much beside the experts."""
    files: list[dict[str, torch.Tensor]] = [{}, {"lm_head.weight": torch.zeros(512, 64)}]
    for layer in LAYERS:
        for expert in range(num_experts):
            values = expert_values(layer, expert)
            if layer == BF16:
                tensors = [values["weight"][:4].clone(), values["weight"][4:].clone()]
            elif layer == FP8:
                tensors = list(values.values())
            else:
                tensors = [values["qweight"].T.contiguous(), values["scales"], values["qzeros"]]
            files[expert % 2].update(zip(parts_of(layer, expert), tensors, strict=True))
    for number, tensors_of_file in enumerate(files):
        save_file(tensors_of_file, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
