"""The engine as its hook sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from agent.engine.reference.port import ExitCode
from agent.engine.slot_port import SlotPort


def end_process(reason: str) -> None:
    """Say why and end the process at once: its other threads may be inside a collective that never ends."""
    sys.stderr.write(f"fail stop: {reason}\n")
    sys.stderr.flush()
    os._exit(ExitCode.FAIL_STOP)


@dataclass(slots=True, kw_only=True)
class HuggingFacePort(SlotPort):
    """`EnginePort` of one rank over the slots and tables of its layers.

    on_fail_stop: called on any thread with the reason; must not return to serving. None = end the process.
    """

    on_fail_stop: Callable[[str], None] | None = None
    _weights_version: int = field(init=False, default=0)

    def weights_version(self) -> int:
        """How often the weights were changed from outside (`weights_changed`)."""
        return self._weights_version

    def weights_changed(self) -> None:
        """To be called after anything but the hook has written slots: a reload, a sync from a trainer."""
        self._weights_version += 1

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def fail_stop(self, reason: str) -> None:
        """The group's ranks may route by different maps: no further step may run here."""
        (self.on_fail_stop or end_process)(reason)
