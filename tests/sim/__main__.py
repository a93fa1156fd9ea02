"""Runs many seeds, or replays one: `python -m tests.sim --seeds 5000`, `python -m tests.sim --seed 17 --trace`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.run import Run
from tests.sim.world import ViolationError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--trace", action="store_true", help="print what happened, also when all held")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    counts: Counter[str] = Counter()
    started_s = time.monotonic()
    for seed in seeds:
        run = Run(seed)
        try:
            counts += run.go()
        except ViolationError as violation:
            print(violation)
            return 1
        if options.trace:
            print("\n".join(run.world.trace))
    for name, count in sorted(counts.items()):
        print(f"{count:10}  {name}")
    print(f"{len(seeds)} seeds held in {time.monotonic() - started_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
