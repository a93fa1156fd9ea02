"""Whether a generation can be rolled out from here, and in which chunks."""

from __future__ import annotations

from eplb_service.errors import InvalidInputError
from eplb_service.generation import Generation, LiveMap
from eplb_service.ids import GenerationNumber
from eplb_service.membership.group import Group
from eplb_service.rollout.chunks import PlannedChunk, plan_chunks


def chunks_to_roll_out(
    generation: Generation,
    *,
    group: Group,
    live: LiveMap,
    generation_floor: GenerationNumber,
    layers_per_chunk_max: int | None,
    flip_bytes_max: int | None = None,
) -> tuple[PlannedChunk, ...]:
    """Chunks from the live map to a generation: only the layers that differ, so an unfinished one is continued.

    generation_floor: highest generation that any rank ever saw. Raises InvalidInputError with the reason why it cannot start.
    """
    name = f"generation {generation.number}"
    if group.observe_only:
        raise InvalidInputError(f"{name} cannot start: {group.observe_only} (observe only)")
    if generation.number < generation_floor:
        raise InvalidInputError(f"{name} cannot start: ranks have seen generation {generation_floor}; numbers never go back")
    _check_not_given_twice(generation, live)
    shares_problem = group.shares_problem(generation.placement)
    if shares_problem:
        raise InvalidInputError(f"{name} cannot start: {shares_problem}")
    for table in generation.placement.tables:
        uncovered = table.uncovered()
        if uncovered:
            layer, expert = uncovered[0]
            raise InvalidInputError(f"{name} cannot start: it leaves expert {expert} of layer {layer} on no rank")
        most = int(table.replica_counts.max())
        if most > group.replica_table_width:
            raise InvalidInputError(
                f"{name} cannot start: an expert of model {table.model!r} has {most} replicas, the engine's tables hold"
                f" {group.replica_table_width}"
            )
    return plan_chunks(
        live.placement,
        generation.placement,
        topology=group.topology,
        expert_bytes=group.expert_bytes,
        staging_bytes=group.staging_bytes,
        layers_max=layers_per_chunk_max,
        flip_bytes_max=flip_bytes_max,
        fan_out=group.fan_out,
        restorers=group.restorers,
    )


def _check_not_given_twice(generation: Generation, live: LiveMap) -> None:
    """A layer that routes by this number has its row, or the number was given to another generation too.

    That can be after a store lost its data while the planner that had published lived on: nobody else could know of the number.
    """
    for layer in live.differing_layers(generation.placement):
        if live.layer_generations[layer] == generation.number:
            raise InvalidInputError(
                f"generation {generation.number} cannot start: ranks route layer {layer} by another row under that number,"
                f" which a planner published before the store lost its data; publish again under a new number"
            )
