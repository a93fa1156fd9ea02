"""What befalls a run, and when: each incident has a source of chance of its own, so that any of them can be left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.hook.chunk_events import ChunkState
from tests.sim.profile import Profile
from tests.sim.store import STORE
from tests.sim.wires import AgentWires
from tests.sim.world import Clock

if TYPE_CHECKING:
    from tests.sim.run import Run

FAULTS_S = 14.0


@dataclass(frozen=True)
class Incident:
    """One fault of a run."""

    index: int
    at_s: float
    kind: str

    def happen(self, run: Run) -> None:
        """Now."""
        run.world.counts[self.kind] += 1
        FAULTS[self.kind](run, run.world.chance(f"incident {self.index}"))


def incidents_of(chance: random.Random, profile: Profile) -> list[Incident]:
    """Those of one run."""
    return [
        Incident(index, chance.uniform(0.5, FAULTS_S), chance.choice(profile.kinds)) for index in range(profile.num_incidents)
    ]


# ── planners ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _take_over(run: Run, chance: random.Random) -> None:
    """Another planner leads while the old one lives on: it hears of it late, by the store or by ranks."""
    old = run.leader
    run.new_planner()
    if chance.random() < 0.5:
        run.store.clock.jump(4 * run.profile.lease_s)  # the lease of the old one is over
    else:
        run.network.cut(old.name, STORE, 4.0)


def _kill_planner(run: Run, chance: random.Random) -> None:
    run.leader.die("killed")
    run.world.after(chance.uniform(0.1, 3.0), lambda: None if run.leader.is_alive else run.new_planner())


def _cut_planner_off(run: Run, chance: random.Random) -> None:
    """Nothing passes between the planner and one node; a stream that is silent for too long ends."""
    planner, node, seconds = run.leader, run.shape.node_of(chance.randrange(2)), chance.uniform(0.3, 3.0)
    run.network.cut(planner.name, node, seconds)
    wires = run.wires
    if isinstance(wires, AgentWires) and seconds > 0.8:
        for stream in list(wires.agents[node].streams.values()):
            if stream.planner is planner:
                run.world.after(0.8, lambda stream=stream: wires.end_stream(stream, "no sign of life"))  # type: ignore[misc]


def _isolate_planner(run: Run, chance: random.Random) -> None:
    """Nothing passes between the planner and any node."""
    seconds = chance.uniform(0.5, 4.0)
    for node in sorted({run.shape.node_of(position) for position in range(run.shape.num_ranks)}):
        run.network.cut(run.leader.name, node, seconds)


def _cut_store_off(run: Run, chance: random.Random) -> None:
    run.network.cut(run.leader.name, STORE, chance.uniform(0.5, 4.0))


def _break_stream(run: Run, chance: random.Random) -> None:
    """An agent process dies, or a connection ends."""
    if run.leader.is_alive and run.engine.is_running:
        run.wires.break_stream(chance)


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lose_store(run: Run, _chance: random.Random) -> None:
    run.store.lose()
    run.forget()


def _leaders_of_one_epoch(run: Run, chance: random.Random) -> None:
    """The store loses everything, and another planner gets the epoch that the old one has."""
    _lose_store(run, chance)
    run.world.after(0.3 * chance.random(), lambda: None if run.world.is_calm else run.new_planner())


def _deaf_leader(run: Run, chance: random.Random) -> None:
    """A machine with the store and a rank on it is lost: leaders of one epoch, of which the new one soon hears no rank."""
    _leaders_of_one_epoch(run, chance)
    _crash_rank(run, chance)
    run.world.after(chance.uniform(0.5, 1.5), lambda: None if run.world.is_calm else _isolate_planner(run, chance))


def _store_goes_back(run: Run, _chance: random.Random) -> None:
    if run.store.go_back():
        run.forget()


def _store_away(run: Run, chance: random.Random) -> None:
    run.store.is_away = True

    def back() -> None:
        run.store.is_away = False

    run.world.after(chance.uniform(0.5, 4.0), back)


def _conflict(run: Run, _chance: random.Random) -> None:
    """Somebody else's document is where the next generation would be."""
    run.store.taken_by_another(1 + max(run.store.newest, run.leader.floor()))


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _crash_rank(run: Run, chance: random.Random) -> None:
    if run.engine.is_running:
        run.engine.die(chance.choice(run.engine.ranks), "killed")
        run.engine.lose("a rank died", chance.uniform(*run.profile.restart_s))


