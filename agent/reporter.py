"""Load reports on their way to the planner: bounded by windows and bytes, the oldest goes first, and what goes is counted.

A planner that is away costs dropped windows and nothing else: nobody waits, memory stays bounded (an unbounded queue of
expert statistics ended an engine for lack of memory in sglang#18587). Reports are idempotent, so those that were sent but
not answered when a stream broke are sent again. Pure; the stream is the runtime's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, field

from eplb_service.errors import InvalidInputError
from eplb_service.ids import GroupId, Incarnation, RankId
from eplb_service.window.report import LoadReport

ReportKey = tuple[RankId, Incarnation, GroupId, int]


@dataclass(slots=True)
class _Queue:
    """Reports of one rank, oldest first. size_bytes: of their counts. dropped: windows lost here so far."""

    reports: deque[LoadReport] = field(default_factory=deque)
    size_bytes: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Reporter:
    """What is to be sent, what was sent and not answered, and how many windows were lost.

    windows_max, bytes_max: bounds for each rank. in_flight_max: reports sent and not answered, all ranks together.
    refused, num_answered: reports that the planner did not believe, and all that it answered.

    >>> reporter = Reporter()
    >>> reporter.take(ready=()) is None
    True
    """

    windows_max: int = 16
    bytes_max: int = 32 << 20
    in_flight_max: int = 16
    refused: int = 0
    num_answered: int = 0
    _queues: dict[RankId, _Queue] = field(default_factory=dict)
    _in_flight: OrderedDict[ReportKey, LoadReport] = field(default_factory=OrderedDict)
    _turn: RankId | None = None
    _last_answer: dict[RankId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.windows_max, self.bytes_max, self.in_flight_max) < 1:
            raise InvalidInputError(
                f"bounds must be >= 1; got windows_max {self.windows_max}, bytes_max {self.bytes_max},"
                f" in_flight_max {self.in_flight_max}"
            )

    def offer(self, report: LoadReport) -> None:
        """Queue a report; the oldest of its rank make room for it."""
        queue = self._queues.setdefault(report.rank_id, _Queue())
        queue.reports.append(report)
        queue.size_bytes += _size_bytes(report)
        self._bound(queue)

    def take(self, ready: Container[RankId]) -> LoadReport | None:
        """The next report to send, ranks in turn; None when there is none, or enough are unanswered.

        ready: ranks that the planner knows by now.
        """
        if len(self._in_flight) >= self.in_flight_max:
            return None
        waiting = sorted(rank for rank, queue in self._queues.items() if queue.reports and rank in ready)
        if not waiting:
            return None
        rank_id = next((rank for rank in waiting if self._turn is None or rank > self._turn), waiting[0])
        self._turn = rank_id
        queue = self._queues[rank_id]
        report = queue.reports.popleft()
        queue.size_bytes -= _size_bytes(report)
        self._in_flight[_key(report)] = report
        return report

    def has_next(self, ready: Container[RankId]) -> bool:
        """Whether `take` would return a report."""
        waiting = any(queue.reports and rank in ready for rank, queue in self._queues.items())
        return waiting and len(self._in_flight) < self.in_flight_max

    def answered(self, key: ReportKey, *, accepted: bool, code: str) -> bool:
        """The planner answered. Returns whether this rank was refused for another reason than the last time: tell someone.

        A duplicate is what sending again costs: it counts as accepted.
        """
        known = self._in_flight.pop(key, None) is not None
        word = "" if accepted or code == "duplicate" else code
        if not known:
            return False
        self.num_answered += 1
        self.refused += bool(word)
        changed = self._last_answer.get(key[0], "") != word
        self._last_answer[key[0]] = word
        return changed and bool(word)

    def unsendable(self, report: LoadReport) -> None:
        """A report that was taken and cannot be put on the wire: lost, counted."""
        self._in_flight.pop(_key(report), None)
        self._queues.setdefault(report.rank_id, _Queue()).dropped += 1

    def stream_lost(self) -> None:
        """Put what was not answered back, in order, before what has not been sent."""
        for report in reversed(self._in_flight.values()):
            queue = self._queues.setdefault(report.rank_id, _Queue())
            queue.reports.appendleft(report)
            queue.size_bytes += _size_bytes(report)
        self._in_flight.clear()
        for queue in self._queues.values():
            self._bound(queue)

    def forget(self, rank_id: RankId) -> None:
        """Drop everything of a rank whose engine, or group, is another one by now; these windows are of no use to anyone."""
        self._queues.pop(rank_id, None)
        self._last_answer.pop(rank_id, None)
        for key in [key for key in self._in_flight if key[0] == rank_id]:
            del self._in_flight[key]

    def dropped(self, rank_id: RankId) -> int:
        """Windows of a rank's present life that were lost here."""
        queue = self._queues.get(rank_id)
        return 0 if queue is None else queue.dropped

    @property
    def num_queued(self) -> int:
        """Reports not sent yet."""
        return sum(len(queue.reports) for queue in self._queues.values())

    @property
    def num_in_flight(self) -> int:
        """Reports sent and not answered."""
        return len(self._in_flight)

    def _bound(self, queue: _Queue) -> None:
        while queue.reports and (len(queue.reports) > self.windows_max or queue.size_bytes > self.bytes_max):
            queue.size_bytes -= _size_bytes(queue.reports.popleft())
            queue.dropped += 1


def _size_bytes(report: LoadReport) -> int:
    return sum(table.counts.nbytes for table in report.tables)


def _key(report: LoadReport) -> ReportKey:
    return (report.rank_id, report.incarnation, report.group_id, report.window_index)
