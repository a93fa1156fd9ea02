"""Claiming the path of a Unix socket: one living owner, what a dead one left is reclaimed, and nobody else may connect.

The owner holds a lock on `<path>.lock` for its life. The kernel lets go of it when the process dies in whatever way, so
two processes that start at once cannot both reclaim, and a socket file without a lock is known to be stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from eplb_service.errors import EnvironmentFault, InvalidInputError

PATH_BYTES_MAX = 107
"""`sun_path` of Linux has 108 bytes, the last one 0."""
CONNECT_TIMEOUT_S = 1.0
BACKLOG = 64


@dataclass(slots=True)
class SocketClaim:
    """A path that is ours: the listening socket and the lock that says so."""

    path: Path
    listener: socket.socket
    lock: int

    def release(self) -> None:
        """Remove the socket, if it is still ours, then let go of the lock."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.listener.close()
        os.close(self.lock)


def claim_socket(path: Path) -> SocketClaim:
    """Listen at a path, mode 0600. Raises InvalidInputError for a path that cannot be, EnvironmentFault for one in use."""
    _check_path(path)
    lock = _lock(path)
    try:
        _reclaim(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        mask = os.umask(0o177)  # the file appears with its final mode: no moment in which others may connect
        try:
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            raise EnvironmentFault(f"cannot listen at {path}: {error.strerror}") from None
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003  (positional only)
    except BaseException:
        os.close(lock)
        raise
    return SocketClaim(path, listener, lock)


def _check_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise InvalidInputError(
            f"socket path has {length} bytes but a Unix socket's has at most {PATH_BYTES_MAX}: {path}; use a shorter folder"
        )
    folder = path.parent
    if not folder.is_dir():
        raise InvalidInputError(f"folder {folder} of the socket {path.name} does not exist or is no folder; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInputError(f"folder {folder} of the socket {path.name} is not writable by user {os.getuid()}")


def _lock(path: Path) -> int:
    name = f"{path}.lock"
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidInputError(f"cannot open the lock {name}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            raise EnvironmentFault(
                f"socket {path} is in use by a running agent process (pid {holder}); stop it or give another --socket"
            ) from None
        raise EnvironmentFault(f"cannot lock {name}: {error.strerror}; use a local file system for --socket") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _reclaim(path: Path) -> None:
    """Remove the socket of a dead process. A living one without our lock (another program) keeps it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidInputError(f"{path} exists and is not a socket; remove it or give another --socket")
    if found.st_uid not in {os.getuid(), 0} and os.getuid() != 0:
        raise InvalidInputError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}; give another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError:  # busy or silent: somebody is there
            pass
    raise EnvironmentFault(f"socket {path} is in use by another running process; stop it or give another --socket")
