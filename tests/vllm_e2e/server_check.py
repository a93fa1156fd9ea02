"""The OpenAI server at DP2 x EP2: streams of requests while the planner has experts moved, is killed and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tests.vllm_e2e import checks
from tests.vllm_e2e.checks import CheckError, CountsDifferError, RankView
from tests.vllm_e2e.engines import DEPLOYMENT, NUM_RANKS, Place, Server, server
from tests.vllm_e2e.plain_model import NUM_EXPERTS, Expected
from tests.vllm_e2e.service import Asked, Service, service_in, wait_until
from tests.vllm_e2e.tape import Tape, places_of

STEPS = 32
"""Of a request, and between two questions."""
MOVED_S = 600.0
ASKED_S = 240.0
LEAST_FALL = 0.01
STALE_MAX = 3
"""Questions after a move whose load may hold steps from before it: vLLM counts slots, and names experts when it asks."""
TRIES = 4

Say = Callable[[str], None]
Requests = Sequence[Sequence[Expected]]
"""Of each engine, in turn."""


def check(place: Place, traffic: Sequence[Requests], say: Say) -> None:
    """Traffic: two kinds of it. Raises CheckError at the first thing that is wrong."""
    place.folder.mkdir(parents=True)
    with service_in(place.folder, DEPLOYMENT) as service, server(place, service) as engine:
        say("  server and planner are up")
        run = _Run(engine, service, say)
        first, second = traffic
        before = run.measured(first)
        with run.streams(first):
            run.until_moved(beyond=0)
        run.must_fall("after the first move", before, run.measured(first))
        run.must_be_recorded(first)
        service.kill_planner()
        say("  planner killed")
        before, moved = run.measured(second), run.generation
        with run.streams(second):
            run.without_planner(3)
        service.restart_planner()  # between two streams, which would leave it no core to start on
        say("  planner started again")
        with run.streams(second):
            run.until_moved(beyond=moved)
        run.must_fall("after the second move", before, run.measured(second))
        run.must_be_recorded(second)


@dataclass
class _Run:
    """What was done so far. tapes: counts of every step of each engine, of the requests that were begun.

    generation: that experts moved to last.
    """

    server: Server
    service: Service
    say: Say
    tapes: tuple[Tape, Tape] = field(default_factory=lambda: (Tape(STEPS), Tape(STEPS)))
    num_requests: int = 0
    num_exact: int = 0
    num_stale: int = 0
    generation: int = 0
    views: list[RankView] = field(default_factory=list)
    _seen: int = 0
    _places: tuple[int, int] = (0, 0)
    _stale_left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.views = self._views_at_rest("as loaded")
        self._digests = checks.digests_by_expert(self.views)

    def measured(self, requests: Requests) -> float:
        """Imbalance of the first request of each engine, both at once, by the slots that they went to."""
        for _ in range(TRIES):
            before = self._views_at_rest("before a measurement")[0].rows
            with ThreadPoolExecutor(NUM_RANKS) as pool:
                list(pool.map(lambda engine: self._request(engine, requests[engine][0]), range(NUM_RANKS)))
            self.views = self._views_at_rest("after a measurement")
            self._look_at_questions()
            if np.array_equal(self.views[0].rows, before):  # else experts moved meanwhile
                break
        else:
            raise CheckError(f"experts moved in each of {TRIES} measurements")
        for engine, view in enumerate(self.views):  # under data parallelism each rank counts its own tokens
            found = checks.by_expert(view.rows, view.slot_loads, NUM_EXPERTS).astype(np.float64)
            checks.counts_equal(f"counted by engine {engine}", requests[engine][0].steps.sum(axis=0), found)
        return checks.imbalance(np.sum([view.slot_loads for view in self.views], axis=0), NUM_RANKS)

    @contextmanager
    def streams(self, requests: Requests) -> Iterator[None]:
        """Within the block each engine has one request after another. Raises CheckError for an answer that is wrong."""
        stop = threading.Event()

        def stream(engine: int) -> None:
            number = 0
            while not stop.is_set():
                self._request(engine, requests[engine][number % len(requests[engine])])
                number += 1

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            self._running = [pool.submit(stream, engine) for engine in range(NUM_RANKS)]
            try:
                yield
            finally:
                stop.set()
            for running in self._running:
                running.result()
        self._running = []

    def until_moved(self, *, beyond: int) -> None:
        """Until experts moved to a generation beyond one, and a question showed it whose load is of the new map alone."""
        deadline = time.monotonic() + MOVED_S
        while self.generation <= beyond or self._stale_left:
            self._wait_for_question(deadline)
            self._look_at_questions()

    def without_planner(self, number: int) -> None:
        """So many questions, all answered keep."""
        deadline = time.monotonic() + ASKED_S
        answers: list[Asked] = []
        while len(answers) < number:
            self._wait_for_question(deadline)
            answers += self._look_at_questions()
        for asked in answers:
            if asked.answer is None or asked.answer.move or not asked.answer.reason.startswith("keep: planner at"):
                raise CheckError(f"without a planner the engine was answered {asked.answer}")

    def must_fall(self, when: str, before: float, after: float) -> None:
        """Raises CheckError when ranks are loaded no more evenly than before, by what they computed."""
        self.say(f"  imbalance {when}: {before:.4f} -> {after:.4f} (measured, mean over layers)")
        if after > before - LEAST_FALL:
            raise CheckError(f"imbalance {when}: {before:.4f} -> {after:.4f}")

    def must_be_recorded(self, requests: Requests) -> None:
        """Raises CheckError unless the planner holds for live what the engines route by, once a question has shown it."""
        tries = 0
        while (states := self.service.generations()).get(self.generation) != "active":
            tries += 1
            if tries > TRIES:
                raise CheckError(f"generation {self.generation} is not active: {states}")
            self.measured(requests)
        if not np.array_equal(self.service.live_rows(), self.views[0].rows):
            raise CheckError("the planner holds another map for live than the engines route by")
        self.say(f"  the planner says: {states}; the adviser says: {self.views[0].outcomes}")
        self.say(f"  {self.num_requests} requests answered right; of the loads {self.num_exact} exact, {self.num_stale} stale")

    def _request(self, engine: int, expected: Expected) -> None:
        with self._lock:
            self.tapes[engine].add(expected.steps)
            self.num_requests += 1
            title = f"request {self.num_requests}"
        checks.outputs_equal(title, [expected], [self.server.complete(engine, expected.prompt, STEPS)])

    def _views_at_rest(self, title: str) -> list[RankView]:
        """Views of all ranks that show one map: engines without requests still step for a moment, and may move then."""
        deadline = time.monotonic() + ASKED_S
        found: list[RankView] = []

        def is_one_map() -> bool:
            nonlocal found
            before, found = found, self.server.views()
            rows = [view.rows.tolist() for view in [*before, *found]]
            return bool(before) and all(one == rows[0] for one in rows)

        wait_until(is_one_map, "all ranks to show one map", deadline)
        if self.views:
            checks.weights_follow(title, found, self._digests)
        return found

    def _wait_for_question(self, deadline: float) -> None:
        """Until there is a question that was not looked at. Raises CheckError when there is none, or a stream failed."""

        def is_there() -> bool:
            for running in self._running:
                if running.done():
                    running.result()
            return len(self.service.asked) > self._seen

        wait_until(is_there, f"question {self._seen + 1}", deadline)

    def _look_at_questions(self) -> list[Asked]:
        """Those since the last look; the load of each must be that of the last steps of the engines."""
        found = self.service.asked[self._seen :]
        for asked in found:
            self._seen += 1
            with self._lock:
                until = len(self.tapes[0]), len(self.tapes[1])
            place = places_of(asked.question.load.astype(np.int64), self.tapes, self._places, until)
            if place is not None:
                self._places, self._stale_left = place, 0
                self.num_exact += 1
            elif self._stale_left:
                self._stale_left -= 1
                self.num_stale += 1
                if not self._stale_left:
                    raise CountsDifferError(f"question {self._seen}: {STALE_MAX} loads after a move are not those of any steps")
            else:
                raise CountsDifferError(
                    f"question {self._seen}: its load, {asked.question.load.sum(axis=1).tolist()} by layer, is not that of any"
                    f" {STEPS} steps of the engines up to steps {until}, the last one known being after {self._places}"
                )
            self.say(f"    question {self._seen}: {f'counts equal, after steps {place}' if place else 'stale'}")
            if asked.answer is not None and asked.answer.move:
                self._stale_left, self.generation = STALE_MAX, int(asked.answer.generation)
                self.say(f"  generation {self.generation}: {asked.answer.reason[:150]}")
        return found
