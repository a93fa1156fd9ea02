"""Placement files of engines: golden files by hand, exact round trips, and what is refused, with layer and slot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.errors import BrokenInvariantError, EnvironmentFault, InvalidInputError
from eplb_service.formats import placements
from eplb_service.formats.placement_rows import Expectation
from eplb_service.formats.placements import (
    PlacementPath,
    placement_bytes,
    placement_path,
    ranks_in,
    read_placement,
    write_placement,
)
from eplb_service.ids import RankId
from eplb_service.placement import Table

ENGINES = ("sglang", "trtllm", "vllm-ascend")
RANKS = (RankId(0), RankId(1))
TABLE = Table("model", (1, 3), 4, RANKS, np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]], np.int32))

SGLANG = '{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]}\n'
TRTLLM = """num_slots: 6
initial_global_assignments:
  1: [0, 1, 2, 3, 0, 1]
  3: [3, 2, 1, 0, 3, 2]
layer_updates_per_iter: 0
"""
ASCEND = {
    "moe_layer_count": 2,
    "layer_list": [
        {
            "layer_id": 0,
            "device_count": 2,
            "device_list": [{"device_id": 0, "device_expert": [0, 1, 2]}, {"device_id": 1, "device_expert": [3, 0, 1]}],
        },
        {
            "layer_id": 1,
            "device_count": 2,
            "device_list": [{"device_id": 0, "device_expert": [3, 2, 1]}, {"device_id": 1, "device_expert": [0, 3, 2]}],
        },
    ],
}
KNOWN = Expectation(num_logical=4, rank_ids=RANKS, layer_ids=(1, 3))


def refused(tmp_path: Path, text: str, match: str, expected: Expectation = KNOWN, placement_format: str | None = None) -> None:
    path = tmp_path / "p"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=match) as caught:
        read_placement(PlacementPath(path, placement_format), expected)
    assert "\n" not in str(caught.value)


# what is written


def test_files_are_written_as_the_engines_read_them() -> None:
    assert placement_bytes(TABLE, "sglang").decode() == SGLANG
    assert placement_bytes(TABLE, "trtllm").decode() == TRTLLM
    assert json.loads(placement_bytes(TABLE, "vllm-ascend")) == ASCEND


def test_sglang_gets_one_key_and_a_row_for_every_layer_of_the_model() -> None:
    content = json.loads(placement_bytes(TABLE, "sglang", num_layers=6))
    assert list(content) == ["physical_to_logical_map"]
    rows = content["physical_to_logical_map"]
    assert len(rows) == 6
    assert rows[1] == [0, 1, 2, 3, 0, 1]
    assert rows[3] == [3, 2, 1, 0, 3, 2]
    for dense in (0, 2, 4, 5):  # as the engine fills a layer by itself
        assert rows[dense] == [slot % 4 for slot in range(6)]
    with pytest.raises(InvalidInputError, match="3 layers for SGLang's file, but the placement has layer 3"):
        placement_bytes(TABLE, "sglang", num_layers=3)


def test_yaml_is_what_a_yaml_library_reads_with_whole_numbers_as_keys() -> None:
    content = yaml.safe_load(placement_bytes(TABLE, "trtllm", layer_updates_per_iter=2))
    assert content == {
        "num_slots": 6,
        "initial_global_assignments": {1: [0, 1, 2, 3, 0, 1], 3: [3, 2, 1, 0, 3, 2]},
        "layer_updates_per_iter": 2,
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_every_slot_of_a_written_file_names_an_expert_vllm_37322(engine: str) -> None:
    empty = TABLE.with_rows({3: np.array([3, 2, 1, 0, -1, 2])})
    with pytest.raises(
        InvalidInputError, match=r"layer 3 slot 4 \(rank 1\) is empty, 1 in all; files of .* name an expert for every"
    ):
        placement_bytes(empty, engine)
    with pytest.raises(InvalidInputError, match=r"has shares of weighted dispatch, which files of .* cannot say"):
        placement_bytes(TABLE.with_even_shares(), engine)


def test_two_copies_on_one_rank_are_refused_where_the_engine_loads_one_of_them_eplb_22() -> None:
    row = np.array([200, 226, 236, 236, *range(200), *range(201, 226), *range(227, 236), *range(237, 256), 0, 1], np.int32)
    row = np.concatenate([row, np.arange(288 - row.size, dtype=np.int32)])
    twice = Table("model", (0,), 256, tuple(RankId(rank) for rank in range(32)), row[None])
    for engine in ("sglang", "vllm-ascend"):
        with pytest.raises(InvalidInputError, match="layer 0 has expert 236 in slots 2 and 3, both on rank 0"):
            placement_bytes(twice, engine)
    assert yaml.safe_load(placement_bytes(twice, "trtllm"))["num_slots"] == 288


@st.composite
def tables(draw: st.DrawFn, first_layer: int = 0) -> Table:
    """Placements that every engine can say."""
    num_ranks = draw(st.integers(1, 4))
    slots = draw(st.integers(1, 4))
    num_logical = draw(st.integers(slots, num_ranks * slots))
    layers = sorted(draw(st.sets(st.integers(first_layer, 12), min_size=1, max_size=4)))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for _ in layers:
        order = seed.permutation(num_logical)
        by_rank = [[int(order[(rank * slots + slot) % num_logical]) for slot in range(slots)] for rank in range(num_ranks)]
        rows.append([expert for held in seed.permutation(by_rank).tolist() for expert in seed.permutation(held).tolist()])
    return Table(
        "model", tuple(layers), num_logical, tuple(RankId(rank) for rank in range(num_ranks)), np.array(rows, np.int32)
    )


@settings(max_examples=60, deadline=None)
@given(tables(), st.sampled_from([*ENGINES, "eplb"]))
def test_round_trips_are_exact(tmp_path_factory: pytest.TempPathFactory, table: Table, placement_format: str) -> None:
    path = tmp_path_factory.mktemp("p") / "file.json"
    write_placement(PlacementPath(path, placement_format), table)
    expected = Expectation(model="model", num_logical=table.num_logical, rank_ids=table.rank_ids, layer_ids=table.layer_ids)
    read = read_placement(PlacementPath(path), expected)
    assert read.table == table
    assert read.notes == ()
    again = placement_bytes(
        read.table, placement_format, num_layers=read.num_layers, layer_updates_per_iter=read.layer_updates_per_iter
    )
    assert again == path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(tables(), st.permutations(ENGINES))
def test_conversions_through_all_engines_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, table: Table, order: list[str]
) -> None:
    path, now = tmp_path_factory.mktemp("p") / "file.json", table
    for engine in order:
        write_placement(PlacementPath(path, engine), now)
        expected = Expectation(num_logical=table.num_logical, rank_ids=table.rank_ids, layer_ids=table.layer_ids)
        now = read_placement(PlacementPath(path, engine), expected).table
    assert now == table


def test_replicas_and_one_list_for_all_layers_vllm_49572(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[0, 1, 2, 3, 0, 1]")
    read = read_placement(PlacementPath(tmp_path / "p.json"), KNOWN)
    assert read.table.layer_ids == (1, 3)
    assert read.table.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    refused(
        tmp_path,
        "[0, 1, 2, 3, 0, 1]",
        "is one list for all layers, and does not say which these are",
        Expectation(rank_ids=RANKS),
    )
    refused(
        tmp_path,
        "[[0, 1, 2, 3, 0, 4]]",
        "layer 1 slot 5 .* holds expert 4",
        Expectation(num_logical=4, rank_ids=RANKS, layer_ids=(1,)),
    )
    refused(
        tmp_path,
        "[[0, 1, 2, 2, 0, 1]]",
        "layer 1 has no slot for expert 3",
        Expectation(num_logical=4, rank_ids=RANKS, layer_ids=(1,)),
    )


def test_shapes_that_only_the_slots_must_divide_are_taken_vllm_18343_trtllm_15410(tmp_path: Path) -> None:
    for num_ranks in (32, 72):  # 288 slots; neither 9 slots nor 72 ranks divide 256 experts
        table = Table.linear(
            model="model", layer_ids=(3,), num_logical=256, rank_ids=range(num_ranks), slots_per_rank=288 // num_ranks
        )
        for engine in ENGINES:
            write_placement(PlacementPath(tmp_path / "p.json", engine), table)
            expected = Expectation(rank_ids=table.rank_ids, layer_ids=(3,))
            assert read_placement(PlacementPath(tmp_path / "p.json"), expected).table == table


def test_ranks_that_do_not_divide_the_slots_say_how_many_would_vllm_52435_vllm_50669(tmp_path: Path) -> None:
    three = Expectation(rank_ids=tuple(RankId(rank) for rank in range(3)))
    linear = json.dumps({"physical_to_logical_map": [list(range(256))]})
    refused(tmp_path, linear, r"256 slots do not divide over 3 ranks; 258 would \(2 redundant experts\)", three)
    refused(
        tmp_path, json.dumps([list(range(8))]), r"8 slots do not divide over 3 ranks; 9 would \(1 redundant experts\)", three
    )


def test_the_last_ranks_ids_are_experts_that_exist_vllm_ascend_5311(tmp_path: Path) -> None:
    """A map that was made as if slot numbers were experts: 256 + 16 on 16 ranks."""
    devices = [{"device_id": rank, "device_expert": list(range(17 * rank, 17 * rank + 17))} for rank in range(16)]
    content = {"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 16, "device_list": devices}]}
    expected = Expectation(num_logical=256, layer_ids=(3,))
    refused(tmp_path, json.dumps(content), r"layer 3 slot 256 .* holds expert 256; ids run from 0 to 255", expected)


def test_a_group_is_addressed_by_position_and_keeps_its_global_ranks_vllm_ascend_10486(tmp_path: Path) -> None:
    ranks = tuple(RankId(rank) for rank in (4, 5))
    table = Table("model", (1, 3), 4, ranks, TABLE.physical_to_logical)
    write_placement(PlacementPath(tmp_path / "a.json", "vllm-ascend"), table)
    content = json.loads((tmp_path / "a.json").read_text())
    assert [device["device_id"] for device in content["layer_list"][0]["device_list"]] == [0, 1]
    expected = Expectation(num_logical=4, rank_ids=ranks, layer_ids=(1, 3))
    assert read_placement(PlacementPath(tmp_path / "a.json"), expected).table == table
    three = Expectation(rank_ids=tuple(RankId(rank) for rank in range(3)))
    refused(tmp_path, json.dumps(ASCEND), "is for 2 ranks, expected 3", three)


# layers


def test_layers_that_a_file_does_not_have_are_as_the_engine_starts_them_and_said_trtllm_13974(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(TRTLLM)
    read = read_placement(PlacementPath(tmp_path / "b.yaml"), Expectation(rank_ids=RANKS, layer_ids=(1, 3, 4)))
    assert read.table.row(4).tolist() == [0, 1, 2, 2, 3, 0]  # slot i of rank r: (r * 4 // 2 + i) % 4
    assert read.notes == (f"layer 4 is not in {tmp_path / 'b.yaml'}: taken to be as the engine starts it",)
    (tmp_path / "s.json").write_text(SGLANG)
    read = read_placement(PlacementPath(tmp_path / "s.json"), Expectation(rank_ids=RANKS, layer_ids=(1, 3, 4)))
    assert read.table.row(4).tolist() == [0, 1, 2, 3, 0, 1]
    assert len(read.notes) == 1


def test_a_drafters_layers_are_never_those_of_its_target_sglang_18213(tmp_path: Path) -> None:
    """No layer in common: not a placement of this model, whatever its shape."""
    other = Expectation(num_logical=4, rank_ids=RANKS, layer_ids=(60, 61))
    refused(tmp_path, TRTLLM, r"has layers 1, 3, but none for layer 60-61 \(layer_ids, expected 60-61\)", other)
    write_placement(PlacementPath(tmp_path / "e.json"), TABLE)
    with pytest.raises(InvalidInputError, match="but none for layer 4"):
        read_placement(PlacementPath(tmp_path / "e.json"), Expectation(layer_ids=(1, 4)))


def test_rows_without_ids_may_have_the_dense_layers_too(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.array([[0, 1, 2, 3, 0, 1]] * 3 + [[3, 2, 1, 0, 3, 2]]))
    for layer_ids in ((1, 3), None):
        expected = Expectation(num_logical=4, rank_ids=RANKS, layer_ids=layer_ids, num_layers=2, num_rows=4, positions=(1, 3))
        read = read_placement(PlacementPath(tmp_path / "m.npy"), expected)
        assert read.table.physical_to_logical.tolist() == TABLE.physical_to_logical.tolist()
    with pytest.raises(InvalidInputError, match="a placement of 4 layers, expected 3"):
        read_placement(PlacementPath(tmp_path / "m.npy"), Expectation(rank_ids=RANKS, layer_ids=(1, 2, 3)))


def test_ids_of_vllm_ascends_layers_are_positions_or_absolute(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ASCEND))
    assert read_placement(PlacementPath(tmp_path / "a.json"), Expectation()).table.layer_ids == (0, 1)
    absolute = json.loads(json.dumps(ASCEND))
    for layer, layer_id in zip(absolute["layer_list"], (1, 3), strict=True):
        layer["layer_id"] = layer_id
    (tmp_path / "a.json").write_text(json.dumps(absolute))
    assert read_placement(PlacementPath(tmp_path / "a.json"), Expectation()).table == TABLE


# what is refused


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (SGLANG.replace("}", ', "logical_count": [[1]]}'), "must have the key physical_to_logical_map and no other"),
        (SGLANG.replace("}", ', "physical_to_logical_map": []}'), "has the key 'physical_to_logical_map' twice"),
        ('{"physical_to_logical_map": []}', "has no MoE layer: a placement has a row"),
        ('{"physical_to_logical_map": 3}', "must be a list of rows, one a layer; got int"),
        ('{"physical_to_logical_map": [[0, 1], [0]]}', "layer 1 has 1 slots, layer 0 has 2; all layers have as many"),
        ('{"physical_to_logical_map": [[0, 1], [0, "1"]]}', "layer 1 slot 1 is '1'; expert ids are whole numbers"),
        ('{"physical_to_logical_map": [[0, 1], [0.0, 1]]}', "layer 1 slot 0 is 0.0; expert ids are whole numbers"),
        ('{"physical_to_logical_map": [[0, true]]}', "layer 0 slot 1 is true"),
        ('{"physical_to_logical_map": [[0, 99999999999]]}', "layer 0 slot 1 is 99999999999"),
        ('{"physical_to_logical_map": [[0, [1]]]}', r"layer 0 slot 1 is \[1\]"),
        ('{"physical_to_logical_map": [7]}', "layer 0 must be a list of expert ids; got 7"),
        (SGLANG.replace("[3, 2, 1, 0, 3, 2]", "[3, 2, 1, 0, 3, 4]"), "layer 3 slot 5 .* holds expert 4; ids run from 0 to 3"),
        (SGLANG.replace("[3, 2, 1, 0, 3, 2]", "[3, 2, 1, 3, 2, 1]"), "layer 3 has no slot for expert 0"),
        (SGLANG.replace("[3, 2, 1, 0, 3, 2]", "[3, 3, 2, 0, 1, 2]"), "layer 3 has expert 3 in slots 0 and 1, both on rank 0"),
        (SGLANG.replace("[3, 2, 1, 0, 3, 2]", "[3, 2, 1, 0, -1, 2]"), r"layer 3 slot 4 \(rank 1\) is empty"),
    ],
)
def test_sglang_files_that_cannot_be_are_refused(tmp_path: Path, text: str, match: str) -> None:
    refused(tmp_path, text, match)


def test_padding_of_maps_is_no_expert_sglang_4957(tmp_path: Path) -> None:
    for text in (SGLANG, TRTLLM, json.dumps(ASCEND)):
        refused(
            tmp_path,
            text.replace("[3, 2, 1", "[3, 2, -1"),
            r"layer 3 has no slot for expert 1|layer 3 slot 2 \(rank 0\) is empty",
        )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (TRTLLM + "ep_size: 2\n", r"has keys \['ep_size'\], which TensorRT-LLM refuses; it knows num_slots"),
        (TRTLLM.replace("  3: [3", "  1: [3"), "has the key 1 twice in the mapping of line 3"),
        (TRTLLM.replace("num_slots: 6", "num_slots: 7"), r"layer 1 has 6 slots, num_slots is 7 \(2 such layers\)"),
        (TRTLLM.replace("num_slots: 6", "num_slots: 6.0"), "num_slots must be a number >= 1; got 6.0"),
        (TRTLLM.replace("num_slots: 6\n", ""), "num_slots must be a number >= 1; got null"),
        (TRTLLM.replace("iter: 0", "iter: -1"), "layer_updates_per_iter must be a number >= 0; got -1"),
        ("num_slots: 6\nlayer_updates_per_iter: 1\n", "has no initial_global_assignments: without them the engine starts"),
        ("num_slots: 6\ninitial_global_assignments: {}\n", "has no initial_global_assignments"),
        (TRTLLM.replace("  1:", "  one:"), "names layer 'one'; layer ids are whole numbers"),
        (TRTLLM.replace("  1:", "  -1:"), "names layer -1; layer ids are whole numbers"),
        (TRTLLM.replace("[0, 1, 2, 3, 0, 1]", "experts"), "layer 1 must be a list of expert ids; got 'experts'"),
        (TRTLLM.replace("[0, 1,", "[0, x,"), "layer 1 slot 1 is 'x'"),
        (TRTLLM.replace("[3, 2, 1, 0, 3, 2]", "[3, 2, 1, 0, 3, 9]"), "layer 3 slot 5 .* holds expert 9"),
        ("num_slots: [", "is no valid YAML"),
        ("num_slots: !!python/object/apply:os.getcwd []\n", "is no valid YAML: could not determine a constructor"),
        ("num_slots: 6\ninitial_global_assignments:\n  ? [1, 2]\n  : [0]\n", "is no valid YAML|names layer"),
    ],
)
def test_trtllm_files_that_cannot_be_are_refused(tmp_path: Path, text: str, match: str) -> None:
    refused(tmp_path, text, match)


def test_another_part_of_the_engines_config_says_what_was_looked_for_trtllm_18626(tmp_path: Path) -> None:
    text = "moe_config:\n  load_balancer:\n    num_slots: 6\n"
    refused(tmp_path, text, r"looked for num_slots, .* at its top; got keys \['moe_config'\]", placement_format="trtllm")
    refused(tmp_path, text, "is no placement file that is known here; looked for: eplb")


def test_yaml_that_repeats_itself_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One list named a thousand times is a small file and a large placement."""
    monkeypatch.setattr("eplb_service.formats.placement_rows.VALUES_MAX", 1000)
    rows = "".join(f"  {layer}: *a\n" for layer in range(2, 999))
    text = f"num_slots: 6\ninitial_global_assignments:\n  1: &a [0, 1, 2, 3, 0, 1]\n{rows}"
    refused(tmp_path, text, "has more than 1,000 slots in all")


