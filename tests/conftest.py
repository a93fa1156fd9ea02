"""What all tests share: the width of output, and which of them may run beside one another (`make unit`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROCESSES = Path(__file__).parent / "integration"


def pytest_configure() -> None:
    """Commands print as into a pipe, whatever terminal or worker the tests run in."""
    os.environ.pop("COLUMNS", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fleets of processes run one after another, so that only one at a time wants all cores; the rest goes file by file."""
    for item in items:
        group = "processes" if item.path.is_relative_to(PROCESSES) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
