"""vLLM's real load balancer over 4 ranks, asking an agent process that answers well, badly, late or not at all."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.advice import AdviceRequest, map_digest
from tests.adviser_doubles import Answer, ScriptedAgent, keeping, linear_map, moving, shuffled_map, silent
from tests.engines.vllm_ranks import LAYERS, NUM_LOGICAL, NUM_PHYSICAL, NUM_RANKS, RankPlace, RankResult, loads_of, serve
from tests.engines.wheels import modules_of

TIMEOUT_S = 1.0
"""Of a question."""
ANSWER_S = 90.0
"""Of a rank that is ordered to do something."""
Maps = dict[str, npt.NDArray[np.int32]]


class EngineCheckError(Exception):
    """An engine did not do what it was told, or did something else."""


def entry_points(into: Path) -> Path:
    """A folder with the entry points of this project's pyproject.toml, as an installed distribution has them."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    folder = into / f"eplb_service_in_engine-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eplb-service-in-engine\nVersion: {project['version']}\n")
    lines = []
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in project["entry-points"][group].items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return into


@dataclass(slots=True)
class Ranks:
    """The ranks of one engine."""

    pipes: list[Connection]

    def interval(self, kind: str, seed: int) -> list[RankResult]:
        """All ranks do one interval. Raises EngineCheckError when one fails, or does not answer."""
        for pipe in self.pipes:
            pipe.send((kind, seed))
        return [_answer(pipe) for pipe in self.pipes]


def _answer(pipe: Connection) -> RankResult:
    if not pipe.poll(ANSWER_S):
        raise EngineCheckError(f"a rank did not answer in {ANSWER_S:g} s")
    answer = pipe.recv()
    if not isinstance(answer, RankResult):
        raise EngineCheckError(str(answer))
    return answer


