"""The reference engine as its hook sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from agent.engine.port import EngineDescription, EngineModel
from agent.engine.reference.experts import LayerExperts
from agent.engine.reference.group import RankGroup
from agent.engine.slot_port import SlotPort
from eplb_service.control import Address, LayerInfo
from eplb_service.ids import Incarnation


class ExitCode(IntEnum):
    """How a rank process ends."""

    STOPPED = 0  # asked to
    START_FAILED = 3  # configuration, model, or the other ranks
    STEP_FAILED = 4  # a step could not be completed: a peer is gone, an invariant is broken
    FAIL_STOP = 5  # the hook does not know how a commit came out: no further step may run


@dataclass(slots=True, kw_only=True)
class ReferencePort(SlotPort):
    """`EnginePort` of one rank.

    reason_file: where `fail_stop` leaves its reason. can_reform: whether the rank goes on when its group is lost.
    """

    reason_file: Path
    can_reform: bool = False

    def weights_version(self) -> int:
        """Always 0: this engine loads once."""
        return 0

    def is_capturing(self) -> bool:
        """Never: this engine captures no graphs."""
        return False

    def fail_stop(self, reason: str) -> None:
        """Leave the reason and end the process at once."""
        leave(ExitCode.FAIL_STOP, reason, self.reason_file)


def describe(
    group: RankGroup, layers: Sequence[LayerExperts], *, digest: str, incarnation: Incarnation, joins: bool = False
) -> EngineDescription:
    """What the hook is told of this engine in one group.

    digest: of the model. incarnation: of this process. joins: this rank is new to a group that serves.
    """
    fleet = group.fleet
    infos = tuple(
        LayerInfo(
            layer_id=layer.layer_id,
            num_logical=layer.tickets.numel(),
            slots=layer.num_slots,
            expert_bytes=layer.expert_bytes,
        )
        for layer in layers
    )
    initial = {layer.layer_id: tuple(layer.tables.physical_to_logical.tolist()) for layer in layers}
    return EngineDescription(
        deployment=fleet.deployment,
        address=Address(fleet.rank_ids[group.position], incarnation, group.group_id),
        node=fleet.nodes[group.position],
        group_rank_ids=fleet.rank_ids,
        nodes=fleet.nodes,
        phase=fleet.phase,
        stage=fleet.stage,
        models=(EngineModel(name=fleet.model_name, digest=digest, layers=infos, initial=initial),),
        capacity=fleet.capacity,
        dispatch=layers[0].dispatch,
        replica_table_width=int(layers[0].tables.logical_to_physical.shape[1]),
        rendezvous_host=fleet.rendezvous_host,
        rendezvous_port=fleet.hook_port,
        joins=joins,
    )


def leave(code: ExitCode, reason: str, reason_file: Path) -> NoReturn:
    """End the process now, whatever its other threads do; destructors of process groups may wait for peers, so none run.

    The reason goes to standard error and, because that may go nowhere, to a file.
    """
    if reason:
        line = f"{reason_file.stem}: {code.name.lower().replace('_', ' ')}: {reason}\n"
        try:
            reason_file.write_text(line)
        except OSError as error:
            sys.stderr.write(f"{reason_file}: cannot be written ({error})\n")
        sys.stderr.write(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
