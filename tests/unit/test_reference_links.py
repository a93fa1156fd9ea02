"""Frames between ranks and clients, the front door, and the notes that rouse idle ranks."""

from __future__ import annotations

import select
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import FleetConfig
from agent.engine.reference.front_door import FrontDoor
from agent.engine.reference.launch import held_back
from agent.engine.reference.messages import (
    FRAME_BYTES_MAX,
    FROM_ENGINE,
    TO_ENGINE,
    Ended,
    EndReason,
    FrameStream,
    Inspect,
    NewToken,
    NewTokens,
    Submit,
)
from agent.engine.reference.wake import WakeMesh
from agent.frames import HEAD, MAGIC
from eplb_service.errors import DeadlineError, EnvironmentFault, InvalidInputError
from eplb_service.ids import DeploymentId, RankId

EMPTY_BUT_HUGE = b'{"kind":"Inspect","body":{"tag":1},"arrays":[["<i8",[0,1073741824,1073741824]]]}'
SUBMIT = Submit(request_id=1, kind="code", prompt=(1, 2, 3), max_new_tokens=4)


def readable(source: socket.socket | WakeMesh, *, within_s: float = 20.0) -> None:
    assert select.select([source], [], [], within_s)[0]


def test_frames_survive_any_cut() -> None:
    left, right = socket.socketpair()
    with right:
        sender, receiver = FrameStream(left, FROM_ENGINE), FrameStream(right, TO_ENGINE)
        sender.send(SUBMIT)
        readable(right)
        data = right.recv(1 << 16)
        feeder, fed = socket.socketpair()
        with feeder, fed:
            receiver = FrameStream(fed, TO_ENGINE)
            for byte in data + data[:-1]:
                feeder.send(bytes([byte]))
            assert receiver.receive() == [SUBMIT]
            assert receiver.receive() == []
            feeder.send(data[-1:])
            assert receiver.receive() == [SUBMIT]
        sender.close()


def test_what_is_no_frame_or_from_the_wrong_side_is_refused() -> None:
    left, right = socket.socketpair()
    with left, right:
        FrameStream(left, TO_ENGINE).send(NewToken(request_id=1, index=0, token=1))
        with pytest.raises(InvalidInputError, match="unknown frame kind 'NewToken'"):
            FrameStream(right, TO_ENGINE).receive()
        left.send(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(InvalidInputError, match="not a frame"):
            FrameStream(right, TO_ENGINE).receive()


def test_messages_before_the_end_of_a_connection_are_not_lost() -> None:
    left, right = socket.socketpair()
    sender = FrameStream(left, FROM_ENGINE)
    ended = Ended(request_id=1, kind="", reason=EndReason.LENGTH, num_tokens=3)
    sender.send(ended)
    sender.close()
    with right:
        receiver = FrameStream(right, FROM_ENGINE)
        assert receiver.receive() == [ended]
        with pytest.raises(ConnectionResetError):
            receiver.receive()


@pytest.fixture
def door() -> Iterator[tuple[FrontDoor, Path]]:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        path = Path(directory) / "rank.sock"
        opened = FrontDoor(path, output_bytes_max=10_000)
        yield opened, path
        opened.close()


def test_a_client_that_does_not_read_is_paused_until_it_does(door: tuple[FrontDoor, Path]) -> None:
    front, path = door
    with RankClient(path) as client:
        client.submit(request_id=1, prompt=b"abc", max_new_tokens=4, kind="code")
        arrivals = [*front.take(timeout_s=20.0), *front.take(timeout_s=20.0)]
        assert [arrival.message for arrival in arrivals] == [
            Submit(request_id=1, kind="code", prompt=(97, 98, 99), max_new_tokens=4)
        ]
        owner = arrivals[0].client
        many = NewTokens(
            boundary=1,
            generations=(0,),
            tokens=tuple(NewToken(request_id=1, index=i, token=1) for i in range(100)),
        )
        sent = 0
        while not front.paused():
            front.send(owner, many)
            sent += 1
        assert front.paused() == {owner}
        received: list[object] = []
        while len(received) < sent:
            front.take(timeout_s=0.0)
            received += client.receive(timeout_s=0.0)
        assert received == [many] * sent
        assert not front.paused()


def test_a_client_that_leaves_is_reported_once(door: tuple[FrontDoor, Path]) -> None:
    front, path = door
    client = RankClient(path)
    front.take(timeout_s=20.0)
    client.close()
    (gone,) = front.take(timeout_s=20.0)
    assert gone.message is None
    front.send(gone.client, SUBMIT)
    assert front.take(timeout_s=0.0) == []


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD.pack(MAGIC, 5, 0) + b"[[[[[",
        HEAD.pack(MAGIC, 0, FRAME_BYTES_MAX + 1),
        HEAD.pack(MAGIC, len(EMPTY_BUT_HUGE), 0) + EMPTY_BUT_HUGE,
    ],
)
def test_a_stranger_who_talks_nonsense_is_cut_off_and_others_stay(door: tuple[FrontDoor, Path], nonsense: bytes) -> None:
    front, path = door
    with RankClient(path) as client, socket.socket(socket.AF_UNIX) as stranger:
        front.take(timeout_s=20.0)
        stranger.connect(str(path))
        front.take(timeout_s=20.0)
        stranger.sendall(nonsense)
        assert [arrival.message for arrival in front.take(timeout_s=20.0)] == [None]
        assert stranger.recv(1) == b""
        with pytest.raises(DeadlineError, match="did not answer within"):
            client.inspect(timeout_s=0.01)
        assert [arrival.message for arrival in front.take(timeout_s=20.0)] == [Inspect(tag=1)]


