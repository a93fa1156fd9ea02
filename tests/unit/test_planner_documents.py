"""Documents of the planner: what was written is read, what is damaged is named and nothing else breaks."""

from __future__ import annotations

import pytest

from eplb_service.errors import BrokenInvariantError
from eplb_service.planner.documents import RequestRecord, Settings, VerdictRecord, decode, decode_requests, encode

SETTINGS = Settings(mode="auto", policy="greedy", paused=True, pause_reason="noon")
REQUEST = RequestRecord(
    key="k", asked="rebalance", generation=3, verdict=VerdictRecord(move=True, code="c", reason="r", decided_at_s=1)
)


@pytest.mark.parametrize("document", [SETTINGS, REQUEST])
def test_document_comes_back_as_it_was(document: Settings | RequestRecord) -> None:
    assert decode(type(document), encode(document), "name") == document


def test_key_of_a_later_release_is_left_out() -> None:
    assert decode(Settings, b'{"mode":"auto","policy":"greedy","colour":"red"}', "settings").mode == "auto"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"null", "'settings' in the store cannot be read"),
        (b"\xff\xfe", "'settings' in the store cannot be read"),
        (b"[" * 100_000, "'settings' in the store cannot be read"),
        (b'{"mode":"auto"}', "policy"),
        (b'{"mode":5,"policy":"greedy"}', "mode is '5', expected str"),
        (b'{"mode":"auto","policy":["x"]}', "expected str"),
        (b'{"mode":"auto","policy":"greedy","paused":"no"}', "paused is 'no', expected bool"),
    ],
)
def test_damaged_settings_are_one_sentence(data: bytes, words: str) -> None:
    with pytest.raises(BrokenInvariantError) as broken:
        decode(Settings, data, "settings")
    assert words in str(broken.value)
    assert "\n" not in str(broken.value)


@pytest.mark.parametrize("data", [None, b"", b"junk", b"{}", b"[" * 100_000])
def test_damaged_list_of_answers_is_an_empty_one(data: bytes | None) -> None:
    assert decode_requests(data) == []


def test_names_of_answers_that_are_none_are_left_out() -> None:
    assert decode_requests(b'[1,{"a":2},"request/x"]') == ["request/x"]
