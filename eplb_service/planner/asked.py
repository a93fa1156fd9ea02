"""What questions give planning: the engine's ranks as a group, its load as windows, facts for people.

An advised deployment has no ranks that link; what plans, scores and views need of them is made here from what the engine says.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from eplb_service.advice import AdviceRequest
from eplb_service.advising import Asker
from eplb_service.control import PROTOCOL_VERSION_OF_RELAYS, Address, LayerInfo, ModelInfo, Registration
from eplb_service.costs import GivenCosts
from eplb_service.ids import DeploymentId, GroupId, Incarnation, Phase, RankId
from eplb_service.membership.group import Group
from eplb_service.planner.load_watch import LoadWatch
from eplb_service.planner.loads import shapes_of
from eplb_service.planner.proposing import Proposer
from eplb_service.window.report import Expected, LoadReport, Semantics, TableCounts

REPLICAS_MAX = 1024
"""Width of the widest replica table that we know of (vLLM's)."""

UNBOUNDED_STAGING = 1 << 62
"""The engine has its own way to stage; what it moves is one chunk to us."""

UNKNOWN_BYTES = "the engine does not say how large its experts are, so a move cannot be priced: give planning.expert_bytes"
UNKNOWN_STEPS = "the engine does not say how many steps its load is of, so a gain cannot be priced: give cost.horizon_steps"

INTERVALS_KEPT = 8

SILENT_INTERVALS = 3.0
SILENT_S = 30.0
"""Without a question for so many of its intervals, and so many seconds, an engine is silent."""

NEVER_ASKED_S = 900.0
"""Without any question for so long, one whose interval is not known is silent: engines ask every few minutes at most."""

WHY_SILENT = "it runs no steps (an idle engine asks nothing), it is gone, or its agent process cannot reach this planner"


class QuestionWatch(LoadWatch):
    """Each question is one window of one sub-window, told by one rank for all."""

    def _what_is_expected(self) -> Expected | None:
        group = self._group
        if group is None:
            return None
        first = group.registrations[0].address
        return Expected(
            group_id=first.group_id, incarnations={first.rank_id: first.incarnation}, window_steps=1, tables=shapes_of(group)
        )


@dataclass(slots=True)
class Asked:
    """What people want to know of the questions.

    times: of the last ones, monotonic, oldest first. answers: by kind. told: generation that is under way, 0 = none.
    expected_since_s: when this planner began to lead, monotonic: what was asked before, or of others, is not missed.
    """

    engine: str = ""
    expected_since_s: float | None = None
    times: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVALS_KEPT + 1))
    answers: Counter[str] = field(default_factory=Counter)
    last_reason: str = ""
    told: int = 0

    @property
    def interval_s(self) -> float | None:
        """Mean time between the last questions; None while there was one at most."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    def silence(self, now_s: float) -> str:
        """Why the engine should have asked by now, one sentence; empty = nothing is missed. now_s: monotonic.

        >>> Asked(times=deque([0.0, 60.0, 120.0])).silence(301.0)[:53]
        'no question for 181 s; the engine asked every 60 s be'
        """
        heard_s = max((time for time in (self.expected_since_s, *self.times) if time is not None), default=now_s)
        silent_s, interval_s = now_s - heard_s, self.interval_s
        if silent_s <= (NEVER_ASKED_S if interval_s is None else max(SILENT_S, SILENT_INTERVALS * interval_s)):
            return ""
        before = "" if interval_s is None else f"; the engine asked every {interval_s:.0f} s before"
        return f"no question for {silent_s:.0f} s{before}: {WHY_SILENT}"


def group_of(deployment: DeploymentId, asker: Asker) -> Group:
    """The ranks of an engine as planning knows them. Nothing of it ever speaks: addresses only name windows."""
    slots = asker.num_slots // len(asker.rank_ids)
    sizes = asker.expert_bytes or (0,) * len(asker.layer_ids)
    model = ModelInfo(
        name=asker.model,
        digest="",
        manifest_digest="",
        layers=tuple(
            LayerInfo(layer_id=layer, num_logical=asker.num_logical, slots=slots, expert_bytes=size)
            for layer, size in zip(asker.layer_ids, sizes, strict=True)
        ),
    )
    ranks = tuple(RankId(rank) for rank in asker.rank_ids)
    return Group.of(
        tuple(
            Registration(
                deployment=deployment,
                address=Address(rank, Incarnation(asker.identity), GroupId(asker.identity)),
                node=node,
                group_rank_ids=ranks,
                phase=Phase.MIXED,
                stage=0,
                models=(model,),
                capacity=1.0,
                dispatch=asker.dispatch,
                vote_period=1,
                window_steps=1,
                sub_windows=1,
                staging_bytes=UNBOUNDED_STAGING,
                replica_table_width=min(REPLICAS_MAX, asker.num_slots),
                weights_version=0,
                protocol_max=PROTOCOL_VERSION_OF_RELAYS - 1,  # it moves its own weights: each rank fetches each of its experts
            )
            for rank, node in zip(ranks, asker.nodes, strict=True)
        )
    )


def groups_kept(asker: Asker) -> int | None:
    """Expert groups that plans must keep on one node each; None where there is nothing to keep.

    As engines do (DeepSeek's `rebalance_experts`): groups that do not divide over the nodes are not kept.
    """
    nodes = len(set(asker.nodes))
    divides = asker.num_groups % nodes == 0 and asker.num_logical % asker.num_groups == 0
    return asker.num_groups if asker.num_groups > 1 and nodes > 1 and divides else None


def proposer_for(given: Proposer, asker: Asker, group: Group, *, knows_steps: bool) -> tuple[Proposer, str]:
    """Who plans for an engine: with its expert groups, no slot left empty, and one chunk for all that it moves.

    The second is why neither moves nor gains can be priced, empty when they can: what nobody told has no price.
    """
    planning, unpriced = given.planning, ""
    if planning.num_groups is None:
        planning = replace(planning, num_groups=groups_kept(asker))
    if not any(group.expert_bytes.values()):
        unpriced = UNKNOWN_BYTES
    elif not knows_steps and given.given.horizon_steps is None:
        unpriced = UNKNOWN_STEPS
    costs = GivenCosts() if unpriced else replace(given.given, commit_stall_s_max=None)
    own = replace(given, planning=planning, given=costs, layers_per_chunk_max=None, fill_slots=True)
    return own, unpriced


def report_of(request: AdviceRequest, group: Group, index: int, digest_before: int, digest_now: int) -> LoadReport:
    """The load of a question as window `index`. digest_before, digest_now: of the live maps that it began and ended under."""
    first = group.registrations[0].address
    counts = request.load.astype("<i8")[None]
    return LoadReport(
        rank_id=first.rank_id,
        incarnation=first.incarnation,
        group_id=first.group_id,
        window_index=index,
        boundary_begin=index,
        boundary_end=index + 1,
        forward_passes=request.steps,
        tokens=int(counts.sum()) // max(1, counts.shape[1]),
        semantics=Semantics.GLOBAL_TOKENS,
        phase=Phase.MIXED,
        live_digest_begin=digest_before,
        live_digest_end=digest_now,
        tables=(TableCounts(model=request.model, layer_ids=request.layer_ids, counts=counts),),
        step_time_min_s=request.step_time_s,
        step_time_mean_s=request.step_time_s,
        step_time_max_s=request.step_time_s,
    )
