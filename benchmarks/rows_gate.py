"""The gate on sampling noise: from the plan for a load, fresh windows of that same load must move nothing."""

from __future__ import annotations

import numpy as np

from benchmarks.measuring import Measured, Peers, Row, proposal_of
from benchmarks.standard import problem_of, standard_load
from eplb_service.costs import CostModel
from eplb_service.gate import GateConfig, GateInputs, TableEvidence, decide
from eplb_service.policy.base import Effort

TOKENS, SUB_WINDOWS, WINDOWS = 2_000_000, 4, 5
POLICIES = ("minmove", "greedy")
EXPERT_BYTES = 44_040_192
CHEAP = CostModel(seconds_per_step=0.03, horizon_steps=100_000, bytes_per_s=50e9, commit_stall_s=0.01)
"""Moves nearly free, so that only noise speaks against them."""


def gate_on(peers: Peers, seed: int) -> Measured:
    """Windows of W, each policy from its own plan for W: minmove to 1.02 with its front, greedy anew; the gate answers each."""
    del peers
    load = standard_load(seed)
    first = {policy: proposal_of(policy, problem_of(load, max_imbalance=1.02))[0].placement for policy in POLICIES}
    shares = load / load.sum(axis=1, keepdims=True)
    random = np.random.default_rng(seed)
    moved = dict.fromkeys(POLICIES, 0)
    for _ in range(WINDOWS):
        window = np.array([random.multinomial(TOKENS // SUB_WINDOWS, shares).astype(np.float64) for _ in range(SUB_WINDOWS)])
        for policy, current in first.items():
            problem = problem_of(
                window, current=current, max_imbalance=1.02, effort=Effort.QUICK, front=True, expert_bytes=EXPERT_BYTES
            )
            proposal, _ = proposal_of(policy, problem)
            evidence = TableEvidence(loads=window, current=current, proposal=proposal, expert_bytes=problem.expert_bytes)
            inputs = GateInputs(
                tables=(evidence,),
                topology=problem.topology,
                dispatch=problem.dispatch,
                coverage=1.0,
                generation_age_s=None,
                cost=CHEAP,
            )
            verdict = decide(GateConfig(), inputs)
            moved[policy] += proposal.moves.experts if verdict.move else 0
    said = "; ".join(f"{policy}: {count}" for policy, count in moved.items())
    return Measured(ours=f"{said} experts in {WINDOWS} windows", least=not any(moved.values()), aim=not any(moved.values()))


ROWS = (
    Row(
        name="resample-gate-on",
        what="the same with the gate on: experts moved, also of full re-plans",
        at_least="0",
        aim="0",
        measure=gate_on,
    ),
)
