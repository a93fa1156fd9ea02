"""Training repeats from a seed, and what it trains is what is served."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from examples.tiny_moe.config import TinyMoeConfig, TinyMoeError
from examples.tiny_moe.generate import run_experts
from examples.tiny_moe.model import Span, TinyMoe
from examples.tiny_moe.muon import Muon, orthogonalise
from examples.tiny_moe.train import Recipe, lr_factor, quantise_in_place, train, update_biases
from examples.tiny_moe.trainable import TrainableTinyMoe, moe

SMALL = TinyMoeConfig(width=16, num_heads=2, num_experts=4, top_k=2, expert_width=8, num_layers=2, context=16)
TEXTS = {"one": bytes(range(256)) * 4, "two": b"to be or not to be, " * 50}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rounding depends on the number of threads, so fix it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_recipe(*, seed: int = 0, steps: int = 2) -> Recipe:
    return Recipe(steps=steps, seed=seed, sequences_per_kind=2, length=16, warm_up_steps=1, report_every=1)


def trained(*, seed: int = 0, steps: int = 2) -> TrainableTinyMoe:
    return train(SMALL, small_recipe(seed=seed, steps=steps), TEXTS, lambda _line: None)


def test_same_seed_gives_the_same_weights_and_another_seed_does_not() -> None:
    one, again, other = trained(), trained(), trained(seed=1)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(one.embedding, other.embedding)


def test_training_moves_every_parameter_and_lowers_the_loss() -> None:
    start = TrainableTinyMoe(SMALL, seed=0)
    end = trained(steps=40)
    for name, parameter in start.named_parameters():
        assert not torch.equal(parameter, end.get_parameter(name)), name
    tokens = torch.tensor([list(TEXTS["two"][:17])])
    with torch.no_grad():
        assert float(end.loss(tokens)) < 0.7 * float(start.loss(tokens))


def test_served_model_computes_what_was_trained() -> None:
    model = trained(steps=20)
    quantise_in_place(model)
    served = TinyMoe(SMALL, model.to_weights())
    prompt = list(b"or not to be, to")
    hidden = served.embed(torch.tensor(prompt))
    spans = [Span(served.new_cache(), 0, len(prompt))]
    for layer_id in served.moe_layer_ids():
        hidden = served.attend(layer_id, hidden, spans)
        routing = served.route(layer_id, hidden)
        hidden = served.combine(hidden, run_experts(served, layer_id, routing), routing.gates)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]))[0]
    assert torch.allclose(served.logits(hidden), expected, atol=2e-4)


def test_experts_by_sort_equal_every_expert_on_every_row() -> None:
    layer = TrainableTinyMoe(SMALL, seed=3).typed_layers()[0]
    layer.selection_bias.copy_(torch.tensor([0.0, 5.0, 0.0, -5.0]))
    inputs = torch.randn(21, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.router_bias.copy_(torch.tensor([0.3, 0.0, -0.2, 0.1]))
    logits = inputs @ layer.router.t() + layer.router_bias
    inner = torch.relu(torch.einsum("nd,efd->nef", inputs, layer.up))
    dense = torch.einsum("nef,edf->ned", inner * inner, layer.down)
    expected = torch.zeros_like(inputs)
    for row in range(21):
        chosen = (logits[row] + layer.selection_bias).topk(2).indices
        gates = torch.softmax(logits[row, chosen], dim=0)
        expected[row] = gates @ dense[row, chosen]
    assert torch.allclose(moe(layer, inputs, 2), expected, atol=1e-5)
    assert int(layer.load[1]) == 21
    assert int(layer.load.sum()) == 42


def test_selection_bias_lifts_cold_experts_then_becomes_part_of_the_router() -> None:
    recipe = Recipe(steps=10, bias_step=0.5)
    selection, router, load = torch.zeros(3), torch.zeros(3), torch.tensor([9.0, 5.0, 1.0])
    of_selection, of_router = [], []
    for step in range(10):
        update_biases(recipe, step, selection=selection, router=router, load=load)
        of_selection.append(float(selection[2]))
        of_router.append(float(router[2]))
        assert selection.tolist()[:2] == [-of_selection[-1], 0.0]
        assert router.tolist()[:2] == [-of_router[-1], 0.0]
    assert of_selection == [0.5, 1.0, 1.5, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert of_router == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_only_a_starving_expert_is_helped_after_the_first_phase() -> None:
    recipe = Recipe(steps=10, bias_step=0.5)
    selection, router, load = torch.zeros(4), torch.zeros(4), torch.tensor([99.0, 20.0, 2.0, 0.0])
    update_biases(recipe, 9, selection=selection, router=router, load=load)
    assert router.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert selection.tolist() == [0.0] * 4


def test_learning_rate_warms_up_stays_and_falls() -> None:
    recipe = Recipe(steps=100, warm_up_steps=10)
    factors = [lr_factor(recipe, step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:60] == [1.0] * 51
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[60:]))
    assert 0.05 <= factors[-1] < 0.08


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((3, 8, 16), (2, 16, 8), (12, 12)):
        matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalise(matrices))
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.3


def test_muon_descends_a_quadratic_and_skips_what_has_no_gradient() -> None:
    target = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    weight, idle = torch.zeros(4, 6, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    muon = Muon([weight, idle])
    distance = [float((weight.detach() - target).norm())]
    for _ in range(30):
        ((weight - target) ** 2).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        muon.step(0.1)
        distance.append(float((weight.detach() - target).norm()))
    assert distance[-1] < 0.6 * distance[0]
    assert weight.grad is None
    assert torch.equal(idle, torch.ones(2, 2))


def test_too_few_steps_or_too_little_text_is_refused() -> None:
    with pytest.raises(TinyMoeError, match="asked for 0 steps"):
        train(SMALL, small_recipe(steps=0), TEXTS, lambda _line: None)
    with pytest.raises(TinyMoeError, match="only 5 bytes of short, a sequence needs 17"):
        train(SMALL, small_recipe(), {"short": b"abcde"}, lambda _line: None)
