"""What an engine that moves its own weights asks the planner, and what it is told: plain values, no wire format.

In an advised deployment the engine's own load balancer carries placements out; the planner only decides. One rank of the
expert-parallel group asks, the others get the answer from it. `agent/frames.py` carries these over the node's Unix socket,
`rpc/convert_advice.py` to the planner. The planner never calls: an engine that asks no more is simply not advised any more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.ids import DeploymentId, GenerationNumber

NO_GENERATION = GenerationNumber(0)


def map_digest(rows: npt.NDArray[np.integer]) -> int:
    """Digest of a map, shape (L, P), of any integer type: 63 bits, never 0. What ranks compare before and after they ask."""
    encoded = np.ascontiguousarray(rows, dtype="<i4")
    head = np.array(encoded.shape, dtype="<i4").tobytes()
    value = int.from_bytes(hashlib.blake2b(head + encoded.tobytes(), digest_size=8).digest(), "little")
    return (value & (1 << 63) - 1) or 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdviceRequest:
    """A question of one engine, once for each of its rebalancing intervals; repeating it (origin, sequence) is harmless.

    deployment: advised, one for each model and pipeline stage of an engine. engine: name and version, for people.
    origin: one life of the asking process, random; sequence: number of the question within it, from 1.
    layer_ids: absolute ids of the MoE layers, length L. rank_ids, nodes: ranks of the group in column order, length R.
    expert_bytes: of one expert of each layer, length L; empty = not known.
    dispatch: see `dispatch.Dispatch`. num_groups: expert groups that the engine keeps on one node each; 1 = none.
    load: token assignments since the last question, shape (L, E), float64 whole numbers, of all ranks together.
    current: the map that the engine routes by, shape (L, P), int32. digest: `map_digest` of it.
    steps: engine steps that the load is of; 0 = not known. step_time_s: mean seconds of one of them; 0 = not known.
    timeout_s: how long the engine waits for the answer.
    copied_generation, copied_s: the generation that the engine carried out last, and how long it took; 0 = not known.
    copy_held_steps: no step ran meanwhile.
    """

    deployment: DeploymentId
    engine: str
    origin: int
    sequence: int
    model: str
    layer_ids: tuple[int, ...]
    rank_ids: tuple[int, ...]
    nodes: tuple[str, ...]
    num_logical: int
    dispatch: str
    num_groups: int
    load: npt.NDArray[np.float64]
    current: npt.NDArray[np.int32]
    digest: int
    expert_bytes: tuple[int, ...] = ()
    steps: int = 0
    step_time_s: float = 0.0
    timeout_s: float = 5.0
    copied_generation: GenerationNumber = NO_GENERATION
    copied_s: float = 0.0
    copy_held_steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advice:
    """The answer to (origin, sequence). move: go to `rows`; else keep the map that the question came with.

    generation: number of the placement to go to, or of the one that is live (0 = as the engine has it). reason: one sentence.
    rows: shape (L, P), int32; None when nothing moves. digest: of rows, or of the map that stays.
    """

    origin: int
    sequence: int
    move: bool
    generation: GenerationNumber
    digest: int
    reason: str
    rows: npt.NDArray[np.int32] | None = None
