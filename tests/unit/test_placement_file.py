from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.formats import placements
from eplb_service.formats.eplb_json import placement_document
from eplb_service.formats.placement_rows import Expectation
from eplb_service.formats.placements import PlacementPath
from eplb_service.ids import RankId
from eplb_service.placement import Table

RANKS = (RankId(4), RankId(9))
TABLE = Table("m", (3, 60), 4, RANKS, np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, -1, 1]], np.int32))


def read_placement(path: Path, expected: Expectation) -> Table:
    return placements.read_placement(PlacementPath(path), expected).table


def write_placement(path: Path, table: Table) -> None:
    placements.write_placement(PlacementPath(path), table)


EXPECTED = Expectation(model="m", num_layers=2, num_logical=4, rank_ids=RANKS)


def test_round_trip_keeps_everything_vllm_49572(tmp_path: Path) -> None:
    write_placement(tmp_path / "p.json", TABLE)
    assert read_placement(tmp_path / "p.json", EXPECTED) == TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_shares_are_read_back_exactly_and_wrong_ones_refused(tmp_path: Path) -> None:
    shares = np.array([[1 / 3, 0.1, 1, 1, 2 / 3, 0.9], [1, 1, 0.7, 1, 0, 0.3]], np.float32)
    weighted = TABLE.with_shares(shares)
    write_placement(tmp_path / "p.json", weighted)
    read = read_placement(tmp_path / "p.json", EXPECTED)
    assert read == weighted
    assert read.shares is not None
    assert read.shares.tobytes() == shares.tobytes()
    for wrong, message in [
        (
            [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]],
            "layer m/3: the shares of expert 0 on its 2 slots add up to 2; they must add up to 1",
        ),
        ([[1] * 5] * 2, r"shape \(layers, slots\) = \(2, 6\); got float64 of shape \(2, 5\)"),
        ("half", "p.json, shares: expected numbers"),
        ([[1e300] * 6] * 2, "slot 0 has share 1e\\+300"),
    ]:
        (tmp_path / "p.json").write_text(json.dumps({**placement_document(TABLE), "shares": wrong}))
        with pytest.raises(InvalidInputError, match=message):
            read_placement(tmp_path / "p.json", EXPECTED)


def test_plain_maps_take_what_they_do_not_say_from_what_is_expected(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", TABLE.physical_to_logical)
    (tmp_path / "p.json").write_text(json.dumps(TABLE.physical_to_logical.tolist()))
    for name in ("p.npy", "p.json"):
        table = read_placement(tmp_path / name, EXPECTED)
        assert table.layer_ids == (0, 1)
        assert np.array_equal(table.physical_to_logical, TABLE.physical_to_logical)
    given = Expectation(model="m", num_layers=2, num_logical=4, rank_ids=RANKS, layer_ids=(3, 60))
    assert read_placement(tmp_path / "p.npy", given) == TABLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "eplb-placement/9"}, "is of format 'eplb-placement/9'; this build reads eplb-placement/1"),
        ({"rank_ids": [4, 8]}, r"has rank_ids \[4, 8\], expected \[4, 9\]"),
        ({"num_logical": 5}, "has num_logical 5, expected 4"),
        ({"layer_ids": [3, "x"]}, "layer_ids must be a list of integers"),
        ({"layer_ids": [60, 3]}, "layer ids must be ascending"),
        ({"layer_ids": [3]}, "1 layer ids but 2 rows"),
        ({"layer_ids": [3], "physical_to_logical": [[0, 1, 2, 3, 0, 1]]}, "a placement of 1 layers, expected 2"),
        ({"layer_ids": None, "physical_to_logical": [[0, 1, 2, 3, 0, 1]]}, "a placement of 1 layers, expected 2"),
        ({"physical_to_logical": [[0, 1, 2, 3, 0]] * 2}, "5 slots do not divide over 2 ranks"),
        ({"physical_to_logical": [[0, 1, 2, 4, 0, 1]] * 2}, "layer 3 slot 3 of model 'm' holds expert 4"),
        ({"physical_to_logical": [[0, 1, 2, 2, 0, 1]] * 2}, "layer 3 has no slot for expert 3 "),
        ({"physical_to_logical": [[0.5, 1, 2, 3, 0, 1]] * 2}, "layer row 0 slot 0 is 0.5; expert ids are whole numbers"),
        ({"physical_to_logical": [[0, 1], [2]]}, "layer row 1 has 1 slots, layer row 0 has 2; all layers have as many"),
        ({"physical_to_logical": "abc"}, "a placement is a list of expert ids, for each layer or for all; got 'abc'"),
    ],
)
def test_documents_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps({**placement_document(TABLE), **changes}))
    with pytest.raises(InvalidInputError, match=message):
        read_placement(tmp_path / "p.json", EXPECTED)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"loads": []}')
    with pytest.raises(InvalidInputError, match=r"has keys \['loads'\] and is no placement file.*looked for: eplb .*sglang"):
        read_placement(tmp_path / "p.json", EXPECTED)
    (tmp_path / "p.txt").write_text("0 1 2 3")
    with pytest.raises(InvalidInputError, match=r"p\.txt is no placement file that is known here; looked for: eplb"):
        read_placement(tmp_path / "p.txt", EXPECTED)
    with pytest.raises(InvalidInputError, match="there is no file"):
        read_placement(tmp_path / "none.json", EXPECTED)
    with pytest.raises(InvalidInputError, match="is a folder; a placement is one file"):
        read_placement(tmp_path, EXPECTED)


def test_many_writers_leave_one_whole_file_hygon_das_69(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    tables = [TABLE.with_rows({3: np.roll(TABLE.row(3), shift)}) for shift in range(6)]
    failures: list[BaseException] = []

    def write_and_read(table: Table) -> None:
        try:
            for _ in range(10):
                write_placement(path, table)
                assert read_placement(path, EXPECTED) in tables
        except BaseException as error:  # noqa: BLE001  # whatever a thread raises fails the test
            failures.append(error)

    threads = [threading.Thread(target=write_and_read, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_unwritable_place_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="No such file or directory"):
        write_placement(tmp_path / "none" / "p.json", TABLE)
