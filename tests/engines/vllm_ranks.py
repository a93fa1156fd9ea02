"""One rank of vLLM's real `EplbState`, with our plug-in loaded by vLLM's own loader of plug-ins.

Real: all of `vllm.distributed.eplb` (state, policy registry, transfer, asynchronous worker) and `vllm.plugins`, of one release.
Stood in for: configuration, process groups (gloo), logger, platform, events and streams. Weights are made so that each tensor
of each expert of each layer can be told from every other.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import types
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from tests.engines.ranks import (
    NUM_LOGICAL,
    NUM_PHYSICAL,
    NUM_RANKS,
    SLOTS,
    WIDTHS,
    Interval,
    Order,
    RankPlace,
    RankResult,
    listen,
    weights_of,
)  # fmt: skip
from tests.engines.stand_ins import init_logger, put_in_place

LAYERS = {"target": 3, "drafter": 1}
WINDOW_STEPS = 4
INTERVAL_STEPS = 1 << 30
HOT = 1000
"""Seeds from here on: one expert, the seed less this, has ten times the tokens of the others."""


def loads_of(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens of each expert, by model. Shape (L, E), int64; multiples of no number of ranks."""
    if seed >= HOT:
        skewed = {model: np.full((layers, NUM_LOGICAL), 2001) for model, layers in LAYERS.items()}
        for load in skewed.values():
            load[:, seed - HOT] = 20_001
        return skewed
    random = np.random.default_rng(seed)
    return {model: random.integers(100, 1000, (layers, NUM_LOGICAL)) * 2 + 1 for model, layers in LAYERS.items()}


class Model:
    """A mixture of experts as `EplbState` sees one."""

    def __init__(self, name: str, rank: int) -> None:
        self.num_moe_layers = LAYERS[name]
        self.num_expert_groups = 1
        self.num_logical_experts = self.num_routed_experts = NUM_LOGICAL
        self.num_physical_experts = NUM_PHYSICAL
        self.num_redundant_experts = NUM_PHYSICAL - NUM_LOGICAL
        self.num_local_physical_experts = SLOTS
        self.moe_layers: list[Any] = []
        first = [slot % NUM_LOGICAL for slot in range(rank * SLOTS, (rank + 1) * SLOTS)]
        self.expert_weights = [
            [
                torch.stack([weights_of(list(LAYERS).index(name), layer, index, expert) for expert in first])
                for index in range(len(WIDTHS))
            ]
            for layer in range(self.num_moe_layers)
        ]

    def set_eplb_state(self, *_args: object) -> None:
        """Models keep views of the tables; here the state's own are looked at."""


def start(place: RankPlace, said: list[str]) -> Interval:
    """The engine of one rank."""
    state = _state(place, said)
    return lambda order: _interval(place, state, order, said)


def _state(place: RankPlace, said: list[str]) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{place.rendezvous}", rank=place.rank, world_size=NUM_RANKS)
    group = types.SimpleNamespace(
        cpu_group=dist.new_group(backend="gloo"), device_group=dist.new_group(backend="gloo"),
        rank=place.rank, rank_in_group=place.rank, world_size=NUM_RANKS, device_communicator=None,
    )  # fmt: skip
    eplb_group = types.SimpleNamespace(
        cpu_group=dist.new_group(backend="gloo"), device_group=dist.new_group(backend="gloo"),
        rank=place.rank, rank_in_group=place.rank, world_size=NUM_RANKS, device_communicator=None,
    )  # fmt: skip
    one_stage = types.SimpleNamespace(rank_in_group=0, world_size=1)
    groups: dict[str, Any] = {
        "get_ep_group": lambda: group,
        "get_pp_group": lambda: one_stage,
        "get_node_count": lambda: 1,
        "in_the_same_node_as": lambda *_args: [True] * NUM_RANKS,
        "is_local_first_rank": lambda: place.rank == 0,
        "GroupCoordinator": types.SimpleNamespace,
        "__only__": True,
    }
    if _release(place) >= (0, 17):
        groups["get_eplb_group"] = lambda: eplb_group
    platform = types.SimpleNamespace(is_rocm=lambda: False, is_xpu=lambda: False, is_cuda=lambda: False)
    put_in_place(
        place.modules,
        "vllm",
        place.release,
        {
            "vllm.logger": {"init_logger": init_logger},
            "vllm.envs": {"VLLM_PLUGINS": None},
            "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
            "vllm.config.parallel": {"EPLBPolicyOption": Literal["default"]},
            "vllm.distributed.parallel_state": groups,
            "vllm.platforms": {"current_platform": platform},
            "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
            "vllm.utils.torch_utils": {"PIN_MEMORY": False},
            "vllm.distributed.nixl_utils": {"NixlWrapper": None},
        },
    )
    listen(said, "vllm.eplb_adviser", "vllm.distributed.eplb.async_worker")
    sys.path.insert(0, str(place.plugins))
    importlib.import_module("vllm.plugins").load_general_plugins()
    balancer = types.SimpleNamespace(
        window_size=WINDOW_STEPS, step_interval=INTERVAL_STEPS, use_async=place.is_async, policy="default",
        communicator="torch_gloo", log_balancedness_interval=1, log_balancedness=False, migration_batching_enabled=False,
    )  # fmt: skip
    parallel = types.SimpleNamespace(
        eplb_config=balancer, enable_elastic_ep=False, data_parallel_size=NUM_RANKS, num_ubatches=1
    )
    state = importlib.import_module("vllm.distributed.eplb.eplb_state").EplbState(parallel, torch.device("cpu"))
    state.device_index = state.cuda_device_index = 0
    for name in LAYERS:
        config = types.SimpleNamespace(model=name, compute_hash=lambda name=name: name)
        state.add_model(Model(name, place.rank), config)
    state.expert_rearrangement_step = 0
    if place.is_async:
        state.start_async_loop()
    return state


