"""How a state machine came where it is: its changes of state with what made them, and an error for one that may not be.

A machine keeps one table, state → the states that may follow → why. `python -m tests.state_tables` draws the documentation's
tables from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from eplb_service.errors import BrokenInvariantError

CHANGES_KEPT = 16
EVENTS_KEPT = 8

S = TypeVar("S", bound=Enum)
Transitions = Mapping[S, Mapping[S, str]]


class Trail(Generic[S]):
    """A machine's state and how it came there. name: of the machine, for people.

    >>> class Door(Enum):
    ...     OPEN = "open"
    ...     SHUT = "shut"
    >>> trail = Trail("the door", {Door.OPEN: {Door.SHUT: "the wind"}, Door.SHUT: {}}, Door.OPEN)
    >>> trail.happens("gust", 1.5)
    >>> trail.enter(Door.SHUT)
    >>> str(trail)
    '1.500 s: open → shut on gust | last events: 1.500 s gust'
    """

    def __init__(self, name: str, transitions: Transitions[S], state: S) -> None:
        self.state = state
        self._name, self._transitions = name, transitions
        self._changes: deque[str] = deque(maxlen=CHANGES_KEPT)
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)

    def happens(self, event: str, now: float) -> None:
        """An event comes in: what follows follows from it."""
        self._events.append((now, event))

    def enter(self, state: S) -> None:
        """Come into a state, the same one too. Raises BrokenInvariantError with the history for one that may not follow."""
        now, event = self._events[-1] if self._events else (0.0, "its making")
        if state is not self.state and state not in self._transitions[self.state]:
            raise self.broken(f"{self._name} is {_word(self.state)} and cannot become {_word(state)}")
        if state is not self.state:
            self._changes.append(f"{now:.3f} s: {_word(self.state)} → {_word(state)} on {event}")
        self.state = state

    def broken(self, what: str) -> BrokenInvariantError:
        """An error that carries the history."""
        return BrokenInvariantError(f"{what}. How it came there: {self}")

    def __str__(self) -> str:
        events = "; ".join(f"{now:.3f} s {event}" for now, event in self._events)
        return f"{'; '.join(self._changes) or 'no change yet'} | last events: {events or 'none'}"


def _word(state: Enum) -> str:
    return str(state.value) if isinstance(state.value, str) else state.name.lower()
