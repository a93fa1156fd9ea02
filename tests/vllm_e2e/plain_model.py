"""A tiny random-weight MoE, and what plain transformers makes of prompts: the outputs and the counts that are right.

Nothing of vLLM and nothing of this project is in here: both are measured by it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 16, 4
HIDDEN, INTERMEDIATE = 128, 64
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 4
VOCABULARY = 512
SEED = 20
PROMPT_TOKENS, ALPHABET = 48, 2
SPREAD = 0.15
"""Standard deviation of all weights: wide enough that another expert's output is another token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What follows a prompt. logprobs: of each token, natural logarithm."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """What plain transformers answers to a prompt.

    steps: tokens that each layer routed to each expert in each forward: that of the prompt, then of each token but the last.
    Shape (number of tokens, L, E).
    """

    prompt: tuple[int, ...]
    output: Output
    steps: Int64Array


class PlainModel:
    """The model in transformers, in 32-bit floats, decoding greedily."""

    def __init__(self, folder: Path) -> None:
        """Make the model anew in a folder, as engines load it."""
        transformers: Any = importlib.import_module("transformers")
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        config = transformers.Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K,
            moe_intermediate_size=INTERMEDIATE, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=512,
            initializer_range=SPREAD, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="float32",
            tie_word_embeddings=False,
        )  # fmt: skip
        self._model: Any = transformers.Qwen3MoeForCausalLM(config).eval()
        self._model.save_pretrained(folder)
        self.folder = folder
        self._steps: list[Int64Array] = []
        for index, layer in enumerate(self._model.model.layers):
            layer.mlp.gate.register_forward_hook(self._counting(index))

    def _counting(self, index: int) -> Any:
        def count(_gate: object, _given: object, made: tuple[Any, ...]) -> None:
            if index == 0:
                self._steps.append(np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.int64))
            self._steps[-1][index] = np.bincount(made[-1].reshape(-1).numpy(), minlength=NUM_EXPERTS)

        return count

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        """Greedy decoding."""
        self._steps.clear()
        given = torch.tensor([list(prompt)])
        made = self._model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = made.sequences[0, len(prompt) :].tolist()
        logprobs = [
            float(torch.log_softmax(logits[0].double(), dim=-1)[token])
            for token, logits in zip(tokens, made.logits, strict=True)
        ]
        output = Output(tokens=tuple(tokens), logprobs=tuple(logprobs))
        return Expected(prompt=tuple(prompt), output=output, steps=np.stack(self._steps))


def prompts_of(kind: int, number: int) -> list[list[int]]:
    """Prompts of one kind: of few tokens, so that few experts get most of the load."""
    random = np.random.default_rng(kind)
    alphabet = random.choice(VOCABULARY, ALPHABET, replace=False)
    return [random.choice(alphabet, PROMPT_TOKENS).tolist() for _ in range(number)]
