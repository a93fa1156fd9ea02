"""Copies whose source and target are the same rank: on the device, from a slot or from another region of staging."""

from __future__ import annotations

from agent.transfer.transport import Held, LocalRank, StagedCopy, Transit
from eplb_service.control import Copy


class LocalCopy:
    """A `Transport` within one rank."""

    def __init__(self, rank: LocalRank) -> None:
        self._rank = rank
        self._arrivals: dict[int, StagedCopy] = {}

    def carries(self, copy: Copy) -> bool:
        """Copies that stay on their rank."""
        return copy.source_rank == copy.target_rank

    def expect(self, arrival: StagedCopy, transit: Transit) -> None:  # noqa: ARG002  # of the interface
        """Remember where it goes."""
        self._arrivals[arrival.index] = arrival

    def give(self, index: int, copy: Copy, held: Held, transit: Transit) -> None:
        """Copy it, in order of the current stream."""
        transit.check(f"expert {copy.expert} of {copy.layer} was not copied within its rank")
        arrival = self._arrivals.pop(index)
        if held.staged is not None:
            arrival.region.device.copy_(held.staged.region.device, non_blocking=True)
        else:
            layout = self._rank.layouts[copy.layer]
            layout.pack(self._rank.tensors[copy.layer], copy.source_slot, arrival.region.device)
        arrival.expected = held.checksum

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """It was copied when it was given."""

    def finish(self, transit: Transit) -> None:
        """Nothing leaves."""

    def quiesce(self) -> None:
        """Forget what was not copied."""
        self._arrivals.clear()
