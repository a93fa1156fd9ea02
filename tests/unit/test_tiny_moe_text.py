"""Kinds of text: present on this machine, repeatable, and split into what teaches and what is held out."""

from __future__ import annotations

import pytest

from examples.tiny_moe.config import TinyMoeError
from examples.tiny_moe.logs import log_text
from examples.tiny_moe.text import KINDS, corpus, held_out, prompts


def test_kinds_are_the_four_that_the_demo_drifts_through() -> None:
    assert KINDS == ("code", "prose", "headers", "logs")


@pytest.mark.parametrize("kind", KINDS)
def test_corpus_is_long_enough_to_train_on_and_repeatable(kind: str) -> None:
    text = corpus(kind, max_bytes=400_000)
    assert len(text) == 400_000
    assert corpus(kind, max_bytes=300_000) == text[:300_000]


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_text_is_not_in_the_training_text(kind: str) -> None:
    training = corpus(kind, max_bytes=4_000_000)
    reserved = held_out(kind, max_bytes=200_000)
    assert len(reserved) >= 100_000
    assert reserved[:60_000] not in training
    if kind == "logs":
        assert not set(reserved.splitlines()) & set(training.splitlines())


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_lines_of_held_out_text_chosen_by_the_seed(kind: str) -> None:
    asked = prompts(kind, 40, length=50, seed=3)
    assert [len(prompt) for prompt in asked] == [50] * 40
    assert asked == prompts(kind, 40, length=50, seed=3)
    assert asked != prompts(kind, 40, length=50, seed=4)
    assert len(set(asked)) > 20
    text = held_out(kind, max_bytes=1_000_000)
    assert all(b"\n" + prompt in b"\n" + text for prompt in asked)


def test_kinds_differ() -> None:
    samples = {kind: b"".join(prompts(kind, 50, length=64, seed=0)) for kind in KINDS}
    digits = {kind: sum(byte in b"0123456789" for byte in text) for kind, text in samples.items()}
    assert digits["logs"] > 2 * max(digits["code"], digits["prose"])


def test_log_files_have_whole_lines_of_one_format_and_their_own_seed() -> None:
    one, other = log_text(1, max_bytes=5_000), log_text(2, max_bytes=5_000)
    assert one == log_text(1, max_bytes=5_000)
    assert one != other
    assert 4_000 < len(one) <= 5_000
    assert one.endswith(b"\n")


def test_bad_requests_for_text_are_refused() -> None:
    with pytest.raises(TinyMoeError, match="unknown kind of text 'poems'; the kinds are code, prose"):
        corpus("poems", max_bytes=10)
    with pytest.raises(TinyMoeError, match="unknown kind"):
        prompts("poems", 1, length=10, seed=0)
    with pytest.raises(TinyMoeError, match="0 bytes"):
        prompts("code", 1, length=0, seed=0)
    with pytest.raises(TinyMoeError, match="prompts need 100000000"):
        prompts("prose", 1, length=100_000_000, seed=0)
