"""Between the machines that decide (`Membership`, `Rollout`) and the streams that carry: who is attached, what was said.

Everything here runs on the event loop without awaiting, so that one event is handled whole before the next. What needs the
store is handed to the owner (`Carried`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from eplb_service import control
from eplb_service.attach import Attach, FromAgent, Gone
from eplb_service.clock import Clock
from eplb_service.control import Address
from eplb_service.errors import EplbError
from eplb_service.ids import ChunkId, DeploymentId, Epoch, RankId
from eplb_service.membership import machine as membership
from eplb_service.membership.machine import Group, GroupLost, GroupReady, Membership, MembershipChange, RankDetached, Ready
from eplb_service.planner.agent_link import AgentLink
from eplb_service.rollout.events import (
    NO_CHUNK,
    Alarm,
    AlarmCleared,
    Effect,
    Finished,
    LiveChanged,
    Note,
    Outranked,
    Persist,
    Progress,
    Received,
    RolloutEvent,
    RolloutSettings,
    RolloutState,
    Send,
    Tick,
)
from eplb_service.rollout.machine import Rollout


@dataclass(slots=True)
class RankFacts:
    """What a rank said last. last_seen_s: monotonic. chunk_state: what it does in the open chunk. nic: empty = its own."""

    address: Address
    node: str
    staging_bytes: int
    last_seen_s: float
    voting: bool = False
    off_reason: str = ""
    boundary: int = 0
    idle: bool = False
    windows_dropped: int = 0
    chunk_state: str = ""
    gone_reason: str = ""
    nic: str = ""


class Carried(Protocol):
    """Who owns a carrier: told of everything that is more than a message to a rank."""

    def persist(self, effect: Persist) -> None:
        """Store this and feed `Persisted` or `PersistFailed`."""

    def live_changed(self, effect: LiveChanged) -> None:
        """The live map is known, or changed."""

    def rollout_finished(self, effect: Finished) -> None:
        """A rollout ended."""

    def outranked(self, epoch: Epoch) -> None:
        """Ranks saw a higher epoch."""

    def noted(self, event: str, text: str, chunk_id: ChunkId, rank_id: RankId | None) -> None:
        """For the journal."""

    def progressed(self) -> None:
        """The machine may be in another state."""

    def group_changed(self, group: Group | None) -> None:
        """A group formed (or formed anew), or is no more."""

    def machine_failed(self, reason: str) -> None:
        """The machine broke: lead anew with a fresh one."""


_CHUNK_STATES = {
    control.Staged: "staged",
    control.Armed: "armed",
    control.Committed: "committed",
    control.Flipped: "flipped",
    control.Refused: "refused",
    control.Disarmed: "",
}


class Carrier:
    """The ranks of one deployment, as far as messages go."""

    def __init__(
        self,
        deployment: DeploymentId,
        owner: Carried,
        clock: Clock,
        metrics: Callable[[control.FromRank], None],
        *,
        silence_s: float,
    ) -> None:
        self.ranks: dict[RankId, RankFacts] = {}
        self.rollout: Rollout | None = None
        """Only while the deployment is led."""
        self.alarm = ""
        """What a person must look at; empty when nothing."""
        self._membership = Membership(deployment, silence_s=silence_s)
        self._owner, self._clock, self._count = owner, clock, metrics
        self._links: dict[RankId, AgentLink] = {}
        self._events: deque[RolloutEvent] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment)

    # ── what others ask ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def group(self) -> Group | None:
        """The ready group."""
        status = self._membership.status
        return status.group if isinstance(status, Ready) else None

    @property
    def waiting_reason(self) -> str:
        """What the group waits for; empty when it is ready and every rank attached."""
        status = self._membership.status
        if not isinstance(status, Ready):
            return status.reason
        return f"no agent process speaks for rank {', '.join(map(str, status.away))}" if status.away else ""

    @property
    def progress(self) -> Progress | None:
        """Where the rollout machine is; None while the deployment is not led."""
        return self.rollout.progress() if self.rollout is not None else None

    @property
    def num_agents(self) -> int:
        """Agent processes with an open stream."""
        return len({id(link) for link in self._links.values()})

    def rank_state(self, facts: RankFacts, silence_s: float) -> str:
        """`live`, `away` (no stream, or silent) or `gone`."""
        if facts.gone_reason:
            return "gone"
        link = self._links.get(facts.address.rank_id)
        attached = link is not None and self._speaks_for(link, facts.address)
        return "live" if attached and self._clock.monotonic() - facts.last_seen_s <= silence_s else "away"

    # ── from agents ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def register(self, registration: control.Registration) -> None:
        """A rank says what it is. Raises what `Membership` raises; then nothing changed."""
        before = self.group
        changes = self._membership.handle(membership.Registered(registration), self._clock.monotonic())
        address = registration.address
        known = self.ranks.get(address.rank_id)
        if known is None or known.address != address or known.gone_reason:
            self.ranks[address.rank_id] = RankFacts(
                address=address,
                node=registration.node,
                staging_bytes=registration.staging_bytes,
                last_seen_s=self._clock.monotonic(),
                nic=registration.nic,
            )
            if known is not None and known.address != address:
                self._links.pop(address.rank_id, None)
            self._log.info("rank.registered", rank=address.rank_id, node=registration.node, group=address.group_id)
        self.ranks = {rank: facts for rank, facts in self.ranks.items() if rank in registration.group_rank_ids}
        self._follow(changes, before)

    def receive(self, link: AgentLink, message: FromAgent) -> None:
        """Something arrived on a stream. Raises NotFoundError or StaleError for an Attach that cannot be: end the stream."""
        match message:
            case Attach():
                for address in message.ranks:
                    self._attach(link, address)
            case Gone():
                if self._speaks_for(link, message.sender):
                    self._gone(message)
            case _:
                if self._speaks_for(link, message.sender):
                    self._note_facts(message)
                    self.feed(Received(message))

    def heard(self, address: Address) -> None:
        """A rank said something, over a control stream or elsewhere."""
        self._membership.handle(membership.Heard(address), self._clock.monotonic())

    def detach(self, link: AgentLink, reason: str) -> None:
        """A stream ended."""
        link.close(reason)
        for rank, address in link.ranks.items():
            if self._links.get(rank) is link:
                del self._links[rank]
                self._change(membership.Detached(address, reason))

    def _attach(self, link: AgentLink, address: Address) -> None:
        before = self.group
        changes = self._membership.handle(membership.Attached(address), self._clock.monotonic())
        previous = self._links.get(address.rank_id)
        self._links[address.rank_id] = link
        link.ranks[address.rank_id] = address
        if previous is not None and previous is not link:
            previous.ranks.pop(address.rank_id, None)
            previous.close(f"another control stream speaks for rank {address.rank_id} now")  # else it would never come back
        facts = self.ranks.get(address.rank_id)
        if facts is not None:
            facts.last_seen_s = self._clock.monotonic()
        self._log.info("rank.attached", rank=address.rank_id, peer=link.peer)
        self._follow(changes, before)

    def _gone(self, message: Gone) -> None:
        rank = message.sender.rank_id
        facts = self.ranks.get(rank)
        if facts is not None and facts.address == message.sender:
            facts.gone_reason = message.reason or "its engine ended"
            self._log.warning("rank.gone", rank=rank, reason=facts.gone_reason)
        self._links.pop(rank, None)
        self._change(membership.Gone(message.sender, message.reason))

    def _speaks_for(self, link: AgentLink, address: Address) -> bool:
        return self._links.get(address.rank_id) is link and link.ranks.get(address.rank_id) == address

    def _note_facts(self, message: control.FromRank) -> None:
        facts = self.ranks.get(message.sender.rank_id)
        if facts is None or facts.address != message.sender:
            return
        facts.last_seen_s = self._clock.monotonic()
        facts.chunk_state = _CHUNK_STATES.get(type(message), facts.chunk_state)
        if isinstance(message, control.Pulse | control.Live):
            facts.voting, facts.off_reason, facts.boundary = message.voting, message.off_reason, message.boundary
        if isinstance(message, control.Pulse):
            facts.idle, facts.windows_dropped = message.idle, message.windows_dropped
            self._change(membership.WeightsSeen(message.sender, message.weights_version))
        else:
            self.heard(message.sender)
        self._count(message)

    def _change(self, event: membership.MembershipEvent) -> None:
        before = self.group
        self._follow(self._membership.handle(event, self._clock.monotonic()), before)

    def _follow(self, changes: tuple[MembershipChange, ...], before: Group | None) -> None:
        for change in changes:
            if isinstance(change, GroupReady):
                self._log.info("group.ready", group=change.group.group_id, ranks=len(change.group.rank_ids))
                self._owner.group_changed(change.group)
            elif isinstance(change, GroupLost):
                self._log.warning("group.lost", group=change.group_id, reason=change.reason)
                if self.group is None and before is not None:
                    self._owner.group_changed(None)
            self.feed(change)

    # ── the rollout machine ──────────────────────────────────────────────────────────────────────────────────────────────

    def lead(self, epoch: Epoch, settings: RolloutSettings, *, first_sequence: int) -> None:
        """A fresh machine for this epoch; it asks the ready group what is live."""
        self.rollout, self.alarm = Rollout(epoch, settings, first_sequence=first_sequence), ""
        status = self._membership.status
        if isinstance(status, Ready):
            self.feed(GroupReady(status.group))
            for rank in status.away:
                self.feed(RankDetached(status.group.addresses[rank], "no agent process speaks for it"))

    def step_down(self) -> None:
        """Lead no more: nothing is sent from now on."""
        self.rollout = None
        self._events.clear()
        self._stop_timer()
        for facts in self.ranks.values():
            facts.chunk_state = ""

    def send_elsewhere(self, reason: str) -> None:
        """Another planner leads: it cannot speak to ranks whose streams stay here."""
        for link in {id(link): link for link in self._links.values()}.values():
            link.send_elsewhere(reason)
            self.detach(link, reason)

    def feed(self, event: RolloutEvent) -> None:
        """Give the machine an event and run what it answers; events that this causes are handled after it, in order."""
        if self.rollout is None:
            return
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events and self.rollout is not None:
                for effect in self.rollout.handle(self._events.popleft(), self._clock.monotonic()):
                    self._run(effect)
        except EplbError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  (a bug in the machine must not end the stream that it was found on)
            self._log.exception("rollout.broke")
            self._fail(f"the rollout machine failed ({type(error).__name__}); see the log")
        finally:
            self._handling = False
        self._start_timer()
        self._owner.progressed()

    def _fail(self, reason: str) -> None:
        self._events.clear()
        self._owner.machine_failed(reason)

    def _run(self, effect: Effect) -> None:  # noqa: C901  (one line for each kind of effect)
        match effect:
            case Send(message):
                self._send(message)
            case Persist():
                self._owner.persist(effect)
            case LiveChanged():
                self._owner.live_changed(effect)
            case Finished():
                self._owner.rollout_finished(effect)
            case Outranked(epoch):
                self._owner.outranked(epoch)
            case Note():
                self._owner.noted(effect.event, effect.text, effect.chunk_id, effect.rank_id)
            case Alarm(code, reason):
                self.alarm = f"{code.value}: {reason}"
                self._log.error("alarm.raised", code=code.value, reason=reason)
                self._owner.noted("alarm.raised", self.alarm, NO_CHUNK, None)
            case AlarmCleared(reason):
                self.alarm = ""
                self._log.info("alarm.cleared", reason=reason)
                self._owner.noted("alarm.cleared", reason, NO_CHUNK, None)
            case Progress():
                if effect.state in (RolloutState.IDLE, RolloutState.BACKING_OFF):
                    for facts in self.ranks.values():
                        facts.chunk_state = ""

    def _send(self, message: control.ToRank) -> None:
        rank = message.to.rank_id
        link = self._links.get(rank)
        if link is None or link.ranks.get(rank) != message.to:
            return  # the machine was told that this rank is detached, and waits for it or gives up
        if isinstance(message, control.Stage):
            facts = self.ranks.get(rank)
            if facts is not None:
                facts.chunk_state = "staging"
        if not link.send(message) and link.closed_reason:
            reason = link.closed_reason
            self._log.warning("agent.dropped", peer=link.peer, reason=reason)
            self.detach(link, reason)

    def _start_timer(self) -> None:
        self._stop_timer()
        deadline = self.rollout.next_deadline if self.rollout is not None else None
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.feed, Tick())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
