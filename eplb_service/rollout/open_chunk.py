"""One chunk's two-phase commit, from its Stage to the proof of what became of it.

    STAGING ──all staged, nobody away──► ARMED ──all flipped──► FlippedEverywhere
       │ refused, late, voting off          │ refused, late, closed by a rank
       └──────────────► DISARMING ◄─────────┘
                          ├── all flipped ─────────────────────► FlippedEverywhere
                          ├── one Disarmed (the rest in time) ──► NeverFlips
                          └── no answer: asks again, stalled

The commit point is a vote of the ranks, not of the planner. A flip needs the vote of every rank and a closed id stays closed,
so one `Disarmed` proves that the chunk never flips in its group, and one `Flipped` or `Committed` proves that it flips on
all. Both together cannot be: `Contradiction`. A chunk is left by no other way, save the end of its group or epoch.

Messages may come in any order and more than once: what counts is the set of answers, never their sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_service.control import (
    Address,
    Arm,
    Armed,
    Committed,
    Disarm,
    Disarmed,
    Flipped,
    Hello,
    RefusalCode,
    Refused,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, LayerRef, RankId
from eplb_service.membership.group import Group
from eplb_service.placement import Int32Array
from eplb_service.replica_shares import Float32Array, as_array
from eplb_service.rollout.chunks import PlannedChunk
from eplb_service.rollout.events import Alarm, AlarmCode, Effect, Note, RolloutSettings, RolloutState, Send
from eplb_service.transitions import Trail

ChunkAnswer = Staged | Armed | Refused | Committed | Flipped | Disarmed

_FATAL = frozenset({RefusalCode.NEW_DIGEST, RefusalCode.MANIFEST, RefusalCode.BUDGET, RefusalCode.INVALID, RefusalCode.OFF})
"""Refusals that another try would meet again."""

_BY_ANOTHER = frozenset({RefusalCode.STALE_EPOCH, RefusalCode.CLOSED})
"""Refusals that another leader may be behind: of a higher epoch, or of ours with higher ids, where a store gave it twice."""


@dataclass(frozen=True, slots=True)
class FlippedEverywhere:
    """Every rank flipped it. boundary: None when no rank could tell."""

    boundary: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFlips:
    """It is proven that it never flips in this group.

    fatal: another try would fail alike. ask_again: a rank routes by other rows than we believe. unvoted: it was armed, and
    its time ran out: an engine that runs no steps looks so.
    """

    reason: str
    fatal: bool = False
    ask_again: bool = False
    unvoted: bool = False


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Ranks say what cannot be true together."""

    alarm: Alarm


ChunkOutcome = FlippedEverywhere | NeverFlips | Contradiction


