"""Every scenario holds, and shows its violation once a rule that it names is off."""

from __future__ import annotations

import pytest

from tests.scenarios.script import Scenario, scenarios
from tests.sim.mutations import MUTATIONS
from tests.sim.world import ViolationError

SCENARIOS = list(scenarios())
OFF = [(scenario, rule) for scenario in SCENARIOS for rule in scenario.without]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    scenario.run()


@pytest.mark.parametrize(("scenario", "rule"), OFF, ids=[f"{scenario.name}: {rule}" for scenario, rule in OFF])
def test_scenario_shows_the_violation_once_the_rule_is_off(scenario: Scenario, rule: str) -> None:
    with MUTATIONS[rule].patched(), pytest.raises(ViolationError) as violation:
        scenario.run(expecting=False)
    assert violation.value.__cause__ is None


def test_every_rule_has_a_scenario_that_shows_what_it_prevents() -> None:
    assert {rule for _, rule in OFF} == set(MUTATIONS)
