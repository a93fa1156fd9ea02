"""Runs many seeds, replays one, or looks for the violation of each rule that is switched off.

python -m tests.sim --seeds 5000            many, on --jobs processes
python -m tests.sim --seed 17 --trace       one, with all that happened
python -m tests.sim --mutations             each rule of `mutations.py`: its script, then a search by seeds
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.sim.faults import FAULTS_S
from tests.sim.many import results_of, searched
from tests.sim.minimise import command_of, failure_of
from tests.sim.mutations import MUTATIONS
from tests.sim.run import Run

BATCH = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--without", default="", help="incidents to leave out, as a failure prints them: 1,4")
    parser.add_argument("--faulty", default=f"0-{FAULTS_S:g}", help="seconds in which the network is faulty: 2.5-7")
    parser.add_argument("--trace", action="store_true", help="print what happened, also when all held")
    parser.add_argument("--mutations", action="store_true", help="switch each rule off and search for the violation")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="with --seed or --mutations: only this rule is off")
    options = parser.parse_args()
    if options.mutations:
        return _mutations([options.mutation] if options.mutation else sorted(MUTATIONS), options.seeds, options.jobs)
    if options.seed is not None:
        return _one(options)
    return _many(range(options.first, options.first + options.seeds), options.jobs)


def _one(options: argparse.Namespace) -> int:
    without = frozenset(int(index) for index in options.without.split(",") if index)
    first_s, _, last_s = options.faulty.partition("-")
    mutation = MUTATIONS[options.mutation] if options.mutation else None
    fixed = mutation.focus if mutation is not None else None
    run = Run(options.seed, without=without, faulty_s=(float(first_s), float(last_s)), fixed=fixed)
    with mutation.patched() if mutation is not None else nullcontext():
        violation = failure_of(run)
    if options.trace or violation is not None:
        print("\n".join(run.world.trace))
    print(f"{command_of(run)}: {violation or 'all held'}")
    return int(violation is not None)


def _many(seeds: range, jobs: int) -> int:
    counts: Counter[str] = Counter()
    events = 0
    started_s = time.monotonic()
    batches = [range(first, min(first + BATCH, seeds.stop)) for first in range(seeds.start, seeds.stop, BATCH)]
    for more, number, report in results_of(batches, jobs):
        counts += more
        events += number
        if report:
            print(report)
            return 1
    took_s = time.monotonic() - started_s
    for name, count in sorted(counts.items()):
        print(f"{count:10}  {name}")
    print(
        f"{len(seeds)} seeds held in {took_s:.1f} s on {jobs} processes:"
        f" {len(seeds) / took_s:.1f} seeds/s, {events / took_s:.0f} events/s"
    )
    return 0


def _mutations(names: list[str], seeds: int, jobs: int) -> int:
    missed = []
    print(f"{'rule that is off':32} {'seeds':>6} {'CPU s':>6}  how it showed")
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for name, found, took_s in pool.imap(searched, [(name, seeds) for name in names], chunksize=1):
            if found is None:
                missed.append(name)
                print(f"{name:32} {seeds:6} {took_s:6.1f}  NOT FOUND", flush=True)
            else:
                print(f"{name:32} {found.seed + 1:6} {took_s:6.1f}  {found.reason}", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} rules that were switched off were found by search")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
