"""One client of one rank: submits requests, receives tokens, looks inside. Every wait has a deadline."""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

from agent.engine.reference.messages import (
    FROM_ENGINE,
    Drain,
    Drained,
    FrameStream,
    FromEngine,
    Inspect,
    Inspection,
    Stop,
    Submit,
)
from eplb_service.errors import DeadlineError, EnvironmentFault

_Answer = TypeVar("_Answer", Drained, Inspection)


class RankClient:
    """A connection to a rank's request socket.

    Messages are received in the order in which the rank sent them; `inspect` and `drain` keep what comes before their
    answer for the next `receive`.
    """

    def __init__(self, path: Path | str) -> None:
        """Connect. Raises EnvironmentFault when no rank listens at `path`."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise EnvironmentFault(f"no rank answers at {path} ({error}); is its fleet running?") from error
        self._path = path
        self._stream = FrameStream(connection, FROM_ENGINE)
        self._inbox: deque[FromEngine] = deque()
        self._tags = itertools.count(1)

    def fileno(self) -> int:
        """For selectors: readable when messages have come."""
        return self._stream.fileno()

    def submit(self, *, request_id: int, prompt: Sequence[int], max_new_tokens: int, kind: str = "") -> None:
        """Ask for tokens. A prompt may be `bytes`, for a model of bytes. Answers: NewTokens and Ended, or Rejected."""
        self._send(Submit(request_id=request_id, kind=kind, prompt=tuple(prompt), max_new_tokens=max_new_tokens))

    def receive(self, *, timeout_s: float) -> list[FromEngine]:
        """Messages that have come, after waiting up to `timeout_s` for the first; none then is an empty list.

        Raises:
            EnvironmentFault: the rank is gone.
        """
        if not self._inbox:
            self._fill(time.monotonic() + timeout_s)
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def inspect(self, *, timeout_s: float) -> Inspection:
        """What the rank holds and has served. Raises DeadlineError without an answer, EnvironmentFault when it is gone."""
        tag = next(self._tags)
        self._send(Inspect(tag=tag))
        return self._answer(Inspection, tag, timeout_s)

    def drain(self, *, timeout_s: float) -> None:
        """Have the rank take no more requests and wait until it has none. Raises as `inspect`."""
        tag = next(self._tags)
        self._send(Drain(tag=tag))
        self._answer(Drained, tag, timeout_s)

    def stop(self, *, cancel: bool = False) -> None:
        """Have the process end once every rank of its group was told so and has no work. cancel: end requests first."""
        self._send(Stop(cancel=cancel))

    def close(self) -> None:
        """Close the connection; the rank drops this client's requests."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, kind: type[_Answer], tag: int, timeout_s: float) -> _Answer:
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self._inbox:
                if isinstance(message, kind) and message.tag == tag:
                    self._inbox.remove(message)
                    return message
            if not self._fill(deadline):
                raise DeadlineError(
                    f"the rank at {self._path} did not answer within {timeout_s} s; is its group stuck in a step?"
                )

    def _fill(self, deadline: float) -> bool:
        """Move arrived messages to the inbox, waiting for some until the deadline; whether any came."""
        while True:
            wait_s = max(0.0, deadline - time.monotonic())
            writing = [self._stream] if self._stream.outgoing_bytes else []
            readable, writable, _ = select.select([self._stream], writing, [], wait_s)
            if not readable and not writable:
                return False
            try:
                if writable:
                    self._stream.flush()
                arrived = [message for message in self._stream.receive() if isinstance(message, FromEngine)]
            except ConnectionError as error:
                raise EnvironmentFault(f"the rank at {self._path} closed the connection ({error})") from error
            if arrived:
                self._inbox.extend(arrived)
                return True

    def _send(self, message: object) -> None:
        try:
            self._stream.send(message)
        except ConnectionError as error:
            raise EnvironmentFault(f"the rank at {self._path} is gone ({error}); its reason file says why") from error
