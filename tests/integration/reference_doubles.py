"""Hooks for rank processes of tests: one that moves experts by a script, and faults wrapped around a hook's port.

A rank loads them by `FleetConfig.hook_factory`. The faults (`weightless`, `scale_left_behind`, `one_rank_late`) are the
negative controls: each breaks one rule of a flip, and whoever checks tokens or slots must notice.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from agent.engine.port import EngineDescription, EnginePort, RoutingTables, SlotTensor
from agent.engine.reference.config import RankConfig
from agent.engine.reference.engine import LoadedStatus, NoHook, StepHook
from agent.engine.reference.model import ServedModel, resolve
from agent.engine.reference.rank import real_hook
from eplb_service.ids import LayerRef
from eplb_service.placement import Int32Array, logical_to_physical

FLIP_PERIOD = 3


def scripted_row(*, layer_id: int, generation: int, num_logical: int, num_physical: int) -> Int32Array:
    """Covers all experts; the other slots hold any expert or, now and then, none. The same on every rank."""
    random = np.random.default_rng([layer_id, generation])
    spare = random.integers(-1, num_logical, num_physical - num_logical)
    return random.permutation(np.concatenate([np.arange(num_logical), spare])).astype(np.int32)


class ScriptedHook:
    """Moves experts every few steps: layer i at boundaries b with (b + i) % 3 = 0 and b > 0, weights from the checkpoint."""

    def __init__(self, port: EnginePort, checkpoint: ServedModel) -> None:
        self._port = port
        self._checkpoint = checkpoint
        self._boundary = 0
        self._generations: dict[LayerRef, int] = {}
        description = port.describe()
        self._position = description.group_rank_ids.index(description.address.rank_id)
        self._num_ranks = len(description.group_rank_ids)
        self._table_width = description.replica_table_width
        (self._model,) = description.models
        self.recorded = 0

    def start(self) -> None:
        pass

    def reform(self) -> None:
        raise NotImplementedError("this script is of one group")

    def close(self) -> None:
        pass

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        self.recorded += experts.numel()

    @property
    def status(self) -> LoadedStatus:
        return LoadedStatus(dict(self._generations))

    def begin_step(self, *, num_real_tokens: int) -> None:
        for index, info in enumerate(self._model.layers):
            if self._boundary and (self._boundary + index) % FLIP_PERIOD == 0:
                layer = LayerRef(self._model.name, info.layer_id)
                self._generations[layer] = self._generations.get(layer, 0) + 1
                row = scripted_row(
                    layer_id=info.layer_id,
                    generation=self._generations[layer],
                    num_logical=info.num_logical,
                    num_physical=info.slots * self._num_ranks,
                )
                self._flip(layer, row, info.num_logical, info.slots)
        self._boundary += 1

    def _flip(self, layer: LayerRef, row: Int32Array, num_logical: int, slots: int) -> None:
        checkpoint = self._checkpoint.expert_tensors(layer.layer_id)
        local = row[self._position * slots : (self._position + 1) * slots]
        for name, tensor in self._port.slot_tensors(layer).items():
            for slot, expert in enumerate(local.tolist()):
                if expert >= 0:
                    tensor.data[slot].copy_(checkpoint[name][expert])
        write_tables(self._port.routing_tables(layer), row, num_logical, self._table_width)


def write_tables(tables: RoutingTables, row: Int32Array, num_logical: int, width: int) -> None:
    tables.physical_to_logical.copy_(torch.from_numpy(row))
    tables.logical_to_physical.copy_(torch.from_numpy(logical_to_physical(row[None], num_logical, width)[0]))
    tables.replica_counts.copy_(torch.from_numpy(np.bincount(row[row >= 0], minlength=num_logical)))


def scripted(port: EnginePort, config: RankConfig) -> StepHook:
    return ScriptedHook(port, cast("ServedModel", resolve(config.fleet.model_factory)()))


RESTORED_AFTER = 6
"""Steps."""


class RestoringHook(NoHook):
    """Brings experts that no slot holds back from the checkpoint, some steps after they were lost, into slots to spare."""

    def __init__(self, port: EnginePort, checkpoint: ServedModel) -> None:
        self._port, self._checkpoint = port, checkpoint
        self._left = RESTORED_AFTER

    def reform(self) -> None:
        self._left = RESTORED_AFTER

    def begin_step(self, *, num_real_tokens: int) -> None:
        (model,) = self._port.describe().models
        rows = {info: self._port.routing_tables(LayerRef(model.name, info.layer_id)) for info in model.layers}
        lacking = [info for info, tables in rows.items() if int(tables.replica_counts.min()) < 1]
        assert not lacking or not num_real_tokens, "tokens were fed to a model of which experts are lost"
        self._left -= bool(lacking)
        if lacking and not self._left:
            for info in lacking:
                self._restore(LayerRef(model.name, info.layer_id), rows[info], info.num_logical, info.slots)

    def _restore(self, layer: LayerRef, tables: RoutingTables, num_logical: int, slots: int) -> None:
        description = self._port.describe()
        row = tables.physical_to_logical.numpy().astype(np.int32)
        free = [slot for slot, expert in enumerate(row) if expert < 0 or expert in row[:slot]]
        lost = [expert for expert in range(num_logical) if expert not in row]
        row[free[: len(lost)]] = lost
        first = description.group_rank_ids.index(description.address.rank_id) * slots
        checkpoint = self._checkpoint.expert_tensors(layer.layer_id)
        for name, tensor in self._port.slot_tensors(layer).items():
            for slot, expert in enumerate(row[first : first + slots].tolist()):
                tensor.data[slot].copy_(checkpoint[name][expert])
        write_tables(tables, row, num_logical, description.replica_table_width)


def restoring(port: EnginePort, config: RankConfig) -> StepHook:
    return RestoringHook(port, cast("ServedModel", resolve(config.fleet.model_factory)()))


def writes_environment(port: EnginePort, config: RankConfig) -> StepHook:
    """No hook; leaves what its process was told."""
    seen = f"{os.environ.get('EPLB_TEST_NAME')} {os.environ.get('EPLB_FAILPOINTS')}"
    (Path(config.fleet.run_directory) / f"environment-{config.position}").write_text(seen)
    return NoHook()


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ShadowPort:
    """A port whose hook writes some storage into copies that the engine does not read."""

    def __init__(self, port: EnginePort) -> None:
        self._port = port

    def describe(self) -> EngineDescription:
        return self._port.describe()

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        return self._port.slot_tensors(layer)

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        return self._port.routing_tables(layer)

    def rederive(self, layer: LayerRef, slots: Sequence[int]) -> None:
        self._port.rederive(layer, slots)

    def weights_version(self) -> int:
        return self._port.weights_version()

    def compute_stream(self) -> torch.cuda.Stream | None:
        return self._port.compute_stream()

    def is_capturing(self) -> bool:
        return self._port.is_capturing()

    def fail_stop(self, reason: str) -> None:
        self._port.fail_stop(reason)


class StuckTensors(ShadowPort):
    """Writes to the slots' tensors of some names never reach the engine; None = of all names."""

    def __init__(self, port: EnginePort, names: frozenset[str] | None) -> None:
        super().__init__(port)
        self._names = names
        self._shadows: dict[LayerRef, dict[str, SlotTensor]] = {}

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        if layer not in self._shadows:
            self._shadows[layer] = {
                name: dataclasses.replace(tensor, data=tensor.data.clone())
                if self._names is None or name in self._names
                else tensor
                for name, tensor in self._port.slot_tensors(layer).items()
            }
        return self._shadows[layer]


