"""What goes into the planner's rollout machine and what comes out of it.

Effects are run in the order in which they are returned. *Persist before send* is by event: `Persist(token, record)` comes
alone, and what may only follow it is returned by the `Persisted(token)` that confirms it; until then nothing of that rollout
is sent. Writes that may lag behind (`LiveChanged`, `Finished`, `Note`) are confirmed by nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from eplb_service.control import NO_THROTTLE, FromRank, Throttle, ToRank
from eplb_service.flip_stall import ASSUMED, ChunkFlip, FlipStall, StallModel
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, RankId
from eplb_service.membership.machine import GroupLost, GroupReady, RankAttached, RankDetached

NO_CHUNK = ChunkId(0)
"""No chunk is open."""

# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a rank arrived."""

    message: FromRank


@dataclass(frozen=True, slots=True)
class Start:
    """Carry this generation to all ranks: the layers that differ from the live map. Answered by one `Finished`.

    stalls: what flips take, by which chunks are cut (`RolloutSettings.commit_stall_ms_max`).
    """

    generation: Generation
    stalls: StallModel = ASSUMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop the rollout: after the open chunk, or, with withdraw, by withdrawing that too. by: who asks (for the record)."""

    reason: str
    by: str
    withdraw: bool = False


@dataclass(frozen=True, slots=True)
class Persisted:
    """The store has what `Persist(token)` asked for."""

    token: int


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """The store could not take it. fenced_by: epoch that leads now, when that is why."""

    token: int
    reason: str
    fenced_by: Epoch | None = None


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another planner leads: stop at once, send nothing more (found by the lease or a fenced write)."""

    by: Epoch


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: look at the deadlines (`Rollout.next_deadline` says when it is due)."""


RolloutEvent = (
    GroupReady | GroupLost | RankAttached | RankDetached | Received | Start | Cancel | Persisted | PersistFailed | Fenced | Tick
)


# ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RolloutState(StrEnum):
    """What the machine is doing (the words of `RolloutStatus.state` on the wire, more finely)."""

    WAITING = "waiting"  # no group
    HELLO = "hello"  # asks every rank what is live
    INCONSISTENT = "inconsistent"  # ranks route by different maps, or broke the protocol: asks again on a slow timer
    IDLE = "idle"  # the live map is known; nothing to do
    PERSISTING = "persisting"  # the start of a rollout is being stored
    STAGING = "staging"
    ARMED = "armed"  # all staged, vote authorised
    DISARMING = "disarming"  # being withdrawn; the outcome may still be a flip
    BACKING_OFF = "backing_off"  # before another try, or the engine runs no steps
    OUTRANKED = "outranked"  # a higher epoch leads: final


@dataclass(frozen=True, slots=True)
class Send:
    """Give this to the rank's control stream."""

    message: ToRank


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """What must be in the store, fenced by epoch, before anything of a rollout is sent. stall: expected of its longest flip."""

    epoch: Epoch
    generation: GenerationNumber
    digest: str
    num_chunks: int
    num_layers: int
    stall: FlipStall | None = None


@dataclass(frozen=True, slots=True)
class Persist:
    """Store this, fenced by our epoch; answer with `Persisted(token)` or `PersistFailed(token)`."""

    token: int
    record: RolloutRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveChanged:
    """The live map is known (again), or a chunk flipped. Written behind.

    generation_floor: highest generation that the ranks ever saw: the next one is 1 + max(store, this).
    boundary: of the flip; None when the map was learned by asking, or no rank could say. flip: how long it held up steps; None
    where no rank told.
    """

    live: LiveMap
    generation_floor: GenerationNumber
    reason: str
    boundary: int | None = None
    flip: ChunkFlip | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the machine is, after every change. chunks_total counts the chunks of the present rollout; 0 without one.

    waiting_for: ranks whose answer is awaited. since_s, deadline_s: on the clock of `now`; deadline None = no time-out here.
    attempt: tries of the open chunk. hold: what the next chunk waits for, beside the back-off.
    stalled: the deadline of this state passed and it goes on waiting. last_error: last refusal, abort or missed deadline.
    """

    state: RolloutState
    generation: GenerationNumber | None
    chunk_id: ChunkId
    chunks_done: int
    chunks_total: int
    attempt: int
    waiting_for: tuple[RankId, ...]
    since_s: float
    deadline_s: float | None
    stalled: bool
    hold: str
    last_error: str


class Outcome(StrEnum):
    """How a rollout ended."""

    ACTIVE = "active"  # every layer has the generation's row
    STOPPED = "stopped"  # given up; some chunks may have flipped
    NOT_STARTED = "not_started"  # cannot be tried now; nothing was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer to `Start`. flip_boundaries: of the chunks that flipped, ascending. seconds: since `Start`.

    stall: of the longest of its flips; None where there was nothing to flip. refused: ranks did not take a chunk, as often as
    it was tried, or for a reason that another try would meet again.
    """

    generation: GenerationNumber
    outcome: Outcome
    reason: str
    flip_boundaries: tuple[int, ...]
    seconds: float
    stall: FlipStall | None = None
    refused: bool = False


