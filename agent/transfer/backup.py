"""Experts that no live rank holds come from elsewhere: host memory, or the checkpoint they were loaded from.

A rank that died took the only replica of some experts with it (vllm#41204, sglang#12068). What a source gives counts only if it
has, to the last byte, what the ranks of the group loaded: the same post-processing, the same checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from agent.transfer.gloo import first_line
from agent.transfer.staging import ExpertLayout
from agent.transfer.transport import Held, StagedCopy, TransferError, Transit
from eplb_service.control import Copy, RefusalCode
from eplb_service.errors import EplbError, InvalidInputError
from eplb_service.ids import LayerRef

KnownChecksums = Mapping[LayerRef, Mapping[int, int]]
"""By layer and expert: of the packed bytes, as the ranks of the group loaded them."""


class ExpertSource(Protocol):
    """Where whole experts can be had without a rank. name: for people."""

    name: str

    def read(self, layer: LayerRef, expert: int, layout: ExpertLayout, region: torch.Tensor) -> bool:
        """Fill the expert's packed bytes, on the host; False = it does not have this expert.

        region: shape (layout.num_bytes,), uint8. Raises EplbError or OSError when it has it and cannot give it.
        """
        ...


class HostBackup:
    """Packed experts in host memory, no more than a budget: a source that needs neither disk nor post-processing.

    max_bytes: of packed experts.
    """

    name = "host memory"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._used = max_bytes, 0
        self._experts: dict[tuple[LayerRef, int], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return self._used

    def fill(
        self, source: ExpertSource, experts: Iterable[tuple[LayerRef, int]], layouts: Mapping[LayerRef, ExpertLayout]
    ) -> int:
        """Take experts from another source, in this order, as long as they fit; those that it lacks are left out.

        Returns how many are held now.
        """
        for layer, expert in experts:
            layout = layouts[layer]
            if (layer, expert) in self._experts or self._used + layout.num_bytes > self._max_bytes:
                continue
            packed = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            if source.read(layer, expert, layout, packed):
                self._experts[layer, expert] = packed
                self._used += layout.num_bytes
        return len(self._experts)

    def read(self, layer: LayerRef, expert: int, layout: ExpertLayout, region: torch.Tensor) -> bool:
        """Copy what is held."""
        packed = self._experts.get((layer, expert))
        if packed is None:
            return False
        if packed.numel() != layout.num_bytes:
            raise InvalidInputError(
                f"the backup of expert {expert} of {layer} has {packed.numel()} bytes, this rank packs {layout.num_bytes}"
            )
        region.copy_(packed)
        return True


class BackupRead:
    """A `Transport` of copies that come from no rank. The first source that has an expert gives it."""

    def __init__(
        self, sources: Sequence[ExpertSource], known: KnownChecksums, layouts: Mapping[LayerRef, ExpertLayout]
    ) -> None:
        self._sources, self._known, self._layouts = sources, known, layouts

    def carries(self, copy: Copy) -> bool:
        """Copies without a source rank."""
        return copy.is_from_backup

    def expect(self, arrival: StagedCopy, transit: Transit) -> None:
        """Nobody sends it."""

    def give(self, index: int, copy: Copy, held: Held, transit: Transit) -> None:  # noqa: ARG002  # of the interface
        """Nobody does."""
        raise TransferError(RefusalCode.INVALID, f"copy {index} of expert {copy.expert} of {copy.layer} has no source rank")

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """Read it into host memory, then bring it to the device."""
        copy, region = arrival.copy, arrival.region
        what = f"expert {copy.expert} of {copy.layer} was not restored"
        transit.check(what)
        expected = self._known.get(copy.layer, {}).get(copy.expert)
        if expected is None:
            raise TransferError(RefusalCode.TRANSFER, f"{what}: nobody knows its checksum since these weights were loaded")
        for source in self._sources:
            try:
                found = source.read(copy.layer, copy.expert, self._layouts[copy.layer], region.host)
            except (EplbError, OSError) as error:
                raise TransferError(RefusalCode.TRANSFER, f"{what} from {source.name}: {first_line(error)}") from error
            if found:
                arrival.expected, arrival.on_host = expected, True
                region.to_device()
                return
        names = ", ".join(source.name for source in self._sources) or "none"
        raise TransferError(RefusalCode.TRANSFER, f"{what}: no rank sends it and no backup has it (backups here: {names})")

    def finish(self, transit: Transit) -> None:
        """Nothing leaves."""

    def quiesce(self) -> None:
        """Reads end before they return."""
