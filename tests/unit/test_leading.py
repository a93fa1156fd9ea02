"""The lead of a deployment: how it is tried again when it cannot begin."""

from __future__ import annotations

import asyncio

import pytest

from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import DeploymentId
from eplb_service.planner.leading import FAULT_PAUSE_MAX_S, RETRY_S, Leading
from eplb_service.store.base import Leadership
from eplb_service.store.memory import MemoryStore


class Led:
    """Something that cannot begin: a document of it is damaged. It begins once `repaired`.

    shows: whether that can be seen without the lead.
    """

    def __init__(self, *, shows: bool = False) -> None:
        self.begins = self.checks = 0
        self.repaired_after = 10**9
        self._shows = shows

    async def check(self) -> None:
        self.checks += 1
        if self._shows and self.checks <= self.repaired_after:
            raise BrokenInvariantError("stored live map is damaged")

    async def begin(self, leadership: Leadership) -> None:
        self.begins += 1
        if not self._shows and self.begins <= self.repaired_after:
            raise BrokenInvariantError("stored live map is damaged")

    async def end(self, reason: str) -> None: ...

    def displaced(self, reason: str) -> None: ...


@pytest.mark.parametrize("shows", [False, True])
def test_a_damaged_document_is_tried_again_more_and_more_rarely_and_takes_no_epoch_where_it_shows_before(
    monkeypatch: pytest.MonkeyPatch, shows: bool
) -> None:
    async def scenario() -> None:
        pauses: list[float] = []
        enough = asyncio.Event()
        sleep = asyncio.sleep

        async def paused(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) >= 12:
                enough.set()
            await sleep(0)

        monkeypatch.setattr("eplb_service.planner.leading.asyncio.sleep", paused)
        led, store = Led(shows=shows), MemoryStore(lambda: 0.0)
        lead = Leading(
            DeploymentId("chat"),
            store,
            led,
            owner="me",
            lease_s=10.0,
            new_id=iter(map(str, range(1000))).__next__,
            on_health=lambda _: None,
        )
        lead.start()
        async with asyncio.timeout(10):
            await enough.wait()
        assert pauses[:4] == [2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, 16 * RETRY_S]
        assert max(pauses) == FAULT_PAUSE_MAX_S
        assert "damaged" in lead.why_not
        assert store._states[DeploymentId("chat")].fence.epoch == led.begins if not shows else not store._states
        assert (led.begins > 0) is not shows
        led.repaired_after = 0
        async with asyncio.timeout(10):
            while not lead.epoch or lead.why_not:
                await sleep(0)
        assert led.begins == 1 or not shows
        await lead.stop(1.0)

    asyncio.run(scenario())
