"""The story of a rollout as the store tells it: whole, over a leader that stops, and over one that dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from eplb_service.app import Service
from eplb_service.ids import DeploymentId, GenerationNumber
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.planner import documents, ledger
from eplb_service.rollout.journal_codec import decode_journal
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_planner_loop import (
    FlakyStore,
    InlineSolver,
    config_of,
    first_generation,
    generation_of,
    planner,
    reach,
    run,
    warm_policies,
)

__all__ = ["warm_policies"]
NAME = DeploymentId("chat")


async def story_of(fleet: Fleet, number: int = 1) -> placement_pb2.RolloutEvents:
    request = placement_pb2.GetRolloutEventsRequest(deployment=fleet.deployment, generation=number)
    told: placement_pb2.RolloutEvents = await fleet.placement.GetRolloutEvents(request, timeout=5)
    return told


def names(story: placement_pb2.RolloutEvents) -> list[str]:
    return [event.event for event in story.events]


async def stored(store: FlakyStore, number: int, last: str) -> None:
    """Wait until the store holds a journal that ends with this event."""

    async def found() -> bool:
        name = documents.events_name(number)
        document = (await store.read(NAME, (name,))).get(name)
        return document is not None and decode_journal(document.value, GenerationNumber(number)).events[-1].event == last

    await until_true(found, f"{last} at the end of the stored journal of generation {number}")


def test_a_rollout_is_told_from_its_publication_to_its_end_with_chunks_ranks_and_reasons() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address) as fleet:
            await first_generation(fleet)
            story = await story_of(fleet)
            assert names(story) == [
                "generation.published",
                "rollout.started",
                *["chunk.opened", "chunk.authorised", "chunk.flipped"] * fleet.num_layers,
                "rollout.finished",
            ]
            assert (story.incomplete, story.dropped) == ("", 0)
            assert story.events[0].text.startswith("generation 1: move: ")
            assert story.events[1].text.startswith("3 layers in 3 chunks; stored after ")
            opened, authorised, flipped = story.events[2:5]
            assert opened.text.startswith("chunk 1 of 3: layer tiny/0, ")
            assert authorised.text.startswith("staged by all 4 ranks after ")
            assert flipped.text.startswith("chunk 1 of 3 of generation 1 flipped at boundary 9 in 1 ms, ")
            assert flipped.text.endswith(" ms expected")
            assert opened.chunk_id == authorised.chunk_id == flipped.chunk_id > 0
            assert not story.events[0].HasField("chunk_id")
            assert story.events[-1].text == "generation 1 active: all 3 chunks flipped"
            times = [event.at_s for event in story.events]
            assert times == sorted(times)
            assert {event.epoch for event in story.events} == {1}
            await stored(store, 1, "rollout.finished")
        # Another planner knows it from the store alone.
        async with planner(store, store__owner="another") as (_, address), Fleet(address, group_id=78) as fleet:
            await reach(fleet, "ready")
            assert await story_of(fleet) == story

    run(scenario())


def test_refusals_and_tries_are_part_of_the_story_with_the_rank_that_refused() -> None:
    async def scenario() -> None:
        async with planner(rollout__tries_max="2") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.ranks[2].closed_id = (1 << 62) - 1  # this hook's tombstone is above every id
            fleet.report(fleet.skewed())
            await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_STOPPED)
            story = await story_of(fleet)
            refused = next(event for event in story.events if event.event == "chunk.refused")
            assert (refused.rank_id, refused.text) == (2, "closed: closed before")
            assert "chunk.withdrawn" in names(story)
            assert "chunk.aborted" in names(story)
            assert names(story)[-1] == "rollout.finished"
            assert "generation 1 stopped: " in story.events[-1].text

    run(scenario())


def test_a_leader_that_stops_leaves_a_journal_that_its_successor_goes_on_with() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, store__owner="first") as (first, address), Fleet(address, hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
            port = int(address.rpartition(":")[2])
            await first.stop()
            fleet.hold_flips = False
            async with planner(store, store__owner="second", listen__port=str(port)) as (_, _again):
                await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
                story = await story_of(fleet)
        told = names(story)
        assert story.incomplete == ""
        assert told[:4] == ["generation.published", "rollout.started", "chunk.opened", "chunk.authorised"]
        ended = told.index("lead.ended")
        assert story.events[ended].text == "the planner stops"
        assert told[ended + 1] == "lead.taken"
        assert "rollout.resumed" in told[ended:]
        assert told[-1] == "rollout.finished"
        assert [event.epoch for event in story.events] == [1] * (ended + 1) + [2] * (len(told) - ended - 1)

    run(scenario())


class SharedStore(FlakyStore):
    """What one planner sees of a store that others use too."""

    def __init__(self, other: FlakyStore | None = None) -> None:
        super().__init__()
        if other is not None:
            self._states = other._states


@contextmanager
def no_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("eplb_service.planner.deployment.DRAIN_S", 0.01)
        patch.setattr("eplb_service.planner.planner.STOP_S", 0.01)
        yield


@pytest.mark.parametrize("flips_meanwhile", [False, True])
def test_a_leader_that_dies_leaves_a_gap_that_its_successor_names(
    monkeypatch: pytest.MonkeyPatch, flips_meanwhile: bool
) -> None:
    """vllm#57883: what became of a rearrangement whose leader is gone must be told, not be silence."""

    async def scenario() -> None:
        store = SharedStore()
        first = Service(config_of(store__owner="chat-planner"), store=store, solver=InlineSolver())  # type: ignore[arg-type]
        ready = await first.start()
        async with Fleet(ready.address, hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
            await stored(store, 1, "chunk.authorised")
            store.is_away = True  # from here on nothing of the first leader reaches the store: to everybody else it is dead
            if flips_meanwhile:
                fleet.hold_flips = False
                fleet.vote()
                await until(lambda: all(1 in rank.generations.values() for rank in fleet.ranks), "a flip that nobody recorded")
            with no_time_to_drain(monkeypatch):
                await first.stop()
            fleet.hold_flips = False
            config = config_of(store__owner="chat-planner", listen__port=str(ready.port))  # the same name: no lease to wait for
            second = Service(config, store=SharedStore(store), solver=InlineSolver())  # type: ignore[arg-type]
            await second.start()
            try:
                await generation_of(fleet, 1, placement_pb2.GENERATION_STATE_ACTIVE)
                story = await story_of(fleet)
                assert fleet.all_route_alike()
            finally:
                await second.stop()
        assert story.incomplete == (
            "the leader of epoch 1 died: what happened between chunk.authorised and epoch 2 may be missing"
        )
        told = names(story)
        assert told[: told.index("chunk.authorised") + 1] == [
            "generation.published",
            "rollout.started",
            "chunk.opened",
            "chunk.authorised",
        ]
        assert told[4] == "lead.taken"
        assert told[-1] == "rollout.finished"

    run(scenario())


def test_a_store_that_is_away_for_a_while_costs_no_event() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address, hold_flips=True) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "all ranks armed")
            store.is_away = True
            fleet.hold_flips = False
            fleet.vote()
            await until(lambda: fleet.live_generations == {1}, "every layer flipped without the store")
            store.is_away = False
            await stored(store, 1, "rollout.finished")
            assert (await story_of(fleet)).incomplete == ""
            assert names(await story_of(fleet)).count("chunk.flipped") == fleet.num_layers

    run(scenario())


