"""Every interleaving of the commit of chunks, over the real machines of ranks and planners.

Ranks are real `ChunkMachine`s, planners real `OpenChunk`s and `LiveReplies`, votes are read by the hook's `read_ballot`. What
lies between them is as hostile as can be: a message that was ever sent may arrive at any time, any number of times, in any
order, or never; deadlines may pass at any time; a planner may stop acting anywhere (it is then a zombie, or dead).

Ranks run in lock-step: one boundary a step, at most one of skew, a vote at every boundary, read at the next one or earlier by a
waiter. Boundaries are counted relative to the slowest rank: nothing in the machines depends on their value, so the search ends.

Bounds: number of ranks, of chunks that each planner may open, and of each kind of fault.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent.hook import ballot
from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from eplb_service.control import (
    Address,
    Arm,
    Armed,
    Disarm,
    Disarmed,
    Flipped,
    FromRank,
    Hello,
    LinkBytes,
    Live,
    RefusalCode,
    Refused,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.generation import LiveMap, as_loaded
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, GroupId, Incarnation, chunk_epoch, chunk_id
from eplb_service.membership.group import Group
from eplb_service.rollout.events import Effect, RolloutSettings, RolloutState, Send
from eplb_service.rollout.live_replies import LiveReplies
from eplb_service.rollout.open_chunk import Contradiction, FlippedEverywhere, NeverFlips, OpenChunk
from eplb_service.rollout.start import chunks_to_roll_out
from eplb_service.rollout.transitions import TRANSITIONS
from eplb_service.transitions import Trail
from tests.model.explore import WrongStateError
from tests.model.interned import Interned
from tests.sim.model import LAYERS, Shape
from tests.sim.planner import make_generation

LAYER = LAYERS[0]
LATE_S = 1e9
SETTINGS = RolloutSettings()
Part = OpenChunk | LiveReplies
_CLOSES_NOTHING = (RefusalCode.BUSY, RefusalCode.STALE_EPOCH, RefusalCode.CLOSED)
_VOTES = (hook.ChunkState.ARMED, hook.ChunkState.VOTING, hook.ChunkState.COMMITTED, hook.ChunkState.FLIPPING)
_COPYING = (hook.ChunkState.STAGING, hook.ChunkState.QUIESCING)


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


class CommitModel:
    """The successor function of one bounded model. What a machine does in a state is computed once, by the machine itself."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        number = bounds.ranks
        self._shape = shape = Shape(num_ranks=number, slots_per_rank=2, num_logical=2 * number - 1, vote_period=1)
        self._addresses = [Address(rank, Incarnation(1), GroupId(1)) for rank in shape.rank_ids]
        self._group = Group.of(tuple(shape.registration(address, 1) for address in self._addresses))
        self._machines: Interned[ChunkMachine] = Interned(_machine_key)
        self._parts: Interned[Part] = Interned(_part_key)
        self._maps: Interned[LiveMap] = Interned(lambda live: (live.digest, live.generations))
        self._messages: Interned[ToRank | FromRank] = Interned(_message_key)
        self._to_rank = [0] * number
        self._from_ranks = 0
        self._machine_steps: dict[tuple[int, Hashable], tuple[int, tuple[hook.Effect, ...]]] = {}
        self._part_steps: dict[tuple[int, int], tuple[int, int] | None] = {}

    # ── the beginning ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> State:
        """All ranks route what they loaded, and the first planner knows it."""
        live = as_loaded(self._shape.linear())
        routed = {layer.layer: layer for layer in live.layers}
        ranks = []
        for address in self._addresses:
            shape = self._shape.rank_shape(address.rank_id)
            machine = ChunkMachine(address, shape, routed, weights_version=1, off_reason="")
            ranks.append(Rank(self._machines.number(machine), live.row_digests[LAYER]))
        number = self.bounds.ranks
        planners = (Planner(1, self._maps.number(live)), Planner(0))
        return State(tuple(ranks), planners, 0, (0,) * number, (0,) * number, frozenset(), frozenset(), (0, 0, 0))

    # ── what may happen ──────────────────────────────────────────────────────────────────────────────────────────────────

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything that may happen next. Raises WrongStateError when an invariant breaks in it."""
        may_vote = self._may_vote(state)
        for position, rank in enumerate(state.ranks):
            if rank.is_ended:
                continue
            for label, following in self._steps_of_rank(state, position, rank):
                if following.ranks[position].routed != rank.routed:
                    raise WrongStateError(f"invariant 1: rank {position} flips in the middle of a step ({label})")
                yield label, following
            if not rank.is_ahead and may_vote:
                yield f"rank {position} passes a boundary", self._passed(state, position)
        for which in range(2):
            yield from self._steps_of_planner(state, which)

    def _steps_of_rank(self, state: State, position: int, rank: Rank) -> Iterator[tuple[str, State]]:
        machine = self._machines[rank.machine]
        bounds, faults = self.bounds, state.faults
        for bit in _bits(state.sent & self._to_rank[position]):
            following = self._fed(state, position, bit)
            if following != state:
                yield f"rank {position} hears {_words(self._messages[bit + 1])}", following
        if machine.state in _COPYING:
            yield f"rank {position} has copied all", self._fed(state, position, "copied")
            if faults[1] < bounds.copy_failures:
                yield f"the copy on rank {position} fails", self._fed(_fault(state, 1), position, "copy failed")
        if machine._deadline < LATE_S and faults[0] < bounds.expiries:
            following = self._fed(state, position, "late")
            if following != state:
                yield f"a deadline of rank {position} passes", following._replace(faults=_fault(state, 0).faults)
        if machine.state is hook.ChunkState.COMMITTED:
            following = self._fed(state, position, "idle")
            if following != state:
                yield f"rank {position} is idle", following
        if rank.cast:
            if not rank.is_ahead:
                yield f"rank {position} learns how the vote ended", self._resolved(state, position)
            if faults[2] < bounds.lost_votes:
                lost = _with_rank(_fault(state, 2), position, rank._replace(cast=0))
                yield f"rank {position} loses the vote", self._fed(lost, position, hook.Outcome.UNKNOWN)

    def _may_vote(self, state: State) -> bool:
        """Whether a boundary changes anything: as long as no rank is, or can be, armed, all cast 0 and stay where they are."""
        machines = [self._machines[rank.machine] for rank in state.ranks]
        if any(rank.is_ahead or rank.cast for rank in state.ranks) or any(machine.state in _VOTES for machine in machines):
            return True
        for bit in _bits(state.sent & sum(self._to_rank)):
            message = self._messages[bit + 1]
            if isinstance(message, Arm) and machines[self._addresses.index(message.to)].open_id == message.chunk_id:
                return True
        return False

    def _steps_of_planner(self, state: State, which: int) -> Iterator[tuple[str, State]]:
        planner = state.planners[which]
        name = f"planner {which + 1}"
        if planner.epoch == 0:
            if self.bounds.chunks[1]:
                yield f"{name} takes over", self._take_over(state)
        elif planner.part:
            staged = []
            for bit in _bits(state.sent & self._from_ranks):
                if isinstance(self._messages[bit + 1], Staged):
                    staged.append(bit)
                    continue
                following = self._told(state, which, bit)
                if following is not None and following != state:
                    yield f"{name} hears {_words(self._messages[bit + 1])}", following
            if len(staged) == self.bounds.ranks:
                yield f"{name} hears Staged of all", self._told_all(state, which, staged)
            following = self._told(state, which, -1)
            if following is not None and following.planners != state.planners:  # what is only said again is under way already
                yield f"a deadline of {name} passes", following
        elif planner.live and planner.opened < self.bounds.chunks[which]:
            yield f"{name} opens a chunk", self._open(state, which)

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fed(self, state: State, position: int, event: Hashable) -> State:
        """An event of a rank, by its name, and all that follows from it at once."""
        rank = state.ranks[position]
        key = (rank.machine, event)
        known = self._machine_steps.get(key)
        if known is None:
            machine = _cloned(self._machines[rank.machine])
            effects = tuple(machine.handle(self._event(event, machine), LATE_S if event == "late" else 0.0))
            known = self._machine_steps[key] = (self._machines.number(machine), effects)
        number, effects = known
        was = self._machines[rank.machine]
        staged = was.open_id if event == "copied" and was.state is hook.ChunkState.STAGING else rank.staged
        state = _with_rank(state, position, rank._replace(machine=number, staged=staged))
        for effect in effects:
            state = self._run(state, position, effect)
        return state

    def _event(self, event: Hashable, machine: ChunkMachine) -> hook.Event:
        """The event of a name; a number is the bit of a message."""
        if isinstance(event, int):
            return hook.Received(self._messages[event + 1])  # type: ignore[arg-type]
        if isinstance(event, hook.Outcome):
            return hook.VoteResolved(machine.open_id, event, "no answer")
        events: dict[Hashable, hook.Event] = {
            "copied": hook.StagingDone(machine.open_id, 0.1, LinkBytes()),
            "copy failed": hook.StagingFailed(machine.open_id, RefusalCode.TRANSFER, "a peer did not answer"),
            "late": hook.Tick(),
            "idle": hook.EngineIdle(),
            "boundary": hook.Boundary(0, 1),
            "flip due": hook.FlipDue(0),
            "vote due": hook.VoteDue(0),
            "flip done": hook.FlipDone(machine.open_id, 0.0),
        }
        return events[event]

    def _run(self, state: State, position: int, effect: hook.Effect) -> State:
        rank = state.ranks[position]
        match effect:
            case hook.Send(message):
                return self._said(state, position, message)
            case hook.ReleaseStaging():
                return _with_rank(state, position, rank._replace(staged=0))
            case hook.CastVote(_, chunk):
                casts = (*state.casts[:position], int(chunk), *state.casts[position + 1 :])
                return _with_rank(state, position, rank._replace(cast=int(chunk)))._replace(casts=casts)
            case hook.Flip(stage, _):
                return self._flipped(state, position, stage)
            case hook.FailStop():
                return _with_rank(state, position, rank._replace(is_ended=True))
        return state

    def _said(self, state: State, position: int, message: FromRank) -> State:
        if isinstance(message, Disarmed) or (isinstance(message, Refused) and message.code not in _CLOSES_NOTHING):
            if message.chunk_id in state.flipped:
                raise WrongStateError(f"rank {position} says {_words(message)}, and it flipped")
            state = state._replace(never=state.never | {message.chunk_id})
        if isinstance(message, Live) and message.epoch == message.epoch_seen:
            rank = state.ranks[position]
            state = _with_rank(state, position, rank._replace(told=max(rank.told, message.epoch)))
        return self._send(state, message)

    def _flipped(self, state: State, position: int, stage: Stage) -> State:
        rank, chunk = state.ranks[position], stage.chunk_id
        if rank.staged != chunk:
            raise WrongStateError(f"invariant 2: rank {position} flips {chunk:#x} and holds {rank.staged:#x}")
        if chunk in state.never:
            raise WrongStateError(f"rank {position} flips {chunk:#x}, and a rank said that it never will")
        if chunk_epoch(chunk) < rank.told:
            raise WrongStateError(f"rank {position} flips {chunk:#x} after it told epoch {rank.told} what is live")
        state = _with_rank(state, position, rank._replace(routed=stage.layers[0].new_digest))
        return self._fed(state._replace(flipped=state.flipped | {chunk}), position, "flip done")

    def _resolved(self, state: State, position: int) -> State:
        """The last whole vote is known to a rank."""
        rank = state.ranks[position]
        minimum = [min(values) for values in zip(*(ballot.ballot(0, ChunkId(cast)) for cast in state.vote), strict=True)]
        outcome, _ = ballot.read_ballot(minimum, boundary=0, chunk=ChunkId(rank.cast))
        return self._fed(_with_rank(state, position, rank._replace(cast=0)), position, outcome)

    def _passed(self, state: State, position: int) -> State:
        """A rank passes its next boundary, as `Hook._commit` does; all that are there must route by one map."""
        state = self._fed(state, position, "boundary")
        if state.ranks[position].cast:
            state = self._resolved(state, position)
        state = self._fed(state, position, "flip due")
        state = self._fed(state, position, "vote due")
        state = _with_rank(state, position, state.ranks[position]._replace(is_ahead=True))
        maps = {rank.routed for rank in state.ranks if rank.is_ahead}
        if len(maps) > 1:
            raise WrongStateError(f"invariant 1: ranks begin a step with {len(maps)} maps")
        if all(rank.is_ahead for rank in state.ranks):
            ranks = tuple(rank._replace(is_ahead=False) for rank in state.ranks)
            state = state._replace(ranks=ranks, vote=state.casts, casts=(0,) * self.bounds.ranks)
        return state

    # ── planners ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_over(self, state: State) -> State:
        """A second planner leads with a higher epoch and asks; the first does not know."""
        replies = LiveReplies(
            epoch=Epoch(2), group=self._group, settings=SETTINGS, last_opened=hook.NO_CHUNK, trail=_trail(RolloutState.WAITING)
        )
        sent = self._mask(replies.ask_all(0.0))
        planners = (state.planners[0], Planner(2, 0, 0, self._parts.number(replies)))
        return state._replace(planners=planners, sent=state.sent | sent)

    def _open(self, state: State, which: int) -> State:
        planner = state.planners[which]
        live, opened = self._maps[planner.live], planner.opened + 1
        identity, number = chunk_id(planner.epoch, opened), GenerationNumber(10 * which + opened)
        target = live.placement.with_rows({LAYER: np.roll(live.placement.row(LAYER), 1 + which)})
        generation = make_generation(number, target, len(live.generations), Epoch(planner.epoch))
        (plan,) = chunks_to_roll_out(
            generation, group=self._group, live=live, generation_floor=GenerationNumber(0), layers_per_chunk_max=None
        )
        chunk = OpenChunk(
            epoch=Epoch(planner.epoch),
            chunk_id=identity,
            mesh_id=identity,
            generation=number,
            weights_version=1,
            plan=plan,
            group=self._group,
            settings=SETTINGS,
            trail=_trail(RolloutState.BACKING_OFF),
        )
        sent = self._mask(chunk.open(0.0))
        planner = planner._replace(opened=opened, part=self._parts.number(chunk))
        return _with_planner(state, which, planner)._replace(sent=state.sent | sent)

    def _told(self, state: State, which: int, bit: int) -> State | None:
        """The state after a planner hears a message, or (bit -1) after its deadline; None when that says nothing."""
        planner = state.planners[which]
        key = (planner.part, bit)
        if key not in self._part_steps:
            part = _copied(self._parts[planner.part])
            effects = self._effects(part, planner.epoch, bit)
            self._part_steps[key] = None if effects is None else (self._parts.number(part), self._mask(effects))
        known = self._part_steps[key]
        if known is None:
            return None
        number, sent = known
        state = _with_planner(state, which, planner._replace(part=number))._replace(sent=state.sent | sent)
        return self._found_out(state, which, self._parts[number])

    def _told_all(self, state: State, which: int, bits: list[int]) -> State:
        """Staged says nothing before it was heard of all: until then hearing it is as good as not."""
        for bit in bits:
            state = self._told(state, which, bit) or state
        return state

    def _effects(self, part: Part, epoch: int, bit: int) -> list[Effect] | None:
        """What a planner's part answers; None where it says nothing. A sign of a higher epoch ends it: as if it never acted."""
        if bit < 0:
            return part.overdue(0.0)
        message = self._messages[bit + 1]
        if isinstance(message, Live):
            if message.epoch != epoch or message.epoch_seen > epoch:
                return None
            if isinstance(part, LiveReplies):
                return [] if part.take(message, self._group.live_map(message.layers), 0.0) else None
            digests = {layer.layer: layer.digest for layer in message.layers}
            return part.seen_live(message.sender.rank_id, message.flipped_id, message.closed_id, digests, 0.0)
        if isinstance(part, OpenChunk) and getattr(message, "chunk_id", 0) == part.chunk_id:
            return part.answered(message, frozenset(), 0.0)  # type: ignore[arg-type]
        return None

    def _found_out(self, state: State, which: int, part: Part) -> State:
        """Take over what a planner's part is certain of by now."""
        planner = state.planners[which]
        if isinstance(part, LiveReplies):
            if part.disagreement is not None:
                raise WrongStateError(f"planner {which + 1} finds ranks unequal: {part.disagreement.reason}")
            if part.agreed is None:
                return state
            return self._believe(state, which, part.agreed)
        match part.outcome:
            case Contradiction(alarm):
                raise WrongStateError(f"planner {which + 1}: {alarm.code}: {alarm.reason}")
            case FlippedEverywhere():
                live = self._maps[planner.live]
                return self._believe(state, which, live.with_rows(part.rows, part.generation))
            case NeverFlips():
                if part.chunk_id in state.flipped:
                    raise WrongStateError(f"planner {which + 1} gives up chunk {part.chunk_id:#x}, which flipped")
                state = state._replace(never=state.never | {part.chunk_id})
                return self._swept(_with_planner(state, which, planner._replace(part=0)))
        return state

    def _believe(self, state: State, which: int, live: LiveMap) -> State:
        """What a leader takes for live is what every rank routes by, unless ranks obey another one by now."""
        planner = state.planners[which]
        machines = [self._machines[rank.machine] for rank in state.ranks]
        if all(machine.ledger.epoch_seen <= planner.epoch for machine in machines):
            for position, rank in enumerate(state.ranks):
                if rank.routed != live.row_digests[LAYER]:
                    raise WrongStateError(f"planner {which + 1} takes another map for live than rank {position} routes by")
        return self._swept(_with_planner(state, which, planner._replace(part=0, live=self._maps.number(live))))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, state: State, message: FromRank) -> State:
        """A rank says something; what no planner can use any more is as good as lost."""
        if isinstance(message, Armed) or not any(self._can_use(planner, message) for planner in state.planners):
            return state
        return state._replace(sent=state.sent | self._bit(message))

    def _can_use(self, planner: Planner, message: FromRank) -> bool:
        chunk = getattr(message, "chunk_id", 0)
        part = self._parts[planner.part] if planner.part else None
        if chunk:
            return isinstance(part, OpenChunk) and part.chunk_id == chunk
        return getattr(message, "epoch", 0) == planner.epoch and (part is not None or self._may_open(planner))

    def _may_open(self, planner: Planner) -> bool:
        return planner.opened < self.bounds.chunks[planner.epoch - 1]

    def _swept(self, state: State) -> State:
        """A planner left something: what ranks said of it is of no use any more."""
        sent = state.sent
        for bit in _bits(sent & self._from_ranks):
            message = self._messages[bit + 1]
            if not any(self._can_use(planner, message) for planner in state.planners):  # type: ignore[arg-type]
                sent &= ~(1 << bit)
        return state._replace(sent=sent)

    def _mask(self, effects: list[Effect]) -> int:
        sent = 0
        for effect in effects:
            if isinstance(effect, Send):
                sent |= self._bit(effect.message)
        return sent

    def _bit(self, message: ToRank | FromRank) -> int:
        bit = 1 << self._messages.number(message) - 1
        if isinstance(message, Hello | Stage | Arm | Disarm):
            self._to_rank[self._addresses.index(message.to)] |= bit
        else:
            self._from_ranks |= bit
        return bit


# ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bits(sent: int) -> Iterator[int]:
    while sent:
        low = sent & -sent
        yield low.bit_length() - 1
        sent ^= low


def _with_rank(state: State, position: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:position], rank, *state.ranks[position + 1 :]))


def _with_planner(state: State, which: int, planner: Planner) -> State:
    return state._replace(planners=(planner, state.planners[1]) if which == 0 else (state.planners[0], planner))


def _fault(state: State, kind: int) -> State:
    faults = list(state.faults)
    faults[kind] += 1
    return state._replace(faults=(faults[0], faults[1], faults[2]))


def _machine_key(machine: ChunkMachine) -> Hashable:
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


def _part_key(part: Part) -> Hashable:
    """All of a planner's part that what follows depends on."""
    if isinstance(part, LiveReplies):
        return part._epoch, part.state, tuple(sorted((rank, live.digest) for rank, live in part._replies.items()))
    told = [frozenset(ranks) for ranks in (part._staged, part._committed, part._disarmed, part._flipped)]
    digests = tuple(change.new_digest for change in part.plan.layers)
    return part.chunk_id, digests, part.state, *told, type(part.outcome)


def _message_key(message: ToRank | FromRank) -> Hashable:
    """What tells two messages apart; texts and times do not."""
    if isinstance(message, Live):
        rows = tuple(layer.digest for layer in message.layers)
        seen = (message.epoch_seen, message.closed_id, message.flipped_id)
        return Live, message.sender.rank_id, message.epoch, seen, rows
    who = message.to.rank_id if isinstance(message, Hello | Stage | Arm | Disarm) else message.sender.rank_id
    chunk, is_stale = getattr(message, "chunk_id", 0), getattr(message, "code", "") is RefusalCode.STALE_EPOCH
    rows = tuple(change.new_digest for change in message.layers) if isinstance(message, Stage) else ()
    if isinstance(message, Flipped):
        rows = tuple(digest for _, digest in message.digests)
    return type(message), who, chunk, getattr(message, "epoch", 0), is_stale, rows


