"""The loop with real parts: a fleet serves before anyone watches it, its counts arrive, and an operator rebalances it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from agent.engine.reference.messages import Ended, Inspection
from eplb_service.cli.generations import state_text
from eplb_service.dispatch import Dispatch, rank_loads
from eplb_service.ids import RankId
from eplb_service.imbalance import Float64Array
from eplb_service.placement import Table
from eplb_service.rpc.arrays import array_from_pb
from eplb_service.topology import Topology
from tests.integration.whole_fleet import WAIT_S, WholeFleet

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
RANK_IDS = (4, 5, 6, 7)  # stable ids need not begin at 0: vllm-ascend#10486
WINDOW_STEPS = 64
EXPERTS = 32


@pytest.fixture(scope="module")
def fleet() -> Iterator[WholeFleet]:
    """Four ranks that have served without planner and agent process, which then appeared."""
    options = {"reconnect_max_s": 0.2, "pulse_period_s": 0.3}
    slots = EXPERTS // 3 + 1  # three ranks hold every expert: one can be drained
    with WholeFleet(
        rank_ids=RANK_IDS, in_flight=2, window_steps=WINDOW_STEPS, hook_options=options, slots_per_rank=slots
    ) as running:
        running.serve_tokens(150)
        running.settle()
        running.tokens_before_service = running.serving.tokens
        running.start_service()
        yield running
        running.stop_ranks()


def test_hooks_without_agent_process_serve_and_link_up_when_one_appears(fleet: WholeFleet) -> None:
    assert fleet.tokens_before_service >= 150  # compared with the oracle before anything was started
    status = fleet.status()
    assert [rank.address.rank_id for rank in status.ranks] == list(RANK_IDS)
    assert all(rank.voting and rank.state == "live" and rank.windows_dropped == 0 for rank in status.ranks)
    fleet.serve_tokens(50)
    fleet.until(lambda: (fleet.status().windows_accepted or 0) > 0, "a window to be accepted")
    fleet.settle()


def test_counts_that_reach_the_planner_are_the_engine_s_own(fleet: WholeFleet) -> None:
    fleet.settle()
    before = step_to_the_end_of_a_window(fleet)
    fleet.turn()
    fleet.settle()
    after = step_to_the_end_of_a_window(fleet)
    assert {i.boundary for i in after} == {before[0].boundary + WINDOW_STEPS}, "the requests did not fit one window"
    generate(fleet, 1)  # the step after the window closes it
    index = before[0].boundary // WINDOW_STEPS
    fleet.until(lambda: (status := fleet.status()) is not None and status.window_index == index, f"window {index}")
    status = fleet.status()
    assert status.window_coverage == 1.0
    tokens = sum(i.real_tokens for i in after) - sum(i.real_tokens for i in before)
    assert tokens > 100
    assert status.window_tokens == tokens
    loads = loads_of(after) - loads_of(before)
    assert np.array_equal(loads.sum(axis=1), np.full(len(loads), 4 * tokens))  # the model chooses 4 experts for each token
    told = array_from_pb(status.rank_loads, "rank_loads", dtypes="f", shape=("layers", "ranks"))
    topology = Topology(fleet.ranks.config.rank_ids, fleet.ranks.config.nodes)
    assert np.allclose(told, rank_loads(loads, table_of(after), topology, Dispatch.EVEN), rtol=1e-6)


def test_operator_rebalances_with_the_command_and_tokens_change_placement_at_the_recorded_steps(fleet: WholeFleet) -> None:
    fleet.back_to_loaded()
    fleet.serve_tokens(100)
    fleet.until(lambda: (status := fleet.status()) is not None and status.window_tokens > 0, "a window to plan from")
    known = len(fleet.served)
    answer = command("rebalance", "--planner", fleet.address, "--force", "--output", "json")
    number = int(str(answer["generation"]))
    view = fleet.until_over(number)
    assert state_text(view.state) == "active"
    fleet.serve_tokens(100)
    routed = {generation for held in fleet.settle() for generation in held.generations}
    assert routed == {number}
    assert changes_of(fleet, known) <= set(view.flip_boundaries)
    assert changes_of(fleet, known)
    shown = command("status", "--planner", fleet.address, "--output", "json")
    assert str(number) in json.dumps(shown)
    assert "wrong_generation" not in fleet.status().windows_refused


def test_a_drained_rank_serves_on_without_experts_until_it_is_given_back_dynamo_13580(fleet: WholeFleet) -> None:
    """The engine with a rank whose slots are all empty: it computes nothing for others, and every token is as it was."""
    rank, position = RANK_IDS[2], 2
    known = len(fleet.served)
    answer = command("drain", str(rank), "--planner", fleet.address, "--output", "json")
    fleet.until(lambda: drain_states(fleet) == ["safe_to_stop"], f"rank {rank} to be empty")
    fleet.until_over(int(str(answer["generation"])))
    fleet.settle()
    before = fleet.serving.inspect()
    fleet.serve_tokens(150)
    fleet.settle()
    after = fleet.serving.inspect()
    assert len(fleet.served) > known  # each was compared with the oracle
    slots = len(after[0].layers[0].row) // len(RANK_IDS)
    own = slice(position * slots, (position + 1) * slots)
    assert {expert for held in after for layer in held.layers for expert in layer.row[own]} == {-1}
    for first, last in zip(before, after, strict=True):
        for layer_before, layer_after in zip(first.layers, last.layers, strict=True):
            sent = np.array(layer_after.sent) - np.array(layer_before.sent)
            assert sent.sum() > 0  # the drained rank, too, sends its own tokens
            assert sent[own].sum() == 0
    command("undrain", str(rank), "--planner", fleet.address, "--output", "json")
    assert drain_states(fleet) == []


def drain_states(fleet: WholeFleet) -> list[str]:
    """How far each drained rank is."""
    status = fleet.status()
    return [str(one.state) for one in status.drains] if status is not None else []


def command(*arguments: str) -> dict[str, object]:
    """What `eplb` prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "eplb_service", *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def generate(fleet: WholeFleet, count: int) -> None:
    """One request of one byte on the first rank: `count` steps of one token."""
    with fleet.ranks.client(0) as client:
        client.submit(request_id=next(fleet.spare_request_ids), prompt=b"d", max_new_tokens=count)
        fleet.until(lambda: any(isinstance(m, Ended) for m in client.receive(timeout_s=0.0)), f"{count} tokens of one request")


