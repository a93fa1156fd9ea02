"""The whole way of a question: the plug-in's client → a real agent process → a planner, and the answer back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agent.adviser.client import ask
from eplb_service import __version__
from eplb_service.advice import Advice, map_digest
from eplb_service.policy.registry import load_policy
from eplb_service.policy.warm_up import warm_up_policy
from tests.integration.advised_engine import Engine
from tests.integration.test_advised_loop import ACTIVE, generation
from tests.integration.test_agent_process import Agent
from tests.integration.test_planner_loop import FlakyStore, planner, run

pytestmark = pytest.mark.process


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        yield Path(name)


class Plugged(Engine):
    """An engine that asks as the plug-in does."""

    socket = ""

    async def ask(self, load: np.ndarray[tuple[int, ...], np.dtype[np.float64]], *, again: bool = False) -> Advice:
        self.sequence += not again
        question = self.question(load)
        answer = await asyncio.to_thread(ask, self.socket, question, timeout_s=self.timeout_s, release=__version__)
        self.answers.append(answer)
        if answer.rows is not None:
            self.rows = answer.rows.copy()
        return answer


def test_question_of_the_plug_in_reaches_the_planner_and_its_answer_the_engine(folder: Path) -> None:
    warm_up_policy(load_policy("greedy"), "greedy")

    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (service, address), Plugged(address) as engine:
            agent = Agent(folder, address)
            engine.socket = str(agent.socket)
            try:
                await agent.start()
                await agent.ready()
                told = await engine.ask_until_move(engine.skewed())
                assert (told.generation, told.digest) == (1, map_digest(engine.rows))
                shown = await engine.ask(engine.skewed())
                assert (shown.move, shown.generation, shown.digest) == (False, 1, told.digest)
                assert (await generation(engine, 1)).state == ACTIVE
                await service.stop()
                away = await engine.ask(engine.skewed())
                assert (away.move, away.generation, away.digest) == (False, 0, told.digest)
                assert away.reason.startswith("keep: planner at")
            finally:
                assert agent.process is not None
                agent.process.kill()
                await agent.ended()

    run(scenario())
