"""Shares of an expert's tokens that its replicas take: what a table may say, and what they are part of."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.errors import InvalidInputError
from eplb_service.generation import as_loaded
from eplb_service.ids import GenerationNumber, LayerRef, RankId
from eplb_service.placement import Placement, Table, logical_to_physical, row_digest
from eplb_service.replica_shares import even_shares, replica_shares

RANKS = (RankId(0), RankId(1))
ROWS = np.array([[0, 1, 1, 2], [2, 0, 1, 0]], np.int32)
SHARES = np.array([[1, 0.25, 0.75, 1], [1, 0.5, 1, 0.5]], np.float32)


def table(shares: object = SHARES, rows: object = ROWS) -> Table:
    return Table("m", (3, 5), 3, RANKS, np.array(rows, np.int32), shares)  # type: ignore[arg-type]


def test_digests_without_shares_are_those_of_stores_and_ranks_that_know_none() -> None:
    """Written down when placements had no shares."""
    row = np.array([0, 1, 1, -1], np.int32)
    assert row_digest(LayerRef("m", 3), row) == 7044960943334821115
    assert Placement((Table("m", (3,), 2, RANKS, row[None]),)).digest() == "2f763c8278ed724584073804f4bf9ed1"


def test_shares_are_part_of_every_digest_and_of_equality() -> None:
    other = SHARES.copy()
    other[1, 1], other[1, 3] = np.nextafter(np.float32(0.5), np.float32(1)), np.float32(0.5)
    tables = [table(None), table(), table(other)]
    assert len({Placement((each,)).digest() for each in tables}) == 3
    assert len(set(tables)) == 3
    assert table() == table()
    assert hash(table()) == hash(table())
    before, after = (Placement((each,)).row_digests() for each in tables[1:])
    assert [layer for layer in before if before[layer] != after[layer]] == [LayerRef("m", 5)]


def test_shares_are_copied_cannot_be_written_and_negative_zero_is_zero() -> None:
    given_shares = np.array([[1.0, -0.0, 1.0, 1.0], SHARES[1]], np.float64)
    made = table(given_shares)
    given_shares[0, 0] = 7
    assert made.shares is not None
    assert made.shares.dtype == np.float32
    assert made.shares[0, 0] == 1
    assert made == table(np.array([[1, 0, 1, 1], SHARES[1]], np.float32))
    with pytest.raises(ValueError, match="read-only"):
        made.shares[0, 0] = 0


@pytest.mark.parametrize(
    ("rows", "shares", "message"),
    [
        (ROWS, SHARES[:1], "shape (layers, slots) = (2, 4); got float32 of shape (1, 4)"),
        (ROWS, np.ones((2, 4), np.int32), "got int32"),
        (ROWS, [[1, 0.25, 0.75, 1], [1, 0.5, 1, 0.4999]], "layer m/5: the shares of expert 0 on its 2 slots add up to 0.9999"),
        (ROWS, [[1, 1.25, -0.25, 1], SHARES[1]], "layer m/3: slot 2 has share -0.25, it holds expert 1"),
        (ROWS, [[np.nan, 0.25, 0.75, 1], SHARES[1]], "layer m/3: slot 0 has share nan"),
        (ROWS, [[np.inf, 0.25, 0.75, 1], SHARES[1]], "layer m/3: slot 0 has share inf"),
        ([[0, 1, 1, -1], ROWS[1]], SHARES, "layer m/3: slot 3 has share 1.0, it is empty and takes none"),
    ],
)
def test_shares_that_say_nothing_or_too_much_are_refused_with_the_numbers(rows: object, shares: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        table(np.array(shares), rows)


def test_a_layer_of_a_table_with_shares_changes_its_slots_only_with_its_shares() -> None:
    row, part = np.array([1, 0, 1, 2], np.int32), np.array([0.1, 1, 0.9, 1], np.float32)
    changed = table().with_rows({3: row}, {3: part})
    assert changed.row(3).tolist() == row.tolist()
    assert changed.shares_row(3) is not None
    np.testing.assert_array_equal(changed.shares_row(3), part)
    np.testing.assert_array_equal(changed.shares_row(5), SHARES[1])
    assert table().with_rows({3: ROWS[0]}) == table(), "the same row keeps its shares"
    with pytest.raises(InvalidInputError, match="layer 3 of model 'm' gets other slots: it needs new shares too"):
        table().with_rows({3: row})
    with pytest.raises(InvalidInputError, match=re.escape("shares for layers [3] of model 'm', whose table has none")):
        table(None).with_rows({3: row}, {3: part})
    with pytest.raises(InvalidInputError, match="no MoE layer 4"):
        table().with_rows({}, {4: part})


def test_all_tables_of_a_deployment_have_shares_or_none_has() -> None:
    draft = Table("draft", (0,), 2, RANKS, np.array([[0, 1]], np.int32))
    with pytest.raises(InvalidInputError, match=re.escape("1 of 2 tables have no shares (models draft)")):
        Placement((table(), draft))
    both = Placement((table(), draft.with_even_shares()))
    assert both.has_shares
    assert not both.without_shares().has_shares
    assert both.without_shares() == Placement((table(None), draft))
    assert both.without_shares().with_even_shares().tables[1].shares_row(0) is not None


def test_other_shares_on_the_same_slots_are_a_difference_of_the_live_map() -> None:
    live = as_loaded(Placement((table().with_even_shares(),)))
    layer = LayerRef("m", 3)
    assert live.differing_layers(Placement((table(),))) == (layer,)
    after = live.with_rows({}, GenerationNumber(4), {layer: SHARES[0]})
    assert after.generations == (4, 0)
    assert after.placement == Placement((table(),))
    assert after.digest != live.digest
    assert after.layers[0].shares == (1.0, 0.25, 0.75, 1.0)


@st.composite
def rows_of_layers(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    num_logical = draw(st.integers(1, 5))
    slots = draw(st.integers(1, 8))
    rows = draw(st.lists(st.lists(st.integers(-1, num_logical - 1), min_size=slots, max_size=slots), min_size=1, max_size=3))
    return np.array(rows, np.int32), num_logical


@given(rows_of_layers())
def test_even_shares_are_accepted_and_read_back_in_the_order_of_the_replicas(case: tuple[np.ndarray, int]) -> None:
    rows, num_logical = case
    shares = even_shares(rows, num_logical)
    made = Table("m", tuple(range(len(rows))), num_logical, (RankId(0),), rows, shares)
    np.testing.assert_array_equal(made.shares, shares)
    width = rows.shape[1] + 1
    by_replica = replica_shares(shares, logical_to_physical(rows, num_logical, width))
    for layer, row in enumerate(rows.tolist()):
        for expert in range(num_logical):
            slots = [slot for slot, held in enumerate(row) if held == expert]
            wanted = [np.float32(1) / np.float32(max(1, len(slots)))] * len(slots) + [0.0] * (width - len(slots))
            assert by_replica[layer, expert].tolist() == [float(share) for share in wanted]
