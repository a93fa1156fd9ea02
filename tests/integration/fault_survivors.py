"""A whole fleet that goes on without a rank that is lost, and takes another one in: no rank that is left starts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.tiny_moe.text import KINDS
from tests.integration.fault_checks import NUM_EXPERTS
from tests.integration.fault_fleet import STEP_TIMEOUT_S, Fault, FaultFleet, Part, Phase
from tests.integration.fault_lines import brought_to, check_nothing_left_behind, how_it_ended, told
from tests.integration.fault_matrix import TOKENS
from tests.integration.surviving_fleet import SurvivingFleet


class LosingFleet(SurvivingFleet, FaultFleet):
    """The ranks that are left hold every expert, or get it back from the checkpoint."""

    planner_arguments = ("--policy=greedy",)

    def __init__(self, *, rank_ids: Sequence[int], **options: Any) -> None:
        options.setdefault("slots_per_rank", -(-NUM_EXPERTS // (len(rank_ids) - 1)) + 1)
        super().__init__(rank_ids=rank_ids, **options)

    @property
    def engine_options(self) -> Mapping[str, Any]:
        return {**super().engine_options, "step_timeout_s": STEP_TIMEOUT_S}  # the launcher ends a rank that hangs

    @property
    def group(self) -> tuple[int, ...]:
        """Ids of the ranks of the present group, in its order."""
        return self.ranks.config.rank_ids

    def rank_pid(self, position: int) -> int:
        return self.ranks.process(self._rank_ids[position]).pid or 0

    def until_gone(self, rank_id: int) -> None:
        """Wait until the others go on without it, and it is no more."""
        left = {rank for rank in self._rank_ids if rank != rank_id}
        self.until(lambda: set(self.group) == left, f"ranks {sorted(left)} to go on alone")
        self.until(lambda: self.serving.num_ranks == len(left), f"the end of rank {rank_id}'s connections")
        self.until(lambda: not self.ranks.process(rank_id).is_alive(), f"the end of rank {rank_id}")

    def bring_in(self, rank_id: int) -> None:
        """Have a rank join, with empty slots, and ask it, too."""
        self.join(rank_id, self.ranks.config.nodes[0])
        self._meet([self.ranks.process(rank_id).pid or 0])

    def order_another(self) -> int:
        """A generation that moves experts: other prompts, and what is best for them."""
        self.traffic.kind = KINDS[(KINDS.index(self.traffic.kind) + 1) % len(KINDS)]
        self.serve_tokens(4 * TOKENS)
        return self.rebalance()


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank is lost in a phase. fault: KILL, or STOP until the launcher ends it past the step's deadline."""

    fault: Fault
    phase: Phase

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}"

    def told(self) -> str:
        """What is expected, for people."""
        return (
            f"rank {self!s}: those that are left serve on in their processes, every expert is back, the generation under"
            " way ends with a reason or goes live, a new rank takes its place"
        )


LOSSES = tuple(Loss(fault, phase) for fault in (Fault.KILL, Fault.STOP) for phase in Phase)


def try_loss(fleet: LosingFleet, loss: Loss) -> str:
    """Returns how the generation under way ended, empty when there was none. Raises AssertionError that tells the line."""
    with told(loss.told()):
        return _try(fleet, loss)


def _try(fleet: LosingFleet, loss: Loss) -> str:
    fleet.until_ready()
    lost = fleet.held_rank
    left = {rank: fleet.ranks.process(rank).pid for rank in fleet.group if rank != lost}
    with brought_to(fleet, loss.phase) as (number, _):
        fleet.strike(Part.RANK, loss.fault)
    fleet.until_gone(lost)
    fleet.serve_tokens(TOKENS)
    fleet.until_ready()
    fleet.until(lambda: (status := fleet.status()) is not None and not status.unreachable, "every expert to be back")
    ended, _ = how_it_ended(fleet, number)
    fleet.settle()
    assert {rank: fleet.ranks.process(rank).pid for rank in fleet.group} == left, "a rank that was left started again"
    fleet.bring_in(lost)
    fleet.until_ready()
    fleet.prove_life_once()
    check_nothing_left_behind(fleet)
    return ended
