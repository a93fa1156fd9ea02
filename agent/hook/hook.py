"""The hook: what an engine holds, and the only thing that it calls."""

from __future__ import annotations

import torch

from agent.engine.port import EnginePort
from agent.hook.config import HookConfig, HookStatus
from eplb_service.ids import ChunkId, LayerRef

__all__ = ["Hook", "HookConfig", "HookStatus"]


class Hook:
    """One rank's part of the loop, inside the engine process.

    The engine calls `begin_step` before every forward pass (real or dummy, on every rank) and `record` for every MoE layer
    with the ids that its router chose, both from its model thread.
    """

    def __init__(self, port: EnginePort, config: HookConfig) -> None:
        self._port = port
        self._config = config
        self._boundary = -1

    def start(self) -> None:
        """Find the other ranks, allocate staging, start the threads. What fails here leaves the hook observe-only."""

    def begin_step(self, *, num_real_tokens: int, warmup: bool = False) -> None:
        """A step boundary: votes, flips and windows happen here. num_real_tokens: without padding and dummies."""
        self._boundary += 1

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        """Count what the router chose. experts: logical ids of real tokens, shape (n, k), any integer type."""

    def close(self) -> None:
        """Cast 0, resolve what is cast, end the threads; every wait has a deadline."""

    @property
    def status(self) -> HookStatus:
        """What this hook is doing."""
        return HookStatus(
            voting=False, off_reason="not started", boundary=self._boundary + 1, connected=False, open_id=ChunkId(0),
            flipped_id=ChunkId(0), generations={}, windows_sent=0, windows_dropped=0, flips=0,
        )
