"""Experts travel between ranks over gloo point-to-point, staged through host memory.

A second NCCL communicator beside cooperative all-to-all kernels deadlocks (vllm#32860, DeepEP#496); gloo uses no device at
all. Both ends of every copy walk the same list in the same order (pytorch#174288), and all receives are posted at the start: a
sender never waits for a receiver that waits for another sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agent.transfer.gloo import Work
from agent.transfer.staging import ExpertLayout, copy_if_apart
from agent.transfer.streams import Streams
from agent.transfer.transport import AwaitedWord, Held, LocalRank, StagedCopy, Transit, data_tag, word_of, word_tag
from eplb_service.control import Copy
from eplb_service.ids import LayerRef
from eplb_service.staging_memory import SEND_DEPTH


@dataclass(slots=True)
class _Leaving:
    copy: Copy
    works: tuple[Work, ...]
    memory: tuple[torch.Tensor, ...]  # kept until they are sent


@dataclass(slots=True)
class SendRing:
    """Host (and device) memory that experts leave through, allocated once: SEND_DEPTH experts may be under way."""

    device: list[torch.Tensor]
    host: list[torch.Tensor]
    under_way: deque[_Leaving] = field(default_factory=deque)
    turn: int = 0

    @classmethod
    def allocate(cls, layouts: Mapping[LayerRef, ExpertLayout], device: torch.device, streams: Streams) -> SendRing:
        """Room for the largest expert of any layer, SEND_DEPTH times."""
        size = max((layout.num_bytes for layout in layouts.values()), default=0)
        on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(SEND_DEPTH)]
        on_host = on_device if device.type == "cpu" else [streams.host_buffer(size) for _ in range(SEND_DEPTH)]
        return cls(on_device, on_host)

    def next(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The part whose turn it is: on the device and on the host (one and the same on a CPU)."""
        turn, self.turn = self.turn, (self.turn + 1) % SEND_DEPTH
        return self.device[turn][:num_bytes], self.host[turn][:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Of device memory."""
        return sum(part.numel() for part in self.device)


class GlooPeer:
    """A `Transport` between any two ranks of the group."""

    def __init__(self, rank: LocalRank, ring: SendRing, streams: Streams) -> None:
        self._rank, self._ring, self._streams = rank, ring, streams
        self._awaited: dict[int, tuple[Work, AwaitedWord]] = {}

    def carries(self, copy: Copy) -> bool:
        """Copies between ranks."""
        return copy.source_rank != copy.target_rank

    def expect(self, arrival: StagedCopy, transit: Transit) -> None:
        """Post both receives."""
        source = self._rank.column(arrival.copy.source_rank)
        data = transit.mesh.receive(arrival.region.host, source, data_tag(arrival.index))
        self._awaited[arrival.index] = data, AwaitedWord.post(transit.mesh, source, arrival.index)

    def give(self, index: int, copy: Copy, held: Held, transit: Transit) -> None:
        """Send it: out of a slot through the ring, out of staging as it lies there."""
        self._finish(SEND_DEPTH - 1, transit)
        if held.staged is not None:
            host = held.staged.region.host
            if not held.staged.on_host:
                held.staged.region.to_host()
        else:
            layout = self._rank.layouts[copy.layer]
            packed, host = self._ring.next(layout.num_bytes)
            layout.pack(self._rank.tensors[copy.layer], copy.source_slot, packed)
            copy_if_apart(packed, host)
        self._streams.record().wait_host()  # the bytes are in host memory before they leave
        to, word = self._rank.column(copy.target_rank), word_of(held)
        works = transit.mesh.send(host, to, data_tag(index)), transit.mesh.send(word, to, word_tag(index))
        self._ring.under_way.append(_Leaving(copy, works, (host, word)))

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """Wait for it, then bring it from host memory to the device."""
        data, word = self._awaited.pop(arrival.index)
        copy = arrival.copy
        transit.wait(data, f"rank {copy.source_rank} sent no expert {copy.expert} of {copy.layer}")
        arrival.expected, _ = word.receive(transit, copy)
        arrival.on_host = True
        arrival.region.to_device()

    def finish(self, transit: Transit) -> None:
        """Wait for all sends."""
        self._finish(0, transit)

    def quiesce(self) -> None:
        """The mesh is abandoned, which ended all of it."""
        self._ring.under_way.clear()
        self._awaited.clear()

    def _finish(self, most: int, transit: Transit) -> None:
        """Wait until at most `most` experts are under way."""
        while len(self._ring.under_way) > most:
            leaving = self._ring.under_way.popleft()
            for work in leaving.works:
                transit.wait(
                    work, f"rank {leaving.copy.target_rank} took no expert {leaving.copy.expert} of {leaving.copy.layer}"
                )
