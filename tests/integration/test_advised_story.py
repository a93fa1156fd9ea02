"""Long random stories of an engine and its planner, with orders, restarts and lost answers: what must hold whatever happens."""

from __future__ import annotations

import random

import grpc
import numpy as np

from eplb_service.advice import map_digest
from eplb_service.generation_codec import decode_generation
from eplb_service.ids import DeploymentId
from eplb_service.pb.v1 import admin_pb2, placement_pb2
from eplb_service.planner import documents
from eplb_service.policy.registry import load_policy
from eplb_service.policy.warm_up import warm_up_policy
from tests.integration.advised_engine import Engine
from tests.integration.test_advised_loop import ACTIVE, ROLLING_OUT, STOPPED
from tests.integration.test_planner_loop import FlakyStore, planner, run

SUPERSEDED = placement_pb2.GENERATION_STATE_SUPERSEDED

QUESTIONS_EACH_LIFE = 12
LIVES = 3
SEEDS = 4


class Story:
    """One engine, and what was seen of it. shown: digests of all maps that it ever asked with."""

    def __init__(self, engine: Engine, store: FlakyStore, rng: random.Random) -> None:
        self.engine, self.store, self.rng = engine, store, rng
        self.shown: set[int] = set()
        self.told: dict[int, int] = {}
        self.goal = engine.rows
        self.next_origin = engine.origin
        self.ends: set[int] = set()

    async def step(self) -> None:
        engine, rng = self.engine, self.rng
        engine.follows = False
        act = rng.choices(
            ["follow", "ignore", "part", "restart", "astray", "repeat", "rollback", "rebalance", "pause"],
            [8, 4, 2, 1, 1, 2, 1, 1, 1],
        )[0]
        if act == "follow":
            engine.rows = self.goal.copy()
        elif act == "part":
            layer = rng.randrange(engine.num_layers)
            engine.rows = engine.rows.copy()
            engine.rows[layer] = self.goal[layer]
        elif act == "restart":
            self.next_origin += 1
            engine.restarted(self.next_origin)
        elif act == "astray":
            engine.rows = np.roll(engine.rows, rng.randrange(1, 5), axis=1)
        elif act in ("rollback", "rebalance", "pause") and self.shown:
            await self._order(act)
        load = engine.skewed(rng.randrange(engine.num_logical))
        again = act == "repeat" and engine.sequence > 0 and map_digest(engine.rows) in self.shown
        self.shown.add(map_digest(engine.rows))
        answer = await engine.ask(load, again=again)
        if not answer.move:
            assert answer.digest == map_digest(engine.rows)
            return
        assert answer.rows is not None
        self.goal = answer.rows
        # Only what is stored is told, and never another map under the same number, or a lower number than before.
        name = documents.generation_name(answer.generation)
        stored = await self.store.read(DeploymentId(engine.deployment), (name,))
        rows = decode_generation(stored[name].value).placement.tables[0].physical_to_logical
        assert map_digest(rows) == answer.digest == self.told.setdefault(answer.generation, answer.digest)
        assert answer.generation == max(self.told)

    async def _order(self, act: str) -> None:
        name, key = self.engine.deployment, str(self.rng.random())
        admin = self.engine.admin
        try:
            if act == "pause":
                await admin.Pause(admin_pb2.PauseRequest(deployment=name, reason="why not"), timeout=5)
                await admin.Resume(admin_pb2.ResumeRequest(deployment=name), timeout=5)
            elif act == "rollback":
                await admin.Rollback(admin_pb2.RollbackRequest(deployment=name, idempotency_key=key), timeout=5)
            else:
                await admin.Rebalance(admin_pb2.RebalanceRequest(deployment=name, idempotency_key=key, force=True), timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:  # a reasoned no (no window yet, …)
                raise

    async def check(self) -> None:
        """The records against what was seen."""
        engine = self.engine
        request = placement_pb2.ListGenerationsRequest(deployment=engine.deployment, limit=1000)
        views = list((await engine.placement.ListGenerations(request, timeout=5)).generations)
        numbers = [view.generation for view in views]
        assert numbers == sorted(set(numbers), reverse=True)
        for view in views:
            self.ends.add(view.state)
            whole = await engine.placement.GetPlacement(
                placement_pb2.GetPlacementRequest(deployment=engine.deployment, generation=view.generation), timeout=5
            )
            table = whole.placement.tables[0].physical_to_logical
            digest = map_digest(np.frombuffer(table.data, "<i4").reshape(tuple(table.shape)))
            if view.active_at_s:  # it was live at some time
                assert digest in self.shown, f"generation {view.generation} is active, and was never shown"
            if view.state == STOPPED:
                assert view.stop_reason
        live = await engine.placement.GetPlacement(placement_pb2.GetPlacementRequest(deployment=engine.deployment), timeout=5)
        table = live.placement.tables[0].physical_to_logical
        np.testing.assert_array_equal(np.frombuffer(table.data, "<i4").reshape(tuple(table.shape)), engine.rows)


def test_whatever_happens_only_what_is_stored_is_told_and_only_what_is_shown_is_active() -> None:
    warm_up_policy(load_policy("greedy"), "greedy")
    ends: set[int] = set()

    async def scenario(seed: int) -> None:
        rng, store = random.Random(seed), FlakyStore()
        story: Story | None = None
        for _ in range(LIVES):
            async with planner(store, gate__min_sub_windows="1") as (_, address):
                if story is None:
                    story = Story(Engine(address), store, rng)
                story.engine.target = address
                async with story.engine:
                    for _ in range(QUESTIONS_EACH_LIFE):
                        await story.step()
                    await story.check()
        assert story is not None
        ends.update(story.ends)

    for seed in range(SEEDS):
        print(f"seed {seed}")  # shown when the test fails
        run(scenario(seed))
    assert ends == {ROLLING_OUT, ACTIVE, STOPPED, SUPERSEDED}  # else this shows less than it says
