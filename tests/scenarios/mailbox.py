"""Where messages wait until a script says what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eplb_service.control import Address, FromRank, Pulse, ToRank
from tests.sim.engine import Engine
from tests.sim.rank import Rank

if TYPE_CHECKING:
    from tests.sim.planner import PlannerProcess


@dataclass(frozen=True, eq=False)
class Letter:
    """One message on its way. source, target: a rank's number or a planner's name."""

    kind: str
    source: str
    target: str
    deliver: Callable[[], None]


@dataclass(frozen=True)
class Which:
    """Letters of a kind (empty = any), to and from some (empty = anybody)."""

    kind: str = ""
    to: frozenset[str] = frozenset()
    of: frozenset[str] = frozenset()

    def fits(self, letter: Letter) -> bool:
        """Whether a letter is meant."""
        return (
            self.kind in ("", letter.kind)
            and (not self.to or letter.target in self.to)
            and (not self.of or letter.source in self.of)
        )


class Mailbox:
    """Letters under way, and those that were. held: letters that stay where they are until they are released."""

    def __init__(self) -> None:
        self.under_way: list[Letter] = []
        self.sent: list[Letter] = []
        self.held: list[Which] = []

    def put(self, letter: Letter) -> None:
        """Somebody sends it."""
        self.under_way.append(letter)
        self.sent.append(letter)

    def take(self, which: Which, *, released: bool = False) -> list[Letter]:
        """Letters that arrive, or are lost, now."""
        taken = [
            letter
            for letter in self.under_way
            if which.fits(letter) and (released or not any(held.fits(letter) for held in self.held))
        ]
        self.under_way = [letter for letter in self.under_way if letter not in taken]
        return taken


class InstantNetwork:
    """To the store: what is sent is there."""

    def send(self, source: str, target: str, message: object, deliver: Callable[[], None]) -> None:
        """See `Network`."""
        deliver()

    def is_cut(self, one: str, other: str) -> bool:
        """See `Network`."""
        return False


class MailboxWires:
    """Every planner and every rank, with a mailbox between them. detached: (planner, rank) without a stream."""

    def __init__(self, engine: Engine, mailbox: Mailbox, planners: Sequence[PlannerProcess]) -> None:
        self._engine, self._mailbox, self._planners = engine, mailbox, planners
        self.detached: set[tuple[str, int]] = set()

    def say(self, rank: Rank, message: FromRank) -> None:
        """See `Wires`. Signs of life arrive at once."""
        for planner in self._planners:
            if not planner.is_alive or (planner.name, rank.address.rank_id) in self.detached:
                continue
            if isinstance(message, Pulse):
                planner.receive(message)
            else:
                self._mailbox.put(
                    Letter(
                        type(message).__name__,
                        str(rank.address.rank_id),
                        planner.name,
                        lambda p=planner: _hear(p, message),  # type: ignore[misc]
                    )
                )

    def order(self, planner: PlannerProcess, message: ToRank) -> None:
        """See `ToRanks`."""
        rank_id = message.to.rank_id
        if (planner.name, rank_id) not in self.detached:
            self._mailbox.put(Letter(type(message).__name__, planner.name, str(rank_id), lambda: self._engine.receive(message)))

    def formed(self) -> None:
        """See `Wires`."""
        for planner in self._planners:
            if planner.is_alive:
                self.met_by(planner)

    def met_by(self, planner: PlannerProcess) -> None:
        """See `ToRanks`."""
        for rank in self._engine.ranks:
            self.attach(planner, rank)

    def attach(self, planner: PlannerProcess, rank: Rank) -> None:
        """A control stream speaks for a rank."""
        registration = self._engine.registration_of(rank.address)
        if registration is not None and not rank.is_dead:
            self.detached.discard((planner.name, rank.address.rank_id))
            planner.register(registration)
            planner.attach(rank.address)

    def formed_again(self, rank: Rank) -> None:
        """See `Wires`."""
        for planner in self._planners:
            if planner.is_alive:
                self.attach(planner, rank)

    def gone(self, address: Address) -> None:
        """See `Wires`."""
        for planner in self._planners:
            planner.gone(address, "its process ended")


def _hear(planner: PlannerProcess, message: FromRank) -> None:
    if planner.is_alive:
        planner.receive(message)
