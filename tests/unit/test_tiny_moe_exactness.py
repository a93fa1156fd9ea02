"""The tiny MoE gives each row the same bits whatever the batch, the neighbours or the place of experts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.tiny_moe import numerics
from examples.tiny_moe.config import TinyMoeConfig, TinyMoeError
from examples.tiny_moe.generate import Oracle, run_experts
from examples.tiny_moe.model import Draw, KvCache, Span, TinyMoe, gumbel_noise
from examples.tiny_moe.numerics import TILE_ROWS, rms_norm, self_check, stable_top_k, tiled_linear
from examples.tiny_moe.weights import random_weights


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Serve as a serving process does, then give the threads back."""
    threads = torch.get_num_threads()
    numerics.configure_torch()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> TinyMoe:
    """The shipped model."""
    return TinyMoe.load()


@dataclass
class Served:
    """One request in a continuously batched run, with every last-row hidden state it produced."""

    request_id: int
    prompt: bytes
    arrives: int
    num_tokens: int
    cache: KvCache
    tokens: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


Shuffle = Callable[[list[Served]], list[Served]]


def serve(model: TinyMoe, requests: list[Served], order: Shuffle) -> None:
    """Continuous batching: requests join when they arrive, rows in any order, prompts beside decodes."""
    step = 0
    while any(len(request.tokens) < request.num_tokens for request in requests):
        active = order([r for r in requests if r.arrives <= step and len(r.tokens) < r.num_tokens])
        step += 1
        fed: list[int] = []
        spans: list[Span] = []
        for request in active:
            pending = request.tokens[-1:] or list(request.prompt)
            spans.append(Span(request.cache, len(fed), len(pending)))
            fed += pending
        hidden = model.embed(torch.tensor(fed, dtype=torch.int64))
        for layer_id in model.moe_layer_ids():
            hidden = model.attend(layer_id, hidden, spans)
            routing = model.route(layer_id, hidden)
            hidden = model.combine(hidden, run_experts(model, layer_id, routing), routing.gates)
        last = hidden[[span.start + span.count - 1 for span in spans]]
        tokens = model.next_tokens(last, [Draw(r.request_id, r.cache.length) for r in active])
        for request, token, row in zip(active, tokens, last, strict=True):
            request.tokens.append(token)
            request.hidden.append(row.clone())


def test_self_check_passes_on_this_machine() -> None:
    self_check()


def test_self_check_names_a_product_that_depends_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs @ weight.t() + inputs.mean() * 1e-7

    monkeypatch.setattr(numerics, "tiled_linear", sloppy)
    with pytest.raises(TinyMoeError, match="288 x 96 weight changed"):
        self_check()


def test_self_check_refuses_more_than_one_thread() -> None:
    torch.set_num_threads(2)
    with pytest.raises(TinyMoeError, match="2 threads"):
        self_check()


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.sampled_from([64, 96]),
    outputs=st.sampled_from([32, 64, 96, 256, 288]),
    seed=st.integers(0, 2**31),
)
def test_rows_keep_their_bits_under_permutation_splits_and_nan_neighbours(
    rows: int, inputs: int, outputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    batch = torch.randn(rows, inputs, generator=generator)
    scale = torch.randn(inputs, generator=generator)
    permutation = torch.randperm(rows, generator=generator)
    poisoned = torch.full((rows + 3, inputs), float("nan"))
    poisoned[2:-1:2] = batch[::2]
    operations: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: tiled_linear(x, weight),
        lambda x: rms_norm(x, scale, epsilon=1e-6),
        lambda x: torch.softmax(x[:, :4], dim=-1),
        lambda x: stable_top_k(x[:, :32], 4)[0],
    )
    for operation in operations:
        alone = torch.cat([operation(row[None]) for row in batch])
        assert torch.equal(operation(batch), alone)
        assert torch.equal(operation(batch[permutation]), alone[permutation])
        assert torch.equal(operation(poisoned)[2:-1:2], alone[::2])


