"""The planner's machine: what it asks, in which order, what it refuses, and that every wait ends with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest

from eplb_service.control import (
    Address,
    Arm,
    Armed,
    Committed,
    Disarm,
    Disarmed,
    Flipped,
    FromRank,
    Hello,
    LayerInfo,
    LinkBytes,
    Live,
    ModelInfo,
    Pulse,
    RefusalCode,
    Refused,
    Registration,
    Stage,
    Staged,
    ToRank,
)
from eplb_service.generation import Generation, LiveMap, as_loaded
from eplb_service.ids import (
    ChunkId,
    DeploymentId,
    Epoch,
    GenerationNumber,
    GroupId,
    Incarnation,
    LayerRef,
    Phase,
    RankId,
    chunk_id,
)
from eplb_service.imbalance import Imbalance
from eplb_service.membership.machine import Group, GroupLost, GroupReady, RankAttached, RankDetached
from eplb_service.moves import NO_MOVES
from eplb_service.placement import Placement, Table
from eplb_service.rollout.events import (
    Alarm,
    AlarmCleared,
    AlarmCode,
    Cancel,
    Effect,
    Fenced,
    Finished,
    LiveChanged,
    Outcome,
    Outranked,
    Persist,
    Persisted,
    PersistFailed,
    Received,
    RolloutEvent,
    RolloutSettings,
    RolloutState,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout.machine import Rollout

EPOCH = Epoch(5)
LAYERS = (LayerRef("m", 0), LayerRef("m", 1))
SETTINGS = RolloutSettings(
    stage_timeout_s=10.0,
    arm_ttl_s=6.0,
    slowest_step_s=0.5,
    answer_slack_s=1.0,
    hello_timeout_s=3.0,
    persist_timeout_s=2.0,
    disarm_timeout_s=4.0,
    inconsistent_retry_s=30.0,
    hold_timeout_s=50.0,
    backoff_s=1.0,
    backoff_max_s=8.0,
    tries_max=3,
)
RANKS = (RankId(4), RankId(5), RankId(6))
VOTE_PERIOD = 4

AnyEffect = TypeVar("AnyEffect")


def group(*, group_id: int = 1, staging_bytes: int = 10, incarnation: int = 1, dispatch: str = "even") -> Group:
    layers = tuple(LayerInfo(layer_id=layer.layer_id, num_logical=3, slots=2, expert_bytes=10) for layer in LAYERS)
    return Group.of(
        tuple(
            Registration(
                deployment=DeploymentId("d"),
                address=Address(rank, Incarnation(incarnation), GroupId(group_id)),
                node="n",
                group_rank_ids=RANKS,
                phase=Phase.DECODE,
                stage=0,
                models=(ModelInfo(name="m", digest="d", manifest_digest="t", layers=layers),),
                capacity=1.0,
                dispatch=dispatch,
                vote_period=VOTE_PERIOD,
                window_steps=8,
                sub_windows=1,
                staging_bytes=staging_bytes,
                replica_table_width=3,
                weights_version=1,
            )
            for rank in RANKS
        )
    )


def placement(first: Sequence[int] = (0, 1, 2, 0, 1, 2), second: Sequence[int] = (0, 1, 2, 0, 1, 2)) -> Placement:
    return Placement((Table("m", (0, 1), 3, RANKS, np.array([first, second], np.int32)),))


ONE_LAYER = placement((0, 1, 2, 0, 1, 1))
TWO_LAYERS = placement((0, 1, 2, 0, 1, 1), (0, 1, 2, 0, 0, 2))


def generation(number: int, target: Placement) -> Generation:
    even = Imbalance((1.0, 1.0))
    return Generation(
        number=GenerationNumber(number),
        placement=target,
        created_at_s=0.0,
        reason="drift",
        policy="greedy",
        epoch=EPOCH,
        before=even,
        predicted=even,
        lower_bound=even,
        moves=NO_MOVES,
    )


class Script:
    """Drives a machine and keeps what it said."""

    def __init__(self, machine: Rollout | None = None, ready: Group | None = None) -> None:
        self.machine = machine or Rollout(EPOCH, SETTINGS, first_sequence=1)
        self.group = ready or group()
        self.now = 0.0
        self.last: tuple[Effect, ...] = ()
        self.all: list[Effect] = []
        self.do(GroupReady(self.group))

    def do(self, event: RolloutEvent) -> tuple[Effect, ...]:
        self.last = self.machine.handle(event, self.now)
        self.all += self.last
        return self.last

    def hear(self, *messages: FromRank) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = ()
        for message in messages:
            effects += self.do(Received(message))
        self.last = effects
        return effects

    def wait(self) -> tuple[Effect, ...]:
        """To the next deadline."""
        assert self.machine.next_deadline is not None
        self.now = self.machine.next_deadline
        return self.do(Tick())

    def address(self, rank: int) -> Address:
        return self.group.addresses[RankId(rank)]

    def lives(self, live: LiveMap | None = None, **changes: object) -> list[Live]:
        live = live or as_loaded(placement())
        return [self.live(rank, live, **changes) for rank in RANKS]

    def live(self, rank: int, live: LiveMap | None = None, **changes: object) -> Live:
        live = live or as_loaded(placement())
        made = Live(
            sender=self.address(rank),
            epoch=EPOCH,
            epoch_seen=EPOCH,
            generation_seen=GenerationNumber(0),
            closed_id=ChunkId(0),
            flipped_id=ChunkId(0),
            boundary=0,
            weights_version=1,
            voting=True,
            off_reason="",
            layers=live.layers,
        )
        return dataclasses.replace(made, **changes)  # type: ignore[arg-type]

    def staged(self, *ranks: int) -> list[Staged]:
        chunk = self.machine.open_chunk
        return [Staged(sender=self.address(r), chunk_id=chunk, seconds=0.1, received=LinkBytes()) for r in ranks or RANKS]

    def flipped(self, *ranks: int, boundary: int = 8, digest: int | None = None) -> list[Flipped]:
        stage = self.stages()[-1]
        digests = tuple((change.layer, digest or change.new_digest) for change in stage.layers)
        return [
            Flipped(sender=self.address(r), chunk_id=stage.chunk_id, boundary=boundary, digests=digests, stall_s=0.0)
            for r in ranks or RANKS
        ]

    def disarmed(self, *ranks: int) -> list[Disarmed]:
        chunk = self.stages()[-1].chunk_id
        return [Disarmed(sender=self.address(r), chunk_id=chunk) for r in ranks or RANKS]

    def refused(self, rank: int, code: RefusalCode = RefusalCode.TRANSFER) -> Refused:
        return Refused(sender=self.address(rank), chunk_id=self.machine.open_chunk, code=code, reason="because")

    def pulse(self, rank: int, **changes: object) -> Pulse:
        made = Pulse(
            sender=self.address(rank), boundary=0, idle=False, voting=True, off_reason="", windows_dropped=0, weights_version=1
        )
        return dataclasses.replace(made, **changes)  # type: ignore[arg-type]

    def stages(self) -> list[Stage]:
        return [effect.message for effect in self.all if isinstance(effect, Send) and isinstance(effect.message, Stage)]

    @property
    def state(self) -> RolloutState:
        return self.machine.state

    def expect(self, state: RolloutState) -> None:
        assert self.machine.state is state, self.machine.progress()


def sent(effects: Sequence[Effect], kind: type[ToRank] | None = None) -> list[tuple[str, int]]:
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [(type(message).__name__, message.to.rank_id) for message in messages if kind is None or isinstance(message, kind)]


def of(effects: Sequence[Effect], kind: type[AnyEffect]) -> list[AnyEffect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def idle(settings: RolloutSettings = SETTINGS) -> Script:
    script = Script(Rollout(EPOCH, settings, first_sequence=1))
    script.hear(*script.lives())
    script.expect(RolloutState.IDLE)
    return script


def staging(target: Placement = ONE_LAYER) -> Script:
    script = idle()
    (persist,) = of(script.do(Start(generation(1, target))), Persist)
    script.do(Persisted(persist.token))
    script.expect(RolloutState.STAGING)
    return script


def armed(target: Placement = ONE_LAYER) -> Script:
    script = staging(target)
    script.hear(*script.staged())
    script.expect(RolloutState.ARMED)
    return script


def outcome(script: Script) -> Finished:
    return of(script.all, Finished)[-1]


# ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_live_maps_are_adopted_whatever_the_store_knew() -> None:
    script = Script()
    assert sent(script.last) == [("Hello", 4), ("Hello", 5), ("Hello", 6)]
    live = as_loaded(placement()).with_rows({LAYERS[0]: np.array((2, 1, 0, 0, 1, 1))}, GenerationNumber(7))
    script.hear(*script.lives(live, generation_seen=GenerationNumber(9)))
    (changed,) = of(script.last, LiveChanged)
    assert changed.live == live
    assert (changed.generation_floor, script.machine.generation_floor) == (9, 9)
    script.expect(RolloutState.IDLE)


def test_a_rank_that_does_not_reply_is_asked_again_and_the_wait_is_seen() -> None:  # vllm#57883
    script = Script()
    script.hear(script.live(4), script.live(6))
    assert script.machine.progress().waiting_for == (5,)
    for _ in range(2):
        assert sent(script.wait()) == [("Hello", 5)]
        assert script.machine.progress().stalled
    script.hear(script.live(5))
    script.expect(RolloutState.IDLE)
    assert not script.machine.progress().stalled


def test_unequal_live_maps_raise_an_alarm_until_an_equal_set_clears_it() -> None:
    """sglang#32962: ranks that route by maps of their own give wrong sums, and no engine says so."""
    script = Script()
    other = as_loaded(ONE_LAYER)
    script.hear(script.live(4), script.live(5), script.live(6, other))
    (alarm,) = of(script.last, Alarm)
    assert alarm.code is AlarmCode.INCONSISTENT
    assert "ranks 4 and 6 route 1 layers by different rows: layer m/0" in alarm.reason
    script.expect(RolloutState.INCONSISTENT)
    assert outcome_of_start(script) is Outcome.NOT_STARTED
    assert sent(script.wait(), Hello) == [("Hello", 4), ("Hello", 5), ("Hello", 6)]
    script.hear(*script.lives(other))
    assert len(of(script.last, AlarmCleared)) == 1
    assert script.machine.alarm is None
    script.expect(RolloutState.IDLE)