def _crash_ranks(run: Run, chance: random.Random) -> None:
    """Several at once, the first of the group among them."""
    if run.engine.is_running:
        for rank in dict.fromkeys((run.engine.ranks[0], chance.choice(run.engine.ranks))):
            run.engine.die(rank, "killed")
        run.engine.lose("ranks died", chance.uniform(*run.profile.restart_s))


def _crash_while_forming(run: Run, chance: random.Random) -> None:
    """A rank dies, and another one while the group forms again."""
    _crash_rank(run, chance)
    run.engine.at_next_forming.append(lambda: None if run.world.is_calm else _crash_rank(run, chance))


def _join(run: Run, chance: random.Random) -> None:
    """One more rank, where the engine can form its group again."""
    if run.engine.is_running and run.engine.can_reform:
        run.engine.lose("a rank joins", chance.uniform(*run.profile.restart_s), joining=1)


def _stop_rank(run: Run, chance: random.Random) -> None:
    """SIGSTOP for a while: peers wait in lock-step, votes time out, and nobody says why."""
    if run.engine.is_running:
        rank = chance.choice(run.engine.ranks)
        run.engine.stop(rank)
        run.world.after(chance.choice([0.3, 1.0, 3.0, 5.0]), lambda: run.engine.resume(rank))


def _in_a_vote(fault: Callable[[Run, random.Random], None]) -> Callable[[Run, random.Random], None]:
    """The same, just after a rank cast an id, while others may not have."""

    def later(run: Run, chance: random.Random) -> None:
        run.engine.at_next_vote.append(lambda: None if run.world.is_calm else fault(run, chance))

    return later


def _leave(run: Run, chance: random.Random) -> None:
    if run.engine.is_running:
        run.engine.leave(chance.choice(run.engine.ranks))


def _idle(run: Run, chance: random.Random) -> None:
    run.engine.idle_until_s = run.world.now + chance.uniform(0.5, 5.0)


def _dummy_steps(run: Run, chance: random.Random) -> None:
    """No tokens anywhere on some ranks: short steps, that count like all others."""
    run.engine.dummy_until_s = run.world.now + chance.uniform(0.5, 3.0)


def _reload(run: Run, chance: random.Random) -> None:
    """Weights change under us. An adapter should not do that while a vote is open; if it does, ranks stop."""
    deciding = (ChunkState.VOTING, ChunkState.COMMITTED)
    if run.engine.is_running:
        votes = any(rank.machine.state in deciding for rank in run.engine.ranks)
        if not votes or chance.random() < 0.3:
            run.engine.reload_weights()


def _clock_jumps(run: Run, chance: random.Random) -> None:
    """A clock goes ahead at once: of a rank, a planner, an agent process or the store."""
    clocks: list[Clock] = [rank.clock for rank in run.engine.ranks] + [run.leader.clock, run.store.clock]
    if isinstance(run.wires, AgentWires):
        clocks += [agent.clock for agent in run.wires.agents.values()]
    run.world.note("── a clock jumps")
    chance.choice(clocks).jump(chance.choice([0.5, 2.0, 30.0]))


FAULTS: Mapping[str, Callable[[Run, random.Random], None]] = {
    "take-overs": _take_over,
    "planners killed": _kill_planner,
    "planners cut off": _cut_planner_off,
    "planners isolated": _isolate_planner,
    "store and rank lost, the leader deaf": _deaf_leader,
    "planners cut off the store": _cut_store_off,
    "streams broken": _break_stream,
    "stores lost": _lose_store,
    "leaders of one epoch": _leaders_of_one_epoch,
    "stores gone back": _store_goes_back,
    "stores away": _store_away,
    "documents of others": _conflict,
    "rank crashes": _crash_rank,
    "ranks stopped": _stop_rank,
    "several ranks crash": _crash_ranks,
    "rank crashes while the group forms": _crash_while_forming,
    "ranks that join": _join,
    "several ranks crash in a vote": _in_a_vote(_crash_ranks),
    "rank crashes in a vote": _in_a_vote(_crash_rank),
    "ranks stopped in a vote": _in_a_vote(_stop_rank),
    "ranks that leave": _leave,
    "idle engines": _idle,
    "dummy steps": _dummy_steps,
    "reloads": _reload,
    "clocks jumped": _clock_jumps,
}
"""By the name under which they are counted. Copies fail, corrupt and run out of memory by `staging.CopyFaults`."""
