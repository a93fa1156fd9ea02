"""A transformers model over the ranks of a process group: its own code, except that experts are computed where their slots are.

Every rank runs the model on its own requests; in each MoE layer its (token, choice) pairs travel to slots on all ranks and
back. So all ranks must take the same number of steps: a rank without requests takes idle ones.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agent.engine.huggingface.found import StackedExperts, combine, find_experts, try_out
from agent.engine.huggingface.port import HuggingFacePort
from agent.engine.huggingface.settings import ParallelSettings
from agent.engine.port import EngineDescription, EngineModel
from agent.engine.reference.dispatch import choose_replicas
from agent.engine.reference.engine import NoHook, StepHook
from agent.engine.reference.exchange import ExpertExchange
from agent.engine.reference.experts import LayerExperts, linear_row, load_layer
from agent.engine.reference.model import update_digest
from eplb_service.control import Address, LayerInfo
from eplb_service.errors import BrokenInvariantError, ConflictError, InvalidInputError
from eplb_service.ids import GroupId, Incarnation, LayerRef

VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Entries of a model's configuration that say nothing about what it computes, or that its tensors say too."""


@dataclass(slots=True)
class _Step:
    """A step under way. rows: shape (n,), int64: places of requests' tokens among the (B * T) of the forward pass."""

    rows: Tensor
    layers_run: int = 0


