"""Proof of the tokens: the same model in one process, without expert parallelism and without our code in its path."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue

from eplb_service.errors import DeadlineError, EnvironmentFault
from eplb_service.parent_death import die_with_parent

BATCH = 8
"""Requests recomputed together; rows are bit-equal whatever the batch (docs/exactness.md)."""


@dataclass(frozen=True, slots=True)
class Served:
    """A finished request: what the engine generated, and the step boundary and generations of each token."""

    request_id: int
    kind: str
    prompt: bytes
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]
    generations: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the oracle found. first_difference: index of the first wrong token, -1 = none; expected: the right one there."""

    request_id: int
    num_tokens: int
    mismatches: int
    first_difference: int
    expected: int


def compare(request_id: int, served: Sequence[int], right: Sequence[int]) -> Judged:
    """Compare token by token; tokens that are missing or too many count as wrong."""
    longest = max(len(served), len(right))
    wrong = [i for i in range(longest) if i >= len(served) or i >= len(right) or served[i] != right[i]]
    first = wrong[0] if wrong else -1
    return Judged(request_id, len(served), len(wrong), first, right[first] if 0 <= first < len(right) else -1)


def _judge(parent_pid: int, requests: Queue[Served | None], results: Queue[Judged]) -> None:
    """Main function of the oracle's process: imports the example model and nothing of the product's path."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the demo decides
    os.nice(5)
    from examples.tiny_moe.generate import Oracle  # noqa: PLC0415  (torch only in this process)
    from examples.tiny_moe.model import TinyMoe  # noqa: PLC0415
    from examples.tiny_moe.numerics import configure_torch, self_check  # noqa: PLC0415

    configure_torch()
    self_check()
    oracle = Oracle(TinyMoe.load())
    ended = False
    while not ended:
        batch = [requests.get()]
        while len(batch) < BATCH and batch[-1] is not None:
            try:
                batch.append(requests.get_nowait())
            except queue.Empty:
                break
        ended = batch[-1] is None
        served = [item for item in batch if item is not None]
        for length in sorted({len(item.tokens) for item in served}):
            same = [item for item in served if len(item.tokens) == length]
            right = (
                oracle.generate_batch([(item.request_id, item.prompt) for item in same], length)
                if length
                else [[] for _ in same]
            )
            for item, tokens in zip(same, right, strict=True):
                results.put(compare(item.request_id, item.tokens, tokens))


class OracleProcess:
    """The oracle in a process of its own, at low priority, judging requests as they finish."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._requests: Queue[Served | None] = context.Queue()
        self._results: Queue[Judged] = context.Queue()
        queues = (self._requests, self._results)
        self._process = context.Process(target=_judge, args=(os.getpid(), *queues), name="oracle", daemon=True)
        self.submitted = 0
        self.judged: list[Judged] = []

    def start(self) -> None:
        """Start the process; requests may be submitted at once."""
        self._process.start()

    def submit(self, served: Served) -> None:
        """Have one finished request judged."""
        self._requests.put(served)
        self.submitted += 1

    def collect(self) -> None:
        """Take what has been judged so far. Raises EnvironmentFault when the oracle has died."""
        while True:
            try:
                self.judged.append(self._results.get_nowait())
            except queue.Empty:
                break
        if not self._process.is_alive() and len(self.judged) < self.submitted:
            raise EnvironmentFault(
                f"the oracle ended (exit code {self._process.exitcode}) with {self.waiting} requests unjudged"
            )

    @property
    def waiting(self) -> int:
        """Requests not judged yet."""
        return self.submitted - len(self.judged)

    @property
    def tokens_checked(self) -> int:
        """Tokens compared so far."""
        return sum(judged.num_tokens for judged in self.judged)

    @property
    def mismatches(self) -> int:
        """Tokens that differ so far."""
        return sum(judged.mismatches for judged in self.judged)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything submitted is judged, then end the process. Raises DeadlineError with what is left."""
        deadline = time.monotonic() + timeout_s
        while self.waiting:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the oracle has not judged {self.waiting} of {self.submitted} requests within {timeout_s:.0f} s"
                )
            self.collect()
            time.sleep(0.02)
        self._requests.put(None)
        self._process.join(10)

    def kill(self) -> None:
        """End it at once; requests that it has not taken in yet are dropped, not waited for at the end of this process."""
        self._requests.cancel_join_thread()
        if self._process.is_alive():
            self._process.kill()
