"""What steps and rollouts cost, learned from samples whose truth is known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eplb_service.calibration import (
    SAMPLES_MAX,
    SAMPLES_MIN,
    Learned,
    LinkRates,
    NotUsable,
    StepSample,
    StepTimeModel,
    fit_step_times,
)
from eplb_service.flip_stall import Stalls

SLOPE, PER_TOKEN, BASE_S = 2e-6, 1e-6, 0.004


def samples(
    number: int,
    *,
    seed: int = 0,
    imbalance: tuple[float, float] = (1.0, 1.5),
    load: tuple[float, float] = (900.0, 1100.0),
    noise: float = 0.01,
    slope: float = SLOPE,
) -> list[StepSample]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        mean = random.uniform(*load)
        busiest = mean * random.uniform(*imbalance)
        seconds = (BASE_S + slope * busiest + PER_TOKEN * mean) * (1 + noise * random.normal())
        made.append(StepSample(float(seconds), float(busiest), float(mean)))
    return made


def usable(found: StepTimeModel | NotUsable) -> StepTimeModel:
    assert isinstance(found, StepTimeModel), str(found)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_cost_of_a_token_on_the_busiest_rank_is_told_from_that_of_a_token_once_imbalance_varies(seed: int) -> None:
    model = usable(fit_step_times(samples(64, seed=seed)))
    assert model.separated
    assert model.seconds_per_token == pytest.approx(SLOPE, abs=4 * model.error)
    assert model.error < 0.2 * SLOPE
    assert model.per_mean_token_s == pytest.approx(PER_TOKEN, abs=1e-6)
    assert model.predict(busiest=1300.0, mean=1000.0) == pytest.approx(BASE_S + SLOPE * 1300 + PER_TOKEN * 1000, rel=0.02)
    assert "R²" in str(model)
    assert "64 windows" in str(model)


def test_steady_imbalance_gives_a_cost_that_holds_all_that_a_token_costs_and_says_so() -> None:
    model = usable(fit_step_times(samples(64, imbalance=(1.4, 1.4), load=(500, 1500), noise=0.002)))
    assert not model.separated
    assert model.seconds_per_token == pytest.approx(SLOPE + PER_TOKEN / 1.4, rel=0.05)
    assert "what every token costs included" in str(model)


def test_imbalance_that_costs_nothing_is_found_out_however_well_step_times_follow_the_tokens() -> None:
    """Memory-bound decoding: the busiest rank takes no longer than the others."""
    found = fit_step_times(samples(128, slope=0.0, load=(500, 1500), noise=0.002))
    assert isinstance(found, NotUsable)
    assert "do not follow the load of the busiest ranks" in found.reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "of 0 windows are known, 12 are needed"),
        (samples(SAMPLES_MIN - 1), "of 11 windows are known"),
        (samples(50, imbalance=(1.2, 1.2), load=(1000, 1000)), "varied by 0.00% over 50 windows"),
        (samples(50, noise=3.0), "do not follow"),
        ([StepSample(0.0, 1.0, 1.0)] * 50, "of 0 windows"),
    ],
)
def test_what_cannot_be_priced_says_why(given: list[StepSample], words: str) -> None:
    found = fit_step_times(given)
    assert isinstance(found, NotUsable)
    assert words in str(found)


def test_windows_with_a_pause_in_them_do_not_bend_the_line() -> None:
    clean = samples(60, noise=0.005)
    paused = [StepSample(clean[at].seconds * 6, clean[at].busiest, clean[at].mean) for at in range(0, 60, 12)]
    bent = usable(fit_step_times([*clean, *paused]))
    assert bent.seconds_per_token == pytest.approx(SLOPE, rel=0.15)
    assert bent.intercept_s == pytest.approx(BASE_S, rel=0.3)


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    learned = Learned()
    for sample in samples(3 * SAMPLES_MAX):
        learned.step(sample)
    assert len(learned.steps) == SAMPLES_MAX
    for chunk in range(1000):
        learned.stalls.add(chunk, 0.1)
        learned.interference.add(0.5)
    assert len(learned.stalls.chunks) == learned.stalls.kept
    assert len(learned.interference.values) == learned.interference.kept


def test_rates_of_both_kinds_of_link_are_found_from_what_ranks_received() -> None:
    random, links = np.random.default_rng(1), LinkRates()
    assert links.rates() == (None, None)
    for _ in range(60):
        within, across = random.integers(1 << 20, 1 << 28, 2).tolist()
        links.add(same_node=within, cross_node=across, seconds=(within / 20e9 + across / 4e9) * random.uniform(0.95, 1.05))
    rates = links.rates()
    assert rates[0] == pytest.approx(20e9, rel=0.2)
    assert rates[1] == pytest.approx(4e9, rel=0.1)


def test_one_kind_of_link_is_measured_alone_and_the_other_stays_unknown() -> None:
    links = LinkRates()
    links.add(same_node=100, cross_node=0, seconds=1.0)
    assert links.rates() == (None, None)
    for _ in range(5):
        links.add(same_node=1 << 30, cross_node=0, seconds=0.1)
    assert links.rates()[0] == pytest.approx((1 << 30) / 0.1)
    assert links.rates()[1] is None
    across = LinkRates()
    across.add(same_node=0, cross_node=1 << 30, seconds=0.5)
    assert across.rates()[0] is None
    assert across.rates()[1] == pytest.approx((1 << 30) / 0.5)
    in_proportion = LinkRates()
    for _ in range(5):
        in_proportion.add(same_node=1 << 20, cross_node=1 << 20, seconds=0.001)
    assert in_proportion.rates()[0] == in_proportion.rates()[1] == pytest.approx((2 << 20) / 0.001)


def test_a_link_that_became_slower_is_believed_after_some_transfers() -> None:
    links = LinkRates()
    for rate in [10e9] * 50 + [1e9] * 100:
        links.add(same_node=1 << 28, cross_node=0, seconds=(1 << 28) / rate)
    assert links.rates()[0] == pytest.approx(1e9, rel=0.5)


def test_stall_of_a_chunk_is_that_of_its_slowest_rank() -> None:
    stalls = Stalls()
    assert stalls.mean_s() is None
    for chunk, seconds in ((1, 0.01), (1, 0.03), (1, 0.02), (2, 0.01), (2, float("nan"))):
        stalls.add(chunk, seconds)
    assert stalls.mean_s() == pytest.approx(0.02)


def test_interference_is_how_much_longer_steps_take_while_copies_run() -> None:
    learned = Learned()
    learned.step_while_copying(StepSample(0.02, 1200, 1000))
    assert learned.interference.mean() is None  # no model yet, so nothing to compare with
    for sample in samples(64, noise=0.001):
        learned.step(sample)
    expected = BASE_S + SLOPE * 1200 + PER_TOKEN * 1000
    for _ in range(3):
        learned.step_while_copying(StepSample(expected / 0.8, 1200, 1000))
    assert learned.interference.mean(3) == pytest.approx(0.2, abs=0.01)


def test_what_was_learned_survives_the_store_and_damage_is_told() -> None:
    learned = Learned()
    for sample in samples(20):
        learned.step(sample)
    learned.links.add(same_node=1 << 30, cross_node=1 << 20, seconds=0.5)
    learned.stalls.add(7, 0.01, 5 << 20)
    learned.stalls.add(8, 0.02)
    learned.interference.add(0.3)
    again = Learned.from_json(json.loads(json.dumps(learned.to_json())))
    assert again.to_json() == learned.to_json()
    assert str(again.model()) == str(learned.model())
    tree = learned.to_json()
    before = {name: value for name, value in tree.items() if name != "stall_bytes"}  # as earlier releases wrote it
    assert Learned.from_json(before).stalls.chunks == learned.stalls.chunks
    damage: list[dict[str, object]] = [
        {"steps": 3},
        {"steps": [[1, 2]]},
        {"links": [1.0]},
        {"stalls": []},
        {"stall_bytes": 3},
        {"stall_bytes": {"7": "x"}},
        {"interference": ["x"]},
    ]
    for bad in damage:
        with pytest.raises((ValueError, TypeError)):
            Learned.from_json(tree | bad)
