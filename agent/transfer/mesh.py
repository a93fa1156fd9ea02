"""Connections between all ranks of a group, for chunks: what gloo carries experts over, and all others their words.

The mesh is full, of TCP connections of its own, found over the store under the chunk's mesh id. A copy that fails or is
withdrawn abandons the whole mesh: bytes still under way can never be taken for those of a later chunk.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch

from agent.transfer.gloo import GlooGroup, Store, Work, prefixed
from eplb_service.ids import ChunkId

_MIN_WAIT_S = 0.001
_POLL_S = 0.005
_GIVEN_UP = "given_up"


class GlooMesh:
    """Connections between all ranks of a group, for the chunks that name one mesh id."""

    def __init__(self, store: Store, mesh_id: ChunkId, position: int, num_ranks: int) -> None:
        self.mesh_id = mesh_id
        self._store = prefixed(f"mesh/{mesh_id}", store)
        self._position, self._num_ranks = position, num_ranks
        self._group: GlooGroup | None = None
        self._abandoned = threading.Event()

    def connect(self, timeout_s: float) -> None:
        """Meet all other ranks. Raises RuntimeError when one does not come, gives up, or this mesh is abandoned meanwhile.

        Ranks first say in the store that they are here: unlike the connecting itself, waiting for that can be ended.
        """
        if self._num_ranks == 1 or self._group is not None:
            return
        self._store.set(f"here/{self._position}", "")
        missing = [f"here/{position}" for position in range(self._num_ranks)]
        until = time.monotonic() + timeout_s
        while missing := [key for key in missing if not self._store.check([key])]:
            if self._store.check([_GIVEN_UP]):
                raise RuntimeError("a rank gave these connections up")
            if time.monotonic() > until:
                columns = ", ".join(key.removeprefix("here/") for key in missing)
                raise RuntimeError(f"ranks in columns {columns} did not come within {timeout_s:.3g} s")
            if self._abandoned.wait(_POLL_S):
                raise RuntimeError("abandoned while connecting")
        self._group = GlooGroup(self._store, self._position, self._num_ranks, max(until - time.monotonic(), _MIN_WAIT_S))

    def send(self, data: torch.Tensor, to: int, tag: int) -> Work:
        """Begin to send host memory to the rank at column `to`."""
        return self._live_group.send(data, to, tag)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Work:
        """Begin to fill host memory from the rank at column `source`."""
        return self._live_group.receive(data, source, tag)

    def abandon(self) -> None:
        """Close the connections, from any thread: every wait under way fails at once, here and at the peers."""
        self._abandoned.set()
        if self._group is not None:
            self._group.close_connections()

    def give_up(self) -> None:
        """Abandon it, and let ranks that still look for this one know."""
        self.abandon()
        with contextlib.suppress(RuntimeError):
            self._store.set(_GIVEN_UP, "")

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until it is abandoned: whether it is."""
        return self._abandoned.wait(seconds)

    @property
    def is_abandoned(self) -> bool:
        """Whether it can carry nothing more."""
        return self._abandoned.is_set()

    @property
    def _live_group(self) -> GlooGroup:
        if self._group is None or self._abandoned.is_set():
            raise RuntimeError("the transfer connections were abandoned")
        return self._group
