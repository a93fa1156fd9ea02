"""Publishing: a new generation is stored, together with the answer to whoever asked for it, and then rolled out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from eplb_service import failpoints
from eplb_service.errors import ConflictError
from eplb_service.generation import Generation
from eplb_service.imbalance import Imbalance
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement
from eplb_service.planner.documents import Loads, RequestRecord, VerdictRecord
from eplb_service.planner.drained_view import why_off_limits
from eplb_service.planner.ledger import Previous

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment

UNKNOWN = Imbalance(())
"""Of a load that nobody measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a new generation is to hold. loads: that it was planned for, shape (L, E) for each table; empty: not known.

    serves: first and last window that it was planned for by a forecast; None: planned from the windows as they were.
    """

    target: Placement
    before: Imbalance
    predicted: Imbalance
    lower_bound: Imbalance
    moves: MoveSummary
    policy: str
    reason: str
    promised_gain: float | None = None
    gain_share: float = 1.0
    loads: Loads = ()
    serves: tuple[int, int] | None = None


async def publish(
    deployment: Deployment, content: Content, record: RequestRecord | None, verdict: VerdictRecord
) -> RequestRecord | None:
    """Store a new generation (and the answer to whoever asked), then roll it out. Call with `planning` held.

    Raises ConflictError for a placement that brings something to a drained rank.
    """
    off_limits = why_off_limits(deployment, content.target)
    if off_limits:
        raise ConflictError(f"nothing was published for {deployment.name}: {off_limits}")
    log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name)
    clock, live, floor = deployment.context.clock, deployment.live, deployment.generation_floor
    number = deployment.ledger.take_number(max(floor, live.newest_generation if live is not None else floor))
    generation = Generation(
        number=number,
        placement=content.target,
        created_at_s=clock.wall(),
        reason=content.reason,
        policy=content.policy,
        epoch=deployment.leading.epoch,
        before=content.before,
        predicted=content.predicted,
        lower_bound=content.lower_bound,
        moves=content.moves,
        promised_gain=content.promised_gain,
        gain_share=content.gain_share,
    )
    if record is not None:
        record = dataclasses.replace(record, generation=number)
    begin_s = clock.monotonic()
    previous = Previous(number, live.placement, content.loads) if live is not None else None
    puts = deployment.ledger.publish_puts(generation, record, previous)
    await deployment.commit(puts.puts, puts.expects, puts.deletes)
    deployment.ledger.keep(generation)
    deployment.ledger.previous = previous
    if record is not None:
        deployment.ledger.remember(record)
    log.info(
        "generation.published",
        generation=number,
        policy=content.policy,
        moves=content.moves.experts,
        code=verdict.code,
        reason=content.reason,
    )
    deployment.journals.begin(number)
    deployment.note("generation.published", f"generation {number}: {content.reason}")
    await failpoints.reach_async("planner.generation.persisted")
    took_s, most_s = clock.monotonic() - begin_s, deployment.context.config.planning.proposal_ttl_s
    why = deployment.why_not_begin()
    if took_s > most_s:
        why = f"the store took {took_s:.0f} s to take it, at most {most_s:.0f} s are allowed (planning.proposal_ttl_s)"
    elif not why and deployment.live is not live:
        why = "the live map changed meanwhile"
    if why:
        deployment.dropped(generation, f"not begun: {why}")
    else:
        deployment.learning.serves = (number, *content.serves) if content.serves is not None else None
        deployment.begin_rollout(generation)
    return record
