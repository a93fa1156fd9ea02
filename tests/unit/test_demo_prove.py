"""The demo's proof: it holds on good evidence, and each of its checks fails on evidence that must fail it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent.engine.reference.messages import Inspection, LayerInspection, RankState
from agent.engine.reference.model import checkpoint_digests
from demo.ledger import MovedSlots
from demo.model import load
from demo.oracle import Judged
from demo.prove import Evidence, prove
from demo.result import Check, Comparison, DemoResult, GenerationRow
from eplb_service.ids import LayerRef
from eplb_service.placement import row_digest

SLOTS = 17
NAMES = {
    "tokens": "every token equals",
    "across": "requests were served across flips",
    "flips": "generations went live",
    "one placement": "one placement per batch",
    "same step": "the planner recorded the steps",
    "same rows": "all ranks hold the same routing tables",
    "weights": "weights follow the map",
    "moved": "slots that moved then served",
    "gate": "the gate chose every generation that nobody ordered",
    "gain": "on the same later window",
}


@pytest.fixture(scope="module")
def digests() -> dict[int, tuple[int, ...]]:
    """Of every expert of the shipped model, by layer."""
    model = load()
    return {layer_id: checkpoint_digests(model, layer_id) for layer_id in model.moe_layer_ids()}


def inspection(rank: int, digests: dict[int, tuple[int, ...]]) -> Inspection:
    layers = []
    for layer_id, right in digests.items():
        row = (*range(16), -1, *range(16, 32), 0)
        held = row[rank * SLOTS : (rank + 1) * SLOTS]
        layers.append(
            LayerInspection(
                layer_id=layer_id,
                generation=2,
                row=row,
                row_digest=row_digest(LayerRef("target", layer_id), np.array(row)),
                slot_digests=tuple(right[expert] if expert >= 0 else 123 for expert in held),
                tokens=(0,) * SLOTS,
                tokens_since_flip=(0,) * SLOTS,
                flip_boundary=48,
                sent=(0,) * 2 * SLOTS,
            )
        )
    return Inspection(
        tag=1, rank_id=rank, state=RankState.SERVING, boundary=90, real_tokens=1, dummy_steps=0, waiting=0, running=0,
        layers=tuple(layers),
    )  # fmt: skip


def generation(number: int) -> GenerationRow:
    return GenerationRow(
        generation=number, phase="code", reason="it pays", seconds=number, predicted_mean=1, predicted_worst=1, observed_mean=1,
        observed_worst=1, moves=3, bytes_moved=300, rollout_s=0.1, flip_boundaries=(24 * number,), state="active",
    )  # fmt: skip


def comparison(number: int, *, before: float = 300.0, after: float = 210.0) -> Comparison:
    return Comparison(
        generation=number, previous=number - 1, tokens=400, layers=("layer 0",),
        rank_loads_before=np.array([[before, 400 - before]]), rank_loads_after=np.array([[after, 400 - after]]),
    )  # fmt: skip


class Case:
    """Good evidence, to be spoiled in one way."""

    def __init__(self, digests: dict[int, tuple[int, ...]]) -> None:
        self.result = DemoResult(
            ranks=2, policy="greedy", seconds=20, setup_s=1, generations=[generation(1), generation(2)],
            comparisons=[comparison(1), comparison(2)],
        )  # fmt: skip
        self.serving: Any = SimpleNamespace(requests=2, across_a_flip=1, boundaries_compared=90, flip_boundaries=[24, 48])
        self.oracle: Any = SimpleNamespace(
            judged=[Judged(1, 8, 0, -1, -1), Judged(2, 8, 0, -1, -1)], waiting=0, tokens_checked=16, mismatches=0
        )
        self.moved = [MovedSlots(1, 3, 3), MovedSlots(2, 3, 3)]
        self.ledger: Any = SimpleNamespace(moved_slots=lambda: self.moved)
        self.inspections = [inspection(rank, digests) for rank in range(2)]

    def checks(self) -> list[Check]:
        return prove(self.result, Evidence(self.serving, self.oracle, self.ledger, self.inspections, []))

    def relayer(self, rank: int, **changes: Any) -> None:
        """Change the last layer of a rank."""
        found = self.inspections[rank]
        layers = (*found.layers[:-1], replace(found.layers[-1], **changes))
        self.inspections[rank] = replace(found, layers=layers)


def test_good_evidence_passes_every_check(digests: dict[int, tuple[int, ...]]) -> None:
    checks = Case(digests).checks()
    assert [check for check in checks if not check.passed] == []
    assert [next(key for key, start in NAMES.items() if check.name.startswith(start)) for check in checks] == list(NAMES)
    detail = {check.name: check.detail for check in checks}
    assert any(text.startswith(f"{len(digests) * 33} slots compared with the checkpoint") for text in detail.values())


def wrong_token(case: Case) -> None:
    case.oracle.judged[1] = Judged(2, 8, 1, 5, 101)
    case.oracle.mismatches = 1


def lost_request(case: Case) -> None:
    case.oracle.judged.pop()


def nothing_checked(case: Case) -> None:
    case.oracle.tokens_checked = 0


def not_all_judged(case: Case) -> None:
    case.oracle.waiting = 1


def nothing_across(case: Case) -> None:
    case.serving.across_a_flip = 0


def one_flip(case: Case) -> None:
    case.result.generations[1] = replace(case.result.generations[1], state="stopped")


def nothing_compared(case: Case) -> None:
    case.serving.boundaries_compared = 0


def tokens_never_changed_placement(case: Case) -> None:
    case.serving.flip_boundaries = []


def flip_at_another_step(case: Case) -> None:
    case.serving.flip_boundaries = [24, 49]


def another_row(case: Case) -> None:
    case.relayer(1, row_digest=99)


def a_scale_left_behind(case: Case) -> None:
    held = case.inspections[1].layers[-1].slot_digests
    case.relayer(1, slot_digests=(held[0] + 1, *held[1:]))


def a_map_without_its_weights(case: Case) -> None:
    row = case.inspections[0].layers[-1].row
    for rank in range(2):
        case.relayer(rank, row=(5, *row[1:]))


def moved_slots_idle(case: Case) -> None:
    case.moved = [MovedSlots(1, 10, 8)]


def nothing_moved(case: Case) -> None:
    case.moved = []


def no_reason(case: Case) -> None:
    case.result.generations[0] = replace(case.result.generations[0], reason="")


def no_moves(case: Case) -> None:
    case.result.generations = [replace(row, moves=0) for row in case.result.generations]


def worse_afterwards(case: Case) -> None:
    case.result.comparisons[1] = comparison(2, before=210.0, after=300.0)


def no_better(case: Case) -> None:
    case.result.comparisons[1] = comparison(2, before=210.0, after=210.0)


def only_one_comparison(case: Case) -> None:
    case.result.comparisons.pop()


def test_generation_overtaken_by_a_change_of_prompts_need_not_be_a_gain_nor_counts_as_one(
    digests: dict[int, tuple[int, ...]],
) -> None:
    case = Case(digests)
    overtaken = replace(comparison(3, before=210, after=300), of_prompts_before=True)
    case.result.comparisons = [comparison(1), comparison(2), overtaken]
    (gain,) = [check for check in case.checks() if check.name.startswith(NAMES["gain"])]
    assert gain.passed
    assert gain.detail.endswith("planned mostly from other prompts than it then served, not compared: [3]")
    case.result.comparisons = [comparison(1), overtaken]
    (gain,) = [check for check in case.checks() if check.name.startswith(NAMES["gain"])]
    assert not gain.passed


def test_what_an_operator_ordered_need_not_be_a_gain_nor_come_from_the_gate(digests: dict[int, tuple[int, ...]]) -> None:
    case = Case(digests)
    case.result.generations.append(replace(generation(3), by_operator=True, moves=0))
    case.result.comparisons.append(comparison(3, before=210.0, after=300.0))
    checks = case.checks()
    assert [check for check in checks if not check.passed] == []
    assert [check.detail.split(": ")[-1] for check in checks if "ordered by an operator" in check.detail] == ["[3]", "[3]"]


@pytest.mark.parametrize(
    ("spoil", "fails", "words"),
    [
        (wrong_token, {"tokens"}, "first: request 2, token 5 should be 101"),
        (lost_request, {"tokens"}, "of 1 requests"),
        (nothing_checked, {"tokens"}, "0 tokens"),
        (not_all_judged, {"tokens"}, "16 tokens"),
        (nothing_across, {"across"}, "0 requests"),
        (one_flip, {"flips"}, "1 generations"),
        (nothing_compared, {"one placement"}, "0 steps"),
        (tokens_never_changed_placement, {"one placement", "same step"}, "seen in the tokens []"),
        (flip_at_another_step, {"same step"}, "recorded [24, 48], seen in the tokens [24, 49]"),
        (another_row, {"same rows"}, "2 different sets of row digests"),
        (a_scale_left_behind, {"weights"}, "wrong: rank 1 layer"),
        (a_map_without_its_weights, {"weights"}, "wrong: rank 0 layer"),
        (moved_slots_idle, {"moved"}, "8 of 10 slots"),
        (nothing_moved, {"moved"}, "0 of 0 slots"),
        (no_reason, {"gate"}, "without a reason: [1]"),
        (no_moves, {"gate"}, "0 experts moved"),
        (worse_afterwards, {"gain"}, "generation 2: 1.050 -> 1.500"),
        (no_better, {"gain"}, "generation 2: 1.050 -> 1.050"),
        (only_one_comparison, {"gain"}, "generation 1"),
    ],
)
def test_each_check_fails_on_what_must_fail_it(
    digests: dict[int, tuple[int, ...]], spoil: Callable[[Case], None], fails: set[str], words: str
) -> None:
    case = Case(digests)
    spoil(case)
    failed = [check for check in case.checks() if not check.passed]
    assert {next(key for key, start in NAMES.items() if check.name.startswith(start)) for check in failed} == fails
    assert any(words in check.detail for check in failed), [check.detail for check in failed]