class HuggingFaceEngine:
    """One rank's model and slots, and the steps that it takes with the other ranks.

    Build it on every rank of the group at once, give the hook its `port`, and hand the hook over before the first step. From
    then on the model has slots in place of its experts: its `state_dict` is no checkpoint any more.

        engine = HuggingFaceEngine(model, settings)
        hook = Hook(engine.port, HookConfig.from_environment(os.environ))
        hook.start()
        engine.watch(hook)
        with engine.step(real):
            outputs = model(input_ids=…, attention_mask=…)
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ParallelSettings,
        *,
        group: dist.ProcessGroup | None = None,
        on_fail_stop: Callable[[str], None] | None = None,
    ) -> None:
        """Put slots in the place of the model's experts; the model must be loaded whole, and equally on all ranks.

        Args:
            model: A causal language model of transformers, in evaluation mode. It is changed in place.
            settings: The group.
            group: Its ranks, in the order of `settings.rank_ids`; None = the default group.
            on_fail_stop: See `HuggingFacePort`.

        Raises:
            InvalidInputError: settings, group and model do not fit one another, or the model's experts have another shape.
            ConflictError: the ranks hold different models or settings.
        """
        num_ranks = settings.num_ranks
        if not dist.is_initialized() or dist.get_world_size(group) != num_ranks:
            there = f"one of {dist.get_world_size(group)}" if dist.is_initialized() else "none"
            raise InvalidInputError(
                f"the settings name {num_ranks} ranks, but the process group is {there}; start as many processes"
            )
        found = find_experts(model)
        top_k, width = _sizes(model)
        num_experts = found[0].config.num_experts
        self._settings, self._group = settings, group
        self._position = dist.get_rank(group)
        self._slots = settings.slots(num_experts)
        with torch.no_grad():
            for experts in found:
                try_out(experts, top_k=top_k, width=width, exact=settings.exact)
        self._digest = model_digest(model)
        group_id = self._agree()
        self._hook: StepHook = NoHook()
        self._step: _Step | None = None
        self._empty = next(model.parameters()).new_empty(0, width)
        self._layers: dict[LayerRef, LayerExperts] = {}
        self._exchanges: dict[LayerRef, ExpertExchange] = {}
        self.boundary = 0
        self.generations: tuple[int, ...] = (0,) * len(found)
        for experts in found:
            self._take_over(model, experts)
        self.port = HuggingFacePort(
            description=self._describe(num_experts, group_id),
            layers=self._layers,
            device=self._empty.device,
            on_fail_stop=on_fail_stop,
        )

    @property
    def layers(self) -> Sequence[LayerExperts]:
        """This rank's MoE layers, ascending."""
        return list(self._layers.values())

    def watch(self, hook: StepHook) -> None:
        """Let a hook see every step from now on. It must be the same moment on all ranks: before the first step."""
        self._hook = hook

    @contextmanager
    def step(self, real: Tensor) -> Iterator[None]:
        """Around one forward pass of the model; every rank takes this step, or `idle_step`, as often as the others.

        real: shape (B, T), bool: which positions of this pass are tokens of requests. The others, padding, are neither sent to
        experts nor counted: their MoE outputs are zero, and nothing may attend to them.

        Raises BrokenInvariantError when the pass ends without having run every MoE layer once: the other ranks wait for it.
        """
        rows = real.flatten().nonzero().flatten().to(self._empty.device)
        self._begin(num_real_tokens=rows.numel())
        self._step = step = _Step(rows)
        try:
            with torch.no_grad():
                yield
        finally:
            self._step = None
        if step.layers_run != len(self._layers):
            raise BrokenInvariantError(
                f"the step at boundary {self.boundary - 1} ran {step.layers_run} MoE layers of {len(self._layers)};"
                " run the model once, and whole, within each step"
            )

    def idle_step(self) -> None:
        """A step without requests: compute this rank's experts for the other ranks."""
        self._begin(num_real_tokens=0)
        nothing = torch.empty(0, dtype=torch.int64, device=self._empty.device)
        with torch.no_grad():
            for ref, layer in self._layers.items():
                self._exchanges[ref].run(layer, self._empty, nothing, real=False)

    def anyone(self, *, has_work: bool) -> bool:
        """Whether any rank has work: all ranks ask before each step, so that all run it or none does."""
        agreed = torch.tensor([int(has_work)], device=self._empty.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._group)
        return bool(agreed.item())

    def mixture(self, ref: LayerRef, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """One MoE layer of the step under way, over all ranks. Shapes (n, D), (n, k), (n, k) to (n, D).

        Raises BrokenInvariantError outside a step.
        """
        step, layer = self._step, self._layers[ref]
        if step is None:
            raise BrokenInvariantError("the model was run outside a step; use `with engine.step(real):`, on all ranks as often")
        step.layers_run += 1
        chosen = index[step.rows].to(torch.int64)
        self._hook.record(ref, chosen)
        physical = choose_replicas(chosen.flatten(), layer, real=True)
        outputs = hidden.new_zeros(*index.shape, hidden.shape[1])
        arrived = self._exchanges[ref].run(layer, hidden[step.rows], physical, real=True)
        outputs[step.rows] = arrived.view(*chosen.shape, -1)
        return combine(outputs, weights)

    def _begin(self, *, num_real_tokens: int) -> None:
        self._hook.begin_step(num_real_tokens=num_real_tokens)
        for layer in self._layers.values():
            layer.notice_flip(self.boundary)
        live = self._hook.status.generations
        self.generations = tuple(live.get(ref, 0) for ref in self._layers)
        self.boundary += 1

    def _take_over(self, model: nn.Module, experts: StackedExperts) -> None:
        """Fill this rank's slots of one layer, and have the model ask us for it."""
        settings, num_experts = self._settings, experts.config.num_experts
        num_physical = self._slots * settings.num_ranks
        layer = load_layer(
            experts,
            experts.layer_id,
            linear_row(num_experts=num_experts, num_physical=num_physical),
            position=self._position,
            slots=self._slots,
            table_width=num_physical - num_experts + 1,  # wide enough for every map that covers all experts
            dispatch=settings.dispatch,
            nodes=settings.nodes,
        )
        experts.release(layer.slots)
        ref = LayerRef(settings.model_name, experts.layer_id)
        self._layers[ref] = layer
        self._exchanges[ref] = ExpertExchange(experts, settings.num_ranks, self._group)
        parent, _, name = experts.path.rpartition(".")
        setattr(model.get_submodule(parent), name, SpreadExperts(self, ref))

    def _agree(self) -> GroupId:
        """Compare model and settings with all ranks; returns the id of the group, which the first rank draws."""
        mine = {"model digest": self._digest, "settings": repr(self._settings)}
        everyone: list[Any] = [None] * self._settings.num_ranks
        dist.all_gather_object(everyone, (mine, secrets.randbits(62) + 1), group=self._group)
        first, group_id = everyone[0]
        for what, said in first.items():
            if said != mine[what]:
                me, other = self._settings.rank_ids[self._position], self._settings.rank_ids[0]
                raise ConflictError(f"rank {me} has {what} {mine[what]}, rank {other} has {said}; give all ranks the same")
        return GroupId(group_id)

    def _describe(self, num_experts: int, group_id: GroupId) -> EngineDescription:
        settings, layers = self._settings, self.layers
        infos = tuple(
            LayerInfo(layer_id=layer.layer_id, num_logical=num_experts, slots=layer.num_slots, expert_bytes=layer.expert_bytes)
            for layer in layers
        )
        initial = {layer.layer_id: tuple(layer.tables.physical_to_logical.tolist()) for layer in layers}
        return EngineDescription(
            deployment=settings.deployment,
            address=Address(settings.rank_ids[self._position], Incarnation(secrets.randbits(62) + 1), group_id),
            node=settings.nodes[self._position],
            group_rank_ids=settings.rank_ids,
            nodes=settings.nodes,
            phase=settings.phase,
            stage=settings.stage,
            models=(EngineModel(name=settings.model_name, digest=self._digest, layers=infos, initial=initial),),
            capacity=settings.capacity,
            dispatch=settings.dispatch,
            replica_table_width=int(layers[0].tables.logical_to_physical.shape[1]),
            rendezvous_host=settings.rendezvous_host,
            rendezvous_port=settings.rendezvous_port,
        )


class SpreadExperts(nn.Module):
    """Takes the place of a layer's experts in the model; what it is asked goes to the engine."""

    def __init__(self, engine: HuggingFaceEngine, ref: LayerRef) -> None:
        """See `HuggingFaceEngine`."""
        super().__init__()
        self._engine, self._ref = engine, ref

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers' experts. Shapes (n, D), (n, k), (n, k) to (n, D)."""
        return self._engine.mixture(self._ref, hidden_states, top_k_index, top_k_weights)


def model_digest(model: nn.Module) -> str:
    """Identity of configuration and checkpoint: must be equal on all ranks of a group. Hex BLAKE2b-16."""
    state = hashlib.blake2b(digest_size=16)
    config: Any = model.config
    kept = {name: value for name, value in config.to_dict().items() if name not in VOLATILE}
    kept["experts_implementation"] = getattr(config.get_text_config(), "_experts_implementation", None)
    state.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        update_digest(state, name, tensor)
    return state.hexdigest()


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Choices of each token, and D. Raises InvalidInputError when the configuration does not say."""
    config: Any = model.config
    text = config.get_text_config()
    top_k, width = getattr(text, "num_experts_per_tok", None), getattr(text, "hidden_size", None)
    if not isinstance(top_k, int) or not isinstance(width, int):
        raise InvalidInputError(
            f"{type(config).__name__} has num_experts_per_tok {top_k!r} and hidden_size {width!r}; this engine needs both"
        )
    return top_k, width
