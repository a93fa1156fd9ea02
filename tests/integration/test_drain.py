"""Orders to drain, on a planner with ranks that speak the protocol: the fewest moves, kept empty, told when safe to stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from eplb_service.app import Service
from eplb_service.ids import DeploymentId, RankId
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.placement import Table
from eplb_service.planner import documents
from eplb_service.planner.documents import Settings
from eplb_service.policy.base import PlanningProblem, Proposal
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.store.memory import MemoryStore
from eplb_service.topology import Topology
from tests.integration.advised_engine import Engine
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_planner_loop import (
    FlakyStore,
    InlineSolver,
    config_of,
    generation_of,
    planner,
    reach,
    run,
    status_of,
)

ACTIVE, STOPPED = placement_pb2.GENERATION_STATE_ACTIVE, placement_pb2.GENERATION_STATE_STOPPED


@pytest.fixture(autouse=True, scope="module")
def warm_policies() -> Iterator[None]:
    """Compiled before any planner runs: `InlineSolver` plans on the planner's own loop, which must not stand still."""
    warm_up_policy(load_policy("greedy"), "greedy")
    table = Table.linear(model="m", layer_ids=(0,), num_logical=8, rank_ids=range(4), slots_per_rank=3)
    topology = dataclasses.replace(Topology.regular(num_ranks=4), dead=frozenset({RankId(1)}))
    problem = PlanningProblem(loads=np.ones((1, 1, 8)), topology=topology, current=table, max_imbalance=2.0)
    run_policy(load_policy("elastic"), problem)
    return iter([None])


async def drain(fleet: Fleet | Engine, *ranks: int, node: str = "", key: str = "k") -> admin_pb2.DrainResponse:
    request = admin_pb2.DrainRequest(deployment=fleet.deployment, rank_ids=ranks, node=node, idempotency_key=key)
    found: admin_pb2.DrainResponse = await fleet.admin.Drain(request, timeout=20)
    return found


async def undrain(fleet: Fleet, *ranks: int, node: str = "") -> admin_pb2.SettingsView:
    request = admin_pb2.UndrainRequest(deployment=fleet.deployment, rank_ids=ranks, node=node)
    found: admin_pb2.SettingsView = await fleet.admin.Undrain(request, timeout=20)
    return found


async def refused(order: object, *words: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await order  # type: ignore[misc]
    assert caught.value.code() is code, caught.value.details()
    for word in words:
        assert word in (caught.value.details() or ""), caught.value.details()


async def safe(fleet: Fleet, *ranks: int) -> None:
    """Return once exactly these ranks are drained, and all of them may be stopped."""

    async def found() -> bool:
        drains = (await status_of(fleet)).drains
        return [(one.rank_id, one.state) for one in drains] == [(rank, "safe_to_stop") for rank in ranks]

    await until_true(found, f"ranks {ranks} to be safe to stop")


def held(fleet: Fleet, rank: int) -> set[int]:
    """Experts that a rank holds in any layer, -1 for an empty slot."""
    first = rank * fleet.slots
    return {expert for row in fleet.ranks[0].rows.values() for expert in row[first : first + fleet.slots]}


def test_a_drained_rank_is_emptied_with_the_fewest_moves_without_load_or_gate_and_told_safe_dynamo_13580() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe", planning__max_moves="0") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            fleet.hold_flips = True
            reply = await drain(fleet, 1)
            assert (reply.generation, reply.verdict.code, list(reply.rank_ids)) == (1, "drain", [1]), reply.verdict.reason
            (view,) = reply.drains
            assert (view.state, view.experts_held, view.experts_alone) == ("draining", 9, 6)
            assert (await status_of(fleet)).settings.drained_rank_ids == [1]
            fleet.hold_flips = False
            fleet.vote()
            active = await generation_of(fleet, 1, ACTIVE)
            assert active.policy == "drain"
            assert active.moves.experts == 6  # of each of three layers two experts lived there alone
            await safe(fleet, 1)
            assert held(fleet, 1) == {-1}
            assert fleet.all_route_alike()
            (view,) = (await status_of(fleet)).drains
            assert view.reason == "rank 1 holds no expert that another has not: safe to stop"

    run(scenario())


def test_ranks_that_cannot_be_spared_or_are_not_there_are_refused_and_nothing_changes() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            await refused(
                drain(fleet, 1, 2),
                "cannot drain ranks 1, 2",
                "(0, 3) have 2 x 3 = 6 slots for the 8 experts",
                "let at least 3 ranks stay",
            )
            await refused(drain(fleet, 0, 1, 2, 3), "no rank would stay")
            bad = grpc.StatusCode.INVALID_ARGUMENT
            await refused(drain(fleet, 7), "rank 7 is not among the ranks 0-3", code=bad)
            await refused(drain(fleet, node="nowhere"), "no rank is on node 'nowhere'; nodes are node0, node1", code=bad)
            await refused(drain(fleet), "name the ranks, or the node, to drain", code=bad)
            await refused(undrain(fleet, 2), "rank 2 is not drained; no rank is drained", code=bad)
            await fleet.admin.Pause(admin_pb2.PauseRequest(deployment="chat", reason="noon"))
            await refused(drain(fleet, 1), "paused (noon)")
            await fleet.admin.Resume(admin_pb2.ResumeRequest(deployment="chat"))
            await fleet.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="pinned"))
            await refused(drain(fleet, 1), "pinned")
            status = await status_of(fleet)
            assert not status.settings.drained_rank_ids
            assert (status.live_generation, len(status.drains)) == (0, 0)

    run(scenario())


