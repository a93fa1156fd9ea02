"""Every slot has to be proven loaded before anything is moved: what a loader left out is found, and named, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from agent.engine.reference.launch import free_port
from agent.hook.config import HookConfig
from agent.hook.hook import Hook
from agent.hook.loaded_check import unequal_replicas
from eplb_service.ids import LayerRef
from tests.integration.hook_fleet import LAYERS, TinyEngine, describe, tables_of

RANKS = 4
"""Slots 0 and 1 of the group hold experts 0 and 1, and so do slots 6 and 7: both slots of the last rank are redundant."""


def reasons_after_start(spoil: Callable[[list[TinyEngine]], None]) -> list[str]:
    """Why each rank moves nothing, after all have started; empty = it may."""
    port = free_port()
    engines = [TinyEngine(describe(position, RANKS, port)) for position in range(RANKS)]
    spoil(engines)
    config = HookConfig(socket_path="/nowhere/agent.sock", staging_bytes=1 << 12, rendezvous_timeout_s=10.0)
    hooks = [Hook(engine, config) for engine in engines]
    on_each(hooks, Hook.start)
    found = [hook.status.off_reason for hook in hooks]
    on_each(hooks, Hook.close)
    return found


def on_each(hooks: list[Hook], work: Callable[[Hook], None]) -> None:
    threads = [threading.Thread(target=work, args=(hook,)) for hook in hooks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def leave_redundant_slots_out(engines: list[TinyEngine]) -> None:
    """As a loader does that takes slots of other ranks' experts for none of its own."""
    for layer in LAYERS:
        for tensor in engines[-1].tensors[layer].values():
            if tensor.data.dim() > 1:
                tensor.data.copy_(torch.full_like(tensor.data, 3))


def leave_one_scale_out(engines: list[TinyEngine]) -> None:
    """The weights are there, one tensor of one expert beside them is not."""
    name = list(engines[0].tensors[LAYERS[1]])[1]
    engines[0].tensors[LAYERS[1]][name].data[1].view(-1)[0] += 1


def route_otherwise_on_one_rank(engines: list[TinyEngine]) -> None:
    """One rank has two experts of a layer the other way round in its map, and says so itself."""
    made = engines[2]
    model = made.description.models[0]
    row = [1, 0, *model.initial[4][2:]]
    made.description = replace(made.description, models=(replace(model, initial={**model.initial, 4: tuple(row)}),))
    made.tables[LAYERS[1]] = tables_of(row)


def test_ranks_that_route_by_different_maps_move_nothing_and_name_the_layer_sglang_32962() -> None:
    """Where outputs are summed, an expert that two ranks send elsewhere counts twice or not at all, without an error."""
    reasons = reasons_after_start(route_otherwise_on_one_rank)
    assert all("disagree about row of layer tiny/4: 0x" in reason for reason in reasons)
    assert any("rank 10 and rank 30 disagree" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _: None, ""),
        (
            leave_redundant_slots_out,
            "replicas do not hold the same weights (layer tiny/1 expert 0: rank 40 slot 0 unlike rank 10 slot 0; layer",
        ),
        (
            leave_one_scale_out,
            "replicas do not hold the same weights (layer tiny/4 expert 1: rank 40 slot 1 unlike rank 10 slot 1): the engine",
        ),
    ],
)
def test_redundant_slots_that_were_not_loaded_leave_every_rank_observing_vllm_37322(
    spoil: Callable[[list[TinyEngine]], None], said: str
) -> None:
    for reason in reasons_after_start(spoil):
        assert reason.startswith(said)
        assert bool(reason) == bool(said)


def test_the_slot_that_is_unlike_most_is_named() -> None:
    layer = LayerRef("m", 3)
    rows = {layer: (0, 1, 0, -1, 0, 1)}
    sums = {7: {"m/3": [5, 6]}, 8: {"m/3": [9, 0]}, 9: {"m/3": [5, 6]}}
    said = unequal_replicas((7, 8, 9), rows, sums)
    assert said.startswith("replicas do not hold the same weights (layer m/3 expert 0: rank 8 slot 0 unlike rank 7 slot 0): ")
    sums[8] = {"m/3": [5, 12345]}  # an empty slot holds whatever it does
    assert unequal_replicas((7, 8, 9), rows, sums) == ""
