"""What must hold, checked on what the parts show and not by what they believe. Nothing here is part of the system.

Invariants (docs/consistency.md): 1 one placement per batch, 2 weights follow the map, 3 coverage, 4 numbers never go back,
5 serving goes on, 6 everything resolves, 7 one answer. `settle` runs after every event and looks at what changed in it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from agent.hook.chunk import ChunkMachine
from eplb_service.control import Disarm, Disarmed, Flipped, FromRank, Hello, Live, LiveLayer, Refused, Stage, ToRank
from eplb_service.control import RefusalCode as Code
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import ChunkId, Epoch, GroupId, Incarnation, LayerRef, chunk_epoch
from eplb_service.rollout.events import Alarm
from tests.sim.model import weights_of
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.engine import Engine
from tests.sim.rank import Rank

_CLOSES_NOTHING = (Code.BUSY, Code.STALE_EPOCH, Code.CLOSED)


class Checkers:
    """All of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engine: Engine | None = None
        self._changed: dict[Rank, set[LayerRef]] = {}
        self._map_of_step: dict[tuple[GroupId, int], int] = {}
        self._boundary_of_flip: dict[ChunkId, int] = {}
        self._flippers: dict[ChunkId, set[Incarnation]] = {}
        self._first_boundary: dict[int, int] = {}
        self.lost: dict[LayerRef, set[int]] = {}
        """Experts that lost ranks alone held, and that are not back."""
        self._never_flips: set[ChunkId] = set()
        self._stages: dict[ChunkId, tuple[object, ...]] = {}
        self._group_of: dict[ChunkId, GroupId] = {}
        self._published: dict[int, list[Mapping[LayerRef, int]]] = {}
        self._remembered: set[int] = set()
        self._leaders: dict[int, set[str]] = {}
        self._started: set[tuple[int, int]] = set()
        self._answered: dict[Rank, Epoch] = {}
        self.epoch_seen = 0
        """Highest epoch that a rank of this life was told."""

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def booted(self, engine: Engine) -> None:
        """A new life: what was said of chunks before binds nobody any more."""
        self._engine = engine
        self._map_of_step.clear()
        self._boundary_of_flip.clear()
        self._flippers.clear()
        self.lost.clear()
        self._never_flips.clear()
        self._answered.clear()
        self.epoch_seen = 0
        self._changed = {rank: set(rank.routed) for rank in engine.ranks}

    def stepped(self, rank: Rank) -> None:
        """A rank begins a step."""
        self._changed.setdefault(rank, set())

    def entered(self, engine: Engine, rank: Rank, machine: ChunkMachine) -> None:
        """A rank is about to go on in another group, with this machine: it forgets no number."""
        before, after, who = rank.machine.ledger, machine.ledger, f"rank {rank.address.rank_id}"
        for name in ("closed_id", "epoch_seen", "generation_seen", "flipped_id"):
            was, now = getattr(before, name), getattr(after, name)
            self._require(now >= was, f"invariant 4: {name} of {who} went back from {was:#x} to {now:#x} as the group formed")
        for layer in rank.routed:
            was, now = rank.routed[layer].generation, machine.live[layer].generation
            self._require(now >= was, f"invariant 4: layer {layer} of {who} went back from {was} to {now} as the group formed")
            held = set()
            for peer in engine.ranks:
                if not peer.is_new:
                    first = peer.position * peer.shape.slots_per_rank
                    held |= set(peer.routed[layer].row[first : first + peer.shape.slots_per_rank])
            self.lost[layer] = set(range(rank.shape.num_logical)) - held
        self._changed.setdefault(rank, set()).update(rank.routed)

    def goes_on(self, rank: Rank, boundary: int) -> None:
        """A rank enters a group after this boundary."""
        assert self._engine is not None
        known = self._first_boundary.setdefault(self._engine.group_id, boundary)
        self._require(known == boundary, f"rank {rank.address.rank_id} goes on after boundary {boundary}, others after {known}")

    def formed_again(self, engine: Engine) -> None:
        """Every rank of another group is in it: all route alike, and what lost ranks alone flipped binds nobody any more."""
        maps = {rank.digest for rank in engine.ranks}
        self._require(len(maps) == 1, f"invariant 1: ranks go on with {len(maps)} maps after their group formed again")
        self._require(
            all(rank.machine.live == rank.routed for rank in engine.ranks), "a rank believes in another map than it routes by"
        )
        alive = {rank.address.incarnation for rank in engine.ranks}
        for chunk in [chunk for chunk, flippers in self._flippers.items() if not flippers & alive]:
            del self._boundary_of_flip[chunk], self._flippers[chunk]
        self._answered.clear()

    def heard(self, rank: Rank, message: ToRank) -> None:
        """A planner's message reaches a rank of its address."""
        if rank.address == message.to:
            epoch = message.epoch if isinstance(message, Hello | Disarm) else chunk_epoch(message.chunk_id)
            self.epoch_seen = max(self.epoch_seen, epoch)

    def said(self, rank: Rank, message: FromRank) -> None:
        """A rank says something: a chunk that it calls closed must not flip anywhere, before or after."""
        match message:
            case Disarmed(chunk_id=chunk):
                self._never_flips.add(chunk)
                self._require(chunk not in self._boundary_of_flip, f"chunk {chunk:#x} flipped, and a rank answers Disarmed")
            case Refused(chunk_id=chunk, code=code) if code not in _CLOSES_NOTHING:
                self._never_flips.add(chunk)
                self._require(chunk not in self._boundary_of_flip, f"chunk {chunk:#x} flipped, and a rank refuses it")
            case Live() if message.epoch == message.epoch_seen:
                self._answered[rank] = max(self._answered.get(rank, Epoch(0)), message.epoch)
            case Flipped():
                self._world.counts["flips of ranks"] += 1
            case _:
                pass

    def flipped(self, rank: Rank, stage: Stage, before: Mapping[LayerRef, LiveLayer]) -> None:
        """A rank wrote its slots and tables."""
        chunk = stage.chunk_id
        self._changed.setdefault(rank, set()).update(change.layer for change in stage.layers)
        self._require(chunk not in self._never_flips, f"chunk {chunk:#x} flips, and a rank said that it never would")
        self._flippers.setdefault(chunk, set()).add(rank.address.incarnation)
        known = self._boundary_of_flip.setdefault(chunk, rank.boundary)
        self._require(
            rank.is_forming or known == rank.boundary,
            f"invariant 1: chunk {chunk:#x} flips at boundary {rank.boundary}, elsewhere at {known}",
        )
        self._require(
            chunk_epoch(chunk) >= self._answered.get(rank, 0),
            f"chunk {chunk:#x} flips after rank {rank.address.rank_id} told a later leader what is live",
        )
        group = self._group_of.get(chunk, rank.address.group_id)
        self._require(group == rank.address.group_id, f"chunk {chunk:#x} of group {group} flips in {rank.address.group_id}")
        published = self._published.get(stage.generation, [])
        for change in stage.layers:
            self.lost[change.layer] = set()
            was = before[change.layer].generation
            self._require(
                stage.generation > was, f"invariant 4: layer {change.layer} goes back from {was} to {stage.generation}"
            )
            self._require(
                any(rows[change.layer] == change.new_digest for rows in published),
                f"invariant 7: layer {change.layer} flips to a row that is not the one published as {stage.generation}",
            )
            if change.new_row == before[change.layer].row:
                self._world.counts["shares alone flipped"] += 1

    def fail_stopped(self, rank: Rank, *, excused: bool) -> None:
        """A rank stopped itself. excused: it could not know how its vote ended, or other weights came between vote and flip."""
        self._require(excused, f"invariant 5: rank {rank.address.rank_id} stops itself without need")

    def outcome_unknown(self, rank: Rank) -> None:
        """A rank's wait for a vote with an id failed: it may not run on."""
        self._require(
            rank.is_dead or rank.is_standing, f"rank {rank.address.rank_id} runs on although it cannot know how its vote ended"
        )

    # ── the planner ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def leads(self, name: str, epoch: int) -> None:
        """A planner leads. A store that lost its data may give an epoch out twice."""
        self._leaders.setdefault(epoch, set()).add(name)

    def published(self, generation: Generation, *, overwrites: bool) -> None:
        """The store took a generation: its number names these rows, as long as anybody remembers it.

        Leaders that share an epoch can both give one number, when the store lost the first; digests tell the two apart, and
        ranks take one of them. overwrites: the store held that number.
        """
        digests = dict(generation.placement.row_digests())
        known = self._published.setdefault(generation.number, [])
        is_shared = len(self._leaders.get(generation.epoch, ())) > 1
        if generation.number in self._remembered and (overwrites or not is_shared):
            self._require(digests in known, f"invariant 4: number {generation.number} is given to two placements")
        self._remembered.add(generation.number)
        known.append(digests)

    def forget_numbers(self, known: int, stored: Container[int] = ()) -> None:
        """Leader and ranks lost what is above this number, the store all but these: the others may be given again."""
        self._remembered = {number for number in self._remembered if number <= known or number in stored}

    def started(self, epoch: int, generation: int) -> None:
        """The store took the start of a rollout."""
        self._started.add((epoch, generation))

    def ordered(self, message: ToRank) -> None:
        """A planner sends something: what it starts is in the store, and a chunk is the same for all ranks."""
        if not isinstance(message, Stage):
            return
        epoch = chunk_epoch(message.chunk_id)
        self._require(
            (epoch, message.generation) in self._started,
            f"generation {message.generation} is sent in epoch {epoch} before the store has it",
        )
        content = (message.layers, message.copies, message.generation, message.mesh_id, message.weights_version)
        self._group_of.setdefault(message.chunk_id, message.to.group_id)
        known = self._stages.setdefault(message.chunk_id, content)
        self._require(
            known is content or known == content, f"invariant 7: chunk {message.chunk_id:#x} is not the same for all ranks"
        )

    def adopted(self, name: str, epoch: int, life: int | None, live: LiveMap, reason: str) -> None:
        """What a leader holds to be live is what every rank routes by. life: group that it leads.

        Of two leaders that a store gave one epoch each learns late what the other moved: its chunks are refused until then.
        """
        engine = self._engine
        if len(self._leaders.get(epoch, ())) > 1:
            return
        if (
            engine is None
            or life != engine.group_id
            or engine.forming is not None
            or epoch < self.epoch_seen
            or not engine.is_running
        ):
            return
        self._world.counts["live maps checked"] += 1
        for rank in engine.ranks:
            self._require(
                rank.digest == live.digest,
                f"{name} takes {live.digest:#x} for live ({reason}), rank {rank.address.rank_id} routes {rank.digest:#x}",
            )

    def alarmed(self, name: str, alarm: Alarm) -> None:
        """No fault that the network, processes or stores have may make ranks contradict one another."""
        self._require(False, f"{name} raises an alarm: {alarm.code}: {alarm.reason}")

    # ── after every event ────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Look at the ranks that stepped, flipped or booted in this event."""
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        for rank, layers in changed.items():
            if rank.is_forming:
                continue  # it runs no step; what it writes is looked at when it goes on
            step = (rank.address.group_id, rank.boundary)
            if self._map_of_step.setdefault(step, rank.digest) != rank.digest:
                self._require(False, f"invariant 1: step {rank.boundary} is routed by different maps")
            if layers:
                self._check_layers(rank, layers)
        if len(self._map_of_step) > 64:
            newest = sorted(self._map_of_step)[-32:]
            self._map_of_step = {step: self._map_of_step[step] for step in newest}

    def _check_layers(self, rank: Rank, layers: set[LayerRef]) -> None:
        engine = self._engine
        assert engine is not None
        shape = rank.shape
        first = rank.position * shape.slots_per_rank
        for layer in sorted(layers):
            row = rank.routed[layer].row
            missing = set(range(shape.num_logical)) - set(row)
            self._require(missing <= self.lost.get(layer, set()), f"invariant 3: {layer} lost an expert")
            for slot in range(shape.slots_per_rank):
                expert, held = row[first + slot], rank.slots[layer][slot]
                if expert != -1 and held != weights_of(expert, rank.weights_version):
                    self._require(
                        False,
                        f"invariant 2: rank {rank.address.rank_id} layer {layer} slot {slot} holds {held}, the map says expert"
                        f" {expert} of weights version {rank.weights_version}",
                    )

    def check_all(self) -> None:
        """Every layer of every rank, at the end."""
        if self._engine is not None:
            for rank in self._engine.ranks:
                self._check_layers(rank, set(rank.routed))

    def _require(self, holds: bool, what: str) -> None:
        self._world.require(holds, what)
