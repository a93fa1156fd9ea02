"""The load of one deployment as the planner sees it: reports in, the last window and its imbalance out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from eplb_service.errors import EplbError
from eplb_service.generation import LiveMap
from eplb_service.ids import Phase
from eplb_service.imbalance import Float64Array, Imbalance
from eplb_service.log import ReasonLog
from eplb_service.membership.machine import Group
from eplb_service.planner.loads import imbalance_under, rank_loads_under, shapes_of
from eplb_service.window.report import Accepted, CombinedWindow, Expected, LoadReport, Refusal, Refused
from eplb_service.window.windows import Windows

LIVE_DIGESTS_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWindow:
    """The last closed window under the live map. rank_loads: shape (L, R), tokens, layers in table order."""

    window: CombinedWindow
    imbalance: Imbalance
    rank_loads: Float64Array


class LoadWatch:
    """Windows of one deployment, and what the last one shows.

    count: called with the outcome of every report (`accepted`, or the refusal).
    """

    def __init__(self, deployment: str, windows: Windows, count: Callable[[str], None]) -> None:
        self.windows = windows
        self.last: LastWindow | None = None
        self.num_closed = 0
        """Windows closed so far, in this life of the planner."""
        self._count = count
        self._group: Group | None = None
        self._expected: Expected | None = None
        self._live_digests: deque[int] = deque(maxlen=LIVE_DIGESTS_KEPT)
        self._is_settled = False
        self._reasons = ReasonLog()
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment)

    @property
    def outcomes(self) -> Counter[str]:
        """Reports by outcome."""
        return self.windows.counters

    def group_changed(self, group: Group | None) -> None:
        """From now on reports of this group are taken; of none while there is none."""
        self._group, self._expected, self._is_settled = group, None, False
        if group is not None:
            self.last = None

    def live_known(self, live: LiveMap) -> None:
        """The live map is this, and no flip can be under way."""
        self.live_passed(live)
        self._is_settled = True

    def live_passed(self, live: LiveMap) -> None:
        """A chunk made this the live map: windows that began or ended under it count, also after the last chunk."""
        if live.digest not in self._live_digests:
            self._live_digests.append(live.digest)
        self._expected = None

    def live_in_motion(self) -> None:
        """A rollout begins: ranks may report live maps that are not known here yet."""
        self._is_settled, self._expected = False, None

    def offer(self, report: LoadReport) -> Accepted | Refused:
        """Take a report, or say why not."""
        expected = self._what_is_expected()
        if expected is None:
            self._count(Refusal.UNKNOWN_RANK.value)
            self.windows.counters[Refusal.UNKNOWN_RANK.value] += 1
            sentence = f"rank {report.rank_id} reports before its group is complete; such windows are dropped"
            return Refused(reason=Refusal.UNKNOWN_RANK, sentence=sentence)
        answer = self.windows.offer(report, expected)
        subject = f"rank {report.rank_id}"
        if isinstance(answer, Refused):
            self._count(answer.reason.value)
            if answer.reason is not Refusal.DUPLICATE and self._reasons.is_news(subject, answer.reason.value):
                self._log.warning("report.refused", rank=report.rank_id, code=answer.reason.value, reason=answer.sentence)
            return answer
        self._count("accepted")
        self._reasons.clear(subject)
        for alarm, sentence in answer.alarms.items():
            if self._reasons.is_news(f"{subject} {alarm.value}", alarm.value):
                self._log.warning("report.odd", rank=report.rank_id, alarm=alarm.value, reason=sentence)
        self.num_closed += len(answer.closed)
        return answer

    def look(self, live: LiveMap | None, group: Group | None) -> LastWindow | None:
        """What the last closed window shows under the live map on the ranks that serve; kept as `last`."""
        window = self.windows.combine(1)
        if window is None or live is None or group is None or self._group is None:
            return None
        try:
            loads = np.concatenate(rank_loads_under(window, live.placement, group))
            self.last = LastWindow(window=window, imbalance=imbalance_under(window, live.placement, group), rank_loads=loads)
        except EplbError as error:
            if self._reasons.is_news("imbalance", str(error)):
                self._log.warning("imbalance.unknown", reason=str(error))
            return None
        return self.last

    def observed(self, live: LiveMap, group: Group, closed: Accepted, min_coverage: float) -> Imbalance | None:
        """Imbalance of a window that this report closed, if it was served wholly by this live map and is full enough."""
        window = self.windows.combine(1, live_digest=live.digest)
        if window is None or window.windows[-1] not in closed.closed or window.coverage < min_coverage:
            return None
        return imbalance_under(window, live.placement, group)

    @staticmethod
    def _phase_of(group: Group) -> Phase | None:
        """Prefill and decode load other experts: a deployment that serves one of them takes no windows of the other."""
        phase = group.registrations[0].phase
        return None if phase is Phase.MIXED else phase

    def _what_is_expected(self) -> Expected | None:
        if self._expected is None and self._group is not None:
            group = self._group
            self._expected = Expected(
                group_id=group.group_id,
                incarnations={rank: address.incarnation for rank, address in group.addresses.items()},
                window_steps=group.registrations[0].window_steps,
                tables=shapes_of(group),
                live_digests=frozenset(self._live_digests) if self._is_settled else None,
                phase=self._phase_of(group),
            )
        return self._expected
