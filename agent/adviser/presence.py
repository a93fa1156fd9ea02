"""Is the adviser on in every rank of a group? Asked before the first collective.

A rank without it (the package or the variable is missing on one node) would never come to our collectives: its peers would
wait for it in them, and its engine would meet them in its own. So the ranks leave a word in the store that their processes
share, and one of them decides for all, whatever the others see later: all there, or none takes part.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch.distributed

from agent.transfer.gloo import first_line

TRIES = 3
"""A rank that starts slowly is there at the next call; one that never comes must not cost a wait at each."""
POLL_S = 0.02
"""Between looks. A store's own `wait` would keep other threads of the process from it."""
ALL = "all"
_dist: Any = torch.distributed


class SharedStore(Protocol):
    """What is needed of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Write."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all are there, now."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if it is as expected (empty = not there); what is there then."""
        ...


def shared_store() -> SharedStore | None:
    """The store of the processes of this engine; None where there is none (groups that each have their own)."""
    try:
        store: SharedStore = _dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):
        return None
    return store


def all_present(store: SharedStore, group: str, *, attempt: int, rank: int, size: int, timeout_s: float) -> str:
    """Why the ranks of a group do not take part, the same sentence on all; empty = they do.

    group: a name that all of its ranks give it, and no other group has. attempt: number of this one, from 1.
    """
    key = f"eplb-adviser/{group}/{attempt}"
    keys = [f"{key}/{other}" for other in range(size)]
    deadline = time.monotonic() + timeout_s
    try:
        store.set(keys[rank], "here")
        while not (all_here := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        missing = [] if all_here else [other for other in range(size) if not store.check([keys[other]])]
        found = (
            f"the adviser is not on in rank {', '.join(map(str, missing[:4]))} of {size} after {timeout_s:g} s;"
            " install eplb-service and set EPLB_ADVISER on every node"
            if missing
            else ALL
        )
        decided = store.compare_set(f"{key}/decided", "", found).decode()
    except RuntimeError as error:
        return f"the ranks' store failed: {first_line(error)}"
    return "" if decided == ALL else decided
