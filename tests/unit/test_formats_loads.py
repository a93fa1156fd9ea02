"""Load recordings of engines: what each format holds, what is added up and what is not, what is refused and how."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import EnvironmentFault, InvalidInputError
from eplb_service.formats import files, torch_file
from eplb_service.formats.loads import read_recording, read_token_choices
from eplb_service.formats.plain_loads import own_bytes
from eplb_service.formats.rank_counts import RankCounts, digest_of, merged_counts
from eplb_service.formats.recording import LoadRecording, recording_of, summed_windows
from eplb_service.formats.safetensors_file import parse_safetensors

E, P = 4, 6
MAP = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]])  # layer 0 is dense
RNG = np.random.default_rng(3)


def physical(*, layers: int = 3, seed: int = 0) -> npt.NDArray[np.int32]:
    counts = np.random.default_rng(seed).integers(1, 50, (layers, P)).astype(np.int32)
    counts[0] = 0
    return counts


def to_logical(counts: npt.NDArray[Any], mapped: npt.NDArray[Any] = MAP) -> npt.NDArray[np.float64]:
    """The slow obvious way."""
    logical = np.zeros((counts.shape[0], int(mapped.max()) + 1))
    for layer, row in enumerate(counts):
        for slot, count in enumerate(row):
            logical[layer, mapped[layer, slot]] += count
    return logical


def record(pass_id: int, rank: int, counts: npt.NDArray[Any], **more: Any) -> dict[str, Any]:
    return {
        "forward_pass_id": pass_id,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.tensor(counts),
        **more,
    }


def dump(path: Path, records: list[dict[str, Any]], mapped: npt.NDArray[Any] = MAP) -> Path:
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(mapped)}, path)
    return path


def stat(path: Path, counts: Any) -> Path:
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, path)
    return path


def refused(path: Path, match: str, load_format: str | None = None) -> None:
    with pytest.raises(InvalidInputError, match=match) as caught:
        read_recording(path, load_format)
    assert "\n" not in str(caught.value)


# SGLang, mode stat


def test_buffers_of_a_stat_dump_become_windows_without_those_that_were_not_filled(tmp_path: Path) -> None:
    counts = np.zeros((5, 4, E), np.int32)
    counts[:3, 1:3] = RNG.integers(1, 9, (3, 2, E))
    made = read_recording(stat(tmp_path / "d.pt", torch.tensor(counts)))
    assert made.source == "SGLang, mode stat"
    assert np.array_equal(made.loads, counts[:3, 1:3])
    assert made.layer_ids == (1, 2)
    assert made.has_layer_ids
    assert made.num_layers == 4
    assert made.dense_layer_ids == (0, 3)
    assert made.notes == ("2 of 5 windows hold no token and are left out",)


def test_counts_that_init_expert_location_takes_are_read_too(tmp_path: Path) -> None:
    counts = [[0, 0], [3, 1]]
    (tmp_path / "c.json").write_text(json.dumps({"logical_count": counts}))
    assert read_recording(tmp_path / "c.json", "sglang").loads.tolist() == [[[3, 1]]]
    torch.save({"logical_count": torch.tensor(counts)}, tmp_path / "c.pt")
    assert read_recording(tmp_path / "c.pt").layer_ids == (1,)


def test_dense_layers_keep_the_ids_of_the_others_sglang_25961(tmp_path: Path) -> None:
    counts = torch.ones((1, 4, E), dtype=torch.int32)
    counts[:, 0] = 0
    assert read_recording(stat(tmp_path / "d.pt", counts)).layer_ids == (1, 2, 3)


def test_counts_in_one_layer_alone_are_no_loads_sglang_25948(tmp_path: Path) -> None:
    counts = torch.zeros((2, 43, E), dtype=torch.int32)
    counts[:, 0] = 7
    refused(stat(tmp_path / "d.pt", counts), r"counts tokens in layer 0 alone, of 43: the engine's recorder did not know")


def test_an_empty_recording_says_what_to_do_sglang_6607(tmp_path: Path) -> None:
    zeros = torch.zeros((3, 2, E), dtype=torch.int32)
    refused(
        stat(tmp_path / "d.pt", zeros), r"holds no token \(3 windows x 2 layers x 4 experts, all zero\): start the engine's"
    )
    refused(dump(tmp_path / "p.pt", []), "holds no pass: start the recording")


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        (
            torch.full((1, 2, 2), -(2**31), dtype=torch.int32),
            r"window 0 layer 0 expert 0 is -2147483648 \(an int32 that overflowed",
        ),
        (torch.full((1, 2, 2), 0.5), "is 0.5, and 3 more such values; counts are whole numbers >= 0"),
        (torch.full((1, 2, 2), float("nan")), "is nan"),
        (torch.full((1, 2, 2), 2**60, dtype=torch.int64), "is 1152921504606846976"),
        (torch.ones(4, dtype=torch.int32), r"must have the axes \(window, layer, expert\).* got shape \(4,\)"),
        (torch.ones((1, 0, 4), dtype=torch.int32), "none of them empty"),
        (torch.ones((1, 2, 2), dtype=torch.bool), "must be an array of counts; got bool"),
        ("counts", "must be an array of counts; got str"),
        (torch.zeros(1, dtype=torch.int32).expand(10**6, 61, 256), "declares shape .* at most 268,435,456 are read"),
        (torch.ones((1, 2), dtype=torch.bfloat16), "holds a tensor of torch.bfloat16"),
        (torch.ones((2, 2)).to_sparse(), "holds a tensor of .* layout torch.sparse_coo"),
    ],
)
def test_stat_dumps_that_hold_no_counts_are_refused(tmp_path: Path, counts: Any, match: str) -> None:
    refused(stat(tmp_path / "d.pt", counts), match)


class Pickled:
    """An object whose class a recording would have to bring along."""


def test_pickled_objects_are_refused_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (tmp_path / "ran",)

    for value in (Pickled(), Evil(), print):
        for is_zip in (True, False):
            try:
                torch.save({"logical_count": value}, tmp_path / "d.pt", _use_new_zipfile_serialization=is_zip)
            except AttributeError:  # a local class cannot be saved by name
                continue
            refused(tmp_path / "d.pt", "holds pickled Python objects, which are never loaded here")
    assert not (tmp_path / "ran").exists()


def test_torch_files_that_are_cut_or_compressed_or_of_other_things_are_refused(tmp_path: Path) -> None:
    whole = stat(tmp_path / "d.pt", torch.ones((2, 2, 2), dtype=torch.int32)).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    for load_format in (None, "sglang", "numpy"):
        refused(
            tmp_path / "cut.pt", r"cannot read .*cut.pt: .* is not in its [\d,]+ bytes: was it cut short\? copy", load_format
        )
    (tmp_path / "old.pt").write_bytes(b"\x80\x02}q\x00")
    refused(tmp_path / "old.pt", "cannot read .* as a file of torch|pickled")
    with zipfile.ZipFile(tmp_path / "d.pt") as good, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            bad.writestr(name, good.read(name))
    refused(tmp_path / "bomb.pt", "and is compressed: torch.save compresses nothing")
    torch.save({"physical_to_logical_map": torch.zeros((2, 4))}, tmp_path / "map.pt")
    refused(tmp_path / "map.pt", "is a placement, not a load: give it as --current sglang:")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", r"is no dump of SGLang's recorder: it holds \['weights'\], not logical_count or records")
    deep: Any = 1
    for _ in range(30):
        deep = [deep]
    torch.save({"logical_count": deep}, tmp_path / "deep.pt")
    refused(tmp_path / "deep.pt", "nested more than 20 deep")


def test_without_torch_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stat(tmp_path / "d.pt", torch.ones((1, 2, 2)))
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(EnvironmentFault, match=r"which is not installed here: install eplb-service\[sglang\]"):
        torch_file.read_torch(path)


def test_two_stat_dumps_are_two_recordings(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        stat(tmp_path / name, torch.ones((1, 2, 2), dtype=torch.int32))
    refused(tmp_path, "holds 2 dumps, a.pt of mode stat; each of these is a recording of all ranks: give one")


# SGLang, modes per_pass and per_token


def test_physical_counts_become_logical_by_the_map_of_the_dump_and_ranks_are_added_up(tmp_path: Path) -> None:
    counts = {(pass_id, rank): physical(seed=10 * pass_id + rank) for pass_id in (5, 9) for rank in range(3)}
    for rank in range(3):
        dump(tmp_path / f"e_{rank}.pt", [record(pass_id, rank, counts[pass_id, rank]) for pass_id in (9, 5)])
    made = read_recording(tmp_path)
    expected = [sum(to_logical(counts[pass_id, rank]) for rank in range(3)) for pass_id in (5, 9)]
    assert np.array_equal(made.loads, np.array(expected)[:, 1:])
    assert made.source == "SGLang, mode per_pass"
    assert made.layer_ids == (1, 2)
    assert made.notes == ()
    again = read_recording(tmp_path / "e_*.pt")
    assert np.array_equal(again.loads, made.loads)


def test_tokens_that_all_ranks_saw_are_counted_once_not_once_a_rank_sglang_32962(tmp_path: Path) -> None:
    """Four ranks, in two pairs of tensor-parallel attention: each pair counted the same tokens."""
    counts = {(pass_id, pair): physical(seed=10 * pass_id + pair) for pass_id in (0, 1) for pair in (0, 1)}
    for rank in range(4):
        dump(tmp_path / f"{rank}.pt", [record(pass_id, rank, counts[pass_id, rank // 2]) for pass_id in (0, 1)])
    made = read_recording(tmp_path)
    expected = [to_logical(counts[pass_id, 0]) + to_logical(counts[pass_id, 1]) for pass_id in (0, 1)]
    assert np.array_equal(made.loads, np.array(expected)[:, 1:])
    assert made.notes == ("ranks 0-1 / 2-3 counted the same tokens in every pass: each set is taken once",)


def test_passes_that_not_every_rank_has_are_left_out_and_said(tmp_path: Path) -> None:
    dump(tmp_path / "0.pt", [record(pass_id, 0, physical(seed=pass_id)) for pass_id in (1, 2)])
    dump(tmp_path / "1.pt", [record(pass_id, 1, physical(seed=7 + pass_id)) for pass_id in (2, 3)])
    made = read_recording(tmp_path)
    assert np.array_equal(made.loads[:, 1], [(to_logical(physical(seed=2)) + to_logical(physical(seed=9)))[2]])
    assert made.notes == ("2 passes that not every rank recorded are left out",)
    dump(tmp_path / "1.pt", [record(8, 1, physical())])
    refused(tmp_path, "no pass was recorded by all of the 2 ranks")


def test_gatherers_of_one_pass_are_added_up(tmp_path: Path) -> None:
    parts = [record(1, 0, physical(seed=seed), gatherer_key=f"child_{seed}") for seed in (1, 2)]
    made = read_recording(dump(tmp_path / "0.pt", parts))
    assert np.array_equal(made.loads[0], (to_logical(physical(seed=1)) + to_logical(physical(seed=2)))[1:])


def test_ranks_that_disagree_on_experts_are_refused_sglang_6081(tmp_path: Path) -> None:
    dump(tmp_path / "0.pt", [record(1, 0, physical())])
    dump(tmp_path / "1.pt", [record(1, 1, physical())], np.zeros((3, P), np.int64))
    refused(tmp_path, "3 layers x 1 experts in pass 1, but .*0.pt has 3 x 4: these are not ranks of one model")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        dump(tmp_path / f"{rank}.pt", [record(1, rank, physical(seed=rank))])
    refused(
        tmp_path, r"test_a_missing_rank_is_named\S* has files of ranks 0, 2 but none of rank 1, whose tokens would be missing"
    )


def test_one_rank_alone_that_counts_its_own_slots_is_refused(tmp_path: Path) -> None:
    counts = np.zeros((3, P), np.int32)
    counts[1:, 2:4] = 5
    dump(tmp_path / "1.pt", [record(1, 1, counts)])
    counts_of_0 = np.roll(counts, -2, axis=1)
    alone = dump(tmp_path / "0.pt", [record(1, 0, counts_of_0)])
    refused(alone, r"counts slots 0 to 1 of 6 alone, those of rank 0: give the folder with the files of all ranks")
    dump(tmp_path / "2.pt", [record(1, 2, np.roll(counts, 2, axis=1))])
    assert np.array_equal(read_recording(tmp_path).loads[0], np.array([[10, 10, 5, 5], [5, 5, 10, 10]]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: r.pop("rank"), "record 0 has no rank; is it a file of SGLang's"),
        (lambda r: r.update(forward_pass_id=-1), "forward_pass_id must be a number >= 0; got -1"),
        (lambda r: r.update(rank=1.0), "rank must be a number >= 0; got 1.0"),
        (lambda r: r.update(global_physical_count=torch.ones((3, 5))), r"counts 3 layers x 5 slots, but .* shape \(3, 6\)"),
        (lambda r: r.update(global_physical_count=-torch.ones((3, P))), "layer 0 slot 0 is -1.0"),
    ],
)
def test_records_that_cannot_be_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], match: str) -> None:
    bad = record(1, 0, physical())
    change(bad)
    refused(dump(tmp_path / "0.pt", [bad]), match)


@pytest.mark.parametrize(
    ("mapped", "match"),
    [
        (np.array([[0, 1, 2, 3, 0, 9]] * 3), "layer 0 slot 5 holds expert 9; 6 slots hold experts 0 to 5 at most"),
        (np.array([[0, 1, 2, 3, 0, -1]] * 3), "layer 0 slot 5 holds expert -1"),
        (
            np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [0, 1, 1, 3, 0, 1]]),
            r"layer 2 has no slot for expert 2 \(1 are missing\)",
        ),
        (np.zeros(3), "must be whole numbers of shape"),
    ],
)
def test_maps_of_dumps_that_cannot_be_are_refused(tmp_path: Path, mapped: npt.NDArray[Any], match: str) -> None:
    refused(dump(tmp_path / "0.pt", [record(1, 0, physical())], mapped), match)


def test_a_pass_that_is_there_twice_and_ranks_in_one_file_are_refused(tmp_path: Path) -> None:
    refused(dump(tmp_path / "0.pt", [record(1, 0, physical())] * 2), "record 1: pass 1 of rank 0 is there twice")
    both = [record(1, 0, physical()), record(1, 1, physical())]
    refused(dump(tmp_path / "0.pt", both), r"holds records of ranks \[0, 1\]; SGLang writes one file a rank")
    dump(tmp_path / "a.pt", [record(1, 0, physical())])
    dump(tmp_path / "b.pt", [record(1, 0, physical())])
    (tmp_path / "0.pt").unlink()
    refused(tmp_path, "b.pt: pass 1 of rank 0 is there twice")


def token_record(pass_id: int, rank: int, chosen: npt.NDArray[np.int32]) -> dict[str, Any]:
    """chosen: [L, tokens, k] of slots, -1 = none."""
    counts = np.array([np.bincount(row[row >= 0], minlength=P) for row in chosen.reshape(chosen.shape[0], -1)])
    return record(pass_id, rank, counts.astype(np.int32), topk_ids_of_layer=torch.tensor(chosen), input_ids=[1, 2])


def test_tokens_of_a_per_token_dump_are_counted_and_padding_is_not_sglang_4957(tmp_path: Path) -> None:
    chosen = np.full((3, 3, 4), -1, np.int32)  # layer 0 is dense, top-2 of a buffer that is 4 wide, the last token is padding
    chosen[1, :2, :2] = [[0, 5], [2, 4]]
    chosen[2, :2, :2] = [[0, 5], [2, 4]]
    path = dump(tmp_path / "0.pt", [token_record(1, 0, chosen)])
    made = read_recording(path)
    assert made.source == "SGLang, mode per_token"
    assert made.loads.tolist() == [[[2, 1, 1, 0], [0, 1, 1, 2]]]
    choices = read_token_choices(path)
    assert choices.layer_ids == (1, 2)
    assert choices.experts.tolist() == [[[0, 1], [3, 2]], [[2, 0], [1, 3]]]
    counted = np.array([np.bincount(choices.experts[:, layer].ravel(), minlength=E) for layer in (0, 1)])
    assert np.array_equal(counted, made.loads.sum(axis=0))


def test_choices_of_tokens_that_two_ranks_saw_are_taken_once(tmp_path: Path) -> None:
    chosen = np.array([[[0, 1]] * 2, [[2, 3]] * 2, [[4, 5]] * 2], np.int32)
    for rank in (0, 1):
        dump(tmp_path / f"{rank}.pt", [token_record(1, rank, chosen)])
    assert read_token_choices(tmp_path).experts.shape == (2, 3, 2)
    dump(tmp_path / "1.pt", [token_record(1, 1, chosen[:, :1])])
    assert read_token_choices(tmp_path).experts.shape == (3, 3, 2)


def test_choices_that_cannot_be_are_refused(tmp_path: Path) -> None:
    bad = token_record(1, 0, np.zeros((3, 2, 2), np.int32))
    bad["topk_ids_of_layer"] = torch.full((3, 2, 2), P, dtype=torch.int32)
    dump(tmp_path / "0.pt", [bad])
    with pytest.raises(InvalidInputError, match="layer 0 token 0 choice 0 is 6; slots run from 0 to 5"):
        read_token_choices(tmp_path / "0.pt")
    dump(tmp_path / "0.pt", [record(1, 0, physical())])
    with pytest.raises(InvalidInputError, match="has no topk_ids_of_layer: record in mode per_token"):
        read_token_choices(tmp_path)
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(InvalidInputError, match="holds no token choices: looked for SGLang's dumps of mode per_token"):
        read_token_choices(tmp_path / "a.npy")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_sums_over_ranks_equal_the_sum_over_distinct_ranks(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    tokens_of = [data.draw(st.integers(0, num_ranks - 1)) for _ in range(num_ranks)]
    passes = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True))
    seen = {
        (group, p): np.random.default_rng([group, p]).integers(1, 99, (2, 3)).astype(float)
        for group in tokens_of
        for p in passes
    }

    def read(rank: int) -> RankCounts:
        mine = {p: seen[tokens_of[rank], p] for p in passes}
        return RankCounts(rank=rank, where=str(rank), passes=mine, digests={p: digest_of(counts) for p, counts in mine.items()})

    made = merged_counts([lambda rank=rank: read(rank) for rank in range(num_ranks)], what="pass", where="dumps")  # type: ignore[misc]
    expected = [sum((seen[group, p] for group in set(tokens_of)), np.zeros((2, 3))) for p in sorted(passes)]
    assert np.array_equal(made.counts, expected)
    assert len(made.leaders) == len(set(tokens_of))


# TensorRT-LLM


def safetensors(tensors: Mapping[str, npt.NDArray[Any]], **header: Any) -> bytes:
    """A file of the format, by hand."""
    names = {"int64": "I64", "int32": "I32", "float32": "F32"}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        entries[name] = {
            "dtype": names[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps({**entries, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def statistics(folder: Path, by_rank: list[dict[str, npt.NDArray[Any]]], num_experts: int | None = 3) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, tensors in enumerate(by_rank):
        (folder / f"rank{rank}.safetensors").write_bytes(safetensors(tensors))
    if num_experts is not None:
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": num_experts, "num_experts_per_token": 2}))
    return folder


def counts_of(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def test_statistics_of_all_ranks_are_added_up_by_iteration_and_layer(tmp_path: Path) -> None:
    ranks = [
        {"100_3": counts_of(1, 2, 3), "100_60": counts_of(4, 0, 2), "101_3": counts_of(1, 0, 1), "101_60": counts_of(0, 2, 0)},
        {"100_3": counts_of(5, 5, 0), "100_60": counts_of(1, 1, 8), "101_3": counts_of(0, 4, 0), "101_60": counts_of(2, 2, 0)},
    ]
    made = read_recording(statistics(tmp_path / "s", ranks))
    assert made.source == "TensorRT-LLM statistics"
    assert made.layer_ids == (3, 60)
    assert made.num_layers is None
    assert made.loads.tolist() == [[[6, 7, 3], [5, 1, 10]], [[1, 4, 1], [2, 4, 0]]]
    one = read_recording(statistics(tmp_path / "t", ranks[:1]) / "rank0.safetensors")
    assert one.loads.tolist() == [[[1, 2, 3], [4, 0, 2]], [[1, 0, 1], [0, 2, 0]]]


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"7_1": torch.tensor([3, 1]), "7_2": torch.tensor([2, 2])}, tmp_path / "rank0.safetensors")
    assert read_recording(tmp_path).loads.tolist() == [[[3, 1], [2, 2]]]


def test_pipeline_stages_have_layers_of_their_own(tmp_path: Path) -> None:
    made = read_recording(statistics(tmp_path / "s", [{"1_3": counts_of(1, 2, 3)}, {"1_9": counts_of(3, 0, 3)}]))
    assert made.layer_ids == (3, 9)
    assert made.loads.tolist() == [[[1, 2, 3], [3, 0, 3]]]


def test_iterations_without_all_layers_are_left_out(tmp_path: Path) -> None:
    rank = {"1_3": counts_of(1, 2, 3), "1_4": counts_of(1, 1, 1), "2_3": counts_of(9, 9, 9)}
    assert read_recording(statistics(tmp_path / "s", [rank])).loads.tolist() == [[[1, 2, 3], [1, 1, 1]]]
    refused(
        statistics(tmp_path / "s", [{"1_3": counts_of(1, 2, 3), "2_4": counts_of(1, 1, 1)}]),
        "no iteration holds all of its layers 3-4",
    )


def test_ranks_of_tensor_parallel_attention_count_the_same_tokens_once(tmp_path: Path) -> None:
    made = read_recording(statistics(tmp_path / "s", [{"1_3": counts_of(1, 2, 3)}] * 4))
    assert made.loads.tolist() == [[[1, 2, 3]]]
    assert made.notes == ("ranks 0-3 counted the same tokens in every iteration: they are taken once",)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"100_None": counts_of(1, 2, 3)}, "has a tensor '100_None'; TensorRT-LLM's statistics name them ITERATION_LAYER"),
        ({"1_3": counts_of(1, 2, 3), "01_3": counts_of(1, 2, 3)}, "iteration 1 has layer 3 twice"),
        ({"1_3": counts_of(1, 2)}, "iteration 1 layer 3 counts 2 experts; meta_info.json says 3"),
        ({"1_3": counts_of(1, -2, 0)}, "tensor 1_3: expert 1 is -2"),
        ({"1_3": np.array([0.5, 1, 1], np.float32)}, "expert 0 is 0.5"),
        ({}, "holds no tensor: did the engine reach EXPERT_STATISTIC_ITER_RANGE"),
    ],
)
def test_statistics_that_cannot_be_are_refused(tmp_path: Path, tensors: dict[str, npt.NDArray[Any]], match: str) -> None:
    refused(statistics(tmp_path / "s", [tensors]), match)


def test_statistics_without_a_rank_or_with_a_bad_meta_file_are_refused(tmp_path: Path) -> None:
    folder = statistics(tmp_path / "s", [{"1_3": counts_of(1, 2, 3)}] * 3)
    (folder / "rank1.safetensors").unlink()
    refused(folder, "/s has files of ranks 0, 2 but none of rank 1")
    (folder / "rank1.safetensors").write_bytes(b"")
    refused(folder, "rank1.safetensors is empty")
    (folder / "rank1.safetensors").unlink()
    (folder / "meta_info.json").write_text('{"num_experts": true}')
    refused(folder, "meta_info.json: num_experts must be a number >= 1; got true")
    (tmp_path / "model.safetensors").write_bytes(safetensors({"w": counts_of(1)}))
    refused(tmp_path / "model.safetensors", "holds no rank0.safetensors, rank1.safetensors, …, as TensorRT-LLM's statistics")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\x00" * 4, "is no safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "is no safetensors file"),
        (struct.pack("<Q", 5000) + b"{}", "is cut short: its header takes 5,008 bytes"),
        (struct.pack("<Q", 4) + b"{\xff\xfe}", "its header is no UTF-8 text"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "its entry in the header is 1, not an object"),
        (
            safetensors({"a": counts_of(1)}, a={"dtype": "I64", "shape": [1], "data_offsets": [0, 8]})[:-1],
            "ends at byte 8 of the data",
        ),
        (
            safetensors({}, a={"dtype": "I64", "shape": [2**40], "data_offsets": [0, 8]}),
            "takes 8,796,093,022,208 bytes, its offsets span 8",
        ),
        (safetensors({}, a={"dtype": "I64", "shape": [-1, -1], "data_offsets": [0, 8]}), "must be lists of whole numbers >= 0"),
        (safetensors({}, a={"dtype": "I64", "shape": [1], "data_offsets": [8, 0]}), "its offsets span -8"),
        (safetensors({}, a={"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}), "has dtype 'BF16'; counts are read as I8"),
        (struct.pack("<Q", 18) + b'{"a": {}, "a": {}}', "has the key 'a' twice"),
    ],
)
def test_hostile_safetensors_are_refused(content: bytes, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        parse_safetensors(content, "f")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_safetensors_that_are_cut_or_changed_anywhere_are_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(safetensors({"1_3": counts_of(1, 2, 3), "1_4": counts_of(4, 5, 6)}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = parse_safetensors(content, "f")
    except InvalidInputError:
        return
    assert all(isinstance(array, np.ndarray) for array in found.values())


def flipped(data: st.DataObject, whole: bytes) -> bytes:
    """A file with some bytes changed, perhaps cut."""
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    return bytes(changed[: data.draw(st.integers(1, len(changed)))])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["own.npz", "stat.pt", "history.json"]))
def test_files_that_are_cut_or_changed_anywhere_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    folder = tmp_path_factory.mktemp("f")
    counts = np.arange(1, 13).reshape(2, 2, 3)
    if name == "own.npz":
        whole = own_bytes(recording_of(counts, source="x", layer_ids=(1, 2)))
    elif name == "stat.pt":
        whole = stat(folder / "whole.pt", torch.tensor(counts)).read_bytes()
    else:
        whole = json.dumps({"load_history": [{"logical_expert_load": rows} for rows in counts.tolist()]}).encode()
    (folder / name).write_bytes(flipped(data, whole))
    try:
        found = read_recording(folder / name)
    except InvalidInputError:
        return
    assert (found.loads >= 0).all()


# arrays, JSON, our own


def test_files_that_hold_less_than_they_declare_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, %d), }"
    for shape, match in (
        ((10**6, 10**6), "declares shape .* at most 268,435,456"),
        ((10, 10**6), "more than its .* bytes hold"),
    ):
        text = (header % shape).ljust(117) + b"\n"
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 80
        (tmp_path / "a.npy").write_bytes(content)
        refused(tmp_path / "a.npy", match)
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("loads.npy", content)
        refused(tmp_path / "a.npz", match)
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "b.npz", "holds 'readme.txt', which is no array of numpy")


def test_a_json_file_that_is_too_large_or_has_a_key_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"loads": [[1]], "loads": [[2]]}')
    refused(tmp_path / "a.json", "has the key 'loads' twice in one object")
    (tmp_path / "a.json").write_text("[" + "9" * 5000 + "]")
    refused(tmp_path / "a.json", "is no valid JSON")
    monkeypatch.setattr(files, "JSON_BYTES_MAX", 100)
    refused(tmp_path / "a.json", "has 5,002 bytes; text files are read up to 100: save the numbers as .npz")


def test_zero_rows_of_plain_arrays_are_dense_layers_too(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, 0], [1, 2], [0, 0], [3, 4]]))
    made = read_recording(tmp_path / "a.npy")
    assert made.layer_ids == (1, 3)
    assert made.dense_layer_ids == (0, 2)
    assert not made.has_layer_ids
    assert made.row_positions == (1, 3)


recordings = st.builds(
    lambda shape, first, seed, source, dense: recording_of(
        np.random.default_rng(seed).integers(1, 2**40, shape).astype(float),
        source=source,
        layer_ids=range(first, first + shape[1]),
        has_dense_rows=dense,
    ),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)),
    st.integers(0, 60),
    st.integers(0, 2**32),
    st.sampled_from(["SGLang, mode stat", "numpy array"]),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(recordings)
def test_our_own_recordings_are_read_back_exactly(tmp_path_factory: pytest.TempPathFactory, made: LoadRecording) -> None:
    path = tmp_path_factory.mktemp("own") / "r.npz"
    path.write_bytes(own_bytes(made))
    again = read_recording(path)
    assert again.loads.tobytes() == made.loads.tobytes()
    assert (again.layer_ids, again.num_layers) == (made.layer_ids, made.num_layers)
    assert again.source == f"recording of eplb, of {made.source}"
    assert own_bytes(again) == own_bytes(made)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": np.array("eplb-load/9")}, "is of format 'eplb-load/9' with arrays .*; this build reads eplb-load/1"),
        ({"layer_ids": np.array([3])}, "1 layer ids for 2 layers"),
        ({"layer_ids": np.array([3, 3])}, "ascending, unique"),
        ({"layer_ids": np.array([0.5, 3])}, "must be a list of whole numbers"),
        ({"num_layers": np.array(2)}, "num_layers must be a number above its layer ids; got 2"),
        ({"loads": np.array([[1, -1], [1, 1]])}, "is -1"),
    ],
)
def test_recordings_of_ours_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    parts = {"format": np.array("eplb-load/1"), "loads": np.ones((2, 2)), "layer_ids": np.array([1, 2])}
    np.savez(tmp_path / "r.npz", **{**parts, **changes})
    refused(tmp_path / "r.npz", match)


def test_windows_are_summed_in_order_and_nothing_is_lost() -> None:
    made = recording_of(np.arange(1, 15, dtype=float).reshape(7, 1, 2), source="x")
    fewer = summed_windows(made, 3)
    assert fewer.loads.tolist() == [[[4.0, 6.0]], [[12.0, 14.0]], [[33.0, 36.0]]]
    assert np.array_equal(fewer.loads.sum(axis=0), made.loads.sum(axis=0))
    assert np.array_equal(summed_windows(made, 7).loads, made.loads)
    with pytest.raises(InvalidInputError, match="8 windows of a recording that has 7"):
        summed_windows(made, 8)


# what a file is


def test_content_decides_not_the_name_and_format_overrides(tmp_path: Path) -> None:
    stat(tmp_path / "dump", torch.ones((1, 2, 2), dtype=torch.int32))
    assert read_recording(tmp_path / "dump").source == "SGLang, mode stat"
    (tmp_path / "loads.txt").write_text("  [[1, 2], [3, 4]]")
    assert read_recording(tmp_path / "loads.txt").source == "JSON list"
    refused(tmp_path / "loads.txt", "is no dump of SGLang's recorder", "sglang")
    refused(tmp_path / "loads.txt", "holds no rank0.safetensors", "trtllm")
    refused(tmp_path / "loads.txt", "is no numpy file", "numpy")
    refused(tmp_path / "dump", "which is no array of numpy", "numpy")
    refused(tmp_path / "dump", r"is no text: byte \d+ is not UTF-8", "json")
    refused(tmp_path / "dump", "'vllm' is no format of loads; they are sglang, trtllm", "vllm")


def test_unknown_files_folders_and_patterns_say_what_was_looked_for(tmp_path: Path) -> None:
    refused(tmp_path, "is a folder without files; looked for: sglang")
    (tmp_path / "a.bin").write_bytes(b"\x01\x02\x03")
    refused(
        tmp_path / "a.bin",
        r"a\.bin is no load file that is known here; looked for: sglang .*, trtllm .*, numpy .*, json .*, eplb",
    )
    refused(tmp_path, "is a folder or pattern without an engine's recording; looked for")
    refused(tmp_path / "*.pt", r"no file matches .*\*\.pt")
    refused(tmp_path / "none.pt", "there is no file")
    statistics(tmp_path, [{"1_3": counts_of(1, 2, 3)}])
    stat(tmp_path / "d.pt", torch.ones((1, 2, 2), dtype=torch.int32))
    refused(tmp_path, "holds files of SGLang and of TensorRT-LLM: give --format, or one of them")
    assert read_recording(tmp_path, "trtllm").layer_ids == (3,)
    np.save(tmp_path / "e.npy", np.ones((1, 2)))
    refused(tmp_path, "numpy loads are one file", "numpy")
