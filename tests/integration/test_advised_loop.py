"""Advised deployments with a store in memory: questions → window → gate → generation → answer → what the engine shows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from eplb_service.advice import Advice, map_digest
from eplb_service.app import Service
from eplb_service.generation_codec import decode_generation
from eplb_service.ids import DeploymentId
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.planner import documents
from eplb_service.planner.advised import AdvisedDeployment
from eplb_service.policy.base import PlanningProblem, Proposal
from eplb_service.policy.registry import load_policy
from eplb_service.policy.verify import verify
from eplb_service.policy.warm_up import run_policy, warm_up_policy
from eplb_service.rpc.convert import registration_to_pb
from eplb_service.rpc.convert_advice import advice_request_to_pb
from eplb_service.store.memory import MemoryStore
from tests.integration.advised_engine import Engine
from tests.integration.planner_fleet import Fleet, until, until_true
from tests.integration.test_planner_loop import FlakyStore, InlineSolver, config_of, planner, reach, run

ACTIVE = placement_pb2.GENERATION_STATE_ACTIVE
STOPPED = placement_pb2.GENERATION_STATE_STOPPED
PUBLISHED = placement_pb2.GENERATION_STATE_PUBLISHED
ROLLING_OUT = placement_pb2.GENERATION_STATE_ROLLING_OUT


@pytest.fixture(autouse=True, scope="module")
def warm_policies() -> Iterator[None]:
    """Compiled before any planner runs: `InlineSolver` plans on the planner's own loop, which must not stand still."""
    warm_up_policy(load_policy("greedy"), "greedy")
    return iter([None])


async def status(engine: Engine) -> admin_pb2.DeploymentStatus:
    reply = await engine.admin.Status(admin_pb2.StatusRequest(deployment=engine.deployment), timeout=5)
    found: admin_pb2.DeploymentStatus = reply.deployments[0]
    return found


async def generation(engine: Engine, number: int) -> placement_pb2.GenerationView:
    request = placement_pb2.GetPlacementRequest(deployment=engine.deployment, generation=number)
    found: placement_pb2.GenerationView = await engine.placement.GetPlacement(request, timeout=5)
    return found