def test_a_journal_goes_with_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """tokenspeed#251: what is kept for each rebalance is bounded."""
    monkeypatch.setattr(ledger, "GENERATIONS_STORED", 2)

    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.report(fleet.skewed())
            for number in range(1, 5):
                if number > 1:
                    back = admin_pb2.RollbackRequest(
                        deployment="chat", idempotency_key=str(number), generation=(number - 1) % 2
                    )
                    await fleet.admin.Rollback(back, timeout=10)
                await generation_of(fleet, number, placement_pb2.GENERATION_STATE_ACTIVE)
                await stored(store, number, "rollout.finished")
            for prefix in (documents.GENERATIONS, documents.EVENTS):
                listed = await store.list(NAME, prefix, limit=100)
                assert [name for name, _ in listed] == [f"{prefix}4", f"{prefix}3"]
        async with planner(store, store__owner="another") as (_, address), Fleet(address, group_id=78) as fleet:
            await reach(fleet, "ready")
            with pytest.raises(grpc.aio.AioRpcError, match="has no generation 2; the newest is 4, and the last 2 are kept"):
                await story_of(fleet, 2)

    run(scenario())


def test_a_generation_without_a_journal_says_so() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (service, address), Fleet(address) as fleet:
            await first_generation(fleet)
            await stored(store, 1, "rollout.finished")
            assert service.planner is not None
            service.planner.deployment("chat").journals.forget()
            del store._states[NAME].documents["events/1"]
            with pytest.raises(grpc.aio.AioRpcError, match="generation 1 of chat has no journal"):
                await story_of(fleet)
            status = await fleet.admin.Status(admin_pb2.StatusRequest(deployment="chat"))
            assert status.deployments[0].state == "ready"

    run(scenario())
