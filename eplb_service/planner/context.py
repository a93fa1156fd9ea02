"""What all deployments of a planner share, and whether the store answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from eplb_service.clock import Clock
from eplb_service.config import ServeConfig
from eplb_service.gate import GateConfig
from eplb_service.planner.proposing import Proposer
from eplb_service.store.base import Store
from eplb_service.telemetry import Metrics
from eplb_service.validation import ValidationConfig


class StoreHealth:
    """Whether the store answered the last time that it was asked, and why not."""

    def __init__(self, metrics: Metrics) -> None:
        self.reason = ""
        self.on_back: list[Callable[[], None]] = []
        """Called when the store answers again."""
        self._metrics = metrics
        self._log = structlog.get_logger("eplb.planner")
        metrics.store_answered(ok=True)

    def note(self, reason: str) -> None:
        """It answered (empty), or did not."""
        changed = bool(reason) != bool(self.reason)
        self.reason = reason
        self._metrics.store_answered(ok=not reason)
        if changed:
            if reason:
                self._log.error("store.lost", reason=reason, effect="no new plans; serving and open chunks go on")
            else:
                self._log.info("store.back")
                for call in self.on_back:
                    call()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerContext:
    """What all deployments of a planner share. owner: who leads, in the store's words. new_id: gives unique ids."""

    config: ServeConfig
    gate: GateConfig
    validation: ValidationConfig
    store: Store
    health: StoreHealth
    proposer: Proposer
    metrics: Metrics
    clock: Clock
    owner: str
    new_id: Callable[[], str]
