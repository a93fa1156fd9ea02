"""The commit protocol, exhaustively, within bounds that take seconds; `python -m tests.model` goes further."""

from __future__ import annotations

import pytest

from tests.model.commit import CommitModel
from tests.model.explore import WrongStateError, explore
from tests.model.states import Bounds, State, machine_key, reached
from tests.sim.mutations import MUTATIONS

BOUNDS = (
    Bounds(ranks=2, chunks=(1, 0), expiries=1, copy_failures=1, lost_votes=1),
    Bounds(ranks=2, chunks=(2, 0)),
    Bounds(ranks=3, chunks=(1, 0)),
    Bounds(ranks=2, chunks=(1, 1)),
    pytest.param(Bounds(ranks=2, chunks=(1, 1), expiries=1, copy_failures=1, lost_votes=1), marks=pytest.mark.long),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_no_interleaving_breaks_an_invariant(bounds: Bounds, capsys: pytest.CaptureFixture[str]) -> None:
    model = CommitModel(bounds)
    found = explore(model.start(), model.steps, split=model.split, describe=reached)
    with capsys.disabled():
        print(f"\n{bounds}: {found}")
    assert found.is_complete
    assert found.ends["nothing flipped"] > 100
    for epoch, most in enumerate(bounds.chunks, 1):
        for opened in range(1, most + 1):
            assert any(f"{epoch << 32 | opened:#x}" in end for end in found.ends), "a chunk never flips anywhere"
    assert any("ended" in end for end in found.ends) == bool(bounds.lost_votes)


@pytest.mark.parametrize("rule", ["one id is enough", "disarmed during a vote", "flip when known", "one flip for all"])
def test_the_shortest_way_to_a_violation_is_found_once_a_rule_is_off(rule: str) -> None:
    model = CommitModel(Bounds(ranks=2, chunks=(1, 0)), is_plain=True)
    with MUTATIONS[rule].patched(), pytest.raises(WrongStateError, match="the shortest way there") as found:
        explore(model.start(), model.steps)
    assert "planner 1 opens a chunk" in str(found.value)


@pytest.mark.parametrize(
    "rule",
    [
        "first reply counts",
        "no tombstone",
        "obeys older epochs",
        "replies with an open chunk",
        "silence is a withdrawal",
        "unknown is no",
    ],
)
def test_a_violation_is_found_where_a_leader_takes_over_once_a_rule_is_off(rule: str) -> None:
    model = CommitModel(Bounds(ranks=2, chunks=(1, 1), lost_votes=int(rule == "unknown is no")))
    with MUTATIONS[rule].patched(), pytest.raises(WrongStateError):
        explore(model.start(), model.steps, split=model.split)


@pytest.mark.parametrize(
    "bounds", [Bounds(ranks=2, chunks=(1, 0), expiries=1, copy_failures=1, lost_votes=1), BOUNDS[1]], ids=str
)
def test_what_is_not_told_apart_leaves_nothing_out(bounds: Bounds) -> None:
    """Where ranks can stand together, with and without all that makes the search smaller."""
    reached_by = []
    for is_plain in (True, False):
        model = CommitModel(bounds, is_plain=is_plain)
        seen: set[object] = set()

        def note(state: State, model: CommitModel = model, seen: set[object] = seen) -> str:
            seen.add(tuple((machine_key(model.machine(rank)), *rank[1:6]) for rank in state.ranks))
            return ""

        explore(model.start(), model.steps, split=model.split, describe=note)
        reached_by.append(seen)
    assert reached_by[0] == reached_by[1]
    assert len(reached_by[0]) > 300
