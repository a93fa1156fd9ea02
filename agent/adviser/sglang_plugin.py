"""SGLang's algorithm asks the planner, by an AROUND hook on `eplb_algorithms.rebalance_experts`. Nothing else is touched.

SGLang only logs that a plug-in failed, and goes on without it. So this one proves that it is active: it says so in the log at
its first call, and in each question (`AdviceRequest.engine`). A deployment that the planner hears of is one whose hook is
active.

The algorithm is given the loads of all layers, dense ones too (their rows are 0), but not the map, which is in the engine's own
metadata. Every rank computes for itself, inside a forward. In an elastic engine one rank computes for all, or ranks are
missing: there SGLang's own algorithm answers, as it does for the first map of all.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent.adviser.adviser import Adviser
from agent.adviser.agree import Group
from agent.adviser.call import Call, Int32Array, Outcome
from agent.adviser.callers import bytes_of_experts, method_of_class
from agent.adviser.config import AdviserConfig, deployment_name
from agent.adviser.engine_copy import Carrying, on_stack
from agent.adviser.replica_tables import replica_tables
from agent.adviser.signatures import attribute, check_parameters
from eplb_service.dispatch import Dispatch
from eplb_service.errors import EplbError

MODULE = "sglang.srt.eplb.eplb_algorithms"
FUNCTION = "rebalance_experts"
PARAMETERS = (
    "tokens_per_expert", "num_physical_experts", "num_local_physical_experts", "num_groups", "num_nodes", "algorithm",
)  # fmt: skip
REGISTER_PARAMETERS = ("target", "hook", "hook_type", "source")
_MARK = "is_eplb_adviser"


def install(environ: Mapping[str, str], logger: logging.Logger) -> None:
    """Register the hook, once. A release or setting that cannot be is said, and changes nothing."""
    try:
        config = AdviserConfig.from_environment(environ)
        algorithm = attribute(importlib.import_module(MODULE), FUNCTION)
        check_parameters(algorithm, f"{MODULE}.{FUNCTION}", PARAMETERS)
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        register = attribute(attribute(registry, "HookRegistry"), "register")
        check_parameters(register, "HookRegistry.register", REGISTER_PARAMETERS)
        around = attribute(attribute(registry, "HookType"), "AROUND")
    except EplbError as error:
        logger.error("adviser: NOT installed, SGLang keeps its own algorithm: %s", error)  # noqa: TRY400  (the sentence says it)
        return
    if getattr(registry, _MARK, False):
        return
    setattr(registry, _MARK, True)
    engine = SglangEngine(adviser=Adviser(config, logger), logger=logger)
    register(f"{MODULE}.{FUNCTION}", engine.around, around)
    logger.info("adviser: registered with SGLang %s; it asks the agent process at %s", engine.version, config.socket_path)


@dataclass(slots=True, kw_only=True)
class SglangEngine:
    """This process's SGLang, as its algorithm sees it."""

    adviser: Adviser
    logger: logging.Logger
    num_calls: int = 0

    @property
    def version(self) -> str:
        """SGLang's release."""
        return str(getattr(sys.modules.get("sglang"), "__version__", "of an unknown release"))

    def around(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called in the algorithm's place. Raises only what SGLang's own algorithm raises, where that one has to answer."""
        self.num_calls += 1
        if self.num_calls == 1:
            self.logger.info("adviser: active: SGLang %s called it in the place of its algorithm", self.version)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        group, metadata, reason = self._surroundings(given)
        if group is None or metadata is None:
            self.adviser.left_to_engine(group, reason)
            return original(*args, **kwargs)
        rows = metadata.physical_to_logical_map_cpu.to(torch.int64).numpy().copy()
        tokens: torch.Tensor = given["tokens_per_expert"]
        outcome = Outcome.FAILED
        try:
            decision = self.adviser.advise(group, lambda: self._call(given, metadata, group), _carrying)
            outcome = decision.outcome
            if decision.rows is not None:
                rows[_routed(_load(tokens))] = decision.rows
        except Exception as error:  # noqa: BLE001  (stays on its map, as its peers do when they hear nothing of this rank)
            self.adviser.broke(error)
        if outcome is Outcome.ENGINE:
            return original(*args, **kwargs)
        physical, counts = replica_tables(rows, int(tokens.shape[-1]))
        return tuple(torch.from_numpy(table).to(tokens.device) for table in (rows, physical, counts))

    def _surroundings(self, given: Mapping[str, Any]) -> tuple[Group | None, Any, str]:
        """The group of ranks that are all in this call, and the engine's map; None and why, where there is none."""
        try:
            metadata = importlib.import_module("sglang.srt.eplb.expert_location").get_global_expert_location_metadata()
            if metadata is None:
                return None, None, "SGLang has no map yet: its own algorithm computes the first"
            elastic = importlib.import_module("sglang.srt.elastic_ep.elastic_ep").ElasticEPStateManager.instance()
            if elastic is not None:
                return None, None, "SGLang runs with elastic expert parallelism: ranks may be missing from this call"
            group: Group = importlib.import_module("sglang.srt.distributed.parallel_state").get_tp_group().cpu_group
        except (ImportError, AttributeError, AssertionError, ValueError, RuntimeError) as error:
            return None, None, f"SGLang does not say what its map and ranks are: {error}"
        slots, slots_of_rank = int(given["num_physical_experts"]), int(given["num_local_physical_experts"])
        if group.size() * slots_of_rank != slots:
            ranks = slots // max(slots_of_rank, 1)
            return None, None, f"SGLang spreads experts over {ranks} ranks but {group.size()} are in a tensor-parallel group"
        if tuple(metadata.physical_to_logical_map_cpu.shape) != (given["tokens_per_expert"].shape[-2], slots):
            return (
                None,
                None,
                (f"SGLang asks for {slots} slots but has a map of {tuple(metadata.physical_to_logical_map_cpu.shape)}"),
            )
        return group, metadata, ""

    def _call(self, given: Mapping[str, Any], metadata: Any, group: Group) -> Call:
        tokens: torch.Tensor = given["tokens_per_expert"]
        load = _load(tokens)
        routed = _routed(load)
        current: Int32Array = metadata.physical_to_logical_map_cpu.to(torch.int32).numpy()
        model = str(_setting("get_model", "model_path") or "sglang")
        stage, num_stages = _stage()
        return Call(
            load=load[routed],
            current=current[routed],
            num_ranks=group.size(),
            num_groups=int(given["num_groups"] or 1),
            layer_ids=tuple(int(layer) for layer in routed),
            deployment=deployment_name(self.adviser.config, model, *([f"stage{stage}"] if num_stages > 1 else [])),
            model=model,
            engine=f"sglang {self.version}, hook active",
            dispatch=_dispatch().value,
            replicas_max=current.shape[1],
            distinct_on_rank=True,
            steps=int(tokens.reshape(-1, tokens.shape[-2] * tokens.shape[-1]).any(dim=1).sum()),
            expert_bytes=_expert_bytes([int(layer) for layer in routed]),
        )


def _load(tokens: torch.Tensor) -> np.ndarray[Any, Any]:
    """Sum over the steps. Tokens: shape (steps, L, E) or (L, E). Shape (L, E), float64."""
    return tokens.to(device="cpu", dtype=torch.float64).reshape(-1, *tokens.shape[-2:]).sum(dim=0).numpy()


def _routed(load: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Layers that routed tokens, ascending: in a window with any, all with experts, and no dense one; all in one without."""
    routed = np.flatnonzero(load.any(axis=1))
    return routed if len(routed) else np.arange(len(load))


def _expert_bytes(layers: list[int]) -> tuple[int, ...]:
    """Of one expert of each layer: the manager that rebalances has the model, and it its experts' weights by layer."""
    found = method_of_class("EPLBManager")
    try:
        if found is None:
            return ()
        manager = found[0]
        model = manager._get_model() if hasattr(manager, "_get_model") else manager._model_runner.model  # to 0.5.14
        return bytes_of_experts(model.routed_experts_weights_of_layer, layers)
    except (AttributeError, TypeError, ValueError, IndexError):  # of another release: nothing of it is needed
        return ()


def _carrying() -> Carrying:
    """`EPLBManager` moves the weights in the method that asked, all at once or some layers after each forward pass.

    In between that method, a generator, rests within the one that the manager keeps.
    """
    found = method_of_class("EPLBManager")
    if found is None:
        return Carrying()
    manager, frame = found
    return Carrying(
        calling=on_stack(frame),
        beside=lambda: getattr(getattr(manager, "_main_generator", None), "gi_yieldfrom", None) is not None,
    )


def _dispatch() -> Dispatch:
    """Its static tables prefer a replica near by; its other ways spread tokens evenly."""
    return Dispatch.NEAREST if _setting("get_exec", "moe", "ep_dispatch_algorithm") == "static" else Dispatch.EVEN


def _stage() -> tuple[int, int]:
    """Which of how many pipeline stages this is."""
    try:
        group = importlib.import_module("sglang.srt.distributed.parallel_state").get_pp_group()
        return int(group.rank_in_group), int(group.world_size)
    except (ImportError, AttributeError, AssertionError, ValueError, RuntimeError):
        return 0, 1


def _setting(function: str, *names: str) -> Any:
    """A setting as SGLang's runtime context has it, or as releases before it (to 0.5.14) have it in their server's arguments.

    None where neither says it. Nothing of it is needed.
    """
    for module, found_by, path in (
        ("sglang.srt.runtime_context", function, names),
        ("sglang.srt.server_args", "get_global_server_args", names[-1:]),
    ):
        try:
            found = getattr(importlib.import_module(module), found_by)()
            for name in path:
                found = getattr(found, name)
        except (ImportError, AttributeError, ValueError, RuntimeError):
            continue
        return found
    return None
