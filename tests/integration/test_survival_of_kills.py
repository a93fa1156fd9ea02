"""`kill -9` of every part of the service at a named place of a rollout, under a fleet that serves.

In each case tokens go on arriving while the part is down and equal the oracle's, the supervisor restarts the part, the rollout
ends with all chunks or with a reason, the invariants hold, and one more rebalance goes through. Processes stand still at
`hold` failpoints, so that the kill hits the state that the test names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eplb_service.cli.generations import state_text
from tests.integration.whole_fleet import WholeFleet, held, is_alive, kill_now

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(300)]
TOKENS = 60


@pytest.fixture(scope="module")
def fleet() -> Iterator[WholeFleet]:
    """Four ranks, started once for all cases."""
    options = {"reconnect_max_s": 0.2, "pulse_period_s": 0.3}
    with WholeFleet(rank_ids=(0, 1, 2, 3), in_flight=2, hook_options=options) as running:
        running.start_service()
        yield running
        running.stop_ranks()


@pytest.fixture(autouse=True)
def _as_loaded(fleet: WholeFleet) -> None:
    """Every case begins with the placement of the engine's start and everything in order."""
    fleet.until_ready()
    fleet.back_to_loaded()


def finished_or_dropped_with_a_reason(view: Any) -> str:
    """State of a generation whose rollout is over."""
    state = state_text(view.state)
    assert state in ("active", "superseded") or (state == "stopped" and view.stop_reason), view
    return state


def no_layer_is_routed_by(number: int, fleet: WholeFleet) -> None:
    """One rank is armed and the others are not: no vote passes."""
    routed_by = {layer.generation for inspection in fleet.serving.inspect() for layer in inspection.layers}
    assert number not in routed_by, f"layers flipped to generation {number} with one rank armed"


def test_planner_killed_while_a_later_chunk_is_staging(fleet: WholeFleet) -> None:
    """Some layers are routed by the new generation, some by the old one: the new leader must carry on from there."""
    epoch = fleet.status().epoch
    with held(fleet.staging) as staging, held(fleet.arming) as arming:
        number = fleet.rebalance()
        fleet.until(lambda: staging.reached, "a rank to begin staging")
        staging.open()
        fleet.until(lambda: arming.reached, "the agent process to have armed the first rank")
        staging.shut()
        arming.open()
        fleet.until(lambda: staging.reached, "a rank to begin staging the next chunk")
        fleet.kill(fleet.planner)
        fleet.serve_tokens(TOKENS)
        assert not is_alive(fleet.planner.pid)
        assert [layer.generation == number for layer in fleet.serving.inspect()[0].layers].count(True) == 1
        fleet.bring_back(fleet.planner)
    finished_or_dropped_with_a_reason(fleet.until_over(number))
    assert fleet.status().epoch > epoch
    fleet.settle()
    fleet.prove_life()


def test_planner_killed_while_armed(fleet: WholeFleet) -> None:
    epoch = fleet.status().epoch
    with held(fleet.arming) as hold:
        number = fleet.rebalance()
        fleet.until(lambda: hold.reached, "the agent process to have armed the first rank")
        fleet.kill(fleet.planner)
        fleet.serve_tokens(TOKENS)
        assert not is_alive(fleet.planner.pid)
        no_layer_is_routed_by(number, fleet)
        fleet.bring_back(fleet.planner)
    finished_or_dropped_with_a_reason(fleet.until_over(number))
    assert fleet.status().epoch > epoch
    fleet.settle()
    fleet.prove_life()


def test_store_killed_while_a_rollout_is_under_way(fleet: WholeFleet) -> None:
    restarts = fleet.planner.restarts
    with held(fleet.staging) as hold:
        number = fleet.rebalance()
        fleet.until(lambda: hold.reached, "a rank to begin staging")
        killed = fleet.store_pid()
        kill_now(killed)
        fleet.serve_tokens(TOKENS)
    fleet.until(lambda: fleet.store_pid() not in (0, killed), "the planner to start its store again")
    assert finished_or_dropped_with_a_reason(fleet.until_over(number)) == "active"
    assert fleet.planner.restarts == restarts
    fleet.settle()
    fleet.prove_life()


def test_store_killed_while_nothing_is_rolled_out(fleet: WholeFleet) -> None:
    restarts = fleet.planner.restarts
    killed = fleet.store_pid()
    kill_now(killed)
    fleet.serve_tokens(TOKENS)
    fleet.until(lambda: fleet.store_pid() not in (0, killed), "the planner to start its store again")
    fleet.until_ready()
    assert fleet.planner.restarts == restarts
    fleet.settle()
    fleet.prove_life()


def test_agent_process_killed_while_a_chunk_is_staging(fleet: WholeFleet) -> None:
    with held(fleet.staging) as hold:
        number = fleet.rebalance()
        fleet.until(lambda: hold.reached, "a rank to begin staging")
        fleet.kill(fleet.agent)
        fleet.serve_tokens(TOKENS)
        assert not is_alive(fleet.agent.pid)
        fleet.bring_back(fleet.agent)
    finished_or_dropped_with_a_reason(fleet.until_over(number))
    fleet.settle()
    fleet.prove_life()


def test_agent_process_killed_while_armed(fleet: WholeFleet) -> None:
    with held(fleet.arming) as hold:
        number = fleet.rebalance()
        fleet.until(lambda: hold.reached, "the agent process to have armed the first rank")
        fleet.kill(fleet.agent)
        fleet.serve_tokens(TOKENS)
        assert not is_alive(fleet.agent.pid)
        no_layer_is_routed_by(number, fleet)
    fleet.bring_back(fleet.agent)
    finished_or_dropped_with_a_reason(fleet.until_over(number))
    fleet.settle()
    fleet.prove_life()
