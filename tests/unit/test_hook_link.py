"""The link to the agent process: absent, silent, of another release, gone and back; the engine never notices."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agent.frames import HEAD, Decoder, RegistrationAnswer, Welcome, encode, frame_lengths
from agent.hook.link import Link
from agent.hook.outbox import Outbox
from eplb_service.control import Address, Armed, Hello, Pulse, Registration, ToRank
from eplb_service.ids import ChunkId, DeploymentId, Epoch, GroupId, Incarnation, Phase, RankId
from eplb_service.window.report import LoadReport, Semantics, TableCounts

WAIT_S = 10.0
ADDRESS = Address(RankId(4), Incarnation(9), GroupId(2))


class Owner:
    """What a hook does, reduced to notes."""

    def __init__(self) -> None:
        self.messages: list[ToRank] = []
        self.answers: list[RegistrationAnswer] = []
        self.attached = 0
        self.ticks = 0
        self.news = threading.Condition()

    def registration(self) -> Registration:
        return Registration(
            deployment=DeploymentId("d"), address=ADDRESS, node="n", group_rank_ids=(RankId(4),), phase=Phase.DECODE, stage=0,
            models=(), capacity=1.0, dispatch="even", vote_period=1, window_steps=1, sub_windows=1, staging_bytes=0,
            replica_table_width=1,
            weights_version=0,
        )  # fmt: skip

    def _note(self) -> None:
        with self.news:
            self.news.notify_all()

    def on_attached(self) -> None:
        self.attached += 1
        self._note()

    def on_message(self, message: ToRank) -> None:
        self.messages.append(message)
        self._note()

    def on_answer(self, answer: RegistrationAnswer) -> None:
        self.answers.append(answer)
        self._note()

    def on_tick(self) -> None:
        self.ticks += 1
        self._note()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(condition, WAIT_S)


class Bench:
    def __init__(self, path: str) -> None:
        self.path, self.owner, self.outbox = path, Owner(), Outbox(4)
        self.link = Link(path, self.owner, self.outbox, release="1.2.3", tick_s=0.02, reconnect_max_s=0.05)

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(4)
        listener.settimeout(WAIT_S)
        return listener


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        bench = Bench(f"{folder}/agent.sock")
        yield bench
        bench.link.close(WAIT_S)


def accept(listener: socket.socket, version: str = "1.2.3") -> socket.socket:
    connection, _ = listener.accept()
    connection.settimeout(WAIT_S)
    connection.sendall(encode(Welcome(version=version)))
    return connection


def _attached(bench: Bench, times: int) -> bool:
    return bench.owner.attached == times


def receive(connection: socket.socket) -> object:
    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            assert part
            data += part
        return data

    head, payload = frame_lengths(read(HEAD.size))
    body = read(head + payload)
    return Decoder((Registration, Armed, Pulse)).decode(body[:head], body[head:])


def test_a_hook_without_agent_process_says_once_where_it_looked_and_what_to_do_and_ticks_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bench.link.start()
        bench.owner.until(lambda: bench.owner.ticks > 15)
    (line,) = [record.getMessage() for record in caplog.records]
    assert bench.path in line
    assert "there is no such socket" in line
    assert "eplb agent" in line


def test_the_registration_comes_first_then_what_is_said_after_it(bench: Bench) -> None:
    listener = bench.listen()
    bench.outbox.put(Armed(sender=ADDRESS, chunk_id=ChunkId(1)))  # nobody is there: forgotten
    bench.link.start()
    connection = accept(listener)
    assert isinstance(receive(connection), Registration)
    bench.owner.until(lambda: bench.owner.attached == 1)
    bench.outbox.put(Armed(sender=ADDRESS, chunk_id=ChunkId(2)))
    bench.link.wake()
    assert receive(connection) == Armed(sender=ADDRESS, chunk_id=ChunkId(2))


def test_frames_that_arrive_in_pieces_and_together_are_all_read(bench: Bench) -> None:
    listener = bench.listen()
    bench.link.start()
    connection = accept(listener)
    receive(connection)
    data = encode(Hello(to=ADDRESS, epoch=Epoch(1))) + encode(RegistrationAnswer(accepted=True, reason=""))
    data += encode(Hello(to=ADDRESS, epoch=Epoch(2)))
    for start in range(0, len(data), 37):
        connection.sendall(data[start : start + 37])
    bench.owner.until(lambda: len(bench.owner.messages) == 2)
    assert [m.epoch for m in bench.owner.messages if isinstance(m, Hello)] == [1, 2]
    assert bench.owner.answers[0].accepted


def test_it_connects_again_and_registers_again(bench: Bench) -> None:
    listener = bench.listen()
    bench.link.start()
    for round_ in range(1, 4):
        connection = accept(listener)
        assert isinstance(receive(connection), Registration)
        bench.owner.until(partial(_attached, bench, round_))
        connection.close()
    bench.owner.until(lambda: not bench.link.is_connected)


def test_an_agent_process_of_another_release_is_refused_by_name(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    listener = bench.listen()
    bench.link.start()
    for _ in range(3):
        accept(listener, "0.9.0")
    assert bench.owner.attached == 0
    (line,) = {record.getMessage() for record in caplog.records}
    assert "release 0.9.0, this hook of 1.2.3" in line


def test_what_is_no_frame_closes_the_link_with_a_reason(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    listener = bench.listen()
    bench.link.start()
    connection, _ = listener.accept()
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    accept(listener).close()
    assert any("not a frame" in record.getMessage() for record in caplog.records)


def test_an_agent_process_that_hangs_never_blocks_who_speaks(bench: Bench) -> None:
    listener = bench.listen()
    bench.link.start()
    connection = accept(listener)
    receive(connection)
    bench.owner.until(lambda: bench.owner.attached == 1)

    def speak() -> None:
        for boundary in range(8_000):  # more than the socket takes; nobody reads
            bench.outbox.put(Armed(sender=ADDRESS, chunk_id=ChunkId(boundary)))
            bench.link.wake()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(WAIT_S)
    assert not speaker.is_alive()
    ticks = bench.owner.ticks
    bench.owner.until(lambda: bench.owner.ticks > ticks)
    assert len(bench.outbox) <= 1024
    assert Path(bench.path).exists()


def test_windows_that_were_on_their_way_when_the_link_broke_are_counted_as_dropped(bench: Bench) -> None:
    listener = bench.listen()
    window = LoadReport(
        rank_id=RankId(4),
        incarnation=Incarnation(9),
        group_id=GroupId(2),
        window_index=0,
        boundary_begin=0,
        boundary_end=1,
        forward_passes=1,
        tokens=1,
        semantics=Semantics.LOCAL_TOKENS,
        phase=Phase.DECODE,
        live_digest_begin=1,
        live_digest_end=1,
        tables=(TableCounts(model="m", layer_ids=(0,), counts=np.zeros((1, 1, 1 << 20), np.int64)),),
    )
    bench.outbox.put_window(window)  # 8 MiB: the socket takes a part of it
    bench.link.start()
    connection = accept(listener)
    receive(connection)
    bench.owner.until(lambda: bench.outbox.windows_sent == 1)
    connection.close()
    bench.owner.until(lambda: not bench.link.is_connected and bench.outbox.windows_dropped == 1)
    assert bench.outbox.windows_sent == 0


def test_a_rank_in_another_group_connects_again_at_once_and_says_who_it_is_now(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with bench.listen() as listener:
        bench.link.start()
        with accept(listener) as first:
            assert isinstance(receive(first), Registration)
            bench.owner.until(partial(_attached, bench, 1))
            bench.link.register_anew()
            with accept(listener) as second:
                assert isinstance(receive(second), Registration)
                bench.owner.until(partial(_attached, bench, 2))
                assert first.recv(1) == b""  # the one before is closed, not left beside it
                assert caplog.records == []