def test_updates_per_iteration_are_kept(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(TRTLLM.replace("iter: 0", "iter: 3"))
    assert read_placement(PlacementPath(tmp_path / "b.yaml"), Expectation(rank_ids=RANKS)).layer_updates_per_iter == 3


def test_without_pyyaml_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.yaml").write_text(TRTLLM)
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(EnvironmentFault, match=r"PyYAML is not installed here: install eplb-service\[trtllm\]"):
        read_placement(PlacementPath(tmp_path / "b.yaml"), KNOWN)


def changed(path: str, value: Any) -> str:
    content: Any = json.loads(json.dumps(ASCEND))
    at, keys = content, path.split("/")
    for key in keys[:-1]:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(keys[-1]) if isinstance(at, list) else keys[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("moe_layer_count", 3, "moe_layer_count is 3, but layer_list has 2 layers"),
        ("layer_list", [], "layer_list must be a list of at least one layer"),
        ("layer_list/1/layer_id", 0, "layer_id of the layers must be ascending, unique"),
        ("layer_list/1/layer_id", "1", "layer_id of the layers must be ascending"),
        ("layer_list/1/device_count", 3, "layer 1: device_count is 3, but device_list has 2"),
        ("layer_list/1/device_list", {}, "layer 1: device_list must be a list of at least one device"),
        ("layer_list/1/device_list/1/device_id", 0, "device_id 0 stands at position 1; the engine goes by position"),
        (
            "layer_list/1/device_list/1/device_expert",
            [0, 3],
            "layer 1 device 1 is one of 2 and has 2 experts; .* 2 devices of 3",
        ),
        ("layer_list/1/device_list/1/device_expert", None, "layer 1 device 1: device_expert must be a list of expert ids"),
        ("layer_list/1/device_list/1/device_expert/2", 1.5, "layer 1 slot 5 is 1.5"),
        ("layer_list/1/device_list/1/device_expert/2", 7, "layer 3 slot 5 .* holds expert 7"),
        ("layer_list/1/device_list/1/device_expert", [0, 3, 3], "layer 3 has expert 3 in slots 4 and 5, both on rank 1"),
    ],
)
def test_vllm_ascend_files_that_cannot_be_are_refused(tmp_path: Path, path: str, value: Any, match: str) -> None:
    refused(tmp_path, changed(path, value), match)


