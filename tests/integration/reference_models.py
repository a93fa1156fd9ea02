"""Models that rank processes of tests load, by `module:callable`."""

from __future__ import annotations

import os

from torch import Tensor

from examples.tiny_moe.config import TinyMoeConfig
from examples.tiny_moe.model import TinyMoe
from examples.tiny_moe.numerics import configure_torch, self_check
from examples.tiny_moe.weights import random_weights

UNEVEN = TinyMoeConfig(width=32, num_layers=2, num_heads=2, context=64, num_experts=10, top_k=3, expert_width=24)


def shipped() -> TinyMoe:
    """The trained model."""
    configure_torch()
    self_check()
    return TinyMoe.load()


def uneven() -> TinyMoe:
    """Small and untrained; 10 experts, which neither 3 nor 4 ranks divide."""
    configure_torch()
    shapes = ((32, 96), (32, 32), (32, 10), (32, 24), (24, 32), (32, 256))
    self_check(shapes=shapes)
    return TinyMoe(UNEVEN, random_weights(UNEVEN, seed=5))


class RaisesOnAByte(TinyMoe):
    """As torch does when a kernel is missing."""

    def embed(self, tokens: Tensor) -> Tensor:
        if bool((tokens == 255).any()):
            raise RuntimeError("no kernel for byte 255")
        return super().embed(tokens)


def raises_on_a_byte() -> TinyMoe:
    """A model with a bug."""
    configure_torch()
    return RaisesOnAByte(UNEVEN, random_weights(UNEVEN, seed=5))


def differs_by_process() -> TinyMoe:
    """Other weights in every process: ranks of one fleet do not agree on the model."""
    configure_torch()
    return TinyMoe(UNEVEN, random_weights(UNEVEN, seed=os.getpid()))