def test_the_order_outlives_the_planner_and_no_plan_uses_the_rank_until_it_is_given_back() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store, planning__mode="observe") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            await drain(fleet, 1)
            await safe(fleet, 1)
            rows = dict(fleet.ranks[0].rows)
        async with planner(store, store__owner="another", planning__mode="auto") as (_, address), Fleet(address) as fleet:
            # the engine was restarted, and loaded every slot again
            await safe(fleet, 1)
            assert held(fleet, 1) == {-1}
            assert {layer: set(row) for layer, row in rows.items()} == {
                layer: set(row) for layer, row in fleet.ranks[0].rows.items()
            }
            await fleet.admin.SetMode(admin_pb2.SetModeRequest(deployment="chat", mode="auto"))
            drained = (await status_of(fleet)).live_generation
            for _ in range(2):
                fleet.report(fleet.skewed(hot=5))
            await until_true(lambda: _newest(fleet, drained), "a generation for balance")
            assert held(fleet, 1) == {-1}
            # as loaded it held experts: going back there is refused, and says what to do
            rollback = admin_pb2.RollbackRequest(deployment="chat", generation=0, idempotency_key="b")
            await refused(fleet.admin.Rollback(rollback, timeout=20), "on rank 1, which is drained: `eplb undrain 1` first")
            settings = await undrain(fleet, 1)
            assert not settings.drained_rank_ids
            for _ in range(2):
                fleet.report(fleet.skewed(hot=5))
            await until(lambda: held(fleet, 1) - {-1}, "the next plan that pays to use the rank")

    async def _newest(fleet: Fleet, than: int) -> bool:
        status = await status_of(fleet)
        return status.live_generation > than and status.state == "ready"

    run(scenario())


def test_a_rollout_that_is_open_is_withdrawn_before_the_drain_begins_vllm_35227() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Fleet(address, slots=4) as fleet:
            await reach(fleet, "ready")
            fleet.hold_flips = True
            for _ in range(2):
                fleet.report(fleet.skewed())
            await until(lambda: all(rank.armed_id for rank in fleet.ranks), "an armed chunk")
            reply = await drain(fleet, node="node1")
            assert list(reply.rank_ids) == [2, 3]
            stopped = await generation_of(fleet, 1, STOPPED)
            assert "drain node node1" in stopped.stop_reason
            assert fleet.live_generations == {0}
            fleet.hold_flips = False
            fleet.vote()
            await generation_of(fleet, reply.generation, ACTIVE)
            await safe(fleet, 2, 3)
            assert held(fleet, 2) == held(fleet, 3) == {-1}

    run(scenario())


