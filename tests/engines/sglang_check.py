"""SGLang's real expert location and updater over 4 ranks, asking an agent process that answers well, badly or not at all."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from eplb_service.advice import AdviceRequest, map_digest
from tests.adviser_doubles import Answer, ScriptedAgent, keeping, moving, shuffled_map, silent
from tests.engines.ranks import (
    NUM_LOGICAL,
    NUM_PHYSICAL,
    NUM_RANKS,
    TIMEOUT_S,
    WIDTHS,
    EngineCheckError,
    Ranks,
    all_route_by,
    check_copy,
    must_say,
    ranks_of,
)  # fmt: skip
from tests.engines.sglang_ranks import MODEL, MOE_LAYERS, STEPS, file_map, loads_of, start

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def check(release: str, *, say: Callable[[str], None]) -> None:
    """Run all scenarios. Raises EngineCheckError at the first thing that is not as it must be."""
    with tempfile.TemporaryDirectory() as temporary:
        socket = Path(temporary) / "agent.sock"
        agent = ScriptedAgent(socket)
        begun = time.monotonic()
        try:
            with ranks_of("sglang", release, start, socket, Path(temporary)) as ranks:
                say(f"  ranks up: {time.monotonic() - begun:.1f} s")
                _scenarios(release, ranks, agent, say)
        finally:
            agent.close()


def _scenarios(release: str, ranks: Ranks, agent: ScriptedAgent, say: Callable[[str], None]) -> None:
    first = ranks.interval("first", 1)
    live: Rows = first[0].maps[MODEL].astype(np.int32)
    all_route_by("first map", first, {MODEL: live})
    said = [line for result in first for line in result.said]
    must_say(said, f"adviser: active: SGLang {release} called it in the place of its algorithm")
    must_say(said, "adviser: engine: SGLang has no map yet: its own algorithm computes the first")
    if agent.questions:
        raise EngineCheckError("a question was asked about a map that is not there")
    say(f"  {'first map, its own algorithm':<32} {max(result.seconds for result in first) * 1000:8.1f} ms")

    moved_in_s, generation = 0.0, 0

    def step(title: str, kind: str, seed: int, answer: Answer, after: Rows, says: str, *, most_s: float = 30.0) -> None:
        nonlocal live, moved_in_s, generation
        agent.answer = answer
        agent.questions.clear()
        results = ranks.interval(kind, seed)
        all_route_by(title, results, {MODEL: after})
        if kind == "interval":
            _check_question(title, agent.questions, release, live, seed)
            check_copy(title, agent.questions[0], generation, moved_in_s, held_steps=True)
        elif agent.questions:
            raise EngineCheckError(f"{title}: a question was asked")
        seconds = max(result.seconds for result in results)
        if seconds > most_s:
            raise EngineCheckError(f"{title}: took {seconds:.2f} s, at most {most_s:g} s are right")
        if kind == "interval" and after is not live:
            moved_in_s, generation = seconds, 4
        live = after
        said = [line for result in results for line in result.said]
        if says:
            must_say(said, says)
        say(f"  {title:<32} {seconds * 1000:8.1f} ms   {next((line for line in said if 'adviser' in line), '')[:110]}")

    step("a placement file of ours", "file", 5, keeping, file_map(5), "")
    moved = [shuffled_map(seed, len(MOE_LAYERS), NUM_LOGICAL, NUM_PHYSICAL, NUM_RANKS) for seed in (7, 8)]
    step("move", "interval", 2, moving(moved[0], generation=4), moved[0], "adviser: moved to generation 4 (check): it pays")
    step("keep", "interval", 3, keeping, moved[0], "adviser: kept (check): gain 0.1 ms")
    step("no load", "idle", 3, keeping, moved[0], "adviser: idle")
    twice = moved[0].copy()
    twice[0, :2] = twice[0, 0]
    lost = np.where(moved[0] == 2, 3, moved[0]).astype(np.int32)
    step(
        "map without an expert", "interval", 3, moving(lost), moved[0], "adviser: refused (check): the planner's answer cannot"
    )
    step(
        "two copies on one rank",
        "interval",
        3,
        moving(twice),
        moved[0],
        "adviser: refused (check): the planner's answer cannot",
    )
    step("silent agent process", "interval", 3, silent, moved[0], "adviser: away (check)", most_s=TIMEOUT_S + 2.0)
    step("move again", "interval", 4, moving(moved[1], generation=5), moved[1], "adviser: moved to generation 5 (check)")


def _check_question(title: str, questions: list[AdviceRequest], release: str, live: Rows, seed: int) -> None:
    if len(questions) != 1:
        raise EngineCheckError(f"{title}: {len(questions)} questions were asked, not 1")
    question = questions[0]
    checks = {
        "map": np.array_equal(question.current, live) and question.digest == map_digest(live),
        "load": np.array_equal(question.load, loads_of(seed).sum(axis=0)[list(MOE_LAYERS)]),
        "layers": question.layer_ids == MOE_LAYERS,
        "bytes": question.expert_bytes == (sum(WIDTHS) * 8,) * len(MOE_LAYERS),
        "steps": question.steps == STEPS,
        "dispatch": question.dispatch == "nearest",
        "proof": question.engine == f"sglang {release}, hook active",
        "model": question.model == "org/Model" and question.deployment == "check",
        "ranks": question.rank_ids == tuple(range(NUM_RANKS)),
    }
    wrong = [what for what, fine in checks.items() if not fine]
    if wrong:
        raise EngineCheckError(f"{title}: the question's {', '.join(wrong)} is wrong: {question}")
