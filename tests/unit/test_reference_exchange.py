from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from agent.engine.reference.dispatch import choose_replicas
from agent.engine.reference.exchange import ExpertExchange
from agent.engine.reference.experts import LayerExperts, check_row_independence, linear_row, load_layer
from agent.engine.reference.model import checkpoint_digests, model_digest, resolve
from agent.hook.routing import LayerTables
from eplb_service.dispatch import Dispatch
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from examples.tiny_moe.config import TinyMoeConfig
from examples.tiny_moe.generate import run_experts
from examples.tiny_moe.model import TinyMoe
from examples.tiny_moe.numerics import configure_torch
from examples.tiny_moe.weights import random_weights

CONFIG = TinyMoeConfig(width=32, num_layers=1, num_heads=2, context=64, num_experts=6, top_k=2, expert_width=16)


@pytest.fixture(scope="module")
def model() -> TinyMoe:
    configure_torch()
    return TinyMoe(CONFIG, random_weights(CONFIG, seed=1))


def layer_of(model: TinyMoe, row: list[int], *, position: int = 0, slots: int | None = None, **options: Any) -> LayerExperts:
    array = np.array(row, np.int32)
    return load_layer(model, 0, array, position=position, slots=slots or len(row), table_width=len(row), **options)


def split(layer: LayerExperts, row: list[int], shares: list[float]) -> None:
    """Write shares into the layer's table, as a flip does."""
    derived = LayerTables.derive(row, 6, len(row), torch.device("cpu"), shares=tuple(np.float32(s).item() for s in shares))
    derived.write(layer.tables)


@pytest.fixture
def alone() -> Iterator[None]:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()


def test_replicas_take_turns_across_steps(model: TinyMoe) -> None:
    layer = layer_of(model, [0, 1, 2, 3, 4, 5, 0, 0])
    served = torch.zeros(8, dtype=torch.int64)
    for step in range(30):
        # One-token steps are where a hash of the token's index would always pick the first replica.
        physical = choose_replicas(torch.tensor([0] * (1 + step % 3) + [3]), layer, real=True)
        assert physical[-1] == 3
        served += torch.bincount(physical, minlength=8)
    assert served[[0, 6, 7]].tolist() == [20, 20, 20]


def test_replicas_take_their_shares_of_tokens_that_come_one_by_one_and_in_batches(model: TinyMoe) -> None:
    row, shares = [0, 1, 2, 3, 4, 5, 0, 0, 5], [0.1, 1, 1, 1, 1, 0.75, 0.6, 0.3, 0.25]
    layer = layer_of(model, row, dispatch=Dispatch.WEIGHTED)
    split(layer, row, shares)
    served = torch.zeros(9, dtype=torch.int64)
    sent = torch.zeros(6, dtype=torch.int64)
    for step in range(400):
        experts = torch.tensor([0] * (1 + step % 7) + [5] * (step % 2) + [3])
        physical = choose_replicas(experts, layer, real=True)
        assert torch.equal(torch.tensor(row)[physical], experts)
        served += torch.bincount(physical, minlength=9)
        sent += torch.bincount(experts, minlength=6)
        wanted = sent[torch.tensor(row)] * torch.tensor(shares)
        assert (served - wanted).abs().max() < 6, "never far from its share, however many came"
    assert served.sum() == sent.sum()
    assert (served - sent[torch.tensor(row)] * torch.tensor(shares)).abs().max() < 4


def test_a_replica_without_a_share_gets_no_token_and_even_shares_are_how_the_engine_starts(model: TinyMoe) -> None:
    row = [0, 1, 2, 3, 4, 5, 0, 0]
    layer = layer_of(model, row, dispatch=Dispatch.WEIGHTED)
    third = pytest.approx(1 / 3)
    assert layer.slot_shares().tolist() == [third, 1, 1, 1, 1, 1, third, third]  # type: ignore[union-attr]
    served = torch.bincount(choose_replicas(torch.zeros(3000, dtype=torch.int64), layer, real=True), minlength=8)
    assert all(abs(int(count) - 1000) < 4 for count in served[[0, 6, 7]])
    split(layer, row, [1 / 3, 1, 1, 1, 1, 1, 2 / 3, 0])
    served = torch.bincount(choose_replicas(torch.zeros(3000, dtype=torch.int64), layer, real=True), minlength=8)
    assert served[7] == 0
    assert abs(int(served[6]) - 2000) < 4


