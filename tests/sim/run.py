"""One simulated run: faults for a while, then calm; what must hold is checked all along, and that all resolves at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from agent.hook.chunk_events import ChunkState
from eplb_service.generation import LiveMap, as_loaded
from eplb_service.rollout.events import Outcome, RolloutState
from tests.sim.checkers import Checkers
from tests.sim.engine import Engine
from tests.sim.faults import FAULTS, FAULTS_S, Incident, incidents_of
from tests.sim.model import Shape
from tests.sim.network import FaultyNetwork
from tests.sim.planner import SETTINGS, PlannerProcess
from tests.sim.profile import Fixed, Profile
from tests.sim.rank import Pace, layers_of
from tests.sim.staging import CopyFaults
from tests.sim.store import SimStore, StoreClient
from tests.sim.wires import AgentWires, StraightWires
from tests.sim.world import Clock, ViolationError, World

RESOLVED_WITHIN_S = 60.0
SAVE_S = 2.5


class Run:
    """A deployment, its planners and its faults, all of one seed.

    without: incidents left out. faulty_s: from when until when the network is faulty. Both only to make a failure smaller.
    fixed: what of its profile a search for one rule's violation does not leave to the seed.
    """

    def __init__(
        self,
        seed: int,
        *,
        without: frozenset[int] = frozenset(),
        faulty_s: tuple[float, float] = (0.0, FAULTS_S),
        fixed: Fixed | None = None,
    ) -> None:
        self.seed, self.without, self.faulty_s, self.fixed = seed, without, faulty_s, fixed or {}
        self.world = World(seed)
        self.profile = profile = Profile.drawn(self.world.chance("profile"), tuple(FAULTS), self.fixed)
        chance = self.world.chance("run")
        self.checkers = Checkers(self.world)
        self.world.after_event = self.checkers.settle
        self.shape = Shape.drawn(chance, num_ranks=profile.num_ranks, is_weighted=seed % 2 == 1)
        self.network = FaultyNetwork(self.world, faulty_s, profile)
        self.store = SimStore(self.world)
        self.store.lease_s = profile.lease_s
        pace = Pace(chance.choice([0.12, 0.25]), self.world.chance("steps"))
        copies = CopyFaults(
            self.world.chance("copies"),
            fail_share=profile.fail_share,
            corrupt_share=profile.corrupt_share,
            memory_share=profile.memory_share,
            slow_share=profile.slow_copy_share,
            quiesce_s=profile.quiesce_s,
        )
        self.engine = Engine(self.world, self.shape, self.checkers, pace=pace, copy_faults=copies)
        self.engine.map_to_boot = self._map_to_boot
        self.engine.can_reform = profile.can_reform
        self.engine.has_backups = profile.can_reform and profile.has_backups
        self.planners: list[PlannerProcess] = []
        self.engine.boot(as_loaded(self.shape.linear()))
        self.wires: AgentWires | StraightWires = (
            AgentWires(self.world, self.engine, self.network, self.planners)
            if profile.is_through_agents
            else StraightWires(self.world, self.engine, self.network, self.planners)
        )
        self.engine.wires = self.wires
        self.world.counts["through agent processes"] += profile.is_through_agents
        self._boots = self.world.chance("boots")
        self.new_planner()
        self.incidents = incidents_of(self.world.chance("incidents"), profile)
        for incident in self.incidents:
            if incident.index not in without:
                self.world.after(incident.at_s, lambda incident=incident: self._happen(incident))  # type: ignore[misc]
        self._save()

    @property
    def leader(self) -> PlannerProcess:
        """The newest planner process."""
        return self.planners[-1]

    def new_planner(self) -> None:
        """Another planner process starts; the ones before are not the newest any more."""
        for planner in self.planners:
            planner.is_current = False
        name = f"P{len(self.planners) + 1}"
        chance = self.world.chance(name)
        clock = Clock(self.world, offset_s=1000 * chance.random(), rate=chance.choice([0.9, 1.0, 1.0, 1.1]))
        planner = PlannerProcess(
            self.world,
            self.shape,
            self.checkers,
            self.store,
            StoreClient(self.store, self.network, name),
            self.wires,
            name=name,
            chance=chance,
            clock=clock,
        )
        planner.settings = replace(SETTINGS, stage_timeout_s=self.profile.stage_timeout_s)
        planner.plan_s, planner.cancel_share = self.profile.plan_s, self.profile.cancel_share
        planner.on_end = lambda: self._planner_ended(planner)
        self.planners.append(planner)
        self.forget()
        planner.start()

    def forget(self) -> None:
        """Numbers that the store, the newest planner and ranks all lost may be given again."""
        known = [self.leader.taken() if self.leader.is_alive else 0]
        for rank in self.engine.ranks:
            known += [rank.machine.ledger.generation_seen, *(live.generation for live in rank.routed.values())]
        self.checkers.forget_numbers(max(known), self.store.generations())

    def go(self) -> Counter[str]:
        """Run it. Raises ViolationError; what is wrong in the simulation itself comes as its cause."""
        try:
            self.world.run(FAULTS_S)
            self._calm()
        except ViolationError:
            raise
        except Exception as error:
            raise ViolationError(f"{type(error).__name__}: {error}") from error
        return self.world.counts

    # ── what happens by itself ───────────────────────────────────────────────────────────────────────────────────────────

    def _happen(self, incident: Incident) -> None:
        if not self.world.is_calm:
            incident.happen(self)

    def _save(self) -> None:
        self.store.save()
        self.world.after(SAVE_S, self._save)

    def _planner_ended(self, planner: PlannerProcess) -> None:
        self.forget()
        if isinstance(self.wires, AgentWires):
            self.wires.planner_ended(planner)

    def _map_to_boot(self) -> LiveMap:
        """What rank 0 gets when it asks once: what a planner last held for live, what another rank had, or nothing."""
        self.world.after(0.0, self.forget)
        kind = self._boots.choice(["linear", "survivor", "planner"])
        is_whole = self.engine.shape.rank_ids == self.shape.rank_ids and not any(self.checkers.lost.values())
        if not is_whole or any(rank.is_new for rank in self.engine.ranks):
            return as_loaded(self.shape.linear())
        if kind == "planner":
            for planner in reversed(self.planners):
                live = planner.rollout.live if planner.is_alive and planner.rollout is not None else None
                if live is not None and live.placement.tables[0].rank_ids == self.shape.rank_ids:
                    return live
        if kind == "linear":
            return as_loaded(self.shape.linear())
        layers = layers_of(self.engine.ranks[0])
        return self.shape.live_map(layers)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _calm(self) -> None:
        """No more faults: the leader gets a generation through, all ranks are free, and weights follow the map."""
        self.world.is_calm = True
        self.world.note("── calm ──")
        self.store.is_away = False
        for rank in self.engine.ranks:
            self.engine.resume(rank)
        if not self.leader.is_alive:
            self.new_planner()
        begun = {planner.name: len(planner.finished) for planner in self.planners}
        until_s = self.world.now + RESOLVED_WITHIN_S
        while (leader := self._resolved_by(begun)) is None:
            if self.world.now >= until_s:
                states = [
                    f"{planner.name} {planner.rollout.progress() if planner.rollout is not None else 'does not lead'}"
                    for planner in self.planners
                    if planner.is_alive
                ]
                self.world.require(False, f"invariant 6: not resolved within {RESOLVED_WITHIN_S:g} s of calm: {states}")
            self.world.run(self.world.now + 0.25)
        self.checkers.check_all()
        live = leader.rollout.live if leader.rollout is not None else None
        for rank in self.engine.ranks:
            same = live is not None and rank.digest == live.digest
            self.world.require(same, f"rank {rank.address.rank_id} does not route by the leader's live map")

    def _resolved_by(self, begun: dict[str, int]) -> PlannerProcess | None:
        """Who leads, once a generation of its went live since the calm began and every rank is free; else None."""
        if (
            not self.engine.is_running
            or self.engine.forming is not None
            or any(rank.machine.state is not ChunkState.IDLE for rank in self.engine.ranks)
        ):
            return None
        for planner in self.planners:
            rollout = planner.rollout
            if rollout is not None and planner.epoch == self.store.state.fence.epoch and rollout.state is RolloutState.IDLE:
                finished = planner.finished[begun[planner.name] :]
                return planner if any(end.outcome is Outcome.ACTIVE for end in finished) else None
        return None
