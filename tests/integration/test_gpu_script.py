"""The script that measures a GPU, tried on a CPU: the same code at small sizes, as far as a CPU can show it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.device_fleet import DeviceFleet, rotated, rows_of

pytestmark = pytest.mark.process


def test_the_script_runs_on_a_cpu_and_says_what_that_does_not_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["note"] == gpu.CPU_SHOWS_NOT
    assert gpu.CPU_SHOWS_NOT in capsys.readouterr().out
    assert (told["numbers"]["wrong, read from memory"], told["numbers"]["wrong, sent over gloo"]) == (0, 0)
    assert told["numbers"]["flip stall, s"] > 0
    rows = {row["what"]: row for row in told["rows"]}
    assert rows["read from memory: ranks that read the memory of all others"]["passed"] is True
    assert rows["slots to staging"]["passed"] is None  # a CPU's rates are no verdict
    assert (tmp_path / "gpu.md").read_text().count("\n| ") >= 13


class Wrong:
    """A fleet whose ranks find what they are told to."""

    sizes = gpu.CPU
    rows: Mapping[int, Sequence[int]] = {}

    def ask(self, name: str, *_: object) -> list[object]:
        return [100, 100, 100] if name == "poison" else [[], ["m:0 slot 1: down is not expert 2's"], []]

    def roll_out(self, *_: object) -> tuple[dict[int, object], dict[int, object]]:
        return {}, {}


def test_what_ranks_find_wrong_fails_the_run_on_any_device(capsys: pytest.CaptureFixture[str]) -> None:
    findings = gpu.Findings(judged=False)
    fleet: DeviceFleet = Wrong()  # type: ignore[assignment]
    gpu.correctness(fleet, findings, generations=1, way="read")
    assert [row.passed for row in findings.failed] == [False]
    assert "rank 1, generation 1: m:0 slot 1: down is not expert 2's" in capsys.readouterr().out


def test_rows_that_are_measured_hold_every_expert_and_stage_as_much_as_they_say() -> None:
    for sizes in (gpu.CPU, gpu.GPU):
        row = rows_of(sizes, np.random.default_rng(0))
        assert set(row) == set(range(sizes.experts))
        changed = [
            slot for slot, (old, new) in enumerate(zip(sizes.row, rotated(sizes.row, sizes.staged), strict=True)) if old != new
        ]
        assert changed == list(range(sizes.staged))  # all of the first rank
        assert sizes.staged <= sizes.slots
        # What the first rank gives up for its neighbour's experts is on the third too: every expert keeps a slot.
        assert set(sizes.row[sizes.slots :]) == set(range(sizes.experts))
    assert 390e6 < gpu.GPU.staged * gpu.GPU.expert_bytes < 410e6


def test_without_a_device_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "--device cpu" in capsys.readouterr().err
