"""What `Hook.reform` and the start of a rank that joins do with engines, weights and shares; hooks as threads, real gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent.engine.port import OutcomeUnknownError
from agent.engine.reference.launch import free_port
from agent.hook.forming import Forming
from agent.hook.hook import Hook
from agent.hook.loaded_check import KnownExperts
from eplb_service.control import CAPABILITY_RESTORE
from eplb_service.errors import ConflictError, EnvironmentFault, InvalidInputError
from eplb_service.ids import LayerRef
from tests.integration.hook_fleet import LAYERS, NUM_LOGICAL, Checkpoint, TinyEngine
from tests.unit.hook_threads import Crew, Rows, at_once, described, settings, shares_of

RANKS = (10, 20, 30, 40)
ROW = (0, 1, 2, 3, 4, 5, 0, 1)
LOADED: Rows = dict.fromkeys(LAYERS, ROW)


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    """Those that a test makes; closed at its end."""
    made: list[Crew] = []
    yield made
    for crew in made:
        crew.close()


def test_shares_of_experts_that_lost_a_replica_add_up_again_alike_on_all_ranks_and_on_one_that_joins(
    crews: list[Crew],
) -> None:
    crew = Crew(RANKS, LOADED, weighted=True)
    crews.append(crew)
    row = (0, 1, 2, 3, 4, 5, 0, 2)
    crew.roll_out({LAYERS[0]: row}, shares={LAYERS[0]: shares_of(row, 0.3)})
    crew.form((40, 20, 30))  # expert 0 keeps 0.7 of its tokens on rank 40, which is all then; expert 2 keeps both
    for member in crew.members.values():
        tables = member.engine.tables[LAYERS[0]]
        assert tables.replica_shares is not None
        assert tables.replica_shares[0].tolist() == [1.0, 0.0, 0.0, 0.0]
        assert tables.replica_shares[1].tolist() == [0.0] * 4
        assert tables.replica_shares[2].tolist() == pytest.approx([0.7, 0.3, 0, 0])
        assert member.hook.status.unreachable == 1  # expert 1 of the first layer
    crew.form((40, 20, 30, 50), joining=(50,))
    crew.check()
    shares = [member.engine.tables[LAYERS[0]].replica_shares for member in crew.members.values()]
    assert shares[0] is not None
    assert all(found is not None and torch.equal(found, shares[0]) for found in shares)
    now = crew.check()[LAYERS[0]]
    crew.roll_out({LAYERS[0]: (*now[:-1], 4)}, shares={LAYERS[0]: shares_of((*now[:-1], 4), 0.25)})
    crew.check()


def test_every_rank_knows_the_checksum_of_every_expert_that_was_loaded_also_of_one_that_nobody_holds(crews: list[Crew]) -> None:
    crew = Crew(RANKS, LOADED, sources=(Checkpoint(),))
    crews.append(crew)
    loaded = crew.members[10].hook._stager.known  # type: ignore[union-attr]
    crew.form((20, 50), joining=(50,))
    assert crew.members[20].hook.status.unreachable == 2 * 4
    for member in crew.members.values():
        assert member.hook._stager is not None
        assert member.hook._stager.known.checksums == loaded.checksums
        assert set(loaded.checksums[LAYERS[0]]) == set(range(NUM_LOGICAL))
        assert member.hook.registration().capabilities == (CAPABILITY_RESTORE,)
    crew.roll_out({LAYERS[0]: (2, 3, 0, 5)})  # from the backups of one that was there and of one that joined
    assert crew.check()[LAYERS[0]] == (2, 3, 0, 5)


def test_checksums_of_other_weights_are_not_handed_on(crews: list[Crew]) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)), sources=(Checkpoint(),))
    crews.append(crew)
    for member in crew.members.values():
        member.engine.version = 3
    crew.form((10, 20, 50), joining=(50,))
    for member in crew.members.values():
        assert member.hook._stager is not None
        assert not member.hook._stager.known.checksums


def test_checksums_go_to_another_rank_as_they_are() -> None:
    known = KnownExperts(4, {LayerRef("m", 3): {0: -5, 7: 1 << 62}, LayerRef("m", 1): {2: 9}})
    assert KnownExperts.from_json(known.to_json()) == known
    assert known.of(4) is known
    assert known.of(5).checksums == {}
    assert (known.of(5).digest, KnownExperts.from_json(known.to_json()).digest) == ("", known.digest)


def test_staging_is_allocated_once_for_all_groups_that_a_rank_is_in(crews: list[Crew]) -> None:
    crew = Crew(RANKS, LOADED)
    crews.append(crew)
    places = {rank: member.hook._stager._staging.buffer.data_ptr() for rank, member in crew.members.items()}  # type: ignore[union-attr]
    for ranks in ((40, 30, 20), (20, 30), (30, 20, 60)):
        crew.form(ranks, joining=[60] if 60 in ranks else [])
        crew.check()
        assert all(
            member.hook._stager._staging.buffer.data_ptr() == places[rank]  # type: ignore[union-attr]
            for rank, member in crew.members.items()
            if rank in places
        )
        for _ in range(3):
            assert set(crew.step()) == {None}


def test_an_engine_that_forms_again_is_told_that_an_outcome_is_unknown_and_any_other_is_ended(crews: list[Crew]) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)), vote_timeout_s=0.5)
    crews.append(crew)
    row = (1, 0, 2, 3, 4, 5)
    crew.arm({LAYERS[0]: row})
    crew.members[20].engine.can_reform = False
    assert crew.step(10, 20) == [None, None]  # both cast it; the third never comes
    crew.step(10, 20)
    again, ended = crew.step(10, 20)
    assert isinstance(again, OutcomeUnknownError)
    assert type(ended) is EnvironmentFault
    assert crew.members[10].engine.stopped == ""
    assert "unknown" in crew.members[20].engine.stopped
    boundary = crew.members[10].hook.status.boundary
    crew.step(10)
    assert crew.members[10].hook.status.boundary == boundary  # none of these was a step
    crew.form((10, 20, 30))
    assert crew.check()[LAYERS[0]] == (0, 1, 2, 3, 4, 5)
    assert {member.hook.status.boundary % 2 for member in crew.members.values()} == {0}
    crew.roll_out({LAYERS[0]: row})
    crew.check()


def test_a_flip_that_breaks_while_the_group_forms_ends_its_rank_for_good_and_the_others_say_which(crews: list[Crew]) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)))
    crews.append(crew)
    crew.arm({LAYERS[0]: (1, 0, 3, 2, 5, 4)})
    for _ in range(2):
        assert set(crew.step()) == {None}
    while crew.members[10].hook.status.flips == 0:
        assert crew.step(10) == [None]
    broken = crew.members[20]

    def rederive(*_: Any) -> None:
        raise RuntimeError("out of memory")

    broken.engine.rederive = rederive  # type: ignore[method-assign,assignment]
    raised = at_once(crew.calls(RANKS[:3]))
    assert all("rank 20: the flip of chunk 0x100000001 broke" in str(error) for error in raised), raised
    assert "out of memory" in broken.engine.stopped
    (never,) = at_once(crew.calls([20]))
    assert "out of memory" in str(never)
    crew.form((10, 30))
    assert crew.check()[LAYERS[0]] == (1, 0, 5, 4)


def test_a_rank_that_joins_holds_nothing_and_is_started_once(crews: list[Crew]) -> None:
    crew = Crew(RANKS, LOADED)
    crews.append(crew)
    with pytest.raises(InvalidInputError, match="a rank that joins has empty slots, so its row is -1 everywhere"):
        hook_of(replace(described(50, (10, 50), free_port(), group=9, rows=dict.fromkeys(LAYERS, ROW[:4])), joins=True))
    with pytest.raises(ConflictError, match=r"call start\(\) first"):
        crew.member(described(50, (10, 50), free_port(), group=9, joins=True)).hook.reform()
    crew.form((*RANKS, 50), joining=(50,))
    with pytest.raises(ConflictError, match=r"call reform\(\)"):
        crew.members[50].hook.start()


def hook_of(description: Any) -> Hook:
    return Hook(TinyEngine(description), settings())


def test_a_rank_that_could_not_join_may_be_started_again_for_another_group(crews: list[Crew]) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)), rendezvous_timeout_s=1.0)
    crews.append(crew)
    joining = crew.member(described(50, (10, 50), free_port(), group=90, joins=True))
    (lonely,) = at_once([joining.hook.start])
    assert isinstance(lonely, EnvironmentFault)
    assert "the host of rank 10 must be able to listen there" in str(lonely)
    with pytest.raises(EnvironmentFault, match="did not form"):
        joining.hook.begin_step(num_real_tokens=0)
    port = free_port()
    ranks = (10, 20, 30, 50)
    calls = []
    for rank in ranks[:3]:
        crew.members[rank].engine.form_again(described(rank, ranks, port, group=91))
        calls.append(crew.members[rank].hook.reform)
    joining.engine.form_again(described(50, ranks, port, group=91, joins=True))
    joining.engine.description = replace(
        joining.engine.description,
        address=replace(joining.engine.description.address, incarnation=joining.hook._facts.description.address.incarnation),
    )
    crew.members[50] = joining
    assert at_once([*calls, joining.hook.start]) == [None] * 4
    assert crew.check()[LAYERS[0]] == (0, 1, 2, 3, 4, 5, -1, -1)


def test_an_engine_whose_tables_cannot_hold_the_new_group_or_that_is_another_is_refused_before_anything_ends(
    crews: list[Crew],
) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)))
    crews.append(crew)
    member = crew.members[10]
    tables, description = dict(member.engine.tables), member.engine.description
    wanted = described(10, (10, 20), free_port(), group=55)
    member.engine.description = wanted
    with pytest.raises(InvalidInputError, match=r"must be int64 of shape \(4,\)"):
        member.hook.reform()  # its tables are of the group that was
    for changed, words in (
        (replace(wanted, dispatch="weighted"), "the dispatch of an engine stays"),
        (replace(wanted, address=replace(wanted.address, incarnation=1)), "the incarnation of an engine stays"),  # type: ignore[arg-type]
        (description, "describe the next group"),
    ):
        member.engine.description = changed
        with pytest.raises(ConflictError, match=words):
            member.hook.reform()
    member.engine.description = description
    assert all(member.engine.tables[layer] is tables[layer] for layer in LAYERS)
    crew.roll_out({LAYERS[0]: (1, 0, 2, 3, 4, 5)})
    crew.check()


def test_ranks_that_only_observe_form_again_and_still_write_the_tables(crews: list[Crew]) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)), staging_bytes=0)
    crews.append(crew)
    crew.form((20, 30, 50), joining=(50,))
    assert crew.check()[LAYERS[0]] == (2, 3, 4, 5, -1, -1)
    for member in crew.members.values():
        assert "staging of 0 bytes" in member.hook.status.off_reason
    assert set(crew.step()) == {None}


def test_one_rank_alone_goes_on_and_takes_others_in_again(crews: list[Crew]) -> None:
    crew = Crew(RANKS[:3], dict.fromkeys(LAYERS, (0, 1, 2, 3, 4, 5)))
    crews.append(crew)
    crew.form((20,))
    assert crew.check()[LAYERS[0]] == (2, 3)
    assert crew.members[20].hook.status.unreachable == 2 * 4
    crew.roll_out({LAYERS[0]: (3, 2)})  # may leave away what nobody holds, and nothing else
    crew.form((10, 20), joining=(10,))
    assert crew.check()[LAYERS[0]] == (-1, -1, 3, 2)


def test_a_rank_that_fails_tells_the_others_at_once_how_far_they_ever_are() -> None:
    port = free_port()
    ranks = (10, 20)
    tries: dict[int, Forming] = {}
    assert at_once(
        [
            lambda rank=rank: tries.update({rank: Forming(described(rank, ranks, port, group=7), None, timeout_s=20.0)})  # type: ignore[misc]
            for rank in ranks
        ]
    ) == [None, None]
    began = time.monotonic()

    def fails() -> None:
        tries[20]._say("comes", "stays")
        tries[20].give_up("out of memory")

    raised = at_once([lambda: tries[10].agree(2), fails])
    assert isinstance(raised[0], EnvironmentFault)
    assert str(raised[0]) == "rank 20 failed: out of memory"
    assert raised[1] is None
    assert time.monotonic() - began < 20.0  # less than the time that it would have waited
