"""What the launcher of a fleet and its ranks say to one another, over the pipe between them.

A starting rank reports words (`LOADED`, `JOINED`), then `Ready`. The rest is said only in fleets that survive: a rank that
stands still says why, and waits until it is told which group to form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from agent.engine.reference.config import FleetConfig, LayerShape

# Names of what a starting rank reports to its launcher, in order.
LOADED, JOINED = "model loaded", "group joined"
STOPPED = "stopped"
"""Its last word, when it was told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The rank serves; one that joins has loaded and waits. shape: of its layers."""

    shape: LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The rank stands still between two steps, all connections to other ranks closed, and waits for a `Form`.

    number: of the group that it was in, or could not form. reason: for people. steps: that it ran in that group.
    """

    number: int
    reason: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The rank is in group `number` and serves."""

    number: int


ToLauncher = str | Ready | Standing | Formed


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Stand still at a step boundary that all ranks of group `number` agree on, or give up forming it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form group `number` (the first is 0, numbers grow) as the rank at `position` of `fleet`."""

    number: int
    fleet: FleetConfig
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The fleet cannot go on; end with this reason."""

    reason: str


ToRankProcess = Halt | Form | End


class LauncherLink:
    """A rank's end of the pipe. on_gone: called, never to return, when the launcher has ended."""

    def __init__(self, connection: Connection, on_gone: Callable[[], None]) -> None:
        self._connection = connection
        self._on_gone = on_gone
        self._orders: deque[ToRankProcess] = deque()

    def fileno(self) -> int:
        """Readable when an order has come, or the launcher has gone."""
        return self._connection.fileno()

    def report(self, said: ToLauncher) -> None:
        """Tell the launcher something."""
        try:
            self._connection.send(said)
        except OSError:
            self._on_gone()

    def read(self) -> None:
        """Take in one order that has come, waiting for it if it has not."""
        try:
            order = self._connection.recv()
        except (EOFError, OSError):
            self._on_gone()
            return
        self._orders.append(order)

    def take(self) -> None:
        """Take in all orders that have come; never waits."""
        while self._connection.poll():
            self.read()

    def is_halted(self, number: int) -> bool:
        """Whether, of what was taken in, the launcher has other plans than group `number`."""
        return any(_ends(order, number) for order in self._orders)

    def next_form(self, *, after: int) -> Form | End:
        """Wait for the order to form a group later than number `after`, or to end. Older orders are dropped."""
        while True:
            while self._orders:
                order = self._orders.popleft()
                if isinstance(order, End) or (isinstance(order, Form) and order.number > after):
                    return order
            self.read()


def _ends(order: ToRankProcess, number: int) -> bool:
    """Whether a rank in group `number`, or on its way into it, has to leave it."""
    match order:
        case Halt():
            return order.number >= number
        case Form():
            return order.number > number
        case End():
            return True
