"""What `make test-vllm-e2e` compares with: each comparison lets the right through, and stops at what is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.vllm_e2e import checks
from tests.vllm_e2e.checks import CountsDifferError, OutputsDifferError, RankView, WeightsDifferError
from tests.vllm_e2e.plain_model import NUM_EXPERTS, NUM_LAYERS, Expected, Output
from tests.vllm_e2e.tape import Tape, places_of

ROW = [0, 1, 2, 0, 3, 1]
KNOWN = [{expert: f"weights of {expert}" for expert in range(4)}]


def view_of(rank: int, row: list[int] = ROW) -> RankView:
    slots = row[rank * 3 : (rank + 1) * 3]
    return RankView(
        rows=np.array([row]),
        replicas=[[[slot for slot, there in enumerate(row) if there == expert] for expert in range(4)]],
        digests=[[KNOWN[0][expert] for expert in slots]],
        slot_loads=np.array([[4, 0, 2, 1, 0, 1]]),
        outcomes={},
    )


def test_weights_that_follow_the_map_are_right_and_one_that_does_not_is_named() -> None:
    views = [view_of(0), view_of(1)]
    assert checks.digests_by_expert(views) == KNOWN
    assert checks.weights_follow("now", views, KNOWN).tolist() == [ROW]
    views[1] = dataclasses.replace(views[1], digests=[[KNOWN[0][2], KNOWN[0][3], KNOWN[0][1]]])
    with pytest.raises(WeightsDifferError, match=r"slot 3 of layer 0 does not hold expert 0 but \[2\]"):
        checks.weights_follow("now", views, KNOWN)


def test_ranks_with_different_maps_or_tables_are_named() -> None:
    with pytest.raises(WeightsDifferError, match="rank 1 routes by"):
        checks.same_map("now", [view_of(0), view_of(1, [0, 1, 2, 3, 0, 1])])
    with pytest.raises(WeightsDifferError, match=r"rank 0 sends expert 0 of layer 0 to slots \[0\], it is in \[0, 3\]"):
        checks.same_map("now", [dataclasses.replace(view_of(0), replicas=[[[0], [1, 5], [2], [4]]])])


def test_another_token_or_another_logprob_is_another_output() -> None:
    wanted = Expected(
        prompt=(1,), output=Output(tokens=(5, 6), logprobs=(-1.0, -2.0)), steps=np.zeros((2, 1, 4), dtype=np.int64)
    )
    close = Output(tokens=(5, 6), logprobs=(-1.0, -2.00001))
    assert checks.outputs_equal("now", [wanted], [close]) == pytest.approx(1e-5)
    for wrong in (Output(tokens=(5, 7), logprobs=(-1.0, -2.0)), Output(tokens=(5, 6), logprobs=(-1.0, -2.1))):
        with pytest.raises(OutputsDifferError):
            checks.outputs_equal("now", [wanted], [wrong])


def test_one_token_that_is_counted_otherwise_is_named() -> None:
    wanted = np.array([[4, 0, 2]])
    checks.counts_equal("now", wanted, wanted.astype(np.float64))
    with pytest.raises(CountsDifferError, match="3 tokens of expert 2 of layer 0"):
        checks.counts_equal("now", wanted, np.array([[4.0, 0.0, 3.0]]))


def test_loads_of_slots_are_those_of_experts_and_of_ranks() -> None:
    loads = view_of(0).slot_loads
    assert checks.by_expert(np.array([ROW]), loads, 4).tolist() == [[5, 1, 2, 0]]
    assert checks.imbalance(loads, 2) == pytest.approx(6 / 4)


def test_steps_that_make_up_a_load_are_found_and_no_others() -> None:
    random = np.random.default_rng(0)
    steps = [random.integers(0, 50, size=(40, NUM_LAYERS, NUM_EXPERTS)) for _ in range(2)]
    tapes = Tape(8), Tape(8)
    for tape, made in zip(tapes, steps, strict=True):
        tape.add(made[:30])
        tape.add(made[30:])
    load = steps[0][11:19].sum(axis=0) + steps[1][:5].sum(axis=0)
    assert places_of(load, tapes, (0, 0), (40, 40)) == (19, 5)
    assert places_of(load, tapes, (20, 0), (40, 40)) is None
    load[0, 0] += 1
    assert places_of(load, tapes, (0, 0), (40, 40)) is None
