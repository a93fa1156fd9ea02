"""A process that ends with the one that started it, however that ends (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; end at once if it has already.

    The signal follows the *thread* that started this process. parent_pid: of whoever started it, taken there: a parent that
    died while this process was still starting would go unnoticed here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)