def outcome_of_start(script: Script) -> Outcome:
    (finished,) = of(script.do(Start(generation(1, TWO_LAYERS))), Finished)
    return finished.outcome


def test_a_live_map_that_cannot_be_is_no_reply() -> None:
    script = Script()
    broken = dataclasses.replace(script.live(5).layers[0], digest=1)
    script.hear(script.live(4), script.live(6), script.live(5, layers=(broken, script.live(5).layers[1])))
    (alarm,) = of(script.last, Alarm)
    assert alarm.code is AlarmCode.BAD_LIVE
    script.expect(RolloutState.HELLO)


def test_a_rank_that_comes_back_with_another_or_an_impossible_map_makes_all_be_asked_again() -> None:
    script = idle()
    script.hear(script.live(5, as_loaded(ONE_LAYER)))
    script.expect(RolloutState.HELLO)
    script.hear(*script.lives())
    script.expect(RolloutState.IDLE)
    script.hear(script.live(5, layers=script.live(5).layers[:1]))
    assert script.machine.alarm is not None
    script.expect(RolloutState.HELLO)
    script.hear(*script.lives())
    assert len(of(script.last, AlarmCleared)) == 1


def test_a_reply_that_has_seen_a_higher_epoch_ends_the_machine() -> None:
    script = Script()
    assert of(script.hear(script.live(4, epoch_seen=Epoch(8))), Outranked) == [Outranked(Epoch(8))]
    script.expect(RolloutState.OUTRANKED)
    assert script.hear(*script.lives()) == ()
    assert script.do(Tick()) == ()


