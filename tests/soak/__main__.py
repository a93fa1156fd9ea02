"""Serves for minutes while every part is killed, stopped and cut off, at random but repeatably; exits with 0 if all held.

python -m tests.soak                          8 ranks, 200 faults, 5 minutes
python -m tests.soak --ranks 4 --faults 40    smaller
python -m tests.soak --survives               ranks that are left go on without one that is killed, and a new one joins
python -m tests.soak --seed 7                 the same faults in the same order again
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from tests.integration.fault_fleet import Fault, Part
from tests.integration.fault_mesh import why_not
from tests.soak.schedule import KINDS, schedule
from tests.soak.soak import Soak
from tests.soak.summary import told

RANKS_MIN = 3
"""Positions 0 to 2: faults at places in the hook hit the rank at 2."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="over which the faults are spread; more where they take longer"
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=8, choices=range(RANKS_MIN, 17), metavar=f"{RANKS_MIN}-16")
    parser.add_argument("--seed", type=int, help="of the faults; drawn if not given")
    parser.add_argument(
        "--survives", action="store_true", help="ranks that are left go on without a lost one, and new ones join"
    )
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    no_mesh = why_not()
    kinds = tuple(kind for kind in KINDS if not (no_mesh and kind == (Part.RANK, Fault.CUT)))
    words = ["--minutes", f"{options.minutes:g}", "--faults", options.faults, "--ranks", options.ranks, "--seed", seed]
    command = " ".join(["python -m tests.soak", *map(str, words), *(["--survives"] if options.survives else [])])
    print(command + (f"\nranks are not cut off from one another: {no_mesh}" if no_mesh else ""), flush=True)
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True)

    faults = schedule(seed, options.faults, kinds=kinds)
    outcome = Soak(faults, ranks=options.ranks, minutes=options.minutes, survives=options.survives, say=say).run()
    print(told(outcome))
    print(f"{'FAILED' if outcome.wrong else 'held'}: {command}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