async def refused(engine: Engine, code: grpc.StatusCode, *words: str) -> None:
    """The next question is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.ask(engine.skewed())
    assert caught.value.code() is code, caught.value.details()
    for word in words:
        assert word in (caught.value.details() or "")


async def rollback(engine: Engine, number: int, key: str = "k") -> admin_pb2.RebalanceResponse:
    request = admin_pb2.RollbackRequest(deployment=engine.deployment, generation=number, idempotency_key=key)
    found: admin_pb2.RebalanceResponse = await engine.admin.Rollback(request, timeout=5)
    return found


def test_engine_asks_is_told_follows_and_its_generation_is_recorded_and_judged() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (service, address), Engine(address) as engine:
            keeps = [await engine.ask(engine.skewed()) for _ in range(3)]
            assert [answer.move for answer in keeps] == [False] * 3
            assert "3 of 4 questions were asked under the live map alone" in keeps[-1].reason
            before = engine.rows
            told = await engine.ask(engine.skewed())
            assert (told.move, told.generation) == (True, 1)
            assert told.digest == map_digest(engine.rows)
            assert not np.array_equal(engine.rows, before)
            stored = await store.read(DeploymentId(engine.deployment), (documents.generation_name(1),))
            kept = decode_generation(stored[documents.generation_name(1)].value)
            assert map_digest(kept.placement.tables[0].physical_to_logical) == told.digest
            assert (await generation(engine, 1)).state == ROLLING_OUT
            view = await status(engine)
            assert (view.state, view.advised.told_generation) == ("rolling_out", 1)
            shown = await engine.ask(engine.skewed())
            assert (shown.move, shown.generation, shown.digest) == (False, 1, told.digest)
            record = await generation(engine, 1)
            assert record.state == ACTIVE
            assert 0 < record.rollout_s < 60
            for _ in range(4):
                await engine.ask(engine.skewed())
            record = await generation(engine, 1)
            assert record.outcome == "kept"
            assert record.observed.worst_layer < record.before.worst_layer
            view = await status(engine)
            assert (view.state, view.live_generation, view.advised.engine) == ("ready", 1, "vllm 0.33.0")
            assert dict(view.advised.answers) == {"keep": 8, "move": 1}
            assert view.advised.interval_s > 0
            assert not view.ranks
            live = await generation(engine, 0)
            assert list(live.layer_generations) == [1, 1, 1]
            diff = await engine.placement.DiffPlacements(
                placement_pb2.DiffPlacementsRequest(deployment=engine.deployment, from_generation=1, to_generation=0), timeout=5
            )
            assert not diff.changes
            text = service.metrics.registry
            assert text.get_sample_value("eplb_questions_total", {"deployment": engine.deployment, "answer": "move"}) == 1
            by = {"deployment": engine.deployment}
            await until(lambda: text.get_sample_value("eplb_last_question_age_seconds", by) is not None, "the gauge to be set")

    run(scenario())


def test_how_long_the_engine_took_is_recorded_and_prices_the_next_move_where_steps_waited() -> None:
    async def scenario() -> None:
        async with planner(FlakyStore()) as (service, address), Engine(address) as engine:
            await engine.ask_until_move(engine.skewed())
            engine.copied = (99, 3.0, True)  # of another planner's store: no generation of this one
            await engine.ask(engine.skewed())
            record = await generation(engine, 1)
            assert (record.state, record.copied_s) == (ACTIVE, 0.0)
            for seconds in (1.5, 2.5):  # what is known stays
                engine.copied = (1, seconds, True)
                await engine.ask(engine.skewed())
                record = await generation(engine, 1)
                assert (record.copied_s, record.copy_held_steps) == (1.5, True)
            assert service.planner is not None
            assert service.planner.deployment(engine.deployment).gauges().commit_stall_s == 1.5
            told = await engine.ask_until_move(engine.skewed(hot=5), most=30)
            engine.copied = (told.generation, 4.0, False)
            await engine.ask(engine.skewed(hot=5))
            record = await generation(engine, told.generation)
            assert (record.state, record.copied_s, record.copy_held_steps) == (ACTIVE, 4.0, False)
            assert service.planner.deployment(engine.deployment).gauges().commit_stall_s == 1.5

    run(scenario())


def test_engine_that_should_have_asked_by_now_is_seen_in_status_and_in_metrics() -> None:
    """vllm#57883: a load balancer that silently does nothing any more, while the engine's health says 200."""

    async def scenario() -> None:
        async with planner(FlakyStore()) as (service, address), Engine(address) as engine:
            by = {"deployment": engine.deployment}

            def silent() -> float | None:
                return service.metrics.registry.get_sample_value("eplb_engine_silent", by)

            await engine.ask_often(engine.even(), 3)
            await until(lambda: silent() == 0.0, "the gauge to say that the engine asks")
            assert service.planner is not None
            deployment = service.planner.deployment(engine.deployment)
            assert isinstance(deployment, AdvisedDeployment)
            asked = deployment.questions
            for index, time in enumerate(list(asked.times)):  # as if the last three questions had come 90 s apart, long ago
                asked.times[index] = time - 400.0 - 90.0 * (len(asked.times) - 1 - index)
            asked.expected_since_s = None
            view = await status(engine)
            assert view.state == "waiting"
            assert (
                "the engine asked every 90 s before: it runs no steps (an idle engine asks nothing), it is gone" in view.reason
            )
            await until(lambda: silent() == 1.0, "the gauge to say that it does not")
            await engine.ask(engine.even())
            assert (await status(engine)).state == "ready"
            await until(lambda: silent() == 0.0, "the gauge to say that it asks again")

    run(scenario())


def test_question_that_is_repeated_gets_the_same_answer_and_counts_once() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Engine(address, follows=False) as engine:
            told = await engine.ask_until_move(engine.skewed())
            accepted = (await status(engine)).windows_accepted
            again = await engine.ask(engine.skewed(), again=True)
            assert (again.move, again.generation, again.digest, again.reason) == (True, 1, told.digest, told.reason)
            assert (await status(engine)).windows_accepted == accepted
            engine.sequence -= 2
            late = await engine.ask(engine.skewed(), again=True)
            assert not late.move
            assert "came after" in late.reason

    run(scenario())


def test_modes_pause_and_pin_keep_and_say_why() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Engine(address) as engine:
            answer = await engine.ask_often(engine.skewed(), 5)
            assert not answer.move
            assert answer.reason.startswith("keep: mode observe; the gate said move: mean over layers")
            assert (await status(engine)).last_verdict.move
            await engine.admin.Pause(admin_pb2.PauseRequest(deployment=engine.deployment, reason="load test"), timeout=5)
            assert "is paused (load test)" in (await engine.ask(engine.skewed())).reason
            await engine.admin.Resume(admin_pb2.ResumeRequest(deployment=engine.deployment), timeout=5)
            await engine.admin.SetMode(admin_pb2.SetModeRequest(deployment=engine.deployment, mode="pinned"), timeout=5)
            assert "is pinned" in (await engine.ask(engine.skewed())).reason
            await engine.admin.SetMode(admin_pb2.SetModeRequest(deployment=engine.deployment, mode="auto"), timeout=5)
            assert (await engine.ask(engine.skewed())).move

    run(scenario())


