"""From a load window to a decision: one plan for each table, joined, checked for the rollout, and put before the gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from eplb_service.dispatch import Dispatch, imbalance_of, rank_loads
from eplb_service.errors import InvalidInputError, UnsupportedError
from eplb_service.gate import GateConfig, GateInputs, TableEvidence, Verdict, VerdictCode, decide
from eplb_service.generation import LiveMap
from eplb_service.ids import LayerRef
from eplb_service.imbalance import Float64Array, Imbalance
from eplb_service.membership.machine import Group
from eplb_service.moves import MoveSummary, residency_moves
from eplb_service.placement import Placement, Table
from eplb_service.policy.base import Constraints, PlanningProblem, Proposal
from eplb_service.rollout.chunks import plan_chunks
from eplb_service.topology import LinkKind
from eplb_service.window.report import CombinedTable, CombinedWindow, TableShape


class Solver(Protocol):
    """Runs policies where they cannot hold up the planner."""

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        """A verified proposal. Raises NotFoundError, InvalidInputError, PolicyFailedError, EnvironmentFault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A joined proposal and the gate's answer. Imbalances: one entry for each layer, in table order.

    cannot_roll_out: why the proposal cannot be carried out (a layer that staging does not hold, …); empty when it can.
    """

    policy: str
    target: Placement
    before: Imbalance
    predicted: Imbalance
    lower_bound: Imbalance
    moves: MoveSummary
    solve_s: float
    verdict: Verdict
    cannot_roll_out: str = ""


def dispatch_of(group: Group) -> Dispatch:
    """How the group's engine picks a replica. Raises UnsupportedError for a word that this release does not know."""
    word = group.registrations[0].dispatch
    try:
        return Dispatch(word)
    except ValueError:
        known = ", ".join(dispatch.value for dispatch in Dispatch)
        raise UnsupportedError(f"the engine dispatches by {word[:40]!r}; this planner knows {known}") from None


def shapes_of(group: Group) -> tuple[TableShape, ...]:
    """What reports of the group must count."""
    return tuple(TableShape(model=t.model, layer_ids=t.layer_ids, num_logical=t.num_logical) for t in group.tables)


def loads_of(window: CombinedWindow, table: Table) -> CombinedTable:
    """The counts of a table. Raises InvalidInputError when the window holds none."""
    for counted in window.tables:
        if (counted.shape.model, counted.shape.layer_ids) == (table.model, table.layer_ids):
            return counted
    raise InvalidInputError(f"the load window has no counts of model {table.model!r}, layers {list(table.layer_ids)}")


def imbalance_under(window: CombinedWindow, placement: Placement, group: Group) -> Imbalance:
    """Imbalance of a placement under the loads of a window, over all layers in table order."""
    dispatch = dispatch_of(group)
    layers: list[float] = []
    for table in placement.tables:
        total = loads_of(window, table).loads.sum(axis=0)
        layers.extend(imbalance_of(total, table, group.topology, dispatch).per_layer)
    return Imbalance(tuple(layers))


def rank_loads_under(window: CombinedWindow, placement: Placement, group: Group) -> list[Float64Array]:
    """Tokens that each rank receives: an array of shape (L, R) for each table."""
    dispatch = dispatch_of(group)
    return [
        rank_loads(loads_of(window, table).loads.sum(axis=0), table, group.topology, dispatch) for table in placement.tables
    ]


def same_shape(first: Placement, second: Placement) -> bool:
    """Whether both are of the same layers, ranks and slots, so that one can follow the other."""
    return len(first.tables) == len(second.tables) and all(
        mine.same_shape(theirs) for mine, theirs in zip(first.tables, second.tables, strict=True)
    )


def moves_between(before: Placement, after: Placement, group: Group) -> MoveSummary:
    """What going from one placement to another moves, over all tables."""
    return _sum_of_moves(
        [
            residency_moves(old, new, group.topology, _expert_bytes(old, group.expert_bytes))
            for old, new in zip(before.tables, after.tables, strict=True)
        ]
    )


def _expert_bytes(table: Table, sizes: Mapping[LayerRef, int]) -> tuple[int, ...]:
    return tuple(sizes[layer] for layer in table.layers)


