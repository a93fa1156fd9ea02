"""Plain generation in one process, without expert parallelism: the oracle that served tokens are compared with.

It imports nothing of the project but this package, and computes one request at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from examples.tiny_moe.config import TinyMoeError
from examples.tiny_moe.model import Draw, KvCache, Routing, Span, TinyMoe
from examples.tiny_moe.numerics import configure_torch, self_check


@dataclass(slots=True)
class Request:
    """A request under way: its prompt, what was generated, its cache."""

    request_id: int
    prompt: bytes
    cache: KvCache
    tokens: list[int] = field(default_factory=list)

    def pending(self) -> list[int]:
        """Tokens to feed at the next step: the whole prompt at first, then the newest token."""
        return self.tokens[-1:] if self.tokens else list(self.prompt)


class Oracle:
    """Generates what any correct engine must generate."""

    def __init__(self, model: TinyMoe) -> None:
        """Use a loaded model; call `numerics.configure_torch` first."""
        self._model = model

    def generate(self, request_id: int, prompt: bytes, max_new_tokens: int) -> list[int]:
        """Tokens that follow one prompt, computed alone.

        Raises:
            TinyMoeError: the prompt is empty, or prompt and new tokens exceed the context.
        """
        request = self._request(request_id, prompt, max_new_tokens)
        for _ in range(max_new_tokens):
            self._step([request])
        return request.tokens

    def generate_batch(self, prompts: Sequence[tuple[int, bytes]], max_new_tokens: int) -> list[list[int]]:
        """The same for many (request id, prompt) at once, faster; equal to `generate` bit for bit, as tests show."""
        requests = [self._request(request_id, prompt, max_new_tokens) for request_id, prompt in prompts]
        for _ in range(max_new_tokens):
            self._step(requests)
        return [request.tokens for request in requests]

    def _request(self, request_id: int, prompt: bytes, max_new_tokens: int) -> Request:
        if not prompt:
            raise TinyMoeError(f"the prompt of request {request_id} is empty; pass at least 1 byte")
        context = self._model.config.context
        # The last token is generated but never fed back.
        if max_new_tokens < 1 or len(prompt) + max_new_tokens - 1 > context:
            raise TinyMoeError(
                f"request {request_id}: {len(prompt)} prompt bytes and {max_new_tokens} new tokens do not fit the "
                f"context of {context}; ask for 1 to {max(0, context + 1 - len(prompt))} new tokens"
            )
        return Request(request_id, prompt, self._model.new_cache())

    def _step(self, requests: Sequence[Request]) -> None:
        """Feed each request's pending tokens and append the token that follows."""
        if not requests:
            return
        model = self._model
        spans: list[Span] = []
        fed: list[int] = []
        for request in requests:
            pending = request.pending()
            spans.append(Span(request.cache, len(fed), len(pending)))
            fed.extend(pending)
        hidden = model.embed(torch.tensor(fed, dtype=torch.int64))
        for layer_id in range(model.config.num_layers):
            hidden = model.attend(layer_id, hidden, spans)
            routing = model.route(layer_id, hidden)
            hidden = model.combine(hidden, run_experts(model, layer_id, routing), routing.gates)
        last_rows = [span.start + span.count - 1 for span in spans]
        draws = [Draw(request.request_id, request.cache.length) for request in requests]
        for request, token in zip(requests, model.next_tokens(hidden[last_rows], draws), strict=True):
            request.tokens.append(token)


def run_experts(model: TinyMoe, layer_id: int, routing: Routing) -> Tensor:
    """Outputs of all (token, choice) of a layer from the checkpoint's experts. Shape (n, k, D), float32."""
    stacked = model.expert_tensors(layer_id)
    outputs = torch.zeros(*routing.experts.shape, routing.inputs.shape[1])
    for expert_id in sorted(set(routing.experts.flatten().tolist())):
        rows, choices = (routing.experts == expert_id).nonzero(as_tuple=True)
        tensors = {name: tensor[expert_id] for name, tensor in stacked.items()}
        outputs[rows, choices] = model.run_expert(tensors, routing.inputs[rows])
    return outputs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a continuation of a prompt."""
    parser = argparse.ArgumentParser(description=main.__doc__, prog="python -m examples.tiny_moe.generate")
    parser.add_argument("--prompt", default="import os", help="text to continue")
    parser.add_argument("--tokens", type=int, default=80, help="how many bytes to generate")
    parser.add_argument("--request-id", type=int, default=0, help="another id draws another continuation")
    parser.add_argument("--weights", type=Path, default=None, help="another weights file than the shipped one")
    options = parser.parse_args(arguments)
    configure_torch()
    try:
        self_check()
        oracle = Oracle(TinyMoe.load(options.weights))
        tokens = oracle.generate(options.request_id, options.prompt.encode(), options.tokens)
    except TinyMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(options.prompt + bytes(tokens).decode("utf-8", errors="replace") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
