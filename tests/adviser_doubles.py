"""An agent process as engines see it, scripted: what it answers to each question, and how badly."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent.frames import HEAD, Decoder, Welcome, encode, frame_lengths
from eplb_service import __version__
from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.ids import GenerationNumber

Answer = Callable[[AdviceRequest], bytes | None]
"""What is sent back to a question: bytes, or None = nothing, and the connection stays open until the asker ends it."""

WELCOME = encode(Welcome(version=__version__))


def advice(
    question: AdviceRequest, rows: npt.NDArray[np.int32] | None, *, generation: int = 1, reason: str = "it pays"
) -> Advice:
    """An answer: go to these rows; None = keep."""
    return Advice(
        origin=question.origin,
        sequence=question.sequence,
        move=rows is not None,
        generation=GenerationNumber(generation),
        digest=map_digest(question.current if rows is None else rows),
        reason=reason,
        rows=rows,
    )


def moving(rows: npt.NDArray[np.int32] | Callable[[AdviceRequest], npt.NDArray[np.int32]], *, generation: int = 1) -> Answer:
    """Answers with a map, or with one made of the question."""
    return lambda question: encode(advice(question, rows(question) if callable(rows) else rows, generation=generation))


def keeping(question: AdviceRequest) -> bytes:
    """Answers: keep."""
    return encode(advice(question, None, generation=0, reason="gain 0.1 ms a step does not pay for 40 moves"))


def silent(_question: AdviceRequest) -> None:
    """Never answers."""


class ScriptedAgent:
    """Listens at a path and answers by whatever `answer` is at the time. Questions are kept in `questions`."""

    def __init__(self, path: Path, answer: Answer = keeping, *, welcome: bytes = WELCOME) -> None:
        self.path, self.answer, self.welcome = path, answer, welcome
        self.questions: list[AdviceRequest] = []
        self.closed_by_asker = threading.Semaphore(0)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, as a process that is killed would."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(self.welcome)
            question = _read(connection)
            if question is not None:
                self.questions.append(question)
                answered = self.answer(question)
                if answered is not None:
                    connection.sendall(answered)
                while connection.recv(1 << 16):
                    pass
        self._connections.discard(connection)
        self.closed_by_asker.release()


def _read(connection: socket.socket) -> AdviceRequest | None:
    received = bytearray()
    head, end = 0, HEAD.size
    while len(received) < end:
        data = connection.recv(1 << 16)
        if not data:
            return None
        received += data
        if len(received) >= HEAD.size:
            head, payload = frame_lengths(bytes(received[: HEAD.size]))
            end = HEAD.size + head + payload
    question = Decoder([AdviceRequest]).decode(
        bytes(received[HEAD.size : HEAD.size + head]), bytes(received[HEAD.size + head : end])
    )
    assert isinstance(question, AdviceRequest)
    return question


@contextlib.contextmanager
def scripted_agent(path: Path, answer: Answer = keeping) -> Iterator[ScriptedAgent]:
    """One that ends with the block."""
    agent = ScriptedAgent(path, answer)
    try:
        yield agent
    finally:
        agent.close()


def linear_map(num_layers: int, num_logical: int, num_physical: int) -> npt.NDArray[np.int32]:
    """How engines start: slot i holds expert i % E. Shape (L, P), int32."""
    return np.tile(np.arange(num_physical, dtype=np.int32) % num_logical, (num_layers, 1))


def shuffled_map(seed: int, num_layers: int, num_logical: int, num_physical: int, num_ranks: int) -> npt.NDArray[np.int32]:
    """A legal map, at random, no expert twice on a rank. Shape (L, P), int32."""
    random = np.random.default_rng(seed)
    slots = num_physical // num_ranks
    rows: list[npt.NDArray[np.int64]] = []
    while len(rows) < num_layers:
        row = np.concatenate([np.arange(num_logical), random.choice(num_logical, num_physical - num_logical)])
        random.shuffle(row)
        by_rank = np.sort(row.reshape(num_ranks, slots), axis=1)
        if not (by_rank[:, 1:] == by_rank[:, :-1]).any():
            rows.append(row)
    return np.array(rows, dtype=np.int32)