def _sum_of_moves(parts: list[MoveSummary]) -> MoveSummary:
    return MoveSummary(
        experts=sum(part.experts for part in parts),
        slots_rewritten=sum(part.slots_rewritten for part in parts),
        layers=sum(part.layers for part in parts),
        bytes_by_link={kind: sum(part.bytes_by_link[kind] for part in parts) for kind in LinkKind},
        bytes_without_source=sum(part.bytes_without_source for part in parts),
        # tables are carried one after another: their busiest ranks add up
        bytes_into_busiest_rank=sum(part.bytes_into_busiest_rank for part in parts),
    )


def chunks_between(live: Placement, target: Placement, group: Group, layers_max: int | None) -> int:
    """Flips that the rollout takes. Raises InvalidInputError when it cannot be carried out."""
    return len(
        plan_chunks(
            live,
            target,
            topology=group.topology,
            expert_bytes=group.expert_bytes,
            staging_bytes=group.staging_bytes,
            layers_max=layers_max,
        )
    )


def nothing_to_gain(gate: GateConfig, now: Imbalance) -> Verdict | None:
    """A verdict without a plan: even a perfect placement (imbalance 1) would gain less than the gate wants.

    >>> nothing_to_gain(GateConfig(), Imbalance((1.2, 1.0))) is None
    True
    """
    if now.mean - 1.0 >= gate.min_gain_mean or now.worst - 1.0 >= gate.min_gain_worst:
        return None
    reason = (
        f"keep: mean over layers {now.mean:.4f} and worst layer {now.worst:.4f} leave less to gain than"
        f" {gate.min_gain_mean:.4f} or {gate.min_gain_worst:.4f}, so no plan was made"
    )
    numbers = {"imbalance_mean_before": now.mean, "imbalance_worst_before": now.worst}
    return Verdict(move=False, code=VerdictCode.GAIN_TOO_SMALL, reason=reason, numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposer:
    """Makes decisions. deadline_s: hard stop of one table's plan."""

    solver: Solver
    gate: GateConfig
    seed: int
    deadline_s: float
    layers_per_chunk_max: int | None = None

    async def propose(
        self, *, group: Group, live: LiveMap, window: CombinedWindow, policy: str, generation_age_s: float | None
    ) -> Decision:
        """Plan every table from the live map and ask the gate. Raises what the solver raises."""
        dispatch = dispatch_of(group)
        evidence = []
        for table in live.placement.tables:
            loads = loads_of(window, table).loads
            problem = PlanningProblem(
                loads=loads,
                topology=group.topology,
                current=table,
                dispatch=dispatch,
                constraints=Constraints(max_replicas=group.replica_table_width),
                expert_bytes=_expert_bytes(table, group.expert_bytes),
                seed=self.seed,
                time_limit_s=self.deadline_s,
            )
            proposal = await self.solver.solve(problem, policy, self.deadline_s)
            evidence.append(TableEvidence(loads=loads, current=table, proposal=proposal))
        return self._decide(group, live, window, policy, tuple(evidence), generation_age_s)

    def _decide(
        self,
        group: Group,
        live: LiveMap,
        window: CombinedWindow,
        policy: str,
        evidence: tuple[TableEvidence, ...],
        generation_age_s: float | None,
    ) -> Decision:
        proposals = [table.proposal for table in evidence]
        target = Placement(tuple(proposal.placement for proposal in proposals))
        cannot = group.observe_only
        num_chunks = 1
        if not cannot:
            try:
                target = group.with_fitting_shares(target)
                num_chunks = chunks_between(live.placement, target, group, self.layers_per_chunk_max)
            except InvalidInputError as error:
                cannot = str(error)
        verdict = decide(
            self.gate,
            GateInputs(
                tables=evidence,
                topology=group.topology,
                dispatch=dispatch_of(group),
                coverage=window.coverage,
                generation_age_s=generation_age_s,
                num_chunks=max(1, num_chunks),
            ),
        )
        return Decision(
            policy=policy,
            target=target,
            before=_joined(proposal.before for proposal in proposals),
            predicted=_joined(proposal.predicted for proposal in proposals),
            lower_bound=_joined(proposal.lower_bound for proposal in proposals),
            moves=_sum_of_moves([proposal.moves for proposal in proposals]),
            solve_s=sum(proposal.solve_s for proposal in proposals),
            verdict=verdict,
            cannot_roll_out=cannot,
        )


def _joined(parts: Iterable[Imbalance]) -> Imbalance:
    return Imbalance(tuple(value for part in parts for value in part.per_layer))
