"""Asks the node's agent process one question over its Unix socket: one connection, one absolute deadline, no thread."""

from __future__ import annotations

import socket
import time

from agent.frames import HEAD, Decoder, Welcome, encode, frame_lengths
from eplb_service.advice import Advice, AdviceRequest
from eplb_service.errors import EnvironmentFault, InvalidInputError

READ_BYTES = 1 << 18
HEAD_BYTES_MAX = 1 << 16
"""Of an answer: its head is a few numbers and one sentence."""
RETRY_S = 0.02
"""Between tries while the agent process has more connections waiting than it accepts."""


class NoAnswerError(EnvironmentFault):
    """The question was not answered; the sentence says why and what to do."""


def ask(path: str, question: AdviceRequest, *, timeout_s: float, release: str) -> Advice:
    """The answer to a question. Raises NoAnswerError when there is none in time, or what came is no answer to it.

    timeout_s: from connecting to the whole answer. release: of this package; the agent process must be of the same.
    """
    frame = encode(question)
    deadline = _Deadline(time.monotonic() + timeout_s, timeout_s, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            _connect(connection, path, deadline)
            stream = _Stream(connection, deadline, payload_bytes_max=question.current.size * 4)
            welcome = stream.next()
            if not isinstance(welcome, Welcome):
                raise NoAnswerError(f"agent process at {path} sent {type(welcome).__name__} before Welcome")
            if welcome.version != release:
                raise NoAnswerError(
                    f"agent process at {path} is of release {welcome.version}, this plug-in of {release};"
                    " install the same release on both sides"
                )
            connection.settimeout(deadline.left("while the question was sent"))
            connection.sendall(frame)
            answer = stream.next()
        except TimeoutError:
            raise NoAnswerError(deadline.sentence("without a whole answer")) from None
        except InvalidInputError as error:
            raise NoAnswerError(f"agent process at {path} sent what is no answer: {error}") from None
        except OSError as error:
            raise NoAnswerError(f"link to the agent process at {path} failed: {error.strerror or error}") from None
    if not isinstance(answer, Advice):
        raise NoAnswerError(f"agent process at {path} answered a question with {type(answer).__name__}")
    if (answer.origin, answer.sequence) != (question.origin, question.sequence):
        raise NoAnswerError(
            f"agent process at {path} answered question {answer.sequence} of origin {answer.origin},"
            f" not {question.sequence} of {question.origin}"
        )
    return answer


class _Deadline:
    """One moment for all that a question takes."""

    def __init__(self, at: float, timeout_s: float, path: str) -> None:
        self._at, self._timeout_s, self._path = at, timeout_s, path

    def left(self, when: str) -> float:
        """Seconds left, above 0. Raises NoAnswerError when there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise NoAnswerError(self.sentence(when))
        return left

    def sentence(self, when: str) -> str:
        """Says that time is up."""
        return f"agent process at {self._path}: {self._timeout_s:g} s (EPLB_ADVISER_TIMEOUT_S) ended {when}"


def _connect(connection: socket.socket, path: str, deadline: _Deadline) -> None:
    while True:
        connection.settimeout(deadline.left("before it took the connection"))
        try:
            connection.connect(path)
        except BlockingIOError:  # its queue is full; a Unix socket does not wait for room
            time.sleep(min(RETRY_S, deadline.left("before it took the connection")))
        except FileNotFoundError:
            raise NoAnswerError(f"no agent process listens at {path}; start `eplb agent` on this node") from None
        except ConnectionRefusedError:
            raise NoAnswerError(f"the agent process that listened at {path} is gone; start `eplb agent` again") from None
        except TimeoutError:
            raise
        except OSError as error:  # a path that is too long says so without an errno
            raise NoAnswerError(f"cannot connect to the agent process at {path}: {error.strerror or error}") from None
        else:
            return


class _Stream:
    """Messages as they come, in whatever pieces."""

    def __init__(self, connection: socket.socket, deadline: _Deadline, *, payload_bytes_max: int) -> None:
        self._connection, self._deadline, self._payload_bytes_max = connection, deadline, payload_bytes_max
        self._received = bytearray()
        self._decoder = Decoder((Welcome, Advice))

    def next(self) -> object:
        """The next message. Raises InvalidInputError for what is none, ConnectionError when the other side is gone."""
        self._read_to(HEAD.size)
        head, payload = frame_lengths(bytes(self._received[: HEAD.size]))
        if head > HEAD_BYTES_MAX or payload > self._payload_bytes_max:
            raise InvalidInputError(
                f"a frame with a head of {head} and a payload of {payload} bytes;"
                f" an answer here has at most {HEAD_BYTES_MAX} and {self._payload_bytes_max}"
            )
        end = HEAD.size + head + payload
        self._read_to(end)
        body = bytes(self._received[HEAD.size : end])
        del self._received[:end]
        return self._decoder.decode(body[:head], body[head:])

    def _read_to(self, length: int) -> None:
        while len(self._received) < length:
            self._connection.settimeout(self._deadline.left("without a whole answer"))
            data = self._connection.recv(READ_BYTES)
            if not data:
                raise ConnectionError("it closed the connection before it had answered")
            self._received += data
