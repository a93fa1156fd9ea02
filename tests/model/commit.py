"""Every interleaving of the commit of chunks, over the real machines of ranks and planners.

Ranks are real `ChunkMachine`s, planners real `OpenChunk`s and `LiveReplies`, votes are read by the hook's `read_ballot`. What
lies between them is as hostile as can be: a message that was ever sent may arrive at any time, any number of times, in any
order, or never; deadlines may pass at any time; a planner may stop acting anywhere (it is then a zombie, or dead).

Ranks run in lock-step: one boundary a step, at most one of skew, a vote at every boundary, read at the next one or earlier by a
waiter. Boundaries are counted relative to the slowest rank: nothing in the machines depends on their value, so the search ends.

What need not be told apart is not: see `split` (a state that has more at its disposal stands for those with less) and
`_answered` (what ranks only answer is said at once, what can change nothing any more is dropped). `is_plain` does without both.

Bounds: number of ranks, of chunks that each planner may open, and of each kind of fault.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

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
from tests.model.explore import WrongStateError
from tests.model.interned import Interned
from tests.model.states import (
    Bounds,
    Part,
    Planner,
    Rank,
    State,
    bits,
    cloned,
    copied,
    fault,
    machine_key,
    message_key,
    part_key,
    trail,
    with_planner,
    with_rank,
    words,
)
from tests.sim.model import LAYERS, Shape
from tests.sim.planner import make_generation

LAYER = LAYERS[0]
LATE_S = 1e9
SETTINGS = RolloutSettings()
_CLOSES_NOTHING = (RefusalCode.BUSY, RefusalCode.STALE_EPOCH, RefusalCode.CLOSED)
_VOTES = (hook.ChunkState.ARMED, hook.ChunkState.VOTING, hook.ChunkState.COMMITTED, hook.ChunkState.FLIPPING)
_COPYING = (hook.ChunkState.STAGING, hook.ChunkState.QUIESCING)


class CommitModel:
    """The successor function of one bounded model. What a machine does in a state is computed once, by the machine itself.

    is_plain: every state is told apart from every other.
    """

    def __init__(self, bounds: Bounds, *, is_plain: bool = False) -> None:
        self.bounds, self.is_plain = bounds, is_plain
        number = bounds.ranks
        self._shape = shape = Shape(num_ranks=number, slots_per_rank=2, num_logical=2 * number - 1, vote_period=1)
        self._addresses = [Address(rank, Incarnation(1), GroupId(1)) for rank in shape.rank_ids]
        self._group = Group.of(tuple(shape.registration(address, 1) for address in self._addresses))
        self._machines: Interned[ChunkMachine] = Interned(machine_key)
        self._parts: Interned[Part] = Interned(part_key)
        self._maps: Interned[LiveMap] = Interned(lambda live: (live.digest, live.generations))
        self._messages: Interned[ToRank | FromRank] = Interned(message_key)
        self._to_rank = [0] * number
        self._from_ranks = 0
        self._machine_steps: dict[tuple[int, Hashable], tuple[int, tuple[hook.Effect, ...]]] = {}
        self._part_steps: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._uses: dict[tuple[Planner, int], bool] = {}

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

    def split(self, state: State) -> tuple[Hashable, int]:
        """What a state is, and as bits what it has to its disposal: the more bits, the more may happen and is looked at.

        Messages that may arrive, faults that are left, and what was said or done that must not be contradicted any more.
        """
        if self.is_plain:
            return state, 0
        bounds, at, has = self.bounds, 0, 0
        for number, most in zip(state.faults, (bounds.expiries, bounds.copy_failures, bounds.lost_votes), strict=True):
            has |= ((1 << most - number) - 1) << at
            at += most
        for rank in state.ranks:
            has |= ((1 << rank.told) - 1) << at
            at += 2
        for chunks in (state.flipped, state.never):
            for chunk in chunks:
                has |= 1 << at + (chunk_epoch(ChunkId(chunk)) - 1) * bounds.chunks[0] + (chunk & 0xFF) - 1
            at += sum(bounds.chunks)
        core = (tuple(rank._replace(told=0) for rank in state.ranks), state.planners, state.vote, state.casts)
        return core, has | state.sent << at

    def machine(self, rank: Rank) -> ChunkMachine:
        """The machine of a rank; to be looked at only."""
        return self._machines[rank.machine]

    # ── what may happen ──────────────────────────────────────────────────────────────────────────────────────────────────

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything that may happen next, with all that costs nothing. Raises WrongStateError when an invariant breaks."""
        for label, following in self._single_steps(state):
            yield label, self._swept(following) if self.is_plain else self._answered(following)

    def _answered(self, state: State) -> State:
        """What ranks only answer, and stay as they are, is said at once: whoever can hear more can do more.

        Then what can change nothing any more is left out: messages that are over, votes that nobody will look at.
        """
        for position, rank in enumerate(state.ranks):
            over = 0
            for bit in bits(state.sent & self._to_rank[position]):
                if rank.is_ended or self._is_over(rank.machine, bit):
                    over |= 1 << bit
                if not rank.is_ended and self._only_answers(rank.machine, bit):
                    state = self._fed(state, position, bit)
            state = state._replace(sent=state.sent & ~over)
        if any(state.vote) and not any(rank.cast for rank in state.ranks):
            state = state._replace(vote=(0,) * self.bounds.ranks)
        return self._swept(state)

    def _only_answers(self, number: int, bit: int) -> bool:
        """Whether a rank's machine stays as it is when it hears a message."""
        following, effects = self._step_of(number, bit)
        return following == number and all(isinstance(effect, hook.Send) for effect in effects)

    def _is_over(self, number: int, bit: int) -> bool:
        """Whether a message can change nothing on a rank any more, now that it is answered."""
        ledger, message = self._machines[number].ledger, self._messages[bit + 1]
        if isinstance(message, Hello):
            return message.epoch < ledger.epoch_seen
        chunk = message.chunk_id  # type: ignore[union-attr]
        if isinstance(message, Disarm):
            return message.epoch < ledger.epoch_seen or chunk <= ledger.closed_id
        return ledger.is_stale(chunk) or chunk <= ledger.closed_id

    def _single_steps(self, state: State) -> Iterator[tuple[str, State]]:
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
        for bit in bits(state.sent & self._to_rank[position]):
            following = self._fed(state, position, bit)
            if following != state:
                yield f"rank {position} hears {words(self._messages[bit + 1])}", following
        if machine.state in _COPYING:
            yield f"rank {position} has copied all", self._fed(state, position, "copied")
            if faults[1] < bounds.copy_failures:
                yield f"the copy on rank {position} fails", self._fed(fault(state, 1), position, "copy failed")
        if machine._deadline < LATE_S and faults[0] < bounds.expiries:
            following = self._fed(state, position, "late")
            if following != state:
                yield f"a deadline of rank {position} passes", following._replace(faults=fault(state, 0).faults)
        if machine.state is hook.ChunkState.COMMITTED:
            following = self._fed(state, position, "idle")
            if following != state:
                yield f"rank {position} is idle", following
        if rank.cast:
            if not rank.is_ahead:
                yield f"rank {position} learns how the vote ended", self._resolved(state, position)
            if faults[2] < bounds.lost_votes:
                lost = with_rank(fault(state, 2), position, rank._replace(cast=0))
                yield f"rank {position} loses the vote", self._fed(lost, position, hook.Outcome.UNKNOWN)

    def _may_vote(self, state: State) -> bool:
        """Whether a boundary changes anything: as long as no rank is, or can be, armed, all cast 0 and stay where they are."""
        machines = [self._machines[rank.machine] for rank in state.ranks]
        if any(rank.is_ahead or rank.cast for rank in state.ranks) or any(machine.state in _VOTES for machine in machines):
            return True
        for bit in bits(state.sent & sum(self._to_rank)):
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
            for bit in bits(state.sent & self._from_ranks):
                if isinstance(self._messages[bit + 1], Staged):
                    staged.append(bit)
                    continue
                following = self._told(state, which, bit)
                if following is not None and following != state:
                    yield f"{name} hears {words(self._messages[bit + 1])}", following
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
        number, effects = self._step_of(rank.machine, event)
        was = self._machines[rank.machine]
        staged = was.open_id if event == "copied" and was.state is hook.ChunkState.STAGING else rank.staged
        state = with_rank(state, position, rank._replace(machine=number, staged=staged))
        for effect in effects:
            state = self._run(state, position, effect)
        return state

    def _step_of(self, number: int, event: Hashable) -> tuple[int, tuple[hook.Effect, ...]]:
        """What a rank's machine becomes by an event, and its effects."""
        key = (number, event)
        known = self._machine_steps.get(key)
        if known is None:
            machine = cloned(self._machines[number])
            effects = tuple(machine.handle(self._event(event, machine), LATE_S if event == "late" else 0.0))
            known = self._machine_steps[key] = (self._machines.number(machine), effects)
        return known

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
                return with_rank(state, position, rank._replace(staged=0))
            case hook.CastVote(_, chunk):
                casts = (*state.casts[:position], int(chunk), *state.casts[position + 1 :])
                return with_rank(state, position, rank._replace(cast=int(chunk)))._replace(casts=casts)
            case hook.Flip(stage, _):
                return self._flipped(state, position, stage)
            case hook.FailStop():
                return with_rank(state, position, rank._replace(is_ended=True))
        return state

    def _said(self, state: State, position: int, message: FromRank) -> State:
        if isinstance(message, Disarmed) or (isinstance(message, Refused) and message.code not in _CLOSES_NOTHING):
            if message.chunk_id in state.flipped:
                raise WrongStateError(f"rank {position} says {words(message)}, and it flipped")
            state = state._replace(never=state.never | {message.chunk_id})
        if isinstance(message, Live) and message.epoch == message.epoch_seen:
            rank = state.ranks[position]
            state = with_rank(state, position, rank._replace(told=max(rank.told, message.epoch)))
        return self._send(state, message)

    def _flipped(self, state: State, position: int, stage: Stage) -> State:
        rank, chunk = state.ranks[position], stage.chunk_id
        if rank.staged != chunk:
            raise WrongStateError(f"invariant 2: rank {position} flips {chunk:#x} and holds {rank.staged:#x}")
        if chunk in state.never:
            raise WrongStateError(f"rank {position} flips {chunk:#x}, and a rank said that it never will")
        if chunk_epoch(chunk) < rank.told:
            raise WrongStateError(f"rank {position} flips {chunk:#x} after it told epoch {rank.told} what is live")
        state = with_rank(state, position, rank._replace(routed=stage.layers[0].new_digest))
        return self._fed(state._replace(flipped=state.flipped | {chunk}), position, "flip done")

    def _resolved(self, state: State, position: int) -> State:
        """The last whole vote is known to a rank."""
        rank = state.ranks[position]
        minimum = [min(values) for values in zip(*(ballot.ballot(0, ChunkId(cast)) for cast in state.vote), strict=True)]
        outcome, _ = ballot.read_ballot(minimum, boundary=0, chunk=ChunkId(rank.cast))
        return self._fed(with_rank(state, position, rank._replace(cast=0)), position, outcome)

    def _passed(self, state: State, position: int) -> State:
        """A rank passes its next boundary, as `Hook._commit` does; all that are there must route by one map."""
        state = self._fed(state, position, "boundary")
        if state.ranks[position].cast:
            state = self._resolved(state, position)
        state = self._fed(state, position, "flip due")
        state = self._fed(state, position, "vote due")
        state = with_rank(state, position, state.ranks[position]._replace(is_ahead=True))
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
            epoch=Epoch(2), group=self._group, settings=SETTINGS, last_opened=hook.NO_CHUNK, trail=trail(RolloutState.WAITING)
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
            trail=trail(RolloutState.BACKING_OFF),
        )
        sent = self._mask(chunk.open(0.0))
        planner = planner._replace(opened=opened, part=self._parts.number(chunk))
        return with_planner(state, which, planner)._replace(sent=state.sent | sent)

    def _told(self, state: State, which: int, bit: int) -> State | None:
        """The state after a planner hears a message, or (bit -1) after its deadline; None when that says nothing."""
        planner = state.planners[which]
        known = self._told_part(planner, bit)
        if known is None:
            return None
        number, sent = known
        state = with_planner(state, which, planner._replace(part=number))._replace(sent=state.sent | sent)
        return self._found_out(state, which, self._parts[number])

    def _told_part(self, planner: Planner, bit: int) -> tuple[int, int] | None:
        """What becomes of a planner's part by a message, and what it sends; None when it says nothing to it."""
        key = (planner.part, bit)
        if key not in self._part_steps:
            part = copied(self._parts[planner.part])
            effects = self._effects(part, planner.epoch, bit)
            self._part_steps[key] = None if effects is None else (self._parts.number(part), self._mask(effects))
        return self._part_steps[key]

    def _told_all(self, state: State, which: int, staged: list[int]) -> State:
        """Staged says nothing before it was heard of all: until then hearing it is as good as not."""
        for bit in staged:
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
                return with_planner(state, which, planner._replace(part=0))
        return state

    def _believe(self, state: State, which: int, live: LiveMap) -> State:
        """What a leader takes for live is what every rank routes by, unless ranks obey another one by now."""
        planner = state.planners[which]
        machines = [self._machines[rank.machine] for rank in state.ranks]
        if all(machine.ledger.epoch_seen <= planner.epoch for machine in machines):
            for position, rank in enumerate(state.ranks):
                if rank.routed != live.row_digests[LAYER]:
                    raise WrongStateError(f"planner {which + 1} takes another map for live than rank {position} routes by")
        return with_planner(state, which, planner._replace(part=0, live=self._maps.number(live)))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, state: State, message: FromRank) -> State:
        """A rank says something; what no planner can use any more is as good as lost."""
        if isinstance(message, Armed):
            return state
        bit = self._bit(message)
        if state.sent & bit or not any(self._can_use(planner, bit.bit_length() - 1) for planner in state.planners):
            return state
        return state._replace(sent=state.sent | bit)

    def _can_use(self, planner: Planner, bit: int) -> bool:
        """Whether a planner may still learn something from a message of a rank."""
        key = (planner, bit)
        if key not in self._uses:
            self._uses[key] = self._finds_use(planner, bit)
        return self._uses[key]

    def _finds_use(self, planner: Planner, bit: int) -> bool:
        message = self._messages[bit + 1]
        part = self._parts[planner.part] if planner.part else None
        if isinstance(message, Live):
            if message.epoch != planner.epoch or message.epoch_seen > planner.epoch:
                return False  # of another leader's asking, or it ends this one: as if it never acted
            if isinstance(part, LiveReplies):
                return True
            if part is None:
                next_id = chunk_id(planner.epoch, planner.opened + 1)
                return planner.opened < self.bounds.chunks[planner.epoch - 1] and message.closed_id >= next_id
            if max(message.closed_id, message.flipped_id) < part.chunk_id:
                return False
        elif not isinstance(part, OpenChunk) or part.chunk_id != message.chunk_id:  # type: ignore[union-attr]
            return False
        if part.state is RolloutState.STAGING:
            return True
        told = self._told_part(planner, bit)  # from here on, what says nothing now says nothing later
        return told is not None and told != (planner.part, 0)

    def _swept(self, state: State) -> State:
        """What ranks said, without what is of no use to any planner any more."""
        sent = state.sent
        for bit in bits(sent & self._from_ranks):
            if not any(self._can_use(planner, bit) for planner in state.planners):
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
