"""The agent process's view of its ranks, as a pure state machine: `handle(event, now) -> effects`, in the order to run them.

A rank is followed from the moment its hook says who it is:

    REGISTERING --accepted--> ATTACHED        facts pass to the planner, orders to the hook
       |     ^                   |
       |     +--retry-- WAITING <+  planner lost
       +--refused, unreachable-^

`TRANSITIONS` below is the whole of it. Only an ATTACHED rank's messages pass, in either direction; all others are dropped
and logged. Dropping what a rank says while the planner is away is safe: nothing that a planner must know is said only once.
`Live`, `Staged`, `Refused`, `Armed`, `Committed`, `Flipped` and `Disarmed` tell of state that the hook keeps (live rows,
open chunk, tombstone, last flipped id), a planner that comes back says Hello before anything else, the hook closes what is
open of an older epoch and answers with all of it; within one epoch a lost answer costs the chunk its deadline, no more.
Replaying old answers instead would hand the new planner facts that Hello has just overtaken. A `Pulse` is stale after a
second. Load reports wait in the reporter, bounded, and are idempotent.

The hook judges content (digests, manifest, budget, tombstone), since it alone outlives this process; here is judged only
what this process knows better: which life of which rank is linked, and which epoch this planner stream has reached.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from agent.frames import RegistrationAnswer
from agent.session_events import (
    CloseLink,
    CloseStream,
    Effect,
    Event,
    ForgetReports,
    HookGone,
    HookSaid,
    LinkId,
    Log,
    Notice,
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
from eplb_service.control import Address, Disarm, FromRank, Hello, Registration, ToRank
from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import DeploymentId, Epoch, Incarnation, RankId, chunk_epoch
from eplb_service.window.report import LoadReport

AWAY_BACKOFF_S = (0.2, 5.0)
"""First and longest pause between tries while the planner is away."""
REFUSED_BACKOFF_S = (1.0, 30.0)
"""First and longest pause after a registration was refused: someone may mend the peer that it disagrees with."""
SUPERSEDED_MAX = 64
_NO_EPOCH = Epoch(0)


class RankState(Enum):
    """Where a linked rank stands with the planner."""

    REGISTERING = auto()  # asked, not answered
    WAITING = auto()  # refused, or the planner is away; asks again at `retry_at_s`
    ATTACHED = auto()  # registered, and listed in an Attach on the control stream


class Step(Enum):
    """What happens to a rank."""

    LINKED = auto()  # its hook said who it is: first, again, or in a new life or group
    ACCEPTED = auto()
    REFUSED = auto()
    UNREACHABLE = auto()
    RETRY = auto()
    PLANNER_LOST = auto()  # the control stream ended


HISTORY_KEPT = 16

TRANSITIONS: Mapping[tuple[RankState, Step], RankState] = {
    (RankState.REGISTERING, Step.LINKED): RankState.REGISTERING,
    (RankState.WAITING, Step.LINKED): RankState.REGISTERING,
    (RankState.ATTACHED, Step.LINKED): RankState.REGISTERING,
    (RankState.REGISTERING, Step.ACCEPTED): RankState.ATTACHED,
    (RankState.REGISTERING, Step.REFUSED): RankState.WAITING,
    (RankState.REGISTERING, Step.UNREACHABLE): RankState.WAITING,
    (RankState.WAITING, Step.RETRY): RankState.REGISTERING,
    (RankState.REGISTERING, Step.PLANNER_LOST): RankState.WAITING,
    (RankState.WAITING, Step.PLANNER_LOST): RankState.WAITING,
    (RankState.ATTACHED, Step.PLANNER_LOST): RankState.WAITING,
}


@dataclass(slots=True)
class _Rank:
    """One linked rank. attempt: number of the registration under way; answers to earlier ones are ignored.

    is_cut_off: it waits for a planner that was not to be reached, not for a peer that disagrees.
    told: what its hook was last told of the registration, None = nothing yet. superseded: earlier lives of this rank that
    this one took over from while they were linked. history: its last steps, oldest first.
    """

    link: LinkId
    registration: Registration
    state: RankState = RankState.REGISTERING
    attempt: int = 0
    failures: int = 0
    retry_at_s: float = 0.0
    is_cut_off: bool = False
    told: RegistrationAnswer | None = None
    superseded: tuple[Incarnation, ...] = ()
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY_KEPT))

    @property
    def address(self) -> Address:
        return self.registration.address

    def move(self, step: Step) -> None:
        following = TRANSITIONS.get((self.state, step))
        if following is None:
            raise BrokenInvariantError(
                f"rank {self.address.rank_id} is {self.state.name} and cannot take the step {step.name}. How it came there:"
                f" {'; '.join(self.history) or 'it was just linked'}"
            )
        self.history.append(f"{self.state.name} + {step.name} → {following.name}")
        self.state = following


@dataclass(slots=True)
class Session:
    """All ranks of one agent process. One process serves one deployment at a time, that of the first rank that links.

    node: name of this node; replaces what the hooks say, None = as they say. jitter_seed: spreads the retries of many
    processes after a planner restart.
    """

    node: str | None = None
    jitter_seed: int = 0
    facts_dropped: int = 0
    orders_dropped: int = 0
    _ranks: dict[RankId, _Rank] = field(default_factory=dict)
    _rank_of_link: dict[LinkId, RankId] = field(default_factory=dict)
    _deployment: DeploymentId | None = None
    _stream: StreamId | None = None
    _streams_opened: int = 0
    _attempts: int = 0
    _epoch: Epoch = _NO_EPOCH
    _trouble: str = ""
    _out: list[Effect] = field(default_factory=list)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event. now: monotonic seconds. Returns effects, to be run in order."""
        match event:
            case HookSaid(link=link, message=message):
                if isinstance(message, Registration):
                    self._linked(link, message)
                else:
                    self._heard(link, message)
            case HookGone(link=link, reason=reason):
                self._unlink(link, reason)
            case RegisterAccepted() | RegisterFailed():
                self._answered(event, now)
            case PlannerSaid(stream=stream, message=order):
                self._ordered(stream, order)
            case StreamClosed(stream=stream, reason=reason):
                self._lost(stream, reason, now)
            case Tick():
                self._retry(now)
        effects, self._out = self._out, []
        return effects

    def due_at_s(self) -> float | None:
        """When the next Tick is due; None = not before something else happens."""
        return min((rank.retry_at_s for rank in self._ranks.values() if rank.state is RankState.WAITING), default=None)

    @property
    def deployment(self) -> DeploymentId | None:
        """The deployment served; None before the first rank links."""
        return self._deployment

    def states(self) -> dict[RankId, RankState]:
        """State of each linked rank, by rank id, ascending."""
        return {rank_id: self._ranks[rank_id].state for rank_id in sorted(self._ranks)}

    def attached(self) -> frozenset[RankId]:
        """Ranks that the planner can be told of now: their load reports may go."""
        return frozenset(rank_id for rank_id, rank in self._ranks.items() if rank.state is RankState.ATTACHED)

    # ── hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _linked(self, link: LinkId, registration: Registration) -> None:
        if self.node is not None:
            registration = replace(registration, node=self.node)
        rank_id = registration.address.rank_id
        refusal = self._refusal(link, registration)
        if refusal:
            self._out += [
                ToHook(link, RegistrationAnswer(accepted=False, reason=refusal)),
                CloseLink(link, refusal),
                Notice(f"rank {rank_id} cannot link: {refusal}"),
            ]
            if link in self._rank_of_link:
                self._unlink(link, refusal)
            return
        if registration.deployment != self._deployment:
            self._enter(registration.deployment)
        rank = self._ranks.get(rank_id)
        if rank is None:
            rank = self._ranks[rank_id] = _Rank(link, registration)
        else:
            self._take_over(rank, link, registration)
        self._rank_of_link[link] = rank_id
        self._out.append(_log("hook.linked", rank, incarnation=rank.address.incarnation, group_id=rank.address.group_id))
        self._register(rank)

    def _refusal(self, link: LinkId, registration: Registration) -> str:
        """Why this rank cannot link here; empty when it can."""
        rank_id, incarnation = registration.address.rank_id, registration.address.incarnation
        bound = self._rank_of_link.get(link)
        if bound is not None and bound != rank_id:
            return f"this link speaks for rank {bound}; rank {rank_id} needs a link of its own"
        others = set(self._ranks) - {rank_id if bound == rank_id else None}
        if others and registration.deployment != self._deployment:
            return (
                f"this agent process serves deployment {self._deployment!r} ({len(others)} ranks linked);"
                f" start another with its own --socket for deployment {registration.deployment!r}"
            )
        current = self._ranks.get(rank_id)
        if current is not None and current.link != link and incarnation in current.superseded:
            return (
                f"rank {rank_id} was taken over by engine incarnation {current.address.incarnation};"
                f" incarnation {incarnation} is an earlier one that should have ended: stop it"
            )
        return ""

    def _enter(self, deployment: DeploymentId) -> None:
        """Serve another deployment, now that no rank of the last one is linked; its control stream is of no use."""
        if self._stream is not None:
            self._out.append(CloseStream(self._stream))
            self._stream = None
        self._deployment, self._epoch = deployment, _NO_EPOCH

    def _take_over(self, rank: _Rank, link: LinkId, registration: Registration) -> None:
        """The same rank says anew who it is: over a new link, in a new group, or in a new life."""
        old = rank.address
        if registration.address != old:
            self._out.append(ForgetReports(old.rank_id))
        if registration.address.incarnation != old.incarnation:
            reason = f"rank {old.rank_id} was taken over by engine incarnation {registration.address.incarnation}"
            rank.superseded = (*rank.superseded, old.incarnation)[-SUPERSEDED_MAX:]
            if rank.state is RankState.ATTACHED and self._stream is not None:
                self._out.append(ToPlanner(self._stream, Gone(sender=old, reason=reason)))
        else:
            reason = f"rank {old.rank_id} linked anew"
        if rank.link != link:
            self._rank_of_link.pop(rank.link, None)
            self._out.append(CloseLink(rank.link, reason))
            rank.told = None
        rank.link, rank.registration, rank.failures = link, registration, 0
        rank.move(Step.LINKED)

    def _heard(self, link: LinkId, message: FromRank | LoadReport) -> None:
        rank_id = self._rank_of_link.get(link)
        if rank_id is None:
            self._out.append(CloseLink(link, f"said {type(message).__name__} before its registration"))
            return
        rank = self._ranks[rank_id]
        if isinstance(message, LoadReport):
            sender = Address(message.rank_id, message.incarnation, message.group_id)
        else:
            sender = message.sender
        if sender != rank.address:
            self._drop_fact(rank, message, f"it is of {_life(sender)}, linked is {_life(rank.address)}")
        elif isinstance(message, LoadReport):
            self._out.append(QueueReport(message))
        elif rank.state is not RankState.ATTACHED or self._stream is None:
            self._drop_fact(rank, message, "the planner is away; it will ask")
        else:
            self._out.append(ToPlanner(self._stream, message))

    def _drop_fact(self, rank: _Rank, message: FromRank | LoadReport, reason: str) -> None:
        self.facts_dropped += 1
        self._out.append(_log("fact.dropped", rank, level="debug", kind=type(message).__name__, reason=reason))

    def _unlink(self, link: LinkId, reason: str) -> None:
        rank_id = self._rank_of_link.pop(link, None)
        if rank_id is None:  # it never said who it is, or another link speaks for the rank by now
            return
        rank = self._ranks.pop(rank_id)
        self._out.append(_log("hook.unlinked", rank, level="warning", reason=reason))
        if rank.state is RankState.ATTACHED and self._stream is not None:
            self._out.append(ToPlanner(self._stream, Gone(sender=rank.address, reason=reason)))
        self._out.append(ForgetReports(rank_id))

    # ── registration at the planner ──────────────────────────────────────────────────────────────────────────────────────

    def _register(self, rank: _Rank) -> None:
        self._attempts += 1
        rank.attempt = self._attempts
        self._out.append(Register(rank.attempt, rank.registration))

    def _answered(self, event: RegisterAccepted | RegisterFailed, now: float) -> None:
        rank = next((r for r in self._ranks.values() if r.attempt == event.attempt), None)
        if rank is None or rank.state is not RankState.REGISTERING:  # of an earlier life, or overtaken
            return
        if isinstance(event, RegisterAccepted):
            rank.move(Step.ACCEPTED)
            self._tell(rank, RegistrationAnswer(accepted=True, reason=""))
            self._attach(rank)
            self._wake_siblings(now)
        elif event.refused:
            rank.move(Step.REFUSED)
            self._back_off(rank, REFUSED_BACKOFF_S, now)
            answer = RegistrationAnswer(accepted=False, reason=event.reason)
            if rank.told != answer:
                self._out.append(
                    Notice(f"rank {rank.address.rank_id} of deployment {self._deployment} is refused: {event.reason}")
                )
                self._out.append(_log("registration.refused", rank, level="error", reason=event.reason))
            self._tell(rank, answer)
        else:
            rank.move(Step.UNREACHABLE)
            self._back_off(rank, AWAY_BACKOFF_S, now)
            self._planner_away(event.reason)

    def _tell(self, rank: _Rank, answer: RegistrationAnswer) -> None:
        if rank.told != answer:
            rank.told = answer
            self._out.append(ToHook(rank.link, answer))

    def _attach(self, rank: _Rank) -> None:
        assert self._deployment is not None
        attach = Attach(deployment=self._deployment, ranks=(rank.address,))
        if self._stream is None:
            self._streams_opened += 1
            self._stream, self._epoch = StreamId(self._streams_opened), _NO_EPOCH
            self._out.append(OpenStream(self._stream))
        self._out.append(ToPlanner(self._stream, attach))
        self._out.append(_log("rank.attached", rank))

    def _back_off(self, rank: _Rank, bounds_s: tuple[float, float], now: float) -> None:
        """Doubling pauses, each shortened by up to half so that the ranks of a fleet do not come back all at once."""
        first_s, longest_s = bounds_s
        pause_s = min(longest_s, first_s * 2 ** min(rank.failures, 16))
        seed = f"{self.jitter_seed}/{rank.address.rank_id}/{rank.failures}".encode()
        share = int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest(), "little") / (1 << 32)
        rank.failures += 1
        rank.is_cut_off = bounds_s is AWAY_BACKOFF_S
        rank.retry_at_s = now + pause_s * (1 - share / 2)

    def _wake_siblings(self, now: float) -> None:
        """The planner answers again: ranks that wait for it need not wait out pauses that grew while it was away."""
        for rank in self._ranks.values():
            if rank.state is RankState.WAITING and rank.is_cut_off:
                rank.retry_at_s = min(rank.retry_at_s, now)

    def _retry(self, now: float) -> None:
        for rank_id in sorted(self._ranks):
            rank = self._ranks[rank_id]
            if rank.state is RankState.WAITING and rank.retry_at_s <= now:
                rank.move(Step.RETRY)
                self._register(rank)

    # ── planner ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ordered(self, stream: StreamId, order: ToRank) -> None:
        if stream != self._stream:
            return
        self._planner_is_back()
        epoch = _epoch_of(order)
        rank = self._ranks.get(order.to.rank_id)
        reason = ""
        if epoch < self._epoch:
            reason = f"it is of epoch {epoch}, this planner has reached {self._epoch}"
        elif rank is None:
            reason = "no such rank is linked here"
        elif order.to != rank.address:
            reason = f"it is for {_life(order.to)}, linked is {_life(rank.address)}"
        elif rank.state is not RankState.ATTACHED:
            reason = f"the rank is {rank.state.name.lower()}"
        self._epoch = max(self._epoch, epoch)
        if rank is None or reason:
            self.orders_dropped += 1
            fields: dict[str, object] = {"rank": int(order.to.rank_id), "kind": type(order).__name__, "reason": reason}
            self._out.append(Log("order.dropped", "warning", fields))
            return
        rank.failures = 0
        self._out.append(ToHook(rank.link, order))

    def _lost(self, stream: StreamId, reason: str, now: float) -> None:
        if stream != self._stream:
            return
        self._stream = None
        self._planner_away(reason)
        for rank_id in sorted(self._ranks):
            rank = self._ranks[rank_id]
            waiting = rank.state is RankState.WAITING
            rank.move(Step.PLANNER_LOST)
            if not waiting:  # who waits already keeps its turn
                self._back_off(rank, AWAY_BACKOFF_S, now)

    def _planner_away(self, reason: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            self._out.append(Log("planner.lost", "warning", {"reason": reason}))

    def _planner_is_back(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._out.append(Log("planner.found", "info", {}))


def _epoch_of(order: ToRank) -> Epoch:
    """Epoch of the planner that sent an order."""
    return order.epoch if isinstance(order, (Hello, Disarm)) else chunk_epoch(order.chunk_id)


def _life(address: Address) -> str:
    return f"rank {address.rank_id} incarnation {address.incarnation} group {address.group_id}"


def _log(event: str, rank: _Rank, *, level: str = "info", **fields: object) -> Log:
    return Log(event, level, {"deployment": str(rank.registration.deployment), "rank": int(rank.address.rank_id), **fields})
