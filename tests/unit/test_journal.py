"""The journal of a rollout: bounded, marked where something is missing, read back as it was written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, RankId
from eplb_service.rollout.journal import (
    EVENTS_MAX,
    GAPS_MAX,
    HEAD_KEPT,
    LEAD_ENDED,
    TEXT_CHARACTERS_MAX,
    Journal,
    JournalEvent,
)
from eplb_service.rollout.journal_codec import decode_journal, encode_journal

GENERATION = GenerationNumber(7)


def event(number: int, name: str = "chunk.opened", *, epoch: int = 1, text: str = "") -> JournalEvent:
    return JournalEvent(at_s=float(number), epoch=Epoch(epoch), event=name, text=text or f"event {number}")


def journal(count: int) -> Journal:
    made = Journal(generation=GENERATION)
    for number in range(count):
        made = made.with_event(event(number))
    return made


def test_a_journal_that_is_full_keeps_how_it_began_and_the_newest_and_counts_the_rest() -> None:
    full = journal(EVENTS_MAX)
    assert (full.num_dropped, full.incomplete) == (0, "")
    over = journal(EVENTS_MAX + 100)
    assert len(over.events) == EVENTS_MAX
    assert [int(kept.at_s) for kept in over.events] == [*range(HEAD_KEPT), *range(HEAD_KEPT + 100, EVENTS_MAX + 100)]
    assert over.num_dropped == 100
    assert over.incomplete == f"100 events after the first {HEAD_KEPT} were left out: a journal keeps {EVENTS_MAX}"


def test_a_reason_that_is_a_book_is_cut() -> None:
    (kept,) = Journal(generation=GENERATION).with_event(event(0, text="x" * 100_000)).events
    assert len(kept.text) == TEXT_CHARACTERS_MAX
    assert kept.text.endswith("…")


def test_the_largest_journal_is_small() -> None:
    largest = Journal(generation=GENERATION)
    for number in range(2 * EVENTS_MAX):
        largest = largest.with_event(event(number, text="x" * 1000))
    for epoch in range(10 * GAPS_MAX):
        largest = largest.taken_up(Epoch(epoch + 2))
    assert len(encode_journal(largest)) < 300_000


def test_a_leader_that_takes_up_after_one_that_ended_in_good_order_notes_no_gap() -> None:
    ended = journal(3).with_event(event(3, LEAD_ENDED))
    assert ended.taken_up(Epoch(2)) == ended


def test_a_leader_that_takes_up_after_one_that_died_says_from_where_on_events_may_be_missing() -> None:
    taken = journal(3).taken_up(Epoch(2))
    assert taken.events == journal(3).events
    assert taken.incomplete == "the leader of epoch 1 died: what happened between chunk.opened and epoch 2 may be missing"
    again = taken.with_event(event(4, "lead.taken", epoch=2)).taken_up(Epoch(3))
    assert again.gaps[1] == "the leader of epoch 2 died: what happened between lead.taken and epoch 3 may be missing"
    assert Journal(generation=GENERATION).taken_up(Epoch(4)).incomplete == "what happened before epoch 4 was not kept"


EVENTS = st.builds(
    JournalEvent,
    at_s=st.floats(0, 2e9),
    epoch=st.integers(0, (1 << 31) - 1).map(Epoch),
    event=st.text(max_size=20),
    text=st.text(max_size=40),
    chunk_id=st.none() | st.integers(0, (1 << 63) - 1).map(ChunkId),
    rank_id=st.none() | st.integers(0, 65535).map(RankId),
)


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(EVENTS, max_size=8), st.integers(0, 1 << 40), st.lists(st.text(max_size=20), max_size=3))
def test_a_journal_is_read_as_it_was_written(events: list[JournalEvent], dropped: int, gaps: list[str]) -> None:
    made = Journal(generation=GENERATION, events=tuple(events), num_dropped=dropped, gaps=tuple(gaps))
    assert decode_journal(encode_journal(made), GENERATION) == made


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["at", "epoch", "event", "text"]), inner),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.binary(max_size=64)
    | st.fixed_dictionaries({"generation": JSON, "events": JSON, "dropped": JSON, "gaps": JSON}).map(
        lambda t: json.dumps(t).encode()
    )
)
def test_bytes_that_are_no_journal_are_told_in_one_sentence(data: bytes) -> None:
    try:
        found = decode_journal(data, GENERATION)
    except BrokenInvariantError as error:
        assert str(error).startswith("the journal of generation 7 ")  # noqa: PT017  (either answer is right, a crash is not)
    else:
        assert found.generation == GENERATION


def test_the_journal_of_another_generation_is_refused() -> None:
    with pytest.raises(BrokenInvariantError, match="the journal of generation 8 is that of generation 7"):
        decode_journal(encode_journal(journal(1)), GenerationNumber(8))
