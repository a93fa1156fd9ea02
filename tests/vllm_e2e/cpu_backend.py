"""TEST ONLY. What vLLM's CPU backend lacks for expert parallelism with EPLB, so that the rest of vLLM can run as it is.

Installed as a plug-in of vLLM (`vllm.general_plugins`) into the processes of this test alone, never shipped. Each patch stands
for something that a device backend of vLLM has and its CPU backend (0.32) has not; nothing of EPLB's own code is touched, and
nothing of what our adviser plug-in uses:

    platform      the configuration refuses EPLB off CUDA, ROCm and XPU
    expert map    the CPU kernel reads slots of other ranks (and crashes): here each rank computes its own, others weigh nothing
    data          `all_gatherv` and `reduce_scatterv` of the CPU communicator: tokens of all data-parallel ranks, over gloo
    all-reduce    gloo in the place of shared memory, which spins and starves ranks that share a core
    routing       from experts to slots, and counting: on a CPU vLLM has a stub that returns experts as if they were slots
    state         the CPU model runner makes no `EplbState`
    events        there is no accelerator whose events and streams could be waited for

EPLB_TEST_ROUTING says which routing: `vllm` (the default: as vLLM's device kernel does), or `stub`: vLLM's CPU stub as it is.
With the stub nothing is counted, and once experts have moved answers are silently wrong: it is this test's negative control.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from tests.cpu_device import Event

ROUTING = "EPLB_TEST_ROUTING"
AS_VLLM, STUB = "vllm", "stub"
KNUTH = 2654435769
"""VLLM's device kernel spreads tokens over replicas by this multiplicative hash of the token's index."""
_dist: Any = torch.distributed


def install() -> None:
    """Patch this process. VLLM calls it in every one of its processes, before it makes its configuration or a worker."""
    _ROUTINGS.setdefault(STUB, _router().eplb_map_to_physical_and_record)
    _allow_eplb()
    _compute_own_experts()
    _exchange_over_gloo()
    route(os.environ.get(ROUTING, AS_VLLM))
    _make_state()


def _allow_eplb() -> None:
    parallel = importlib.import_module("vllm.config.parallel")
    platform: Any = parallel.current_platform

    class AllowedPlatform:
        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    vars(parallel)["current_platform"] = AllowedPlatform()


def _compute_own_experts() -> None:
    experts: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    original = experts.apply

    def apply(self: Any, **given: Any) -> None:
        own = given["expert_map"]
        if own is not None:
            local = own[given["topk_ids"].long()]
            given["topk_weights"] = torch.where(local >= 0, given["topk_weights"], 0.0)
            given["topk_ids"] = local.clamp(min=0).to(torch.int32)
        original(self, **given)

    experts.apply = apply


def _exchange_over_gloo() -> None:
    communicator: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator").CpuCommunicator

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(given, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in given]
        counts = sizes or [len(given)] * self.world_size
        own = given.new_zeros((max(counts), *given.shape[1:]))  # gloo wants the same of all
        own[: len(given)] = given
        parts = [torch.empty_like(own) for _ in counts]
        _dist.all_gather(parts, own, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatterv(self: Any, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        counts = sizes or [len(given) // self.world_size] * self.world_size
        total = given.contiguous().clone()
        _dist.all_reduce(total, group=self.device_group)
        begin = sum(counts[: self.rank_in_group])
        return total[begin : begin + counts[self.rank_in_group]].contiguous()

    communicator.all_gatherv = all_gatherv
    communicator.reduce_scatterv = reduce_scatterv
    communicator._all_group_ranks_share_shm_group_name = lambda _self: False  # the condition of its shared memory


def route(routing: str) -> None:
    """From experts to slots, from the next forward on. Raises ValueError for a routing that is not known."""
    if routing not in _ROUTINGS:
        raise ValueError(f"routing {routing!r} is not known; {', '.join(_ROUTINGS)} are")
    vars(_router())["eplb_map_to_physical_and_record"] = _ROUTINGS[routing]


def _router() -> Any:
    return importlib.import_module("vllm.model_executor.layers.fused_moe.router.base_router")


def _to_slots_and_count(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    experts = topk_ids.long()
    token = torch.arange(len(experts)).unsqueeze(1)
    replica = ((token * KNUTH) & 0xFFFFFFFF) % logical_replica_count[experts].clamp(min=1)
    slots = logical_to_physical_map[experts, replica]
    if bool(record_enabled):
        real = slots if num_unpadded_tokens is None else slots[: int(num_unpadded_tokens)]
        expert_load_view += torch.bincount(real.reshape(-1), minlength=len(expert_load_view)).to(expert_load_view.dtype)
    return slots.to(topk_ids.dtype)


_ROUTINGS: dict[str, Any] = {AS_VLLM: _to_slots_and_count}
"""By name; vLLM's own stub comes in when it is replaced."""


def _make_state() -> None:
    """The CPU worker's modules patch torch when they are imported; so what they leave out is put in once a model is loaded."""
    worker: Any = importlib.import_module("vllm.v1.worker.cpu_worker")
    runner = worker.CPUModelRunner
    load_model = runner.load_model

    def load_model_and_state(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if not self.parallel_config.enable_eplb:
            return
        torch_module: Any = torch
        torch_module.Event = Event
        torch_module.accelerator.current_stream = lambda *_args: Event()
        interfaces = importlib.import_module("vllm.model_executor.models.interfaces")
        state = importlib.import_module("vllm.distributed.eplb.eplb_state").EplbState(self.parallel_config, self.device)
        self._moe_model = interfaces.get_mixture_of_experts_model(self.model)
        state.add_model(self._moe_model, self.model_config)
        self.eplb_state = state

    runner.load_model = load_model_and_state
