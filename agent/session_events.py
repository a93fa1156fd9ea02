"""What goes into the session and what comes out: events, and effects in the order that the shell must run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from agent.frames import RegistrationAnswer
from eplb_service.attach import FromAgent
from eplb_service.control import FromRank, Registration, ToRank
from eplb_service.ids import RankId
from eplb_service.window.report import LoadReport

LinkId = NewType("LinkId", int)
"""One connection of a hook; never reused within a process."""

StreamId = NewType("StreamId", int)
"""One control stream; never reused within a process."""

HookMessage = Registration | LoadReport | FromRank


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class HookSaid:
    """A frame from a hook. Its first one is a Registration."""

    link: LinkId
    message: HookMessage


@dataclass(frozen=True, slots=True)
class HookGone:
    """A link ended, whoever ended it."""

    link: LinkId
    reason: str


@dataclass(frozen=True, slots=True)
class RegisterAccepted:
    """The planner took a registration."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RegisterFailed:
    """The planner refused a registration, or (refused false) did not answer."""

    attempt: int
    refused: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PlannerSaid:
    """A message on a control stream."""

    stream: StreamId
    message: ToRank


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A control stream ended or could not be opened."""

    stream: StreamId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: `due_at_s` is reached."""


Event = HookSaid | HookGone | RegisterAccepted | RegisterFailed | PlannerSaid | StreamClosed | Tick


# ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Register:
    """Ask the planner; answer with RegisterAccepted or RegisterFailed of the same attempt."""

    attempt: int
    registration: Registration


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a control stream; whatever is sent on it follows. When it ends: StreamClosed."""

    stream: StreamId


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a control stream, once what was sent before is out. No StreamClosed is due."""

    stream: StreamId


@dataclass(frozen=True, slots=True)
class ToPlanner:
    """Send on a control stream."""

    stream: StreamId
    message: FromAgent


@dataclass(frozen=True, slots=True)
class ToHook:
    """Send on a link."""

    link: LinkId
    message: ToRank | RegistrationAnswer


@dataclass(frozen=True, slots=True)
class CloseLink:
    """End a link, once what was sent before is out."""

    link: LinkId
    reason: str


@dataclass(frozen=True, slots=True)
class QueueReport:
    """Hand a load report to the reporter."""

    report: LoadReport


@dataclass(frozen=True, slots=True)
class ForgetReports:
    """Drop the load reports of a rank's earlier life or group, or of a rank that is gone."""

    rank_id: RankId


@dataclass(frozen=True, slots=True)
class Log:
    """Log an event `noun.past_participle`."""

    event: str
    level: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Notice:
    """Tell the operator on stderr, in one sentence."""

    sentence: str


Effect = Register | OpenStream | CloseStream | ToPlanner | ToHook | CloseLink | QueueReport | ForgetReports | Log | Notice
