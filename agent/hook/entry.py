"""A rank comes into a group that forms again: what it does between the first word to the others and its first step.

Nothing that the rank remembers changes in here but what the others' decision flips: a try that fails is made again, with any
other ranks, from where this one stands by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.hook.config import HookConfig
from agent.hook.forming import Forming
from agent.hook.loaded_check import KnownExperts
from agent.hook.regroup import Agreement
from agent.hook.routing import write_tables
from agent.hook.stager import Stager
from agent.hook.startup import EngineFacts, Meeting, gather
from agent.transfer.gloo import GlooGroup, Store
from agent.transfer.streams import Streams
from eplb_service.errors import ConflictError
from eplb_service.failpoints import reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A group that a rank came into. facts: `live` is what all its ranks route by, and what their tables say."""

    facts: EngineFacts
    agreement: Agreement
    meeting: Meeting


def come_in(
    forming: Forming,
    facts: EngineFacts,
    *,
    config: HookConfig,
    streams: Streams,
    weights_version: int,
    flip: Callable[[Agreement], str],
    staging: Callable[[Store], Stager | str],
) -> Entry:
    """Agree with all ranks, write the tables, form the vote group, find the ways that experts go.

    flip: do what is decided of the chunk that this rank voted for; why that could not be, empty when it could. staging: of this
    rank, or why it can move nothing; ranks that differ in that, or in other settings, observe only.
    Raises EnvironmentFault when this rank must not serve on, as DeadlineError when a rank did not come in time. The others are
    told what failed here, rather than wait for this rank.
    """
    with forming.telling_of_failure():
        shape = facts.shape
        agreement = forming.agree(config.vote_period)
        reach("hook.reform.agreed")
        forming.done(flip(agreement))
        live = forming.live(shape.layers, weighted=shape.weighted)
        write_tables(live, facts.tables, shape.layers, width=shape.replica_table_width, device=facts.device, streams=streams)
        stager = staging(forming.store)
        problem = stager if isinstance(stager, str) else ""
        mine = KnownExperts(weights_version) if isinstance(stager, str) else stager.known.of(weights_version)
        known = forming.known(mine)
        facts = replace(facts, live=live, problem=problem)
        votes: GlooGroup | None = None
        try:
            votes = gather(forming.store, facts, config)
        except ConflictError as error:
            problem = str(error)
        if not isinstance(stager, str) and not problem:
            stager.form_again(shape, facts.description.nodes, forming.store, known, weights_version)
        reach("hook.reform.gathered")
        return Entry(facts=facts, agreement=agreement, meeting=Meeting(forming.store, votes, problem))
