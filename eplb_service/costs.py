"""What imbalance and moves cost, in seconds: from what an operator gave, what was measured, and careful assumptions.

Saving and cost are both *time in which the deployment serves less*, so they can be compared:

    saved = seconds per step x fall of imbalance x steps until the load drifts away
    cost  = copying x interference + flips x stall + memory that replicas hold, if that is priced
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from eplb_service.control import NO_THROTTLE, Throttle
from eplb_service.errors import InvalidInputError
from eplb_service.flip_stall import ASSUMED, StallModel
from eplb_service.moves import MoveSummary
from eplb_service.topology import LinkKind

ASSUMED_BYTES_PER_S = 1e9
"""Until a rollout was measured: far below any interconnect between GPUs, so that a first move must be well worth it."""

ASSUMED_STALL_S = 0.05
"""Until a flip was measured: several decode steps."""

ASSUMED_INTERFERENCE = 1.0
"""Until it was measured: nothing at all is served while weights are copied."""

GIB = float(1 << 30)


class Origin(StrEnum):
    """Where a number of the cost model comes from."""

    GIVEN = "given"
    MEASURED = "measured"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What imbalance and moves cost, in seconds.

    seconds_per_step: time of one step spent where ranks wait for the busiest, at imbalance 1 (its excess over 1 is lost time).
    horizon_steps: steps that the gain is worth: until the load is expected to drift away.
    bytes_per_s: rate at which one rank receives weights from its node. cross_node_bytes_per_s: rate at which one NIC receives
    them from others (None = the same); where no NICs are named every rank has its own.
    commit_stall_s: time that one chunk's flip stops every rank.
    copy_interference: share of serving time lost while weights are copied.
    replica_s_per_gib: seconds that a GiB held by replicas is worth over the horizon; 0 = memory is shown, not priced.
    origins: where the numbers come from, by name; those not named were given.
    """

    seconds_per_step: float
    horizon_steps: float
    bytes_per_s: float
    commit_stall_s: float
    cross_node_bytes_per_s: float | None = None
    copy_interference: float = 1.0
    replica_s_per_gib: float = 0.0
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "horizon_steps", "bytes_per_s", "cross_node_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidInputError(f"{name} of the cost model must be finite and > 0; got {value}")
        if not 0 <= self.commit_stall_s < float("inf") or not 0 <= self.copy_interference <= 1:
            raise InvalidInputError(
                f"commit_stall_s must be >= 0 and copy_interference between 0 and 1;"
                f" got {self.commit_stall_s} and {self.copy_interference}"
            )
        if not 0 <= self.replica_s_per_gib < float("inf"):
            raise InvalidInputError(f"replica_s_per_gib must be finite and >= 0; got {self.replica_s_per_gib}")

    @property
    def cross_node(self) -> float:
        """Bytes per second into one NIC from other nodes."""
        return self.bytes_per_s if self.cross_node_bytes_per_s is None else self.cross_node_bytes_per_s

    def origin(self, name: str) -> Origin:
        """Where a number comes from."""
        return self.origins.get(name, Origin.GIVEN)

    def saved_s(self, gain: float) -> float:
        """Seconds saved by a fall of imbalance (mean over layers, by load) that lasts for the horizon."""
        return self.seconds_per_step * gain * self.horizon_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrice:
    """What a move costs. copy_s: how long weights are copied; the others: seconds of serving that this and the rest cost.

    nic_s: how much of copy_s is of tables whose busiest NIC takes longer than their busiest rank.
    """

    copy_s: float
    interference_s: float
    stall_s: float
    memory_s: float
    nic_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.interference_s + self.stall_s + self.memory_s


def copy_seconds(cost: CostModel, moves: MoveSummary) -> float:
    """Time that the busiest rank takes to receive its experts, or the busiest NIC, if that takes longer."""
    return max(_rank_seconds(cost, moves), _nic_seconds(cost, moves))


def _nic_seconds(cost: CostModel, moves: MoveSummary) -> float:
    """Time that the busiest NIC takes; 0 where none are named."""
    return moves.bytes_into_busiest_nic / cost.cross_node


def _rank_seconds(cost: CostModel, moves: MoveSummary) -> float:
    """Time that the busiest rank takes.

    The bytes of the busiest rank are split over links as those of all ranks are. Bytes that no serving rank holds come from a
    host or a checkpoint, and are counted as crossing nodes.
    """
    within, across = moves.bytes_by_link[LinkKind.SAME_NODE], moves.bytes_by_link[LinkKind.CROSS_NODE]
    across += moves.bytes_without_source
    total = within + across
    if not total:
        return 0.0
    return moves.bytes_into_busiest_rank * (within / cost.bytes_per_s + across / cost.cross_node) / total


