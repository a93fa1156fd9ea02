"""`python -m tests.engines`: our plug-ins in the engines' own code, then their planners and ours on the same load.

Prints what each took; the exit code counts what failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from tests.engines import sglang_check, vllm_check, whole_check
from tests.engines.ranks import EngineCheckError
from tests.engines.wheels import CACHE, FetchError, modules_of

VLLM = ("0.33.0", "0.29.0", "0.26.0", "0.22.0", "0.19.1", "0.18.0", "0.17.1", "0.16.0", "0.14.0")
SGLANG = ("0.5.23", "0.5.20", "0.5.17", "0.5.14")


def main() -> int:
    """Run what is asked for; returns the number of failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    parser.add_argument("--vllm", nargs="*", default=VLLM, metavar="RELEASE", help=f"default: {' '.join(VLLM)}")
    parser.add_argument("--sglang", nargs="*", default=SGLANG, metavar="RELEASE", help=f"default: {' '.join(SGLANG)}")
    chosen = parser.parse_args()
    say(f"modules of engines are kept in {CACHE}")
    failed = 0
    for release in chosen.vllm:
        failed += not passed(f"vLLM {release}, in the forward", partial(vllm_check.check, release, is_async=False, say=say))
        failed += not passed(f"vLLM {release}, asynchronous", partial(vllm_check.check, release, is_async=True, say=say))
    for release in chosen.vllm[:1]:
        failed += not passed(f"vLLM {release}, adviser off on one rank", partial(vllm_check.check_half_on, release, say=say))
        failed += not passed(f"vLLM {release}, grown by a rank", partial(vllm_check.check_growing, release, say=say))
        failed += not passed(
            f"vLLM {release}, with a real agent process and planner",
            partial(whole_check.check, release, is_async=True, say=say),
        )
    for release in chosen.sglang:
        failed += not passed(f"SGLang {release}", partial(sglang_check.check, release, say=say))
    for vllm, sglang in zip(chosen.vllm[:1], chosen.sglang[:1], strict=False):
        failed += not passed(
            f"planners of vLLM {vllm} and SGLang {sglang} beside ours", partial(compare_planners, vllm, sglang)
        )
    say(f"{failed} failed" if failed else "all passed")
    return failed


def compare_planners(vllm: str, sglang: str) -> None:
    """Print balance, moves and time of each planner on one load. Raises EngineCheckError when one of them fails."""
    peers = ["--peer-vllm", str(modules_of("vllm", vllm)), "--peer-sglang", str(modules_of("sglang", sglang))]
    command = [sys.executable, "-m", "benchmarks.planner", "--table", "planners", "--jobs", "1", *peers]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise EngineCheckError(f"the benchmark of planners ended with {done.returncode}")


def passed(title: str, check: Callable[[], None]) -> bool:
    """Run one check, and say how long it took and what was wrong."""
    say(title)
    begun = time.monotonic()
    try:
        check()
    except (EngineCheckError, FetchError) as error:
        say(f"FAILED {title}: {error}")
        return False
    finally:
        say(f"  in all: {time.monotonic() - begun:.1f} s")
    return True


def say(line: str) -> None:
    """Show a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
