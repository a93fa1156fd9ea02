"""What it takes to bring lost experts of the standard work back: `python -m benchmarks.restore`, the table of docs/elastic.md.

The start is the placement that `minmove` keeps at 1.05; then ranks are lost, and the group forms again without them. `greedy`
and `elastic` plan the ranks that are left for balance at once, as a planner would that does not bring experts back first.
"""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.drain import CASES, balanced, gib
from benchmarks.measuring import proposal_of
from eplb_service.dispatch import imbalance_of
from eplb_service.ids import RankId
from eplb_service.moves import MoveSummary, residency_moves
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem
from eplb_service.policy.restore import Restorers, restored
from eplb_service.policy.survivors import onto_ranks
from eplb_service.topology import Topology


def after_loss(slots: int, ranks: range) -> PlanningProblem:
    """The ranks that are left, with what they hold."""
    problem, live = balanced(slots)
    lost = frozenset(RankId(rank) for rank in ranks)
    stay = [place for place, rank in enumerate(problem.topology.rank_ids) if rank not in lost]
    topology = Topology(
        tuple(problem.topology.rank_ids[place] for place in stay), tuple(problem.topology.nodes[place] for place in stay)
    )
    return replace(problem, topology=topology, current=onto_ranks(live, topology), source_loads=None)


def row(what: str, slots: int, ranks: range) -> str:
    """One line of the table."""
    problem = after_loss(slots, ranks)
    missing = len(problem.current.uncovered())
    everyone = Restorers(
        ranks=set(problem.topology.rank_ids), drained=frozenset(), staging_bytes=slots * problem.expert_bytes[0]
    )
    begin = time.process_time()
    found = restored(problem, everyone).table
    cpu_s = time.process_time() - begin
    cells = [f"{what}, {slots} slots a rank", f"{missing:,}"]
    moves = moved(problem, found)
    cells += [f"{moves.experts:,}", f"{moves.bytes_without_source / 2**30:.1f}", f"{moves.bytes_into_busiest_rank / 2**30:.2f}"]
    cells += [f"{worst(problem, found):.3f}", f"{cpu_s:.2f} s"]
    for policy in ("elastic", "greedy"):
        proposal, _ = proposal_of(policy, problem if policy == "elastic" else replace(problem, max_imbalance=None))
        others = moved(problem, proposal.placement)
        cells.append(f"{others.experts:,}, {gib(others)} GiB")
    return f"| {' | '.join(cells)} |"


def moved(problem: PlanningProblem, target: Table) -> MoveSummary:
    """What going there moves."""
    return residency_moves(problem.current, target, problem.topology, problem.expert_bytes)


def worst(problem: PlanningProblem, table: Table) -> float:
    """Imbalance of the worst layer under the load that was planned for."""
    return imbalance_of(problem.total_loads, table, problem.topology, problem.dispatch).worst


def main() -> None:
    """Print the table."""
    print(
        "| lost | experts lost | moves | GiB from backups | GiB into the busiest rank | worst layer | time | elastic | greedy |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        print(row(*case), flush=True)


if __name__ == "__main__":
    main()
