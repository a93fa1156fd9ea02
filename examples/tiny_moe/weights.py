"""The weights file of the tiny MoE: which tensors there are, quantisation of experts, reading and writing.

In the file every expert has tensors of its own, as in checkpoints of large models (`layers.2.experts.17.up` and its
`up_scale`); in memory they are stacked over experts. An expert is right only with all four: int8 weights mean nothing
without their scales.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from examples.tiny_moe.config import TinyMoeConfig, TinyMoeError

SHIPPED_WEIGHTS = Path(__file__).with_name("tiny_moe.safetensors")
EXPERT_TENSORS = ("up", "up_scale", "down", "down_scale")
_CONFIG_KEY = "tiny_moe_config"
_DIGEST_KEY = "tiny_moe_sha256"


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model in memory.

    Attributes:
        shared: `embedding` (V, D), `final_norm` (D,), `head` (V, D), float32.
        layers: For each layer: `attention_norm` (D,), `attention_qkv` (3D, D), `attention_out` (D, D), `moe_norm` (D,),
            `router` (E, D), `router_bias` (E,), float32; `up` (E, F, D) int8, `up_scale` (E, F) float32, `down` (E, D, F)
            int8, `down_scale` (E, D) float32.
    """

    shared: Mapping[str, Tensor]
    layers: tuple[Mapping[str, Tensor], ...]


