"""One rank of SGLang's real expert location and its updater, with our plug-in loaded by SGLang's own loader of plug-ins.

Real: all of `sglang.srt.eplb` that is imported here (metadata, updater, algorithms) and `sglang.srt.plugins`. Stood in for: the
runtime context (settings), process groups (gloo), the model's shape. Layer 0 is dense.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eplb_service.formats.sglang_map import map_bytes
from eplb_service.ids import RankId
from eplb_service.placement import Table
from tests.adviser_doubles import shuffled_map
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
from tests.engines.stand_ins import put_in_place

MODEL = "model"
NUM_LAYERS = 4
MOE_LAYERS = (1, 2, 3)
STEPS = 3


def loads_of(seed: int) -> npt.NDArray[np.int64]:
    """Tokens of each expert in each step, all ranks together; layer 0 has none. Shape (steps, L, E)."""
    loads = np.random.default_rng(seed).integers(10, 100, (STEPS, NUM_LAYERS, NUM_LOGICAL)) * 2 + 1
    loads[:, 0] = 0
    return loads


def file_map(seed: int) -> npt.NDArray[np.int32]:
    """What the engine is started with by a file of ours: MoE layers of shape (3, P)."""
    return shuffled_map(seed, len(MOE_LAYERS), NUM_LOGICAL, NUM_PHYSICAL, NUM_RANKS)


def start(place: RankPlace, said: list[str]) -> Interval:
    """The engine of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{place.rendezvous}", rank=place.rank, world_size=NUM_RANKS)
    group = types.SimpleNamespace(cpu_group=dist.new_group(backend="gloo"))
    moe = types.SimpleNamespace(
        eplb_algorithm="deepseek", ep_num_redundant_experts=NUM_PHYSICAL - NUM_LOGICAL, ep_dispatch_algorithm="static",
        moe_a2a_backend="deepep", ep_join_mode=None, init_expert_location="trivial",
    )  # fmt: skip
    parallel = types.SimpleNamespace(
        ep_size=NUM_RANKS, nnodes=1, elastic_ep_initial_size=None, tp_rank=place.rank, tp_size=NUM_RANKS, pp_rank=0, pp_size=1,
        ep_join_rank_offset=0,
    )  # fmt: skip
    arguments = types.SimpleNamespace(**vars(moe), **vars(parallel), device="cpu", model_path="org/Model")
    resources = types.SimpleNamespace(expert_location_metadata=None)
    unset = types.SimpleNamespace(get=lambda: None)
    elastic = type("ElasticEPStateManager", (), {"instance": staticmethod(lambda: None)})
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = types.ModuleType("einops")  # used for metrics only
    put_in_place(
        place.modules,
        "sglang",
        place.release,
        {
            "sglang.srt.runtime_context": {
                "get_exec": lambda: types.SimpleNamespace(moe=arguments),
                "get_parallel": lambda: parallel,
                "get_device": lambda: types.SimpleNamespace(device="cpu"),
                "get_resources": lambda: resources,
                "get_model": lambda: types.SimpleNamespace(model_path="org/Model"),
                "get_server_args": lambda: arguments,
            },
            "sglang.srt.server_args": {"get_global_server_args": lambda: arguments},
            "sglang.srt.environ": {
                "envs": types.SimpleNamespace(
                    SGLANG_PLUGINS=unset,
                    SGLANG_PLATFORM=unset,
                    SGLANG_EPLB_P2P_BATCH_CHUNK_SIZE=types.SimpleNamespace(get=lambda: 32),
                )
            },
            "sglang.srt.elastic_ep.elastic_ep": {
                "ElasticEPStateManager": elastic,
                "elastic_expanded_world_enabled": lambda: False,
            },
            "sglang.srt.utils": {
                "get_bool_env_var": lambda _name: False,
                "get_int_env_var": lambda _name, default: default,
                "is_hip": lambda: False,
            },
            "sglang.srt.distributed.parallel_state": {
                "get_tp_group": lambda: group,
                "get_pp_group": lambda: types.SimpleNamespace(rank_in_group=0, world_size=1),
            },
            "sglang.srt.model_loader": {"get_model_architecture": lambda _config: (_ModelClass, "")},
        },
    )
    listen(said, "sglang.eplb_adviser")
    sys.path.insert(0, str(place.plugins))
    importlib.import_module("sglang.srt.plugins").load_plugins()
    updater = importlib.import_module("sglang.srt.eplb.expert_location_updater").ExpertLocationUpdater()
    engine = _Engine(place, importlib.import_module("sglang.srt.eplb.expert_location"), updater, arguments)
    return lambda order: engine.interval(order, said)


class _ModelClass:
    """The model's class as the metadata asks it."""

    @staticmethod
    def get_model_config_for_expert_location(_config: object) -> Any:
        """Its shape."""
        location = importlib.import_module("sglang.srt.eplb.expert_location")
        return location.ModelConfigForExpertLocation(num_layers=NUM_LAYERS, num_logical_experts=NUM_LOGICAL, num_groups=None)


