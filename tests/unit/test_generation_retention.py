"""Which generations the store keeps, with their journals, and what a planner that has just started says of them."""

from __future__ import annotations

import asyncio

import pytest

from eplb_service.ids import DeploymentId
from eplb_service.planner.documents import Settings
from eplb_service.planner.ledger import GENERATIONS_STORED, JUMP_MAX, Ledger
from eplb_service.store.base import NAMES_MAX, Write
from eplb_service.store.memory import MemoryStore
from tests.unit.test_rollout import ONE_LAYER, generation


def deletes(before: int | None, number: int) -> list[str]:
    ledger = Ledger(DeploymentId("chat"), MemoryStore(lambda: 0.0), Settings(mode="auto", policy="greedy"))
    if before is not None:
        ledger.keep(generation(before, ONE_LAYER))
    return list(ledger.publish_puts(generation(number, ONE_LAYER), None).deletes)


def test_as_many_as_are_published_go_once_the_store_is_full() -> None:
    assert deletes(None, 1) == []
    assert deletes(GENERATIONS_STORED - 1, GENERATIONS_STORED) == []
    assert deletes(GENERATIONS_STORED, GENERATIONS_STORED + 1) == ["generation/1", "events/1"]
    assert deletes(1003, 1005) == ["generation/4", "events/4", "generation/5", "events/5"]


@pytest.mark.parametrize("jump", [JUMP_MAX + 1, 1_000_000])
def test_numbers_that_jump_do_not_take_the_history_along(jump: int) -> None:
    """A store that was restored, ranks that saw more: the generations before are still those to go back to."""
    assert deletes(1500, 1500 + jump) == ["generation/501", "events/501"]
    assert deletes(50, 50 + jump) == []


def test_one_write_never_names_more_than_a_store_takes() -> None:
    assert len(deletes(5000, 5000 + JUMP_MAX)) == 2 * JUMP_MAX < NAMES_MAX


def test_a_planner_that_has_just_started_tells_what_the_store_has_not_that_there_is_none() -> None:
    async def told() -> tuple[list[int], int]:
        chat, store = DeploymentId("chat"), MemoryStore(lambda: 0.0)
        before = Ledger(chat, store, Settings(mode="auto", policy="greedy"))
        leadership = await store.lead(chat, owner="first", lease_s=1.0, floor=0, write_id="a")
        for number in (1, 2):
            published = before.publish_puts(generation(number, ONE_LAYER), None)
            await store.write(chat, Write(write_id=f"w{number}", epoch=leadership.epoch, puts=published.puts))
        listing, showing = (Ledger(chat, store, Settings(mode="auto", policy="greedy")) for _ in range(2))
        return [one.number for one in await listing.newest(10)], (await showing.generation(2)).number

    assert asyncio.run(told()) == ([2, 1], 2)
