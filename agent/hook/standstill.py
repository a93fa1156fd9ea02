"""Why no step may run on a rank: until its group has formed again, or for good."""

from __future__ import annotations

import logging

from agent.engine.port import EnginePort, FormsAgain, OutcomeUnknownError
from eplb_service.errors import EnvironmentFault

logger = logging.getLogger(__name__)


class Standstill:
    """Of one rank. Set from any thread, looked at by the model's before and in each step.

    broken: why this rank cannot serve in any group; empty = it can.
    """

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._why: tuple[type[EnvironmentFault], str] | None = None
        self.broken = ""

    @property
    def holds(self) -> bool:
        """Whether no step may run."""
        return self._why is not None

    def stop(self, reason: str, *, for_good: bool = False) -> None:
        """No step may run: until the group forms again, where the engine can do that, unless it is for good."""
        logger.critical("hook.stopped: %s", reason)
        if for_good:
            self.broken = reason
        elif isinstance(self._port, FormsAgain) and self._port.can_reform:
            self._why = (OutcomeUnknownError, reason)
            return
        self._why = (EnvironmentFault, reason)
        self._port.fail_stop(reason)

    def not_formed(self, reason: str) -> None:
        """The group that was is given up, and no other formed. An outcome that is unknown stays so."""
        logger.error("hook.not_formed: %s", reason)
        if self._why is None or self._why[0] is not OutcomeUnknownError:
            self._why = (EnvironmentFault, f"{reason}; form another group, or restart the engine")

    def end(self) -> None:
        """The group formed."""
        self._why = None

    def check(self) -> None:
        """Raises EnvironmentFault, or its kind OutcomeUnknownError, where no step may run."""
        if self._why is not None:
            error, reason = self._why
            raise error(reason)