def step_to_the_end_of_a_window(fleet: WholeFleet) -> Sequence[Inspection]:
    """Step the idle engine to the next multiple of the window's length; what the ranks hold there, idle again."""
    fleet.serving.accepting = False
    missing = -fleet.serving.inspect()[0].boundary % WINDOW_STEPS
    if missing:
        generate(fleet, missing)
    inspections = fleet.serving.inspect()
    assert {inspection.boundary % WINDOW_STEPS for inspection in inspections} == {0}
    fleet.serving.accepting = True
    return inspections


def loads_of(inspections: Sequence[Inspection]) -> Float64Array:
    """What all ranks sent to each expert since the start. Shape (L, E)."""
    loads = np.zeros((len(inspections[0].layers), EXPERTS))
    for inspection in inspections:
        for index, layer in enumerate(inspection.layers):
            row = np.array(layer.row)
            np.add.at(loads[index], row[row >= 0], np.array(layer.sent, np.float64)[row >= 0])
    return loads


def table_of(inspections: Sequence[Inspection]) -> Table:
    layers = inspections[0].layers
    rows = np.array([layer.row for layer in layers], np.int32)
    return Table("target", tuple(layer.layer_id for layer in layers), EXPERTS, tuple(map(RankId, RANK_IDS)), rows)


def changes_of(fleet: WholeFleet, first: int) -> set[int]:
    """Steps at which the requests from the `first`-th on were routed by other generations than at the step before."""
    routed_by = {
        boundary: generations
        for request in fleet.served[first:]
        for boundary, generations in zip(request.boundaries, request.generations, strict=True)
    }
    return {b for a, b in itertools.pairwise(sorted(routed_by)) if routed_by[a] != routed_by[b]}
