"""A planner learns from the flips of one generation how the next is to be cut, and shows what came of it."""

from __future__ import annotations

import pytest

from eplb_service.pb.v1 import admin_pb2, placement_pb2
from tests.integration.planner_fleet import Fleet
from tests.integration.test_planner_loop import first_generation, generation_of, planner, run

ACTIVE = placement_pb2.GENERATION_STATE_ACTIVE


def test_flips_that_took_too_long_make_the_next_generation_go_layer_by_layer_and_its_record_says_so() -> None:
    async def scenario() -> None:
        limit = {"rollout__commit_stall_ms_max": "5"}
        async with (
            planner(**limit) as (service, address),
            Fleet(address, layers_per_chunk=3, expert_bytes=2_000_000, flip_s=0.03) as fleet,
        ):
            first = await first_generation(fleet)
            assert len(first.flip_boundaries) == 1  # nothing was measured: what is assumed lets all three layers flip together
            assert first.flip_stall.expected_s < first.flip_stall.limit_s == 0.005
            assert first.flip_stall.measured_s == 0.03
            await fleet.admin.Rollback(admin_pb2.RollbackRequest(deployment="chat", generation=0, idempotency_key="b"))
            second = await generation_of(fleet, 2, ACTIVE)
            assert len(second.flip_boundaries) == fleet.num_layers
            assert second.flip_stall.expected_s > second.flip_stall.limit_s == 0.005
            last = {
                kind: service.metrics.registry.get_sample_value(
                    "eplb_chunk_stall_seconds", {"deployment": "chat", "kind": kind}
                )
                for kind in ("expected", "measured")
            }
            assert last["measured"] == 0.03
            assert last["expected"] == pytest.approx(second.flip_stall.expected_s, rel=1.0)

    run(scenario())


def test_without_a_limit_layers_flip_together_however_long_that_takes() -> None:
    async def scenario() -> None:
        async with (
            planner(rollout__commit_stall_ms_max="0") as (_, address),
            Fleet(address, layers_per_chunk=3, expert_bytes=2_000_000, flip_s=0.5) as fleet,
        ):
            await first_generation(fleet)
            await fleet.admin.Rollback(admin_pb2.RollbackRequest(deployment="chat", generation=0, idempotency_key="b"))
            second = await generation_of(fleet, 2, ACTIVE)
            assert len(second.flip_boundaries) == 1
            assert not second.flip_stall.HasField("limit_s")
            assert second.flip_stall.measured_s == 0.5

    run(scenario())
