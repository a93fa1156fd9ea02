"""Files that say which experts are chosen together: counted in pieces, scaled to the load, refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eplb_service.errors import InvalidInputError
from eplb_service.offline import together_file
from eplb_service.offline.together_file import read_together

CHOICES = np.random.default_rng(3).permuted(np.tile(np.arange(6), (200, 3, 1)), axis=2)[:, :, :2]
"""200 tokens, 3 layers, 2 of 6 experts."""


def slow_pairs(choices: np.ndarray[tuple[int, ...], np.dtype[np.int64]], layer: int) -> dict[tuple[int, int], int]:
    counted: dict[tuple[int, int], int] = {}
    for token in choices[:, layer].tolist():
        for one in token:
            for other in token:
                counted[one, other] = counted.get((one, other), 0) + 1
    return counted


def loads_of(choices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.stack([np.bincount(choices[:, layer].reshape(-1), minlength=6) for layer in range(3)]).astype(np.float64)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_choices_are_counted_in_pieces(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together_file, "PIECE_BYTES", 7 * 3 * 2)  # seven tokens of uint8
    path = tmp_path / f"choices.{suffix}"
    data = CHOICES.astype(np.uint8)
    np.save(path, data) if suffix == "npy" else np.savez_compressed(path, other=np.zeros(3), experts=data)
    read = read_together(path, loads_of(CHOICES))
    assert read.choices is not None
    assert [len(piece) for piece in read.choices.pieces()] == [7] * 28 + [4]
    for layer in range(3):
        slow = slow_pairs(CHOICES, layer)
        for one in range(6):
            for other in range(6):
                wanted = slow.get((one, other), 0) if one != other else 0
                assert read.pairs[layer, one, other] == pytest.approx(wanted)


def test_pairs_of_another_sample_are_scaled_to_the_load(tmp_path: Path) -> None:
    path = tmp_path / "choices.npy"
    np.save(path, CHOICES)
    loads = loads_of(CHOICES)
    once, tripled = read_together(path, loads), read_together(path, 3 * loads)
    np.testing.assert_allclose(tripled.pairs, 3 * once.pairs)
    drifted = loads.copy()
    drifted[0, 2] = 4.0
    clipped = read_together(path, drifted).pairs
    assert (clipped[0, 2] <= 4.0).all(), "no pair has more tokens than either of its experts"


def test_a_diagonal_says_how_many_tokens_were_seen_and_without_one_the_load_does(tmp_path: Path) -> None:
    loads = loads_of(CHOICES)
    path = tmp_path / "choices.npy"
    np.save(path, CHOICES)
    pairs = read_together(path, loads).pairs
    with_own = pairs.copy()
    with_own[:, np.arange(6), np.arange(6)] = loads
    np.save(tmp_path / "own.npy", 10 * with_own)
    np.testing.assert_allclose(read_together(tmp_path / "own.npy", loads).pairs, pairs)
    np.save(tmp_path / "bare.npy", pairs)
    np.testing.assert_allclose(read_together(tmp_path / "bare.npy", loads).pairs, pairs)
    np.save(tmp_path / "more.npy", 10 * pairs)
    more = read_together(tmp_path / "more.npy", loads)
    assert (more.pairs <= np.minimum(loads[:, :, None], loads[:, None, :])).all()


def test_rows_of_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "choices.npy"
    np.save(path, np.concatenate([np.full((200, 1, 2), -1), CHOICES], axis=1))
    plain = tmp_path / "plain.npy"
    np.save(plain, CHOICES)
    read = read_together(path, loads_of(CHOICES), num_rows=4, positions=(1, 2, 3))
    np.testing.assert_allclose(read.pairs, read_together(plain, loads_of(CHOICES)).pairs)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (
            np.zeros((3, 6)),
            r"got float64 of shape \(3, 6\); give pairs, numbers of shape \(layers, experts, experts\) = \(3, 6, 6\)",
        ),
        (np.zeros((9, 3, 2)), "tokens' choices, integers of shape"),
        (np.full((9, 3, 2), 6), r"token 0 layer row 0 chose expert 6; the load has experts 0 to 5"),
        (np.full((9, 3, 2), -2), "chose expert -2"),
        (np.asfortranarray(np.zeros((9, 3, 2), np.int64)), "numpy.ascontiguousarray"),
        (np.triu(np.ones((3, 6, 6)), 1), "pairs must be symmetric"),
        (np.full((3, 6, 6), np.nan), "finite"),
        (np.array([{}], object), "Python objects"),
    ],
)
def test_files_that_say_something_else_are_refused(
    tmp_path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], said: str
) -> None:
    path = tmp_path / "wrong.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(InvalidInputError, match=said):
        read_together(path, np.full((3, 6), 100.0))


def per_token_dump(path: Path, choices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Path:
    """SGLang's recording of tokens in a model whose first layer is dense: [layers, tokens, 8], -1 = none."""
    chosen = torch.full((4, len(choices), 8), -1, dtype=torch.int32)
    chosen[1:, :, :2] = torch.tensor(choices.transpose(1, 0, 2))
    counts = torch.zeros((4, 6), dtype=torch.int32)
    counts[1:] = torch.tensor(loads_of(choices))
    records = [{"forward_pass_id": 1, "rank": 0, "global_physical_count": counts, "topk_ids_of_layer": chosen}]
    mapping = torch.arange(6).repeat(4, 1)
    torch.save({"records": records, "last_physical_to_logical_map": mapping}, path)
    return path


