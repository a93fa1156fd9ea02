"""The planner processes of the simulation: real membership and rollout machines, a shell that leads, stores and publishes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

from eplb_service.control import Address, FromRank, Pulse, Registration, ToRank
from eplb_service.coverage import unreachable
from eplb_service.errors import ConflictError, EplbError, FencedError
from eplb_service.generation import Generation
from eplb_service.ids import Epoch, GenerationNumber
from eplb_service.imbalance import Imbalance
from eplb_service.membership.machine import (
    Attached,
    Detached,
    Gone,
    GroupReady,
    Membership,
    MembershipEvent,
    RankDetached,
    Ready,
    Registered,
    WeightsSeen,
)
from eplb_service.moves import NO_MOVES
from eplb_service.placement import Placement
from eplb_service.rollout.chunk_ids import drawn_sequence
from eplb_service.rollout.events import (
    Alarm,
    AlarmCleared,
    Cancel,
    Effect,
    Fenced,
    Finished,
    LiveChanged,
    Note,
    Outcome,
    Outranked,
    Persist,
    Persisted,
    PersistFailed,
    Received,
    RolloutEvent,
    RolloutRecord,
    RolloutSettings,
    RolloutState,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout.machine import Rollout
from eplb_service.store.base import Leadership
from tests.sim.checkers import Checkers
from tests.sim.model import DEPLOYMENT, Shape
from tests.sim.store import SimStore, StoreClient
from tests.sim.world import Clock, World

SILENCE_S = 3.0
"""How long a rank counts as alive after it was last heard."""

SETTINGS = RolloutSettings(
    stage_timeout_s=1.5,
    arm_ttl_s=2.0,
    slowest_step_s=0.4,
    answer_slack_s=0.5,
    hello_timeout_s=1.0,
    persist_timeout_s=1.0,
    disarm_timeout_s=1.0,
    inconsistent_retry_s=2.0,
    hold_timeout_s=10.0,
    backoff_s=0.2,
    backoff_max_s=1.0,
    tries_max=4,
)


class ToRanks(Protocol):
    """What carries a planner's messages."""

    def order(self, planner: PlannerProcess, message: ToRank) -> None:
        """Bring this to its rank, if it can be reached."""

    def met_by(self, planner: PlannerProcess) -> None:
        """This planner leads now: ranks find it."""