def test_orders_are_published_at_once_and_told_at_the_next_question_without_the_gate() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Engine(address) as engine:
            linear = engine.rows
            for _ in range(4):
                await engine.ask(engine.skewed())
            plan = await engine.admin.Plan(admin_pb2.PlanRequest(deployment=engine.deployment), timeout=10)
            assert plan.verdict.move
            order = admin_pb2.RebalanceRequest(deployment=engine.deployment, idempotency_key="r")
            assert (await engine.admin.Rebalance(order, timeout=10)).generation == 1
            assert (await generation(engine, 1)).state == PUBLISHED
            assert (await status(engine)).reason == "generation 1 is the answer to the next question"
            assert (await engine.ask(engine.skewed())).generation == 1
            # Undone before the engine shows it: it is stopped, and counts once it is shown.
            assert (await rollback(engine, 0)).generation == 2
            assert (await rollback(engine, 0)).generation == 2  # the same key
            assert (await generation(engine, 1)).state == STOPPED
            told = await engine.ask(engine.skewed())
            assert (told.move, told.generation, told.digest) == (True, 2, map_digest(linear))
            assert (await generation(engine, 1)).state == ACTIVE
            await engine.ask(engine.skewed())
            assert (await generation(engine, 2)).state == ACTIVE
            assert (await generation(engine, 1)).state == placement_pb2.GENERATION_STATE_SUPERSEDED
            with pytest.raises(grpc.aio.AioRpcError, match="has no generation 9"):
                await rollback(engine, 9, "other")

    run(scenario())


def test_order_that_another_map_overtook_is_not_told() -> None:
    async def scenario() -> None:
        async with planner(planning__mode="observe") as (_, address), Engine(address) as engine:
            for _ in range(4):
                await engine.ask(engine.skewed())
            order = admin_pb2.RebalanceRequest(deployment=engine.deployment, idempotency_key="r")
            await engine.admin.Rebalance(order, timeout=10)
            engine.rows = np.ascontiguousarray(engine.rows[:, ::-1])
            answer = await engine.ask(engine.skewed())
            assert not answer.move
            record = await generation(engine, 1)
            assert record.state == STOPPED
            assert "another map than it was planned from" in record.stop_reason
            assert "moved by itself" in (await status(engine)).reason or (await status(engine)).live_generation == 0

    run(scenario())


def test_engine_that_does_not_follow_is_left_alone_and_the_record_says_so() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Engine(address, follows=False) as engine:
            await engine.ask_until_move(engine.skewed())
            again = await engine.ask(engine.skewed())
            assert (again.move, again.generation) == (True, 1)
            assert "(told once before)" in again.reason
            after = [await engine.ask(engine.skewed()) for _ in range(5)]
            assert [answer.move for answer in after] == [False] * 4 + [True]
            assert "the engine did not follow" in after[0].reason
            assert after[-1].generation == 2
            record = await generation(engine, 1)
            assert record.state == STOPPED
            assert "did not follow" in record.stop_reason

    run(scenario())


def test_restart_own_move_and_another_shape_are_taken_up_and_told() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Engine(address) as engine:
            await engine.ask_until_move(engine.skewed())
            await engine.ask(engine.skewed())
            assert (await status(engine)).live_generation == 1
            engine.restarted(origin=78)
            assert not (await engine.ask(engine.skewed())).move
            view = await status(engine)
            assert view.live_generation == 0
            assert "the engine restarted: 3 of 3 layers are other than generation 1" in view.reason
            told = await engine.ask_until_move(engine.skewed())
            assert told.generation == 2  # numbers never go back
            old = dataclasses.replace(engine, origin=77)
            async with old:
                await refused(old, grpc.StatusCode.FAILED_PRECONDITION, "another process asks for this deployment")
            async with engine.with_layers(2) as smaller:
                smaller.origin = 79
                answer = await smaller.ask(smaller.skewed())
                assert (answer.move, answer.generation) == (False, 0)
                assert "another layer_ids" in (await generation(smaller, 2)).stop_reason
                assert (await smaller.ask_until_move(smaller.skewed())).generation == 3

    run(scenario())


