"""The agent session under random orders of events: whatever comes when, nothing stale passes, and everyone is served again."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from agent.frames import RegistrationAnswer
from agent.session import RankState, Session
from agent.session_events import (
    CloseLink,
    CloseStream,
    Effect,
    Event,
    HookGone,
    HookSaid,
    LinkId,
    OpenStream,
    PlannerSaid,
    QueueReport,
    Register,
    RegisterAccepted,
    RegisterFailed,
    StreamClosed,
    StreamId,
    Tick,
    ToHook,
    ToPlanner,
)
from eplb_service.attach import Attach, Gone
from eplb_service.control import Address, Arm, Disarm, Hello, LayerInfo, LinkBytes, ModelInfo, Registration, Staged, ToRank
from eplb_service.ids import DeploymentId, Epoch, GroupId, Incarnation, Phase, RankId, chunk_epoch, chunk_id

SEEDS = st.integers(0, (1 << 32) - 1)


MODEL = ModelInfo(
    name="m", digest="a", manifest_digest="b", layers=(LayerInfo(layer_id=1, num_logical=4, slots=3, expert_bytes=64),)
)


def registration(who: Address, deployment: str) -> Registration:
    return Registration(
        deployment=DeploymentId(deployment), address=who, node="n", group_rank_ids=(who.rank_id,), phase=Phase.MIXED, stage=0,
        models=(MODEL,), capacity=1.0, dispatch="even", vote_period=1, window_steps=1, sub_windows=1, staging_bytes=0,
        replica_table_width=1, weights_version=0,
    )  # fmt: skip


def facts(who: Address | None) -> Staged:
    who = who or Address(RankId(9), Incarnation(9), GroupId(9))
    return Staged(sender=who, chunk_id=chunk_id(1, 1), seconds=0.0, received=LinkBytes())


KINDS = ["link"] * 2 + ["accept"] * 3 + ["fail"] + ["order"] * 4 + ["fact"] * 3 + ["lost", "gone", "tick"]


class Run:
    """Makes events that matter in the state that the session is in, and stale ones of every kind beside them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.session = Session(jitter_seed=seed)
        self.pending: dict[int, Register] = {}
        self.issued = 0
        self.links: dict[LinkId, Address] = {}
        self.streams = 0
        self.now = 0.0

    def next_event(self) -> Event:
        pick = self._random.choice
        match pick(KINDS):
            case "link":
                return HookSaid(self._link(), registration(self._any_address(), pick(["d"] * 9 + ["other"])))
            case "accept":
                return RegisterAccepted(self._attempt())
            case "fail":
                return RegisterFailed(self._attempt(), pick([True, False]), "no")
            case "order":
                return PlannerSaid(self._stream(), self._order(self._address()))
            case "fact":
                link = self._link()
                return HookSaid(link, facts(self.links.get(link) if pick([True, False]) else self._any_address()))
            case "lost":
                return StreamClosed(self._stream(), "lost")
            case "gone":
                return HookGone(self._link(), "closed")
            case _:
                return Tick()

    def _link(self) -> LinkId:
        return LinkId(self._random.randint(1, 3))

    def _attempt(self) -> int:
        if self.pending and self._random.random() < 0.8:
            return self._random.choice(sorted(self.pending))
        return self._random.randint(0, self.issued)

    def _stream(self) -> StreamId:
        return StreamId(self._random.choice([self.streams, self.streams, self.streams, max(0, self.streams - 1)]))

    def _any_address(self) -> Address:
        rank, incarnation, group = self._random.randint(0, 1), self._random.randint(1, 2), self._random.randint(1, 2)
        return Address(RankId(rank), Incarnation(incarnation), GroupId(group))

    def _address(self) -> Address:
        linked = [self.links[link] for link in sorted(self.links)]
        return self._random.choice(linked) if linked and self._random.random() < 0.7 else self._any_address()

    def _order(self, to: Address) -> ToRank:
        epoch = Epoch(self._random.randint(1, 3))
        orders: list[ToRank] = [
            Hello(to=to, epoch=epoch),
            Arm(to=to, chunk_id=chunk_id(epoch, 1)),
            Disarm(to=to, chunk_id=chunk_id(1, 1), epoch=epoch),
        ]
        return self._random.choice(orders)

    def handle(self, event: Event) -> list[Effect]:
        """Feed one event; ticks come when they are due."""
        if isinstance(event, Tick):
            self.now = max(self.now, self.session.due_at_s() or 0.0)
        if isinstance(event, RegisterAccepted | RegisterFailed):
            self.pending.pop(event.attempt, None)
        if isinstance(event, HookGone):
            self.links.pop(event.link, None)
        effects = self.session.handle(event, self.now)
        for effect in effects:
            match effect:
                case Register(attempt):
                    self.pending[attempt], self.issued = effect, attempt
                    if isinstance(event, HookSaid):
                        self.links[event.link] = effect.registration.address
                case OpenStream(stream):
                    self.streams = stream
                case CloseLink(link):
                    self.links.pop(link, None)
        return effects


