"""A store whose documents were damaged: the deployment is not led, says which document it is, and no epoch is spent on it."""

from __future__ import annotations

import grpc
import pytest

from eplb_service.ids import DeploymentId
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.planner import leading
from eplb_service.store.base import Document
from tests.integration.planner_fleet import Fleet, until_true
from tests.integration.test_planner_loop import (
    FlakyStore,
    first_generation,
    planner,
    reach,
    run,
    status_of,
    warm_policies,
)

__all__ = ["warm_policies"]
NAME = DeploymentId("chat")


@pytest.mark.parametrize("document", ["live", "generation/1", "settings", "loaded"])
def test_a_damaged_document_is_named_costs_no_epoch_and_is_taken_up_once_it_is_whole_again(
    monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    """HYGON-AI/vllm-plugin-das#69: files of placements that were written over one another."""
    monkeypatch.setattr(leading, "RETRY_S", 0.01)
    monkeypatch.setattr(leading, "FAULT_PAUSE_MAX_S", 0.05)

    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address) as fleet:
            await first_generation(fleet)
            await fleet.admin.Pause(admin_pb2.PauseRequest(deployment="chat", reason="test"))
        state = store._states[NAME]
        whole, epoch = state.documents[document], state.fence.epoch
        state.documents[document] = Document(whole.value[: len(whole.value) // 2], whole.version)
        async with planner(store) as (service, address), Fleet(address) as fleet:
            assert service.planner is not None
            leads = service.planner.deployment("chat").leading

            async def named() -> bool:
                try:
                    return f"document '{document}' in the store" in (await status_of(fleet)).reason
                except grpc.aio.AioRpcError:
                    return False

            await until_true(named, "the reason in the status")
            checks = 0
            load = service.planner.deployment("chat").ledger.load

            async def counted() -> None:
                nonlocal checks
                checks += 1
                await load()

            monkeypatch.setattr(service.planner.deployment("chat").ledger, "load", counted)
            await until_true(lambda: _true(checks > 5), "more tries")
            assert (state.fence.epoch, leads.epoch) == (epoch, 0)
            state.documents[document] = whole
            await reach(fleet, "ready")
            assert leads.epoch == epoch + 1
            assert fleet.all_route_alike()

    run(scenario())


async def _true(value: bool) -> bool:
    return value


def test_a_damaged_answer_to_a_key_or_journal_costs_no_more_than_itself() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Fleet(address) as fleet:
            await first_generation(fleet)
        documents = store._states[NAME].documents
        for name in ("events/1", "previous", "learned"):
            if name in documents:
                documents[name] = Document(b"\xff\xfe damaged", documents[name].version)
        assert "events/1" in documents
        async with planner(store, store__owner="another") as (_, address), Fleet(address, group_id=78) as fleet:
            await reach(fleet, "ready")
            request = placement_pb2.GetRolloutEventsRequest(deployment="chat", generation=1)
            with pytest.raises(grpc.aio.AioRpcError, match="the journal of generation 1 cannot be read"):
                await fleet.placement.GetRolloutEvents(request, timeout=5)

    run(scenario())
