"""`eplb plan --load`: what goes in, what comes out, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_service.cli.root import run


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    file = tmp_path / "load.npy"
    np.save(file, np.random.default_rng(7).integers(1, 1000, (3, 16)))
    return file


def plan(capsys: pytest.CaptureFixture[str], file: Path, *words: str, ranks: int = 4, slots: int = 5) -> Any:
    assert run(["plan", "--load", str(file), "--ranks", str(ranks), "--slots-per-rank", str(slots), *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out) if "json" in words else said.out


def test_plan_prints_what_is_promised_and_every_expert_has_a_slot(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(capsys, loads, "--nodes", "2", "--output", "json")
    assert np.shape(made["physical_to_logical"]) == (3, 20)
    assert all(set(row) >= set(range(16)) for row in made["physical_to_logical"])
    assert set(made["imbalance"]) == {"mean", "worst", "per_layer"}
    assert set(made["lower_bound"]) == {"mean", "worst"}
    assert 1.0 <= made["lower_bound"]["worst"] <= made["imbalance"]["worst"] < made["imbalance_before"]["worst"]
    assert made["policy"] == "greedy"
    assert made["solve_s"] >= 0
    assert made["moves"]["experts"] > 0


def test_plan_that_was_written_is_read_back_and_nothing_moves(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    page = plan(capsys, loads, "--out", str(out), "--expert-bytes", "1048576")
    assert f"placement written to {out}" in page
    assert " MiB; " in page
    again = plan(capsys, loads, "--current", str(out), "--output", "json")
    assert again["moves"]["experts"] == 0
    assert again["moves_against"] == "current"
    assert again["physical_to_logical"] == json.loads(out.read_text())["physical_to_logical"]


def test_layers_without_load_are_perfect_and_do_not_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.npy"
    loads = np.random.default_rng(7).integers(1, 1000, (3, 16))
    loads[1] = 0
    np.save(file, loads)
    made = plan(capsys, file, "--output", "json")
    assert made["imbalance"]["per_layer"][1] == 1.0
    assert made["physical_to_logical"][1] == [slot % 16 for slot in range(20)]


def test_experts_that_ranks_do_not_divide_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"loads": np.random.default_rng(7).random((2, 13)).tolist()}))
    made = plan(capsys, file, "--output", "json", ranks=4, slots=4)
    assert np.shape(made["physical_to_logical"]) == (2, 16)
    assert made["imbalance"]["worst"] >= 1.0


def test_same_input_gives_the_same_plan(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (plan(capsys, loads, "--output", "json") for _ in range(2))
    for made in (first, second):
        del made["solve_s"]
    assert first == second


def test_flags_for_files_are_refused_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--ranks", "4", "--out", "x.json"]) == 2
    assert (
        capsys.readouterr().err
        == "eplb: --ranks, --out: for a plan from a file; give --load FILE too; see `eplb plan --help`\n"
    )
