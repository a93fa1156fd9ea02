"""Fleets of the reference engine that go on when a rank is lost, and take new ones in: real processes, tokens compared.

Nobody watches these engines (no hook): the map stays what was loaded, less the slots of lost ranks. With 10 experts in 4 x 5
slots every expert has a second copy on another rank, so that any one rank can be lost.
"""

from __future__ import annotations

import os
import selectors
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.engine.reference.config import Member
from agent.engine.reference.launch import Fleet, launch_ranks
from agent.engine.reference.messages import Inspection
from agent.engine.reference.port import ExitCode
from eplb_service.errors import EnvironmentFault
from eplb_service.ids import RankId
from tests.integration.reference_doubles import RESTORED_AFTER
from tests.integration.reference_fleet import WAIT_S, Answer, collect, expected, fleet_config, prompts_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(280)]
NEW_TOKENS = 24
DOUBLED = {"model": "uneven", "slots_per_rank": 5, "survives": True}
"""Every expert lives on two of four ranks."""


@contextmanager
def surviving(**options: Any) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory, launch_ranks(fleet_config(directory, **options)) as fleet:
        yield fleet


class Requests:
    """Requests at some ranks, and all that came of them."""

    def __init__(self, fleet: Fleet, positions: range, *, each: int, first_id: int = 0) -> None:
        self.fleet = fleet
        self.clients = {position: fleet.client(position) for position in positions}
        self.sent: dict[int, tuple[int, bytes]] = {}
        self.answers: dict[int, Answer] = {}
        self.gone: set[int] = set()
        self._selector = selectors.DefaultSelector()
        for position, client in self.clients.items():
            self._selector.register(client, selectors.EVENT_READ, position)
        ids = range(first_id, first_id + each * len(positions))
        for request_id, prompt in prompts_for(ids).items():
            position = positions[request_id % len(positions)]
            self.sent[request_id], self.answers[request_id] = (position, prompt), Answer()
            self.clients[position].submit(request_id=request_id, prompt=prompt, max_new_tokens=NEW_TOKENS, kind="test")

    def collect_until(self, done: Any, what: str) -> None:
        """Take in what comes, also that a rank is gone, until something holds."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
            for key, _ in self._selector.select(0.1):
                try:
                    for message in self.clients[key.data].receive(timeout_s=0.0):
                        collect(message, self.answers)
                except EnvironmentFault:
                    self._selector.unregister(self.clients[key.data])
                    self.gone.add(key.data)

    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers.values())

    def all_ended(self) -> bool:
        return all(
            answer.ended is not None for request_id, answer in self.answers.items() if self.sent[request_id][0] not in self.gone
        )

    def check(self) -> None:
        """Every request of a rank that is left has all its tokens, those of a lost rank have what came before: all right."""
        right = expected("uneven", self.sent, NEW_TOKENS)
        for request_id, answer in self.answers.items():
            wanted = right[request_id]
            if self.sent[request_id][0] in self.gone:
                wanted = wanted[: len(answer.tokens)]
            assert answer.tokens == wanted, f"request {request_id} of the rank at position {self.sent[request_id][0]}"

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


def inspections(fleet: Fleet) -> list[Inspection]:
    found = []
    for position in range(fleet.config.num_ranks):
        with fleet.client(position) as client:
            found.append(client.inspect(timeout_s=WAIT_S))
    return found


def ids(*numbers: int) -> tuple[RankId, ...]:
    return tuple(map(RankId, numbers))


@pytest.mark.parametrize("lost", [4, pytest.param(6, marks=pytest.mark.long)])
def test_ranks_that_are_left_lose_no_token_and_a_new_one_serves_with_them(lost: int) -> None:
    """The first rank, which hosts what the others meet at, and another one."""
    with surviving(num_ranks=4, first_rank_id=4, batch_max=3, **DOUBLED) as fleet:
        requests = Requests(fleet, range(4), each=6)
        requests.collect_until(lambda: requests.tokens() > 40, "tokens of all four")
        fleet.process(lost).kill()
        requests.collect_until(requests.all_ended, "the requests of the three that are left")
        requests.check()
        requests.close()
        left = tuple(rank for rank in ids(4, 5, 6, 7) if rank != lost)
        fleet.wait_for_ranks(left, timeout_s=WAIT_S)
        assert {len(layer.row) for one in inspections(fleet) for layer in one.layers} == {15}

        during = Requests(fleet, range(3), each=4, first_id=100)
        fleet.join([Member(rank_id=RankId(9), node="node-9")], timeout_s=WAIT_S)
        assert fleet.config.rank_ids == (*left, 9)
        after = Requests(fleet, range(4), each=3, first_id=200)
        for part in (during, after):
            part.collect_until(part.all_ended, "requests around the joining of a rank")
            part.check()
            assert not part.gone
            part.close()
        held = inspections(fleet)
        assert {one.boundary for one in held} == {held[0].boundary}
        assert {layer.row[15:] for one in held for layer in one.layers} == {(-1,) * 5}, "a new rank has empty slots"
        fleet.stop(timeout_s=WAIT_S)
    assert fleet.process(9).exitcode == ExitCode.STOPPED


@pytest.mark.long
def test_a_rank_that_hangs_is_ended_past_the_step_s_deadline_and_the_others_go_on_vllm_39942() -> None:
    with surviving(num_ranks=3, model="uneven", slots_per_rank=7, survives=True, step_timeout_s=3.0) as fleet:
        requests = Requests(fleet, range(3), each=4)
        requests.collect_until(lambda: requests.tokens() > 20, "tokens of all three")
        stopped = fleet.process(1)
        assert stopped.pid
        os.kill(stopped.pid, signal.SIGSTOP)
        requests.collect_until(requests.all_ended, "the requests of the two that are left")
        requests.check()
        requests.close()
        assert requests.gone == {1}
        stopped.join(WAIT_S)
        assert stopped.exitcode == -signal.SIGKILL
        fleet.wait_for_ranks(ids(0, 2), timeout_s=WAIT_S)
        fleet.stop(timeout_s=WAIT_S)


@pytest.mark.long
def test_an_idle_fleet_notices_a_loss_and_serves_the_next_request() -> None:
    with surviving(num_ranks=4, **DOUBLED) as fleet:
        fleet.process(0).kill()
        fleet.process(0).join()
        fleet.wait_for_ranks(ids(1, 2, 3), timeout_s=WAIT_S)
        requests = Requests(fleet, range(3), each=2)
        requests.collect_until(requests.all_ended, "requests of the three that are left")
        requests.check()
        requests.close()
        fleet.stop(timeout_s=WAIT_S)


@pytest.mark.long
def test_a_rank_that_is_lost_while_the_group_forms_again_is_left_out_of_the_next_one_vllm_38862() -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        # its first group forms; it ends in the middle of forming the second
        first_time = Path(directory) / "met"
        config = fleet_config(
            directory,
            num_ranks=4,
            model="uneven",
            slots_per_rank=5,
            survives=True,
            form_timeout_s=10.0,
            rank_environments={2: {"EPLB_FAILPOINTS": f"engine.group.formed_again=exit:{first_time}"}},
        )
        with launch_ranks(config) as fleet:
            requests = Requests(fleet, range(4), each=4)
            requests.collect_until(lambda: requests.tokens() > 20, "tokens of all four")
            fleet.process(1).kill()
            requests.collect_until(lambda: {1, 2} <= requests.gone, "the loss of the second")
            assert first_time.exists()
            fleet.wait_for_ranks(ids(0, 3), timeout_s=WAIT_S)
            requests.close()
            fleet.stop(timeout_s=WAIT_S, cancel=True)


def test_ranks_whose_slots_cannot_hold_the_experts_end_with_the_least_number_that_could() -> None:
    with surviving(num_ranks=3, model="uneven", slots_per_rank=4, survives=True) as fleet:
        fleet.process(2).kill()
        with pytest.raises(EnvironmentFault, match="8; use at least 5 slots per rank"):
            fleet.wait_for_ranks(ids(0, 1), timeout_s=WAIT_S)
        for rank in (0, 1):
            fleet.process(rank).join(WAIT_S)
            assert fleet.process(rank).exitcode == ExitCode.STEP_FAILED
            assert "10 experts do not fit the 2 ranks that are left" in fleet.reason(rank)
        assert "rank 2 is lost" in fleet.why_ended


def test_a_model_that_fails_again_and_again_ends_the_fleet_with_what_it_said() -> None:
    with surviving(num_ranks=2, **{**DOUBLED, "model": "raises_on_a_byte"}) as fleet:
        with fleet.client(0) as client:
            client.submit(request_id=1, prompt=b"ab\xffcd", max_new_tokens=3)
            for rank in (0, 1):
                fleet.process(rank).join(WAIT_S)
        assert "groups of the same ranks ended without one step" in fleet.why_ended
        assert "no kernel for byte 255" in fleet.why_ended
        assert fleet.why_ended in fleet.reason(1)


def test_requests_wait_while_experts_live_on_no_rank_and_go_on_once_they_are_back_sglang_12068() -> None:
    """A hook double brings the lost experts back after some dummy steps; no request is lost and no token is wrong."""
    options = {
        "model": "uneven",
        "slots_per_rank": 5,
        "survives": True,
        "hook_factory": "tests.integration.reference_doubles:restoring",
    }
    with surviving(num_ranks=3, **options) as fleet:
        requests = Requests(fleet, range(3), each=4)
        requests.collect_until(lambda: requests.tokens() > 20, "tokens of all three")
        fleet.process(1).kill()  # of 10 experts in 15 slots, 5 live on it alone
        fleet.wait_for_ranks(ids(0, 2), timeout_s=WAIT_S)
        requests.collect_until(requests.all_ended, "the requests of the two that are left")
        requests.check()
        held = inspections(fleet)
        requests.close()
        fleet.stop(timeout_s=WAIT_S)
    assert {set(layer.row) >= set(range(10)) for one in held for layer in one.layers} == {True}
    assert min(one.dummy_steps for one in held) >= RESTORED_AFTER


@pytest.mark.long
def test_groups_that_come_and_go_leave_nothing_behind_in_a_rank_that_stays() -> None:
    """Threads and descriptors of the first rank, after each of five losses and joinings."""
    with surviving(num_ranks=3, model="uneven", slots_per_rank=10, survives=True) as fleet:
        seen = []
        for newcomer in range(10, 15):
            fleet.join([Member(rank_id=RankId(newcomer), node="node-9")], timeout_s=WAIT_S)
            requests = Requests(fleet, range(4), each=1, first_id=100 * newcomer)
            requests.collect_until(requests.all_ended, "requests of the four")
            requests.check()
            requests.close()
            fleet.process(newcomer).kill()
            fleet.wait_for_ranks(ids(0, 1, 2), timeout_s=WAIT_S)
            inspections(fleet)
            process = Path(f"/proc/{fleet.process(0).pid}")
            seen.append(tuple(len(list((process / what).iterdir())) for what in ("task", "fd")))
        fleet.stop(timeout_s=WAIT_S)
    assert max(seen[1:]) <= seen[0], seen
