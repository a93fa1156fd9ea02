"""What a rank of the reference engine and its clients say to one another, in frames of `agent.frames` on a Unix socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import StrEnum

from agent.frames import HEAD, Decoder, encode, frame_lengths
from eplb_service.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Generate `max_new_tokens` after a prompt. request_id: chosen by the client; with the position it seeds sampling.

    kind: what sort of text this is; comes back in `Ended`.
    """

    request_id: int
    kind: str
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Ask for an `Inspection`, answered between two steps. tag: comes back."""

    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no more requests, finish those that are there, then answer `Drained`. The rank goes on in lock-step."""

    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the process once every rank of the group was told so and no rank has work. cancel: end the requests first."""

    cancel: bool = False


ToEngine = Submit | Inspect | Drain | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """One generated token. index: 0 is the first after the prompt."""

    request_id: int
    index: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """What one step generated for one client.

    boundary: number of the step boundary before the step, equal on all ranks (0 = the first step).
    generations: what each MoE layer, ascending, was routed by in this step; 0 = as loaded.
    """

    boundary: int
    generations: tuple[int, ...]
    tokens: tuple[NewToken, ...]


class EndReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"  # all tokens that were asked for
    CANCELLED = "cancelled"  # the rank was told to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Nothing more comes of this request."""

    request_id: int
    kind: str
    reason: EndReason
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The request was not taken up, and why."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """All requests of this rank have ended and none is taken up. tag: of the `Drain`."""

    tag: int


class RankState(StrEnum):
    """What a rank is doing."""

    SERVING = "serving"  # the group runs steps
    IDLE = "idle"  # no rank has work: no steps at all


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInspection:
    """What one layer of one rank holds and has served.

    row: shape (P,), physical to logical as the dispatch reads it. shares: shape (P,), of each slot, under weighted dispatch.
    row_digest: `placement.row_digest` of both.
    slot_digests: shape (S,), `model.expert_digest` of the tensors in each local slot.
    tokens: shape (S,), (token, choice) pairs that each local slot computed since start, dummy tokens left out.
    tokens_since_flip: the same since the layer's row or shares last changed. flip_boundary: when that was; -1 = never.
    sent: shape (P,), (token, choice) pairs that this rank's own requests sent to each slot since start.
    """

    layer_id: int
    generation: int
    row: tuple[int, ...]
    row_digest: int
    slot_digests: tuple[int, ...]
    tokens: tuple[int, ...]
    tokens_since_flip: tuple[int, ...]
    flip_boundary: int
    sent: tuple[int, ...]
    shares: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Answer to `Inspect`. boundary: step boundaries passed so far. real_tokens: fed to the model, dummy ones left out."""

    tag: int
    rank_id: int
    state: RankState
    boundary: int
    real_tokens: int
    dummy_steps: int
    waiting: int
    running: int
    layers: tuple[LayerInspection, ...]


FromEngine = NewTokens | Ended | Rejected | Drained | Inspection

TO_ENGINE: tuple[type, ...] = (Submit, Inspect, Drain, Stop)
FROM_ENGINE: tuple[type, ...] = (NewTokens, Ended, Rejected, Drained, Inspection)
FRAME_BYTES_MAX = 16 << 20
"""No message of either side is near it: what announces more would only fill memory."""


class FrameStream:
    """Frames over a connected stream socket, without ever blocking: what does not go out at once waits in a buffer."""

    def __init__(self, connection: socket.socket, understood: tuple[type, ...]) -> None:
        connection.settimeout(0)
        self._connection = connection
        self._decoder = Decoder(understood)
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    @property
    def outgoing_bytes(self) -> int:
        """Bytes that wait for the peer to read."""
        return len(self._outgoing)

    def send(self, message: object) -> None:
        """Queue a message and write what the socket takes. Raises ConnectionError when the peer is gone."""
        self._outgoing += encode(message)
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes. Raises ConnectionError when the peer is gone."""
        while self._outgoing:
            try:
                sent = self._connection.send(self._outgoing)
            except BlockingIOError:
                return
            del self._outgoing[:sent]

    def receive(self) -> list[object]:
        """Every whole message that has arrived.

        Raises:
            ConnectionError: the peer is gone (messages before that were returned by earlier calls).
            InvalidInputError: what came is no frame, or not a message of this side.
        """
        messages = self._parse()
        if messages:
            return messages
        while True:
            try:
                chunk = self._connection.recv(1 << 18)
            except BlockingIOError:
                break
            if not chunk:
                messages = self._parse()
                if messages:
                    return messages
                raise ConnectionResetError("the peer closed the connection")
            self._incoming += chunk
            if len(chunk) < 1 << 18:
                break
        return self._parse()

    def close(self) -> None:
        """Close the socket; what was queued is lost."""
        self._connection.close()

    def _parse(self) -> list[object]:
        messages: list[object] = []
        offset = 0
        while len(self._incoming) - offset >= HEAD.size:
            head_length, payload_length = frame_lengths(bytes(self._incoming[offset : offset + HEAD.size]))
            if head_length + payload_length > FRAME_BYTES_MAX:
                raise InvalidInputError(
                    f"frame too large: {head_length + payload_length} bytes are announced, at most {FRAME_BYTES_MAX} are taken"
                )
            start = offset + HEAD.size
            end = start + head_length + payload_length
            if len(self._incoming) < end:
                break
            head = bytes(self._incoming[start : start + head_length])
            messages.append(self._decoder.decode(head, bytes(self._incoming[start + head_length : end])))
            offset = end
        del self._incoming[:offset]
        return messages
