"""Ranks that lie to the planner: refused, named, and never believed over the others; no lie makes a map of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.control import (
    Arm,
    Armed,
    Committed,
    Disarm,
    Disarmed,
    Flipped,
    FromRank,
    Hello,
    LinkBytes,
    RefusalCode,
    Refused,
    Stage,
    Staged,
)
from eplb_service.generation import as_loaded
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, GroupId, Incarnation, RankId, chunk_id
from eplb_service.rollout.events import (
    Alarm,
    AlarmCode,
    Effect,
    Note,
    Persist,
    Persisted,
    Received,
    RolloutState,
    Send,
    Start,
    Tick,
)
from eplb_service.rollout.machine import Rollout
from tests.unit.test_rollout import (
    EPOCH,
    ONE_LAYER,
    RANKS,
    SETTINGS,
    TWO_LAYERS,
    Script,
    armed,
    generation,
    of,
    outcome,
    placement,
    sent,
    staging,
)

LIAR = RankId(5)


def alarm_of(script: Script) -> Alarm:
    (alarm,) = of(script.last, Alarm)
    return alarm


def test_staged_twice_by_one_rank_is_not_staged_by_two() -> None:
    script = staging()
    script.hear(*script.staged(4, 5), *script.staged(5), *script.staged(5))
    script.expect(RolloutState.STAGING)
    assert script.machine.progress().waiting_for == (6,)
    assert not sent(script.last, Arm)
    script.wait()
    assert "ranks 6 did not stage it within" in script.machine.progress().last_error


def test_staged_for_another_chunk_counts_for_none() -> None:
    script = staging()
    other = chunk_id(EPOCH, 1_000_000)
    lies = [dataclasses.replace(said, chunk_id=ChunkId(other - 1)) for said in script.staged(5)]
    script.hear(*script.staged(4, 6))
    assert script.machine.handle(Received(dataclasses.replace(lies[0], chunk_id=ChunkId(1))), script.now) == ()
    assert script.machine.progress().waiting_for == (5,)


def test_a_flip_that_was_never_armed_names_its_rank() -> None:
    script = staging()
    script.hear(*script.flipped(5))
    alarm = alarm_of(script)
    assert alarm.code is AlarmCode.FLIP_UNASKED
    assert alarm.reason.startswith("rank 5 flipped chunk ")
    assert "never armed" in outcome(script).reason


def test_a_flip_that_leaves_out_a_layers_digest_names_its_rank() -> None:
    """vllm-ascend#4417: told as done, and nothing was."""
    script = armed()
    (said,) = script.flipped(5)
    script.hear(dataclasses.replace(said, digests=()))
    assert alarm_of(script).code is AlarmCode.FLIP_DIGEST
    assert "rank 5 says that it flipped" in alarm_of(script).reason


def test_a_rank_that_tells_its_flip_twice_with_two_steps_is_named() -> None:
    script = armed()
    script.hear(*script.flipped(5, boundary=8))
    script.hear(*script.flipped(5, boundary=12))
    assert alarm_of(script).code is AlarmCode.FLIP_BOUNDARY
    assert "rank 5 flipped" in alarm_of(script).reason


def test_a_flip_that_is_never_told_is_waited_for_by_name() -> None:
    """vllm#57883: a rank that never answers is named in the state and in the journal, each time it is asked again."""
    script = armed()
    script.hear(*script.flipped(4, 6))
    script.wait()
    assert script.machine.progress().waiting_for == (5,)
    assert script.machine.progress().stalled
    notes = [note.text for note in of(script.all, Note) if note.event == "chunk.awaited"]
    assert notes == [f"armed: ranks 5 did not answer within {SETTINGS.arm_timeout_s(4):g} s; asked again"]
    script.wait()
    assert len([note for note in of(script.all, Note) if note.event == "chunk.awaited"]) == 1


@pytest.mark.parametrize(
    "changes",
    [{"incarnation": Incarnation(9)}, {"group_id": GroupId(9)}, {"rank_id": RankId(9)}],
    ids=["life", "group", "rank"],
)
def test_facts_in_the_name_of_another_life_group_or_deployment_count_for_nobody(changes: dict[str, Any]) -> None:
    script = armed()
    before = script.machine.progress()
    lies: list[FromRank] = [
        *script.flipped(5),
        *script.staged(5),
        *script.disarmed(5),
        script.refused(5),
        script.pulse(5, voting=False),
    ]
    for said in lies:
        sender = dataclasses.replace(said.sender, **changes)
        assert script.do(Received(dataclasses.replace(said, sender=sender))) == ()
    assert script.machine.progress() == before
    assert script.machine.dropped["of another group or life"] == 5


def test_a_live_map_under_a_digest_of_another_is_named() -> None:
    script = Script()
    layers = as_loaded(placement()).layers
    wrong = (dataclasses.replace(layers[0], digest=layers[0].digest ^ 1), *layers[1:])
    script.hear(script.live(5, layers=wrong))
    assert alarm_of(script).code is AlarmCode.BAD_LIVE
    assert alarm_of(script).reason.startswith("rank 5: layer m/0 claims digest")


