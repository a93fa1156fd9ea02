"""The rules by which one rank takes part in chunks: a pure state machine.

    state       event                          → state        effects
    idle        Stage, all checks pass         → staging      BeginStaging
    staging     StagingDone                    → staged       Staged
    staging     StagingFailed                  → idle         Refused
    staging     withdrawn, late, outranked     → quiescing    CancelStaging, Disarmed or Refused; busy until the worker ends
    staged      Arm                            → armed        Armed
    staged      not armed in time              → idle         Refused
    armed       VoteDue                        → voting       CastVote(id)
    armed       withdrawn, time to live over   → idle         Disarmed
    voting      passed                         → committed    (Committed when the engine is idle)
    voting      failed                         → armed, or idle with Disarmed when it was withdrawn meanwhile
    voting      unknown                        → unresolved   FailStop
    voting      diverged                       → idle         Disarmed; voting is off
    committed   FlipDue                        → flipping     Flip
    flipping    FlipDone                       → idle         Flipped

When the group ends to form again (`reform`), what was not voted for closes, and a vote without a known outcome is unresolved:

    voting      GroupEnded                     → unresolved
    unresolved  GroupFormed, flips             → flipping     Flip; so does a committed chunk
    unresolved  GroupFormed, does not flip     → idle         ReleaseStaging

What makes `Disarmed` a proof: a flip needs the id cast by *every* rank in one vote, an id is cast only while armed, and a
closed id (at or below the tombstone) is never staged or armed again. `Disarmed` is therefore sent only when the id is closed
and no vote with it is unresolved.

A committed chunk flips at the boundary of the *next vote*, also when its vote was resolved early by an idle engine: only that
boundary is the same on all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from agent.hook.chunk_events import (
    NO_CHUNK,
    TRANSITIONS,
    Attached,
    BeginStaging,
    Boundary,
    CancelStaging,
    CastVote,
    ChunkState,
    Effect,
    EngineIdle,
    Event,
    FailStop,
    Flip,
    FlipDone,
    FlipDue,
    GroupEnded,
    GroupFormed,
    Outcome,
    Received,
    ReleaseStaging,
    Send,
    StagingDone,
    StagingFailed,
    Tick,
    VoteDue,
    VoteResolved,
    VotingOff,
    VotingOn,
)
from agent.hook.chunk_ledger import Ledger, layers_of
from agent.hook.stage_check import RankShape, check_stage
from eplb_service.control import (
    Address,
    Arm,
    Armed,
    Committed,
    Disarm,
    Disarmed,
    FromRank,
    Hello,
    LiveLayer,
    RefusalCode,
    Refused,
    Stage,
    Staged,
)
from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import ChunkId, LayerRef, chunk_epoch

HISTORY_MAX = 64

_BEFORE_VOTE = (ChunkState.STAGING, ChunkState.STAGED, ChunkState.ARMED)
_DECIDED = (ChunkState.COMMITTED, ChunkState.FLIPPING)


class ChunkMachine:
    """One rank's live map, open chunk, tombstone and epoch. `handle(event, now)` is the only way in.

    live: what every layer routes by at the start. now: seconds on any monotonic clock.
    """

    def __init__(
        self,
        address: Address,
        shape: RankShape,
        live: Mapping[LayerRef, LiveLayer],
        *,
        weights_version: int,
        off_reason: str,
    ) -> None:
        self._address = address
        self._shape = shape
        self._ledger = Ledger(address, dict(live), weights_version, off_reason)
        self._state = ChunkState.IDLE
        self._open: Stage | None = None
        self._staged: Staged | None = None
        self._deadline = float("inf")
        self._flip_boundary = 0
        self._withdrawn = False  # a Disarm of the open chunk waits for its vote
        self._doomed: tuple[RefusalCode, str] | None = None  # the open chunk closes once its vote is resolved, for this reason
        self._stale_weights = False
        self._passed = False
        self._hello: Hello | None = None
        self._last: tuple[FromRank, ...] = ()  # how the last chunk ended
        self._history: deque[str] = deque(maxlen=HISTORY_MAX)
        self._out: list[Effect] = []
        self.refusals: Counter[str] = Counter()

    def in_group(self, shape: RankShape, ledger: Ledger) -> ChunkMachine:
        """The same rank in another group, with nothing open. ledger: what it remembers there (`regroup.ledger_after`)."""
        after = ChunkMachine(
            ledger.address, shape, ledger.live, weights_version=ledger.weights_version, off_reason=ledger.off_reason
        )
        after._ledger = ledger
        after.refusals = self.refusals
        return after

    # ── what others may look at ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> ChunkState:
        """Where the open chunk stands."""
        return self._state

    @property
    def ledger(self) -> Ledger:
        """What outlives a chunk; to be read only."""
        return self._ledger

    @property
    def shape(self) -> RankShape:
        """What rows are checked against."""
        return self._shape

    @property
    def live(self) -> Mapping[LayerRef, LiveLayer]:
        """What every layer routes by, by the flips that are complete."""
        return self._ledger.live

    @property
    def live_after_open(self) -> Mapping[LayerRef, LiveLayer]:
        """What every layer would route by after the chunk under way."""
        return self.live if self._open is None else {**self.live, **layers_of(self._open)}

    @property
    def off_reason(self) -> str:
        """Why this rank takes part in no rollout; empty when it does."""
        return self._ledger.off_reason

    @property
    def open_id(self) -> ChunkId:
        """The chunk under way, 0 = none."""
        return self._open.chunk_id if self._open is not None else NO_CHUNK

    @property
    def unresolved_id(self) -> ChunkId:
        """The chunk whose vote was cast and whose outcome is not known: what ranks exchange when the group re-forms."""
        return self.open_id if self._state in (ChunkState.VOTING, ChunkState.UNRESOLVED) else NO_CHUNK

    @property
    def opened(self) -> Stage | None:
        """The chunk under way."""
        return self._open

    @property
    def has_passed(self) -> bool:
        """Whether the vote for the chunk under way is known to have passed."""
        return self._passed

    @property
    def is_stale(self) -> bool:
        """Whether the weights changed since the chunk that this rank voted for was staged: it must not be flipped here."""
        return self._stale_weights

    # ── the only way in ──────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event; the effects run in order. Raises BrokenInvariantError for what cannot happen."""
        self._out = []
        before = self._state
        _ACTIONS[type(event)](self, event, now)
        if self._state is not before and self._state not in TRANSITIONS[before]:
            self._broken(f"{before.value} became {self._state.value} on {_summary(event)}")
        if self._state is not before or not isinstance(event, Boundary | Tick):
            self._history.append(
                f"{before.value} + {_summary(event)} → {self._state.value} (closed {self._ledger.closed_id:#x})"
            )
        return self._out

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_received(self, event: Received, now: float) -> None:
        message = event.message
        if message.to != self._address or self._state is ChunkState.UNRESOLVED:
            return  # of another life or group; or nothing can be said before the group re-forms
        match message:
            case Hello():
                self._on_hello(message)
            case Stage():
                self._on_stage(message, now)
            case Arm():
                self._on_arm(message, now)
            case Disarm():
                self._on_disarm(message)

    def _on_hello(self, hello: Hello) -> None:
        ledger = self._ledger
        if hello.epoch < ledger.epoch_seen:
            self._send(ledger.reply(hello.epoch))  # names the higher epoch; nothing is closed for a leader of the past
            return
        ledger.epoch_seen = hello.epoch
        if self._open is not None and chunk_epoch(self._open.chunk_id) < hello.epoch:
            self._doom(RefusalCode.WITHDRAWN, f"a planner of epoch {hello.epoch} leads now")
        self._hello = hello
        if self._state is ChunkState.COMMITTED:
            self._send(self._committed())  # it will flip; only then there is a live map to tell
        self._answer_hello()

    def _answer_hello(self) -> None:
        """Reply once no chunk can change the live map under the reply, not even one that the same planner opened."""
        if self._hello is not None and self._state in (ChunkState.IDLE, ChunkState.QUIESCING):
            hello, self._hello = self._hello, None
            self._send(self._ledger.reply(hello.epoch))

    def _is_over(self, chunk: ChunkId) -> bool:
        """Answer a Stage or Arm of a chunk that can no longer be taken up: of an older epoch, flipped, or closed."""
        ledger = self._ledger
        flipped = ledger.flip_of(chunk)
        if flipped is not None:
            self._send(flipped)
        elif ledger.is_stale(chunk):
            self._refuse(chunk, RefusalCode.STALE_EPOCH, f"of epoch {chunk_epoch(chunk)}; epoch {ledger.epoch_seen} leads")
        elif chunk <= ledger.closed_id:
            self._refuse(chunk, RefusalCode.CLOSED, f"ids up to {ledger.closed_id:#x} are closed here")
        else:
            return False
        return True

    def _on_stage(self, stage: Stage, now: float) -> None:
        chunk, ledger = stage.chunk_id, self._ledger
        if self._is_over(chunk):
            return
        if stage == self._open:
            self._restate()
        elif self._state is not ChunkState.IDLE:
            self._refuse(chunk, RefusalCode.BUSY, f"chunk {self.open_id:#x} is {self._state.value}")
        else:
            ledger.epoch_seen = chunk_epoch(chunk)
            ledger.generation_seen = max(ledger.generation_seen, stage.generation)
            refusal = check_stage(stage, self._shape, ledger.live, ledger.weights_version)
            if ledger.off_reason:
                refusal = (RefusalCode.OFF, ledger.off_reason)
            if refusal is not None:
                ledger.close(chunk)
                self._last = (self._refuse(chunk, *refusal),)
                return
            self._open, self._state = stage, ChunkState.STAGING
            self._deadline = now + stage.stage_timeout_s
            self._out.append(BeginStaging(stage, self._deadline))

    def _on_arm(self, arm: Arm, now: float) -> None:
        chunk = arm.chunk_id
        if self._is_over(chunk):
            return
        if chunk != self.open_id or self._state is ChunkState.STAGING:
            self._refuse(chunk, RefusalCode.BUSY, f"it is not staged here: chunk {self.open_id:#x} is {self._state.value}")
        elif self._state is ChunkState.STAGED:
            self._state = ChunkState.ARMED
            self._deadline = now + self._opened.arm_ttl_s
            self._send(Armed(sender=self._address, chunk_id=chunk))
        else:
            self._restate()

    def _on_disarm(self, disarm: Disarm) -> None:
        chunk, ledger = disarm.chunk_id, self._ledger
        if disarm.epoch < ledger.epoch_seen:
            return
        ledger.epoch_seen = disarm.epoch
        flipped = ledger.flip_of(chunk)
        if flipped is not None:
            self._send(flipped)
        elif ledger.may_have_flipped(chunk):
            return
        elif chunk == self.open_id and self._state is ChunkState.VOTING:
            self._withdrawn = True
        elif chunk == self.open_id and self._state in _DECIDED:
            self._send(self._committed())
        elif chunk == self.open_id and self._state in _BEFORE_VOTE:
            self._close((Disarmed(sender=self._address, chunk_id=chunk),))
        else:
            ledger.close(chunk)
            if self._open is not None and self._open.chunk_id < chunk:
                self._doom(RefusalCode.WITHDRAWN, f"chunk {chunk:#x}, which is later, was withdrawn")
            self._send(Disarmed(sender=self._address, chunk_id=chunk))

    def _on_attached(self, _event: Attached, _now: float) -> None:
        self._restate()

    # ── staging ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_staging_end(self, event: StagingDone | StagingFailed, _now: float) -> None:
        chunk = event.chunk_id
        if chunk != self.open_id or self._state not in (ChunkState.STAGING, ChunkState.QUIESCING):
            self._broken(f"{_summary(event)}, but no copy of it runs")
        if self._state is ChunkState.STAGING and isinstance(event, StagingDone):
            self._state = ChunkState.STAGED
            self._deadline += self._opened.arm_ttl_s  # others may use their whole time to stage before it is armed
            self._staged = Staged(sender=self._address, chunk_id=chunk, seconds=event.seconds, received=event.received)
            self._send(self._staged)
            return
        failed = event if self._state is ChunkState.STAGING and isinstance(event, StagingFailed) else None
        self._out.append(ReleaseStaging(chunk))
        self._forget_open()
        if failed is not None:
            self._ledger.close(chunk)
            self._last = (self._refuse(chunk, failed.code, failed.reason),)
        self._answer_hello()

    # ── boundaries and votes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_boundary(self, event: Boundary, now: float) -> None:
        ledger = self._ledger
        ledger.boundary = event.boundary
        if event.weights_version != ledger.weights_version:
            reason = f"weights version went from {ledger.weights_version} to {event.weights_version}"
            ledger.weights_version = event.weights_version
            if self._state is ChunkState.COMMITTED:
                self._stale_weights = True
                self._unresolved(f"{reason} between the vote for chunk {self.open_id:#x} and its flip")
            else:
                self._stale_weights = self._state in (ChunkState.VOTING, ChunkState.UNRESOLVED)
                self._doom(RefusalCode.WEIGHTS_VERSION, reason)
        self._expire(now)

    def _on_tick(self, _event: Tick, now: float) -> None:
        self._expire(now)

    def _expire(self, now: float) -> None:
        """Staging that takes too long, a staged chunk that is not armed, an armed one that is not voted through: all close."""
        if now < self._deadline or self._open is None:
            return
        stage = self._open
        match self._state:
            case ChunkState.STAGING:
                self._doom(RefusalCode.TRANSFER, f"staging took longer than {stage.stage_timeout_s:g} s")
            case ChunkState.STAGED:
                self._doom(RefusalCode.EXPIRED, f"not armed within {stage.stage_timeout_s + stage.arm_ttl_s:g} s of Stage")
            case ChunkState.ARMED | ChunkState.VOTING:
                self._doom(RefusalCode.EXPIRED, f"armed for {stage.arm_ttl_s:g} s and not voted through")
            case _:
                pass

    def _on_vote_due(self, event: VoteDue, now: float) -> None:
        if self._state in (ChunkState.VOTING, ChunkState.COMMITTED, ChunkState.UNRESOLVED):
            self._broken(f"vote at boundary {event.boundary} while chunk {self.open_id:#x} is {self._state.value}")
        self._expire(now)
        cast = NO_CHUNK
        if self._state is ChunkState.ARMED:
            cast, self._state = self.open_id, ChunkState.VOTING
        self._out.append(CastVote(event.boundary, cast))

    def _on_vote_resolved(self, event: VoteResolved, _now: float) -> None:
        if self._state is not ChunkState.VOTING or event.chunk_id != self.open_id:
            self._broken(f"{_summary(event)}, but no vote of it is under way")
        chunk = event.chunk_id
        self._passed = event.outcome is Outcome.PASSED
        match event.outcome:
            case Outcome.PASSED if self._stale_weights:
                self._unresolved(f"the vote for chunk {chunk:#x} passed, but the weights changed since they were staged")
            case Outcome.PASSED:
                self._state = ChunkState.COMMITTED
            case Outcome.UNKNOWN:
                self._unresolved(f"the outcome of the vote for chunk {chunk:#x} is unknown ({event.detail})")
            case Outcome.DIVERGED:
                self._ledger.off_reason = event.detail
                self._state = ChunkState.ARMED
                self._doom(RefusalCode.OFF, event.detail)
            case Outcome.FAILED:
                self._state = ChunkState.ARMED
                if self._withdrawn:
                    self._close((Disarmed(sender=self._address, chunk_id=chunk),))
                elif self._doomed is not None:
                    self._doom(*self._doomed)

    def _unresolved(self, reason: str) -> None:
        self._state = ChunkState.UNRESOLVED
        self._out.append(FailStop(f"{reason}; this rank runs no further step until the group has re-formed"))

    def _on_idle(self, _event: EngineIdle, _now: float) -> None:
        if self._state is ChunkState.COMMITTED:
            self._send(self._committed())

    def _on_flip_due(self, event: FlipDue, _now: float) -> None:
        if self._state is ChunkState.COMMITTED:
            self._state, self._flip_boundary = ChunkState.FLIPPING, event.boundary
            self._out.append(Flip(self._opened, event.boundary))

    def _on_flip_done(self, event: FlipDone, _now: float) -> None:
        if self._state is not ChunkState.FLIPPING or event.chunk_id != self.open_id:
            self._broken(f"{_summary(event)}, but it does not flip")
        flipped = self._ledger.note_flip(self._opened, self._flip_boundary, event.stall_s)
        self._out.append(ReleaseStaging(event.chunk_id))
        self._forget_open()
        self._last = (flipped,)
        self._send(flipped)
        self._answer_hello()

    def _on_voting_off(self, event: VotingOff, _now: float) -> None:
        self._ledger.off_reason = event.reason
        self._doom(RefusalCode.OFF, event.reason)

    def _on_voting_on(self, _event: VotingOn, _now: float) -> None:
        self._ledger.off_reason = ""

    # ── another group ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_group_ended(self, _event: GroupEnded, _now: float) -> None:
        self._hello = None  # of a leader of the group that was
        if self._state is ChunkState.VOTING:
            self._state = ChunkState.UNRESOLVED
        self._doom(RefusalCode.WITHDRAWN, "the group forms again")

    def _on_group_formed(self, event: GroupFormed, _now: float) -> None:
        if event.flips and self._state in (ChunkState.UNRESOLVED, ChunkState.COMMITTED) and not self._stale_weights:
            self._state, self._flip_boundary = ChunkState.FLIPPING, 0  # others flipped at a boundary that is not this rank's
            self._out.append(Flip(self._opened, event.boundary))
        elif not event.flips and self._state is ChunkState.UNRESOLVED:
            self._ledger.close(self.open_id)
            self._out.append(ReleaseStaging(self.open_id))
            self._forget_open()
        elif event.flips or self._state is not ChunkState.IDLE:
            self._broken(f"{_summary(event)}, but chunk {self.open_id:#x} is {self._state.value}")

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _doom(self, code: RefusalCode, reason: str) -> None:
        """Close the open chunk for this reason: now, or once its vote is resolved."""
        if self._state is ChunkState.VOTING:
            self._doomed = self._doomed or (code, reason)
        elif self._state in _BEFORE_VOTE:
            refused = Refused(sender=self._address, chunk_id=self.open_id, code=code, reason=reason)
            self.refusals[code.value] += 1
            armed = self._state is ChunkState.ARMED
            self._close((refused, Disarmed(sender=self._address, chunk_id=self.open_id)) if armed else (refused,))

    def _close(self, answers: tuple[FromRank, ...]) -> None:
        """Close the open chunk, whose vote is not under way, and say so."""
        chunk = self.open_id
        self._ledger.close(chunk)
        self._last = answers
        if self._state is ChunkState.STAGING:
            self._state, self._deadline = ChunkState.QUIESCING, float("inf")
            self._out.append(CancelStaging(chunk))
        else:
            self._out.append(ReleaseStaging(chunk))
            self._forget_open()
        for answer in answers:
            self._send(answer)
        self._answer_hello()

    def _forget_open(self) -> None:
        self._open, self._staged, self._state = None, None, ChunkState.IDLE
        self._deadline = float("inf")
        self._withdrawn, self._doomed, self._stale_weights, self._passed = False, None, False, False

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _opened(self) -> Stage:
        if self._open is None:
            self._broken(f"{self._state.value} without a chunk")
        return self._open

    def _send(self, message: FromRank) -> None:
        self._out.append(Send(message))

    def _refuse(self, chunk: ChunkId, code: RefusalCode, reason: str) -> Refused:
        refused = Refused(sender=self._address, chunk_id=chunk, code=code, reason=reason)
        self.refusals[code.value] += 1
        self._send(refused)
        return refused

    def _committed(self) -> Committed:
        return Committed(sender=self._address, chunk_id=self.open_id, boundary=self._ledger.boundary)

    def _restate(self) -> None:
        """Say again what was last said of the open chunk, or how the last one ended."""
        match self._state:
            case ChunkState.IDLE | ChunkState.QUIESCING:
                for answer in self._last:
                    self._send(answer)
            case ChunkState.STAGED if self._staged is not None:
                self._send(self._staged)
            case ChunkState.ARMED | ChunkState.VOTING:
                self._send(Armed(sender=self._address, chunk_id=self.open_id))
            case ChunkState.COMMITTED | ChunkState.FLIPPING:
                self._send(self._committed())
            case _:
                pass

    def _broken(self, what: str) -> NoReturn:
        lines = "\n  ".join(self._history)
        raise BrokenInvariantError(f"rank {self._address.rank_id}: {what}. History:\n  {lines}")


