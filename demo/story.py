"""The run: serves prompts that drift, lets the planner rebalance meanwhile, then proves what happened."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from demo.chronicle import Chronicle
from demo.ledger import Ledger
from demo.observer import Observer
from demo.oracle import OracleProcess
from demo.parts import DEPLOYMENT, NUM_EXPERTS, PLANNING_WINDOWS, WINDOW_STEPS, Service, start_ranks, start_service, topology_of
from demo.processes import ignore_interrupts
from demo.prove import FLIPS_MIN, Evidence, prove
from demo.result import DemoResult, Phase
from demo.screen import Screen
from demo.serving import Serving
from demo.traffic import Traffic
from eplb_service.errors import DeadlineError

INSPECT_PERIOD_S = 1.0
DRAIN_TIMEOUT_S = 60.0
JUDGE_TIMEOUT_S = 180.0
RANKS_STOP_S = 30.0
TICK_S = 0.05
ROUND_S = 12.0
ROUND_STEPS = 4 * PLANNING_WINDOWS * WINDOW_STEPS
"""Least time and steps for one kind of prompts when it is served on past `seconds`: a generation is planned from these
prompts, goes live and is compared before they change, however slow the machine is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `eplb demo` can be told. seconds: of serving, shared evenly by the kinds of prompts.

    generations_wanted: the proof compares so many generations on load that came after them; a machine that is slow or busy
    has them later than in `seconds`, and is then served on, at most `patience_s`, through the same kinds again.
    hook_factory: for negative controls only, see `start_ranks`.
    """

    ranks: int = 4
    seconds: float = 60.0
    policy: str = "minmove"
    keep_running: bool = False
    port: int = 0
    seed: int = 1
    in_flight: int = 8
    kinds: tuple[str, ...] = ("code", "logs", "prose")
    generations_wanted: int = FLIPS_MIN
    patience_s: float = 120.0
    hook_factory: str = ""


def run_story(options: DemoOptions, screen: Screen) -> DemoResult:
    """Run the demo. What must hold is in the result's checks. Raises EplbError when a part cannot be started or dies."""
    started = time.monotonic()
    with ExitStack() as stack:
        try:
            return _run_in(stack, options, screen, started)
        finally:
            ignore_interrupts()


