"""A store on a server: what it makes of its URL, of servers that refuse, and of answers that never come."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis

from eplb_service.errors import (
    BrokenInvariantError,
    ConflictError,
    DeadlineError,
    EplbError,
    InvalidInputError,
    StoreUnavailableError,
)
from eplb_service.ids import DeploymentId
from eplb_service.store.address import parse_address
from eplb_service.store.base import Document, Leadership, Write
from eplb_service.store.connection import StoreTimes
from eplb_service.store.embedded import EmbeddedStore, find_binary
from eplb_service.store.open import open_store
from eplb_service.store.redis import RedisStore

StartServer = Callable[..., Path]
QUICK = StoreTimes(operation_s=0.4, try_s=0.2, pause_first_s=0.01, pause_max_s=0.05)
PATIENT = StoreTimes(operation_s=20.0, try_s=0.15, pause_first_s=0.01, pause_max_s=0.05)
SECRET = "s3cret-Wort"
NAME = DeploymentId("d")


def make_store(url: str, times: StoreTimes = PATIENT) -> RedisStore:
    """For a server that answers in the end, or refuses for good."""
    return RedisStore(url, times=times, jitter=lambda: 0.5)


def quick_store(url: str) -> RedisStore:
    """For a server that never gives the answer: the test lasts as long as the operation."""
    return make_store(url, QUICK)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Path:
    return start_server(find_binary())


@pytest.fixture(scope="module")
def guarded_server(start_server: StartServer) -> Path:
    return start_server(find_binary(), "--requirepass", SECRET)


def test_what_every_store_promises_loads_without_redis_structlog_or_asyncio() -> None:
    blocked = "import sys; sys.modules.update(redis=None, structlog=None, asyncio=None)"
    modules = ", ".join(f"eplb_service.store.{name}" for name in ("base", "memory", "refusals", "address"))
    subprocess.run([sys.executable, "-c", f"{blocked}; import {modules}"], check=True)


# --- URLs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache", "redis://cache:6379"),
        (f"redis://:{SECRET}@cache:6380/2", "redis://cache:6380 database 2"),
        (f"rediss://planner:{SECRET}@[fd00::1]/0?ca=/etc/ca.pem", "rediss://[fd00::1]:6379"),
        ("unix:///run/valkey.sock?database=3", "unix:///run/valkey.sock database 3"),
        (f"unix://:{SECRET}@/run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)
def test_url_is_understood_and_shown_without_its_password(url: str, shown: str) -> None:
    address = parse_address(url)
    assert str(address) == shown
    assert SECRET not in repr(address)
    assert address.password == (SECRET if SECRET in url else None)


def test_url_parts_reach_the_address() -> None:
    address = parse_address("rediss://planner:p%40ss@cache:6380/2?ca=/etc/ca.pem")
    assert (address.host, address.port, address.database) == ("cache", 6380, 2)
    assert (address.user, address.password, address.tls, address.ca_path) == ("planner", "p@ss", True, "/etc/ca.pem")
    assert parse_address("redis://:old@cache", password="new").password == "new"


@pytest.mark.parametrize(
    "url",
    [
        "http://cache",
        "cache:6379",
        "redis://",
        "redis://cache:0x1",
        "redis://cache:99999",
        "redis://cache/first",
        "redis://cache?retry=3",
        "redis://cache?ca=/etc/ca.pem",
        "unix://run/valkey.sock",
        "redis://[::1",
        "redis://cache..local",
        f"redis://:{SECRET}#x@cache",
        f"redis://:{SECRET}/x@cache",
        f"redis://u:12/{SECRET}@cache",
        f"redis://u:12?{SECRET}@cache",
    ],
)
def test_unusable_url_is_refused_without_repeating_what_may_be_a_password(url: str) -> None:
    with pytest.raises(InvalidInputError, match="redis://") as refused:
        parse_address(url)
    assert SECRET not in str(refused.value)


def test_store_is_opened_by_its_specification(tmp_path: Path) -> None:
    assert isinstance(open_store(None, tmp_path), EmbeddedStore)
    assert isinstance(open_store("embedded", tmp_path), EmbeddedStore)
    store = open_store("redis://cache/1", tmp_path, password=SECRET)
    assert isinstance(store, RedisStore)
    assert store.address.password == SECRET
    with pytest.raises(InvalidInputError, match="neither 'embedded' nor a URL"):
        open_store("sqlite", tmp_path)


# --- servers that refuse ---------------------------------------------------------------------------------------------


def start_error(store: RedisStore) -> str:
    """Start a store that must fail; its sentence. The password may be neither in it nor in the log."""
    with structlog.testing.capture_logs() as logs, pytest.raises(EplbError) as failed:
        asyncio.run(_start_and_close(store))
    for text in (str(failed.value), repr(failed.value), str(logs)):
        assert SECRET not in text
    assert "\n" not in str(failed.value)
    assert isinstance(failed.value, StoreUnavailableError | DeadlineError | InvalidInputError)
    return str(failed.value)


async def _start_and_close(store: RedisStore) -> None:
    try:
        await store.start()
    finally:
        await store.close()


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_unreachable_server_is_named_with_host_port_and_what_to_check() -> None:
    port = closed_port()
    sentence = start_error(quick_store(f"redis://:{SECRET}@127.0.0.1:{port}"))
    assert f"redis://127.0.0.1:{port} is unreachable" in sentence
    assert "check that the server runs" in sentence
    assert "'start' was tried" in sentence


def test_missing_socket_is_named(tmp_path: Path) -> None:
    sentence = start_error(quick_store(f"unix://{tmp_path}/none"))
    assert f"unix://{tmp_path}/none is unreachable (No such file or directory)" in sentence


def test_server_that_never_answers_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        sentence = start_error(quick_store(f"redis://:{SECRET}@127.0.0.1:{mute.getsockname()[1]}"))
    assert "did not answer in time" in sentence


def test_wrong_missing_and_superfluous_passwords_are_told_apart(server: Path, guarded_server: Path) -> None:
    assert "WRONGPASS" in start_error(make_store(f"unix://:not-{SECRET}@{guarded_server}"))
    assert "'nobody'" in start_error(make_store(f"unix://nobody:{SECRET}x@{guarded_server}"))
    assert "NOAUTH" in start_error(make_store(f"unix://{guarded_server}"))
    assert "has no password set" in start_error(make_store(f"unix://:{SECRET}@{server}"))


def test_right_password_is_accepted(guarded_server: Path) -> None:
    asyncio.run(_start_and_close(make_store(f"unix://:{SECRET}@{guarded_server}")))
    asyncio.run(_start_and_close(RedisStore(f"unix://{guarded_server}", password=SECRET)))


def test_database_that_is_not_there_is_named(server: Path) -> None:
    assert "has no database 999" in start_error(make_store(f"unix://{server}?database=999"))


def test_what_no_planner_wrote_is_named_and_ends_nothing_else(server: Path) -> None:
    async def body() -> None:
        store = make_store(f"unix://{server}?database=9")
        await store.start()
        leadership = await store.lead(NAME, owner="a", lease_s=60, floor=0, write_id="w")
        await store.write(NAME, Write(write_id="x", epoch=leadership.epoch, puts={"settings": b"s", "generation/1": b"g"}))
        async with Redis(unix_socket_path=str(server), db=9) as client:
            await client.sadd("eplb:deployments", b"\xff\xfe", b"a b", b"", b"x" * 500)
            await client.hset(f"eplb:{{{NAME}}}:versions", "settings", "one")
            await client.hdel(f"eplb:{{{NAME}}}:versions", "generation/1")
        with structlog.testing.capture_logs() as logs:
            assert await store.deployments() == [NAME]
        assert [entry["event"] for entry in logs] == ["deployments.odd"]
        with pytest.raises(BrokenInvariantError, match=r"'settings' in the store has version b'one', which is no number"):
            await store.read(NAME, ("settings",))
        with pytest.raises(BrokenInvariantError, match=r"'generation/1' in the store has version None"):
            await store.list(NAME, "generation/", limit=5)
        await store.close()

    asyncio.run(body())


def test_databases_are_apart(server: Path) -> None:
    async def body() -> None:
        first, second = make_store(f"unix://{server}"), make_store(f"unix://{server}?database=7")
        await first.start()
        await second.start()
        await first.lead(NAME, owner="a", lease_s=60, floor=0, write_id="w")
        assert NAME in await first.deployments()
        assert await second.deployments() == []
        await first.close()
        await second.close()

    asyncio.run(body())


def test_replica_is_refused_with_the_name_of_its_primary(start_server: StartServer) -> None:
    replica = start_server(find_binary(), "--replicaof", "127.0.0.1 1")
    assert "read-only replica of 127.0.0.1:1" in start_error(make_store(f"unix://{replica}"))


def test_server_demoted_while_in_use_is_named_at_the_next_write(start_server: StartServer) -> None:
    path = start_server(find_binary())

    async def body() -> None:
        store = make_store(f"unix://{path}")
        await store.start()
        await _command(path, b"REPLICAOF 127.0.0.1 1\r\n")
        with pytest.raises(StoreUnavailableError, match="is a read-only replica: give the address of the primary"):
            await store.lead(NAME, owner="a", lease_s=60, floor=0, write_id="w")
        await store.close()

    asyncio.run(body())


def test_full_memory_is_named_and_nothing_is_half_written(start_server: StartServer) -> None:
    path = start_server(find_binary())

    async def body() -> None:
        store = make_store(f"unix://{path}")
        await store.start()
        lead = await store.lead(NAME, owner="a", lease_s=60, floor=0, write_id="w")
        await _command(path, b"CONFIG SET maxmemory 1\r\n")
        write = Write(write_id="x", epoch=lead.epoch, puts={"a": b"1", "b": b"2"})
        with pytest.raises(StoreUnavailableError, match="no memory left"):
            await store.write(NAME, write)
        assert await store.read(NAME, ("a", "b")) == {}
        await store.renew(lead)  # a leader does not lose its lease for lack of memory
        await _command(path, b"CONFIG SET maxmemory 0\r\n")
        assert await store.write(NAME, write) == {"a": 1, "b": 1}
        await store.close()

    asyncio.run(body())


def test_user_without_rights_is_told_which_are_needed(start_server: StartServer) -> None:
    path = start_server(find_binary(), "--user", "guest", "on", f">{SECRET}", "~other:*", "+info", "+ping")
    store = make_store(f"unix://guest:{SECRET}@{path}")

    async def body() -> None:
        await store.start()
        with pytest.raises(StoreUnavailableError, match="grant"):
            await store.deployments()
        await store.close()

    asyncio.run(body())


def test_cluster_node_is_refused(start_server: StartServer) -> None:
    path = start_server(find_binary(), "--port", str(closed_port() % 20000 + 20000), "--cluster-enabled", "yes")
    assert "Redis Cluster" in start_error(make_store(f"unix://{path}"))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"redis_version:6.2.14\r\nrole:master\r\n", ["is Redis 6.2.14", "least version is 7.0"]),
        (b"redis_version:5.0.7\r\nrole:master\r\n", ["is Redis 5.0.7"]),
    ],
)
def test_server_that_is_too_old_is_told_the_least_version(tmp_path: Path, answer: bytes, words: list[str]) -> None:
    bulk = b"$%d\r\n%s\r\n" % (len(answer), answer)
    sentence = run_against(tmp_path, {b"INFO": bulk}, start_error)
    assert all(word in sentence for word in words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"-LOADING Valkey is loading the dataset in memory\r\n", "still loading"),
        (b"-MISCONF Errors writing to the AOF file: No space left on device\r\n", "cannot save to its disk"),
        (b"-BUSY Valkey is busy running a script.\r\n", "is busy"),
        (b"-ERR unknown command 'INFO'\r\n", "check that it is a Redis or Valkey server"),
    ],
)
def test_refusals_at_the_first_command_are_one_sentence(tmp_path: Path, answer: bytes, words: str) -> None:
    assert words in run_against(tmp_path, {b"INFO": answer}, start_error)


def test_last_try_that_the_deadline_cuts_short_does_not_hide_the_reason_of_those_before(tmp_path: Path) -> None:
    async def body() -> None:
        num_refused = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_refused
            num_refused += 1
            while num_refused <= 2 and await reader.read(65536):  # the third connection is never answered
                writer.write(b"-LOADING reading\r\n")
                await writer.drain()
            await reader.read()
            writer.close()

        async with await asyncio.start_unix_server(handle, tmp_path / "s"):
            times = StoreTimes(operation_s=0.3, try_s=30.0, pause_first_s=0.01, pause_max_s=0.01)
            with pytest.raises(StoreUnavailableError, match=r"still loading.*'start' was tried \d times"):
                await make_store(f"unix://{tmp_path}/s", times).start()

    asyncio.run(body())


def test_something_else_than_redis_at_the_port_is_named(tmp_path: Path) -> None:
    sentence = run_against(tmp_path, {b"": b"HTTP/1.1 400 Bad Request\r\n\r\n"}, start_error)
    assert "store unix://" in sentence


def run_against(tmp_path: Path, answers: dict[bytes, bytes], check: Callable[[RedisStore], str]) -> str:
    """Run a check in this thread against a server in another that answers each command by the word it holds, else +OK."""
    path = tmp_path / "scripted"
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    for request in data.split(b"*")[1:]:
                        writer.write(next((answers[word] for word in answers if word in request), b"+OK\r\n"))
                    await writer.drain()
            writer.close()

        async with await asyncio.start_unix_server(handle, path):
            ready.set()
            await done.wait()

    ready = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(5)
        return check(quick_store(f"unix://{path}"))
    finally:
        stop[0]()
        thread.join(5)


def test_operations_on_a_closed_store_are_refused(server: Path) -> None:
    store = make_store(f"unix://{server}")
    asyncio.run(_start_and_close(store))
    with pytest.raises(StoreUnavailableError, match="closed"):
        asyncio.run(store.ping())


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the test's certificate")
    folder = Path(tmp_path_factory.mktemp("tls"))
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem "
            "-days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        ),
        check=True,
        cwd=folder,
        capture_output=True,
    )
    return folder


def test_tls_checks_the_certificate_against_the_authority_given(server: Path, certificate: Path) -> None:
    async def body() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        async with relay(server, context=context) as front:
            url = f"rediss://localhost:{front.port}"
            store = make_store(f"{url}?ca={certificate}/cert.pem")
            await store.start()
            assert f"at {url}" in await store.ping()
            await store.close()
            with pytest.raises(StoreUnavailableError, match=r"failed the TLS handshake \(.*self.signed"):
                await make_store(url).start()
            with pytest.raises(StoreUnavailableError, match="TLS"):
                await make_store(f"rediss://127.0.0.1:{front.port}?ca={certificate}/cert.pem").start()
        async with relay(server) as plain:
            with pytest.raises(DeadlineError, match="and that it speaks TLS"):
                await quick_store(f"rediss://localhost:{plain.port}").start()

    asyncio.run(body())


def test_unreadable_certificate_file_is_named(tmp_path: Path) -> None:
    sentence = start_error(make_store(f"rediss://localhost?ca={tmp_path}/none.pem"))
    assert f"{tmp_path}/none.pem" in sentence


# --- answers that never come -----------------------------------------------------------------------------------------


class Relay:
    """Between client and server; loses the next answers: `stalls` keeps the connection open, `cuts` closes it."""

    def __init__(self) -> None:
        self.port = 0
        self.stalls = 0
        self.cuts = 0
        self.num_lost = 0

    async def forward(self, upstream: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(upstream)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, up_writer))
                group.create_task(self._answers(up_reader, writer))
        except* OSError:
            pass
        finally:
            up_writer.close()
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            up_writer.write(data)
            await up_writer.drain()
        up_writer.close()

    async def _answers(self, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stalled = False
        while data := await up_reader.read(65536):
            if self.cuts:
                self.cuts -= 1
                self.num_lost += 1
                writer.close()
                return
            if self.stalls:
                self.stalls -= 1
                self.num_lost += 1
                stalled = True
            if not stalled:
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def relay(upstream: Path, *, context: ssl.SSLContext | None = None) -> AsyncIterator[Relay]:
    front = Relay()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await front.forward(upstream, reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    front.port = server.sockets[0].getsockname()[1]
    try:
        yield front
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Body = Callable[[RedisStore, Relay, Leadership], Awaitable[None]]


@pytest.fixture
def through_relay(server: Path, request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs a body with a store that reaches the server through a relay, and leads a deployment of its own."""
    name = DeploymentId(request.node.name.replace("[", "-").replace("]", ""))

    async def run(body: Body) -> None:
        async with relay(server) as front:
            store = make_store(f"redis://127.0.0.1:{front.port}")
            await store.start()
            try:
                await body(store, front, await store.lead(name, owner="a", lease_s=60, floor=0, write_id="lead"))
            finally:
                await store.close()

    return lambda body: asyncio.run(run(body))


