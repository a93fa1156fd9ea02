"""The commit protocol, exhaustively, within bounds that take seconds; `python -m tests.model` goes further."""

from __future__ import annotations

import pytest

from tests.model.commit import Bounds, CommitModel, reached
from tests.model.explore import WrongStateError, explore
from tests.sim.mutations import MUTATIONS

BOUNDS = (
    Bounds(ranks=2, chunks=(1, 0), expiries=1, copy_failures=1, lost_votes=1),
    pytest.param(Bounds(ranks=2, chunks=(2, 0)), marks=pytest.mark.long),
    Bounds(ranks=3, chunks=(1, 0)),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_no_interleaving_breaks_an_invariant(bounds: Bounds, capsys: pytest.CaptureFixture[str]) -> None:
    model = CommitModel(bounds)
    found = explore(model.start(), model.steps, describe=reached)
    with capsys.disabled():
        print(f"\n{bounds}: {found}")
    assert found.is_complete
    assert found.ends["nothing flipped"] > 100
    for opened in range(1, bounds.chunks[0] + 1):
        assert any(f"{1 << 32 | opened:#x} flipped" in end for end in found.ends), "a chunk never flips anywhere"
    assert any("ended" in end for end in found.ends) == bool(bounds.lost_votes)


@pytest.mark.parametrize("rule", ["one id is enough", "disarmed during a vote", "flip when known", "one flip for all"])
def test_the_shortest_way_to_a_violation_is_found_once_a_rule_is_off(rule: str) -> None:
    model = CommitModel(Bounds(ranks=2, chunks=(1, 0)))
    with MUTATIONS[rule].patched(), pytest.raises(WrongStateError, match="the shortest way there") as found:
        explore(model.start(), model.steps)
    assert "planner 1 opens a chunk" in str(found.value)
