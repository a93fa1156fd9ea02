"""Requests whose kind of text changes in the middle of the run, so that the hot experts change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from examples.tiny_moe.text import KINDS, prompts

PROMPT_BYTES = 96
NEW_TOKENS = 24
PROMPTS_OF_A_KIND = 512


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. request_id: unique in a run; sampling is seeded by it."""

    request_id: int
    kind: str
    text: bytes
    max_new_tokens: int


class Traffic:
    """An endless stream of prompts of the present kind; every request id and text follow from the seed."""

    def __init__(self, *, seed: int, prompt_bytes: int = PROMPT_BYTES, new_tokens: int = NEW_TOKENS) -> None:
        self._new_tokens = new_tokens
        self._texts = {
            kind: prompts(kind, PROMPTS_OF_A_KIND, length=prompt_bytes, seed=seed + index) for index, kind in enumerate(KINDS)
        }
        self._used = dict.fromkeys(KINDS, 0)
        self._ids: Iterator[int] = itertools.count(seed * 1_000_000 + 1)  # no end: ranks may be kept busy for days
        self.kind = KINDS[0]

    def next(self) -> Prompt:
        """The next request of the present kind; after all texts were used they come again under new ids."""
        texts = self._texts[self.kind]
        text = texts[self._used[self.kind] % len(texts)]
        self._used[self.kind] += 1
        return Prompt(next(self._ids), self.kind, text, self._new_tokens)
