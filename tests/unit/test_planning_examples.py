"""The worked examples in the docstrings of the planning modules are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["dispatch", "imbalance", "moves", "placement", "policy.bounds", "topology", "costs", "noise", "validation"]
)
def test_worked_examples_are_true(name: str) -> None:
    module = importlib.import_module(f"eplb_service.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
