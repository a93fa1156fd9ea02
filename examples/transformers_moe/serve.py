"""Serves a Mixture-of-Experts model of transformers on several ranks; experts move under it when a planner says so.

With `eplb serve` and `eplb agent --socket /tmp/eplb-agent.sock` running:

    EPLB_SOCKET=/tmp/eplb-agent.sock EPLB_STAGING_BYTES=16777216 torchrun --nproc-per-node 2 -m examples.transformers_moe.serve

Without `--model` it is a small Qwen3-MoE with random weights: it talks nonsense, but routes, counts and moves as a large one.
Every round each rank generates a batch and says what it was routed by.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agent.engine.huggingface.backup import checkpoint_backup
from agent.engine.huggingface.batch import GreedyBatch, serve
from agent.engine.huggingface.engine import HuggingFaceEngine
from agent.engine.huggingface.settings import ParallelSettings
from agent.hook.config import HookConfig
from agent.hook.hook import Hook
from eplb_service.ids import DeploymentId, RankId


def load(name: str) -> Any:
    """A model of transformers by its name or folder; small and random without one. Its expert kernels give the same bits in any
    batch, so that what is generated does not depend on where experts are.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415  # slow to import

    if name:
        loader: Any = AutoModelForCausalLM
        return loader.from_pretrained(name, experts_implementation="batched_mm").eval()
    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.2,
        pad_token_id=0,
    )
    kind: Any = Qwen3MoeForCausalLM
    return kind._from_config(config, experts_implementation="batched_mm").eval()  # how to choose kernels there


def main() -> None:
    """One rank of a `torchrun`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="name or folder of a MoE model of transformers")
    parser.add_argument("--rounds", type=int, default=50, help="batches that each rank generates")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--redundant-experts", type=int, default=4)
    parser.add_argument("--hook-port", type=int, default=29_650, help="where the first rank listens for the hooks")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = load(options.model)
    settings = ParallelSettings(
        deployment=DeploymentId("transformers"),
        rank_ids=tuple(RankId(position) for position in range(num_ranks)),
        nodes=(os.uname().nodename,) * num_ranks,
        rendezvous_host=os.environ["MASTER_ADDR"],
        rendezvous_port=options.hook_port,
        num_redundant_experts=options.redundant_experts,
    )
    engine = HuggingFaceEngine(model, settings)
    sources = (checkpoint_backup(engine, Path(options.model)),) if Path(options.model).is_dir() else ()
    hook = Hook(engine.port, HookConfig.from_environment(os.environ), sources=sources)
    hook.start()
    engine.watch(hook)

    draw = torch.Generator().manual_seed(rank)
    vocabulary = model.get_input_embeddings().num_embeddings
    for number in range(options.rounds):
        prompts = torch.randint(1, min(vocabulary, 64), (4, 16), generator=draw).tolist()
        batch = GreedyBatch(model, prompts, max_new_tokens=options.new_tokens)
        tokens = serve(engine, batch)
        routed = sorted(set(batch.generations))
        print(f"rank {rank} round {number}: {sum(map(len, tokens))} tokens, layers routed by generations {routed}", flush=True)
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
