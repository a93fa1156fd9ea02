"""The offline engine at TP2 x EP2: batch after batch while the planner has experts moved, is killed and comes back.

An interval of vLLM's load balancer is as long as a batch and ends within one: requests are alive whenever weights move. It is
known, step for step, which tokens a question's load is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eplb_service.advice import Advice, AdviceRequest
from eplb_service.dispatch import Dispatch
from tests.vllm_e2e import checks
from tests.vllm_e2e.checks import CheckError, CountsDifferError, OutputsDifferError, RankView
from tests.vllm_e2e.cpu_backend import AS_VLLM, STUB
from tests.vllm_e2e.engines import DEPLOYMENT, NUM_RANKS, OfflineEngine, Place, offline_engine
from tests.vllm_e2e.plain_model import NUM_EXPERTS, Expected, Int64Array
from tests.vllm_e2e.service import Asked, Service, array_of, service_in

STEPS = 8
"""Of a batch, and between two questions."""
FIRST_QUESTION = STEPS // 4
"""VLLM's first rearrangement comes after a quarter of the interval."""
BATCHES_MAX = 24
"""To a move: the planner wants four questions under one map, and may need more than one to make a plan."""
LEAST_FALL = 0.01

Say = Callable[[str], None]
Batch = Sequence[Expected]


def check(place: Place, traffic: Sequence[Sequence[Batch]], say: Say) -> None:
    """Traffic: two kinds of it, each some batches that are sent in turn. Raises CheckError at the first thing that is wrong."""
    place.folder.mkdir(parents=True)
    with service_in(place.folder, DEPLOYMENT) as service, offline_engine(place, service) as engine:
        run = _Run(engine, service, say)
        say("  engine and planner are up")
        first, second = traffic
        before = run.until_moved(first, generation=1)[-len(first) :]
        after = run.batches(first, 2 * len(first))  # so many that the generation is judged by the load that it was made for
        run.must_fall("after the first move", before, after)
        run.must_be_recorded(generation=1)
        _without_planner(run, second)
        before = run.until_moved(second, generation=2)[-len(second) :]
        after = run.batches(second, len(second))
        run.must_fall("after the second move", before, after)
        run.must_be_recorded(generation=2)
        _with_stub(run, second[0])


def _without_planner(run: _Run, traffic: Sequence[Batch]) -> None:
    """Killed, and back on what it had stored."""
    live = run.views[0].rows
    run.service.kill_planner()
    run.say("  planner killed")
    run.counted_by_planner = False
    run.batches(traffic, 3)
    if not np.array_equal(run.views[0].rows, live):
        raise CheckError("experts moved while there was no planner")
    for asked in run.service.asked[-3:]:
        if asked.answer is None or asked.answer.move or not asked.answer.reason.startswith("keep: planner at"):
            raise CheckError(f"without a planner the engine was answered {asked.answer}")
    run.say(f"    answered: {run.service.asked[-1].answer.reason}")  # type: ignore[union-attr]
    run.service.restart_planner()
    run.counted_by_planner, run.num_heard = True, 0
    run.say("  planner started again")


def _with_stub(run: _Run, batch: Batch) -> None:
    """The negative control: with vLLM's CPU stub the same checks must fail, and with that alone."""
    run.engine.route(STUB)
    _must_fail(run, OutputsDifferError, lambda: run.answered(batch))
    _must_fail(run, CountsDifferError, run.asked_once)
    run.engine.route(AS_VLLM)
    run.answered(batch)
    run.say("  without the stub outputs are equal again")


def _must_fail(run: _Run, kind: type[CheckError], part: Callable[[], object]) -> None:
    try:
        part()
    except kind as error:
        run.say(f"  negative control, vLLM's CPU stub: {str(error)[:180]}")
    else:
        raise CheckError(f"the negative control was not caught: experts were taken for slots, and there was no {kind.__name__}")


