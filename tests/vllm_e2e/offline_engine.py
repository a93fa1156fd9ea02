"""TEST ONLY. VLLM's offline engine as a process of its own, in its own environment: it does what comes over a socket.

`python -m tests.vllm_e2e.offline_engine SOCKET`; the first message holds the engine's arguments. Nothing of this project's is
imported here: the adviser gets in by itself, as vLLM's plug-in.
"""

from __future__ import annotations

import importlib
import sys
from multiprocessing.connection import Client
from typing import Any


def main() -> None:
    """Serve until the other side is gone. Answers are (True, …); what goes wrong is sent as (False, text)."""
    with Client(sys.argv[1], family="AF_UNIX") as orders:
        try:
            vllm: Any = importlib.import_module("vllm")
            engine = vllm.LLM(**orders.recv())
            orders.send((True, "ready"))
            while True:
                kind, given = orders.recv()
                orders.send((True, _generated(vllm, engine, **given) if kind == "generate" else _called(engine, **given)))
        except EOFError:
            return
        except Exception as error:
            orders.send((False, f"{type(error).__name__}: {error}"))
            raise


def _generated(vllm: Any, engine: Any, prompts: list[list[int]], num_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs of each prompt, greedy."""
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, logprobs=1, detokenize=False
    )
    made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    outputs = [one.outputs[0] for one in made]
    return [
        (list(one.token_ids), [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)])
        for one in outputs
    ]


def _called(engine: Any, method: str, words: list[str]) -> str:
    engine.collective_rpc(method, args=tuple(words))
    return words[0]


if __name__ == "__main__":
    main()