def test_a_client_says_when_no_rank_is_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no rank answers at"):
        RankClient(tmp_path / "nobody.sock")


def test_a_door_that_cannot_open_says_where(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"cannot listen at .*use a short run directory"):
        FrontDoor(tmp_path / "missing" / "rank.sock", output_bytes_max=1)


def meshes(num_ranks: int) -> list[WakeMesh]:
    store = HashStore()
    with ThreadPoolExecutor(num_ranks) as pool:
        made = [
            pool.submit(WakeMesh, store, position=p, num_ranks=num_ranks, host="127.0.0.1", timeout_s=20.0)
            for p in range(num_ranks)
        ]
        return [future.result(timeout=30) for future in made]


def heard(mesh: WakeMesh) -> None:
    readable(mesh)
    mesh.read()


def test_a_wake_note_reaches_every_rank_and_ends_one_period_only() -> None:
    one, two, three = meshes(3)
    two.wake(5)
    for mesh in (one, three):
        assert not mesh.woken(5)
        heard(mesh)
        assert mesh.woken(5)
        assert not mesh.woken(6)
    # Notes that cross: a late one of the same period does not end the next.
    one.wake(5)
    heard(three)
    assert not three.woken(6)
    for mesh in (one, two, three):
        mesh.close()


def test_ranks_leave_only_when_all_have_said_that_they_stop() -> None:
    one, two, three = meshes(3)
    for mesh, position in ((one, 0), (two, 1)):
        mesh.stopping(position)
        heard(three)
        assert not three.all_stopping
    three.stopping(2)
    assert three.all_stopping
    while not one.all_stopping:
        heard(one)
    # A rank that said that it stops may go: that is no fault.
    two.close()
    three.close()
    heard(one)
    assert one.all_stopping
    one.close()


def test_a_rank_that_vanishes_without_a_word_is_a_fault() -> None:
    one, two = meshes(2)
    two.close()
    readable(one)
    with pytest.raises(EnvironmentFault, match="rank at position 1 is gone"):
        one.read()
    one.close()


def test_ranks_that_do_not_come_are_counted() -> None:
    with pytest.raises(DeadlineError, match="2 of 2 other ranks did not connect in time"):
        WakeMesh(HashStore(), position=0, num_ranks=3, host="127.0.0.1", timeout_s=0.05)


def config(**options: object) -> FleetConfig:
    fields: dict[str, object] = {
        "deployment": DeploymentId("d"),
        "model_factory": "m:f",
        "rank_ids": (RankId(4), RankId(5)),
        "nodes": ("a", "b"),
        "run_directory": "/tmp",
        "engine_port": 1,
        "hook_port": 2,
    }
    return FleetConfig(**(fields | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank_ids": (1, 1)}, "rank ids must be unique"),
        ({"nodes": ("a",)}, "1 node names for 2 ranks"),
        ({"hook_sockets": ("/a",)}, "1 hook sockets for 2 ranks"),
        ({"dummy_tokens": 2}, "a dummy batch has 0 or 1 token"),
        ({"batch_max": 0}, "batch_max is 0; it must be at least 1"),
        ({"slots_per_rank": -1}, "slots_per_rank is -1"),
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        config(**options)


def test_slots_default_to_one_more_than_needed() -> None:
    assert config().slots(10) == 6
    assert config().slots(11) == 7
    assert config(slots_per_rank=9).slots(11) == 9
    with pytest.raises(InvalidInputError, match="11 experts do not fit 2 ranks x 5 slots = 10; use at least 6 slots per rank"):
        config(slots_per_rank=5).slots(11)


def test_interrupt_while_a_rank_is_started_arrives_once_it_is_known() -> None:
    steps: list[str] = []

    def start() -> None:
        with held_back(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
            steps.append("known")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["known"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