def test_a_chunk_of_our_epoch_that_is_not_ours_gives_another_leader_away() -> None:
    script = Script(Rollout(EPOCH, SETTINGS, first_sequence=1000))
    script.hear(script.live(4, closed_id=chunk_id(EPOCH, 77)))
    assert of(script.last, Outranked) == [Outranked(EPOCH)]


def test_messages_of_another_life_or_group_are_dropped_and_counted() -> None:
    script = Script()
    older = dataclasses.replace(script.live(4), sender=Address(RankId(4), Incarnation(9), GroupId(1)))
    strange = dataclasses.replace(script.live(4), sender=Address(RankId(4), Incarnation(1), GroupId(2)))
    assert script.hear(older, strange) == ()
    assert script.machine.dropped == {"of another group or life": 2}


# ── a rollout ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_sent_before_the_store_has_the_start() -> None:
    script = idle()
    effects = script.do(Start(generation(1, ONE_LAYER)))
    assert sent(effects) == []
    (persist,) = of(effects, Persist)
    assert (persist.record.epoch, persist.record.generation, persist.record.num_chunks) == (5, 1, 1)
    assert sent(script.do(Persisted(persist.token + 1))) == []
    assert sent(script.do(Persisted(persist.token))) == [("Stage", 4), ("Stage", 5), ("Stage", 6)]


