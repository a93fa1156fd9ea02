"""Experts that tokens choose together, on recorded routing of a public model: nodes that a token visits, and balance.

gpt-oss-20b: 24 layers of 32 experts, the top 4 of 215,438 tokens. Every second token plans, the others score: imbalance, and of
every fifth of them how many nodes hold its experts, exactly, each choice going to any copy. Without the pass a plan knows loads
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import NotBuiltError, proposal_of
from benchmarks.traces import TRACES
from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.node_visits import distinct_nodes, node_shares
from eplb_service.placement import Table
from eplb_service.policy.base import PlanningProblem
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]

FILE = "gpt-oss-20b_token_routing.npz"
NUM_LOGICAL = 32
TIME_LIMIT_S = 3600.0
EACH = 5
"""One token of so many is followed to its nodes: half a million tokens in layers are enough for three digits."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ranks, their nodes and slots."""

    ranks: int
    nodes: int
    slots: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where a plan starts and what it aims at."""

    title: str
    policy: str
    from_nothing: bool
    target: float | None


FLEETS = (Fleet(8, 4, 5), Fleet(16, 4, 3), Fleet(8, 8, 5), Fleet(16, 8, 3))
STARTS = (
    Start("greedy from nothing, no target", "greedy", from_nothing=True, target=None),
    Start("greedy from nothing to 1.02", "greedy", from_nothing=True, target=1.02),
    Start("greedy from nothing to 1.05", "greedy", from_nothing=True, target=1.05),
    Start("minmove from linear to 1.02", "minmove", from_nothing=False, target=1.02),
    Start("minmove from linear to 1.10", "minmove", from_nothing=False, target=1.10),
)
COLUMNS = (
    "fleet",
    "plan",
    "nodes a token, before",
    "nodes, without",
    "nodes, with",
    "imbalance, without",
    "imbalance, with",
    "other tokens, without",
    "other tokens, with",
    "moves, without",
    "moves, with",
    "time of the pass",
)


def read_choices(folder: Path = TRACES) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Tokens to plan from and tokens to score, shape (tokens, 24, 4) each. Raises NotBuiltError when they are not there."""
    path = folder / FILE
    if not path.is_file():
        raise NotBuiltError(f"no recorded routing {FILE} in {folder}")
    with np.load(path) as archive:
        experts: npt.NDArray[np.uint8] = archive["experts"]
    return experts[::2], experts[1::2]


def counted(choices: npt.NDArray[np.uint8]) -> tuple[Float64Array, Float64Array]:
    """Loads, shape (L, E), and pairs, (L, E, E), of tokens."""
    num_layers = choices.shape[1]
    pairs = np.zeros((num_layers, NUM_LOGICAL, NUM_LOGICAL))
    for layer in range(num_layers):
        chosen = np.zeros((len(choices), NUM_LOGICAL), np.float32)
        np.put_along_axis(chosen, choices[:, layer].astype(np.int64), 1.0, axis=1)
        pairs[layer] = chosen.T @ chosen
    diagonal = np.arange(NUM_LOGICAL)
    loads = pairs[:, diagonal, diagonal].copy()
    pairs[:, diagonal, diagonal] = 0.0
    return loads, pairs


def nodes_visited(choices: npt.NDArray[np.uint8], table: Table, topology: Topology) -> float:
    """Expected distinct nodes of a token in a layer."""
    total, number = distinct_nodes(choices[::EACH].astype(np.int64), *node_shares(table, topology, Dispatch.EVEN))
    return total / number


def together_rows() -> list[tuple[str, ...]]:
    """A row for each fleet and start. Raises NotBuiltError when the routing is not there."""
    planned, scored = read_choices()
    loads, pairs = counted(planned)
    fresh, _ = counted(scored)
    rows = []
    for fleet in FLEETS:
        topology = Topology.regular(num_ranks=fleet.ranks, num_nodes=fleet.nodes)
        linear = Table.linear(
            model="gpt-oss",
            layer_ids=range(loads.shape[0]),
            num_logical=NUM_LOGICAL,
            rank_ids=topology.rank_ids,
            slots_per_rank=fleet.slots,
        )
        before = nodes_visited(scored, linear, topology)
        for start in STARTS:
            problem = PlanningProblem(
                loads=loads[None],
                topology=topology,
                current=linear,
                from_nothing=start.from_nothing,
                max_imbalance=start.target,
                time_limit_s=TIME_LIMIT_S,
            )
            (without, bare_s), (with_it, full_s) = (
                proposal_of(start.policy, asked) for asked in (problem, replace(problem, together=pairs))
            )
            both = (without, with_it)
            visited = [f"{nodes_visited(scored, plan.placement, topology):.3f}" for plan in both]
            balance = [f"{plan.predicted.mean:.4f} / {plan.predicted.worst:.4f}" for plan in both]
            unseen = [imbalance_of(fresh, plan.placement, topology) for plan in both]
            moves = ["-" if start.from_nothing else f"{plan.moves.experts:,}" for plan in both]
            rows.append(
                (
                    f"{fleet.ranks} ranks x {fleet.slots} slots, {fleet.nodes} nodes",
                    start.title,
                    f"{before:.3f}",
                    *visited,
                    *balance,
                    *(f"{seen.mean:.4f} / {seen.worst:.4f}" for seen in unseen),
                    *moves,
                    f"{max(0.0, full_s - bare_s):.1f} s",
                )
            )
    return rows
