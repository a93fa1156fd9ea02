"""What a hook tells the planner of its rank."""

from __future__ import annotations

from agent.hook.config import HookConfig
from agent.hook.startup import EngineFacts
from eplb_service.control import (
    CAPABILITY_RESTORE,
    PROTOCOL_VERSION_MIN,
    PROTOCOL_VERSION_OF_SHARES,
    Registration,
)


def registration_of(
    facts: EngineFacts, config: HookConfig, *, weights_version: int, stages: bool, restores: bool
) -> Registration:
    """What the rank is. stages: it can take experts; restores: also from a backup of its own."""
    description = facts.description
    return Registration(
        deployment=description.deployment,
        address=description.address,
        node=description.node,
        group_rank_ids=description.group_rank_ids,
        phase=description.phase,
        stage=description.stage,
        models=facts.models,
        capacity=description.capacity,
        nic=facts.nic,
        dispatch=description.dispatch,
        vote_period=config.vote_period,
        window_steps=config.window_steps,
        sub_windows=config.sub_windows,
        staging_bytes=config.staging_bytes if stages else 0,
        replica_table_width=description.replica_table_width,
        weights_version=weights_version,
        capabilities=(CAPABILITY_RESTORE,) if stages and restores else (),
        protocol_min=PROTOCOL_VERSION_OF_SHARES if facts.shape.weighted else PROTOCOL_VERSION_MIN,
    )
