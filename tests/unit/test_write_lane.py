"""Writes of one leadership: in order, once, merged while they wait, ended by a newer leader."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from eplb_service.errors import ConflictError, FencedError, StoreUnavailableError
from eplb_service.ids import DeploymentId
from eplb_service.planner.write_lane import COMMITS_WAITING_MAX, JOURNAL_WAITING_MAX, WriteLane
from eplb_service.store.base import Leadership, Write
from eplb_service.store.memory import MemoryStore

NAME = DeploymentId("d")


class Store(MemoryStore):
    """Counts writes; `away` refuses them, `lose_answers` applies them and then fails as if the answer was lost."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.writes: list[Write] = []
        self.away = False
        self.lose_answers = 0

    async def write(self, deployment: DeploymentId, write: Write) -> dict[str, int]:
        if self.away:
            raise StoreUnavailableError("away")
        answer = await super().write(deployment, write)
        self.writes.append(write)
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreUnavailableError("the answer was lost")
        return answer


class Bench:
    def __init__(self) -> None:
        self.store = Store()
        self.health: list[str] = []
        self.fenced: list[str] = []
        self.ids = (f"w{number}" for number in itertools.count())

    async def lead(self, owner: str = "a") -> Leadership:
        return await self.store.lead(NAME, owner=owner, lease_s=60, floor=0, write_id=next(self.ids))

    async def lane(self) -> WriteLane:
        return WriteLane(
            self.store,
            await self.lead(),
            new_id=lambda: next(self.ids),
            on_health=self.health.append,
            on_fenced=self.fenced.append,
        )


def run(scenario: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(Bench()), 20))


def test_later_value_of_a_name_replaces_one_that_waits_and_a_commit_keeps_its_place() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.away = True
        lane.behind({"live": b"1"})
        await asyncio.sleep(0)
        lane.behind({"live": b"2"})  # the one before is under way already: it may have been applied
        commit = asyncio.create_task(lane.commit({"rollout": b"x"}))
        await asyncio.sleep(0)
        lane.behind({"live": b"3"})
        lane.behind({"live": b"4"})
        bench.store.away = False
        await commit
        await lane.close(5)
        assert [dict(write.puts) for write in bench.store.writes] == [
            {"live": b"1"},
            {"live": b"2"},
            {"rollout": b"x"},
            {"live": b"4"},
        ]

    run(scenario)


def test_write_whose_answer_was_lost_is_applied_once() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.lose_answers = 1
        await lane.commit({"generation/1": b"x"}, expects={"generation/1": 0})
        assert (await bench.store.read(NAME, ("generation/1",)))["generation/1"].version == 1
        assert "the answer was lost" in bench.health
        assert bench.health[-1] == ""
        await lane.close(5)

    run(scenario)


def test_version_that_differs_fails_that_commit_and_no_other() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        await lane.commit({"a": b"1"})
        with pytest.raises(ConflictError):
            await lane.commit({"a": b"2"}, expects={"a": 0})
        await lane.commit({"a": b"3"}, expects={"a": 1})
        await lane.close(5)

    run(scenario)


def test_newer_leader_ends_the_lane_and_everything_that_waits_in_it() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.away = True
        waiting = [asyncio.create_task(lane.commit({f"a{number}": b""})) for number in range(3)]
        await asyncio.sleep(0)
        await bench.lead()
        bench.store.away = False
        for task in waiting:
            with pytest.raises(FencedError):
                await task
        assert len(bench.fenced) == 1
        with pytest.raises(FencedError):
            await lane.commit({"late": b""})
        lane.behind({"late": b""})
        await lane.close(5)
        assert bench.store.writes == []

    run(scenario)


def test_journal_that_overflows_says_how_much_it_lost() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.away = True
        lane.behind({"first": b""})
        await asyncio.sleep(0)
        for number in range(JOURNAL_WAITING_MAX + 5):
            lane.note({"event": "e", "number": number})
        bench.store.away = False
        await lane.close(5)
        entries = [json.loads(entry) for entry in await bench.store.journal(NAME, limit=4096)]
        assert entries[0] == {"event": "journal.incomplete", "dropped": 5}
        assert [entry["number"] for entry in entries[1:]] == list(range(5, JOURNAL_WAITING_MAX + 5))

    run(scenario)


def test_commits_that_wait_are_bounded() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.away = True
        lane.behind({"first": b""})
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(lane.commit({"a": b""})) for _ in range(COMMITS_WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailableError, match=f"{COMMITS_WAITING_MAX} writes wait"):
            await lane.commit({"a": b""})
        await lane.close(0.01)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, FencedError)

    run(scenario)


def test_lane_that_closes_while_the_store_is_away_leaves_nobody_waiting_for_the_write_under_way() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.away = True
        under_way, behind_it = (asyncio.create_task(lane.commit({name: b""})) for name in ("a", "b"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the first is on its way to a store that does not answer
        assert lane.num_waiting == 1
        await lane.close(0.01)
        for task in (under_way, behind_it):
            with pytest.raises(FencedError, match="gave up its leadership"):
                await asyncio.wait_for(task, 5)

    run(scenario)


def test_caller_that_goes_away_does_not_take_its_write_along() -> None:
    async def scenario(bench: Bench) -> None:
        lane = await bench.lane()
        bench.store.away = True
        task = asyncio.create_task(lane.commit({"a": b"1"}))
        await asyncio.sleep(0)
        task.cancel()
        bench.store.away = False
        await lane.close(5)
        assert [dict(write.puts) for write in bench.store.writes] == [{"a": b"1"}]

    run(scenario)