def test_tiled_linear_is_the_product_and_takes_no_rows_and_unaligned_rows() -> None:
    weight = torch.randn(32, 96)
    batch = torch.randn(13, 96)
    assert torch.allclose(tiled_linear(batch, weight), batch @ weight.t(), atol=1e-4)
    assert tiled_linear(batch[:0], weight).shape == (0, 32)
    storage = torch.zeros(13 * 96 + 1)
    unaligned = storage[1:].view(13, 96)
    unaligned.copy_(batch)
    assert torch.equal(tiled_linear(unaligned, weight), tiled_linear(batch, weight))


def test_equal_logits_go_to_the_lowest_expert() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    values, experts = stable_top_k(logits, 3)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert values.tolist() == [[3.0, 3.0, 3.0], [2.0, 2.0, 2.0]]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_request_in_any_batch_equals_the_request_alone(model: TinyMoe, data: st.DataObject) -> None:
    requests = [
        Served(
            request_id=data.draw(st.integers(0, 2**40)),
            prompt=data.draw(st.binary(min_size=1, max_size=40)),
            arrives=data.draw(st.integers(0, 4)),
            num_tokens=data.draw(st.integers(1, 6)),
            cache=model.new_cache(),
        )
        for _ in range(data.draw(st.integers(2, 9)))
    ]
    shuffle = random.Random(data.draw(st.integers(0, 2**31)))
    serve(model, requests, lambda active: shuffle.sample(active, len(active)))
    for request in requests:
        alone = Served(request.request_id, request.prompt, 0, request.num_tokens, model.new_cache())
        serve(model, [alone], lambda active: active)
        assert request.tokens == alone.tokens
        assert torch.equal(torch.stack(request.hidden), torch.stack(alone.hidden))
        assert torch.equal(request.cache.keys, alone.cache.keys)
        assert request.tokens == Oracle(model).generate(request.request_id, request.prompt, request.num_tokens)


def test_batched_oracle_equals_the_oracle(model: TinyMoe) -> None:
    oracle = Oracle(model)
    prompts = [(7 * index, b"def f(self, x):\n"[: 3 + index]) for index in range(11)]
    together = oracle.generate_batch(prompts, 6)
    assert together == [oracle.generate(request_id, prompt, 6) for request_id, prompt in prompts]
    assert oracle.generate_batch([], 6) == []


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), num_rows=st.integers(1, 60), num_parts=st.integers(1, 5))
def test_expert_output_does_not_depend_on_which_replica_computes_a_row(
    model: TinyMoe, seed: int, num_rows: int, num_parts: int
) -> None:
    chooser = np.random.default_rng(seed)
    tensors = {name: tensor[int(chooser.integers(32))] for name, tensor in model.expert_tensors(2).items()}
    inputs = torch.from_numpy(chooser.standard_normal((num_rows, 96)).astype(np.float32))
    whole = model.run_expert(tensors, inputs)
    parts = np.array_split(chooser.permutation(num_rows), num_parts)
    for part in parts:
        assert torch.equal(model.run_expert(tensors, inputs[part]), whole[part])


def test_expert_computes_from_the_passed_tensors_alone(model: TinyMoe) -> None:
    slot = {name: tensor[3].clone() for name, tensor in model.expert_tensors(1).items()}
    other = {name: tensor[5] for name, tensor in model.expert_tensors(1).items()}
    inputs = torch.randn(5, 96)
    before = model.run_expert(slot, inputs)
    for name in ("up", "down"):  # the weights move in place, the scales are left behind
        slot[name].copy_(other[name])
    mixed = model.run_expert(slot, inputs)
    assert not torch.equal(mixed, before)
    assert not torch.equal(mixed, model.run_expert(other, inputs))
    for name in ("up_scale", "down_scale"):
        slot[name].copy_(other[name])
    assert torch.equal(model.run_expert(slot, inputs), model.run_expert(other, inputs))


def test_step_without_rows_runs(model: TinyMoe) -> None:
    hidden = model.embed(torch.zeros(0, dtype=torch.int64))
    for layer_id in model.moe_layer_ids():
        hidden = model.attend(layer_id, hidden, [])
        routing = model.route(layer_id, hidden)
        assert routing.experts.shape == (0, 4)
        outputs = torch.zeros(0, 4, 96)
        hidden = model.combine(hidden, outputs, routing.gates)
    assert model.run_expert({n: t[0] for n, t in model.expert_tensors(0).items()}, hidden).shape == (0, 96)
    assert model.next_tokens(hidden, []) == []


