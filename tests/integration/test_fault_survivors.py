"""Ranks that are lost in every phase of a chunk, under a whole fleet that goes on without them (`fault_survivors.LOSSES`).

No token is wrong, no rank that is left starts again, experts that lived on the lost rank alone come back from the checkpoint,
and a rank that joins is given its share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.fault_lines import four_ranks
from tests.integration.fault_survivors import LOSSES, LosingFleet, Loss, try_loss

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[LosingFleet]:
    """Four ranks; one is lost and replaced in each case."""
    with four_ranks(LosingFleet) as running:
        yield running


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_every_loss(fleet: LosingFleet, loss: Loss) -> None:
    try_loss(fleet, loss)
