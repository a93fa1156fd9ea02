"""A model of transformers on two ranks with our hook: counts, moves, flips and outputs against transformers in one process.

Outputs are compared bit for bit with what transformers' own `generate` gives (experts_implementation="batched_mm", float32).
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.engine.huggingface.found import find_experts
from agent.engine.reference.launch import free_port
from agent.engine.reference.messages import LayerInspection
from agent.engine.reference.model import checkpoint_digests
from eplb_service.errors import ConflictError
from eplb_service.ids import RankId
from eplb_service.placement import Placement, Table
from eplb_service.rollout.events import Outcome
from tests.integration.rollout_driver import RolloutDriver
from tests.integration.small_service import Service
from tests.integration.transformers_fleet import (
    MOE_LAYERS,
    NUM_EXPERTS,
    NUM_RANKS,
    REDUNDANT,
    TOP_K,
    VOCABULARY,
    Alone,
    Group,
    GroupPlan,
    Prompts,
    Ranks,
    Result,
    generate_alone,
    preload,
    tiny_qwen,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed; pip install 'eplb-service[dev]' brings it",
    ),
]
NEW_TOKENS = 12
LONG = 3000
"""More new tokens than a rollout can take: the driver ends these requests."""
PLANNER_WAIT_S = 120.0


def prompts(seed: int, *lengths: int) -> Prompts:
    random = np.random.default_rng(seed)
    return [random.integers(1, VOCABULARY, length).tolist() for length in lengths]


EVERYWHERE = (prompts(1, 9, 4, 1), prompts(2, 6, 6))


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The model in this process, as transformers alone runs it; meanwhile the server that ranks fork from imports it too."""
    preload()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield tiny_qwen()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ranks(model: Any) -> Iterator[Ranks]:
    ranks = Ranks.start()
    yield ranks
    ranks.close()


@pytest.fixture
def group(ranks: Ranks) -> Iterator[Group]:
    """A group as it was loaded."""
    group = Group(ranks)
    yield group
    group.close()


@pytest.fixture
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        service = Service(Path(folder))
        yield service
        for part in reversed(service.parts):
            part.stop()


def generated_alone(model: Any, everywhere: Sequence[Prompts], num_tokens: int) -> list[Alone]:
    return [generate_alone(model, own, num_tokens) for own in everywhere]


def wrong_outputs(results: Sequence[Result], alone: Sequence[Alone]) -> list[str]:
    """Every request and step whose logits have one wrong bit, and every wrong token."""
    wrong = []
    for position, (result, expected) in enumerate(zip(results, alone, strict=True)):
        for step, (ours, theirs) in enumerate(zip(result.logits, expected.logits, strict=True)):
            rows = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
            wrong += [f"rank at {position}, step {step}: logits of request {row}" for row in rows]
        if result.tokens != expected.tokens:
            wrong.append(f"rank at {position}: tokens {result.tokens} in place of {expected.tokens}")
    return wrong


def wrong_slots(model: Any, inspections: Sequence[Sequence[LayerInspection]], placement: Placement) -> list[str]:
    """Every slot that does not hold the bytes of the expert that the placement names, and every other row or boundary."""
    wrong = []
    digests = placement.row_digests()
    for index, ((layer, _, row), experts) in enumerate(zip(placement.layers(), find_experts(model), strict=True)):
        own = [inspection[index] for inspection in inspections]
        if {inspection.row_digest for inspection in own} != {digests[layer]}:
            wrong.append(f"layer {layer}: ranks route by {[inspection.row for inspection in own]} in place of {row.tolist()}")
        checkpoint = checkpoint_digests(experts, layer.layer_id)
        held = [digest for inspection in own for digest in inspection.slot_digests]
        wrong += [
            f"layer {layer}: slot {slot} does not hold expert {expert}"
            for slot, (digest, expert) in enumerate(zip(held, row.tolist(), strict=True))
            if expert >= 0 and digest != checkpoint[expert]
        ]
        if len({inspection.flip_boundary for inspection in own}) != 1:
            wrong.append(f"layer {layer}: flipped at boundaries {[inspection.flip_boundary for inspection in own]}")
    return wrong


