"""What flips take, learned from flips whose truth is known, and what chunks may hold so that they end in time."""

from __future__ import annotations

import random

import pytest

from eplb_service.flip_stall import (
    ASSUMED,
    ASSUMED_FLIP_BYTES_PER_S,
    FLIP_BYTES_MIN,
    FlipStall,
    StallModel,
    Stalls,
    fit_stalls,
    flip_bytes_max,
)

MB = 1_000_000
FIXED_S, PER_BYTE = 0.0004, 1e-12


def flips(
    number: int, *, seed: int = 0, noise: float = 0.02, sizes: tuple[int, int] = (20 * MB, 800 * MB)
) -> list[tuple[int, float]]:
    drawn = random.Random(seed)
    made = []
    for _ in range(number):
        size = drawn.randint(*sizes)
        made.append((size, (FIXED_S + PER_BYTE * size) * (1 + noise * drawn.gauss(0, 1))))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_the_fixed_part_is_told_from_what_bytes_take_once_chunks_differ_in_size(seed: int) -> None:
    model = fit_stalls(flips(32, seed=seed))
    assert model.fixed_s == pytest.approx(FIXED_S, rel=0.2)
    assert model.seconds_per_byte == pytest.approx(PER_BYTE, rel=0.2)
    assert model.num_flips == 32
    assert "over 32 flips" in str(model)


def test_a_pause_that_falls_into_some_flips_does_not_bend_the_line() -> None:
    paused = [(size, seconds + (0.5 if index % 5 == 0 else 0.0)) for index, (size, seconds) in enumerate(flips(30))]
    assert fit_stalls(paused).seconds(400 * MB) == pytest.approx(FIXED_S + PER_BYTE * 400 * MB, rel=0.2)


@pytest.mark.parametrize("limit_s", [0.0006, 0.001])
def test_the_largest_flip_that_is_allowed_stays_within_the_limit(limit_s: float) -> None:
    model = fit_stalls(flips(32))
    allowed = model.bytes_within(limit_s)
    assert FIXED_S + PER_BYTE * allowed <= limit_s
    assert FIXED_S + PER_BYTE * allowed >= 0.8 * limit_s


def test_flips_of_one_size_are_put_down_to_their_bytes_so_that_a_larger_one_is_not_thought_faster_than_it_is() -> None:
    same = [(100 * MB, FIXED_S + PER_BYTE * 100 * MB)] * 8
    model = fit_stalls(same)
    assert model.fixed_s == 0.0
    assert model.error_s < 1e-9
    assert model.seconds(100 * MB) == pytest.approx(same[0][1])
    assert model.seconds(500 * MB) >= FIXED_S + PER_BYTE * 500 * MB


def test_flips_of_few_bytes_say_nothing_of_what_a_byte_takes() -> None:
    model = fit_stalls([(FLIP_BYTES_MIN // 4, 0.002), (FLIP_BYTES_MIN // 8, 0.004), (0, 0.003)] * 3)
    assert model.fixed_s == 0.003
    assert model.seconds_per_byte == 1 / ASSUMED_FLIP_BYTES_PER_S


def test_stalls_that_do_not_grow_with_their_bytes_are_not_read_as_a_rate_below_nothing() -> None:
    model = fit_stalls([(size * MB, 0.003) for size in (10, 50, 100, 200, 400)])
    assert model.seconds_per_byte > 0
    assert model.fixed_s >= 0
    assert model.seconds(400 * MB) >= 0.003


def test_before_any_flip_a_careful_rate_is_assumed_and_said() -> None:
    assert fit_stalls([]) == ASSUMED
    assert ASSUMED.bytes_within(0.01) == 100 * MB
    assert "assumed" in str(ASSUMED)


def test_where_a_flip_takes_the_whole_limit_by_itself_chunks_are_not_cut_to_nothing() -> None:
    slow = StallModel(fixed_s=0.02, seconds_per_byte=1e-10)
    assert slow.bytes_within(0.01) == 10 * MB  # a tenth of the limit is left to the bytes
    assert slow.seconds(slow.bytes_within(0.01)) == pytest.approx(0.021)


def test_no_limit_is_none() -> None:
    assert flip_bytes_max(ASSUMED, None) is None
    assert flip_bytes_max(ASSUMED, 0.001) == 10 * MB


def test_flips_are_kept_with_their_bytes_by_chunk_and_the_oldest_go() -> None:
    stalls = Stalls(kept=3)
    for chunk in range(5):
        stalls.add(chunk, 0.001)  # a rank told
        stalls.add(chunk, 0.002 * (chunk + 1), staged_bytes=(chunk + 1) * 10 * MB)  # all did
    stalls.add(4, float("nan"), staged_bytes=1)
    assert stalls.chunks == pytest.approx({2: 0.006, 3: 0.008, 4: 0.01})
    assert stalls.staged_bytes == {2: 30 * MB, 3: 40 * MB, 4: 50 * MB}
    assert stalls.model().seconds(100 * MB) == pytest.approx(0.02)


def test_what_a_generation_says_of_its_longest_flip() -> None:
    planned = FlipStall(expected_s=0.0123, limit_s=0.01)
    assert planned.over_s == pytest.approx(0.0023)
    assert str(planned) == "12.3 ms expected: 2.3 ms over the limit of 10 ms, as a layer is not cut"
    within = FlipStall(expected_s=0.002, limit_s=0.01, measured_s=0.0031)
    assert str(within) == "3.1 ms, 2 ms expected, limit 10 ms"
    assert str(FlipStall(expected_s=0.002)) == "2 ms expected"
    assert planned.followed_by(within) == FlipStall(expected_s=0.0123, limit_s=0.01, measured_s=0.0031)
