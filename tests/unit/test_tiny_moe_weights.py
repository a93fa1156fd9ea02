"""The weights file: read back as written, and refused with one clear sentence when it is not right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.tiny_moe.config import TinyMoeConfig, TinyMoeError
from examples.tiny_moe.generate import main as generate_main
from examples.tiny_moe.model import TinyMoe
from examples.tiny_moe.weights import (
    EXPERT_TENSORS,
    SHIPPED_WEIGHTS,
    expert_shapes,
    quantise,
    random_weights,
    read_weights,
    write_weights,
)

SMALL = TinyMoeConfig(vocabulary=256, width=16, num_heads=2, num_experts=4, top_k=2, expert_width=8, num_layers=2)


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """A small model with random weights."""
    path = tmp_path / "small.safetensors"
    write_weights(path, SMALL, random_weights(SMALL, seed=0))
    return path


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace or drop tensors but keep the header."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
    tensors = load_file(path)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, metadata=metadata)


def test_shipped_model_has_the_promised_shape_and_size() -> None:
    model = TinyMoe.load()
    assert SHIPPED_WEIGHTS.stat().st_size < 10_000_000
    assert len(model.moe_layer_ids()) >= 4
    assert model.config.num_experts == 32
    assert model.config.top_k == 4
    for layer_id in model.moe_layer_ids():
        tensors = model.expert_tensors(layer_id)
        assert tuple(tensors) == EXPERT_TENSORS
        shapes = expert_shapes(model.config)
        assert {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()} == shapes
        assert [tensors[name].dtype for name in EXPERT_TENSORS] == [torch.int8, torch.float32, torch.int8, torch.float32]


def test_experts_of_the_shipped_model_differ_in_weights_and_in_scales() -> None:
    """Otherwise a scale left behind, or a map moved without weights, could not be noticed."""
    model = TinyMoe.load()
    for layer_id in model.moe_layer_ids():
        for name, tensor in model.expert_tensors(layer_id).items():
            distinct = {row.numpy().tobytes() for row in tensor}
            assert len(distinct) == model.config.num_experts, (layer_id, name)


def test_file_is_read_back_as_written(small_file: Path) -> None:
    config, weights = read_weights(small_file)
    original = random_weights(SMALL, seed=0)
    assert config == SMALL
    for layer, expected in zip(weights.layers, original.layers, strict=True):
        for name in EXPERT_TENSORS:
            assert torch.equal(layer[name], expected[name])
        assert torch.equal(layer["router"], expected["router"].half().float())


def test_every_expert_is_stored_by_itself(small_file: Path) -> None:
    names = set(load_file(small_file))
    for expert_id in range(SMALL.num_experts):
        assert {f"layers.1.experts.{expert_id}.{name}" for name in EXPERT_TENSORS} <= names


def test_quantised_weight_is_within_half_a_step_and_zero_channels_stay_zero() -> None:
    weight = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    weight[1, 2] = 0
    values, scale = quantise(weight)
    assert values.dtype == torch.int8
    error = (values.float() * scale[..., None] - weight).abs()
    assert bool((error <= 0.5001 * scale[..., None]).all())
    assert bool((values[1, 2] == 0).all())
    assert scale[1, 2] == 1


def test_missing_file_says_how_to_train_one(tmp_path: Path) -> None:
    with pytest.raises(TinyMoeError, match=r"no weights at .*none.safetensors.*examples.tiny_moe.train"):
        TinyMoe.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_truncated_file_is_refused(small_file: Path, keep: int) -> None:
    small_file.write_bytes(small_file.read_bytes()[:keep])
    with pytest.raises(TinyMoeError, match="not a readable safetensors file"):
        TinyMoe.load(small_file)


def test_one_flipped_bit_of_a_weight_is_noticed(small_file: Path) -> None:
    data = bytearray(small_file.read_bytes())
    data[-5] ^= 1
    small_file.write_bytes(data)
    with pytest.raises(TinyMoeError, match="is damaged: its tensors have digest"):
        TinyMoe.load(small_file)


def test_lost_scale_is_noticed(small_file: Path) -> None:
    rewrite(small_file, {"layers.0.experts.1.up_scale": None})
    with pytest.raises(TinyMoeError, match="is damaged"):
        TinyMoe.load(small_file)


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(TinyMoeError, match="so it is no tiny MoE"):
        TinyMoe.load(path)


def test_tensors_that_do_not_match_the_configuration_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    weights = random_weights(SMALL, seed=0)
    cases: list[tuple[TinyMoeConfig, str]] = [
        (TinyMoeConfig(width=16, num_heads=2, num_experts=4, top_k=2, expert_width=8, num_layers=1), "does not know"),
        (TinyMoeConfig(width=16, num_heads=2, num_experts=3, top_k=2, expert_width=8, num_layers=2), r"router is \(4, 16\)"),
    ]
    for config, message in cases:
        write_weights(path, SMALL, weights)
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata()
        metadata["tiny_moe_config"] = config.to_json()
        save_file(load_file(path), path, metadata=metadata)
        with pytest.raises(TinyMoeError, match=message):
            TinyMoe.load(path)


def test_configuration_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(TinyMoeError, match="width 90 does not split into 4 heads"):
        TinyMoeConfig(width=90)
    with pytest.raises(TinyMoeError, match="top_k 40 exceeds the 32 experts"):
        TinyMoeConfig(top_k=40)
    with pytest.raises(TinyMoeError, match="num_layers is 0"):
        TinyMoeConfig(num_layers=0)
    with pytest.raises(TinyMoeError, match="not JSON"):
        TinyMoeConfig.from_json("{")
    with pytest.raises(TinyMoeError, match="expected exactly"):
        TinyMoeConfig.from_json('{"width": 96}')


def test_generate_command_continues_the_prompt_and_refuses_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    try:
        assert generate_main(["--prompt", "import os", "--tokens", "12"]) == 0
        first = capsys.readouterr().out
        assert first.startswith("import os")
        assert len(first) > len("import os\n")
        assert generate_main(["--prompt", "import os", "--tokens", "12"]) == 0
        assert capsys.readouterr().out == first
        assert generate_main(["--weights", str(tmp_path / "none")]) == 1
        assert capsys.readouterr().err.startswith("error: no weights at")
    finally:
        torch.set_num_threads(threads)
