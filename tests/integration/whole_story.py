"""Runs the demo's own story with a hook of a test's choice, as a process: `python -m tests.integration.whole_story HOOK`.

HOOK: `module:callable` for `FleetConfig.hook_factory`; empty = the product's own. Prints the result as JSON. Ends as
`eplb demo` does: 0 only if every check holds, 1 if one does not, and by an error's sentence and code when the run was broken
off.
"""

from __future__ import annotations

import json
import sys

from demo.screen import Screen
from demo.story import DemoOptions, run_story
from eplb_service.errors import EplbError

BROKEN_OFF = 3


def main(hook_factory: str, seconds: float) -> int:
    options = DemoOptions(
        ranks=2,
        seconds=seconds,
        policy="greedy",  # moves more, so that a fault shows in more slots
        kinds=("logs",),
        in_flight=6,
        generations_wanted=1,
        hook_factory=hook_factory,
    )
    try:
        with Screen(quiet=True) as screen:
            result = run_story(options, screen)
    except EplbError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return BROKEN_OFF
    print(json.dumps(result.to_json()))
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