def test_a_generation_is_carried_layer_by_layer_within_the_budget() -> None:
    script = armed(TWO_LAYERS)
    assert [change.layer for change in script.stages()[-1].layers] == [LAYERS[0]]
    effects = script.hear(*script.flipped(boundary=8))
    (changed,) = of(effects, LiveChanged)
    assert changed.live.generations == (1, 0)
    assert changed.boundary == 8
    assert [change.layer for change in script.stages()[-1].layers] == [LAYERS[1]]
    script.hear(*script.staged())
    script.hear(*script.flipped(boundary=20))
    finished = outcome(script)
    assert (finished.outcome, finished.flip_boundaries) == (Outcome.ACTIVE, (8, 20))
    assert script.machine.live is not None
    assert script.machine.live.placement == TWO_LAYERS
    script.expect(RolloutState.IDLE)


def test_answers_may_come_in_any_order_and_twice() -> None:  # vllm-ascend#17232
    script = staging()
    script.hear(*script.staged(6), *script.staged(6), *script.staged(4))
    script.expect(RolloutState.STAGING)
    assert script.machine.progress().waiting_for == (5,)
    effects = script.hear(*script.staged(5))
    assert sent(effects) == [("Arm", 4), ("Arm", 5), ("Arm", 6)]
    late_armed = Armed(sender=script.address(4), chunk_id=script.machine.open_chunk)
    script.hear(*script.flipped(5), late_armed, *script.flipped(5), *script.staged(4), *script.flipped(6, 4))
    assert outcome(script).outcome is Outcome.ACTIVE
    assert script.hear(*script.flipped()) == ()


def test_a_layer_that_has_its_row_already_is_not_carried_again() -> None:
    script = idle()
    assert outcome_of(script, generation(1, placement())) == (Outcome.ACTIVE, "every layer has its row already")


def outcome_of(script: Script, target: Generation) -> tuple[Outcome, str]:
    (finished,) = of(script.do(Start(target)), Finished)
    return finished.outcome, finished.reason


def test_a_new_leader_continues_an_unfinished_generation_with_the_remaining_layers() -> None:
    half = as_loaded(placement()).with_rows({LAYERS[0]: np.array((0, 1, 2, 0, 1, 1))}, GenerationNumber(3))
    script = Script(Rollout(Epoch(6), SETTINGS, first_sequence=1))
    seen = {"epoch": Epoch(6), "epoch_seen": Epoch(6), "generation_seen": GenerationNumber(3)}
    script.hear(*script.lives(half, **seen))
    (persist,) = of(script.do(Start(generation(3, TWO_LAYERS))), Persist)
    assert (persist.record.num_chunks, persist.record.num_layers) == (1, 1)
    script.do(Persisted(persist.token))
    assert [change.layer for change in script.stages()[-1].layers] == [LAYERS[1]]
    script.hear(*script.staged())
    script.hear(*script.flipped())
    assert script.machine.live is not None
    assert script.machine.live.generations == (3, 3)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (generation(1, placement((0, 1, 0, 0, 1, 1))), "leaves expert 2 of layer m/0 on no rank"),
        (generation(1, placement((0, 0, 0, 0, 1, 2))), "4 replicas, the engine's tables hold 3"),
        (generation(1, placement((1, 0, 2, 0, 1, 2))), "stages 20 bytes on rank 4 but the smallest staging budget is 10"),
    ],
)
def test_a_generation_that_cannot_be_carried_is_not_started(target: Generation, said: str) -> None:
    script = idle()
    result, reason = outcome_of(script, target)
    assert result is Outcome.NOT_STARTED
    assert said in reason
    assert sent(script.last) == []
    script.expect(RolloutState.IDLE)


def test_a_number_that_ranks_route_by_other_rows_of_is_not_carried_again() -> None:
    """A store lost its data while the planner that had published the number lived on, and flipped it."""
    other = as_loaded(placement()).with_rows({LAYERS[0]: np.array((1, 1, 2, 0, 0, 2))}, GenerationNumber(3))
    script = Script()
    script.hear(*script.lives(other, generation_seen=GenerationNumber(3)))
    result, reason = outcome_of(script, generation(3, TWO_LAYERS))
    assert result is Outcome.NOT_STARTED
    assert "ranks route layer m/0 by another row under that number" in reason
    assert "publish again under a new number" in reason
    assert sent(script.last) == []


