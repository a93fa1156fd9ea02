"""Ranks of an engine as processes: how they are started, what they are told, and what they answer."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eplb_service import __version__
from eplb_service.advice import AdviceRequest
from tests.engines.wheels import modules_of

NUM_LOGICAL, NUM_PHYSICAL, NUM_RANKS = 8, 12, 4
SLOTS = NUM_PHYSICAL // NUM_RANKS
WIDTHS = (6, 4)
"""Numbers of each tensor of an expert."""
TIMEOUT_S = 1.0
"""Of a question."""
ANSWER_S = 90.0
"""Of a rank that is ordered to do something."""
Maps = dict[str, npt.NDArray[np.integer]]
Order = tuple[str, int]
"""What to do, and the seed of the loads."""


class EngineCheckError(Exception):
    """An engine did not do what it was told, or did something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs. modules: folder of the release's real modules; plugins: folder with our entry points."""

    rank: int
    release: str
    modules: Path
    rendezvous: Path
    plugins: Path
    is_async: bool
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """A rank after one interval. maps: by model, shape (L, P). problem: what does not follow the map; empty = all does."""

    maps: dict[str, npt.NDArray[np.integer]]
    problem: str
    seconds: float
    said: list[str]


Interval = Callable[[Order], RankResult]
Start = Callable[[RankPlace, list[str]], Interval]
"""Makes the engine of a rank, and returns what does its intervals. What is logged goes to the list."""


def weights_of(model: int, layer: int, index: int, expert: int) -> torch.Tensor:
    """One tensor of an expert, unlike any other."""
    start = (model * 1000 + layer) * 1000 + index * 100 + expert
    return torch.arange(WIDTHS[index], dtype=torch.float64) / 64 + start


def listen(said: list[str], *names: str) -> None:
    """Keep what some loggers say."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(Listener())
        logger.propagate = False


def serve(start: Start, place: RankPlace, orders: Connection) -> None:
    """A rank's process: do the intervals that are ordered. What goes wrong is sent, as text."""
    os.environ.update(place.environment)
    said: list[str] = []
    try:
        interval = start(place, said)
        orders.send("ready")
        while True:
            order = orders.recv()
            said.clear()
            orders.send(interval(order))
    except Exception as error:
        logging.getLogger(__name__).exception("rank %d", place.rank)
        orders.send(f"rank {place.rank} failed: {type(error).__name__}: {error}")


@dataclass(slots=True)
class Ranks:
    """The ranks of one engine."""

    pipes: list[Connection]

    def interval(self, kind: str, seed: int) -> list[RankResult]:
        """All ranks do one interval. Raises EngineCheckError when one fails, or does not answer."""
        for pipe in self.pipes:
            pipe.send((kind, seed))
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe: Connection) -> RankResult:
        answer = received(pipe)
        if not isinstance(answer, RankResult):
            raise EngineCheckError(str(answer))
        return answer


def received(pipe: Connection) -> Any:
    """What a rank says next. Raises EngineCheckError when it says nothing in time."""
    if not pipe.poll(ANSWER_S):
        raise EngineCheckError(f"a rank did not answer in {ANSWER_S:g} s")
    return pipe.recv()


@contextmanager
def ranks_of(
    engine: str,
    release: str,
    start: Start,
    socket: Path,
    folder: Path,
    *,
    is_async: bool = False,
    off_on: int | None = None,
) -> Iterator[Ranks]:
    """Ranks of one release, up and with their models; ended with the block. off_on: a rank that the adviser is off on."""
    modules, plugins = modules_of(engine, release), entry_points(folder / "plugins")
    environment = {"EPLB_ADVISER_TIMEOUT_S": f"{TIMEOUT_S:g}", "EPLB_DEPLOYMENT": "check", "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.ranks"])
    pipes, processes = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        place = RankPlace(
            rank=rank, release=release, modules=modules, rendezvous=folder / "rendezvous", plugins=plugins, is_async=is_async,
            environment=environment | ({} if rank == off_on else {"EPLB_ADVISER": str(socket)}),
        )  # fmt: skip
        process = context.Process(target=serve, args=(start, place, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            if (ready := received(pipe)) != "ready":
                raise EngineCheckError(str(ready))
        yield Ranks(pipes)
    finally:
        for process in processes:  # threads of the engine wait without a time-out: nothing to end in order
            process.kill()
        for process in processes:
            process.join()


def entry_points(into: Path) -> Path:
    """A folder with the entry points of this project's pyproject.toml, as an installed distribution has them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    folder = into / f"eplb_service_in_engine-{__version__}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eplb-service-in-engine\nVersion: {__version__}\n")
    lines = []
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in project["entry-points"][group].items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return into


def must_say(said: list[str], text: str) -> None:
    """Raises EngineCheckError when no line holds a text."""
    if not any(text in line for line in said):
        raise EngineCheckError(f"nothing that was said holds {text!r}: {said}")


def all_route_by(title: str, results: list[RankResult], maps: Maps) -> None:
    """Raises EngineCheckError when a rank has another map, or something that does not follow it."""
    for rank, result in enumerate(results):
        if result.problem:
            raise EngineCheckError(f"{title}: {result.problem}")
        for name, rows in maps.items():
            if not np.array_equal(result.maps[name], rows):
                found = result.maps[name].tolist()
                raise EngineCheckError(f"{title}: rank {rank} routes {name} by {found}, not by {rows.tolist()}")


def check_copy(title: str, question: AdviceRequest, generation: int, moved_in_s: float, *, held_steps: bool) -> None:
    """Raises EngineCheckError when a question does not tell of the move before it.

    generation: that the engine moved to last, 0 = none. moved_in_s: of the whole interval in which it did.
    """
    told = (question.copied_generation, question.copy_held_steps)
    wanted = (generation, held_steps) if generation else (0, False)
    if told != wanted or bool(generation) != (question.copied_s > 0) or question.copied_s > moved_in_s + 0.1:
        raise EngineCheckError(
            f"{title}: the question says that generation {told[0]} took {question.copied_s:.3f} s (steps held up: {told[1]});"
            f" the engine's interval took {moved_in_s:.3f} s, and {wanted} was to be told"
        )
