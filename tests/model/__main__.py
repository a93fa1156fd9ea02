"""Explores the commit protocol within bounds: `python -m tests.model --ranks 3 --chunks 1 1 --expiries 1`."""

from __future__ import annotations

import argparse
import sys

from tests.model.commit import CommitModel
from tests.model.explore import WrongStateError, explore
from tests.model.states import Bounds, reached


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--chunks", type=int, nargs=2, default=(1, 1), metavar=("FIRST", "SECOND"))
    parser.add_argument("--expiries", type=int, default=0)
    parser.add_argument("--copy-failures", type=int, default=0)
    parser.add_argument("--lost-votes", type=int, default=0)
    parser.add_argument("--states", type=int, default=5_000_000, help="stop after so many")
    options = parser.parse_args()
    bounds = Bounds(options.ranks, tuple(options.chunks), options.expiries, options.copy_failures, options.lost_votes)
    model = CommitModel(bounds)
    try:
        found = explore(model.start(), model.steps, split=model.split, describe=reached, states_max=options.states)
    except WrongStateError as error:
        print(error)
        return 1
    print(f"{bounds}\n{found}")
    for end, number in sorted(found.ends.items()):
        print(f"{number:10}  {end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
