"""One advised deployment: an engine that moves its own weights and asks what to do. Beside ranks that link, all is the same.

The lead, the store, windows, costs, the gate and what comes of generations are those of `Deployment`; what is live is read from
the questions (`advising`) instead of asked from ranks, and a generation is carried out by telling it in an answer.
"""

from __future__ import annotations

import dataclasses
import json

import structlog

from eplb_service import advising, control
from eplb_service.advice import AdviceRequest
from eplb_service.advising import Asker, EngineState, Look, Sight, Told
from eplb_service.costs import MeasuredCosts
from eplb_service.errors import ConflictError
from eplb_service.generation import ORDERED, Generation, GenerationState, LiveMap
from eplb_service.ids import DeploymentId, Epoch, GenerationNumber
from eplb_service.membership.machine import Group
from eplb_service.planner import documents
from eplb_service.planner.asked import Asked, QuestionWatch, group_of, proposer_for, report_of
from eplb_service.planner.context import PlannerContext
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.proposing import Known
from eplb_service.rollout.events import Finished, LiveChanged, Outcome
from eplb_service.telemetry import DeploymentGauges
from eplb_service.window.report import Accepted, CombinedWindow, LoadReport, Refusal, Refused
from eplb_service.window.windows import Windows

FRESH_INTERVALS = 1.5
"""Intervals that a proposal may be old, where that is longer than `planning.proposal_ttl_s`: load comes once an interval."""

_EVENTS = {
    Sight.FIRST: "engine.taken_up",
    Sight.FOLLOWED: "engine.followed",
    Sight.UNDERWAY: "engine.awaited",
    Sight.IGNORED: "engine.given_up",
    Sight.OTHER: "engine.moved",
}
"""What is logged, and noted in the journal, where a question shows something."""


