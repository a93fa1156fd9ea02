"""Servers that store tests talk to: started as an operator would, not by the embedded store."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

READY_S = 10.0


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """`start_server(binary, *options)` runs a server without persistence and returns its Unix socket once it listens."""
    folder = Path(tmp_path_factory.mktemp("s"))
    numbers = itertools.count()
    processes: list[subprocess.Popen[bytes]] = []

    def start(binary: Path, *options: str) -> Path:
        home = folder / str(next(numbers))
        home.mkdir()
        path = home / "s"
        arguments = [str(binary), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(home), *options]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        processes.append(process)
        deadline_s = time.monotonic() + READY_S
        while not _listens(path):
            if process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"{binary} did not listen: {(home / 'log').read_text()[-500:]}")
            time.sleep(0.005)
        return path

    yield start
    for process in processes:
        process.kill()
        process.wait(timeout=READY_S)


@pytest.fixture(scope="session")
def debian_redis() -> Path:
    """Debian's `redis-server`, where it is installed."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    return Path(found)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
