"""Processes as the kernel has them: killed, stopped, continued, and what one of them holds or leaves behind (Linux)."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

WAIT_S = 30.0


def kill_now(pid: int) -> None:
    """SIGKILL, and wait until the process is no more (or a zombie)."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} survives SIGKILL"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does; empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def birth_of(pid: int) -> int:
    """When a process was started, in the kernel's ticks; 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def stop_now(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    while state_of(pid) not in ("T", "", "Z"):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.002)


def go_on(pid: int) -> None:
    """SIGCONT, to whoever is still there."""
    if state_of(pid):
        os.kill(pid, signal.SIGCONT)


def children_of(pid: int) -> list[int]:
    """Its children, whichever of its threads started them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def descendants_of(pid: int) -> set[int]:
    """Children, their children, and so on."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def name_of(pid: int) -> str:
    """Name of the program; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def marked(text: str) -> list[int]:
    """Processes that run with this text in their environment or their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                held = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in held and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return sorted(found)


def shared_memory_of(pids: Collection[int]) -> list[str]:
    """Names in /dev/shm that carry one of these process ids, as torch's and multiprocessing's do."""
    wanted = {str(pid) for pid in pids}
    folder = Path("/dev/shm")
    return sorted(entry.name for entry in folder.iterdir() if wanted & set(re.findall(r"\d+", entry.name)))


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds. rss_bytes: of memory that is its own (anonymous); files: open descriptors."""

    rss_bytes: int
    files: int
    threads: int


def holdings_of(pid: int) -> Holdings | None:
    """None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    values = dict(re.findall(r"^(\w+):\s+(\d+)", status, flags=re.MULTILINE))
    if "RssAnon" not in values:
        return None
    return Holdings(int(values["RssAnon"]) * 1024, files, int(values["Threads"]))