class AdvisedDeployment(Deployment):
    """The planner of one advised deployment."""

    proposal_ttl_from = ""  # it follows from how often the engine asks

    def __init__(self, name: DeploymentId, context: PlannerContext) -> None:
        super().__init__(name, context)
        config = context.config.planning
        self.load = QuestionWatch(
            name,
            Windows(windows_max=config.windows_kept, bytes_max=config.windows_bytes),
            lambda outcome: context.metrics.report_answered(name, outcome),
        )
        self.questions = Asked()
        self.engine: EngineState | None = None
        self._given_context = context
        self._ranks: Group | None = None
        self.not_ours = ""
        """Why no question may be taken though this planner leads; empty when it may."""
        self._num_questions = 0
        self._num_served = 0
        """Questions that the live map served alone, since it is live."""
        self._unpriced = ""
        """Why neither moves nor gains can be priced; empty when they can."""
        self._log = structlog.get_logger("eplb.planner").bind(deployment=name, advised=True)

    # ── what others ask ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def members(self) -> Group | None:
        """The engine's ranks, as its last question named them."""
        return self._ranks

    @property
    def leads(self) -> bool:
        """Whether this planner leads the deployment."""
        return self.lane is not None

    @property
    def known_live(self) -> LiveMap | None:
        """What the engine showed last."""
        return self.engine.live if self.engine is not None and self.leads else None

    @property
    def generation_floor(self) -> GenerationNumber:
        """Questions name no generations: the ledger alone knows."""
        return GenerationNumber(0)

    @property
    def is_free(self) -> bool:
        """Whether the engine's map is known and nothing is under way."""
        return self.leads and self.engine is not None and self.engine.told is None

    @property
    def asked(self) -> Asked:
        """Who asks, how often, and what was answered."""
        told = self.engine.told if self.engine is not None else None
        return dataclasses.replace(self.questions, told=told.generation if told is not None else 0)

    def state(self) -> tuple[str, str]:
        """One word and a sentence: waiting, ready or rolling_out."""
        if not self.leads:
            return "waiting", f"this planner does not lead: {self.leading.why_not}"
        if self.not_ours:
            return "waiting", self.not_ours
        silence = self.questions.silence(self.context.clock.monotonic())
        if silence:
            return "waiting", silence
        if self.engine is None or not self.questions.times:
            return "waiting", "its engine has not asked yet, since this planner leads it"
        told = self.engine.told
        if told is not None and not told.times:
            return "rolling_out", f"generation {told.generation} is the answer to the next question"
        if told is not None:
            return "rolling_out", f"the engine was told to go to generation {told.generation}, and has not shown it yet"
        return "ready", self.restoring.why or self.last_error

    def window(self) -> CombinedWindow | None:
        """The last questions since the live map is live, but the first: engines count by it, and miscount where they moved."""
        if self.engine is None or not self._num_served:
            return None
        return self.load.windows.combine(min(self.num_windows, self._num_served), live_digest=self.engine.live.digest)

    @property
    def proposal_ttl_s(self) -> float:
        """How old a proposal may be: so that one which came too late for its question can be the answer to the next."""
        return max(super().proposal_ttl_s, FRESH_INTERVALS * (self.questions.interval_s or 0.0))

    @property
    def num_windows(self) -> int:
        """Questions that a plan is made from: never fewer than the gate wants."""
        return max(self.context.config.planning.windows, self.context.gate.min_sub_windows)

    def gauges(self) -> DeploymentGauges:
        """The state in numbers."""
        times, now_s = self.questions.times, self.context.clock.monotonic()
        silent = bool(self.questions.silence(now_s)) if self.leads and not self.not_ours else None
        age_s = now_s - times[-1] if times else None
        return dataclasses.replace(super().gauges(), last_question_age_s=age_s, engine_silent=silent)

    # ── from agents: none ────────────────────────────────────────────────────────────────────────────────────────────────

    def register(self, registration: control.Registration) -> None:
        """Ranks that link belong elsewhere. Raises ConflictError."""
        raise ConflictError(
            f"deployment {self.name} is advised: its engine ({self.questions.engine or 'not seen yet'}) asks and moves its own"
            f" weights; rank {registration.address.rank_id} has to register under another name"
        )

    def report(self, report: LoadReport) -> Refused:  # noqa: ARG002  (whatever it says)
        """Load comes with the questions."""
        sentence = f"deployment {self.name} is advised: its load comes with the engine's questions, not in reports"
        return Refused(reason=Refusal.UNKNOWN_RANK, sentence=sentence)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_over(self, epoch: Epoch) -> None:
        """Take up what the store says of the engine, and of a generation that it did not show yet."""
        self.not_ours = ""
        self.questions.expected_since_s = self.context.clock.monotonic()
        if self.ledger.advised is None and self.ledger.live is not None:
            self.not_ours = f"the store knows {self.name} as a deployment of ranks that link: give the engine another name"
            self._log.error("deployment.not_advised", reason=self.not_ours)
            return
        unfinished = self.ledger.unfinished()
        self.engine = self._stored_engine()
        if self.engine is not None:
            known, self._num_served = self._ranks, 0
            self._meet(self.engine.asker)
            self._price(knows_steps=True)
            if known is None or self._ranks is None or known.group_id != self._ranks.group_id:
                self.outcomes.group_changed(self._ranks)
        if unfinished is None:
            return
        if self.engine is None or not self.engine.asker.fits(unfinished.placement):
            self.dropped(unfinished, "not resumed by the new leader: the engine has other layers, ranks or slots now")
            return
        told, why = self._told_of(unfinished), self._why_not_resumed(unfinished)
        if why:  # should the engine show it all the same, it counts
            self.engine = dataclasses.replace(self.engine, lapsed=told)
            self.dropped(unfinished, f"not resumed by the new leader: {why}")
            return
        self._log.info("advice.resumed", generation=unfinished.number, epoch=epoch)
        self.note("rollout.resumed", f"generation {unfinished.number}")
        self.engine = dataclasses.replace(self.engine, told=told)
        self.outcomes.rollout_since_s = self.context.clock.monotonic()

    def _why_not_resumed(self, generation: Generation) -> str:
        """What speaks against telling what a predecessor published; empty when nothing does."""
        if self.ledger.settings.paused:
            return "the deployment is paused"
        age_s, most_s = self.context.clock.wall() - generation.created_at_s, self.context.config.rollout.resume_age_s
        if age_s > most_s and generation.policy not in ORDERED:  # an order stands
            return f"it was decided {age_s:.0f} s ago (rollout.resume_age_s)"
        return ""

    def _stored_engine(self) -> EngineState | None:
        data, live = self.ledger.advised, self.ledger.live
        if data is None or live is None:
            return None
        try:
            tree = json.loads(data)
            asker, self.questions.engine = Asker.from_json(tree["asker"]), str(tree["engine"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._log.warning("asker.unreadable", reason=f"it is taken up anew with its next question: {error}")
            return None
        return EngineState(asker=asker, live=live) if asker.fits(live.placement) else None

    def _told_of(self, generation: Generation) -> Told:
        """A generation that a predecessor published. Whether the engine was told is known from its state."""
        rows = generation.placement.tables[0].physical_to_logical
        told = generation.state is GenerationState.ROLLING_OUT
        return Told(generation=generation.number, rows=rows, times=int(told), at_s=generation.created_at_s)

    async def end(self, reason: str) -> None:
        """The lead was lost, or is given up. What was seen of the engine is read from the store by who leads next."""
        await super().end(reason)
        self.outcomes.rollout_since_s = None

    # ── a question ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, request: AdviceRequest, at_s: float) -> Look:
        """What a question shows, recorded. at_s: wall clock. Call only while this planner leads.

        Raises InvalidInputError for a question that cannot be.
        """
        question = advising.Question(
            asker=Asker.of(request),
            origin=request.origin,
            sequence=request.sequence,
            rows=request.current,
            at_s=at_s,
        )
        before = self.engine
        seen = advising.look(before, question)
        if seen.sight in (Sight.REPEATED, Sight.LATE, Sight.RIVAL):
            return seen
        live_before = before.live if before is not None and seen.sight is not Sight.FIRST else seen.state.live
        self.engine = seen.state
        self.questions.engine = request.engine
        self.questions.times.append(self.context.clock.monotonic())
        if seen.sight is Sight.FIRST:
            self._num_served = 0
            self._meet(question.asker)
            self._store_asker()
            self.outcomes.group_changed(self._ranks)
        self._price(knows_steps=request.steps > 0)
        self._note_copy(request)
        self._record(before, seen)
        self._count(request, live_before)
        return seen

    def _meet(self, asker: Asker) -> None:
        """Plan for this engine: its ranks, the size of its experts."""
        size = self._given_context.config.planning.expert_bytes
        if not any(asker.expert_bytes) and size is not None:
            asker = dataclasses.replace(asker, expert_bytes=(size,) * len(asker.layer_ids))
        self._ranks = group_of(self.name, asker)

    def _price(self, *, knows_steps: bool) -> None:
        """Plan with this engine's expert groups and prices."""
        if self.engine is not None and self._ranks is not None:
            own = proposer_for(self._given_context.proposer, self.engine.asker, self._ranks, knows_steps=knows_steps)
            proposer, self._unpriced = own
            self.context = dataclasses.replace(self._given_context, proposer=proposer)

    def _store_asker(self) -> None:
        if self.engine is not None:
            tree = {"engine": self.questions.engine, "asker": dataclasses.asdict(self.engine.asker)}
            self.ledger.advised = json.dumps(tree, separators=(",", ":")).encode()
            self.behind({documents.ADVISED: self.ledger.advised})

    def _record(self, before: EngineState | None, seen: Look) -> None:
        """What became of generations, and of the live map."""
        live = seen.state.live
        if seen.reason:
            self._log.info(_EVENTS[seen.sight], reason=seen.reason)
            self.note(_EVENTS[seen.sight], seen.reason)
        if seen.stopped is not None:
            self._ended(seen.stopped, Outcome.STOPPED, seen.reason, seen.seconds)
        if before is None or before.live is not live:
            reason = seen.reason or "its first question"
            self.outcomes.live_changed(LiveChanged(live=live, generation_floor=GenerationNumber(0), reason=reason))
        if seen.active is not None:
            self._ended(seen.active, Outcome.ACTIVE, seen.reason, seen.seconds)
        if seen.sight is Sight.OTHER:
            self.last_error = seen.reason

    def _note_copy(self, request: AdviceRequest) -> None:
        """How long the engine took for a generation, told once it is known; where steps waited for it, a flip costs that."""
        generation = self.ledger.generations.get(request.copied_generation)
        if generation is None or generation.copied_s or not request.copied_s:
            return
        held = request.copy_held_steps
        self.became(dataclasses.replace(generation, copied_s=request.copied_s, copy_held_steps=held))
        if held:
            self.learning.costs.stalls.add(generation.number, request.copied_s)
        how = "in which no step ran" if held else "beside its steps"
        self.note("engine.copied", f"generation {generation.number} took the engine {request.copied_s:.3f} s, {how}")

    def _ended(self, number: GenerationNumber, outcome: Outcome, reason: str, seconds: float) -> None:
        self.outcomes.rollout_finished(
            Finished(generation=number, outcome=outcome, reason=reason, flip_boundaries=(), seconds=seconds)
        )

    def _count(self, request: AdviceRequest, live_before: LiveMap) -> None:
        """The load of a question, as a window. Where the map changed since the last one it was served by both."""
        group, engine = self._ranks, self.engine
        if group is None or engine is None:
            return
        report = report_of(request, group, self._num_questions, live_before.digest, engine.live.digest)
        self._num_questions += 1
        self._num_served = self._num_served + 1 if live_before is engine.live else 0
        answer = self.load.offer(report)
        if isinstance(answer, Accepted) and answer.closed:
            self._window_closed(answer)

    def told(self) -> Generation:
        """The generation under way is named in an answer now. Raises EplbError when none is."""
        if self.engine is None or self.engine.told is None:
            raise ConflictError(f"nothing is under way for {self.name}")
        generation = self.ledger.generations[self.engine.told.generation]
        self.engine = advising.answered(self.engine, self.context.clock.wall())
        if generation.state is GenerationState.PUBLISHED:
            generation = generation.rolling_out()
            self.note("rollout.started", f"generation {generation.number} is the answer to the engine's question")
            self.became(generation)
            self.announce()
        return generation

    # ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_rollout(self, generation: Generation) -> None:
        """A generation was published: it is the answer to the present question, or to the next one."""
        if self.engine is None:
            return
        self.learning.rollout_begins(self.context.validation.windows)
        rows = generation.placement.tables[0].physical_to_logical
        self.engine = advising.publish(self.engine, generation.number, rows)
        self.outcomes.rollout_since_s = self.context.clock.monotonic()
        self.announce()

    def cancel_rollout(self, reason: str, *, by: str, withdraw: bool) -> None:  # noqa: ARG002  (no chunk is open)
        """Do not tell it again. What the engine began it may end: then the generation is live all the same."""
        if self.engine is None or self.engine.told is None or not self.leads:
            return
        number = self.engine.told.generation
        self.engine = advising.give_up(self.engine)
        self._ended(number, Outcome.STOPPED, reason, 0.0)

    def rested(self) -> None:
        """A question was answered keep, since the engine did not follow."""
        if self.engine is not None:
            self.engine = advising.rested(self.engine)

    def is_copying(self) -> bool | None:
        """Nobody says when the engine copies: steps of an interval in which it may are no measure of anything."""
        return None if self.engine is not None and self.engine.told is not None else False

    def known(self, live: LiveMap, window: CombinedWindow) -> Known:
        """What a decision goes by beside the window."""
        known = super().known(live, window)
        return dataclasses.replace(known, measured=MeasuredCosts(step_time=self._unpriced)) if self._unpriced else known
