"""Where ranks say that their group is, when that is far from where it is believed to be.

Ranks of a group step in lock-step, so a window that is far from all others is either a mistake of its rank or news of the whole
group (the planner heard nothing of it for hours). One rank alone is not believed: its report is refused, and what it says is
kept as its claim. Two ranks that claim the same bring a group forward. More than half of them bring it back: that is the case
where the first report of a group was the mistake, and everybody else's would be late for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb_service.ids import RankId

FAR_WINDOWS = 64
"""Windows that a report may be off. An agent process that comes back after a time has up to 16 waiting for each rank."""


@dataclass(slots=True)
class Claims:
    """The last window that each rank claimed in vain. One for each group."""

    _claimed: dict[RankId, int] = field(default_factory=dict)

    def is_far(self, window_index: int, reached: int | None) -> bool:
        """Whether a window is far from where the group is; never while nothing is known of it."""
        return reached is not None and abs(window_index - reached) > FAR_WINDOWS

    def is_believed(self, rank: RankId, window_index: int, reached: int, num_ranks: int) -> bool:
        """Take a rank's claim of a window that is far; whether enough ranks claim the same by now."""
        self._claimed[rank] = window_index
        alike = sum(abs(claimed - window_index) <= FAR_WINDOWS for claimed in self._claimed.values())
        return alike >= min(2, num_ranks) if window_index > reached else 2 * alike > num_ranks

    def forget(self, rank: RankId) -> None:
        """A report of this rank was taken."""
        self._claimed.pop(rank, None)
