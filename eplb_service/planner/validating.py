"""After the commit: looks at every full window under the live generation until it can be judged (see `validation`)."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from eplb_service.generation import Generation, GenerationState
from eplb_service.ids import GenerationNumber
from eplb_service.imbalance import Float64Array
from eplb_service.placement import Placement
from eplb_service.planner.learning import Held
from eplb_service.planner.loads import dispatch_of
from eplb_service.planner.proposing import same_shape
from eplb_service.validation import Judgement, Observation, Outcome, judge, observe

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fault:
    """A generation that made things worse. loads: of the last window, shape (L, E) for each table."""

    generation: GenerationNumber
    reason: str
    previous: Placement
    live_digest: int
    loads: tuple[Float64Array, ...]

    def held(self) -> Held:
        """Nothing is moved until the load is another one."""
        return Held(generation=self.generation, reason=self.reason, loads=self.loads)


class Validating:
    """Judges the generations of one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._number = GenerationNumber(0)
        self._offset_s = 0.0
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name)

    async def look(self) -> Fault | None:
        """Observe the windows that closed since; a fault when the generation is judged worse, once."""
        generation, previous = self._looked_at()
        if generation is None or previous is None:
            return None
        deployment, config = self._deployment, self._deployment.context.validation
        group, live = deployment.carrier.group, deployment.live
        if group is None or live is None:
            return None
        if self._number != generation.number:  # what steps were off by just before
            self._number, self._offset_s = generation.number, deployment.learning.offset_s(config.windows)
        seen = {observation.window_index for observation in generation.observations}
        least = deployment.context.gate.min_coverage
        windows = [
            window
            for window in deployment.learning.history
            if window.live_digest == live.digest and window.coverage >= least and window.index not in seen
        ][: config.windows - len(seen)]
        if not windows or not same_shape(previous, live.placement):
            return None
        model = deployment.learning.model
        observations = [
            await asyncio.to_thread(
                observe,
                window,
                live.placement.tables,
                previous.tables,
                topology=group.topology,
                dispatch=dispatch_of(group),
                model=model,
                offset_s=self._offset_s,
            )
            for window in windows
        ]
        current = deployment.ledger.generations.get(generation.number)
        if current is not generation:
            return None  # something happened to it meanwhile
        return self._add(generation, tuple(observations), previous, live.digest, windows[-1].loads)

    def _looked_at(self) -> tuple[Generation | None, Placement | None]:
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
            or generation.policy == "rollback"
        ):
            return None, None
        return generation, previous.placement

    def _add(
        self,
        generation: Generation,
        observations: tuple[Observation, ...],
        previous: Placement,
        live_digest: int,
        loads: tuple[Float64Array, ...],
    ) -> Fault | None:
        deployment = self._deployment
        promised = generation.promised_gain
        every = generation.observations + observations
        judgement = judge(deployment.context.validation, promised if promised is not None else 0.0, every)
        outcome = "" if judgement.outcome is Outcome.PENDING else judgement.outcome.value
        deployment.became(dataclasses.replace(generation, observations=every, outcome=outcome, judgement=judgement.reason))
        if not outcome:
            return None
        self._judged(generation, judgement)
        if judgement.outcome is not Outcome.WORSE or promised is None:
            return None
        return Fault(
            generation=generation.number,
            reason=judgement.reason,
            previous=previous,
            live_digest=live_digest,
            loads=loads,
        )

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