def other_placement(placement: Placement, seed: int) -> Placement:
    """Every layer's experts at random, others than now replicated."""
    (table,) = placement.tables
    random = np.random.default_rng(seed)
    rows = []
    for row in table.physical_to_logical:
        single = np.flatnonzero(np.bincount(row) == 1)
        rows.append(random.permutation(np.concatenate([np.arange(NUM_EXPERTS), random.choice(single, REDUNDANT)])))
    physical = np.stack(rows).astype(np.int32)
    return Placement((Table(table.model, table.layer_ids, table.num_logical, table.rank_ids, physical),))


def test_two_ranks_give_the_bits_of_the_model_in_one_process(group: Group, model: Any) -> None:
    results = group.serve(EVERYWHERE, NEW_TOKENS)
    assert wrong_outputs(results, generated_alone(model, EVERYWHERE, NEW_TOKENS)) == []
    assert [len(result.tokens) for result in results] == [3, 2]


def test_the_default_kernels_of_transformers_give_the_same_tokens(group: Group) -> None:
    """They sum in another order: tokens are equal, logits to 1e-4 of their range."""
    default = tiny_qwen(experts_implementation="grouped_mm")
    for result, alone in zip(
        group.serve(EVERYWHERE, NEW_TOKENS), generated_alone(default, EVERYWHERE, NEW_TOKENS), strict=True
    ):
        assert result.tokens == alone.tokens
        for ours, theirs in zip(result.logits, alone.logits, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_hooks_report_each_ranks_own_tokens_as_the_models_gates_chose_them(group: Group, model: Any) -> None:
    uneven = (prompts(3, 12, 5), prompts(4, 3, 7, 2))
    alone = generated_alone(model, uneven, NEW_TOKENS)
    group.serve(uneven, NEW_TOKENS)
    reported = group.counts()
    for position in range(NUM_RANKS):
        assert reported[position].tolist() == alone[position].counts.tolist()
        tokens = sum(len(prompt) + NEW_TOKENS - 1 for prompt in uneven[position])
        assert reported[position].sum(axis=1).tolist() == [TOP_K * tokens] * len(MOE_LAYERS)
        own = [window for window in group.agent.windows if window.rank_id == 10 * (position + 1)]
        assert sum(window.tokens for window in own) == tokens


def test_a_rank_without_requests_computes_for_the_other_and_counts_nothing(group: Group, model: Any) -> None:
    own = prompts(5, 8, 3)
    (idle, busy) = group.serve(([], own), NEW_TOKENS)
    assert idle.tokens == []
    assert wrong_outputs([busy], [generate_alone(model, own, NEW_TOKENS)]) == []
    assert min(sum(layer.tokens) for layer in group.inspect()[0]) > 0
    reported = group.counts()
    assert reported[0].sum() == 0
    assert reported[1].sum() > 0


def test_a_request_that_has_ended_is_not_counted_and_changes_no_other(group: Group, model: Any) -> None:
    own = prompts(6, 5, 5, 5)
    alone = generate_alone(model, own, NEW_TOKENS)
    stop = alone.tokens[0][3]
    lengths = [tokens.index(stop) + 1 if stop in tokens else NEW_TOKENS for tokens in alone.tokens]
    assert lengths[0] <= 4 < max(lengths), "no request ends before another"
    (result, _) = group.serve((own, []), NEW_TOKENS, stop)
    assert result.tokens == [tokens[:length] for tokens, length in zip(alone.tokens, lengths, strict=True)]
    tokens = sum(len(prompt) + length - 1 for prompt, length in zip(own, lengths, strict=True))
    assert group.counts()[0].sum(axis=1).tolist() == [TOP_K * tokens] * len(MOE_LAYERS)


def test_experts_move_and_replicate_under_requests_that_do_not_notice(group: Group, model: Any) -> None:
    driver = RolloutDriver(group.agent)
    driver.until_live()
    group.begin(EVERYWHERE, LONG)
    group.step(2)
    for seed in (1, 2):
        target = other_placement(driver.live.placement, seed)
        finished = driver.roll_out(target, group.step)
        assert finished.outcome is Outcome.ACTIVE, finished
        group.step(4)
        inspections = group.inspect()
        assert wrong_slots(model, inspections, target) == []
        check_replicas_serve(inspections, group.ranks.ask("boundary")[0])
    results = group.results()
    steps = len(results[0].generations)
    assert wrong_outputs(results, generated_alone(model, EVERYWHERE, steps)) == []
    assert results[0].generations == results[1].generations
    assert {numbers[0] for numbers in results[0].generations} == {0, 1, 2}, "the requests lived through no flip"
    again = (prompts(7, 4), prompts(8, 11, 2))
    assert wrong_outputs(group.serve(again, NEW_TOKENS), generated_alone(model, again, NEW_TOKENS)) == []


def check_replicas_serve(inspections: Sequence[Sequence[LayerInspection]], boundary: int) -> None:
    """Since the flip every token of every request was computed, and each replica of an expert took its part of those."""
    for layers in zip(*inspections, strict=True):
        row = np.array(layers[0].row)
        served = np.concatenate([layer.tokens_since_flip for layer in layers])
        assert served.sum() == (boundary - layers[0].flip_boundary) * sum(map(len, EVERYWHERE)) * TOP_K
        for expert in np.flatnonzero(np.bincount(row) > 1):
            # Each of the ranks takes replicas in turn, and may be one ahead with any.
            assert np.ptp(served[row == expert]) <= NUM_RANKS


def test_a_planner_plans_from_what_hooks_report_and_moves_experts_under_requests(
    service: Service, ranks: Ranks, model: Any
) -> None:
    for part in service.parts:
        part.wait_ready()
    ranks.ask("start", GroupPlan(hook_port=free_port(), socket=service.socket))
    loaded = [layer.row for layer in ranks.ask("inspect")[0]]
    step_until(service.is_ready, ranks, service)
    ranks.ask_each("begin", [(own, LONG) for own in EVERYWHERE])
    step_until(service.has_ordered_a_rebalance, ranks, service)
    step_until(service.is_active, ranks, service)
    ranks.ask("step", 4)
    inspections = ranks.ask("inspect")
    rows = np.array([layer.row for layer in inspections[0]])
    assert rows.tolist() != [list(row) for row in loaded], "nothing moved"
    table = Table("target", MOE_LAYERS, NUM_EXPERTS, (RankId(10), RankId(20)), rows)
    assert wrong_slots(model, inspections, Placement((table,))) == []
    results = ranks.ask("result")
    assert wrong_outputs(results, generated_alone(model, EVERYWHERE, len(results[0].generations))) == []
    assert len(set(results[0].generations)) > 1, "the requests lived through no flip"
    ranks.ask("close")


def step_until(done: Callable[[], bool], ranks: Ranks, service: Service) -> None:
    """Step until something holds."""
    deadline = time.monotonic() + PLANNER_WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"waited {PLANNER_WAIT_S:g} s for {done.__name__}\n{service.last_words()}"
        ranks.ask("step", 4)


@pytest.mark.parametrize("fault", ["weightless", "one_rank_late"])
def test_a_broken_flip_is_caught_by_the_same_checks(ranks: Ranks, model: Any, fault: str) -> None:
    group = Group(ranks, fault=fault)
    driver = RolloutDriver(group.agent)
    target = other_placement(driver.until_live().placement, 1)
    group.begin(EVERYWHERE, LONG)
    group.step(2)
    finished = driver.roll_out(target, group.step)
    assert finished.outcome is Outcome.ACTIVE, finished
    group.step(4)
    slots = wrong_slots(model, group.inspect(), target)
    assert any("does not hold" in line for line in slots) == (fault == "weightless")
    assert any("flipped at" in line for line in slots) == (fault == "one_rank_late")
    results = group.results()
    steps = len(results[0].generations)
    assert any("logits" in line for line in wrong_outputs(results, generated_alone(model, EVERYWHERE, steps)))
    group.close()


def test_ranks_with_other_weights_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ConflictError, match=r"rank 20 has model digest .*, rank 10 has .*; give all ranks the same"):
        ranks.ask("start", GroupPlan(hook_port=0, seeds=(11, 12)))
