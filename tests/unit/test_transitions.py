"""State machines against their tables: a change that may not be carries the history, and the documentation is in step."""

from __future__ import annotations

from enum import Enum

import pytest

from agent.frames import RegistrationAnswer
from agent.hook import chunk_events as ev
from agent.session import Session, Step
from agent.session_events import HookSaid, LinkId, RegisterAccepted, StreamClosed, StreamId
from eplb_service.errors import BrokenInvariantError
from eplb_service.ids import Epoch, chunk_id
from eplb_service.rollout.events import RolloutState
from eplb_service.rollout.transitions import TRANSITIONS
from eplb_service.transitions import CHANGES_KEPT, EVENTS_KEPT, Trail
from tests import state_tables
from tests.integration.agent_doubles import address as agent_address
from tests.integration.agent_doubles import registration
from tests.unit.hook_chunk_parts import address, machine, stage
from tests.unit.test_rollout import TWO_LAYERS, Script, armed


class Light(Enum):
    RED = "red"
    GREEN = "green"


ROAD = {Light.RED: {Light.GREEN: "time"}, Light.GREEN: {Light.RED: "time"}}


def test_a_change_that_may_not_be_is_an_error_that_carries_how_it_came_there() -> None:
    trail = Trail("the light", {Light.RED: {Light.GREEN: "time"}, Light.GREEN: {}}, Light.RED)
    trail.happens("a tick", 1.0)
    trail.enter(Light.GREEN)
    trail.enter(Light.GREEN)  # to stay is no change
    trail.happens("a truck", 2.5)
    with pytest.raises(BrokenInvariantError) as broken:
        trail.enter(Light.RED)
    assert str(broken.value) == (
        "the light is green and cannot become red. How it came there: 1.000 s: red → green on a tick | last events:"
        " 1.000 s a tick; 2.500 s a truck"
    )
    assert trail.state is Light.GREEN


def test_the_history_is_bounded() -> None:
    trail = Trail("the light", ROAD, Light.RED)
    for number in range(1000):
        trail.happens("x" * 10, float(number))
        trail.enter(Light.RED if trail.state is Light.GREEN else Light.GREEN)
    assert str(trail).count("→") == CHANGES_KEPT
    assert str(trail).count("s xxx") == EVENTS_KEPT


def test_every_state_of_the_rollout_has_its_row_and_leads_somewhere_but_the_last() -> None:
    assert set(TRANSITIONS) == set(RolloutState)
    assert [state for state, following in TRANSITIONS.items() if not following] == [RolloutState.OUTRANKED]
    reached = {other for following in TRANSITIONS.values() for other in following}
    assert reached == set(RolloutState)


def test_an_illegal_state_of_the_rollout_names_the_last_events_and_their_ranks() -> None:
    """vllm#57883: what is stuck must say how it came to be."""
    script = armed(TWO_LAYERS)
    with pytest.raises(BrokenInvariantError) as broken:
        script.machine._trail.enter(RolloutState.PERSISTING)
    said = str(broken.value)
    assert said.startswith("the rollout machine is armed and cannot become persisting. How it came there: ")
    assert "hello → idle on Live of rank 6" in said
    assert f"staging → armed on Staged {script.machine.open_chunk:#x} of rank 6" in said


def test_states_of_the_rollout_are_those_of_its_trail_throughout() -> None:
    script = Script()
    for _ in range(3):
        assert script.machine._trail.state is script.machine.state
        script.hear(*script.lives())
        assert script.machine._trail.state is script.machine.state


def test_an_illegal_step_of_a_rank_in_the_agent_process_carries_its_last_steps() -> None:
    session, who = Session(), agent_address(0)
    session.handle(HookSaid(LinkId(1), registration(who)), 0.0)
    session.handle(RegisterAccepted(1), 0.1)
    session.handle(StreamClosed(StreamId(1), "reset"), 0.2)
    rank = session._ranks[who.rank_id]
    assert rank.told == RegistrationAnswer(accepted=True, reason="")
    with pytest.raises(BrokenInvariantError) as broken:
        rank.move(Step.ACCEPTED)
    assert str(broken.value) == (
        "rank 0 is WAITING and cannot take the step ACCEPTED. How it came there: REGISTERING + ACCEPTED → ATTACHED; ATTACHED +"
        " PLANNER_LOST → WAITING"
    )


def test_an_illegal_state_of_a_ranks_chunk_carries_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, chunk = machine(), chunk_id(Epoch(1), 1)
    rank.handle(ev.Received(stage(chunk)), 0.0)
    monkeypatch.delitem(ev.TRANSITIONS[ev.ChunkState.STAGING], ev.ChunkState.QUIESCING)
    with pytest.raises(BrokenInvariantError) as broken:
        rank.handle(ev.VotingOff("the test turned it off"), 1.0)
    assert f"rank {address().rank_id}: staging became quiescing on VotingOff" in str(broken.value)
    assert f"idle + Stage {chunk:#x} → staging" in str(broken.value)


def test_every_state_of_a_ranks_chunk_has_its_row() -> None:
    assert set(ev.TRANSITIONS) == set(ev.ChunkState)


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    text = state_tables.PAGE.read_text()
    assert state_tables.with_tables(text) == text, "run `python -m tests.state_tables`"
    assert state_tables.with_tables(text.replace("| the vote passed |", "| by luck |")) == text
    with pytest.raises(ValueError, match="needs the marks <!-- states: chunk -->"):
        state_tables.with_tables(text.replace("<!-- states: chunk -->", ""))
