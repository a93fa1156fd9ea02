"""What goes into the chunk machine of a rank and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eplb_service.control import FromRank, LinkBytes, RefusalCode, Stage, ToRank
from eplb_service.ids import ChunkId
from eplb_service.transitions import Transitions

NO_CHUNK = ChunkId(0)


class ChunkState(Enum):
    """Where the one chunk that a rank may hold stands."""

    IDLE = "idle"  # none
    STAGING = "staging"  # the worker copies
    STAGED = "staged"  # all copies are in staging
    ARMED = "armed"  # the next vote casts its id
    VOTING = "voting"  # its id is cast and the outcome not known
    COMMITTED = "committed"  # the vote passed; the flip comes at the boundary of the next vote
    FLIPPING = "flipping"  # copies and tables are under way on the compute stream
    QUIESCING = "quiescing"  # closed, but the cancelled worker may still write to staging
    UNRESOLVED = "unresolved"  # the outcome of its vote is unknown: no step until the group re-forms


_S = ChunkState
TRANSITIONS: Transitions[ChunkState] = {
    _S.IDLE: {_S.STAGING: "a Stage that passes all checks"},
    _S.STAGING: {
        _S.STAGED: "every copy is in staging",
        _S.IDLE: "a copy failed",
        _S.QUIESCING: "withdrawn, late or outranked; the worker is told to stop",
    },
    _S.QUIESCING: {_S.IDLE: "the worker ended"},
    _S.STAGED: {_S.ARMED: "an Arm", _S.IDLE: "not armed in time, withdrawn or outranked"},
    _S.ARMED: {_S.VOTING: "a vote is due: its id is cast", _S.IDLE: "its time is over, withdrawn or outranked"},
    _S.VOTING: {
        _S.COMMITTED: "the vote passed",
        _S.ARMED: "the vote failed",
        _S.IDLE: "the vote failed, and it was withdrawn or outranked meanwhile; or ranks diverged",
        _S.UNRESOLVED: "the outcome is unknown, also because the group ended, or the weights changed under a vote that passed",
    },
    _S.COMMITTED: {
        _S.FLIPPING: "the boundary of the next vote, or the group formed again",
        _S.UNRESOLVED: "the weights changed before the flip",
    },
    _S.FLIPPING: {_S.IDLE: "the flip is through on the device"},
    _S.UNRESOLVED: {
        _S.FLIPPING: "the group formed again, and the vote had passed",
        _S.IDLE: "the group formed again, and nobody knew it to have passed",
    },
}
"""What may follow, and why: within one event of the machine."""


class Outcome(Enum):
    """How a vote in which this rank cast an id ended."""

    PASSED = "passed"  # min = max = that id
    FAILED = "failed"  # known, and not unanimous
    UNKNOWN = "unknown"  # error or time-out: others may have seen it pass
    DIVERGED = "diverged"  # the ranks are at different boundaries


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Received:
    """A planner's message arrived."""

    message: ToRank


@dataclass(frozen=True, slots=True)
class Attached:
    """The agent process is there (again): say once more where the chunk stands, what was sent before may be lost."""


@dataclass(frozen=True, slots=True)
class StagingDone:
    """The worker has every copy in staging, checksums right. Also the end of a cancelled copy that was complete."""

    chunk_id: ChunkId
    seconds: float
    received: LinkBytes


@dataclass(frozen=True, slots=True)
class StagingFailed:
    """The worker gave up and no longer touches staging."""

    chunk_id: ChunkId
    code: RefusalCode
    reason: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """A step boundary. weights_version: the engine's, now."""

    boundary: int
    weights_version: int


@dataclass(frozen=True, slots=True)
class FlipDue:
    """The vote before this boundary is resolved: flip now if it passed."""

    boundary: int


@dataclass(frozen=True, slots=True)
class VoteDue:
    """This boundary votes: say what to cast."""

    boundary: int


@dataclass(frozen=True, slots=True)
class VoteResolved:
    """The vote in which this rank cast `chunk_id` ended. detail: what went wrong, for people."""

    chunk_id: ChunkId
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineIdle:
    """The engine runs no steps now."""


@dataclass(frozen=True, slots=True)
class FlipDone:
    """The flip's copies are complete on the device."""

    chunk_id: ChunkId
    stall_s: float


@dataclass(frozen=True, slots=True)
class VotingOff:
    """This rank takes part in no rollout from now on; what is cast still resolves."""

    reason: str


@dataclass(frozen=True, slots=True)
class VotingOn:
    """It takes part (again)."""


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The vote group is given up: no vote is resolved any more, and no step begins before another group formed."""


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """What ranks decided of the chunk that this one voted for. flips: now, before its first step; else it closes.

    boundary: of the first step.
    """

    flips: bool
    boundary: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Received
    | Attached
    | StagingDone
    | StagingFailed
    | Boundary
    | FlipDue
    | VoteDue
    | VoteResolved
    | EngineIdle
    | FlipDone
    | VotingOff
    | VotingOn
    | GroupEnded
    | GroupFormed
    | Tick
)


# ── effects, in the order in which they must run ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Send:
    """Give this to the agent process."""

    message: FromRank


@dataclass(frozen=True, slots=True)
class BeginStaging:
    """Let the worker copy; it answers with exactly one StagingDone or StagingFailed. deadline: on the clock of `now`."""

    stage: Stage
    deadline: float


@dataclass(frozen=True, slots=True)
class CancelStaging:
    """Stop the worker's copy of this chunk soon; it still answers."""

    chunk_id: ChunkId


@dataclass(frozen=True, slots=True)
class ReleaseStaging:
    """What is staged is not needed any more."""

    chunk_id: ChunkId


@dataclass(frozen=True, slots=True)
class CastVote:
    """Cast this id at this boundary; 0 = not in favour of anything."""

    boundary: int
    chunk_id: ChunkId


@dataclass(frozen=True, slots=True)
class Flip:
    """Copy staging into the slots and write the tables, now; answer with FlipDone once the device is through."""

    stage: Stage
    boundary: int


@dataclass(frozen=True, slots=True)
class FailStop:
    """The engine may run no further step."""

    reason: str


Effect = Send | BeginStaging | CancelStaging | ReleaseStaging | CastVote | Flip | FailStop