def price(cost: CostModel, moves: Sequence[MoveSummary], *, num_flips: int, replica_bytes: float = 0.0) -> MovePrice:
    """Price of carrying out the moves of every table. num_flips: chunks. replica_bytes: more held by replicas than now.

    >>> from eplb_service.moves import NO_MOVES
    >>> cost = CostModel(seconds_per_step=1, horizon_steps=1, bytes_per_s=1, commit_stall_s=0.5)
    >>> price(cost, [NO_MOVES], num_flips=2).total_s
    1.0
    """
    copy_s = sum(copy_seconds(cost, part) for part in moves)
    return MovePrice(
        copy_s=copy_s,
        interference_s=copy_s * cost.copy_interference,
        stall_s=cost.commit_stall_s * num_flips,
        memory_s=max(0.0, replica_bytes) / GIB * cost.replica_s_per_gib,
        nic_s=sum(copy_seconds(cost, part) for part in moves if _nic_seconds(cost, part) > _rank_seconds(cost, part)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """What an operator gave (see `CostModel`); None = measure it. throttle: how fast ranks may send weights.

    commit_stall_s_max: chunks are cut so that a flip takes no longer; None = no limit.
    """

    seconds_per_step: float | None = None
    horizon_steps: float | None = None
    bytes_per_s: float | None = None
    cross_node_bytes_per_s: float | None = None
    commit_stall_s: float | None = None
    copy_interference: float | None = None
    replica_s_per_gib: float = 0.0
    throttle: Throttle = NO_THROTTLE
    commit_stall_s_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """What was measured of one deployment (see `CostModel`); None = not yet.

    seconds_per_token: of step time, for each token more on the busiest rank of a layer; step_time: the
    same as a sentence, or why it is not known. stalls: what a flip takes, by its bytes.
    """

    seconds_per_token: float | None = None
    step_time: str = "no step times were measured yet"
    horizon_steps: float | None = None
    bytes_per_s: float | None = None
    cross_node_bytes_per_s: float | None = None
    commit_stall_s: float | None = None
    copy_interference: float | None = None
    stalls: StallModel = ASSUMED


def cost_model(
    given: GivenCosts, measured: MeasuredCosts, *, tokens_per_step: float, steps_planned_from: float
) -> CostModel | None:
    """The cost model: what was given wins over what was measured, that over what is assumed. None: a step cannot be priced.

    tokens_per_step: mean rank load of a layer in one step, summed over layers: what the busiest ranks would
    serve at imbalance 1. steps_planned_from: of the windows that a plan is made from. Unless more is known, the load is
    expected to last as long again.
    """
    seconds, origins = given.seconds_per_step, dict[str, Origin]()
    if seconds is None and measured.seconds_per_token is not None:
        seconds, origins["seconds_per_step"] = measured.seconds_per_token * tokens_per_step, Origin.MEASURED
    if seconds is None or not 0 < seconds < float("inf"):
        return None
    # A throttle makes copies last longer and hinders serving less, alike: what an unmeasured copy costs stays the same.
    slowed = given.throttle.time_share * min(1.0, (given.throttle.bytes_per_s or ASSUMED_BYTES_PER_S) / ASSUMED_BYTES_PER_S)
    assumed = {
        "horizon_steps": max(1.0, steps_planned_from),
        "bytes_per_s": ASSUMED_BYTES_PER_S * slowed,
        "commit_stall_s": min(ASSUMED_STALL_S, given.commit_stall_s_max or ASSUMED_STALL_S),
        "copy_interference": ASSUMED_INTERFERENCE * slowed,
    }
    values: dict[str, float] = {}
    for name, fallback in assumed.items():
        values[name] = _first(name, given, measured, origins, fallback)
    known = given.cross_node_bytes_per_s or (None if given.bytes_per_s else measured.cross_node_bytes_per_s)
    across: float | None = known
    if known is None and given.bytes_per_s is None:  # never faster than the node's own links were measured to be
        across, origins["cross_node_bytes_per_s"] = min(ASSUMED_BYTES_PER_S, values["bytes_per_s"]), Origin.ASSUMED
    elif known is not None and given.cross_node_bytes_per_s is None:
        origins["cross_node_bytes_per_s"] = Origin.MEASURED
    return CostModel(
        seconds_per_step=seconds,
        cross_node_bytes_per_s=across,
        replica_s_per_gib=given.replica_s_per_gib,
        origins=origins,
        **values,
    )


def _first(name: str, given: GivenCosts, measured: MeasuredCosts, origins: dict[str, Origin], assumed: float) -> float:
    """A number from the first source that has it; notes which."""
    for source, origin in ((given, Origin.GIVEN), (measured, Origin.MEASURED)):
        value: float | None = getattr(source, name)
        if value is not None:
            origins[name] = origin
            return value
    origins[name] = Origin.ASSUMED
    return assumed
