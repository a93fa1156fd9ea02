"""Logging of the processes: structlog, one event a line on stderr, for people (console) or machines (JSON).

Events are named `noun.past_participle` (`window.closed`, `hook.linked`), with deployment, generation, epoch and rank as
fields. A repeated reason is logged when it changes: `ReasonLog` remembers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

import structlog

from eplb_service.errors import InvalidInputError

FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error")


class _Stderr:
    """Whatever `sys.stderr` is when a line is written: loggers are kept, and who replaced stderr takes it back."""

    def write(self, text: str) -> int:
        """Write to the present one."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flush the present one."""
        sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether the present one is a terminal."""
        return sys.stderr.isatty()


def configure(*, log_format: str = "console", level: str = "info", stream: TextIO | None = None) -> None:
    """Set up logging for the whole process. Raises InvalidInputError for an unknown format or level."""
    if log_format not in FORMATS:
        raise InvalidInputError(f"log format {log_format!r} is not one of {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise InvalidInputError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    target: TextIO | _Stderr = stream or _Stderr()
    renderer: Any = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=target.isatty(), pad_event_to=26)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(target),  # type: ignore[arg-type]  # it writes and flushes, no more
        cache_logger_on_first_use=True,
    )


def get_logger(**bound: object) -> Any:
    """A logger with fields bound to every event. Typed Any: structlog's loggers take any field."""
    return structlog.get_logger(**bound)


@dataclass(slots=True)
class ReasonLog:
    """Says whether a reason is news: each subject is told once until its reason changes or it is cleared.

    >>> reasons = ReasonLog()
    >>> reasons.is_news("store", "refused"), reasons.is_news("store", "refused"), reasons.is_news("store", "timed out")
    (True, False, True)
    """

    subjects_max: int = 4096
    _last: dict[str, str] = field(default_factory=dict)

    def is_news(self, subject: str, reason: str) -> bool:
        """Whether to log this reason of a subject."""
        if self._last.get(subject) == reason:
            return False
        self._last.pop(subject, None)
        self._last[subject] = reason
        if len(self._last) > self.subjects_max:  # the subject that has been quiet for longest
            del self._last[next(iter(self._last))]
        return True

    def clear(self, subject: str) -> bool:
        """The subject is well again. Returns whether it was not."""
        return self._last.pop(subject, None) is not None