def test_numbers_never_go_back() -> None:
    script = Script()
    script.hear(*script.lives(generation_seen=GenerationNumber(9)))
    result, reason = outcome_of(script, generation(8, ONE_LAYER))
    assert result is Outcome.NOT_STARTED
    assert "ranks have seen generation 9" in reason


SHARES = np.array([[0.25, 1, 1, 0.75, 0, 0], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]], np.float32)
SPLIT = placement((0, 1, 2, 0, -1, -1)).tables[0].with_shares(SHARES)


def test_a_layer_whose_shares_alone_change_is_voted_and_flipped_like_any_other() -> None:
    script = Script(ready=group(dispatch="weighted"))
    live = as_loaded(placement((0, 1, 2, 0, -1, -1)).with_even_shares())
    script.hear(*script.lives(live))
    (persist,) = of(script.do(Start(generation(1, Placement((SPLIT,))))), Persist)
    assert (persist.record.num_chunks, persist.record.num_layers) == (1, 1)
    script.do(Persisted(persist.token))
    stage = script.stages()[-1]
    assert stage.copies == ()
    (change,) = stage.layers
    assert (change.layer, change.new_row) == (LAYERS[0], (0, 1, 2, 0, -1, -1))
    assert change.new_shares == (0.25, 1.0, 1.0, 0.75, 0.0, 0.0)
    script.hear(*script.staged())
    (changed,) = of(script.hear(*script.flipped()), LiveChanged)
    assert changed.live.generations == (1, 0)
    assert changed.live.placement == Placement((SPLIT,))
    assert outcome(script).outcome is Outcome.ACTIVE


@pytest.mark.parametrize(
    ("dispatch", "live", "target", "said"),
    [
        ("nearest", placement(), placement().with_even_shares(), "the engine's dispatch is 'nearest', which knows none"),
        ("weighted", placement().with_even_shares(), ONE_LAYER, "the placement has none: give every slot its share"),
    ],
)
def test_shares_go_to_weighted_engines_and_to_no_others(dispatch: str, live: Placement, target: Placement, said: str) -> None:
    script = Script(ready=group(dispatch=dispatch))
    script.hear(*script.lives(as_loaded(live)))
    result, reason = outcome_of(script, generation(1, target))
    assert result is Outcome.NOT_STARTED
    assert said in reason


def test_a_group_without_staging_is_only_observed() -> None:
    script = Script(ready=group(staging_bytes=0))
    script.hear(*script.lives())
    assert "observe only" in outcome_of(script, generation(1, ONE_LAYER))[1]


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_refusal_withdraws_the_chunk_on_all_ranks_and_the_next_try_has_new_ids() -> None:  # vllm#53947
    script = staging()
    first = script.stages()[-1]
    script.hear(*script.staged(4, 5))
    assert sent(script.hear(script.refused(6))) == [("Disarm", 4), ("Disarm", 5), ("Disarm", 6)]
    script.hear(*script.disarmed())
    script.expect(RolloutState.BACKING_OFF)
    script.wait()
    second = script.stages()[-1]
    assert second.chunk_id > first.chunk_id
    assert (first.mesh_id, second.mesh_id) == (first.chunk_id, second.chunk_id)
    script.hear(*script.staged())
    script.hear(*script.flipped())
    assert outcome(script).outcome is Outcome.ACTIVE
    (persist,) = of(script.do(Start(generation(2, placement()))), Persist)
    script.do(Persisted(persist.token))
    assert script.stages()[-1].mesh_id == second.mesh_id  # connections that worked are kept


def test_it_gives_up_loudly_after_the_last_try_and_is_free_again() -> None:  # vllm#53947
    script = staging()
    for _ in range(SETTINGS.tries_max):
        script.hear(script.refused(5))
        script.hear(*script.disarmed())
        if script.machine.next_deadline is not None:
            script.wait()
    finished = outcome(script)
    assert finished.outcome is Outcome.STOPPED
    assert finished.reason == "gave up chunk 1 after 3 tries: rank 5 refused (transfer): because"
    assert finished.refused
    script.expect(RolloutState.IDLE)
    assert of(script.do(Start(generation(2, ONE_LAYER))), Persist)


