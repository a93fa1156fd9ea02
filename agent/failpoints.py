"""Named places where a test can stop a process: the crash happens there each time, not after a sleep of the right length.

    EPLB_FAILPOINTS="agent.stage.forwarded=exit,agent.arm.forwarded=pause"  EPLB_FAILPOINTS_DIR=/tmp/run

A process that reaches a listed point makes the marker file `<dir>/<name>` (its pid in it) and then exits at once, as by
kill -9, or stops as a whole until the marker is removed. Each point acts once for a folder: a process that was restarted
with the same environment finds the marker and goes on. Without the environment a point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from eplb_service.errors import InvalidInputError

EXIT_CODE = 86
PAUSE_SECONDS_MAX = 120.0
POLL_SECONDS = 0.005


class Action(StrEnum):
    """What happens at a point."""

    EXIT = "exit"
    PAUSE = "pause"


class Failpoints:
    """The points of one process."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Read the environment. Raises InvalidInputError for an unknown action or a missing folder."""
        self._actions = _parse(environment.get("EPLB_FAILPOINTS", ""))
        self._folder = Path(environment.get("EPLB_FAILPOINTS_DIR", ""))
        if self._actions and not environment.get("EPLB_FAILPOINTS_DIR"):
            raise InvalidInputError("EPLB_FAILPOINTS is set but EPLB_FAILPOINTS_DIR, the folder of the markers, is not")

    def reach(self, name: str) -> None:
        """Be at a point: returns at once unless it is listed."""
        action = self._actions.get(name)
        if action is None:
            return
        marker = self._folder / name
        try:
            with marker.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        if action is Action.EXIT:
            os._exit(EXIT_CODE)
        deadline = time.monotonic() + PAUSE_SECONDS_MAX
        while marker.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _parse(text: str) -> dict[str, Action]:
    actions = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = entry.partition("=")
        if action not in list(Action):
            raise InvalidInputError(f"EPLB_FAILPOINTS: {entry!r} is not NAME={'|'.join(Action)}")
        actions[name] = Action(action)
    return actions
