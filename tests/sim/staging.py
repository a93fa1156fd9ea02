"""The staging worker of a rank: copies into one buffer that is used again and again, checks, cancels, fails."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.hook import chunk_events as hook
from eplb_service.control import Copy, LinkBytes, RefusalCode, Stage
from eplb_service.ids import ChunkId, LayerRef, RankId
from tests.sim.model import GARBAGE, weights_of

if TYPE_CHECKING:
    from tests.sim.engine import Engine
from tests.sim.rank import Rank


@dataclass
class CopyFaults:
    """What copies meet. Shares of chunks; chance None: a script ends every copy and says how."""

    chance: random.Random | None = None
    fail_share: float = 0.0
    corrupt_share: float = 0.0
    memory_share: float = 0.0
    slow_share: float = 0.0
    quiesce_s: float = 0.5
    next_corrupt: set[int] = field(default_factory=set)
    """Positions of ranks whose next copy brings other bytes."""


@dataclass(slots=True)
class _Job:
    stage: Stage
    copies: tuple[Copy, ...]
    is_cancelled: bool = False
    is_corrupt: bool = False
    is_over: bool = False
    lost_peer: bool = False


class StagingWorker:
    """Answers every `begin` with exactly one end. buffer: one region for each copy of a chunk, in order, reused by the next."""

    def __init__(self, engine: Engine, rank: Rank, faults: CopyFaults) -> None:
        self._engine, self._rank, self._faults = engine, rank, faults
        self._job: _Job | None = None
        self._held: _Job | None = None
        self._jobs: list[_Job] = []
        self.buffer: dict[int, int] = {}

    @property
    def is_copying(self) -> bool:
        """Whether an end is due."""
        return self._job is not None

    def begin(self, stage: Stage, _deadline: float) -> None:
        """Copies read their sources at times of their own."""
        mine = tuple(copy for copy in stage.copies if copy.target_rank == self._rank.address.rank_id)
        job = self._job = _Job(stage, mine)
        self.buffer.clear()
        self._jobs = [*(known for known in self._jobs if not known.is_over), job]
        chance = self._faults.chance
        if chance is None:
            job.is_corrupt = self._rank.position in self._faults.next_corrupt
            self._faults.next_corrupt.discard(self._rank.position)
            return
        calm = self._engine.world.is_calm
        fate, end_s = chance.random(), 0.02 + 0.6 * chance.random()
        if not calm and chance.random() < self._faults.slow_share:
            end_s = 0.5 + 4.5 * chance.random()
        job.is_corrupt = not calm and self._faults.memory_share < fate < self._faults.memory_share + self._faults.corrupt_share
        for region in range(len(mine)):
            self._engine.later(end_s * chance.random(), lambda region=region: self._read(job, region))  # type: ignore[misc]
        if calm or fate > self._faults.memory_share + self._faults.corrupt_share + self._faults.fail_share:
            self._engine.later(end_s, lambda: self._end(job, ""))
        elif fate < self._faults.memory_share:
            self._engine.world.counts["out of memory"] += 1
            self._engine.later(0.02, lambda: self._end(job, "OutOfMemoryError: no room for what the copy needs"))
        elif job.is_corrupt:
            self._engine.later(end_s, lambda: self._end(job, ""))
        else:
            self._engine.world.counts["copies failed"] += 1
            self._engine.later(end_s, lambda: self._end(job, "a peer did not answer"))

    def _read(self, job: _Job, region: int) -> None:
        """Bytes of one copy arrive. A cancelled copy goes on writing until it is over; nobody may use its buffer before."""
        if job.is_over:
            return
        copy = job.copies[region]
        source = None if copy.is_from_backup else self._rank_of(copy.source_rank)
        if source is not None and (source.is_stopped or source.is_dead):
            job.lost_peer = True
        is_corrupt = job.is_corrupt and region == 0
        self.buffer[region] = GARBAGE if is_corrupt else self._sent(job.stage, copy)

    def _sent(self, stage: Stage, copy: Copy) -> int:
        """What the source sends: of a live slot, or what an earlier copy brought it (for which it waits)."""
        if copy.is_from_backup:
            self._engine.world.counts["copies from backups"] += 1
            return weights_of(copy.expert, stage.weights_version)
        if not copy.is_relay:
            return self._rank_of(copy.source_rank).slots[copy.layer][copy.source_slot]
        first = stage.copies[copy.relay_of]
        brought = self._rank_of(copy.source_rank).worker.brought(stage.chunk_id, first)
        return self._sent(stage, first) if brought is None else brought

    def brought(self, chunk: ChunkId, copy: Copy) -> int | None:
        """What a copy of a chunk brought into this buffer; None as long as it did not."""
        job = self._job or self._held
        if job is None or job.stage.chunk_id != chunk or copy not in job.copies:
            return None
        return self.buffer.get(job.copies.index(copy))

    def _rank_of(self, rank_id: RankId) -> Rank:
        return self._engine.known[rank_id]

    def cancel(self, chunk: ChunkId) -> None:
        """Its copy ends soon, and with it the last write to the buffer."""
        job = self._job
        if job is not None and job.stage.chunk_id == chunk:
            job.is_cancelled = True
            if self._faults.chance is not None:
                last_s = 0.5 if self._engine.world.is_calm else self._faults.quiesce_s
                self._engine.later(
                    last_s * self._faults.chance.random(), lambda: self._end(job, "withdrawn while it was copied")
                )

    def release(self) -> None:
        """What is staged is not needed any more."""
        self._held = None

    def take(self) -> dict[tuple[LayerRef, int], int]:
        """What a flip copies into the slots: whatever the buffer holds now."""
        held = self._held
        if held is None:
            self._engine.world.require(False, f"rank {self._rank.address.rank_id} flips, and nothing is staged")
            return {}
        return {(copy.layer, copy.target_slot): self.buffer.get(region, GARBAGE) for region, copy in enumerate(held.copies)}

    def write_late(self) -> None:
        """Every copy that is not over writes once more; none when all were seen to their end."""
        for job in self._jobs:
            for region in range(len(job.copies)):
                self._read(job, region)

    def end_now(self, failure: str = "") -> None:
        """A script says that the copy under way ends. failure: why it fails; empty = all bytes are there."""
        job = self._job
        if job is None:
            raise ValueError(f"rank {self._rank.address.rank_id} copies nothing now")
        if not failure:
            for region in range(len(job.copies)):
                self._read(job, region)
        self._end(job, failure)

    def _end(self, job: _Job, failure: str) -> None:
        if job.is_over:
            return
        job.is_over = True
        if self._job is job:
            self._job = None
        chunk = job.stage.chunk_id
        if job.lost_peer and not failure:
            failure = "a peer did not answer"
        if failure or job.is_cancelled:
            self._engine.handle(self._rank, hook.StagingFailed(chunk, RefusalCode.TRANSFER, failure or "withdrawn"))
        elif self._differs(job):
            self._engine.world.counts["checksums wrong"] += 1
            self._engine.handle(self._rank, hook.StagingFailed(chunk, RefusalCode.CHECKSUM, "other bytes than were sent"))
        else:
            self._held = job
            self._engine.handle(self._rank, hook.StagingDone(chunk, 0.1, LinkBytes()))

    def _differs(self, job: _Job) -> bool:
        version = job.stage.weights_version
        return any(self.buffer.get(region) != weights_of(copy.expert, version) for region, copy in enumerate(job.copies))
