"""One deployment: what its ranks say, what the store knows, what is planned for it and why.

State changes on the event loop without awaiting (see `carrier`); what waits are the lead (`leading`), the writes
(`write_lane`) and, in `steering`, plans and orders. Questions are answered from memory, so they need neither lead nor store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from eplb_service import control
from eplb_service.attach import FromAgent
from eplb_service.control import Address
from eplb_service.drain import (
    knows_no_empty_slot,
    serving,
)
from eplb_service.errors import ConflictError, DeadlineError, EplbError
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import DeploymentId, Epoch, GenerationNumber, RankId
from eplb_service.membership.machine import Group
from eplb_service.placement import Placement
from eplb_service.planner import documents
from eplb_service.planner.agent_link import AgentLink
from eplb_service.planner.asked import Asked
from eplb_service.planner.carrier import Carrier
from eplb_service.planner.context import PlannerContext
from eplb_service.planner.documents import VerdictRecord
from eplb_service.planner.drained_view import why_drained_too_far
from eplb_service.planner.forecasting import Forecasting
from eplb_service.planner.gauges import gauges_of
from eplb_service.planner.leading import Leading
from eplb_service.planner.learning import Learning
from eplb_service.planner.lessons import learn, remember
from eplb_service.planner.load_watch import LoadWatch
from eplb_service.planner.loads import loads_of
from eplb_service.planner.outcomes import Outcomes
from eplb_service.planner.proposing import Decision, Known
from eplb_service.planner.recorded import Recorded
from eplb_service.planner.restoring import Restoring
from eplb_service.planner.write_lane import WriteLane
from eplb_service.rollout.chunk_ids import drawn_sequence
from eplb_service.rollout.events import (
    Cancel,
    Fenced,
    RolloutState,
    Start,
)
from eplb_service.rollout.journal import LEAD_ENDED
from eplb_service.store.base import Leadership
from eplb_service.telemetry import DeploymentGauges
from eplb_service.window.report import Accepted, CombinedWindow, LoadReport, Refused
from eplb_service.window.windows import Windows

DRAIN_S = 2.0
REFUSAL_SHOWN_S = 60.0
"""How long the status tells of a rank that was refused: it asks again at least twice a minute."""
WITHDRAW_S = 60.0
"""Longest wait for a rollout that was withdrawn."""
HOUSEKEEPING_S = 1.0


class Deployment(Recorded):
    """The planner of one deployment. proposal_ttl_from: the setting that says how old a proposal may be, in brackets."""

    proposal_ttl_from = " (planning.proposal_ttl_s)"

    def __init__(self, name: DeploymentId, context: PlannerContext) -> None:
        super().__init__(name, context)
        config = context.config
        self.load = LoadWatch(
            name,
            Windows(windows_max=config.planning.windows_kept, bytes_max=config.planning.windows_bytes),
            lambda outcome: context.metrics.report_answered(name, outcome),
        )
        self.learning = Learning(
            windows_kept=config.planning.windows_kept,
            forecasting=Forecasting(
                mode=config.planning.forecast,
                day_bins=config.planning.forecast_day_bins,
                num_windows=config.planning.windows,
            ),
        )
        self.outcomes = Outcomes(self)
        self.restoring = Restoring(self)
        self.carrier = Carrier(name, self.outcomes, context.clock, self.outcomes.count, silence_s=config.rollout.rank_silence_s)
        self.leading = Leading(
            name,
            context.store,
            self,
            owner=context.owner,
            lease_s=config.store.lease_s,
            new_id=context.new_id,
            on_health=context.health.note,
        )
        self.verdict: VerdictRecord | None = None
        self.decision: Decision | None = None
        """The last one that was made."""
        self.last_error = ""
        """Why the last rollout or plan came to nothing; empty when it did not."""
        self.planning = asyncio.Lock()
        """Held while something is decided and published: one thing at a time."""
        self.plan_wanted = asyncio.Event()
        """Set when there may be something new to plan from."""
        self._refusal, self._refused_s = "", 0.0
        self._tasks: list[asyncio.Task[None]] = []

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin to lead and to plan."""
        self.leading.start()
        self.context.health.on_back.append(self.plan_wanted.set)
        self._tasks.append(asyncio.create_task(self._keep_house(), name=f"housekeeping of {self.name}"))

    async def stop(self, timeout_s: float) -> None:
        """Stop planning, write what waits, give the lead up."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()
        with contextlib.suppress(ValueError):
            self.context.health.on_back.remove(self.plan_wanted.set)
        await self.leading.stop(timeout_s)

    async def check(self) -> None:
        """Whether the store's documents can be read (`Led`)."""
        await self.ledger.load()

    async def begin(self, leadership: Leadership) -> None:
        """The lead was taken (`Led`)."""
        await self.ledger.load()
        unfinished = self.ledger.unfinished()
        await self.journals.take_up(unfinished.number if unfinished is not None else None, leadership.epoch)
        remember(self)
        self.lane = WriteLane(
            self.context.store,
            leadership,
            new_id=self.context.new_id,
            on_health=self.context.health.note,
            on_fenced=self._fenced,
        )
        self.note("lead.taken", f"epoch {leadership.epoch}")
        self._take_over(leadership.epoch)
        self.announce()

    def _take_over(self, epoch: Epoch) -> None:
        """Go on from what the ledger says: what the leader before did not finish, and what is live."""
        self.outcomes.begin(self.ledger.unfinished())
        settings, first_sequence = self.context.config.rollout_settings(), drawn_sequence(self.context.new_id())
        self.carrier.lead(epoch, settings, first_sequence=first_sequence)

    async def end(self, reason: str) -> None:
        """The lead was lost, or is given up (`Led`)."""
        self.note(LEAD_ENDED, reason)
        self.carrier.step_down()
        self.outcomes.begin(None)
        lane, self.lane = self.lane, None
        if lane is not None:
            await lane.close(DRAIN_S)
        self.journals.forget()
        self.load.live_in_motion()
        self.announce()

    def displaced(self, reason: str) -> None:
        """Another planner took the lead after this one had lost it (`Led`)."""
        self.carrier.send_elsewhere(f"this planner leads {self.name} no more ({reason}): connect anew")

    def _fenced(self, reason: str) -> None:
        """A write was refused: somebody leads with a higher epoch, or the store forgot ours."""
        epoch = self.leading.epoch
        self.leading.lose(reason, floor=epoch, fenced=True)
        self.carrier.feed(Fenced(Epoch(epoch + 1)))

    # ── from agents ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def register(self, registration: control.Registration) -> None:
        """A rank says what it is. Raises what `Membership` raises."""
        if len(registration.group_rank_ids) > self.context.config.limits.ranks:
            raise ConflictError(
                f"deployment {self.name} names {len(registration.group_rank_ids)} ranks; this planner takes at most"
                f" {self.context.config.limits.ranks} (limits.ranks)"
            )
        try:
            self.carrier.register(registration)
        except EplbError as error:
            self._refusal, self._refused_s = str(error), self.context.clock.monotonic()
            raise

    def _last_refusal(self) -> str:
        """Why a rank was refused a moment ago; empty when none was."""
        is_fresh = self._refusal and self.context.clock.monotonic() - self._refused_s < REFUSAL_SHOWN_S
        return f"a rank was refused: {self._refusal}" if is_fresh else ""

    def receive(self, link: AgentLink, message: FromAgent) -> None:
        """A message on a control stream. Raises what `Carrier.receive` raises."""
        self.carrier.receive(link, message)

    def detach(self, link: AgentLink, reason: str) -> None:
        """A control stream ended."""
        self.carrier.detach(link, reason)

    def report(self, report: LoadReport) -> Accepted | Refused:
        """A load window of one rank."""
        answer = self.load.offer(report)
        if isinstance(answer, Accepted):
            self.carrier.heard(Address(report.rank_id, report.incarnation, report.group_id))
            if answer.closed:
                self._window_closed(answer)
        return answer

    def _window_closed(self, closed: Accepted) -> None:
        self.load.look(self.live, self.group)
        self.outcomes.window_closed(closed)
        learn(self)
        self.plan_wanted.set()

    def is_copying(self) -> bool | None:
        """Whether weights are copied aside just now; None while a rollout is under way and waits, votes or flips."""
        progress = self.carrier.progress
        if self.outcomes.rollout_since_s is None or progress is None:
            return False
        return True if progress.state is RolloutState.STAGING else None

    def store_learned(self) -> None:
        """Write what was learned behind."""
        self.behind({documents.LEARNED: self.learning.to_document()})

    # ── what others ask ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def members(self) -> Group | None:
        """The ranks that link, drained ones among them; None while they are not complete."""
        return self.carrier.group

    @property
    def group(self) -> Group | None:
        """The same; ranks that were drained and hold nothing any more serve no expert. None while they are not complete."""
        members, live = self.members, self.live
        if members is None or live is None or not self.drained:
            return members
        return dataclasses.replace(members, topology=serving(members.topology, live.placement, self.drained))

    @property
    def told_placement(self) -> Placement | None:
        """What ranks said last that they route by; None while they are not complete, or it is not known."""
        live = self.known_live if self.members is not None else None
        return live.placement if live is not None else None

    @property
    def drained(self) -> frozenset[RankId]:
        """Ranks to which nothing may be moved, whether they are here or not."""
        return frozenset(RankId(rank) for rank in self.ledger.settings.drained)

    @property
    def keeps_copies(self) -> bool:
        """Whether drained ranks keep copies of experts that live elsewhere too, since the engine knows no empty slot."""
        live = self.live
        return self.context.proposer.fill_slots and live is not None and knows_no_empty_slot(live.placement)

    @property
    def leads(self) -> bool:
        """Whether this planner leads the deployment."""
        return self.carrier.rollout is not None

    @property
    def known_live(self) -> LiveMap | None:
        """What ranks said that they route by; None while they were not asked in this leadership."""
        return self.carrier.rollout.live if self.carrier.rollout is not None else None

    @property
    def generation_floor(self) -> GenerationNumber:
        """Highest generation that ranks ever saw."""
        rollout = self.carrier.rollout
        return rollout.generation_floor if rollout is not None else GenerationNumber(0)

    @property
    def live(self) -> LiveMap | None:
        """What ranks route by as far as known; the last known map while they cannot be asked."""
        return self.known_live or self.ledger.live

    def window(self) -> CombinedWindow | None:
        """The load windows that a plan is made from; None while none is closed."""
        return self.load.windows.combine(self.context.config.planning.windows)

    @property
    def asked(self) -> Asked | None:
        """Who asks, where an engine that moves its own weights does (`advised`); None: ranks that link."""
        return None

    @property
    def is_free(self) -> bool:
        """Whether the live map is known and nothing is being rolled out."""
        rollout = self.carrier.rollout
        return rollout is not None and rollout.live is not None and rollout.state is RolloutState.IDLE

    def state(self) -> tuple[str, str]:
        """One word and a sentence: waiting, syncing, ready, rolling_out, inconsistent or observe_only."""
        rollout, group = self.carrier.rollout, self.carrier.group
        if self.carrier.alarm:
            return "inconsistent", self.carrier.alarm
        if rollout is None:
            return "waiting", f"this planner does not lead: {self.leading.why_not}"
        if group is None:
            return "waiting", "; ".join(part for part in (self.carrier.waiting_reason, self._last_refusal()) if part)
        progress = rollout.progress()
        ranks = ", ".join(map(str, progress.waiting_for))
        if rollout.state is RolloutState.INCONSISTENT:
            return "inconsistent", progress.last_error or "ranks route by different maps"
        if rollout.live is None:
            return "syncing", f"asking what is live; waiting for rank {ranks}" if ranks else "asking what is live"
        if progress.generation is not None:
            return "rolling_out", progress.hold or progress.last_error
        if group.observe_only:
            return "observe_only", self._why_observing(group.observe_only)
        stuck = self.restoring.why or why_drained_too_far(self)
        return "ready", self.carrier.waiting_reason or stuck or self._last_refusal() or self.last_error

    def state_text(self) -> str:
        """State and reason for a sentence."""
        state, reason = self.state()
        return state + (f": {reason}" if reason else "")

    def _why_observing(self, what: str) -> str:
        """What is missing, and the reason that a rank which has none of it gives, as far as one did."""
        said = [facts.off_reason for facts in self.carrier.ranks.values() if facts.off_reason and not facts.staging_bytes]
        return ": ".join([what, *said[:1]])

    async def wait_until_free(self, timeout_s: float = WITHDRAW_S) -> None:
        """Return once nothing is being rolled out. Raises DeadlineError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_free:
                    await self.wait_for_change()
        except TimeoutError:
            state, reason = self.state()
            raise DeadlineError(
                f"deployment {self.name} is still {state} after {timeout_s:.0f} s ({reason or 'see status'}); try again"
            ) from None

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def why_not_begin(self) -> str:
        """Why nothing at all can be published now; empty when something can."""
        if self.lane is None or not self.leads:
            return f"this planner does not lead {self.name}: {self.leading.why_not}"
        if self.context.health.reason:
            return f"the store does not answer: {self.context.health.reason}"
        if self.ledger.settings.paused:
            return f"{self.name} is paused ({self.ledger.settings.pause_reason or 'no reason given'}); resume it first"
        if not self.is_free:
            return f"{self.name} is {self.state_text()}"
        return ""

    def why_not_plan(self) -> str:
        """What speaks against a new generation for balance, or for an operator, now; empty when nothing does."""
        return self.why_not_begin() or self.restoring.why or why_drained_too_far(self)

    def check_plannable(self) -> None:
        """Raise ConflictError with what speaks against a new generation now."""
        why = self.why_not_plan()
        if why:
            raise ConflictError(f"nothing can be published now: {why}")

    def known(self, live: LiveMap, window: CombinedWindow) -> Known:
        """What a decision goes by beside the window."""
        learning, config = self.learning, self.context.validation
        loads = tuple(loads_of(window, table).loads.sum(axis=0) for table in live.placement.tables)
        hold = learning.why_held(
            loads, now_s=self.context.clock.wall(), least_change=config.changed_share, hold_s=config.hold_s
        )
        return Known(
            measured=learning.measured(),
            gain_share=learning.bias.share,
            hold=hold,
            plans=tuple(learning.plans),
            history=tuple(learning.history),
            horizon=learning.horizon,
            forecast=learning.forecasting.forecast(),
        )

    @property
    def proposal_ttl_s(self) -> float:
        """How old a proposal may be."""
        return self.context.config.planning.proposal_ttl_s

    def record_verdict(self, verdict: VerdictRecord) -> None:
        """The gate (or an operator) answered."""
        known = self.verdict
        self.verdict = verdict
        self.context.metrics.verdict_given(self.name, verdict.code)
        if known is None or (known.code, known.move) != (verdict.code, verdict.move):
            self._log.info("gate.moved" if verdict.move else "gate.held", code=verdict.code, reason=verdict.reason)
            self.note("gate.moved" if verdict.move else "gate.held", verdict.reason)

    def begin_rollout(self, generation: Generation) -> None:
        """Give a published generation to the machine."""
        self.load.live_in_motion()
        self.learning.rollout_begins(self.context.validation.windows)
        self.carrier.feed(Start(generation, self.learning.costs.stalls.model()))

    def cancel_rollout(self, reason: str, *, by: str, withdraw: bool) -> None:
        """Stop a rollout after its open chunk, or with that withdrawn too."""
        self.outcomes.forget_unfinished(f"{reason} (by {by})")
        progress = self.carrier.progress
        if progress is not None and progress.generation is not None:
            self.carrier.feed(Cancel(reason=reason, by=by, withdraw=withdraw))

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_house(self) -> None:
        while True:
            self.context.metrics.state_changed(self.name, self.gauges())
            await asyncio.sleep(HOUSEKEEPING_S)

    def gauges(self) -> DeploymentGauges:
        """The state in numbers."""
        return gauges_of(self)