@contextmanager
def ranks_of(release: str, socket: Path, folder: Path, *, is_async: bool, advised: bool = True) -> Iterator[Ranks]:
    """Ranks of one release, up and with their models; ended with the block."""
    modules, plugins = modules_of("vllm", release), entry_points(folder / "plugins")
    environment = {"EPLB_ADVISER_TIMEOUT_S": f"{TIMEOUT_S:g}", "EPLB_DEPLOYMENT": "check", "OMP_NUM_THREADS": "1"}
    if advised:
        environment["EPLB_ADVISER"] = str(socket)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.vllm_ranks"])
    pipes, processes = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        place = RankPlace(
            rank=rank, release=release, modules=modules, rendezvous=folder / "rendezvous", plugins=plugins, is_async=is_async,
            environment=environment,
        )  # fmt: skip
        process = context.Process(target=serve, args=(place, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            if not pipe.poll(ANSWER_S):
                raise EngineCheckError("a rank did not start")
            if (ready := pipe.recv()) != "ready":
                raise EngineCheckError(str(ready))
        yield Ranks(pipes)
    finally:
        for process in processes:  # threads of the engine wait without a time-out: nothing to end in order
            process.kill()
        for process in processes:
            process.join()


def check(release: str, *, is_async: bool, say: Callable[[str], None]) -> None:
    """Run all scenarios on one release. Raises EngineCheckError at the first thing that is not as it must be."""
    with tempfile.TemporaryDirectory() as temporary:
        socket = Path(temporary) / "agent.sock"
        agent = ScriptedAgent(socket)
        start = time.monotonic()
        try:
            with ranks_of(release, socket, Path(temporary), is_async=is_async) as ranks:
                say(f"  ranks up: {time.monotonic() - start:.1f} s")
                _scenarios(ranks, agent, socket, say)
        finally:
            agent.close()


def _scenarios(ranks: Ranks, agent: ScriptedAgent, socket: Path, say: Callable[[str], None]) -> None:
    live: Maps = {name: linear_map(layers, NUM_LOGICAL, NUM_PHYSICAL) for name, layers in LAYERS.items()}
    first, second = _targets(1), _targets(2)

    def step(
        title: str, kind: str, seed: int, answer: Answer, after: Maps, *, questions: int, most_s: float = 30.0
    ) -> list[str]:
        nonlocal live
        agent.answer = answer
        agent.questions.clear()
        results = ranks.interval(kind, seed)
        _compare(title, results, after)
        if len(agent.questions) != questions:
            raise EngineCheckError(f"{title}: {len(agent.questions)} questions were asked, not {questions}")
        for question in agent.questions:
            _check_question(title, question, live, seed)
        seconds = max(result.seconds for result in results)
        if seconds > most_s:
            raise EngineCheckError(f"{title}: took {seconds:.2f} s, at most {most_s:g} s are right")
        live = after
        said = [line for result in results for line in result.said]
        first_said = next((line for line in said if line.startswith("adviser: ")), "")
        say(f"  {title:<28} {seconds * 1000:8.1f} ms   {first_said[:110]}")
        return said

    models = len(LAYERS)
    step("profile at start", "profile", 0, keeping, live, questions=0)
    said = step("move", "interval", 1, _answer_with(first), first, questions=models)
    _must_say(said, "adviser: moved to generation 7 (check): it pays")
    said = step("keep", "interval", 2, keeping, first, questions=models)
    _must_say(said, "adviser: kept (check): gain 0.1 ms")
    for title, answer, reason in _unusable():
        said = step(title, "interval", 3, answer, first, questions=models)
        _must_say(said, reason)
    said = step("silent agent process", "interval", 4, silent, first, questions=models, most_s=models * TIMEOUT_S + 2.0)
    _must_say(said, f"{TIMEOUT_S:g} s (EPLB_ADVISER_TIMEOUT_S) ended without a whole answer")
    agent.close()
    said = step("no agent process", "interval", 5, keeping, first, questions=0, most_s=2.0)
    _must_say(said, "start `eplb agent` on this node")
    back = ScriptedAgent(socket)
    agent.questions, agent.answer = back.questions, keeping
    try:
        back.answer = _answer_with(second)
        step("agent process is back: move", "interval", 6, keeping, second, questions=models)
    finally:
        back.close()


def _targets(seed: int) -> Maps:
    return {name: shuffled_map(seed, layers, NUM_LOGICAL, NUM_PHYSICAL, NUM_RANKS) for name, layers in LAYERS.items()}


def _answer_with(target: Maps) -> Answer:
    by_layers = {len(rows): rows for rows in target.values()}
    return moving(lambda question: by_layers[len(question.current)], generation=7)


def _unusable() -> list[tuple[str, Answer, str]]:
    def lost(question: AdviceRequest) -> npt.NDArray[np.int32]:
        rows = question.current.copy()
        rows[rows == 3] = 4
        return rows

    def beyond(question: AdviceRequest) -> npt.NDArray[np.int32]:
        rows = question.current.copy()
        rows[-1, 0] = NUM_LOGICAL
        return rows

    return [
        ("map without an expert", moving(lost), "holds no copy of expert 3"),
        ("map with an unknown expert", moving(beyond), f"holds {NUM_LOGICAL}; experts are 0 to {NUM_LOGICAL - 1}"),
        ("map of another shape", moving(lambda question: question.current[:, :-NUM_RANKS].copy()), "its map has shape"),
        ("bytes that are no frame", lambda _question: b"HTTP/1.1 200 OK\r\n\r\n", "sent what is no answer"),
    ]


def _compare(title: str, results: list[RankResult], after: Maps) -> None:
    for rank, result in enumerate(results):
        if result.problem:
            raise EngineCheckError(f"{title}: {result.problem}")
        for name, rows in after.items():
            if not np.array_equal(result.maps[name], rows):
                raise EngineCheckError(
                    f"{title}: rank {rank} routes {name} by {result.maps[name].tolist()}, not by {rows.tolist()}"
                )


def _check_question(title: str, question: AdviceRequest, live: Maps, seed: int) -> None:
    name = next(name for name, layers in LAYERS.items() if layers == len(question.current))
    wanted = {"target": "check", "drafter": f"check.{LAYERS['drafter']}-layers"}[name]
    checks = {
        "map": np.array_equal(question.current, live[name]) and question.digest == map_digest(live[name]),
        "load": np.array_equal(question.load, loads_of(seed)[name]),
        "deployment": question.deployment == wanted,
        "ranks": question.rank_ids == tuple(range(NUM_RANKS))
        and len(set(question.nodes)) == 1
        and len(question.nodes) == NUM_RANKS,
    }
    wrong = [what for what, fine in checks.items() if not fine]
    if wrong:
        raise EngineCheckError(f"{title}: the question's {', '.join(wrong)} of {name} is wrong: {question}")


def _must_say(said: list[str], text: str) -> None:
    if not any(text in line for line in said):
        raise EngineCheckError(f"nothing that was said holds {text!r}: {said}")
