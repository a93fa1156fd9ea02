"""The tiny MoE for serving: a decoder cut where an expert-parallel engine must cut it, exact in any batch.

One step of a batch is, in terms of the methods below::

    hidden = model.embed(tokens)
    for layer_id in range(model.config.num_layers):
        hidden = model.attend(layer_id, hidden, spans)
        routing = model.route(layer_id, hidden)
        outputs = ...  # run_expert for each (token, choice), wherever that expert lives
        hidden = model.combine(hidden, outputs, routing.gates)
    tokens = model.next_tokens(hidden[last_rows], draws)

Every method gives each row the same bits in any batch (see `numerics`), so `generate.Oracle`, which calls these same
methods for one request at a time, must agree exactly with an engine that batches requests and spreads experts over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.tiny_moe.config import TinyMoeConfig, TinyMoeError
from examples.tiny_moe.numerics import rms_norm, stable_top_k, tiled_linear
from examples.tiny_moe.weights import EXPERT_TENSORS, SHIPPED_WEIGHTS, Weights, expert_name, read_weights


class KvCache:
    """Keys and values of one request, all layers: preallocated, so that attention sees the same strides in any batch.

    Attributes:
        keys: Shape (L, heads, context, head width), float32.
        values: The same shape.
    """

    __slots__ = ("_layer_lengths", "keys", "values")

    def __init__(self, config: TinyMoeConfig) -> None:
        """Room for one request of up to `config.context` tokens."""
        shape = (config.num_layers, config.num_heads, config.context, config.head_width)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self._layer_lengths = [0] * config.num_layers

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(self._layer_lengths)

    def layer_length(self, layer_id: int) -> int:
        """Tokens that this layer holds: during a step, earlier layers are ahead of later ones."""
        return self._layer_lengths[layer_id]

    def truncate(self, length: int) -> None:
        """Forget what any layer holds beyond so many tokens; what was there is written over."""
        self._layer_lengths = [min(held, length) for held in self._layer_lengths]

    def append(self, layer_id: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens to one layer and return all it holds.

        Args:
            layer_id: The layer.
            keys: Shape (count, heads, head width), float32, already rotated.
            values: The same shape.

        Returns:
            Views (heads, length, head width) of the keys and the values.

        Raises:
            TinyMoeError: the request outgrows the context.
        """
        start = self._layer_lengths[layer_id]
        stop = start + keys.shape[0]
        if stop > self.keys.shape[2]:
            raise TinyMoeError(
                f"a request of {stop} tokens does not fit the context of {self.keys.shape[2]}; "
                "shorten the prompt or ask for fewer new tokens"
            )
        self.keys[layer_id, :, start:stop] = keys.transpose(0, 1)
        self.values[layer_id, :, start:stop] = values.transpose(0, 1)
        self._layer_lengths[layer_id] = stop
        return self.keys[layer_id, :, :stop], self.values[layer_id, :, :stop]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, start + count) of a batch belong to the request of `cache`: a whole prompt, or one new token."""

    cache: KvCache
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the rows of a batch go in one MoE layer.

    Attributes:
        inputs: Shape (n, D), float32: the normed hidden rows that are fed to the experts.
        experts: Shape (n, k), int64: logical experts, best first, ties by the lowest id.
        gates: Shape (n, k), float32, summing to 1 in each row: the weight of each choice.
    """

    inputs: Tensor
    experts: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """Names the random numbers of one sampled token: nothing else enters them but the model's seed."""

    request_id: int
    position: int


