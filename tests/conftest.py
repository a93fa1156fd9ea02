"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples every time, so that what fails here fails everywhere; `HYPOTHESIS_PROFILE=explore` draws new ones.
settings.register_profile("steady")
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure() -> None:
    """Commands print as into a pipe, whatever terminal or worker the tests run in."""
    os.environ.pop("COLUMNS", None)
