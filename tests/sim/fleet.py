"""The engine of the simulation: ranks in lock-step with real chunk machines, symbolic weights, votes, restarts.

A slot holds the *name* of an expert, staging holds what the copy read when it read it: weights that do not follow the map
are seen as what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from agent.hook import chunk_events as hook
from agent.hook.chunk import ChunkMachine
from agent.hook.stage_check import LayerShape, RankShape
from eplb_service.control import (
    Address,
    Disarm,
    Disarmed,
    Flipped,
    FromRank,
    Hello,
    LayerInfo,
    LinkBytes,
    LiveLayer,
    ModelInfo,
    Pulse,
    RefusalCode,
    Registration,
    Stage,
    ToRank,
)
from eplb_service.generation import LiveMap, as_loaded, live_digest
from eplb_service.ids import DeploymentId, GenerationNumber, GroupId, Incarnation, LayerRef, Phase, RankId, chunk_epoch
from eplb_service.placement import Int32Array, Placement, Table
from eplb_service.replica_shares import Float32Array, as_array
from tests.sim.world import World

DEPLOYMENT = DeploymentId("sim")
LAYERS = tuple(LayerRef("m", layer_id) for layer_id in (1, 2, 3))
EXPERT_BYTES = 10


@dataclass(slots=True)
class Rank:
    """One rank: its machine, and what its device really holds."""

    address: Address
    machine: ChunkMachine
    slots: dict[LayerRef, list[int]]
    routed: dict[LayerRef, LiveLayer]
    boundary: int = -1
    is_ready: bool = True
    is_dead: bool = False
    cast: dict[int, int] = field(default_factory=dict)
    staging: dict[int, dict[tuple[LayerRef, int], int]] = field(default_factory=dict)
    copying: set[int] = field(default_factory=set)

    digest: int = 0

    def __post_init__(self) -> None:
        self.map_changed()

    def map_changed(self) -> None:
        self.digest = live_digest({layer: live.digest for layer, live in self.routed.items()})


class Fleet:
    """All ranks of one deployment. `listeners`: where ranks' messages go (every planner that is there)."""

    def __init__(self, world: World) -> None:
        chance = world.random
        self.world = world
        self.num_ranks = chance.choice([2, 3, 3, 4])
        self.slots_per_rank = chance.choice([2, 3])
        self.num_logical = self.num_ranks * self.slots_per_rank - chance.choice([1, 2])
        self.vote_period = chance.choice([1, 2, 3])
        self.step_s = chance.choice([0.05, 0.15])
        self.is_weighted = world.seed % 2 == 1
        first = chance.choice([0, 4])
        self.rank_ids = tuple(RankId(first + position) for position in range(self.num_ranks))
        self.listeners: list[Callable[[FromRank], None]] = []
        self.on_gone: list[Callable[[Address], None]] = []
        self.on_formed: list[Callable[[], None]] = []
        self.life = 0
        self.epoch_seen = 0
        self.votes: dict[tuple[int, int], dict[RankId, int]] = {}
        self.is_running = False
        self.idle_until_s = 0.0
        self.is_idle = False
        self.weights_version = 1
        self.closed: set[tuple[int, int]] = set()
        self.flipped: set[tuple[int, int]] = set()
        self.generation_rows: dict[tuple[int, LayerRef], int] = {}
        self.ranks: list[Rank] = []
        self.boot(as_loaded(self.linear()))
        world.after(0.5, self._pulse)

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def linear(self) -> Placement:
        table = Table.linear(
            model="m",
            layer_ids=[layer.layer_id for layer in LAYERS],
            num_logical=self.num_logical,
            rank_ids=self.rank_ids,
            slots_per_rank=self.slots_per_rank,
        )
        return Placement((table.with_even_shares() if self.is_weighted else table,))

    def random_target(self, live: Placement) -> Placement:
        """Some layers get another covering row; under weighted dispatch other shares too, or those alone."""
        chance = self.world.random
        rows, shares = {}, {}
        for layer in chance.sample(LAYERS, chance.randint(1, len(LAYERS))):
            if self.is_weighted and chance.random() < 0.4:
                shares[layer] = self._random_shares(live.row(layer))
                continue
            spare = self.num_ranks * self.slots_per_rank - self.num_logical
            row = [*range(self.num_logical), *(chance.randint(-1, self.num_logical - 1) for _ in range(spare))]
            chance.shuffle(row)
            rows[layer] = np.array(row, np.int32)
            if self.is_weighted:
                shares[layer] = self._random_shares(rows[layer])
        return live.with_rows(rows, shares)

    def _random_shares(self, row: Int32Array) -> Float32Array:
        """Each expert's tokens split at random over its slots. Shape (P,)."""
        weights = np.array([self.world.random.randint(1, 4) for _ in row], np.float64)
        totals = np.bincount(row[row >= 0], weights=weights[row >= 0], minlength=self.num_logical)
        shares: Float32Array = np.where(row >= 0, weights / totals[row], 0.0).astype(np.float32)
        return shares

    def registrations(self) -> list[Registration]:
        layers = tuple(
            LayerInfo(
                layer_id=layer.layer_id, num_logical=self.num_logical, slots=self.slots_per_rank, expert_bytes=EXPERT_BYTES
            )
            for layer in LAYERS
        )
        return [
            Registration(
                deployment=DEPLOYMENT,
                address=rank.address,
                node=f"node{position % 2}",
                group_rank_ids=self.rank_ids,
                phase=Phase.DECODE,
                stage=0,
                models=(ModelInfo(name="m", digest="d", manifest_digest="t", layers=layers),),
                capacity=1.0,
                dispatch="weighted" if self.is_weighted else "even",
                vote_period=self.vote_period,
                window_steps=8,
                sub_windows=1,
                staging_bytes=self.staging_bytes,
                replica_table_width=self.num_ranks * self.slots_per_rank,
                weights_version=self.weights_version,
            )
            for position, rank in enumerate(self.ranks)
        ]

    @property
    def staging_bytes(self) -> int:
        return self.slots_per_rank * EXPERT_BYTES  # every layer fits alone, two seldom do

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def boot(self, live: LiveMap) -> None:
        """All ranks start anew from one map (rank 0 asked for it and broadcast it)."""
        self.life += 1
        self.epoch_seen = 0
        self.is_running = True
        self.is_idle = False
        self.world.note(f"fleet boots, life {self.life}, map {live.digest:#x}")
        shapes = {
            layer: LayerShape(num_logical=self.num_logical, slots=self.slots_per_rank, expert_bytes=EXPERT_BYTES)
            for layer in LAYERS
        }
        self.ranks = []
        for position, rank_id in enumerate(self.rank_ids):
            address = Address(rank_id, Incarnation(self.life * 100 + position), GroupId(self.life))
            routed = {layer.layer: layer for layer in live.layers}
            first = position * self.slots_per_rank
            slots = {layer: list(row.row[first : first + self.slots_per_rank]) for layer, row in routed.items()}
            shape = RankShape(
                rank_id=rank_id,
                group_rank_ids=self.rank_ids,
                layers=shapes,
                replica_table_width=self.num_ranks * self.slots_per_rank,
                staging_bytes=self.staging_bytes,
                weighted=self.is_weighted,
            )
            machine = ChunkMachine(address, shape, routed, weights_version=self.weights_version, off_reason="")
            self.ranks.append(Rank(address, machine, slots, routed))
        for formed in self.on_formed:
            formed()
        self._later(0.0, self._step)

    def crash(self) -> None:
        """A rank dies. A vote that it did not take part in stays unresolved; then the engine is started anew."""
        if not self.is_running:
            return
        self.world.counts["rank crashes"] += 1
        dead = self.world.random.choice(self.ranks)
        dead.is_dead = True
        self.is_running = False
        self.world.note(f"rank {dead.address.rank_id} dies")
        for rank in self.ranks:
            if rank.machine.state is hook.ChunkState.VOTING and not rank.is_dead:
                lost = hook.VoteResolved(rank.machine.open_id, hook.Outcome.UNKNOWN, "a peer died")
                effects = rank.machine.handle(lost, self.world.now)
                stopped = any(isinstance(effect, hook.FailStop) for effect in effects)
                self.world.require(stopped, "a rank runs on although the outcome of its vote is unknown")
        for gone in self.on_gone:
            gone(dead.address)
        self.world.after(self.world.random.uniform(0.5, 3.0), lambda: self.boot(self._map_to_boot()))

    def _map_to_boot(self) -> LiveMap:
        """What a planner or the store would answer; or nobody does, and all load linear."""
        if self.world.chance(0.5):
            return as_loaded(self.linear())
        survivor = next(rank for rank in self.ranks if not rank.is_dead)
        layers = [survivor.routed[layer] for layer in LAYERS]
        rows = {layer.layer: np.array(layer.row, np.int32) for layer in layers}
        shares = {layer.layer: given for layer in layers if (given := as_array(layer.shares)) is not None}
        return LiveMap(self.linear().with_rows(rows, shares), tuple(layer.generation for layer in layers))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Something of this life only."""
        life = self.life
        self.world.after(delay_s, lambda: action() if life == self.life and self.is_running else None)

    def forget_generations(self, known_elsewhere: int) -> None:
        """Numbers that nobody remembers any more (store, planners and ranks all lost them) may be given again."""
        here = max(layer.generation for rank in self.ranks for layer in rank.routed.values())
        known = max(here, known_elsewhere)
        self.generation_rows = {key: digest for key, digest in self.generation_rows.items() if key[0] <= known}

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        """Let every rank pass its next boundary that may: nobody is more than one boundary ahead."""
        for rank in self.ranks:
            least = min([peer.boundary for peer in self.ranks])
            if self.world.now < self.idle_until_s and all(peer.boundary == least for peer in self.ranks):
                self._go_idle()
                return
            if rank.is_ready and rank.boundary == least:
                rank.is_ready = False
                self._pass_boundary(rank)
                if not self.is_running:
                    return
                self._later(self.step_s * self.world.random.uniform(0.7, 1.5), partial(self._ready, rank))

    def _ready(self, rank: Rank) -> None:
        rank.is_ready = True
        self._step()

    def _go_idle(self) -> None:
        if not self.is_idle:
            self.is_idle = True
            self.world.counts["idle spells"] += 1
            self.world.note("engine idle")
            for rank in self.ranks:
                self._handle(rank, hook.EngineIdle())
            self._pulse_now()
            self._later(max(0.0, self.idle_until_s - self.world.now) + 0.001, self._wake)

    def _wake(self) -> None:
        self.is_idle = False
        self._pulse_now()
        self._step()

    def _pass_boundary(self, rank: Rank) -> None:
        rank.boundary += 1
        boundary = rank.boundary
        self._handle(rank, hook.Boundary(boundary, self.weights_version))
        if boundary % self.vote_period == 0:
            self._resolve(rank, boundary - self.vote_period)
            self._handle(rank, hook.FlipDue(boundary))
            self._handle(rank, hook.VoteDue(boundary))
        ahead = [peer for peer in self.ranks if peer.boundary == boundary]
        maps = {peer.digest for peer in ahead}
        self.world.require(len(maps) == 1, f"invariant 1: step {boundary} is routed by {len(maps)} different maps")

    def _resolve(self, rank: Rank, boundary: int) -> None:
        """The vote cast at a boundary is known to this rank now."""
        if not rank.cast.pop(boundary, 0):
            return
        cast = rank.machine.open_id
        votes = self.votes[self.life, boundary]
        passed = len(votes) == self.num_ranks and set(votes.values()) == {cast}
        outcome = hook.Outcome.PASSED if passed else hook.Outcome.FAILED
        self._handle(rank, hook.VoteResolved(cast, outcome))

    # ── messages and effects ─────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: ToRank) -> None:
        """A planner's message arrives at its rank (or at whoever has its id now)."""
        if self.is_running:
            epoch = message.epoch if isinstance(message, Hello | Disarm) else chunk_epoch(message.chunk_id)
            rank = self.ranks[self.rank_ids.index(message.to.rank_id)]
            if rank.address == message.to:  # the machine itself drops the others
                self.epoch_seen = max(self.epoch_seen, epoch)
            self._handle(rank, hook.Received(message))

    def tick(self) -> None:
        for rank in self.ranks:
            if self.is_running:
                self._handle(rank, hook.Tick())

    def _handle(self, rank: Rank, event: hook.Event) -> None:
        if rank.is_dead:
            return
        for effect in rank.machine.handle(event, self.world.now):
            self._run(rank, effect)

    def _run(self, rank: Rank, effect: hook.Effect) -> None:
        match effect:
            case hook.Send(message):
                self._say(rank, message)
            case hook.BeginStaging(stage, _):
                self._begin_copy(rank, stage)
            case hook.CancelStaging(chunk):
                self._later(self.world.random.uniform(0.0, 0.5), lambda: self._end_copy(rank, chunk, None, "cancelled"))
            case hook.ReleaseStaging(chunk):
                rank.staging.pop(chunk, None)
            case hook.CastVote(boundary, chunk):
                self._cast(rank, boundary, chunk)
            case hook.Flip(stage, boundary):
                self._flip(rank, stage, boundary)
            case hook.FailStop(reason):
                self.world.require(False, f"fail-stop without a crash: {reason}")

    def _say(self, rank: Rank, message: FromRank) -> None:
        if not isinstance(message, Pulse):
            self.world.note(f"A{rank.address.rank_id} → {_short(message)}")
        if isinstance(message, Disarmed):
            self.closed.add((self.life, message.chunk_id))
            self._check_proof(message.chunk_id)
        if isinstance(message, Flipped):
            self.world.counts["flips of ranks"] += 1
        for listener in self.listeners:
            self.world.transmit(partial(listener, message))

    def _check_proof(self, chunk: int) -> None:
        both = self.closed & self.flipped
        self.world.require((self.life, chunk) not in both, f"chunk {chunk:#x} was answered Disarmed and flipped")

    def _begin_copy(self, rank: Rank, stage: Stage) -> None:
        """Copies read their sources at times of their own."""
        chunk = stage.chunk_id
        rank.copying.add(chunk)
        rank.staging[chunk] = {}
        end_s = self.world.random.uniform(0.02, 0.6)
        if not self.world.is_calm and self.world.chance(0.1):
            end_s = self.world.random.uniform(0.5, 5.0)
        for copy in stage.copies:
            if copy.target_rank == rank.address.rank_id:
                source = self.ranks[self.rank_ids.index(copy.source_rank)]

                def read(copy=copy, source=source) -> None:  # type: ignore[no-untyped-def]
                    if chunk in rank.copying:
                        rank.staging[chunk][copy.layer, copy.target_slot] = source.slots[copy.layer][copy.source_slot]

                self._later(end_s * self.world.random.random(), read)
        fails = not self.world.is_calm and self.world.chance(0.08)
        self._later(end_s, lambda: self._end_copy(rank, chunk, stage, "a peer did not answer" if fails else ""))

    def _end_copy(self, rank: Rank, chunk: int, stage: Stage | None, failure: str) -> None:
        if chunk not in rank.copying:
            return
        rank.copying.discard(chunk)
        if failure or stage is None:
            self._handle(rank, hook.StagingFailed(chunk, RefusalCode.TRANSFER, failure))  # type: ignore[arg-type]
        else:
            self._handle(rank, hook.StagingDone(stage.chunk_id, 0.1, LinkBytes()))

    def _cast(self, rank: Rank, boundary: int, chunk: int) -> None:
        votes = self.votes.setdefault((self.life, boundary), {})
        votes[rank.address.rank_id] = chunk
        rank.cast[boundary] = chunk
        if len(votes) == self.num_ranks:  # waiter threads may know it before the next vote
            self.votes.pop((self.life, boundary - 3 * self.vote_period), None)
            for peer in self.ranks:
                self._later(self.world.random.uniform(0.0, 0.3), partial(self._resolve, peer, boundary))

    def _flip(self, rank: Rank, stage: Stage, boundary: int) -> None:
        self.flipped.add((self.life, stage.chunk_id))
        self._check_proof(stage.chunk_id)
        staged = rank.staging[stage.chunk_id]
        for (layer, slot), expert in staged.items():
            rank.slots[layer][slot] = expert
        first = self.rank_ids.index(rank.address.rank_id) * self.slots_per_rank
        for change in stage.layers:
            live = rank.routed[change.layer]
            before = live.generation
            if change.new_row == live.row and change.new_shares != live.shares:
                self.world.counts["shares alone flipped"] += 1
            self.world.require(
                stage.generation > before, f"invariant 4: layer {change.layer} goes back from {before} to {stage.generation}"
            )
            known = self.generation_rows.setdefault((stage.generation, change.layer), change.new_digest)
            self.world.require(
                known == change.new_digest, f"invariant 4: generation {stage.generation} has two rows of {change.layer}"
            )
            covered = set(change.new_row) - {-1} == set(range(self.num_logical))
            self.world.require(covered, f"invariant 3: layer {change.layer} lost an expert")
            rank.routed[change.layer] = LiveLayer(
                layer=change.layer,
                generation=GenerationNumber(stage.generation),
                digest=change.new_digest,
                row=change.new_row,
                shares=change.new_shares,
            )
        rank.map_changed()
        self._check_weights(rank, first)
        self.world.note(f"A{rank.address.rank_id} flips {stage.chunk_id:#x} at {boundary}")
        self._later(self.world.random.uniform(0.0, 0.2), lambda: self._handle(rank, hook.FlipDone(stage.chunk_id, 0.001)))

    def _check_weights(self, rank: Rank, first: int) -> None:
        for layer, live in rank.routed.items():
            wanted: Sequence[int] = live.row[first : first + self.slots_per_rank]
            for slot, expert in enumerate(wanted):
                held = rank.slots[layer][slot]
                self.world.require(
                    expert in (-1, held),
                    f"invariant 2: rank {rank.address.rank_id} layer {layer} slot {slot} holds {held}, map {expert}",
                )

    # ── signs of life ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pulse(self) -> None:
        self._pulse_now()
        self.tick()
        self.world.after(0.5, self._pulse)

    def _pulse_now(self) -> None:
        if not self.is_running:
            return
        for rank in self.ranks:
            self._say(
                rank,
                Pulse(
                    sender=rank.address,
                    boundary=max(0, rank.boundary),
                    idle=self.is_idle,
                    voting=not rank.machine.off_reason,
                    off_reason=rank.machine.off_reason,
                    windows_dropped=0,
                    weights_version=self.weights_version,
                ),
            )


def _short(message: object) -> str:
    chunk = getattr(message, "chunk_id", None)
    text = type(message).__name__
    if chunk is not None:
        text += f" {chunk:#x}"
    for name in ("epoch", "epoch_seen", "closed_id", "flipped_id", "code", "boundary"):
        value = getattr(message, name, None)
        if value is not None:
            text += f" {name}={value:#x}" if name.endswith("_id") else f" {name}={value}"
    return text
