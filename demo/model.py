"""The model that the demo's ranks serve."""

from __future__ import annotations

from examples.tiny_moe.model import TinyMoe
from examples.tiny_moe.numerics import configure_torch, self_check


def load() -> TinyMoe:
    """The shipped weights, numerics set up and checked on this machine."""
    configure_torch()
    self_check()
    return TinyMoe.load()
