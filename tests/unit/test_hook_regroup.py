"""Maps and memories carried into another group: against a slow oracle, and over every way in which a vote may have ended."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hook import chunk_events as ev
from agent.hook.chunk import ChunkMachine
from agent.hook.chunk_events import ChunkState
from agent.hook.reform import NotServed
from agent.hook.regroup import (
    Account,
    Agreement,
    Regrouping,
    account_of,
    agree,
    ledger_after,
    live_after,
    routed_digest,
    row_after,
    uncovered,
)
from agent.hook.stage_check import LayerShape
from eplb_service.control import Address, Arm, Disarm, Flipped, Hello, Live, LiveLayer, RefusalCode, Refused, Stage
from eplb_service.errors import BrokenInvariantError, InvalidInputError
from eplb_service.ids import ChunkId, Epoch, GenerationNumber, GroupId, Incarnation, LayerRef, RankId, chunk_id
from eplb_service.placement import row_digest
from tests.empty_map import live_of_a_rank_that_joins
from tests.unit.hook_chunk_parts import LAYER, NUM_LOGICAL, OTHER, RANKS, ROW, SLOTS, address, done, machine, sent, shape, stage
from tests.unit.test_hook_reform import CHUNK, PERIOD, Seen, rank_that_saw, stories, survivors_of

JOINING = RankId(5)
NEXT = GroupId(9)


# ── rows and shares ──────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def regroupings(draw: st.DrawFn) -> Regrouping:
    before = tuple(RankId(rank) for rank in draw(st.permutations(range(5)))[: draw(st.integers(1, 5))])
    after = tuple(RankId(rank) for rank in draw(st.permutations(range(8)))[: draw(st.integers(1, 6))])
    joining = frozenset(rank for rank in after if rank not in before or draw(st.booleans()))
    return Regrouping(before=before, after=after, joining=joining)


def held_by(row: Sequence[int], ranks: Sequence[RankId], slots: int) -> dict[tuple[RankId, int], int]:
    """The oracle's map: what each slot of each rank holds."""
    return {(ranks[index // slots], index % slots): expert for index, expert in enumerate(row)}


@given(regroupings(), st.integers(1, 3), st.data())
def test_what_a_rank_that_is_left_holds_stays_where_it_is_and_all_other_slots_are_empty(
    regrouping: Regrouping, slots: int, data: st.DataObject
) -> None:
    row = data.draw(
        st.lists(st.integers(-1, 3), min_size=slots * len(regrouping.before), max_size=slots * len(regrouping.before))
    )
    before = held_by(row, regrouping.before, slots)
    after = held_by(row_after(row, slots, regrouping), regrouping.after, slots)
    assert after.keys() == {(rank, slot) for rank in regrouping.after for slot in range(slots)}
    for (rank, slot), expert in after.items():
        assert expert == (-1 if rank in regrouping.joining else before[rank, slot])


def weighted_live(row: Sequence[int], weights: Sequence[int]) -> LiveLayer:
    """A layer of four experts whose replicas share by these weights, none by 0 alone."""
    total = [sum(w for w, e in zip(weights, row, strict=True) if e == expert) for expert in range(NUM_LOGICAL)]
    count = [list(row).count(expert) for expert in range(NUM_LOGICAL)]
    shares = tuple(
        0.0 if expert < 0 else float(np.float32(weight / total[expert] if total[expert] else 1 / count[expert]))
        for weight, expert in zip(weights, row, strict=True)
    )
    digest = row_digest(LAYER, np.array(row), np.array(shares, np.float32))
    return LiveLayer(layer=LAYER, generation=GenerationNumber(2), digest=digest, row=tuple(row), shares=shares)


@given(regroupings(), st.integers(1, 3), st.data())
def test_shares_of_what_is_left_add_up_to_one_in_the_proportions_that_they_had(
    regrouping: Regrouping, slots: int, data: st.DataObject
) -> None:
    size = slots * len(regrouping.before)
    row = data.draw(st.lists(st.integers(-1, NUM_LOGICAL - 1), min_size=size, max_size=size))
    before = weighted_live(row, data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    layers = {LAYER: LayerShape(num_logical=NUM_LOGICAL, slots=slots, expert_bytes=1)}
    after = live_after({LAYER: before}, layers, regrouping)[LAYER]
    assert after.row == row_after(row, slots, regrouping)
    assert after.shares is not None
    assert before.shares is not None
    assert after.digest == row_digest(LAYER, np.array(after.row), np.array(after.shares, np.float32))
    assert after.generation == before.generation
    was = dict(zip(held_by(row, regrouping.before, slots), before.shares, strict=True))
    now = dict(zip(held_by(after.row, regrouping.after, slots), after.shares, strict=True))
    for expert in range(NUM_LOGICAL):
        mine = [place for place, held in held_by(after.row, regrouping.after, slots).items() if held == expert]
        left = sum(was[place] for place in mine)
        for place in mine:
            assert now[place] == pytest.approx(was[place] / left if left else 1 / len(mine), rel=1e-6)
            if len(mine) == row.count(expert):
                assert now[place] == was[place]
    assert all(share == 0 for share, held in zip(after.shares, after.row, strict=True) if held < 0)


@given(regroupings(), st.data())
def test_losing_ranks_one_after_another_comes_to_the_same_slots_as_losing_them_at_once(
    regrouping: Regrouping, data: st.DataObject
) -> None:
    between = [rank for rank in regrouping.before if rank in regrouping.after or data.draw(st.booleans())]
    row = tuple(range(len(regrouping.before)))
    joining = regrouping.joining
    first = Regrouping(before=regrouping.before, after=tuple(between), joining=joining)
    second = Regrouping(before=tuple(between), after=regrouping.after, joining=joining)
    assert row_after(row_after(row, 1, first), 1, second) == row_after(row, 1, regrouping)


def test_a_row_of_another_length_is_refused() -> None:
    live = LiveLayer(layer=LAYER, generation=GenerationNumber(0), digest=1, row=(0, 1, 2))
    with pytest.raises(InvalidInputError, match="row of 3 slots for 3 ranks of 2 slots"):
        live_after({LAYER: live}, shape().layers, Regrouping(before=RANKS, after=RANKS))


def test_the_digest_that_ranks_compare_knows_slots_and_generations_whatever_their_size() -> None:
    live = {LAYER: LiveLayer(layer=LAYER, generation=GenerationNumber(3), digest=1, row=(0, 1, 2, 3))}
    changes = ({"generation": GenerationNumber(1 << 40)}, {"row": (1, 0, 2, 3)}, {"generation": GenerationNumber(0)})
    digests = {routed_digest(live), *(routed_digest({LAYER: replace(live[LAYER], **change)}) for change in changes)}
    assert len(digests) == 4
    assert routed_digest({LAYER: replace(live[LAYER], shares=(0.5,) * 4)}) == routed_digest(live)


def test_experts_without_a_slot_are_counted_over_all_layers() -> None:
    live = {
        layer: LiveLayer(layer=layer, generation=GenerationNumber(0), digest=1, row=(0, -1, 0))
        for layer in (LAYER, LayerRef("m", 4))
    }
    layers = dict.fromkeys(live, shape().layers[LAYER])
    assert uncovered(live, layers) == 2 * 3


# ── a group that forms again, whole ──────────────────────────────────────────────────────────────────────────────────────


class Group:
    """Machines of a group and how each forming is done, as the hooks do it; a forming may end on some ranks only."""

    def __init__(self, machines: Mapping[RankId, ChunkMachine]) -> None:
        self.machines = dict(machines)
        self.formings = dict.fromkeys(machines, 0)

    def accounts(self, after: Sequence[RankId], joining: frozenset[RankId]) -> dict[RankId, Account]:
        told = {}
        for rank in after:
            if rank not in joining:
                found = self.machines[rank]
                self.settle(found)
                regrouping = Regrouping(before=found.shape.group_rank_ids, after=tuple(after), joining=joining)
                told[rank] = account_of(found, regrouping, formings=self.formings[rank])
        return told

    def settle(self, found: ChunkMachine) -> None:
        """What a hook does before it tells where it stands."""
        if found.state is ChunkState.FLIPPING:
            found.handle(ev.FlipDone(found.open_id, 0.0), 9.0)
        effects = found.handle(ev.GroupEnded(), 9.0)
        assert not any(isinstance(effect, ev.FailStop | ev.Flip) for effect in effects)
        for effect in effects:
            if isinstance(effect, ev.CancelStaging):
                found.handle(ev.StagingFailed(effect.chunk_id, RefusalCode.WITHDRAWN, "withdrawn"), 9.0)

    def form(
        self,
        after: Sequence[RankId],
        *,
        group_id: GroupId = NEXT,
        joining: frozenset[RankId] = frozenset(),
        flips_on: frozenset[RankId] | None = None,
        ends_on: frozenset[RankId] | None = None,
    ) -> Agreement | NotServed:
        """flips_on: ranks that come as far as their flip; ends_on: those that go on in the new group. None = all."""
        agreement = agree(self.accounts(after, joining), after, vote_period=PERIOD)
        if isinstance(agreement, NotServed):
            return agreement
        formed = {}
        for rank in after:
            if rank in joining or (flips_on is not None and rank not in flips_on):
                continue
            found = self.machines[rank]
            effects = found.handle(
                ev.GroupFormed(flips=rank in agreement.reformed.flips, boundary=agreement.reformed.boundary), 9.0
            )
            assert any(isinstance(effect, ev.Flip) for effect in effects) == (rank in agreement.reformed.flips)
            if rank in agreement.reformed.flips:
                found.handle(ev.FlipDone(found.open_id, 0.0), 9.0)
        for rank in after:
            if ends_on is None or rank in ends_on:
                formed[rank] = self.formed(rank, agreement, after, group_id, joining)
        self.machines.update(formed)
        self.formings.update(dict.fromkeys(formed, agreement.formings))
        return agreement

    def formed(
        self, rank: RankId, agreement: Agreement, after: Sequence[RankId], group_id: GroupId, joining: frozenset[RankId]
    ) -> ChunkMachine:
        """A rank that was there goes on with its own map, one that joins with the guide's."""
        source = self.machines[agreement.guide if rank in joining else rank]
        regrouping = Regrouping(before=source.shape.group_rank_ids, after=tuple(after), joining=joining)
        live = live_after(source.live, source.shape.layers, regrouping)
        new = Address(rank, Incarnation(50 + rank), group_id)
        before = None if rank in joining else source.ledger
        ledger = ledger_after(agreement, new, live, weights_version=0, off_reason="", before=before)
        return machine(rank).in_group(replace(shape(rank), group_rank_ids=tuple(after)), ledger)


def three(story: Sequence[Seen]) -> Group:
    return Group({rank: rank_that_saw(rank, seen) for rank, seen in zip(RANKS, story, strict=True)})


def test_after_every_vote_and_loss_the_new_group_has_one_map_and_its_numbers_never_go_back() -> None:
    """Every story of a vote and every set of ranks lost, with and without one that joins; then a chunk commits."""
    flipped = set()
    for number, story in enumerate(stories()):
        for left in survivors_of(story):
            joining = frozenset({JOINING}) if number % 2 else frozenset()
            after = (*sorted(left, reverse=bool(number % 3)), *joining)
            group = three(story)
            agreement = group.form(after, joining=joining)
            assert isinstance(agreement, Agreement), (story, agreement)
            machines = [group.machines[rank] for rank in after]
            old = OTHER if agreement.flipped_id else ROW
            held = held_by(old, RANKS, SLOTS)
            for found in machines:
                live = found.live[LAYER]
                expected = [held.get((rank, slot), -1) for rank in after for slot in range(SLOTS)]
                assert list(live.row) == expected
                assert live.digest == row_digest(LAYER, np.array(expected))
                assert found.state is ChunkState.IDLE
                ledger = found.ledger
                assert ledger.epoch_seen >= max((left[rank].ledger.epoch_seen for rank in left), default=Epoch(0))
                assert ledger.generation_seen >= max(left[rank].ledger.generation_seen for rank in left)
                assert ledger.closed_id >= max(left[rank].ledger.closed_id for rank in left)
                assert ledger.flipped_id == agreement.flipped_id
                late = found.handle(ev.Received(replace(stage(CHUNK), to=ledger.address)), 10.0)
                assert [type(said) for said in sent(late)] in ([Refused], [Flipped]) or not ledger.closed_id
            flipped.add(bool(agreement.reformed.flips))
            if not number % 4:
                commits_in(group, after)
    assert flipped == {True, False}


def commits_in(group: Group, after: Sequence[RankId]) -> None:
    """A chunk that swaps the first rank's slots goes through in the new group."""
    live = group.machines[after[0]].live[LAYER]
    new = (live.row[1], live.row[0], *live.row[2:])
    if new == live.row or min(new[:SLOTS]) < 0:
        return
    chunk = chunk_id(3, 1)
    part = stage(chunk, old=live.row, new=new)
    copies = tuple(
        replace(
            part.copies[0], source_rank=after[0], target_rank=after[0], source_slot=1 - slot, target_slot=slot, expert=new[slot]
        )
        for slot in range(SLOTS)
    )
    for rank in after:
        found = group.machines[rank]
        order = replace(part, to=found.ledger.address, copies=copies, layers=(replace(part.layers[0], old_digest=live.digest),))
        assert isinstance(found.handle(ev.Received(order), 20.0)[0], ev.BeginStaging), rank
        found.handle(done(chunk), 20.0)
        found.handle(ev.Received(Arm(to=found.ledger.address, chunk_id=chunk)), 20.0)
        boundary = found.ledger.boundary + 1
        assert boundary % PERIOD == 0
        assert found.handle(ev.VoteDue(boundary), 20.0) == [ev.CastVote(boundary, chunk)]
        found.handle(ev.VoteResolved(chunk, ev.Outcome.PASSED), 20.0)
        found.handle(ev.FlipDue(boundary + PERIOD), 20.0)
        found.handle(ev.FlipDone(chunk, 0.0), 20.0)
        assert found.live[LAYER].row == new


def test_a_forming_that_ended_on_some_ranks_only_can_be_tried_again_with_any_others() -> None:
    """Every story; the first try ends anywhere on any subset of its ranks, then ranks are lost and it is tried again."""
    subsets = [frozenset(part) for size in range(4) for part in itertools.combinations(RANKS, size)]
    second = GroupId(10)
    for index, story in enumerate(stories()):
        for number, (flips_on, ends_on) in enumerate((f, e) for f in subsets for e in subsets if e <= f):
            if (index + number) % 13:
                continue
            group = three(story)
            first = group.form(RANKS, flips_on=flips_on, ends_on=ends_on)
            assert isinstance(first, Agreement)
            after = tuple(rank for rank in RANKS if rank != RANKS[number % 3])
            told = group.form(after, group_id=second)
            assert isinstance(told, Agreement), (story, flips_on, ends_on, told)
            rows = {group.machines[rank].live[LAYER].row for rank in after}
            assert len(rows) == 1
            assert {group.machines[rank].ledger.flipped_id for rank in after} == {told.flipped_id}
            # Whoever went on after the first try may have told others what was live: it stays so.
            if ends_on & set(after):
                assert told.flipped_id == first.flipped_id
            assert told.reformed.boundary % PERIOD == 0


def test_shares_that_ranks_rounded_on_different_ways_do_not_keep_them_apart_and_all_take_the_guide_s() -> None:
    live = {LAYER: weighted_live(ROW, (1, 2, 3, 1, 2, 1))}
    layers = shape().layers
    one_way = live_after(live, layers, Regrouping(before=RANKS, after=RANKS[:2]))
    other = {
        LAYER: replace(
            one_way[LAYER], shares=tuple(float(np.nextafter(np.float32(s), np.float32(2))) for s in one_way[LAYER].shares or ())
        )
    }
    assert routed_digest(one_way) == routed_digest(other)


def test_a_rank_that_joins_under_the_id_of_one_that_is_gone_does_not_take_its_slots_for_its_own() -> None:
    group = three(("idle", "idle", "idle"))
    agreement = group.form(RANKS, joining=frozenset({RANKS[1]}))
    assert isinstance(agreement, Agreement)
    assert group.machines[RANKS[1]].live[LAYER].row == (0, 1, -1, -1, 0, 1)
    assert {found.live[LAYER].digest for found in group.machines.values()} == {
        row_digest(LAYER, np.array((0, 1, -1, -1, 0, 1)))
    }


def test_a_rank_that_a_group_formed_without_does_not_come_back_with_its_old_map() -> None:
    group = three(("idle", "idle", "idle"))
    assert isinstance(group.form(RANKS[:2]), Agreement)
    told = group.form(RANKS, group_id=GroupId(10))
    assert isinstance(told, NotServed)
    assert f"start rank {RANKS[2]} anew as one that joins" in told.reason
    assert isinstance(group.form(RANKS, group_id=GroupId(11), joining=frozenset({RANKS[2]})), Agreement)


def test_two_halves_that_each_went_on_alone_do_not_become_one_group() -> None:
    group = three(("idle", "idle", "idle"))
    assert isinstance(group.form(RANKS[:1]), Agreement)
    assert isinstance(group.form(RANKS[1:], group_id=GroupId(10)), Agreement)
    told = group.form(RANKS, group_id=GroupId(11))
    assert isinstance(told, NotServed)
    assert "without it" in told.reason


def test_ranks_that_all_join_have_no_map_to_take() -> None:
    told = agree({}, RANKS, vote_period=PERIOD)
    assert isinstance(told, NotServed)
    assert "start them with the experts that they load" in told.reason
    with pytest.raises(InvalidInputError, match=r"ranks \[4\] have accounts but are not in the group"):
        agree(three(("idle",) * 3).accounts(RANKS[:1], frozenset()), RANKS[1:], vote_period=PERIOD)


def test_a_rank_that_joins_starts_with_what_all_others_know() -> None:
    group = three(("flipped", "unknown", "passed"))
    agreement = group.form((*RANKS, JOINING), joining=frozenset({JOINING}))
    assert isinstance(agreement, Agreement)
    joined = group.machines[JOINING]
    hello = Hello(to=joined.ledger.address, epoch=Epoch(4))
    (reply,) = sent(joined.handle(ev.Received(hello), 0.0))
    assert isinstance(reply, Live)
    assert (reply.flipped_id, reply.closed_id, reply.generation_seen) == (CHUNK, CHUNK, GenerationNumber(1))
    assert reply.layers[0].row == (*OTHER, -1, -1)
    empty = live_of_a_rank_that_joins(joined.shape.layers, (*RANKS, JOINING), weighted=True)[LAYER]
    assert (set(empty.row), set(empty.shares or ())) == ({-1}, {0.0})


def test_what_was_flipped_before_is_still_answered_for_in_the_new_group_and_nothing_closed_comes_back() -> None:
    group = three(("flipped", "flipped", "unknown"))
    assert isinstance(group.form(RANKS[1:]), Agreement)
    for rank in RANKS[1:]:
        found = group.machines[rank]
        disarm = Disarm(to=found.ledger.address, chunk_id=CHUNK, epoch=Epoch(1))
        (said,) = sent(found.handle(ev.Received(disarm), 0.0))
        assert isinstance(said, Flipped)
        assert said.sender == found.ledger.address
        late: ChunkId = chunk_id(1, 6)
        (refused,) = sent(found.handle(ev.Received(replace(stage(late), to=found.ledger.address)), 0.0))
        assert isinstance(refused, Refused)
        assert refused.code is RefusalCode.CLOSED


def test_nothing_is_taken_up_while_a_vote_is_unresolved_and_a_flip_that_was_not_voted_for_is_a_bug() -> None:
    found = rank_that_saw(RANKS[0], "voting")
    assert found.handle(ev.GroupEnded(), 0.0) == []
    assert found.state is ChunkState.UNRESOLVED
    assert found.handle(ev.Received(stage(chunk_id(1, 8))), 0.0) == []
    for seen in ("idle", "staged", "flipped"):
        other = rank_that_saw(RANKS[0], seen)
        other.handle(ev.GroupEnded(), 0.0)
        with pytest.raises(BrokenInvariantError, match="GroupFormed"):
            other.handle(ev.GroupFormed(flips=True, boundary=12), 0.0)
    passed = rank_that_saw(RANKS[0], "passed")
    with pytest.raises(BrokenInvariantError, match="committed"):
        passed.handle(ev.GroupFormed(flips=False, boundary=12), 0.0)


def test_a_copy_under_way_is_cancelled_and_a_staged_chunk_withdrawn_when_the_group_ends() -> None:
    found = machine()
    found.handle(ev.Received(stage(CHUNK)), 0.0)
    effects = found.handle(ev.GroupEnded(), 0.0)
    assert effects[0] == ev.CancelStaging(CHUNK)
    assert found.state is ChunkState.QUIESCING
    armed = rank_that_saw(RANKS[0], "armed")
    effects = armed.handle(ev.GroupEnded(), 0.0)
    assert effects[0] == ev.ReleaseStaging(CHUNK)
    refused = next(said for said in sent(effects) if isinstance(said, Refused))
    assert "the group forms again" in refused.reason
    assert isinstance(stage(CHUNK), Stage)
    assert address().group_id != NEXT


def test_what_a_planner_says_while_the_group_forms_counts_in_the_new_one() -> None:
    group = three(("idle", "idle", "idle"))
    accounts = group.accounts(RANKS, frozenset())
    agreement = agree(accounts, RANKS, vote_period=PERIOD)
    assert isinstance(agreement, Agreement)
    found = group.machines[RANKS[0]]
    found.handle(ev.VotingOff("the vote group forms again"), 0.0)
    found.handle(ev.Received(Hello(to=address(), epoch=Epoch(9))), 0.0)
    found.handle(ev.Received(stage(chunk_id(9, 4))), 0.0)
    ledger = ledger_after(agreement, address(), found.live, weights_version=0, off_reason="", before=found.ledger)
    assert (ledger.epoch_seen, ledger.closed_id, ledger.generation_seen) == (9, chunk_id(9, 4), 1)