class Model:
    """What an outsider knows from events and effects alone: who is linked where, and what the streams have said."""

    def __init__(self) -> None:
        self.life_of_link: dict[LinkId, Address] = {}
        self.stream: StreamId | None = None
        self.epoch = 0
        self.attached: set[Address] = set()

    def before(self, event: Event) -> None:
        if isinstance(event, PlannerSaid) and event.stream == self.stream:
            order = event.message
            self.epoch = max(self.epoch, epoch_of(order))
        if isinstance(event, HookGone):
            self.life_of_link.pop(event.link, None)
        if isinstance(event, StreamClosed) and event.stream == self.stream:
            self.stream = None
            self.attached.clear()
        if isinstance(event, HookSaid) and isinstance(event.message, Registration):
            self.life_of_link[event.link] = event.message.address

    def check(self, event: Event, effect: Effect) -> None:
        match effect:
            case OpenStream(stream):
                assert self.stream is None
                self.stream, self.epoch = stream, 0
                self.attached.clear()
            case CloseStream(stream):
                assert stream == self.stream
                self.stream = None
                self.attached.clear()
            case Register(_, registered):
                self.attached = {who for who in self.attached if who.rank_id != registered.address.rank_id}
            case CloseLink(link, _):
                self.life_of_link.pop(link, None)
            case ToHook(link, RegistrationAnswer()):
                pass
            case ToHook(link, order):
                assert isinstance(event, PlannerSaid)
                assert order is event.message
                assert event.stream == self.stream, "an order of an earlier stream passed"
                assert self.life_of_link[link] == order.to, "an order reached another life than it is for"
                assert order.to in self.attached, "an order reached a rank that this planner was not told of"
                assert epoch_of(order) >= self.epoch, "an order of an older epoch passed"
            case ToPlanner(stream, Attach(ranks=ranks)):
                assert stream == self.stream
                assert set(ranks) <= set(self.life_of_link.values())
                self.attached |= set(ranks)
            case ToPlanner(stream, Gone(sender=sender)):
                assert stream == self.stream
                assert sender in self.attached
                self.attached.discard(sender)
            case ToPlanner(stream, fact):
                assert stream == self.stream
                assert isinstance(event, HookSaid)
                assert fact is event.message
                assert self.life_of_link[event.link] == fact.sender, "a fact of another life passed"
                assert fact.sender in self.attached, "a fact of a rank that this planner was not told of passed"
            case QueueReport():
                raise AssertionError("no report was offered")


def epoch_of(order: ToRank) -> int:
    return order.epoch if isinstance(order, Hello | Disarm) else chunk_epoch(order.chunk_id)


@settings(max_examples=250, deadline=None)
@given(SEEDS)
def test_no_order_of_events_forwards_a_stale_message(seed: int) -> None:
    run, model = Run(seed), Model()
    for _ in range(60):
        event = run.next_event()
        model.before(event)
        for effect in run.handle(event):
            model.check(event, effect)
        assert run.session.attached() == {who.rank_id for who in model.attached}


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_whatever_happened_every_linked_rank_is_attached_once_the_planner_answers(seed: int) -> None:
    run = Run(seed)
    for _ in range(40):
        run.handle(run.next_event())
    for _ in range(20):
        if all(state is RankState.ATTACHED for state in run.session.states().values()):
            break
        for attempt in sorted(run.pending):
            run.handle(RegisterAccepted(attempt))
        run.handle(Tick())
    assert all(state is RankState.ATTACHED for state in run.session.states().values())


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_the_same_events_have_the_same_effects(seed: int) -> None:
    run, twin = Run(seed), Session(jitter_seed=seed)
    for _ in range(40):
        event = run.next_event()
        effects = run.handle(event)
        assert twin.handle(event, run.now) == effects