def test_a_file_without_moe_layers_is_refused_and_named_vllm_40740(tmp_path: Path) -> None:
    for text in (
        '{"physical_to_logical_map": []}',
        '{"moe_layer_count": 0, "layer_list": []}',
        "[]",
        '{"physical_to_logical": []}',
    ):
        refused(tmp_path, text, f"{tmp_path / 'p'}")


def test_what_a_file_does_not_say_is_asked_for_by_its_flag_vllm_24523(tmp_path: Path) -> None:
    for text in (SGLANG, TRTLLM, "[[0, 1]]"):
        refused(tmp_path, text, "does not say how many ranks its . slots are on: give --ranks", Expectation())
    bad = SGLANG.replace("[3, 2, 1, 0, 3, 2]", "[3, 2, 1, 0, 3, 99]")
    refused(
        tmp_path,
        bad,
        r"layer 0 has no slot for expert 4 \(.*by its largest id, layer 3 slot 5, there are 100",
        Expectation(rank_ids=RANKS),
    )


def test_sglang_maps_in_pt_are_read(tmp_path: Path) -> None:
    rows = json.loads(SGLANG)["physical_to_logical_map"]
    torch.save({"physical_to_logical_map": torch.tensor(rows)}, tmp_path / "m.pt")
    assert read_placement(PlacementPath(tmp_path / "m.pt"), KNOWN).table == TABLE
    torch.save({"physical_to_logical_map": torch.tensor(rows, dtype=torch.float32)}, tmp_path / "m.pt")
    with pytest.raises(InvalidInputError, match="which are integers; got float32"):
        read_placement(PlacementPath(tmp_path / "m.pt"), KNOWN)
    torch.save([1], tmp_path / "m.pt")
    with pytest.raises(InvalidInputError, match="is no placement of SGLang: looked for physical_to_logical_map"):
        read_placement(PlacementPath(tmp_path / "m.pt"), KNOWN)