def test_generation_that_makes_things_worse_is_taken_back_in_an_answer() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Engine(address) as engine:
            linear = engine.rows
            await engine.ask_until_move(engine.skewed())
            # the load that the map as loaded balances, and the new one does not
            answer = await engine.ask_until_move(engine.even(), 12)
            assert (answer.generation, answer.digest) == (2, map_digest(linear)), answer.reason
            assert "generation 1 is rolled back: worse by imbalance" in answer.reason
            await engine.ask(engine.even())
            assert (await generation(engine, 2)).state == ACTIVE
            assert (await generation(engine, 1)).outcome == "worse"

    run(scenario())


def test_planner_that_starts_anew_goes_on_where_its_predecessor_was() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Engine(address) as engine:
            told = await engine.ask_until_move(engine.skewed())
        async with planner(store) as (_, address):
            engine.target = address
            async with engine:
                view = await status(engine)
                assert (view.advised.engine, view.state) == ("vllm 0.33.0", "waiting")
                assert view.live_generation == 0
                shown = await engine.ask(engine.skewed())
                assert (shown.move, shown.generation, shown.digest) == (False, 1, told.digest)
                assert (await generation(engine, 1)).state == ACTIVE
                assert (await engine.ask_until_move(engine.skewed(1))).generation == 2  # its windows count
                await engine.ask(engine.skewed(1))
                assert (await rollback(engine, 0)).generation == 3
        async with planner(store) as (_, address):  # an order that was not told yet
            engine.target = address
            async with engine:
                assert (await engine.ask(engine.skewed())).generation == 3

    run(scenario())


@pytest.mark.parametrize("shows", [True, False])
def test_what_a_predecessor_decided_long_ago_is_not_told_but_counts_where_the_engine_shows_it(shows: bool) -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (_, address), Engine(address, follows=shows) as engine:
            await engine.ask_until_move(engine.skewed())
        async with planner(store, rollout__resume_age_s="0") as (_, address):
            engine.target = address
            async with engine:
                assert "rollout.resume_age_s" in (await generation(engine, 1)).stop_reason
                answer = await engine.ask(engine.skewed())
                assert (answer.move, answer.generation) == (False, int(shows))
                assert (await generation(engine, 1)).state == (ACTIVE if shows else STOPPED)

    run(scenario())


def test_store_that_is_away_keeps_the_map_and_comes_back() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (service, address), Engine(address, timeout_s=1.0) as engine:
            for _ in range(3):
                await engine.ask(engine.skewed())
            store.is_away = True
            answer = await engine.ask(engine.skewed())
            assert not answer.move
            assert "stor" in answer.reason
            service.health.note("taken away")
            answer = await engine.ask(engine.skewed())
            assert "the store does not answer" in answer.reason
            store.is_away = False
            service.health.note("")
            told = await engine.ask_until_move(engine.skewed())
            await engine.ask(engine.skewed())
            assert (await generation(engine, told.generation)).state == ACTIVE

    run(scenario())


def test_planner_that_does_not_lead_says_who_does() -> None:
    async def scenario() -> None:
        store = MemoryStore(asyncio.get_running_loop().time)
        async with (
            planner(store, store__owner="first") as (_, address),
            planner(store, store__owner="second") as (_, other),
            Engine(address) as engine,
        ):
            await engine.ask(engine.skewed())
            async with dataclasses.replace(engine, target=other) as stray:
                await refused(stray, grpc.StatusCode.UNAVAILABLE, "does not lead vllm-chat", "first")
            assert not (await engine.ask(engine.skewed())).move

    run(scenario())