class AlarmCode(StrEnum):
    """What a person must look at."""

    INCONSISTENT = "inconsistent"  # ranks reply with different live maps
    FLIP_DIGEST = "flip_digest"  # a rank says it flipped, and routes by another row
    FLIP_BOUNDARY = "flip_boundary"  # ranks flipped one chunk at different steps
    FLIP_UNASKED = "flip_unasked"  # a rank flipped a chunk that was never armed
    FLIP_AFTER_DISARM = "flip_after_disarm"  # one rank closed the chunk, another flipped it
    BAD_LIVE = "bad_live"  # a live map that cannot be: wrong layers, shape, digest


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that must not happen did. Nothing is rolled out until an equal set of live maps clears it."""

    code: AlarmCode
    reason: str


@dataclass(frozen=True, slots=True)
class AlarmCleared:
    """All ranks reply with one live map again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Outranked:
    """Ranks have seen a higher epoch than ours, or ours from another planner: lead again with this floor, or step down."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A journal entry. event: `chunk.staged`, … as in the logs."""

    event: str
    text: str
    chunk_id: ChunkId = NO_CHUNK
    rank_id: RankId | None = None


Effect = Send | Persist | LiveChanged | Progress | Finished | Alarm | AlarmCleared | Outranked | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Deadlines and tries. All in seconds on the planner's monotonic clock.

    stage_timeout_s: longest time to stage a chunk at full speed. throttle: how fast ranks may send; staging gets the more time.
    arm_ttl_s: given to the ranks with every Stage. slowest_step_s: the longest step that is still healthy.
    hold_timeout_s: how long a chunk may wait for ranks that are away, or that serve another weights version.
    answer_slack_s: added to every deadline for messages and queues. commit_stall_ms_max: how long a flip may hold up steps,
    milliseconds; 0 = no limit.
    """

    stage_timeout_s: float = 60.0
    arm_ttl_s: float = 20.0
    slowest_step_s: float = 1.0
    answer_slack_s: float = 2.0
    hello_timeout_s: float = 10.0
    persist_timeout_s: float = 10.0
    disarm_timeout_s: float = 10.0
    inconsistent_retry_s: float = 30.0
    hold_timeout_s: float = 120.0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    tries_max: int = 4
    layers_per_chunk_max: int | None = None
    commit_stall_ms_max: float = 10.0
    throttle: Throttle = NO_THROTTLE

    @property
    def commit_stall_s_max(self) -> float | None:
        """How long a flip may hold up steps, seconds; None = no limit."""
        return self.commit_stall_ms_max / 1e3 or None

    def stage_seconds(self, bytes_in_a_row: int) -> float:
        """Longest time to stage a chunk (`Traffic.bytes_in_a_row`) as slowly as the throttle asks for."""
        return self.throttle.seconds(bytes_in_a_row, unthrottled_s=self.stage_timeout_s)

    def arm_timeout_s(self, vote_period: int) -> float:
        """How long to wait for Flipped before withdrawing: longer than the rank's own time to live plus two votes."""
        return self.arm_ttl_s + 2 * vote_period * self.slowest_step_s + self.answer_slack_s

    def backoff_after(self, tries: int) -> float:
        """Seconds before the next try of a chunk that failed so many times: doubled each time, up to the most."""
        return min(self.backoff_max_s, self.backoff_s * 2.0 ** max(0, tries - 1))