class LatePort(ShadowPort):
    """Everything that the hook writes reaches the engine one step boundary later (`deliver`)."""

    def __init__(self, port: EnginePort) -> None:
        super().__init__(port)
        self._slots: dict[LayerRef, dict[str, SlotTensor]] = {}
        self._tables: dict[LayerRef, RoutingTables] = {}

    def slot_tensors(self, layer: LayerRef) -> Mapping[str, SlotTensor]:
        if layer not in self._slots:
            real = self._port.slot_tensors(layer)
            self._slots[layer] = {name: dataclasses.replace(t, data=t.data.clone()) for name, t in real.items()}
        return self._slots[layer]

    def routing_tables(self, layer: LayerRef) -> RoutingTables:
        if layer not in self._tables:
            real = self._port.routing_tables(layer)
            self._tables[layer] = RoutingTables(
                physical_to_logical=real.physical_to_logical.clone(),
                logical_to_physical=real.logical_to_physical.clone(),
                replica_counts=real.replica_counts.clone(),
                replica_shares=None if real.replica_shares is None else real.replica_shares.clone(),
            )
        return self._tables[layer]

    def deliver(self) -> None:
        for layer, shadows in self._slots.items():
            for name, tensor in self._port.slot_tensors(layer).items():
                tensor.data.copy_(shadows[name].data)
        for layer, shadow in self._tables.items():
            real = self._port.routing_tables(layer)
            real.physical_to_logical.copy_(shadow.physical_to_logical)
            real.logical_to_physical.copy_(shadow.logical_to_physical)
            real.replica_counts.copy_(shadow.replica_counts)
            if real.replica_shares is not None and shadow.replica_shares is not None:
                real.replica_shares.copy_(shadow.replica_shares)


