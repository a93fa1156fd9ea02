"""One soak: a whole fleet under requests and orders, one fault after another, and everything that was seen of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.engine.reference.messages import RankState
from eplb_service.errors import EplbError
from examples.tiny_moe.text import KINDS as TEXT_KINDS
from tests.integration.fault_checks import check_boundaries, check_maps, check_slots
from tests.integration.fault_fleet import Fault, Part
from tests.integration.fault_points import Hold
from tests.integration.whole_fleet import DEPLOYMENT, HELD_POSITION, TURN_S
from tests.soak.fleet import fleet_of
from tests.soak.holdings import Growth, Watch
from tests.soak.operator import Operator, Orders
from tests.soak.requests import Books
from tests.soak.schedule import STEADY_SHARE, Planned
from tests.soak.store_keys import keys_of

POINT_TIMEOUT_S = 6.0
"""After so long a fault comes where it comes: not every rollout passes every point, least of all while parts are away."""
END_TIMEOUT_S = 90.0
CALM_TIMEOUT_S = 240.0
SILENCE_MAX_S = 30.0
"""Longest that serving may stand still while no rank is hit or held: steps take milliseconds, on a busy machine more."""
PAUSE_AFTER_S = 15.0
SAMPLE_PERIOD_S = 1.0
ORACLE_BACKLOG_MAX = 64
VOTES_OFF_S = 3.0


@dataclass(slots=True)
class Outcome:
    """What a soak showed. wrong: everything that must not be, as sentences."""

    books: Books
    orders: Orders
    seconds: float = 0.0
    struck: Counter[tuple[Part, Fault]] = field(default_factory=Counter)
    at_points: Counter[str] = field(default_factory=Counter)
    missed_points: int = 0
    fleet_starts: int = 1
    joined: int = 0
    pauses: int = 0
    why_restarted: Counter[str] = field(default_factory=Counter)
    restart_s: list[float] = field(default_factory=list)
    part_restarts: dict[str, int] = field(default_factory=dict)
    tokens_checked: int = 0
    mismatches: int = 0
    growths: Sequence[Growth] = ()
    store_keys: str = ""
    left: Sequence[str] = ()
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Active:
    planned: Planned
    end: Callable[[], None]
    due_s: float


class Soak:
    """Runs one; `run` returns what was seen."""

    def __init__(
        self, faults: Sequence[Planned], *, ranks: int, minutes: float, survives: bool, say: Callable[[str], None]
    ) -> None:
        self._faults, self._ranks, self._say = faults, ranks, say
        self._pace_s = 60.0 * minutes / max(1, len(faults))
        self._books = Books()
        self._fleet = fleet_of(ranks, self._books, survives=survives)
        self._survives = survives
        self._operator = Operator(self._fleet.address, DEPLOYMENT)
        self._outcome = Outcome(self._books, self._operator.orders)
        self._active: list[_Active] = []
        self._held: Hold | None = None
        self._killed: set[int] = set()
        """Positions of ranks that this soak killed, since all were started."""
        self._down: set[int] = set()
        """Of them, those that may not come back yet."""
        self._blame: set[str] = set()
        self._watch: Watch | None = None
        self._sampled_s = 0.0
        self._votes_off_since: float | None = None
        self._ending = False

    def run(self) -> Outcome:
        """The whole of it. What breaks it off is in `wrong`, too."""
        begin = time.monotonic()
        outcome, fleet = self._outcome, self._fleet
        try:
            with fleet:
                fleet.start_service()
                self._operator.start()
                try:
                    self._strike_all()
                    self._end_well()
                finally:
                    self._operator.stop()
                    outcome.part_restarts = {part.name: part.restarts for part in fleet.parts}
                fleet.stop_ranks()
        except (EplbError, AssertionError) as error:
            outcome.wrong.append(f"broken off: {type(error).__name__}: {error}")
        outcome.left = fleet.all_left()
        outcome.wrong += [f"left behind: {what}" for what in outcome.left]
        outcome.wrong += [*self._books.hanging, *self._operator.orders.wrong]
        for during, stall_s in self._books.stalls_s.items():
            if during != "a rank" and stall_s > SILENCE_MAX_S:
                outcome.wrong.append(f"no token for {stall_s:.0f} s while {during} was hit")
        outcome.seconds = time.monotonic() - begin
        return outcome

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _strike_all(self) -> None:
        steady_from = len(self._faults) - int(len(self._faults) * STEADY_SHARE)
        begin = time.monotonic()
        for planned in self._faults:
            if planned.index == steady_from:
                self._end_faults()
                self._until(lambda: self._operator.is_quiet, "the planner to be ready before nothing is killed any more")
                self._watch = Watch()
            self._turn_until(begin + planned.index * self._pace_s)
            self._strike(planned)
            if planned.index % 10 == 9:
                self._say(self._progress(planned.index + 1))
        self._end_faults()

    def _strike(self, planned: Planned) -> None:
        """Wait for its place, let it begin, and, unless the next one overlaps, end."""
        kind = TEXT_KINDS[planned.victim % len(TEXT_KINDS)]
        self._fleet.traffic.kind = kind
        self._let_recover()
        earlier = list(self._active)
        hold = self._come_to(planned)
        fleet = self._fleet
        at_hook = hold is not None and planned.point.startswith("hook.")
        victim = HELD_POSITION if at_hook else self._victim_of(planned)
        self._blame.add("a rank" if planned.part is Part.RANK else "another part")
        end = fleet.strike(planned.part, planned.fault, victim=victim)
        if planned.fault is Fault.KILL:
            end = self._killed_rank(victim) if planned.part is Part.RANK else self._restarter(planned.part)
        self._outcome.struck[planned.part, planned.fault] += 1
        now = time.monotonic()
        self._active.append(_Active(planned, end, now + planned.lasts_s))
        if hold is not None:
            self._turn_until(now + planned.held_s)
            self._open(hold)
        for active in earlier:  # at most two overlap
            self._turn_until(active.due_s)
            self._end(active)
        if not planned.overlaps:
            self._turn_until(now + planned.lasts_s)
            self._end_faults()

    def _let_recover(self) -> None:
        """Faults pause while serving stands still for long, and without them it must go on.

        Experts that lived on a lost rank alone come back by the planner, which may start for longer than faults are apart.
        """
        serving = self._fleet.booked
        if serving.silence_s(time.monotonic()) > PAUSE_AFTER_S:
            self._outcome.pauses += 1
            self._end_faults()
            self._until(lambda: self._fleet.booked.silence_s(time.monotonic()) < 1.0, "serving to go on after the faults")

    def _victim_of(self, planned: Planned) -> int:
        """Position of a rank that lives, the planned one if it does."""
        order = [(planned.victim + step) % self._ranks for step in range(self._ranks)]
        return next((position for position in order if self._fleet.is_alive(position)), order[0])

    def _killed_rank(self, position: int) -> Callable[[], None]:
        self._killed.add(position)
        self._down.add(position)
        return lambda: self._down.discard(position)

    def _come_to(self, planned: Planned) -> Hold | None:
        """Wait for the point, which then is held, or for tokens."""
        if not planned.point:
            goal = self._books.tokens + planned.tokens
            deadline = time.monotonic() + POINT_TIMEOUT_S
            while self._books.tokens < goal and time.monotonic() < deadline:
                self._turn()
            return None
        hold = self._fleet.holds[planned.point]
        hold.shut()
        self._held = hold
        deadline = time.monotonic() + (POINT_TIMEOUT_S / 3 if self._active else POINT_TIMEOUT_S)
        while not hold.reached and self._held is hold:
            if time.monotonic() > deadline:
                self._outcome.missed_points += 1
                self._open(hold)
                return None
            self._turn()
        if self._held is not hold:
            return None
        self._outcome.at_points[planned.point] += 1
        if planned.point.startswith("hook."):
            self._blame.add("a rank")
        return hold

    def _open(self, hold: Hold) -> None:
        hold.open()
        self._held = None

    def _restarter(self, part: Part) -> Callable[[], None]:
        return lambda: self._fleet.let_restart(part)

    def _end(self, active: _Active) -> None:
        if active in self._active:
            self._active.remove(active)
            active.end()

    def _end_faults(self, *parts: Part) -> None:
        for active in list(self._active):
            if not parts or active.planned.part in parts:
                self._end(active)

    # ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        fleet, now = self._fleet, time.monotonic()
        fleet.turn()
        if fleet.is_lost:
            self._start_again()
            return
        self._outcome.joined += fleet.replace_lost(but=self._down)
        serving = fleet.booked
        serving.accepting = fleet.oracle.waiting < ORACLE_BACKLOG_MAX and not self._ending
        self._look_at_silence(now)
        serving.look_for_hanging(now)
        self._look_at_votes(now)
        if self._watch is not None and now - self._sampled_s >= SAMPLE_PERIOD_S:
            self._sampled_s = now
            self._watch.sample(now, self._long_living())

    def _look_at_silence(self, now: float) -> None:
        """Longest time without a token, by the worst that was wrong meanwhile."""
        silence = self._fleet.booked.silence_s(now)
        during = next((what for what in ("a rank", "another part") if what in self._blame), "nothing")
        self._books.note_stall(silence, during)
        if silence < 2 * TURN_S:
            self._blame = {"a rank" if active.planned.part is Part.RANK else "another part" for active in self._active}
            held = self._held is not None and self._held.reached and self._held.point.startswith("hook.")
            if held or self._fleet.booked.num_ranks < self._ranks:
                self._blame.add("a rank")

    def _look_at_votes(self, now: float) -> None:
        """Ranks whose votes ended serve on, but no generation goes live until their engine starts again."""
        status = self._operator.status
        off = status is not None and any(not rank.voting for rank in status.ranks)
        if not off or self._active:
            self._votes_off_since = None
        elif self._votes_off_since is None:
            self._votes_off_since = now
        elif now - self._votes_off_since > VOTES_OFF_S:
            self._restart("votes had ended, serving went on")

    def _start_again(self) -> None:
        """A rank is gone: every other one must end, too, and say why. Then all start again."""
        fleet, outcome = self._fleet, self._outcome
        self._end_faults(Part.RANK)
        if self._held is not None:
            self._open(self._held)
        deadline = time.monotonic() + END_TIMEOUT_S
        while len(fleet.ends_of_ranks()) < self._ranks and time.monotonic() < deadline:
            fleet.turn()
        ends = fleet.ends_of_ranks()
        for position in range(self._ranks):
            if position not in ends:
                outcome.wrong.append(f"rank {position} hangs: it lives {END_TIMEOUT_S:.0f} s after another had ended")
            elif position not in self._killed and not self._survives and not fleet.ranks.reason(position):
                outcome.wrong.append(f"rank {position} ended without a reason: {ends[position]}")
        if self._survives:
            self._restart(fleet.ranks.why_ended)
        else:
            self._restart("a rank was killed" if self._killed else "a rank was away past a deadline")

    def _restart(self, why: str) -> None:
        fleet, outcome = self._fleet, self._outcome
        check_boundaries(fleet.served)
        fleet.booked.fail_all()
        begin = time.monotonic()
        fleet.restart_ranks()
        outcome.restart_s.append(time.monotonic() - begin)
        outcome.why_restarted[why] += 1
        outcome.fleet_starts += 1
        self._killed.clear()
        self._down.clear()
        self._blame.clear()
        self._votes_off_since = None

    def _turn_until(self, until: float) -> None:
        while time.monotonic() < until:
            self._turn()

    def _until(self, done: Callable[[], bool], what: str, timeout_s: float = CALM_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}\n{self._fleet.last_words()}"
            self._turn()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_well(self) -> None:
        """The faults are over: generations go live again, every request ends, every invariant holds, nothing grew."""
        fleet, outcome, operator = self._fleet, self._outcome, self._operator
        committed = operator.orders.committed
        self._until(lambda: operator.orders.committed >= committed + 2, "two more generations after the last fault")
        self._until(lambda: len(fleet.present) == self._ranks == fleet.booked.num_ranks, "all ranks to be there")
        operator.ordering = False
        looks = operator.looks
        self._until(lambda: operator.is_quiet and operator.looks > looks + 1, "the last rollout to end")
        if self._watch is not None:
            outcome.growths = self._watch.growths(self._long_living())
            outcome.wrong += [growth.wrong for growth in outcome.growths if growth.wrong]
        self._ending = True
        self._until(lambda: not any(fleet.serving.running), "the end of the requests under way")
        self._until(lambda: all(i.state is RankState.IDLE for i in fleet.serving.inspect()), "the engine to be idle")
        inspections = fleet.serving.inspect()
        check_maps(inspections)
        check_slots(inspections)
        check_boundaries(fleet.served)
        self._until(lambda: not fleet.oracle.waiting, "the oracle")
        outcome.tokens_checked, outcome.mismatches = fleet.oracle.tokens_checked, fleet.oracle.mismatches
        if outcome.mismatches:
            first = next(judged for judged in fleet.oracle.judged if judged.mismatches)
            outcome.wrong.append(f"{outcome.mismatches} tokens differ from the unbalanced model's; first: {first}")
        if not operator.orders.committed:
            outcome.wrong.append("no generation went live")
        keys = keys_of(fleet.folder / "store.sock", DEPLOYMENT, generations=max(operator.history.digests, default=0))
        outcome.store_keys = keys.told
        outcome.wrong += keys.wrong
        outcome.wrong += [f"lies about: {what}" for what in fleet.left_behind()]

    def _long_living(self) -> dict[str, int]:
        fleet = self._fleet
        ranks = {f"rank {position}": fleet.rank_pid(position) for position in range(self._ranks)}
        return {part.name: part.pid for part in fleet.parts} | ranks

    def _progress(self, count: int) -> str:
        books, orders = self._books, self._operator.orders
        return (
            f"{count:4} of {len(self._faults)} faults; {books.answered} requests answered, {books.failed} failed;"
            f" {orders.committed} generations live, {self._outcome.fleet_starts - 1} restarts of the ranks;"
            f" {self._fleet.oracle.mismatches} of {self._fleet.oracle.tokens_checked} tokens differ"
        )
