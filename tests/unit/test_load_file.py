from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.errors import InvalidInputError
from eplb_service.formats.loads import read_recording
from eplb_service.offline.load_file import Float64Array, read_source_loads

MATRIX = [[1.0, 2.5, 0.0], [4.0, 5.0, 6.0]]


def read_loads(path: Path) -> Float64Array:
    return read_recording(path).loads


def saved(path: Path, content: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, content, allow_pickle=True)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "content", "num_windows"),
    [
        ("a.npy", np.array(MATRIX), 1),
        ("a.npy", np.array([MATRIX, MATRIX], np.float32), 2),
        ("a.npy", np.array(MATRIX, np.int32), 1),
        ("a.npz", {"anything": np.array(MATRIX)}, 1),
        ("a.npz", {"extra": np.zeros(3), "loads": np.array([MATRIX] * 3)}, 3),
        ("a.json", MATRIX, 1),
        ("a.json", {"loads": [MATRIX, MATRIX]}, 2),
        ("a.json", {"load_history": [{"logical_expert_load": MATRIX}, {"logical_expert_load": MATRIX, "step": 7}]}, 2),
    ],
)
def test_every_form_is_read_as_windows_layers_experts(tmp_path: Path, name: str, content: Any, num_windows: int) -> None:
    loads = read_loads(saved(tmp_path / name, content))
    assert loads.shape == (num_windows, 2, 3)
    assert loads.dtype == np.float64
    whole = name == "a.npy" and content.dtype == np.int32
    assert loads[-1].tolist() == ([[1.0, 2.0, 0.0], [4.0, 5.0, 6.0]] if whole else MATRIX)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", np.array([[1.0, -2.0]]), r"window 0 layer row 0 expert 1 is -2\.0 \(1 such value\)"),
        ("a.npy", np.array([[1.0, np.nan]]), "is nan"),
        ("a.npy", np.array([[np.inf, np.inf]]), r"is inf \(2 such values\)"),
        ("a.npy", np.array([1.0, 2.0]), r"shape \(layers, experts\).* got \(2,\)"),
        ("a.npy", np.zeros((2, 2, 2, 2)), r"got \(2, 2, 2, 2\)"),
        ("a.npy", np.zeros((0, 4)), "is empty"),
        ("a.npy", np.array([[{}, 1]], object), "Python objects, not numbers"),
        ("a.npy", np.array([["1", "2"]]), "must be numbers"),
        ("a.npy", np.array([[1j, 2]]), "must be numbers"),
        ("a.npy", np.array([[True, False]]), "must be numbers"),
        ("a.npz", {"a": np.ones((1, 1)), "b": np.ones((1, 1))}, "name the loads one of"),
        ("a.npz", {"a": np.array([[{}]], object)}, "Python objects, not numbers"),
        ("a.json", "", "is empty"),
        ("a.json", "{not json", "no valid JSON"),
        ("a.json", "[" * 100_000, "no valid JSON"),
        ("a.json", [[1, 2], [3]], "rows differ in length"),
        ("a.json", [[1, None]], "expected numbers"),
        ("a.json", [["a", "b"]], "expected numbers"),
        ("a.json", {"load": MATRIX}, r"has keys \['load'\]; expected loads, load_history"),
        ("a.json", {"load_history": []}, "at least one entry"),
        ("a.json", {"load_history": [{"logical": 1}]}, "entry 0 of load_history has no logical_expert_load"),
        ("a.json", "[[1, NaN]]", "is nan"),
        ("a.csv", "1,2", r"a\.csv is no load file that is known here; looked for: sglang .*trtllm .*numpy .*json .*eplb"),
    ],
)
def test_bad_files_end_in_one_clear_sentence(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_loads(saved(tmp_path / name, content))
    assert "\n" not in str(caught.value).strip()


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no file"):
        read_loads(tmp_path / "none.npy")
    with pytest.raises(InvalidInputError, match="is a folder"):
        read_loads(tmp_path)
    for name in ("empty.npy", "empty.npz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(InvalidInputError, match="is empty"):
            read_loads(tmp_path / name)
    for name in ("junk.npy", "junk.npz"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 no archive at all")
        with pytest.raises(InvalidInputError, match="cannot read"):
            read_loads(tmp_path / name)
    whole = saved(tmp_path / "cut.npy", np.ones((50, 50))).read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-100])
    with pytest.raises(InvalidInputError, match="cannot read"):
        read_loads(tmp_path / "cut.npy")
    (tmp_path / "latin.json").write_bytes(b'[["\xff\xfe"]]')
    with pytest.raises(InvalidInputError, match=r"latin.json is no text: byte 3 is not UTF-8"):
        read_loads(tmp_path / "latin.json")


SOURCES = np.random.default_rng(5).gamma(0.5, 100, (2, 4, 3))


def sources_of(path: Path) -> Float64Array:
    return read_source_loads(path, num_layers=2, num_logical=3, num_ranks=4)


@pytest.mark.parametrize(
    ("name", "content", "times"),
    [
        ("a.npy", SOURCES, 1),
        ("a.npy", np.stack([SOURCES, SOURCES]), 2),
        ("a.npz", {"loads": np.zeros((2, 3)), "source_loads": SOURCES}, 1),
        ("a.json", SOURCES.tolist(), 1),
        ("a.json", {"loads": 1, "source_loads": [SOURCES.tolist()] * 3}, 3),
    ],
)
def test_source_loads_are_read_as_layers_ranks_experts(tmp_path: Path, name: str, content: Any, times: int) -> None:
    np.testing.assert_allclose(sources_of(saved(tmp_path / name, content)), SOURCES * times)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.npy",
            SOURCES.transpose(1, 0, 2),
            r"= \(2, 4, 3\).* got float64 of shape \(4, 2, 3\): its first two axes are swapped",
        ),
        ("a.npy", SOURCES[:, :3], r"got float64 of shape \(2, 3, 3\)$"),
        ("a.npy", SOURCES[0], r"shape \(4, 3\)"),
        ("a.npy", -SOURCES, r"layer row 0 rank 0 expert 0 is -.*\(24 such values\)"),
        ("a.json", {"load": 1, "what": 2}, "expected numbers|source loads must be"),
        ("a.json", {"what": 2}, r"has keys \['what'\]; expected source_loads"),
        ("a.csv", "1", "ends in .csv"),
    ],
)
def test_bad_source_loads_end_in_one_clear_sentence(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        sources_of(saved(tmp_path / name, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [{"physical_to_logical_map": [[0, 1]]}, {"physical_to_logical": [[0]]}, {"layer_list": []}])
def test_a_placement_that_is_given_for_a_load_is_told_so(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"a.json is a placement, not a load: give it as --current .*a.json"):
        read_loads(saved(tmp_path / "a.json", content))


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ('[["a", 1]]', "'a'"),
        ("[[null, 1]]", "null"),
        ("[[true, false]]", "true"),
        (f"[[{10**30}, 1]]", f"{10**30}, which is beyond 64 bits"),
    ],
)
def test_values_that_are_no_numbers_are_shown(tmp_path: Path, text: str, got: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidInputError, match=rf"a.json: expected numbers; got {got}$"):
        read_loads(tmp_path / "a.json")