def test_an_order_that_was_stored_by_a_planner_that_died_is_carried_out_by_the_next() -> None:
    async def scenario() -> None:
        store = MemoryStore(lambda: 0.0)
        async with planner(store) as (service, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            assert service.planner is not None
            deployment = service.planner.deployment("chat")
            stored = Settings(mode="observe", policy="greedy", drained=(2,))
            await deployment.commit({documents.SETTINGS: documents.encode(stored)})
        async with planner(store, store__owner="another") as (_, address), Fleet(address) as fleet:
            await safe(fleet, 2)
            assert held(fleet, 2) == {-1}
            await generation_of(fleet, 1, ACTIVE)

    run(scenario())


def test_a_drain_that_ranks_refuse_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_service.planner.standing.RETRY_S", 0.2)

    async def scenario() -> None:
        async with planner(rollout__tries_max="1") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            for rank in fleet.ranks:
                rank.closed_id = 1 << 62  # refuses every chunk
            reply = await drain(fleet, 1)
            assert reply.generation == 1
            await generation_of(fleet, 1, STOPPED)
            status = await status_of(fleet)
            assert status.drains[0].state == "draining"
            await generation_of(fleet, 2, STOPPED)
            for rank in fleet.ranks:
                rank.closed_id = 0
            await safe(fleet, 1)

    run(scenario())


def test_the_same_key_gives_the_same_answer_and_a_second_order_finds_nothing_to_do() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            first = await drain(fleet, 3, key="a")
            await safe(fleet, 3)
            again = await drain(fleet, 3, key="a")
            assert (again.generation, again.verdict) == (first.generation, first.verdict)
            later = await drain(fleet, 3, key="b")
            assert later.generation == 0
            assert "nothing is left to move" in later.verdict.reason
            await refused(drain(fleet, 2, key="a"), "was used before to drain rank 3")

    run(scenario())


def test_imbalance_is_that_of_the_ranks_that_serve_experts() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            await drain(fleet, 3)
            await safe(fleet, 3)
            fleet.report(np.full((3, 8), 6000, np.int64))

            async def seen() -> admin_pb2.DeploymentStatus | None:
                status = await status_of(fleet)
                return status if status.HasField("imbalance") else None

            status = await until_true(seen, "a window")
            busiest = max(sum(6000 / row.count(expert) for expert in row[:3] if expert >= 0) for row in _by_rank(fleet))
            assert status.imbalance.worst_layer == pytest.approx(busiest / (8 * 6000 / 3))

    def _by_rank(fleet: Fleet) -> list[list[int]]:
        rows = [list(row) for row in fleet.ranks[0].rows.values()]
        return [row[first : first + 3] + row[:first] + row[first + 3 :] for row in rows for first in (0, 3, 6)]

    run(scenario())


class FillingSolver(InlineSolver):
    """Plans as the solver's process does, slots filled where that is asked for."""

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        plan = run_policy(load_policy(policy), dataclasses.replace(problem, time_limit_s=deadline_s))
        return verify(problem, plan, policy=policy, solve_s=0.0)


def test_an_engine_that_knows_no_empty_slot_keeps_copies_on_the_drained_rank_and_is_told_so() -> None:
    async def scenario() -> None:
        service = Service(config_of(), store=FlakyStore(), solver=FillingSolver())  # type: ignore[arg-type]
        address = (await service.start()).address
        try:
            async with Engine(address, timeout_s=30.0) as engine:
                await engine.ask(engine.even())
                reply = await drain(engine, 1)
                assert reply.generation == 1
                (view,) = reply.drains
                assert (view.state, view.experts_alone) == ("draining", 6)
                told = await engine.ask(engine.even())
                assert told.move
                assert told.rows is not None
                assert (told.rows >= 0).all()
                assert np.array_equal(told.rows[:, 3:6], engine.linear()[:, 3:6])
                elsewhere = np.delete(told.rows, slice(3, 6), axis=1)
                assert all(set(row) == set(range(8)) for row in elsewhere.tolist())
                await engine.ask(engine.even())
                status = await engine.admin.Status(admin_pb2.StatusRequest(deployment=engine.deployment))
                (view,) = status.deployments[0].drains
                assert view.state == "safe_to_stop"
                assert "the engine knows no empty slot" in view.reason
                # plans for balance leave the rank as it is
                told = await engine.ask_until_move(engine.skewed())
                assert told.rows is not None
                assert np.array_equal(told.rows[:, 3:6], engine.linear()[:, 3:6])
        finally:
            await service.stop()

    run(scenario())


def test_what_a_later_release_wrote_among_drained_ranks_costs_the_lead_not_a_wrong_plan() -> None:
    """Settings that cannot be read are named, never guessed: a rank that is to stay empty must not be filled."""

    async def scenario() -> None:
        store = MemoryStore(lambda: 0.0)
        async with planner(store) as (service, address), Fleet(address) as fleet:
            await reach(fleet, "ready")
            assert service.planner is not None
            broken = b'{"mode":"observe","policy":"greedy","drained":"all"}'
            await service.planner.deployment("chat").commit({documents.SETTINGS: broken})
        async with planner(store, store__owner="another") as (service, address), Fleet(address) as fleet:
            assert service.planner is not None
            leading = service.planner.deployment(DeploymentId("chat")).leading
            await until(lambda: "drained is 'all'" in leading.why_not, "the document to be named")

    run(scenario())
