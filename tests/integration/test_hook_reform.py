"""Hooks whose group forms again in place, as processes that are really killed, in each phase of a chunk.

`FormingFleet` knows by itself what each rank holds; `check` compares every slot's bytes and every rank's tables with that.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from eplb_service.control import CAPABILITY_RESTORE, Flipped, Refused
from tests.integration.forming_fleet import FormingFleet
from tests.integration.hook_fleet import LAYERS, wait_for

pytestmark = pytest.mark.process

Context = multiprocessing.context.ForkServerContext


@pytest.fixture(scope="module")
def context() -> Context:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.integration.forming_fleet"])
    return context


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        yield folder


def test_a_group_that_loses_its_first_rank_forms_again_takes_another_in_and_brings_back_what_was_lost(
    context: Context, folder: str
) -> None:
    """One story, as the ranks of one fleet: each loss in another phase of a chunk."""
    fleet = FormingFleet(context, folder, num_ranks=4, setup={"forms_again": True, "restores": True})
    fleet.step(3)
    _a_vote_whose_outcome_nobody_knows_is_void_once_the_group_formed_without_the_rank_that_died(fleet)
    _a_rank_that_joins_is_routed_to_only_after_it_was_given_experts(fleet)
    _a_chunk_that_one_rank_flipped_is_flipped_by_all_that_are_left(fleet)
    _experts_whose_last_copy_died_are_counted_and_come_back_from_a_backup_with_the_bytes_that_were_loaded(fleet)
    assert max(fleet.close()) < 3.0


def _a_vote_whose_outcome_nobody_knows_is_void_once_the_group_formed_without_the_rank_that_died(fleet: FormingFleet) -> None:
    chunk = fleet.armed(fleet.turned())
    fleet.lose(10)  # the first of the group, which hosts its rendezvous; it never votes for the chunk
    said = fleet.step_until_error(1, 2, 3)
    stopped = [position for position, word in said.items() if word]
    assert all(said[position].startswith("OutcomeUnknownError") for position in stopped), said
    again = fleet.ask_all("step", 1, False, only=stopped)
    assert again == [said[position] for position in stopped]  # they stand still
    fleet.serves(20, 30, 40)
    fleet.check()
    fleet.step(2)
    fleet.roll_out(fleet.turned())
    fleet.check()
    assert fleet.agent.answers(Flipped, chunk) == {}
    assert fleet.ask(0, "check")[2] == ""  # never told to stop


def _a_rank_that_joins_is_routed_to_only_after_it_was_given_experts(fleet: FormingFleet) -> None:
    fleet.serves(20, 30, 40, 10, joining=(10,))
    fleet.check()
    row = fleet.rows[LAYERS[0]]
    assert row[-2:] == (-1, -1)
    fleet.step(2)
    fleet.roll_out({LAYERS[0]: (*row[:-2], row[0], row[2]), LAYERS[1]: (*fleet.rows[LAYERS[1]][:-2], row[0], -1)})
    fleet.check()


def _a_chunk_that_one_rank_flipped_is_flipped_by_all_that_are_left(fleet: FormingFleet) -> None:
    rows = fleet.turned(LAYERS[1])
    chunk = fleet.armed(rows)
    fleet.step(1 + (fleet.boundary + 1) % 2)
    assert fleet.boundary % 2 == 0  # all cast it
    fleet.agent.until(fleet.has_committed, "a passed vote on every rank")
    fleet.step()
    fleet.lose(40)
    assert fleet.ask(0, "step", 1, False) == ""  # one flips; the others never begin this step
    fleet.expect(Flipped, chunk, 1)
    fleet.flipped(rows)
    fleet.serves(20, 30, 10)
    fleet.check()
    assert {fleet.ask(position, "status").flipped_id for position in range(3)} == {chunk}
    fleet.step(3)
    fleet.check()


def _experts_whose_last_copy_died_are_counted_and_come_back_from_a_backup_with_the_bytes_that_were_loaded(
    fleet: FormingFleet,
) -> None:
    fleet.lose(20)
    fleet.serves(30, 10, 50, joining=(50,))
    fleet.check()
    missing = fleet.unreachable()
    assert missing > 0
    assert {fleet.ask(position, "status").unreachable for position in range(3)} == {missing}
    assert all(CAPABILITY_RESTORE in registration.capabilities for registration in fleet.agent.registrations.values())
    fleet.step(2)
    fleet.roll_out(fleet.covered())
    fleet.check()
    assert fleet.unreachable() == 0
    assert {fleet.ask(position, "status").unreachable for position in range(3)} == {0}


# ── each phase by itself ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_copy_under_way_ends_with_its_group_and_its_staging_serves_the_next(context: Context, folder: str) -> None:
    hold = Path(folder) / "hold"
    fleet = FormingFleet(context, folder, num_ranks=4, failpoints={1: f"hook.staging.connected=hold:{hold}"})
    fleet.step(1)
    hold.touch()
    rows = {layer: fleet.rows[layer][2:] + fleet.rows[layer][:2] for layer in LAYERS}  # every slot of every rank
    chunk = fleet.stage(rows)
    wait_for(Path(f"{hold}.reached"))
    fleet.lose(40)
    hold.unlink()
    fleet.serves(10, 20, 30)
    fleet.check()
    fleet.step(2)
    for layer in LAYERS:
        fleet.roll_out({layer: fleet.rows[layer][2:] + fleet.rows[layer][:2]})
        fleet.check()
    assert fleet.agent.answers(Flipped, chunk) == {}
    fleet.close()


@pytest.mark.long
def test_a_chunk_that_was_armed_or_in_an_unread_vote_closes_for_good(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=4)
    fleet.step(2)
    armed = fleet.armed(fleet.turned())
    fleet.lose(40)
    fleet.serves(10, 20, 30)
    fleet.check()
    fleet.stage_again(armed)
    assert {message.chunk_id for message in fleet.expect(Refused, armed, 3).values()} == {armed}
    fleet.step(2)
    voted = fleet.armed(fleet.turned())
    assert fleet.boundary % 2 == 1
    fleet.lose(10)
    assert fleet.ask_all("step", 1, False, only=(1, 2)) == ["", ""]  # cast; nobody waits for it yet
    fleet.serves(20, 30)
    fleet.check()
    fleet.stage_again(voted)
    fleet.expect(Refused, voted, 2)
    fleet.step(2)
    fleet.roll_out(fleet.turned())
    fleet.check()
    fleet.close()


@pytest.mark.long
def test_a_passed_vote_stands_though_the_only_rank_that_flipped_is_lost(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=3)
    rows = fleet.turned()
    fleet.step(1)
    fleet.flipped_by_one(0, rows)
    fleet.lose(10)
    fleet.flipped(rows)
    fleet.serves(20, 30)
    fleet.check()
    fleet.close()


@pytest.mark.long
@pytest.mark.parametrize("point", ["hook.reform.agreed", "hook.reform.gathered"])
def test_a_rank_that_is_lost_while_the_group_forms_is_named_and_the_others_form_another(
    context: Context, folder: str, point: str
) -> None:
    """Those that flipped in the first try say so in the second, whoever hosts it."""
    fleet = FormingFleet(
        context, folder, num_ranks=4, failpoints={3: f"{point}=exit:{folder}/died"}, config={"rendezvous_timeout_s": 8.0}
    )
    rows = fleet.turned()
    fleet.step(1)
    fleet.flipped_by_one(1, rows)
    fleet.lose(10)
    said = fleet.form(20, 30, 40, silent=(40,))
    if point == "hook.reform.agreed":
        assert all("rank 40 did not do what the ranks decided" in word for word in said.values()), said
    fleet.lose(40)
    fleet.flipped(rows)
    fleet.serves(30, 20)
    fleet.check()
    fleet.step(3)
    fleet.roll_out(fleet.turned(LAYERS[1]))
    fleet.check()
    fleet.close()


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_nobody_steps_until_a_group_forms(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=4, config={"rendezvous_timeout_s": 8.0})
    fleet.step(1)
    said = fleet.form(10, 20, 30, 40, absent=(30,))
    assert all("rank 30 did not come" in word and word.startswith("EnvironmentFault") for word in said.values()), said
    answers = fleet.ask_all("step", 1, False, only=(0, 1, 3))
    assert all("did not form" in word for word in answers), answers
    said = fleet.form(20, 40, 50, joining=(50,), absent=(20,))  # the host never comes
    assert all("rank 20 must be able to listen" in word for word in said.values()), said
    fleet.serves(10, 20, 40)
    fleet.check()
    fleet.step(2)
    fleet.roll_out(fleet.turned())
    fleet.check()
    fleet.close()


@pytest.mark.long
def test_ranks_that_cannot_agree_do_not_serve_and_say_why(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=4)
    fleet.step(1)
    fleet.serves(10, 20, 30)  # without a rank that lives on
    fleet.step(1)
    fleet.roll_out(fleet.turned())
    said = fleet.form_with_left_out(10, 20, 30, 40)
    assert len(said) == 4
    assert all("start rank 40 anew as one that joins" in word for word in said.values()), said
    assert all("did not form" in word for word in fleet.ask_all("step", 1, False))
    fleet.serves(10, 20, 30, 40, joining=(40,))
    fleet.check()

    rows = fleet.turned()
    chunk = fleet.armed(rows)
    fleet.step(1 + (fleet.boundary + 1) % 2)
    fleet.agent.until(fleet.has_committed, "a passed vote on every rank")
    fleet.ask(2, "version", 1)  # its weights are others now, and cannot become those of the chunk
    said = fleet.form(10, 20, 30, 40)
    assert all(f"rank 30 has to flip chunk {chunk:#x}" in word for word in said.values()), said
    fleet.close()


@pytest.mark.long
def test_calls_that_make_no_sense_say_so_and_change_nothing(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=3)
    fleet.step(1)
    fleet.group_id -= 1
    said = fleet.form(10, 20, 30)
    assert all(word.startswith("ConflictError") and "describe the next group" in word for word in said.values()), said
    fleet.step(2)
    fleet.roll_out(fleet.turned())
    said = fleet.form_with_loader(10, 20, 30)
    assert all("rank 20 starts with experts that it loaded" in word for word in said.values()), said
    fleet.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_lost_and_joins_in_whatever_phase_all_ranks_route_alike_and_hold_what_their_tables_say(
    context: Context, folder: str, seed: int
) -> None:
    chance = random.Random(seed)
    fleet = FormingFleet(context, folder, num_ranks=4, setup={"forms_again": True, "restores": True})
    phases, newest = Counter[str](), 40
    for _ in range(16):
        fleet.step(chance.randrange(1, 4))
        before, rows = fleet.ranks, fleet.turned(chance.choice(LAYERS))
        phase = chance.choice(["idle", "staging", "armed", "cast", "passed", "flipped by one"])
        phases[phase] += 1
        if phase == "staging":
            fleet.stage(rows)
        elif phase != "idle":
            fleet.armed(rows)
            if phase != "armed":
                fleet.step(1 + (fleet.boundary + 1) % 2)
            if phase in ("passed", "flipped by one"):
                fleet.agent.until(fleet.has_committed, "a passed vote on every rank")
        if phase == "flipped by one":
            fleet.step()
            assert fleet.ask(chance.randrange(fleet.num_ranks), "step", 1, False) == ""  # a command
        losing = chance.sample(fleet.ranks, chance.randrange(min(3, fleet.num_ranks - 1)))
        fleet.lose(*losing)
        left = [rank for rank in before if rank not in losing]
        joining = [newest + 10 * (1 + number) for number in range(chance.randrange(max(0, 3 - len(left)), 6 - len(left)))]
        newest += 10 * len(joining)
        members = chance.sample([*left, *joining], len(left) + len(joining))
        fleet.serves(*members, joining=joining)
        if phase in ("cast", "passed", "flipped by one"):  # whether a vote that was cast has passed, ranks may not have learnt
            assert fleet.settle(rows, before) or phase == "cast"
        fleet.check()
        assert fleet.ask(0, "status").unreachable == fleet.unreachable()
        if fleet.unreachable():
            fleet.roll_out(fleet.covered())
            fleet.check()
    assert len(phases) > 3
    fleet.close()


@pytest.mark.long
def test_ranks_of_a_node_read_one_another_s_memory_again_in_the_next_group(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=4, config={"same_node_copies": "read"})
    assert fleet.ask(0, "status").reads_from == (20,)
    fleet.lose(30)
    fleet.serves(20, 10, 40)
    assert [fleet.ask(position, "status").reads_from for position in range(3)] == [(10,), (20,), ()]
    fleet.step(1)
    row = fleet.rows[LAYERS[0]]
    fleet.roll_out({LAYERS[0]: (*row[2:4], *row[:2], *row[4:])})
    fleet.check()
    fleet.serves(40, 10, 50, 20, joining=(50,))  # nodes are of three ids each
    assert [fleet.ask(position, "status").reads_from for position in range(4)] == [(50,), (20,), (40,), (10,)]
    row = fleet.rows[LAYERS[0]]
    fleet.roll_out({LAYERS[0]: (*row[:4], row[0], row[1], *row[6:])})
    fleet.check()
    fleet.close()


@pytest.mark.long
def test_memory_threads_and_files_do_not_grow_over_formings(context: Context, folder: str) -> None:
    fleet = FormingFleet(context, folder, num_ranks=3)
    measured = []
    for number in range(8):
        fleet.step(2)
        fleet.roll_out(fleet.turned(LAYERS[number % 2]))
        fleet.serves(*((20, 30, 10) if number % 2 else (10, 20, 30)))  # and again at once, without a step between
        fleet.serves(10, 30, 20)
        fleet.check()
        measured.append(fleet.settled_memory())
    staging, threads, files = zip(*measured, strict=True)
    assert len(set(staging)) == 1
    assert max(threads[2:]) <= threads[1], threads
    assert max(files[2:]) <= files[1], files
    fleet.close()
