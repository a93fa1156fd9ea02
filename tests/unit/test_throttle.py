"""A throttle slows copies down; it never makes the planner give them up, nor moves look dearer than they are."""

from __future__ import annotations

import dataclasses

import pytest

from eplb_service.control import Throttle
from eplb_service.costs import CostModel, GivenCosts, MeasuredCosts, MovePrice, cost_model, price
from eplb_service.moves import MoveSummary
from eplb_service.rollout.events import Persist, Persisted, RolloutSettings, RolloutState, Start, Tick
from eplb_service.topology import LinkKind
from tests.unit.test_rollout import SETTINGS, Script, generation, idle, of, placement, sent

TARGET = placement((0, 1, 2, 0, 1, 0))
"""Expert 0 is new on the last rank."""
SLOW = Throttle(bytes_per_s=0.5, time_share=0.25)


def staging(settings: RolloutSettings) -> Script:
    script = idle(settings)
    (persist,) = of(script.do(Start(generation(1, TARGET))), Persist)
    script.do(Persisted(persist.token))
    return script


def test_every_rank_is_told_the_throttle_and_has_the_time_that_it_takes() -> None:
    script = staging(dataclasses.replace(SETTINGS, throttle=SLOW))
    # One expert of 10 bytes at half a byte a second, and 10 s at full speed in a quarter of the time.
    assert {(stage.throttle, stage.stage_timeout_s) for stage in script.stages()} == {(SLOW, 20.0 + 40.0)}
    script.now += 60.0
    script.do(Tick())
    script.expect(RolloutState.STAGING)
    script.hear(*script.staged())
    script.expect(RolloutState.ARMED)


def test_a_throttled_chunk_that_is_later_than_that_is_withdrawn() -> None:
    script = staging(dataclasses.replace(SETTINGS, throttle=SLOW))
    script.wait()
    assert script.now == 60.0 + SETTINGS.answer_slack_s
    assert [kind for kind, _ in sent(script.last)] == ["Disarm"] * 3


def test_without_a_throttle_the_time_is_the_one_that_was_set() -> None:
    assert {stage.stage_timeout_s for stage in staging(SETTINGS).stages()} == {SETTINGS.stage_timeout_s}


MOVES = MoveSummary(
    experts=4,
    slots_rewritten=4,
    layers=1,
    bytes_by_link={LinkKind.SAME_RANK: 0, LinkKind.SAME_NODE: 1 << 30, LinkKind.CROSS_NODE: 1 << 30},
    bytes_without_source=0,
    bytes_into_busiest_rank=1 << 30,
)


def priced(given: GivenCosts, measured: MeasuredCosts) -> tuple[CostModel, MovePrice]:
    cost = cost_model(given, measured, tokens_per_step=1.0, steps_planned_from=10.0)
    assert cost is not None
    return cost, price(cost, [MOVES], num_flips=1)


@pytest.mark.parametrize(
    "throttle", [Throttle(bytes_per_s=1e8), Throttle(time_share=0.2), Throttle(bytes_per_s=1e8, time_share=0.2)]
)
def test_an_unmeasured_copy_lasts_longer_under_a_throttle_and_costs_the_same(throttle: Throttle) -> None:
    measured = MeasuredCosts(seconds_per_token=1e-6)
    _, free = priced(GivenCosts(), measured)
    cost, held = priced(GivenCosts(throttle=throttle), measured)
    slower = (1e9 / throttle.bytes_per_s if throttle.bytes_per_s else 1.0) / throttle.time_share
    assert held.copy_s == pytest.approx(free.copy_s * slower)
    assert held.interference_s == pytest.approx(free.interference_s)
    assert cost.copy_interference == pytest.approx(1 / slower)


def test_what_was_measured_under_the_throttle_is_not_slowed_again() -> None:
    measured = MeasuredCosts(seconds_per_token=1e-6, bytes_per_s=3e8, cross_node_bytes_per_s=2e8, copy_interference=0.1)
    assert priced(GivenCosts(throttle=Throttle(bytes_per_s=1e8)), measured) == priced(GivenCosts(), measured)
