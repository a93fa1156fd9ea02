"""The normal suite's share of the simulation; `make sim SEEDS=100000` runs more. What it covers: docs/consistency.md."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.faults import FAULTS
from tests.sim.minimise import failure_of, kind_of, minimised, report_of
from tests.sim.mutations import MUTATIONS, search
from tests.sim.run import Run

NUM_SEEDS = 1000

HAPPENS = (
    *FAULTS,
    "CAS conflicts",
    "agent processes killed",
    "cancels",
    "checksums wrong",
    "chunk.aborted",
    "continued",
    "copies from backups",
    "copies failed",
    "finished stopped",
    "groups formed again",
    "idle spells",
    "messages cut off",
    "messages late",
    "messages lost",
    "messages repeated",
    "out of memory",
    "outranked",
    "planners fenced",
    "ranks that stopped themselves",
    "shares alone flipped",
    "through agent processes",
)


@pytest.mark.timeout(600)
def test_invariants_hold_and_everything_resolves_under_faults() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        run = Run(seed)
        violation = failure_of(run)
        if violation is not None:
            pytest.fail(report_of(run, violation))
        counts += run.world.counts
    # what a run that never got anywhere would also "hold"
    assert counts["flips of ranks"] > 3 * NUM_SEEDS
    assert counts["finished active"] > NUM_SEEDS
    assert counts["live maps checked"] > NUM_SEEDS
    assert counts["flipped as the group formed"] > NUM_SEEDS // 200
    for happened in HAPPENS:
        assert counts[happened] > NUM_SEEDS // 40, f"{happened}: {counts[happened]} in {NUM_SEEDS} seeds"


def test_a_seed_replays_to_the_same_trace() -> None:
    runs = [Run(11), Run(11)]
    for run in runs:
        run.go()
    assert runs[0].world.trace == runs[1].world.trace
    assert runs[0].world.num_events == runs[1].world.num_events > 500


def test_a_failure_is_made_smaller_and_prints_how_to_replay_it() -> None:
    mutation = MUTATIONS["silence is a withdrawal"]
    found = search(mutation, range(60))
    assert found is not None
    with mutation.patched():
        run = Run(found.seed)
        violation = failure_of(run)
        assert violation is not None
        smallest, again = minimised(run, violation)
        report = report_of(run, violation)
        assert kind_of(again) == kind_of(violation)
        assert smallest.without > run.without or smallest.faulty_s != run.faulty_s
    assert f"replay: python -m tests.sim --seed {found.seed}" in report
    assert f"as it was found: python -m tests.sim --seed {found.seed}" in report
    assert failure_of(Run(found.seed)) is None
