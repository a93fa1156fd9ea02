"""How an expert-parallel group is laid out: plain values, the same on all its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import DeploymentId, Phase, RankId

DISPATCHES = (Dispatch.EVEN, Dispatch.NEAREST, Dispatch.WEIGHTED)
"""What this engine can do; it numbers an expert's tokens and hashes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """One expert-parallel group.

    Attributes:
        deployment: Name of the group for the planner.
        rank_ids: Stable ids, in the order of the process group's ranks, which is the column order of placements.
        nodes: Name of each rank's node.
        rendezvous_host, rendezvous_port: Where the first rank may listen for the hook's own groups.
        num_redundant_experts: Slots of a layer beyond one for each expert, over all ranks.
        model_name: Name of the model within the deployment.
        dispatch: How a token's replica is picked: `even` (in turn), `nearest` or `weighted` (see `reference.dispatch`).
        exact: Whether outputs must be the bits of the model in one process; if not, they are its numbers up to rounding.

    >>> settings = ParallelSettings(deployment=DeploymentId("chat"), rank_ids=(RankId(0), RankId(1)), nodes=("a", "a"),
    ...     rendezvous_host="127.0.0.1", rendezvous_port=29600, num_redundant_experts=4)
    >>> settings.slots(16)
    10
    """

    deployment: DeploymentId
    rank_ids: tuple[RankId, ...]
    nodes: tuple[str, ...]
    rendezvous_host: str
    rendezvous_port: int
    num_redundant_experts: int = 0
    model_name: str = "target"
    dispatch: Dispatch = Dispatch.EVEN
    phase: Phase = Phase.MIXED
    stage: int = 0
    capacity: float = 1.0
    exact: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be laid out. Raises InvalidInputError."""
        if not self.rank_ids or len(set(self.rank_ids)) != len(self.rank_ids) or min(self.rank_ids) < 0:
            raise InvalidInputError(f"rank ids must be unique, not negative and at least one; got {list(self.rank_ids)}")
        if len(self.nodes) != len(self.rank_ids):
            raise InvalidInputError(f"{len(self.nodes)} node names for {len(self.rank_ids)} ranks; give one for each rank")
        if self.dispatch not in DISPATCHES:
            raise InvalidInputError(f"dispatch is {self.dispatch!r}; this engine has {', '.join(DISPATCHES)}")
        if self.num_redundant_experts < 0:
            raise InvalidInputError(f"num_redundant_experts is {self.num_redundant_experts}; give 0 or more")

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.rank_ids)

    def slots(self, num_experts: int) -> int:
        """S for a layer of E experts. Raises InvalidInputError when the slots do not divide by the ranks."""
        num_physical, num_ranks = num_experts + self.num_redundant_experts, self.num_ranks
        slots, rest = divmod(num_physical, num_ranks)
        if rest:
            fitting = [str(self.num_redundant_experts + step) for step in (-rest, num_ranks - rest)]
            near = " or ".join(number for number in fitting if int(number) >= 0)
            raise InvalidInputError(
                f"{num_experts} experts and {self.num_redundant_experts} redundant ones are {num_physical} slots, which"
                f" {num_ranks} ranks do not divide; use num_redundant_experts = {near}"
            )
        return slots
