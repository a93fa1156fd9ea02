"""The adapter for transformers on a group of one rank: architectures, and what is refused with which words."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch._C._distributed_c10d import HashStore

from agent.engine.huggingface.backup import checkpoint_backup
from agent.engine.huggingface.batch import GreedyBatch, serve
from agent.engine.huggingface.engine import HuggingFaceEngine
from agent.engine.huggingface.found import StackedExperts, combine, find_experts, try_out
from agent.engine.huggingface.settings import ParallelSettings
from agent.hook.routing import LayerTables
from eplb_service.dispatch import Dispatch
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.ids import DeploymentId, LayerRef, RankId

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed; pip install 'eplb-service[dev]' brings it",
)
PROMPTS = [[5, 6, 7, 8, 9], [1, 2], [7]]
NEW_TOKENS = 6
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {"n_group": 2, "topk_group": 1}
# Widths are multiples of what vector units take at a time, as those of real models are: what is left over goes by other code,
# and where it lies depends on the number of rows.
# Architecture: what its configuration has besides, and its MoE layers. One has biases and another layout, one shared experts,
# one a grouped sigmoid router after a dense layer.
ARCHITECTURES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "Mixtral": ({"num_local_experts": 8}, [0, 1]),
    "Olmoe": ({"num_experts": 8}, [0, 1]),
    "Qwen2Moe": ({"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}, [0, 1]),
    "GptOss": ({"num_local_experts": 8, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, [0, 1]),
    "Glm4Moe": (
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
        },
        [1],
    ),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)


def tiny(architecture: str, *, experts_implementation: str = "batched_mm", **more: Any) -> Any:
    import transformers

    values, _ = ARCHITECTURES.get(architecture, ({}, []))
    config = getattr(transformers, f"{architecture}Config")(**{**COMMON, **values, **more})
    torch.manual_seed(1)
    kind = getattr(transformers, f"{architecture}ForCausalLM")
    model = kind._from_config(config, experts_implementation=experts_implementation)
    for parameter in model.parameters():  # also those that some architectures start at zero
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def settings(*, ranks: int = 1, **more: Any) -> ParallelSettings:
    ids = tuple(RankId(position) for position in range(ranks))
    values = {"num_redundant_experts": 3, "rendezvous_host": "127.0.0.1", "rendezvous_port": 1, **more}
    return ParallelSettings(deployment=DeploymentId("test"), rank_ids=ids, nodes=("a",) * ranks, **values)


def generated(model: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    longest = max(map(len, PROMPTS))
    made = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[:, longest:].tolist(), list(made.logits)


def served(model: Any, engine: HuggingFaceEngine) -> GreedyBatch:
    batch = GreedyBatch(model, PROMPTS, max_new_tokens=NEW_TOKENS, keep_logits=True)
    serve(engine, batch)
    return batch


def move(engine: HuggingFaceEngine, row: list[int], checkpoint: list[dict[str, torch.Tensor]], *, weights: bool) -> None:
    """Write what a flip writes, weights from the checkpoint."""
    for layer, tensors in zip(engine.layers, checkpoint, strict=True):
        for slot, expert in enumerate(row):
            for name, tensor in tensors.items():
                if weights:
                    layer.slots[name][slot] = tensor[expert]
        width = int(layer.tables.logical_to_physical.shape[1])
        LayerTables.derive(row, 8, width, torch.device("cpu")).write(layer.tables)


@needs_transformers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_give_the_bits_of_transformers_alone_under_any_placement(architecture: str) -> None:
    plain = tiny(architecture)
    tokens, logits = generated(plain)
    model = copy.deepcopy(plain)
    checkpoint = [{n: t.clone() for n, t in e.expert_tensors(e.layer_id).items()} for e in find_experts(model)]
    engine = HuggingFaceEngine(model, settings())
    assert [layer.layer_id for layer in engine.layers] == ARCHITECTURES[architecture][1]
    assert {layer.num_slots for layer in engine.layers} == {11}
    assert_same(served(model, engine), tokens, logits)
    for seed in (1, 2):
        move(engine, scattered(seed), checkpoint, weights=True)
        assert_same(served(model, engine), tokens, logits)
    move(engine, scattered(3), checkpoint, weights=False)
    with pytest.raises(AssertionError):
        assert_same(served(model, engine), tokens, logits)


def scattered(seed: int) -> list[int]:
    """8 experts in 11 slots."""
    random = np.random.default_rng(seed)
    row: list[int] = random.permutation(np.concatenate([np.arange(8), random.choice(8, 3)])).tolist()
    return row


def assert_same(batch: GreedyBatch, tokens: list[list[int]], logits: list[torch.Tensor]) -> None:
    assert batch.tokens == tokens
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch.logits, logits, strict=True))


@needs_transformers
@pytest.mark.parametrize("dispatch", [Dispatch.NEAREST, Dispatch.WEIGHTED])
def test_any_dispatch_gives_the_same(dispatch: Dispatch) -> None:
    plain = tiny("Mixtral")
    model = copy.deepcopy(plain)
    engine = HuggingFaceEngine(model, settings(dispatch=dispatch))
    assert engine.port.describe().dispatch == dispatch
    assert (engine.port.routing_tables(LayerRef("target", 0)).replica_shares is not None) == (dispatch is Dispatch.WEIGHTED)
    assert_same(served(model, engine), *generated(plain))


@needs_transformers
def test_kernels_whose_bits_depend_on_the_batch_are_refused_unless_rounding_is_allowed() -> None:
    with pytest.raises(InvalidInputError, match=r"other bits than the model's own layer.*experts_implementation='batched_mm'"):
        HuggingFaceEngine(tiny("Mixtral", experts_implementation="grouped_mm"), settings())
    plain = tiny("Mixtral", experts_implementation="grouped_mm")
    tokens, logits = generated(plain)
    model = copy.deepcopy(plain)
    batch = served(model, HuggingFaceEngine(model, settings(exact=False)))
    assert batch.tokens == tokens
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(batch.logits, logits, strict=True))


@needs_transformers
def test_models_of_another_shape_are_refused_by_what_was_looked_for() -> None:
    with pytest.raises(InvalidInputError, match=r"0 lists of layers of Qwen3ForCausalLM \(transformers \S+\) have experts"):
        HuggingFaceEngine(tiny("Qwen3"), settings())
    import transformers

    config = transformers.Llama4TextConfig(**{**COMMON, "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 40})
    with pytest.raises(InvalidInputError, match=r"layer 0 .* Llama4TextExperts has forward\(hidden_states\); this"):
        HuggingFaceEngine(transformers.Llama4ForCausalLM(config), settings())


@needs_transformers
def test_the_model_runs_only_within_steps_and_whole() -> None:
    model = tiny("Mixtral")
    engine = HuggingFaceEngine(model, settings())
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(BrokenInvariantError, match="run outside a step"):
        model(ids)
    with pytest.raises(BrokenInvariantError, match="ran 0 MoE layers of 2"), engine.step(torch.ones_like(ids).bool()):
        pass
    with pytest.raises(InvalidInputError, match="the engine has no layer other/0; it has target/0, target/1"):
        engine.port.slot_tensors(LayerRef("other", 0))
    engine.port.weights_changed()
    assert engine.port.weights_version() == 1


@needs_transformers
def test_settings_that_do_not_fit_group_or_model_are_refused() -> None:
    model = tiny("Mixtral")
    with pytest.raises(InvalidInputError, match="the settings name 2 ranks, but the process group is one of 1"):
        HuggingFaceEngine(model, settings(ranks=2))


def test_slots_that_ranks_do_not_divide_are_refused_with_the_nearest_that_they_do() -> None:
    """vllm#52435, vllm#50669: 0 redundant experts stay 0 where they divide; the refusal names the number and its setting."""
    assert settings(ranks=4, num_redundant_experts=0).slots(8) == 2
    with pytest.raises(InvalidInputError, match=r"8 experts and 0 redundant ones are 8 slots, which 3 .* = 1$"):
        settings(ranks=3, num_redundant_experts=0).slots(8)
    assert settings(ranks=4, num_redundant_experts=4).slots(8) == 3
    with pytest.raises(InvalidInputError, match=r"8 experts and 3 redundant ones are 11 slots, which 4 .* = 0 or 4$"):
        settings(ranks=4, num_redundant_experts=3).slots(8)
    with pytest.raises(InvalidInputError, match=r"6 experts and 0 redundant ones are 6 slots, which 4 .* = 2$"):
        settings(ranks=4, num_redundant_experts=0).slots(6)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"nodes": ("a", "b")}, "2 node names for 1 ranks"),
        ({"rank_ids": (RankId(-1),)}, "rank ids must be unique"),
        ({"num_redundant_experts": -1}, "num_redundant_experts is -1; give 0 or more"),  # vllm#50669
        ({"dispatch": "hashed"}, "dispatch is 'hashed'; this engine has even, nearest, weighted"),
    ],
)
def test_bad_settings_say_what_is_wrong(values: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"rank_ids": (RankId(0),), "nodes": ("a",), "rendezvous_host": "h", "rendezvous_port": 1}
    with pytest.raises(InvalidInputError, match=sentence):
        ParallelSettings(deployment=DeploymentId("test"), **{**good, **values})


