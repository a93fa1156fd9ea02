"""Starts the rank processes of a fleet, knows when they are ready, and leaves none behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import FleetConfig, RankConfig
from agent.engine.reference.port import ExitCode
from agent.engine.reference.rank import READY, run_rank
from eplb_service.errors import DeadlineError, EnvironmentFault

# Below Linux's range for outgoing connections, so that none takes a port between its choice and its use.
_PORTS = range(20_000, 32_000)
_PORTS_OF_A_PROCESS = 100
_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now, another one at each call. Raises EnvironmentFault when 100 tries find none.

    Between its choice and its use a port is nobody's: processes that choose at the same time look in different places first.
    """
    first = _PORTS.start + os.getpid() % (len(_PORTS) // _PORTS_OF_A_PROCESS) * _PORTS_OF_A_PROCESS
    own = [port for port in range(first, first + _PORTS_OF_A_PROCESS) if port not in _given]
    for port in own + [secrets.choice(_PORTS) for _ in range(100)]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise EnvironmentFault(f"no free port on {host} between {_PORTS.start} and {_PORTS.stop - 1}: 100 tries found none")


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that come meanwhile arrive afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch_ranks(config: FleetConfig, *, preload: Sequence[str] = ()) -> Fleet:
    """Start all ranks of a fleet and wait until every one is ready.

    They fork from a server process that has torch and the model's code loaded (whose import must start no thread), and die
    with this process.

    Args:
        config: The fleet; its run directory must exist.
        preload: More modules for the fork server; counts at the first launch of this process only.

    Raises:
        EnvironmentFault: a rank ended while starting: names it and its reason.
        DeadlineError: a rank was not ready in time: names the last thing that it did.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__, config.model_factory.partition(":")[0], *preload])
    with held_back(signal.SIGINT):  # and for its life: Ctrl-C would end its imports with a traceback; the launcher decides
        forkserver.ensure_running()
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for position, rank_id in enumerate(config.rank_ids):
            ours, theirs = context.Pipe()
            rank = RankConfig(fleet=config, position=position)
            process = context.Process(target=run_rank, args=(rank, theirs), name=f"rank-{rank_id}", daemon=True)
            with held_back(signal.SIGINT, signal.SIGTERM):  # a rank that nobody knows of would wait for its peers for long
                process.start()
                processes.append(process)
            theirs.close()
            connections.append(ours)
        fleet = Fleet(config, processes, connections)
        fleet.wait_ready()
    except BaseException:  # also an interrupt
        Fleet(config, processes, connections).kill()
        raise
    return fleet


class Fleet:
    """Rank processes that run. As a context manager, kills what still runs at the end."""

    def __init__(self, config: FleetConfig, processes: Sequence[BaseProcess], connections: Sequence[Connection]) -> None:
        """See `launch_ranks`."""
        self.config = config
        self.processes = tuple(processes)
        self._connections = tuple(connections)

    def wait_ready(self) -> None:
        """Wait until every rank has said that it is ready. Raises as `launch_ranks`."""
        deadline = time.monotonic() + self.config.start_timeout_s
        last = dict.fromkeys(range(self.config.num_ranks), "process started")
        positions = {id(connection): position for position, connection in enumerate(self._connections)}
        waiting = list(self._connections)
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(
                    f"rank {self.config.rank_ids[position]} (last: {last[position]})"
                    for position in sorted(positions[id(connection)] for connection in waiting)
                )
                raise DeadlineError(f"not ready within {self.config.start_timeout_s} s: {late}; is the machine overloaded?")
            for connection in ready:
                position = positions[id(connection)]
                try:
                    last[position] = self._connections[position].recv()
                except (EOFError, ConnectionError):
                    raise EnvironmentFault(self._why_ended(position, last[position])) from None
                if last[position] == READY:
                    waiting.remove(self._connections[position])

    def client(self, position: int) -> RankClient:
        """A new connection to a rank. Raises EnvironmentFault when it is gone."""
        return RankClient(RankConfig(fleet=self.config, position=position).request_socket)

    def stop(self, *, timeout_s: float, cancel: bool = False) -> None:
        """Have all ranks finish their requests (or cancel them) and end.

        Raises:
            EnvironmentFault: a rank had ended before, or ends with an error.
            DeadlineError: a rank still runs at the deadline; it is killed.
        """
        deadline = time.monotonic() + timeout_s
        clients = [self.client(position) for position in range(self.config.num_ranks)]
        for client in clients:
            client.stop(cancel=cancel)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for client in clients:
            client.close()
        late = [process.name for process in self.processes if process.is_alive()]
        self.kill()
        if late:
            raise DeadlineError(f"{', '.join(late)} did not end within {timeout_s} s and were killed; a client may not read")
        for position, process in enumerate(self.processes):
            if process.exitcode != ExitCode.STOPPED:
                raise EnvironmentFault(self._why_ended(position, "stop asked"))

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def reason(self, position: int) -> str:
        """Why a rank ended, in its own words; empty when it left none."""
        path: Path = RankConfig(fleet=self.config, position=position).reason_file
        return path.read_text().strip() if path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _why_ended(self, position: int, last: str) -> str:
        process = self.processes[position]
        process.join(5.0)
        reason = self.reason(position) or "it left no reason; see its standard error"
        return f"rank {self.config.rank_ids[position]} ended with code {process.exitcode} after {last!r}: {reason}"
