"""The shipped model routes as real ones do: skewed, differently for each kind of text, with no dead expert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from examples.tiny_moe.measure import (
    NUM_RANKS,
    Loads,
    contiguous_placement,
    expert_loads,
    greedy_placement,
    hottest_to_mean,
    imbalance,
    total_variation,
    worst_layer,
)
from examples.tiny_moe.model import TinyMoe
from examples.tiny_moe.numerics import configure_torch
from examples.tiny_moe.text import KINDS, prompts


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Serve as a serving process does, then give the threads back."""
    threads = torch.get_num_threads()
    configure_torch()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loads() -> dict[str, Loads]:
    """Loads of each kind on a small sample of prompts."""
    model = TinyMoe.load()
    return {kind: expert_loads(model, prompts(kind, 48, length=96, seed=11)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_hottest_expert_has_half_as_much_again_as_the_mean_in_most_layers(loads: dict[str, Loads], kind: str) -> None:
    ratios = hottest_to_mean(loads[kind])
    assert (ratios >= 1.5).sum() > len(ratios) / 2, ratios


def test_no_expert_is_dead_over_all_kinds(loads: dict[str, Loads]) -> None:
    total = np.sum(list(loads.values()), axis=0)
    assert total.shape == (4, 32)
    assert total.min() > 0


def test_popularity_shifts_between_kinds(loads: dict[str, Loads]) -> None:
    for index, one in enumerate(KINDS):
        for other in KINDS[index + 1 :]:
            assert total_variation(loads[one], loads[other]).mean() > 0.08, (one, other)
    assert total_variation(loads["code"], loads["logs"]).mean() > 0.2


def test_own_plan_beats_linear_and_a_stale_plan_is_visibly_worse(loads: dict[str, Loads]) -> None:
    linear = [contiguous_placement(32)] * 4
    plans = {kind: [greedy_placement(load) for load in loads[kind]] for kind in KINDS}
    for kind in KINDS:
        own = worst_layer(loads[kind], plans[kind])
        assert own < 1.05
        assert worst_layer(loads[kind], linear) > own + 0.1
    assert worst_layer(loads["logs"], plans["code"]) > worst_layer(loads["logs"], plans["logs"]) + 0.1
    assert worst_layer(loads["code"], plans["logs"]) > worst_layer(loads["code"], plans["code"]) + 0.1


def test_greedy_gives_the_hot_expert_its_replicas_on_distinct_ranks() -> None:
    load = np.ones(32, np.int64)
    load[5] = 40
    placement = greedy_placement(load)
    assert [len(rank) for rank in placement] == [9] * NUM_RANKS
    assert sum(5 in rank for rank in placement) == NUM_RANKS
    assert {expert for rank in placement for expert in rank} == set(range(32))
    assert all(len(set(rank)) == len(rank) for rank in placement)


def test_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    load = np.array([4, 0, 2, 2, 0, 0, 0, 0], np.int64)
    assert imbalance(load, contiguous_placement(8)) == pytest.approx(4 / 2)
    assert imbalance(np.ones(8, np.int64), contiguous_placement(8)) == pytest.approx(1.0)
    shared = [[0, 1], [0, 2], [3, 4, 5], [6, 7]]
    assert imbalance(load, shared) == pytest.approx(4 / 2)  # rank 1: half of expert 0, all of expert 2


def test_total_variation_of_disjoint_loads_is_one() -> None:
    one, other = np.array([[3, 0, 1], [1, 1, 1]]), np.array([[0, 8, 0], [2, 2, 2]])
    assert total_variation(one, other).tolist() == [1.0, 0.0]