# names of files


@pytest.mark.parametrize(
    ("text", "path", "placement_format"),
    [
        ("plan.json", "plan.json", None),
        ("sglang:map.json", "map.json", "sglang"),
        ("vllm-ascend:a/b.json", "a/b.json", "vllm-ascend"),
        ("trtllm:C:\\maps\\b.yaml", "C:\\maps\\b.yaml", "trtllm"),
        ("C:\\maps\\plan.json", "C:\\maps\\plan.json", None),
        ("C:/maps/plan.json", "C:/maps/plan.json", None),
        ("./sglang:odd.json", "sglang:odd.json", None),
        ("/data/2026-11-30T10:00:00/p.json", "/data/2026-11-30T10:00:00/p.json", None),
        ("eplb:sglang:x", "sglang:x", "eplb"),
    ],
)
def test_formats_before_a_colon_are_told_from_names_with_colons(text: str, path: str, placement_format: str | None) -> None:
    assert placement_path(text) == PlacementPath(Path(path), placement_format)


def test_formats_that_do_not_exist_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InvalidInputError, match=r"'vllm' is no format of placements; they are eplb, .*for a file of that name: ./vllm:x"
    ):
        placement_path("vllm:x")
    Path("vllm:x").touch()
    assert placement_path("vllm:x") == PlacementPath(Path("vllm:x"))
    for text, match in (("sglang:", "names a format and no file"), ("", "needs a name")):
        with pytest.raises(InvalidInputError, match=match):
            placement_path(text)
    with pytest.raises(
        InvalidInputError, match=r"b\.yaml is to be YAML, but the default format is eplb's JSON; say trtllm:b\.yaml"
    ):
        write_placement(PlacementPath(Path("b.yaml")), TABLE)
    for name, instead in (("b.pt", "b.json"), ("b", "b.json"), ("b.JSON", "b.json")):
        with pytest.raises(InvalidInputError, match=rf"{name}: SGLang opens .* ends in .json .*; say sglang:{instead}$"):
            write_placement(PlacementPath(Path(name), "sglang"), TABLE)
    assert list(Path().iterdir()) == [Path("vllm:x")]


