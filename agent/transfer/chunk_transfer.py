"""One chunk's copies, from first to last: who carries which, in which order, and whether what arrived is right.

The order is such that no rank waits in a circle, whatever the list of copies: everything that will arrive is expected first;
then experts leave that lie in live slots, which depends on nobody; then relays, each once its expert is in staging; then the
rest arrives. Only relays wait for others, and only for experts that leave before any relay does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from agent.transfer.checksum import checksum
from agent.transfer.gloo import first_line
from agent.transfer.mesh import GlooMesh
from agent.transfer.pace import Pacer, Pressure
from agent.transfer.staging import Staging
from agent.transfer.streams import Streams
from agent.transfer.transport import Held, LocalRank, StagedCopy, TransferError, Transit, Transport
from eplb_service.control import Copy, LinkBytes, RefusalCode, Stage


class ChunkTransfer:
    """Carries the copies of chunks, one chunk at a time. Used by one worker thread; `mesh.abandon` by any.

    transports: the first that carries a copy takes it. pressure: what the engine says of it, and what that did.
    """

    def __init__(
        self,
        rank: LocalRank,
        staging: Staging,
        transports: Sequence[Transport],
        streams: Streams,
        clock: Callable[[], float],
        pressure: Pressure | None = None,
    ) -> None:
        self._rank, self._staging, self._carriers, self._streams, self._clock = rank, staging, transports, streams, clock
        self.pressure = pressure or Pressure()

    def run(self, stage: Stage, mesh: GlooMesh, deadline: float) -> tuple[list[StagedCopy], LinkBytes]:
        """Bring every copy that ends here into staging, verified.

        deadline: on this object's clock. Raises TransferError; then staging holds nothing of use, and is free after `quiesce`.
        """
        try:
            with self._streams.on_side_stream():
                staged = self._run(stage, Transit(mesh, deadline, self._clock))
                self._verify(staged)
        except RuntimeError as error:
            raise TransferError(RefusalCode.TRANSFER, f"a copy failed: {first_line(error)}") from error
        return staged, self._link_bytes(staged)

    def quiesce(self) -> None:
        """After a failure, the mesh abandoned: returns once nothing of the chunk can touch staging any more."""
        for transport in self._carriers:
            transport.quiesce()
        with self._streams.on_side_stream():
            self._streams.record().wait_host()

    def _run(self, stage: Stage, transit: Transit) -> list[StagedCopy]:
        me = self._rank.rank_id
        arrivals: dict[int, StagedCopy] = {}
        for index, copy in enumerate(stage.copies):
            if copy.target_rank == me:
                arrivals[index] = StagedCopy(copy, self._staging.take(copy.layer), index)
                self._transport_of(copy).expect(arrivals[index], transit)
        pacer = Pacer(
            stage.throttle, clock=self._clock, wait=transit.mesh.wait, deadline=transit.deadline, pressure=self.pressure
        )
        leaving = [(index, copy) for index, copy in enumerate(stage.copies) if copy.source_rank == me]
        for index, copy in leaving:
            if not copy.is_relay:
                held = Held(self._rank.checksums[copy.layer][copy.source_slot])
                pacer.before_expert(self._leaving_bytes(copy))
                self._transport_of(copy).give(index, copy, held, transit)
        taken: set[int] = set()
        for index, copy in leaving:
            if copy.is_relay:
                first = arrivals[copy.relay_of]
                self._take(first, taken, transit)
                pacer.waited()
                pacer.before_expert(self._leaving_bytes(copy))
                self._transport_of(copy).give(index, copy, Held(first.expected, first), transit)
        for arrival in arrivals.values():
            self._take(arrival, taken, transit)
        for transport in self._carriers:
            transport.finish(transit)
        return list(arrivals.values())

    def _leaving_bytes(self, copy: Copy) -> int:
        """Bytes that go to another rank: none of a copy between slots of this one."""
        return 0 if copy.target_rank == self._rank.rank_id else self._rank.layouts[copy.layer].expert_bytes

    def _take(self, arrival: StagedCopy, taken: set[int], transit: Transit) -> None:
        if arrival.index not in taken:
            taken.add(arrival.index)
            self._transport_of(arrival.copy).take(arrival, transit)

    def _transport_of(self, copy: Copy) -> Transport:
        for transport in self._carriers:
            if transport.carries(copy):
                return transport
        raise TransferError(
            RefusalCode.TRANSFER,
            f"nothing here carries expert {copy.expert} of {copy.layer} from rank {copy.source_rank} to {copy.target_rank}",
        )

    def _verify(self, staged: list[StagedCopy]) -> None:
        """Compare what lies in staging, on the device that will use it, with what the source says of its bytes."""
        sums = [checksum(entry.region.device) for entry in staged]
        found = torch.stack(sums).tolist() if sums else []
        for entry, value in zip(staged, found, strict=True):
            if value != entry.expected:
                copy = entry.copy
                raise TransferError(
                    RefusalCode.CHECKSUM,
                    f"expert {copy.expert} of {copy.layer} from {copy.source}: checksum"
                    f" {value & (1 << 64) - 1:#x}, its source has {entry.expected & (1 << 64) - 1:#x} since load or flip",
                )

    def _link_bytes(self, staged: list[StagedCopy]) -> LinkBytes:
        rank = self._rank
        node = dict(zip(rank.group_rank_ids, rank.nodes, strict=True))
        count = {"same_rank": 0, "same_node": 0, "cross_node": 0}
        for entry in staged:
            if entry.copy.is_from_backup:
                continue  # over no link
            source = entry.copy.source_rank
            near = "same_node" if node[source] == node[rank.rank_id] else "cross_node"
            link = "same_rank" if source == rank.rank_id else near
            count[link] += rank.layouts[entry.copy.layer].expert_bytes
        return LinkBytes(**count)
