"""Where a transformers model has its experts, and whether they are of the one shape that this engine can spread over ranks.

From version 5 on, transformers stacks the experts of a layer in one module, whatever the architecture:

    experts(hidden_states (n, D), top_k_index (n, k), top_k_weights (n, k)) -> (n, D)

with every tensor of shape (E, …). That is all that is asked for: the module itself computes each expert here too, from a
slot's tensors in place of the E. Whether it really treats (token, choice) pairs one by one is tried, not believed (`try_out`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agent.engine.reference.model import ExpertShape
from eplb_service.errors import InvalidInputError

WANTED = (
    "an `experts` module with an integer `num_experts`, tensors that all have that many rows, and"
    " forward(hidden_states, top_k_index, top_k_weights)"
)
_PROBE_TOKENS = 6
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_LOW = 5e-2
"""Largest difference, in parts of the largest output, that rounding may make where bits are not asked for; half precision."""


@dataclass(frozen=True, slots=True)
class Shape:
    """E of one layer."""

    num_experts: int


class StackedExperts:
    """The experts of one layer as the model was loaded; an `ExpertModel` of that layer alone.

    `release` lets go of the checkpoint's tensors once slots are filled from them.
    """

    def __init__(self, layer_id: int, path: str, module: nn.Module) -> None:
        """See `find_experts`. path: the module's name within the model."""
        self.layer_id, self.path = layer_id, path
        self._module = module
        self._num_experts = _num_experts(module)
        self._tensors = dict(module.named_parameters())

    @property
    def config(self) -> ExpertShape:
        """Its size."""
        return Shape(self._num_experts)

    def moe_layer_ids(self) -> Sequence[int]:
        """This layer."""
        return [self.layer_id]

    def expert_tensors(self, layer_id: int) -> Mapping[str, Tensor]:  # noqa: ARG002 - has one layer
        """The checkpoint's tensors, by name. Shapes (E, …)."""
        return {name: tensor.data for name, tensor in self._tensors.items()}

    def run_expert(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """One expert on rows (m, D) to (m, D), by the model's own code.

        A single row goes with a copy of itself: matrix products of one row take another path, with other rounding.
        """
        rows = inputs.expand(2, -1) if inputs.shape[0] == 1 else inputs
        index = torch.zeros(rows.shape[0], 1, dtype=torch.int64, device=rows.device)
        stacked = {name: tensors[name][None] for name in self._tensors}
        self._module.num_experts = 1  # type: ignore[assignment]  # a plain attribute; torch's stub knows tensors and modules
        try:
            outputs: Tensor = torch.func.functional_call(self._module, stacked, (rows, index, rows.new_ones(index.shape)))
        finally:
            self._module.num_experts = self._num_experts  # type: ignore[assignment]
        return outputs[: inputs.shape[0]]

    def run_whole(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """All experts, as the model does without this engine. Shapes (n, D), (n, k), (n, k) to (n, D)."""
        outputs: Tensor = self._module(hidden, index, weights)
        return outputs

    def release(self, slots: Mapping[str, Tensor]) -> None:
        """Have the module hold the slots' tensors, shapes (S, …), in place of the checkpoint's."""
        for name, tensor in self._tensors.items():
            tensor.data = slots[name]


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum over choices, weighed, in choice order: what transformers' `batched_mm` does. (n, k, D), (n, k) to (n, D)."""
    num_tokens, top_k, width = outputs.shape
    weighted = outputs.reshape(-1, width) * weights.reshape(-1, 1)
    return weighted.view(num_tokens, top_k, width).sum(dim=1).to(outputs.dtype)


def find_experts(model: nn.Module) -> list[StackedExperts]:
    """The experts of every MoE layer, by ascending layer id (the layer's index in the decoder, dense layers counted).

    Raises InvalidInputError when the model has none, or some that are not of the wanted shape.
    """
    path, layers = _layers_with_experts(model)
    found = []
    for layer_id, layer in enumerate(layers):
        named = [(name, module) for name, module in layer.named_modules() if _is_called_experts(name)]
        if len(named) > 1:
            names = [name for name, _ in named]
            raise InvalidInputError(f"layer {layer_id} of {_name(model)} has {len(named)} experts modules ({names}), not one")
        for name, module in named:
            objection = _objection(module)
            if objection:
                raise InvalidInputError(
                    f"layer {layer_id} of {_name(model)}: {type(module).__name__} {objection}; this engine looks for {WANTED}"
                )
            found.append(StackedExperts(layer_id, f"{path}.{layer_id}.{name}", module))
    sizes = {experts.config.num_experts for experts in found}
    if len(sizes) > 1:
        raise InvalidInputError(
            f"the layers of {_name(model)} have {sorted(sizes)} experts; this engine takes one number for all"
        )
    return found


def try_out(experts: StackedExperts, *, top_k: int, width: int, exact: bool) -> None:
    """Run the layer as the model does, and pair by pair as this engine does, and compare.

    Args:
        experts: The layer, before `release`.
        top_k: Choices of each token.
        width: D.
        exact: Whether every bit must be the same; otherwise rounding may differ.

    Raises:
        InvalidInputError: they differ: these experts do something else, or sum in another order.
    """
    tensors = experts.expert_tensors(experts.layer_id)
    first = next(iter(tensors.values()))
    num_experts, draw = experts.config.num_experts, torch.Generator().manual_seed(experts.layer_id)
    hidden = torch.randn(_PROBE_TOKENS, width, generator=draw).to(first)
    index = torch.rand(_PROBE_TOKENS, num_experts, generator=draw).topk(top_k).indices.to(first.device)
    weights = torch.rand(_PROBE_TOKENS, top_k, generator=draw).to(first)
    whole = experts.run_whole(hidden, index, weights)
    pairs = hidden.repeat_interleave(top_k, 0)
    views = [{name: tensor[expert] for name, tensor in tensors.items()} for expert in range(num_experts)]
    alone = torch.cat([experts.run_expert(views[e], row[None]) for e, row in zip(index.flatten().tolist(), pairs, strict=True)])
    grouped = torch.empty_like(alone)
    for expert in sorted(set(index.flatten().tolist())):
        places = (index.flatten() == expert).nonzero().flatten()
        grouped[places] = experts.run_expert(views[expert], pairs[places])
    for outputs, what in ((alone, "one row at a time"), (grouped, "all rows of an expert at a time")):
        combined = combine(outputs.view(_PROBE_TOKENS, top_k, width), weights)
        difference = float((combined - whole).abs().max()) / max(float(whole.abs().max()), 1e-30)
        if exact and not torch.equal(combined, whole):
            raise InvalidInputError(
                f"layer {experts.layer_id}: {what}, its experts give other bits than the model's own layer (difference"
                f" {difference:.1e} of the largest output); load the model with experts_implementation='batched_mm', or set"
                " exact to false where rounding may differ"
            )
        if not difference <= _TOLERANCE.get(first.dtype, _TOLERANCE_LOW):
            raise InvalidInputError(
                f"layer {experts.layer_id}: {what}, its experts give other outputs than the model's own layer (difference"
                f" {difference:.1e} of the largest output), so they are no sum over choices of weight times expert"
            )


def _layers_with_experts(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The one list of layers that has experts, with its path. Raises InvalidInputError when there is none, or several."""
    lists = [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] == "layers"]
    stacks = [(path, module) for path, module in lists if isinstance(module, nn.ModuleList)]
    found = [stack for stack in stacks if any(_is_called_experts(name) for name, _ in stack[1].named_modules())]
    if len(found) == 1:
        return found[0]
    looked = ", ".join(f"{path} ({len(stack)})" for path, stack in stacks) or "none"
    raise InvalidInputError(
        f"{len(found)} lists of layers of {_name(model)} have experts, among: {looked}; this engine takes one, and looks in it"
        f" for {WANTED}"
    )


def _is_called_experts(path: str) -> bool:
    return path.rpartition(".")[2] == "experts"


def _objection(module: nn.Module) -> str:
    """Why these are not stacked experts; empty when they are."""
    num_experts = _num_experts(module)
    if num_experts < 1:
        return "has no integer num_experts"
    if not (parameters := dict(module.named_parameters())):
        return "has no tensors of its own"
    for name, tensor in (*parameters.items(), *module.named_buffers()):
        if tensor.dim() < 2 or tensor.shape[0] != num_experts:
            return f"has {num_experts} experts and a tensor {name} of shape {tuple(tensor.shape)}"
    if any(True for _ in module.named_buffers()):
        return "has buffers beside its parameters"
    inputs = list(inspect.signature(type(module).forward).parameters)
    if len(inputs) != 4:
        return f"has forward({', '.join(inputs[1:])})"
    return ""


def _num_experts(module: nn.Module) -> int:
    number = getattr(module, "num_experts", None)
    return number if isinstance(number, int) else 0


def _name(model: nn.Module) -> str:
    """The model's class, with the version of the package that it comes from."""
    package = type(model).__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "of unknown version")
    return f"{type(model).__name__} ({package} {version})"