class TinyMoe:
    """A loaded model; holds no state of any request, so one instance serves all."""

    def __init__(self, config: TinyMoeConfig, weights: Weights) -> None:
        """Wrap weights that `weights.read_weights` or `weights.random_weights` made and checked."""
        self.config = config
        self._weights = weights
        self._file: Path | None = None
        self._cos, self._sin = _rotation_tables(config)

    @classmethod
    def load(cls, path: Path | None = None) -> TinyMoe:
        """Read a model from a safetensors file; by default the weights shipped beside this module.

        Raises:
            TinyMoeError: the file is missing, corrupt, or holds other tensors than the model needs.
        """
        config, weights = read_weights(path or SHIPPED_WEIGHTS)
        model = cls(config, weights)
        model._file = path or SHIPPED_WEIGHTS
        return model

    def moe_layer_ids(self) -> tuple[int, ...]:
        """Absolute ids of the layers with experts: all of them in this model."""
        return tuple(range(self.config.num_layers))

    def expert_tensors(self, layer_id: int) -> dict[str, Tensor]:
        """The checkpoint's expert tensors of a layer, by name, stacked over logical experts.

        Returns:
            `up` (E, 64, 96) int8, `up_scale` (E, 64) float32, `down` (E, 96, 64) int8, `down_scale` (E, 96) float32 (for
            the shipped shape). Not copies: change them and the checkpoint in memory changes.
        """
        layer = self._weights.layers[layer_id]
        return {name: layer[name] for name in EXPERT_TENSORS}

    def weights_files(self) -> tuple[Path, ...]:
        """The file that `load` read; none for a model that was made otherwise."""
        return () if self._file is None else (self._file,)

    def names_in_files(self, layer_id: int, expert: int) -> dict[str, str]:
        """Of each of `expert_tensors`, what this expert's part is called in the file: the same bytes."""
        return {name: expert_name(layer_id, expert, name) for name in EXPERT_TENSORS}

    def new_cache(self) -> KvCache:
        """An empty cache for a new request."""
        return KvCache(self.config)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens to the first hidden rows. Shape (n,), int64, to (n, D), float32."""
        return self._weights.shared["embedding"][tokens]

    def attend(self, layer_id: int, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        """Self-attention with its residual; adds the rows to the cache of each span.

        Each request is attended by itself at its own length, so shapes are the same as when it is served alone.

        Args:
            layer_id: The layer.
            hidden: Shape (n, D), float32.
            spans: Disjoint spans that together cover all n rows. A span of several rows must be a whole prompt.

        Returns:
            Shape (n, D), float32.

        Raises:
            TinyMoeError: the spans do not cover the rows, a prompt is split, or a request outgrows the context.
        """
        config = self.config
        num_rows = hidden.shape[0]
        positions = _positions(layer_id, spans, num_rows, config.context)
        layer = self._weights.layers[layer_id]
        normed = rms_norm(hidden, layer["attention_norm"], epsilon=config.norm_epsilon)
        projected = tiled_linear(normed, layer["attention_qkv"])
        queries, keys, values = projected.view(num_rows, 3, config.num_heads, config.head_width).unbind(dim=1)
        cos, sin = self._cos[positions], self._sin[positions]
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        mixed = torch.zeros(num_rows, config.width)
        for span in spans:
            rows = slice(span.start, span.start + span.count)
            held_keys, held_values = span.cache.append(layer_id, keys[rows], values[rows])
            mixed[rows] = _attention(queries[rows], held_keys, held_values)
        return hidden + tiled_linear(mixed, layer["attention_out"])

    def route(self, layer_id: int, hidden: Tensor) -> Routing:
        """Choose the experts of each row. Shape (n, D), float32."""
        layer = self._weights.layers[layer_id]
        inputs = rms_norm(hidden, layer["moe_norm"], epsilon=self.config.norm_epsilon)
        logits = tiled_linear(inputs, layer["router"]) + layer["router_bias"]
        values, experts = stable_top_k(logits, self.config.top_k)
        return Routing(inputs=inputs, experts=experts, gates=torch.softmax(values, dim=-1))

    def run_expert(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """One expert on the rows sent to it: squared ReLU between two int8 weights.

        Only the tensors passed in matter, not the model's own: an engine passes what lies in a slot. Nothing is cached,
        since a slot's weights change in place under us.

        Args:
            tensors: One expert's tensors, named as in `expert_tensors`, without the leading axis.
            inputs: Shape (m, D), float32.

        Returns:
            Shape (m, D), float32.
        """
        # Scaling outputs instead of weights: the scale is per output channel, and rows are fewer than weight columns.
        inner = tiled_linear(inputs, tensors["up"].float()) * tensors["up_scale"]
        inner = torch.relu(inner)
        return tiled_linear(inner * inner, tensors["down"].float()) * tensors["down_scale"]

    def combine(self, hidden: Tensor, outputs: Tensor, gates: Tensor) -> Tensor:
        """Weighted sum of the experts' outputs in the order of the choices, then the residual.

        Args:
            hidden: Shape (n, D), float32: what `route` was given.
            outputs: Shape (n, k, D), float32: output of each (token, choice).
            gates: Shape (n, k), float32.

        Returns:
            Shape (n, D), float32.
        """
        total = torch.zeros_like(hidden)
        for choice in range(outputs.shape[1]):
            # Two separate operations: a fused multiply-add would round once where another shape may round twice.
            weighted = outputs[:, choice] * gates[:, choice, None]
            total = total + weighted
        return hidden + total

    def next_tokens(self, hidden: Tensor, draws: Sequence[Draw]) -> list[int]:
        """Sample one token for each row.

        Args:
            hidden: Shape (m, D), float32: last rows of m requests.
            draws: One for each row.

        Raises:
            TinyMoeError: not one draw per row.
        """
        if hidden.shape[0] != len(draws):
            raise TinyMoeError(f"{hidden.shape[0]} rows but {len(draws)} draws; pass one draw for each row")
        logits = self.logits(hidden).numpy()
        return [self._sample(row, draw) for row, draw in zip(logits, draws, strict=True)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next byte for each row. Shape (m, D) to (m, 256), float32."""
        normed = rms_norm(hidden, self._weights.shared["final_norm"], epsilon=self.config.norm_epsilon)
        return tiled_linear(normed, self._weights.shared["head"])

    def _sample(self, logits: np.ndarray[tuple[int], np.dtype[np.float32]], draw: Draw) -> int:
        """Gumbel-max: the largest of logits / temperature + noise; `numpy.argmax` takes the lowest index of ties."""
        noise = gumbel_noise(self.config.sampling_seed, draw, self.config.vocabulary)
        return int(np.argmax(logits.astype(np.float64) / self.config.temperature + noise))


