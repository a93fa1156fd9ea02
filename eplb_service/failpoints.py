"""Named places where a test stops or ends a process, so that it need not sleep and hope.

    EPLB_FAILPOINTS="planner.arm.sent=pause:/tmp/x/arm,planner.generation.persisted=exit:/tmp/x/gen"

`exit:FILE`   write FILE, then end the process at once (`os._exit(86)`), as `kill -9` would
`pause:FILE`  write FILE, then stand still until it is removed (asyncio: only this task; else this thread)
`hold:FILE`   whenever FILE is there: write FILE.reached, then stand still until FILE is removed

FILE (or FILE.reached) holds the process id. `exit` and `pause` fire once per process: an `exit` point whose FILE is there
already has fired in an earlier life and is passed. `hold` fires as often as the test makes FILE: for processes that are too
dear to start for each case. Standard library only; without the variable a point costs one dictionary look-up.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from eplb_service.errors import InvalidInputError

VARIABLE = "EPLB_FAILPOINTS"
EXIT_CODE = 86
POLL_S = 0.01


class Action(Enum):
    """What happens at a point."""

    EXIT = "exit"
    PAUSE = "pause"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One armed point."""

    action: Action
    file: Path


def parse(text: str) -> dict[str, Failpoint]:
    """Points by name. Raises InvalidInputError for what cannot be read.

    >>> parse("a.b=exit:/tmp/f")["a.b"].action
    <Action.EXIT: 'exit'>
    """
    points = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = part.partition("=")
        word, _, file = rest.partition(":")
        if not name or word not in {action.value for action in Action} or not file:
            raise InvalidInputError(f"{VARIABLE} has {part!r}; write name=exit:FILE, pause:FILE or hold:FILE, joined by commas")
        points[name] = Failpoint(Action(word), Path(file))
    return points


_armed: dict[str, Failpoint] | None = None


def _take(name: str) -> Failpoint | None:
    """The point, when it acts now; None otherwise."""
    global _armed  # noqa: PLW0603  # read once from the environment of the process
    if _armed is None:
        _armed = parse(os.environ.get(VARIABLE, ""))
    armed = _armed
    point = armed.get(name)
    if point is None:
        return None
    if point.action is Action.HOLD:
        if not point.file.exists():
            return None
        _write_pid(point.file.with_name(f"{point.file.name}.reached"))
        return point
    del armed[name]
    if point.action is Action.EXIT and point.file.exists():
        return None
    _write_pid(point.file)
    if point.action is Action.EXIT:
        os._exit(EXIT_CODE)
    return point


def _write_pid(file: Path) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(f"{os.getpid()}\n", encoding="ascii")
    temporary.replace(file)


def reach(name: str) -> None:
    """Mark a place in threaded code."""
    point = _take(name)
    while point is not None and point.file.exists():
        time.sleep(POLL_S)


async def reach_async(name: str) -> None:
    """Mark a place in asyncio code: a pause holds this task, not the loop."""
    point = _take(name)
    while point is not None and point.file.exists():  # noqa: ASYNC110  # another process removes the file
        await asyncio.sleep(POLL_S)


def check() -> None:
    """Read the variable now, so that a mistake in it ends the start and not something later. Raises InvalidInputError."""
    global _armed  # noqa: PLW0603  # as above
    _armed = parse(os.environ.get(VARIABLE, ""))


def forget() -> None:
    """Read the variable again at the next point: for tests that share a process."""
    global _armed  # noqa: PLW0603  # as above
    _armed = None