def test_nearest_replicas_take_turns_and_farther_ones_get_none(model: TinyMoe) -> None:
    # ranks of two slots, two ranks a node; expert 0 lies on ranks 0, 1, 2 and 3 (twice), expert 5 on ranks 2 and 3
    row = [0, 1, 2, 0, 3, 4, 5, 0, 0, 5]
    nodes = ("a", "a", "b", "b", "c")
    options: dict[str, Any] = {"slots": 2, "dispatch": Dispatch.NEAREST, "nodes": nodes}
    experts = torch.tensor([0, 5] * 60)

    def served(position: int) -> list[int]:
        layer = layer_of(model, row, position=position, **options)
        return torch.bincount(choose_replicas(experts, layer, real=True), minlength=10).tolist()

    assert served(0) == [60, 0, 0, 0, 0, 0, 30, 0, 0, 30], "its own replica of expert 0; all of expert 5 are far: in turn"
    assert served(2) == [0, 0, 0, 0, 0, 0, 60, 60, 0, 0], "rank 3 is the neighbour with both"
    assert served(3) == [0, 0, 0, 0, 0, 0, 60, 60, 0, 0], "on its own rank"
    assert served(4) == [0, 0, 0, 0, 0, 0, 0, 0, 60, 60], "on its own rank, a node by itself"


def test_the_same_tokens_pick_the_same_replicas_again(model: TinyMoe) -> None:
    experts = torch.randint(0, 6, (50,), generator=torch.Generator().manual_seed(3))
    row = [0, 1, 2, 3, 4, 5, 5, 1, 1]
    first, second = (choose_replicas(experts, layer_of(model, row), real=True) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.tensor(row)[first], experts)


def test_dummy_tokens_take_no_tickets(model: TinyMoe) -> None:
    layer = layer_of(model, [0, 1, 2, 3, 4, 5, 0])
    first = choose_replicas(torch.tensor([0]), layer, real=False)
    assert torch.equal(choose_replicas(torch.tensor([0]), layer, real=True), first)
    assert not torch.equal(choose_replicas(torch.tensor([0]), layer, real=True), first)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("row", [[0, 1, 2, 3, 4, 5], [5, 0, -1, 3, 2, 1, 4, 5, 5]])
def test_outputs_come_back_to_the_choice_that_asked_bit_for_bit(model: TinyMoe, row: list[int]) -> None:
    layer = layer_of(model, row)
    hidden = torch.randn(37, CONFIG.width, generator=torch.Generator().manual_seed(9))
    routed = model.route(0, hidden)
    physical = choose_replicas(routed.experts.flatten(), layer, real=True)
    outputs = ExpertExchange(model, 1).run(layer, routed.inputs, physical, real=True)
    assert torch.equal(outputs.view(37, CONFIG.top_k, -1), run_experts(model, 0, routed))
    assert int(layer.tokens.sum()) == 37 * CONFIG.top_k
    assert torch.equal(layer.tokens, torch.bincount(physical, minlength=len(row)))
    assert torch.equal(layer.sent, layer.tokens)


@pytest.mark.usefixtures("alone")
def test_a_rank_without_rows_takes_part_and_dummy_rows_are_not_counted(model: TinyMoe) -> None:
    layer = layer_of(model, [0, 1, 2, 3, 4, 5])
    exchange = ExpertExchange(model, 1)
    nothing = exchange.run(layer, torch.empty(0, CONFIG.width), torch.empty(0, dtype=torch.int64), real=False)
    assert nothing.shape == (0, CONFIG.width)
    exchange.run(layer, torch.ones(1, CONFIG.width), torch.tensor([2, 4]), real=False)
    assert layer.tokens.tolist() == [0] * 6
    assert layer.sent.tolist() == [0] * 6


