"""The soak (`python -m tests.soak`): what it draws and how it judges, and a short one of each kind of fleet."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.integration.fault_fleet import Fault, Part
from tests.integration.fault_processes import Holdings, holdings_of
from tests.soak.__main__ import main
from tests.soak.holdings import MIB, SAMPLES_MIN, Life, growth_of
from tests.soak.schedule import KINDS, STEADY_SHARE, schedule


def test_faults_follow_from_the_seed_alone() -> None:
    assert schedule(7, 200) == schedule(7, 200)
    assert schedule(7, 200) != schedule(8, 200)
    drawn = {(planned.part, planned.fault) for planned in schedule(7, 200)}
    assert drawn == set(KINDS)


@pytest.mark.parametrize("seed", range(20))
def test_the_last_part_of_a_run_kills_nothing_and_faults_that_overlap_hit_different_parts(seed: int) -> None:
    faults = schedule(seed, 200)
    steady = faults[len(faults) - int(len(faults) * STEADY_SHARE) :]
    assert all(planned.fault is not Fault.KILL for planned in steady)
    assert any(planned.fault is Fault.KILL for planned in faults)
    for planned, following in itertools.pairwise(faults):
        assert not planned.overlaps or planned.part is not following.part
        assert not (planned.overlaps and planned.part is Part.RANK)


def life(*, mib_a_sample: float = 0.0, files_a_sample: float = 0.0, threads_a_sample: float = 0.0) -> Life:
    made = Life("part", 1)
    for index in range(60):
        held = Holdings(
            int((100 + index * mib_a_sample) * MIB), int(30 + index * files_a_sample), int(9 + index * threads_a_sample)
        )
        made.samples.append((float(index), held))
    return made


@pytest.mark.parametrize(
    ("grows", "word"),
    [({"mib_a_sample": 1.0}, "memory"), ({"files_a_sample": 1.0}, "files"), ({"threads_a_sample": 0.5}, "threads")],
)
def test_what_grows_is_named(grows: dict[str, float], word: str) -> None:
    growth = growth_of(life(**grows))
    assert growth is not None
    assert word in growth.wrong
    steady = growth_of(life())
    assert steady is not None
    assert steady.wrong == ""


def test_a_life_that_was_seen_too_seldom_is_not_judged() -> None:
    assert growth_of(Life("part", 1, life().samples[: SAMPLES_MIN - 1])) is None


def test_what_this_process_holds_is_seen() -> None:
    before = holdings_of(os.getpid())
    with Path("/dev/null").open() as file:
        held = holdings_of(os.getpid())
    assert before is not None
    assert held is not None
    assert file.closed
    assert held.files == before.files + 1
    assert held.rss_bytes > 10 * MIB


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [[], ["--survives"]], ids=["restarts", "survives"])
def test_a_short_soak_holds(kind: list[str]) -> None:
    assert main(["--ranks", "4", "--faults", "15", "--minutes", "0.5", "--seed", "11", *kind]) == 0
