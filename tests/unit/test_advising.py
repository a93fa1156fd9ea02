"""What questions show of an engine: named cases, and random engines that follow, do not, follow late, restart, or go astray."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service import advising
from eplb_service.advising import PATIENCE, REST_QUESTIONS, Asker, EngineState, Look, Question, Sight
from eplb_service.errors import InvalidInputError
from eplb_service.ids import GenerationNumber

Rows = npt.NDArray[np.int32]
LAYERS, EXPERTS, SLOTS = 4, 4, 6
ASKER = Asker(
    model="tiny",
    layer_ids=(3, 4, 5, 6),
    rank_ids=(0, 1),
    nodes=("a", "b"),
    num_logical=EXPERTS,
    num_slots=SLOTS,
    dispatch="hashed",
    num_groups=1,
    expert_bytes=(),
)
LINEAR: Rows = np.tile(np.arange(SLOTS, dtype=np.int32) % EXPERTS, (LAYERS, 1))


def turned(by: int, layers: tuple[int, ...] = tuple(range(LAYERS))) -> Rows:
    """Another map: some layers turned by so many slots."""
    rows = LINEAR.copy()
    for layer in layers:
        rows[layer] = np.roll(rows[layer], by)
    return rows


def question(rows: Rows = LINEAR, sequence: int = 1, *, origin: int = 1, at_s: float = 0.0, asker: Asker = ASKER) -> Question:
    return Question(asker=asker, origin=origin, sequence=sequence, rows=rows, at_s=at_s)


def first() -> EngineState:
    return advising.look(None, question()).state


def told(rows: Rows, number: int = 1, at_s: float = 10.0) -> EngineState:
    """An engine that was told once, in the answer to its first question."""
    return advising.answered(advising.publish(first(), GenerationNumber(number), rows), at_s)


def test_first_question_is_taken_up_as_generation_0_and_the_same_map_shows_nothing() -> None:
    seen = advising.look(None, question())
    assert (seen.sight, seen.state.live.newest_generation) == (Sight.FIRST, 0)
    again = advising.look(seen.state, question(sequence=2))
    assert (again.sight, again.reason, again.state.sequence) == (Sight.SAME, "", 2)


def test_advised_map_shown_makes_its_generation_live_with_the_time_that_it_took() -> None:
    state = told(turned(1))
    seen = advising.look(state, question(turned(1), 2, at_s=100.0))
    assert (seen.sight, seen.active, seen.seconds) == (Sight.FOLLOWED, 1, 90.0)
    assert set(seen.state.live.generations) == {1}
    assert seen.state.told is None
    assert "90 s after it was told" in seen.reason


def test_repeated_and_late_questions_change_nothing() -> None:
    state = advising.look(first(), question(sequence=5)).state
    for sequence, sight in ((5, Sight.REPEATED), (4, Sight.LATE)):
        seen = advising.look(state, question(turned(2), sequence))
        assert seen.sight is sight
        assert seen.state is state


def test_engine_that_does_not_follow_is_told_again_then_given_up_and_left_alone_longer_each_time() -> None:
    state, rests = told(turned(1)), []
    for round_ in range(3):
        number = GenerationNumber(round_ + 1)
        for _ in range(PATIENCE - 1):
            seen = advising.look(state, question(LINEAR, state.sequence + 1, at_s=200.0))
            assert (seen.sight, seen.stopped) == (Sight.UNDERWAY, None)
            state = advising.answered(seen.state, 150.0)
        seen = advising.look(state, question(LINEAR, state.sequence + 1, at_s=200.0))
        state = seen.state
        assert seen.sight is Sight.IGNORED
        assert (seen.stopped, seen.active) == (number, None)
        assert f"told {PATIENCE} times to go to generation {number}" in seen.reason
        rests.append(state.rest)
        state = advising.answered(advising.publish(state, GenerationNumber(round_ + 2), turned(1)), 210.0)
    assert rests == [REST_QUESTIONS, 2 * REST_QUESTIONS, 4 * REST_QUESTIONS]


def test_engine_that_follows_after_it_was_given_up_has_its_generation_live_all_the_same() -> None:
    state = advising.give_up(told(turned(1)))
    state = advising.publish(state, GenerationNumber(2), turned(2))  # an operator's order, not told yet
    seen = advising.look(state, question(turned(1), 2))
    assert (seen.sight, seen.active, seen.stopped) == (Sight.FOLLOWED, 1, None)
    assert seen.state.told is not None
    assert seen.state.told.generation == 2  # still to be told


def test_layers_that_arrive_one_by_one_are_a_live_map_of_two_generations_and_progress_buys_time() -> None:
    state = told(turned(1))
    for arrived in range(1, LAYERS):
        seen = advising.look(state, question(turned(1, tuple(range(arrived))), arrived + 1))
        assert seen.sight is Sight.UNDERWAY
        assert list(seen.state.live.generations) == [1] * arrived + [0] * (LAYERS - arrived)
        assert f"{arrived} of {LAYERS} layers" in seen.reason
        state = advising.answered(seen.state, 20.0)
    for sequence in range(10, 9 + PATIENCE):  # it stops half way
        state = advising.look(state, question(turned(1, (0, 1, 2)), sequence)).state
    seen = advising.look(state, question(turned(1, (0, 1, 2)), 9 + PATIENCE))
    state = seen.state
    assert (seen.sight, seen.stopped) == (Sight.IGNORED, 1)
    assert list(state.live.generations) == [1, 1, 1, 0]
    assert advising.look(state, question(turned(1), 20)).active == 1  # and arrives late


@pytest.mark.parametrize("origin", [1, 2])
def test_any_other_map_is_a_restart_or_the_engines_own_move_and_ends_what_was_told(origin: int) -> None:
    seen = advising.look(told(turned(1)), question(turned(3), 2, origin=origin))
    assert (seen.sight, seen.stopped, seen.active) == (Sight.OTHER, 1, None)
    assert set(seen.state.live.generations) == {0}
    assert ("restarted" if origin == 2 else "moved by itself") in seen.reason
    assert f"{LAYERS} of {LAYERS} layers" in seen.reason


def test_restart_on_the_old_map_is_told_again_and_the_old_process_is_a_rival_from_then_on() -> None:
    seen = advising.look(told(turned(1)), question(LINEAR, 1, origin=2))
    assert seen.sight is Sight.UNDERWAY
    rival = advising.look(seen.state, question(LINEAR, 2, origin=1))
    assert rival.sight is Sight.RIVAL
    assert rival.state is seen.state
    assert advising.look(seen.state, question(LINEAR, 2, origin=2)).sight is not Sight.RIVAL


def test_two_engines_of_different_shape_under_one_name_do_not_take_turns() -> None:
    other = dataclasses.replace(ASKER, nodes=("c", "c"))
    seen = advising.look(first(), question(origin=2, asker=other))
    assert (seen.sight, seen.state.asker) == (Sight.FIRST, other)
    assert "another nodes" in seen.reason
    assert advising.look(seen.state, question(sequence=2, origin=1)).sight is Sight.RIVAL


def test_other_layers_ranks_or_slots_are_taken_up_anew_and_end_what_was_told() -> None:
    asker = dataclasses.replace(ASKER, layer_ids=(3, 4))
    seen = advising.look(told(turned(1)), question(LINEAR[:2], 2, asker=asker))
    assert (seen.sight, seen.stopped) == (Sight.FIRST, 1)
    assert len(seen.state.live.generations) == 2


def test_nothing_is_published_over_what_is_under_way_and_no_answer_names_nothing() -> None:
    with pytest.raises(InvalidInputError, match="generation 1 is under way"):
        advising.publish(told(turned(1)), GenerationNumber(2), turned(2))
    with pytest.raises(InvalidInputError, match="nothing is under way"):
        advising.answered(first(), 1.0)


def test_rows_that_are_no_map_of_the_engine_are_refused() -> None:
    wrong = LINEAR.copy()
    wrong[0, 0] = EXPERTS
    for state in (None, first()):
        with pytest.raises(InvalidInputError, match=f"holds expert {EXPERTS}"):
            advising.look(state, question(wrong, 2))


def test_asker_survives_json_and_what_is_none_does_not() -> None:
    tree = json.loads(json.dumps(dataclasses.asdict(ASKER)))
    assert Asker.from_json(tree) == ASKER
    assert Asker.from_json(tree).identity == ASKER.identity != dataclasses.replace(ASKER, num_groups=2).identity
    del tree["nodes"]
    with pytest.raises(KeyError):
        Asker.from_json(tree)


# ── random engines ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Story:
    """An engine and a planner that publishes at random; what must hold is checked after every question."""

    state: EngineState | None = None
    rows: Rows = field(default_factory=LINEAR.copy)
    origin: int = 1
    sequence: int = 0
    clock_s: float = 0.0
    highest: int = 0
    published: dict[int, Rows] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    goal: Rows | None = None

    def ask(self) -> Look:
        self.sequence += 1
        self.clock_s += 90.0
        before = self.state
        seen = advising.look(before, question(self.rows.copy(), self.sequence, origin=self.origin, at_s=self.clock_s))
        self.state = seen.state
        np.testing.assert_array_equal(seen.state.rows, self.rows)  # live is what the engine shows, nothing else
        for number in seen.state.live.generations:  # a layer is of a generation only when it routes by its row
            assert number == 0 or number in self.published
        for layer, number in enumerate(seen.state.live.generations):
            if number:
                np.testing.assert_array_equal(self.rows[layer], self.published[number][layer])
        if seen.active is not None:
            np.testing.assert_array_equal(self.rows, self.published[seen.active])
            assert self.ends[seen.active] in ([], ["stopped"])  # each becomes live once, also after it was given up
            self.ends[seen.active].append("active")
        if seen.stopped is not None:
            assert self.ends[seen.stopped] == []
            self.ends[seen.stopped].append("stopped")
            assert seen.reason
        return seen

    def answer(self, publish: Rows | None) -> None:
        """Tell what is under way, else publish this and tell it."""
        assert self.state is not None
        if self.state.told is None:
            if publish is None:
                return
            self.highest += 1
            self.published[self.highest] = publish
            self.ends[self.highest] = []
            self.state = advising.publish(self.state, GenerationNumber(self.highest), publish)
        assert self.state.told is not None
        assert self.state.told.generation == max(self.published)  # numbers never go back
        np.testing.assert_array_equal(self.state.told.rows, self.published[self.state.told.generation])
        self.goal = self.published[self.state.told.generation]
        self.state = advising.answered(self.state, self.clock_s)


MOVES = st.sampled_from(["follow", "ignore", "some layers", "restart", "by itself", "give up"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(MOVES, st.integers(0, 5), st.booleans(), st.integers(0, 15)), min_size=1, max_size=25))
def test_whatever_an_engine_does_generations_are_live_only_when_shown_and_numbers_never_go_back(
    plot: list[tuple[str, int, bool, int]],
) -> None:
    story = Story()
    for move, turn, publishes, mask in plot:
        if move == "follow" and story.goal is not None:
            story.rows = story.goal.copy()
        elif move == "some layers" and story.goal is not None:
            for layer in range(LAYERS):
                if mask >> layer & 1:
                    story.rows[layer] = story.goal[layer]
        elif move == "restart":
            story.origin, story.sequence, story.rows = story.origin + 1, 0, LINEAR.copy()
        elif move == "by itself":
            story.rows = turned(turn)
        elif move == "give up" and story.state is not None and story.state.told is not None:
            story.ends[story.state.told.generation].append("stopped")
            story.state = advising.give_up(story.state)
        story.ask()
        story.answer(turned(turn, tuple(layer for layer in range(LAYERS) if mask >> layer & 1)) if publishes else None)
    assert story.state is not None
    under_way = set() if story.state.told is None else {story.state.told.generation}
    assert {number for number, ends in story.ends.items() if not ends} == under_way  # every other one has an end
