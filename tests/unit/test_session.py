"""The agent session by scripts: each opens with its hazard, feeds events and compares effects (log lines left out)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.frames import RegistrationAnswer
from agent.session import AWAY_BACKOFF_S, REFUSED_BACKOFF_S, TRANSITIONS, RankState, Session, Step
from agent.session_events import (
    CloseLink,
    CloseStream,
    Effect,
    Event,
    ForgetReports,
    HookGone,
    HookSaid,
    LinkId,
    Log,
    Notice,
    OpenStream,
    PlannerSaid,
    QueueReport,
    Register,
    RegisterAccepted,
    RegisterFailed,
    StreamClosed,
    StreamId,
    Tick,
    ToHook,
    ToPlanner,
)
from eplb_service.attach import Attach, Gone
from eplb_service.control import (
    Address,
    Arm,
    Disarm,
    Hello,
    LayerInfo,
    LinkBytes,
    ModelInfo,
    Registration,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.ids import DeploymentId, Epoch, GenerationNumber, GroupId, Incarnation, Phase, RankId, chunk_id
from eplb_service.window.report import LoadReport, Semantics, TableCounts

ACCEPTED = RegistrationAnswer(accepted=True, reason="")
L1, L2, L3 = LinkId(1), LinkId(2), LinkId(3)
S1, S2 = StreamId(1), StreamId(2)
D = DeploymentId("d")


def address(rank: int, incarnation: int = 100, group: int = 7) -> Address:
    return Address(RankId(rank), Incarnation(incarnation), GroupId(group))


def registration(who: Address, deployment: str = "d") -> Registration:
    layer = LayerInfo(layer_id=1, num_logical=4, slots=3, expert_bytes=64)
    return Registration(
        deployment=DeploymentId(deployment),
        address=who,
        node="n0",
        group_rank_ids=(RankId(0), RankId(1)),
        phase=Phase.MIXED,
        stage=0,
        models=(ModelInfo(name="m", digest="a", manifest_digest="b", layers=(layer,)),),
        capacity=1.0,
        dispatch="even",
        vote_period=4,
        window_steps=16,
        sub_windows=1,
        staging_bytes=1 << 20,
        replica_table_width=4,
        weights_version=0,
    )


def stage(to: Address, epoch: int, sequence: int = 1) -> Stage:
    chunk = chunk_id(epoch, sequence)
    return Stage(
        to=to, chunk_id=chunk, generation=GenerationNumber(1), weights_version=0, mesh_id=chunk, layers=(), copies=(),
        stage_timeout_s=5.0, arm_ttl_s=5.0,
    )  # fmt: skip


def staged(sender: Address, epoch: int = 1, sequence: int = 1) -> Staged:
    return Staged(sender=sender, chunk_id=chunk_id(epoch, sequence), seconds=0.5, received=LinkBytes())


def report(who: Address, window: int = 0) -> LoadReport:
    return LoadReport(
        rank_id=who.rank_id, incarnation=who.incarnation, group_id=who.group_id, window_index=window,
        boundary_begin=window * 16, boundary_end=window * 16 + 16, forward_passes=16, tokens=8,
        semantics=Semantics.LOCAL_TOKENS, phase=Phase.MIXED, live_digest_begin=1, live_digest_end=1,
        tables=(TableCounts(model="m", layer_ids=(1,), counts=np.ones((1, 1, 4), np.int32)),),
    )  # fmt: skip


class Script:
    """Feeds events and shows effects without log lines; those are kept in `logs`."""

    def __init__(self, session: Session | None = None) -> None:
        self.session = session or Session()
        self.now = 0.0
        self.logs: list[Log] = []

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.session.handle(event, self.now)
        self.logs += [effect for effect in effects if isinstance(effect, Log)]
        return [effect for effect in effects if not isinstance(effect, Log)]

    def link(self, link: LinkId, who: Address) -> int:
        """Link a hook; returns the number of the attempt to register it."""
        return _attempt(self(HookSaid(link, registration(who))))

    def attach(self, link: LinkId, who: Address) -> None:
        self(RegisterAccepted(self.link(link, who)))
        assert who.rank_id in self.session.attached()

    def until_due(self) -> list[Effect]:
        due_at_s = self.session.due_at_s()
        assert due_at_s is not None
        self.now = due_at_s
        return self(Tick())


def test_first_rank_registers_then_opens_the_stream_and_attaches() -> None:
    script, who = Script(), address(0)
    assert script(HookSaid(L1, registration(who))) == [Register(1, registration(who))]
    assert script(RegisterAccepted(1)) == [
        ToHook(L1, ACCEPTED),
        OpenStream(S1),
        ToPlanner(S1, Attach(deployment=D, ranks=(who,))),
    ]


def test_a_rank_that_comes_later_attaches_on_the_open_stream() -> None:
    script = Script()
    script.attach(L1, address(0))
    attempt = script.link(L2, address(1))
    assert script(RegisterAccepted(attempt)) == [
        ToHook(L2, ACCEPTED),
        ToPlanner(S1, Attach(deployment=D, ranks=(address(1),))),
    ]


def test_orders_go_to_the_hook_of_their_rank_and_facts_to_the_planner() -> None:
    script = Script()
    script.attach(L1, address(0))
    script.attach(L2, address(1))
    for order in (
        Hello(to=address(1), epoch=Epoch(1)),
        stage(address(1), 1),
        Arm(to=address(1), chunk_id=chunk_id(1, 1)),
        Disarm(to=address(1), chunk_id=chunk_id(1, 1), epoch=Epoch(1)),
    ):
        assert script(PlannerSaid(S1, order)) == [ToHook(L2, order)]
    assert script(HookSaid(L1, staged(address(0)))) == [ToPlanner(S1, staged(address(0)))]


def test_facts_said_while_the_planner_is_away_are_dropped() -> None:
    """A new planner says Hello and hears all that holds: replaying old answers would contradict it."""
    script = Script()
    script.attach(L1, address(0))
    script(StreamClosed(S1, "reset"))
    assert script(HookSaid(L1, staged(address(0)))) == []
    assert script.session.facts_dropped == 1
    script(RegisterAccepted(_attempt(script.until_due())))
    assert script(HookSaid(L1, staged(address(0), sequence=2))) == [ToPlanner(S2, staged(address(0), sequence=2))]


def test_reports_are_queued_while_the_planner_is_away() -> None:
    script, window = Script(), report(address(0))
    script.link(L1, address(0))
    assert script(HookSaid(L1, window)) == [QueueReport(window)]
    assert script.session.attached() == frozenset()


def test_planner_restart_registers_and_attaches_every_rank_again() -> None:
    script = Script()
    script.attach(L1, address(0))
    script.attach(L2, address(1))
    assert script(StreamClosed(S1, "gone")) == []
    again: list[Effect] = []
    while script.session.due_at_s() is not None:
        again += script.until_due()
    assert sorted(effect.registration.address.rank_id for effect in again if isinstance(effect, Register)) == [0, 1]
    attached = [script(RegisterAccepted(_attempt([effect]))) for effect in again]
    assert [type(effect) for effect in attached[0]] == [OpenStream, ToPlanner]
    assert [type(effect) for effect in attached[1]] == [ToPlanner]
    assert script.session.attached() == {0, 1}


def test_an_answer_of_the_old_planner_does_not_attach_a_rank_at_the_new_one() -> None:
    """Rank 1's registration is under way when the stream breaks: its answer may be of the process that is gone."""
    script = Script()
    script.attach(L1, address(0))
    attempt = script.link(L2, address(1))
    script(StreamClosed(S1, "gone"))
    assert script(RegisterAccepted(attempt)) == []
    assert script.session.states()[RankId(1)] is RankState.WAITING


