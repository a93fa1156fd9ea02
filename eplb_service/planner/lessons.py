"""What a deployment learns from its windows, and takes up again after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from eplb_service.errors import EplbError
from eplb_service.planner.loads import dispatch_of

if TYPE_CHECKING:
    from eplb_service.planner.deployment import Deployment

_log = structlog.get_logger("eplb.planner")


def remember(deployment: Deployment) -> None:
    """Take up what the store says was learned. What cannot be read is learned anew."""
    data, deployment.ledger.learned = deployment.ledger.learned, None
    if data is None:
        return
    try:
        deployment.learning.read_document(data)
    except EplbError as error:
        _log.warning("learned.unreadable", deployment=deployment.name, reason=str(error))


def learn(deployment: Deployment) -> None:
    """What the last window teaches."""
    group, live, last = deployment.group, deployment.live, deployment.load.last
    if group is None or live is None or last is None:
        return
    context = deployment.context
    try:
        enough = deployment.learning.window_closed(
            last.window,
            last.imbalance,
            live,
            group,
            dispatch_of(group),
            copying=deployment.is_copying(),
            at_s=context.clock.wall(),
            commit_s=deployment.ledger.commit_s,
            serve_s=max(context.config.planning.interval_s, context.gate.min_generation_age_s),
        )
    except EplbError as error:  # windows of other tables than those live now: the next ones will do
        _log.debug("window.not_learned", deployment=deployment.name, reason=str(error))
        return
    if enough:
        deployment.store_learned()