def _words(message: ToRank | FromRank) -> str:
    chunk, epoch = getattr(message, "chunk_id", 0), getattr(message, "epoch", 0)
    of = "" if isinstance(message, Hello | Stage | Arm | Disarm) else f" of rank {message.sender.rank_id}"
    return type(message).__name__ + (f" {chunk:#x}" if chunk else "") + (f" epoch {epoch}" if epoch else "") + of


def _cloned(machine: ChunkMachine) -> ChunkMachine:
    """The same machine once more: what it changes later it changes alone."""
    clone = copy.copy(machine)
    ledger = copy.copy(machine._ledger)
    ledger.live, ledger._flipped = dict(ledger.live), ledger._flipped.copy()
    clone._ledger = ledger
    for name in ("_history", "_trail"):
        if hasattr(machine, name):
            setattr(clone, name, copy.copy(getattr(machine, name)))
    return clone


def _copied(part: Part) -> Part:
    """The same, once more."""
    clone = copy.copy(part)
    for name, value in vars(part).items():
        if isinstance(value, set | dict):
            setattr(clone, name, value.copy())
    clone._trail = _trail(part.state)
    return clone


def _trail(state: RolloutState) -> Trail[RolloutState]:
    return Trail("a planner", TRANSITIONS, state)


def reached(state: State) -> str:
    """For the count of what was reached: what flipped, and how many ranks ended."""
    flipped = ", ".join(f"{chunk:#x}" for chunk in sorted(state.flipped)) or "nothing"
    ended = sum(rank.is_ended for rank in state.ranks)
    return f"{flipped} flipped" + (f", {ended} ended" if ended else "")
