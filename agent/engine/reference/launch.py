"""Starts the rank processes of a fleet, knows when they are ready, and leaves none behind.

Of a fleet that survives, `watch` sees which ranks are lost, and takes new ones in.
"""

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
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

from agent.engine.reference.client import RankClient
from agent.engine.reference.config import FleetConfig, LayerShape, Member, RankConfig
from agent.engine.reference.coordinator import check_newcomers
from agent.engine.reference.orders import Ready
from agent.engine.reference.port import ExitCode
from agent.engine.reference.rank import run_rank
from agent.engine.reference.watch import FleetWatch, Watched
from eplb_service.errors import DeadlineError, EnvironmentFault, UnsupportedError
from eplb_service.ids import RankId

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
    ranks: list[Watched] = []
    try:
        for position in range(config.num_ranks):
            start_rank_process(RankConfig(fleet=config, position=position), ranks)
        fleet = Fleet(config, ranks)
        fleet.wait_ready()
    except BaseException:  # also an interrupt
        Fleet(config, ranks).kill()
        raise
    return fleet


def start_rank_process(rank: RankConfig, started: list[Watched]) -> Watched:
    """Fork one rank; it is in `started` whatever interrupts the caller."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_rank, args=(rank, theirs), name=f"rank-{rank.rank_id}", daemon=True)
    with held_back(signal.SIGINT, signal.SIGTERM):  # a rank that nobody knows of would wait for its peers for long
        process.start()
        watched = Watched(member=rank.fleet.member(rank.position), process=process, connection=ours)
        started.append(watched)
    theirs.close()
    return watched


class Fleet:
    """Rank processes that run. As a context manager, kills what still runs at the end."""

    def __init__(self, config: FleetConfig, ranks: Sequence[Watched]) -> None:
        """See `launch_ranks`."""
        self._launched = config
        self._ranks = list(ranks)  # in the order of their start, those that ended too
        self._watch: FleetWatch | None = None

    @property
    def config(self) -> FleetConfig:
        """The present group; of a fleet that survives, ranks come and go."""
        return self._launched if self._watch is None else self._watch.config

    @property
    def processes(self) -> tuple[BaseProcess, ...]:
        """Of all ranks, in the order of their start; a rank that is lost stays in it."""
        return tuple(rank.process for rank in self._ranks)

    def wait_ready(self) -> None:
        """Wait until every rank has said that it is ready. Raises as `launch_ranks`."""
        deadline = time.monotonic() + self._launched.start_timeout_s
        waiting = {id(rank.connection): rank for rank in self._ranks}
        shape: LayerShape | None = None
        while waiting:
            ready = wait([rank.connection for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(f"rank {rank.member.rank_id} (last: {rank.last})" for rank in waiting.values())
                raise DeadlineError(f"not ready within {self._launched.start_timeout_s} s: {late}; is the machine overloaded?")
            for connection in ready:
                rank = waiting[id(connection)]
                try:
                    said = rank.connection.recv()
                except (EOFError, ConnectionError):
                    raise EnvironmentFault(self._why_ended(rank)) from None
                if isinstance(said, Ready):
                    shape, rank.last = said.shape, "ready"
                    del waiting[id(connection)]
                else:
                    rank.last = said
        if self._launched.survives and shape is not None:
            ranks = {rank.member.rank_id: rank for rank in self._ranks}
            self._watch = FleetWatch(self._launched, ranks, shape=shape, free_port=free_port)

    def join(self, newcomers: Sequence[Member], *, timeout_s: float) -> None:
        """Start ranks that join the group, with empty slots, and wait until they are in it.

        Raises:
            InvalidInputError: an id is taken.
            UnsupportedError: the fleet does not survive changes of its group.
            EnvironmentFault: a new rank ended first, with its reason; or the fleet did.
            DeadlineError: the time is over.
        """
        started = self.begin_join(newcomers)
        ids = {newcomer.rank_id for newcomer in newcomers}
        watch = self._watching

        def are_in(group: FleetConfig) -> bool:
            for rank in started:
                if watch.is_gone(rank.member.rank_id):
                    raise EnvironmentFault(self._why_ended(rank))
            return ids <= set(group.rank_ids)

        watch.wait_for(are_in, f"ranks {sorted(ids)} to join", timeout_s=timeout_s)

    def begin_join(self, newcomers: Sequence[Member]) -> list[Watched]:
        """Start ranks that join the group as soon as they have loaded.

        Raises InvalidInputError when an id is taken, UnsupportedError when the fleet does not survive changes of its group.
        """
        watch, present = self._watching, self._watching.config
        check_newcomers(present.rank_ids, [newcomer.rank_id for newcomer in newcomers])
        members = [present.member(position) for position in range(present.num_ranks)]
        fleet = present.regrouped(
            [*members, *newcomers],
            shape=watch.shape,
            engine_port=present.engine_port,
            hook_port=present.hook_port,
        )
        started = []
        for position in range(present.num_ranks, fleet.num_ranks):
            rank = start_rank_process(RankConfig(fleet=fleet, position=position, joins=True), self._ranks)
            watch.add(rank)
            started.append(rank)
        return started

    def wait_for_ranks(self, rank_ids: Sequence[RankId], *, timeout_s: float) -> None:
        """Wait until the group that serves has exactly these ranks, in this order. Raises as `join`."""
        wanted = tuple(rank_ids)
        self._watching.wait_for(lambda group: group.rank_ids == wanted, f"a group of ranks {list(wanted)}", timeout_s=timeout_s)

    def client(self, position: int) -> RankClient:
        """A new connection to the rank at a position of the present group. Raises EnvironmentFault when it is gone."""
        return RankClient(RankConfig(fleet=self.config, position=position).request_socket)

    def process(self, rank_id: int) -> BaseProcess:
        """The newest process of a rank. Raises KeyError when there was none."""
        return {rank.member.rank_id: rank.process for rank in self._ranks}[RankId(rank_id)]

    @property
    def why_ended(self) -> str:
        """Why a fleet that survives could not go on; empty while it does."""
        return "" if self._watch is None else self._watch.reason

    def stop(self, *, timeout_s: float, cancel: bool = False) -> None:
        """Have all ranks finish their requests (or cancel them) and end.

        Raises:
            EnvironmentFault: a rank had ended before, or ends with an error.
            DeadlineError: a rank still runs at the deadline; it is killed.
        """
        deadline = time.monotonic() + timeout_s
        present = self.config
        ranks = [rank for rank in self._ranks if rank.member.rank_id in present.rank_ids and not self._was_lost(rank)]
        clients = [self.client(position) for position in range(present.num_ranks)]
        for client in clients:
            client.stop(cancel=cancel)
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        for client in clients:
            client.close()
        late = [rank.process.name for rank in ranks if rank.process.is_alive()]
        self.kill()
        if late:
            raise DeadlineError(f"{', '.join(late)} did not end within {timeout_s} s and were killed; a client may not read")
        for rank in ranks:
            if rank.process.exitcode != ExitCode.STOPPED:
                rank.last = "stop asked"
                raise EnvironmentFault(self._why_ended(rank))

    def kill(self) -> None:
        """Kill what still runs."""
        if self._watch is not None:
            self._watch.close()
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()

    def reason(self, position: int) -> str:
        """Why the rank at a position of the group that was launched ended, in its own words; empty when it left none."""
        return _reason(RankConfig(fleet=self._launched, position=position).reason_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def _watching(self) -> FleetWatch:
        if self._watch is None:
            raise UnsupportedError("the ranks of this fleet do not change: start it with FleetConfig.survives")
        return self._watch

    def _was_lost(self, rank: Watched) -> bool:
        """Whether it ended before a rank of the same id took its place, or the group went on without it."""
        return self._launched.survives and rank.process is not self.process(rank.member.rank_id)

    def _why_ended(self, rank: Watched) -> str:
        rank.process.join(5.0)
        path = Path(self._launched.run_directory) / f"rank-{rank.member.rank_id}.reason"
        reason = _reason(path) or "it left no reason; see its standard error"
        return f"rank {rank.member.rank_id} ended with code {rank.process.exitcode} after {rank.last!r}: {reason}"


def _reason(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