def test_a_wrong_format_is_refused_by_what_it_looked_for(tmp_path: Path) -> None:
    refused(tmp_path, SGLANG, "has no physical_to_logical; its keys are", placement_format="eplb")
    refused(tmp_path, "[[0, 1]]", "is no file of vllm-ascend: it holds a list, not an object", placement_format="vllm-ascend")
    refused(tmp_path, TRTLLM, "is no valid JSON", placement_format="sglang")


def test_a_file_is_replaced_only_by_one_that_reads_back_vllm_ascend_4417(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called done has been looked at."""
    target = PlacementPath(tmp_path / "s.json", "sglang")
    write_placement(target, TABLE)
    before = target.path.read_bytes()
    monkeypatch.setattr(
        placements, "placement_bytes", lambda *_, **__: SGLANG.replace("[3, 2, 1, 0, 3, 2]", "[2, 3, 1, 0, 3, 2]").encode()
    )
    with pytest.raises(BrokenInvariantError, match="would not read back as it is; nothing was written"):
        write_placement(target, TABLE)
    assert target.path.read_bytes() == before


def test_ranks_of_a_file_are_named_or_counted(tmp_path: Path) -> None:
    for name, text in (("s", SGLANG), ("t", TRTLLM), ("a", json.dumps(ASCEND))):
        (tmp_path / name).write_text(text)
        assert ranks_in(PlacementPath(tmp_path / name), 3) == RANKS
    assert ranks_in(PlacementPath(tmp_path / "s"), 4) is None
    write_placement(PlacementPath(tmp_path / "e"), Table("m", (1, 3), 4, (RankId(4), RankId(9)), TABLE.physical_to_logical))
    assert ranks_in(PlacementPath(tmp_path / "e"), 3) == (4, 9)
