"""A Stage is checked in full before a byte moves: each way in which map and weights could part is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent.hook.stage_check import check_stage
from eplb_service.control import NO_RANK, Copy, LayerChange, RefusalCode
from eplb_service.ids import LayerRef, RankId, chunk_id
from eplb_service.placement import row_digest
from eplb_service.replica_shares import as_array, even_shares
from tests.unit.hook_chunk_parts import LAYER, OTHER, RANKS, ROW, SLOTS, copies, digest, live, shape, stage

GOOD = stage(chunk_id(1, 1))


def refused(made: Any, version: int = 0, **of_shape: Any) -> tuple[RefusalCode, str]:
    refusal = check_stage(made, replace(shape(), **of_shape), live(), version)
    assert refusal is not None
    return refusal


def test_a_right_chunk_passes_on_every_rank() -> None:
    for rank in RANKS:
        assert check_stage(GOOD, shape(rank), live(), 0) is None


def test_an_empty_slot_needs_no_copy() -> None:
    made = stage(chunk_id(1, 1), new=(0, 1, 2, 3, -1, 1))
    assert made.copies == ()
    assert check_stage(made, shape(), live(), 0) is None


@pytest.mark.parametrize("index", range(len(GOOD.copies)))
def test_every_copy_is_needed(index: int) -> None:
    fewer = GOOD.copies[:index] + GOOD.copies[index + 1 :]
    code, reason = refused(replace(GOOD, copies=fewer))
    assert (code, "needs 1 copies, the chunk has 0" in reason) == (RefusalCode.INVALID, True)


def test_a_slot_is_filled_once() -> None:
    code, reason = refused(replace(GOOD, copies=(*GOOD.copies, GOOD.copies[0])))
    assert (code, "the chunk has 2" in reason) == (RefusalCode.INVALID, True)


def test_a_copy_into_a_slot_that_keeps_its_expert_is_refused() -> None:
    kept = replace(GOOD.copies[0], expert=2, source_rank=RANKS[1], source_slot=0, target_rank=RANKS[1], target_slot=0)
    code, reason = refused(replace(GOOD, copies=(*GOOD.copies, kept)))
    assert (code, "needs 0 copies" in reason) == (RefusalCode.INVALID, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_slot": 1}, "the source slot holds expert"),
        ({"source_slot": 2}, "slots run from 0 to 1"),
        ({"target_slot": -1}, "slots run from 0 to 1"),
        ({"source_rank": RankId(5)}, "not part of this chunk and group"),
        ({"layer": LayerRef("m", 9)}, "not part of this chunk and group"),
        ({"target_rank": RANKS[1]}, "the new row puts expert"),
    ],
)
def test_a_copy_that_does_not_fit_the_rows_is_refused(changes: dict[str, Any], words: str) -> None:
    bad = replace(GOOD.copies[1], **changes)
    code, reason = refused(replace(GOOD, copies=(GOOD.copies[0], bad, *GOOD.copies[2:])))
    assert (code, words in reason) == (RefusalCode.INVALID, True), reason


RELAYS = stage(chunk_id(1, 1), new=(1, 2, 2, 3, 2, 0))
"""Copies: expert 1 to slot 0 of the first rank, expert 2 to its slot 1, experts 2 and 0 to the slots of the last."""
PASSED_ON = replace(RELAYS.copies[2], source_rank=RANKS[0], source_slot=1, relay_of=1)


def test_a_copy_may_pass_on_what_another_brings_to_its_source() -> None:
    for rank in RANKS:
        assert (
            check_stage(replace(RELAYS, copies=(*RELAYS.copies[:2], PASSED_ON, RELAYS.copies[3])), shape(rank), live(), 0)
            is None
        )


def test_a_relay_on_its_own_rank_fills_a_second_slot() -> None:
    made = stage(chunk_id(1, 1), new=(2, 2, 0, 3, 0, 1))
    twice = replace(made.copies[1], source_rank=RANKS[0], source_slot=0, relay_of=0)
    assert check_stage(replace(made, copies=(made.copies[0], twice, *made.copies[2:])), shape(), live(), 0) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relay_of": 2}, "it is copy 2 and a relay of copy 2; relays are of earlier copies, 0 to 1"),
        ({"relay_of": 3}, "a relay of copy 3; relays are of earlier copies, 0 to 1"),
        ({"relay_of": -2}, "a relay of copy -2; relays are of earlier copies, 0 to 1"),
        ({"relay_of": 0}, "copy 0, which it passes on, is of m/3 expert 1"),
        ({"source_rank": RANKS[1]}, "copy 1, which it passes on, goes to rank 4 slot 1"),
        ({"source_slot": 0}, "copy 1, which it passes on, goes to rank 4 slot 1"),
        ({"relay_of": -1}, "the source slot holds expert 1"),
    ],
)
def test_a_relay_of_what_does_not_come_there_is_refused(changes: dict[str, Any], words: str) -> None:
    bad = replace(PASSED_ON, **changes)
    code, reason = refused(replace(RELAYS, copies=(*RELAYS.copies[:2], bad, RELAYS.copies[3])))
    assert (code, words in reason) == (RefusalCode.INVALID, True), reason


def test_a_relay_of_a_relay_is_refused() -> None:
    made = stage(chunk_id(1, 1), new=(2, 1, 2, 3, 2, 0))
    to_first, to_last = made.copies[0], made.copies[1]
    passed = replace(to_last, source_rank=to_first.target_rank, source_slot=to_first.target_slot, relay_of=0)
    again = replace(to_last, source_rank=to_last.target_rank, source_slot=to_last.target_slot, target_slot=1, relay_of=1)
    code, reason = refused(replace(made, copies=(to_first, passed, again)))
    assert code is RefusalCode.INVALID
    assert "a relay of copy 1, itself a relay of copy 0; relays are one deep" in reason


def with_row(row: tuple[int, ...], **changes: Any) -> Any:
    change = LayerChange(layer=LAYER, old_digest=digest(ROW), new_digest=digest(row), new_row=row)
    return replace(GOOD, layers=(replace(change, **changes),), copies=copies(ROW, row) if len(row) == len(ROW) else ())


@pytest.mark.parametrize(
    ("made", "code", "words"),
    [
        (with_row(OTHER, old_digest=7), RefusalCode.OLD_DIGEST, "this rank routes by"),
        (with_row(OTHER, new_digest=7), RefusalCode.NEW_DIGEST, "the message says 0x7"),
        (with_row((0, 1, 2, 2, 0, 1)), RefusalCode.INVALID, "expert 3 would have no replica"),
        (with_row((0, 1, 2, 3, 0)), RefusalCode.INVALID, "row of 5 slots, expected 6"),
        (with_row((0, 1, 2, 3, 0, 1), layer=LayerRef("m", 4)), RefusalCode.INVALID, "serves no MoE layer m/4"),
        (replace(GOOD, layers=()), RefusalCode.INVALID, "changes no layer"),
        (replace(GOOD, layers=GOOD.layers * 2), RefusalCode.INVALID, "appears twice"),
    ],
)
def test_a_row_that_cannot_be_routed_by_is_refused(made: Any, code: RefusalCode, words: str) -> None:
    found, reason = refused(made)
    assert (found, words in reason) == (code, True), reason


@pytest.mark.parametrize("row", [(0, 1, 2, 3, 4, 1), (0, 1, 2, 3, -2, 1)])
def test_an_expert_that_does_not_exist_is_refused(row: tuple[int, ...]) -> None:
    change = LayerChange(layer=LAYER, old_digest=digest(ROW), new_digest=digest(row), new_row=row)
    assert refused(replace(GOOD, layers=(change,), copies=()))[0] is RefusalCode.INVALID


def test_more_replicas_than_the_tables_hold_are_refused() -> None:
    code, reason = refused(stage(chunk_id(1, 1), new=(3, 2, 1, 0, 0, 0)), replica_table_width=2)
    assert (code, "has 3 replicas, this engine's tables hold 2" in reason) == (RefusalCode.INVALID, True)


def test_another_weights_version_is_refused() -> None:
    assert refused(GOOD, version=3)[0] is RefusalCode.WEIGHTS_VERSION


def test_only_what_arrives_here_counts_against_the_budget() -> None:
    assert check_stage(GOOD, shape(RANKS[0], staging_bytes=200), live(), 0) is None
    assert refused(GOOD, staging_bytes=199) == (
        RefusalCode.BUDGET,
        "2 experts of 200 bytes exceed the staging budget of 199 bytes; use smaller chunks",
    )
    assert check_stage(GOOD, shape(RANKS[1], staging_bytes=0), live(), 0) is None  # its slots stay


SHARES = (0.25, 0.5, 1.0, 1.0, 0.75, 0.5)


def weighted(shares: tuple[float, ...] | None, *, row: tuple[int, ...] = ROW, **changes: Any) -> Any:
    """A chunk that changes the shares, and the row if that is another."""
    old = tuple(even_shares(np.array([ROW]), 4)[0].tolist())
    change = LayerChange(
        layer=LAYER,
        old_digest=row_digest(LAYER, np.array(ROW), np.array(old, np.float32)),
        new_digest=row_digest(LAYER, np.array(row), as_array(shares)),
        new_row=row,
        new_shares=shares,
    )
    return replace(GOOD, layers=(replace(change, **changes),), copies=copies(ROW, row))


def check_weighted(made: Any) -> tuple[RefusalCode, str] | None:
    shares = even_shares(np.array([ROW]), 4)[0]
    known = live()[LAYER]
    held = {LAYER: replace(known, digest=row_digest(LAYER, np.array(ROW), shares), shares=tuple(shares.tolist()))}
    return check_stage(made, replace(shape(), weighted=True), held, 0)


def test_shares_alone_or_with_other_slots_pass_on_a_weighted_engine() -> None:
    assert weighted(SHARES).copies == ()
    assert check_weighted(weighted(SHARES)) is None
    assert check_weighted(weighted((1.0, 0.5, 1.0, 0.5, 0.5, 0.5), row=(1, 0, 2, 3, 3, 0))) is None


@pytest.mark.parametrize(
    ("made", "code", "words"),
    [
        (weighted(None), RefusalCode.INVALID, "it comes without shares, this engine dispatches by them"),
        (weighted(SHARES[:-1]), RefusalCode.INVALID, "shape (layers, slots) = (1, 6); got float32 of shape (1, 5)"),
        (
            weighted((0.25, 0.5, 1.0, 1.0, 0.5, 0.5)),
            RefusalCode.INVALID,
            "the shares of expert 0 on its 2 slots add up to 0.75",
        ),
        (weighted((-1.0, 0.5, 1.0, 1.0, 2.0, 0.5)), RefusalCode.INVALID, "slot 0 has share -1.0"),
        (weighted((float("nan"), *SHARES[1:])), RefusalCode.INVALID, "slot 0 has share nan"),
        (weighted((1e300, *SHARES[1:])), RefusalCode.INVALID, "slot 0 has share inf"),
        (weighted(SHARES, new_digest=digest(ROW)), RefusalCode.NEW_DIGEST, "the row has digest"),
    ],
)
def test_shares_that_cannot_be_are_refused(made: Any, code: RefusalCode, words: str) -> None:
    refusal = check_weighted(made)
    assert refusal is not None
    assert (refusal[0], words in refusal[1]) == (code, True), refusal


def test_an_engine_with_another_dispatch_takes_no_shares() -> None:
    change = replace(weighted(SHARES).layers[0], old_digest=digest(ROW))
    code, reason = refused(replace(GOOD, layers=(change,), copies=()))
    assert (code, "it comes with shares, this engine's dispatch knows none" in reason) == (RefusalCode.INVALID, True)


def test_an_expert_that_died_with_its_rank_may_stay_away_or_come_back_and_no_other_may_go() -> None:
    lost = (0, 1, 2, -1, 0, 1)  # expert 3
    known = live(lost)
    for row, words in (
        ((1, 0, 2, -1, 0, 1), ""),
        ((0, 1, 3, 2, 0, 1), ""),
        ((0, 1, -1, -1, 0, 1), "expert 2 would have no replica"),
        ((0, 1, 3, -1, 0, 1), "expert 2 would have no replica"),
    ):
        change = LayerChange(layer=LAYER, old_digest=digest(lost), new_digest=digest(row), new_row=row)
        moved = tuple(
            Copy(
                layer=LAYER,
                expert=expert,
                source_rank=NO_RANK if expert == 3 else RANKS[lost.index(expert) // SLOTS],
                source_slot=0 if expert == 3 else lost.index(expert) % SLOTS,
                target_rank=RANKS[slot // SLOTS],
                target_slot=slot % SLOTS,
            )
            for slot, expert in enumerate(row)
            if expert not in (lost[slot], -1)
        )
        refusal = check_stage(replace(GOOD, layers=(change,), copies=moved), shape(), known, 0)
        assert ("" if refusal is None else refusal[1]) == (f"layer {LAYER}: {words}" if words else "")
