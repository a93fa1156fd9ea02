"""After the commit: looks at every full window under the live generation until it can be judged (see `validation`)."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog

from eplb_service.generation import ORDERED, Generation, GenerationState
from eplb_service.horizon import WindowSum
from eplb_service.ids import GenerationNumber
from eplb_service.imbalance import Float64Array
from eplb_service.placement import Placement
from eplb_service.planner.learning import Held
from eplb_service.planner.ledger import Previous
from eplb_service.planner.loads import dispatch_of
from eplb_service.planner.proposing import same_shape
from eplb_service.validation import Judgement, Observation, Outcome, judge, observe

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fault:
    """A generation that made things worse. loads: that it was planned for, shape (L, E) for each table."""

    generation: GenerationNumber
    reason: str
    previous: Placement
    live_digest: int
    loads: tuple[Float64Array, ...]


def to_judge(windows: Sequence[WindowSum], due: Sequence[int], num_seen: int) -> list[WindowSum]:
    """The windows that are the next to be looked at. due: least index of each in turn; num_seen: those that were already."""
    chosen: list[WindowSum] = []
    for window in windows:
        if num_seen + len(chosen) < len(due) and window.index >= due[num_seen + len(chosen)]:
            chosen.append(window)
    return chosen


class Validating:
    """Judges the generations of one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._fault: tuple[Fault, float] | None = None
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name)

    async def look(self) -> Fault | None:
        """Observe the windows that closed since; a fault while the live generation is newly judged worse and not undone."""
        await self._observe()
        if self._fault is None:
            return None
        fault, judged_at_s = self._fault
        now_s, most_s = self._deployment.context.clock.monotonic(), self._deployment.context.config.planning.proposal_ttl_s
        if now_s - judged_at_s > most_s:
            self._fault = None
            return None
        return fault

    def undone(self, fault: Fault) -> None:
        """What was live before is on its way back."""
        deployment = self._deployment
        self._fault = None
        deployment.learning.held.append(
            Held(
                generation=fault.generation,
                reason=fault.reason,
                loads=fault.loads,
                at_s=deployment.context.clock.wall(),
            )
        )
        deployment.store_learned()
        deployment.context.metrics.rolled_back(deployment.name)

    async def _observe(self) -> None:
        generation, previous = self._looked_at()
        if generation is None or previous is None:
            return
        deployment, config = self._deployment, self._deployment.context.validation
        group, live = deployment.group, deployment.live
        if group is None or live is None:
            return
        seen = {observation.window_index for observation in generation.observations}
        least = deployment.context.gate.min_coverage
        windows = [
            window
            for window in deployment.learning.history
            if window.live_digest == live.digest and window.coverage >= least and window.index not in seen
        ]
        windows = to_judge(windows, self._due(generation.number, config.windows), len(seen))
        if not windows or not same_shape(previous.placement, live.placement):
            return
        model, offset_s = deployment.learning.baseline or (None, 0.0)
        observations = [
            await asyncio.to_thread(
                observe,
                window,
                live.placement.tables,
                previous.placement.tables,
                topology=group.topology,
                dispatch=dispatch_of(group),
                model=model,
                offset_s=offset_s,
            )
            for window in windows
        ]
        current = deployment.ledger.generations.get(generation.number)
        if current is not generation:
            return  # something happened to it meanwhile
        self._add(generation, tuple(observations), previous, live.digest)

    def _due(self, number: GenerationNumber, num_windows: int) -> list[int]:
        """Least index of each window that a generation is judged on: the next ones, or evenly over those it was planned for.

        A plan for a forecast may be made for what begins a little later; then its first windows alone would be no fair judge.
        """
        serves = self._deployment.learning.serves
        if serves is None or serves[0] != number:
            return [0] * num_windows
        return [math.floor(index) for index in np.linspace(serves[1], serves[2], num_windows)]

    def _looked_at(self) -> tuple[Generation | None, Previous | None]:
        """The live generation while it is to be judged, and what was live before it."""
        deployment = self._deployment
        live, previous = deployment.live, deployment.ledger.previous
        if deployment.lane is None or live is None or previous is None or not deployment.is_free:
            return None, None
        generation = deployment.ledger.generations.get(live.newest_generation)
        if (
            generation is None
            or generation.state is not GenerationState.ACTIVE
            or generation.outcome
            or previous.generation != generation.number
            or generation.policy in ORDERED
        ):
            return None, None
        return generation, previous

    def _add(self, generation: Generation, observations: tuple[Observation, ...], previous: Previous, live_digest: int) -> None:
        deployment = self._deployment
        promised = generation.promised_gain
        every = generation.observations + observations
        judgement = judge(deployment.context.validation, promised if promised is not None else 0.0, every)
        outcome = "" if judgement.outcome is Outcome.PENDING else judgement.outcome.value
        deployment.became(dataclasses.replace(generation, observations=every, outcome=outcome, judgement=judgement.reason))
        if not outcome:
            return
        self._judged(generation, judgement)
        if judgement.outcome is Outcome.WORSE and promised is not None:
            fault = Fault(
                generation=generation.number,
                reason=judgement.reason,
                previous=previous.placement,
                live_digest=live_digest,
                loads=previous.loads,
            )
            self._fault = (fault, deployment.context.clock.monotonic())

    def _judged(self, generation: Generation, judgement: Judgement) -> None:
        """Log, count, learn."""
        deployment, promised = self._deployment, generation.promised_gain
        level = 30 if judgement.outcome is Outcome.WORSE else 20
        self._log.log(
            level,
            "generation.validated",
            generation=generation.number,
            outcome=judgement.outcome.value,
            promised_gain=promised,
            observed_gain=round(judgement.gain, 6),
            reason=judgement.reason,
        )
        deployment.note("generation.validated", f"generation {generation.number}: {judgement.reason}")
        deployment.context.metrics.generation_validated(
            deployment.name, judgement.outcome.value, promised_gain=promised, observed_gain=judgement.gain
        )
        if promised is not None:
            # The gate believed in a share of the plan's promise only; the bias is that of the plan.
            deployment.learning.bias = deployment.learning.bias.after(
                promised=promised / generation.gain_share, observed=judgement.gain
            )
        deployment.store_learned()
        deployment.announce()
