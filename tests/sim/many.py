"""Seeds in batches, on several processes."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator

from tests.sim.minimise import report_of
from tests.sim.run import Run
from tests.sim.world import ViolationError

Result = tuple[Counter[str], int, str]
"""Counts, number of events, and the report of the first failure (empty when all held)."""


def run_batch(seeds: range) -> Result:
    """Some seeds, until one fails."""
    counts: Counter[str] = Counter()
    events = 0
    for seed in seeds:
        run = Run(seed)
        try:
            counts += run.go()
        except ViolationError as violation:
            return counts, events, report_of(run, violation)
        events += run.world.num_events
    return counts, events, ""


def results_of(batches: list[range], jobs: int) -> Iterator[Result]:
    """Of every batch, as they end."""
    if jobs == 1:
        yield from map(run_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_batch, batches)
