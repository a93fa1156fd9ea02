"""Ranks of an engine as processes with a gloo group, whose load balancer is the adviser alone: it moves no weights."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from agent.adviser import agree as agree_module
from agent.adviser import rank_table
from agent.adviser.adviser import Adviser
from agent.adviser.call import Call
from agent.adviser.config import AdviserConfig
from agent.adviser.engine_copy import Carrying
from tests.adviser_doubles import linear_map

NUM_LAYERS, NUM_LOGICAL, SLOTS = 3, 8, 6
WAIT_S = 60.0
POINTS = ("row_of", "check_rows", "build")
"""Where a rank can be told to fail; and in its n-th collective, as `all_reduce n`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One call of the balancer. load: shape (L, E). fail_at: one of POINTS or `all_reduce n`, on the rank that gets it."""

    load: npt.NDArray[np.float64]
    fail_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What came of it on one rank. rows: the map that it routes by now; reduces: its collectives so far."""

    outcome: str
    reason: str
    generation: int
    rows: npt.NDArray[np.int32]
    reduces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOf:
    """One rank: where it meets the others, and whom it asks."""

    rank: int
    num_ranks: int
    rendezvous: Path
    socket: Path
    deployment: str
    timeout_s: float
    group_timeout_s: float


def serve(place: RankOf, orders: Connection) -> None:
    """A rank's process: calls as they are ordered, until None is."""
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{place.rendezvous}", rank=place.rank, world_size=place.num_ranks)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=place.group_timeout_s))
    config = AdviserConfig(socket_path=str(place.socket), deployment=place.deployment, timeout_s=place.timeout_s)
    adviser = Adviser(config, logging.getLogger("adviser"))
    rows = linear_map(NUM_LAYERS, NUM_LOGICAL, SLOTS * place.num_ranks)
    counted = _Counted()
    agree_module._dist = counted
    orders.send("up")
    while (order := orders.recv()) is not None:

        def build(order: Order = order, rows: npt.NDArray[np.int32] = rows) -> Call:
            if order.fail_at == "build":
                raise ValueError("build fails here")
            return Call(
                load=order.load, current=rows, num_ranks=place.num_ranks, num_groups=1, layer_ids=tuple(range(NUM_LAYERS)),
                deployment=place.deployment, model="tiny", engine="test", dispatch="hashed", replicas_max=64, steps=100,
            )  # fmt: skip

        with _failing(order.fail_at, counted):
            decision = adviser.advise(group, build, Carrying)
        rows = rows if decision.rows is None else decision.rows
        orders.send(
            Done(
                outcome=decision.outcome.value, reason=decision.reason, generation=decision.generation, rows=rows,
                reduces=counted.reduces,
            )
        )  # fmt: skip
    os._exit(0)


class _Counted:
    """torch.distributed, with its collectives counted, and one of them failing when told so."""

    def __init__(self) -> None:
        self.reduces, self.fail_in = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        self.reduces += 1
        self.fail_in -= 1
        if self.fail_in == 0:
            raise RuntimeError("this rank's network is gone")
        return dist.all_reduce(*args, **kwargs)


@contextmanager
def _failing(point: str, counted: _Counted) -> Iterator[None]:
    if point.startswith("all_reduce"):
        counted.fail_in = int(point.split()[1])
        yield
        return
    owner: Any = rank_table if point == "row_of" else agree_module
    real = getattr(owner, point, None)
    if real is None:
        yield
        return

    def fails(*_args: object, **_kwargs: object) -> None:
        raise ValueError(f"{point} fails here")

    setattr(owner, point, fails)
    try:
        yield
    finally:
        setattr(owner, point, real)


@dataclass(slots=True)
class Ranks:
    """All ranks of one engine."""

    pipes: list[Connection]

    def call(
        self, load: npt.NDArray[np.float64], fail_at: dict[int, str] | None = None, only: tuple[int, ...] = ()
    ) -> list[Done]:
        """All ranks call their balancer at once. only: the ranks that do; () = all."""
        called = [pipe for rank, pipe in enumerate(self.pipes) if not only or rank in only]
        for rank, pipe in enumerate(self.pipes):
            if pipe in called:
                pipe.send(Order(load=load, fail_at=(fail_at or {}).get(rank, "")))
        return [self._received(pipe) for pipe in called]

    @staticmethod
    def _received(pipe: Connection) -> Done:
        assert pipe.poll(WAIT_S), "a rank did not answer"
        done = pipe.recv()
        assert isinstance(done, Done)
        return done


@contextmanager
def ranks_up(
    folder: Path,
    socket: Path,
    *,
    num_ranks: int = 2,
    deployment: str = "engine",
    timeout_s: float = 2.0,
    group_timeout_s: float = 60.0,
) -> Iterator[Ranks]:
    """Ranks that have met; killed with the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        place = RankOf(
            rank=rank, num_ranks=num_ranks, rendezvous=folder / "rendezvous", socket=socket, deployment=deployment,
            timeout_s=timeout_s, group_timeout_s=group_timeout_s,
        )  # fmt: skip
        process = context.Process(target=serve, args=(place, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(WAIT_S)
            assert pipe.recv() == "up"
        yield Ranks(pipes)
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.join()
