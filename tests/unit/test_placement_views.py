"""What people and programs are shown of placements with shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb_service.cli import placement as shown
from eplb_service.cli.output import to_plain
from eplb_service.ids import RankId
from eplb_service.moves import NO_MOVES
from eplb_service.placement import Placement, Table
from eplb_service.rpc.convert_placement import placement_to_pb, table_to_pb
from eplb_service.rpc.views import diff_view

ROWS = np.array([[0, 1, 1, 2], [2, 0, 1, -1]], np.int32)
TABLE = Table("m", (3, 5), 3, (RankId(4), RankId(9)), ROWS)
SHARES = np.array([[1, 0.25, 0.75, 1], [1, 1, 1, 0]], np.float32)


def changes_of(before: Table, after: Table) -> list[tuple[Any, ...]]:
    view = diff_view(Placement((before,)), Placement((after,)), NO_MOVES)
    return [
        (
            *(change.layer.layer_id, change.rank_id, change.slot, change.from_expert, change.to_expert),
            *(getattr(change, name) if change.HasField(name) else None for name in ("from_share", "to_share")),
        )
        for change in view.changes
    ]


def test_a_diff_names_slots_that_take_another_share_of_the_same_expert() -> None:
    assert changes_of(TABLE.with_even_shares(), TABLE.with_shares(SHARES)) == [
        (3, 4, 1, 1, 1, 0.5, 0.25),
        (3, 9, 0, 1, 1, 0.5, 0.75),
    ]


def test_a_diff_without_shares_names_experts_alone() -> None:
    other = TABLE.with_rows({3: np.array([0, 1, 2, 2])})
    assert changes_of(TABLE, other) == [(3, 9, 0, 1, 2, None, None)]
    assert changes_of(TABLE.with_shares(SHARES), other) == [(3, 9, 0, 1, 2, 0.75, None)]


def test_what_a_rebalance_changed_is_told_by_layer_and_rank_before_and_after_sglang_30624() -> None:
    random = np.random.default_rng(3)
    ranks = tuple(RankId(rank) for rank in (0, 2, 5))
    before, after = (
        Table("m", (3, 7), 4, ranks, np.array([random.permutation([0, 1, 2, 3, 0, 1]) for _ in range(2)], np.int32))
        for _ in range(2)
    )
    by_hand = [
        (layer, rank, slot, before.local_experts(layer, rank)[slot], after.local_experts(layer, rank)[slot], None, None)
        for layer in (3, 7)
        for rank in ranks
        for slot in range(2)
        if before.local_experts(layer, rank)[slot] != after.local_experts(layer, rank)[slot]
    ]
    assert len(by_hand) > 5
    assert changes_of(before, after) == by_hand
    assert changes_of(after, after) == []


def test_shares_are_shown_where_an_expert_has_other_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    shown._show_table(table_to_pb(TABLE.with_shares(SHARES)), 3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["3", "4", "0", "1*", "25%"] in rows
    assert ["9", "1*", "75%", "2"] in rows
    shown._show_table(table_to_pb(TABLE), 3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["3", "4", "0", "1*"] in rows


def test_one_layer_as_json_has_that_layer_s_shares_only() -> None:
    view = {"placement": to_plain(placement_to_pb(Placement((TABLE.with_shares(SHARES),))))}
    (table,) = shown._only_layer(view, 5)["placement"]["tables"]
    assert (table["layer_ids"], table["physical_to_logical"], table["shares"]) == ([5], [[2, 0, 1, -1]], [[1, 1, 1, 0]])
    view = {"placement": to_plain(placement_to_pb(Placement((TABLE,))))}
    assert shown._only_layer(view, 5)["placement"]["tables"][0]["shares"] is None
