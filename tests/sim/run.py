"""One simulated run: faults for a while, then calm; what must hold is checked all along, and that all resolves at the end."""

from __future__ import annotations

from collections import Counter

from agent.hook.chunk_events import ChunkState
from eplb_service.rollout.events import Outcome, RolloutState
from tests.sim.fleet import Fleet
from tests.sim.planner import PlannerProcess, SimStore
from tests.sim.world import ViolationError, World

FAULTS_S = 14.0
RESOLVED_WITHIN_S = 60.0


class Run:
    """A deployment, its planners and its faults, all of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        self.fleet = Fleet(self.world)
        self.store = SimStore()
        self.planners: list[PlannerProcess] = []
        self._new_planner()
        self.fleet.on_formed.append(self._forget)
        chance = self.world.random
        faults = [
            self._take_over,
            self._kill_planner,
            self._lose_store,
            self._crash_rank,
            self._idle,
            self._break_stream,
            self._reload,
        ]
        for fault in chance.sample(faults, chance.randint(0, len(faults))):
            for _ in range(chance.randint(1, 2)):
                self.world.after(chance.uniform(0.5, FAULTS_S), fault)

    @property
    def leader(self) -> PlannerProcess:
        return self.planners[-1]

    def go(self) -> Counter[str]:
        """Run it. Raises ViolationError with the trace, the seed and the command that replays it."""
        try:
            self.world.run(FAULTS_S)
            self._calm()
        except Exception as error:
            trace = "\n".join(self.world.trace)
            raise ViolationError(
                f"{error}\n\n{trace}\n\nseed {self.seed} at {self.world.now:.3f} s: {error!r}\n"
                f"replay: python -m tests.sim --seed {self.seed}"
            ) from error
        return self.world.counts

    def _calm(self) -> None:
        """No more faults: the leader gets a generation through, all ranks are free, and weights follow the map."""
        self.world.is_calm = True
        self.world.note("── calm ──")
        if not self.leader.is_alive:
            self._new_planner()
        begun = len(self.leader.finished)
        leader = self.leader

        def is_resolved() -> bool:
            done = any(finished.outcome is Outcome.ACTIVE for finished in leader.finished[begun:])
            free = all(rank.machine.state is ChunkState.IDLE for rank in self.fleet.ranks)
            return done and free and leader.rollout.state is RolloutState.IDLE and self.fleet.is_running

        resolved = self.world.run(self.world.now + RESOLVED_WITHIN_S, is_resolved)
        progress = leader.rollout.progress()
        self.world.require(resolved, f"not resolved within {RESOLVED_WITHIN_S} s of calm: {progress}")
        live = leader.rollout.live
        for rank in self.fleet.ranks:
            same = live is not None and rank.digest == live.digest
            self.world.require(same, f"rank {rank.address.rank_id} does not route by the leader's live map")
        for rank in self.fleet.ranks:
            self.fleet._check_weights(rank, self.fleet.rank_ids.index(rank.address.rank_id) * self.fleet.slots_per_rank)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_planner(self) -> None:
        for planner in self.planners:
            planner.is_current = False
        self.planners.append(PlannerProcess(self.world, self.fleet, self.store, f"P{len(self.planners) + 1}"))
        self._forget()

    def _forget(self) -> None:
        leader = self.leader
        floor = leader.generation_floor() if leader.is_alive else 0
        self.fleet.forget_generations(max(self.store.latest, floor))

    def _take_over(self) -> None:
        """Another planner leads while the old one lives on."""
        self.world.counts["take-overs"] += 1
        self._new_planner()

    def _kill_planner(self) -> None:
        self.world.counts["planners killed"] += 1
        self.leader.die("killed")
        self._forget()
        self.world.after(self.world.random.uniform(0.1, 3.0), lambda: None if self.leader.is_alive else self._new_planner())

    def _lose_store(self) -> None:
        if self.leader.has_adopted:
            self.world.counts["stores lost"] += 1
            self.world.note("the store loses everything")
            self.store.lose()
            self._forget()

    def _crash_rank(self) -> None:
        self.fleet.crash()

    def _idle(self) -> None:
        self.fleet.idle_until_s = self.world.now + self.world.random.uniform(0.5, 5.0)

    def _break_stream(self) -> None:
        if self.leader.is_alive:
            self.leader.break_stream()

    def _reload(self) -> None:
        """Weights change under us, on all ranks before the same step, while no vote is open."""
        busy = (ChunkState.VOTING, ChunkState.COMMITTED, ChunkState.ARMED)
        level = len({rank.boundary for rank in self.fleet.ranks}) == 1
        if level and not any(rank.machine.state in busy for rank in self.fleet.ranks):
            self.world.counts["reloads"] += 1
            self.fleet.weights_version += 1
