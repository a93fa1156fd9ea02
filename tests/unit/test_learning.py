"""What a deployment teaches its planner is kept over a restart, within bounds, and held against plans only while it applies."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eplb_service.calibration import StepSample
from eplb_service.errors import BrokenInvariantError
from eplb_service.flip_stall import ASSUMED, ChunkFlip
from eplb_service.gate import Verdict, VerdictCode
from eplb_service.horizon import Horizon, WindowSum
from eplb_service.placement import Placement
from eplb_service.planner import learning as module
from eplb_service.planner.learning import HELD_KEPT, PLANS_APART, PLANS_KEPT, Held, Learning
from eplb_service.validation import Bias
from tests.unit.gate_trials import LINEAR, Float64Array, popularity

LOADS = (popularity(1) * 1e6,)
PLACEMENT = Placement((LINEAR,))


def window(index: int, sources: Float64Array | None = None) -> WindowSum:
    return WindowSum(
        index=index,
        loads=LOADS,
        sources=(sources,),
        steps=32,
        live_digest=1,
        coverage=1.0,
        dispersion=1.0,
        step_s=0.0,
    )


def held(number: int, loads: tuple[Float64Array, ...] = LOADS, at_s: float = 100.0) -> Held:
    return Held(generation=number, reason="worse by imbalance", loads=loads, at_s=at_s)


def taught() -> Learning:
    learning = Learning(windows_kept=64)
    for step in range(20):
        learning.costs.step(StepSample(0.01 + step * 1e-4, 1000.0 + step * 10, 900.0))
    learning.costs.links.add(same_node=1 << 30, cross_node=0, seconds=0.1)
    learning.costs.stalls.add(5, 0.002)
    learning.bias = Bias(0.3, 0.2)
    learning.horizon = Horizon(steps=900.0, half_life_steps=None, shares=(1.0, 0.5), num_plans=2)
    learning.held.append(held(7))
    return learning


def test_what_flips_take_is_learned_by_their_bytes_and_survives_the_store() -> None:
    learning = Learning(windows_kept=64)
    assert learning.measured().stalls == ASSUMED
    for chunk, size in enumerate((10, 40, 100, 200, 400), start=1):
        flip = ChunkFlip(chunk_id=chunk, staged_bytes=size * 1_000_000, expected_s=1.0, measured_s=0.001 + size * 1e-5)
        learning.flipped(flip)
    found = learning.measured().stalls
    assert found.fixed_s == pytest.approx(0.001)
    assert found.seconds_per_byte == pytest.approx(1e-11)
    again = Learning(windows_kept=64)
    again.read_document(learning.to_document())
    assert again.measured().stalls == found


def test_everything_but_the_windows_survives_the_store() -> None:
    before, after = taught(), Learning(windows_kept=64)
    after.read_document(before.to_document())
    assert after.facts() == before.facts()
    assert after.measured() == before.measured()
    assert after.bias == before.bias
    assert [one.generation for one in after.held] == [7]
    assert np.allclose(after.held[0].loads[0], LOADS[0], rtol=1e-6)


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b"{}", b"\xff", json.dumps({"costs": {}, "bias": [], "horizon": None, "held": []}).encode()],
)
def test_a_document_that_is_damaged_changes_nothing(damage: bytes) -> None:
    learning = taught()
    facts = learning.facts()
    with pytest.raises(BrokenInvariantError, match="learned anew"):
        learning.read_document(damage)
    assert learning.facts() == facts


def why(learning: Learning, loads: tuple[Float64Array, ...], now_s: float = 200.0) -> str:
    return learning.why_held(loads, now_s=now_s, least_change=0.1, hold_s=1000.0)


def test_nothing_is_moved_under_the_load_of_a_generation_that_was_rolled_back_and_only_under_that() -> None:
    learning = Learning(windows_kept=64)
    assert why(learning, LOADS) == ""
    learning.held.append(held(3))
    assert "generation 3 was rolled back (worse by imbalance)" in why(learning, LOADS)
    assert why(learning, (popularity(2) * 1e6,)) == ""
    assert why(learning, LOADS)  # that load came back: the plan for it is as bad as it was
    assert why(learning, (np.zeros((2, 3)),)) == ""  # other layers than then
    assert why(learning, LOADS, now_s=1101.0) == ""
    assert not learning.held


def test_plans_that_are_followed_are_few_apart_and_those_that_are_carried_out_always_among_them() -> None:
    learning = Learning(windows_kept=64)
    move = Verdict(move=True, code=VerdictCode.MOVE, reason="", numbers={}, gain=0.1)
    learning.planned(move, PLACEMENT, PLACEMENT, moves=True)
    assert not learning.plans  # nothing to follow it on yet
    for index in range(40):
        learning.history.append(window(index))
        learning.planned(move, PLACEMENT, PLACEMENT, moves=index == 38)
    assert len(learning.plans) == PLANS_KEPT
    assert [plan.index for plan in learning.plans][-2:] == [36, 38]
    assert PLANS_APART == 4
    for code in (VerdictCode.WITHIN_NOISE, VerdictCode.GAIN_TOO_SMALL):
        learning.planned(Verdict(move=False, code=code, reason="", numbers={}, gain=0.1), PLACEMENT, PLACEMENT, moves=False)
    assert learning.plans[-1].index == 38
    learning.group_changed()
    assert not learning.plans
    assert not learning.history


def test_windows_that_are_kept_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = np.zeros((4, 4, 16))
    monkeypatch.setattr(module, "HISTORY_BYTES_MAX", 5 * (sources.nbytes + LOADS[0].nbytes))
    learning = Learning(windows_kept=64)
    for index in range(20):
        learning.history.append(window(index, sources))
        learning._bound_history()
    assert [one.index for one in learning.history] == [15, 16, 17, 18, 19]
    monkeypatch.setattr(module, "HISTORY_BYTES_MAX", 1)
    learning._bound_history()
    assert [one.index for one in learning.history] == [18, 19]
    for number in range(20):
        learning.held.append(held(number))
    assert len(learning.held) == HELD_KEPT