def _release(place: RankPlace) -> tuple[int, ...]:
    return tuple(int(part) for part in place.release.split(".")[:2])


def _interval(place: RankPlace, state: Any, order: Order, said: list[str]) -> RankResult:
    """One rebalancing interval: this rank's part of the load, then what the engine does at its end."""
    kind, seed = order
    begun = time.monotonic()
    if kind == "profile":
        state.step(is_profile=True)
    else:
        if kind == "grow":
            _empty_last_rank(place.rank, state)
        _count_tokens(place.rank, state, seed)
        with torch.inference_mode(not place.is_async):  # as in a forward
            state.rearrange()
        deadline = time.monotonic() + 60.0
        while place.is_async and any(model.rebalanced for model in state.model_states.values()):
            state.step(is_dummy=True)
            if time.monotonic() > deadline:
                return RankResult(maps={}, problem="the engine's worker did not finish in 60 s", seconds=60.0, said=list(said))
    seconds = time.monotonic() - begun
    maps = {name: model.physical_to_logical_map.numpy().copy() for name, model in state.model_states.items()}
    problem = next(filter(None, (_problem(place.rank, name, model) for name, model in state.model_states.items())), "")
    return RankResult(maps=maps, problem=problem, seconds=seconds, said=list(said))


def _empty_last_rank(rank: int, state: Any) -> None:
    """The last rank has just joined: its slots hold nothing, as when vLLM has grown by it."""
    for model in state.model_states.values():
        model.physical_to_logical_map[:, (NUM_RANKS - 1) * SLOTS :] = -1
        if rank == NUM_RANKS - 1:
            for tensors in model.model.expert_weights:
                for tensor in tensors:
                    tensor.zero_()


def _count_tokens(rank: int, state: Any, seed: int) -> None:
    """Each rank counts its own tokens over all slots: here all of an expert's on its first slot."""
    for name, load in loads_of(seed).items():
        model = state.model_states[name]
        share = load // NUM_RANKS + (load % NUM_RANKS if rank == 0 else 0)
        counted = np.zeros((LAYERS[name], NUM_PHYSICAL), dtype=np.int32)
        for layer, row in enumerate(model.physical_to_logical_map.tolist()):
            for expert in range(NUM_LOGICAL):
                counted[layer, row.index(expert)] = share[layer, expert]
        model.expert_load_window.zero_()
        model.expert_load_window[0].copy_(torch.from_numpy(counted))


def _problem(rank: int, name: str, model: Any) -> str:
    """What of a model does not follow its map: a tensor of a slot, or the tables that tokens are routed by."""
    rows = model.physical_to_logical_map
    for layer, row in enumerate(rows.tolist()):
        for slot in range(SLOTS):
            expert = row[rank * SLOTS + slot]
            for index in range(len(WIDTHS)):
                held = model.model.expert_weights[layer][index][slot]
                if not torch.equal(held, weights_of(list(LAYERS).index(name), layer, index, expert)):
                    where = f"{name} layer {layer} rank {rank} slot {slot} tensor {index}"
                    return f"{where} is not that of expert {expert}: {held.tolist()}"
        for expert in range(NUM_LOGICAL):
            slots = [slot for slot, there in enumerate(row) if there == expert]
            table = [slot for slot in model.logical_to_physical_map[layer, expert].tolist() if slot >= 0]
            if sorted(table) != slots or int(model.logical_replica_count[layer, expert]) != len(slots):
                return f"{name} layer {layer}: expert {expert} is in slots {slots}, its table says {table}"
    return ""
