"""What the demo would say of a broken flip: each fault, under real rollouts, must be caught and end the run non-zero.

The demo's own story runs with the product's hook over a port that breaks one rule of a flip, and once with the product's own
hook. A run ends with its first generation that can be compared, so what is looked at are the checks that must catch
the fault: with the true hook and the same options they hold.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.whole_fleet import compile_kernels

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
SECONDS = 4.0
DEADLINE_S = 200.0
NO_FAULT = ""
FAULTS = ("weightless_rollout", "scale_left_behind_rollout", "one_rank_late_rollout")
# How the names of checks begin that must catch a fault.
TOKENS = "every token equals"
WEIGHTS = "weights follow the map"
ROWS = "all ranks hold the same routing tables"
ONE_PLACEMENT = "one placement per batch"
NEEDS_TIME = ("generations went live", "slots that moved", "on the same later window")
"""Checks that need two generations and enough load under each."""


@dataclass(frozen=True)
class Story:
    """How one run ended. checks: (held, detail) by name."""

    code: int
    flips: int
    mismatches: int
    checks: dict[str, tuple[bool, str]]

    @property
    def failed(self) -> set[str]:
        """Names as far as this module knows them."""
        known = (TOKENS, WEIGHTS, ROWS, ONE_PLACEMENT, *NEEDS_TIME)
        failed = [name for name, (held, _) in self.checks.items() if not held]
        return {next((begin for begin in known if name.startswith(begin)), name) for name in failed}

    def detail(self, begin: str) -> str:
        """What the one check said whose name begins so."""
        (found,) = [detail for name, (_, detail) in self.checks.items() if name.startswith(begin)]
        return found


@pytest.fixture(scope="module")
def stories() -> Iterator[dict[str, Story]]:
    """All runs, side by side."""
    compile_kernels()
    with ExitStack() as stack:
        running = {fault: stack.enter_context(started(fault)) for fault in (NO_FAULT, *FAULTS)}
        for process in running.values():
            stack.callback(process.kill)
        yield {fault: told(process) for fault, process in running.items()}


def started(fault: str) -> subprocess.Popen[str]:
    hook = f"tests.integration.reference_doubles:{fault}" if fault else ""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.whole_story", hook, str(SECONDS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> Story:
    out, _ = process.communicate(timeout=DEADLINE_S)
    result: dict[str, Any] = json.loads(out)
    assert "error" not in result, result
    checks = {check["name"]: (check["passed"], check["detail"]) for check in result["checks"]}
    return Story(process.returncode, result["flips"], result["token_mismatches"], checks)


def names_the_first_wrong_token(detail: str) -> bool:
    return re.search(r"first: request \d+, token \d+ should be \d+", detail) is not None


def test_true_hook_passes_every_check_that_catches_a_fault(stories: dict[str, Story]) -> None:
    story = stories[NO_FAULT]
    assert story.flips > 0
    assert story.mismatches == 0
    for begin in (TOKENS, WEIGHTS, ROWS, ONE_PLACEMENT):
        assert story.detail(begin)
    assert story.failed <= set(NEEDS_TIME), story.checks
    assert story.code == (1 if story.failed else 0)


def test_map_flipped_without_weights_is_caught_in_tokens_and_slots(stories: dict[str, Story]) -> None:
    story = stories["weightless_rollout"]
    assert story.code == 1
    assert story.flips > 0
    assert {TOKENS, WEIGHTS} <= story.failed
    assert story.mismatches > 0
    assert names_the_first_wrong_token(story.detail(TOKENS))
    assert re.search(r"wrong: rank \d+ layer \d+ slot \d+", story.detail(WEIGHTS))


def test_scale_left_behind_is_caught_in_tokens_and_slots(stories: dict[str, Story]) -> None:
    story = stories["scale_left_behind_rollout"]
    assert story.code == 1
    assert story.flips > 0
    assert {TOKENS, WEIGHTS} <= story.failed
    assert story.mismatches > 0
    assert names_the_first_wrong_token(story.detail(TOKENS))
    assert re.search(r"wrong: rank \d+ layer \d+ slot \d+", story.detail(WEIGHTS))


def test_one_rank_flipping_a_step_late_is_caught_in_the_tokens_alone(stories: dict[str, Story]) -> None:
    """A step later all is in order again, so what is looked at afterwards shows nothing: only tokens can tell."""
    story = stories["one_rank_late_rollout"]
    assert story.code == 1
    assert story.flips > 0
    assert TOKENS in story.failed
    assert not {WEIGHTS, ROWS} & story.failed
    assert story.mismatches > 0
    assert names_the_first_wrong_token(story.detail(TOKENS))
