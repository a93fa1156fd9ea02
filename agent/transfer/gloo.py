"""The few calls of `torch.distributed` that we use, with types: stores, groups of our own, and nothing of the default group."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from eplb_service.errors import DeadlineError

_dist: Any = torch.distributed

_ABANDON_TAG = (1 << 31) - 1
_SOURCE_LINE = re.compile(r"^\[\S*:\d+\]\s*")


class Work(Protocol):
    """An operation under way."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it ends. Raises RuntimeError on failure or time-out."""
        ...

    def is_completed(self) -> bool:
        """Whether it ended, well or not (collectives only)."""
        ...


class Store(Protocol):
    """Keys shared by the ranks of a group."""

    def set(self, key: str, value: str) -> None:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read; blocks until it is there or the store's time-out. Raises RuntimeError then."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all are there, now."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until all are there. Raises RuntimeError on time-out."""
        ...


def tcp_store(host: str, port: int, *, is_host: bool, timeout_s: float) -> Store:
    """Host a store, or connect to it. Raises RuntimeError when that is not possible in time."""
    store: Store = _dist.TCPStore(
        host, port, None, is_host, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=False
    )
    return store


def prefixed(prefix: str, store: Store) -> Store:
    """The same store, under a prefix."""
    inner: Store = _dist.PrefixStore(prefix, store)
    return inner


def said_by(store: Store, key: str, timeout_s: float, failure: str) -> str:
    """What a rank wrote under a key. Raises DeadlineError when it does not in time. failure: that, in words."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key).decode()
    except RuntimeError as error:
        raise DeadlineError(failure) from error


def local_store() -> Store:
    """A store for a group of one."""
    store: Store = _dist.HashStore()
    return store


class GlooGroup:
    """A gloo group of our own. Raises RuntimeError when not all ranks meet in time.

    timeout_s: for the meeting, and for operations that name none.
    """

    def __init__(self, store: Store, position: int, num_ranks: int, timeout_s: float) -> None:
        self._position, self._num_ranks = position, num_ranks
        self._group = _dist.ProcessGroupGloo(store, position, num_ranks, timedelta(seconds=timeout_s))

    def all_reduce_min(self, values: torch.Tensor, timeout_s: float) -> Work:
        """Begin the element-wise minimum over all ranks, in place."""
        options = _dist.AllreduceOptions()
        options.reduceOp = _dist.ReduceOp.MIN
        options.timeout = timedelta(seconds=timeout_s)
        work: Work = self._group.allreduce([values], options)
        return work

    def send(self, data: torch.Tensor, to: int, tag: int) -> Work:
        """Begin to send host memory to the rank at column `to`."""
        work: Work = self._group.send([data], to, tag)
        return work

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Work:
        """Begin to fill host memory from the rank at column `source`."""
        work: Work = self._group.recv([data], source, tag)
        return work

    def close_connections(self) -> None:
        """From any thread: every point-to-point wait under way fails at once, here and at the peers.

        gloo has no call for that; a receive that times out closes all connections of its context.
        """
        if self._num_ranks > 1:
            peer = (self._position + 1) % self._num_ranks
            with contextlib.suppress(RuntimeError):
                self.receive(torch.zeros(1, dtype=torch.uint8), peer, _ABANDON_TAG).wait(timedelta(milliseconds=1))


def first_line(error: BaseException) -> str:
    """What an error says, in one short line."""
    text = _SOURCE_LINE.sub("", str(error).strip())
    return text.splitlines()[0][:200] if text else type(error).__name__