class SlowSolver(InlineSolver):
    """Plans once it may."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.num_plans = 0

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        self.num_plans += 1
        await self.go.wait()
        return await super().solve(problem, policy, deadline_s)


def test_plan_that_takes_longer_than_the_engine_waits_is_kept_for_the_next_question() -> None:
    async def scenario() -> None:
        solver = SlowSolver()
        service = Service(config_of(), store=FlakyStore(), solver=solver)  # type: ignore[arg-type]
        address = (await service.start()).address
        try:
            async with Engine(address, timeout_s=0.5) as engine:
                answer = await engine.ask_often(engine.skewed(), 4)
                assert not answer.move
                assert "planning takes longer than the engine waits" in answer.reason
                assert "the plan is kept for the next question" in answer.reason
                solver.go.set()
                engine.timeout_s = 5.0
                assert (await engine.ask(engine.skewed())).generation == 1
                assert solver.num_plans == 1
        finally:
            await service.stop()

    run(scenario())


def test_kept_plan_is_not_told_under_another_load() -> None:
    async def scenario() -> None:
        solver = SlowSolver()
        service = Service(config_of(), store=FlakyStore(), solver=solver)  # type: ignore[arg-type]
        address = (await service.start()).address
        try:
            async with Engine(address, timeout_s=0.5) as engine:
                await engine.ask_often(engine.skewed(), 4)
                solver.go.set()
                await engine.admin.Plan(admin_pb2.PlanRequest(deployment=engine.deployment), timeout=5)  # comes after it
                engine.timeout_s = 5.0
                answer = await engine.ask(100 * engine.skewed(5))
                assert solver.num_plans == 3  # planned anew
                assert answer.generation == 1
                assert answer.rows is not None
                assert (answer.rows == 5).sum() > (answer.rows == 0).sum()
        finally:
            await service.stop()

    run(scenario())


def test_groups_of_the_engine_are_kept_on_their_nodes_unless_the_operator_says_otherwise() -> None:
    def groups_split(answer: Advice) -> int:
        assert answer.rows is not None
        halves = answer.rows.reshape(3, 2, -1) // 4  # two groups of four experts, two nodes
        return sum(
            len({node for node in range(2) if (halves[layer, node] == group).any()}) > 1
            for layer in range(3)
            for group in range(2)
        )

    async def told(**more: Any) -> Advice:
        async with planner(**more) as (_, address), Engine(address, num_groups=2) as engine:
            return await engine.ask_until_move(engine.skewed())

    async def scenario() -> None:
        assert groups_split(await told()) == 0
        assert groups_split(await told(planning__num_groups="1")) > 0

    run(scenario())


@pytest.mark.parametrize("dispatch", ["even", "nearest"])
def test_engines_of_other_dispatch_are_told_maps_without_two_copies_on_a_rank(dispatch: str) -> None:
    """SGLang's loader fills only the first of two slots of a rank that hold one expert."""

    async def scenario() -> None:
        async with planner() as (_, address), Engine(address, dispatch=dispatch) as engine:
            told = await engine.ask_until_move(engine.skewed())
            assert told.rows is not None
            for rank in told.rows.reshape(-1, engine.slots):
                assert len(set(rank.tolist())) == engine.slots

    run(scenario())


class MinmoveSolver(InlineSolver):
    """Plans as the solver's process does; `holes`: empty slots that the policy leaves where nothing forbids it."""

    holes = 0

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        free = dataclasses.replace(problem, constraints=dataclasses.replace(problem.constraints, fill_slots=False))
        self.holes = int((run_policy(load_policy(policy), free).physical_to_logical < 0).sum())
        raw = run_policy(load_policy(policy), problem)
        return verify(problem, raw, policy=policy, solve_s=0.0)


def test_engine_whose_map_has_no_empty_slot_is_told_none_and_one_that_has_some_may_be() -> None:
    async def scenario() -> None:
        solver = MinmoveSolver()
        service = Service(config_of(planning__policy="minmove"), store=FlakyStore(), solver=solver)  # type: ignore[arg-type]
        address = (await service.start()).address
        load = np.round(np.exp(np.random.default_rng(0).normal(0, 0.8, (3, 16))) * 10_000)
        try:
            async with Engine(address, num_logical=16, slots=5, timeout_s=30.0) as engine:
                told = await engine.ask_until_move(load)
                assert solver.holes > 0  # else this shows nothing
                assert told.rows is not None
                assert (told.rows >= 0).all()
            async with Engine(address, deployment="holed", num_logical=16, slots=5, timeout_s=30.0) as engine:
                engine.rows[:, -1] = -1
                told = await engine.ask_until_move(load)
                assert told.rows is not None
                assert (told.rows < 0).any()
        finally:
            await service.stop()

    run(scenario())


def test_moves_without_a_price_are_kept_until_somebody_gives_one() -> None:
    async def asked(**more: str) -> Advice:
        async with planner(**more) as (_, address), Engine(address, expert_bytes=()) as engine:
            return await engine.ask_often(engine.skewed(), 4)

    async def scenario() -> None:
        answer = await asked()
        assert not answer.move
        assert "does not say how large its experts are" in answer.reason
        assert "give planning.expert_bytes" in answer.reason
        assert (await asked(planning__expert_bytes="1000")).move

    run(scenario())


