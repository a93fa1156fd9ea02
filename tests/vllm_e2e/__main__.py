"""`python -m tests.vllm_e2e`: a real vLLM on CPUs, advised by a real planner. Exits with 1 if anything failed."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.engines.wheels import FetchError
from tests.vllm_e2e import offline_check, server_check
from tests.vllm_e2e.checks import CheckError
from tests.vllm_e2e.engines import NUM_RANKS, Place
from tests.vllm_e2e.environment import environment
from tests.vllm_e2e.plain_model import PlainModel, prompts_of

KINDS = (1, 21)
"""Of prompts. Each loads the two ranks unevenly in every layer under the map that vLLM starts with, and not in the same way."""
PROMPTS, BATCHES = 8, 2
"""In a batch of the offline engine, and batches of each kind, sent in turn."""
REQUESTS = 2
"""Of each kind to each engine of the server, sent in turn."""
T = TypeVar("T")


def main() -> int:
    """Run what is asked for; returns the number of failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_e2e", description=__doc__)
    parser.add_argument("--only", choices=("offline", "server"))
    parser.add_argument("--folder", type=Path, help="an empty one to run in, whose logs are kept; a temporary one if not given")
    chosen = parser.parse_args()
    if chosen.folder is not None:
        chosen.folder.mkdir(parents=True)
        return _run(chosen.folder.absolute(), chosen.only)
    with tempfile.TemporaryDirectory(prefix="eplb-") as temporary:
        return _run(Path(temporary), chosen.only)


def _run(folder: Path, only: str | None) -> int:
    timed = _Timed()
    python = timed.part("environment of vLLM", lambda: environment(say))
    plain = timed.part("tiny model", lambda: PlainModel(folder / "model")) if python else None
    if python is not None and plain is not None:
        if only != "server":
            timed.part("offline engine, TP2 x EP2", lambda: _offline(python, plain, folder / "offline"))
        if only != "offline":
            timed.part("OpenAI server, DP2 x EP2", lambda: _server(python, plain, folder / "server"))
    for title, seconds in timed.durations.items():
        say(f"{seconds:8.1f} s  {title}")
    say(f"{timed.num_failed} failed" if timed.num_failed else "all passed")
    return int(timed.num_failed > 0)


def _offline(python: Path, plain: PlainModel, folder: Path) -> bool:
    place = Place(python=python, folder=folder, model=plain.folder, step_interval=offline_check.STEPS)
    traffic = []
    for kind in KINDS:
        answers = [plain.answer(prompt, offline_check.STEPS) for prompt in prompts_of(kind, BATCHES * PROMPTS)]
        traffic.append([answers[batch * PROMPTS :][:PROMPTS] for batch in range(BATCHES)])
    offline_check.check(place, traffic, say)
    return True


def _server(python: Path, plain: PlainModel, folder: Path) -> bool:
    place = Place(python=python, folder=folder, model=plain.folder, step_interval=server_check.STEPS)
    traffic = []
    for kind in KINDS:
        answers = [plain.answer(prompt, server_check.STEPS) for prompt in prompts_of(kind, NUM_RANKS * REQUESTS)]
        traffic.append([answers[engine::NUM_RANKS] for engine in range(NUM_RANKS)])
    server_check.check(place, traffic, say)
    return True


@dataclass
class _Timed:
    """Parts of the run: how long each took, and how many failed."""

    durations: dict[str, float] = field(default_factory=dict)
    num_failed: int = 0

    def part(self, title: str, do: Callable[[], T]) -> T | None:
        """What it returns; None when it failed, which is said."""
        say(title)
        begun = time.monotonic()
        try:
            return do()
        except (CheckError, FetchError) as error:
            self.num_failed += 1
            say(f"FAILED {title}: {error}")
            return None
        finally:
            self.durations[title] = time.monotonic() - begun


def say(line: str) -> None:
    """Show a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