@pytest.mark.parametrize("how", ["stalls", "cuts"])
@pytest.mark.parametrize("num_lost", [1, 3])
def test_compare_and_set_whose_answer_is_lost_does_not_conflict_with_itself(
    through_relay: Callable[[Body], None], how: str, num_lost: int
) -> None:
    async def body(store: RedisStore, front: Relay, lead: Leadership) -> None:
        setattr(front, how, num_lost)
        versions = await store.write(
            lead.deployment,
            Write(write_id="x", epoch=lead.epoch, puts={"a": b"1"}, expects={"a": 0}, journal=(b"once",)),
        )
        assert front.num_lost == num_lost
        assert versions == {"a": 1}
        assert await store.read(lead.deployment, ("a",)) == {"a": Document(b"1", 1)}
        assert await store.journal(lead.deployment, limit=9) == [b"once"]

    through_relay(body)


@pytest.mark.parametrize("how", ["stalls", "cuts"])
def test_lead_whose_answer_is_lost_takes_one_epoch_only(through_relay: Callable[[Body], None], how: str) -> None:
    async def body(store: RedisStore, front: Relay, lead: Leadership) -> None:
        setattr(front, how, 1)
        again = await store.lead(lead.deployment, owner="a", lease_s=60, floor=0, write_id="again")
        assert front.num_lost == 1
        assert again.epoch == lead.epoch + 1

    through_relay(body)


