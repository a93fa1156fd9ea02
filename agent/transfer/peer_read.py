"""Experts are read out of the memory of another rank of the node, by the rank that needs them: no second copy, no host memory.

The source says over the mesh that an expert may be read, and its checksum; it does nothing else. Its live slots stay as they
are until all ranks have staged the chunk, and what the device of the reader does is over before the reader says that it has.
"""

from __future__ import annotations

import torch

from agent.engine.port import SlotTensor
from agent.transfer.gloo import Work
from agent.transfer.peer_memory import Neighbours
from agent.transfer.streams import Streams
from agent.transfer.transport import AwaitedWord, Held, LocalRank, StagedCopy, Transit, word_of, word_tag
from eplb_service.control import Copy


class PeerRead:
    """A `Transport` between ranks of a node that can read one another's memory."""

    def __init__(self, rank: LocalRank, neighbours: Neighbours, streams: Streams) -> None:
        self._rank, self._neighbours, self._streams = rank, neighbours, streams
        self._slots = {
            peer: {
                layer: {name: SlotTensor(data) for name, data in tensors.items()} for layer, tensors in memory.tensors.items()
            }
            for peer, memory in neighbours.memory.items()
        }
        self._awaited: dict[int, AwaitedWord] = {}
        self._said: list[tuple[Copy, Work, torch.Tensor]] = []

    def carries(self, copy: Copy) -> bool:
        """Copies between ranks of which the target can read the source."""
        return (copy.source_rank, copy.target_rank) in self._neighbours.links

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

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """Read it, in order of the current stream."""
        copy, layout = arrival.copy, self._rank.layouts[arrival.copy.layer]
        arrival.expected, offset = self._awaited.pop(arrival.index).receive(transit, copy)
        transit.check(f"expert {copy.expert} of {copy.layer} was not read from rank {copy.source_rank}")
        if offset < 0:
            layout.pack(self._slots[copy.source_rank][copy.layer], copy.source_slot, arrival.region.device)
        else:
            staging = self._neighbours.memory[copy.source_rank].staging
            arrival.region.device.copy_(staging[offset : offset + layout.num_bytes], non_blocking=True)

    def finish(self, transit: Transit) -> None:
        """Wait until all that was said was heard."""
        while self._said:
            copy, work, _ = self._said.pop()
            transit.wait(work, f"rank {copy.target_rank} did not ask for expert {copy.expert} of {copy.layer}")

    def quiesce(self) -> None:
        """The mesh is abandoned, which ended all of it but the reads of the device."""
        self._awaited.clear()
        self._said.clear()
