"""How planners and ranks reach one another: straight, so that every planner hears every rank, or through agent processes.

Straight is what no deployment has and the machines must stand: a planner that was replaced goes on talking to all ranks, and
hears them. Through agent processes the real `agent.session` decides what passes; streams break, processes die.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

from agent.frames import RegistrationAnswer
from agent.hook import chunk_events as hook
from agent.session import Session
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
    Register,
    RegisterAccepted,
    RegisterFailed,
    StreamClosed,
    StreamId,
    Tick,
    ToHook,
    ToPlanner,
)
from eplb_service.attach import Attach, FromAgent, Gone
from eplb_service.control import Address, FromRank, ToRank
from eplb_service.errors import EplbError
from eplb_service.ids import RankId
from tests.sim.engine import Engine
from tests.sim.network import Network
from tests.sim.planner import PlannerProcess
from tests.sim.rank import Rank
from tests.sim.world import Clock, World

DRAIN_S = 3.0


class StraightWires:
    """Every planner hears every rank and reaches it."""

    def __init__(self, world: World, engine: Engine, network: Network, planners: list[PlannerProcess]) -> None:
        self._world, self._engine, self._network, self._planners = world, engine, network, planners
        self._chance = world.chance("wires")

    def say(self, rank: Rank, message: FromRank) -> None:
        """See `Wires`."""
        node = self._engine.shape.node_of(rank.address.rank_id)
        for planner in self._planners:
            if planner.is_alive:
                self._network.send(node, planner.name, message, partial(_hear, planner, message))

    def order(self, planner: PlannerProcess, message: ToRank) -> None:
        """See `ToRanks`."""
        node = self._engine.shape.node_of(message.to.rank_id)
        self._network.send(planner.name, node, message, lambda: self._engine.receive(message))

    def formed(self) -> None:
        """All planners meet the ranks of a new life."""
        for planner in self._planners:
            self.met_by(planner)

    def formed_again(self, rank: Rank) -> None:
        """See `Wires`."""
        for planner in self._planners:
            self._world.after(0.5 * self._chance.random(), partial(self._meet, planner, rank.address))

    def met_by(self, planner: PlannerProcess) -> None:
        """A planner leads."""
        for rank in self._engine.ranks:
            self._world.after(0.5 * self._chance.random(), partial(self._meet, planner, rank.address))

    def gone(self, address: Address) -> None:
        """See `Wires`."""
        for planner in self._planners:
            self._world.after(0.5 * self._chance.random(), partial(planner.gone, address, "the process ended"))

    def break_stream(self, chance: random.Random) -> None:
        """An agent process, or its connection, goes away for a while."""
        rank, planner = chance.choice(self._engine.ranks), self._planners[-1]
        planner.detach(rank.address, "stream broken")
        self._world.after(0.1 + 1.9 * chance.random(), partial(self._meet, planner, rank.address))

    def _meet(self, planner: PlannerProcess, address: Address) -> None:
        registration = self._engine.registration_of(address)
        if registration is None or not planner.is_alive:
            return
        try:
            planner.register(registration)
            planner.attach(address)
        except EplbError:
            self._world.counts["registrations refused"] += 1
            self._world.after(0.5 + self._chance.random(), partial(self._meet, planner, address))


def _hear(planner: PlannerProcess, message: FromRank) -> None:
    if planner.is_alive:
        planner.receive(message)


# ── agent processes ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Stream:
    """One control stream: who is at its ends, and for which ranks it speaks."""

    id: StreamId
    agent: AgentProcess
    planner: PlannerProcess
    is_open: bool = True
    ranks: dict[RankId, Address] = field(default_factory=dict)


class AgentProcess:
    """One life of the agent process of a node, with the real session."""

    def __init__(self, wires: AgentWires, node: str, clock: Clock) -> None:
        self.wires, self.node, self.clock = wires, node, clock
        self.is_alive = True
        self.session = Session(jitter_seed=len(node))
        self.links: dict[LinkId, Rank] = {}
        self.streams: dict[StreamId, Stream] = {}
        self._due_s: float | None = None

    def handle(self, event: Event) -> None:
        """An event, and what the session answers."""
        if not self.is_alive:
            return
        for effect in self.session.handle(event, self.clock.now()):
            self._run(effect)
        due_s = self.session.due_at_s()
        if due_s is not None and due_s != self._due_s:
            self._due_s = due_s
            self.wires.world.after(self.clock.until(due_s) + 0.001, self._tick)

    def _tick(self) -> None:
        self._due_s = None
        self.handle(Tick())

    def _run(self, effect: Effect) -> None:
        match effect:
            case Register(attempt, registration):
                self.wires.register(self, attempt, registration.address)
            case OpenStream(stream):
                self.wires.open_stream(self, stream)
            case CloseStream(stream):
                self.wires.end_stream(self.streams.get(stream), "closed", tell_agent=False)
            case ToPlanner(stream, message):
                self.wires.to_planner(self.streams.get(stream), message)
            case ToHook(link, message) if not isinstance(message, RegistrationAnswer):
                self.wires.to_hook(self, link, message)
            case CloseLink(link, reason):
                self.wires.unlink(self, link, reason)
            case _:
                pass


class AgentWires:
    """Agent processes of all nodes between ranks and planners."""

    def __init__(self, world: World, engine: Engine, network: Network, planners: list[PlannerProcess]) -> None:
        self.world, self.engine, self.network, self.planners = world, engine, network, planners
        self.chance = world.chance("wires")
        self.agents: dict[str, AgentProcess] = {}
        self._links = 0
        self._link_of: dict[Rank, tuple[AgentProcess, LinkId]] = {}
        self._speaks: dict[tuple[PlannerProcess, RankId], Stream] = {}
        for position in range(engine.shape.num_nodes):
            self.start_agent(engine.shape.node_of(position))
        world.after(DRAIN_S, self._drain)

    # ── agent processes and their links ──────────────────────────────────────────────────────────────────────────────────

    def start_agent(self, node: str) -> None:
        """A new agent process; its ranks connect soon."""
        clock = Clock(self.world, offset_s=1000 * self.chance.random(), rate=self.chance.choice([0.9, 1.0, 1.1]))
        self.agents[node] = AgentProcess(self, node, clock)
        for rank in self.engine.ranks:
            if self.engine.shape.node_of(rank.address.rank_id) == node:
                self._connect_soon(rank)

    def kill_agent(self, node: str) -> None:
        """SIGKILL: streams and links end; what was under way on them is lost."""
        agent = self.agents[node]
        agent.is_alive = False
        self.world.note("── the agent process of {} dies", node)
        for stream in list(agent.streams.values()):
            self.end_stream(stream, "the agent process died", tell_agent=False)
        for rank, (of, _) in list(self._link_of.items()):
            if of is agent:
                del self._link_of[rank]

    def formed(self) -> None:
        """Every rank of a new life connects to the agent process of its node."""
        for rank in self.engine.ranks:
            self._connect_soon(rank)

    def formed_again(self, rank: Rank) -> None:
        """See `Wires`: a hook that is linked says anew what it is."""
        linked, registration = self._link_of.get(rank), self.engine.registration_of(rank.address)
        if linked is None or registration is None:
            self._connect_soon(rank)
        else:
            agent, link = linked
            self.world.after(0.002, lambda: agent.handle(HookSaid(link, registration)) if link in agent.links else None)

    def gone(self, address: Address) -> None:
        """The process of a rank ended: its link is closed."""
        for rank, (agent, link) in list(self._link_of.items()):
            if rank.address == address:
                del self._link_of[rank]
                self.world.after(0.2 * self.chance.random(), partial(agent.handle, HookGone(link, "its process ended")))

    def _connect_soon(self, rank: Rank) -> None:
        self.world.after(0.01 + 0.3 * self.chance.random(), partial(self._connect, rank))

    def _connect(self, rank: Rank) -> None:
        agent = self.agents[self.engine.shape.node_of(rank.address.rank_id)]
        registration = self.engine.registration_of(rank.address)
        if registration is None or rank.is_dead or rank in self._link_of:
            return
        if not agent.is_alive:
            self._connect_soon(rank)
            return
        self._links += 1
        link = LinkId(self._links)
        agent.links[link] = rank
        self._link_of[rank] = (agent, link)
        agent.handle(HookSaid(link, registration))
        self.engine.handle(rank, hook.Attached())

    def unlink(self, agent: AgentProcess, link: LinkId, reason: str) -> None:
        """The session ends a link: the hook connects again."""
        rank = agent.links.pop(link)
        if self._link_of.get(rank) == (agent, link):
            del self._link_of[rank]
            self._connect_soon(rank)
        agent.handle(HookGone(link, reason))

    def say(self, rank: Rank, message: FromRank) -> None:
        """See `Wires`: over the Unix socket, in order, while somebody is there."""
        linked = self._link_of.get(rank)
        if linked is not None:
            agent, link = linked
            self.world.after(0.002, lambda: agent.handle(HookSaid(link, message)) if link in agent.links else None)

    def to_hook(self, agent: AgentProcess, link: LinkId, message: ToRank) -> None:
        """The same, the other way."""
        rank = agent.links.get(link)
        if rank is not None and self._link_of.get(rank) == (agent, link):
            self.world.after(0.002, lambda: self.engine.receive(message) if self._link_of.get(rank) == (agent, link) else None)

    # ── registrations and streams ────────────────────────────────────────────────────────────────────────────────────────

    def _located(self, agent: AgentProcess) -> PlannerProcess | None:
        """Where the planners' name leads: to one that leads, the newest of them; now and then to any that lives."""
        alive = [planner for planner in self.planners if planner.is_alive and not self.network.is_cut(agent.node, planner.name)]
        leading = [planner for planner in alive if planner.rollout is not None] or alive
        if not alive:
            return None
        return leading[-1] if self.world.is_calm or self.chance.random() < 0.85 else self.chance.choice(alive)

    def register(self, agent: AgentProcess, attempt: int, address: Address) -> None:
        """The unary call: answered, refused or failed."""
        self.world.after(0.01 + 0.05 * self.chance.random(), partial(self._register, agent, attempt, address))

    def _register(self, agent: AgentProcess, attempt: int, address: Address) -> None:
        planner, registration = self._located(agent), self.engine.registration_of(address)
        answer: RegisterAccepted | RegisterFailed = RegisterFailed(attempt, refused=False, reason="nobody answers")
        if planner is not None and registration is not None:
            try:
                planner.register(registration)
                answer = RegisterAccepted(attempt)
            except EplbError as error:
                self.world.counts["registrations refused"] += 1
                answer = RegisterFailed(attempt, refused=True, reason=str(error))
        self.world.after(0.01, partial(agent.handle, answer))

    def open_stream(self, agent: AgentProcess, stream_id: StreamId) -> None:
        """A control stream to whoever is there."""
        planner = self._located(agent)
        if planner is None:
            self.world.after(0.1, partial(agent.handle, StreamClosed(stream_id, "nobody answers")))
        else:
            agent.streams[stream_id] = Stream(stream_id, agent, planner)

    def to_planner(self, stream: Stream | None, message: FromAgent) -> None:
        """Attach and Gone are as sure as the stream; the rest meets what the network has in store."""
        if stream is None or not stream.is_open:
            return
        if isinstance(message, Attach | Gone):
            self.world.after(0.01, partial(self._control, stream, message))
        else:
            self.network.send(
                stream.agent.node,
                stream.planner.name,
                message,
                lambda: stream.planner.receive(message) if self._speaks_for(stream, message.sender) else None,
            )

    def _control(self, stream: Stream, message: Attach | Gone) -> None:
        if not stream.is_open or not stream.planner.is_alive:
            return
        if isinstance(message, Gone):
            if self._speaks_for(stream, message.sender):
                self._speaks.pop((stream.planner, message.sender.rank_id))
                stream.planner.gone(message.sender, message.reason)
            return
        for address in message.ranks:
            before = self._speaks.get((stream.planner, address.rank_id))
            self._speaks[stream.planner, address.rank_id] = stream
            stream.ranks[address.rank_id] = address
            if before is not None and before is not stream:
                before.ranks.pop(address.rank_id, None)
                self.end_stream(before, "another stream speaks for its rank")
            try:
                stream.planner.attach(address)
            except EplbError as error:
                self.end_stream(stream, str(error))

    def _speaks_for(self, stream: Stream, address: Address) -> bool:
        return (
            stream.is_open
            and stream.planner.is_alive
            and self._speaks.get((stream.planner, address.rank_id)) is stream
            and stream.ranks.get(address.rank_id) == address
        )

    def order(self, planner: PlannerProcess, message: ToRank) -> None:
        """See `ToRanks`."""
        stream = self._speaks.get((planner, message.to.rank_id))
        if stream is not None and stream.ranks.get(message.to.rank_id) == message.to:
            self.network.send(
                planner.name,
                stream.agent.node,
                message,
                lambda: stream.agent.handle(PlannerSaid(stream.id, message)) if stream.is_open else None,
            )

    def end_stream(self, stream: Stream | None, reason: str, *, tell_agent: bool = True) -> None:
        """Both ends learn it, each in its own time."""
        if stream is None or not stream.is_open:
            return
        stream.is_open = False
        if tell_agent:
            self.world.after(0.2 * self.chance.random(), partial(stream.agent.handle, StreamClosed(stream.id, reason)))
        self.world.after(0.2 * self.chance.random(), partial(self._detach, stream, reason))

    def _detach(self, stream: Stream, reason: str) -> None:
        for rank, address in stream.ranks.items():
            if self._speaks.get((stream.planner, rank)) is stream:
                del self._speaks[stream.planner, rank]
                stream.planner.detach(address, reason)

    # ── what befalls them ────────────────────────────────────────────────────────────────────────────────────────────────

    def met_by(self, planner: PlannerProcess) -> None:
        """A planner leads now, and has the name: agents come over one after another, when their streams end."""
        for agent in self.agents.values():
            for stream in list(agent.streams.values()):
                if stream.is_open and stream.planner is not planner:
                    self.world.after(2.0 * self.chance.random(), partial(self.end_stream, stream, "the name leads elsewhere"))

    def _drain(self) -> None:
        """What gives planners their name ends streams to one that does not lead while another does."""
        if any(planner.rollout is not None for planner in self.planners):
            for agent in self.agents.values():
                for stream in list(agent.streams.values()):
                    if stream.planner.rollout is None:
                        self.end_stream(stream, "it does not lead")
        self.world.after(DRAIN_S, self._drain)

    def planner_ended(self, planner: PlannerProcess) -> None:
        """Its streams end."""
        for agent in self.agents.values():
            for stream in list(agent.streams.values()):
                if stream.planner is planner:
                    self.end_stream(stream, "the planner ended")

    def break_stream(self, chance: random.Random) -> None:
        """A connection ends, or an agent process dies and is started again."""
        node = chance.choice(sorted(self.agents))
        agent = self.agents[node]
        if chance.random() < 0.5 and agent.is_alive:
            self.world.counts["agent processes killed"] += 1
            self.kill_agent(node)
            self.world.after(0.1 + 2.0 * chance.random(), partial(self.start_agent, node))
        else:
            for stream in list(agent.streams.values()):
                self.end_stream(stream, "connection reset")