def test_late_answer_of_an_abandoned_try_is_not_taken_for_the_next_one(through_relay: Callable[[Body], None]) -> None:
    async def body(store: RedisStore, front: Relay, lead: Leadership) -> None:
        await store.write(lead.deployment, Write(write_id="x", epoch=lead.epoch, puts={"a": b"1", "b": b"2"}))
        for _ in range(5):
            front.stalls = 1
            first, second = await asyncio.gather(store.read(lead.deployment, ("a",)), store.read(lead.deployment, ("b",)))
            assert first == {"a": Document(b"1", 1)}
            assert second == {"b": Document(b"2", 1)}
        assert front.num_lost == 5

    through_relay(body)


def test_write_that_the_caller_gave_up_on_can_be_sent_again(through_relay: Callable[[Body], None]) -> None:
    async def body(store: RedisStore, front: Relay, lead: Leadership) -> None:
        write = Write(write_id="x", epoch=lead.epoch, puts={"a": b"1"}, expects={"a": 0})
        front.stalls = 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.write(lead.deployment, write)
        assert await store.write(lead.deployment, write) == {"a": 1}
        with pytest.raises(ConflictError):
            await store.write(lead.deployment, Write(write_id="y", epoch=lead.epoch, puts={"a": b"2"}, expects={"a": 0}))

    through_relay(body)