def test_slots_are_filled_by_the_row_scales_included(model: TinyMoe) -> None:
    layer = layer_of(model, [0, 1, 2, 3, 4, 5, 3, -1], position=1, slots=4)
    checkpoint = checkpoint_digests(model, 0)
    assert list(layer.slot_digests())[:3] == [checkpoint[4], checkpoint[5], checkpoint[3]]
    assert all(not bool(tensor[3].any()) for tensor in layer.slots.values())
    layer.slots["up_scale"][0] *= 2
    assert layer.slot_digests()[0] != checkpoint[4]
    assert layer.expert_bytes == sum(t[0].nbytes for t in model.expert_tensors(0).values())


def test_the_linear_row_repeats_experts_from_the_first() -> None:
    assert linear_row(num_experts=3, num_physical=8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_flip_of_shares_alone_is_noticed_and_starts_a_new_count(model: TinyMoe) -> None:
    row = [0, 1, 2, 3, 4, 5, 0]
    layer = layer_of(model, row, dispatch=Dispatch.WEIGHTED)
    layer.tokens += 5
    assert not layer.notice_flip(3)
    split(layer, row, [0.25, 1, 1, 1, 1, 1, 0.75])
    assert layer.notice_flip(4)
    assert layer.flip_boundary == 4
    assert not layer.notice_flip(5)
    assert (layer.tokens - layer.tokens_before_flip).tolist() == [0] * 7


def test_a_flip_is_noticed_and_starts_a_new_count(model: TinyMoe) -> None:
    layer = layer_of(model, [0, 1, 2, 3, 4, 5, 0])
    layer.tokens += 5
    assert not layer.notice_flip(3)
    layer.tables.physical_to_logical[6] = 1
    assert layer.notice_flip(4)
    assert layer.flip_boundary == 4
    assert not layer.notice_flip(5)
    assert (layer.tokens - layer.tokens_before_flip).tolist() == [0] * 7


def test_a_map_without_a_replica_of_some_expert_is_not_served(model: TinyMoe) -> None:
    layer = layer_of(model, [0, 1, 2, 3, 4, 5])
    layer.tables.physical_to_logical[4] = 5
    layer.tables.replica_counts[4] = 0
    with pytest.raises(BrokenInvariantError, match="expert 4 has no replica since boundary 17"):
        layer.notice_flip(17)


def test_an_expert_whose_rows_influence_each_other_is_caught(model: TinyMoe) -> None:
    class Leaky(TinyMoe):
        def run_expert(self, tensors: object, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + (inputs.shape[0] > 4) * 1e-6

    layer = layer_of(model, [0, 1, 2, 3, 4, 5])
    inputs = model.route(0, torch.randn(24, CONFIG.width)).inputs
    check_row_independence(model, layer, inputs)
    with pytest.raises(BrokenInvariantError, match="24 rows changed when they were computed 5 at a time"):
        check_row_independence(Leaky(CONFIG, random_weights(CONFIG, seed=1)), layer, inputs)


def test_the_model_digest_covers_configuration_and_every_kind_of_tensor() -> None:
    def digest(config: TinyMoeConfig, name: str = "", *, shared: bool = False) -> str:
        weights = random_weights(config, seed=1)
        if name:
            tensor = (weights.shared if shared else weights.layers[0])[name]
            tensor.view(-1)[-1] += 1
        return model_digest(TinyMoe(config, weights))

    configure_torch()
    seen = [digest(CONFIG), digest(dataclasses.replace(CONFIG, sampling_seed=1))]
    seen += [digest(CONFIG, name) for name in ("up", "up_scale", "down", "down_scale", "attention_qkv", "router", "moe_norm")]
    assert len(set(seen)) == len(seen)
    assert digest(CONFIG) == seen[0]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_colon", "write it as package.module:callable"),
        ("no.such.module:x", "cannot be imported"),
        ("json:nothing", "has no 'nothing'"),
        ("json:__name__", "not a callable"),
    ],
)
def test_a_reference_to_a_callable_that_is_none_is_refused(reference: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        resolve(reference)