@pytest.mark.parametrize("code", [RefusalCode.MANIFEST, RefusalCode.BUDGET, RefusalCode.INVALID, RefusalCode.OFF])
def test_a_refusal_that_another_try_would_meet_again_stops_the_rollout(code: RefusalCode) -> None:
    script = staging()
    script.hear(script.refused(5, code))
    script.hear(*script.disarmed())
    assert outcome(script).outcome is Outcome.STOPPED
    assert code.value in outcome(script).reason
    assert outcome(script).refused


def test_a_rank_that_routes_by_other_rows_makes_all_be_asked_again() -> None:
    script = staging()
    script.hear(script.refused(5, RefusalCode.OLD_DIGEST))
    script.hear(*script.disarmed())
    assert outcome(script).outcome is Outcome.STOPPED
    assert not outcome(script).refused
    script.expect(RolloutState.HELLO)
    script.hear(*script.lives(closed_id=script.stages()[-1].chunk_id))
    script.expect(RolloutState.IDLE)


def test_one_disarmed_proves_the_withdrawal_when_the_others_stay_silent() -> None:
    script = staging()
    script.hear(script.refused(5))
    script.hear(*script.disarmed(4))
    script.expect(RolloutState.DISARMING)
    script.wait()
    script.expect(RolloutState.BACKING_OFF)


def test_no_answer_to_a_withdrawal_is_asked_for_again_and_seen_as_stalled() -> None:  # vllm#57883
    script = staging()
    script.wait()  # nobody staged
    script.expect(RolloutState.DISARMING)
    assert "ranks 4, 5, 6 did not stage it within 11 s" in script.machine.progress().last_error
    for _ in range(3):
        assert sent(script.wait(), Disarm) == [("Disarm", 4), ("Disarm", 5), ("Disarm", 6)]
        assert script.machine.progress().stalled
    script.hear(*script.disarmed(5))
    script.wait()
    script.expect(RolloutState.BACKING_OFF)


def test_every_state_that_waits_has_a_deadline() -> None:  # vllm#57883
    hello, persisting = Script(), idle()
    persisting.do(Start(generation(1, ONE_LAYER)))
    disarming, backing_off = staging(), staging()
    disarming.hear(disarming.refused(4))
    backing_off.hear(backing_off.refused(4), *backing_off.disarmed())
    inconsistent = Script()
    inconsistent.hear(inconsistent.live(4), inconsistent.live(5), inconsistent.live(6, as_loaded(ONE_LAYER)))
    scripts = [hello, persisting, staging(), armed(), disarming, backing_off, inconsistent]
    assert {script.state for script in scripts} == set(RolloutState) - {
        RolloutState.WAITING,
        RolloutState.IDLE,
        RolloutState.OUTRANKED,
    }
    for script in scripts:
        assert script.machine.next_deadline is not None, script.state


def test_the_arm_deadline_outlasts_the_ranks_own_and_two_votes() -> None:
    script = armed()
    assert (
        script.machine.next_deadline == SETTINGS.arm_ttl_s + 2 * VOTE_PERIOD * SETTINGS.slowest_step_s + SETTINGS.answer_slack_s
    )


def test_a_rank_that_never_flips_is_not_waited_for_once_one_closed_the_chunk() -> None:  # vllm#32418
    script = armed()
    script.wait()
    assert sent(script.last, Disarm) == [("Disarm", 4), ("Disarm", 5), ("Disarm", 6)]
    script.hear(*script.disarmed(4, 5, 6))
    script.expect(RolloutState.BACKING_OFF)
    assert script.machine.live == as_loaded(placement())


def test_a_disarm_that_comes_too_late_ends_in_the_flip() -> None:  # vllm#32418
    script = armed()
    script.wait()
    script.hear(*script.flipped(4))
    script.wait()
    assert sent(script.last, Arm) == [("Arm", 5), ("Arm", 6)]  # answered by Flipped: it is settled, only not known
    script.hear(*script.flipped(5, 6))
    assert outcome(script).outcome is Outcome.ACTIVE


def test_a_flip_that_one_rank_has_not_reported_is_waited_for_and_never_withdrawn() -> None:  # sglang#22788
    """sglang#18213: a generation is live when every reader of the map says so, not when most do."""
    script = armed()
    script.hear(*script.flipped(4, 5))
    script.wait()
    assert sent(script.last, Disarm) == []
    assert sent(script.last, Arm) == [("Arm", 6)]
    assert script.machine.progress().stalled
    assert script.machine.live == as_loaded(placement())
    script.hear(*script.flipped(6))
    assert outcome(script).outcome is Outcome.ACTIVE