class LateHook:
    """A hook over a `LatePort`: what it wrote at the last boundary reaches the engine at this one."""

    def __init__(self, port: LatePort, hook: StepHook) -> None:
        self._port = port
        self._hook = hook

    def start(self) -> None:
        self._hook.start()

    def reform(self) -> None:
        self._hook.reform()

    def close(self) -> None:
        self._hook.close()

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        self._hook.record(layer, experts)

    @property
    def status(self) -> LoadedStatus:
        return LoadedStatus(self._hook.status.generations)

    def begin_step(self, *, num_real_tokens: int) -> None:
        self._port.deliver()
        self._hook.begin_step(num_real_tokens=num_real_tokens)


HookMaker = Callable[[EnginePort, RankConfig], StepHook]


def without_weights(port: EnginePort, config: RankConfig, make: HookMaker) -> StepHook:
    """The map flips, no weight moves."""
    return make(StuckTensors(port, None), config)


def without_one_scale(port: EnginePort, config: RankConfig, make: HookMaker) -> StepHook:
    """The map flips and weights move, but not the scale of the first product."""
    return make(StuckTensors(port, frozenset({"up_scale"})), config)


def second_rank_late(port: EnginePort, config: RankConfig, make: HookMaker) -> StepHook:
    """The second rank flips one step after the others."""
    if config.position != 1:
        return make(port, config)
    late = LatePort(port)
    return LateHook(late, make(late, config))


# By script (`scripted`), and by real rollouts (a planner and an agent process must be there).
weightless = partial(without_weights, make=scripted)
scale_left_behind = partial(without_one_scale, make=scripted)
one_rank_late = partial(second_rank_late, make=scripted)
weightless_rollout = partial(without_weights, make=real_hook)
scale_left_behind_rollout = partial(without_one_scale, make=real_hook)
one_rank_late_rollout = partial(second_rank_late, make=real_hook)


class FailsAt(NoHook):
    """Does not know how a commit came out, at one boundary of one rank."""

    def __init__(self, port: EnginePort, boundary: int) -> None:
        self._port = port
        self._left = boundary

    def begin_step(self, *, num_real_tokens: int) -> None:
        if self._left == 0:
            self._port.fail_stop("the vote on chunk 0x100000002 timed out after 10 s")
        self._left -= 1


def unknown_outcome(port: EnginePort, config: RankConfig) -> StepHook:
    return FailsAt(port, 4) if config.position == 1 else NoHook()