class OpenChunk:
    """One try of one planned chunk: every method returns effects to run in order; then look at `outcome`."""

    def __init__(
        self,
        *,
        epoch: Epoch,
        chunk_id: ChunkId,
        mesh_id: ChunkId,
        generation: GenerationNumber,
        weights_version: int,
        plan: PlannedChunk,
        group: Group,
        settings: RolloutSettings,
        trail: Trail[RolloutState],
    ) -> None:
        self.chunk_id = chunk_id
        self.generation = generation
        self.plan = plan
        self.outcome: ChunkOutcome | None = None
        self.state = RolloutState.STAGING
        self.since_s = 0.0
        self.deadline_s = 0.0
        self.stalled = False
        self.last_error = ""
        self.stall_s: float | None = None
        """As the slowest of the ranks told that flipped it."""
        self._epoch, self._mesh_id, self._weights_version = epoch, mesh_id, weights_version
        self._group, self._settings, self._trail = group, settings, trail
        self._stage_seconds = settings.stage_seconds(plan.traffic.bytes_in_a_row)
        self._staged: set[RankId] = set()
        self._committed: set[RankId] = set()
        self._disarmed: set[RankId] = set()
        self._flipped: dict[RankId, int | None] = {}
        self._last_staged: RankId | None = None
        self._fatal = self._ask_again = self._unvoted = False
        self._effects: list[Effect] = []

    # ── what others may look at ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def digests(self) -> Mapping[LayerRef, int]:
        """What every rank must route by after the flip."""
        return {change.layer: change.new_digest for change in self.plan.layers}

    @property
    def rows(self) -> Mapping[LayerRef, Int32Array]:
        """New rows of its layers."""
        return {change.layer: np.array(change.new_row, np.int32) for change in self.plan.layers}

    @property
    def shares(self) -> Mapping[LayerRef, Float32Array]:
        """New shares of its layers; empty without weighted dispatch."""
        given = {change.layer: as_array(change.new_shares) for change in self.plan.layers}
        return {layer: shares for layer, shares in given.items() if shares is not None}

    @property
    def waiting_for(self) -> tuple[RankId, ...]:
        """Ranks whose answer is awaited, in column order."""
        if self.state is RolloutState.STAGING:
            return self._without(self._staged)
        if self.state is RolloutState.ARMED:
            return self._without(self._flipped)
        return self._without(self._disarmed | set(self._flipped))

    @property
    def is_certain_to_flip(self) -> bool:
        """A rank flipped it, or knows that the vote passed."""
        return bool(self._flipped or self._committed)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, now: float) -> list[Effect]:
        """Give it to every rank."""
        self._effects = []
        self._send_all(self._stage)
        self._enter(RolloutState.STAGING, now, self._stage_seconds + self._settings.answer_slack_s)
        return self._effects

    def answered(self, message: ChunkAnswer, away: frozenset[RankId], now: float) -> list[Effect] | None:
        """Take a rank's answer to this chunk in; None where it says nothing in this state. away: without a stream now."""
        action = _ON_ANSWER.get((type(message), self.state))
        if action is None:
            return None
        self._effects = []
        action(self, message, now)
        if self.state is RolloutState.STAGING:
            self._arm_if_staged(away, now)
        return self._effects

    def attached(self, address: Address, away: frozenset[RankId], now: float) -> list[Effect]:
        """A rank's stream is back: what it was sent may be lost. Said again, it answers where it stands."""
        self._effects = []
        if self.state is RolloutState.STAGING:
            self._send(self._stage(address))
            self._arm_if_staged(away, now)
        elif self.state is RolloutState.ARMED:
            self._send(Arm(to=address, chunk_id=self.chunk_id))
        else:
            self._send(self._disarm(address))
        return self._effects

    def seen_live(
        self, rank: RankId, flipped_id: ChunkId, closed_id: ChunkId, digests: Mapping[LayerRef, int], now: float
    ) -> list[Effect]:
        """A rank told what is live there: it answers Hello only while it holds no open chunk, so this may settle it."""
        self._effects = []
        if flipped_id == self.chunk_id:
            self._take_flip(rank, None, digests)
        elif closed_id >= self.chunk_id and self.state is not RolloutState.DISARMING:
            self._withdraw(f"rank {rank} came back with the chunk closed", now)
        return self._effects

    def withdraw(self, reason: str, now: float, *, fatal: bool = False) -> list[Effect]:
        """Ask every rank to close it; their answers decide whether it flipped. Nothing when that is under way."""
        self._effects = []
        if self.state is not RolloutState.DISARMING:
            self._fatal = fatal
            self._withdraw(reason, now)
        return self._effects

    def overdue(self, now: float) -> list[Effect]:
        """The deadline of the state passed."""
        self._effects = []
        late = ", ".join(str(rank) for rank in self.waiting_for)
        waited_s = now - self.since_s
        if self.state is RolloutState.STAGING:
            self._withdraw(f"ranks {late or 'away'} did not stage it within {waited_s:g} s", now)
        elif self.is_certain_to_flip:
            self._ask_silent(lambda to: Arm(to=to, chunk_id=self.chunk_id), now)  # a rank that flipped answers so
        elif self.state is RolloutState.ARMED:
            self._unvoted = True
            self._withdraw(f"ranks {late} did not flip it within {waited_s:g} s", now)
        elif self._disarmed:
            self._settle_aborted()
        else:
            self._ask_silent(self._disarm, now)
        return self._effects

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_staged(self, message: Staged, _now: float) -> None:
        if message.sender.rank_id not in self._staged:
            self._staged.add(message.sender.rank_id)
            self._last_staged = message.sender.rank_id

    def _arm_if_staged(self, away: frozenset[RankId], now: float) -> None:
        """Authorise: all staged, the group is whole, no higher epoch was seen (that would have ended the machine)."""
        if self._without(self._staged) or away:
            return
        last = f", by rank {self._last_staged} last" if self._last_staged is not None else ""
        text = f"staged by all {len(self._group.rank_ids)} ranks after {now - self.since_s:.3f} s{last}; {self.plan.traffic}"
        self._note("chunk.authorised", text)
        self._send_all(lambda to: Arm(to=to, chunk_id=self.chunk_id))
        self._enter(RolloutState.ARMED, now, self._settings.arm_timeout_s(self._group.vote_period))

    def _on_armed(self, _message: Armed, _now: float) -> None:
        """Nothing depends on it: the vote counts who is armed."""

    def _on_refused(self, message: Refused, now: float) -> None:
        rank = message.sender.rank_id
        self._note("chunk.refused", f"{message.code}: {message.reason}", rank)
        if message.code in _BY_ANOTHER:
            self._send(Hello(to=message.sender, epoch=self._epoch))  # the reply names the epoch and ids that it saw
        if self.state is not RolloutState.DISARMING:
            self._fatal = message.code in _FATAL
            self._ask_again = message.code is RefusalCode.OLD_DIGEST
            self._unvoted = message.code is RefusalCode.EXPIRED and self.state is RolloutState.ARMED
            self._withdraw(f"rank {rank} refused ({message.code}): {message.reason}", now)

    def _on_committed(self, message: Committed, _now: float) -> None:
        if not self._committed:
            self._note(
                "chunk.committed", "the vote passed; the engine is idle and flips at its next vote", message.sender.rank_id
            )
        self._committed.add(message.sender.rank_id)
        self._check_contradiction()

    def _on_flipped(self, message: Flipped, _now: float) -> None:
        self.stall_s = max(message.stall_s, self.stall_s or 0.0)
        self._take_flip(message.sender.rank_id, message.boundary or None, dict(message.digests))

    def _on_flipped_unasked(self, message: Flipped, _now: float) -> None:
        self._contradict(AlarmCode.FLIP_UNASKED, f"rank {message.sender.rank_id} flipped {self._name}, which was never armed")

    def _take_flip(self, rank: RankId, boundary: int | None, digests: Mapping[LayerRef, int]) -> None:
        for layer, wanted in self.digests.items():
            if digests.get(layer) != wanted:
                self._contradict(
                    AlarmCode.FLIP_DIGEST,
                    f"rank {rank} says that it flipped {self._name}, but routes layer {layer} by a row of digest"
                    f" {digests.get(layer, 0):#x} and not {wanted:#x}",
                )
                return
        known = self._boundary
        if boundary is not None and known is not None and boundary != known:
            self._contradict(
                AlarmCode.FLIP_BOUNDARY,
                f"rank {rank} flipped {self._name} at boundary {boundary}, others at {known}: steps between ran with two maps",
            )
            return
        if boundary is not None or rank not in self._flipped:
            self._flipped[rank] = boundary
        self._check_contradiction()
        if self.outcome is None and not self._without(self._flipped):
            self.outcome = FlippedEverywhere(self._boundary)

    def _on_disarmed(self, message: Disarmed, now: float) -> None:
        rank = message.sender.rank_id
        self._disarmed.add(rank)
        self._check_contradiction()
        if self.outcome is None and self.state is not RolloutState.DISARMING:
            self._unvoted = self.state is RolloutState.ARMED
            self._withdraw(f"rank {rank} closed it by itself", now)
        if self.outcome is None and not self._without(self._disarmed):
            self._settle_aborted()

    def _check_contradiction(self) -> None:
        if self._disarmed and self.is_certain_to_flip:
            flips = min(self._committed | set(self._flipped))
            self._contradict(
                AlarmCode.FLIP_AFTER_DISARM,
                f"{self._name} was closed without a flip on rank {min(self._disarmed)}, but rank {flips} flips it",
            )

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _name(self) -> str:
        return f"chunk {self.chunk_id:#x}"

    @property
    def _boundary(self) -> int | None:
        return next((boundary for boundary in self._flipped.values() if boundary is not None), None)

    def _without(self, known: Iterable[RankId]) -> tuple[RankId, ...]:
        done = set(known)
        return tuple(rank for rank in self._group.rank_ids if rank not in done)

    def _contradict(self, code: AlarmCode, reason: str) -> None:
        self.outcome = Contradiction(Alarm(code, reason))

    def _settle_aborted(self) -> None:
        self.outcome = NeverFlips(reason=self.last_error, fatal=self._fatal, ask_again=self._ask_again, unvoted=self._unvoted)

    def _withdraw(self, reason: str, now: float) -> None:
        self.last_error = reason
        self._note("chunk.withdrawn", reason)
        self._send_all(self._disarm)
        self._enter(RolloutState.DISARMING, now, self._settings.disarm_timeout_s)

    def _ask_silent(self, message: Callable[[Address], ToRank], now: float) -> None:
        """Stay, past the deadline, and ask again. Hello: a rank that obeys a higher epoch answers nothing else."""
        addresses = self._group.addresses
        silent = ", ".join(str(rank) for rank in self._without(self._flipped))
        if not self.stalled:
            self._note(
                "chunk.awaited", f"{self.state}: ranks {silent} did not answer within {now - self.since_s:g} s; asked again"
            )
        for rank in self._without(self._flipped):
            self._send(message(addresses[rank]))
            self._send(Hello(to=addresses[rank], epoch=self._epoch))
        self.deadline_s = now + self._settings.disarm_timeout_s
        self.stalled = True

    def _stage(self, to: Address) -> Stage:
        """The same whenever it is said: a rank that has it answers where it stands."""
        return Stage(
            to=to,
            chunk_id=self.chunk_id,
            generation=self.generation,
            weights_version=self._weights_version,
            mesh_id=self._mesh_id,
            layers=self.plan.layers,
            copies=self.plan.copies,
            stage_timeout_s=self._stage_seconds,
            arm_ttl_s=self._settings.arm_ttl_s,
            throttle=self._settings.throttle,
        )

    def _disarm(self, to: Address) -> Disarm:
        return Disarm(to=to, chunk_id=self.chunk_id, epoch=self._epoch)

    def _enter(self, state: RolloutState, now: float, timeout_s: float) -> None:
        self._trail.enter(state)
        self.state = state
        self.since_s = now
        self.deadline_s = now + timeout_s
        self.stalled = False

    def _send(self, message: ToRank) -> None:
        self._effects.append(Send(message))

    def _send_all(self, message: Callable[[Address], ToRank]) -> None:
        for address in self._group.addresses.values():
            self._send(message(address))

    def _note(self, event: str, text: str, rank_id: RankId | None = None) -> None:
        self._effects.append(Note(event=event, text=text, chunk_id=self.chunk_id, rank_id=rank_id))


_S = RolloutState

_ON_ANSWER: Mapping[tuple[type, RolloutState], Callable[[OpenChunk, Any, float], None]] = {
    (Staged, _S.STAGING): OpenChunk._on_staged,
    (Refused, _S.STAGING): OpenChunk._on_refused,
    (Disarmed, _S.STAGING): OpenChunk._on_disarmed,
    (Flipped, _S.STAGING): OpenChunk._on_flipped_unasked,
    (Armed, _S.ARMED): OpenChunk._on_armed,
    (Refused, _S.ARMED): OpenChunk._on_refused,
    (Committed, _S.ARMED): OpenChunk._on_committed,
    (Flipped, _S.ARMED): OpenChunk._on_flipped,
    (Disarmed, _S.ARMED): OpenChunk._on_disarmed,
    (Refused, _S.DISARMING): OpenChunk._on_refused,
    (Committed, _S.DISARMING): OpenChunk._on_committed,
    (Flipped, _S.DISARMING): OpenChunk._on_flipped,
    (Disarmed, _S.DISARMING): OpenChunk._on_disarmed,
}
"""What an answer does in each state; one that is not here says nothing new."""