def test_ranks_that_flip_at_different_steps_are_an_alarm() -> None:  # sglang#22788
    script = armed()
    script.hear(*script.flipped(4, boundary=100), *script.flipped(5, boundary=101))
    (alarm,) = of(script.all, Alarm)
    assert alarm.code is AlarmCode.FLIP_BOUNDARY
    assert "rank 5" in alarm.reason
    assert "101, others at 100" in alarm.reason
    assert outcome(script).outcome is Outcome.STOPPED
    assert script.machine.live is None


def test_a_flip_to_another_row_is_an_alarm() -> None:  # vllm-ascend#4417
    script = armed()
    script.hear(*script.flipped(4, 5), *script.flipped(6, digest=99))
    (alarm,) = of(script.all, Alarm)
    assert alarm.code is AlarmCode.FLIP_DIGEST
    assert "digest 0x63" in alarm.reason
    script.expect(RolloutState.HELLO)
    flipped = as_loaded(ONE_LAYER)
    script.hear(*script.lives(flipped))  # from before the chunk was closed: no proof
    script.expect(RolloutState.HELLO)
    script.hear(*script.lives(flipped, closed_id=script.stages()[-1].chunk_id))
    script.expect(RolloutState.IDLE)


def test_a_flip_after_a_proven_withdrawal_is_an_alarm() -> None:
    script = staging()
    script.hear(script.refused(4), *script.disarmed())
    script.hear(*script.flipped(5))
    assert [alarm.code for alarm in of(script.all, Alarm)] == [AlarmCode.FLIP_AFTER_DISARM]
    assert outcome(script).outcome is Outcome.STOPPED


def test_a_flip_and_a_withdrawal_of_one_chunk_contradict_each_other() -> None:
    script = armed()
    committed = Committed(sender=script.address(4), chunk_id=script.machine.open_chunk, boundary=3)
    script.hear(committed, *script.disarmed(5))
    assert [alarm.code for alarm in of(script.all, Alarm)] == [AlarmCode.FLIP_AFTER_DISARM]


def test_a_rank_that_is_gone_aborts_and_the_ranks_that_are_left_are_freed() -> None:
    script = armed()
    effects = script.do(GroupLost(GroupId(1), "rank 5 is gone: exit 9"))
    assert sent(effects, Disarm) == [("Disarm", 4), ("Disarm", 5), ("Disarm", 6)]
    assert outcome(script).reason.startswith("rank 5 is gone: exit 9; what became of chunk 0x500000001 is learned when")
    script.expect(RolloutState.WAITING)
    script.group = group(group_id=2, incarnation=2)
    assert sent(script.do(GroupReady(script.group))) == [("Hello", 4), ("Hello", 5), ("Hello", 6)]
    script.hear(*script.lives(as_loaded(ONE_LAYER)))  # it had flipped
    assert script.machine.live == as_loaded(ONE_LAYER)


def test_a_stream_that_comes_back_is_asked_and_told_again_what_counts() -> None:
    script = staging()
    lost, chunk = script.address(5), script.machine.open_chunk
    script.do(RankDetached(lost, "reset"))
    script.hear(*script.staged())
    script.expect(RolloutState.STAGING)  # not armed while one cannot hear it
    effects = script.do(RankAttached(lost))
    assert sent(effects)[:2] == [("Hello", 5), ("Stage", 5)]
    script.expect(RolloutState.ARMED)
    again = script.stages()[-1]
    assert dataclasses.replace(again, to=script.address(4)) == script.stages()[0]
    script.do(RankDetached(lost, "reset"))
    script.hear(*script.flipped(4, 6))
    assert sent(script.do(RankAttached(lost))) == [("Hello", 5), ("Arm", 5)]
    flipped = as_loaded(placement()).with_rows({LAYERS[0]: np.array((0, 1, 2, 0, 1, 1))}, GenerationNumber(1))
    script.hear(script.live(5, flipped, flipped_id=chunk, closed_id=chunk))
    assert outcome(script).flip_boundaries == (8,)


def test_a_rank_that_comes_back_with_the_chunk_closed_withdraws_it() -> None:
    script = staging()
    script.do(RankDetached(script.address(5), "reset"))
    script.do(RankAttached(script.address(5)))
    script.hear(script.live(5, closed_id=script.machine.open_chunk))
    script.expect(RolloutState.DISARMING)


