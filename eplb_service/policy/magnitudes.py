"""How large and how small the numbers of a problem may be: what searches and bounds compute with them stays exact enough.

Searches multiply loads by work, divide them by capacities and by one another, and add up bytes in 64 bits. Beyond these limits
a result overflows or is lost, and a plan would be made on nothing. No fleet is near them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError
from eplb_service.topology import Topology

LOAD_MAX = 1e300
"""Most tokens of an expert in a sub-window."""

LOAD_MIN = 1e-290
"""Fewer tokens of an expert in a sub-window are none: what is left of a load that was averaged away."""

CAPACITY_MIN, CAPACITY_MAX = 1e-3, 1e15
"""Slowest and fastest rank: whatever the unit, sums of loads over them stay finite."""

BASE_LOAD_MAX = 1e3
"""Most work that a rank may have beside a layer's tokens, in mean rank loads."""

EXPERT_BYTES_MAX = 1 << 44
"""Most bytes of one expert of one layer, 16 TiB."""


def check_magnitudes(
    loads: npt.NDArray[np.float64], layer_ids: Sequence[int], topology: Topology, expert_bytes: Sequence[int]
) -> None:
    """Raises InvalidInputError naming the number that is out of range. Loads: shape (W, L, E), finite, >= 0."""
    if loads.max(initial=0.0) > LOAD_MAX:
        window, layer, expert = np.argwhere(loads > LOAD_MAX)[0].tolist()
        raise InvalidInputError(
            f"loads are tokens, at most {LOAD_MAX:g} of an expert; window {window} layer {layer_ids[layer]} expert {expert} has"
            f" {loads[window, layer, expert]:g}; scale them down"
        )
    for rank_id, speed in zip(topology.rank_ids, topology.capacity or (), strict=False):
        if not CAPACITY_MIN <= speed <= CAPACITY_MAX:
            raise InvalidInputError(
                f"rank {rank_id} has capacity {speed:g}; relative speeds run from {CAPACITY_MIN:g} to {CAPACITY_MAX:g}; declare"
                " a rank that serves next to nothing dead"
            )
    work = topology.base_load
    if work is not None and max(work) > BASE_LOAD_MAX:
        most = work.index(max(work))
        raise InvalidInputError(
            f"rank {topology.rank_ids[most]} has a base load of {work[most]:g} mean rank loads; at most {BASE_LOAD_MAX:g} can"
            " be planned for; it is work in mean rank loads, not in tokens"
        )
    for layer_id, size in zip(layer_ids, expert_bytes, strict=False):
        if not 0 <= size <= EXPERT_BYTES_MAX:
            raise InvalidInputError(f"an expert of layer {layer_id} has {size} bytes; sizes run from 0 to {EXPERT_BYTES_MAX}")
