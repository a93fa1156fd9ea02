"""A planner killed between storing a generation and answering: the question that comes again is answered from the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from agent.engine.reference.launch import free_port
from eplb_service import failpoints
from eplb_service.advice import map_digest
from tests.integration.advised_engine import Engine
from tests.integration.planner_fleet import until
from tests.integration.test_advised_loop import ACTIVE, generation
from tests.integration.test_planner_loop import run
from tests.integration.test_planner_process import Serve, serve

__all__ = ["serve"]  # a fixture

pytestmark = pytest.mark.process

POINT = "planner.generation.persisted"


def test_planner_killed_between_publish_and_answer_tells_the_stored_generation(serve: Serve, tmp_path: Path) -> None:
    port = free_port()
    first = serve("--port", str(port), failpoint=f"{POINT}=exit:{tmp_path / POINT}")
    first.wait_ready()

    async def scenario() -> None:
        async with Engine(f"127.0.0.1:{port}", timeout_s=20.0) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.ask_often(engine.skewed(), 5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: first.popen.poll() is not None, "the planner to die")
            assert first.popen.returncode == failpoints.EXIT_CODE
            assert not any(answer.move for answer in engine.answers)
        second = serve("--port", str(port))
        await asyncio.to_thread(second.wait_ready)
        async with engine:
            told = await engine.ask(engine.skewed(), again=True)
            assert (told.move, told.generation) == (True, 1)
            view = await generation(engine, 1)
            assert view.epoch == 1  # stored by the planner that died
            shown = await engine.ask(engine.skewed())
            assert (shown.move, shown.generation, shown.digest) == (False, 1, map_digest(engine.rows))
            assert (await generation(engine, 1)).state == ACTIVE

    run(scenario())
