"""Experts leave no faster than allowed, and not while the engine reports pressure: in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.transfer.pace import POLL_S, Pacer, Pressure
from eplb_service.control import NO_THROTTLE, Throttle

ROUNDING = 1e-6


class Machine:
    """A worker in virtual time. Sending an expert takes a while; the engine is under pressure at given times."""

    def __init__(self, throttle: Throttle, *, deadline: float = 1e9, pressure: Sequence[tuple[float, float]] = ()) -> None:
        self.now = 0.0
        self.withdrawn_at = float("inf")
        asked: Callable[[], bool] = lambda: any(begin <= self.now < end for begin, end in pressure)  # noqa: E731
        self.pressure = Pressure(asked if pressure else None)
        self.pacer = Pacer(
            throttle,
            clock=lambda: self.now,
            wait=self.wait,
            deadline=deadline,
            pressure=self.pressure,
        )

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        self.now = min(self.now + seconds, max(self.withdrawn_at, self.now))
        return self.now >= self.withdrawn_at

    def send(self, experts: Sequence[tuple[int, float]]) -> list[float]:
        """(bytes, seconds that sending takes) of each; when each left."""
        left = []
        for num_bytes, seconds in experts:
            self.pacer.before_expert(num_bytes)
            left.append(self.now)
            self.now += seconds
        return left


EXPERTS = st.lists(st.tuples(st.integers(1, 1000), st.floats(0.0, 5.0)), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(EXPERTS, st.floats(1.0, 1e4))
def test_the_rate_holds_over_every_stretch_of_time(experts: list[tuple[int, float]], rate: float) -> None:
    left = Machine(Throttle(bytes_per_s=rate)).send(experts)
    for first in range(len(left)):
        for last in range(first, len(left)):
            since = left[first - 1] if first else 0.0
            sent = sum(num_bytes for num_bytes, _ in experts[first : last + 1])
            assert sent <= rate * (left[last] - since) * (1 + ROUNDING)


@settings(max_examples=50, deadline=None)
@given(EXPERTS, st.floats(1.0, 1e4))
def test_a_link_that_is_slower_than_the_rate_is_not_held_back_twice(experts: list[tuple[int, float]], rate: float) -> None:
    machine = Machine(Throttle(bytes_per_s=rate))
    machine.send(experts)
    slower = sum(max(num_bytes / rate, seconds) for num_bytes, seconds in experts)
    assert machine.now <= (slower + max(seconds for _, seconds in experts)) * (1 + ROUNDING)


@settings(max_examples=50, deadline=None)
@given(EXPERTS, st.floats(0.01, 1.0))
def test_no_more_of_its_time_is_spent_than_its_share(experts: list[tuple[int, float]], share: float) -> None:
    machine = Machine(Throttle(time_share=share))
    left = machine.send([*experts, (1, 0.0)])
    busy = sum(seconds for _, seconds in experts)
    assert busy == pytest.approx(share * left[-1], rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(EXPERTS, st.floats(1.0, 1e4), st.floats(0.01, 1.0))
def test_what_the_throttle_says_it_takes_is_never_exceeded(experts: list[tuple[int, float]], rate: float, share: float) -> None:
    throttle = Throttle(bytes_per_s=rate, time_share=share)
    machine = Machine(throttle)
    machine.send(experts)
    total, unthrottled_s = sum(num_bytes for num_bytes, _ in experts), sum(seconds for _, seconds in experts)
    assert machine.now <= throttle.seconds(total, unthrottled_s=unthrottled_s) * (1 + ROUNDING)


def test_without_a_throttle_nothing_waits() -> None:
    assert Machine(NO_THROTTLE).send([(1 << 40, 0.0), (1 << 40, 2.0), (1 << 40, 0.0)]) == [0.0, 0.0, 2.0]


def test_what_stays_on_the_rank_is_not_counted_against_the_rate() -> None:
    left = Machine(Throttle(bytes_per_s=10.0)).send([(10, 0.0), (0, 0.0), (0, 0.0), (10, 0.0)])
    assert left == [1.0, 1.0, 1.0, 2.0]


def test_under_pressure_nothing_leaves_until_it_is_over() -> None:
    machine = Machine(NO_THROTTLE, pressure=((1.0, 3.0), (7.0, 8.0)))
    left = machine.send([(1, 1.0), (1, 1.0), (1, 1.0)])
    assert left[0] == 0.0
    assert left[1:] == pytest.approx([3.0, 4.0], abs=2 * POLL_S)
    assert machine.pressure.pauses == 1
    assert machine.pressure.paused_s == pytest.approx(2.0, abs=2 * POLL_S)


def test_pressure_that_outlasts_the_chunk_ends_it_at_its_deadline_with_the_reason() -> None:
    machine = Machine(NO_THROTTLE, deadline=4.0, pressure=((1.0, 1e9),))
    with pytest.raises(RuntimeError, match=r"reported pressure for 3 s, until the deadline of the chunk"):
        machine.send([(1, 1.0), (1, 1.0)])
    assert machine.now == pytest.approx(4.0)
    assert machine.pressure.paused_s == pytest.approx(3.0)


def test_a_rate_that_the_deadline_does_not_allow_for_ends_the_chunk_there() -> None:
    machine = Machine(Throttle(bytes_per_s=1.0), deadline=2.5)
    with pytest.raises(RuntimeError, match="left experts over at the deadline"):
        machine.send([(1, 0.0)] * 3)
    assert machine.now == 2.5


@pytest.mark.parametrize("throttle", [Throttle(bytes_per_s=1.0), NO_THROTTLE])
def test_a_chunk_that_is_withdrawn_is_not_waited_for(throttle: Throttle) -> None:
    machine = Machine(throttle, pressure=() if throttle.bytes_per_s else ((0.0, 1e9),))
    machine.withdrawn_at = 0.5
    with pytest.raises(RuntimeError, match="withdrawn while it was held back"):
        machine.send([(100, 0.0)])
    assert machine.now == 0.5


def test_time_that_is_spent_waiting_for_others_asks_for_no_rest() -> None:
    machine = Machine(Throttle(time_share=0.5))
    machine.send([(1, 1.0)])
    machine.now += 100.0
    machine.pacer.waited()
    machine.now += 2.0
    assert machine.send([(1, 0.0)]) == [105.0]
