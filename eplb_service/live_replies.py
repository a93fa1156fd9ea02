"""Collects what ranks reply to Hello and says whether they route by one map.

A reply counts only if no chunk of ours can still change what it says: ranks answer while they hold no open chunk, and a reply
that is older than the last chunk's end (delayed on its way) is told by the ids that it carries.
"""

from __future__ import annotations

from eplb_service.control import Live
from eplb_service.generation import LiveMap
from eplb_service.ids import ChunkId, RankId
from eplb_service.membership import Group
from eplb_service.rollout_events import NO_CHUNK, Alarm, AlarmCode


class LiveReplies:
    """One round of asking. last_opened: our last chunk, which every rank that replies must have closed."""

    def __init__(self, group: Group, last_opened: ChunkId = NO_CHUNK) -> None:
        self.last_opened = last_opened
        self._group = group
        self._replies: dict[RankId, LiveMap] = {}

    @property
    def missing(self) -> tuple[RankId, ...]:
        """Ranks that have not replied, in column order."""
        return tuple(rank for rank in self._group.rank_ids if rank not in self._replies)

    def take(self, live: Live, live_map: LiveMap) -> bool:
        """Note a reply; False when our last chunk may still be open on that rank."""
        if live.closed_id < self.last_opened:
            return False
        self._replies[live.sender.rank_id] = live_map
        return True

    def agreed(self) -> LiveMap | Alarm:
        """The one live map of all ranks, or what they disagree about; only when none is missing.

        Rows must be equal. Generation numbers may differ where rows do not: the highest names the layer.
        """
        ranks = self._group.rank_ids
        first = self._replies[ranks[0]]
        for rank in ranks[1:]:
            differing = first.differing_layers(self._replies[rank].placement)
            if differing:
                layer = differing[0]
                return Alarm(
                    AlarmCode.INCONSISTENT,
                    f"ranks {ranks[0]} and {rank} route {len(differing)} layers by different rows: layer {layer} has digest"
                    f" {first.row_digests[layer]:#x} against {self._replies[rank].row_digests[layer]:#x}",
                )
        columns = zip(*(self._replies[rank].generations for rank in ranks), strict=True)
        return LiveMap(first.placement, tuple(max(column) for column in columns))