_ACTIONS: Mapping[type, Callable[[ChunkMachine, Any, float], None]] = {
    Received: ChunkMachine._on_received,  # the table is the machine's own
    Attached: ChunkMachine._on_attached,
    StagingDone: ChunkMachine._on_staging_end,
    StagingFailed: ChunkMachine._on_staging_end,
    Boundary: ChunkMachine._on_boundary,
    FlipDue: ChunkMachine._on_flip_due,
    VoteDue: ChunkMachine._on_vote_due,
    VoteResolved: ChunkMachine._on_vote_resolved,
    EngineIdle: ChunkMachine._on_idle,
    FlipDone: ChunkMachine._on_flip_done,
    VotingOff: ChunkMachine._on_voting_off,
    VotingOn: ChunkMachine._on_voting_on,
    GroupEnded: ChunkMachine._on_group_ended,
    GroupFormed: ChunkMachine._on_group_formed,
    Tick: ChunkMachine._on_tick,
}


def _summary(event: Event) -> str:
    """An event in few words, for the history."""
    match event:
        case Received(message=Hello() as hello):
            return f"Hello epoch {hello.epoch}"
        case Received(message=Stage() | Arm() | Disarm() as message):
            return f"{type(message).__name__} {message.chunk_id:#x}"
        case StagingDone() | StagingFailed() | FlipDone():
            return f"{type(event).__name__} {event.chunk_id:#x}"
        case VoteResolved():
            return f"vote for {event.chunk_id:#x} {event.outcome.value}"
        case _:
            return repr(event)
