"""What all tests share."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    """Commands print as into a pipe, whatever terminal or worker the tests run in."""
    os.environ.pop("COLUMNS", None)
