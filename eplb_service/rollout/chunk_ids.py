"""The chunk ids of one planner under one epoch, and what is remembered of those given out to the present group."""

from __future__ import annotations

import hashlib

from eplb_service.ids import CHUNK_SEQUENCE_BITS, ChunkId, Epoch, chunk_epoch, chunk_id
from eplb_service.rollout.events import NO_CHUNK


def drawn_sequence(unique_id: str) -> int:
    """Where a leader's chunk ids begin, from an id that no other leader has: 1 + 65536 x 16 bits of it.

    Each leader has 65,536 ids before it comes to where another one may begin.
    """
    return 1 + (int.from_bytes(hashlib.blake2b(unique_id.encode(), digest_size=2).digest(), "little") << 16)


class ChunkIds:
    """Gives out ids that only grow. last_opened, last_flipped, last_aborted: of the present group; 0 = none.

    mesh_id: first chunk that used the present transfer connections. It changes after a chunk that failed or was withdrawn
    (bytes of it may still be under way) and whenever the live map had to be asked for: then all ranks connect anew.
    first_sequence: where the ids begin. A store that lost its data may hand out an epoch that another planner still uses. If
    both draw it at random, they share no id, so that a vote is never for two contents, and either one's ids, told by ranks,
    give it away to the other.
    """

    def __init__(self, epoch: Epoch, first_sequence: int) -> None:
        self.epoch = epoch
        self.last_opened = self.last_flipped = self.last_aborted = NO_CHUNK
        self.mesh_id = NO_CHUNK
        self._first_sequence = self._next_sequence = first_sequence

    def open_next(self) -> ChunkId:
        """The id of a new chunk."""
        self.last_opened = chunk_id(self.epoch, self._next_sequence)
        self._next_sequence += 1
        self.mesh_id = self.mesh_id or self.last_opened
        return self.last_opened

    def flipped(self, chunk: ChunkId) -> None:
        """A chunk flipped everywhere: its connections serve the next."""
        self.last_flipped = chunk

    def aborted(self, chunk: ChunkId) -> None:
        """A chunk was proven never to flip."""
        self.last_aborted = chunk
        self.connect_anew()

    def connect_anew(self) -> None:
        """The next chunk uses new connections."""
        self.mesh_id = NO_CHUNK

    def forget_group(self) -> None:
        """The group ended, and its tombstones with it."""
        self.last_opened = self.last_flipped = self.last_aborted = NO_CHUNK
        self.connect_anew()

    def is_foreign(self, chunk: ChunkId) -> bool:
        """Of our epoch, and never given out: another planner believes that this epoch is its own."""
        sequence = chunk & (1 << CHUNK_SEQUENCE_BITS) - 1
        return chunk_epoch(chunk) == self.epoch and not self._first_sequence <= sequence < self._next_sequence
