"""The map of a rank that joins a group, by its engine's description: every slot is empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agent.hook.stage_check import LayerShape
from eplb_service.control import LiveLayer
from eplb_service.generation import AS_LOADED
from eplb_service.ids import LayerRef, RankId
from eplb_service.placement import EMPTY_SLOT, row_digest
from eplb_service.replica_shares import as_values


def live_of_a_rank_that_joins(
    layers: Mapping[LayerRef, LayerShape], group: Sequence[RankId], *, weighted: bool
) -> dict[LayerRef, LiveLayer]:
    """What is known of the map before the others tell it: nothing, every slot is empty."""
    live = {}
    for layer, shape in layers.items():
        row = np.full(shape.slots * len(group), EMPTY_SLOT, np.int32)
        shares = np.zeros(row.size, np.float32) if weighted else None
        live[layer] = LiveLayer(
            layer=layer,
            generation=AS_LOADED,
            digest=row_digest(layer, row, shares),
            row=tuple(row.tolist()),
            shares=as_values(shares),
        )
    return live
