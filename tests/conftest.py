"""What all tests share."""

from __future__ import annotations

import os

import grpc.aio
from hypothesis import settings

# The same examples every time, so that what fails here fails everywhere; `HYPOTHESIS_PROFILE=explore` draws new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure() -> None:
    """Commands print as into a pipe, whatever terminal or worker the tests run in."""
    os.environ.pop("COLUMNS", None)
    # Kept for the life of the process: else the last client's end, in a garbage collection, waits for gRPC's poller thread.
    grpc.aio.init_grpc_aio()