def test_a_reply_from_before_a_flip_is_no_news() -> None:
    script = armed()
    script.hear(*script.flipped())
    script.hear(script.live(4))
    assert script.machine.dropped == {"Live from before a flip": 1}
    script.expect(RolloutState.IDLE)


def test_a_chunk_is_not_opened_while_a_rank_is_away_and_that_wait_ends() -> None:
    script = idle()
    script.do(RankDetached(script.address(5), "reset"))
    (persist,) = of(script.do(Start(generation(1, ONE_LAYER))), Persist)
    script.do(Persisted(persist.token))
    progress = script.machine.progress()
    assert (progress.state, progress.waiting_for) == (RolloutState.BACKING_OFF, (5,))
    assert script.stages() == []
    script.wait()
    assert outcome(script).reason == "waited 50 s: ranks are without a control stream"


def test_an_idle_engine_is_a_state_and_not_a_time_out() -> None:
    script = armed()
    script.hear(*(script.pulse(rank, idle=True) for rank in RANKS))
    script.hear(*script.disarmed())  # ranks disarm themselves when their time is over
    script.wait()
    progress = script.machine.progress()
    assert (progress.hold, progress.attempt, progress.deadline_s) == ("the engine runs no steps", 0, None)
    script.now += 10_000
    assert script.do(Tick()) == ()
    script.hear(script.pulse(4))
    script.expect(RolloutState.STAGING)


def test_a_rank_that_stops_voting_stops_the_rollout() -> None:
    script = armed()
    script.hear(script.pulse(6, voting=False, off_reason="switched off"))
    script.expect(RolloutState.DISARMING)
    script.hear(*script.disarmed())
    assert outcome(script).reason == "rank 6 takes no part in votes: switched off"


def test_weights_that_change_are_staged_with_their_new_version_once_all_ranks_have_it() -> None:
    script = staging()
    script.hear(script.refused(4, RefusalCode.WEIGHTS_VERSION), *script.disarmed())
    script.hear(script.pulse(4, weights_version=2))
    script.wait()
    assert script.machine.progress().hold == "ranks serve different weights versions: [1, 2]"
    script.hear(script.pulse(5, weights_version=2), script.pulse(6, weights_version=2))
    assert script.stages()[-1].weights_version == 2


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (PersistFailed(1, "no answer"), "the store did not take the start of the rollout: no answer"),
        (None, "the store did not confirm the start of the rollout within 2 s"),
    ],
)
def test_a_store_that_does_not_answer_leaves_everything_as_it_was(event: PersistFailed | None, said: str) -> None:
    script = idle()
    script.do(Start(generation(1, ONE_LAYER)))
    if event is None:
        script.wait()
    else:
        script.do(event)
    assert (outcome(script).outcome, outcome(script).reason) == (Outcome.NOT_STARTED, said)
    assert script.stages() == []
    script.expect(RolloutState.IDLE)


@pytest.mark.parametrize("event", [Fenced(Epoch(7)), PersistFailed(1, "fenced", fenced_by=Epoch(7))])
def test_a_fenced_planner_sends_nothing_more(event: RolloutEvent) -> None:
    script = idle()
    script.do(Start(generation(1, ONE_LAYER)))
    assert of(script.do(event), Outranked) == [Outranked(Epoch(7))]
    assert sent(script.last) == []
    assert script.do(Persisted(1)) == ()


def test_a_pause_stops_after_the_open_chunk() -> None:
    script = armed(TWO_LAYERS)
    script.do(Cancel(reason="maintenance", by="ann"))
    script.expect(RolloutState.ARMED)
    script.hear(*script.flipped())
    finished = outcome(script)
    assert (finished.outcome, finished.reason) == (Outcome.STOPPED, "maintenance (by ann)")
    assert finished.flip_boundaries == (8,)
    assert script.machine.live is not None
    assert script.machine.live.generations == (1, 0)


def test_a_cancel_that_withdraws_waits_for_the_proof() -> None:
    script = armed()
    script.do(Cancel(reason="stop", by="ann", withdraw=True))
    script.expect(RolloutState.DISARMING)
    assert of(script.all, Finished) == []
    script.hear(*script.disarmed())
    assert outcome(script).outcome is Outcome.STOPPED


def test_a_second_start_is_not_taken_while_one_runs() -> None:
    script = armed()
    result, reason = outcome_of(script, generation(2, TWO_LAYERS))
    assert (result, reason) == (Outcome.NOT_STARTED, "generation 2 cannot start: the rollout machine is armed")
    script.expect(RolloutState.ARMED)
