"""Every part of a whole fleet, killed, stopped and cut off in every phase of a chunk (`fault_matrix.table`).

In each case requests are served as the table says and every token equals the unbalanced model's, the chunk flips on all ranks
or on none, all route by one map, one more generation goes through, and nothing is left behind. A few lines in `make test`, on
one fleet; all of them in `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.fault_fleet import Fault, FaultFleet, Part, Phase
from tests.integration.fault_lines import four_ranks
from tests.integration.fault_matrix import Cell, table, try_cell

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

FEW = {
    (Part.STORE, Fault.KILL, Phase.STAGING),
    (Part.PLANNER, Fault.HOLD, Phase.ARMED),
    (Part.AGENT, Fault.CUT, Phase.FLIPPED),
    (Part.RANK, Fault.STOP, Phase.VOTING),
}
"""Each part and each fault once."""
LINES = {str(cell): cell for cell in table()}


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultFleet]:
    """Four ranks; started once, restarted where a line ends them."""
    with four_ranks(FaultFleet) as running:
        yield running


def try_it(fleet: FaultFleet, cell: Cell) -> None:
    if cell.part is Part.RANK and cell.fault is Fault.CUT and fleet.mesh is None:
        pytest.skip(f"ranks cannot have a network of their own here: {fleet.why_no_mesh}")
    try_cell(fleet, cell)


@pytest.mark.parametrize(
    "name", [name for name, cell in LINES.items() if (cell.part, cell.fault, cell.phase) in FEW and not cell.lasting]
)
def test_some_faults(fleet: FaultFleet, name: str) -> None:
    try_it(fleet, LINES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LINES)
def test_every_fault(fleet: FaultFleet, name: str) -> None:
    try_it(fleet, LINES[name])


def test_the_table_has_every_part_fault_and_phase() -> None:
    tried = {(cell.part, cell.fault, cell.phase) for cell in LINES.values()}
    missing = {(part, fault, phase) for part in Part for fault in Fault for phase in Phase} - tried
    assert {part for part, _, _ in FEW} == set(Part)
    assert {fault for _, fault, _ in FEW} == set(Fault)
    assert missing == {(Part.RANK, Fault.HOLD, phase) for phase in Phase}  # packets of ranks are dropped: that is its CUT
