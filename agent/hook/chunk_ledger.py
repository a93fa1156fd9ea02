"""What a rank remembers beyond one chunk: live map, tombstone, highest epoch and generation, the chunks that it flipped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.hook.chunk_events import NO_CHUNK
from eplb_service.control import Address, Flipped, Live, LiveLayer, Stage
from eplb_service.generation import AS_LOADED
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, LayerRef, chunk_epoch

FLIPS_REMEMBERED_MAX = 1024
NO_EPOCH = Epoch(0)


@dataclass(slots=True)
class Ledger:
    """Facts that only grow, for one life of a rank in one group.

    live: what every layer routes by. closed_id: ids up to it are never staged or armed (again). epoch_seen, generation_seen:
    the highest that a message named. boundary: of the last step.
    """

    address: Address
    live: dict[LayerRef, LiveLayer]
    weights_version: int
    off_reason: str
    closed_id: ChunkId = NO_CHUNK
    epoch_seen: Epoch = NO_EPOCH
    generation_seen: GenerationNumber = AS_LOADED
    boundary: int = 0
    _flipped: OrderedDict[ChunkId, Flipped] = field(default_factory=OrderedDict)
    _forgotten_id: ChunkId = NO_CHUNK

    @property
    def flipped_id(self) -> ChunkId:
        """The last chunk that this rank flipped, 0 = none."""
        return next(reversed(self._flipped), self._forgotten_id)

    def close(self, chunk: ChunkId) -> None:
        """Raise the tombstone."""
        self.closed_id = max(self.closed_id, chunk)

    def is_stale(self, chunk: ChunkId) -> bool:
        """Whether a higher epoch than the chunk's was seen."""
        return chunk_epoch(chunk) < self.epoch_seen

    def flip_of(self, chunk: ChunkId) -> Flipped | None:
        """What was said when this rank flipped the chunk."""
        return self._flipped.get(chunk)

    def may_have_flipped(self, chunk: ChunkId) -> bool:
        """Whether the chunk is so old that its flip would be forgotten: neither answer would be a proof."""
        return chunk <= self._forgotten_id

    def note_flip(self, stage: Stage, boundary: int, stall_s: float) -> Flipped:
        """The chunk is live. Returns what to say of it."""
        self.live.update(layers_of(stage))
        flipped = Flipped(
            sender=self.address,
            chunk_id=stage.chunk_id,
            boundary=boundary,
            digests=tuple((change.layer, change.new_digest) for change in stage.layers),
            stall_s=stall_s,
        )
        self._flipped[stage.chunk_id] = flipped
        if len(self._flipped) > FLIPS_REMEMBERED_MAX:
            self._forgotten_id, _ = self._flipped.popitem(last=False)
        self.close(stage.chunk_id)
        return flipped

    def remember(self, flipped_id: ChunkId, before: Ledger | None) -> None:
        """What was flipped in the group that was. flipped_id: the last by any rank. before: of this rank; None = it joins."""
        self._forgotten_id = flipped_id
        if before is not None and before.flipped_id == flipped_id:
            self._forgotten_id = before._forgotten_id
            self._flipped.update({chunk: replace(said, sender=self.address) for chunk, said in before._flipped.items()})

    def reply(self, epoch: Epoch) -> Live:
        """The answer to a Hello of this epoch."""
        layers: Mapping[LayerRef, LiveLayer] = self.live
        return Live(
            sender=self.address,
            epoch=epoch,
            epoch_seen=self.epoch_seen,
            generation_seen=self.generation_seen,
            closed_id=self.closed_id,
            flipped_id=self.flipped_id,
            boundary=self.boundary,
            weights_version=self.weights_version,
            voting=not self.off_reason,
            off_reason=self.off_reason,
            layers=tuple(layers[layer] for layer in sorted(layers)),
        )


def layers_of(stage: Stage) -> dict[LayerRef, LiveLayer]:
    """What the layers of a chunk route by once it is flipped."""
    return {
        change.layer: LiveLayer(
            layer=change.layer,
            generation=stage.generation,
            digest=change.new_digest,
            row=change.new_row,
            shares=change.new_shares,
        )
        for change in stage.layers
    }