class PlannerProcess:
    """One life of a planner. With `chance` it publishes random targets, one after another; without, a script says what it does.

    is_current: the newest one; others step down for good once they learn that they do not lead any more.
    """

    def __init__(
        self,
        world: World,
        shape: Shape,
        checkers: Checkers,
        store: SimStore,
        client: StoreClient,
        wires: ToRanks,
        *,
        name: str,
        chance: random.Random | None,
        clock: Clock,
    ) -> None:
        self.world, self.shape, self.checkers, self.store, self.name = world, shape, checkers, store, name
        self.client, self.wires, self.chance, self.clock = client, wires, chance, clock
        self.is_alive = self.is_current = True
        self.plan_s, self.cancel_share = 1.0, 0.2
        self.on_end: Callable[[], None] = lambda: None
        self.settings = SETTINGS
        self.finished: list[Finished] = []
        self.alarms: list[Alarm] = []
        self.membership = Membership(DEPLOYMENT, silence_s=SILENCE_S)
        self.rollout: Rollout | None = None
        self.epoch = Epoch(0)
        self.highest = 0
        self._sequences = world.chance(f"sequences of {name}")
        self._owner = name
        self._known: dict[int, tuple[str, str]] = {}
        self._contents: dict[int, Generation] = {}
        self._timer: tuple[Rollout, float | None] | None = None
        clock.on_jump.append(self._look_at_timer)

    # ── the lead ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Ask for the lead until it is ours."""
        self._seek(0)

    def die(self, why: str) -> None:
        """The process ends."""
        if self.is_alive:
            self.world.note("── {} ends: {}", self.name, why)
            self.is_alive = False
            self.rollout = None
            self.client.close()
            self.on_end()

    def floor(self) -> int:
        """Highest generation number that this process knows of."""
        return max(self.highest, self.rollout.generation_floor if self.rollout is not None else 0)

    def taken(self) -> int:
        """Highest generation number that it heard of as given, not those that it is about to give."""
        return max(self.rollout.generation_floor if self.rollout is not None else 0, *self._known, 0)

    def _seek(self, floor: int) -> None:
        self.highest = self.floor()
        self.rollout = None
        self.client.lead(self._owner, floor, partial(self._asked, floor))

    def _asked(self, floor: int, answer: Leadership | EplbError) -> None:
        if not self.is_alive:
            return
        if isinstance(answer, EplbError):
            self.world.after(0.3, lambda: self._seek(floor) if self.is_alive and self.rollout is None else None)
        else:
            self.client.read(partial(self._lead, answer))

    def _lead(self, leadership: Leadership, known: dict[int, tuple[str, str]] | EplbError) -> None:
        if not self.is_alive or isinstance(known, EplbError):
            return
        self._known |= known
        self.highest = max(self.highest, *known, 0)
        self.epoch = leadership.epoch
        self.checkers.leads(self.name, self.epoch)
        self.world.note("── {} leads with epoch {}", self.name, self.epoch)
        rollout = self.rollout = Rollout(self.epoch, self.settings, first_sequence=first_sequence(self._sequences))
        status = self.membership.status
        if isinstance(status, Ready):
            self.feed(GroupReady(status.group))
            for rank in status.away:
                self.feed(RankDetached(status.group.addresses[rank], "no agent process speaks for it"))
        self.wires.met_by(self)
        self._renew_later(rollout, leadership)

    def _renew_later(self, rollout: Rollout, leadership: Leadership) -> None:
        if self.chance is None:
            return

        def answered(answer: EplbError | None) -> None:
            if answer is None:
                self._renew_later(rollout, leadership)
            elif self.rollout is rollout:
                self._fenced()

        self.world.after(
            leadership.lease_s / 3,
            lambda: self.client.renew(leadership, answered) if self.is_alive and self.rollout is rollout else None,
        )

    def _fenced(self) -> None:
        """The store refused us: somebody else leads, or it forgot our epoch. We are told apart from now on."""
        self.world.counts["planners fenced"] += 1
        self._owner = f"{self.name}~{self.world.num_events}"
        self.feed(Fenced(Epoch(self.epoch + 1)))

    def _outranked(self, machine: Rollout, epoch: Epoch) -> None:
        self.world.counts["outranked"] += 1
        if not self.is_current:
            self.die("outranked")
        elif self.is_alive and self.rollout is machine:
            self._seek(max(epoch, self.epoch))

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def register(self, registration: Registration) -> None:
        """A rank says what it is. Raises what the membership raises."""
        for change in self.membership.handle(Registered(registration), self.clock.now()):
            self.feed(change)

    def attach(self, address: Address) -> None:
        """A control stream speaks for this rank. Raises what the membership raises."""
        self._member(Attached(address))

    def detach(self, address: Address, reason: str) -> None:
        """That stream ended."""
        self._member(Detached(address, reason))

    def gone(self, address: Address, reason: str) -> None:
        """The rank's process ended."""
        self._member(Gone(address, reason))

    def receive(self, message: FromRank) -> None:
        """A rank says something."""
        if isinstance(message, Pulse):
            self._member(WeightsSeen(message.sender, message.weights_version))
        self.feed(Received(message))

    def _member(self, event: MembershipEvent) -> None:
        if self.is_alive:
            for change in self.membership.handle(event, self.clock.now()):
                self.feed(change)

    # ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: RolloutEvent) -> None:
        """An event, and what the machine answers."""
        machine = self.rollout
        if machine is None:
            return
        for effect in machine.handle(event, self.clock.now()):
            if self.is_alive and self.rollout is machine:
                self._run(machine, effect)
        if machine is self.rollout and self._timer != (machine, machine.next_deadline):
            self._set_timer(machine)

    def _set_timer(self, machine: Rollout) -> None:
        deadline = machine.next_deadline
        self._timer = (machine, deadline)
        if deadline is not None:
            self.world.after(self.clock.until(deadline), lambda: self._fire(machine, deadline))

    def _fire(self, machine: Rollout, deadline: float) -> None:
        if machine is not self.rollout or machine.next_deadline != deadline:
            return
        self._timer = None
        self.feed(Tick())

    def _look_at_timer(self) -> None:
        if self.rollout is not None and self.rollout.next_deadline is not None:
            self.feed(Tick())

    def _run(self, machine: Rollout, effect: Effect) -> None:
        match effect:
            case Send(message):
                self.world.note("{} → rank {}: {}", self.name, message.to.rank_id, message)
                self.checkers.ordered(message)
                self.wires.order(self, message)
            case Persist(token, record):
                self._persist(machine, token, record)
            case LiveChanged():
                self._live_changed(machine, effect)
            case Finished():
                self._on_finished(effect)
            case Alarm():
                self.alarms.append(effect)
                self.checkers.alarmed(self.name, effect)
            case AlarmCleared():
                self.world.note("{}: the alarm is over", self.name)
            case Outranked(epoch):
                self._outranked(machine, epoch)
            case Note(event=event, text=text):
                self.world.counts[event] += 1
                self.world.note("{}: {} ({})", self.name, event, text)
                if event == "chunk.authorised" and self.chance is not None:
                    self._may_cancel(self.chance)
            case _:
                pass

    def _may_cancel(self, chance: random.Random) -> None:
        """An operator's cancel that races with the vote."""
        at_s, withdraw = 0.8 * chance.random(), chance.random() < 0.8
        if chance.random() < self.cancel_share and not self.world.is_calm:
            self.world.after(at_s, lambda: self.cancel(withdraw=withdraw))

    def cancel(self, *, withdraw: bool) -> None:
        """An operator stops the rollout."""
        if self.rollout is not None and self.rollout.open_chunk:
            self.world.counts["cancels"] += 1
            self.feed(Cancel(reason="enough", by="operator", withdraw=withdraw))

    def _live_changed(self, machine: Rollout, change: LiveChanged) -> None:
        group = machine.group
        self.checkers.adopted(self.name, self.epoch, group.group_id if group else None, change.live, change.reason)
        if self.chance is not None:
            self._plan_soon(self.chance)

    def _on_finished(self, finished: Finished) -> None:
        self.finished.append(finished)
        self.world.counts[f"finished {finished.outcome}"] += 1
        self.world.note("{}: generation {} {}: {}", self.name, finished.generation, finished.outcome, finished.reason)
        generation = self._contents.get(finished.generation)
        if generation is not None and finished.outcome is not Outcome.NOT_STARTED:
            self._write_state(generation, finished.outcome)
        if self.chance is not None:
            self._plan_soon(self.chance)

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _plan(self) -> None:
        """Publish a new generation, or go on with one that is not finished."""
        rollout, chance = self.rollout, self.chance
        if not self.is_alive or chance is None or rollout is None:
            return
        live = rollout.live
        if rollout.state is not RolloutState.IDLE or live is None:
            return
        group = rollout.group
        restorable = group is not None and group.restorers == frozenset(group.rank_ids)
        if not restorable and unreachable(live.placement):
            return  # nothing is planned before the engine has them again
        newest = max(self.floor(), max(self._known, default=0))
        digest, state = self._known.get(newest, ("", ""))
        stored = self.store.contents.get(digest)
        is_ours = stored is not None and stored.placement.tables[0].rank_ids == live.placement.tables[0].rank_ids
        is_ours = is_ours and not unreachable(live.placement)
        if state in ("published", "rolling") and is_ours and chance.random() < 0.6:
            self.world.counts["continued"] += 1
            self._contents[newest] = self.store.contents[digest]
            self.feed(Start(self._contents[newest]))
        else:
            self.publish(self.shape.random_target(live, chance))

    def _plan_soon(self, chance: random.Random) -> None:
        longest_s = 1.0 if self.world.is_calm else self.plan_s
        self.world.after(longest_s * chance.random(), self._plan)

    def publish(self, target: Placement) -> None:
        """Store a new generation, then roll it out."""
        rollout = self.rollout
        if rollout is None or rollout.live is None:
            raise ValueError(f"{self.name} leads nothing whose live map it knows")
        live = rollout.live
        self.highest = 1 + max(self.floor(), live.newest_generation)
        generation = make_generation(self.highest, target, len(live.generations), self.epoch)
        puts = {f"generation/{generation.number}": f"{generation.digest}|published".encode()}

        def applied() -> None:
            self.checkers.published(generation, overwrites=self.store.overwrote)
            self.store.contents[generation.digest] = generation

        def stored(answer: dict[str, int] | EplbError) -> None:
            if isinstance(answer, FencedError):
                if self.rollout is rollout:
                    self._fenced()
            elif isinstance(answer, ConflictError):
                self.world.counts["CAS conflicts"] += 1
                if self.chance is not None:
                    self.world.after(0.2, self._plan)
            else:
                self._known[generation.number] = (generation.digest, "published")
                self._contents[generation.number] = generation
                if self.rollout is rollout and rollout.live is live:
                    self.feed(Start(generation))

        self.client.write(self.epoch, puts, stored, expects=dict.fromkeys(puts, 0), on_applied=applied)

    def _persist(self, machine: Rollout, token: int, record: RolloutRecord) -> None:
        generation = self._contents[record.generation]
        puts = {
            "rollout": f"{record.epoch} {record.generation}".encode(),
            f"generation/{record.generation}": f"{generation.digest}|rolling".encode(),
        }

        def applied() -> None:
            self.checkers.started(record.epoch, record.generation)

        def stored(answer: dict[str, int] | EplbError) -> None:
            if self.rollout is not machine:
                return
            if isinstance(answer, FencedError):
                self._owner = f"{self.name}~{self.world.num_events}"
                self.feed(PersistFailed(token, str(answer), fenced_by=Epoch(record.epoch + 1)))
            elif isinstance(answer, EplbError):
                self.feed(PersistFailed(token, str(answer)))
            else:
                self.feed(Persisted(token))

        self.client.write(self.epoch, puts, stored, on_applied=applied)

    def _write_state(self, generation: Generation, outcome: Outcome) -> None:
        """Written behind."""
        self._known[generation.number] = (generation.digest, outcome.value)
        puts = {f"generation/{generation.number}": f"{generation.digest}|{outcome.value}".encode()}
        self.client.write(self.epoch, puts, lambda _: None)


def first_sequence(chance: random.Random) -> int:
    """Where a leader's chunk ids begin."""
    return drawn_sequence(str(chance.random()))


def make_generation(number: int, placement: Placement, num_layers: int, epoch: Epoch) -> Generation:
    """A generation of which only number and placement matter."""
    even = Imbalance((1.0,) * num_layers)
    return Generation(
        number=GenerationNumber(number),
        placement=placement,
        created_at_s=0.0,
        reason="simulated",
        policy="random",
        epoch=epoch,
        before=even,
        predicted=even,
        lower_bound=even,
        moves=NO_MOVES,
    )
