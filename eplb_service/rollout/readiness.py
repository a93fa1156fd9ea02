"""What ranks last said of themselves beside the protocol, and whether a chunk can be opened on them now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.control import Live, Pulse
from eplb_service.ids import RankId
from eplb_service.membership.group import Group


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no chunk can be opened now. fatal: waiting does not help. is_timed: the wait for it has a deadline."""

    reason: str
    fatal: bool = False
    is_timed: bool = True


@dataclass(frozen=True, slots=True)
class _Vitals:
    weights_version: int
    voting: bool = True
    off_reason: str = ""
    idle: bool = False


class Readiness:
    """Weights version, vote and steps of every rank of a group, and which have no control stream (`away`)."""

    def __init__(self, group: Group) -> None:
        self.away: frozenset[RankId] = frozenset()
        self._ranks = {entry.address.rank_id: _Vitals(entry.weights_version) for entry in group.registrations}

    def note(self, message: Live | Pulse) -> None:
        """Take in what a rank says of itself."""
        rank = message.sender.rank_id
        idle = message.idle if isinstance(message, Pulse) else self._ranks[rank].idle
        self._ranks[rank] = replace(
            self._ranks[rank],
            weights_version=message.weights_version,
            voting=message.voting,
            off_reason=message.off_reason,
            idle=idle,
        )

    @property
    def is_idle(self) -> bool:
        """The engine runs no steps: nothing can be voted through, and nobody is to blame."""
        return all(vitals.idle for vitals in self._ranks.values())

    @property
    def weights_version(self) -> int:
        """Of all ranks; only without an obstacle."""
        return next(iter(self._ranks.values())).weights_version

    def obstacle(self) -> Obstacle | None:
        """What speaks against a chunk now."""
        for rank, vitals in self._ranks.items():
            if not vitals.voting:
                return Obstacle(f"rank {rank} takes no part in votes: {vitals.off_reason or 'no reason given'}", fatal=True)
        if self.away:
            return Obstacle("ranks are without a control stream")
        versions = sorted({vitals.weights_version for vitals in self._ranks.values()})
        if len(versions) > 1:
            return Obstacle(f"ranks serve different weights versions: {versions}")
        if self.is_idle:
            return Obstacle("the engine runs no steps", is_timed=False)  # a state, not a time-out
        return None
