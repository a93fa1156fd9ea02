"""Experts are read out of the memory of another rank of the node, by the rank that needs them: no second copy, no host memory.

What the device of the reader does is over before the reader says that it has the expert.
"""

from __future__ import annotations

from agent.engine.port import SlotTensor
from agent.transfer.one_sided import OneSidedRead
from agent.transfer.peer_memory import Neighbours
from agent.transfer.streams import Streams
from agent.transfer.transport import LocalRank, StagedCopy, Transit


class PeerRead(OneSidedRead):
    """A `Transport` between ranks of a node that can read one another's memory."""

    def __init__(self, rank: LocalRank, neighbours: Neighbours, streams: Streams) -> None:
        super().__init__(rank, neighbours.links, streams)
        self._memory = neighbours.memory
        self._slots = {
            peer: {
                layer: {name: SlotTensor(data) for name, data in tensors.items()} for layer, tensors in memory.tensors.items()
            }
            for peer, memory in neighbours.memory.items()
        }

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """Read it, in order of the current stream."""
        copy, layout = arrival.copy, self._rank.layouts[arrival.copy.layer]
        offset = self._told(arrival, transit)
        transit.check(f"expert {copy.expert} of {copy.layer} was not read from rank {copy.source_rank}")
        if offset < 0:
            layout.pack(self._slots[copy.source_rank][copy.layer], copy.source_slot, arrival.region.device)
        else:
            staging = self._memory[copy.source_rank].staging
            arrival.region.device.copy_(staging[offset : offset + layout.num_bytes], non_blocking=True)
