"""Which state of the planner's rollout machine may follow which, and why. See `machine`, `run` and `open_chunk`."""

from __future__ import annotations

from eplb_service.control import FromRank
from eplb_service.rollout.events import Received, RolloutEvent, RolloutState
from eplb_service.transitions import Transitions

_S = RolloutState
_ANYWHERE = {
    _S.WAITING: "the group ended, or formed anew",
    _S.OUTRANKED: "a higher epoch leads, or ours is led by two",
}
_DOUBT = {_S.HELLO: "ranks contradict one another, or what we knew"}
_ENDED = {_S.IDLE: "the rollout ended"}

TRANSITIONS: Transitions[RolloutState] = {
    _S.WAITING: {_S.HELLO: "the group is ready", _S.OUTRANKED: _ANYWHERE[_S.OUTRANKED]},
    _S.HELLO: {
        _S.INCONSISTENT: "all replied, not alike",
        _S.IDLE: "all replied, and alike",
        **_ANYWHERE,
    },
    _S.INCONSISTENT: {_S.HELLO: "it is time to ask again", _S.IDLE: "all replied, and alike", **_ANYWHERE},
    _S.IDLE: {_S.PERSISTING: "a generation starts", **_DOUBT, **_ANYWHERE},
    _S.PERSISTING: {_S.BACKING_OFF: "the start is stored", **_ENDED, **_DOUBT, **_ANYWHERE},
    _S.BACKING_OFF: {_S.STAGING: "nothing speaks against the next chunk", **_ENDED, **_DOUBT, **_ANYWHERE},
    _S.STAGING: {
        _S.ARMED: "staged by all ranks, none away",
        _S.DISARMING: "refused, late or withdrawn",
        _S.BACKING_OFF: "every rank says that it has it",
        **_ENDED,
        **_DOUBT,
        **_ANYWHERE,
    },
    _S.ARMED: {
        _S.BACKING_OFF: "flipped by all ranks",
        _S.DISARMING: "late, closed by a rank, or withdrawn",
        **_ENDED,
        **_DOUBT,
        **_ANYWHERE,
    },
    _S.DISARMING: {
        _S.BACKING_OFF: "proven: flipped by all, or by none for ever",
        **_ENDED,
        **_DOUBT,
        **_ANYWHERE,
    },
    _S.OUTRANKED: {},
}


def summary(event: RolloutEvent) -> str:
    """An event in few words, for the history."""
    return _of_rank(event.message) if isinstance(event, Received) else type(event).__name__


def _of_rank(message: FromRank) -> str:
    chunk = getattr(message, "chunk_id", None)
    what = type(message).__name__ + (f" {chunk:#x}" if chunk is not None else "")
    return f"{what} of rank {message.sender.rank_id}"
