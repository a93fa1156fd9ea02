"""Files of engines through the commands: plan from a recording, write what the engine reads, convert, show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from eplb_service.cli.root import run
from eplb_service.ids import ids_text
from eplb_service.placement import EMPTY_SLOT

DENSE, LAYERS, E = 3, 7, 16
SIZE = ("--ranks", "4", "--nodes", "2", "--slots-per-rank", "5")


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stat dump of SGLang: layers 0-2 are dense, the last rows of the buffer were not filled."""
    monkeypatch.chdir(tmp_path)
    counts = np.zeros((4, LAYERS, E), np.int32)
    counts[:3, DENSE:] = np.random.default_rng(5).gamma(0.5, 1000, (3, LAYERS - DENSE, E))
    torch.save({"rank": 0, "logical_count": torch.tensor(counts)}, "sglang.pt")
    return Path("sglang.pt")


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run([str(word) for word in words]) == code, capsys.readouterr().err
    heard = capsys.readouterr()
    if code:
        assert heard.err.count("\n") == 1
        return heard.err
    return heard.out


def test_a_plan_of_an_sglang_dump_is_written_as_trtllm_reads_it(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "plan", "--load", str(dump), *SIZE, "--out", "trtllm:out.yaml")
    assert "4 layers x 16 experts in 20 slots on 4 ranks of 2 nodes" in page
    assert "load         SGLang, mode stat, 3 windows: layers 0-2 left out, dense: no token; 1 of 4 windows hold no" in page
    assert "nothing is in place, so moves cost nothing" in page
    assert "placement written to out.yaml as trtllm reads it" in page
    content = yaml.safe_load(Path("out.yaml").read_text())
    assert content["num_slots"] == 20
    assert content["layer_updates_per_iter"] == 0
    assert sorted(content["initial_global_assignments"]) == [3, 4, 5, 6]
    for row in content["initial_global_assignments"].values():
        assert len(row) == 20
        assert set(row) == set(range(E))


