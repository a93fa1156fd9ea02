"""vLLM's policy "default" asks the planner. Nothing else of vLLM is touched.

vLLM has each rank call `rebalance_experts` with the load of all ranks and its own copy of the map, and routes by what comes
back without a look at it: on its asynchronous worker's thread, in lock-step with the peers' threads, or inside a forward. The
policy of 0.14 to 0.18 returns three tensors, from 0.19 on one; EPLB has a group of its own from 0.17 on. Where there is no map
to stay on (a new worker without one, an elastic resize) vLLM's own policy answers, as it would without us.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent.adviser.adviser import Adviser
from agent.adviser.agree import Group
from agent.adviser.call import Call, Outcome
from agent.adviser.callers import bytes_of_experts, calling_frame, variable_of_caller
from agent.adviser.config import AdviserConfig, deployment_name
from agent.adviser.engine_copy import Carrying, on_stack
from agent.adviser.replica_tables import replica_tables
from agent.adviser.signatures import attribute, check_parameters, returned
from eplb_service.advice import map_digest
from eplb_service.dispatch import Dispatch
from eplb_service.errors import EplbError, UnsupportedError

POLICY = "default"
PARAMETERS = ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices")
REPLICAS_MAX = 1024
"""Width of `logical_to_physical_map` in all releases from 0.14 to 0.33: 1023 redundant experts and one."""


def install(environ: Mapping[str, str], logger: logging.Logger) -> None:
    """Put the adviser in the place of vLLM's policy, once. A release or setting that cannot be is said, and changes nothing."""
    try:
        config = AdviserConfig.from_environment(environ)
        policies = attribute(importlib.import_module("vllm.distributed.eplb.policy"), "EPLB_POLICIES")
        original = policies.get(POLICY) if isinstance(policies, dict) else None
        if getattr(original, "is_eplb_adviser", False):
            return
        if not isinstance(original, type):
            raise UnsupportedError(f"vLLM has no policy {POLICY!r} among {list(policies)}")
        shape = _return_shape(original)
        groups = importlib.import_module("vllm.distributed.parallel_state")
        group_name = "get_eplb_group" if hasattr(groups, "get_eplb_group") else "get_ep_group"
        attribute(groups, group_name)
    except EplbError as error:
        logger.error("adviser: NOT installed, vLLM keeps its own policy: %s", error)  # noqa: TRY400  (the sentence says it)
        return
    engine = VllmEngine(original=original, adviser=Adviser(config, logger), returns=shape, groups=groups, group_name=group_name)
    policies[POLICY] = advised_policy(engine)
    logger.info("adviser: installed in vLLM %s; it asks the agent process at %s", engine.version, config.socket_path)


def _return_shape(original: Any) -> int:
    """Tensors that the policy returns: 1 or 3. Raises UnsupportedError for another signature."""
    name = f"{original.__name__}.rebalance_experts"
    function = attribute(original, "rebalance_experts")
    check_parameters(function, name, PARAMETERS)
    text = returned(function).removeprefix("torch.")
    shapes = {"Tensor": 1, "tuple[torch.Tensor, torch.Tensor, torch.Tensor]": 3}
    if text not in shapes:
        raise UnsupportedError(f"{name} returns {text or 'nothing that it names'}; known are {', '.join(shapes)}")
    return shapes[text]


