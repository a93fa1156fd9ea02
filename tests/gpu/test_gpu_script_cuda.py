"""The script that measures a GPU, tried on one: few rounds, so that no rate is judged (CPU twin: tests/integration)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_several_ranks_share_a_device_and_nothing_of_poisoned_staging_reaches_an_output(tmp_path: Path) -> None:
    assert gpu.main(["--quick", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert (told["numbers"]["wrong, read from memory"], told["numbers"]["wrong, sent over gloo"]) == (0, 0)