def test_load_of_unknown_steps_is_no_gain_of_seconds() -> None:
    async def asked(horizon_steps: int | None) -> Advice:
        config = config_of()
        config = dataclasses.replace(config, cost=dataclasses.replace(config.cost, horizon_steps=horizon_steps))
        service = Service(config, store=FlakyStore(), solver=InlineSolver())  # type: ignore[arg-type]
        address = (await service.start()).address
        try:
            async with Engine(address, steps=0) as engine:
                return await engine.ask_often(engine.skewed(), 4)
        finally:
            await service.stop()

    async def scenario() -> None:
        answer = await asked(None)
        assert not answer.move
        assert "give cost.horizon_steps" in answer.reason
        assert (await asked(10_000)).move

    run(scenario())


def test_names_of_linked_and_of_advised_deployments_are_not_mixed() -> None:
    async def scenario() -> None:
        async with planner() as (_, address), Engine(address) as engine, Fleet(address) as fleet:
            await reach(fleet, "ready")
            await engine.ask(engine.skewed())
            async with dataclasses.replace(engine, deployment=fleet.deployment) as stray:
                await refused(stray, grpc.StatusCode.FAILED_PRECONDITION, "ranks that link", "another name")
            rank = fleet.registration(fleet.ranks[0])
            request = registration_to_pb(dataclasses.replace(rank, deployment=DeploymentId(engine.deployment)))
            with pytest.raises(grpc.aio.AioRpcError, match="is advised"):
                await fleet.agent.Register(request, timeout=5)

    run(scenario())


def test_planner_that_comes_to_lead_a_deployment_of_linked_ranks_takes_no_questions_for_it() -> None:
    """Hazard: it heard of the name from an engine first, and would write over what the ranks' planner stored."""

    async def scenario() -> None:
        store = MemoryStore(asyncio.get_running_loop().time)
        async with planner(store, store__owner="second") as (_, other):
            async with planner(store, store__owner="first") as (_, address), Fleet(address) as fleet:
                await reach(fleet, "ready")
                async with Engine(other, deployment=fleet.deployment) as engine:
                    await refused(engine, grpc.StatusCode.UNAVAILABLE, "first")
            before = await store.read(DeploymentId(fleet.deployment), (documents.LIVE,))
            async with engine:
                await until_true(lambda: leads(engine), "the second planner to lead")
                await refused(engine, grpc.StatusCode.FAILED_PRECONDITION, "ranks that link", "another name")
            assert await store.read(DeploymentId(fleet.deployment), (documents.LIVE,)) == before

    async def leads(engine: Engine) -> bool:
        return (await status(engine)).epoch > 0

    run(scenario())


def test_damaged_record_of_the_asker_costs_its_history_and_not_the_lead() -> None:
    async def scenario() -> None:
        store = FlakyStore()
        async with planner(store) as (service, address), Engine(address) as engine:
            await engine.ask_until_move(engine.skewed())
            assert service.planner is not None
            deployment = service.planner.deployment(engine.deployment)
            await deployment.commit({documents.ADVISED: b'{"engine": "vllm", "asker": {}}'})
        async with planner(store) as (_, address):
            engine.target = address
            async with engine:
                answer = await engine.ask(engine.skewed())
                assert (answer.move, answer.generation) == (False, 0)
                assert "other layers, ranks or slots" in (await generation(engine, 1)).stop_reason
                assert (await engine.ask_until_move(engine.skewed(3))).generation == 2

    run(scenario())


def test_engine_whose_call_ends_early_still_finds_its_answer() -> None:
    """Hazard: the agent process hangs up between publish and answer; the question comes again."""

    async def scenario() -> None:
        solver = SlowSolver()
        service = Service(config_of(), store=FlakyStore(), solver=solver)  # type: ignore[arg-type]
        address = (await service.start()).address
        try:
            async with Engine(address, follows=False) as engine:
                for _ in range(3):
                    await engine.ask(engine.skewed())
                engine.sequence += 1
                request = engine.question(engine.skewed())
                call = engine.adviser.Advise(advice_request_to_pb(request), timeout=5)
                await until(lambda: solver.num_plans, "a plan to begin")
                call.cancel()
                solver.go.set()
                again = await engine.ask(engine.skewed(), again=True)
                assert (again.move, again.generation) == (True, 1)
                assert solver.num_plans == 1
        finally:
            await service.stop()

    run(scenario())
