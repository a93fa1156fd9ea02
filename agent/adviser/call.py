"""One call of an engine's policy, as plain values, and what came of it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eplb_service.errors import InvalidInputError

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]


class Outcome(StrEnum):
    """What a call led to; the names of the counters.

    MOVED: a new map. KEPT: the planner says keep. IDLE: no load, nobody was asked (such as an engine's profile at its start).
    AWAY: no answer in time. REFUSED: an answer that this engine cannot go to. DISAGREED: ranks did not have the same map, or
    not the same answer. FAILED: something went wrong on a rank. GROUP: the ranks could not talk to one another.
    ENGINE: the engine's own policy answered (it is changing its size, or has no map yet).
    """

    MOVED = "moved"
    KEPT = "kept"
    IDLE = "idle"
    AWAY = "away"
    REFUSED = "refused"
    DISAGREED = "disagreed"
    FAILED = "failed"
    GROUP = "group"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """What one rank was called with.

    load: token assignments of all ranks together, shape (L, E), float64. current: the map, shape (L, P), int32.
    num_ranks: of the expert-parallel group. num_groups: as the engine says. layer_ids: ids of the rows, length L.
    steps: that the load is of; 0 = not known. deployment, model, engine, dispatch, expert_bytes: see `AdviceRequest`.
    replicas_max, distinct_on_rank: see `EngineRules`.
    """

    load: Float64Array
    current: Int32Array
    num_ranks: int
    num_groups: int
    layer_ids: tuple[int, ...]
    deployment: str
    model: str
    engine: str
    dispatch: str
    replicas_max: int
    distinct_on_rank: bool = False
    steps: int = 0
    expert_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.load.ndim != 2 or self.current.ndim != 2 or len(self.load) != len(self.current):
            raise InvalidInputError(
                f"the load has shape {self.load.shape} and the map {self.current.shape};"
                " expected (layers, experts) and (layers, slots)"
            )
        if not np.isfinite(self.load).all() or (self.load < 0).any():
            raise InvalidInputError(
                f"the load has negative or endless counts (least {self.load.min()}): 32-bit counters of the engine ran over;"
                " use a shorter window"
            )

    @property
    def num_logical(self) -> int:
        """Experts of each layer."""
        return int(self.load.shape[1])

    @property
    def resizing(self) -> str:
        """Why the map is none to stay on, one sentence; empty = it is one.

        Ranks that join an engine have empty slots: to stay would leave them idle, so the engine's own policy fills them.
        """
        if not self.current.size or 0 <= int(self.current.min()) <= int(self.current.max()) < self.num_logical:
            return ""
        return f"the engine's map has slots without an expert of 0 to {self.num_logical - 1}: it changes its size"

    @property
    def idle(self) -> bool:
        """Nothing was routed."""
        return not self.load.any()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What all ranks do, the same on each.

    rows: the map to go to, shape (L, P), int32; None = stay. generation: of the answer, -1 = none. reason: one sentence.
    """

    outcome: Outcome
    reason: str
    generation: int = -1
    rows: Int32Array | None = None


def each_token_once(load: Float64Array, num_ranks: int) -> Float64Array:
    """Loads without the ranks that counted the same tokens. Shape (L, E), both.

    With tensor parallelism every rank of a stage sees all tokens, and the engine adds their counts up. How many ranks do so
    depends on engine, release and back end, but they are a divisor of the ranks, and then every count is a multiple of it: no
    chance, with hundreds of counts. Needs whole numbers; others are left as they are.

    >>> each_token_once(np.array([[4.0, 8.0, 2.0]]), 4)
    array([[2., 4., 1.]])
    """
    if (load != np.floor(load)).any() or not load.any():
        return load
    common = int(np.gcd.reduce(load.astype(np.int64).reshape(-1)))
    return load / math.gcd(common, num_ranks)
