"""What a chunk's copies put on each link, rank and NIC, and how many bytes must leave one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eplb_service.control import Copy
from eplb_service.ids import LayerRef
from eplb_service.topology import LinkKind, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of a chunk. By rank position: length R; by NIC (`Topology.nic_indices`): length `num_nics`.

    by_link: kind of link → bytes over all links of that kind. sent: to other ranks, from live slots. passed_on: to other ranks,
    from staging. received: from other ranks. into_nics, out_of_nics: between nodes. from_backups: over no link, of
    all ranks together.
    """

    by_link: Mapping[LinkKind, int]
    sent: tuple[int, ...]
    passed_on: tuple[int, ...]
    received: tuple[int, ...]
    into_nics: tuple[int, ...]
    out_of_nics: tuple[int, ...]
    from_backups: int = 0

    @property
    def bytes_in_a_row(self) -> int:
        """Most bytes that leave one after another where every rank sends one expert at a time.

        Ranks send from their slots first. What one passes on then may have come from the one that sent longest.
        """
        return max(self.sent) + max(self.passed_on)

    def __str__(self) -> str:
        within, across = self.by_link[LinkKind.SAME_NODE], self.by_link[LinkKind.CROSS_NODE]
        text = f"{within / 1e6:.1f} MB within nodes, {across / 1e6:.1f} MB between them"
        if across:
            text += f" (busiest NIC {max(self.into_nics) / 1e6:.1f} MB in, {max(self.out_of_nics) / 1e6:.1f} MB out)"
        return text + (f", {self.from_backups / 1e6:.1f} MB from backups" if self.from_backups else "")


def traffic_of(copies: Sequence[Copy], topology: Topology, expert_bytes: Mapping[LayerRef, int]) -> Traffic:
    """Traffic of some copies that are carried together."""
    position = {rank: index for index, rank in enumerate(topology.rank_ids)}
    nic_of = topology.nic_indices
    by_link = dict.fromkeys(LinkKind, 0)
    sent, passed_on, received = ([0] * topology.num_ranks for _ in range(3))
    into_nics, out_of_nics = [0] * topology.num_nics, [0] * topology.num_nics
    from_backups = sum(expert_bytes[copy.layer] for copy in copies if copy.is_from_backup)
    for copy in copies:
        if copy.is_from_backup:
            continue
        source, target, size = position[copy.source_rank], position[copy.target_rank], expert_bytes[copy.layer]
        link = topology.link(source, target)
        by_link[link] += size
        if link is LinkKind.SAME_RANK:
            continue
        (passed_on if copy.is_relay else sent)[source] += size
        received[target] += size
        if link is LinkKind.CROSS_NODE:
            out_of_nics[nic_of[source]] += size
            into_nics[nic_of[target]] += size
    return Traffic(
        by_link=by_link,
        sent=tuple(sent),
        passed_on=tuple(passed_on),
        received=tuple(received),
        into_nics=tuple(into_nics),
        out_of_nics=tuple(out_of_nics),
        from_backups=from_backups,
    )
