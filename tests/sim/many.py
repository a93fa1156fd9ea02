"""Seeds in batches, on several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator

from tests.sim.minimise import report_of
from tests.sim.mutations import MUTATIONS, Found, search
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


def searched(task: tuple[str, int]) -> tuple[str, Found | None, float]:
    """A rule by its name and how many seeds to try; with what was found, and seconds of processor time."""
    name, seeds = task
    began_s = time.process_time()
    found = search(MUTATIONS[name], range(seeds))
    return name, found, time.process_time() - began_s
