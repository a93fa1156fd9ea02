"""The model whose ranks `benchmarks.recovery` loses: small but for its experts, of which nobody looks at the tokens."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from examples.tiny_moe.config import TinyMoeConfig
from examples.tiny_moe.model import TinyMoe
from examples.tiny_moe.numerics import configure_torch
from examples.tiny_moe.weights import Weights, random_weights, write_weights

WEIGHTS = "EPLB_RECOVERY_WEIGHTS"
"""Environment variable: the file that ranks load."""

WIDTH, LAYERS, EXPERTS, CONTEXT = 128, 2, 32, 1024


def config_of(expert_width: int) -> TinyMoeConfig:
    """With experts of so many inner channels."""
    return TinyMoeConfig(
        width=WIDTH,
        num_layers=LAYERS,
        num_heads=2,
        context=CONTEXT,
        num_experts=EXPERTS,
        top_k=2,
        expert_width=expert_width,
    )


def load() -> TinyMoe:
    """What ranks call."""
    configure_torch()
    return TinyMoe.load(Path(os.environ[WEIGHTS]))


def write(path: Path, expert_width: int) -> int:
    """Make a weights file with experts of so many inner channels; returns the bytes of one expert."""
    config = config_of(expert_width)
    made = random_weights(config_of(1), seed=1)
    generator = torch.Generator().manual_seed(2)
    layers = []
    for layer in made.layers:
        up = torch.randint(-127, 128, (EXPERTS, expert_width, WIDTH), generator=generator, dtype=torch.int8)
        down = torch.randint(-127, 128, (EXPERTS, WIDTH, expert_width), generator=generator, dtype=torch.int8)
        scale = torch.full((EXPERTS, expert_width), 1e-3)
        layers.append({**layer, "up": up, "up_scale": scale, "down": down, "down_scale": torch.full((EXPERTS, WIDTH), 1e-4)})
    write_weights(path, config, Weights(shared=made.shared, layers=tuple(layers)))
    return 2 * WIDTH * expert_width + 4 * (expert_width + WIDTH)