def test_draws_depend_on_seed_request_and_position_alone() -> None:
    base = gumbel_noise(0, Draw(1, 2), 256)
    assert np.array_equal(base, gumbel_noise(0, Draw(1, 2), 256))
    for other in (gumbel_noise(1, Draw(1, 2), 256), gumbel_noise(0, Draw(2, 2), 256), gumbel_noise(0, Draw(1, 3), 256)):
        assert not np.array_equal(base, other)


def test_sampling_follows_the_softmax_at_the_temperature() -> None:
    config = TinyMoeConfig(vocabulary=4, width=8, num_heads=2, num_experts=4, top_k=2, expert_width=8, num_layers=1)
    weights = random_weights(config, seed=0)
    small = TinyMoe(config, weights)
    row = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    expected = torch.softmax(small.logits(row)[0].double() / config.temperature, dim=-1).numpy()
    draws = [Draw(request_id, 5) for request_id in range(4000)]
    tokens = small.next_tokens(row.expand(4000, 8), draws)
    observed = np.bincount(tokens, minlength=4) / 4000
    assert np.abs(observed - expected).max() < 0.04


def test_attention_reads_earlier_tokens_but_never_later_ones(model: TinyMoe) -> None:
    def last_hidden(prompt: bytes, row: int) -> Tensor:
        hidden = model.embed(torch.tensor(list(prompt)))
        return model.attend(0, hidden, [Span(model.new_cache(), 0, len(prompt))])[row]

    assert torch.allclose(last_hidden(b"abcd", 1), last_hidden(b"abzz", 1), atol=1e-6)
    assert not torch.allclose(last_hidden(b"abcd", 3), last_hidden(b"zbcd", 3), atol=1e-4)


def test_decode_step_sees_what_a_prefill_sees(model: TinyMoe) -> None:
    """Shapes differ, so only close: serving never mixes the two, since a prompt is always prefilled whole."""
    tokens = model.embed(torch.tensor(list(b"the quick brown")))
    whole = model.attend(1, tokens, [Span(model.new_cache(), 0, len(tokens))])
    cache = model.new_cache()
    stepped = torch.cat([model.attend(1, tokens[index : index + 1], [Span(cache, 0, 1)]) for index in range(len(tokens))])
    assert torch.allclose(whole, stepped, atol=1e-4)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 2)], "2 of 4 rows belong to no span"),
        ([(0, 3), (2, 2)], "overlaps"),
        ([(0, 5)], "does not lie within the 4 rows"),
        ([(0, 4), (1, 0)], "does not lie within"),
    ],
)
def test_spans_that_do_not_fit_the_batch_are_refused(model: TinyMoe, spans: list[tuple[int, int]], message: str) -> None:
    made = [Span(model.new_cache(), start, count) for start, count in spans]
    with pytest.raises(TinyMoeError, match=message):
        model.attend(0, torch.zeros(4, 96), made)


def test_split_prompt_and_overlong_request_are_refused_and_leave_the_cache_alone(model: TinyMoe) -> None:
    cache = model.new_cache()
    model.attend(0, torch.zeros(3, 96), [Span(cache, 0, 3)])
    with pytest.raises(TinyMoeError, match="already holds 3 tokens"):
        model.attend(0, torch.zeros(2, 96), [Span(cache, 0, 2)])
    with pytest.raises(TinyMoeError, match="257 tokens does not fit the context of 256"):
        model.attend(0, torch.zeros(257, 96), [Span(model.new_cache(), 0, 257)])
    assert cache.layer_length(0) == 3
    assert cache.length == 0  # the other layers hold nothing yet


def test_oracle_refuses_an_empty_prompt_and_too_many_tokens(model: TinyMoe) -> None:
    oracle = Oracle(model)
    with pytest.raises(TinyMoeError, match="prompt of request 4 is empty"):
        oracle.generate(4, b"", 3)
    with pytest.raises(TinyMoeError, match="ask for 1 to 7 new tokens"):
        oracle.generate(4, b"x" * 250, 8)


def test_tiles_are_eight_rows() -> None:
    assert TILE_ROWS == 8