@dataclass
class _Run:
    """What was done so far. views: of the ranks after the last batch; tape: counts of every step, shape (L, E) each."""

    engine: OfflineEngine
    service: Service
    say: Say
    counted_by_planner: bool = True
    views: list[RankView] = field(default_factory=list)
    tape: list[Int64Array] = field(default_factory=list)
    num_batches: int = 0
    num_moves: int = 0
    num_heard: int = 0
    _digests: list[dict[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.views = self.engine.views()
        self._digests = checks.digests_by_expert(self.views)

    def batches(self, traffic: Sequence[Batch], number: int) -> list[float]:
        """So many batches without a move. Returns the imbalance of each, as measured in the engine."""
        found = []
        for _ in range(number):
            moved, measured = self._batch(traffic)
            if moved:
                raise CheckError(f"batch {self.num_batches}: experts moved once more")
            found.append(measured)
        return found

    def until_moved(self, traffic: Sequence[Batch], *, generation: int) -> list[float]:
        """Batches until experts moved to a generation. Returns the imbalance of those before."""
        found: list[float] = []
        for _ in range(BATCHES_MAX):
            moved, measured = self._batch(traffic)
            if moved:
                told = self._answer_of_last()
                if told.generation != generation:
                    raise CheckError(f"experts moved to generation {told.generation}, expected {generation}")
                self.say(f"  generation {generation}: {told.reason[:150]}")
                return found
            found.append(measured)
        raise CheckError(f"no move in {BATCHES_MAX} batches; the planner says: {self._answer_of_last().reason}")

    def must_fall(self, when: str, before: Sequence[float], after: Sequence[float]) -> None:
        """Raises CheckError when ranks are loaded no more evenly than before, by what they computed."""
        was, now = float(np.mean(before)), float(np.mean(after))
        self.say(f"  imbalance {when}: {was:.4f} -> {now:.4f} (measured, mean over layers)")
        if now > was - LEAST_FALL:
            raise CheckError(f"imbalance {when}: {was:.4f} -> {now:.4f}")

    def must_be_recorded(self, *, generation: int) -> None:
        """Raises CheckError unless the planner holds for live what the engine routes by."""
        states = self.service.generations()
        if states.get(generation) != "active":
            raise CheckError(f"generation {generation} is not active: {states}")
        if not np.array_equal(self.service.live_rows(), self.views[0].rows):
            raise CheckError("the planner holds another map for live than the engine routes by")
        outcomes = self.views[0].outcomes
        if outcomes.get("moved") != self.num_moves or any(outcome not in ("moved", "kept") for outcome in outcomes):
            raise CheckError(f"{self.num_moves} moves were seen; the adviser says {outcomes}")
        self.say(f"  the planner says: {states}; the adviser says: {outcomes}")

    def _answer_of_last(self) -> Advice:
        answer = self.service.asked[-1].answer
        if answer is None:
            raise CheckError("the last question was not answered")
        return answer

    def answered(self, batch: Batch) -> float:
        """One batch; the largest difference of a logprob. Raises OutputsDifferError."""
        self.num_batches += 1
        self.tape += list(np.sum([one.steps for one in batch], axis=0))
        outputs = self.engine.generate([one.prompt for one in batch], STEPS)
        return checks.outputs_equal(self._title, batch, outputs)

    def asked_once(self) -> Asked:
        """The question of the last batch; its load is of the steps since the one before. Raises CountsDifferError."""
        if len(self.service.asked) != self.num_batches:
            raise CountsDifferError(f"{self._title}: {len(self.service.asked)} questions were asked, not {self.num_batches}")
        asked = self.service.asked[-1]
        end = FIRST_QUESTION + STEPS * (self.num_batches - 1)
        # Both ranks counted every token; the plug-in tells the planner each token once.
        checks.counts_equal(self._title, np.sum(self.tape[max(0, end - STEPS) : end], axis=0), asked.question.load)
        return asked

    @property
    def _title(self) -> str:
        return f"batch {self.num_batches}"

    def _batch(self, traffic: Sequence[Batch]) -> tuple[bool, float]:
        largest = self.answered(traffic[self.num_batches % len(traffic)])
        asked = self.asked_once()
        before, self.views = self.views[0].rows, self.engine.views()
        rows = checks.weights_follow(self._title, self.views, self._digests)
        changed = int(np.count_nonzero(rows != before))
        self.num_moves += changed > 0
        self._check_question(asked.question, before)
        if self.counted_by_planner:
            self._check_planner(asked)
        if not changed:
            self._check_ranks()
        measured = checks.imbalance(self.views[0].slot_loads, NUM_RANKS)
        seen = f"{changed} slots moved" if changed else f"imbalance {measured:.4f}"
        self.say(f"    {self._title}: outputs equal (logprobs to {largest:.0e}), counts equal, weights as the map says, {seen}")
        return changed > 0, measured

    def _check_question(self, question: AdviceRequest, rows: Int64Array) -> None:
        right = {
            "map": np.array_equal(question.current, rows),
            "ranks": question.rank_ids == tuple(range(NUM_RANKS)) and len(set(question.nodes)) == 1,
            "dispatch": question.dispatch == Dispatch.HASHED.value,
            "deployment": question.deployment == DEPLOYMENT,
        }
        if not all(right.values()):
            wrong = ", ".join(what for what, fine in right.items() if not fine)
            raise CheckError(f"{self._title}: of the question {wrong} is wrong: {question}")

    def _check_planner(self, asked: Asked) -> None:
        """What the planner made of the question: its load by rank, under the map that it came with.

        One that was just started again may not be reached by the agent process yet: then that is what the answer says.
        """
        status, question = self.service.status(), asked.question
        heard = sum(status.advised.answers.values())
        was_heard, self.num_heard = heard > self.num_heard, heard
        if not was_heard:
            if asked.answer is None or asked.answer.move or "planner" not in asked.answer.reason:
                raise CheckError(f"{self._title}: the planner was not asked, and the answer does not say so: {asked.answer}")
            self.say(f"    not heard by the planner: {asked.answer.reason[:150]}")
            return
        wanted = loads_of_ranks(question.load, question.current)
        found = array_of(status.rank_loads, "<f4")
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-5):
            raise CountsDifferError(
                f"{self._title}: by the planner the ranks have {found.tolist()}, by the question {wanted.tolist()}"
            )

    def _check_ranks(self) -> None:
        """Under tensor parallelism each rank counts all tokens, so that vLLM's sum over ranks is as many times the tokens."""
        wanted = np.sum(self.tape[-STEPS:], axis=0)
        for rank, view in enumerate(self.views):
            found = checks.by_expert(view.rows, view.slot_loads, NUM_EXPERTS)
            checks.counts_equal(f"{self._title}, counted by rank {rank}", wanted, found.astype(np.float64))


def loads_of_ranks(load: npt.NDArray[np.float64], rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Load of each rank when replicas share alike. Shape (L, R)."""
    found = np.zeros((len(rows), NUM_RANKS))
    slots = rows.shape[1] // NUM_RANKS
    for layer, row in enumerate(rows.tolist()):
        for slot, expert in enumerate(row):
            found[layer, slot // slots] += load[layer, expert] / row.count(expert)
    return found
