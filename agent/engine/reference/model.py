"""What the reference engine needs from a model: the calls of one decoder step, cut where expert parallelism cuts it.

A model fits by its shape alone (`typing.Protocol`); `examples.tiny_moe.TinyMoe` does. For tokens to be bit-equal to those
of one process without expert parallelism, every method must give a row the same bits in any batch (`docs/exactness.md`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from eplb_service.errors import InvalidInputError


class ExpertShape(Protocol):
    """The size that slots and the exchange read from a model's configuration."""

    @property
    def num_experts(self) -> int:
        """E, in every MoE layer."""
        ...


class ModelShape(ExpertShape, Protocol):
    """The sizes that the engine reads from a model's configuration."""

    @property
    def num_layers(self) -> int:
        """Layers, dense ones included."""
        ...

    @property
    def top_k(self) -> int:
        """Experts chosen for each token."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of one request."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        ...


class Routed(Protocol):
    """What a router says about n rows."""

    @property
    def inputs(self) -> Tensor:
        """Rows for the experts. Shape (n, D)."""
        ...

    @property
    def experts(self) -> Tensor:
        """Logical experts, in choice order. Shape (n, k), int64."""
        ...

    @property
    def gates(self) -> Tensor:
        """Weight of each choice. Shape (n, k)."""
        ...


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [start, start + count) of a batch belong to the request of `cache`: a whole prompt, or one token."""

    cache: Any
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Names the random numbers of one sampled token. position: tokens of the request before it."""

    request_id: int
    position: int


class ExpertModel(Protocol):
    """The part of a model that slots and the exchange need: experts, one by one."""

    @property
    def config(self) -> ExpertShape:
        """Its sizes."""
        ...

    def moe_layer_ids(self) -> Sequence[int]:
        """Absolute ids of the layers with experts, ascending."""
        ...

    def expert_tensors(self, layer_id: int) -> Mapping[str, Tensor]:
        """The checkpoint's tensors of a layer's experts, by name. Shapes (E, …)."""
        ...

    def run_expert(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """One expert's tensors (no leading axis) on rows (m, D) to (m, D)."""
        ...


class RequestCache(Protocol):
    """Keys and values of one request."""

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        ...

    def truncate(self, length: int) -> None:
        """Forget what any layer holds beyond so many tokens: a step that failed half way is taken again."""
        ...


class ServedModel(ExpertModel, Protocol):
    """A loaded model. Holds no state of any request. Spans and draws are `RowSpan` and `TokenDraw`, read by attribute."""

    @property
    def config(self) -> ModelShape:
        """Its sizes; a dataclass, so that it enters the digest whole."""
        ...

    def new_cache(self) -> Any:
        """Empty keys and values of one request, a `RequestCache`."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Shape (n,), int64, to (n, D)."""
        ...

    def attend(self, layer_id: int, hidden: Tensor, spans: Sequence[Any]) -> Tensor:
        """Attention with its residual. Shape (n, D) to (n, D); adds to the caches."""
        ...

    def route(self, layer_id: int, hidden: Tensor) -> Routed:
        """Choose experts for each row of (n, D)."""
        ...

    def combine(self, hidden: Tensor, outputs: Tensor, gates: Tensor) -> Tensor:
        """Outputs (n, k, D) weighed by gates (n, k), in choice order, added to hidden (n, D)."""
        ...

    def next_tokens(self, hidden: Tensor, draws: Sequence[Any]) -> Sequence[int]:
        """Sample one token for each row of (m, D)."""
        ...


ModelFactory = Callable[[], ServedModel]


def resolve(reference: str) -> Callable[..., Any]:
    """The callable that `module:name` names.

    Raises:
        InvalidInputError: not of that form, no such module, no such name, or not callable.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise InvalidInputError(f"{reference!r} does not name a callable; write it as package.module:callable")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise InvalidInputError(
            f"{reference!r}: the module cannot be imported ({error}); check its name and sys.path"
        ) from error
    except AttributeError:
        raise InvalidInputError(f"{reference!r}: module {module_name} has no {name!r}") from None
    if not callable(found):
        raise InvalidInputError(f"{reference!r} is a {type(found).__name__}, not a callable")
    return cast("Callable[..., Any]", found)


def model_digest(model: ServedModel) -> str:
    """Identity of architecture and checkpoint: must be equal on all ranks of a group. Hex BLAKE2b-16.

    Covers the configuration, every tensor of every expert, and, since other tensors have no names here, what embedding,
    attention, router and head make of one fixed prompt. Raises InvalidInputError when the configuration is no dataclass.
    """
    state = hashlib.blake2b(digest_size=16)
    config = model.config
    fields: Any = config
    if not dataclasses.is_dataclass(fields) or isinstance(fields, type):
        raise InvalidInputError(f"the model's configuration is a {type(config).__name__}; it must be a dataclass instance")
    state.update(repr(sorted(dataclasses.asdict(fields).items())).encode())
    for layer_id in model.moe_layer_ids():
        for name, tensor in sorted(model.expert_tensors(layer_id).items()):
            update_digest(state, f"{layer_id}.{name}", tensor)
    tokens = torch.arange(min(16, config.vocabulary, config.context), device=device_of(model))
    hidden = model.embed(tokens)
    cache = model.new_cache()
    moe_layer_ids = set(model.moe_layer_ids())
    for layer_id in range(config.num_layers):
        hidden = model.attend(layer_id, hidden, [RowSpan(cache, 0, len(tokens))])
        if layer_id in moe_layer_ids:
            routed = model.route(layer_id, hidden)
            update_digest(state, f"{layer_id}.gates", routed.gates)
    update_digest(state, "hidden", hidden)
    state.update(repr(list(model.next_tokens(hidden, [TokenDraw(0, row) for row in range(len(tokens))]))).encode())
    return state.hexdigest()


def update_digest(state: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    """Add a tensor to a digest: name, type, shape and bytes."""
    state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def expert_digest(tensors: Mapping[str, Tensor]) -> int:
    """Digest of all tensors of one expert (no leading axis), names in order. Unsigned 63 bits, BLAKE2b-8."""
    state = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        update_digest(state, name, tensors[name])
    return int.from_bytes(state.digest(), "little") & (1 << 63) - 1


def checkpoint_digests(model: ExpertModel, layer_id: int) -> tuple[int, ...]:
    """`expert_digest` of every logical expert of a layer, as the checkpoint has it. Length E."""
    tensors = model.expert_tensors(layer_id)
    return tuple(
        expert_digest({name: tensor[expert] for name, tensor in tensors.items()}) for expert in range(model.config.num_experts)
    )


def device_of(model: ExpertModel) -> torch.device:
    """Where the model's weights are: the engine keeps its slots and tables there too."""
    first = next(iter(model.expert_tensors(model.moe_layer_ids()[0]).values()))
    return first.device
