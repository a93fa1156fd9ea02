"""The planner processes of the simulation: real membership and rollout machines over a store that may lose everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from eplb_service.control import Address, FromRank, Pulse
from eplb_service.errors import EplbError
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import Epoch, GenerationNumber
from eplb_service.imbalance import Imbalance
from eplb_service.membership.machine import (
    Attached,
    Detached,
    Gone,
    GroupReady,
    Membership,
    MembershipEvent,
    Ready,
    Registered,
    WeightsSeen,
)
from eplb_service.moves import NO_MOVES
from eplb_service.rollout.events import (
    Alarm,
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
    RolloutSettings,
    RolloutState,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout.machine import Rollout
from tests.sim.fleet import DEPLOYMENT, Fleet, _short
from tests.sim.world import World

SETTINGS = RolloutSettings(
    stage_timeout_s=1.5,
    arm_ttl_s=2.0,
    slowest_step_s=0.3,
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


@dataclass
class SimStore:
    """Fence and generations; `lose` is a disk that went."""

    epoch: int = 0
    latest: int = 0
    generations: dict[int, Generation] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def lead(self, floor: int) -> Epoch:
        self.epoch = 1 + max(self.epoch, floor)
        return Epoch(self.epoch)

    def lose(self) -> None:
        self.epoch = self.latest = 0
        self.generations.clear()
        self.finished.clear()


class PlannerProcess:
    """One life of a planner. It publishes random targets, one after another, and does what the machine's effects say."""

    def __init__(self, world: World, fleet: Fleet, store: SimStore, name: str) -> None:
        self.world, self.fleet, self.store, self.name = world, fleet, store, name
        self.is_alive = True
        self.is_current = True
        self.finished: list[Finished] = []
        self.membership = Membership(DEPLOYMENT)
        self.epoch = Epoch(0)
        self.has_adopted = False
        self.timer: tuple[Rollout, float | None] | None = None
        self._lead(0)
        fleet.listeners.append(self.receive)
        fleet.on_gone.append(self._rank_gone)
        fleet.on_formed.append(self._meet_ranks)
        self._meet_ranks()

    def die(self, why: str) -> None:
        if self.is_alive:
            self.world.note(f"{self.name} ends: {why}")
            self.is_alive = False
            self.fleet.listeners.remove(self.receive)
            self.fleet.on_gone.remove(self._rank_gone)
            self.fleet.on_formed.remove(self._meet_ranks)

    def _lead(self, floor: int) -> None:
        self.epoch = self.store.lead(max(floor, self.epoch))
        self.rollout = Rollout(
            self.epoch,
            SETTINGS,
            generation_floor=self.generation_floor(),
            first_sequence=1 + 65536 * self.world.random.randrange(65536),
        )
        self.has_adopted = False
        self.world.note(f"{self.name} leads with epoch {self.epoch}")
        status = self.membership.status
        if isinstance(status, Ready):
            self.feed(GroupReady(status.group))

    def _lead_again(self, outranked: Rollout, floor: int) -> None:
        if self.is_alive and self.rollout is outranked:
            self._lead(floor)

    def generation_floor(self) -> GenerationNumber:
        mine = self.rollout.generation_floor if hasattr(self, "rollout") else GenerationNumber(0)
        return max(mine, GenerationNumber(self.store.latest))

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _meet_ranks(self) -> None:
        for registration in self.fleet.registrations():
            delay_s = self.world.random.uniform(0.0, 0.5)
            self.world.after(delay_s, partial(self._meet, registration.address))

    def _meet(self, address: Address) -> None:
        for registration in self.fleet.registrations():
            if registration.address == address:
                self.member(Registered(registration))
                self.member(Attached(address))

    def _rank_gone(self, address: Address) -> None:
        self.world.after(self.world.random.uniform(0.0, 0.5), lambda: self.member(Gone(address, "the process ended")))

    def break_stream(self) -> None:
        """An agent process, or its connection, goes away for a while; what was under way is lost or late like anything else."""
        rank = self.world.random.choice(self.fleet.ranks)
        self.world.counts["streams broken"] += 1
        self.member(Detached(rank.address, "stream broken"))
        self.world.after(self.world.random.uniform(0.1, 2.0), lambda: self._meet(rank.address))

    def member(self, event: MembershipEvent) -> None:
        if not self.is_alive:
            return
        try:
            changes = self.membership.handle(event, self.world.now)
        except EplbError:
            self.world.counts["registrations refused"] += 1
            if isinstance(event, Registered):
                address = event.registration.address
                self.world.after(self.world.random.uniform(0.5, 1.5), lambda: self._meet(address))
            return
        for change in changes:
            self.feed(change)

    def receive(self, message: FromRank) -> None:
        if not self.is_alive:
            return
        if isinstance(message, Pulse):
            self.member(WeightsSeen(message.sender, message.weights_version))
        self.feed(Received(message))

    # ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: RolloutEvent) -> None:
        if not self.is_alive:
            return
        machine = self.rollout
        for effect in machine.handle(event, self.world.now):
            if self.is_alive:
                self._run(effect)
        if machine is self.rollout and self.timer != (machine, machine.next_deadline):
            self._set_timer()

    def _set_timer(self) -> None:
        machine, due_s = self.timer = self.rollout, self.rollout.next_deadline
        if due_s is not None:

            def fire() -> None:
                if self.is_alive and machine is self.rollout and machine.next_deadline == due_s:
                    self.timer = None
                    self.feed(Tick())

            self.world.after(max(0.0, due_s - self.world.now), fire)

    def _run(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self.world.note(f"{self.name} → A{message.to.rank_id} {_short(message)}")
                self.world.transmit(lambda: self.fleet.receive(message))
            case Persist(token, record):
                self.world.after(self.world.random.uniform(0.0, 0.2), lambda: self._persist(token, record.generation))
            case LiveChanged():
                self._check_live(effect)
            case Finished():
                self._on_finished(effect)
            case Alarm():
                self.world.require(False, f"{self.name} raises an alarm although ranks agree: {effect}")
            case Outranked(epoch):
                self.world.counts["outranked"] += 1
                if self.is_current:
                    self.world.after(0.1, partial(self._lead_again, self.rollout, epoch))
                else:
                    self.die("outranked")
            case Note(event=event, text=text):
                self.world.counts[event] += 1
                self.world.note(f"{self.name} notes {event}: {text}")
                if event == "chunk.authorised" and not self.world.is_calm and self.world.chance(0.2):
                    self.world.after(self.world.random.uniform(0.0, 0.8), self._cancel)
            case _:
                pass

    def _cancel(self) -> None:
        """An operator's cancel that races with the vote."""
        if self.rollout.open_chunk:
            self.world.counts["cancels"] += 1
            self.feed(Cancel(reason="enough", by="operator", withdraw=self.world.chance(0.8)))

    def _persist(self, token: int, generation: GenerationNumber) -> None:
        if not self.is_alive:
            return
        if self.store.epoch == self.epoch:
            if not self.world.is_calm and self.world.chance(0.05):
                self.feed(PersistFailed(token, "no answer"))
            else:
                self.store.latest = max(self.store.latest, generation)
                self.feed(Persisted(token))
        elif self.store.epoch > self.epoch:
            self.feed(PersistFailed(token, "fenced", fenced_by=Epoch(self.store.epoch)))
        else:  # the store forgot us: take a higher epoch
            self.feed(Fenced(self.epoch))

    def _check_live(self, change: LiveChanged) -> None:
        """What the leader holds to be live is what every rank routes by."""
        self.has_adopted = True
        self._soon_start()
        group = self.rollout.group
        if (
            group is None
            or group.group_id != self.fleet.life
            or self.epoch < self.fleet.epoch_seen
            or not self.fleet.is_running
        ):
            return
        self.world.counts["live maps checked"] += 1
        for rank in self.fleet.ranks:
            self.world.require(
                rank.digest == change.live.digest,
                f"{self.name} takes {change.live.digest:#x} for live ({change.reason}),"
                f" rank {rank.address.rank_id} routes {rank.digest:#x}",
            )

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_finished(self, finished: Finished) -> None:
        self.finished.append(finished)
        self.world.counts[f"finished {finished.outcome}"] += 1
        self.world.note(f"{self.name} finished {finished.generation}: {finished.outcome} {finished.reason}")
        if finished.outcome is Outcome.ACTIVE and self.store.epoch == self.epoch:
            self.store.finished.add(finished.generation)
        self._soon_start()

    def _soon_start(self) -> None:
        self.world.after(self.world.random.uniform(0.0, 1.0), self._start)

    def _start(self) -> None:
        if not self.is_alive or self.rollout.state is not RolloutState.IDLE or self.rollout.live is None:
            return
        if self.store.epoch != self.epoch:
            self.feed(Fenced(Epoch(max(self.store.epoch, self.epoch))))
            return
        self.feed(Start(self._next_generation(self.rollout.live)))

    def _next_generation(self, live: LiveMap) -> Generation:
        """An unfinished one is continued, if nothing newer was seen; else the next number, published first."""
        newest = max(self.store.latest, self.rollout.generation_floor)
        unfinished = self.store.generations.get(newest)
        if unfinished is not None and newest not in self.store.finished and self.world.chance(0.6):
            self.world.counts["continued"] += 1
            return unfinished
        generation = make_generation(newest + 1, self.fleet, live, self.epoch)
        self.store.generations[generation.number] = generation
        self.store.latest = generation.number
        return generation


def make_generation(number: int, fleet: Fleet, live: LiveMap, epoch: Epoch) -> Generation:
    placement = fleet.random_target(live.placement)
    even = Imbalance((1.0,) * len(live.generations))
    return Generation(
        number=GenerationNumber(number),
        placement=placement,
        created_at_s=fleet.world.now,
        reason="simulated",
        policy="random",
        epoch=epoch,
        before=even,
        predicted=even,
        lower_bound=even,
        moves=NO_MOVES,
    )
