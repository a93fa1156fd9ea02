"""What it costs to empty ranks of the standard work: `python -m benchmarks.drain` prints the table of docs/elastic.md.

The start is the placement that `minmove` keeps at 1.05. `alone` are experts that no rank which stays holds: no drain moves
fewer. A planner that does not look at what is there (`greedy`, with the drained ranks dead) stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.measuring import proposal_of
from benchmarks.standard import RANKS, problem_of, standard_load
from eplb_service.drain import staying
from eplb_service.ids import RankId
from eplb_service.moves import MoveSummary, residency_moves
from eplb_service.placement import Table
from eplb_service.policy.base import Constraints, PlanningProblem
from eplb_service.policy.drained import without_drained
from eplb_service.policy.survivors import onto_ranks

NODES = 4
TARGET = 1.05
EXPERT_BYTES = 42 << 20
"""About one expert of DeepSeek-V3 in 8-bit floats."""

CASES: Sequence[tuple[str, int, range]] = (
    ("one rank", 9, range(5, 6)),
    ("three ranks", 9, range(5, 8)),
    ("a node", 11, range(8, 16)),
)
"""What is drained, slots a rank, ranks."""


def balanced(slots: int) -> tuple[PlanningProblem, Table]:
    """The standard work on four nodes, and the placement that is live."""
    problem = problem_of(
        standard_load(),
        slots_per_rank=slots,
        num_nodes=NODES,
        expert_bytes=EXPERT_BYTES,
        constraints=Constraints(),
        max_imbalance=TARGET,
    )
    proposal, _ = proposal_of("minmove", problem)
    return problem, proposal.placement


def row(what: str, slots: int, ranks: range) -> str:
    """One line of the table."""
    problem, live = balanced(slots)
    drained = frozenset(RankId(rank) for rank in ranks)
    alone = len(onto_ranks(live, staying(problem.topology, drained)).uncovered())
    without, _ = without_drained(replace(problem, current=live), drained)
    proposal, cpu_s = proposal_of("elastic", without)
    other, _ = proposal_of("greedy", replace(without, max_imbalance=None))
    moves, others = (residency_moves(live, one.placement, problem.topology, problem.expert_bytes) for one in (proposal, other))
    stay = (RANKS - len(drained)) * slots
    return (
        f"| {what}, {slots} slots a rank | {stay} | {alone:,} | {moves.experts:,} | {gib(moves)} |"
        f" {moves.bytes_into_busiest_rank / 2**30:.2f} | {proposal.predicted.worst:.4f} | {cpu_s:.1f} s |"
        f" {others.experts:,}, {gib(others)} GiB |"
    )


def gib(moves: MoveSummary) -> str:
    """Bytes of all moves."""
    return f"{moves.move_bytes / 2**30:.1f}"


def main() -> None:
    """Print the table."""
    print(
        "| drained | slots that stay | alone | experts moved | GiB | GiB into the busiest rank | worst layer | time | greedy |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        print(row(*case), flush=True)


if __name__ == "__main__":
    main()
