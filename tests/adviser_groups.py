"""Ranks as threads of one process: collectives that are written down, so that tests can compare them between ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from agent.adviser import agree as agree_module

T = TypeVar("T")
WAIT_S = 10.0


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Shared:
    """What the ranks of a group share."""

    size: int
    barrier: threading.Barrier
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, tuple[int, ...], str]]] = field(default_factory=dict)


class ThreadGroup:
    """One rank's side."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self._rank = shared, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.shared.size

    def all_reduce(self, tensor: torch.Tensor, how: str) -> None:
        """As torch's: every rank comes with a tensor of the same shape and type, or nobody gets anything."""
        shared = self.shared
        shared.calls.setdefault(self._rank, []).append((how, tuple(tensor.shape), str(tensor.dtype)))
        shared.tensors[self._rank] = tensor.clone()
        shared.barrier.wait(WAIT_S)
        pieces = [shared.tensors[rank] for rank in range(shared.size)]
        if len({(piece.shape, piece.dtype) for piece in pieces}) != 1:
            raise RuntimeError(f"ranks reduce tensors of different shapes: {[tuple(piece.shape) for piece in pieces]}")
        stacked = torch.stack(pieces)
        tensor.copy_(stacked.sum(dim=0) if how == "sum" else stacked.min(dim=0).values)
        shared.barrier.wait(WAIT_S)


class FakeDist:
    """The part of torch.distributed that `agree` uses."""

    class ReduceOp:
        SUM = "sum"
        MIN = "min"

    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def all_reduce(tensor: torch.Tensor, *, op: str, group: ThreadGroup) -> None:
        group.all_reduce(tensor, op)


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of `agree` go to thread groups from here on."""
    monkeypatch.setattr(agree_module, "_dist", FakeDist)


def groups_of(size: int) -> list[ThreadGroup]:
    """One group for each rank of a new world."""
    shared = Shared(size=size, barrier=threading.Barrier(size))
    return [ThreadGroup(shared, rank) for rank in range(size)]


def on_each(groups: list[ThreadGroup], work: Callable[[ThreadGroup], T]) -> list[T]:
    """What each rank's work returns. Fails when a rank raises, or when ranks did not do the same collectives."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank()] = work(group)
        except BaseException as error:  # noqa: BLE001  (raised again by the test's own thread)
            errors.append(error)
            group.shared.barrier.abort()

    for group in groups:
        group.shared.calls.clear()
    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    if errors:
        raise errors[0]
    calls: dict[int, Any] = groups[0].shared.calls
    assert all(calls.get(rank, []) == calls.get(0, []) for rank in range(len(groups))), calls
    return [results[rank] for rank in range(len(groups))]
