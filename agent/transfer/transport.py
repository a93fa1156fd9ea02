"""What every way to bring experts into staging has in common: one seam, with a file for each way behind it.

`chunk_transfer` drives the transports; `tests/contract/test_transport_contract.py` holds all of them to the same promises:

- Both ends of a copy choose the same transport, from what all ranks know alike.
- `expect` waits for nobody; every other wait ends at the chunk's deadline, or when its mesh is abandoned.
- After `quiesce` nothing of a failed chunk reads or writes memory of this rank any more.
- The checksum of an expert comes from where its bytes come from, and travels with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from agent.engine.port import SlotTensor
from agent.transfer.gloo import Work, first_line
from agent.transfer.mesh import GlooMesh
from agent.transfer.staging import ExpertLayout, Region
from eplb_service.control import Copy, RefusalCode
from eplb_service.errors import EnvironmentFault
from eplb_service.ids import LayerRef, RankId

_MIN_WAIT_S = 0.001
_DATA, _WORD = 0, 1
_IN_SLOT = -1


class TransferError(EnvironmentFault):
    """A copy failed. code: what the planner is told."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """What a transfer needs of the rank that it runs on. checksums: of each local slot's expert, by layer (see `checksum`)."""

    rank_id: RankId
    group_rank_ids: tuple[RankId, ...]
    nodes: tuple[str, ...]
    tensors: Mapping[LayerRef, Mapping[str, SlotTensor]]
    layouts: Mapping[LayerRef, ExpertLayout]
    checksums: Mapping[LayerRef, Sequence[int]]

    def column(self, rank_id: RankId) -> int:
        """Position of a rank of the group."""
        return self.group_rank_ids.index(rank_id)


@dataclass(slots=True)
class StagedCopy:
    """A copy that ends here. index: in `Stage.copies`.

    expected: the checksum that its source holds, once it is taken. on_host: whether `region.host` has its bytes too.
    """

    copy: Copy
    region: Region
    index: int
    expected: int = 0
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """An expert that this rank can give away. staged: where it lies, of a relay; None = in the copy's live source slot."""

    checksum: int
    staged: StagedCopy | None = None


@dataclass(frozen=True, slots=True)
class Transit:
    """The connections and the time that the copies of one chunk have. deadline: on `clock`."""

    mesh: GlooMesh
    deadline: float
    clock: Callable[[], float]

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, a little when it is over."""
        return max(self.deadline - self.clock(), _MIN_WAIT_S)

    def wait(self, work: Work, what: str) -> None:
        """Raises TransferError when the work does not end well in time. what: the failure, in words."""
        try:
            work.wait(timedelta(seconds=self.left_s))
        except RuntimeError as error:
            raise TransferError(RefusalCode.TRANSFER, f"{what}: {first_line(error)}") from error

    def check(self, what: str) -> None:
        """Between parts of a copy that waits for no message: raises TransferError when the chunk is over."""
        if self.mesh.is_abandoned:
            raise TransferError(RefusalCode.TRANSFER, f"{what}: the transfer connections were abandoned")
        if self.clock() >= self.deadline:
            raise TransferError(RefusalCode.TRANSFER, f"{what}: the chunk's time is over")


def data_tag(index: int) -> int:
    """Message tag of the bytes of the copy at an index."""
    return 2 * index + _DATA


def word_tag(index: int) -> int:
    """Message tag of what its source says of them (`word_of`)."""
    return 2 * index + _WORD


def word_of(held: Held) -> torch.Tensor:
    """What the source of a copy says of it: its checksum, and where in the source's staging it lies; -1 = in its live slot.

    Shape (2,), int64.
    """
    return torch.tensor([held.checksum, _IN_SLOT if held.staged is None else held.staged.region.offset], dtype=torch.int64)


@dataclass(slots=True)
class AwaitedWord:
    """The word of a copy's source, on its way. It also says that the bytes may be read."""

    value: torch.Tensor
    work: Work

    @classmethod
    def post(cls, mesh: GlooMesh, source: int, index: int) -> AwaitedWord:
        """Begin to receive it from the rank at column `source`."""
        value = torch.zeros(2, dtype=torch.int64)
        return cls(value, mesh.receive(value, source, word_tag(index)))

    def receive(self, transit: Transit, copy: Copy) -> tuple[int, int]:
        """Wait for it: checksum and place, as `word_of` has them. Raises TransferError."""
        transit.wait(self.work, f"rank {copy.source_rank} sent no expert {copy.expert} of {copy.layer}")
        checksum, offset = self.value.tolist()
        return checksum, offset


class Transport(Protocol):
    """One way for experts to travel. Used by one worker thread; every method may raise TransferError or RuntimeError."""

    def carries(self, copy: Copy) -> bool:
        """Whether this copy goes this way. The same on all ranks."""
        ...

    def expect(self, arrival: StagedCopy, transit: Transit) -> None:
        """Get ready for an expert that ends here; waits for nobody. Called for all of a chunk before anything else."""
        ...

    def give(self, index: int, copy: Copy, held: Held, transit: Transit) -> None:
        """Let an expert that is here leave, or be read; may wait for room, and for nothing that needs this rank."""
        ...

    def take(self, arrival: StagedCopy, transit: Transit) -> None:
        """Bring an expected expert into `arrival.region.device` (in order of the current stream) and set `arrival.expected`."""
        ...

    def finish(self, transit: Transit) -> None:
        """Wait until what was given has left."""
        ...

    def quiesce(self) -> None:
        """After a failure, the mesh abandoned: forget the chunk. Returns once no work of it is left but the device's."""
        ...