def test_a_batch_needs_prompts_with_tokens_and_something_to_generate() -> None:
    for prompts, count, sentence in (([[1], []], 3, "prompts of 0 tokens"), ([[1]], 0, "0 new tokens")):
        with pytest.raises(InvalidInputError, match=sentence):
            GreedyBatch(nn.Linear(1, 1), prompts, max_new_tokens=count)


# ── experts that look right and are not ──────────────────────────────────────────────────────────────────────────────────


class Experts(nn.Module):
    """One matrix an expert. weigh: how weight and expert meet."""

    def __init__(self, weigh: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.num_experts = 5
        self.matrix = nn.Parameter(torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(2)))
        self.weigh = weigh

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return self.weigh(self.matrix[top_k_index], hidden_states[:, None, :, None], top_k_weights[:, :, None, None])[..., 0]


def test_experts_are_tried_before_they_are_believed() -> None:
    after = StackedExperts(3, "experts", Experts(lambda m, x, w: ((m @ x) * w).sum(1)))
    before = StackedExperts(3, "experts", Experts(lambda m, x, w: (m @ (x * w)).tanh().sum(1)))
    with torch.no_grad():
        try_out(after, top_k=2, width=8, exact=False)
        with pytest.raises(InvalidInputError, match=r"layer 3: .* they are no sum over choices of weight times expert"):
            try_out(before, top_k=2, width=8, exact=False)


