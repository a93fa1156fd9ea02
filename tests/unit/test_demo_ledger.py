"""The demo's ledger: spans of serving, comparisons on the same load, slots that moved and served."""

from __future__ import annotations

import numpy as np
import pytest

from agent.engine.reference.messages import Inspection, LayerInspection, RankState
from demo.ledger import ASSIGNMENTS_MIN, COMMIT_STEPS, Ledger
from eplb_service.ids import LayerRef, RankId
from eplb_service.placement import row_digest
from eplb_service.topology import Topology

LINEAR = (0, 1, 2, 2, 3, 0)  # 2 ranks x 3 slots, 4 experts: slot 2 holds a copy of expert 2, slot 5 one of expert 0
MOVED = (0, 1, 2, 0, 3, 2)


def inspections(
    row: tuple[int, ...],
    sent: tuple[int, ...],
    *,
    generation: int = 0,
    served: tuple[int, ...] = (0,) * 6,
    layers: int = 1,
    boundary: int = 1,
    flip_boundary: int = -1,
) -> list[Inspection]:
    """What both ranks say: each sent half of `sent` to the slots."""
    found = []
    for rank in range(2):
        layer = [
            LayerInspection(
                layer_id=layer_id,
                generation=generation,
                row=row,
                row_digest=row_digest(LayerRef("m", layer_id), np.array(row)),
                slot_digests=(0, 0, 0),
                tokens=(0, 0, 0),
                tokens_since_flip=served[rank * 3 : rank * 3 + 3],
                flip_boundary=flip_boundary,
                sent=tuple(count // 2 for count in sent),
            )
            for layer_id in range(layers)
        ]
        found.append(
            Inspection(
                tag=1, rank_id=rank, state=next(iter(RankState)), boundary=boundary, real_tokens=0, dummy_steps=0,
                waiting=0, running=0, layers=tuple(layer),
            )
        )  # fmt: skip
    return found


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(model="m", num_logical=4, topology=Topology((RankId(0), RankId(1)), ("a", "b")))


MANY = ASSIGNMENTS_MIN
SOME = (MANY, 0, 0, 0, 0, 0)


def test_load_of_a_span_is_what_was_sent_since_it_began_by_expert(ledger: Ledger) -> None:
    assert ledger.offer(inspections(LINEAR, (10, 20, 30, 40, 50, 60)))
    assert ledger.offer(inspections(LINEAR, (12, 20, 34, 48, 50, 66)))
    (span,) = ledger.spans
    assert span.loads.tolist() == [[2 + 6, 0, 4 + 8, 0]]


def test_ranks_on_different_rows_are_not_taken_and_say_so(ledger: Ledger) -> None:
    before, after = inspections(LINEAR, SOME), inspections(MOVED, SOME, generation=1)
    assert not ledger.offer([before[0], after[1]])
    assert ledger.spans == []


def test_a_placement_is_compared_with_the_one_before_on_its_own_load(ledger: Ledger) -> None:
    """All load is expert 0's: as loaded its copies are on both ranks, in the next placement both are on rank 0."""
    together = (0, 0, 2, 1, 3, 2)
    ledger.offer(inspections(LINEAR, (0,) * 6))
    ledger.offer(inspections(LINEAR, (0, 2 * MANY, 0, 0, 0, 0)))  # load of the first span: no part of the comparison
    ledger.offer(inspections(together, (0, 2 * MANY, 0, 0, 0, 0), generation=1))
    ledger.offer(inspections(together, (MANY, 2 * MANY, 0, 0, 0, 0), generation=1))
    (comparison,) = ledger.comparisons()
    assert (comparison.generation, comparison.previous, comparison.tokens) == (1, 0, MANY)
    assert comparison.layers == ("layer 0",)
    assert comparison.rank_loads_before.tolist() == [[MANY / 2, MANY / 2]]
    assert comparison.rank_loads_after.tolist() == [[MANY, 0]]
    assert (comparison.before.worst, comparison.after.worst) == (1.0, 2.0)


def test_a_span_that_served_too_little_is_not_compared(ledger: Ledger) -> None:
    ledger.offer(inspections(LINEAR, (0,) * 6))
    ledger.offer(inspections(MOVED, (0,) * 6, generation=1))
    ledger.offer(inspections(MOVED, (MANY - 2, 0, 0, 0, 0, 0), generation=1))
    assert ledger.comparisons() == []
    assert len(ledger.settled()) == 1


def test_after_the_prompts_changed_a_span_takes_no_more_load(ledger: Ledger) -> None:
    ledger.offer(inspections(LINEAR, (0,) * 6))
    ledger.offer(inspections(LINEAR, SOME))
    ledger.prompts_changed()
    ledger.offer(inspections(LINEAR, (MANY, 0, 0, 0, 2 * MANY, 0)))
    assert ledger.spans[0].loads.sum() == MANY
    ledger.offer(inspections(MOVED, (MANY, 0, 0, 0, 2 * MANY, 0), generation=1))
    ledger.offer(inspections(MOVED, (MANY, 0, 0, 0, 4 * MANY, 0), generation=1))
    assert ledger.spans[1].loads.tolist() == [[0, 0, 0, 2 * MANY]]


@pytest.mark.parametrize(
    ("flip_boundary", "stale"), [(90, True), (100 + 35 + COMMIT_STEPS, True), (100 + 36 + COMMIT_STEPS, False)]
)
def test_generation_that_was_planned_mostly_from_earlier_prompts_is_told_apart(flip_boundary: int, stale: bool) -> None:
    ledger = Ledger(model="m", num_logical=4, topology=Topology((RankId(0), RankId(1)), ("a", "b")), planned_steps=72)
    ledger.prompts_changed()  # the first prompts: there were none before
    ledger.offer(inspections(LINEAR, (0,) * 6))
    ledger.offer(inspections(MOVED, (0,) * 6, generation=1, boundary=20, flip_boundary=16))
    ledger.offer(inspections(MOVED, SOME, generation=1, boundary=100, flip_boundary=16))
    ledger.prompts_changed()
    ledger.offer(inspections(LINEAR, SOME, generation=2, boundary=160, flip_boundary=flip_boundary))
    ledger.offer(inspections(LINEAR, (2 * MANY, 0, 0, 0, 0, 0), generation=2, boundary=170, flip_boundary=flip_boundary))
    assert [comparison.of_prompts_before for comparison in ledger.comparisons()] == [False, stale]


def test_slots_that_moved_count_as_served_only_when_they_computed_tokens(ledger: Ledger) -> None:
    ledger.offer(inspections(LINEAR, (0,) * 6))
    ledger.offer(inspections(MOVED, (0,) * 6, generation=1))
    ledger.offer(inspections(MOVED, SOME, generation=1, served=(9, 9, 9, 0, 9, 5)))
    (moved,) = ledger.moved_slots()
    assert (moved.generation, moved.moved, moved.served) == (1, 2, 1)  # slots 3 and 5 changed, only 5 served
