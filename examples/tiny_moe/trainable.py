"""The tiny MoE as it is trained: whole sequences in a batch, float32 experts, gradients; equal to `model` up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.tiny_moe.config import TinyMoeConfig
from examples.tiny_moe.model import rotate
from examples.tiny_moe.weights import Weights, dense_shapes, quantise, shared_shapes


class TrainableLayer(nn.Module):
    """Parameters of one layer, the bias that training adds to the choice of experts, and the load of the last batch."""

    selection_bias: Tensor
    load: Tensor

    def __init__(self, config: TinyMoeConfig, generator: torch.Generator) -> None:
        """Draw the initial parameters."""
        super().__init__()
        width, inner, num_experts = config.width, config.expert_width, config.num_experts
        small = (2 * config.num_layers) ** -0.5

        def normal(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale * shape[-1] ** -0.5)

        self.attention_norm = nn.Parameter(torch.ones(width))
        # Queries, keys and values as three matrices: Muon orthogonalises each by itself.
        self.attention_qkv = normal(3, width, width)
        self.attention_out = normal(width, width, scale=small)
        self.moe_norm = nn.Parameter(torch.ones(width))
        self.router = normal(num_experts, width)
        self.router_bias = nn.Parameter(torch.zeros(num_experts))
        self.up = normal(num_experts, inner, width)
        self.down = normal(num_experts, width, inner, scale=small)
        self.register_buffer("selection_bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts))


class TrainableTinyMoe(nn.Module):
    """The decoder over whole sequences."""

    def __init__(self, config: TinyMoeConfig, *, seed: int) -> None:
        """Draw the initial parameters from a seed."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.width, generator=generator))
        self.layers = nn.ModuleList(TrainableLayer(config, generator) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Parameter(torch.randn(config.vocabulary, config.width, generator=generator) * config.width**-0.5)

    def typed_layers(self) -> list[TrainableLayer]:
        """The layers, with their type."""
        return [layer for layer in self.layers if isinstance(layer, TrainableLayer)]

    def matrices(self) -> list[Tensor]:
        """What Muon trains: attention and experts."""
        names = ("attention_qkv", "attention_out", "up", "down")
        return [getattr(layer, name) for layer in self.typed_layers() for name in names]

    def others(self) -> list[Tensor]:
        """What AdamW trains: embedding, head, routers and norms."""
        names = ("attention_norm", "moe_norm", "router", "router_bias")
        of_layers = [getattr(layer, name) for layer in self.typed_layers() for name in names]
        return [self.embedding, self.head, self.final_norm, *of_layers]

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats. Shape (sequences, length + 1), int64."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte. Shape (sequences, length), int64, to (sequences, length, 256)."""
        config = self.config
        cos, sin = _rotation(config, tokens.shape[1])
        hidden = self.embedding[tokens]
        for layer in self.typed_layers():
            hidden = hidden + self._attention(layer, hidden, cos, sin)
            normed = functional.rms_norm(hidden, (config.width,), layer.moe_norm, config.norm_epsilon)
            flat = normed.flatten(0, 1)
            hidden = hidden + moe(layer, flat, config.top_k).view_as(hidden)
        normed = functional.rms_norm(hidden, (config.width,), self.final_norm, config.norm_epsilon)
        return functional.linear(normed, self.head)

    def _attention(self, layer: TrainableLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        num_sequences, length, width = hidden.shape
        normed = functional.rms_norm(hidden, (width,), layer.attention_norm, config.norm_epsilon)
        projected = functional.linear(normed, layer.attention_qkv.flatten(0, 1))
        heads = projected.view(num_sequences, length, 3, config.num_heads, config.head_width)
        queries, keys, values = heads.unbind(dim=2)
        queries, keys = rotate(queries, cos, sin).transpose(1, 2), rotate(keys, cos, sin).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values.transpose(1, 2), is_causal=True)
        return functional.linear(mixed.transpose(1, 2).reshape(num_sequences, length, width), layer.attention_out)

    @torch.no_grad()
    def to_weights(self) -> Weights:
        """The weights to ship: experts as int8 with a scale per output channel."""
        layers: list[dict[str, Tensor]] = []
        for layer in self.typed_layers():
            tensors = {name: getattr(layer, name).detach().clone() for name in dense_shapes(self.config)}
            tensors["attention_qkv"] = tensors["attention_qkv"].flatten(0, 1)
            for name in ("up", "down"):
                tensors[name], tensors[f"{name}_scale"] = quantise(getattr(layer, name).detach())
            layers.append(tensors)
        shared = {name: getattr(self, name).detach().clone() for name in shared_shapes(self.config)}
        return Weights(shared=shared, layers=tuple(layers))


def moe(layer: TrainableLayer, inputs: Tensor, top_k: int) -> Tensor:
    """Experts by sort and one product each; the selection bias steers the choice, never the gates (DeepSeek-V3, section 2.1.2).

    Args:
        layer: Its `load` is set to the assignments of this batch.
        inputs: Shape (n, D), float32, normed.
        top_k: Experts of each row.

    Returns:
        Shape (n, D), float32.
    """
    logits = functional.linear(inputs, layer.router, layer.router_bias)
    experts = (logits.detach() + layer.selection_bias).topk(top_k, dim=-1).indices
    gates = torch.softmax(logits.gather(1, experts), dim=-1)
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.bincount(experts.flatten(), minlength=layer.router.shape[0])
    layer.load.copy_(counts)
    rows = order // top_k
    outputs = []
    for expert_id, part in enumerate(torch.split(inputs[rows], counts.tolist())):
        inner = torch.relu(part @ layer.up[expert_id].t())
        outputs.append((inner * inner) @ layer.down[expert_id].t())
    weighted = torch.cat(outputs) * gates.flatten()[order, None]
    return torch.zeros_like(inputs).index_add(0, rows, weighted)


def _rotation(config: TinyMoeConfig, length: int) -> tuple[Tensor, Tensor]:
    half = config.head_width // 2
    frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()