def test_messages_and_ends_of_an_earlier_stream_are_ignored() -> None:
    script = Script()
    script.attach(L1, address(0))
    script(StreamClosed(S1, "gone"))
    script(RegisterAccepted(_attempt(script.until_due())))
    assert script(PlannerSaid(S1, Hello(to=address(0), epoch=Epoch(9)))) == []
    assert script(StreamClosed(S1, "late")) == []
    order = Hello(to=address(0), epoch=Epoch(1))
    assert script(PlannerSaid(S2, order)) == [ToHook(L1, order)]


@pytest.mark.parametrize(
    "order",
    [
        Hello(to=address(0), epoch=Epoch(2)),
        stage(address(0), 2),
        Arm(to=address(0), chunk_id=chunk_id(2, 5)),
        Disarm(to=address(0), chunk_id=chunk_id(3, 1), epoch=Epoch(2)),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders_of_a_lower_epoch_than_the_stream_has_reached_are_dropped(order: ToRank) -> None:
    script = Script()
    script.attach(L1, address(0))
    script(PlannerSaid(S1, Hello(to=address(0), epoch=Epoch(3))))
    assert script(PlannerSaid(S1, order)) == []
    assert script.session.orders_dropped == 1
    assert script.logs[-1].fields["reason"] == "it is of epoch 2, this planner has reached 3"


def test_a_chunk_of_an_older_epoch_is_disarmed_by_the_present_planner() -> None:
    script = Script()
    script.attach(L1, address(0))
    script(PlannerSaid(S1, Hello(to=address(0), epoch=Epoch(3))))
    order = Disarm(to=address(0), chunk_id=chunk_id(2, 1), epoch=Epoch(3))
    assert script(PlannerSaid(S1, order)) == [ToHook(L1, order)]


def test_the_epoch_of_a_stream_does_not_bind_the_next_one() -> None:
    """A planner whose store was lost starts from a lower epoch and learns of the higher one from the hooks' Live."""
    script = Script()
    script.attach(L1, address(0))
    script(PlannerSaid(S1, Hello(to=address(0), epoch=Epoch(9))))
    script(StreamClosed(S1, "gone"))
    script(RegisterAccepted(_attempt(script.until_due())))
    order = Hello(to=address(0), epoch=Epoch(1))
    assert script(PlannerSaid(S2, order)) == [ToHook(L1, order)]


@pytest.mark.parametrize("to", [address(0, incarnation=99), address(0, group=6), address(5)], ids=["life", "group", "rank"])
def test_orders_for_another_life_group_or_rank_are_dropped(to: Address) -> None:
    script = Script()
    script.attach(L1, address(0))
    assert script(PlannerSaid(S1, stage(to, 1))) == []
    assert script.session.orders_dropped == 1


@pytest.mark.parametrize("sender", [address(0, incarnation=99), address(0, group=6), address(1)], ids=["life", "group", "rank"])
def test_facts_and_reports_of_another_life_group_or_rank_are_dropped(sender: Address) -> None:
    script = Script()
    script.attach(L1, address(0))
    assert script(HookSaid(L1, staged(sender))) == []
    assert script(HookSaid(L1, report(sender))) == []
    assert script.session.facts_dropped == 2


def test_a_hook_that_goes_is_reported_gone_and_its_reports_are_dropped() -> None:
    script = Script()
    script.attach(L1, address(0))
    assert script(HookGone(L1, "the hook closed the link")) == [
        ToPlanner(S1, Gone(sender=address(0), reason="the hook closed the link")),
        ForgetReports(RankId(0)),
    ]
    assert script(PlannerSaid(S1, stage(address(0), 1))) == []


def test_a_hook_that_links_anew_takes_over_and_is_attached_again() -> None:
    """Facts may be lost with the old link: the planner must say Hello again, so the rank attaches again."""
    script = Script()
    script.attach(L1, address(0))
    assert script(HookSaid(L2, registration(address(0)))) == [
        CloseLink(L1, "rank 0 linked anew"),
        Register(2, registration(address(0))),
    ]
    assert script(HookGone(L1, "closed")) == []
    assert script(RegisterAccepted(2)) == [ToHook(L2, ACCEPTED), ToPlanner(S1, Attach(deployment=D, ranks=(address(0),)))]
    assert script(HookSaid(L1, staged(address(0)))) == [CloseLink(L1, "said Staged before its registration")]


def test_nothing_passes_between_linking_anew_and_the_planners_answer() -> None:
    """The planner talks to a rank whose hook has just linked anew: until it has said Hello again, its orders are of before."""
    script = Script()
    script.attach(L1, address(0))
    script.link(L2, address(0))
    assert script(PlannerSaid(S1, stage(address(0), 1))) == []
    assert script(HookSaid(L2, staged(address(0)))) == []
    assert (script.session.orders_dropped, script.session.facts_dropped) == (1, 1)


def test_a_new_life_takes_over_and_the_old_one_is_gone() -> None:
    script, new = Script(), address(0, incarnation=200)
    script.attach(L1, address(0))
    reason = "rank 0 was taken over by engine incarnation 200"
    assert script(HookSaid(L2, registration(new))) == [
        ForgetReports(RankId(0)),
        ToPlanner(S1, Gone(sender=address(0), reason=reason)),
        CloseLink(L1, reason),
        Register(2, registration(new)),
    ]


def test_an_engine_that_was_taken_over_cannot_take_the_rank_back() -> None:
    """Two engines claim one rank: without this rule they would push each other out for ever."""
    script = Script()
    script.attach(L1, address(0))
    script.attach(L2, address(0, incarnation=200))
    effects = script(HookSaid(L3, registration(address(0))))
    assert [type(effect) for effect in effects] == [ToHook, CloseLink, Notice]
    assert script.session.attached() == {0}
    script(HookGone(L2, "ended"))
    assert isinstance(script(HookSaid(LinkId(4), registration(address(0))))[-1], Register)


def test_a_new_group_is_registered_and_attached_over_the_same_link() -> None:
    script, new = Script(), address(0, group=8)
    script.attach(L1, address(0))
    assert script(HookSaid(L1, registration(new))) == [ForgetReports(RankId(0)), Register(2, registration(new))]
    assert script(PlannerSaid(S1, stage(address(0), 1))) == []
    assert script(RegisterAccepted(2)) == [ToPlanner(S1, Attach(deployment=D, ranks=(new,)))]


def test_refusal_is_told_to_the_hook_and_the_operator_once_and_tried_again_with_growing_pauses() -> None:
    script = Script()
    attempt = script.link(L1, address(0))
    reason = "rank 0 has model digest a, rank 1 has c"
    assert script(RegisterFailed(attempt, refused=True, reason=reason)) == [
        Notice(f"rank 0 of deployment d is refused: {reason}"),
        ToHook(L1, RegistrationAnswer(accepted=False, reason=reason)),
    ]
    pauses = []
    for _ in range(8):
        before = script.now
        retry = script.until_due()
        pauses.append(script.now - before)
        assert script(RegisterFailed(_attempt(retry), refused=True, reason=reason)) == []
    assert REFUSED_BACKOFF_S[0] / 2 <= pauses[0] <= REFUSED_BACKOFF_S[0]
    assert pauses[3] > pauses[0] * 2
    assert max(pauses) <= REFUSED_BACKOFF_S[1]
    assert script(RegisterAccepted(_attempt(script.until_due())))[0] == ToHook(L1, ACCEPTED)


def test_an_absent_planner_is_logged_once_for_each_reason_and_not_told_to_hooks() -> None:
    script = Script()
    attempt = script.link(L1, address(0))
    for reason in ("refused", "refused", "timed out", "timed out"):
        assert script(RegisterFailed(attempt, refused=False, reason=reason)) == []
        attempt = _attempt(script.until_due())
        assert script.now < 4 * AWAY_BACKOFF_S[1]
    assert [log.fields["reason"] for log in script.logs if log.event == "planner.lost"] == ["refused", "timed out"]


def test_a_planner_that_ends_every_stream_at_once_is_not_asked_in_a_hot_loop() -> None:
    script = Script()
    script.attach(L1, address(0))
    for stream in range(1, 30):
        script(StreamClosed(StreamId(stream), "ended"))
        script(RegisterAccepted(_attempt(script.until_due())))
    assert script.now > 29 / 2 * AWAY_BACKOFF_S[1] * 0.7


def test_ranks_of_two_deployments_do_not_share_a_process() -> None:
    script = Script()
    script.attach(L1, address(0))
    effects = script(HookSaid(L2, registration(address(1), deployment="other")))
    assert [type(effect) for effect in effects] == [ToHook, CloseLink, Notice]
    answer = effects[0]
    assert isinstance(answer, ToHook)
    assert isinstance(answer.message, RegistrationAnswer)
    assert "serves deployment 'd' (1 ranks linked)" in answer.message.reason


def test_another_deployment_may_follow_once_all_ranks_are_gone() -> None:
    script = Script()
    script.attach(L1, address(0))
    script(HookGone(L1, "ended"))
    other = registration(address(0), deployment="other")
    assert script(HookSaid(L2, other)) == [CloseStream(S1), Register(2, other)]
    assert script(RegisterAccepted(2))[1] == OpenStream(S2)


def test_a_link_speaks_for_one_rank() -> None:
    script = Script()
    script.attach(L1, address(0))
    effects = script(HookSaid(L1, registration(address(1))))
    assert isinstance(effects[0], ToHook)
    assert CloseLink(L1, "this link speaks for rank 0; rank 1 needs a link of its own") in effects
    assert script.session.attached() == frozenset()


def test_a_link_that_speaks_before_it_registers_is_closed() -> None:
    assert Script()(HookSaid(L1, staged(address(0)))) == [CloseLink(L1, "said Staged before its registration")]


def test_the_configured_node_name_replaces_what_hooks_say() -> None:
    script = Script(Session(node="rack7"))
    assert script(HookSaid(L1, registration(address(0)))) == [Register(1, replace(registration(address(0)), node="rack7"))]


def test_processes_with_different_seeds_come_back_at_different_times() -> None:
    dues = set()
    for seed in range(20):
        script = Script(Session(jitter_seed=seed))
        script.attach(L1, address(0))
        script(StreamClosed(S1, "gone"))
        dues.add(script.session.due_at_s())
    assert len(dues) == 20


def test_every_state_but_the_first_answer_can_be_linked_anew_and_lose_the_planner() -> None:
    for state in RankState:
        assert (state, Step.LINKED) in TRANSITIONS
        assert (state, Step.PLANNER_LOST) in TRANSITIONS


def _attempt(effects: list[Effect]) -> int:
    (register,) = [effect for effect in effects if isinstance(effect, Register)]
    return register.attempt


def test_one_rank_that_reaches_a_planner_again_brings_its_siblings_back_at_once() -> None:
    script = Script()
    for link, rank in ((L1, 0), (L2, 1)):
        script.attach(link, address(rank))
    script(StreamClosed(S1, "planner gone"))
    for _ in range(12):  # long enough for the pauses to have grown
        for effect in script.until_due():
            if isinstance(effect, Register):
                script(RegisterFailed(effect.attempt, refused=False, reason="not reachable"))
    first = script.until_due()
    script(RegisterAccepted(_attempt(first)))
    assert script.session.due_at_s() == script.now
    assert [effect.registration.address for effect in script(Tick()) if isinstance(effect, Register)] == [
        address(1) if first[0] == Register(_attempt(first), registration(address(0))) else address(0)
    ]


def test_a_refused_rank_keeps_its_pause_when_a_sibling_is_accepted() -> None:
    script = Script()
    refused = script.link(L1, address(0))
    script(RegisterFailed(refused, refused=True, reason="another model"))
    pause_ends_s = script.session.due_at_s()
    script.attach(L2, address(1))
    assert script.session.due_at_s() == pause_ends_s