def _run_in(stack: ExitStack, options: DemoOptions, screen: Screen, started: float) -> DemoResult:
    folder = Path(tempfile.mkdtemp(prefix="eplb-demo-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    oracle = OracleProcess()
    oracle.start()
    stack.callback(oracle.kill)
    screen.event("starting the embedded store, the planner and the agent process")
    service = start_service(folder, stack, policy=options.policy, port=options.port)
    screen.event(f"starting {options.ranks} ranks of the reference engine")
    ranks = start_ranks(folder, ranks=options.ranks, socket=service.socket, hook_factory=options.hook_factory)
    fleet = stack.enter_context(ranks)
    traffic = Traffic(seed=options.seed)
    clients = [fleet.client(position) for position in range(options.ranks)]
    serving = Serving(clients, traffic, in_flight=options.in_flight, finished=oracle.submit)
    stack.callback(serving.close)
    observer = Observer(service.address, DEPLOYMENT)
    observer.start()
    stack.callback(observer.stop)
    ledger = Ledger(
        model=fleet.config.model_name,
        num_logical=NUM_EXPERTS,
        topology=topology_of(fleet),
        planned_steps=PLANNING_WINDOWS * WINDOW_STEPS,
    )
    story = _Story(options, screen, service, serving, traffic, oracle, observer, ledger)
    result = story.run(setup_s=time.monotonic() - started)
    serving.close()
    fleet.stop(timeout_s=RANKS_STOP_S)
    return result


class _Story:
    """Serving, phase by phase, one turn at a time."""

    def __init__(
        self,
        options: DemoOptions,
        screen: Screen,
        service: Service,
        serving: Serving,
        traffic: Traffic,
        oracle: OracleProcess,
        observer: Observer,
        ledger: Ledger,
    ) -> None:
        self._options, self._screen, self._service = options, screen, service
        self._serving, self._traffic, self._oracle = serving, traffic, oracle
        self._observer, self._ledger = observer, ledger
        self._chronicle = Chronicle(screen)
        self._phases: list[Phase] = []
        self._begin = time.monotonic()
        self._inspected = 0.0

    def run(self, *, setup_s: float) -> DemoResult:
        """Serve every kind of prompts, drain, and prove."""
        options = self._options
        self._screen.view.phases = options.kinds
        for index, kind in enumerate(options.kinds, start=1):
            self._enter(kind)
            self._serve_until(options.seconds * index / len(options.kinds))
        self._serve_on()
        if options.keep_running:
            self._keep_running()
        self._end_phase()
        seconds = self._now
        self._inspect()
        self._screen.event("no new requests; finishing those under way")
        self._serving.accepting = False
        self._wait(lambda: not any(self._serving.running), DRAIN_TIMEOUT_S, "the end of the requests under way")
        inspections = self._serving.inspect()
        self._screen.event("every request is done; the oracle finishes its comparison")
        self._wait(lambda: not self._oracle.waiting, JUDGE_TIMEOUT_S, "the oracle's judgement")
        self._oracle.finish(JUDGE_TIMEOUT_S)
        result = self._result(seconds, setup_s)
        evidence = Evidence(self._serving, self._oracle, self._ledger, inspections, self._chronicle.generations)
        result.checks = prove(result, evidence)
        return result

    def _result(self, seconds: float, setup_s: float) -> DemoResult:
        return DemoResult(
            ranks=self._options.ranks,
            policy=self._options.policy,
            seconds=seconds,
            setup_s=setup_s,
            phases=self._phases,
            samples=self._chronicle.samples,
            generations=self._chronicle.rows(self._phases),
            comparisons=self._ledger.comparisons(),
            requests=self._serving.requests,
            tokens_served=self._serving.tokens,
            tokens_checked=self._oracle.tokens_checked,
            token_mismatches=self._oracle.mismatches,
            restarts={part.name: part.restarts for part in self._service.parts},
        )

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _enter(self, kind: str) -> None:
        if self._phases:
            self._end_phase()
            self._inspect()
            self._ledger.prompts_changed()
        self._phases.append(Phase(kind=kind, begin_s=self._now, end_s=self._now))
        self._traffic.kind = self._screen.view.phase = kind
        self._screen.event(f"prompts are now {kind}")

    def _end_phase(self) -> None:
        if self._phases:
            self._phases[-1] = replace(self._phases[-1], end_s=self._now)

    def _serve_until(self, seconds: float) -> None:
        while self._now < seconds:
            self._turn()

    def _serve_on(self) -> None:
        """Go through the kinds of prompts again until there are generations enough to prove anything by."""
        kinds, wanted = self._options.kinds, self._options.generations_wanted
        until_s = self._now + self._options.patience_s
        if len(self._ledger.comparisons()) < wanted:
            self._screen.event(
                f"served on until {wanted} generations can be compared, at most {self._options.patience_s:.0f} s"
            )
        for kind in itertools.cycle(kinds):
            while not self._round_over():
                if self._num_compared() >= wanted or self._now >= until_s:
                    return
                self._turn()
            self._enter(kind)

    def _round_over(self) -> bool:
        """Whether the prompts of now have been served long enough to change."""
        options = self._options
        least_s = max(ROUND_S, options.seconds / len(options.kinds))
        return (
            len(options.kinds) > 1
            and self._now - self._phases[-1].begin_s >= least_s
            and self._ledger.steps_since_change >= ROUND_STEPS
        )

    def _num_compared(self) -> int:
        return sum(not comparison.of_prompts_before for comparison in self._ledger.comparisons())

    def _wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what} did not come within {timeout_s:.0f} s")
            self._turn()

    def _keep_running(self) -> None:
        self._screen.event(f"kept running, try `eplb status --planner {self._service.address}`; Ctrl-C ends it with the proof")
        try:
            while True:
                self._turn()
        except KeyboardInterrupt:
            return

    def _turn(self) -> None:
        """Requests, supervision, what the planner says, the screen."""
        now = self._now
        self._serving.pump(now, wait_s=TICK_S)
        self._oracle.collect()
        for part in self._service.parts:
            if part.revive():
                self._screen.event(f"{part.name} died and was started again; serving went on")
        if now - self._inspected >= INSPECT_PERIOD_S:
            self._inspect()
        view = self._screen.view
        view.seconds = now
        view.tokens_served, view.tokens_per_s = self._serving.tokens, self._serving.tokens_per_s(now)
        view.tokens_checked, view.mismatches = self._oracle.tokens_checked, self._oracle.mismatches
        self._chronicle.note(now, self._observer.seen(), running=self._serving.running)
        self._screen.refresh()

    def _inspect(self) -> None:
        self._inspected = self._now
        self._ledger.offer(self._serving.inspect())
