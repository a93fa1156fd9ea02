"""`python -m tests.engines`: our plug-ins in the engines' own code. Prints what each took; the exit code counts what failed."""

from __future__ import annotations

import argparse
import sys
import time

from tests.engines import vllm_check
from tests.engines.vllm_check import EngineCheckError
from tests.engines.wheels import CACHE, FetchError

VLLM = ("0.33.0", "0.29.0", "0.26.0", "0.22.0", "0.19.1", "0.18.0", "0.17.1", "0.16.0", "0.14.0")
ASYNC = (0, 14)
"""First release whose asynchronous worker is driven too."""


def main() -> int:
    """Run what is asked for; returns the number of failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    parser.add_argument("--vllm", nargs="*", default=VLLM, metavar="RELEASE", help=f"default: {' '.join(VLLM)}")
    chosen = parser.parse_args()
    print(f"modules of engines are kept in {CACHE}")
    failed = 0
    for release in chosen.vllm:
        for is_async in (False, True):
            title = f"vLLM {release}, {'asynchronous' if is_async else 'in the forward'}"
            print(title, flush=True)
            start = time.monotonic()
            try:
                vllm_check.check(release, is_async=is_async, say=lambda line: print(line, flush=True))
            except (EngineCheckError, FetchError) as error:
                failed += 1
                print(f"FAILED {title}: {error}", flush=True)
            print(f"  in all: {time.monotonic() - start:.1f} s", flush=True)
    print(f"{failed} failed" if failed else "all passed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
