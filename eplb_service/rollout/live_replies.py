"""Asks every rank what it routes by, until all replies agree.

    HELLO ──all replied, equal──► `agreed`
      ▲ └──all replied, unequal──► INCONSISTENT (`disagreement`)
      └────────slow timer──────────────┘

A reply counts only if no chunk of ours can still change what it says: ranks answer while they hold no open chunk, and a reply
that is older than the last chunk's end (delayed on its way) is told by the ids that it carries.
"""

from __future__ import annotations

from collections.abc import Iterable

from eplb_service.control import Disarm, Hello, Live
from eplb_service.generation import LiveMap
from eplb_service.ids import ChunkId, Epoch, RankId
from eplb_service.membership.group import Group
from eplb_service.rollout.events import Alarm, AlarmCode, Effect, RolloutSettings, RolloutState, Send
from eplb_service.transitions import Trail


class LiveReplies:
    """What the ranks of a group replied so far. last_opened: our last chunk, which a rank that replies must have closed."""

    def __init__(
        self, *, epoch: Epoch, group: Group, settings: RolloutSettings, last_opened: ChunkId, trail: Trail[RolloutState]
    ) -> None:
        self.state = RolloutState.HELLO
        self.since_s = 0.0
        self.deadline_s = 0.0
        self.stalled = False
        self.last_error = ""
        self.agreed: LiveMap | None = None
        self.disagreement: Alarm | None = None
        self._epoch = epoch
        self._group = group
        self._settings = settings
        self._last_opened = last_opened
        self._trail = trail
        self._replies: dict[RankId, LiveMap] = {}

    @property
    def waiting_for(self) -> tuple[RankId, ...]:
        """Ranks that have not replied, in column order."""
        return tuple(rank for rank in self._group.rank_ids if rank not in self._replies)

    def ask_all(self, now: float) -> list[Effect]:
        """Begin, or begin anew: what was replied before does not count."""
        self._replies.clear()
        self.agreed = self.disagreement = None
        self._enter(RolloutState.HELLO, now)
        self.deadline_s = now + self._settings.hello_timeout_s
        return self._ask(self._group.rank_ids)

    def overdue(self, now: float) -> list[Effect]:
        """The deadline of the state passed: ask those that are silent, or all again."""
        if self.state is RolloutState.INCONSISTENT:
            return self.ask_all(now)
        self.deadline_s = now + self._settings.hello_timeout_s
        self.stalled = True
        return self._ask(self.waiting_for)

    def take(self, live: Live, live_map: LiveMap, now: float) -> bool:
        """Note a reply, and compare once none is missing; False when our last chunk may still be open on that rank."""
        if live.closed_id < self._last_opened:
            return False
        self._replies[live.sender.rank_id] = live_map
        if not self.waiting_for:
            self._compare()
            if self.disagreement is not None:
                self._enter(RolloutState.INCONSISTENT, now)
                self.deadline_s = now + self._settings.inconsistent_retry_s
                self.last_error = self.disagreement.reason
        return True

    def _enter(self, state: RolloutState, now: float) -> None:
        self._trail.enter(state)
        self.state, self.since_s, self.stalled = state, now, False

    def _compare(self) -> None:
        """Rows must be equal. Generation numbers may differ where rows do not: the highest names the layer."""
        ranks = self._group.rank_ids
        first = self._replies[ranks[0]]
        self.agreed = self.disagreement = None
        for rank in ranks[1:]:
            differing = first.differing_layers(self._replies[rank].placement)
            if differing:
                layer = differing[0]
                self.disagreement = Alarm(
                    AlarmCode.INCONSISTENT,
                    f"ranks {ranks[0]} and {rank} route {len(differing)} layers by different rows: layer {layer} has digest"
                    f" {first.row_digests[layer]:#x} against {self._replies[rank].row_digests[layer]:#x}",
                )
                return
        columns = zip(*(self._replies[rank].generations for rank in ranks), strict=True)
        self.agreed = LiveMap(first.placement, tuple(max(column) for column in columns))

    def _ask(self, ranks: Iterable[RankId]) -> list[Effect]:
        """Hello of our own epoch closes nothing of that epoch: a chunk that we left is closed by a Disarm."""
        effects: list[Effect] = []
        for rank in ranks:
            to = self._group.addresses[rank]
            if self._last_opened:
                effects.append(Send(Disarm(to=to, chunk_id=self._last_opened, epoch=self._epoch)))
            effects.append(Send(Hello(to=to, epoch=self._epoch)))
        return effects