def test_server_that_stays_silent_ends_at_the_deadline_and_says_how_often_it_was_asked(server: Path) -> None:
    async def body() -> float:
        async with relay(server) as front:
            store = quick_store(f"redis://127.0.0.1:{front.port}")
            await store.start()
            front.stalls = 1000
            begin_s = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineError, match=r"did not answer in time.*'read' was tried \d times in 0\.\d s"):
                await store.read(NAME, ("a",))
            took_s = asyncio.get_running_loop().time() - begin_s
            await store.close()
            return took_s

    assert asyncio.run(body()) < QUICK.operation_s + 0.5


def test_scripts_are_sent_again_to_a_server_that_forgot_them(server: Path) -> None:
    async def body() -> None:
        store = make_store(f"unix://{server}")
        await store.start()
        await _command(server, b"SCRIPT FLUSH\r\n")
        assert await store.read(NAME, ("never",)) == {}
        await store.close()

    asyncio.run(body())


def test_change_of_reason_and_recovery_are_logged_once(server: Path) -> None:
    async def body() -> list[str]:
        async with relay(server) as front:
            store = make_store(f"redis://127.0.0.1:{front.port}")
            await store.start()
            with structlog.testing.capture_logs() as logs:
                store._log = structlog.get_logger()
                front.stalls = 3
                await store.ping()
                await store.close()
            return [entry["event"] for entry in logs]

    assert asyncio.run(body()) == ["store.call_failed", "store.recovered"]


def test_pauses_between_tries_double_up_to_a_bound_and_jitter_scales_them() -> None:
    times = StoreTimes(pause_first_s=0.02, pause_max_s=0.5)
    assert [times.pause_s(number, 1.0) for number in (1, 2, 3, 6, 1000)] == [0.02, 0.04, 0.08, 0.5, 0.5]
    assert times.pause_s(1, 0.0) == 0.01


async def _command(path: Path, command: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(command)
    assert await reader.readline() == b"+OK\r\n"
    writer.close()
