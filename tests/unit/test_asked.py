"""When an engine that asks should have asked by now."""

from __future__ import annotations

from collections import deque

import pytest

from eplb_service.planner.asked import NEVER_ASKED_S, SILENT_S, Asked


def asked(*times: float, since_s: float | None = 0.0) -> Asked:
    return Asked(times=deque(times), expected_since_s=since_s)


@pytest.mark.parametrize(
    ("questions", "now_s", "said"),
    [
        (asked(10.0, 100.0, 190.0), 460.0, ""),
        (asked(10.0, 100.0, 190.0), 461.0, "no question for 271 s; the engine asked every 90 s before: "),
        (asked(1.0, 2.0), 2.0 + SILENT_S, ""),  # three short intervals are nothing yet
        (asked(1.0, 2.0), 2.1 + SILENT_S, "no question for 30 s; the engine asked every 1 s before: "),
        (asked(5.0), 5.0 + NEVER_ASKED_S, ""),  # once is no interval
        (asked(5.0), 6.0 + NEVER_ASKED_S, "no question for 901 s: "),
        (asked(), NEVER_ASKED_S, ""),
        (
            asked(),
            NEVER_ASKED_S + 1,
            "no question for 901 s: it runs no steps (an idle engine asks nothing), it is gone, or its",
        ),
        (asked(10.0, 100.0, since_s=1000.0), 1270.0, ""),  # another planner led in between: what that was asked is not missed
        (asked(10.0, 100.0, since_s=1000.0), 1271.0, "no question for 271 s; the engine asked every 90 s before: "),
        (asked(since_s=None), 1e9, ""),  # nobody leads yet
    ],
)
def test_engine_is_silent_after_several_of_its_own_intervals(questions: Asked, now_s: float, said: str) -> None:
    silence = questions.silence(now_s)
    assert silence.startswith(said)
    assert bool(silence) == bool(said)