def gumbel_noise(seed: int, draw: Draw, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Noise of one draw from a counter-based generator (Philox, Salmon et al. 2011): no state is carried between draws.

    Returns:
        Shape (count,), float64.
    """
    bits = np.random.Philox(key=np.array([seed, draw.request_id], np.uint64), counter=[0, 0, 0, draw.position])
    uniform = np.random.Generator(bits).random(count)
    return -np.log(-np.log(np.maximum(uniform, np.finfo(np.float64).tiny)))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves convention.

    Args:
        heads: Shape (..., heads, head width), float32.
        cos: Shape (..., head width / 2), float32; `sin` likewise.
        sin: See `cos`.
    """
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _rotation_tables(config: TinyMoeConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (context, head width / 2), computed in float64 and rounded once to float32."""
    half = config.head_width // 2
    frequencies = config.rope_base ** (-np.arange(half) / half)
    angles = np.arange(config.context)[:, None] * frequencies[None, :]
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def _positions(layer_id: int, spans: Sequence[Span], num_rows: int, context: int) -> Tensor:
    """Position of each row in its request, (n,) int64, after checking that the spans are sound."""
    positions = torch.full((num_rows,), -1, dtype=torch.int64)
    for span in spans:
        held = span.cache.layer_length(layer_id)
        if span.count < 1 or span.start < 0 or span.start + span.count > num_rows:
            raise TinyMoeError(f"span [{span.start}, +{span.count}) does not lie within the {num_rows} rows of the batch")
        if span.count > 1 and held > 0:
            raise TinyMoeError(
                f"a span of {span.count} rows for a request that already holds {held} tokens: "
                "pass a whole prompt at once, then one token a step"
            )
        if held + span.count > context:
            raise TinyMoeError(
                f"a request of {held + span.count} tokens does not fit the context of {context}; "
                "shorten the prompt or ask for fewer new tokens"
            )
        rows = positions[span.start : span.start + span.count]
        if bool((rows >= 0).any()):
            raise TinyMoeError(f"span [{span.start}, +{span.count}) overlaps another span; each row has one request")
        rows.copy_(torch.arange(held, held + span.count))
    missing = int((positions < 0).sum())
    if missing:
        raise TinyMoeError(f"{missing} of {num_rows} rows belong to no span; cover every row")
    return positions


def _attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the newest rows of one request over all it holds.

    Args:
        queries: Shape (count, heads, head width); count is 1 or the whole length.
        keys: Shape (heads, length, head width); `values` likewise.
        values: See `keys`.

    Returns:
        Shape (count, D), float32.
    """
    count, num_heads, head_width = queries.shape
    length = keys.shape[1]
    by_head = queries.transpose(0, 1).contiguous()
    scores = torch.bmm(by_head, keys.transpose(1, 2)) * head_width**-0.5
    if count > 1:
        future = torch.ones(count, length, dtype=torch.bool).triu(diagonal=length - count + 1)
        scores = scores.masked_fill(future, float("-inf"))
    mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
    return mixed.transpose(0, 1).reshape(count, num_heads * head_width)