def test_combining_is_in_choice_order() -> None:
    outputs = torch.tensor([[[1e8], [1.0], [-1e8]], [[1.0], [1e8], [-1e8]]])
    summed = combine(outputs, torch.ones(2, 3)).flatten().tolist()
    assert summed == [float(np.float32(np.float32(1e8) + np.float32(1)) - np.float32(1e8)), 0.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "num_experts", None), "has no integer num_experts"),
        (lambda m: setattr(m, "num_experts", 4), r"has 4 experts and a tensor matrix of shape \(5, 8, 8\)"),
        (lambda m: m.register_buffer("scale", torch.ones(5, 1)), "has buffers beside its parameters"),
    ],
)
def test_experts_modules_of_another_shape_are_refused(change: Callable[[Experts], None], words: str) -> None:
    experts = Experts(lambda m, x, w: ((m @ x) * w).sum(1))
    change(experts)
    layer = nn.Module()
    layer.experts = experts
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    with pytest.raises(InvalidInputError, match=words):
        find_experts(model)


# ── the files that it was loaded from ────────────────────────────────────────────────────────────────────────────────────


def saved(model: object, folder: Path) -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    model.save_pretrained(folder)  # type: ignore[attr-defined]


@needs_transformers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_expert_comes_out_of_the_files_as_slots_hold_it(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture)
    saved(model, tmp_path)
    loaded = {
        experts.layer_id: {name: tensor.clone() for name, tensor in experts.expert_tensors(experts.layer_id).items()}
        for experts in find_experts(model)
    }
    engine = HuggingFaceEngine(model, settings())
    checkpoint = checkpoint_backup(engine, tmp_path)
    assert [layer.layer_id for layer in engine.port.layers] == ARCHITECTURES[architecture][1]
    for layer in engine.port.layers:
        for expert in range(8):
            values = checkpoint.values(layer, expert)
            assert values is not None
            assert set(values) == set(loaded[layer.layer_id])
            for name, tensor in values.items():
                assert torch.equal(tensor, loaded[layer.layer_id][name][expert])


@needs_transformers
def test_a_model_that_runs_in_fewer_bits_than_its_files_have_gets_what_loading_made_of_them(tmp_path: Path) -> None:
    model = tiny("Olmoe")
    saved(model, tmp_path)
    engine = HuggingFaceEngine(model.to(torch.bfloat16), settings(exact=False))
    values = checkpoint_backup(engine, tmp_path).values(next(iter(engine.port.layers)), 3)
    assert values is not None
    assert {tensor.dtype for tensor in values.values()} == {torch.bfloat16}


@needs_transformers
def test_files_of_another_model_or_without_an_expert_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny("Olmoe")
    saved(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    whole = load_file(file)
    engine = HuggingFaceEngine(model, settings())
    other = {name: tensor + 1 if ".experts.0.down_proj" in name else tensor for name, tensor in whole.items()}
    save_file(other, file)
    with pytest.raises(InvalidInputError, match="has another down_proj of expert 0 of target/0 than this rank holds"):
        checkpoint_backup(engine, tmp_path)
    save_file({name: tensor for name, tensor in whole.items() if "layers.1.mlp.experts.7.up_proj" not in name}, file)
    with pytest.raises(
        InvalidInputError, match=r"does not hold the 8 experts of target/1 .* slots hold down_proj, gate_up_proj"
    ):
        checkpoint_backup(engine, tmp_path)
