"""The agent's Unix socket against hooks that send anything at all, do not read, or come in crowds."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agent import link_server
from agent.frames import HEAD, MAGIC, RegistrationAnswer, encode
from agent.link_server import FROM_HOOK, LinkServer
from agent.session_events import HookMessage, LinkId
from agent.socket_path import claim_socket
from eplb_service.advice import AdviceRequest
from eplb_service.control import Hello
from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.ids import Epoch
from tests.integration.agent_doubles import (
    DEADLINE_S,
    Changes,
    FakeHook,
    address,
    pulse,
    registration,
    report,
    staged,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        yield Path(name)


class Server(Changes):
    """A LinkServer that keeps what it hears, and what the event loop complains of."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "s"
        self.heard: list[tuple[LinkId, HookMessage | AdviceRequest]] = []
        self.gone: list[tuple[LinkId, str]] = []
        self.complaints: list[dict[str, Any]] = []
        self.links = LinkServer(
            self.path, release="1.2.3", on_message=self._on_message, on_gone=self._on_gone, on_sent=lambda _message: None
        )

    async def start(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: self.complaints.append(context))
        await self.links.start()

    def _on_message(self, link: LinkId, message: HookMessage | AdviceRequest) -> None:
        self.heard.append((link, message))
        self.changed()

    def _on_gone(self, link: LinkId, reason: str) -> None:
        self.gone.append((link, reason))
        self.changed()

    async def reason(self, count: int = 1) -> str:
        """Why the count-th link ended."""
        await self.until(lambda: len(self.gone) >= count, f"{count} links ended")
        return self.gone[count - 1][1]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    server = Server(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.links.close()
        assert server.complaints == []


def frame(head: object, payload: bytes = b"") -> bytes:
    encoded = json.dumps(head).encode()
    return HEAD.pack(MAGIC, len(encoded), len(payload)) + encoded + payload


def typed_frame(kind: str, body: object, arrays: object, payload: bytes) -> bytes:
    return frame({"kind": kind, "body": body, "arrays": arrays}, payload)


LENGTHS = st.integers(0, 2**32 - 1)
VALID = [encode(m) for m in (registration(address(0)), staged(address(0)), pulse(address(0)), report(address(0), 1))]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from([cls.__name__ for cls in FROM_HOOK])
DESCRIBED = st.lists(
    st.tuples(st.sampled_from(["<i4", "<i8", "O", ""]), st.lists(st.integers(-1, 1 << 40), max_size=3)), max_size=2
)


def mutated(draw: Any) -> bytes:
    """A valid frame with some bytes changed, and perhaps its end cut off."""
    original = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 3))):
        original[draw(st.integers(0, len(original) - 1))] = draw(st.integers(0, 255))
    return bytes(original[: draw(st.integers(len(original) // 2, len(original)))])


FRAMES = st.one_of(
    st.binary(max_size=64),
    st.builds(lambda a, b, rest: HEAD.pack(MAGIC, a, b) + rest, LENGTHS, LENGTHS, st.binary(max_size=64)),
    st.builds(frame, JSON, st.binary(max_size=32)),
    st.builds(typed_frame, KINDS, JSON, DESCRIBED | JSON, st.binary(max_size=32)),
    st.composite(mutated)(),
)  # fmt: skip


async def attack(server: Server, frames: bytes) -> None:
    """Send bytes on a link of their own; it must end, and nothing else happen."""
    ended = len(server.gone)
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(frames)
    writer.write_eof()
    reason = await server.reason(ended + 1)
    assert reason.startswith(("the hook sent what is no message: ", "the hook closed the link", "the link failed: "))
    async with asyncio.timeout(DEADLINE_S):
        await reader.read()
    writer.transport.abort()


def test_no_bytes_of_a_hook_end_more_than_its_own_link(folder: Path) -> None:
    with asyncio.Runner() as runner:
        server, bystander = Server(folder), FakeHook(address(1))
        runner.run(server.start())
        runner.run(bystander.link(server.path))

        @settings(max_examples=120, deadline=None, database=None)
        @given(FRAMES)
        def fuzz(frames: bytes) -> None:
            runner.run(attack(server, frames))

        fuzz()
        server.heard.clear()
        runner.run(bystander.say(pulse(address(1))))
        runner.run(server.until(lambda: (LinkId(1), pulse(address(1))) in server.heard, "the bystander is heard"))
        runner.run(server.links.close())
        assert server.complaints == []


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a frame: it starts with b'GET '"),
        (HEAD.pack(MAGIC, 1 << 31, 0), "frame too large: head 2147483648 of at most"),
        (HEAD.pack(MAGIC, 0, 100 << 20), "frame too large for a hook: head 0 of at most 33554432 bytes, payload 104857600"),
        (HEAD.pack(MAGIC, 100_000, 0) + b"[" * 100_000, "is not the expected JSON"),
        (frame({"kind": "Pulse", "body": {}, "arrays": [["<i8", [0, 1 << 30, 1 << 30]]]}), "1073741824] is too large; at most"),
        (frame({"kind": "Hello", "body": {}, "arrays": []}), "unknown frame kind 'Hello'; expected one of Registration"),
        (encode(pulse(address(0)))[:-3], "the hook closed the link in the middle of a frame"),
    ],
)
def test_the_reason_says_what_was_wrong(folder: Path, sent: bytes, reason: str) -> None:
    async def work() -> None:
        async with serving(folder) as server:
            await attack(server, sent)
            assert reason in server.gone[0][1]

    asyncio.run(work())


def test_a_hook_that_stops_reading_loses_its_link_and_no_memory_grows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "QUEUE_FRAMES_MAX", 8)
    monkeypatch.setattr(link_server, "CLOSE_TIMEOUT_S", 0.1)

    async def work() -> None:
        async with serving(folder) as server:
            _, writer = await asyncio.open_unix_connection(str(server.path), limit=1)
            writer.write(encode(registration(address(0))))
            await server.until(lambda: server.heard, "the registration")
            link = server.heard[0][0]
            answer = RegistrationAnswer(accepted=False, reason="x" * 100_000)
            for _ in range(2000):
                server.links.send(link, answer)
                if server.gone:
                    break
                await asyncio.sleep(0)
            assert await server.reason() == "the hook does not read: 8 messages are waiting for it"
            writer.transport.abort()

    asyncio.run(work())


def test_what_was_queued_before_a_link_is_closed_still_arrives(folder: Path) -> None:
    async def work() -> None:
        async with serving(folder) as server:
            hook = FakeHook(address(0))
            await hook.link(server.path)
            await server.until(lambda: server.heard, "the registration")
            link = server.heard[0][0]
            server.links.send(link, RegistrationAnswer(accepted=False, reason="no"))
            server.links.close_link(link, "refused")
            server.links.send(link, Hello(to=address(0), epoch=Epoch(1)))
            assert (await hook.hear(RegistrationAnswer)).reason == "no"
            await hook.unlinked()
            assert await server.reason() == "refused"
            assert not any(isinstance(message, Hello) for message in hook.heard)

    asyncio.run(work())


def test_more_hooks_than_a_node_can_have_are_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "LINKS_MAX", 3)

    async def work() -> None:
        async with serving(folder) as server:
            hooks = [FakeHook(address(rank)) for rank in range(3)]
            for hook in hooks:
                await hook.link(server.path)
            await server.until(lambda: len(server.heard) == 3, "three registrations")
            fourth = FakeHook(address(3))
            await fourth.link(server.path)
            await fourth.unlinked()
            assert len(server.heard) == 3
            await hooks[0].drop()
            await server.reason()
            again = FakeHook(address(3))
            await again.link(server.path)
            await server.until(lambda: len(server.heard) == 4, "a hook in the room that one left")

    asyncio.run(work())


def test_a_stale_socket_is_reclaimed_and_a_live_one_is_not(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    claim = claim_socket(path)
    with pytest.raises(EnvironmentFault, match=f"in use by a running agent process \\(pid {os.getpid()}\\)"):
        claim_socket(path)
    claim.release()
    assert not path.exists()
    claim_socket(path).release()


def test_a_path_that_is_too_long_is_refused_with_the_numbers(folder: Path) -> None:
    path = folder / ("x" * (108 - len(str(folder)) - 1))
    assert len(str(path)) == 108
    with pytest.raises(InvalidInputError, match="socket path has 108 bytes but a Unix socket's has at most 107"):
        claim_socket(path)
    claim_socket(path.with_name(path.name[1:])).release()
