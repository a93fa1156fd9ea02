"""What a rank reports of its load: a recorder while it works, nothing while the rank is switched off. What fails in here ends
recording, never a step.
"""

from __future__ import annotations

import contextlib
import logging
import time

import torch

from agent.hook.config import HookConfig
from agent.hook.outbox import Outbox
from agent.hook.recorder import Recorder
from agent.hook.startup import EngineFacts
from agent.transfer.streams import Streams
from eplb_service.control import Address
from eplb_service.errors import InvalidInputError
from eplb_service.ids import LayerRef

logger = logging.getLogger(__name__)


class Observer:
    """One rank's windows. Every method is called on the engine's model thread."""

    def __init__(self, facts: EngineFacts, config: HookConfig, streams: Streams, outbox: Outbox) -> None:
        self._layers = frozenset(facts.shape.layers)
        self._inert = config.off
        self.recorder: Recorder | None = Recorder(
            [(layer, shape.num_logical) for layer, shape in facts.shape.layers.items()],
            address=facts.description.address,
            phase=facts.description.phase,
            window_steps=config.window_steps,
            sub_windows=config.sub_windows,
            idle_after_s=config.idle_after_s,
            device=facts.device,
            streams=streams,
            outbox=outbox,
            clock=time.monotonic,
        )

    @property
    def stray_ids(self) -> int:
        """Ids that no expert of their layer has."""
        return self.recorder.stray_ids if self.recorder is not None else 0

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        """Count what the router chose; see `Hook.record`."""
        if self._inert or self.recorder is None:
            return
        if layer not in self._layers:
            raise InvalidInputError(f"record was called for layer {layer}, which the engine did not register as an MoE layer")
        self.recorder.record(layer, experts)

    def warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Nothing recorded inside the block counts, however it ends."""
        return self.recorder.warming_up() if self.recorder is not None else contextlib.nullcontext()

    def boundary(
        self,
        boundary: int,
        *,
        num_real_tokens: int,
        warmup: bool,
        capturing: bool,
        live_digest: int,
        switched_off: bool,
    ) -> None:
        """A step begins; see `Recorder.boundary`."""
        if self.recorder is None:
            return
        try:
            if switched_off != self._inert and not capturing:
                self._inert = switched_off
                self.recorder.pause()
            if not self._inert:
                self.recorder.boundary(
                    boundary,
                    num_real_tokens=num_real_tokens,
                    warmup=warmup,
                    capturing=capturing,
                    live_digest=live_digest,
                )
        except Exception:
            logger.exception("recorder.failed: this rank reports no more windows")
            self.recorder = None

    def enter(self, address: Address) -> None:
        """The rank is in another group, whose windows begin with its first step."""
        if self.recorder is not None:
            self.recorder.enter(address)
