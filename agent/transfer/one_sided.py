"""What ways have in common on which the rank that needs an expert reads it: its source only says that it may be read.

The source says so over the mesh, with the checksum, and does nothing else. Its live slots stay as they are until all ranks have
staged the chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from agent.transfer.gloo import Store, Work, said_by
from agent.transfer.streams import Streams
from agent.transfer.transport import AwaitedWord, Held, LocalRank, StagedCopy, Transit, word_of, word_tag
from eplb_service.control import Copy
from eplb_service.ids import RankId

Links = frozenset[tuple[RankId, RankId]]
"""(source, target) of ranks of which the target can read the source."""


def memory_said_by(store: Store, key: str, peer: RankId, timeout_s: float) -> str:
    """What a rank says of its memory under a key. Raises DeadlineError when it does not in time."""
    return said_by(store, key, timeout_s, f"rank {peer} did not say within {timeout_s:g} s what memory it shares")


def agree_on_links(store: Store, prefix: str, rank: LocalRank, readable: Iterable[RankId], timeout_s: float) -> Links:
    """Who can read whom, the same on all ranks. readable: by this one.

    Raises DeadlineError when a rank does not come in time.
    """
    store.set(f"{prefix}/{rank.rank_id}", json.dumps(sorted(readable)))
    return frozenset(
        (RankId(source), peer)
        for peer in rank.group_rank_ids
        for source in json.loads(memory_said_by(store, f"{prefix}/{peer}", peer, timeout_s))
    )


class OneSidedRead:
    """A `Transport` but for `take`, which reads."""

    def __init__(self, rank: LocalRank, links: Links, streams: Streams) -> None:
        self._rank, self._links, self._streams = rank, links, streams
        self._awaited: dict[int, AwaitedWord] = {}
        self._said: list[tuple[Copy, Work, torch.Tensor]] = []

    def carries(self, copy: Copy) -> bool:
        """Copies between ranks of which the target can read the source."""
        return (copy.source_rank, copy.target_rank) in self._links

    def expect(self, arrival: StagedCopy, transit: Transit) -> None:
        """Listen for the source."""
        source = self._rank.column(arrival.copy.source_rank)
        self._awaited[arrival.index] = AwaitedWord.post(transit.mesh, source, arrival.index)

    def give(self, index: int, copy: Copy, held: Held, transit: Transit) -> None:
        """Say that it may be read, once it is all there."""
        if held.staged is not None:
            self._streams.record().wait_host()
        word = word_of(held)
        work = transit.mesh.send(word, self._rank.column(copy.target_rank), word_tag(index))
        self._said.append((copy, work, word))

    def finish(self, transit: Transit) -> None:
        """Wait until all that was said was heard."""
        while self._said:
            copy, work, _ = self._said.pop()
            transit.wait(work, f"rank {copy.target_rank} did not ask for expert {copy.expert} of {copy.layer}")

    def quiesce(self) -> None:
        """The mesh is abandoned, which ended all of it but reads that are under way."""
        self._awaited.clear()
        self._said.clear()

    def _told(self, arrival: StagedCopy, transit: Transit) -> int:
        """Wait until it may be read; where in the source's staging it lies, -1 = in its live slot. Sets what is expected."""
        arrival.expected, offset = self._awaited.pop(arrival.index).receive(transit, arrival.copy)
        return offset