def _manager(weights: dict[int, list[torch.Tensor]]) -> Any:
    """SGLang's own manager, unborn but for the model that it looks for its layers in."""
    of_release = importlib.import_module("sglang.srt.eplb.eplb_manager").EPLBManager
    manager = object.__new__(of_release)
    model = types.SimpleNamespace(routed_experts_weights_of_layer=weights)
    manager._rebalance_layers_per_chunk = None
    if "get_model" in inspect.signature(of_release.__init__).parameters:
        manager._get_model = lambda: model
    else:
        manager._model_runner = types.SimpleNamespace(model=model)
    return manager


def _rebalance(self: Any, engine: _Engine, logical_count: torch.Tensor) -> None:
    """The manager's steps from counts to weights, the manager as `self`. Its own code finds the model where it was put."""
    assert self._compute_update_layer_ids_chunks() == [list(MOE_LAYERS)]
    target = engine.location.ExpertLocationMetadata.init_by_eplb(*engine.given, logical_count)
    missing = engine.updater.update(engine.weights, target, list(MOE_LAYERS), nnodes=1, rank=engine.rank)
    assert not missing


class _Engine:
    """The steps that SGLang's manager takes at a rebalance, with its own code for each."""

    def __init__(self, place: RankPlace, location: Any, updater: Any, arguments: Any) -> None:
        self._place, self.location, self.updater, self._arguments = place, location, updater, arguments
        self.rank = place.rank
        config = types.SimpleNamespace(hf_config=None)
        takes_arguments = "server_args" in inspect.signature(location.compute_initial_expert_location_metadata).parameters
        self.given = (arguments, config) if takes_arguments else (config,)
        self.weights: dict[int, list[torch.Tensor]] = {}
        self._manager = _manager(self.weights)

    def interval(self, order: Order, said: list[str]) -> RankResult:
        kind, seed = order
        begun = time.monotonic()
        logical_count = torch.from_numpy(loads_of(seed) if kind != "idle" else np.zeros_like(loads_of(0)))
        if kind == "first":  # as `--init-expert-location` with counts: there is no map yet
            self._load(self.location.ExpertLocationMetadata.init_by_eplb(*self.given, logical_count))
        elif kind == "file":
            self._arguments.init_expert_location = str(self._written(seed))
            self._load(self.location.compute_initial_expert_location_metadata(*self.given, self._place.rank))
        else:
            _rebalance(self._manager, self, logical_count)
        seconds = time.monotonic() - begun
        metadata = self.location.get_global_expert_location_metadata()
        rows = metadata.physical_to_logical_map_cpu.numpy()[list(MOE_LAYERS)].copy()
        return RankResult(maps={MODEL: rows}, problem=self._problem(metadata), seconds=seconds, said=list(said))

    def _written(self, seed: int) -> Path:
        """A placement file of ours, as `eplb plan` writes it for SGLang."""
        table = Table(
            model=MODEL, num_logical=NUM_LOGICAL, layer_ids=MOE_LAYERS, rank_ids=tuple(map(RankId, range(NUM_RANKS))),
            physical_to_logical=file_map(seed),
        )  # fmt: skip
        path = self._place.rendezvous.parent / f"placement-{self._place.rank}.json"
        path.write_bytes(map_bytes(table, NUM_LAYERS))
        return path

    def _load(self, metadata: Any) -> None:
        """The model's loader: each slot gets the weights of the expert that the map names."""
        if hasattr(self.location, "_global_expert_location_metadata"):  # older releases keep it in the module, and set it once
            self.location._global_expert_location_metadata = metadata
        else:
            self.location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
        first = self._place.rank * SLOTS
        for layer in MOE_LAYERS:
            held = metadata.physical_to_logical_map_cpu[layer, first : first + SLOTS].tolist()
            self.weights[layer] = [
                torch.stack([weights_of(0, layer, index, expert) for expert in held]) for index in range(len(WIDTHS))
            ]

    def _problem(self, metadata: Any) -> str:
        for layer in MOE_LAYERS:
            row = metadata.physical_to_logical_map_cpu[layer].tolist()
            for slot in range(SLOTS):
                expert = row[self._place.rank * SLOTS + slot]
                for index in range(len(WIDTHS)):
                    if not torch.equal(self.weights[layer][index][slot], weights_of(0, layer, index, expert)):
                        return (
                            f"layer {layer} rank {self._place.rank} slot {slot} tensor {index} is not that of expert {expert}"
                        )
            for expert in range(NUM_LOGICAL):
                slots = [slot for slot, there in enumerate(row) if there == expert]
                sent_to = int(metadata.logical_to_rank_dispatch_physical_map[layer, expert])
                if sent_to not in slots:
                    return f"layer {layer}: tokens of expert {expert} go to slot {sent_to}; it is in {slots}"
        return ""
