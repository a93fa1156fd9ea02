"""The directory that an embedded server keeps its data in: one planner and one server at a time.

Two locks, both released by the kernel however their holder dies:

    planner.lock    held by the planner process (flock); holds its pid, for whoever is refused
    server.lock     opened and locked by the planner, inherited by the server: held while any server process lives

So a planner that gets `planner.lock` but not `server.lock` has found a server that outlived its planner; whoever holds
that lock open and works in this directory is that server, whatever pid files say, and may be stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path

from eplb_service.errors import ConflictError, InvalidInputError, StoreUnavailableError

FREE_BYTES_LEAST = 64 << 20
"""A server is not started with less room than this: it exits for good when an append fails."""

_SOCKET_PATH_BYTES_MAX = 107  # sun_path of unix(7), less the final zero
_SOCKET_RECORD = "socket.path"


class DataDirectory:
    """A locked data directory. `open` takes it, `close` lets it go."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._planner_lock: int | None = None

    @property
    def log_path(self) -> Path:
        """What the server prints."""
        return self.path / "server.log"

    def open(self) -> None:
        """Create the directory if need be and take it for this process.

        Raises InvalidInputError when it cannot be used, ConflictError when another planner has it.
        """
        if self._planner_lock is not None:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = self.path.resolve()
            lock = os.open(self.path / "planner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidInputError(
                f"data directory {self.path} is not a directory ({error.filename} is in the way): give another"
            ) from error
        except OSError as error:
            raise unusable(self.path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise ConflictError(
                f"data directory {self.path} is in use by the planner with pid {holder or 'unknown'}: stop it, or give "
                "this planner another directory"
            ) from error
        except OSError as error:
            os.close(lock)
            raise unusable(self.path, error) from error
        self._planner_lock = lock

    def close(self) -> None:
        """Let another planner in; idempotent."""
        if self._planner_lock is not None:
            os.close(self._planner_lock)
            self._planner_lock = None

    def check_room(self) -> None:
        """Raise StoreUnavailableError when the disk is (nearly) full."""
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < FREE_BYTES_LEAST:
            raise StoreUnavailableError(
                f"disk of data directory {self.path} is full: {free_bytes >> 20} MiB free, at least {FREE_BYTES_LEAST >> 20} "
                "MiB are needed; free space or give another directory"
            )

    def try_server_lock(self) -> int | None:
        """A locked descriptor to hand to the server, or None while a server process lives. The caller closes its copy."""
        lock = os.open(self.path / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def kill_stale_servers(self) -> list[int]:
        """Kill the processes that hold the server lock open and work in this directory; returns their pids.

        Safe, since every acknowledged write is on the disk. Call only while holding the directory, without a server.
        """
        killed = []
        for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            if pid == os.getpid() or not self._is_our_server(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                try:
                    if self._is_our_server(pid):  # still the same process, now that the descriptor pins it
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                        killed.append(pid)
                finally:
                    os.close(process)
        return killed

    def make_socket_path(self) -> Path:
        """A short socket path in a new private directory, recorded here; removes the one recorded before."""
        self.remove_socket()
        folder = Path(tempfile.mkdtemp(prefix="eplb-", dir=_runtime_directory()))
        path = folder / "valkey.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
            folder.rmdir()
            raise InvalidInputError(
                f"socket path {path} has {len(os.fsencode(path))} bytes, the system allows {_SOCKET_PATH_BYTES_MAX}: "
                "set XDG_RUNTIME_DIR to a shorter directory"
            )
        try:
            (self.path / _SOCKET_RECORD).write_text(f"{path}\n")
        except OSError as error:
            folder.rmdir()
            raise unusable(self.path, error) from error
        return path

    def remove_socket(self) -> None:
        """Remove the recorded socket and its directory, if it is one that we made."""
        record = self.path / _SOCKET_RECORD
        try:
            path = Path(record.read_text().strip())
        except OSError:
            return
        with contextlib.suppress(OSError):
            if path.name == "valkey.sock" and path.parent.name.startswith("eplb-") and _is_private(path.parent):
                path.unlink(missing_ok=True)
                path.parent.rmdir()
        with contextlib.suppress(OSError):
            record.unlink()

    def _is_our_server(self, pid: int) -> bool:
        lock, process = self.path / "server.lock", Path(f"/proc/{pid}")
        try:
            if (process / "cwd").readlink() != self.path:
                return False
            return any(descriptor.readlink() == lock for descriptor in (process / "fd").iterdir())
        except OSError:  # gone meanwhile, or another user's
            return False


def unusable(path: Path, error: OSError) -> InvalidInputError | StoreUnavailableError:
    """The directory, or a file of it, cannot be written: as one sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnavailableError(f"disk of data directory {path} is full ({error.strerror}): free space")
    return InvalidInputError(f"data directory {path} cannot be written ({error.strerror}): give one that this user owns")


def _runtime_directory() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return runtime if _is_private(Path(runtime)) and os.access(runtime, os.W_OK) else "/tmp"  # noqa: S108  mkdtemp makes it private


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
