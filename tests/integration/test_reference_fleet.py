"""Whole fleets of the reference engine: real processes, real collectives, tokens compared with generation in one process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agent.engine.reference.client import RankClient
from agent.engine.reference.launch import Fleet, launch_ranks
from agent.engine.reference.messages import EndReason, Inspection, NewTokens, RankState
from agent.engine.reference.model import checkpoint_digests
from agent.engine.reference.port import ExitCode
from eplb_service.errors import EnvironmentFault
from tests.integration.reference_fleet import (
    WAIT_S,
    Answer,
    collect,
    expected,
    fleet_config,
    prompts_for,
    running_fleet,
    serve,
)
from tests.integration.reference_models import UNEVEN, uneven

pytestmark = pytest.mark.process
NEW_TOKENS = 7


def spread(request_ids: range, num_ranks: int) -> dict[int, tuple[int, bytes]]:
    return {i: (i % num_ranks, prompt) for i, prompt in prompts_for(request_ids).items()}


def clients_of(fleet: Fleet) -> dict[int, RankClient]:
    return {position: fleet.client(position) for position in range(fleet.config.num_ranks)}


def inspect_all(clients: dict[int, RankClient]) -> list[Inspection]:
    return [client.inspect(timeout_s=WAIT_S) for client in clients.values()]


def assert_slots_hold_what_the_map_says(inspections: list[Inspection]) -> None:
    model = uneven()
    for index, layer_id in enumerate(model.moe_layer_ids()):
        checkpoint = checkpoint_digests(model, layer_id)
        rows = {inspection.layers[index].row for inspection in inspections}
        assert len(rows) == 1, "ranks route by different maps"
        held = [digest for inspection in inspections for digest in inspection.layers[index].slot_digests]
        wanted = [None if expert < 0 else checkpoint[expert] for expert in rows.pop()]
        assert [digest if want is not None else None for digest, want in zip(held, wanted, strict=True)] == wanted


@pytest.fixture(scope="module")
def quiet() -> Iterator[tuple[Fleet, dict[int, RankClient]]]:
    """Four ranks, 10 experts in 16 slots, no hook, a dummy token in every dummy step."""
    with running_fleet(model="uneven", num_ranks=4, first_rank_id=4, dummy_tokens=1, batch_max=3, queue_max=4) as fleet:
        yield fleet, clients_of(fleet)


def test_four_ranks_generate_what_one_process_generates(quiet: tuple[Fleet, dict[int, RankClient]]) -> None:
    _, clients = quiet
    requests = spread(range(10), 4)
    answers = serve(clients, requests, NEW_TOKENS)
    assert {i: answer.tokens for i, answer in answers.items()} == expected("uneven", requests, NEW_TOKENS)
    assert {answer.ended.reason for answer in answers.values() if answer.ended} == {EndReason.LENGTH}
    assert_slots_hold_what_the_map_says(inspect_all(clients))


@pytest.mark.parametrize("position", [0, 3])
def test_requests_at_one_rank_only_wake_and_use_all_ranks(quiet: tuple[Fleet, dict[int, RankClient]], position: int) -> None:
    _, clients = quiet
    before = inspect_all(clients)
    requests = {100 + i: (position, prompt) for i, prompt in prompts_for(range(3)).items()}
    answers = serve(clients, requests, NEW_TOKENS)
    after = inspect_all(clients)
    assert {i: answer.tokens for i, answer in answers.items()} == expected("uneven", requests, NEW_TOKENS)
    assert len({inspection.boundary for inspection in after}) == 1, "ranks took different numbers of steps"
    steps = after[0].boundary - before[0].boundary
    for other in set(range(4)) - {position}:
        assert after[other].dummy_steps - before[other].dummy_steps == steps
        assert after[other].real_tokens == before[other].real_tokens
        served = [np.subtract(a.tokens, b.tokens).sum() for a, b in zip(after[other].layers, before[other].layers, strict=True)]
        assert min(served) > 0, "a rank without requests computed nothing for the others"


def test_dummy_tokens_are_never_counted(quiet: tuple[Fleet, dict[int, RankClient]]) -> None:
    _, clients = quiet
    serve(clients, {200: (1, b"only one rank has work")}, NEW_TOKENS)
    inspections = inspect_all(clients)
    assert sum(inspection.dummy_steps for inspection in inspections) > 0
    pairs = UNEVEN.top_k * sum(inspection.real_tokens for inspection in inspections)
    for index in range(UNEVEN.num_layers):
        assert sum(sum(inspection.layers[index].tokens) for inspection in inspections) == pairs
        assert sum(sum(inspection.layers[index].sent) for inspection in inspections) == pairs


def test_replicas_of_an_expert_get_equal_shares(quiet: tuple[Fleet, dict[int, RankClient]]) -> None:
    _, clients = quiet
    serve(clients, spread(range(300, 312), 4), NEW_TOKENS)
    inspections = inspect_all(clients)
    for index in range(UNEVEN.num_layers):
        row = np.array(inspections[0].layers[index].row)
        served = np.concatenate([inspection.layers[index].tokens for inspection in inspections])
        twice = np.flatnonzero(np.bincount(row) == 2)
        assert twice.tolist() == [0, 1, 2, 3, 4, 5]
        for inspection in inspections:
            sent = np.array(inspection.layers[index].sent)
            for expert in twice:
                assert np.ptp(sent[row == expert]) <= 1
        assert all(served[row == expert].min() > 0 for expert in twice)


def test_an_idle_group_runs_no_steps_and_uses_no_processor(quiet: tuple[Fleet, dict[int, RankClient]]) -> None:
    fleet, clients = quiet
    serve(clients, {400: (0, b"x")}, 2)
    # Rank 3 may be on its way from the last step to its sleep: it is there once it says so.
    while (asleep := clients[3].inspect(timeout_s=WAIT_S)).state is not RankState.IDLE:
        pass
    switches = context_switches(fleet.processes[3].pid)
    for _ in range(200):
        answer = clients[0].inspect(timeout_s=WAIT_S)
        assert answer.state is RankState.IDLE
        assert answer.boundary == asleep.boundary
    # Its answer may still have been on its way to sleep when they were first read.
    assert sum(context_switches(fleet.processes[3].pid)) - sum(switches) <= 2


def context_switches(pid: int | None) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])


def test_what_cannot_be_served_is_rejected_with_a_reason(quiet: tuple[Fleet, dict[int, RankClient]]) -> None:
    _, clients = quiet
    long = serve({0: clients[0]}, {500: (0, b"x" * 60)}, 10)[500]
    assert long.rejected is not None
    assert "60 prompt tokens and 10 new ones do not fit the context of 64" in long.rejected.reason
    many = serve({0: clients[0]}, {600 + i: (0, b"many at once") for i in range(40)}, 2)
    reasons = {answer.rejected.reason for answer in many.values() if answer.rejected}
    assert any("requests wait already, of at most 4" in reason for reason in reasons)
    served = {i: answer.tokens for i, answer in many.items() if answer.ended}
    assert served
    assert served == expected("uneven", dict.fromkeys(served, (0, b"many at once")), 2)


@pytest.mark.parametrize(("num_ranks", "slots"), [(1, 0), (2, 5), (3, 4)])
def test_any_number_of_ranks_and_slots_generates_the_same(num_ranks: int, slots: int) -> None:
    requests = spread(range(6), num_ranks)
    with running_fleet(model="uneven", num_ranks=num_ranks, slots_per_rank=slots) as fleet:
        clients = clients_of(fleet)
        answers = serve(clients, requests, NEW_TOKENS)
        assert_slots_hold_what_the_map_says(inspect_all(clients))
    assert {i: answer.tokens for i, answer in answers.items()} == expected("uneven", requests, NEW_TOKENS)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_do_not_change_when_experts_move_between_steps(num_ranks: int) -> None:
    requests = spread(range(12), num_ranks)
    with running_fleet(
        model="uneven", num_ranks=num_ranks, batch_max=2, hook_factory="tests.integration.reference_doubles:scripted"
    ) as fleet:
        clients = clients_of(fleet)
        answers = serve(clients, requests, NEW_TOKENS)
        inspections = inspect_all(clients)
        assert_slots_hold_what_the_map_says(inspections)
    assert {i: answer.tokens for i, answer in answers.items()} == expected("uneven", requests, NEW_TOKENS)
    generations = {generation for answer in answers.values() for generation in answer.generations}
    assert len(generations) >= 4, "requests did not live through flips"
    assert any(len(set(answer.generations)) > 1 for answer in answers.values())
    for index in range(UNEVEN.num_layers):
        assert len({inspection.layers[index].flip_boundary for inspection in inspections}) == 1
        assert inspections[0].layers[index].flip_boundary > 0
        assert sum(sum(inspection.layers[index].tokens_since_flip) for inspection in inspections) > 0


@pytest.mark.parametrize("fault", ["weightless", "scale_left_behind", "one_rank_late"])
def test_a_broken_flip_shows_in_tokens_and_in_what_ranks_say(fault: str) -> None:
    requests = spread(range(4), 2)
    with running_fleet(model="uneven", num_ranks=2, hook_factory=f"tests.integration.reference_doubles:{fault}") as fleet:
        clients = clients_of(fleet)
        answers = serve(clients, requests, NEW_TOKENS)
        inspections = inspect_all(clients)
    if fault == "one_rank_late":
        assert len({inspection.layers[0].flip_boundary for inspection in inspections}) == 2
    else:
        with pytest.raises(AssertionError):
            assert_slots_hold_what_the_map_says(inspections)
    assert {i: answer.tokens for i, answer in answers.items()} != expected("uneven", requests, NEW_TOKENS)


def test_a_fleet_whose_agent_process_is_missing_serves_as_loaded() -> None:
    requests = spread(range(4), 2)
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        nobody = f"{directory}/no-agent.sock"
        with launch_ranks(
            fleet_config(
                directory,
                model="uneven",
                num_ranks=2,
                hook_sockets=(nobody, nobody),
                hook_options={"idle_after_s": 0.5},
                log_to_files=True,
            )
        ) as fleet:
            answers = serve(clients_of(fleet), requests, NEW_TOKENS)
            fleet.stop(timeout_s=WAIT_S)
        assert "Traceback" not in (Path(directory) / "rank-0.log").read_text()
    assert {i: answer.tokens for i, answer in answers.items()} == expected("uneven", requests, NEW_TOKENS)
    assert {generation for answer in answers.values() for generation in answer.generations} == {(0, 0)}


def test_variables_reach_the_ranks_that_they_are_meant_for() -> None:
    failpoints = {1: {"EPLB_FAILPOINTS": "never=exit:/never"}}
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        config = fleet_config(
            directory,
            model="uneven",
            num_ranks=2,
            environment={"EPLB_TEST_NAME": "all"},
            rank_environments=failpoints,
            hook_factory="tests.integration.reference_doubles:writes_environment",
        )
        with launch_ranks(config) as fleet:
            fleet.stop(timeout_s=WAIT_S)
        assert (Path(directory) / "environment-0").read_text() == "all None"
        assert (Path(directory) / "environment-1").read_text() == "all never=exit:/never"


def test_a_draining_rank_finishes_what_it_has_and_rejects_the_rest() -> None:
    with running_fleet(model="uneven", num_ranks=2) as fleet:
        clients = clients_of(fleet)
        clients[0].submit(request_id=1, prompt=b"before", max_new_tokens=NEW_TOKENS)
        clients[0].drain(timeout_s=WAIT_S)
        assert clients[0].inspect(timeout_s=WAIT_S).running == 0
        clients[0].submit(request_id=2, prompt=b"after", max_new_tokens=NEW_TOKENS)
        answers = {1: Answer(), 2: Answer()}
        while answers[2].rejected is None:
            messages = clients[0].receive(timeout_s=WAIT_S)
            assert messages
            for message in messages:
                collect(message, answers)
        assert len(answers[1].tokens) == NEW_TOKENS
        assert "draining" in answers[2].rejected.reason
        # The other rank goes on, and the drained one still computes its experts for it.
        requests = {3: (1, b"elsewhere")}
        assert serve(clients, requests, NEW_TOKENS)[3].tokens == expected("uneven", requests, NEW_TOKENS)[3]


def test_stop_with_cancel_ends_requests_under_way() -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        config = fleet_config(directory, model="uneven", num_ranks=2, queue_max=100, batch_max=1)
        with launch_ranks(config) as fleet:
            client = fleet.client(0)
            requests = range(60)
            for request_id in requests:
                client.submit(request_id=request_id, prompt=b"a long queue", max_new_tokens=50)
            answers = {request_id: Answer() for request_id in requests}
            while not answers[0].tokens:
                for message in client.receive(timeout_s=WAIT_S):
                    collect(message, answers)
            fleet.stop(timeout_s=WAIT_S, cancel=True)
            while any(answer.ended is None for answer in answers.values()):
                messages = client.receive(timeout_s=WAIT_S)
                assert messages
                for message in messages:
                    collect(message, answers)
    reasons = [answer.ended.reason for answer in answers.values() if answer.ended]
    assert len(reasons) == 60
    assert reasons.count(EndReason.CANCELLED) > 0


@pytest.mark.parametrize("busy", [False, True])
def test_when_a_rank_is_killed_the_others_end_and_say_why(*, busy: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        with launch_ranks(fleet_config(directory, model="uneven", num_ranks=3, queue_max=100)) as fleet:
            client = fleet.client(0)
            if busy:
                for request_id in range(100):
                    client.submit(request_id=request_id, prompt=b"a long run", max_new_tokens=50)
                assert client.receive(timeout_s=WAIT_S)
            fleet.processes[2].kill()
            for position in (0, 1):
                fleet.processes[position].join(WAIT_S)
                assert fleet.processes[position].exitcode == ExitCode.STEP_FAILED
                assert "gone" in fleet.reason(position)
        assert {process.exitcode for process in fleet.processes} == {ExitCode.STEP_FAILED, -signal.SIGKILL}


def collect_boundaries(client: RankClient, boundaries: list[int]) -> None:
    while arrived := client.receive(timeout_s=WAIT_S):
        boundaries += [message.boundary for message in arrived if isinstance(message, NewTokens)]


def test_a_rank_that_must_not_run_another_step_ends_with_its_reason() -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        config = fleet_config(
            directory, model="uneven", num_ranks=2, hook_factory="tests.integration.reference_doubles:unknown_outcome"
        )
        with launch_ranks(config) as fleet:
            client = fleet.client(0)
            client.submit(request_id=1, prompt=b"x", max_new_tokens=30)
            boundaries: list[int] = []
            with pytest.raises(EnvironmentFault, match="closed the connection"):
                collect_boundaries(client, boundaries)
            for process in fleet.processes:
                process.join(WAIT_S)
            assert [process.exitcode for process in fleet.processes] == [ExitCode.STEP_FAILED, ExitCode.FAIL_STOP]
            assert fleet.reason(1) == "rank-1: fail stop: the vote on chunk 0x100000002 timed out after 10 s"
            # Boundary 4 was never passed by the rank that stopped, so no step after it gave a token.
            assert boundaries == [0, 1, 2, 3]


LAUNCHER = """
import sys
from agent.engine.reference.launch import launch_ranks
from tests.integration.reference_fleet import fleet_config
if __name__ == "__main__":
    fleet = launch_ranks(fleet_config(sys.argv[1], model="uneven", num_ranks=2))
    print(*(process.pid for process in fleet.processes), flush=True)
    sys.stdin.read()
"""


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        launcher = subprocess.Popen(
            [sys.executable, str(script), directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert launcher.stdout
        ranks = [os.pidfd_open(int(pid)) for pid in launcher.stdout.readline().split()]
        launcher.kill()
        launcher.wait()
        assert len(ranks) == 2
        for rank in ranks:
            assert select.select([rank], [], [], WAIT_S)[0], "a rank outlived its launcher"
            os.close(rank)


@pytest.mark.parametrize(
    ("model", "slots", "sentence"),
    [
        ("nothing_of_this_name", 0, "has no 'nothing_of_this_name'"),
        (
            "uneven",
            4,
            "10 experts do not fit 2 ranks x 4 slots = 8; use at least 5 slots per rank",
        ),
        ("differs_by_process", 0, "give all ranks the same weights"),
    ],
)
def test_a_fleet_that_cannot_start_says_why_in_one_sentence(model: str, slots: int, sentence: str) -> None:
    with tempfile.TemporaryDirectory(prefix="eplb-") as directory:
        config = fleet_config(directory, model=model, num_ranks=2, slots_per_rank=slots)
        with pytest.raises(EnvironmentFault, match="ended with code 3") as caught:
            launch_ranks(config)
        assert sentence in str(caught.value)
