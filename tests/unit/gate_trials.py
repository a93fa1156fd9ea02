"""Loads, plans and fronts for trials of the gate: small shapes, so that a thousand of them take seconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.dispatch import Dispatch, imbalance_of
from eplb_service.gains import TableEvidence
from eplb_service.gate import GateInputs
from eplb_service.imbalance import Imbalance
from eplb_service.moves import residency_moves
from eplb_service.placement import Table
from eplb_service.policy.base import FrontPoint, PlanningProblem, Proposal
from eplb_service.policy.greedy import GreedyPolicy
from eplb_service.topology import Topology

Float64Array = npt.NDArray[np.float64]

NUM_LAYERS, NUM_EXPERTS = 4, 16
EXPERT_BYTES = (40_000_000,) * NUM_LAYERS
TOPOLOGY = Topology.regular(num_ranks=4, num_nodes=2)
LINEAR = Table.linear(
    model="m", layer_ids=range(NUM_LAYERS), num_logical=NUM_EXPERTS, rank_ids=TOPOLOGY.rank_ids, slots_per_rank=5
)


def popularity(seed: int, sigma: float = 1.0) -> Float64Array:
    """Shape (L, E), rows sum to 1."""
    weights = np.exp(np.random.default_rng(seed).normal(0, sigma, (NUM_LAYERS, NUM_EXPERTS)))
    shares: Float64Array = weights / weights.sum(axis=1, keepdims=True)
    return shares


def draw(random: np.random.Generator, shares: Float64Array, tokens: int, sub_windows: int = 4) -> Float64Array:
    """A window of so many tokens a layer. Shape (sub-windows, L, E)."""
    return random.multinomial(tokens // sub_windows, shares, size=(sub_windows, NUM_LAYERS)).astype(np.float64)


def plan(loads: Float64Array, current: Table) -> Proposal:
    """The greedy plan, aligned to what is there. Not verified: that takes as long as the rest of a trial."""
    problem = PlanningProblem(loads=loads, topology=TOPOLOGY, current=current, expert_bytes=EXPERT_BYTES)
    rows = GreedyPolicy().plan(problem).physical_to_logical
    placement = Table(current.model, current.layer_ids, current.num_logical, current.rank_ids, rows)
    total = problem.total_loads
    return Proposal(
        policy="greedy",
        placement=placement,
        before=imbalance_of(total, current, TOPOLOGY),
        predicted=imbalance_of(total, placement, TOPOLOGY),
        lower_bound=Imbalance((1.0,) * current.num_layers),
        moves=residency_moves(current, placement, TOPOLOGY, EXPERT_BYTES),
        solve_s=0.0,
        status="heuristic",
        cut_off=False,
    )


def with_front(proposal: Proposal, current: Table, loads: Float64Array) -> Proposal:
    """The plan and what is between it and keeping: only the layer that gains most, the plan."""
    now, then = np.array(proposal.before.per_layer), np.array(proposal.predicted.per_layer)
    rows = current.physical_to_logical.copy()
    points = []
    for layer in np.argsort(then - now, kind="stable").tolist()[:1]:
        rows[layer] = proposal.placement.physical_to_logical[layer]
        table = Table(current.model, current.layer_ids, current.num_logical, current.rank_ids, rows)
        points.append(
            FrontPoint(
                placement=table,
                predicted=imbalance_of(loads.sum(axis=0), table, TOPOLOGY),
                moves=residency_moves(current, table, TOPOLOGY, EXPERT_BYTES),
            )
        )
    return Proposal(**{name: getattr(proposal, name) for name in Proposal.__slots__} | {"front": tuple(points)})


def asked(loads: Float64Array, current: Table, **more: object) -> GateInputs:
    """What the gate sees of this window and a plan made from it."""
    proposal = with_front(plan(loads, current), current, loads)
    table = TableEvidence(loads=loads, current=current, proposal=proposal, expert_bytes=EXPERT_BYTES)
    options: dict[str, object] = {"coverage": 1.0, "generation_age_s": None}
    return GateInputs(tables=(table,), topology=TOPOLOGY, dispatch=Dispatch.EVEN, **(options | more))  # type: ignore[arg-type]
