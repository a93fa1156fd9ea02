"""The proxy by which tests cut links: what it lets pass, keeps and ends."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.engine.reference.launch import free_port
from tests.integration.cut_link import CutLink, connected_socket, listening_socket

TIMEOUT_S = 10.0
SILENCE_S = 0.2


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[CutLink, socket.socket]]:
    """A link, and the socket that listens behind it."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        if request.param == "tcp":
            near, far = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        else:
            near, far = f"unix:{Path(folder) / 'near'}", f"unix:{Path(folder) / 'far'}"
        with listening_socket(far) as listener, CutLink(near, far) as link:
            listener.settimeout(TIMEOUT_S)
            yield link, listener


def connected(link: CutLink, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = connected_socket(link.listen)
    client.settimeout(TIMEOUT_S)
    server, _ = listener.accept()
    server.settimeout(TIMEOUT_S)
    return client, server


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_pass_in_order_both_ways_and_the_end_of_a_connection_too(ends: tuple[CutLink, socket.socket]) -> None:
    link, listener = ends
    client, server = connected(link, listener)
    sent = bytes(range(256)) * 8192  # more than buffers hold
    got = bytearray()
    client.setblocking(False)
    left = memoryview(sent)
    while len(got) < len(sent):
        with contextlib.suppress(BlockingIOError):
            left = left[client.send(left) :] if left else left
        got += server.recv(1 << 16)
    assert got == sent
    server.sendall(b"answer")
    client.settimeout(TIMEOUT_S)
    assert client.recv(16) == b"answer"
    server.close()
    assert is_ended(client)
    client.close()


def test_a_cut_ends_what_is_there_refuses_what_comes_and_is_undone(ends: tuple[CutLink, socket.socket]) -> None:
    link, listener = ends
    client, server = connected(link, listener)
    link.cut()
    assert is_ended(client)
    assert is_ended(server)
    with pytest.raises(OSError, match=r"refused|No such file"):
        connected_socket(link.listen)
    link.restore()
    again, server_again = connected(link, listener)
    again.sendall(b"x")
    assert server_again.recv(1) == b"x"
    for one in (client, server, again, server_again):
        one.close()


def test_a_held_link_is_silent_and_brings_what_was_sent_once_it_is_restored(ends: tuple[CutLink, socket.socket]) -> None:
    link, listener = ends
    client, server = connected(link, listener)
    link.hold()
    client.sendall(b"late")
    late_comer = connected_socket(link.listen)
    for silent in (server, listener):
        silent.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            silent.recv(4) if silent is server else silent.accept()
        silent.settimeout(TIMEOUT_S)
    link.restore()
    assert server.recv(4) == b"late"
    newest, _ = listener.accept()
    late_comer.sendall(b"new")
    newest.settimeout(TIMEOUT_S)
    assert newest.recv(3) == b"new"
    for one in (client, server, late_comer, newest):
        one.close()


def test_a_link_to_nobody_ends_what_comes(ends: tuple[CutLink, socket.socket]) -> None:
    link, listener = ends
    listener.close()
    if link.target.startswith("unix:"):
        Path(link.target.removeprefix("unix:")).unlink()
    try:
        client = connected_socket(link.listen)
    except ConnectionResetError:
        return  # so soon
    with client:
        client.settimeout(TIMEOUT_S)
        assert is_ended(client)
