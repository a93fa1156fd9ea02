"""The parts of a scenario, and what each kind of line does to them."""

from __future__ import annotations

from agent.hook import chunk_events as hook
from eplb_service.generation import as_loaded
from eplb_service.ids import RankId
from tests.scenarios.mailbox import InstantNetwork, Letter, Mailbox, MailboxWires, Which
from tests.sim.checkers import Checkers
from tests.sim.engine import Engine
from tests.sim.model import LAYERS, Shape
from tests.sim.planner import PlannerProcess
from tests.sim.rank import Rank, layers_of
from tests.sim.staging import CopyFaults
from tests.sim.store import LEASE_S, SimStore, StoreClient
from tests.sim.world import Clock, World

TICK_S = 0.1
DELIVERIES_MAX = 2000
FORMED_WITHIN_S = 1.5


class ScenarioError(Exception):
    """A line cannot be, or what it expects is not so."""


class Stage:
    """The parts of one scenario, and what each line does to them."""

    def __init__(self) -> None:
        self.world = World(0)
        self.checkers = Checkers(self.world)
        self.world.after_event = self.checkers.settle
        self.mailbox = Mailbox()
        self.store = SimStore(self.world)
        self.planners: dict[str, PlannerProcess] = {}
        self._alive: list[PlannerProcess] = []
        self._turn = 0
        self._copies = CopyFaults()
        self._set_up(Shape(num_ranks=3, slots_per_rank=2, num_logical=5, vote_period=1))

    def _set_up(self, shape: Shape) -> None:
        self.engine = Engine(self.world, shape, self.checkers, pace=None, copy_faults=self._copies)
        self.wires = MailboxWires(self.engine, self.mailbox, self._alive)
        self.engine.wires = self.wires
        self.engine.boot(as_loaded(shape.linear()))

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def ranks(self, numbers: str) -> list[Rank]:
        """Those of a list, or all."""
        if numbers in ("", "all"):
            return list(self.engine.ranks)
        return [self.engine.known[RankId(int(part))] for part in numbers.split(",")]

    def set_up(self, ranks: str, period: str) -> None:
        """The fleet is another one."""
        number = int(ranks)
        self._set_up(Shape(num_ranks=number, slots_per_rank=2, num_logical=2 * number - 1, vote_period=int(period)))

    def start_planner(self, name: str, learns: str) -> None:
        """A planner process; it leads if the store lets it."""
        client = StoreClient(self.store, InstantNetwork(), name)
        parts = (self.world, self.engine.shape, self.checkers, self.store, client, self.wires)
        planner = PlannerProcess(*parts, name=name, chance=None, clock=Clock(self.world))
        self.planners[name] = planner
        self._alive.append(planner)
        planner.start()
        if learns:
            self.deliver("", "", "")
            self.expect_planner(name, "idle")

    def publish(self, name: str, layers: str) -> None:
        """The next generation: rows of some layers, turned round."""
        planner = self.planners[name]
        rollout = planner.rollout
        if rollout is None or rollout.live is None:
            raise ScenarioError(f"{name} does not know what is live")
        self._turn += 1
        changed = LAYERS[: int(layers or 1)]
        planner.publish(self.engine.shape.turned_target(rollout.live, changed, self._turn))

    def publish_swap(self, name: str, one: str, other: str) -> None:
        """The next generation: two slots of the first layer change places."""
        planner = self.planners[name]
        if planner.rollout is None or planner.rollout.live is None:
            raise ScenarioError(f"{name} does not know what is live")
        planner.publish(self.engine.shape.swapped_target(planner.rollout.live, int(one), int(other)))

    def cancel(self, name: str) -> None:
        """An operator stops the rollout, with its open chunk."""
        self.planners[name].cancel(withdraw=True)

    def kill_planner(self, name: str) -> None:
        """SIGKILL."""
        self.planners[name].die("killed")

    def lapse(self, name: str) -> None:
        """Its lease runs out, and it does not know."""
        self.store.clock.jump(2 * LEASE_S)

    def detach(self, name: str, ranks: str) -> None:
        """Streams end; what is under way on them is lost."""
        planner = self.planners[name]
        for rank in self.ranks(ranks):
            self.wires.detached.add((name, rank.address.rank_id))
            self.mailbox.take(Which(to=frozenset({str(rank.address.rank_id)}), of=frozenset({name})), released=True)
            self.mailbox.take(Which(to=frozenset({name}), of=frozenset({str(rank.address.rank_id)})), released=True)
            planner.detach(rank.address, "its agent process died")

    def attach(self, name: str, ranks: str) -> None:
        """An agent process is there again: its hooks say where they stand."""
        for rank in self.ranks(ranks):
            self.wires.attach(self.planners[name], rank)
            self.engine.handle(rank, hook.Attached())

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, kind: str, to: str, of: str) -> None:
        """All that fits; without words until nothing is under way."""
        which = _which(kind, to, of)
        everything = which == Which()
        for _ in range(DELIVERIES_MAX):
            letters = self.mailbox.take(which)
            for letter in letters:
                self._arrive(letter)
            if not letters and not everything:
                raise ScenarioError(
                    f"nothing of that is under way, but {[_words(letter) for letter in self.mailbox.under_way]}"
                )
            if not letters or not everything:
                return
        raise ScenarioError(f"still no quiet after {DELIVERIES_MAX} rounds")

    def lose(self, kind: str, to: str, of: str) -> None:
        """It never arrives."""
        if not self.mailbox.take(_which(kind, to, of), released=True):
            raise ScenarioError(self._nothing_of_that())

    def _nothing_of_that(self) -> str:
        return f"nothing of that is under way, but {[_words(letter) for letter in self.mailbox.under_way]}"

    def hold(self, kind: str, to: str, of: str) -> None:
        """From now on it stays under way."""
        self.mailbox.held.append(_which(kind, to, of))

    def release(self, kind: str) -> None:
        """What was held arrives: all, or what was held under a kind."""
        self.mailbox.held = [held for held in self.mailbox.held if kind and held.kind != kind]
        for letter in self.mailbox.take(Which(kind), released=True):
            self._arrive(letter)

    def repeat(self, kind: str, to: str, of: str) -> None:
        """The first letter of that kind ever sent to each arrives once more."""
        first: dict[str, Letter] = {}
        for letter in self.mailbox.sent:
            if _which(kind, to, of).fits(letter):
                first.setdefault(letter.target, letter)
        if not first:
            raise ScenarioError("nothing of that was ever sent")
        for letter in first.values():
            self._arrive(letter)

    def _arrive(self, letter: Letter) -> None:
        letter.deliver()
        self.checkers.settle()

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, ranks: str, times: str) -> None:
        """Boundaries are passed; nobody gets more than one ahead."""
        for _ in range(int(times or 1)):
            for rank in self.ranks(ranks):
                if rank.is_dead or rank.is_stopped:
                    if ranks:
                        raise ScenarioError(f"rank {rank.address.rank_id} runs no step")
                    continue
                if rank.boundary > min(peer.boundary for peer in self.engine.ranks):
                    raise ScenarioError(f"rank {rank.address.rank_id} is ahead: its step waits for the others")
                self.engine.pass_boundary(rank)
                self.checkers.settle()

    def end_copies(self, ranks: str) -> None:
        """All bytes are there."""
        for rank in self.ranks(ranks):
            if ranks or rank.worker.is_copying:
                rank.worker.end_now()

    def fail_copy(self, ranks: str, why: str) -> None:
        """A copy ends without."""
        for rank in self.ranks(ranks):
            rank.worker.end_now(why)

    def corrupt_copy(self, ranks: str) -> None:
        """The next copy brings other bytes."""
        self._copies.next_corrupt |= {rank.position for rank in self.ranks(ranks)}

    def late_bytes(self, ranks: str) -> None:
        """Every copy that did not end yet writes once more."""
        for rank in self.ranks(ranks):
            rank.worker.write_late()

    def learn_vote(self, ranks: str) -> None:
        """The waiter thread knows how the vote ended."""
        for rank in self.ranks(ranks):
            self.engine.resolve_vote(rank)

    def lose_vote(self, ranks: str) -> None:
        """The wait for the vote ends in an error."""
        for rank in self.ranks(ranks):
            self.engine.give_up_vote(rank)

    def idle(self) -> None:
        """No steps; every rank notices."""
        for rank in self.ranks(""):
            self.engine.handle(rank, hook.EngineIdle())

    def wait(self, seconds: str) -> None:
        """Time passes; timers run, messages stay where they are."""
        until_s = self.world.now + float(seconds)
        while self.world.now < until_s - 1e-9:
            self.world.run(min(until_s, self.world.now + TICK_S))
            self.engine.tick()
            self.checkers.settle()

    def befall(self, ranks: str, what: str) -> None:
        """Something happens to a process of the engine."""
        for rank in self.ranks(ranks):
            match what:
                case "stop" | "stops":
                    self.engine.stop(rank)
                case "go on" | "goes on":
                    self.engine.resume(rank)
                case "leave" | "leaves":
                    self.engine.leave(rank)
                case _:
                    self.engine.die(rank, "killed")

    def can_reform(self, backups: str) -> None:
        """Of an engine that forms its group again in place."""
        self.engine.can_reform, self.engine.has_backups = True, bool(backups)
        self.restart("")

    def form(self, joining: str) -> None:
        """The ranks that are left form a group, with others that have empty slots; nobody dies meanwhile."""
        self.begin_forming(joining)
        self.wait(str(FORMED_WITHIN_S))
        _require(self.engine.forming is None, "the group did not form")

    def begin_forming(self, joining: str) -> None:
        """They begin to."""
        self.engine.form(int(joining or 0))

    def expect_lost(self, number: str) -> None:
        """Experts without a slot, over all layers, in the tables of every rank."""
        for rank in self.ranks(""):
            rows = [set(live.row) - {-1} for live in rank.routed.values()]
            found = sum(self.engine.shape.num_logical - len(row) for row in rows)
            _require(found == int(number), f"{found} experts have no slot on rank {rank.address.rank_id}")

    def publish_whole(self, name: str) -> None:
        """The next generation: every layer's experts one after another, from the first slot on."""
        planner = self.planners[name]
        if planner.rollout is None or planner.rollout.live is None:
            raise ScenarioError(f"{name} does not know what is live")
        planner.publish(self.engine.shape.whole_target(planner.rollout.live))

    def restart(self, live: str) -> None:
        """A new life of the engine."""
        layers = layers_of(self.engine.ranks[0])
        for rank in self.engine.ranks:
            self.engine.die(rank, "the engine restarts")
        self.engine.boot(self.engine.shape.live_map(layers) if live else as_loaded(self.engine.shape.linear()))

    def reload(self) -> None:
        """Other weights, before the next step of every rank."""
        self.engine.reload_weights()

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def change_store(self, what: str) -> None:
        """Something happens to the store."""
        match what:
            case "goes away" | "comes back":
                self.store.is_away = what == "goes away"
            case "is saved":
                self.store.save()
            case "goes back":
                self.store.go_back()
            case _:
                self.store.lose()
                self.checkers.forget_numbers(max(rank.machine.ledger.generation_seen for rank in self.engine.ranks))

    def write_document(self, number: str) -> None:
        """Somebody else writes where a generation would be."""
        self.store.taken_by_another(int(number))

    # ── what must be so ──────────────────────────────────────────────────────────────────────────────────────────────────

    def expect_ranks(self, ranks: str, state: str) -> None:
        """Where the chunk machines are."""
        for rank in self.ranks(ranks):
            _require(rank.machine.state.value == state, f"rank {rank.address.rank_id} is {rank.machine.state.value}")

    def expect_route(self, ranks: str, number: str) -> None:
        """Which generation the first layer is routed by."""
        for rank in self.ranks(ranks):
            found = rank.routed[LAYERS[0]].generation
            _require(found == int(number), f"rank {rank.address.rank_id} routes generation {found}")

    def expect_off(self, ranks: str, text: str) -> None:
        """Why ranks take part in no rollout."""
        for rank in self.ranks(ranks):
            _require(text in rank.machine.off_reason, f"rank {rank.address.rank_id}: {rank.machine.off_reason!r}")

    def expect_ended(self, ranks: str) -> None:
        """Ranks that run no further step."""
        for rank in self.ranks(ranks):
            _require(rank.is_dead, f"rank {rank.address.rank_id} runs on")

    def expect_planner(self, name: str, state: str) -> None:
        """Where the rollout machine is."""
        rollout = self.planners[name].rollout
        found = rollout.state.value if rollout is not None else "without the lead"
        _require(found == state, f"{name} is {found}")

    def expect_finished(self, name: str, outcome: str, text: str) -> None:
        """How the last rollout ended, and why."""
        finished = self.planners[name].finished
        _require(bool(finished), f"{name} ended none")
        last = finished[-1]
        _require(last.outcome.value == outcome and text in last.reason, f"{last.outcome.value}: {last.reason}")

    def expect_reason(self, name: str, text: str) -> None:
        """What a person reads while the machine waits."""
        rollout = self.planners[name].rollout
        progress = rollout.progress() if rollout is not None else None
        said = f"{progress.last_error} {progress.hold} waits for {progress.waiting_for}" if progress is not None else ""
        _require(text in said, said)

    def expect_said(self, ranks: str, negated: str, kind: str) -> None:
        """What ranks ever sent."""
        for rank in self.ranks(ranks):
            said = any(letter.source == str(rank.address.rank_id) and letter.kind == kind for letter in self.mailbox.sent)
            _require(said != bool(negated), f"rank {rank.address.rank_id} said {'' if said else 'no '}{kind}")

    def expect_sent(self, name: str, kind: str) -> None:
        """What a planner never sent."""
        _require(not any(letter.source == name and letter.kind == kind for letter in self.mailbox.sent), f"{name} sent {kind}")

    def expect_serving(self) -> None:
        """Every rank passes a boundary."""
        before = [rank.boundary for rank in self.engine.ranks]
        self.step("", "")
        _require(all(rank.boundary > old for rank, old in zip(self.engine.ranks, before, strict=True)), "a rank runs no step")

    def expect_epoch(self, name: str, number: str) -> None:
        """In which epoch a planner leads."""
        _require(self.planners[name].epoch == int(number), f"{name} leads in epoch {self.planners[name].epoch}")


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise ScenarioError(found)


def _words(letter: Letter) -> str:
    return f"{letter.kind} {letter.source} → {letter.target}"


def _which(kind: str, to: str, of: str) -> Which:
    return Which(kind, frozenset(to.split(",")) - {""}, frozenset(of.split(",")) - {""})
