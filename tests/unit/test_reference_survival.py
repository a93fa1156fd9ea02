"""What the reference engine decides when its group changes: the launcher's coordinator, and what a rank carries over."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.engine.port import OutcomeUnknownError, SlotTensor
from agent.engine.reference import coordinator as co
from agent.engine.reference.config import FleetConfig, LayerShape, Member
from agent.engine.reference.experts import carried_row, load_layer
from agent.engine.reference.orders import End, Form, Halt, LauncherLink, Ready
from agent.engine.reference.sources import LoadedModel, expert_sources
from agent.engine.reference.survive import Reaction, reaction_to
from agent.transfer.checkpoint import Checkpoint
from agent.transfer.staging import ExpertLayout
from eplb_service.dispatch import Dispatch
from eplb_service.errors import BrokenInvariantError, ConflictError, DeadlineError, EnvironmentFault, InvalidInputError
from eplb_service.ids import DeploymentId, LayerRef, RankId
from examples.tiny_moe.config import TinyMoeConfig
from examples.tiny_moe.model import Span, TinyMoe
from examples.tiny_moe.numerics import configure_torch
from examples.tiny_moe.weights import random_weights

FOUR = tuple(map(RankId, (4, 5, 6, 7)))
STEP_S, FORM_S = 10.0, 30.0
SHAPE = LayerShape(num_experts=10, slots=7, table_width=20)


def ids(*numbers: int) -> tuple[RankId, ...]:
    return tuple(map(RankId, numbers))


class Course:
    """A coordinator and its clock."""

    def __init__(self, ranks: tuple[RankId, ...] = FOUR, *, experts: int = 10, slots: int = 5) -> None:
        self.machine = co.Coordinator(
            members=ranks, num_experts=experts, slots_per_rank=slots, gather_timeout_s=STEP_S, form_timeout_s=FORM_S
        )
        self.now = 100.0

    def ended(self, rank: int, *, asked: bool = False) -> list[co.Effect]:
        return self.machine.handle(co.RankEnded(RankId(rank), asked), self.now)

    def loaded(self, rank: int) -> list[co.Effect]:
        return self.machine.handle(co.RankLoaded(RankId(rank)), self.now)

    def stand(self, *ranks: int, number: int | None = None, steps: int = 9) -> list[co.Effect]:
        return [
            effect
            for rank in ranks
            for effect in self.machine.handle(
                co.RankStands(RankId(rank), self.machine.number if number is None else number, "a step failed", steps), self.now
            )
        ]

    def form(self, *ranks: int) -> list[co.Effect]:
        return [
            effect
            for rank in ranks
            for effect in self.machine.handle(co.RankFormed(RankId(rank), self.machine.number), self.now)
        ]

    def after(self, seconds: float) -> list[co.Effect]:
        self.now += seconds
        return self.machine.handle(co.Tick(), self.now)


@pytest.mark.parametrize("lost", FOUR)
def test_those_that_are_left_form_again_in_their_old_order_once_all_of_them_stand(lost: RankId) -> None:
    course = Course()
    left = tuple(rank for rank in FOUR if rank != lost)
    assert course.ended(lost) == [co.HaltRanks(left, 0)]
    assert course.stand(*left[:-1]) == []
    assert course.stand(left[-1]) == [co.FormGroup(left, 1)]
    assert course.form(*left) == []
    assert course.machine.stage is co.Stage.SERVING


def test_a_rank_that_stands_before_the_loss_is_seen_waits_for_it() -> None:
    course = Course()
    assert course.stand(5) == [co.HaltRanks(ids(4, 6, 7), 0)]
    assert course.stand(6, 7) == []
    assert course.ended(4) == [co.FormGroup(ids(5, 6, 7), 1)]
    assert course.machine.reason == "rank 4 is lost"


def test_notices_that_come_twice_or_late_change_nothing_vllm_38862() -> None:
    course = Course()
    course.ended(6)
    assert course.ended(6) == []
    course.stand(4, 5)
    assert course.stand(4) == []
    assert course.stand(7) == [co.FormGroup(ids(4, 5, 7), 1)]
    assert course.ended(6) == []
    assert course.stand(4, 5, 7, number=0) == []  # of the group that is no more
    assert course.machine.handle(co.RankFormed(RankId(6), 1), course.now) == []
    course.form(4, 5, 7)
    assert course.ended(6) == []
    assert course.stand(4, number=0) == []
    assert course.form(4) == []
    assert course.machine.stage is co.Stage.SERVING
    assert course.machine.number == 1


def test_a_rank_lost_while_the_group_forms_again_has_it_formed_once_more_of_those_that_are_left() -> None:
    course = Course()
    course.ended(4)
    assert course.stand(5, 6, 7) == [co.FormGroup(ids(5, 6, 7), 1)]
    assert course.form(5) == []
    assert course.ended(6) == [co.HaltRanks(ids(5, 7), 1)]
    assert course.form(7) == []  # on its way when the other ended: it will fail, and stand
    assert course.stand(7, 5) == [co.FormGroup(ids(5, 7), 2)]
    course.form(5, 7)
    assert course.machine.stage is co.Stage.SERVING


def test_a_rank_that_does_not_stand_still_within_the_longest_step_is_killed() -> None:
    course = Course()
    course.stand(4, 5, 7)
    assert course.after(STEP_S - 0.1) == []
    assert course.after(0.1) == [co.KillRank(RankId(6), "it did not stand still within 10 s")]
    assert course.ended(6) == [co.FormGroup(ids(4, 5, 7), 1)]
    assert course.form(4, 5) == []
    assert course.after(FORM_S) == []  # others may wait for it as long, and then stand
    assert course.after((co.FORM_WAITS - 1) * FORM_S) == [co.KillRank(RankId(7), "it did not form its group within 120 s")]
    assert course.ended(7) == [co.HaltRanks(ids(4, 5), 1)]
    assert course.stand(4, 5) == [co.FormGroup(ids(4, 5), 2)]


def test_too_few_slots_for_the_experts_end_the_fleet_with_the_least_number() -> None:
    course = Course(experts=10, slots=4)
    course.ended(4)
    assert course.stand(5, 6, 7) == [co.FormGroup(ids(5, 6, 7), 1)]
    course.form(5, 6, 7)
    course.ended(7)
    (end,) = course.stand(5, 6)
    assert end == co.EndFleet(
        ids(5, 6),
        "rank 7 is lost: 10 experts do not fit the 2 ranks that are left x 4 slots = 8;"
        " use at least 5 slots per rank (10 slots, 0 redundant experts)",
    )
    assert course.machine.stage is co.Stage.ENDED
    assert course.ended(5) == course.stand(6) == course.loaded(9) == []


def test_a_new_rank_joins_at_a_step_boundary_of_all_others_and_comes_last_sglang_22788() -> None:
    course = Course()
    assert course.loaded(2) == [co.HaltRanks(FOUR, 0)]
    assert course.stand(*FOUR) == [co.FormGroup((*FOUR, RankId(2)), 1)]
    assert course.form(*FOUR) == []
    assert course.form(2) == []
    assert course.machine.members == (*FOUR, 2)
    assert course.loaded(2) == []


def test_new_ranks_come_in_with_the_group_that_forms_anyway_and_no_lost_one_is_waited_for() -> None:
    course = Course()
    course.ended(5)
    assert course.loaded(8) == []
    assert course.loaded(9) == []
    assert course.ended(9) == []
    assert course.stand(4, 6, 7) == [co.FormGroup(ids(4, 6, 7, 8), 1)]
    assert course.loaded(10) == []  # while it forms: with the next one
    assert course.form(4, 6, 7, 8) == [co.HaltRanks(ids(4, 6, 7, 8), 1)]
    assert course.stand(4, 6, 7, 8) == [co.FormGroup(ids(4, 6, 7, 8, 10), 2)]


def test_new_ranks_alone_are_no_fleet_they_hold_nothing() -> None:
    course = Course(ids(4, 5))
    course.loaded(8)
    assert course.stand(4, 5) == [co.FormGroup(ids(4, 5, 8), 1)]
    course.ended(4)
    (end,) = course.ended(5) + course.stand(8)
    assert isinstance(end, co.EndFleet)
    assert end.reason == "every rank that served is lost"


def test_the_same_ranks_that_fail_again_without_a_step_are_given_up_and_a_step_between_starts_the_count_anew() -> None:
    course = Course()
    for number in itertools.count(1):
        effects = course.stand(*FOUR, steps=0 if number != 3 else 1)
        if isinstance(effects[-1], co.EndFleet):
            break
        assert effects[-1] == co.FormGroup(FOUR, number)
        course.form(*FOUR)
    assert number == 3 + co.FRUITLESS_MAX + 1
    assert "groups of the same ranks ended without one step, the last: rank 4: a step failed" in course.machine.reason


def test_a_rank_that_was_told_to_stop_is_not_lost() -> None:
    course = Course()
    for rank in FOUR:
        assert course.ended(rank, asked=True) == []
    assert course.machine.members == ()


KINDS = ("ended", "loaded", "stands", "formed", "tick")
HAPPENINGS = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from([*FOUR, *ids(8, 9)]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([0.0, 31.0, 121.0]),
)


@given(st.lists(HAPPENINGS, max_size=30))
def test_whatever_comes_in_whatever_order_groups_are_of_living_ranks_and_numbers_grow(
    happenings: list[tuple[str, RankId, int, bool, float]],
) -> None:
    course, dead, number = Course(), set[RankId](), 0
    for kind, rank, age, stepped, seconds in happenings:
        if kind == "ended":
            dead.add(rank)
        elif rank in dead and kind != "tick":
            continue  # the dead say nothing
        late = max(0, course.machine.number - age)
        events: dict[str, co.Event] = {
            "ended": co.RankEnded(rank),
            "loaded": co.RankLoaded(rank),
            "stands": co.RankStands(rank, late, "it failed", int(stepped)),
            "formed": co.RankFormed(rank, late),
            "tick": co.Tick(),
        }
        course.now += seconds
        for effect in course.machine.handle(events[kind], course.now):
            if isinstance(effect, co.FormGroup):
                assert not dead.intersection(effect.rank_ids)
                assert effect.number == number + 1
                number = effect.number
        if course.machine.stage is co.Stage.SERVING:
            assert not dead.intersection(course.machine.members)


def test_ids_that_are_taken_cannot_join() -> None:
    co.check_newcomers(FOUR, ids(8, 9))
    for joining, words in ((ids(8, 4), r"of these \[4\] are in the fleet"), (ids(8, 8), "unique"), (ids(-1), "not negative")):
        with pytest.raises(InvalidInputError, match=words):
            co.check_newcomers(FOUR, joining)


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "reaction"),
    [
        (RuntimeError("[gloo] Connection closed by peer"), Reaction.STAND),
        (EnvironmentFault("the rank at position 1 is gone"), Reaction.STAND),
        (DeadlineError("rank 3 did not come"), Reaction.STAND),
        (OutcomeUnknownError("vote 0x3"), Reaction.STAND),
        (BrokenInvariantError("an expert has no replica"), Reaction.LEAVE),
        (ConflictError("another model"), Reaction.LEAVE),
    ],
)
def test_what_another_group_can_end_is_stood_and_nothing_is_in_a_fleet_that_does_not_survive(
    error: Exception, reaction: Reaction
) -> None:
    assert reaction_to(error, survives=True) is reaction
    assert reaction_to(error, survives=False) is Reaction.LEAVE


def test_orders_of_groups_that_are_no_more_are_dropped() -> None:
    ours, theirs = multiprocessing.Pipe()
    link = LauncherLink(theirs, on_gone=lambda: None)
    fleet = config()
    link.take()
    assert not link.is_halted(3)
    ours.send(Halt(number=2))
    ours.send(Form(number=3, fleet=fleet, position=1))
    link.take()
    assert not link.is_halted(3)
    assert link.is_halted(2)
    ours.send(Halt(number=3))
    link.read()
    assert link.is_halted(3)
    ours.send(Form(number=4, fleet=fleet, position=0))
    assert link.next_form(after=3) == Form(number=4, fleet=fleet, position=0)
    assert not link.is_halted(4)
    ours.send(End(reason="too few"))
    link.read()
    assert link.is_halted(4)
    assert link.next_form(after=4) == End(reason="too few")
    link.report(Ready(shape=SHAPE))
    assert ours.recv() == Ready(shape=SHAPE)


def config(**options: object) -> FleetConfig:
    fields: dict[str, object] = {
        "deployment": DeploymentId("d"),
        "model_factory": "m:f",
        "rank_ids": FOUR,
        "nodes": ("a", "a", "b", "b"),
        "run_directory": "/tmp",
        "engine_port": 1,
        "hook_port": 2,
        "hook_sockets": ("/a", "/a", "/b", "/b"),
        "rank_environments": {2: {"X": "1"}},
        **options,
    }
    return FleetConfig(**fields)  # type: ignore[arg-type]


def test_nodes_and_sockets_follow_the_ranks_of_another_group() -> None:
    fleet = config()
    members = [fleet.member(3), fleet.member(1), Member(rank_id=RankId(9), node="c", hook_socket="/c")]
    other = fleet.regrouped(members, shape=SHAPE, engine_port=11, hook_port=12)
    assert (other.rank_ids, other.nodes, other.hook_sockets) == (ids(7, 5, 9), ("b", "a", "c"), ("/b", "/a", "/c"))
    assert (other.slots_per_rank, other.table_width(10), other.engine_port, other.hook_port) == (7, 20, 11, 12)
    assert other.rank_environments == {}
    assert config(hook_sockets=()).regrouped(members, shape=SHAPE, engine_port=11, hook_port=12).hook_sockets == ()


# ── what is carried over ─────────────────────────────────────────────────────────────────────────────────────────────────────

TINY = TinyMoeConfig(width=32, num_layers=2, num_heads=2, context=64, num_experts=6, top_k=3, expert_width=24)


@pytest.fixture(scope="module")
def model() -> TinyMoe:
    configure_torch()
    return TinyMoe(TINY, random_weights(TINY, seed=3))


def row_of(*entries: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(entries, np.int32)


def test_a_row_keeps_the_slots_of_ranks_that_stay_wherever_they_are_in_the_new_order() -> None:
    row = row_of(0, 1, 2, 3, 4, 5, 0, 3)
    assert carried_row(row, FOUR, ids(7, 5)).tolist() == [0, 3, 2, 3]
    assert carried_row(row, FOUR, ids(4, 9, 6)).tolist() == [0, 1, -1, -1, 4, 5]
    assert carried_row(row, FOUR, FOUR).tolist() == row.tolist()


@pytest.mark.parametrize("dispatch", [Dispatch.EVEN, Dispatch.NEAREST, Dispatch.WEIGHTED])
def test_tables_are_of_the_new_group_and_slots_keep_their_storage(model: TinyMoe, dispatch: Dispatch) -> None:
    row = row_of(0, 1, 2, 3, 4, 5, 0, 3)
    nodes = ("a", "a", "b", "b")
    layer = load_layer(model, 0, row, position=2, slots=2, table_width=3, dispatch=dispatch, nodes=nodes)
    storage = {name: tensor.data_ptr() for name, tensor in layer.slots.items()}
    layer.tokens += 4
    layer.regroup(carried_row(row, FOUR, ids(5, 6, 7)), position=1, nodes=nodes[1:], table_width=2)
    layer.settle(40)
    assert layer.tables.physical_to_logical.tolist() == [2, 3, 4, 5, 0, 3]
    assert layer.tables.logical_to_physical.tolist() == [[4, -1], [-1, -1], [0, -1], [1, 5], [2, -1], [3, -1]]
    assert layer.tables.replica_counts.tolist() == [1, 0, 1, 2, 1, 1]
    assert layer.num_unreachable == 1
    assert layer.nearness.tolist() == [2, 2, 0, 0, 1, 1]
    assert layer.sent.tolist() == [0] * 6
    assert layer.tokens.tolist() == [0, 0]
    assert (layer.tables.replica_shares is not None) == (dispatch is Dispatch.WEIGHTED)
    assert not layer.notice_flip(41)
    with pytest.raises(BrokenInvariantError, match="expert 1 has no replica since boundary 40"):
        layer.check_reachable()
    assert {name: tensor.data_ptr() for name, tensor in layer.slots.items()} == storage


def test_a_step_taken_again_after_it_failed_half_way_leaves_the_same_bits(model: TinyMoe) -> None:
    tokens = torch.tensor([7, 1, 250])
    whole, torn = model.new_cache(), model.new_cache()

    def feed(cache: object, some: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        hidden = model.embed(some)
        for layer_id in layers:
            hidden = model.attend(layer_id, hidden, [Span(cache, 0, len(some))])  # type: ignore[arg-type]
        return hidden

    feed(whole, tokens, (0, 1))
    feed(torn, tokens, (0,))  # the second layer's exchange failed
    torn.truncate(0)
    feed(torn, tokens, (0, 1))
    right = feed(whole, torch.tensor([9]), (0, 1))
    feed(torn, torch.tensor([9]), (0,))
    torn.truncate(3)
    assert torch.equal(feed(torn, torch.tensor([9]), (0, 1)), right)
    assert torch.equal(torn.keys, whole.keys)
    assert torch.equal(torn.values, whole.values)


def test_experts_come_back_from_the_file_and_from_the_model_with_the_bytes_of_a_slot() -> None:
    shipped = TinyMoe.load()
    file, loaded = expert_sources(shipped)
    assert isinstance(file, Checkpoint)
    layer = LayerRef("m", 1)
    held = load_layer(shipped, 1, row_of(*range(32)), position=0, slots=32, table_width=1)
    slots = {name: SlotTensor(tensor) for name, tensor in held.slots.items()}
    layout = ExpertLayout.of(layer, slots)
    packed, wanted = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    for expert in (0, 17, 31):
        layout.pack(slots, expert, wanted)
        for source in (file, loaded):
            packed.fill_(255)
            assert source.read(layer, expert, layout, packed)
            assert torch.equal(packed, wanted)
    assert file.bytes_read == 3 * layout.expert_bytes


def test_a_model_without_files_restores_from_itself(model: TinyMoe) -> None:
    (source,) = expert_sources(model)
    assert isinstance(source, LoadedModel)