def advised_policy(engine: VllmEngine) -> type:
    """The class that takes the policy's place: of the same kind, with the same method."""

    def rebalance_experts(
        _cls: type,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> Any:
        return engine.rebalance(weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices)

    members = {"rebalance_experts": classmethod(rebalance_experts), "is_eplb_adviser": True, "adviser": engine.adviser}
    return type("AdvisedEplbPolicy", (engine.original,), members)


@dataclass(slots=True)
class _Learnt:
    """What vLLM's configuration says, which can be seen during the start-up profile from some releases on."""

    model: str = ""
    drafter: bool = False
    steps: int = 0


@dataclass(slots=True, kw_only=True)
class VllmEngine:
    """This process's vLLM, as its policy sees it.

    original: vLLM's policy. returns: tensors that it returns. groups: vLLM's module of process groups; group_name: its function
    for the group that EPLB uses.
    """

    original: Any
    adviser: Adviser
    returns: int
    groups: Any
    group_name: str
    _learnt: _Learnt | None = None
    _first_shape: tuple[int, ...] = ()
    _asked: tuple[tuple[int, ...], int] = ((), 0)

    @property
    def version(self) -> str:
        """VLLM's release."""
        return str(getattr(sys.modules.get("vllm"), "__version__", "of an unknown release"))

    def rebalance(
        self,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old: torch.Tensor | None,
    ) -> Any:
        """The policy's method. Raises only what vLLM's own policy raises, where that one has to answer.

        Device tensors in, the same device out; the map that is kept keeps its type.
        """
        rows = self._advised(weight, num_replicas, num_groups, num_ranks, old)
        if rows is None:
            return self.original.rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_ranks, old)
        return self._shaped(rows, weight)

    def _advised(
        self, weight: torch.Tensor, num_replicas: int, num_groups: int, num_ranks: int, old: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The map to go to or to stay on; None = vLLM's own policy answers. Never raises."""
        try:
            group = self._group()
            reason = self._left_to_engine(group, num_replicas, num_ranks, old)
            if group is None or old is None or reason:
                self.adviser.left_to_engine(group, reason)
                return None
            decision = self.adviser.advise(group, lambda: self._call(weight, num_groups, num_ranks, old), _carrying)
            if decision.outcome is Outcome.ENGINE:
                return None
            if decision.rows is None:
                return old.clone()
            self.adviser.models.left_at(*self._asked, map_digest(decision.rows))
            return torch.from_numpy(decision.rows.astype(np.int64))
        except Exception as error:  # noqa: BLE001  (it would end vLLM's worker thread without a word, vllm#57883)
            self.adviser.broke(error)
            return old

    def _group(self) -> Group | None:
        try:
            group: Group = getattr(self.groups, self.group_name)().cpu_group
        except (AssertionError, AttributeError):  # vLLM asserts that there is one
            return None
        return group

    def _left_to_engine(self, group: Group | None, num_replicas: int, num_ranks: int, old: torch.Tensor | None) -> str:
        """Why the ranks of the group are not all in this call with a map of the size that is asked for; the same on all."""
        if group is None:
            return "vLLM has no group for its load balancer yet"
        if old is None:
            return "vLLM gives no map that could be kept: a new worker computes its first"
        if old.dim() != 2 or old.shape[1] != num_replicas:
            return f"vLLM asks for {num_replicas} slots but has a map of {tuple(old.shape)}: it changes its size"
        if group.size() != num_ranks:
            return f"vLLM asks for {num_ranks} ranks but its group has {group.size()}: it changes its size"
        return ""

    def _call(self, weight: torch.Tensor, num_groups: int, num_ranks: int, old: torch.Tensor) -> Call:
        current = old.to(device="cpu", dtype=torch.int32).numpy()
        learnt = self._learn()
        self.adviser.models.most = 2 if learnt.drafter else 1
        shape = tuple(current.shape)
        self._first_shape = self._first_shape or shape
        index = self.adviser.models.of(shape, map_digest(current))
        self._asked = shape, index
        return Call(
            load=weight.to(device="cpu", dtype=torch.float64).numpy(),
            current=current,
            num_ranks=num_ranks,
            num_groups=num_groups,
            layer_ids=tuple(range(shape[0])),
            deployment=deployment_name(self.adviser.config, learnt.model or "vllm", *self._parts(shape, index, learnt)),
            model=learnt.model or "vllm",
            engine=f"vllm {self.version}",
            dispatch=Dispatch.HASHED.value,
            replicas_max=REPLICAS_MAX,
            steps=learnt.steps,
            expert_bytes=_expert_bytes(shape[0]),
        )

    def _parts(self, shape: tuple[int, ...], index: int, learnt: _Learnt) -> list[str]:
        """What tells this stage and model from the engine's others; nothing where there are no others."""
        stage, num_stages = self._stage()
        parts = [f"stage{stage}"] if num_stages > 1 else []
        if learnt.drafter or shape != self._first_shape:  # which of them comes first depends on the release: both are named
            parts.append(f"{shape[0]}-layers")
        return [*parts, f"model{index + 1}"] if index else parts

    def _stage(self) -> tuple[int, int]:
        try:
            group = self.groups.get_pp_group()
            return int(group.rank_in_group), int(group.world_size)
        except (AssertionError, AttributeError):
            return 0, 1

    def _learn(self) -> _Learnt:
        """What vLLM says of itself, where it does; nothing of it is needed."""
        if self._learnt is not None:
            return self._learnt
        module = sys.modules.get("vllm.config.vllm") or sys.modules.get("vllm.config")
        current = getattr(module, "get_current_vllm_config_or_none", None)
        try:
            config = current() if callable(current) else None
            if config is None:
                return _Learnt()
            balancer = config.parallel_config.eplb_config
            self._learnt = _Learnt(
                model=str(config.model_config.model),
                drafter=config.speculative_config is not None,
                steps=min(int(balancer.window_size), int(balancer.step_interval)),
            )
        except (AttributeError, TypeError, ValueError):
            self._learnt = _Learnt()
        return self._learnt

    def _shaped(self, rows: torch.Tensor, weight: torch.Tensor) -> Any:
        """What this release's policy returns, on the device of the load."""
        rows = rows.to(weight.device)
        if self.returns == 1:
            return rows
        physical, counts = replica_tables(rows.cpu().numpy(), int(weight.shape[1]))
        return rows, torch.from_numpy(physical).to(weight.device), torch.from_numpy(counts).to(weight.device)


def _expert_bytes(num_layers: int) -> tuple[int, ...]:
    """Of one expert of each layer: vLLM's state holds them where it calls its policy (`expert_weights`, from 0.14 on)."""
    state = variable_of_caller("eplb_model_state", "model_state")  # inside a forward; on the asynchronous worker's thread
    try:
        return bytes_of_experts(dict(enumerate(state.model.expert_weights)), range(num_layers)) if state is not None else ()
    except (AttributeError, TypeError, ValueError, IndexError):  # of another release: nothing of it is needed
        return ()


def _carrying() -> Carrying:
    """In a forward, `rearrange` moves the weights before it returns; an asynchronous worker does so layer by layer.

    Then vLLM's state says `rebalanced` until the last layer is through: from before the policy is asked, or, where `rearrange`
    asks it (to 0.16), from before that returns.
    """
    state = variable_of_caller("eplb_model_state", "model_state")
    frame = calling_frame()
    beside = getattr(state, "rebalanced", False)
    return Carrying(
        calling=None if beside or frame is None else on_stack(frame),
        beside=lambda: bool(getattr(state, "rebalanced", False)),
    )
