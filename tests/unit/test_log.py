"""Logging: one event a line, for people or machines; a reason is news once."""

from __future__ import annotations

import io
import json

import pytest
import structlog

from eplb_service.errors import InvalidInputError
from eplb_service.log import ReasonLog, configure, get_logger


@pytest.fixture(autouse=True)
def _restore_structlog() -> None:
    structlog.reset_defaults()


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_events_carry_their_bound_fields_and_those_below_the_level_are_left_out(log_format: str) -> None:
    stream = io.StringIO()
    configure(log_format=log_format, level="info", stream=stream)
    log = get_logger(deployment="moe")
    log.debug("window.offered")
    log.warning("window.closed", rank=3)
    (line,) = stream.getvalue().splitlines()
    if log_format == "json":
        fields = json.loads(line)
        assert fields.pop("timestamp").endswith("Z")
        assert fields == {"event": "window.closed", "level": "warning", "deployment": "moe", "rank": 3}
    else:
        assert "window.closed" in line
        assert "deployment=moe" in line
        assert "\x1b" not in line
    structlog.reset_defaults()


def test_a_logger_that_is_kept_follows_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(log_format="json")
    log = get_logger()
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        log.info("window.closed")
        assert "window.closed" in stream.getvalue()
        stream.close()


def test_unknown_formats_and_levels_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="log format 'xml' is not one of console, json"):
        configure(log_format="xml")
    with pytest.raises(InvalidInputError, match="log level 'loud' is not one of debug"):
        configure(level="loud")


def test_a_reason_is_news_when_it_changes_and_again_after_the_subject_was_well() -> None:
    reasons = ReasonLog()
    assert [reasons.is_news("a", reason) for reason in ("x", "x", "y", "x")] == [True, False, True, True]
    assert reasons.is_news("b", "x")
    assert reasons.clear("a")
    assert not reasons.clear("a")
    assert reasons.is_news("a", "x")


def test_the_number_of_subjects_remembered_is_bounded() -> None:
    reasons = ReasonLog(subjects_max=2)
    for subject in ("a", "b", "c"):
        reasons.is_news(subject, "x")
    assert not reasons.is_news("c", "x")
    assert reasons.is_news("a", "x")