def test_tokens_that_sglang_recorded_are_read_by_their_layers(tmp_path: Path) -> None:
    path = per_token_dump(tmp_path / "0.pt", CHOICES)
    np.save(tmp_path / "choices.npy", CHOICES)
    wanted = read_together(tmp_path / "choices.npy", loads_of(CHOICES)).pairs
    read = read_together(path, loads_of(CHOICES), layer_ids=(1, 2, 3))
    np.testing.assert_allclose(read.pairs, wanted)
    np.testing.assert_allclose(read_together(path, loads_of(CHOICES)[1:], layer_ids=(2, 3)).pairs, wanted[1:])
    np.testing.assert_allclose(read_together(path, loads_of(CHOICES)).pairs, wanted)
    with pytest.raises(InvalidInputError, match="choices of layers 1-3; the load has layers 0-2"):
        read_together(path, loads_of(CHOICES), layer_ids=(0, 1, 2))
    with pytest.raises(InvalidInputError, match="a token chose expert 5; the load has experts 0 to 4"):
        read_together(path, loads_of(CHOICES)[:, :5])


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    loads = np.full((3, 6), 100.0)
    for name, content, said in (
        ("empty.npy", b"", "is empty"),
        ("text.npy", b"hello there", "as a numpy file"),
        ("none.npy", None, "there is no file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInputError, match=said):
            read_together(tmp_path / name, loads)
    (tmp_path / "notes.txt").write_text("hello there")
    with pytest.raises(InvalidInputError, match="holds no token choices"):
        read_together(tmp_path / "notes.txt", loads)
    np.save(tmp_path / "cut.npy", CHOICES)
    whole = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-10])
    with pytest.raises(InvalidInputError, match="cut short"):
        read_together(tmp_path / "cut.npy", loads)
    np.savez(tmp_path / "two.npz", a=CHOICES, b=CHOICES)
    with pytest.raises(InvalidInputError, match="name the one to read"):
        read_together(tmp_path / "two.npz", loads)


def test_files_without_a_single_pair_are_refused_instead_of_planned_on(tmp_path: Path) -> None:
    loads = np.full((3, 6), 100.0)
    nothing = {"pairs": np.zeros((3, 6, 6)), "one": CHOICES[:, :, :1], "none": np.full((5, 3, 2), -1)}
    for name, content in nothing.items():
        np.save(tmp_path / f"{name}.npy", content)
        with pytest.raises(InvalidInputError, match="no token chose two different experts that have load"):
            read_together(tmp_path / f"{name}.npy", loads)
