"""The store of the simulation: the real core of the memory store, behind a network, and what may happen to its data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from eplb_service.errors import ConflictError, EplbError, FencedError
from eplb_service.generation import Generation
from eplb_service.store.base import Leadership, Write
from eplb_service.store.memory import DeploymentState
from tests.sim.model import DEPLOYMENT
from tests.sim.network import Network
from tests.sim.world import Clock, World

STORE = "store"
LEASE_S = 1.5
RETRY_S = 0.3

T = TypeVar("T")


class SimStore:
    """Documents of one deployment. A generation is stored as (digest, state); what it holds is looked up by its digest."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = Clock(world)
        self.is_away = False
        self.lease_s = LEASE_S
        self.state = DeploymentState()
        self.overwrote = False
        """Whether a generation that the last write named was there before."""
        self.contents: dict[str, Generation] = {}
        self._saved: DeploymentState | None = None

    def save(self) -> None:
        """What a replica or a backup holds: the store may go back to it."""
        state = self.state
        self._saved = DeploymentState(
            fence=copy.copy(state.fence),
            documents=dict(state.documents),
            deleted_version=state.deleted_version,
            journal=state.journal.copy(),
            answers=state.answers.copy(),
        )

    def go_back(self) -> bool:
        """The store is what it was at the last `save`; False when there was none."""
        if self._saved is None:
            return False
        self.world.note("── the store goes back to an older state")
        self.state, self._saved = self._saved, None
        return True

    def lose(self) -> None:
        """Everything is gone."""
        self.world.note("── the store loses everything")
        self.state, self._saved = DeploymentState(), None

    def taken_by_another(self, number: int) -> None:
        """Somebody writes a document where the next generation would be."""
        epoch = self.state.fence.epoch
        if epoch and self.state.fence.owner:
            write = Write(write_id=f"other {number} {self.world.now}", epoch=epoch, puts={f"generation/{number}": b"?|stopped"})
            self.state.write(write)

    def generations(self) -> dict[int, tuple[str, str]]:
        """(digest, state) by number."""
        found = self.state.list("generation/", limit=64, newest_first=False)
        return {int(name.split("/")[1]): tuple(document.value.decode().split("|")) for name, document in found}  # type: ignore[misc]

    @property
    def newest(self) -> int:
        """Highest generation number that it holds."""
        return max(self.generations(), default=0)


class StoreClient:
    """One process's connection: every call is sent until it is answered, with one write id."""

    def __init__(self, store: SimStore, network: Network, name: str) -> None:
        self._store, self._network, self._name = store, network, name
        self._world = store.world
        self._ids = 0
        self._is_closed = False

    def close(self) -> None:
        """Its process ended."""
        self._is_closed = True

    def lead(self, owner: str, floor: int, done: Callable[[Leadership | EplbError], None]) -> None:
        """Take the lead."""
        write_id = self._new_id()

        def run() -> Leadership:
            state, now_s = self._store.state, self._store.clock.now()
            epoch = state.lead(owner=owner, lease_s=self._store.lease_s, floor=floor, write_id=write_id, now_s=now_s)
            return Leadership(deployment=DEPLOYMENT, epoch=epoch, owner=owner, lease_s=self._store.lease_s)

        self._call("lead", run, done)

    def renew(self, leadership: Leadership, done: Callable[[EplbError | None], None]) -> None:
        """Extend the lease."""
        self._call("renew", lambda: self._store.state.renew(leadership, now_s=self._store.clock.now()), done)

    def write(
        self,
        epoch: int,
        puts: dict[str, bytes],
        done: Callable[[dict[str, int] | EplbError], None],
        *,
        expects: dict[str, int] | None = None,
        on_applied: Callable[[], None] = lambda: None,
    ) -> None:
        """Write until answered. A lost answer is asked for again under the same id. on_applied: once the store has it."""
        write = Write(write_id=self._new_id(), epoch=epoch, puts=puts, expects=expects or {})

        def run() -> dict[str, int]:
            known = self._store.generations()
            self._store.overwrote = any(f"generation/{number}" in puts for number in known)
            versions = self._store.state.write(write)
            on_applied()
            return versions

        self._call("write", run, done)

    def read(self, done: Callable[[dict[int, tuple[str, str]] | EplbError], None]) -> None:
        """All generations."""
        self._call("read", self._store.generations, done)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self._name} {self._ids}"

    def _call(self, what: str, run: Callable[[], T], done: Callable[[T | EplbError], None]) -> None:
        """Ask, and ask again every RETRY_S, until an answer is there."""
        answered = False

        def ask() -> None:
            if not answered and not self._is_closed:
                self._network.send(self._name, STORE, what, arrive)
                self._world.after(RETRY_S, ask)

        def arrive() -> None:
            if self._store.is_away:
                return
            answer: T | EplbError
            try:
                answer = run()
            except (ConflictError, FencedError) as error:
                answer = error
            self._network.send(STORE, self._name, what, lambda: take(answer))

        def take(answer: T | EplbError) -> None:
            nonlocal answered
            if not answered and not self._is_closed:
                answered = True
                done(answer)

        ask()
