"""What the search keeps of ranks, planners and messages: states, and what tells two of them apart."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from agent.hook.chunk import ChunkMachine
from eplb_service.control import Arm, Disarm, Flipped, FromRank, Hello, Live, RefusalCode, Stage, ToRank
from eplb_service.rollout.events import RolloutState
from eplb_service.rollout.live_replies import LiveReplies
from eplb_service.rollout.open_chunk import OpenChunk
from eplb_service.rollout.transitions import TRANSITIONS
from eplb_service.transitions import Trail

Part = OpenChunk | LiveReplies


@dataclass(frozen=True)
class Bounds:
    """How far the search goes. chunks: that the first planner may open, and the one that takes over (0 = nobody does).

    expiries, copy_failures, lost_votes: how often each may happen in one run, on any rank.
    """

    ranks: int = 2
    chunks: tuple[int, int] = (1, 1)
    expiries: int = 0
    copy_failures: int = 0
    lost_votes: int = 0


class Rank(NamedTuple):
    """One rank. machine: number of its machine's state. cast: id whose vote it does not know yet.

    is_ahead: it passed a boundary that not all have passed. staged: chunk whose copies are in its staging. routed: digest that
    its tables hold. told: epoch of the last leader that it answered.
    """

    machine: int
    routed: int
    cast: int = 0
    is_ahead: bool = False
    staged: int = 0
    is_ended: bool = False
    told: int = 0


class Planner(NamedTuple):
    """One planner. part, live: numbers of what it waits for and of what it believes; 0 = nothing. epoch 0 = not there yet."""

    epoch: int
    live: int = 0
    opened: int = 0
    part: int = 0


class State(NamedTuple):
    """One state of everything. sent: bits of messages that were sent and may still arrive.

    vote, casts: ids of the last whole vote, and of the one begun. flipped, never: chunks that a rank flipped, or said that it
    never will.
    """

    ranks: tuple[Rank, ...]
    planners: tuple[Planner, ...]
    sent: int
    vote: tuple[int, ...]
    casts: tuple[int, ...]
    flipped: frozenset[int]
    never: frozenset[int]
    faults: tuple[int, int, int]


def bits(sent: int) -> Iterator[int]:
    while sent:
        low = sent & -sent
        yield low.bit_length() - 1
        sent ^= low


def with_rank(state: State, position: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:position], rank, *state.ranks[position + 1 :]))


def with_planner(state: State, which: int, planner: Planner) -> State:
    return state._replace(planners=(planner, state.planners[1]) if which == 0 else (state.planners[0], planner))


def fault(state: State, kind: int) -> State:
    faults = list(state.faults)
    faults[kind] += 1
    return state._replace(faults=(faults[0], faults[1], faults[2]))


def machine_key(machine: ChunkMachine) -> Hashable:
    """All of a rank's machine that what follows depends on: not counters, texts, history, nor boundaries."""
    ledger = machine.ledger
    return (
        ledger.address,
        machine.state,
        machine.open_id,
        tuple(change.new_digest for change in machine._open.layers) if machine._open else (),
        machine._withdrawn,
        machine._doomed[0] if machine._doomed else None,
        machine._hello.epoch if machine._hello else 0,
        machine._deadline == float("inf"),
        ledger.closed_id,
        ledger.epoch_seen,
        tuple(ledger._flipped),
        ledger.off_reason,
        tuple(layer.digest for layer in ledger.live.values()),
    )


def part_key(part: Part) -> Hashable:
    """All of a planner's part that what follows depends on.

    One Disarmed says what all do: a deadline, which may pass at any time, ends the chunk on it.
    """
    if isinstance(part, LiveReplies):
        return part._epoch, part.state, tuple(sorted((rank, live.digest) for rank, live in part._replies.items()))
    staged = frozenset(part._staged) if part.state is RolloutState.STAGING else frozenset()
    told = (staged, part.is_certain_to_flip, bool(part._disarmed), frozenset(part._flipped))
    digests = tuple(change.new_digest for change in part.plan.layers)
    return part.chunk_id, digests, part.state, *told, type(part.outcome)


def message_key(message: ToRank | FromRank) -> Hashable:
    """What tells two messages apart; texts and times do not."""
    if isinstance(message, Live):
        rows = tuple(layer.digest for layer in message.layers)
        seen = (message.epoch_seen, message.closed_id, message.flipped_id)
        return Live, message.sender.rank_id, message.epoch, seen, rows
    who = message.to.rank_id if isinstance(message, Hello | Stage | Arm | Disarm) else message.sender.rank_id
    chunk, asks = getattr(message, "chunk_id", 0), getattr(message, "code", "") in (RefusalCode.STALE_EPOCH, RefusalCode.CLOSED)
    rows = tuple(change.new_digest for change in message.layers) if isinstance(message, Stage) else ()
    if isinstance(message, Flipped):
        rows = tuple(digest for _, digest in message.digests)
    return type(message), who, chunk, getattr(message, "epoch", 0), asks, rows


def words(message: ToRank | FromRank) -> str:
    chunk, epoch = getattr(message, "chunk_id", 0), getattr(message, "epoch", 0)
    of = "" if isinstance(message, Hello | Stage | Arm | Disarm) else f" of rank {message.sender.rank_id}"
    return type(message).__name__ + (f" {chunk:#x}" if chunk else "") + (f" epoch {epoch}" if epoch else "") + of


def cloned(machine: ChunkMachine) -> ChunkMachine:
    """The same machine once more: what it changes later it changes alone."""
    clone = copy.copy(machine)
    ledger = copy.copy(machine._ledger)
    ledger.live, ledger._flipped = dict(ledger.live), ledger._flipped.copy()
    clone._ledger = ledger
    for name in ("_history", "trail"):
        if hasattr(machine, name):
            setattr(clone, name, copy.copy(getattr(machine, name)))
    return clone


def copied(part: Part) -> Part:
    """The same, once more."""
    clone = copy.copy(part)
    for name, value in vars(part).items():
        if isinstance(value, set | dict):
            setattr(clone, name, value.copy())
    clone._trail = trail(part.state)
    return clone


def trail(state: RolloutState) -> Trail[RolloutState]:
    return Trail("a planner", TRANSITIONS, state)


def reached(state: State) -> str:
    """For the count of what was reached: what flipped, and how many ranks ended."""
    flipped = ", ".join(f"{chunk:#x}" for chunk in sorted(state.flipped)) or "nothing"
    ended = sum(rank.is_ended for rank in state.ranks)
    return f"{flipped} flipped" + (f", {ended} ended" if ended else "")
