"""From a load window to a decision: a plan for each table, its front put before the gate, the choice checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eplb_service.config import PlanningConfig
from eplb_service.costs import CostModel, GivenCosts, MeasuredCosts, cost_model
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.flip_stall import flip_bytes_max
from eplb_service.gains import plan_of, points_of
from eplb_service.gate import GateConfig, GateInputs, TableEvidence, Verdict, VerdictCode, decide
from eplb_service.generation import LiveMap
from eplb_service.horizon import Horizon, PastPlan, WindowSum, measure_horizon
from eplb_service.ids import LayerRef, RankId
from eplb_service.imbalance import Imbalance
from eplb_service.membership.machine import Group
from eplb_service.moves import NO_MOVES, MoveSummary, residency_moves
from eplb_service.placement import EMPTY_SLOT, Placement, Table
from eplb_service.planner.forecasting import LoadForecast
from eplb_service.planner.loads import dispatch_of, loads_of, sources_for_plans
from eplb_service.policy.base import Effort, FrontPoint, PlanningProblem, Proposal
from eplb_service.policy.drained import with_drained_kept, without_drained
from eplb_service.rollout.chunk_count import count_chunks
from eplb_service.rollout.chunks import plan_chunks
from eplb_service.topology import LinkKind
from eplb_service.window.report import Alarm, CombinedWindow

SOURCED = frozenset({Dispatch.NEAREST, Dispatch.WEIGHTED})
"""Where a plan can do something about the way that tokens take: it is told where they come from."""


class Solver(Protocol):
    """Runs policies where they cannot hold up the planner."""

    async def solve(self, problem: PlanningProblem, policy: str, deadline_s: float) -> Proposal:
        """A verified proposal. Raises NotFoundError, InvalidInputError, PolicyFailedError, EnvironmentFault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where to go: a point of every table, joined. predicted: one entry for each layer, in table order."""

    target: Placement
    predicted: Imbalance
    moves: MoveSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A joined proposal and the gate's answer. Imbalances: one entry for each layer, in table order.

    choice: the point that the gate speaks of (the policy's own plan where it looked at none); own: the policy's own plan.
    live_digest: of the live map that it starts from. made_at_s: when its window was taken, on the planner's monotonic clock.
    num_points: points to choose from; points: them, of each table.
    loads: of the windows that it was made from (also where it was made for a forecast), shape (L, E) for each table.
    cost, horizon: what the gate priced it with; None = not known.
    cannot_roll_out: why the choice cannot be carried out (a layer that staging does not hold, …); empty when it can.
    serves: first and last window (index) that it was made for; None = made from the windows as they were, no forecast.
    drained: ranks to which nothing was moved.
    """

    policy: str
    choice: Choice
    own: Choice
    before: Imbalance
    lower_bound: Imbalance
    moves_lower_bound: int | None
    solve_s: float
    verdict: Verdict
    live_digest: int
    made_at_s: float
    num_points: int
    points: tuple[tuple[FrontPoint, ...], ...] = ()
    loads: tuple[npt.NDArray[np.float64], ...] = ()
    cost: CostModel | None = None
    horizon: Horizon | None = None
    cut_off: bool = False
    cannot_roll_out: str = ""
    serves: tuple[int, int] | None = None
    drained: frozenset[RankId] = frozenset()

    @property
    def target(self) -> Placement:
        """Of the choice."""
        return self.choice.target

    @property
    def predicted(self) -> Imbalance:
        """Of the choice."""
        return self.choice.predicted

    @property
    def moves(self) -> MoveSummary:
        """Of the choice."""
        return self.choice.moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a deployment beside the window: costs, how past plans went stale, how much of a promise comes true.

    hold: why nothing is to be moved now; empty when nothing speaks against it.
    forecast: what is planned for; None = the windows as they are.
    """

    measured: MeasuredCosts = field(default_factory=MeasuredCosts)
    gain_share: float = 1.0
    hold: str = ""
    plans: tuple[PastPlan, ...] = ()
    history: tuple[WindowSum, ...] = ()
    horizon: Horizon | None = None
    forecast: LoadForecast | None = None


def same_shape(first: Placement, second: Placement) -> bool:
    """Whether both are of the same layers, ranks and slots, so that one can follow the other."""
    return len(first.tables) == len(second.tables) and all(
        mine.same_shape(theirs) for mine, theirs in zip(first.tables, second.tables, strict=True)
    )


def moves_between(before: Placement, after: Placement, group: Group) -> MoveSummary:
    """What going from one placement to another moves, over all tables."""
    return _sum_of_moves(
        [
            residency_moves(old, new, group.topology, expert_bytes_of(old, group.expert_bytes), fan_out=group.fan_out)
            for old, new in zip(before.tables, after.tables, strict=True)
        ]
    )


def expert_bytes_of(table: Table, sizes: Mapping[LayerRef, int]) -> tuple[int, ...]:
    """Bytes of one expert of each layer of a table."""
    return tuple(sizes[layer] for layer in table.layers)


def _sum_of_moves(parts: Sequence[MoveSummary]) -> MoveSummary:
    return MoveSummary(
        experts=sum(part.experts for part in parts),
        slots_rewritten=sum(part.slots_rewritten for part in parts),
        layers=sum(part.layers for part in parts),
        bytes_by_link={kind: sum(part.bytes_by_link[kind] for part in parts) for kind in LinkKind},
        bytes_without_source=sum(part.bytes_without_source for part in parts),
        # tables are carried one after another: their busiest ranks and NICs add up
        bytes_into_busiest_rank=sum(part.bytes_into_busiest_rank for part in parts),
        bytes_into_busiest_nic=sum(part.bytes_into_busiest_nic for part in parts),
    )


def why_not_carried(live: Placement, target: Placement, group: Group, layers_max: int | None) -> str:
    """Why a rollout cannot be carried out; empty when it can."""
    if group.observe_only:
        return group.observe_only
    try:
        plan_chunks(
            live,
            target,
            topology=group.topology,
            expert_bytes=group.expert_bytes,
            staging_bytes=group.staging_bytes,
            layers_max=layers_max,
            fan_out=group.fan_out,
            restorers=group.restorers,
        )
    except InvalidInputError as error:
        return str(error)
    return ""


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


def priced(known: Known, given: GivenCosts, window: CombinedWindow, group: Group) -> tuple[CostModel | None, Horizon | None]:
    """The cost model for a window, and the horizon in it, when one was measured."""
    horizon = (
        measure_horizon(known.plans, known.history, group.topology, dispatch_of(group)) if given.horizon_steps is None else None
    ) or known.horizon
    measured = known.measured
    if horizon is not None:
        measured = replace(measured, horizon_steps=horizon.steps)
    ranks = len(group.topology.alive_positions())
    tokens = sum(float(table.loads.sum()) for table in window.tables) / max(1, ranks) / max(1, window.steps)
    cost = cost_model(given, measured, tokens_per_step=tokens, steps_planned_from=float(window.steps))
    return cost, horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposer:
    """Makes decisions. deadline_s: hard stop of one table's plan.

    fill_slots: plans leave no slot empty where the live placement has none.
    """

    solver: Solver
    gate: GateConfig
    given: GivenCosts
    planning: PlanningConfig
    deadline_s: float
    layers_per_chunk_max: int | None = None
    fill_slots: bool = False

    async def propose(
        self,
        *,
        group: Group,
        live: LiveMap,
        window: CombinedWindow,
        policy: str,
        generation_age_s: float | None,
        known: Known,
        now_s: float,
        drained: frozenset[RankId] = frozenset(),
    ) -> Decision:
        """Plan every table from the live map, for what is forecast, and ask the gate. Raises what the solver raises.

        drained: ranks to which nothing may be moved. Raises InvalidInputError when the others cannot hold all experts.
        """
        counted = window
        window = known.forecast.applied(counted) if known.forecast is not None else counted
        planned: list[tuple[PlanningProblem, Proposal]] = []
        given_up: list[str] = []
        for table in live.placement.tables:
            problem, notes = without_drained(self.problem(table, window, group), drained)
            planned.append((problem, await self.solved(problem, policy, drained)))
            given_up += notes
        decided = await asyncio.to_thread(self._decide, group, live, counted, policy, planned, generation_age_s, known, now_s)
        reason = "; ".join([decided.verdict.reason, *dict.fromkeys(given_up)])
        return replace(decided, verdict=replace(decided.verdict, reason=reason), drained=drained)

    async def solved(self, problem: PlanningProblem, policy: str, drained: AbstractSet[RankId]) -> Proposal:
        """A plan for ranks that stay. Where the engine knows no empty slot those drained keep what they hold."""
        proposal = await self.solver.solve(problem, policy, self.deadline_s)
        return with_drained_kept(proposal, problem.current, drained) if problem.constraints.fill_slots else proposal

    def problem(self, table: Table, window: CombinedWindow | None, group: Group) -> PlanningProblem:
        """What a policy is given for a table. window: None = nothing was counted yet, every expert is taken to be as busy."""
        planning, dispatch = self.planning, dispatch_of(group)
        loads, sources = np.ones((1, table.num_layers, table.num_logical)), None
        if window is not None:
            counted = loads_of(window, table)
            loads = counted.loads
            sources = sources_for_plans(counted, window, group) if planning.sources and dispatch in SOURCED else None
        constraints = planning.constraints(max_replicas=group.replica_table_width)
        if self.fill_slots and not (table.physical_to_logical == EMPTY_SLOT).any():
            constraints = replace(constraints, fill_slots=True)
        return PlanningProblem(
            loads=loads,
            source_loads=sources,
            topology=group.topology,
            current=table,
            dispatch=dispatch,
            constraints=constraints,
            expert_bytes=expert_bytes_of(table, group.expert_bytes),
            fan_out=group.fan_out,
            max_imbalance=planning.max_imbalance,
            front=planning.front,
            certify=planning.certify,
            seed=planning.seed,
            time_limit_s=self.deadline_s,
            effort=Effort(planning.effort),
        )

    def _decide(
        self,
        group: Group,
        live: LiveMap,
        window: CombinedWindow,
        policy: str,
        planned: Sequence[tuple[PlanningProblem, Proposal]],
        generation_age_s: float | None,
        known: Known,
        now_s: float,
    ) -> Decision:
        """Everything after the plans, in a thread: scoring a front of a large deployment takes a second or two."""
        cost, horizon = priced(known, self.given, window, group)
        counted = [loads_of(window, problem.current).loads for problem, _ in planned]
        evidence = tuple(
            self._evidence(problem, proposal, group, loads, known)
            for (problem, proposal), loads in zip(planned, counted, strict=True)
        )
        proposals = [proposal for _, proposal in planned]
        verdict = decide(
            self.gate,
            GateInputs(
                tables=evidence,
                topology=planned[0][0].topology,
                dispatch=dispatch_of(group),
                coverage=window.coverage,
                generation_age_s=generation_age_s,
                cost=cost,
                no_cost_reason=f"no cost model is given (cost.seconds_per_step) or measured yet: {known.measured.step_time}",
                gain_share=known.gain_share,
                odd_load=window.alarms.get(Alarm.ONE_LAYER_ONLY, ""),
                hold=known.hold,
            ),
        )
        if known.forecast is not None:
            verdict = replace(verdict, reason=f"{verdict.reason}; {known.forecast.words}")
        own = [plan_of(proposal, problem.current) for problem, proposal in planned]
        chosen = (
            [
                point if point is not None else FrontPoint(placement=table, predicted=proposal.before, moves=NO_MOVES)
                for point, table, proposal in zip(verdict.chosen, live.placement.tables, proposals, strict=True)
            ]
            if verdict.chosen
            else own
        )
        bounds = [proposal.moves_lower_bound for proposal in proposals]
        choice = _joined(chosen)
        return Decision(
            policy=policy,
            choice=choice,
            own=_joined(own),
            before=_concatenated(proposal.before for proposal in proposals),
            lower_bound=_concatenated(proposal.lower_bound for proposal in proposals),
            moves_lower_bound=sum(bound for bound in bounds if bound is not None) if None not in bounds else None,
            solve_s=sum(proposal.solve_s for proposal in proposals),
            verdict=verdict,
            live_digest=live.digest,
            made_at_s=now_s,
            num_points=max(len(table.points) for table in evidence),
            points=tuple(table.points for table in evidence),
            loads=tuple(part.sum(axis=0) for part in counted),
            cost=cost,
            horizon=horizon,
            cut_off=any(proposal.cut_off for proposal in proposals),
            serves=known.forecast.served_after(window.windows[-1][1]) if known.forecast is not None else None,
            cannot_roll_out=why_not_carried(live.placement, choice.target, group, self.layers_per_chunk_max),
        )

    def _evidence(
        self,
        problem: PlanningProblem,
        proposal: Proposal,
        group: Group,
        counted: npt.NDArray[np.float64],
        known: Known,
    ) -> TableEvidence:
        points = points_of(proposal, problem.current)
        most, forecast = flip_bytes_max(known.measured.stalls, self.given.commit_stall_s_max), known.forecast
        flips = [
            count_chunks(
                problem.current,
                point.placement,
                topology=group.topology,
                expert_bytes=problem.expert_bytes,
                staging_bytes=group.staging_bytes,
                layers_max=self.layers_per_chunk_max,
                flip_bytes_max=most,
                restorers=group.restorers,
            )
            for point in points
        ]
        # Where no point can be carried out the gate still tells what it would be worth.
        return TableEvidence(
            loads=problem.loads,
            source_loads=problem.source_loads,
            current=problem.current,
            proposal=proposal,
            flips=tuple(flips) if any(count is not None for count in flips) else (1,) * len(flips),
            expert_bytes=problem.expert_bytes,
            counted=counted if forecast is not None else None,
            forecast_error=forecast.error if forecast is not None else 0.0,
        )


def _joined(points: Sequence[FrontPoint]) -> Choice:
    return Choice(
        target=Placement(tuple(point.placement for point in points)),
        predicted=_concatenated(point.predicted for point in points),
        moves=_sum_of_moves([point.moves for point in points]),
    )


def _concatenated(parts: Iterable[Imbalance]) -> Imbalance:
    return Imbalance(tuple(value for part in parts for value in part.per_layer))
