"""A network of their own for the ranks of a fleet, which a test can take down: votes, weights and the engine's collectives.

It is a network namespace with nothing but a loopback. What else ranks talk to (agent process, clients) they reach over Unix
sockets, which know no namespaces. Needs root and Linux's `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

from demo.model import load as load_demo
from eplb_service import failpoints
from eplb_service.parent_death import die_with_parent
from examples.tiny_moe.model import TinyMoe

VARIABLE = "EPLB_TEST_NETWORK"
"""Path of the namespace that a rank enters before anything else; empty = it stays where it is."""
HELD = "EPLB_TEST_FAILPOINTS"
"""`NAME/POINTS`: failpoints of the rank process of that name, in whatever life."""
CLONE_NEWNET = 0x40000000
TIMEOUT_S = 30.0


def load() -> TinyMoe:
    """The demo's model, in a process that is in the fleet's own network from now on. Raises OSError when it may not be.

    Ranks call it before anything else, those that join later, too.
    """
    name, _, points = os.environ.get(HELD, "").partition("/")
    if name == multiprocessing.current_process().name:
        os.environ[failpoints.VARIABLE] = points
        failpoints.forget()
    if os.environ.get(VARIABLE):
        enter(os.environ[VARIABLE])
    return load_demo()


def enter(path: str) -> None:
    """Have this thread, and those that it starts, in another network namespace. Raises OSError when it may not be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


def why_not() -> str:
    """Why no such network can be had here; empty when it can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


class Mesh:
    """The network, for as long as the process that holds it lives."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  (as the supervisor of the demo does)
        )
        ours, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + TIMEOUT_S
        while Path(self.path).readlink() == ours:
            assert time.monotonic() < deadline, "unshare does not come into a namespace of its own"
            time.sleep(0.005)
        self.restore()

    @property
    def path(self) -> str:
        """For `VARIABLE`."""
        return str(Path(f"/proc/{self._holder.pid}/ns/net"))

    def cut(self) -> None:
        """Whatever a rank sends to another is lost."""
        self._set("down")

    def restore(self) -> None:
        """Packets pass again; connections that stood go on with their next try to send."""
        self._set("up")

    def close(self) -> None:
        """Give it up; it goes with the last process in it."""
        self._holder.kill()
        self._holder.wait(TIMEOUT_S)

    def _set(self, state: str) -> None:
        command = ["nsenter", f"--net={self.path}", "ip", "link", "set", "lo", state]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
