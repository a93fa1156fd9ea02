"""Fleets that restart behind their agent processes, and one started beside another: the real agent process and planner."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.frames import RegistrationAnswer
from agent.runtime import AgentConfig, run_agent
from eplb_service.app import Service
from eplb_service.control import Hello
from tests.integration.agent_doubles import DEADLINE_S, FakeHook, address, pulse
from tests.integration.planner_fleet import until
from tests.integration.test_planner_loop import planner, run, warm_policies

__all__ = ["warm_policies"]
OLD, NEW = (100, 7), (200, 8)
"""Incarnation and group of a fleet's ranks."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eplb-") as name:
        yield Path(name)


@asynccontextmanager
async def agent(target: str, folder: Path, name: str, *, node: str | None = None) -> AsyncIterator[Path]:
    """An agent process on this loop; gives its socket."""
    path, ready, stop = folder / name, folder / f"{name}.ready", asyncio.Event()
    task = asyncio.create_task(run_agent(AgentConfig(planner=target, socket=path, node=node, ready_file=ready), stop=stop))
    await until(ready.exists, f"agent process {name}")
    try:
        yield path
    finally:
        stop.set()
        await task


async def link(path: Path, rank: int, life: tuple[int, int]) -> FakeHook:
    hook = FakeHook(address(rank, *life))
    await hook.link(path)
    return hook


async def group_is(service: Service, group_id: int) -> None:
    made = service.planner
    assert made is not None

    def serves() -> bool:
        groups = [deployment.carrier.group for deployment in made.deployments]
        return any(group is not None and group.group_id == group_id for group in groups)

    await until(serves, f"group {group_id} to be complete", DEADLINE_S)


@pytest.mark.parametrize("all_at_once", [True, False])
def test_engines_that_restart_are_taken_up_at_once_whether_the_old_ones_are_all_dead_or_not(
    folder: Path, all_at_once: bool
) -> None:
    """sglang#33111: a fleet that came back was locked out until its predecessor's lease ran out."""

    async def scenario() -> None:
        async with planner() as (service, target), agent(target, folder, "a") as path:
            old = [await link(path, rank, OLD) for rank in (0, 1)]
            await group_is(service, 7)
            begin_s = asyncio.get_running_loop().time()
            await old[1].drop()  # killed
            if all_at_once:
                await old[0].drop()
            new = [await link(path, rank, NEW) for rank in (1, 0)]  # over the other one's head, where it still lives
            await group_is(service, 8)
            for hook in new:
                await hook.hear(Hello)
            assert asyncio.get_running_loop().time() - begin_s < 8, "a rank's silence had not to be waited for"
            for hook in new:
                await hook.drop()

    run(scenario())


def test_a_fleet_beside_another_is_told_at_its_hooks_and_taken_once_the_first_is_gone_for_long(folder: Path) -> None:
    """vllm#53947: not locked out for good by something that is no more."""

    async def scenario() -> None:
        async with (
            planner(rollout__rank_silence_s="0.8") as (service, target),
            agent(target, folder, "a", node="one") as path,
            agent(target, folder, "b", node="two") as other,
        ):
            first = [await link(path, rank, OLD) for rank in (0, 1)]
            await group_is(service, 7)
            alive = asyncio.create_task(pulses(first))
            second = [await link(other, rank, NEW) for rank in (0, 1)]
            for rank, hook in enumerate(second):
                refused = await hook.hear(RegistrationAnswer)
                assert not refused.accepted
                assert f"rank {rank} of group 8 (incarnation 200 on node two) registers" in refused.reason
                assert f"rank {rank} of group 7 (incarnation 100 on node one)" in refused.reason
            await group_is(service, 7)
            alive.cancel()
            for hook in first:
                await hook.drop()
            await group_is(service, 8)
            for hook in second:
                await hook.drop()

    run(scenario())


async def pulses(hooks: list[FakeHook]) -> None:
    """Signs of life, as hooks give them."""
    while True:
        for hook in hooks:
            await hook.say(pulse(hook.address))
        await asyncio.sleep(0.1)
