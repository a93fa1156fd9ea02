"""What a fleet of hooks does when ranks die or stop, disagree, run out of room, fall idle, are switched off or leave."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eplb_service.control import Armed, Committed, Disarmed, Flipped, RefusalCode, Refused, Staged
from eplb_service.ids import ChunkId
from tests.integration.hook_fleet import EXPERT_BYTES, LAYERS, SLOTS, WAIT_S, Fleet, wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.integration.hook_fleet"])
    return context


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        yield folder


@pytest.fixture(scope="module")
def pair(context: multiprocessing.context.ForkServerContext) -> Iterator[Fleet]:
    """Three ranks with staging for one layer, an off file, and a worker that can be held while it is connected."""
    with tempfile.TemporaryDirectory(prefix="eplb") as folder:
        fleet = Fleet(
            context,
            folder,
            num_ranks=3,
            config={"staging_bytes": max(SLOTS * size for size in EXPERT_BYTES.values()), "off_file": f"{folder}/off"},
            failpoints={0: f"hook.staging.connected=pause:{folder}/held"},
        )
        yield fleet
        fleet.close()


MOVED = (1, 0, 3, 2, 5, 4)


def test_a_chunk_withdrawn_while_it_is_copied_is_disarmed_at_once_and_staging_is_free_after_the_copy_ended(pair: Fleet) -> None:
    held = Path(pair.folder) / "held"
    chunk = pair.stage({LAYERS[0]: MOVED})
    wait_for(held)
    pair.disarm(chunk)
    pair.expect(Disarmed, chunk)
    busy = pair.stage({LAYERS[0]: MOVED}, only=(0,))
    assert pair.expect(Refused, busy, 1)[10].code is RefusalCode.BUSY
    held.unlink()
    pair.disarm(busy)
    pair.expect(Disarmed, busy)
    pair.agent.until(lambda: pair.ask(0, "status").open_id == 0, "end of the copy")
    pair.check()
    pair.roll_out({LAYERS[0]: MOVED})
    pair.check()


def test_a_chunk_larger_than_staging_is_refused_with_the_numbers(pair: Fleet) -> None:
    rows = {layer: pair.rows[layer][2:] + pair.rows[layer][:2] for layer in LAYERS}  # every slot of every rank changes
    chunk = pair.stage(rows)
    for message in pair.expect(Refused, chunk).values():
        assert message.code is RefusalCode.BUDGET
        assert str(max(SLOTS * size for size in EXPERT_BYTES.values())) in message.reason


def test_a_rank_that_never_hears_of_a_chunk_ends_the_copy_of_the_others_at_the_deadline(pair: Fleet) -> None:
    pair.mesh = ChunkId(0)  # over new connections, which the third rank never comes to
    chunk = pair.stage({LAYERS[1]: pair.rows[LAYERS[1]][2:] + pair.rows[LAYERS[1]][:2]}, only=(0, 1), stage_timeout_s=0.4)
    for message in pair.expect(Refused, chunk, 2).values():
        assert message.code is RefusalCode.TRANSFER
    pair.disarm(chunk)
    pair.expect(Disarmed, chunk)
    pair.check()


def test_a_disarm_ends_the_wait_for_ranks_that_do_not_come(pair: Fleet) -> None:
    row = pair.rows[LAYERS[1]][2:] + pair.rows[LAYERS[1]][:2]
    chunk = pair.stage({LAYERS[1]: row}, only=(0,), stage_timeout_s=600.0)
    pair.agent.until(lambda: pair.ask(0, "status").open_id == chunk, "open chunk")
    pair.disarm(chunk)
    pair.expect(Disarmed, chunk)
    pair.agent.until(lambda: pair.ask(0, "status").open_id == 0, "end of the copy")
    pair.roll_out({LAYERS[1]: row})
    pair.check()


def test_an_idle_engine_commits_and_flips_at_the_boundary_of_the_next_vote(pair: Fleet) -> None:
    row = pair.rows[LAYERS[1]][::-1]
    chunk = pair.stage({LAYERS[1]: row})
    pair.expect(Staged, chunk)
    pair.arm(chunk)
    pair.expect(Armed, chunk)
    pair.step(1 + (pair.boundary + 1) % 2)  # the vote is cast at an even boundary; no step follows
    assert pair.boundary % 2 == 0
    pair.expect(Committed, chunk)
    assert pair.agent.answers(Flipped, chunk) == {}
    pair.step()
    pair.check()
    pair.step()
    assert {message.boundary for message in pair.expect(Flipped, chunk).values()} == {pair.boundary}
    pair.rows[LAYERS[1]] = row
    pair.check()


def test_a_new_weights_version_closes_the_open_chunk(pair: Fleet) -> None:
    chunk = pair.stage({LAYERS[1]: pair.rows[LAYERS[1]][::-1]})
    pair.expect(Staged, chunk)
    pair.arm(chunk)
    pair.expect(Armed, chunk)
    pair.ask_all("version", 7)
    pair.step(4)
    refused = pair.expect(Refused, chunk)
    assert {message.code for message in refused.values()} == {RefusalCode.WEIGHTS_VERSION}
    pair.expect(Disarmed, chunk)
    stale = pair.stage({LAYERS[1]: pair.rows[LAYERS[1]][::-1]}, weights_version=0)
    assert {m.code for m in pair.expect(Refused, stale).values()} == {RefusalCode.WEIGHTS_VERSION}
    pair.ask_all("version", 0)
    pair.step()
    pair.check()


def test_the_off_file_makes_one_rank_inert_while_the_others_go_on_and_is_undone_by_removing_it(pair: Fleet) -> None:
    off = Path(pair.folder) / "off"
    off.touch()
    pair.agent.until(lambda: all(pair.ask_all("status")[i].off_reason for i in range(3)), "switched off")
    chunk = pair.stage({LAYERS[1]: pair.rows[LAYERS[1]][::-1]})
    for message in pair.expect(Refused, chunk).values():
        assert message.code is RefusalCode.OFF
        assert str(off) in message.reason
    pair.agent.until(lambda: any(not p.voting and str(off) in p.off_reason for p in pair.agent.pulses), "pulse that says so")
    pair.step(16)
    sent = len(pair.agent.windows)
    pair.step(16)
    assert len(pair.agent.windows) == sent
    off.unlink()
    pair.agent.until(lambda: not any(status.off_reason for status in pair.ask_all("status")), "switched on")
    pair.roll_out({LAYERS[1]: pair.rows[LAYERS[1]][::-1]})
    pair.check()


def test_a_rank_that_leaves_ends_votes_without_stopping_the_others(pair: Fleet) -> None:
    row = pair.rows[LAYERS[0]][::-1]
    chunk = pair.stage({LAYERS[0]: row})
    pair.expect(Staged, chunk)
    pair.arm(chunk)
    pair.expect(Armed, chunk)
    pair.pipes[2].send(("close",))  # it casts one last vote, which pairs with the next one of the others
    pair.step(6, only=(0, 1))
    assert pair._answer(2) < 3.0
    for position in (0, 1):
        status = pair.ask(position, "status")
        assert "left" in status.off_reason
    pair.expect(Disarmed, chunk, 2)
    pair.check(only=(0, 1))


def test_a_peer_killed_in_the_middle_of_a_transfer_is_refused_before_the_deadline(
    context: multiprocessing.context.ForkServerContext, folder: str
) -> None:
    held = Path(folder) / "held"
    fleet = Fleet(context, folder, num_ranks=3, failpoints={1: f"hook.staging.connected=pause:{held}"})
    fleet.step(3)
    chunk = fleet.stage({LAYERS[0]: (2, 3, 4, 5, 0, 1)}, stage_timeout_s=2 * WAIT_S)
    wait_for(held)
    fleet.kill(1)
    refused = fleet.expect(Refused, chunk, 2)  # within WAIT_S, less than the stage's own time
    assert {message.code for message in refused.values()} == {RefusalCode.TRANSFER}
    assert "rank" in refused[10].reason
    fleet.step(8, only=(0, 2))  # its vote is missed: voting ends, serving goes on
    fleet.check(only=(0, 2))
    assert all(seconds < 8.0 for seconds in fleet.close())


def test_a_stopped_peer_stops_the_rank_that_cast_an_id_and_only_silences_the_one_that_cast_zero(
    context: multiprocessing.context.ForkServerContext, folder: str
) -> None:
    fleet = Fleet(context, folder, num_ranks=3, config={"vote_timeout_s": 0.7, "vote_period": 1})
    fleet.step(3)
    chunk = fleet.stage({LAYERS[0]: (2, 3, 4, 5, 0, 1)})
    fleet.expect(Staged, chunk)
    fleet.arm(chunk, only=(0,))
    fleet.expect(Armed, chunk, 1)
    os.kill(fleet.processes[2].pid or 0, signal.SIGSTOP)
    assert fleet.ask(0, "step", 12, False) == ""  # casts the id
    assert fleet.ask(1, "step", 12, False) == ""
    error = fleet.ask(0, "step", 12, False)
    assert "unknown" in error
    assert "unknown" in fleet.ask(0, "check")[2]
    fleet.agent.until(
        lambda: fleet.ask(1, "step", 12, False) == "" and bool(fleet.ask(1, "status").off_reason), "end of voting on the other"
    )
    assert fleet.ask(1, "check")[2] == ""
    assert "unknown" in fleet.ask(0, "step", 12, False)  # for good
    fleet.kill(2)
    fleet.close()


def test_ranks_with_unequal_shared_tensors_only_observe_and_name_them(
    context: multiprocessing.context.ForkServerContext, folder: str
) -> None:
    fleet = Fleet(context, folder, num_ranks=3, shared={1: 1.25}, config={"window_steps": 4})
    for status in fleet.started:
        assert "shared tensor input_scale of layer tiny/1" in status.off_reason
    assert {r.staging_bytes for r in fleet.agent.registrations.values()} == {0}
    fleet.step(9)
    fleet.agent.until(lambda: len(fleet.agent.windows) == 6, "windows of all ranks")
    chunk = fleet.stage({LAYERS[0]: (1, 0, 3, 2, 5, 4)})
    assert {m.code for m in fleet.expect(Refused, chunk).values()} == {RefusalCode.OFF}
    fleet.close()
