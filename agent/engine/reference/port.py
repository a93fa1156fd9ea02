"""The reference engine as its hook sees it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from agent.engine.slot_port import SlotPort


class ExitCode(IntEnum):
    """How a rank process ends."""

    STOPPED = 0  # asked to
    START_FAILED = 3  # configuration, model, or the other ranks
    STEP_FAILED = 4  # a step could not be completed: a peer is gone, an invariant is broken
    FAIL_STOP = 5  # the hook does not know how a commit came out: no further step may run


@dataclass(slots=True, kw_only=True)
class ReferencePort(SlotPort):
    """`EnginePort` of one rank. reason_file: where `fail_stop` leaves its reason."""

    reason_file: Path

    def weights_version(self) -> int:
        """Always 0: this engine loads once."""
        return 0

    def is_capturing(self) -> bool:
        """Never: this engine captures no graphs."""
        return False

    def fail_stop(self, reason: str) -> None:
        """Leave the reason and end the process at once: this engine cannot re-form its group."""
        leave(ExitCode.FAIL_STOP, reason, self.reason_file)


def leave(code: ExitCode, reason: str, reason_file: Path) -> NoReturn:
    """End the process now, whatever its other threads do; destructors of process groups may wait for peers, so none run.

    The reason goes to standard error and, because that may go nowhere, to a file.
    """
    if reason:
        line = f"{reason_file.stem}: {code.name.lower().replace('_', ' ')}: {reason}\n"
        try:
            reason_file.write_text(line)
        except OSError as error:
            sys.stderr.write(f"{reason_file}: cannot be written ({error})\n")
        sys.stderr.write(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