def test_a_plan_goes_round_through_every_format(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "plan", "--load", str(dump), *SIZE, "--from-nothing", "--out", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    known = ("--ranks", "4", "--layer-ids", "3..6")
    said(capsys, "placement", "convert", "plan.json", "sglang:s.json")
    assert len(json.loads(Path("s.json").read_text())["physical_to_logical_map"]) == LAYERS
    said(capsys, "placement", "convert", *known, "s.json", "vllm-ascend:a.json")
    said(capsys, "placement", "convert", *known, "a.json", "trtllm:t.yaml")
    text = said(capsys, "placement", "convert", *known, "--experts", "16", "t.yaml", "eplb:again.json")
    assert text == "again.json written as eplb: 4 layers (3-6) x 16 experts in 20 slots on 4 ranks\n"
    assert json.loads(Path("again.json").read_text()) == plan
    for name in ("plan.json", "s.json", "a.json", "t.yaml"):
        again = json.loads(
            said(capsys, "plan", "--load", str(dump), *SIZE, "--current", name, "--max-moves", "0", "--output", "json")
        )
        assert again["moves_against"] == "current"
        assert again["moves"]["experts"] == 0


def test_an_sglang_file_has_as_many_rows_as_the_recording_has_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = torch.ones((1, 6, E), dtype=torch.int32)
    counts[:, [0, 4, 5]] = 0
    torch.save({"logical_count": counts}, "d.pt")
    said(capsys, "plan", "--load", "d.pt", *SIZE, "--out", "sglang:s.json")
    assert len(json.loads(Path("s.json").read_text())["physical_to_logical_map"]) == 6
    said(capsys, "placement", "convert", "--ranks", "4", "--layer-ids", "1..3", "--num-layers", "9", "s.json", "sglang:n.json")
    assert len(json.loads(Path("n.json").read_text())["physical_to_logical_map"]) == 9


def test_pins_and_sources_are_for_the_layers_of_the_model(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(said(capsys, "plan", "--load", str(dump), *SIZE, "--pin", "7@2/4", "--output", "json"))
    row = made["physical_to_logical"][made["layer_ids"].index(4)]
    assert 7 in row[10:15]
    text = said(capsys, "plan", "--load", str(dump), *SIZE, "--pin", "7@2/0", code=2)
    assert "layer 0" in text
    loads = torch.load(dump)["logical_count"].numpy().sum(axis=0)
    for name, rows in (("all.npy", loads), ("moe.npy", loads[DENSE:])):
        np.save(name, np.repeat(rows[:, None] / 4, 4, axis=1))
        made = json.loads(
            said(capsys, "plan", "--load", str(dump), *SIZE, "--dispatch", "nearest", "--source-load", name, "--output", "json")
        )
        assert made["layer_ids"] == [3, 4, 5, 6]


def test_a_missing_layer_is_filled_as_the_engine_starts_it_with_a_note(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "plan", "--load", str(dump), *SIZE, "--from-nothing", "--out", "plan.json")
    assert run(["placement", "convert", "plan.json", "trtllm:t.yaml", "--layer-ids", "3..7"]) == 0
    heard = capsys.readouterr()
    assert heard.err == "note: layer 7 is not in plan.json: taken to be as the engine starts it\n"
    assert "5 layers (3-7)" in heard.out
    text = said(capsys, "placement", "convert", "plan.json", "x.json", "--layer-ids", "3..7", code=2)
    assert "has layers 3-6, but none for layer 7" in text


OWN_MAPS = {
    "[0, 1, 2, 3, 0, 1]": [[0, 1, 2, 3, 0, 1]] * 2,  # one list for all layers, replicas allowed
    "[[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]": [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]],
}
KNOWN = ("--ranks", "2", "--experts", "4", "--layer-ids", "3..4")


@pytest.mark.parametrize("text", OWN_MAPS)
@pytest.mark.parametrize("engine", ["sglang", "trtllm", "vllm-ascend"])
def test_maps_of_ones_own_go_to_an_engine_and_come_back_vllm_49572_vllm_53022(
    text: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs, back = tmp_path / "map.json", tmp_path / "theirs.json", tmp_path / "back.json"
    mine.write_text(text)
    said(capsys, "placement", "convert", *KNOWN, str(mine), f"{engine}:{theirs}")
    said(capsys, "placement", "convert", *KNOWN, str(theirs), str(back))
    content = json.loads(back.read_text())
    assert content["physical_to_logical"] == OWN_MAPS[text]
    assert content["layer_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ("[0, 1, 2, 4, 0, 1]", KNOWN, "layer 3 slot 3 of model 'model' holds expert 4; ids run from 0 to 3"),
        ("[[0, 1, 2, 3, 0, 1], [0, 1, 2, 2, 0, 1]]", KNOWN, "layer 4 has no slot for expert 3 (1 are missing)"),
        (
            "[0, 1, 2, 3, 0, -1]",
            KNOWN,
            "layer 3 slot 5 (rank 1) is empty, 2 in all; files of SGLang name an expert",
        ),
        ("[[0, 1, 2, 3, 0, 1]]", KNOWN, "a placement of 1 layers, expected 2"),
        ("[[0, 1, 2, 3, 0, 1], [0, 1, 2, 3]]", KNOWN, "layer row 1 has 4 slots, layer row 0 has 6; all layers have as many"),
        ("[0.0, 1.0, 2.0, 3.0]", KNOWN, "slot 0 is 0.0; expert ids are whole numbers"),  # vllm#18343
        ("[0, 1, 2, 3, 0]", KNOWN, "5 slots do not divide over 2 ranks; 6 would (2 redundant experts)"),  # vllm#52435
        ("[0, 1, 2, 3, 0, 1]", KNOWN[:4], "one list for all layers, and does not say which these are: give --layer-ids"),
        ("[0, 1, 2, 3, 0, 1]", KNOWN[2:], "does not say how many ranks its 6 slots are on: give --ranks"),  # vllm#24523
        ("[]", KNOWN, "has no MoE layer"),  # vllm#40740
    ],
)
def test_maps_of_ones_own_that_cannot_be_are_refused_and_nothing_is_written_vllm_49572(
    text: str, words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = tmp_path / "map.json", tmp_path / "theirs.json"
    mine.write_text(text)
    assert sentence in said(capsys, "placement", "convert", *words, str(mine), f"sglang:{theirs}", code=2)
    assert not theirs.exists()


def test_an_unwritten_plan_leaves_no_file_and_old_files_stay(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.json").write_text("old")
    text = said(capsys, "plan", "--load", str(dump), *SIZE, "--unusable-slot", "0:1", "--out", "sglang:out.json", code=2)
    assert "slot 1 of rank 0 is unusable, so slots would stay empty" in text
    assert Path("out.json").read_text() == "old"
    for bad, match in (("vllm:x", "'vllm' is no format"), ("x.yaml", "say trtllm:x.yaml")):
        assert match in said(capsys, "plan", "--load", str(dump), *SIZE, "--out", bad, code=2)
    assert "there is no file none.pt" in said(capsys, "plan", "--load", "none.pt", *SIZE, code=2)
    text = said(capsys, "plan", "--load", str(dump), "--format", "trtllm", *SIZE, code=2)
    assert "holds no rank0.safetensors" in text


def test_a_recording_is_shown(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "load", "show", str(dump), "--layers")
    assert page.splitlines()[0] == "sglang.pt: SGLang, mode stat"
    assert "4 with experts: 3-6" in page
    assert "layers 0-2 left out, dense: no token; 1 of 4 windows hold no token and are left out" in page
    totals = torch.load(dump)["logical_count"].numpy().sum(axis=0)[DENSE:]
    rows = [line.split() for line in page.splitlines()[-4:]]
    assert [int(row[0]) for row in rows] == [3, 4, 5, 6]
    assert [int(row[1].replace(",", "")) for row in rows] == totals.sum(axis=1).tolist()
    assert [int(row[2]) for row in rows] == totals.argmax(axis=1).tolist()
    made = json.loads(said(capsys, "load", "show", str(dump), "--output", "json"))
    assert made["dense_layer_ids"] == [0, 1, 2]
    assert made["assignments_per_layer"] == totals.sum(axis=1).tolist()


def test_a_recording_is_kept_as_a_small_file_of_our_own(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "load", "convert", str(dump), "small.npz", "--windows", "1")
    plans = [
        json.loads(said(capsys, "plan", "--load", name, *SIZE, "--policy", "greedy", "--output", "json"))
        for name in (str(dump), "small.npz")
    ]
    assert plans[0]["physical_to_logical"] == plans[1]["physical_to_logical"]
    assert plans[1]["layer_ids"] == [3, 4, 5, 6]
    assert plans[1]["load"]["source"] == "recording of eplb, of SGLang, mode stat"
    said(capsys, "plan", "--load", "small.npz", *SIZE, "--out", "sglang:s.json")
    assert len(json.loads(Path("s.json").read_text())["physical_to_logical_map"]) == LAYERS
    assert "is to be written as .npz" in said(capsys, "load", "convert", str(dump), "small.pt", code=2)
    assert "9 windows of a recording that has 3" in said(
        capsys, "load", "convert", str(dump), "x.npz", "--windows", "9", code=2
    )


# slots that a policy leaves empty


def test_a_plan_for_an_engine_leaves_no_slot_empty_and_says_that_it_filled_some(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table: Any = json.loads(said(capsys, "plan", "--load", str(dump), *SIZE, "--policy", "greedy", "--output", "json"))
    table["physical_to_logical"] = [
        [EMPTY_SLOT if row.count(expert) > 1 and row.index(expert) == slot else expert for slot, expert in enumerate(row)]
        for row in table["physical_to_logical"]
    ]
    Path("now.json").write_text(json.dumps(table))
    words = ("plan", "--load", str(dump), *SIZE, "--to", "now.json")
    assert any(EMPTY_SLOT in row for row in table["physical_to_logical"])
    assert "(filled)" not in said(capsys, *words, "--out", "kept.json")
    assert "(filled)" in said(capsys, *words, "--fill-slots")
    assert "(filled)" in said(capsys, *words, "--out", "sglang:s.json")
    assert EMPTY_SLOT not in np.array(json.loads(Path("s.json").read_text())["physical_to_logical_map"])


def test_ids_are_told_as_ranges() -> None:
    assert ids_text((0, 1, 2, 60)) == "0-2, 60"
    assert ids_text(tuple(range(0, 40, 2))) == "0, 2, 4, 6, 8, 10, 12, … (20 in all)"
