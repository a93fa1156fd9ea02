"""Becomes another program that dies with the process that started this one (Linux); run as a script, standard library only.

    python -I -S exec_with_parent.py PARENT_PID PROGRAM [ARGUMENT…]

PR_SET_PDEATHSIG (prctl(2)) survives exec. It fires when the *thread* that forked ends, so start this from a thread that
lives as long as the program should: the one that runs the event loop. A process of its own sets it, since Python code
between fork and exec (`preexec_fn`) may deadlock in a process with other threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Arrange to be killed with the parent, then become the program; returns only on failure."""
    parent_pid, program = int(arguments[0]), arguments[1]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.stderr.write(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}\n")
        return 70
    if os.getppid() != parent_pid:  # it died before the signal was arranged
        return 71
    try:
        os.execv(program, arguments[1:])  # noqa: S606  no shell is the point
    except OSError as error:
        sys.stderr.write(f"cannot run {program}: {error.strerror}\n")
    return 72


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