def shared_shapes(config: TinyMoeConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that belong to no layer."""
    return {
        "embedding": (config.vocabulary, config.width),
        "final_norm": (config.width,),
        "head": (config.vocabulary, config.width),
    }


def dense_shapes(config: TinyMoeConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer that belong to no expert."""
    return {
        "attention_norm": (config.width,),
        "attention_qkv": (3 * config.width, config.width),
        "attention_out": (config.width, config.width),
        "moe_norm": (config.width,),
        "router": (config.num_experts, config.width),
        "router_bias": (config.num_experts,),
    }


def expert_shapes(config: TinyMoeConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one expert."""
    return {
        "up": (config.expert_width, config.width),
        "up_scale": (config.expert_width,),
        "down": (config.width, config.expert_width),
        "down_scale": (config.width,),
    }


def expert_name(layer_id: int, expert_id: int, tensor: str) -> str:
    """What one of an expert's tensors is called in the file."""
    return f"layers.{layer_id}.experts.{expert_id}.{tensor}"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of a weight, one scale per output channel.

    Args:
        weight: Shape (..., N, K), float32.

    Returns:
        int8 (..., N, K) and float32 scales (..., N), with weight ~ int8 * scale. A channel of zeros has scale 1.
    """
    largest = weight.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return torch.round(weight / scale[..., None]).clamp(-127, 127).to(torch.int8), scale


def random_weights(config: TinyMoeConfig, *, seed: int) -> Weights:
    """Untrained weights of the right shapes, for tests and as what training starts from being compared with."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        matrix: Tensor = torch.randn(shape, generator=generator) * float(shape[-1] ** -0.5)
        return matrix

    layers = []
    for _ in range(config.num_layers):
        layer = {name: normal(shape) for name, shape in dense_shapes(config).items()}
        layer["router_bias"] = torch.randn(config.num_experts, generator=generator) * 0.1
        for name in ("up", "down"):
            shape = (config.num_experts, *expert_shapes(config)[name])
            layer[name], layer[f"{name}_scale"] = quantise(normal(shape))
        layers.append(layer)
    shared = {name: normal(shape) for name, shape in shared_shapes(config).items()}
    return Weights(shared=shared, layers=tuple(layers))


def write_weights(path: Path, config: TinyMoeConfig, weights: Weights) -> None:
    """Write a model: shared and dense tensors as float16 (norms as float32), experts one by one."""
    tensors: dict[str, Tensor] = {}
    for name in shared_shapes(config):
        tensors[name] = _stored(weights.shared[name])
    for layer_id, layer in enumerate(weights.layers):
        for name in dense_shapes(config):
            tensors[f"layers.{layer_id}.{name}"] = _stored(layer[name])
        for expert_id in range(config.num_experts):
            for name in EXPERT_TENSORS:
                tensors[expert_name(layer_id, expert_id, name)] = layer[name][expert_id].clone()
    save_file(tensors, path, metadata={_CONFIG_KEY: config.to_json(), _DIGEST_KEY: _digest(tensors)})


def read_weights(path: Path) -> tuple[TinyMoeConfig, Weights]:
    """Read what `write_weights` wrote, checking the digest, names, shapes, types and that every number is finite.

    Raises:
        TinyMoeError: the file is missing, not a safetensors file, of another model, or damaged.
    """
    config, tensors = _open(path)

    def take(name: str, shape: tuple[int, ...], *, integer: bool) -> Tensor:
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise TinyMoeError(f"{path} lacks the tensor {name}; restore it from the repository")
        right_type = tensor.dtype == torch.int8 if integer else tensor.dtype in (torch.float16, torch.float32)
        if tuple(tensor.shape) != shape or not right_type:
            kind = "int8" if integer else "float16 or float32"
            raise TinyMoeError(f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {kind}")
        if not integer and not bool(torch.isfinite(tensor).all()):
            raise TinyMoeError(f"{path}: {name} holds numbers that are not finite; restore it from the repository")
        # A copy: what the file maps may be unaligned, and products must see the same alignment everywhere.
        return tensor.clone() if integer else tensor.to(torch.float32, copy=True)

    shared = {name: take(name, shape, integer=False) for name, shape in shared_shapes(config).items()}
    layers = []
    for layer_id in range(config.num_layers):
        prefix = f"layers.{layer_id}"
        layer = {name: take(f"{prefix}.{name}", shape, integer=False) for name, shape in dense_shapes(config).items()}
        for name, shape in expert_shapes(config).items():
            of_experts = [
                take(expert_name(layer_id, expert_id, name), shape, integer=not name.endswith("_scale"))
                for expert_id in range(config.num_experts)
            ]
            layer[name] = torch.stack(of_experts)
        layers.append(layer)
    if tensors:
        raise TinyMoeError(
            f"{path} holds {len(tensors)} tensors that the model does not know, such as {min(tensors)}; pass the right file"
        )
    return config, Weights(shared=shared, layers=tuple(layers))


def _open(path: Path) -> tuple[TinyMoeConfig, dict[str, Tensor]]:
    """The configuration and the raw tensors of a file whose digest is right."""
    if not path.is_file():
        raise TinyMoeError(
            f"no weights at {path}; they ship with the repository, or train them: "
            f"python -m examples.tiny_moe.train --out {path}"
        )
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise TinyMoeError(
            f"{path} ({path.stat().st_size} bytes) is not a readable safetensors file ({error}); restore it from the repository"
        ) from error
    if _CONFIG_KEY not in metadata or _DIGEST_KEY not in metadata:
        raise TinyMoeError(
            f"the header of {path} lacks {_CONFIG_KEY} or {_DIGEST_KEY}, so it is no tiny MoE; pass the right file"
        )
    found = _digest(tensors)
    if found != metadata[_DIGEST_KEY]:
        raise TinyMoeError(
            f"{path} is damaged: its tensors have digest {found[:16]}, its header says {metadata[_DIGEST_KEY][:16]}; "
            "restore it from the repository"
        )
    return TinyMoeConfig.from_json(metadata[_CONFIG_KEY]), tensors


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes: a flipped bit of an int8 weight is a valid weight, so it needs this."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _stored(tensor: Tensor) -> Tensor:
    """How a tensor that is no expert's is stored: norms whole, matrices as float16."""
    return tensor.float().contiguous() if tensor.dim() == 1 else tensor.to(torch.float16).contiguous()
