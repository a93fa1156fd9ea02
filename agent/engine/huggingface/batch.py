"""Requests of one rank that are generated together, greedily: the smallest loop that serves a model step by step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agent.engine.huggingface.engine import HuggingFaceEngine
from eplb_service.errors import InvalidInputError

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls keys and values of earlier tokens, newest first."""


class GreedyBatch:
    """Prompts padded on the left, their first step a whole pass and each later one a token, until all have ended.

    tokens: what was generated so far, for each request. generations: of every MoE layer, in each step so far.
    logits: shape (B, V) for each step, if they are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        keep_logits: bool = False,
    ) -> None:
        """Prompts may be none: a rank without requests. Raises InvalidInputError for an empty one, or nothing to generate."""
        if max_new_tokens < 1 or not all(prompts):
            shortest = min(map(len, prompts), default=0)
            raise InvalidInputError(
                f"{max_new_tokens} new tokens for prompts of {shortest} tokens and more; both must be at least 1"
            )
        self._model, self._max_new_tokens = model, max_new_tokens
        self._eos_token_id, self._pad_token_id, self._keep_logits = eos_token_id, pad_token_id, keep_logits
        self._cache: Any = None
        self._cache_name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
        device = next(model.parameters()).device
        longest = max(map(len, prompts), default=0)
        padded = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        held = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        self._feed = torch.tensor(padded, dtype=torch.int64, device=device)
        self._mask = torch.tensor(held, dtype=torch.int64, device=device)
        self._running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.generations: list[tuple[int, ...]] = []
        self.logits: list[Tensor] = []

    @property
    def finished(self) -> bool:
        """Whether no request wants another token."""
        return not bool(self._running.any())

    def step(self, engine: HuggingFaceEngine) -> None:
        """One more token for every request that runs; an idle step when none does."""
        if self.finished:
            engine.idle_step()
            return
        new = self._feed.shape[1]
        position_ids = (self._mask.cumsum(1) - 1).clamp_min(0)[:, -new:]
        with engine.step(self._mask[:, -new:].bool() & self._running[:, None]):
            outputs: Any = self._model(
                input_ids=self._feed,
                attention_mask=self._mask,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._cache},
            )
        self._cache = getattr(outputs, self._cache_name)
        self.generations.append(engine.generations)
        self._take(outputs.logits[:, -1].float())

    def _take(self, logits: Tensor) -> None:
        """Add each running request's next token, and feed it in the next step; ended ones feed padding."""
        if self._keep_logits:
            self.logits.append(logits)
        chosen = torch.where(self._running, logits.argmax(-1), self._pad_token_id)
        for request, (token, running) in enumerate(zip(chosen.tolist(), self._running.tolist(), strict=True)):
            if running:
                self.tokens[request].append(token)
        if len(self.generations) == self._max_new_tokens:
            self._running = torch.zeros_like(self._running)
        elif self._eos_token_id is not None:
            self._running = self._running & (chosen != self._eos_token_id)
        self._feed = chosen[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(chosen), 1)], dim=1)


def serve(engine: HuggingFaceEngine, batch: GreedyBatch) -> list[list[int]]:
    """Generate until every rank's batch has finished; every rank calls this at once. Returns this rank's new tokens."""
    while engine.anyone(has_work=not batch.finished):
        batch.step(engine)
    return batch.tokens