# ── whatever it says, and whenever ───────────────────────────────────────────────────────────────────────────────────────


class Honest:
    """What ranks 4 and 6 do: all that they are told. The third never votes, so that nothing is ever voted through."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def answer(self, effects: tuple[Effect, ...]) -> list[FromRank]:
        said: list[FromRank] = []
        for effect in effects:
            if not isinstance(effect, Send) or effect.message.to.rank_id == LIAR:
                continue
            message = effect.message
            match message:
                case Stage():
                    said.append(Staged(sender=message.to, chunk_id=message.chunk_id, seconds=0.1, received=LinkBytes()))
                case Arm():
                    said.append(Armed(sender=message.to, chunk_id=message.chunk_id))
                case Disarm():
                    said.append(Disarmed(sender=message.to, chunk_id=message.chunk_id))
                case Hello():
                    last = self.script.machine._ids.last_opened
                    said.append(self.script.live(message.to.rank_id, closed_id=last))
        return said


KINDS = st.sampled_from(["staged", "armed", "refused", "committed", "flipped", "disarmed", "live", "pulse"])
LIES = st.lists(
    st.tuples(
        KINDS,
        st.sampled_from(["open", "open", "before", "after"]),
        st.integers(0, 1 << 20),
        st.booleans(),
        st.sampled_from(list(RefusalCode)),
    ),
    max_size=12,
)


def lie(script: Script, kind: str, which: str, number: int, right: bool, code: RefusalCode) -> FromRank:
    me, stages = script.address(LIAR), script.stages()
    opened = stages[-1].chunk_id if stages else chunk_id(EPOCH, 1)
    chunk = {"open": opened, "before": ChunkId(max(1, opened - 1)), "after": ChunkId(opened + 1)}[which]
    layers = stages[-1].layers if stages else ()
    match kind:
        case "staged":
            return Staged(sender=me, chunk_id=chunk, seconds=0.0, received=LinkBytes())
        case "armed":
            return Armed(sender=me, chunk_id=chunk)
        case "refused":
            return Refused(sender=me, chunk_id=chunk, code=code, reason="because")
        case "committed":
            return Committed(sender=me, chunk_id=chunk, boundary=number)
        case "flipped":
            digests = tuple((layer.layer, layer.new_digest if right else number) for layer in layers)
            return Flipped(sender=me, chunk_id=chunk, boundary=number, digests=digests, stall_s=0.0)
        case "disarmed":
            return Disarmed(sender=me, chunk_id=chunk)
        case "live":
            live = as_loaded(placement()) if right else as_loaded(ONE_LAYER)
            return script.live(LIAR, live, flipped_id=chunk if number % 2 else ChunkId(0), closed_id=chunk)
        case _:
            return script.pulse(LIAR, voting=right, off_reason="" if right else "so it says", idle=bool(number % 2))


@settings(max_examples=120, deadline=None)
@given(LIES)
def test_one_liar_never_makes_a_map_and_is_the_one_that_is_named(lies: list[tuple[str, str, int, bool, RefusalCode]]) -> None:
    """Ranks 4 and 6 are honest, and no vote passed: whatever rank 5 says, no new row may be taken for live."""
    script = Script(Rollout(EPOCH, dataclasses.replace(SETTINGS, tries_max=2), first_sequence=1))
    script.hear(*script.lives())
    honest, loaded = Honest(script), as_loaded(placement())
    (persist,) = of(script.do(Start(generation(1, TWO_LAYERS))), Persist)
    waiting = honest.answer(script.do(Persisted(persist.token)))
    for index, told in enumerate([*lies, *[None] * 30]):
        if told is not None:
            waiting += honest.answer(script.do(Received(lie(script, *told))))
        while waiting:
            waiting += honest.answer(script.do(Received(waiting.pop(0))))
        if script.state is RolloutState.OUTRANKED:
            return  # it spoke of a chunk that was never given out: the planner leads anew, in a higher epoch
        assert script.machine.live is None or script.machine.live.digest == loaded.digest
        for alarm in of(script.last, Alarm):
            assert "rank 5" in alarm.reason or "ranks 4 and 5" in alarm.reason, alarm
        deadline = script.machine.next_deadline
        if deadline is not None and (told is None or index % 3 == 0):
            script.now = deadline
            waiting += honest.answer(script.do(Tick()))
    while waiting:
        waiting += honest.answer(script.do(Received(waiting.pop(0))))
    # A rank that says no more is waited for by name, or the rollout was given up.
    assert script.state in (
        RolloutState.IDLE,
        RolloutState.HELLO,
        RolloutState.INCONSISTENT,
        RolloutState.ARMED,
        RolloutState.DISARMING,
    )
    if script.state in (RolloutState.HELLO, RolloutState.ARMED, RolloutState.DISARMING):
        assert LIAR in script.machine.progress().waiting_for
    assert {Epoch(EPOCH)} == {effect.record.epoch for effect in script.all if isinstance(effect, Persist)}
    assert GenerationNumber(1) == script.machine.generation_floor
    assert set(RANKS) == set(script.group.rank_ids)
