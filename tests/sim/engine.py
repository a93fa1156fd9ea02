"""The engine of the simulation: ranks in lock-step with real chunk machines, votes, weights, deaths and lives.

A slot holds the *name* of what is in it (`model.weights_of`), staging holds what the copy read when it read it: weights that do
not follow the map are seen as what they are. Votes are read by the hook's own `read_ballot`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from agent.hook import ballot
from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from agent.hook.regroup import Agreement
from eplb_service.control import Address, FromRank, LiveLayer, Pulse, Registration, Stage, ToRank
from eplb_service.generation import LiveMap, as_loaded
from eplb_service.ids import ChunkId, GenerationNumber, GroupId, Incarnation, RankId
from tests.sim import forming
from tests.sim.checkers import Checkers
from tests.sim.forming import Forming, joining_machine
from tests.sim.model import GARBAGE, Shape, weights_of
from tests.sim.rank import Pace, Rank, Wires
from tests.sim.staging import CopyFaults, StagingWorker
from tests.sim.world import Clock, World

VOTE_TIMEOUT_S = 2.0
PULSE_S = 0.5


class Engine:
    """All ranks of one deployment, life after life."""

    def __init__(self, world: World, shape: Shape, checkers: Checkers, *, pace: Pace | None, copy_faults: CopyFaults) -> None:
        self.world, self.shape, self.checkers = world, shape, checkers
        self.wires: Wires | None = None
        self.life = 0
        self.is_running = False
        self.is_idle = False
        self.idle_until_s = 0.0
        self.dummy_until_s = 0.0
        self.weights_version = 1
        self.ranks: list[Rank] = []
        self.at_next_vote: list[Callable[[], None]] = []
        """What happens just after a rank casts an id."""
        self.map_to_boot: Callable[[], LiveMap] = lambda: as_loaded(shape.linear())
        self.base = shape
        self.group_id = 0
        self.can_reform = self.has_backups = False
        """Of an engine that forms its group again in place; its ranks have backups of all experts."""
        self.forming: Forming | None = None
        self.known: dict[RankId, Rank] = {}
        """Who had, or has, a rank id in this life: the last one."""
        self.at_next_forming: list[Callable[[], None]] = []
        """What happens while the group forms."""
        self._loss = self._born = 0
        self._pace, self._copy_faults = pace, copy_faults
        self._votes: dict[tuple[GroupId, int], dict[int, list[int]]] = {}
        self._reload_at = -1
        self._registrations: dict[Address, Registration] = {}

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def boot(self, live: LiveMap | None = None) -> None:
        """All ranks start anew from one map (rank 0 asked for it and broadcast it)."""
        live = self.map_to_boot() if live is None else live
        self.life += 1
        self.group_id += 1
        self.shape, self.forming = self.base, None
        self._loss += 1
        self.is_running, self.is_idle, self._reload_at = True, False, -1
        self._votes.clear()
        self.world.note("── the engine boots, life {}, map {}", self.life, f"{live.digest:#x}")
        self.ranks = [self._new_rank(position, live) for position in range(self.shape.num_ranks)]
        self.known = {rank.address.rank_id: rank for rank in self.ranks}
        self._registrations = {rank.address: self._registration(rank) for rank in self.ranks}
        self.checkers.booted(self)
        if self.wires is not None:
            self.wires.formed()
        if self._pace is not None:
            self.later(0.0, self._step)
            self.later(PULSE_S, self._pulse)

    def _new_rank(self, position: int, live: LiveMap) -> Rank:
        shape, rank_id = self.shape, self.shape.rank_ids[position]
        address = Address(rank_id, Incarnation(self.life * 1000 + position), GroupId(self.group_id))
        routed = {layer.layer: layer for layer in live.layers}
        first = position * shape.slots_per_rank
        slots = {
            layer: [weights_of(expert, self.weights_version) for expert in row.row[first : first + shape.slots_per_rank]]
            for layer, row in routed.items()
        }
        machine = ChunkMachine(address, shape.rank_shape(rank_id), routed, weights_version=self.weights_version, off_reason="")
        rank = Rank(shape, position, address, machine, self._new_clock(), slots, dict(routed))
        rank.weights_version = self.weights_version
        rank.worker = StagingWorker(self, rank, self._copy_faults)
        return rank

    def _registration(self, rank: Rank) -> Registration:
        return rank.shape.registration(rank.address, rank.weights_version, restores=self.has_backups)

    def _new_clock(self) -> Clock:
        if self._pace is None:
            return Clock(self.world)
        chance = self._pace.chance
        return Clock(self.world, offset_s=1000.0 * chance.random(), rate=chance.choice([0.9, 1.0, 1.0, 1.1]))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Something of this life only."""
        life = self.life
        self.world.after(delay_s, lambda: action() if life == self.life and self.is_running else None)

    def registration_of(self, address: Address) -> Registration | None:
        """What the rank says of itself now; None when that life is over."""
        return self._registrations.get(address) if self.is_running else None

    def die(self, rank: Rank, why: str) -> None:
        """A rank's process ends."""
        if rank.is_dead:
            return
        rank.is_dead = True
        self.world.note("── rank {} dies: {}", rank.address.rank_id, why)
        if self.wires is not None:
            self.wires.gone(rank.address)

    def end(self, why: str, restart_in_s: float) -> None:
        """The engine is of no use without one of its ranks: what they wait for never comes; then all start anew."""
        if not self.is_running:
            return
        self.is_running = False
        for rank in self.ranks:
            self.resume(rank)
            if not rank.is_dead and rank.machine.state is hook.ChunkState.VOTING:
                self.give_up_vote(rank)
                self.checkers.outcome_unknown(rank)
        self.world.note("── the engine ends: {}", why)
        for rank in self.ranks:
            self.die(rank, "the engine ends")
        self.world.after(restart_in_s, self.boot)

    # ── other groups, in place ───────────────────────────────────────────────────────────────────────────────────────────

    def lose(self, why: str, within_s: float, *, joining: int = 0) -> None:
        """The group is not whole, or not as it shall be: it forms again soon; where it cannot, all start anew."""
        if not self.can_reform:
            self.end(why, within_s)
        elif self.is_running:
            self._loss += 1
            loss = self._loss
            self.world.note("── the group is to form again: {}", why)
            self.later(within_s, lambda: self.form(joining) if loss == self._loss else None)

    def form(self, joining: int) -> None:
        """With all that live; ranks that hang are ended first."""
        chance = self._pace.chance if self._pace is not None else None
        for rank in self.ranks:
            if rank.is_stopped:
                self.die(rank, "it hangs, and the group forms without it")
        left = [rank for rank in self.ranks if not rank.is_dead and not rank.is_new]
        for rank in self.ranks:
            if rank.is_new:
                self.die(rank, "it never joined")
        if not left:
            self.end("no rank is left", 0.5)
            return
        missing = max(0, self.base.num_ranks - len(left))
        needed = -(-self.base.num_logical // self.base.slots_per_rank) - len(left)
        if chance is not None:
            joining += missing if self.world.is_calm or chance.random() < 0.5 else max(0, needed)
        free = [
            rank
            for rank in range(self.base.first_rank, self.base.first_rank + 8)
            if rank not in {r.address.rank_id for r in left}
        ]
        number = min(joining, len(free))
        ids = [RankId(rank) for rank in (free[:number] if chance is None else chance.sample(free, number))]
        if self.forming is not None:
            self.forming.is_over = True
        self.group_id += 1
        after = [rank.address.rank_id for rank in left] + ids
        if chance is not None:
            chance.shuffle(after)
        self.shape = self.base.of_group(tuple(after))
        new = {rank_id: self._joining_rank(rank_id) for rank_id in ids}
        members = {rank.address.rank_id: rank for rank in left} | new
        self.ranks = [members[rank_id] for rank_id in after]
        self.known |= members
        self._reload_at = -1
        self.is_idle = False
        self.world.note("── the group forms again: ranks {}", str(after))
        self.world.counts["formings"] += 1
        self.forming = Forming(self, self.ranks, frozenset(ids), self.shape, chance or random.Random(0))
        self.forming.begin()
        if self.at_next_forming:
            self.later(0.5, self.at_next_forming.pop())

    def _joining_rank(self, rank_id: RankId) -> Rank:
        self._born += 1
        address = Address(rank_id, Incarnation(self.life * 1000 + 100 + self._born), GroupId(self.group_id))
        machine = joining_machine(address, self.shape, self.weights_version)
        slots = {layer: [GARBAGE] * self.shape.slots_per_rank for layer in machine.live}
        position = self.shape.rank_ids.index(rank_id)
        rank = Rank(self.shape, position, address, machine, self._new_clock(), slots, dict(machine.live))
        rank.weights_version, rank.is_new = self.weights_version, True
        rank.worker = StagingWorker(self, rank, self._copy_faults)
        return rank

    def give_up_group(self, rank: Rank) -> None:
        """A rank leaves the group that was, as `Hook.reform` begins; weights that changed meanwhile are in its slots."""
        rank.cast = None
        self.handle(rank, hook.VotingOff("the vote group forms again"))
        if rank.weights_version != self.weights_version:
            self._reload(rank)
        self.handle(rank, hook.Boundary(max(rank.boundary, 0), rank.weights_version))
        self.handle(rank, hook.GroupEnded())

    def enter(self, rank: Rank, machine: ChunkMachine, agreement: Agreement) -> None:
        """A rank is of the new group: it writes its tables, registers and may step."""
        self.checkers.entered(self, rank, machine)
        self.checkers.goes_on(rank, forming.boundary_of(agreement, rank))
        self._registrations.pop(rank.address, None)
        rank.machine, rank.address, rank.shape = machine, machine.ledger.address, self.shape
        rank.position = self.shape.rank_ids.index(rank.address.rank_id)
        rank.routed = dict(machine.live)
        rank.map_changed()
        rank.boundary = forming.boundary_of(agreement, rank)
        rank.is_forming = rank.is_standing = rank.is_voter_off = rank.is_cut_off = rank.is_new = False
        rank.is_ready = True
        self._registrations[rank.address] = self._registration(rank)
        self.world.note("── rank {} is in group {}", rank.address.rank_id, rank.address.group_id)
        if self.wires is not None:
            self.wires.formed_again(rank)
        if not any(peer.is_forming for peer in self.ranks):
            self._formed()
        if self._pace is not None:
            self.later(0.0, self._step)

    def _formed(self) -> None:
        if self.forming is not None:
            self.forming.is_over, self.forming = True, None
        self.world.counts["groups formed again"] += 1
        self.checkers.formed_again(self)
        if not self.has_backups and any(self.checkers.lost.values()):
            self.later(3.0, partial(self._give_up_group_of, self.group_id))

    def _give_up_group_of(self, group: int) -> None:
        if group == self.group_id:
            self.end("experts are lost, and no rank has a backup", 0.5)

    def not_served(self, why: str) -> None:
        """The ranks agreed that no map is right for all of them."""
        self.world.counts["not served"] += 1
        self.end(why, 0.5)

    def stop(self, rank: Rank) -> None:
        """SIGSTOP: the process does nothing, and nobody is told."""
        rank.is_stopped = True
        self.world.note("── rank {} is stopped", rank.address.rank_id)

    def resume(self, rank: Rank) -> None:
        """SIGCONT: all that waited happens now."""
        if rank.is_stopped:
            rank.is_stopped = False
            self.world.note("── rank {} goes on", rank.address.rank_id)
            backlog, rank.backlog = rank.backlog, []
            for event in backlog:
                self.handle(rank, event)
            if self._pace is not None and not self.is_idle:
                self.later(0.0, self._step)

    def leave(self, rank: Rank) -> None:
        """Its engine closes: it takes part in nothing more, and says good-bye in the next vote."""
        rank.is_leaving = True
        self.world.note("── rank {} leaves", rank.address.rank_id)
        self.handle(rank, hook.VotingOff("the engine is closing"))

    def reload_weights(self) -> None:
        """Other weights, on all ranks before the same step."""
        if min(rank.boundary for rank in self.ranks) >= self._reload_at:
            self._reload_at = 1 + max(rank.boundary for rank in self.ranks)
            self.weights_version += 1
            self.world.note("── weights version {} from boundary {} on", self.weights_version, self._reload_at)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Let every rank pass its next boundary that may: nobody is more than one boundary ahead."""
        ranks, idle = self.ranks, self.world.now < self.idle_until_s
        for rank in ranks:
            if not self.is_running or rank not in self.ranks:
                return
            if rank.is_forming or rank.is_standing:
                continue
            if self.forming is not None and rank.boundary >= self.forming.first_boundary:
                continue  # its step waits for ranks that are not there yet
            least = min([peer.boundary for peer in ranks if not peer.is_forming])
            if idle and self.forming is None and all(peer.boundary == least for peer in ranks):
                self._go_idle()
                return
            if rank.is_ready and rank.boundary == least and not rank.is_stopped:
                rank.is_ready = False
                self.pass_boundary(rank)
                if not self.is_running:
                    return
                self.later(self._step_time_s(), partial(self._ready, rank))

    def _step_time_s(self) -> float:
        assert self._pace is not None
        share = 0.3 if self.world.now < self.dummy_until_s else 1.0
        return share * self._pace.step_s * (0.7 + 0.8 * self._pace.chance.random())

    def _ready(self, rank: Rank) -> None:
        rank.is_ready = True
        if not self.is_idle:
            self._step()

    def _go_idle(self) -> None:
        """No steps for a while; each rank notices when its own timer says so."""
        if self.is_idle or self._pace is None:
            return
        self.is_idle = True
        self.world.counts["idle spells"] += 1
        self.world.note("── the engine is idle")
        for rank in self.ranks:
            self.later(0.4 * self._pace.chance.random(), partial(self._notice_idle, rank))
        self.later(max(0.0, self.idle_until_s - self.world.now) + 0.001, self._wake)

    def _notice_idle(self, rank: Rank) -> None:
        if self.is_idle:
            self.handle(rank, hook.EngineIdle())
            self._say_pulse(rank)

    def _wake(self) -> None:
        self.is_idle = False
        for rank in self.ranks:
            self._say_pulse(rank)
        self._step()

    def pass_boundary(self, rank: Rank) -> None:
        """What a hook does before a step: see the last vote through, flip if it passed, cast the next."""
        rank.boundary += 1
        boundary = rank.boundary
        if boundary == self._reload_at:
            self._reload(rank)
        self.handle(rank, hook.Boundary(boundary, rank.weights_version))
        if boundary % self.shape.vote_period == 0:
            self._vote(rank, boundary)
        if not rank.is_dead and not rank.is_standing:
            self.checkers.stepped(rank)

    def _vote(self, rank: Rank, boundary: int) -> None:
        self.resolve_vote(rank)
        self._look_at_zero(rank, boundary - self.shape.vote_period)
        if rank.is_dead or rank.is_standing:
            return
        self.handle(rank, hook.FlipDue(boundary))
        if rank.is_leaving:
            self._take_part(rank, boundary, ballot.ballot(ballot.LEAVING, hook.NO_CHUNK))
            self.die(rank, "it left")
            if self._pace is not None:
                self.later(1.0, lambda: self.lose("a rank left", 0.5))
        elif not rank.is_voter_off:
            self.handle(rank, hook.VoteDue(boundary))

    def _reload(self, rank: Rank) -> None:
        """The engine writes every slot by the map that it routes by."""
        rank.weights_version = self.weights_version
        first = rank.position * self.shape.slots_per_rank
        for layer, live in rank.routed.items():
            experts = live.row[first : first + self.shape.slots_per_rank]
            rank.slots[layer] = [weights_of(expert, rank.weights_version) for expert in experts]
        self._registrations[rank.address] = self._registration(rank)

    # ── votes ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _cast(self, rank: Rank, boundary: int, chunk: int) -> None:
        if chunk:
            rank.cast, rank.is_cut_off = (boundary, chunk), False
            if self._pace is not None:
                self.later(VOTE_TIMEOUT_S, partial(self._time_out, rank, boundary))
        self._take_part(rank, boundary, ballot.ballot(boundary, ChunkId(chunk)))
        if chunk and self.at_next_vote:
            self.later(0.001, self.at_next_vote.pop())

    def _take_part(self, rank: Rank, boundary: int, values: list[int]) -> None:
        group = rank.address.group_id
        votes = self._votes.setdefault((group, boundary), {})
        votes[rank.position] = values
        if len(votes) < rank.shape.num_ranks:
            return
        self._votes.pop((group, boundary - 3 * self.shape.vote_period), None)
        if self._pace is not None:
            for peer in self.ranks:  # waiter threads may know it before the next vote
                if peer.cast is not None:
                    self.later(0.3 * self._pace.chance.random(), partial(self._waiter, peer, boundary))

    def _waiter(self, rank: Rank, boundary: int) -> None:
        """The waiter thread of a rank looks. A stopped peer made the ranks that go on disagree: some are told, some never."""
        assert self._pace is not None
        if rank.cast is None or rank.cast[0] != boundary:
            return
        if any(peer.is_stopped or peer.is_dead for peer in self.ranks) and self._pace.chance.random() < 0.5:
            rank.is_cut_off = True
        else:
            self.resolve_vote(rank)

    def _time_out(self, rank: Rank, boundary: int) -> None:
        if rank.cast is not None and rank.cast[0] == boundary:
            self.give_up_vote(rank)

    def give_up_vote(self, rank: Rank) -> None:
        """The wait for its vote failed: what peers saw is unknown to this rank."""
        rank.is_cut_off = True
        self.resolve_vote(rank)

    def resolve_vote(self, rank: Rank) -> None:
        """The vote that this rank cast for an id is known to it now, or never will be."""
        if rank.cast is None:
            return
        (boundary, chunk), rank.cast = rank.cast, None
        votes = self._votes.get((rank.address.group_id, boundary), {})
        if len(votes) < rank.shape.num_ranks and (
            self.forming is not None or any(peer.is_dead or peer.is_standing for peer in self.ranks)
        ):
            rank.is_cut_off = True  # whoever died or left before it voted leaves the others without an answer
        outcome, detail = hook.Outcome.UNKNOWN, "no answer in time"
        if len(votes) == rank.shape.num_ranks and not rank.is_cut_off:
            minimum = [min(values) for values in zip(*votes.values(), strict=True)]
            outcome, detail = ballot.read_ballot(minimum, boundary=boundary, chunk=ChunkId(chunk))
        if outcome in (hook.Outcome.UNKNOWN, hook.Outcome.DIVERGED):
            self._voter_off(rank, detail)
        self.handle(rank, hook.VoteResolved(ChunkId(chunk), outcome, detail))

    def _look_at_zero(self, rank: Rank, boundary: int) -> None:
        """A vote that was cast for nothing is looked at too: somebody may have left in it."""
        votes = self._votes.get((rank.address.group_id, boundary))
        if votes is not None and not rank.is_voter_off and len(votes) == rank.shape.num_ranks:
            low, negative_high = min(values[0] for values in votes.values()), min(values[1] for values in votes.values())
            if low != -negative_high:
                self._voter_off(rank, f"a rank left the vote group at boundary {boundary}")

    def _voter_off(self, rank: Rank, reason: str) -> None:
        if not rank.is_voter_off:
            rank.is_voter_off = True
            self.handle(rank, hook.VotingOff(reason))

    # ── messages and effects ─────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: ToRank) -> None:
        """A planner's message arrives at its rank (or at whoever has its id now)."""
        rank = self.known.get(message.to.rank_id)
        if self.is_running and rank is not None:
            self.checkers.heard(rank, message)
            self.handle(rank, hook.Received(message))

    def handle(self, rank: Rank, event: hook.Event) -> None:
        """An event of one rank, and all that follows from it at once."""
        if rank.is_dead:
            return
        if rank.is_stopped:
            rank.backlog.append(event)
            return
        for effect in rank.machine.handle(event, rank.clock.now()):
            self._run(rank, effect)

    def _run(self, rank: Rank, effect: hook.Effect) -> None:
        match effect:
            case hook.Send(message):
                self._say(rank, message)
            case hook.BeginStaging(stage, deadline):
                rank.worker.begin(stage, deadline)
            case hook.CancelStaging(chunk):
                rank.worker.cancel(chunk)
            case hook.ReleaseStaging():
                rank.worker.release()
            case hook.CastVote(boundary, chunk):
                self._cast(rank, boundary, chunk)
            case hook.Flip(stage, boundary):
                self._flip(rank, stage, boundary)
            case hook.FailStop(reason):
                self._fail_stop(rank, reason)

    def _say(self, rank: Rank, message: FromRank) -> None:
        if not isinstance(message, Pulse):
            self.world.note("rank {}: {}", rank.address.rank_id, message)
            self.checkers.said(rank, message)
        if self.wires is not None:
            self.wires.say(rank, message)

    def _fail_stop(self, rank: Rank, reason: str) -> None:
        self.world.counts["ranks that stopped themselves"] += 1
        reloaded = rank.boundary - self._reload_at <= self.shape.vote_period and self._reload_at >= 0
        self.checkers.fail_stopped(rank, excused=rank.is_cut_off or reloaded)
        if self.can_reform:
            rank.is_standing = True
            self.world.note("── rank {} runs no further step: {}", rank.address.rank_id, reason)
        else:
            self.die(rank, reason)
        if self._pace is not None and not rank.is_forming:
            self.lose("a rank stands still", self._pace.chance.uniform(0.2, 2.0))

    def _flip(self, rank: Rank, stage: Stage, boundary: int) -> None:
        before = dict(rank.routed)
        for (layer, slot), held in rank.worker.take().items():
            rank.slots[layer][slot] = held
        for change in stage.layers:
            rank.routed[change.layer] = LiveLayer(
                layer=change.layer,
                generation=GenerationNumber(stage.generation),
                digest=change.new_digest,
                row=change.new_row,
                shares=change.new_shares,
            )
        rank.map_changed()
        self.world.note("rank {} flips {} at boundary {}", rank.address.rank_id, f"{stage.chunk_id:#x}", boundary)
        self.checkers.flipped(rank, stage, before)
        done = hook.FlipDone(stage.chunk_id, 0.001)
        if self._pace is None:
            self.handle(rank, done)
        else:
            self.later(0.2 * self._pace.chance.random(), lambda: self.handle(rank, done))

    # ── signs of life ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pulse(self) -> None:
        self.tick()
        self.later(PULSE_S, self._pulse)

    def tick(self) -> None:
        """Every rank's link thread looks at its timers."""
        for rank in self.ranks:
            self._say_pulse(rank)
            if self.is_running:
                self.handle(rank, hook.Tick())

    def _say_pulse(self, rank: Rank) -> None:
        if rank.is_dead or rank.is_stopped:
            return
        reason = rank.machine.off_reason
        self._say(
            rank,
            Pulse(
                sender=rank.address,
                boundary=max(0, rank.boundary),
                idle=self.is_idle,
                voting=not reason,
                off_reason=reason,
                windows_dropped=0,
                weights_version=rank.machine.ledger.weights_version,
            ),
        )
