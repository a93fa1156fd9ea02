"""vLLM's real load balancer over 4 ranks, asking an agent process that answers well, badly, late or not at all."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.advice import AdviceRequest, map_digest
from tests.adviser_doubles import Answer, ScriptedAgent, keeping, linear_map, moving, shuffled_map, silent
from tests.engines.ranks import (
    NUM_LOGICAL,
    NUM_PHYSICAL,
    NUM_RANKS,
    TIMEOUT_S,
    WIDTHS,
    EngineCheckError,
    Maps,
    Ranks,
    all_route_by,
    check_copy,
    must_say,
    ranks_of,
)  # fmt: skip
from tests.engines.vllm_ranks import LAYERS, loads_of, start


def check(release: str, *, is_async: bool, say: Callable[[str], None]) -> None:
    """Run all scenarios on one release. Raises EngineCheckError at the first thing that is not as it must be."""
    with tempfile.TemporaryDirectory() as temporary:
        socket = Path(temporary) / "agent.sock"
        agent = ScriptedAgent(socket)
        begun = time.monotonic()
        try:
            with ranks_of("vllm", release, start, socket, Path(temporary), is_async=is_async) as ranks:
                say(f"  ranks up: {time.monotonic() - begun:.1f} s")
                _scenarios(ranks, agent, socket, say, is_async=is_async)
        finally:
            agent.close()


def check_half_on(release: str, *, say: Callable[[str], None]) -> None:
    """The adviser is off on one rank: it is off on all, nobody waits for ever, and vLLM balances as it does by itself."""
    with tempfile.TemporaryDirectory() as temporary:
        socket = Path(temporary) / "agent.sock"
        agent = ScriptedAgent(socket, _answer_with(_targets(1)))
        try:
            with ranks_of("vllm", release, start, socket, Path(temporary), off_on=NUM_RANKS - 1) as ranks:
                slowest = 0.0
                for number in range(5):
                    results = ranks.interval("interval", number + 1)
                    all_route_by("off on one rank", results, {name: results[0].maps[name] for name in LAYERS})
                    said = [line for result in results for line in result.said]
                    if number == 0:
                        must_say(said, f"adviser: engine: the adviser is not on in rank {NUM_RANKS - 1} of {NUM_RANKS}")
                    slowest = max(result.seconds for result in results)
                    say(f"  off on one rank, interval {number + 1}  {slowest * 1000:8.1f} ms")
                if slowest > TIMEOUT_S:
                    raise EngineCheckError(f"ranks still wait for one that never comes: {slowest:.1f} s in the last interval")
                if agent.questions:
                    raise EngineCheckError("a question was asked")
        finally:
            agent.close()


def check_growing(release: str, *, say: Callable[[str], None]) -> None:
    """A rank joined with empty slots: vLLM's own policy fills them, nobody is asked; from then on the planner is."""
    with tempfile.TemporaryDirectory() as temporary:
        socket = Path(temporary) / "agent.sock"
        target = _targets(4)
        agent = ScriptedAgent(socket, _answer_with(target))
        try:
            with ranks_of("vllm", release, start, socket, Path(temporary)) as ranks:
                results = ranks.interval("grow", 1)
                grown = {name: results[0].maps[name] for name in LAYERS}
                all_route_by("grown by a rank", results, grown)
                must_say([line for result in results for line in result.said], "it changes its size")
                if agent.questions or any((rows < 0).any() for rows in grown.values()):
                    raise EngineCheckError(f"{len(agent.questions)} questions were asked; the map is {grown}")
                say(f"  grown by a rank               {max(result.seconds for result in results) * 1000:8.1f} ms")
                all_route_by("move after it", ranks.interval("interval", 2), target)
        finally:
            agent.close()


def _scenarios(ranks: Ranks, agent: ScriptedAgent, socket: Path, say: Callable[[str], None], *, is_async: bool) -> None:
    live: Maps = {name: linear_map(layers, NUM_LOGICAL, NUM_PHYSICAL) for name, layers in LAYERS.items()}
    first, second = _targets(1), _targets(2)
    moved_in_s = 0.0

    def step(
        title: str, kind: str, seed: int, answer: Answer, after: Maps, *, questions: int, most_s: float = 30.0
    ) -> list[str]:
        nonlocal live, moved_in_s
        agent.answer = answer
        agent.questions.clear()
        results = ranks.interval(kind, seed)
        all_route_by(title, results, after)
        if len(agent.questions) != questions:
            raise EngineCheckError(f"{title}: {len(agent.questions)} questions were asked, not {questions}")
        for question in agent.questions:
            _check_question(title, question, live, seed)
            check_copy(title, question, 7 if moved_in_s else 0, moved_in_s, held_steps=not is_async)
        seconds = max(result.seconds for result in results)
        if after is not live:
            moved_in_s = seconds
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
    must_say(said, "adviser: moved to generation 7 (check): it pays")
    said = step("keep", "interval", 2, keeping, first, questions=models)
    must_say(said, "adviser: kept (check): gain 0.1 ms")
    for title, answer, reason in _unusable():
        said = step(title, "interval", 3, answer, first, questions=models)
        must_say(said, reason)
    said = step("silent agent process", "interval", 4, silent, first, questions=models, most_s=models * TIMEOUT_S + 2.0)
    must_say(said, f"{TIMEOUT_S:g} s (EPLB_ADVISER_TIMEOUT_S) ended without a whole answer")
    agent.close()
    said = step("no agent process", "interval", 5, keeping, first, questions=0, most_s=2.0)
    must_say(said, "start `eplb agent` on this node")
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
    by_layers = {len(rows): rows.astype(np.int32) for rows in target.values()}
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


def _check_question(title: str, question: AdviceRequest, live: Maps, seed: int) -> None:
    name = next(name for name, layers in LAYERS.items() if layers == len(question.current))
    wanted = {"target": "check", "drafter": f"check.{LAYERS['drafter']}-layers"}[name]
    checks = {
        "map": np.array_equal(question.current, live[name]) and question.digest == map_digest(live[name]),
        "load": np.array_equal(question.load, loads_of(seed)[name]),
        "bytes": question.expert_bytes == (sum(WIDTHS) * 8,) * LAYERS[name],
        "deployment": question.deployment == wanted,
        "ranks": question.rank_ids == tuple(range(NUM_RANKS))
        and len(set(question.nodes)) == 1
        and len(question.nodes) == NUM_RANKS,
    }
    wrong = [what for what, fine in checks.items() if not fine]
    if wrong:
        raise EngineCheckError(f"{title}: the question's {', '.join(wrong)} of {name} is wrong: {question}")
