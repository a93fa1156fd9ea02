"""The journal of one generation: what happened on its way to the ranks, when, to which chunk and rank, and why.

It is bounded and says so: beyond `EVENTS_MAX` the first `HEAD_KEPT` events and the newest stay, what lay between is counted.
It is written behind, so the leader that wrote it may die with the end of its part unwritten: a leader that takes it up sees
whether the part before was ended in good order (`LEAD_ENDED`) and, where it was not, notes a gap.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from eplb_service.ids import ChunkId, Epoch, GenerationNumber, RankId

EVENTS_MAX = 512
HEAD_KEPT = 64
GAPS_MAX = 32
TEXT_CHARACTERS_MAX = 400
LEAD_ENDED = "lead.ended"
"""The last event of a leader that stopped, or was stopped, in good order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent:
    """One thing that happened. at_s: wall clock of the planner of `epoch`. event: `chunk.opened`, … as in the logs."""

    at_s: float
    epoch: Epoch
    event: str
    text: str
    chunk_id: ChunkId | None = None
    rank_id: RankId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The events of one generation, oldest first.

    num_dropped: events that are missing for want of room, between the first HEAD_KEPT and the rest. gaps: where events may
    be missing since a leader died, one sentence each.

    >>> empty = Journal(generation=GenerationNumber(7))
    >>> event = JournalEvent(at_s=1.0, epoch=Epoch(1), event="rollout.started", text="2 chunks")
    >>> empty.with_event(event).with_event(event).incomplete
    ''
    """

    generation: GenerationNumber
    events: tuple[JournalEvent, ...] = ()
    num_dropped: int = 0
    gaps: tuple[str, ...] = ()

    @property
    def incomplete(self) -> str:
        """What is missing, in a sentence; empty when nothing is."""
        dropped = (
            f"{self.num_dropped} events after the first {HEAD_KEPT} were left out: a journal keeps {EVENTS_MAX}"
            if self.num_dropped
            else ""
        )
        return "; ".join((*self.gaps, *((dropped,) if dropped else ())))

    def with_event(self, event: JournalEvent) -> Journal:
        """The same and one event more, its text cut to TEXT_CHARACTERS_MAX."""
        if len(event.text) > TEXT_CHARACTERS_MAX:
            event = dataclasses.replace(event, text=event.text[: TEXT_CHARACTERS_MAX - 1] + "…")
        events = (*self.events, event)
        surplus = len(events) - EVENTS_MAX
        if surplus > 0:
            events = events[:HEAD_KEPT] + events[HEAD_KEPT + surplus :]
        return dataclasses.replace(self, events=events, num_dropped=self.num_dropped + max(0, surplus))

    def taken_up(self, epoch: Epoch) -> Journal:
        """The same in the hands of the leader of `epoch`: with a gap, unless the one before ended its part."""
        last = self.events[-1] if self.events else None
        if last is not None and last.event == LEAD_ENDED:
            return self
        if last is None:
            return self.with_gap(f"what happened before epoch {epoch} was not kept")
        return self.with_gap(
            f"the leader of epoch {last.epoch} died: what happened between {last.event} and epoch {epoch} may be missing"
        )

    def with_gap(self, sentence: str) -> Journal:
        """The same, with events missing for this reason."""
        return dataclasses.replace(self, gaps=(*self.gaps, sentence)[-GAPS_MAX:])
